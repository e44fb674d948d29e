"""The settings of a training, and the texts, windows and rates of each step that follow from them.

All randomness is a function of the seed and the number of the step, so that a training resumes from that number alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from linearizer.errors import RequestError
from linearizer.plan.options import check_options, option
from linearizer.plan.plan import Plan
from linearizer.run.disk import SAVE_EVERY

LAYERWISE, END_TO_END = ("softmax", "l2", "output"), ("direct", "logits")
NAMES_BY_RATE = {  # the names of parameters in their feature maps; z and log_weight: the paper's
    0.0005: "lora",
    0.003: "hidden out",
    0.01: "norm key_map query_map key_shift gate_down gate_up tap_weight query_tap_weight",
    0.02: "z query_weight key_weight gain bias value_scale router",
    0.03: "centres metric mass",
    0.05: "gate_bias",
    0.06: "query_centres log_sharpness",
    0.2: "log_weight",
}
RATES: Mapping[str, float] = {name: rate for rate, names in NAMES_BY_RATE.items() for name in names.split()}
DROPOUT = 0.5  # of windows of heads with features: see TrainingSettings
MIN_PASSAGE_TOKENS = 16  # of a passage that is repeated


@dataclass(frozen=True)
class TrainingSettings:
    """How a student is trained."""

    loss: str = option("softmax", choices=(*LAYERWISE, *END_TO_END))
    steps: int = option(150, least=0)
    batch: int = option(2, "texts per step", least=1)
    rate: float = 1.0  # factor of all learning rates
    warmup: int = option(10, "steps until the rates are full", least=0)
    window_dropout: float = option(
        DROPOUT, "chance at the start, falling to 0, that a step trains with smaller windows", least=0, most=1
    )
    repeats: float = option(0.5, "share of the texts in which a passage is repeated", least=0, most=1)
    lora: int = option(0, "rank of adapters on q, k, v and o; end to end only", least=0)
    save_every: int = option(SAVE_EVERY, "steps", least=1)
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        if self.lora and self.loss not in END_TO_END:
            raise RequestError(
                f"lora={self.lora} changes queries, keys and values, which the loss {self.loss!r} takes as constant: "
                f"use {' or '.join(END_TO_END)}, or lora=0"
            )

    def rate_of(self, parameter: str) -> float:
        """Look up the learning rate of a parameter by its name in the model."""
        kind = "lora" if "lora_" in parameter else parameter.rpartition(".")[2]
        return self.rate * RATES[kind]


def rate_share(settings: TrainingSettings, step: int) -> float:
    """Compute the share of the learning rates that a step uses: they rise at first, and fall by a cosine to 0."""
    warm = min(1.0, (step + 1) / (settings.warmup + 1))
    done = step / max(1, settings.steps)
    return warm * (1 + math.cos(math.pi * done)) / 2


def window_share(settings: TrainingSettings, step: int) -> float:
    """Draw the share of the windows that a step trains with: 1, or at random a smaller one, to train the far field."""
    drop, share = torch.rand(2, generator=generator_for(settings, step)).tolist()
    chance = settings.window_dropout * (1 - step / max(1, settings.steps))
    return share if drop < chance else 1.0


def draw_batch(texts: torch.Tensor, settings: TrainingSettings, step: int) -> torch.Tensor:  # (batch, tokens)
    """Draw the texts of a step, each once before any is reused; repeat a passage in some of them."""
    rows = []
    for position in range(step * settings.batch, (step + 1) * settings.batch):
        epoch, place = divmod(position, len(texts))
        order = torch.randperm(len(texts), generator=generator_for(settings, -1 - epoch))
        rows.append(texts[order[place]])
    draw = generator_for(settings, step + 2**40)
    return torch.stack(
        [repeat_passage(row, draw) if float(torch.rand((), generator=draw)) < settings.repeats else row for row in rows]
    )


def repeat_passage(text: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Copy a passage of a text over a later place, with random places and a random length."""

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    if len(text) < 4 * MIN_PASSAGE_TOKENS:
        return text
    length = pick(MIN_PASSAGE_TOKENS, len(text) // 4 + 1)
    begin = pick(1, len(text) - 2 * length + 1)
    target = pick(begin + length, len(text) - length + 1)
    text = text.clone()
    text[target : target + length] = text[begin : begin + length]
    return text


def generator_for(settings: TrainingSettings, number: int) -> torch.Generator:
    """Seed a generator for one purpose."""
    return torch.Generator().manual_seed((settings.seed * 0x9E3779B97F4A7C15 + number) % 2**63)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training, which changed the student itself."""

    steps: int
    start: Mapping[int, float]  # excess loss of each layer on the first batch
    end: Mapping[int, float]  # its running mean at the end
    events: tuple[str, ...]  # sentences about what went wrong
    kl: tuple[float, float] | None = None  # without adapters and with them, on texts that they did not learn from


def training_settings(plan: Plan) -> list[TrainingSettings]:
    """Make the settings of each phase of a plan: one phase for each loss; the first phase takes the odd step."""
    losses = plan.resolved_loss.split("+")
    steps, odd = divmod(plan.steps, len(losses))
    return [
        TrainingSettings(
            loss=loss,
            steps=steps + (number < odd),
            batch=plan.batch,
            seed=plan.seed,
            lora=plan.resolved_lora if loss in END_TO_END else 0,
            window_dropout=DROPOUT if plan.may_hold_features else 0.0,
        )
        for number, loss in enumerate(losses)
    ]
