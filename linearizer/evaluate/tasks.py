"""Scores on tasks: those of lm_eval, from which published figures come, through its own code; and generated tasks.

Generated tasks are long texts with hidden facts, and a question at their end. Their kinds are those of RULER (Hsieh et
al. 2024), but the sentences and the scoring are our own, so scores are not RULER's. Words are drawn from the text
itself: the model knows them, whatever its language. A task is scored by the share of the answer's words in
which every token is the likeliest, at each depth of each length, and by the loss of the answer at all depths, which
also tells models apart that are too small to be right.
"""

from __future__ import annotations

import io
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from linearizer.errors import RequestError, TextError, first_line
from linearizer.evaluate.recall import insert_tokens
from linearizer.evaluate.subjects import Subject, read_last
from linearizer.progress import Progress, Steps
from linearizer.run.results import Score, Scored, Tasks
from linearizer.teacher.text import start_tokens

DRAWN = 1000  # times that results are resampled, for the errors of metrics that are not means
INSTALL = "pip install 'linearizer[tasks]'"
LONG_TEXT = "long-text"  # name of the generated tasks
LOSS = "loss of the answer"  # in nats a token
SAMPLES = 8  # of a task at a depth and a length
DEPTHS = (0.1, 0.5, 0.9)  # of the text before the fact in question
KEYS, VALUES, HOPS, LISTED, COMMON = 6, 4, 4, 12, 5
WORDS = 400  # most frequent words of the text, to draw from
FEWEST_WORDS = 2 * (KEYS + LISTED)

Tensor = torch.Tensor
LaidOut = tuple[Tensor, list[int]]  # a text (1, tokens), and the tokens of each word of its answer


def measure_tasks(
    subjects: Sequence[Subject],
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    limit: int | None = None,
    few_shot: int | None = None,
    folder: str | None = None,
    seed: int = 0,
    batch: int = 8,
) -> Steps[Tasks]:
    """Let all subjects do the same tasks; a folder may hold the user's tasks."""
    manager = find_tasks(names, folder)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    scores = []
    for done, subject in enumerate(subjects):
        yield Progress("tasks", done, len(subjects), "models")
        with subject.prepared() as model, silent():
            results = lm_eval.simple_evaluate(
                HFLM(pretrained=model, tokenizer=deepcopy(tokenizer), backend="causal", batch_size=batch),
                tasks=list(names),
                task_manager=manager,
                num_fewshot=few_shot,
                limit=limit,
                log_samples=False,
                bootstrap_iters=DRAWN,
                **dict.fromkeys(seeds, seed % 2**32),  # numpy takes no others
            )
        scores.append(collect_scores(subject.name, results, names))
    yield Progress("tasks", len(subjects), len(subjects), "models")
    return Tasks(tuple(names), limit, few_shot, tuple(scores))


def find_tasks(names: Sequence[str], folder: str | None) -> Any:
    """Return lm_eval's manager of tasks; load the named tasks once, so that missing data is known before measuring."""
    if folder is not None and not Path(folder).is_dir():
        raise RequestError(f"--task-folder {folder!r} is not a folder: name one that holds tasks as YAML files")
    try:
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as error:
        raise RequestError(f"tasks need lm_eval, which is not installed here: {INSTALL}") from error
    with silent():
        manager = None if folder is None else TaskManager(include_path=folder, include_defaults=False)
        if manager is None or not set(names) <= set(manager.all_tasks):  # only then: reading all tasks takes seconds
            manager = TaskManager(include_path=folder)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            similar = " or ".join(get_close_matches(name, known, 3))
            advice = f"did you mean {similar}?" if similar else "`lm-eval ls tasks` lists all tasks"
            raise RequestError(f"there is no task {name!r}: {advice}")
    try:
        with silent():
            get_task_dict(list(names), manager)
    except Exception as error:  # each task loads its data in its own way, with errors of many types
        raise RequestError(
            f"the data of {', '.join(names)} cannot be loaded ({first_line(error)}): connect, or name a folder with "
            "your own tasks and data with --task-folder"
        ) from error
    return manager


def collect_scores(subject: str, results: Mapping[str, Any], names: Sequence[str]) -> Scored:
    """Read the scores of the requested tasks; a tag stands for its tasks."""
    members = results.get("group_subtasks", {})
    tasks = [task for name in names for task in ([name] if name in results["results"] else members.get(name, []))]
    scores = []
    for task in tasks:
        row = results["results"][task]
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                error = row.get(f"{metric}_stderr,{kind}")
                known = isinstance(error, (int, float)) and math.isfinite(error)
                label = metric if kind == "none" else f"{metric} ({kind})"
                samples = int(row.get("sample_len", 0) or 0)
                scores.append(Score(task, label, float(value), float(error) if known else None, samples))
    accuracies = [score.value for score in scores if score.metric == "acc"]
    return Scored(subject, tuple(scores), math.fsum(accuracies) / len(accuracies) if accuracies else None)


