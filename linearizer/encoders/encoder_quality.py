"""How close an encoder's student is to its teacher on held-out texts or pictures, and controls of as many keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity, normalize

from linearizer.encoders import slots_of_all
from linearizer.encoders.encoder_inputs import Inputs, batches
from linearizer.plan.json_products import JsonProduct

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARPNESS = 20  # of the softmax over cosines, as sentence encoders are trained with
NEAREST = 3  # inputs that are compared
AT_ONCE = 4  # inputs
TOKENS_APART = 16  # of a text whose every token has logits: all of them would take gigabytes


@dataclass(frozen=True)
class Outputs:
    """What a model makes of inputs: hidden states of each input (tokens, dim), their means, and logits if there are."""

    hidden: list[torch.Tensor]
    means: torch.Tensor  # (inputs, dim)
    logits: torch.Tensor | None  # (inputs or some of their tokens, classes)


@dataclass(frozen=True)
class Quality(JsonProduct):
    """Means over held-out inputs."""

    keys: float  # that a token sees, a mean over heads, with what finding slots costs
    kl: float  # nats: of the classes, or of which other input is alike (softmax of 20 cosines), teacher ‖ student
    agreement: float  # share of the same classes, or of the same nearest inputs
    cosine: float  # of the means of hidden states
    hidden: float  # cosine of the hidden states of all tokens


def read_outputs(model: PreTrainedModel, inputs: Iterable[Inputs]) -> Outputs:
    """Let a model read inputs."""
    hidden, logits = list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        for batch in batches(list(inputs), AT_ONCE):
            out: Any = model(**{name: x.to(model.device) for name, x in batch.items()}, output_hidden_states=True)
            hidden += [*last_hidden(out).cpu()]
            if (scores := getattr(out, "logits", None)) is not None:
                chosen = scores[:, ::TOKENS_APART] if scores.ndim == 3 else scores
                logits.append(chosen.flatten(0, -2).cpu())
    return Outputs(hidden, torch.stack([each.mean(0) for each in hidden]), torch.cat(logits) if logits else None)


def last_hidden(out: Any) -> torch.Tensor:
    """Return the last hidden states: those that a model gives out, or else those before its head."""
    states = getattr(out, "last_hidden_state", None)
    return out.hidden_states[-1] if states is None else states


def compare(teacher: Outputs, student: Outputs, keys: float) -> Quality:
    """Compare what two models make of the same inputs."""
    if teacher.logits is not None and student.logits is not None:
        expected, found = teacher.logits.log_softmax(-1), student.logits.log_softmax(-1)
        agreement = (expected.argmax(-1) == found.argmax(-1)).float().mean()
    else:
        expected, found = alike(teacher.means), alike(student.means)
        count = min(NEAREST, max(1, (expected.shape[-1] - 1) // 2))  # all the others would always agree
        pairs = expected.topk(count).indices[:, :, None] == found.topk(count).indices[:, None]
        agreement = pairs.any(-1).float().mean()
    tokens = zip(teacher.hidden, student.hidden, strict=True)
    return Quality(
        keys,
        kl=float((expected.exp() * (expected - found)).nan_to_num().sum(-1).mean()),
        agreement=float(agreement),
        cosine=float(cosine_similarity(teacher.means, student.means).mean()),
        hidden=float(torch.stack([cosine_similarity(*pair, dim=-1).mean() for pair in tokens]).mean()),
    )


def alike(means: torch.Tensor) -> torch.Tensor:
    """Return how alike each input is to every other, as logarithms of shares; it is not compared with itself."""
    unit = normalize(means, dim=-1)
    own = torch.eye(len(unit), dtype=torch.bool)
    return (SHARPNESS * unit @ unit.T).masked_fill(own, float("-inf")).log_softmax(-1)


@dataclass(frozen=True)
class MergedTokens:
    """A control in the manner of ToMe: all tokens are merged to a number of keys, whose search is not counted."""

    count: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, grid: Any = ()
    ) -> torch.Tensor:
        if key.shape[2] <= self.count:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        owner = slots_of_all.find_slots(normalize(key, dim=-1), self.count, piece=key.shape[2] + 1)
        sums = [torch.zeros_like(x[:, :, : self.count]) for x in (key, value)]
        into = owner[..., None].expand_as(key)
        keys, values = (each.scatter_add(2, into, x) for each, x in zip(sums, (key, value), strict=True))
        counts = torch.zeros_like(keys[..., :1]).scatter_add(2, owner[..., None], torch.ones_like(key[..., :1]))
        shown = counts.log().mT.clamp_min(torch.finfo(counts.dtype).min)
        scores = query * scale @ (keys / counts.clamp_min(1)).mT + shown
        return scores.softmax(-1) @ (values / counts.clamp_min(1))
