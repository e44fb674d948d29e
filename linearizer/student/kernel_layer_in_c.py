"""Reading by heads with windows, alone or with slots, on a CPU by a kernel in C: what PyTorch does, up to rounding.

In PyTorch a layer that reads takes hundreds of operations, whose calls take longer than their work. The kernel reads a
text or a token for all these heads of a layer: it takes keys and values as they will be kept, merges the blocks that
leave, attends, and writes the states. What a row sees is summed in the order of places, so that results depend neither
on how a text was cut into calls nor on the number of threads. The reference are slots_torch.py and features_torch.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from .kernel_in_c import Kernel, addresses_of, load_kernel, whole_numbers
from .kernel_state_in_c import SOURCE as STATE
from .packed_state import SINK_TYPE, Turns
from .rounding import FEWER, SCALE_BYTES
from .slots_merging import Merging
from .state import ExactState, FeatureState, SlotState, in_graphs, is_traced, tensors, working_dtype

VECTORS = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v")
MERGING = ("metric", "gain", "mean_query")  # of heads with slots, in the order of the kernel
HELD = (*VECTORS, "weight", "spread")  # of states, in the order of the kernel
WIDEST = 64  # bytes of a vector, which turned keys and values fill
TOKENS, STRIDES, OF_CALL = 3, slice(9, 25), slice(1, 7)  # where a call's own sizes and tensors lie
OF_LAYER, OF_GROUP = 13, 1 + len(MERGING) + len(HELD)  # how many tensors a layer has before those of its groups

Tensor = torch.Tensor

SOURCE = (
    STATE
    + r"""
enum { NEXT, GROUPS, TEXTS, TOKENS, EACH, SINKS, KEY_DIM, VALUE_DIM, KEEPS, OF_Q, OF_K = OF_Q + 4, OF_V = OF_K + 4,
       OF_OUT = OF_V + 4, LAYER_SIZES = OF_OUT + 4 };
enum { HEADS, WINDOW, SLOTS, BLOCK, KEY_BITS, VALUE_BITS, SLOT_BITS, KEPT_BF16, GROUP_SIZES };
enum { FACTORS, Q, K, V, OUT, COUNT, PRESENT, ENTER_K, BACK_K, MIDDLE_K, ENTER_V, BACK_V, MIDDLE_V, LAYER_TENSORS };
enum { SCALE, ROOT };

typedef struct {
    const REAL *k, *v;
    long count, k_width, v_width;
} Part;

static Side side_of(const int64_t *sizes, const int64_t *group, void **tensors, void **of, int v, long head) {
    Side s = {.bits = group[KEY_BITS + v], .dim = sizes[KEY_DIM + v]};
    s.size = padded(s.dim, LANES), s.width = s.bits == 16 ? s.dim * (long)sizeof(REAL) : s.dim + 1;
    if (s.bits < 8) s.width = s.dim * s.bits / 8 + 2;
    void **turns = tensors + (v ? ENTER_V : ENTER_K);
    if (s.bits < 16 && turns[0]) {
        s.enter = (REAL *)turns[0] + head * s.dim * s.dim, s.back = (REAL *)turns[1] + head * s.dim * s.dim;
        s.middle = (REAL *)turns[2] + head * s.dim;
    }
    return s;
}

/* Hide a token from some rows. */
static void hide(REAL *logits, long from, long to) {
    for (long row = from > 0 ? from : 0; row < to; row++) logits[row] = EMPTY;
}

/* Let rows of tokens from a place on attend, and put out what they read; column after column, so that no row depends on
   another. */
