"""Reading by heads with windows, alone or with slots, on a CPU by a kernel in C: what PyTorch does, up to rounding.

In PyTorch a layer that reads takes hundreds of operations, whose calls take longer than their work. The kernel reads a
text or a token for all these heads of a layer: it takes keys and values as they will be kept, merges the blocks that
leave, attends, and writes the states. What a row sees is summed in the order of places, so that results depend neither
on how a text was cut into calls nor on the number of threads. The reference are slots_torch.py and features_torch.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from .kernel_heads_in_c import SOURCE
from .kernel_in_c import Kernel, addresses_of, copy_numbers, load_kernel, whole_numbers
from .packed_state import SINK_TYPE
from .rounding import FEWER, packed_bytes
from .slots_merging import Merging
from .state import ExactState, FeatureState, SlotState, in_graphs, is_traced, tensors, working_dtype

VECTORS = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v")
MERGING = ("metric", "gain", "mean_query")  # of heads with slots, in the order of the kernel
HELD = (*VECTORS, "weight", "spread")  # of states, in the order of the kernel
TOKENS_AT_ONCE = 16  # of a head, by each of these threads at least
WIDEST = 64  # bytes of a vector, which turned keys and values fill
TOKENS, STRIDES, OF_CALL = 3, slice(9, 25), slice(1, 8)  # where a call's own sizes and tensors lie
OF_LAYER, OF_GROUP = 11, 1 + len(MERGING) + len(HELD)  # how many tensors a layer has before those of its groups
PROCESS = os.getpid()

Tensor = torch.Tensor


@dataclass
class ServedHeads:
    """The heads of a layer that the kernel serves, and what it is told of them, whatever their states are.

    It is made once for texts of a kind, and holds no number that may be learned.
    """

    texts: tuple  # the kind
    kernel: Kernel
    numbers: list[int]  # sizes
    sizes: Any  # the same as the kernel reads them
    work: torch.dtype
    wide: bool
    layouts: dict[int, dict[str, tuple]]  # of the state of each group
    heads: list[Tensor]  # of each group
    factors: Tensor

    def __reduce__(self) -> tuple:
        """Become nothing in a copy."""
        return type(None), ()

    @staticmethod
    def of(groups: Sequence[Any], texts: tuple, q: Tensor, k: Tensor, v: Tensor) -> ServedHeads | None:
        """Find the groups that are served; None: PyTorch serves all."""
        *_, scale, keeps, exact_values = texts
        work, layouts = working_dtype(k), {}
        wide = not any(x.shape[-1] * work.itemsize % WIDEST for x in (k, v))
        if (kernel := load_kernel("read_heads", SOURCE, work, wide)) is None:
            return None
        numbers: list[int] = []
        for index, group in enumerate(groups):
            held = group.window_group(scale, None)
            if held is None or (held.merging is not None and held.merging.block > group.window):
                continue
            if q.shape[-2] == 1 and k.dtype != work and group.bits == 16:
                continue  # a state in another type changes it at each call
            layouts[index] = layout_of(group, held.merging, k, v, work)
            room = (group.window, 0, 0) if held.merging is None else (group.window, group.slots, group.block)
            of_values = 16 if exact_values else group.bits
            kept_bf16 = group.bits == 16 and k.dtype != work
            numbers += [len(group.heads), *room, group.bits, of_values, of_values, int(kept_bf16)]
        if not layouts:
            return None
        sinks, dims = groups[min(layouts)].sinks, (k.shape[-1], v.shape[-1])
        sizes = [0, len(layouts), len(k), 0, q.shape[2], sinks, *dims, int(keeps), *[0] * 16]
        heads = [torch.tensor(groups[index].heads, device="cpu") for index in layouts]
        factors = torch.tensor([scale, scale**0.5], dtype=torch.float64, device="cpu")
        numbers = [*sizes, *numbers]
        return ServedHeads(texts, kernel, numbers, whole_numbers(*numbers), work, wide, layouts, heads, factors)


@dataclass
class LayerInC:
    """What the kernel needs of some heads of a layer; all but a call's own lies at the same addresses."""

    served: ServedHeads
    sizes: Any
    addresses: Any
    count: Tensor  # (batch,) tokens read, as all states have it
    windows: dict[int, Tensor | None]  # of the state of each group that is served: while they are its own, all holds
    kept: list[Tensor | None]  # what lives at the addresses

    def __reduce__(self) -> tuple:
        """Become nothing in a copy, whose tensors lie elsewhere."""
        return type(None), ()

    @staticmethod
    @torch.inference_mode(False)  # so that later calls may write what this one makes
    def of(student: Any, memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float) -> LayerInC | None:
        """Prepare for the groups that are served, with states of their own; None: PyTorch serves all."""
        groups = tuple(group.kind() for group in student.groups)
        texts = (groups, len(k), k.dtype, *q.shape[2:3], q.shape[-2] > 1, k.shape[-1], v.shape[-1])
        texts += scale, memory is not None, student.exact_values
        if (served := student.served_in_c) is None or served.texts != texts:
            served = student.served_in_c = ServedHeads.of(student.groups, texts, q, k, v)
        if served is None:
            return None
        states = {index: memory[index] if memory else None for index in served.layouts}
        count = torch.zeros(len(k), dtype=torch.long, device="cpu")
        for index, state in states.items():
            if state is not None:
                if any(getattr(state, name).shape != shape for name, (shape, _) in served.layouts[index].items()):
                    return None  # PyTorch refuses it
                count = state.count.clone()
        turns = student.turns
        turning = [None] * 3 if turns is None else turns(turns.steps_and_middles, served.work)
        kept = [served.factors, *[None] * 7, *turning]
        windows: dict[int, Tensor | None] = {}
        if memory is not None:
            memory += [None] * (len(student.groups) - len(memory))
        for heads, (index, state) in zip(served.heads, states.items(), strict=True):
            merging, own = student.groups[index].merging(scale), {}
            if merging is not None:
                own = {name: getattr(merging, name).to(served.work).contiguous() for name in MERGING}
            if memory is not None:
                memory[index] = state = own_state(state, served.layouts[index], count)
                own |= vars(state)
            windows[index] = own.get("window_k")
            kept += [heads, *(own.get(name) for name in (*MERGING, *HELD))]
        return LayerInC(served, copy_numbers(served.sizes), addresses_of(*kept), count, windows, kept)

    def holds(self, memory: list, k: Tensor) -> bool:
        """Whether the states still lie at the addresses: all that changes one replaces its count, too."""
        if len(self.count) != len(k) or self.served.work != working_dtype(k):
            return False
        for index, window in self.windows.items():  # no generator, which each token of each layer would wait for
            state = memory[index]
            if state.count is not self.count or state.window_k is not window:
                return False
        return True

    def read(self, memory: list | None, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, out: Tensor) -> None:
        """Read a text or a token into `out`, q, k, v and out being those of the whole layer, and update the states."""
        if is_traced():
            there = [index for index, x in enumerate(self.kept) if x is not None]
            held = [index for index in there if index >= OF_LAYER and (index - OF_LAYER) % OF_GROUP > len(MERGING)]
            given = [index for index in there if index not in held]
            tensors_at = ([self.kept[index] for index in at] for at in (given, held))
            read_heads(q, k, v, real, out, self.count, *tensors_at, given, held, self.served.numbers, self.served.wide)
        else:
            call_kernel(self.served.kernel, self.sizes, self.addresses, q, k, v, real, out, self.count)
        if memory is None:
            return
        self.count.add_(q.shape[-2] if real is None else real.sum(-1))
        for index in self.windows if out.dtype != self.served.work else ():
            for name, x in tensors(memory[index]).items():
                if name in VECTORS and x.is_floating_point():
                    setattr(memory[index], name, x.to(out.dtype))


