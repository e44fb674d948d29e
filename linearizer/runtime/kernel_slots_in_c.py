"""Merging slots on a CPU by a kernel in C.

In PyTorch a block merges in some hundred operations. The kernel merges all blocks of a text, head after head, and keeps
what pairs cost from one block to the next. It does what slots_merging.py does, up to rounding; a pair costs the same
bits whichever of both has changed, so that results do not depend on how a text was cut into calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from .few_bits import BY_AXIS, limits_of, round_vectors
from .kernel_in_c import addresses_of, load_kernel, may_run_in_c, whole_numbers
from .kernel_trial import passes_trial
from .slots_merging import Merging, Slots, merge_block

TRIAL_SLOTS, TRIAL_BLOCK, TRIAL_BLOCKS = 12, 4, 6

Tensor = torch.Tensor

SOURCE = r"""
enum { ROWS = 4 };
enum { FROM, TO, HEADS, PERIODS, SLOTS, BLOCK, COLUMNS, KEY_DIM, VALUE_DIM, BITS, KEPT_BF16 };
enum { OLD_K, OLD_V, OLD_WEIGHT, OLD_SPREAD, NEW_K, NEW_V, INDEX, PRESENT, METRIC, LIMITS_K, LIMITS_V, OUT_K, OUT_V,
       OUT_WEIGHT, OUT_SPREAD };

static const REAL TINY = 1e-30, MOST_TOKENS = 32767;

/* The slots of one head: rows of metric·k, v and k, each padded to whole vectors; and what distances are made of. */
typedef struct {
    long count, room, key, value, width;        /* slots held, places for them, padded sizes */
    REAL *rows, *columns, *cost;                /* (room, width), (key + value, room), (room, room) */
    REAL *key_square, *value_square, *weight, *inverse, *spread, *dots, *mean, *sums;
    REAL *metric;                               /* (key_dim, key), turned */
    char *changed, *gone;
    long *order, *partner;
} Head;

static void round_vector(REAL *x, long dim, long bits, int kept_bf16, const REAL *limits) {
    if (kept_bf16)
        for (long d = 0; d < dim; d++) x[d] = as_bf16(x[d]);
    if (bits == 16) return;
    if (bits == 8) {
        float top = 0, scale;
        for (long d = 0; d < dim; d++) top = fabsf((float)x[d]) > top ? fabsf((float)x[d]) : top;
        uint32_t number;
        memcpy(&number, &top, 4);
        number = (number + 0x1FFFF) & 0x7F800000u;
        memcpy(&scale, &number, 4);
        scale = fminf(fmaxf(scale * 0x1p-6f, 0x1p-24f), 0x1p121f);
        for (long d = 0; d < dim; d++) x[d] = ROUND(x[d] / (REAL)scale) * (REAL)scale;
        return;
    }
    REAL scale = best_scale(x, dim, limits);
    for (long d = 0; d < dim; d++) x[d] = code_of(x[d], scale, limits[d]) * scale;
}

/* Complete a slot whose v and k are in its row. */
static void measure_slot(Head *h, long i, const int64_t *sizes) {
    REAL *row = h->rows + i * h->width, *k = row + h->key + h->value;
    vec *seen = (vec *)row;
    memset(row, 0, h->key * sizeof(REAL));
    for (long c = 0; c < sizes[KEY_DIM]; c++) {
        const vec *metric = (const vec *)(h->metric + c * h->key);
        for (long r = 0; r < h->key / LANES; r++) seen[r] += k[c] * metric[r];
    }
    REAL key = 0, value = 0;
    for (long d = 0; d < h->key; d++) key += row[d] * row[d];
    for (long d = 0; d < h->value; d++) value += row[h->key + d] * row[h->key + d];
    h->key_square[i] = key, h->value_square[i] = value, h->inverse[i] = 1 / h->weight[i], h->changed[i] = 1;
    for (long d = 0; d < h->key + h->value; d++) h->columns[d * h->room + i] = row[d];
}

