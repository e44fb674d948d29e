"""RULER's tasks (Hsieh et al. 2024) as its authors define them: what is hidden, how often, and how it is scored.

  python -m tests.benchmarks.ruler RUN              eleven tasks in 4,096 tokens, for teacher, student and window
  python -m tests.benchmarks.ruler RUN --tasks niah_single_2 vt --length 2048 --count 5

An answer is written, not forced: the score is the share of the right strings that stand in the text which a model
writes, of as many tokens as the authors allow. Sentences, words and code are ours, so figures are comparable row by
row here, and by task elsewhere. The two question tasks (qa_1, qa_2) need data that no package carries, and are left
out. Options are those of needles.py; essays are the documents of texts_of_others.py, or --texts.
"""

import random
import re
import string
import uuid
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

from linearizer.amounts import columns
from linearizer.errors import TextError
from linearizer.evaluate.generation import write
from tests.benchmarks.needles import ROWS, arguments_of, student_of, texts_to_hide_in

NOISE = "Rain falls on the hill. The road bends to the left. A boat goes by. It comes home at night."
HOPS, COMMON, OFTEN, SELDOM = 4, 10, 30, 3  # of a chain of variables; words of a list, and how often they stand there
ZETA, ASKED = 2.0, 3  # exponent of the frequencies of coded words, and how many of them are asked for


@dataclass(frozen=True)
class Sources:
    """What texts are made of."""

    sentences: list[str]
    words: list[str]

    @staticmethod
    def of(text):
        words = sorted({word.lower() for word in re.findall(r"\b[A-Za-z]{4,}\b", text)})
        return Sources(re.split(r"(?<=[.!?])\s+", " ".join(text.split())), words)


@dataclass(frozen=True)
class Puzzle:
    """A text with its question, the begin of the answer, and the strings that must follow."""

    text: str
    prefix: str
    answers: list[str]


@dataclass(frozen=True)
class Task:
    """A way to make puzzles from a number of sentences or words, and the tokens that an answer may have."""

    make: Callable[[Sources, random.Random, int], Puzzle]
    tokens: int


def a_number(sources, drawn):
    return str(drawn.randrange(10**6, 10**7))


def a_word(sources, drawn):
    return "-".join(drawn.sample(sources.words, 2))


def an_id(sources, drawn):
    return str(uuid.UUID(int=drawn.getrandbits(128), version=4))


NAMES = {a_number: "number", a_word: "word", an_id: "id"}


def hide_needles(sources, drawn, units, hay="essay", key=a_word, value=a_number, keys=1, values=1, asked=1):
    """Hide values of keys in a haystack; ask for those of the first keys."""
    kind = NAMES[value]

    def tell(name, told):
        return f"One of the hidden {kind}s of {name} is: {told}."

    hidden = {key(sources, drawn): [value(sources, drawn) for _ in range(values)] for _ in range(keys)}
    facts = [tell(name, told) for name, all_told in hidden.items() for told in all_told]
    others = (tell(key(sources, drawn), value(sources, drawn)) for _ in range(units))
    sentences = {"noise": lambda: [NOISE] * units, "essay": lambda: essay(sources, units), "needles": lambda: [*others]}
    names = [*hidden][:asked]
    wanted = ", ".join(names)
    many = values * asked > 1
    question = f"{'Which are all' if many else 'Which is the'} hidden {kind}{'s' * many} of {wanted} in the text?"
    lead = f"Some {kind}s are hidden in this text. Remember them: you are asked for them at its end.\n\n"
    text = f"{lead}{spread(sentences[hay](), facts, drawn)}\n\n{question}"
    prefix = f"The hidden {kind}{'s' * many} of {wanted} in the text {'are' if many else 'is'}"
    return Puzzle(text, prefix, [told for name in names for told in hidden[name]])


