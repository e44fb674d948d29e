"""Optimises the parameters of one layer, and returns to the last good state if the training diverges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

COPY_EVERY = 10  # steps between copies of a good state
HIGH = 10.0  # times the loss at the start: above it a loss counts as high
NOISE = 1e-3  # a loss below this is noise: it may grow without counting as high
MAX_HIGH_STEPS = 20  # steps for which a loss may stay high
MEMORY = 0.9  # of the running mean of the loss
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what Adam keeps of a parameter


@dataclass
class LayerStatus:
    """The state of a layer's training, without its tensors."""

    start: float | None = None  # its first loss with whole windows
    recent: float | None = None  # running mean of the loss with whole windows
    high: int = 0  # steps for which the loss has been high
    rate: float = 1.0  # the share of its learning rate that is left after it diverged
    given_up: str | None = None  # the reason, once it trains no more


class LayerOptimizer:
    """Trains some parameters by Adam, with a learning rate for each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        self.parameters, self.rates, self.status = dict(parameters), dict(rates), LayerStatus()
        self.good = self.copy_parameters()
        self.reset_adam()

    def reset_adam(self) -> None:
        """Start Adam without moments."""
        groups = [{"params": [p], "full": self.rates[name]} for name, p in self.parameters.items()]
        self.adam = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.99))

    def copy_parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def return_to_good_state(self) -> None:
        """Restore the last copy of the parameters."""
        for name, p in self.parameters.items():
            p.copy_(self.good[name])
        self.reset_adam()

    def take_step(self, loss: float, step: int, rate: float, whole_windows: bool) -> str | None:
        """Update the parameters by their gradients; return a sentence if the training went wrong.

        A loss with smaller windows does not measure progress, and is not compared with others.
        """
        status = self.status
        if not self.is_finite(loss):
            self.return_to_good_state()
            status.given_up = "its loss or gradient is not finite"
            return f"{status.given_up}; it falls back to its last good state and learns no more"
        if whole_windows:
            status.start = loss if status.start is None else status.start
            status.recent = loss if status.recent is None else MEMORY * status.recent + (1 - MEMORY) * loss
            status.high = status.high + 1 if loss > HIGH * max(status.start, NOISE) else 0
        if status.high >= MAX_HIGH_STEPS:
            self.return_to_good_state()
            status.high, status.rate = 0, status.rate / 2
            return (
                f"its loss stays at {loss:.3g}, from {status.start:.3g} at the start; it falls back to its last good "
                f"state, its learning rate halved to {status.rate:g} of what was asked"
            )
        if status.high == 0 and step % COPY_EVERY == 0:
            self.good = self.copy_parameters()
        for group in self.adam.param_groups:
            group["lr"] = group["full"] * rate * status.rate
        self.adam.step()
        return None

    def is_finite(self, loss: float) -> bool:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name every tensor that resuming needs."""
        named: dict[str, torch.Tensor] = {}
        for name, p in self.parameters.items():
            named |= {f"{name}/now": p.detach(), f"{name}/good": self.good[name]}
            named |= {f"{name}/{moment}": value for moment, value in self.adam.state.get(p, {}).items()}
        return named

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `tensors` and `facts` of an earlier optimiser."""
        self.status = LayerStatus(**facts)
        self.reset_adam()
        for name, p in self.parameters.items():
            p.copy_(tensors[f"{name}/now"])
            self.good[name].copy_(tensors[f"{name}/good"])
            if f"{name}/{MOMENTS[0]}" in tensors:
                moments = {moment: tensors[f"{name}/{moment}"].clone() for moment in MOMENTS}
                self.adam.state[p] = {m: t if m == "step" else t.to(p.device) for m, t in moments.items()}
