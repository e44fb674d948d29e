"""The one place that chooses between Triton's kernels and PyTorch, for texts and single tokens, features and slots.

kernel_serves_…  tells whether a kernel may do the work: there is one for such tensors, and its trial found it right
                 (kernel_trial.py)
…_by_kernel      does the work, as its counterpart in features_torch.py or slots_torch.py does
linear_attention: what callers use for heads that hold the same window, sinks and features, or another memory
slot_attention: the same for heads with slots
attend_token_of_layer: heads of a layer with windows alone share one launch, heads with slots another

A token of heads with features is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .features_torch import CHUNK, ScaledMap, attend_chunks, attend_text_with_features, attend_token_with_features
from .kernel_token_table import TokenGroup, get_table
from .kernel_trial import TrialSizes, TrialText, kernels_accept, passes_trial
from .packed_state import Turns, as_sink, pack_state
from .rounding import FEWER, round_vectors, unpack_vectors
from .slots_merging import MAX_MERGED_ROWS, Merging
from .slots_torch import Piece, attend_periods, attend_text_with_slots, attend_token_with_slots
from .state import ABSENT, Columns, ExactState, FeatureState, SlotState, as_slice, working_dtype

try:
    from .kernel_text_gradients import FeatureAttention
    from .kernel_text_slots import run_slot_merging, run_text_slots
    from .kernel_token_slots import run_token_slots
    from .kernel_token_windows import run_token_windows
except ImportError as missing:
    if missing.name != "triton":
        raise
    FeatureAttention = None  # type: ignore[assignment, misc]
    run_text_slots = run_slot_merging = run_token_windows = run_token_slots = None  # type: ignore[assignment]

TRIAL_WINDOW = 16
TRIAL_ENDS = (32, 192)  # of the calls for a text: the second takes a state and has two segments
TRIAL_SLOTS, TRIAL_BLOCK, TRIAL_GAIN, TRIAL_QUERY = 28, 8, 0.25, 0.125  # their window is as large as a block

Tensor = torch.Tensor


def linear_attention(q: Tensor, k: Tensor, v: Tensor, far: Any, window: int, real: Tensor | None, state: Any) -> Tensor:
    """Attend and update the state, by kernels where they serve: window, sinks and features."""
    if q.shape[-2] == 1 and real is None:
        held = TokenGroup(list(range(k.shape[1])), state, window)
        if far is None and kernel_serves_token(q, k, v, held):
            return attend_token_by_kernel(q, k, v, held)
        return attend_token_with_features(q, k, v, far, window, state)
    fused = (far is None or isinstance(far, ScaledMap)) and kernel_serves_text_features(q, k, v, state)
    attend = attend_chunks_by_kernel if fused else attend_chunks
    return attend_text_with_features(q, k, v, far, window, real, state, attend=attend)


def slot_attention(q: Tensor, k: Tensor, v: Tensor, merging: Merging, real: Tensor | None, state: SlotState) -> Tensor:
    """Attend and update the state, by kernels where they serve; q is multiplied by the scale of the scores."""
    if q.shape[-2] == 1 and real is None:
        held = TokenGroup(list(range(k.shape[1])), state, merging.window, merging)
        if kernel_serves_token(q, k, v, held):
            return attend_token_by_kernel(q, k, v, held)
        return attend_token_with_slots(q, k, v, merging, state)
    fused = kernel_serves_text_slots(q, k, v, merging, state)
    return attend_text_with_slots(q, k, v, merging, real, state, attend_periods_by_kernel if fused else attend_periods)


def kernel_serves_text_features(q: Tensor, k: Tensor, v: Tensor, state: FeatureState) -> bool:
    """Tell whether kernels may attend with a text to features, with gradients if they are taken."""
    if FeatureAttention is None or not kernels_accept(q, k, v):
        return False
    sizes, gradients = sizes_of(q, v, state), torch.is_grad_enabled()

    def compute(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        text = TrialText.of(q, sizes, TRIAL_ENDS[-1], dtype)
        inputs = [x.requires_grad_(gradients) for x in (text.q, text.k, text.v)]
        state = FeatureState.empty(text.k, text.v, TRIAL_WINDOW, sizes.sinks, sizes.features)
        attend = attend_chunks_by_kernel if by_kernels else attend_chunks
        features = text.features if sizes.features else None
        out = []
        for start, stop in ((0, TRIAL_ENDS[0]), TRIAL_ENDS):
            part = text.piece(start, stop)
            out.append(attend_text_with_features(*part, features, TRIAL_WINDOW, None, state, attend=attend).to(dtype))
        results = [torch.cat(out, -2), state.level, state.mean]
        if gradients:
            results += torch.autograd.grad([x.square().sum() for x in results], inputs)
        return results

    return passes_trial("attention and its gradients" if gradients else "attention", q, sizes, compute)


def attend_chunks_by_kernel(
    q: Tensor, columns: Columns, features: ScaledMap | None, state: FeatureState, chunk: int = CHUNK
) -> Tensor:
    """Attend with a text to features, all chunks at once."""
    u = w = None
    if features is not None:
        tokens, work, sinks = q.shape[-2], working_dtype(q), state.sink_k.shape[-2]
        leaving = columns.filled(0, tokens) & (columns.place(0, tokens) >= sinks)
        u, w = features.queries(q.to(work)), features.keys(columns.k[:, :, :tokens].to(work))
        u, w = u.to(work), w.to(work).masked_fill(~leaving[:, None, :, None], ABSENT)  # autocast multiplies in bf16
    kept = [state.sink_k, state.sink_v, columns.first, columns.empty, u, w, state.level, state.mean]
    inputs = [None if x is None else x.contiguous() for x in (q, columns.k, columns.v, *kept)]
    out, state.level, state.mean = FeatureAttention.apply(columns.window, *inputs)
    return out


def kernel_serves_text_slots(q: Tensor, k: Tensor, v: Tensor, merging: Merging, state: SlotState) -> bool:
    """Tell whether kernels may attend with a text to slots: they give no gradients."""
    slots, block = state.slot_k.shape[2], merging.block
    if (
        run_slot_merging is None
        or torch.is_grad_enabled()
        or slots + block > MAX_MERGED_ROWS
        or merging.bits in FEWER
        or not kernels_accept(q, k, v, state.slot_k)
    ):
        return False
    sizes = sizes_of(q, v, state)

    def compute(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        text = TrialText.of(q, sizes, sizes.sinks + block + slots + 4 * block, dtype)
        metric = torch.eye(sizes.key_dim, device=q.device, dtype=dtype).expand(2, -1, -1)
        own = trial_merging(metric, block, bits=merging.bits)
        state = SlotState.empty(text.k, text.v, block, sizes.sinks, slots)
        attend = attend_periods_by_kernel if by_kernels else attend_periods
        k, v = (round_vectors(x) if merging.bits == 8 else x for x in (text.k, text.v))  # as a layer gives them
        out = attend_text_with_slots(text.q, k, v, own, None, state, attend)
        return [out.to(dtype), state.slot_k, state.slot_v, state.weight]

    with torch.no_grad():
        return passes_trial("slots", q, (*sizes, slots, block, merging.bits), compute)


def trial_merging(metric: Tensor, block: int, root: float = 1.0, bits: int = 16) -> Merging:
    """Return how heads merge on which a kernel is tried; their window is as large as a block."""
    query = metric.new_full((len(metric), metric.shape[-1] + 1), TRIAL_QUERY) / root
    return Merging(metric, torch.full_like(metric[:, 0, 0], TRIAL_GAIN), query, block, block, root, bits)


def attend_periods_by_kernel(piece: Piece) -> Tensor:
    """Merge the blocks of some periods, then attend with the rows of all of them."""
    columns, state, merging = piece.columns, piece.state, piece.merging
    k, v = columns.k.contiguous(), columns.v.contiguous()
    before = [state.slot_k, state.slot_v, state.weight, state.spread]
    blocks = piece.leaving.index, piece.leaving.present
    scaled = merging.scaled
    metric, mean_query = scaled.metric.contiguous(), scaled.mean_query.contiguous()
    after = run_slot_merging(k, v, metric, mean_query, *blocks, before, merging.bits)
    state.slot_k, state.slot_v, state.weight, state.spread = (
        x[:, -1].clone() for x in after
    )  # not all periods with it
    sinks = state.sink_k.contiguous(), state.sink_v.contiguous()
    near = piece.place.contiguous(), piece.merged.clamp_min(0), columns.first, columns.empty
    return run_text_slots(piece.q.contiguous(), k, v, *sinks, after, merging.gain, *near, columns.window)


def kernel_serves_token(q: Tensor, k: Tensor, v: Tensor, held: TokenGroup) -> bool:
    """Tell whether a kernel may attend with a token, and change the state in place."""
    if run_token_slots is None or torch.is_grad_enabled() or not kernels_accept(q, k, v, held.state.sink_k):
        return False
    return can_merge(held) and token_is_right(q, v, held)


def can_merge(held: TokenGroup) -> bool:
    """Tell whether a block, if there is one, fits into the window, and slots and block into one program."""
    (window, slots, block), merging = held.sizes(), held.merging
    if merging is None:
        return True
    if merging.bits != held.bits:  # numbers that are rounded and not kept as bytes
        return False
    whole = all(x.is_contiguous() for x in (merging.metric, merging.gain, merging.mean_query))
    return whole and 0 < block <= window and slots + block <= MAX_MERGED_ROWS


def token_is_right(q: Tensor, v: Tensor, held: TokenGroup, scale: float = 1.0) -> bool:
    """Try the kernel for such heads and queries; the size of the window and the number of slots do not change it."""
    sizes, bits, merging = sizes_of(q, v, held.state), held.bits, held.merging

    def compute(by_kernel: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        tokens = sizes.sinks + (TRIAL_WINDOW + 8 if merging is None else 3 * TRIAL_BLOCK + TRIAL_SLOTS)
        text = TrialText.of(q, sizes, tokens, dtype)
        text.q = (text.q / scale).to(q.dtype).to(dtype)
        own, out = trial_group(text, sizes.sinks, held), []
        if by_kernel and bits == 8:
            own = replace(own, state=pack_state(own.state))
        for t in range(tokens):
            token_q, k, v = text.piece(t, t + 1)
            if by_kernel:
                out.append(attend_token_by_kernel(token_q, k, v, own, scale))
            else:
                k, v = (x if bits == 16 else as_sink(x) if t < sizes.sinks else round_vectors(x) for x in (k, v))
                out.append(attend_token(token_q * scale, k, v, own))
        result = [torch.cat(out, -2).to(dtype)]
        if merging is not None:
            kept = own.state.slot_k, own.state.slot_v
            result += [*(unpack_vectors(x, dtype) if x.dtype == torch.int8 else x for x in kept), own.state.weight]
        return result

    root, family = (1.0, "single tokens") if merging is None else (merging.root, "single tokens and slots")
    with torch.no_grad():
        return passes_trial(family, q, (*sizes, scale, root, bits), compute)


def trial_group(text: TrialText, sinks: int, held: TokenGroup) -> TokenGroup:
    """Give two heads that have read nothing, for the trial of a kernel for heads such as these."""
    if held.merging is None:
        state = FeatureState.empty(text.k, text.v, TRIAL_WINDOW, sinks, 0)
        return TokenGroup([0, 1], state, TRIAL_WINDOW)
    root, like = held.merging.root, held.merging.metric
    metric = torch.eye(text.k.shape[-1], device=text.k.device, dtype=like.dtype).repeat(2, 1, 1) / root
    slots = SlotState.empty(text.k, text.v, TRIAL_BLOCK, sinks, TRIAL_SLOTS)
    return TokenGroup([0, 1], slots, TRIAL_BLOCK, trial_merging(metric, TRIAL_BLOCK, root, held.bits))


def attend_token(q: Tensor, k: Tensor, v: Tensor, held: TokenGroup) -> Tensor:
    """Attend with one token to a window, alone or with slots, in PyTorch."""
    if held.merging is None:
        return attend_token_with_features(q, k, v, None, held.window, held.state)
    return attend_token_with_slots(q, k, v, held.merging, held.state)


@torch.no_grad()
def attend_token_by_kernel(q: Tensor, k: Tensor, v: Tensor, held: TokenGroup, scale: float = 1.0) -> Tensor:
    """Attend with one token; nothing waits for the device, and no tensor of the state is exchanged."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    launch_token(q, k, v, out, [held], scale)
    return out


