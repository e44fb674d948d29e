"""A token for heads with windows and slots on a CPU by a kernel in C: what token_buffer.py does, up to rounding.

The kernel writes the token into the rings of all heads that lie in a buffer, as numbers or as bytes, and attends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .kernel_in_c import Kernel, load_kernel, may_run_in_c, whole_numbers

AXIS_PARTS = ("factor", "middle", "enter", "limits", "pack", "share", "base")  # in the order of the kernel

Tensor = torch.Tensor

SOURCE = r"""
enum { BATCH, ALL, HEADS, GROUP, ROWS, SINKS, KEY_DIM, VALUE_DIM, BITS, KEY_BYTES, VALUE_BYTES };
enum { Q, K, V, OUT, HEAD, WINDOW, PLACE, SCALE, BUFFER_K, BUFFER_V, LEVEL, OF_KEYS, OF_VALUES = OF_KEYS + 7,
       ASK = OF_VALUES + 7, KEY_MIDDLE, BACK, MIDDLE, VALUE_MIDDLE };
enum { FACTOR, SHIFT, ENTER, LIMITS, PACK, SHARE, BASE };

/* How the keys or the values of one head lie in rows. */
typedef struct {
    long bits, dim, bytes, numbers, width;  /* of axes bytes of numbers; numbers that are read, bytes of a row */
    const REAL *axes[7];
} Side;

/* Read a row as numbers, padded by zeros, of which the scale is given. */
static REAL read_row(const Side *s, const char *row, REAL *numbers) {
    if (s->bits == 16) {
        memcpy(numbers, row, s->dim * sizeof(REAL));
        return 1;
    }
    if (s->bits == 8) {
        const int8_t *codes = (const int8_t *)row;
        for (long d = 0; d < s->dim; d++) numbers[d] = codes[d];
        return (REAL)ldexpf(1, codes[s->dim]);
    }
    const uint8_t *bytes = (const uint8_t *)row;
    const REAL *share = s->axes[SHARE], *base = s->axes[BASE];
    for (long w = 0; w < s->bytes; w++) {
        REAL high = (REAL)(int)(bytes[w] * share[w]);
        numbers[w] = high, numbers[s->bytes + w] = bytes[w] - high * base[w];
    }
    uint32_t number = (uint32_t)(bytes[s->bytes] | bytes[s->bytes + 1] << 8) << 16;
    float scale;
    memcpy(&scale, &number, 4);
    return scale;
}

/* Write a vector as a row; `work` has room for two vectors. */
static void write_row(const Side *s, const REAL *x, char *row, REAL *work) {
    if (s->bits == 16) {
        memcpy(row, x, s->dim * sizeof(REAL));
    } else if (s->bits == 8) {
        float top = 0;
        for (long d = 0; d < s->dim; d++) top = fabsf((float)x[d]) > top ? fabsf((float)x[d]) : top;
        int32_t number;
        memcpy(&number, &top, 4);
        number = (number + 0x1FFFF - (133 << 23)) >> 23;
        number = number < -24 ? -24 : number > 121 ? 121 : number;
        REAL by = (REAL)ldexpf(1, -number);
        for (long d = 0; d < s->dim; d++) ((int8_t *)row)[d] = (int8_t)ROUND(x[d] * by);
        ((int8_t *)row)[s->dim] = (int8_t)number;
    } else {
        const REAL *enter = s->axes[ENTER], *limits = s->axes[LIMITS], *pack = s->axes[PACK];
        REAL *numbers = work, *bytes = work + s->dim;
        memset(work, 0, (s->dim + s->bytes) * sizeof(REAL));
        for (long c = 0; c < s->dim; c++) {
            REAL from = x[c] * s->axes[FACTOR][0] + s->axes[SHIFT][c];
            for (long d = 0; d < s->dim; d++) numbers[d] += from * enter[c * s->dim + d];
        }
        REAL scale = best_scale(numbers, s->dim, limits);
        for (long d = 0; d < s->dim; d++) {
            REAL whole = code_of(numbers[d], scale, limits[d]) + limits[d];
            for (long w = 0; w < s->bytes; w++) bytes[w] += whole * pack[d * s->bytes + w];
        }
        for (long w = 0; w < s->bytes; w++) ((uint8_t *)row)[w] = (uint8_t)bytes[w];
        float rounded = (float)scale;
        uint32_t number;
        memcpy(&number, &rounded, 4);
        ((uint8_t *)row)[s->bytes] = number >> 16, ((uint8_t *)row)[s->bytes + 1] = number >> 24;
    }
}

static REAL product(const REAL *x, const REAL *y, long size) {
    vec sum = {0};
    REAL whole = 0;
    for (long d = 0; d < size; d += LANES) sum += *(const vec *)(x + d) * *(const vec *)(y + d);
    for (long d = 0; d < LANES; d++) whole += sum[d];
    return whole;
}

