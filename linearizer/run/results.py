"""The request for an evaluation, and its results: one frozen dataclass for every part of evaluation.json.

A comparison has the texts of teacher, student and a window after the same prompt; it is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar, get_args

from linearizer.errors import RequestError
from linearizer.plan.json_products import read_plain
from linearizer.plan.options import check_options, option

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens, and its interval of confidence."""

    mean: float
    interval: Interval


@dataclass(frozen=True)
class Tail:
    """The largest differences of a subject from the teacher, which a mean hides; also used for quantised weights."""

    kl_99: float  # nats: 99% of the tokens stay below
    kl_999: float  # 99.9%
    probability_change: float  # of the actual next token: the root of the mean square


@dataclass(frozen=True)
class Predictions:
    """One subject, in nats; comparisons with the teacher are None if there is no teacher."""

    name: str
    state_bytes: int  # of cache or state at the end of a text
    loss: Estimate
    by_position: tuple[float, ...]  # loss in the ranges that begin at `edges`
    excess: Estimate | None  # loss above the teacher's on the same tokens
    kl: Estimate | None  # of the next-token distribution from the teacher's
    agreement: Estimate | None  # how often the likeliest tokens are the same
    calibration_error: float  # |probability - correct|, averaged over the predictions
    tail: Tail | None


@dataclass(frozen=True)
class ShortPredictions:
    """One subject on the beginnings of texts, in nats; comparisons are None if there is no teacher."""

    name: str
    loss: Estimate
    kl: Estimate | None
    agreement: Estimate | None
    catastrophic: float | None = None  # share of positions that the teacher is sure of, and the subject misses


@dataclass(frozen=True)
class LengthResult:
    """All subjects on texts of one length, which are the beginnings of all texts."""

    length: int  # tokens
    drawn: str  # what the intervals are over: documents or texts
    count: int  # how many of these there are
    window: int  # tokens that a window of the student's bytes holds at this length, with its sinks
    subjects: tuple[ShortPredictions, ...]
    # the student's kl minus that of the window, token by token; without a teacher the losses
    difference: Estimate | None  # None: one text or document shows no difference
    strained: bool = False  # whether the teacher predicts the tokens of only this length worse than the window does


@dataclass(frozen=True)
class Language:
    """All subjects on one text."""

    tokens: int  # predicted
    edges: tuple[int, ...]
    drawn: str  # what the intervals are over: documents or texts
    count: int  # how many of these there are
    subjects: tuple[Predictions, ...]
    lengths: tuple[LengthResult, ...]  # from short to long, the last whole texts

    def at(self, length: int) -> LengthResult | None:
        """Return the result on texts of a length."""
        return next((result for result in self.lengths if result.length == length), None)


@dataclass(frozen=True)
class RecallLosses:
    """One subject's loss on repeated passages, gap by gap."""

    name: str
    first: tuple[float, ...]
    second: tuple[float, ...]


@dataclass(frozen=True)
class Recall:
    """All subjects on the same texts."""

    passage: int  # tokens
    gaps: tuple[int, ...]
    subjects: tuple[RecallLosses, ...]


@dataclass(frozen=True)
class Grid:
    """One subject's answers, [length][depth]; None where memory did not reach."""

    name: str
    correct: tuple[tuple[float | None, ...], ...]
    loss: tuple[tuple[float | None, ...], ...]
    surprise: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Needle:
    """All subjects on the same texts."""

    lengths: tuple[int, ...]  # tokens
    depths: tuple[float, ...]  # share of the text before the pair
    extrapolated: tuple[bool, ...]  # whether a length lies beyond the teacher's positions
    subjects: tuple[Grid, ...]


@dataclass(frozen=True)
class GenerationScores:
    """Measures of one subject's texts; comparisons with the teacher are None if there is no teacher."""

    name: str
    sampled: bool  # drawn, or the likeliest tokens
    diverged: tuple[int, ...] | None  # tokens of each text before the first that is not the teacher's
    repeated: float  # share of the runs of four tokens that occurred earlier in the same text
    distinct: tuple[float, ...]  # share of distinct runs of one, two, three tokens
    loss: float | None  # of the teacher on these texts, in nats per token
    likeliest: float | None  # share of the tokens that are the teacher's first choice at their place


@dataclass(frozen=True)
class Generation:
    """All subjects on the same prompts."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    subjects: tuple[GenerationScores, ...]


@dataclass(frozen=True)
class Pace:
    """One subject at one length; None: not measured."""

    length: int
    batch: int
    read_rate: float | None  # tokens per second, of all texts together
    write_rate: float | None
    peak_bytes: int | None  # apart from the weights; None if the system does not report them
    state_bytes: int | None  # of cache or state
    predicted_bytes: int  # of cache or state, from its shape
    predicted_operations: int  # of attention for one token
    extrapolated: str | None = None  # why it was not measured: memory or time


@dataclass(frozen=True)
class SpeedOfModel:
    """One subject at all lengths: one text at a time, and as many as fit."""

    name: str
    paces: tuple[Pace, ...]
    batched: tuple[Pace, ...]


@dataclass(frozen=True)
class Breakeven:
    """The length from which on the student is no worse than the teacher; None: never."""

    predicted_bytes: int | None
    predicted_operations: int | None
    writing: int | None  # measured


@dataclass(frozen=True)
class Speed:
    """All subjects, and where the student's advantage begins."""

    lengths: tuple[int, ...]
    beyond: tuple[bool, ...]  # whether a length lies beyond the teacher's positions
    seconds: float  # limit of one measurement
    subjects: tuple[SpeedOfModel, ...]
    breakeven: Breakeven | None  # None without a teacher


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    value: float
    error: float | None  # standard; None if the harness returns none
    samples: int


