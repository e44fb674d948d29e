"""The plan of an encoder's run, and the facts about the encoder that are known without its weights."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from linearizer.errors import UnsupportedModel
from linearizer.plan.inspection import ModelFacts
from linearizer.plan.json_products import JsonProduct
from linearizer.plan.options import check_options, option, write_options

LENGTHS = (512, 2048, 8192, 32768)  # tokens of texts for which the share of attention is stated
LATENTS = "latents"  # the input of a denoiser
LEAST_SHARE = 0.1  # of attention in a model's operations: with less there is little to save


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
        """The number of texts or pictures for training: one batch a step, and one that decides about its result."""
        return (self.steps + 1) * self.batch if self.steps else 0

    @property
    def least(self) -> int:
        """The number of these that there must be at least."""
        return 2 * self.batch if self.steps else 0

    @property
    def budget_in_words(self) -> str:
        """The plan's budget, in words."""
        return f"{self.budget} keys a token"

    @property
    def in_brief(self) -> str:
        """The plan's budget and method, in words."""
        return f"{self.budget_in_words}, {'slots' if self.slots else 'a window alone'}"

    def command(self) -> str:
        """Write `linearizer run …` with every option that is not the usual one."""
        return shlex.join(["linearizer", "run", self.model, *write_options(self, {"model": self.model})])


@dataclass(frozen=True, kw_only=True)
class EncoderInspection(ModelFacts):
    """Facts about an encoder."""

    auto_class: str  # of transformers, by which it loads
    reads: str  # texts, pictures, or LATENTS
    layers: int  # that attend to all tokens; those with windows of their own are not changed
    heads: int
    head_dim: int
    tokens: int  # of a picture of the usual size, or the maximum of a text
    layer_parameters: int  # outside of embeddings: a token is multiplied by each
    first: int = 0  # tokens before the patches of a picture, or special ones before a text
    last: int = 0  # special ones after a text
    stretches: bool = False  # whether its positions are a table, which can be interpolated for longer texts
    repo_id: str | None = None  # of the Hub

    @property
    def pair_operations(self) -> int:
        """The multiplications and additions that a key costs a token, in all layers."""
        return 2 * self.layers * self.heads * self.head_dim

    def share(self, tokens: int) -> float:
        """Return the share of attention in the operations of the model at a length."""
        attention = tokens * self.pair_operations
        return attention / (attention + self.layer_parameters)

    def describe_shape(self) -> list[tuple[str, str]]:
        """Describe layers, tokens and the cost of attention, as pairs of a name and words."""
        texts, longest = self.reads == "texts", self.tokens
        lengths = LENGTHS if texts else (longest, 4 * longest, 16 * longest)
        shares = ", ".join(f"{self.share(tokens):.0%} at {tokens:,}" for tokens in lengths)
        longer = "; longer texts by interpolated positions" * self.stretches
        return [
            ("parameters", f"{self.parameters:,}"),
            ("attention", f"in both directions, {self.layers} layers of {self.heads} heads of size {self.head_dim}"),
            ("tokens", f"{longest:,} of {f'a text at most{longer}' if texts else 'a picture'}"),
            ("its share", f"of the model's operations: {shares} tokens"),
            ("licence", self.licence or "not stated"),
            ("supported", "yes, and tested" if self.tested else "yes"),
        ]

    def check_worth(self, budget: float, tokens: int) -> None:
        """Refuse a budget with which there is nothing to save."""
        nothing = f"there is nothing to save in {self.name!r} at {tokens} tokens, because "
        longer = "ask for longer texts" if self.reads == "texts" else "let its processor make larger pictures"
        if budget >= tokens:
            raise UnsupportedModel(f"{nothing}the budget of {budget:g} is not less: ask for a smaller one, or {longer}")
        if (share := self.share(tokens)) < LEAST_SHARE:
            raise UnsupportedModel(f"{nothing}attention is {share:.1%} of its operations there: {longer}")