static void attend(Reader *r, const int64_t *sizes, const REAL *q, REAL *out, long place, long found, REAL by) {
    long each = r->each, used = found * each, rows = padded(used, LANES), last = place + found - 1, merged = 0, j = 0;
    const REAL *a[ROWS];
    Slots *slots = &r->slots;
    if (slots->most && place >= r->window) merged = ((place - r->window) / r->block + 1) * r->block;
    long from = slots->most ? merged : place - r->window + 1, behind = slots->most ? merged : last - r->window + 1;
    from = from < 0 ? 0 : from > last + 1 || !r->window ? last + 1 : from, behind = behind < 0 ? 0 : behind;
    long near = last + 1 - from, begin = from % r->room, whole = r->room - begin < near ? r->room - begin : near;
    Part parts[PARTS] = {
        {r->key.sinks, r->value.sinks, behind < r->sinks ? behind : r->sinks, r->key.size, r->value.size},
        {r->key.ring + begin * r->key.size, r->value.ring + begin * r->value.size, whole, r->key.size, r->value.size},
        {r->key.ring, r->value.ring, near - whole, r->key.size, r->value.size},
        {slots->seen, slots->seen + slots->key, slots->count, slots->key + slots->value, slots->key + slots->value}};
    REAL *asks = r->asks, *logits = r->logits;
    for (long row = 0; row < rows; row++) {
        long token = r->tokens[row < used ? row / each : 0];
        const REAL *own = q + token * sizes[OF_Q + 3] + row % each * sizes[OF_Q + 2];
        for (long d = 0; d < r->key.dim; d++) asks[d * rows + row] = row < used ? own[d] * by : 0;
    }
    if (r->key.back) {
        REAL *turned = asks + padded(r->key.dim, ROWS) * rows;
        for (long d = 0; d < r->key.dim; d += ROWS) {
            for (int m = 0; m < ROWS; m++) a[m] = r->key.back + (d + m) * r->key.dim;
            multiply(a, 1, r->key.dim, asks, rows, rows, turned + d * rows, rows, 0);
        }
        asks = turned;
    }
    for (Part *part = parts; part < parts + PARTS; part++) {
        for (long i = 0; i < part->count; i += ROWS) {
            for (long m = 0; m < ROWS; m++) a[m] = part->k + (i + m < part->count ? i + m : i) * part->k_width;
            multiply(a, 1, r->key.dim, asks, rows, rows, logits + (j + i) * rows, rows, 0);
        }
        for (long i = 0; i < part->count; i++, j++) {
            REAL *own = logits + j * rows;
            long at = part == parts ? i : part == parts + 1 ? from + i : from + whole + i;
            if (part == parts + 3) {
                for (long row = 0; row < rows; row++) own[row] += r->level[i];
            } else if (part == parts) {
                if (!slots->most) hide(own, 0, (at + r->window - place) * each);
            } else {
                hide(own, 0, (at - place) * each);
                if (!slots->most) hide(own, (at + r->window - place) * each, used);
            }
        }
    }
    memcpy(r->top, logits, rows * sizeof(REAL)), memset(r->sum, 0, rows * sizeof(REAL));
    for (REAL *own = logits; own < logits + j * rows; own += rows)
        for (long row = 0; row < rows; row++) r->top[row] = own[row] > r->top[row] ? own[row] : r->top[row];
    for (REAL *own = logits; own < logits + j * rows; own += rows)
        for (long row = 0; row < rows; row++) own[row] = exponential(own[row] - r->top[row]), r->sum[row] += own[row];
    long size = r->value.size;
    REAL *read = r->read, *turned = read + ROWS * size;
    for (long row = 0; row < used; row += ROWS) {
        j = 0;
        for (Part *part = parts; part < parts + PARTS; part++) {
            for (int m = 0; m < ROWS; m++) a[m] = logits + j * rows + row + m;
            if (part->count) multiply(a, rows, part->count, part->v, part->v_width, size, read, size, j > 0);
            j += part->count;
        }
        for (int m = 0; m < ROWS; m++)
            for (long d = 0; d < size; d++) read[m * size + d] /= r->sum[row + m];
        if (r->value.back) {
            for (int m = 0; m < ROWS; m++) a[m] = read + m * size;
            multiply(a, 1, r->value.dim, r->value.back, size, size, turned, size, 0);
        }
        for (long m = 0; m < ROWS && row + m < used; m++) {
            REAL *own = out + r->tokens[(row + m) / each] * sizes[OF_OUT + 3] + (row + m) % each * sizes[OF_OUT + 2];
            const REAL *given = (r->value.back ? turned : read) + m * size;
            for (long d = 0; d < r->value.dim; d++) own[d] = given[d] + (r->value.back ? r->value.middle[d] : 0);
        }
    }
}

/* Let a block of tokens from a place on leave the window. */
static void merge_block(Reader *r, long from) {
    for (long p = from; p < from + r->block; p++) {
        long at = p % r->room;
        if (p < r->sinks) continue;
        REAL *row = add_slot(&r->slots, 1, 0);
        memcpy(row + r->key.size, r->value.ring + at * r->value.size, r->value.size * sizeof(REAL));
        memcpy(row + r->key.size + r->value.size, r->key.ring + at * r->key.size, r->key.size * sizeof(REAL));
    }
    merge_slots(&r->slots);
}

