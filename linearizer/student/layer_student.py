"""The student of one attention layer: its KV heads, in groups of the same kind.

A KV head has one of four kinds of state: an exact window; a window and features; a window and slots, into which older
tokens are merged; or all tokens, for softmax. Heads of the same kind and size form a group and are computed together.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from .feature_maps import FEATURE_MAPS, FeatureMap
from .features_torch import ScaledMap
from .kernel_dispatch import linear_attention, may_run_in_triton
from .kernel_in_c import may_run_in_c
from .kernel_layer_in_c import ServedHeads, held_layer, read_in_c
from .kernel_trial import kernels_accept, passes_trial
from .matrix_rule import MatrixRule, ScaledRule
from .packed_state import Turns, as_sink, first_columns, first_tokens, pack_state, round_tokens, unpack_state
from .rounding import FEWER, can_turn, rotate, round_vectors
from .slots_merging import Merger, Merging
from .slots_torch import read_together
from .state import ExactState, FeatureState, SlotState, SoftmaxState, Text, as_index, is_compiled
from .state_pool import PoolLayout, attend_in_pool, pool_for_token
from .token_buffer import WindowGroup, attend_token_in_buffer
from .update_rules import UPDATE_RULES

Tensor = torch.Tensor
SOFTMAX = "softmax"
FAMILIES = {"in_c": "heads in C", "in_triton": "texts with windows and slots"}  # of kernels
TOKENS = "tokens with windows and slots"  # Triton's: slow to compile, and not needed for a text
TRIAL_HELD = ([6, 0, 5, 3], [7, 0, 0, 0])  # kinds of heads for a kernel's trial, with each number of bits
TRIAL_ENDS, TRIAL_SCALE, TRIAL_QUERY = (17, 18, 19, 30), 0.5, 0.125  # of its calls: a text, two tokens, a text


def generator_at(seed: int, *place: int) -> torch.Generator:
    """Return a generator for one layer or head of a model, independent of what is drawn for the others."""
    for number in place:
        seed = (seed * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


class HeadGroup(nn.Module):
    """KV heads of one layer with the same kind of state; `heads` are their indices in the layer."""

    def __init__(self, heads: list[int], window: int, sinks: int, bits: int, turns: bool) -> None:
        super().__init__()
        self.heads, self.window, self.sinks, self.bits, self.turns = heads, window, sinks, bits, turns

    def merging(self, scale: float) -> Merging | None:
        return None

    def kind(self) -> tuple[Any, ...]:
        """Return the group and its sizes: groups of equal kind have states of the same sizes."""
        return self, self.window, self.bits

    def window_group(self, scale: float, state: Any) -> WindowGroup | None:
        """Return this group for reading all heads of a layer at once; None if it has more than windows and slots."""
        return WindowGroup(self.heads, state, self.merging(scale), self.bits)


class FeatureGroup(HeadGroup):
    """KV heads with a window, and with features or a memory if `features` is not 0."""

    def __init__(
        self, heads: list[int], window: int, features: int, sinks: int, key_dim: int, feature_map: str, bits: int = 16,
        value_dim: int = 0,
    ) -> None:  # fmt: skip
        value_dim = value_dim or key_dim
        turns = can_turn(bits, key_dim, value_dim) and not features  # features need keys that are not turned
        super().__init__(heads, window, sinks, bits, turns)
        self.features, self.feature_map = features, None  # type: int, FeatureMap | MatrixRule | None
        if features and (rule := UPDATE_RULES.get(feature_map)):
            self.feature_map = MatrixRule(len(heads), key_dim, value_dim, features, rule)
        elif features:
            self.feature_map = FEATURE_MAPS[feature_map](len(heads), key_dim, features)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, state: ExactState | None
    ) -> tuple[Tensor, ExactState]:
        state = self.empty(k, v, self.window, scale) if state is None else state
        return linear_attention(q * scale, k, v, self.memory(scale), self.window, real, state), state

    def memory(self, scale: float) -> ScaledMap | ScaledRule | None:
        """Return the far field for queries multiplied by the scale of the scores."""
        if isinstance(self.feature_map, MatrixRule):
            return ScaledRule(self.feature_map, scale**0.5)
        return None if self.feature_map is None else ScaledMap(self.feature_map, scale)

    def empty(self, k: Tensor, v: Tensor, window: int, scale: float) -> ExactState:
        memory = self.memory(scale)
        if memory is None:
            return FeatureState.empty(k, v, window, self.sinks, 0)
        return memory.empty(k, v, window, self.sinks)

    def window_group(self, scale: float, state: Any) -> WindowGroup | None:
        return super().window_group(scale, state) if self.feature_map is None else None


class SlotGroup(HeadGroup):
    """KV heads that merge tokens into slots when these leave the window."""

    def __init__(
        self, heads: list[int], window: int, slots: int, block: int, sinks: int, key_dim: int, bits: int, value_dim: int
    ) -> None:
        if not 0 < block <= window:
            raise ValueError(
                f"KV heads {heads} merge {block} tokens at once and have a window of {window}: set a window, and merge "
                "at most its tokens"
            )
        super().__init__(heads, window, sinks, bits, can_turn(bits, key_dim, value_dim))
        self.slots, self.block, self.merger = slots, block, Merger(len(heads), key_dim)

    def kind(self) -> tuple[Any, ...]:
        return *super().kind(), self.slots, self.block

    def merging(self, scale: float) -> Merging:
        metric, gain, mean_query = self.merger()
        root = 1.0 if self.turns else scale**0.5  # turned keys are multiplied by it
        return Merging(metric, gain, mean_query, self.window, self.block, root, self.bits)


class SoftmaxGroup(HeadGroup):
    """KV heads that keep their whole cache, for softmax."""

    def __init__(self, heads: list[int], bits: int, sinks: int, key_dim: int, value_dim: int) -> None:
        exact_sinks = sinks if bits < 16 else 0  # stored apart from the other tokens
        super().__init__(heads, 0, exact_sinks, bits, can_turn(bits, key_dim, value_dim))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, state: SoftmaxState | None
    ) -> tuple[Tensor, SoftmaxState]:
        tokens, padded = q.shape[-2], real is not None or (state is not None and not state.real.all())
        real = torch.ones(k.shape[0], tokens, dtype=torch.bool, device=k.device) if real is None else real
        if state is not None:
            k, v = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
            real = torch.cat([state.real, real], -1)
        mask = None
        if padded or (state is not None and tokens > 1):
            causal = torch.ones(tokens, k.shape[-2], dtype=torch.bool, device=k.device).tril(k.shape[-2] - tokens)
            mask = (causal & real[:, None])[:, None]
        causal_alone = mask is None and bool(tokens > 1)
        out = scaled_dot_product_attention(
            q.flatten(1, 2), k, v, attn_mask=mask, is_causal=causal_alone, scale=scale, enable_gqa=True
        )
        return out.unflatten(1, q.shape[1:3]), SoftmaxState(k, v, real, *first_columns(k, v, real, self.sinks))

    def window_group(self, scale: float, state: Any) -> WindowGroup | None:
        return None


class LayerStudent(nn.Module):
    """Attention of one layer; `head_kinds` describes the state of every KV head.

    It is [window, features], [window, 0, slots, block] or "softmax"; with fewer than 16 bits a number, 8 for example,
    [window, features, slots, block, 8] or "softmax 8"; with rows of a memory in place of features, its name last.
    """

    def __init__(self, head_kinds: list, sinks: int, key_dim: int, feature_map: str, value_dim: int = 0) -> None:
        super().__init__()
        kinds: dict[tuple[Any, ...] | str, list[int]] = {}
        for head, kind in enumerate(head_kinds):
            kinds.setdefault(kind if isinstance(kind, str) else tuple(kind), []).append(head)
        for kind, heads in kinds.items():
            if not isinstance(kind, str) and not any(kind[:3]) and not sinks:
                raise ValueError(f"KV heads {heads} hold nothing: set a window, features, sinks or softmax")

        def group(kind: tuple[Any, ...] | str, heads: list[int]) -> HeadGroup:
            if isinstance(kind, str):
                return SoftmaxGroup(heads, int(kind.removeprefix(SOFTMAX) or 16), sinks, key_dim, value_dim)
            usual: list[Any] = [0, 0, 0, 0, 16, ""]
            window, features, slots, block, bits, memory = [*kind, *usual[len(kind) :]]
            if slots:
                return SlotGroup(heads, window, slots, block, sinks, key_dim, bits, value_dim)
            return FeatureGroup(heads, window, features, sinks, key_dim, memory or feature_map, bits, value_dim)

        value_dim = value_dim or key_dim
        self.kv_heads, self.sinks = len(head_kinds), sinks
        self.groups = nn.ModuleList(group(kind, heads) for kind, heads in kinds.items())
        self.kinds_of_bits = sorted({int(each.bits) for each in self.groups})  # type: ignore[arg-type]
        self.turns = Turns(len(head_kinds), key_dim, value_dim) if any(each.turns for each in self.groups) else None
        self.exact_values = False  # leave values of any size unrounded: to measure attention weights, without memory
        self.keeps_bytes = True  # pack numbers of few bits; graphs for other runtimes keep the rounded numbers
        self.served_in_c: ServedHeads | None = None  # what the kernel in C read last
        self.pool_layout: PoolLayout | None = None  # of the last pool of states for Triton
        self.in_c: bool | None = None  # whether the kernel in C reads; None: if its trial succeeds
        self.in_triton: bool | None = None  # the same for Triton's kernels
        self.found_right: set[tuple] = set()  # kernels, types and sizes with a successful trial

    def reset(self, generator: torch.Generator) -> None:
        """Draw new features."""
        for module in self.modules():
            if isinstance(module, (FeatureMap, MatrixRule, Merger, Turns)):
                module.reset(generator)
        for group in self.groups:
            if isinstance(group, SlotGroup):
                for place, metric in enumerate(group.merger.metric):
                    self.set_merger(group, place, metric.clone(), metric.new_zeros(metric.shape[-1] + 1))

    @torch.no_grad()
    def set_merger(self, group: SlotGroup, place: int, metric: Tensor, mean_query: Tensor) -> None:
        """Set the metric and the mean query, for keys multiplied by `root`, of a head by its place in its group."""
        if self.turns is not None and group.turns:
            head = group.heads[place]
            around = mean_query[-1:].to(metric) - mean_query[:-1].to(metric) @ self.turns.key_middle[head].to(metric)
            metric, query = (self.turns.turn_metric(x, head) for x in (metric, mean_query[:-1]))
            mean_query = torch.cat([query, around.to(query)])
        group.merger.metric[place] = metric.to(group.merger.metric)
        group.merger.mean_query[place] = mean_query.to(group.merger.mean_query)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, real: Tensor | None, memory: list | None
    ) -> Tensor:
        """Attend and update `memory`; autocast changes only the type of the inputs."""
        device = query.device.type
        attend = self.attend_uncompiled if self.breaks_graph(query, key, real, memory) else self.attend
        if device == "meta" or not torch.is_autocast_enabled(device):
            return attend(query, key, value, scale, real, memory)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return attend(query.to(dtype), key.to(dtype), value.to(dtype), scale, real, memory)

    def breaks_graph(self, q: Tensor, k: Tensor, real: Tensor | None, memory: list | None) -> bool:
        """Whether a compiled model leaves attention uncompiled, since it would read values, which breaks graphs.

        So do texts, and slots that no kernel reads; where tokens may be padding, so do all heads that no kernel reads.
        """
        if not torch.compiler.is_dynamo_compiling() or q.shape[-2] > 1:
            return torch.compiler.is_dynamo_compiling()
        plans = (held_layer(memory, k), pool_for_token(memory, k) if real is None else None) if is_compiled() else ()
        served = [index for plan in plans if plan is not None for index in plan.windows]
        look = SlotGroup if real is None else HeadGroup
        return any(isinstance(group, look) and index not in served for index, group in enumerate(self.groups))

    @torch.compiler.disable
    def attend_uncompiled(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, real: Tensor | None, memory: list | None
    ) -> Tensor:
        real = None if real is not None and real.all() else real
        return self.attend(query, key, value, scale, real, memory)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, real: Tensor | None, memory: list | None
    ) -> Tensor:
        """Attend and update `memory`, a list with the state of every group.

        The kernel in C serves many groups at once. In PyTorch the windows and slots of all heads read a token in a few
        operations, heads with slots read a text together, and other groups attend one by one.
        """
        batch, count, tokens, dim = query.shape
        group_size = count // self.kv_heads
        query = query.view(batch, self.kv_heads, group_size, tokens, dim)
        # the output lies in memory token by token, as the layer needs it
        out = value.new_empty(batch, tokens, self.kv_heads, group_size, value.shape[-1]).permute(0, 2, 3, 1, 4)
        inputs, groups = (query, key, value, scale, real, out), cast(Sequence[HeadGroup], self.groups)
        done: list[int] = []
        if is_compiled() or self.reads_in_c(query, key, value):
            done = read_in_c(self, memory, *inputs)
        if len(done) == len(groups):
            return out.flatten(1, 2)
        in_triton = len(done) < len(groups) and self.reads_in_triton(query, key, value)
        if is_compiled() or in_triton:
            done += attend_in_pool(self, memory, *inputs, done)
        elif len(done) < len(groups):
            done += attend_token_in_buffer(groups, memory, *inputs, done, self.turns)
        if memory is not None:
            memory += [None] * (len(groups) - len(memory))
        pending = {index: group for index, group in enumerate(groups) if index not in done}
        prepared = {index: self.take(group, *inputs[:5], memory and memory[index]) for index, group in pending.items()}
        parts = self.read_with_slots(pending, prepared, scale, real)
        for index, group in pending.items():
            q, k, v, state = prepared.pop(index)
            part, state = parts.pop(index) if index in parts else group(q, k, v, scale, real, state)
            if memory is not None:
                packs = self.keeps_bytes and group.bits < 16
                memory[index] = pack_state(state, group.bits, memory[index]) if packs else state
            heads = as_index(group.heads, q.device)
            if self.turns is not None and group.turns and not self.exact_values:
                part = self.turns(self.turns.turn_back, part, heads)
            out[:, heads] = part.to(out.dtype)
        return out.flatten(1, 2)

    def take(
        self,
        group: HeadGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        real: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return a group's queries, keys and values, turned and rounded as it needs them, and its unpacked state."""
        heads = as_index(group.heads, q.device)
        q, k, v = q[:, heads], k[:, heads], v[:, heads]
        if group.bits == 16:
            return q, k, v, state
        is_sink = first_tokens(state, q.shape[-2], real, self.sinks, q)
        if group.turns and self.turns is not None:
            q, k, turned = self.turns(self.turns.turn, q, k, None if self.exact_values else v, scale**0.5, heads)
            v = v if turned is None else turned
        if self.exact_values:
            k = round_tokens([k], group.bits, is_sink)[0]
        else:
            k, v = round_tokens([k, v], group.bits, is_sink)
        return q, k, v, unpack_state(state, group.bits, k.dtype, v.dtype) if state and self.keeps_bytes else state

    def read_with_slots(
        self, groups: dict[int, HeadGroup], prepared: dict[int, tuple], scale: float, real: Tensor | None
    ) -> dict[int, tuple[Tensor, SlotState]]:
        """Let all groups with slots read a text, so that they merge a block at once; return outputs and states."""
        texts = {}
        for index, group in groups.items():
            if isinstance(group, SlotGroup):
                q, k, v, state = prepared[index]
                state = SlotState.empty(k, v, group.window, group.sinks, group.slots) if state is None else state
                merging = group.merging(scale)
                merging = replace(merging, bits=16) if self.exact_values else merging
                texts[index] = Text.of(q * scale, k, v, group.window, real, state), merging
        parts = read_together([*texts.values()])
        return {index: (part, text.state) for (index, (text, _)), part in zip(texts.items(), parts, strict=True)}

    def reads_in_c(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the kernel in C may read this text."""
        return may_run_in_c(q, k, v) and not kernels_accept(q, k, v) and self.is_right("in_c", q, v)

    def reads_in_triton(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether Triton's kernels for windows and slots may read this text or token."""
        return not self.exact_values and may_run_in_triton(q, k, v) and self.is_right("in_triton", q, v)

    def is_right(self, kernel: str, q: Tensor, v: Tensor) -> bool:
        """Whether the kernel, "in_c" or "in_triton", computes what PyTorch does; the first call compares them."""
        if (forced := getattr(self, kernel)) is not None:
            return forced
        group, *dims = sizes = q.shape[2], q.shape[-1], q.shape[-1] if self.exact_values else v.shape[-1]
        of_token = kernel == "in_triton" and q.shape[-2] == 1
        sinks, family = (1 if kernel == "in_c" else self.sinks), TOKENS if of_token else FAMILIES[kernel]
        if (family, q.dtype, *sizes) in self.found_right:
            return True

        @torch.no_grad()
        def compute(bits: int, by_kernel: bool, dtype: torch.dtype) -> list[Tensor]:
            kinds = TRIAL_HELD if kernel == "in_c" else TRIAL_HELD[:1]  # other kernels read windows alone
            trial: Any = LayerStudent([[*kind, bits] for kind in kinds], sinks, dims[0], "prf", dims[1])
            trial.reset(generator := generator_at(0))
            trial.in_c = trial.in_triton = False
            setattr(trial, kernel, by_kernel)
            heads, tokens = len(kinds), TRIAL_ENDS[-1]
            if bits in FEWER:  # the error of a sum may change how a spread, of two bytes here, is rounded
                trial.groups[0].merger.gain.zero_()
            trial.groups[0].merger.mean_query.fill_(TRIAL_QUERY)
            queries = torch.randn(1, heads * group, tokens, dims[0], generator=generator)
            drawn = (torch.randn(1, heads, tokens, dim, generator=generator) for dim in dims)
            inputs = queries, *trial.stable(bits, TRIAL_SCALE, *drawn)
            text, memory = [x.to(q.device, q.dtype).to(dtype) for x in inputs], []  # type: ignore[var-annotated]
            trial.to(q.device, dtype)
            ends, out = TRIAL_ENDS if kernel == "in_c" or of_token else TRIAL_ENDS[::3], []
            for begin, end in zip((0, *ends), ends, strict=False):
                if of_token:  # PyTorch reads the texts around them
                    trial.in_triton = by_kernel and end - begin == 1
                out.append(trial(*(x[:, :, begin:end] for x in text), TRIAL_SCALE, None, memory))
            return out

        trials = ((family, q, (*sizes, sinks, bits), partial(compute, bits)) for bits in self.kinds_of_bits)
        if not all(passes_trial(*trial) for trial in trials):
            return False
        self.found_right.add((family, q.dtype, *sizes))
        return True

    def stable(self, bits: int, scale: float, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return rounded keys and values, whose rounding in heads of these bits does not depend on errors of sums."""
        if self.turns is None:
            return k, v

        def keep(x: Tensor) -> Tensor:
            x = rotate(x)
            return rotate(torch.cat([as_sink(x[:, :, : self.sinks]), round_vectors(x[:, :, self.sinks :], bits)], 2))

        steps = self.turns.key_steps.to(k.dtype)[:, None]
        return keep(k / steps) * steps / scale**0.5, keep(v)
