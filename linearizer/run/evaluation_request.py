"""What an evaluation is asked for: which parts, on what text, how much of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from linearizer.errors import RequestError

PARTS = ("language", "recall", "needle", "generation", "approximation", "speed", "tasks")  # in their order
WHOLE = ("length", "texts", "curve_steps", "seed", "limit", "few_shot")  # numbers
WORDS = ("text", "task_folder")
LISTS = {"parts": str, "lengths": int, "tasks": str}


@dataclass(frozen=True)
class Request:
    """What to measure, and on what."""

    parts: tuple[str, ...] = ()  # none: all of them, tasks if some are named
    text: str | None = None  # None: the run's own, where its training did not reach
    length: int | None = None  # tokens of a text; None: as the run's own
    texts: int = 8
    lengths: tuple[int, ...] = ()  # tokens, where several lengths are compared; none: as each part chooses
    seconds: float = 15.0  # that one measurement of speed may take
    curve_steps: int = 0  # of training at every number of features; 0: the curve is of untrained ones alone
    seed: int = 0

    tasks: tuple[str, ...] = ()  # of lm_eval, or of the folder
    limit: int | None = None  # samples of a task; None: all
    few_shot: int | None = None  # examples before each sample; None: as the task says
    task_folder: str | None = None

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                near = get_close_matches(part, PARTS, 1)
                meant = f" (did you mean {near[0]!r}?)" if near else ""
                raise RequestError(f"there is no part {part!r}{meant}: name some of {', '.join(PARTS)}")
        for name, least, asked in (
            ("length", 16, self.length),
            ("texts", 1, self.texts),
            ("curve_steps", 0, self.curve_steps),
            ("limit", 1, self.limit),
            ("few_shot", 0, self.few_shot),
            *(("lengths", 32, length) for length in self.lengths),
        ):
            if asked is not None and asked < least:
                raise RequestError(f"{name} {asked} is too few: give at least {least}")
        if "tasks" in self.parts and not self.tasks:
            raise RequestError("no task was named: add --tasks, as in --tasks piqa,arc_easy")
        if not self.seconds > 0:
            raise RequestError(f"seconds {self.seconds} measure nothing: give a number above 0")

    @staticmethod
    def of(given: Mapping[str, Any]) -> Request:
        """Read a request from plain values that came from elsewhere; what is None is left to its default."""
        known = {field.name for field in fields(Request)}
        if unknown := sorted(set(given) - known):
            raise RequestError(
                f"{', '.join(unknown)} is no choice of an evaluation: there are {', '.join(sorted(known))}"
            )
        asked: dict[str, Any] = {name: checked(name, value) for name, value in given.items() if value is not None}
        return Request(**asked)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The parts to measure, in their order."""
        usual = tuple(part for part in PARTS if part != "tasks")
        named = self.parts or usual
        return tuple(part for part in PARTS if part in named or (part == "tasks" and self.tasks))


def checked(name: str, value: Any) -> Any:
    """Take a value of the kind that a choice has."""
    if name in LISTS and isinstance(value, list | tuple) and all(is_a(LISTS[name], one) for one in value):
        return tuple(value)
    if (name in WHOLE and is_a(int, value)) or (name in WORDS and is_a(str, value)):
        return value
    if name == "seconds" and (is_a(int, value) or is_a(float, value)):
        return value
    kind = (
        "a list"
        if name in LISTS
        else "a whole number"
        if name in WHOLE
        else "a number"
        if name == "seconds"
        else "text"
    )
    raise RequestError(f"{name} {str(value)[:40]!r} cannot be: give {kind}")


def is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