/* Products of some slots with all, over some of the columns: the same bits for a pair, whichever is a row. */
static void multiply(const Head *h, long from, long to, const long *rows, REAL *out) {
    for (long j = 0; j < padded(h->count, TILE); j += TILE) {
        vec sum[ROWS][2];
        memset(sum, 0, sizeof sum);
        for (long d = from; d < to; d++) {
            const REAL *column = h->columns + d * h->room;
            vec a = *(const vec *)(column + j), b = *(const vec *)(column + j + LANES);
            for (int r = 0; r < ROWS; r++) sum[r][0] += a * column[rows[r]], sum[r][1] += b * column[rows[r]];
        }
        for (int r = 0; r < ROWS; r++) {
            *(vec *)(out + r * h->room + j) = sum[r][0];
            *(vec *)(out + r * h->room + j + LANES) = sum[r][1];
        }
    }
}

/* Compute what merging costs each pair of which a slot has changed. */
static void measure_pairs(Head *h) {
    long n = h->count, found = 0, some[ROWS];
    REAL *key = h->dots, *value = h->dots + ROWS * h->room;
    for (long i = 0; i < n || found;) {
        for (; i < n && found < ROWS; i++)
            if (h->changed[i]) some[found++] = i;
        if (!found) break;
        for (long r = found; r < ROWS; r++) some[r] = some[0];
        multiply(h, 0, h->key, some, key);
        multiply(h, h->key, h->key + h->value, some, value);
        for (long r = 0; r < found; r++) {
            REAL *cost = h->cost + some[r] * h->room, *kk = key + r * h->room, *vv = value + r * h->room;
            REAL a = h->key_square[some[r]], b = h->value_square[some[r]], own = h->inverse[some[r]];
            for (long j = 0; j < n; j++) {
                REAL x = a + h->key_square[j] - 2 * kk[j], y = b + h->value_square[j] - 2 * vv[j];
                x = x * x / (own + h->inverse[j]);
                cost[j] = x * x * (y > TINY ? y : TINY);
            }
            cost[some[r]] = INFINITY;
            for (long j = 0; j < n; j++) h->cost[j * h->room + some[r]] = cost[j];
            h->changed[some[r]] = 0;
        }
        found = 0;
    }
}

/* Choose which slots go, and into which that stay. */
static void choose_pairs(Head *h, long most) {
    long n = h->count, chosen = 0;
    REAL *cheapest = h->dots, lanes[LANES];
    for (long i = 0; i < n; i++) h->gone[i] = 0;
    for (long i = 0; i < n; i++) {
        REAL best = INFINITY;
        const REAL *cost = h->cost + i * h->room;
        for (long j = i / LANES * LANES; j < i; j++) best = cost[j] < best ? cost[j] : best;
        for (long l = 0; l < LANES; l++) lanes[l] = INFINITY;
        for (long j = 0; j < i / LANES * LANES; j += LANES)
            for (long l = 0; l < LANES; l++) lanes[l] = cost[j + l] < lanes[l] ? cost[j + l] : lanes[l];
        for (long l = 0; l < LANES; l++) best = lanes[l] < best ? lanes[l] : best;
        cheapest[i] = best;
        long at = chosen < most ? chosen : most;
        while (at > 0 && best < cheapest[h->order[at - 1]]) at--;
        if (at == most) continue;
        chosen = chosen < most ? chosen + 1 : most;
        for (long o = chosen - 1; o > at; o--) h->order[o] = h->order[o - 1];
        h->order[at] = i;
    }
    for (long o = 0; o < most; o++) h->gone[h->order[o]] = 1;
    for (long o = 0; o < most; o++) {
        const REAL *cost = h->cost + h->order[o] * h->room;
        long partner = -1;
        for (long j = 0; j < n; j++)
            if (!h->gone[j] && (partner < 0 || cost[j] < cost[partner])) partner = j;
        h->partner[o] = partner;
    }
}

