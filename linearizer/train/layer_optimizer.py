"""The parameters of one layer while they are learnt, and what protects them: the last state that was good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

GOOD_EVERY = 10  # steps between copies of a good state
HIGH = 10.0  # times the loss at the start: more is divergence
LEAST = 1e-3  # a loss under this is noise; what it grows by is no divergence
PATIENCE = 20  # steps for which a loss may stay high
MEMORY = 0.9  # of the running mean of the loss
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what Adam keeps of a parameter


@dataclass
class Course:
    """How a layer's training has gone so far."""

    start: float | None = None  # its first loss with whole windows
    recent: float | None = None  # running mean of the loss with whole windows
    high: int = 0  # steps for which it has been high
    rate: float = 1.0  # what divergence has left of its learning rate
    given_up: str | None = None  # why it learns no more


class Learner:
    """Learns some parameters by Adam, a rate for each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        self.parameters, self.rates, self.course = dict(parameters), dict(rates), Course()
        self.good = self.copies()
        self.begin()

    def begin(self) -> None:
        """Forget what the optimiser has gathered."""
        groups = [{"params": [p], "full": self.rates[name]} for name, p in self.parameters.items()]
        self.optimiser = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.99))

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def fall_back(self) -> None:
        """Return to the last good state."""
        for name, p in self.parameters.items():
            p.copy_(self.good[name])
        self.begin()

    def learn(self, loss: float, step: int, rate: float, whole: bool) -> str | None:
        """Take a step with the gradients that are there; say what went wrong, if anything did.

        `whole` says that the windows were: a loss without them is no measure.
        """
        course = self.course
        if not self.is_finite(loss):
            self.fall_back()
            course.given_up = "its loss or gradient is not finite"
            return f"{course.given_up}; it falls back to its last good state and learns no more"
        if whole:
            course.start = loss if course.start is None else course.start
            course.recent = loss if course.recent is None else MEMORY * course.recent + (1 - MEMORY) * loss
            course.high = course.high + 1 if loss > HIGH * max(course.start, LEAST) else 0
        if course.high >= PATIENCE:
            self.fall_back()
            course.high, course.rate = 0, course.rate / 2
            return (
                f"its loss stays at {loss:.3g}, from {course.start:.3g} at the start; it falls back to its last good "
                f"state, its learning rate halved to {course.rate:g} of what was asked"
            )
        if course.high == 0 and step % GOOD_EVERY == 0:
            self.good = self.copies()
        for group in self.optimiser.param_groups:
            group["lr"] = group["full"] * rate * course.rate
        self.optimiser.step()
        return None

    def is_finite(self, loss: float) -> bool:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients)

    def forget_gradients(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name every tensor that going on needs."""
        found: dict[str, torch.Tensor] = {}
        for name, p in self.parameters.items():
            found |= {f"{name}/now": p.detach(), f"{name}/good": self.good[name]}
            found |= {f"{name}/{moment}": value for moment, value in self.optimiser.state.get(p, {}).items()}
        return found

    def facts(self) -> dict[str, Any]:
        return asdict(self.course)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what `tensors` and `facts` gave."""
        self.course = Course(**facts)
        self.begin()
        for name, p in self.parameters.items():
            p.copy_(tensors[f"{name}/now"])
            self.good[name].copy_(tensors[f"{name}/good"])
            if f"{name}/{MOMENTS[0]}" in tensors:
                kept = {moment: tensors[f"{name}/{moment}"].clone() for moment in MOMENTS}
                self.optimiser.state[p] = {m: t if m == "step" else t.to(p.device) for m, t in kept.items()}
