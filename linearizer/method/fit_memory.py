"""Fits to a text of the teacher what a memory weighs, and how much it adds to a mean: no training.

A memory that has learned nothing must do no harm. Where no weight brings a head nearer to its teacher than its window
alone is, the memory begins with next to none.
"""

from __future__ import annotations

import torch

from linearizer.method.samples import LayerSamples
from linearizer.student.layer_student import FeatureGroup
from linearizer.student.matrix_rule import MatrixRule, ScaledRule
from linearizer.student.softmax_parts import Reading
from linearizer.student.state import EMPTY

SHIFTS = [step / 2 for step in range(-20, 9)]  # nats that masses are moved by
MOST_SCALE = 4.0
NEGLIGIBLE = -6.0  # nats: what weighs next to nothing compared with what a row sees exactly
LEAST_GAIN = 0.002  # of a head's error: less is noise

Tensor = torch.Tensor


@torch.no_grad()
def fit_memory(group: FeatureGroup, text: LayerSamples | None) -> None:
    """Set the masses of a group's memory, and the scales of its values; without a text it weighs next to nothing."""
    rule = group.feature_map
    assert isinstance(rule, MatrixRule)
    if text is None or text.keys.shape[-2] <= group.window + group.sinks + 1:
        rule.mass += NEGLIGIBLE
        return
    device = rule.mass.device
    q = text.queries.unflatten(0, (len(text.keys), -1))[group.heads].float().to(device)  # (heads, group, tokens, dim)
    k, v = (x[group.heads].float().to(device) for x in (text.keys, text.values))
    far = slice(group.window + group.sinks, None)  # rows for which some tokens are far
    whole, near = (attend(q, k, v, window, group.sinks) for window in (k.shape[-2], group.window))
    rule.value_scale.fill_(0.0)
    plain = read_with_memory(group, q, k, v)
    rule.value_scale.fill_(1.0)
    full = read_with_memory(group, q, k, v)
    near_mass, exact = near[1][:, :, far], whole[0][:, :, far] - near[0][:, :, far]
    mass = full.bound[0][:, :, far] + (near_mass if full.is_share else 0.0)
    away, more = plain.sum[0][:, :, far] - near[0][:, :, far], (full.sum - plain.sum)[0][:, :, far]

    def fit_scale(shift: float) -> tuple[Tensor, Tensor]:
        """Return each head's error with its masses moved, and the scale of values that makes it the least."""
        share = (mass + shift - near_mass).sigmoid()
        left, added = exact - share * away, share * more
        scale = ((left * added).sum((1, 2, 3)) / added.square().sum((1, 2, 3)).clamp_min(1e-30)).clamp(0, MOST_SCALE)
        return (left - scale[:, None, None, None] * added).square().sum((1, 2, 3)), scale

    errors, scales = (torch.stack(parts) for parts in zip(*map(fit_scale, SHIFTS), strict=True))
    best = errors.argmin(0)
    helps = errors.amin(0) < (1 - LEAST_GAIN) * exact.square().sum((1, 2, 3))
    nothing = NEGLIGIBLE - (mass - near_mass).amax((1, 2, 3))
    rule.mass += torch.where(helps, torch.tensor(SHIFTS, device=device)[best], nothing)
    rule.value_scale.copy_(torch.where(helps, scales.gather(0, best[None])[0], 1.0))


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int) -> tuple[Tensor, Tensor]:
    """Attend to windows and sinks, head by head: outputs and the logarithms of their masses."""
    place = torch.arange(k.shape[-2], device=k.device)
    seen = (place <= place[:, None]) & ((place[:, None] - place < window) | (place < sinks))
    outputs, masses = [], []
    for own_q, own_k, own_v in zip(q, k, v, strict=True):
        logits = (own_q @ own_k.mT).masked_fill(~seen, EMPTY)
        outputs.append(logits.softmax(-1) @ own_v)
        masses.append(logits.logsumexp(-1, keepdim=True))
    return torch.stack(outputs), torch.stack(masses)


def read_with_memory(group: FeatureGroup, q: Tensor, k: Tensor, v: Tensor) -> Reading:
    """Let a memory read a text whose tokens leave the window one after the other: what each row sees of it."""
    memory, window, place = group.memory(1.0), group.window, torch.arange(k.shape[-2], device=k.device)[None]
    assert isinstance(memory, ScaledRule)
    left_k, left_v = (x.roll(window, -2)[None] for x in (k, v))
    state = memory.empty(left_k, left_v, window, group.sinks)
    return memory.chunk(state, q[None], left_k, left_v, place >= window + group.sinks, place)