/* Merge what goes into what stays. */
static void merge_pairs(Head *h, long most, const int64_t *sizes, const REAL *limits_k, const REAL *limits_v) {
    for (long o = 0; o < most; o++) {
        long into = h->partner[o];
        if (into < 0) continue;
        REAL *row = h->rows + into * h->width, total = h->weight[into];
        REAL square = total * h->key_square[into], spread = total * h->spread[into];
        for (long d = 0; d < h->width; d++) h->sums[d] = total * row[d];
        for (long p = o; p < most; p++) {
            if (h->partner[p] != into) continue;
            long from = h->order[p];
            REAL weight = h->weight[from], *other = h->rows + from * h->width;
            square += weight * h->key_square[from], spread += weight * h->spread[from], total += weight;
            for (long d = 0; d < h->width; d++) h->sums[d] += weight * other[d];
            h->partner[p] = -1;
        }
        for (long d = 0; d < h->width; d++) row[d] = h->sums[d] / total;
        spread = square / total + spread / total;
        REAL of_mean = 0;
        for (long d = 0; d < h->key; d++) of_mean += row[d] * row[d];
        spread = spread > of_mean ? spread - of_mean : 0;
        if (sizes[BITS] < 8) spread = as_bf16(spread), total = total > MOST_TOKENS ? MOST_TOKENS : total;
        h->weight[into] = total, h->spread[into] = spread;
        round_vector(row + h->key, sizes[VALUE_DIM], sizes[BITS], sizes[KEPT_BF16], limits_v);
        round_vector(row + h->key + h->value, sizes[KEY_DIM], sizes[BITS], sizes[KEPT_BF16], limits_k);
        measure_slot(h, into, sizes);
    }
}

/* Close the gaps that slots left which went. */
static void close_gaps(Head *h) {
    long n = h->count, kept = 0;
    for (long i = 0; i < n; i++)
        if (!h->gone[i]) h->order[kept++] = i;
    for (long i = 0; i < kept; i++) {
        long from = h->order[i];
        if (from != i) {
            memcpy(h->rows + i * h->width, h->rows + from * h->width, h->width * sizeof(REAL));
            h->key_square[i] = h->key_square[from], h->value_square[i] = h->value_square[from];
            h->weight[i] = h->weight[from], h->inverse[i] = h->inverse[from], h->spread[i] = h->spread[from];
            h->changed[i] = h->changed[from];
        }
        REAL *to = h->cost + i * h->room, *cost = h->cost + from * h->room;
        for (long j = 0; j < kept; j++) to[j] = cost[h->order[j]];
    }
    for (long d = 0; d < h->key + h->value; d++) {
        REAL *column = h->columns + d * h->room;
        for (long j = 0; j < kept; j++) column[j] = column[h->order[j]];
    }
    h->count = kept;
}

static void add_slot(Head *h, const REAL *k, const REAL *v, REAL weight, REAL spread, const int64_t *sizes) {
    REAL *row = h->rows + h->count * h->width;
    memset(row, 0, h->width * sizeof(REAL));
    memcpy(row + h->key, v, sizes[VALUE_DIM] * sizeof(REAL));
    memcpy(row + h->key + h->value, k, sizes[KEY_DIM] * sizeof(REAL));
    h->weight[h->count] = weight, h->spread[h->count] = spread;
    measure_slot(h, h->count++, sizes);
}