static void level_slots(Reader *r, REAL gain) {
    const Slots *s = &r->slots;
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o];
        r->level[o] = (sizeof(REAL) == 4 ? logf(s->weight[i]) : log(s->weight[i])) + gain * s->spread[i];
    }
}

static void prepare_merging(Slots *s, const REAL *metric, const REAL *query, REAL factor) {
    show_slots(s, 1);
    memset(s->columns, 0, (s->key + s->value) * s->room * sizeof(REAL));
    memset(s->metric, 0, s->key_dim * s->key * sizeof(REAL));
    for (long r = 0; r < s->key_dim; r++)
        for (long c = 0; c < s->key_dim; c++) s->metric[c * s->key + r] = metric[r * s->key_dim + c] * factor;
    for (long c = 0; c < s->key_dim; c++) s->query[c] = query[c] * factor;
    s->query[s->key_dim] = query[s->key_dim];
}

/* Let one head of a text read. */
static int read_head(const int64_t *sizes, void **tensors, const int64_t *group, void **of, long b, long h) {
    const double *factors = tensors[FACTORS];
    long head = ((int64_t *)of[HEAD])[h], tokens = sizes[TOKENS], zeros;
    Reader r = {side_of(sizes, group, tensors, of, 0, head), side_of(sizes, group, tensors, of, 1, head)};
    Slots *slots = &r.slots;
    r.of = of, r.window = group[WINDOW], r.block = group[BLOCK], r.sinks = sizes[SINKS], r.each = sizes[EACH];
    r.own = b * group[HEADS] + h, r.chunk = ROWS_AT_ONCE / r.each > 0 ? ROWS_AT_ONCE / r.each : 1;
    r.chunk = r.chunk < tokens ? r.chunk : tokens, r.room = r.window + r.chunk;
    slots->most = group[SLOTS], slots->room = slots->most ? padded(slots->most + r.block, TILE) : 0;
    slots->key = r.key.size, slots->value = r.value.size, slots->width = 2 * r.key.size + r.value.size;
    slots->key_dim = r.key.dim, slots->value_dim = r.value.dim, slots->bits = group[SLOT_BITS];
    slots->kept_bf16 = group[KEPT_BF16];
    char *memory = aligned_alloc(BYTES, lay_out(&r, 0, &zeros));
    if (!memory) return 0;
    lay_out(&r, memory, &zeros), memset(memory, 0, zeros);
    for (long i = 0; i < slots->room; i++) slots->place[i] = INFINITY;

    const REAL *q = (REAL *)tensors[Q] + b * sizes[OF_Q] + head * sizes[OF_Q + 1];
    const REAL *k = (REAL *)tensors[K] + b * sizes[OF_K] + head * sizes[OF_K + 1];
    const REAL *v = (REAL *)tensors[V] + b * sizes[OF_V] + head * sizes[OF_V + 1];
    REAL *out = (REAL *)tensors[OUT] + b * sizes[OF_OUT] + head * sizes[OF_OUT + 1];
    const uint8_t *present = tensors[PRESENT] ? (uint8_t *)tensors[PRESENT] + b * tokens : 0;
    REAL root = factors[ROOT], by = r.key.back ? factors[SCALE] / factors[ROOT] : factors[SCALE], gain = 0;
    long before = sizes[KEEPS] ? ((int64_t *)tensors[COUNT])[b] : 0, place = before, merged = !before, prepared = 0;
    if (slots->most) gain = ((REAL *)of[GAIN])[h];
    if (sizes[KEEPS]) read_state(&r, before);
    level_slots(&r, gain);
    for (long t = 0; t < tokens;) {
        long found = 0, limit = r.chunk, leaves = slots->most && place >= r.window && !((place - r.window) % r.block);
        if (slots->most) {  /* rows that see the same slots */
            long ahead = place < r.window ? r.window - place : r.block - (place - r.window) % r.block;
            limit = ahead < limit ? ahead : limit;
        }
        for (; t < tokens && found < limit; t++) {
            if (!present || present[t]) {
                r.tokens[found++] = t;
                continue;
            }
            for (long g = 0; g < r.each; g++)
                memset(out + t * sizes[OF_OUT + 3] + g * sizes[OF_OUT + 2], 0, r.value.dim * sizeof(REAL));
        }
        if (!found) break;
        if (leaves) {
            if (!prepared)
                prepare_merging(slots, (REAL *)of[METRIC] + h * r.key.dim * r.key.dim,
                                (REAL *)of[MEAN_QUERY] + h * (r.key.dim + 1), r.key.back ? 1 : root);
            prepared = merged = 1;
            merge_block(&r, place - r.window), level_slots(&r, gain);
        }
        take_tokens(&r, &r.key, k, sizes[OF_K + 3], found, root, place);
        take_tokens(&r, &r.value, v, sizes[OF_V + 3], found, 1, place);
        attend(&r, sizes, q, out, place, found, by);
        place += found;
    }
    if (sizes[KEEPS]) write_state(&r, before, place, merged);
    free(memory);
    return 1;
}

