"""The plan of an encoder's run."""

from __future__ import annotations

from dataclasses import dataclass

from linearizer.plan.json_products import JsonProduct
from linearizer.plan.options import check_options, option


@dataclass(frozen=True)
class EncoderPlan(JsonProduct):
    """All that decides what a run of an encoder makes."""

    json_indent = 1

    model: str
    budget: int = option(256, least=1)
    length: int | None = option(None, least=4)  # tokens of a text; None: as many as the model has positions for
    text: str = "builtin"
    pictures: str | None = None  # a folder
    slots: bool = True  # whether far tokens share slots; otherwise they are not seen
    texts: int = option(16, least=4)  # texts or pictures to judge on
    steps: int = option(32, least=0)  # of distillation
    batch: int = option(4, least=1)
    seed: int = option(0, least=0)
    device: str = "auto"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def learnt(self) -> int:
        """How many texts or pictures are learnt from."""
        return self.steps * self.batch

    @property
    def least(self) -> int:
        """How many of these there must be."""
        return min(self.steps, 1) * self.batch
