"""The kernel in C that reads on a CPU with heads with windows, alone or with slots: PyTorch's results, up to rounding.

In PyTorch a layer takes hundreds of operations to read, and their calls take longer than their work. The kernel reads a
text or a token for all such heads of a layer: it rounds keys and values as states store them, merges the leaving
blocks, attends, and writes the states. Sums run in the order of places, so results depend neither on how a text was cut
into calls nor on the number of threads. It equals `read` of student/attention_of_student.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from linearizer.kernels.c.compiler import Kernel, addresses_of, load_kernel, pack_numbers
from linearizer.kernels.compiled import as_custom_op, is_traced
from linearizer.student.attention_of_student import (
    FEWER,
    SINK_TYPE,
    HeadState,
    Scores,
    packed_bytes,
    tensors,
    working_dtype,
)

VECTORS = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v")
MERGING = ("metric", "gain", "mean_query")  # of heads with slots, in the kernel's order
STORED = (*VECTORS, "weight", "spread")  # of states, in the kernel's order
TOKENS_AT_ONCE = 16  # of a head: fewer are not worth a helper thread
WIDEST = 64  # bytes of a vector register, if keys and values fill it
TOKENS, STRIDES, CALL_TENSORS = 3, slice(9, 25), slice(1, 9)  # where the sizes and tensors of one call are
LAYER_TENSORS, GROUP_TENSORS = 12, 1 + len(MERGING) + len(STORED)  # of a layer, followed by those of each group
PROCESS = os.getpid()

Tensor = torch.Tensor


class KindOfTexts(NamedTuple):
    """What the arguments of the kernel depend on, other than states and learned numbers."""

    groups: tuple[tuple, ...]
    texts: int
    dtype: torch.dtype
    query_heads: int  # for each KV head
    several_tokens: bool
    key_dim: int
    value_dim: int
    scale: float
    keeps: bool
    cap: float = 0.0  # of scores; 0: none


@dataclass
class ServedHeads:
    """The heads of a layer that the kernel serves, and the arguments that depend on no state and no learned number;
    made once for each kind of texts."""

    kind: KindOfTexts
    kernel: Kernel
    numbers: list[int]  # sizes
    work: torch.dtype
    wide: bool
    layouts: dict[int, dict[str, Tensor]]  # of the state of each group: zeros of its shapes and types
    heads: list[Tensor]  # of each group
    factors: Tensor

    def __reduce__(self) -> tuple:
        """Become None in a copy."""
        return type(None), ()

    @staticmethod
    @torch.inference_mode(False)  # so that later calls may use what this one makes
    def of(groups: Sequence[Any], kind: KindOfTexts, q: Tensor, k: Tensor, v: Tensor) -> ServedHeads | None:
        """Find the groups that are served; None: PyTorch serves all."""
        work, layouts = working_dtype(k), {}
        wide = not any(x.shape[-1] * work.itemsize % WIDEST for x in (k, v))
        if (kernel := load_kernel("read_heads", work, wide)) is None:
            return None
        numbers: list[int] = []
        for index, group in enumerate(groups):
            if group.kind is None:
                continue
            kept_bf16 = group.bits == 16 and k.dtype != work
            if kept_bf16 and (k.dtype != torch.bfloat16 or not kind.several_tokens):
                continue  # the kernel rounds to bf16 alone, and a state in another type changes it at each call
            layouts[index] = layout_of(group, k, v, work)
            capacities = group.kind.window, group.kind.slots, group.kind.block
            numbers += [len(group.heads), *capacities, *[group.bits] * 3, int(kept_bf16)]
        if not layouts:
            return None
        sinks, dims = groups[min(layouts)].sinks, (k.shape[-1], v.shape[-1])
        sizes = [0, len(layouts), len(k), 0, q.shape[2], sinks, *dims, int(kind.keeps), *[0] * 16]
        heads = [torch.tensor(groups[index].heads, device="cpu") for index in layouts]
        factors = torch.tensor([kind.scale, kind.scale**0.5, kind.cap], dtype=torch.float64, device="cpu")
        numbers = [*sizes, *numbers]
        return ServedHeads(kind, kernel, numbers, work, wide, layouts, heads, factors)


@dataclass
class LayerInC:
    """The kernel's arguments for heads of a layer, with fixed addresses except those of one call."""

    served: ServedHeads
    sizes: Any
    addresses: Any
    count: Tensor  # (batch,) tokens read, the same in all states
    windows: dict[int, Tensor | None]  # of the states of served groups: while states have these, addresses are valid
    addressed: list[Tensor | None]  # the tensors at the addresses

    def __reduce__(self) -> tuple:
        """Become None in a copy, whose tensors have other addresses."""
        return type(None), ()

    @staticmethod
    @torch.inference_mode(False)  # so that later calls may write what this one makes
    def of(student: Any, served: ServedHeads, memory: list | None) -> LayerInC | None:
        """Prepare the served groups, with unshared states; None: PyTorch refuses the states."""
        states = {index: memory[index] if memory else None for index in served.layouts}
        count = torch.zeros(served.kind.texts, dtype=torch.long, device="cpu")
        for index, state in states.items():
            if state is not None:
                if any(getattr(state, name).shape != zeros.shape for name, zeros in served.layouts[index].items()):
                    return None
                count = state.count.clone()
        turns = student.turns
        turn_tensors = [None] * 3 if turns is None else turns(functools.partial(steps_and_middles, turns), served.work)
        addressed = [served.factors, *[None] * 8, *turn_tensors]
        windows: dict[int, Tensor | None] = {}
        if memory is not None:
            memory += [None] * (len(student.groups) - len(memory))
        for heads, (index, state) in zip(served.heads, states.items(), strict=True):
            merging, named = student.groups[index].merging(served.kind.scale), {}
            if merging is not None:
                named = {name: getattr(merging, name).to(served.work).contiguous() for name in MERGING}
            if memory is not None:
                memory[index] = state = unshared_state(state, served.layouts[index], count)
                named |= vars(state)
            windows[index] = named.get("window_k")
            addressed += [heads, *(named.get(name) for name in (*MERGING, *STORED))]
        plan = LayerInC(served, pack_numbers(*served.numbers), addresses_of(*addressed), count, windows, addressed)
        if memory is not None:
            memory[min(windows)].layer_in_c = plan
        return plan

    def holds(self, memory: list, k: Tensor) -> bool:
        """Whether the states are still at the addresses: whatever changes a state also replaces its count."""
        if len(self.count) != len(k) or self.served.kind.dtype != k.dtype:
            return False
        for index, window in self.windows.items():  # not a generator, which would delay each token of each layer
            state = memory[index]
            if state.count is not self.count or state.window_k is not window:
                return False
        return True

    def read(
        self, memory: list | None, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, out: Tensor,
        learned_sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Read a text or a token into `out` and update the states; q, k, v and out belong to the whole layer."""
        if is_traced():
            present = [index for index, x in enumerate(self.addressed) if x is not None]
            state_at = [x for x in present if x >= LAYER_TENSORS and (x - LAYER_TENSORS) % GROUP_TENSORS > len(MERGING)]
            input_at = [index for index in present if index not in state_at]
            tensors_at = ([self.addressed[index] for index in indices] for indices in (input_at, state_at))
            extra = input_at, state_at, self.served.numbers, self.served.wide
            read_heads(q, k, v, [real, learned_sinks], out, self.count, *tensors_at, *extra)
        else:
            given = real, out, self.count, learned_sinks
            call_kernel(self.served.kernel, self.sizes, self.addresses, q, k, v, *given)
        if memory is None:
            return
        self.count.add_(q.shape[-2] if real is None else real.sum(-1))
        for index in self.windows if out.dtype != self.served.work else ():
            for name, x in tensors(memory[index]).items():
                if name in VECTORS and x.dtype == self.served.work:
                    setattr(memory[index], name, x.to(out.dtype))


@functools.cache
def begin_in_openmp() -> int:
    """Return the address of the function that runs PyTorch's OpenMP threads, which are awake; 0 if it has others."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@functools.cache
def helpers(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process for reading without OpenMP; they are reused, since starting one takes time."""
    return ThreadPoolExecutor()


def call_kernel(
    kernel: Kernel, sizes: Any, addresses: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, out: Tensor,
    count: Tensor, learned_sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Read; complete sizes and addresses with those of this call."""
    work, tokens = working_dtype(k), q.shape[-2]
    if not q.dtype == k.dtype == v.dtype == work:
        q, k, v = (x.to(work) for x in (q, k, v))
    inputs = [*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)), out.to(work)]
    of_q, of_k, of_v, of_out = (x.stride() for x in inputs)
    sizes[STRIDES] = [*of_q[:4], *of_k[:2], 0, of_k[2], *of_v[:2], 0, of_v[2], *of_out[:4]]
    sizes[0], sizes[TOKENS] = 0, tokens
    extra = count, None if real is None else real.contiguous()
    learned_sinks = as_read(learned_sinks, work)
    threads = torch.get_num_threads()
    openmp = begin_in_openmp() if os.getpid() == PROCESS else 0  # whose threads do not outlive a fork
    helper_count = 0 if openmp or tokens == 1 else min(threads, len(k) * k.shape[1] * -(-tokens // TOKENS_AT_ONCE)) - 1
    call = (ctypes.c_int64 * (8 * threads + 8))(threads, openmp) if threads > 1 and (openmp or helper_count) else None
    *pointers, sinks_at = [None if x is None else x.data_ptr() for x in (*inputs, *extra, learned_sinks)]
    addresses[CALL_TENSORS] = [*pointers, None if call is None else ctypes.addressof(call), sinks_at]
    futures = [helpers(os.getpid()).submit(kernel, sizes, addresses) for _ in range(helper_count)]
    done = kernel(sizes, addresses), *(future.cancel() or future.result() for future in futures)
    if not all(done):
        raise MemoryError("no memory to attend in")
    if out.dtype != work:
        out.copy_(inputs[3])


@as_custom_op(
    "(Tensor q, Tensor k, Tensor v, Tensor?[] given, Tensor(a!) out, Tensor count, Tensor[] inputs, "
    "Tensor(b!)[] states, int[] input_at, int[] state_at, int[] numbers, bool wide) -> ()"
)
def read_heads(
    q: Tensor, k: Tensor, v: Tensor, given: list[Tensor | None], out: Tensor, count: Tensor, inputs: list[Tensor],
    states: list[Tensor], input_at: list[int], state_at: list[int], numbers: list[int], wide: bool,
) -> None:  # fmt: skip
    """Read as a step of a graph, where addresses change from call to call; `given`: real tokens and learned sinks."""
    kernel = load_kernel("read_heads", working_dtype(k), wide)
    assert kernel is not None
    placed: list[Tensor | None] = [None] * (LAYER_TENSORS + GROUP_TENSORS * numbers[1])
    for index, x in zip((*input_at, *state_at), (*inputs, *states), strict=True):
        placed[index] = x
    call_kernel(kernel, pack_numbers(*numbers), addresses_of(*placed), q, k, v, given[0], out, count, given[1])


def layout_of(group: Any, k: Tensor, v: Tensor, work: torch.dtype) -> dict[str, Tensor]:
    """Return zeros of the shape and the type of each tensor of a group's state, without memory of their own."""
    shape, bits, layout = (len(k), len(group.heads)), group.bits, {}

    def lay(name: str, kind: torch.dtype, *sizes: int) -> None:
        layout[name] = torch.zeros((), dtype=kind, device="cpu").expand(*shape, *sizes)

    rows = {"sink": group.sinks, "window": group.kind.window, "slot": group.kind.slots}
    for name in ("weight", "spread"):
        lay(name, torch.int16 if bits in FEWER else work, group.kind.slots)
    kind = work if bits == 16 else torch.uint8 if bits in FEWER else torch.int8
    for side, dim in (("k", k.shape[-1]), ("v", v.shape[-1])):
        for name, count in rows.items():
            lay(f"{name}_{side}", kind, count, dim if bits == 16 else packed_bytes(dim, bits))
        if bits < 16:
            lay(f"sink_{side}", SINK_TYPE, group.sinks, dim)
    return layout


def unshared_state(state: HeadState | None, layout: dict[str, Tensor], count: Tensor) -> Any:
    """Copy a state so that nothing shares it; before the first token return an empty one."""
    dense = torch.contiguous_format  # as the kernel writes; zeros of a layout have no strides
    if state is None:
        empty = {name: torch.zeros_like(zeros, memory_format=dense) for name, zeros in layout.items()}
        return HeadState(count=count, **empty)
    named = {name: (getattr(state, name).detach(), zeros.dtype) for name, zeros in layout.items()}
    copies = {name: x.to(kind, copy=True, memory_format=dense) for name, (x, kind) in named.items()}
    return replace(state, count=count, **copies)


def as_read(learned_sinks: Tensor | None, work: torch.dtype) -> Tensor | None:
    """Return the logits of learned sinks as the kernel reads them, which must be kept while it does."""
    return None if learned_sinks is None else learned_sinks.detach().to(work).contiguous()


def steps_and_middles(turns: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return the steps and the middle of keys, and the middle of values, each (heads, dim)."""
    return [x.to(dtype).contiguous() for x in (turns.key_steps, turns.key_middle, turns.value_middle)]


def begin_in_c(students: Sequence[Any], memories: Sequence[list | None], texts: int, tokens: int) -> None:
    """Make the empty states of all layers for new texts, if the last ones were of the same kind.

    Between the work of the layers it would take three times as long, since the processor forgets the code.
    """
    for student, memory in zip(students, memories, strict=True):
        if (served := getattr(student, "arguments_in_c", None)) is None or memory != []:
            continue  # also other modules that attend in a layer
        kinds = kinds_of(student)
        kind = served.kind._replace(groups=kinds, texts=texts, several_tokens=tokens > 1, keeps=True)
        if served.kind == kind and len(served.layouts) == len(kinds):
            LayerInC.of(student, served, memory)


def kinds_of(student: Any) -> tuple[tuple, ...]:
    """Return the groups of a layer and what they keep: if these are the same, so are the arguments of the kernel."""
    return tuple((group, group.kind) for group in student.groups)


def read_in_c(
    student: Any, memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, out: Tensor,
    scores: Scores | None = None,
) -> list[int]:  # fmt: skip
    """Read with all heads that the kernel serves, into `out`; return the indices of their groups.

    q (batch, heads, group, tokens, dim), k, v and out belong to the whole layer; `memory` has the states of groups.
    """
    if (plan := held_layer(memory, k)) is None:
        if is_traced():
            return []
        cap = 0.0 if scores is None else scores.cap or 0.0
        sizes = q.shape[2], q.shape[-2] > 1, k.shape[-1], v.shape[-1], scale, memory is not None, cap
        kind = KindOfTexts(kinds_of(student), len(k), k.dtype, *sizes)
        if (served := getattr(student, "arguments_in_c", None)) is None or served.kind != kind:
            served = student.arguments_in_c = ServedHeads.of(student.groups, kind, q, k, v)
        if served is None or (plan := LayerInC.of(student, served, memory)) is None:
            return []
    plan.read(memory, q, k, v, real, out, None if scores is None else scores.sink)
    return list(plan.windows)


def held_layer(memory: list | None, k: Tensor) -> LayerInC | None:
    """Return the kernel's arguments for the layer with these states, if the kernel was the last to read them."""
    plan = None
    for state in memory or ():
        if (layer := getattr(state, "layer_in_c", None)) is not None:
            if plan is not None:
                return None
            plan = layer
    return plan if plan is not None and plan.holds(memory or [], k) else None