/* e^x for x that is at most 0; 0 where that nearly underflows. */
static inline REAL exponential(REAL x) {
    if (sizeof(REAL) == 8) return exp(x);
    float y = x < -87 ? -87 : x, whole = rintf(y * 1.44269504f), r = y - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f, sum = sum * r + 8.3334519073e-3f, sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f, sum = sum * r + 5.0000001201e-1f, sum = sum * r * r + r + 1;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87 ? 0 : sum * power;
}

/* One softmax of a query over weights, in place. */
static void soften(REAL *logits, long rows) {
    REAL top = logits[0], sum = 0;
    for (long r = 1; r < rows; r++) top = logits[r] > top ? logits[r] : top;
    for (long r = 0; r < rows; r++) logits[r] = exponential(logits[r] - top);
    for (long r = 0; r < rows; r++) sum += logits[r];
    for (long r = 0; r < rows; r++) logits[r] /= sum;
}

static Side side_of(const int64_t *sizes, void **tensors, int keys, long head) {
    Side s = {sizes[BITS], sizes[keys ? KEY_DIM : VALUE_DIM], sizes[keys ? KEY_BYTES : VALUE_BYTES], 0, 0, {0}};
    s.numbers = s.bits < 8 ? 2 * s.bytes : s.dim;
    s.width = s.bits == 16 ? s.dim * (long)sizeof(REAL) : s.bits == 8 ? s.dim + 1 : s.bytes + 2;
    if (s.bits < 8) {
        long each[7] = {1, s.dim, s.dim * s.dim, s.dim, s.dim * s.bytes, s.bytes, s.bytes};
        for (int part = 0; part < 7; part++)
            s.axes[part] = (REAL *)tensors[(keys ? OF_KEYS : OF_VALUES) + part] + head * each[part];
    }
    return s;
}