@contextmanager
def silent() -> Iterator[None]:
    """Suppress the output of the harness: errors are raised, and results are returned."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Puzzle:
    """Facts with their depths from 0 to 1, a question, and the words of its answer."""

    facts: Sequence[tuple[float, str]]
    question: str
    answer: Sequence[str]


def measure_long_text_tasks(
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
        texts = lay_out_all(kind, depth, words, windows[:, :length], tokenizer, samples or SAMPLES, seed)
        for subject, rows, lost in zip(subjects, scores, losses, strict=True):
            answers = score_answers(subject, texts)
            lost += [loss for _, loss in answers]
            rows.append(score_of(f"{kind}, {length} tokens", f"depth {depth:.0%}", [share for share, _ in answers]))
            if depth == DEPTHS[-1]:
                rows.append(score_of(f"{kind}, {length} tokens", LOSS, lost))
                lost.clear()
        yield Progress("tasks", done + 1, len(cells), "cells")
    return [Scored(subject.name, tuple(rows), None) for subject, rows in zip(subjects, scores, strict=True)]


def lay_out_all(
    kind: str,
    depth: float,
    words: Sequence[str],
    windows: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    seed: int = 0,
) -> list[LaidOut]:
    """Draw puzzles of a kind, and lay each into a text."""
    drawn = random.Random(f"{seed} {kind} {windows.shape[1]} {depth}")
    puzzles = [KINDS[kind](drawn.sample(words, FEWEST_WORDS), depth, drawn) for _ in range(samples)]
    return [lay_out(puzzle, windows[n % len(windows)], tokenizer) for n, puzzle in enumerate(puzzles)]


def frequent_words(tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> list[str]:
    """List the words of texts, the most frequent first."""
    text = " ".join(tokenizer.batch_decode(windows, skip_special_tokens=True))
    counts = Counter(re.findall(r"(?<=\s)[^\W\d_]{3,}(?=[\s.,;:])", text))
    words = [word for word, _ in counts.most_common(WORDS)]
    if len(words) < FEWEST_WORDS:
        raise TextError(f"the text has {len(words)} words for tasks, and {FEWEST_WORDS} are needed: name a longer text")
    return words


def hide_keys(words: Sequence[str], depth: float, drawn: random.Random, count: int = KEYS) -> Puzzle:
    """Several keys have a value each; the question asks for the value of the first."""
    pairs = zip(words[:count], words[count : 2 * count], strict=True)
    facts = [(drawn.random() if n else depth, f" The secret word of {k} is {v}.") for n, (k, v) in enumerate(pairs)]
    return Puzzle(facts, f" The secret word of {words[0]} is", [words[count]])


def hide_many_values(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    """One key has several values, all stated from the depth on; the question asks for them in their order."""
    key, *values = words[: VALUES + 1]
    places = sorted(depth + (1 - depth) * 0.9 * drawn.random() for _ in values)
    facts = [f" The next secret word of {key} is {value}." for value in values]
    return Puzzle(
        list(zip(places, facts, strict=True)), f" The secret words of {key} are, one after the other:", values
    )


def hide_variables(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    """Each variable equals the one before; the question asks for the value of the last."""
    value, *names = words[: HOPS + 1]
    places = sorted([depth, *(depth + (1 - depth) * 0.9 * drawn.random() for _ in names[1:])])
    facts = [f" Let {name} be {before}." for before, name in zip([value, *names], names, strict=False)]
    chain = "".join(f" {name} is" for name in reversed(names))
    return Puzzle(list(zip(places, facts, strict=True)), f" So{chain}", [value])


def hide_common_words(words: Sequence[str], depth: float, drawn: random.Random) -> Puzzle:
    """One word of a list is repeated several times."""
    common, *rare = words[: LISTED + 1]
    items = [*rare, *[common] * COMMON]
    drawn.shuffle(items)
    return Puzzle([(depth, f" A list: {', '.join(items)}.")], " The word that comes most often in the list:", [common])


KINDS: Mapping[str, Callable[[Sequence[str], float, random.Random], Puzzle]] = {
    "single key": partial(hide_keys, count=1),
    "many keys": hide_keys,
    "many values": hide_many_values,
    "variable tracking": hide_variables,
    "common words": hide_common_words,
}


def lay_out(puzzle: Puzzle, window: Tensor, tokenizer: PreTrainedTokenizerBase) -> LaidOut:
    """Lay a puzzle into a text of the window's length, the answer last; also return the tokens of each answer word."""

    def tokens(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=window.dtype)

    facts = [(depth, tokens(words)) for depth, words in sorted(puzzle.facts, key=lambda pair: pair[0])]
    answer = [tokens(f" {word}") for word in puzzle.answer]
    end = torch.cat([tokens(puzzle.question), *answer])
    start = len(start_tokens(tokenizer))
    room = len(window) - len(end) - sum(len(fact_tokens) for _, fact_tokens in facts)
    if room <= start:
        raise TextError(f"a task does not fit into a text of {len(window)} tokens: ask for longer --lengths")
    places = [(start + int(depth * (room - start)), fact_tokens) for depth, fact_tokens in facts]
    return torch.cat([insert_tokens(window[:room], places), end])[None], [len(word) for word in answer]


def score_answers(subject: Subject, texts: Sequence[LaidOut]) -> list[tuple[float, float]]:
    """Return for each answer the share of words that a subject would have written, and the loss of its tokens."""
    ids, answers, scores = torch.cat([text for text, _ in texts]), [answer for _, answer in texts], []
    for row, answer, logits in zip(ids, answers, read_last(subject, ids, list(map(sum, answers))), strict=True):
        target, logits = row[-len(logits) :], logits.cpu()
        right = (logits.argmax(-1) == target).split(answer)
        scores.append((fmean(bool(word.all()) for word in right), cross_entropy(logits, target).item()))
    return scores


def score_of(task: str, metric: str, values: Sequence[float]) -> Score:
    """Average values; several have a standard error."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Score(task, metric, fmean(values), error, len(values))
