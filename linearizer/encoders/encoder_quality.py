"""How close an encoder's student, and controls of as many keys, are to its teacher on held-out texts or pictures.

denoiser_run.py scores denoisers: their kl is for one step, and their hidden states are the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity, normalize

from linearizer.encoders import attention_both_ways
from linearizer.encoders.encoder_inputs import Inputs, batches
from linearizer.evaluate.language import Units
from linearizer.run.results import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARPNESS = 20  # of the softmax over cosines, as sentence encoders are trained with
NEAREST = 5  # inputs that are compared
AT_ONCE = 4  # inputs
TOKENS_APART = 16  # of a text whose every token has logits: all of them would take gigabytes


@dataclass(frozen=True)
class Outputs:
    """A model's outputs for inputs: hidden states (tokens, dim), and logits (tokens or 1, classes) if any."""

    hidden: list[torch.Tensor]
    logits: list[torch.Tensor]

    @property
    def means(self) -> torch.Tensor:  # (inputs, dim)
        return torch.stack([states.mean(0) for states in self.hidden])


@dataclass(frozen=True)
class Quality:
    """How close a model is to the teacher: means over held-out inputs, with their intervals."""

    keys: float  # that a token sees, a mean over heads, including the cost of finding slots
    kl: Estimate  # nats, teacher ‖ student: of the classes, or of which other input is alike (softmax of 20 cosines)
    agreement: Estimate  # share of the same classes, or nearest inputs, or signs of noise
    hidden: Estimate  # cosine of the hidden states of all tokens
    nearest: Estimate | None = None  # share of the same among the five nearest inputs, or fewer if inputs are few
    apart: Estimate | None = None  # kl of the student less this, input by input; None for the student itself


@dataclass(frozen=True)
class Judgement:
    """A student and its controls on the same held-out inputs; intervals are over documents or pictures."""

    text: str  # the source, or a folder of pictures
    tokens: int  # of a text or picture
    inputs: int
    drawn: str  # the unit of the intervals: documents or texts
    count: int  # how many of these there are
    rows: dict[str, Quality]

    @property
    def name(self) -> str:
        return f"{self.inputs} of {self.tokens} tokens, {self.text}"


@dataclass(frozen=True)
class LayerTime:
    """Seconds for the attention of a layer: a student's, and softmax over all tokens (SDPA)."""

    tokens: int
    student: float
    sdpa: float


def read_outputs(model: PreTrainedModel, inputs: Iterable[Inputs]) -> Outputs:
    """Return a model's outputs for inputs."""
    hidden, logits = list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        for batch in batches(list(inputs), AT_ONCE):
            out: Any = model(**{name: x.to(model.device) for name, x in batch.items()}, output_hidden_states=True)
            hidden += [*last_hidden(out).cpu()]
            if (scores := getattr(out, "logits", None)) is not None:
                logits += [*(scores[:, ::TOKENS_APART] if scores.ndim == 3 else scores[:, None]).cpu()]
    return Outputs(hidden, logits)


def last_hidden(out: Any) -> torch.Tensor:
    """Return the last hidden states of a model's output, or else those before its head."""
    states = getattr(out, "last_hidden_state", None)
    return out.hidden_states[-1] if states is None else states


def score(teacher: Outputs, student: Outputs) -> dict[str, torch.Tensor]:
    """Compare two models' outputs for each input, by the fields of Quality: (inputs, 1) each."""
    likeness = [log_similarities(outputs.means) for outputs in (teacher, student)]
    closest = [x.topk(min(NEAREST, max(1, (len(x) - 1) // 2))).indices for x in likeness]
    shared = (closest[0][:, :, None] == closest[1][:, None]).any(-1).double().mean(-1)
    if teacher.logits:
        pairs = [[x.log_softmax(-1) for x in pair] for pair in zip(teacher.logits, student.logits, strict=True)]
    else:
        pairs = [[x[None] for x in pair] for pair in zip(*likeness, strict=True)]
    states = zip(teacher.hidden, student.hidden, strict=True)
    scores = {
        "kl": torch.stack([(a.exp() * (a - b)).nan_to_num().sum(-1).mean() for a, b in pairs]),
        "agreement": torch.stack([(a.argmax(-1) == b.argmax(-1)).double().mean() for a, b in pairs]),
        "nearest": shared,
        "hidden": torch.stack([cosine_similarity(a, b, dim=-1).mean() for a, b in states]),
    }
    return {name: x.double()[:, None] for name, x in scores.items()}


def describe_scores(
    keys: float, scores: Mapping[str, torch.Tensor], student: Mapping[str, torch.Tensor], over: Units
) -> Quality:
    """Reduce the scores of the student, or of a control of it."""
    apart = None if scores is student else over.estimate_difference(student["kl"] - scores["kl"])
    return Quality(keys, **{name: over.estimate(x) for name, x in scores.items()}, apart=apart)


def log_similarities(means: torch.Tensor) -> torch.Tensor:
    """Return the similarity of each input to every other, not to itself, as logarithms of shares."""
    unit = normalize(means, dim=-1)
    is_itself = torch.eye(len(unit), dtype=torch.bool)
    return (SHARPNESS * unit @ unit.T).masked_fill(is_itself, float("-inf")).log_softmax(-1)


@dataclass(frozen=True)
class MergedTokens:
    """A control like ToMe: all tokens are merged to a number of keys; the cost of the search is not counted."""

    count: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, grid: Any = ()
    ) -> torch.Tensor:
        if key.shape[2] <= self.count:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
        unit, piece = normalize(key, dim=-1), key.shape[2] + 1
        heads = [attention_both_ways.find_slots(x[None, None], self.count, piece=piece) for x in unit.flatten(0, 1)]
        owner = torch.cat(heads).view(key.shape[:3])  # one by one: all pairs of all heads would take gigabytes
        sums = [torch.zeros_like(x[:, :, : self.count]) for x in (key, value)]
        into = owner[..., None].expand_as(key)
        keys, values = (total.scatter_add(2, into, x) for total, x in zip(sums, (key, value), strict=True))
        counts = torch.zeros_like(keys[..., :1]).scatter_add(2, owner[..., None], torch.ones_like(key[..., :1]))
        shown = counts.log().mT.clamp_min(torch.finfo(counts.dtype).min)
        scores = query * scale @ (keys / counts.clamp_min(1)).mT + shown
        return scores.softmax(-1) @ (values / counts.clamp_min(1))