/* Write a token into the rings of heads, and attend with it. */
int attend_token(const int64_t *sizes, void **tensors) {
    long group = sizes[GROUP], rows = sizes[ROWS], dk = sizes[KEY_DIM], dv = sizes[VALUE_DIM];
    long most = 2 * (sizes[KEY_BYTES] > sizes[VALUE_BYTES] ? sizes[KEY_BYTES] : sizes[VALUE_BYTES]);
    most = padded(most > dk ? most > dv ? most : dv : dk > dv ? dk : dv, LANES);
    REAL *memory = aligned_alloc(32, padded((2 * most + group * (most + rows + 1)) * sizeof(REAL), 32));
    if (!memory) return 0;
    REAL *numbers = memory, *asks = numbers + 2 * most, *logits = asks + group * most, *less = logits + group * rows;
    REAL scale = *(double *)tensors[SCALE];
    for (long b = 0; b < sizes[BATCH]; b++)
        for (long h = 0; h < sizes[HEADS]; h++) {
            Side key = side_of(sizes, tensors, 1, h), value = side_of(sizes, tensors, 0, h);
            long head = ((int64_t *)tensors[HEAD])[h], from = b * sizes[ALL] + head, own = b * sizes[HEADS] + h;
            long place = sizes[SINKS] + ((int64_t *)tensors[PLACE])[b] % ((int64_t *)tensors[WINDOW])[h];
            const REAL *q = (REAL *)tensors[Q] + from * group * dk;
            char *keys = (char *)tensors[BUFFER_K] + own * rows * key.width;
            char *values = (char *)tensors[BUFFER_V] + own * rows * value.width;
            REAL *level = (REAL *)tensors[LEVEL] + own * rows, *out = (REAL *)tensors[OUT] + from * group * dv;
            write_row(&key, (REAL *)tensors[K] + from * dk, keys + place * key.width, numbers);
            write_row(&value, (REAL *)tensors[V] + from * dv, values + place * value.width, numbers);
            level[place] = 0;
            memset(numbers, 0, 2 * most * sizeof(REAL)), memset(asks, 0, group * most * sizeof(REAL));
            for (long g = 0; g < group; g++) {
                REAL *ask = asks + g * most;
                less[g] = 0;
                if (key.bits < 8) {
                    const REAL *turn = (REAL *)tensors[ASK] + h * dk * key.numbers;
                    const REAL *middle = (REAL *)tensors[KEY_MIDDLE] + h * key.numbers;
                    for (long c = 0; c < dk; c++)
                        for (long d = 0; d < key.numbers; d++) ask[d] += q[g * dk + c] * turn[c * key.numbers + d];
                    for (long d = 0; d < key.numbers; d++) less[g] += ask[d] * middle[d];
                } else {
                    for (long c = 0; c < dk; c++) ask[c] = q[g * dk + c] * scale;
                }
            }
            for (long r = 0; r < rows; r++) {
                if (level[r] <= EMPTY) {
                    for (long g = 0; g < group; g++) logits[g * rows + r] = EMPTY;
                    continue;
                }
                REAL by = read_row(&key, keys + r * key.width, numbers);
                for (long g = 0; g < group; g++) {
                    REAL sum = product(asks + g * most, numbers, most) - less[g];
                    logits[g * rows + r] = sum * by + level[r];
                }
            }
            for (long g = 0; g < group; g++) soften(logits + g * rows, rows);
            memset(asks, 0, group * most * sizeof(REAL)), memset(numbers, 0, 2 * most * sizeof(REAL));
            memset(less, 0, group * sizeof(REAL));
            for (long r = 0; r < rows; r++) {
                if (level[r] <= EMPTY) continue;
                REAL by = read_row(&value, values + r * value.width, numbers);
                for (long g = 0; g < group; g++) {
                    REAL weight = logits[g * rows + r] * by;
                    vec *sum = (vec *)(asks + g * most);
                    for (long d = 0; d < most / LANES; d++) sum[d] += weight * ((vec *)numbers)[d];
                    less[g] += weight;
                }
            }
            for (long g = 0; g < group; g++) {
                const REAL *sum = asks + g * most;
                if (value.bits >= 8) {
                    memcpy(out + g * dv, sum, dv * sizeof(REAL));
                    continue;
                }
                const REAL *back = (REAL *)tensors[BACK] + h * value.numbers * dv;
                const REAL *mean = (REAL *)tensors[MIDDLE] + h * dv, *middle = (REAL *)tensors[VALUE_MIDDLE] + h * dv;
                for (long d = 0; d < dv; d++) out[g * dv + d] = mean[d] - less[g] * middle[d];
                for (long c = 0; c < value.numbers; c++)
                    for (long d = 0; d < dv; d++) out[g * dv + d] += sum[c] * back[c * dv + d];
            }
        }
    free(memory);
    return 1;
}
"""


@dataclass(frozen=True, slots=True)
class TokenInC:
    """What the kernel needs of a buffer: all but the token lies at the same addresses from call to call."""

    kernel: Kernel
    sizes: Any
    addresses: Any  # those of q, k, v and what is put out come first
    places: Any
    kept: tuple  # tensors and numbers that live at the addresses

    @staticmethod
    def of(
        buffers: Sequence[Tensor], level: Tensor, heads: Sequence[int], all_heads: int, windows: Tensor, sinks: int,
        group: int, dims: tuple[int, int], bits: int, scale: float, axes: Any,
    ) -> TokenInC | None:  # fmt: skip
        """Prepare for a buffer of (keys and values, batch, heads, rows, …), or one for each; None: PyTorch serves.

        `axes` (AxisBytes of state_in_few_bits.py) is given where numbers have fewer than 8 bits.
        """
        work = level.dtype
        if (bits == 16 and buffers[0].dtype != work) or not may_run_in_c(level, *buffers):
            return None
        kernel = load_kernel("attend_token", SOURCE, work)
        if kernel is None:
            return None
        keys, values = buffers[0][0], buffers[-1][-1]
        bytes = [0, 0] if axes is None else [x.shape[-1] - 2 for x in (keys, values)]
        sizes = len(level), all_heads, len(heads), group, level.shape[-1], sinks, *dims, bits, *bytes
        places = (ctypes.c_int64 * len(level))()
        factor, chosen = ctypes.c_double(scale), torch.tensor(heads)
        tensors = [chosen, windows, keys, values, level]
        if axes is not None:
            sides = (axes.sides[0], 0), (axes.sides[-1], -1)
            of_axes = [getattr(side, name)[at, 0].contiguous() for side, at in sides for name in AXIS_PARTS]
            rest = [axes.ask, axes.key_middle, axes.back, axes.middle, axes.value_middle]
            tensors += [*of_axes, *(x.contiguous() for x in rest)]
        given = [x.data_ptr() for x in tensors]
        pointers = ctypes.addressof(places), ctypes.addressof(factor)
        addresses = (ctypes.c_void_p * (len(given) + 6))(0, 0, 0, 0, *given[:2], *pointers, *given[2:])
        return TokenInC(kernel, whole_numbers(*sizes), addresses, places, (*tensors, factor))

    def __reduce__(self) -> tuple:
        """Become nothing in a copy, whose tensors lie elsewhere: PyTorch serves it."""
        return type(None), ()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, places: Sequence[int]) -> None:
        """Attend with the token at these places, q, k, v and out being those of the whole layer, into `out`."""
        tensors = [x.contiguous() for x in (q, k, v)]
        for index, x in enumerate((*tensors, out)):
            self.addresses[index] = x.data_ptr()
        self.places[:] = places
        if not self.kernel(self.sizes, self.addresses):
            raise MemoryError("no memory to attend in")