@functools.cache
def begin_in_openmp() -> int:
    """Return the address of what begins the threads of PyTorch, which are awake; 0 where it has others."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@functools.cache
def helpers(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process that read where OpenMP begins none; they last, since each takes time to start."""
    return ThreadPoolExecutor()


def call_kernel(
    kernel: Kernel, sizes: Any, addresses: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, out: Tensor,
    count: Tensor,
) -> None:  # fmt: skip
    """Read; sizes and addresses have all but what is of this call."""
    work, tokens = working_dtype(k), q.shape[-2]
    if not q.dtype == k.dtype == v.dtype == work:
        q, k, v = (x.to(work) for x in (q, k, v))
    given = [*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)), out.to(work)]
    of_q, of_k, of_v, of_out = (x.stride() for x in given)
    sizes[STRIDES] = [*of_q[:4], *of_k[:2], 0, of_k[2], *of_v[:2], 0, of_v[2], *of_out[:4]]
    sizes[0], sizes[TOKENS] = 0, tokens
    rest = count, None if real is None else real.contiguous()
    threads = torch.get_num_threads()
    openmp = begin_in_openmp() if os.getpid() == PROCESS else 0  # whose threads do not outlive a fork
    others = 0 if openmp or tokens == 1 else min(threads, len(k) * k.shape[1] * -(-tokens // TOKENS_AT_ONCE)) - 1
    call = (ctypes.c_int64 * (8 * threads + 8))(threads, openmp) if threads > 1 and (openmp or others) else None
    placed = [None if x is None else x.data_ptr() for x in (*given, *rest)]
    addresses[OF_CALL] = [*placed, None if call is None else ctypes.addressof(call)]
    parts = [helpers(os.getpid()).submit(kernel, sizes, addresses) for _ in range(others)]
    done = kernel(sizes, addresses), *(part.cancel() or part.result() for part in parts)
    if not all(done):
        raise MemoryError("no memory to attend in")
    if out.dtype != work:
        out.copy_(given[3])


@in_graphs(
    "(Tensor q, Tensor k, Tensor v, Tensor? real, Tensor(a!) out, Tensor count, Tensor[] given, Tensor(b!)[] held, "
    "int[] given_at, int[] held_at, int[] numbers, bool wide) -> ()"
)
def read_heads(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, out: Tensor, count: Tensor, given: list[Tensor],
    held: list[Tensor], given_at: list[int], held_at: list[int], numbers: list[int], wide: bool,
) -> None:  # fmt: skip
    """Read as a step of a graph, whose tensors may lie anywhere."""
    kernel = load_kernel("read_heads", SOURCE, working_dtype(k), wide)
    assert kernel is not None
    placed: list[Tensor | None] = [None] * (OF_LAYER + OF_GROUP * numbers[1])
    for index, x in zip((*given_at, *held_at), (*given, *held), strict=True):
        placed[index] = x
    call_kernel(kernel, whole_numbers(*numbers), addresses_of(*placed), q, k, v, real, out, count)


def layout_of(group: Any, merging: Merging | None, k: Tensor, v: Tensor, work: torch.dtype) -> dict[str, tuple]:
    """Return the shape and the type of each tensor that a group keeps."""
    shape, bits = (len(k), len(group.heads)), group.bits
    rows, kept = {"sink": group.sinks, "window": group.window}, {}
    if merging is None:
        kept = {"level": ((*shape, 0), work), "mean": ((*shape, 0, v.shape[-1]), work)}
    else:
        rows["slot"], kind = group.slots, torch.int16 if bits in FEWER else work
        kept = {name: ((*shape, group.slots), kind) for name in ("weight", "spread")}
    kind = work if bits == 16 else torch.uint8 if bits in FEWER else torch.int8
    for side, dim in (("k", k.shape[-1]), ("v", v.shape[-1])):
        width = dim if bits == 16 else packed_bytes(dim, bits)
        kept |= {f"{name}_{side}": ((*shape, count, width), kind) for name, count in rows.items()}
        if bits < 16:
            kept[f"sink_{side}"] = ((*shape, group.sinks, dim), SINK_TYPE)
    return kept


def own_state(state: ExactState | None, layout: dict[str, tuple], count: Tensor) -> Any:
    """Return a state that nothing else shares; before the first token an uninitialised one, which the kernel fills."""
    if state is None:
        kept = {name: torch.empty(shape, dtype=kind, device="cpu") for name, (shape, kind) in layout.items()}
        return (SlotState if "weight" in layout else FeatureState)(count=count, **kept)
    kinds, how = {name: kind for name, (_, kind) in layout.items()}, {"memory_format": torch.contiguous_format}
    return replace(
        state, count=count, **{name: getattr(state, name).detach().to(kinds[name], copy=True, **how) for name in kinds}
    )


def read_in_c(
    student: Any, memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, out: Tensor
) -> list[int]:
    """Read with all heads that the kernel serves, into `out`; return the indices of their groups.

    q (batch, heads, group, tokens, dim), k, v and out are those of the whole layer, `memory` has the states of groups.
    """
    if (plan := held_layer(memory, k)) is None:
        if is_traced() or (plan := LayerInC.of(student, memory, q, k, v, scale)) is None:
            return []
        if memory is not None:
            memory[min(plan.windows)].layer_in_c = plan
    plan.read(memory, q, k, v, real, out)
    return list(plan.windows)


def held_layer(memory: list | None, k: Tensor) -> LayerInC | None:
    """Return what the kernel knows of the layer whose states these are, where it read them last."""
    plan = None
    for state in memory or ():
        if (own := getattr(state, "layer_in_c", None)) is not None:
            if plan is not None:
                return None
            plan = own
    return plan if plan is not None and plan.holds(memory or [], k) else None