static void merge_head(Head *h, long b, long head, const int64_t *sizes, void **tensors) {
    long heads = sizes[HEADS], slots = sizes[SLOTS], block = sizes[BLOCK], dk = sizes[KEY_DIM], dv = sizes[VALUE_DIM];
    long own = b * heads + head;
    const REAL *metric = (REAL *)tensors[METRIC] + head * dk * dk;
    h->count = 0;
    memset(h->metric, 0, dk * h->key * sizeof(REAL));
    for (long r = 0; r < dk; r++)
        for (long c = 0; c < dk; c++) h->metric[c * h->key + r] = metric[r * dk + c];
    const REAL *weight = (REAL *)tensors[OLD_WEIGHT] + own * slots, *spread = (REAL *)tensors[OLD_SPREAD] + own * slots;
    const REAL *old_k = (REAL *)tensors[OLD_K] + own * slots * dk, *old_v = (REAL *)tensors[OLD_V] + own * slots * dv;
    for (long i = 0; i < slots; i++)
        if (weight[i] > 0) add_slot(h, old_k + i * dk, old_v + i * dv, weight[i], spread[i], sizes);
    for (long period = 0; period < sizes[PERIODS]; period++) {
        long at = b * sizes[PERIODS] + period, out = (at * heads + head) * slots;
        const int64_t *index = (int64_t *)tensors[INDEX] + at * block;
        const uint8_t *present = (uint8_t *)tensors[PRESENT] + at * block;
        for (long t = 0; t < block; t++) {
            long token = own * sizes[COLUMNS] + index[t];
            if (present[t])
                add_slot(h, (REAL *)tensors[NEW_K] + token * dk, (REAL *)tensors[NEW_V] + token * dv, 1, 0, sizes);
        }
        if (h->count > slots) {
            long most = h->count - slots;
            measure_pairs(h);
            choose_pairs(h, most);
            merge_pairs(h, most, sizes, tensors[LIMITS_K], tensors[LIMITS_V]);
            close_gaps(h);
        }
        REAL *k = (REAL *)tensors[OUT_K] + out * dk, *v = (REAL *)tensors[OUT_V] + out * dv;
        for (long i = 0; i < h->count; i++) {
            const REAL *row = h->rows + i * h->width;
            memcpy(k + i * dk, row + h->key + h->value, dk * sizeof(REAL));
            memcpy(v + i * dv, row + h->key, dv * sizeof(REAL));
        }
        memcpy((REAL *)tensors[OUT_WEIGHT] + out, h->weight, h->count * sizeof(REAL));
        memcpy((REAL *)tensors[OUT_SPREAD] + out, h->spread, h->count * sizeof(REAL));
        long left = slots - h->count;
        memset(k + h->count * dk, 0, left * dk * sizeof(REAL));
        memset(v + h->count * dv, 0, left * dv * sizeof(REAL));
        memset((REAL *)tensors[OUT_WEIGHT] + out + h->count, 0, left * sizeof(REAL));
        memset((REAL *)tensors[OUT_SPREAD] + out + h->count, 0, left * sizeof(REAL));
    }
}

/* Merge the blocks that come to some heads of all texts, one after the other; return whether there was memory. */
int merge_blocks(const int64_t *sizes, void **tensors) {
    Head h;
    h.room = padded(sizes[SLOTS] + sizes[BLOCK], TILE);
    h.key = padded(sizes[KEY_DIM], LANES), h.value = padded(sizes[VALUE_DIM], LANES), h.width = 2 * h.key + h.value;
    long of_room = h.width + h.key + h.value + h.room + 5 + 2 * ROWS, rest = sizes[KEY_DIM] * h.key + h.width;
    REAL *memory = aligned_alloc(32, padded((h.room * of_room + rest) * sizeof(REAL), 32));
    char *small = calloc(h.room, 2 + 2 * sizeof(long));
    if (memory && small) {
        memset(memory, 0, (h.room * of_room + rest) * sizeof(REAL));
        REAL *next = memory;
        h.rows = next, next += h.room * h.width;
        h.columns = next, next += h.room * (h.key + h.value);
        h.cost = next, next += h.room * h.room;
        h.dots = next, next += h.room * 2 * ROWS;
        h.metric = next, next += sizes[KEY_DIM] * h.key;
        h.sums = next, next += h.width;
        h.key_square = next, next += h.room;
        h.value_square = next, next += h.room;
        h.weight = next, next += h.room;
        h.inverse = next, next += h.room;
        h.spread = next;
        h.order = (long *)small, h.partner = h.order + h.room;
        h.changed = (char *)(h.partner + h.room), h.gone = h.changed + h.room;
        for (long own = sizes[FROM]; own < sizes[TO]; own++)
            merge_head(&h, own / sizes[HEADS], own % sizes[HEADS], sizes, tensors);
    }
    int done = memory && small;
    free(memory), free(small);
    return done;
}
"""


def merges_in_c(held: Slots, k: Tensor, v: Tensor, merging: Merging) -> bool:
    """Tell whether the kernel may merge blocks of tokens (batch, heads, tokens, dim): it gives no gradients."""
    work = held.weight.dtype
    if held.k.dtype not in (work, torch.bfloat16) or not may_run_in_c(k, v, held.k, held.v):
        return False
    if load_kernel("merge_blocks", SOURCE, work) is None:
        return False
    sizes = (k.shape[-1], v.shape[-1], merging.bits)
    return passes_trial("slots in C", k, sizes, functools.partial(merge_trial_text, sizes, work))


def merge_trial_text(
    sizes: tuple[int, int, int], work: torch.dtype, by_kernel: bool, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Merge a small text; its numbers are so round that no mean of them lies near what rounds up or down."""
    (*dims, bits), heads = sizes, 2
    generator, dtype = torch.Generator("cpu").manual_seed(0), work if dtype != torch.float64 else dtype
    shape = 1, heads, TRIAL_BLOCK * TRIAL_BLOCKS
    drawn = (torch.randn(*shape, dim, generator=generator, device="cpu") for dim in dims)
    k, v = ((x * 1024).round() / 1024 for x in drawn)
    k, v = (x.to(dtype) for x in ((round_vectors(x, bits) if bits < 16 else x) for x in (k, v)))
    metric = torch.eye(dims[0], dtype=dtype, device="cpu").expand(heads, -1, -1)
    merging = Merging(metric, metric[:, 0, 0], TRIAL_BLOCK, TRIAL_BLOCK, bits=bits)
    numbers = k.new_zeros(1, heads, TRIAL_SLOTS)
    none_k, none_v = (x.new_zeros(1, heads, TRIAL_SLOTS, x.shape[-1]) for x in (k, v))
    held = Slots(none_k, none_v, numbers, numbers)
    index = torch.arange(k.shape[2], device="cpu").view(1, TRIAL_BLOCKS, TRIAL_BLOCK)
    present = index >= 2
    if by_kernel:
        merged = merge_blocks_in_c(held, k, v, index, present, merging)
        return [x[-1:] for x in merged.all()]
    for block in range(TRIAL_BLOCKS):
        held = merge_block(held, k[:, :, index[0, block]], v[:, :, index[0, block]], present[:, block], merging)
    return held.all()