@dataclass(frozen=True)
class Scored:
    """The scores of one subject."""

    name: str
    scores: tuple[Score, ...]
    accuracy: float | None  # mean of "acc" over the tasks that have it, as in the paper's tables


@dataclass(frozen=True)
class Tasks:
    """All subjects on the same tasks."""

    tasks: tuple[str, ...]
    limit: int | None  # samples of a task; None: all
    few_shot: int | None  # examples before each; None: the task's number
    subjects: tuple[Scored, ...]


Result = Language | Recall | Needle | Generation | Speed | Tasks
# by the names of the parts, in their order
RESULTS: dict[str, type[Result]] = {kind.__name__.lower(): kind for kind in get_args(Result)}
PARTS = tuple(RESULTS)


@dataclass(frozen=True)
class Request:
    """The parts to measure, and the text to measure them on."""

    parts: tuple[str, ...] = option((), "the parts to measure", "all; tasks only if --tasks names some", choices=PARTS)
    text: str | None = option(
        None, "the text, as of `linearizer run`", "the run's own, where its training did not reach"
    )
    length: int | None = option(
        None, "tokens of a text", "as the run's own; language is also judged at twice that", least=16
    )
    texts: int = option(8, "how many texts", "8; of an encoder, as many as its run", least=1)
    lengths: tuple[int, ...] = option(
        (), "tokens, where several lengths are compared: 1024,4096,…", "as each part chooses", least=32
    )
    seconds: float = option(15.0, "seconds that one measurement of speed may take", above=0)
    seed: int = option(0, "the seed of everything that is drawn at random")
    tasks: tuple[str, ...] = option(
        (),
        "long-text (facts hidden in texts of --lengths, made here) or tasks of lm_eval: piqa,… (needs pip install "
        "'linearizer[tasks]')",
        "none",
    )
    limit: int | None = option(None, "samples of a task", "all", least=1)
    few_shot: int | None = option(None, "examples before each sample", "as the task says", least=0)
    task_folder: str | None = option(None, "a folder with your own tasks as YAML files; its code may be run")

    def __post_init__(self) -> None:
        check_options(self)
        if "tasks" in self.parts and not self.tasks:
            raise RequestError("no task was named: add --tasks, as in --tasks piqa,arc_easy")

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Request:
        """Read a request from plain values, with lists as tuples; None stands for the default."""
        given = {name: value for name, value in plain.items() if value is not None}
        given.pop("short", None)  # requests of former versions
        return read_plain(Request, given)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The parts to measure, in their order."""
        named = self.parts or tuple(part for part in PARTS if part != "tasks")
        return tuple(part for part in PARTS if part in named or (part == "tasks" and self.tasks))


@dataclass(frozen=True)
class MadeWith:
    """The software and the device of a measurement, and its teacher."""

    versions: dict[str, str]
    device: str
    dtype: str
    teacher: dict[str, Any] | None  # its name and revision
    alone: str | None  # why there was no teacher
    kernels: str = ""  # that read with the student; "" in results of earlier versions


@dataclass(frozen=True)
class TextRead:
    """The texts that a part was measured on."""

    text: str  # the source
    texts: int
    length: int  # tokens of each
    seed: int
    beyond: bool = False  # whether they are longer than the teacher's positions


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Part(Generic[R]):
    """One part of an evaluation: its result, its texts, and its software and device."""

    asked: dict[str, Any]  # the fields of the request that the part uses
    made_with: MadeWith
    result: R  # of the class that RESULTS names for the part
    read: TextRead | None = None  # None: the part reads no text of a source

    def to_plain(self) -> dict[str, Any]:
        """Return the part in the form of evaluation.json."""
        asked = {**self.asked, "made_with": asdict(self.made_with)}
        return {"asked": asked, **({} if self.read is None else asdict(self.read)), **asdict(self.result)}


def read_part(name: str, plain: Mapping[str, Any]) -> Part:
    """Read the form of `Part.to_plain`."""
    asked = dict(plain["asked"])
    asked.pop("short", None)  # of former versions, which could leave out rivals
    made_with = read_plain(MadeWith, asked.pop("made_with"))
    source = read_plain(TextRead, plain, "ignore") if "text" in plain else None
    return Part(asked, made_with, read_plain(RESULTS[name], plain, "ignore"), source)


@dataclass(frozen=True)
class Side:
    """The text of one model, its speed, and the size of its state, in the units of every other size."""

    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float  # after the first token
    tokens_read: int
    state_bytes: int  # of cache or state once these are read
    difference: Difference | None = None  # from the teacher, if it is another model


@dataclass(frozen=True)
class Difference:
    """The first token in which a model differs from the teacher."""

    place: int  # number of equal tokens before it
    alike: str  # the text of these
    teacher: str  # the token of each
    own: str
    chances: tuple[tuple[float, float], tuple[float, float]] | None = None  # of these two: by the teacher, and its own


@dataclass(frozen=True)
class Comparison:
    """The texts of all models so far."""

    prompt: str
    prompt_tokens: int
    teacher: Side
    student: Side
    window: Side | None = None  # a plain window of the student's bytes


@dataclass(frozen=True)
class StateSizes:
    """The sizes of the models' states while they read a text, by their names."""

    tokens: int  # of the text that are read
    total: int
    bytes: dict[str, int]
    again: bool = False  # the text was read before, but the states were dropped
    recurrent_bytes: int = 0  # of each model, in recurrent layers: they do not grow
