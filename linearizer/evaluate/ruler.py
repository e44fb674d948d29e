"""Generated tasks in the manner of RULER (Hsieh et al. 2024): facts hidden in text, and a question at its end.

Words are drawn from the text itself: the model knows them, whatever its language. A task is scored by the share of the
answer's words whose every token is the likeliest, at each depth of each length, and by the loss of the answer at all
depths: that also tells models apart which are too small to be right.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from linearizer.errors import TextError
from linearizer.evaluate.needle import insert_tokens
from linearizer.evaluate.subjects import Subject, read_into_cache, read_logits
from linearizer.progress import Progress, Steps
from linearizer.run.results import Score, Scored
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.text import start_tokens

RULER = "ruler"  # the name among tasks
LOSS = "loss of the answer"  # in nats a token
SAMPLES = 8  # of a task at a depth and a length
DEPTHS = (0.1, 0.5, 0.9)  # of the text before the fact that is asked about
KEYS, VALUES, HOPS, LISTED, COMMON = 6, 4, 4, 12, 5
WORDS = 400  # the most frequent of the text, to draw from
FEWEST_WORDS = 2 * (KEYS + LISTED)

Tensor = torch.Tensor


@dataclass(frozen=True)
class Puzzle:
    """Facts in their order, at depths from 0 to 1; a question, and the words that answer it."""

    facts: Sequence[tuple[float, str]]
    question: str
    answer: Sequence[str]


def measure_ruler(
    subjects: Sequence[Subject],
    tokenizer: PreTrainedTokenizerBase,
    windows: Tensor,  # (texts, at least the largest length)
    lengths: Sequence[int],
    samples: int | None = None,
    seed: int = 0,
) -> Steps[list[Scored]]:
    """Let all subjects answer the same questions, task by task."""
    words = frequent_words(tokenizer, windows)
    cells = [(kind, length, depth) for kind in KINDS for length in sorted(lengths) for depth in DEPTHS]
    scores: list[list[Score]] = [[] for _ in subjects]
    losses: list[list[float]] = [[] for _ in subjects]  # of the answers to a task at a length
    for done, (kind, length, depth) in enumerate(cells):
        drawn = random.Random(f"{seed} {kind} {length} {depth}")
        shares: list[list[float]] = [[] for _ in subjects]
        for number in range(samples or SAMPLES):
            puzzle = KINDS[kind](drawn.sample(words, FEWEST_WORDS), depth, drawn)
            ids, answer = lay_out(puzzle, windows[number % len(windows), :length], tokenizer)
            for place, subject in enumerate(subjects):
                share, loss = score_answer(subject, ids, answer)
                shares[place].append(share)
                losses[place].append(loss)
        for rows, own, lost in zip(scores, shares, losses, strict=True):
            task = f"{kind}, {length} tokens"
            rows.append(Score(task, f"depth {depth:.0%}", *mean_and_error(own), len(own)))
            if depth == DEPTHS[-1]:
                rows.append(Score(task, LOSS, *mean_and_error(lost), len(lost)))
                lost.clear()
        yield Progress("ruler", done + 1, len(cells), "cells")
    return [Scored(subject.name, tuple(rows), None) for subject, rows in zip(subjects, scores, strict=True)]


def frequent_words(tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> list[str]:
    """List the words of some texts from the most frequent on."""
    text = " ".join(tokenizer.batch_decode(windows, skip_special_tokens=True))
    counts = Counter(re.findall(r"(?<=\s)[^\W\d_]{3,}(?=[\s.,;:])", text))
    words = [word for word, _ in counts.most_common(WORDS)]
    if len(words) < FEWEST_WORDS:
        raise TextError(
            f"the text has {len(words)} words to make tasks of, and {FEWEST_WORDS} are needed: name a longer text"
        )
    return words


def hide_one_key(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    key, value = words[:2]
    return Puzzle([(depth, fact(key, value))], ask_for(key), [value])


def hide_many_keys(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    pairs = list(zip(words[:KEYS], words[KEYS : 2 * KEYS], strict=True))
    others = [(drawn.random(), fact(*pair)) for pair in pairs[1:]]
    return Puzzle([(depth, fact(*pairs[0])), *others], ask_for(pairs[0][0]), [pairs[0][1]])


def hide_many_values(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    """One key has several values, all stated from the depth on; the question asks for them in their order."""
    key, *values = words[: VALUES + 1]
    places = sorted(depth + (1 - depth) * 0.9 * drawn.random() for _ in values)
    facts = [
        (place, f" The next secret word of {key} is {value}.") for place, value in zip(places, values, strict=True)
    ]
    return Puzzle(facts, f" The secret words of {key} are, one after the other:", values)


def hide_variables(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    """Each variable is the one before; the value of the last is asked for."""
    value, *names = words[: HOPS + 1]
    places = sorted([depth, *(depth + (1 - depth) * 0.9 * drawn.random() for _ in names[1:])])
    given = [f" Let {name} be {before}." for before, name in zip([value, *names], names, strict=False)]
    chain = "".join(f" {name} is" for name in reversed(names))
    return Puzzle(list(zip(places, given, strict=True)), f" So{chain}", [value])


def hide_common_words(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    """One word of a list comes several times."""
    common, *others = words[: LISTED + 1]
    listed = [*others, *[common] * COMMON]
    drawn.shuffle(listed)
    return Puzzle([(depth, f" A list: {', '.join(listed)}.")], " The word that comes most often in the list:", [common])


KINDS: Mapping[str, Callable[[Sequence[str], float, random.Random], Puzzle]] = {
    "single key": hide_one_key,
    "many keys": hide_many_keys,
    "many values": hide_many_values,
    "variable tracking": hide_variables,
    "common words": hide_common_words,
}


def fact(key: str, value: str) -> str:
    return f" The secret word of {key} is {value}."


def ask_for(key: str) -> str:
    return f" The secret word of {key} is"


def lay_out(puzzle: Puzzle, window: Tensor, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, list[int]]:
    """Lay a puzzle into a text of the window's length, the answer last; give the tokens of each of its words, too."""

    def tokens(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=window.dtype)

    facts = [(depth, tokens(words)) for depth, words in sorted(puzzle.facts, key=lambda pair: pair[0])]
    answer = [tokens(f" {word}") for word in puzzle.answer]
    end = torch.cat([tokens(puzzle.question), *answer])
    first = len(start_tokens(tokenizer))
    room = len(window) - len(end) - sum(len(fact_tokens) for _, fact_tokens in facts)
    if room <= first:
        raise TextError(f"a task does not fit into a text of {len(window)} tokens: ask for longer --lengths")
    places = [(first + int(depth * (room - first)), fact_tokens) for depth, fact_tokens in facts]
    return torch.cat([insert_tokens(window[:room], places), end])[None], [len(word) for word in answer]


def score_answer(subject: Subject, ids: Tensor, answer: Sequence[int]) -> tuple[float, float]:
    """Give the share of the answer's words that a subject would have written, and the loss of the answer's tokens."""
    cache, count = fresh_cache(subject.model), sum(answer)
    begin = ids.shape[1] - count - 1
    read_into_cache(subject, ids[:, :begin], cache)
    logits, wanted = read_logits(subject, ids[:, begin:], cache)[0, :-1].cpu(), ids[0, begin + 1 :]
    right = (logits.argmax(-1) == wanted).split(list(answer))
    return sum(bool(word.all()) for word in right) / len(right), cross_entropy(logits.float(), wanted).item()


def mean_and_error(shares: Sequence[float]) -> tuple[float, float | None]:
    """Give the mean and its standard error, where there are several."""
    return fmean(shares), stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else None