def essay(sources, units):
    """Take the first sentences, from the first on again where there are too few."""
    times = -(-units // len(sources.sentences))
    return (sources.sentences * times)[:units]


def spread(sentences, facts, drawn):
    """Insert facts at random places between sentences, in an order of their own."""
    sentences, places = list(sentences), sorted(drawn.choices(range(len(sentences) + 1), k=len(facts)), reverse=True)
    for place, fact in zip(places, drawn.sample(facts, len(facts)), strict=True):
        sentences.insert(place, fact)
    return " ".join(sentences)


def track_variables(sources, drawn, units):
    """One variable gets a value, and each of four more that of the one before; ask for all that have the value."""
    example = chain(drawn, 8)
    shown = f"{example.text}\n{example.prefix} {', '.join(example.answers)}.\n\n"
    puzzle = chain(drawn, units)
    return Puzzle(shown + puzzle.text, puzzle.prefix, puzzle.answers)


def chain(drawn, units):
    names = ["".join(drawn.choices(string.ascii_uppercase, k=5)) for _ in range(HOPS + 1)]
    value = str(drawn.randrange(10_000, 100_000))
    facts = [f"VAR {name} = {held}" for name, held in zip(names, [value, *names[:-1]], strict=True)]
    sentences, places = [NOISE] * units, sorted(drawn.choices(range(units + 1), k=len(facts)))
    for place, fact in reversed([*zip(places, facts, strict=True)]):  # a chain stands in its order
        sentences.insert(place, f"{fact}.")
    asks = f"Which variables have the value {value} in the text, by one or more steps?"
    return Puzzle(
        f"Follow the variables in this text.\n\n{' '.join(sentences)}\n\n{asks}", f"They are {HOPS + 1}:", names
    )


def find_common_words(sources, drawn, units):
    """Ten words stand thirty times in a list, all others three times; ask for the ten."""
    example = numbered(sources, drawn, COMMON, 10)
    shown = f"{example.text}\n{example.prefix} {', '.join(example.answers)}\n\n"
    puzzle = numbered(sources, drawn, units, OFTEN)
    return Puzzle(shown + puzzle.text, puzzle.prefix, puzzle.answers)


def numbered(sources, drawn, units, often):
    words = drawn.sample(sources.words, min(len(sources.words), COMMON + units))
    common, others = words[:COMMON], words[COMMON:]
    items = drawn.sample(listed := common * often + others * SELDOM, len(listed))
    text = " ".join(f"{place}. {word}" for place, word in enumerate(items, 1))
    question = f"Which {COMMON} words are the most common in the list?"
    return Puzzle(f"Remember the words that come often in this list.\n{text}\n{question}", "They are:", common)


def find_frequent_words(sources, drawn, units):
    """Coded words are as frequent as their ranks to a power; the first is noise, and the next three are asked for."""
    ranks = range(1, 50)
    scale = sum(rank**-ZETA for rank in ranks)
    coded = ["".join(drawn.choices(string.ascii_lowercase, k=6)) for _ in ranks]
    counts = [max(1, round(units * rank**-ZETA / scale)) for rank in ranks]
    items = [word for word, count in zip(["...", *coded[1:]], counts, strict=True) for _ in range(count)]
    text = " ".join(drawn.sample(items, len(items)))
    question = f"Which {ASKED} coded words are the most frequent in the text? Leave out the dots."
    return Puzzle(f"Follow the coded words.\n\n{text}\n\n{question}", "They are:", coded[1 : ASKED + 1])


TASKS = {
    "niah_single_1": Task(partial(hide_needles, hay="noise"), 128),
    "niah_single_2": Task(hide_needles, 128),
    "niah_single_3": Task(partial(hide_needles, value=an_id), 128),
    "niah_multikey_1": Task(partial(hide_needles, keys=4), 128),
    "niah_multikey_2": Task(partial(hide_needles, hay="needles"), 128),
    "niah_multikey_3": Task(partial(hide_needles, hay="needles", key=an_id, value=an_id), 128),
    "niah_multivalue": Task(partial(hide_needles, values=4), 128),
    "niah_multiquery": Task(partial(hide_needles, keys=4, asked=4), 128),
    "vt": Task(track_variables, 30),
    "cwe": Task(find_common_words, 120),
    "fwe": Task(find_frequent_words, 50),
}


def lay_out(name, sources, tokenizer, length, seed):
    """Make the largest puzzle that has room for its answer in a length: its tokens (1, tokens), and the answers."""
    task = TASKS[name]

    def puzzle(units):
        return task.make(sources, random.Random(f"{seed} {name} {length}"), units)

    def tokens(units):
        return tokens_of(puzzle(units), tokenizer)

    room = length - task.tokens
    if tokens(1).shape[1] > room:
        raise TextError(f"{name} does not fit into a text of {length} tokens: ask for a longer --length")
    units = bisect_right(range(1, length), room, key=lambda units: tokens(units).shape[1])
    return tokens(units), puzzle(units).answers


def tokens_of(puzzle, tokenizer):
    """Ask as a turn of a chat, where a model knows such, and begin the answer."""
    text = f"{puzzle.text}\n"
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": puzzle.text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text + puzzle.prefix, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([ids])


def score(written, answers):
    """Return the share of answers that stand in a text, as the authors match strings."""
    return fmean(answer.lower() in written.lower() for answer in answers)


def do_tasks(subject, tokenizer, text, length, count, names=tuple(TASKS)):
    """Let a subject do tasks in texts of a length, which are made of a text: the mean score of each."""
    sources = Sources.of(text)
    scores = {}
    for name in names:
        laid_out = [lay_out(name, sources, tokenizer, length, seed) for seed in range(count)]
        answers = [(write(subject, ids, TASKS[name].tokens, None), expected) for ids, expected in laid_out]
        scores[name] = fmean(score(tokenizer.decode(ids[0]), expected) for ids, expected in answers)
    return scores


def main(arguments=None):
    parser = arguments_of(__doc__)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    for folder in given.runs or [given.work / f"needles-{given.budget}"]:
        with student_of(folder, given) as setup:
            texts = torch.cat([*texts_to_hide_in(setup.tokenizer, given)])
            text = "\n".join(setup.tokenizer.batch_decode(texts, skip_special_tokens=True))
            lines = [["", *given.tasks]]
            for row, subject in zip(ROWS, setup.subjects(given.length), strict=True):
                if row in given.rows:
                    scores = do_tasks(subject, setup.tokenizer, text, given.length, given.count, given.tasks)
                    lines.append([row, *(f"{scores[name]:.0%}" for name in given.tasks)])
        print(f"{folder}: RULER's tasks in {given.length:,} tokens\n{columns(lines)}", flush=True)


if __name__ == "__main__":
    main()
