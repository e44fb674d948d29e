"""The facts about an encoder that are known without its weights, and the cost of its attention."""

from __future__ import annotations

from dataclasses import dataclass

from linearizer.errors import UnsupportedModel
from linearizer.plan.inspection import ModelFacts

LENGTHS = (512, 2048, 8192, 32768)  # tokens of texts for which the share of attention is stated
LATENTS = "latents"  # the input of a denoiser
LEAST_SHARE = 0.1  # of attention in a model's operations: with less there is little to save


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
