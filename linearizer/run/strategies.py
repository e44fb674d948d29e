"""Strategies: what heads may hold, and which measurement decides how the budget is shared out among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """How a budget becomes an allocation."""

    about: str
    decided_by: Literal["prices", "gates", "freedoms", "budget"]  # "budget": nothing has to be measured
    far_field: Literal["slots", "features", ""] = ""  # what heads may hold beside a window
    bits: tuple[int, ...] = (16,)  # that a number in keys and values may have; the first is the default
    fewer: tuple[int, ...] = ()  # that heads may have where that pays, unless bits are asked for

    @property
    def spends_tokens(self) -> bool:
        """Whether the budget is given in tokens of cache; otherwise it may be a mean number of features."""
        return self.decided_by != "freedoms"

    @property
    def product(self) -> str:
        """Name the product of a run that is measured last, and that decides; every run has a profile."""
        return self.decided_by if self.decided_by in ("prices", "gates") else "profile"


STRATEGIES: Mapping[str, Strategy] = {
    "gain": Strategy(
        "a window or slots by each head's price; with --may-grow softmax, too",
        "prices",
        "slots",
        (8, 16, 6, 5, 4),
        (6, 5, 4),
    ),
    "gain-features": Strategy("as gain, with features in place of slots", "prices", "features", (8, 16)),
    "windows": Strategy("as gain, without slots", "prices", "", (16, 8, 6, 5, 4)),
    "window": Strategy("the same window for every head", "budget", "", (16, 8, 6, 5, 4)),
    "memory": Strategy("the same memory for every head, beside a window: --feature-map names it", "budget", "features"),
    "duo": Strategy("softmax or a window by learned gates; needs --may-grow", "gates"),
    "fix": Strategy("the same number of features for every head", "freedoms", "features"),
    "dof": Strategy("features by the most degrees of freedom in a layer (the paper)", "freedoms", "features"),
    "dof-clip": Strategy("as dof, but at most the head size", "freedoms", "features"),
    "dof-mean": Strategy("features by the mean degrees of freedom of a layer", "freedoms", "features"),
    "common-lambda": Strategy("features by degrees of freedom at one λ for all heads", "freedoms", "features"),
}
