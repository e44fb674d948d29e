"""The plan of an encoder's run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields

from linearizer.plan.json_products import JsonProduct
from linearizer.plan.options import check_options, option, write_options


@dataclass(frozen=True)
class EncoderPlan(JsonProduct):
    """Everything that decides the result of an encoder's run."""

    json_indent = 1

    model: str
    budget: int = option(256, "how many tokens each token sees", least=1)
    length: int | None = option(None, "tokens of a text", "as many as the model has positions for", least=4)
    text: str = option("builtin", "texts to learn from and to judge on: builtin, file:PATH or dataset:ID")
    pictures: str | None = option(
        None, "pictures to learn from and to judge on: a folder, or dataset:ID[:config][:split][:column]"
    )
    slots: bool = option(True, "whether far tokens share slots; otherwise they are not seen", "yes")
    texts: int = option(16, "how many texts or pictures to judge on", least=4)
    steps: int = option(32, "steps of distillation", least=0)
    batch: int = option(4, "texts or pictures of a step", least=1)
    seed: int = option(0, "the seed of everything that is drawn at random", least=0)
    device: str = option("auto", "the device to compute on: auto, cpu or cuda")

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def learnt(self) -> int:
        """The number of texts or pictures for training."""
        return self.steps * self.batch

    @property
    def least(self) -> int:
        """The number of these that there must be at least."""
        return min(self.steps, 1) * self.batch

    @property
    def dial(self) -> str:
        """The plan's budget, in words."""
        return f"{self.budget} keys a token"

    @property
    def in_brief(self) -> str:
        """The plan's budget and method, in words."""
        return f"{self.dial}, {'slots' if self.slots else 'a window alone'}"

    def command(self) -> str:
        """Write `linearizer run …` with every option that is not the usual one."""
        usual = {field.name: field.default for field in fields(self)} | {"model": self.model}
        return shlex.join(["linearizer", "run", self.model, *write_options(self, usual)])
