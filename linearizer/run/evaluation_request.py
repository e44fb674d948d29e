"""The request for an evaluation: which parts, on what text, how much of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linearizer.errors import RequestError
from linearizer.plan.json_products import read_plain
from linearizer.plan.options import check_options, option

PARTS = ("language", "recall", "needle", "generation", "approximation", "speed", "tasks")  # in their order


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
    texts: int = option(8, "how many texts", least=1)
    short: bool = option(False, "leave out the caches in few bits, which language and recall compare with")
    lengths: tuple[int, ...] = option(
        (), "tokens, where several lengths are compared: 1024,4096,…", "as each part chooses", least=32
    )
    seconds: float = option(15.0, "seconds that one measurement of speed may take", above=0)
    seed: int = option(0, "the seed of everything that is drawn at random")
    tasks: tuple[str, ...] = option(
        (),
        "ruler (generated, at --lengths) or tasks of lm_eval: piqa,… (needs pip install 'linearizer[tasks]')",
        "none",
    )
    limit: int | None = option(None, "samples of a task", "all", least=1)
    few_shot: int | None = option(None, "examples before each sample", "as the task says", least=0)
    task_folder: str | None = option(
        None, "a folder of tasks of your own, as YAML files, which may run code that you put there"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if "tasks" in self.parts and not self.tasks:
            raise RequestError("no task was named: add --tasks, as in --tasks piqa,arc_easy")

    @staticmethod
    def of(given: Mapping[str, Any]) -> Request:
        """Read a request from plain values, lists for tuples; None stands for the default."""
        return read_plain(Request, {name: value for name, value in given.items() if value is not None})

    @property
    def chosen(self) -> tuple[str, ...]:
        """The parts to measure, in their order."""
        named = self.parts or tuple(part for part in PARTS if part != "tasks")
        return tuple(part for part in PARTS if part in named or (part == "tasks" and self.tasks))