def attend_token_of_layer(
    groups: Sequence[Any], memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None,
    out: Tensor, turns: Turns | None = None,
) -> list[int]:  # fmt: skip
    """Attend with a token, one launch for all heads of a kind, into `out`; return the indices of the groups served.

    q (batch, heads, group, 1, dim), k, v and out are those of the whole layer, and their heads' states in `memory`.
    Heads that turn what they take are given it turned.
    """
    if run_token_slots is None or real is not None or q.shape[-2] > 1 or memory is None or len(memory) < len(groups):
        return []
    if torch.is_grad_enabled() or not kernels_accept(q, k, v):
        return []
    kinds: dict[tuple[int, bool, bool], dict[int, TokenGroup]] = {}
    for index, (group, state) in enumerate(zip(groups, memory, strict=False)):
        held = group.token_group(scale, state)
        if held is None or held.state.window_k.dtype not in (k.dtype, torch.int8) or not can_merge(held):
            continue
        if held.state.sink_k.device == k.device:  # PyTorch refuses another; to a kernel it would be addresses
            kinds.setdefault((held.bits, held.merging is None, group.turns), {})[index] = held
    done: list[int] = []
    for (_, _, turned), some in kinds.items():
        states, given = list(some.values()), (q, k, v, out)
        if turned and turns is not None:
            asks, keys, values = turns(turns.turn, q, k, v, scale**0.5)
            given = asks, keys, values, torch.empty(out.shape, dtype=values.dtype, device=out.device)
        if not token_is_right(given[0], v, states[0], scale):
            continue
        launch_token(*given, states, scale)
        if turned and turns is not None:
            for index in some:
                heads = as_slice(groups[index].heads)
                out[:, heads] = turns(turns.turn_back, given[3][:, heads], heads).to(out.dtype)
        done += some
    return done


@torch.compiler.disable  # which would not see that memory changes behind addresses
def launch_token(q: Tensor, k: Tensor, v: Tensor, out: Tensor, groups: list[TokenGroup], scale: float) -> None:
    """Attend with heads of a layer in one launch; q (batch, heads, group, 1, dim) is that of the whole layer."""
    state, merging = groups[0].state, groups[0].merging
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    table = get_table(groups)
    if merging is None:
        run_token_windows(q, k, v, out, table, state, scale)
        return
    room = max(slots + block for _, slots, block in (held.sizes() for held in groups))
    run_token_slots(q, k, v, out, table, state, room, merging.metric.dtype, merging.root, scale)


def sizes_of(q: Tensor, v: Tensor, state: ExactState) -> TrialSizes:
    features = state.level.shape[-1] if hasattr(state, "level") else 0
    return TrialSizes(q.shape[2], q.shape[-1], v.shape[-1], state.sink_k.shape[-2], features)