def merge_block_in_c(held: Slots, k: Tensor, v: Tensor, comes: Tensor, merging: Merging) -> Slots:
    """Merge a block of tokens (batch, heads, block, dim), of which some come (batch, block), into slots."""
    index = torch.arange(k.shape[2], device=k.device).expand(len(k), 1, -1)
    merged = merge_blocks_in_c(held, k, v, index, comes[:, None], merging)
    return replace(merged, k=merged.k.to(held.k.dtype), v=merged.v.to(held.v.dtype))


def merge_blocks_in_c(held: Slots, k: Tensor, v: Tensor, index: Tensor, present: Tensor, merging: Merging) -> Slots:
    """Merge blocks, one after the other; return the slots after each, (batch · blocks, heads, slots, …), in order.

    k, v (batch, heads, tokens, dim); index, present (batch, blocks, block) the tokens of the blocks, and which come.
    """
    work, kept = held.weight.dtype, held.k.dtype
    (batch, heads, slots, key_dim), value_dim = held.k.shape, held.v.shape[-1]
    dims, bits = (key_dim, value_dim), merging.bits
    rounds = kept == torch.bfloat16 and work != kept
    sizes = heads, index.shape[1], slots, index.shape[2], k.shape[2], *dims, bits, rounds
    limits = [limits_of(bits, dim, work, k.device) if bits in BY_AXIS else held.weight for dim in dims]
    tokens = [x.to(work) for x in (held.k, held.v, held.weight, held.spread, k, v)]
    inputs = [x.contiguous() for x in (*tokens, index, present, merging.scaled.to(work), *limits)]
    shape = batch * index.shape[1], heads, slots
    out = [torch.empty(shape + more, dtype=work, device=k.device) for more in ((key_dim,), (value_dim,), (), ())]
    kernel = load_kernel("merge_blocks", SOURCE, work)
    assert kernel is not None
    addresses, count = addresses_of(*inputs, *out), batch * heads
    threads = min(torch.get_num_threads(), count if index.shape[1] > 1 else 1)  # one block is done before they begin
    ends = [count * part // threads for part in range(threads + 1)]
    parts = [whole_numbers(*pair, *sizes) for pair in itertools.pairwise(ends)]
    if threads == 1:
        done = [kernel(parts[0], addresses)]
    else:
        with ThreadPoolExecutor(threads) as pool:  # a kernel lets other threads of Python work meanwhile
            done = [*pool.map(kernel, parts, [addresses] * threads)]
    if not all(done):
        raise MemoryError("no memory to merge slots in")
    return Slots(*out)
