"""A student with one of its branches taken away, or read in another way: what each is worth.

Each is so for as long as a context lasts:
  without_far, without_window   what the other branch is worth alone
  with_gaussian_mass            far values as they are, with the mass that far keys have if they are Gaussian
  with_readout                  weights of exact tokens and slots that are no softmax: sigmoid(logit - log n), which do
                                not sum to one, or a power of softplus(logit), divided by their sum
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import softplus

from linearizer.student import features_torch, slots_torch
from linearizer.student.features_torch import ScaledMap
from linearizer.student.layer_student import FeatureGroup, SlotGroup
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.student.slots_merging import Slots
from linearizer.student.slots_torch import MergeRequest, attend_rows
from linearizer.student.softmax_parts import Reading, multiply_by_head
from linearizer.student.state import EMPTY, FeatureState

Tensor = torch.Tensor
READOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of logits, and of the logarithm of how many are seen
    "sigmoid": lambda logits, number: (logits - number).sigmoid(),
    "softplus": lambda logits, number: softplus(logits),
    "softplus⁴": lambda logits, number: softplus(logits) ** 4,
}


exchanged = patch.object  # (owner, name, other)


@contextmanager
def without_far(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a window hold nothing else."""
    with ExitStack() as stack:
        for layer in student.students():
            for index, group in enumerate(layer.groups):
                slots = isinstance(group, SlotGroup)
                if slots or (isinstance(group, FeatureGroup) and group.features and group.window):
                    key_dim = group.merger.metric.shape[-1] if slots else 1
                    plain = FeatureGroup(group.heads, group.window, 0, group.sinks, key_dim, "prf", group.bits)
                    stack.enter_context(patch.dict(layer.groups._modules, {str(index): plain}))
        yield