/* Let all heads of a layer read that no other thread has begun. */
int read_heads(int64_t *sizes, void **tensors) {
    int done = 1;
    for (;;) {
        long next = __atomic_fetch_add(&sizes[NEXT], 1, __ATOMIC_RELAXED);
        int64_t *group = sizes + LAYER_SIZES, *end = group + sizes[GROUPS] * GROUP_SIZES;
        void **of = tensors + LAYER_TENSORS;
        for (; group < end && next >= sizes[TEXTS] * group[HEADS]; group += GROUP_SIZES, of += GROUP_TENSORS)
            next -= sizes[TEXTS] * group[HEADS];
        if (group == end) return done;
        done &= read_head(sizes, tensors, group, of, next / group[HEADS], next % group[HEADS]);
    }
}
"""
)


@dataclass
class ServedHeads:
    """The heads of a layer that the kernel serves, and what it is told of them, whatever their states are.

    It is made once for texts of a kind; what follows from numbers that may be learned is made again where they change.
    """

    texts: tuple  # the kind
    kernel: Kernel
    numbers: list[int]  # sizes, as the kernel reads them
    work: torch.dtype
    wide: bool
    layouts: dict[int, dict[str, tuple]]  # of the state of each group
    heads: list[Tensor]  # of each group
    factors: Tensor
    turned: list[Tensor] | None = None  # Turns.matrices, which follow from these:
    given: Sequence[Tensor] = ()

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
        return ServedHeads(texts, kernel, [*sizes, *numbers], work, wide, layouts, heads, factors)

    def turning(self, turns: Turns) -> list[Tensor]:
        """Return how heads turn what they take."""
        given = turns.key_steps, turns.key_middle, turns.value_middle
        if self.turned is None or not all(map(torch.equal, self.given, given)):
            self.given, self.turned = [x.detach().clone() for x in given], turns.matrices(self.work)
        return self.turned


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
    @torch.no_grad()
    def of(student: Any, memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float) -> LayerInC | None:
        """Prepare for the groups that are served, with states of their own; None: PyTorch serves all."""
        texts = (len(k), k.dtype, *q.shape[2:3], q.shape[-2] > 1, k.shape[-1], v.shape[-1])
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
        kept = [served.factors, *[None] * 6, *([None] * 6 if turns is None else turns(served.turning, turns))]
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
        return LayerInC(served, whole_numbers(*served.numbers), addresses_of(*kept), count, windows, kept)

    def holds(self, memory: list, k: Tensor) -> bool:
        """Whether the states still lie at the addresses: all that changes one replaces its count, too."""
        if len(self.count) != len(k) or self.served.work != working_dtype(k):
            return False
        states = [(memory[index], window) for index, window in self.windows.items()]
        return all(state.count is self.count and state.window_k is window for state, window in states)

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
def helpers(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process that help to read; they last, since starting threads takes 0.1 ms a layer."""
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
    addresses[OF_CALL] = [None if x is None else x.data_ptr() for x in (*given, *rest)]
    threads = min(torch.get_num_threads(), len(k) * k.shape[1])
    others = threads - 1 if tokens > 1 else 0  # a token is read before others begin
    parts = [helpers(os.getpid()).submit(kernel, sizes, addresses) for _ in range(others)]
    done = kernel(sizes, addresses), *(part.result() for part in parts)
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
        width = dim if bits == 16 else dim + 1 if bits == 8 else dim * bits // 8 + SCALE_BYTES
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
        state, count=count, **{name: getattr(state, name).to(kinds[name], copy=True, **how) for name in kinds}
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
    plans = [state.layer_in_c for state in memory or () if getattr(state, "layer_in_c", None) is not None]
    return plans[0] if len(plans) == 1 and plans[0].holds(memory or [], k) else None