@contextmanager
def without_window(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a far field see nothing exactly but sinks, and with slots the newest token."""
    with ExitStack() as stack:
        for group in (group for layer in student.students() for group in layer.groups):
            if isinstance(group, SlotGroup):
                stack.enter_context(patch.dict(group.__dict__, {"window": 1, "block": 1}))
            elif isinstance(group, FeatureGroup) and group.features:
                stack.enter_context(patch.dict(group.__dict__, {"window": 0}))
        yield


def without_kernels() -> patch.dict:
    """Let PyTorch do all work: kernels would pass by what is exchanged in it."""
    return patch.dict(os.environ, {"LINEARIZER_KERNELS": "0"})


@contextmanager
def with_readout(kind: str) -> Iterator[None]:
    """While this lasts, let exact tokens and slots be weighed by another function of their logits than a softmax."""

    def attend_seen(q: Tensor, k: Tensor, v: Tensor, late: Tensor, level: Tensor | None = None) -> Tensor:
        logits = multiply_by_head(q, k.to(q.dtype).mT)
        log_number = torch.where(late <= 0, 0.0, EMPTY).to(q.dtype)[:, None, None].expand(*logits.shape[:-1], -1)
        if level is not None:  # a slot is as many tokens as its weight
            more = level[:, :, None, None].expand(*logits.shape[:-1], -1)
            log_number = torch.cat([log_number, more.clamp_min(EMPTY)], -1)
        weights = READOUTS[kind](logits, log_number.logsumexp(-1, keepdim=True)) * log_number.exp()
        if kind != "sigmoid":
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
        return multiply_by_head(weights, v.to(q.dtype))

    with (
        without_kernels(),
        exchanged(slots_torch, "attend_seen", attend_seen),
        exchanged(features_torch, "attend_seen", attend_seen),
    ):
        yield


@contextmanager
def with_gaussian_mass(student: LinearizedForCausalLM, texts: Tensor) -> Iterator[None]:
    """While this lasts, let slots and features weigh what Gaussian keys do; what that is off by is fitted to texts."""
    mass, chunk = GaussianMass(), ScaledMap.chunk

    def read(memory: ScaledMap, state: FeatureState, q: Tensor, k: Tensor, v: Tensor, comes: Tensor, place: Any) -> Any:
        return mass.of_features(chunk(memory, state, q, k, v, comes, place), memory, state, q, k, comes)

    own = exchanged(slots_torch, "attend_rows", mass.of_slots), exchanged(ScaledMap, "chunk", read)
    with without_kernels(), own[0], own[1], torch.no_grad():
        student(texts, use_cache=False)
        mass.fits = False
        yield


@dataclass
class GaussianMass:
    """log n + q·mean + ½ Σ variance q² over far keys, and what it is off by: the median of each head, of some texts."""

    fits: bool = True
    off: dict[int, Tensor] = field(default_factory=dict)  # of the heads of each group

    def mass(self, q: Tensor, keys: Tensor, far: Tensor, own: Tensor, group: int) -> Tensor:
        """Return the mass for rows q (batch, heads, group, rows, dim) of the keys that are far from each of them.

        keys (batch, heads, keys, dim), far (batch, rows, keys); `own` (…, rows, 1) is where nothing is far.
        """
        some, far = far.any(-1)[:, None, None, :, None], far[:, None].to(q.dtype)
        number = far.sum(-1, keepdim=True).clamp_min(1)
        mean, square = far @ keys / number, far @ keys.square() / number
        variance = (square - mean.square()).clamp_min(0)
        seen = q * mean[:, :, None] + q.square() * variance[:, :, None] / 2
        mass = number.log()[:, :, None] + seen.sum(-1, keepdim=True)
        if self.fits:
            exact = (multiply_by_head(q, keys.mT) + (far - 1)[:, :, None] * -EMPTY).logsumexp(-1, keepdim=True)
            off = torch.where(some, exact - mass, torch.nan).transpose(0, 1).flatten(1)
            self.off[group] = off.nanmedian(-1).values.nan_to_num()
        return torch.where(some, mass + self.off[group][:, None, None, None], own)

    def of_slots(self, request: MergeRequest, held: Slots) -> Tensor:
        """Attend with the rows of some periods, as `attend_rows` does."""
        columns, periods = request.columns, request.place.shape[1]
        if request.state.count.any():
            raise ValueError("the whole text is read at once: what was merged before is known by its slots alone")
        place = columns.place(0, columns.k.shape[-2])[:, None, None]
        merged = request.merged[..., None, None].expand(*request.place.shape, 1)
        far = (place < merged) & (place >= request.state.sink_k.shape[-2])
        keys = columns.k.to(request.q.dtype).repeat_interleave(periods, 0)

        def attend_seen(q: Tensor, k: Tensor, v: Tensor, late: Tensor, level: Tensor) -> Tensor:
            logits, tokens = multiply_by_head(q, k.to(q.dtype).mT), late.shape[-1]
            near = logits[..., :tokens] + torch.where(late <= 0, 0.0, EMPTY).to(q.dtype)[:, None, None]
            slots = logits[..., tokens:] + level[:, :, None, None].clamp_min(EMPTY)
            own = slots.logsumexp(-1, keepdim=True)
            moved = self.mass(q, keys.to(q.dtype), far.flatten(0, 1), own, request.merging.metric.data_ptr()) - own
            return multiply_by_head(torch.cat([near, slots + moved], -1).softmax(-1), v.to(q.dtype))

        with exchanged(slots_torch, "attend_seen", attend_seen):
            return attend_rows(request, held)

    def of_features(
        self, reading: Reading, memory: ScaledMap, state: FeatureState, q: Tensor, k: Tensor, comes: Tensor
    ) -> Reading:
        """Change the mass of a reading of features; all keys that came before are kept beside the state."""
        before = getattr(state, "keys_before", (k[:, :, :0], comes[:, :0]))
        keys, came = torch.cat([before[0], k], 2), torch.cat([before[1], comes], 1)
        state.keys_before = (keys, came)  # type: ignore[attr-defined]
        rows, known = q.shape[-2], before[1].shape[1]
        earlier = torch.ones(rows, known + rows, dtype=torch.bool).tril(known) & came[:, None]
        group = id(memory.feature_map)
        mass = self.mass(q, keys, earlier, torch.full_like(reading.lse, EMPTY), group)
        mean = reading.sum / reading.total.clamp_min(torch.finfo(q.dtype).tiny)
        return Reading(mass, torch.ones_like(mass), mean)
