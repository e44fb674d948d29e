"""The states of heads in C: rows of numbers or bytes, the state of one head, and the memory that reading needs.

This source follows the source of slots; kernel_heads_in_c.py reads with it.
"""

from __future__ import annotations

from .kernel_slots_in_c import SOURCE as SLOTS

SOURCE = (
    SLOTS
    + r"""
enum {  /* tensors of a group of heads */
       HEAD, METRIC, GAIN, MEAN_QUERY, SINK_K, SINK_V, WINDOW_K, WINDOW_V, SLOT_K, SLOT_V, WEIGHT, SPREAD,
       GROUP_TENSORS };

/* How the keys or the values of one head are turned and stored in rows of a state; and those kept exactly. */
typedef struct {
    long bits, dim, size, width;            /* of a row: padded numbers, bytes */
    const REAL *steps, *middle;             /* of heads that turn vectors; values have no steps */
    REAL *turn, *turn_back;                 /* factors of vectors before and after their rotation */
    long rotated;                           /* numbers that are rotated together */
    REAL *sinks, *near, *zeros;             /* near: the window, then the tokens of a part; zeros: one row */
} Side;

static void read_row(const Side *s, const char *row, REAL *x) {
    if (s->bits == 16) {
        memcpy(x, row, s->width);
    } else if (s->bits == 8) {
        REAL scale = float_of_bits((uint32_t)(((const int8_t *)row)[s->dim] + 127) << 23);
        for (long d = 0; d < s->dim; d++) x[d] = ((const int8_t *)row)[d] * scale;
    } else {
        const uint8_t *bytes = (const uint8_t *)row;
        REAL scale = float_of_bits((uint32_t)(bytes[s->width - 2] | bytes[s->width - 1] << 8) << 16);
        REAL limit = limit_of(s->bits);
        long half = s->dim / 2, high_bits = s->bits - 4, high_bytes = s->dim * high_bits / 8;  /* above four bits */
        uint8_t codes[s->dim];
        for (long d = 0; d < half; d++) codes[d] = bytes[d] & 15, codes[half + d] = bytes[d] >> 4;
        const uint64_t high = ((1 << high_bits) - 1) * 0x0101010101010101u;  /* of eight bytes at once */
        for (long shift = 0, d = 0; d < s->dim && high_bits; shift += high_bits, d += high_bytes) {
            long p = 0;
            for (uint64_t x, y; p + 8 <= high_bytes; p += 8) {
                memcpy(&x, bytes + half + p, 8), memcpy(&y, codes + d + p, 8);
                y |= (x >> shift & high) << 4, memcpy(codes + d + p, &y, 8);
            }
            for (; p < high_bytes; p++) codes[d + p] |= (bytes[half + p] >> shift & high & 255) << 4;
        }
        for (long d = 0; d < s->dim; d++) x[d] = ((REAL)codes[d] - limit) * scale;
    }
}

/* Write a rounded vector. */
static void write_row(const Side *s, const REAL *restrict x, char *restrict row) {
    if (s->bits == 16) {
        memcpy(row, x, s->width);
        return;
    }
    const long dim = s->dim;
    const REAL scale = scale_of(x, dim, s->bits), limit = limit_of(s->bits), inverse = 1 / scale;
    if (s->bits == 8) {
        for (long d = 0; d < dim; d++) row[d] = (int8_t)ROUND(x[d] * inverse);
        row[dim] = (int8_t)((int32_t)(bits_of(scale) >> 23) - 127);
    } else {
        uint8_t *bytes = (uint8_t *)row, codes[dim];
        long half = dim / 2, high_bits = s->bits - 4, high_bytes = dim * high_bits / 8;
        memset(bytes, 0, s->width);
        for (long d = 0; d < dim; d++) codes[d] = (uint8_t)(code_of(x[d], scale, limit) + limit);
        for (long d = 0; d < half; d++) bytes[d] = (codes[d] & 15) | codes[half + d] << 4;
        for (long shift = 0, d = 0; d < dim && high_bits; shift += high_bits, d += high_bytes)
            for (long p = 0; p < high_bytes; p++) bytes[half + p] |= (codes[d + p] >> 4) << shift;
        bytes[s->width - 2] = bits_of(scale) >> 16, bytes[s->width - 1] = bits_of(scale) >> 24;
    }
}

/* Sinks are exact, or have 16 bits where other rows have fewer. */
static void read_sink(const Side *s, const char *sinks, long row, REAL *x) {
    if (s->bits == 16) memcpy(x, sinks + row * s->width, s->width);
    for (long d = 0; d < s->dim && s->bits < 16; d++)
        x[d] = float_of_bits((uint32_t)((const uint16_t *)sinks)[row * s->dim + d] << 16);
}

static void write_sink(const Side *s, const REAL *x, char *sinks, long row) {
    if (s->bits == 16) memcpy(sinks + row * s->width, x, s->width);
    for (long d = 0; d < s->dim && s->bits < 16; d++) ((uint16_t *)sinks)[row * s->dim + d] = bits_of(x[d]) >> 16;
}

/* Rows of tokens that attend at once: the first in a part of a text, their number, their version of slots. */
typedef struct {
    long first, found, slots;
} Rows;

/* The memory in which a thread attends. */
typedef struct {
    REAL *queries, *logits, *top, *sum, *read;
} Scratch;

typedef struct Reader Reader;
typedef void Step(const Reader *r, const Scratch *scratch, long index);

/* The steps, in any order, that the thread of a head shares with idle threads. */
typedef struct {
    int64_t next, count, inside;
    const Reader *reader;
    Step *step;
    int64_t padding[3];
} Shared;

struct Reader {
    Side key, value;
    Slots slots;
    long window, block, sinks, query_heads, state_index, chunk, part, merges;  /* merges: at most, in a part */
    long begin, place, found, version;      /* places of the first near token and of a part; version: the last slots */
    const int64_t *sizes;
    void **tensors;                         /* of the group */
    const REAL *q, *k, *v;
    REAL *out, root, query_scale, *seen, *level;  /* seen, level, seen_counts: of slots after each merge of a part */
    long *tokens, *seen_counts;
    Rows *rows;
    Shared *shared;
};

#define TAKE(x, count) (x = (void *)(memory + used), used += padded((count) * (long)sizeof *(x), BYTES))

/* Lay out the memory of a thread, and return its bytes. */
static long lay_scratch(const Reader *r, Scratch *scratch, char *memory) {
    long used = 0, rows = padded(r->chunk * r->query_heads, LANES);
    long tokens = r->sinks + r->window + r->chunk + r->slots.capacity + PARTS * ROWS;
    TAKE(scratch->queries, r->key.dim * rows), TAKE(scratch->logits, tokens * rows), TAKE(scratch->top, rows);
    TAKE(scratch->sum, rows), TAKE(scratch->read, ROWS * r->value.size);
    return used;
}

/* Lay out the memory of a head, and return its bytes; the first `zeros` bytes must be zero. */
static long lay_out(Reader *r, char *memory, long *zeros) {
    long used = 0, capacity = r->slots.capacity, room = r->slots.room, key = r->key.size, value = r->value.size;
    Slots *slots = &r->slots;
    TAKE(r->key.turn, r->key.dim), TAKE(r->key.turn_back, r->key.dim);
    TAKE(r->value.turn, r->value.dim), TAKE(r->value.turn_back, r->value.dim);
    TAKE(r->key.zeros, key), TAKE(r->value.zeros, value);
    TAKE(r->key.sinks, r->sinks * key), TAKE(r->value.sinks, r->sinks * value);
    *zeros = used;
    TAKE(r->key.near, (r->window + r->part) * key), TAKE(r->value.near, (r->window + r->part) * value);
    if (key > r->key.dim || value > r->value.dim) *zeros = used;
    TAKE(r->tokens, r->part), TAKE(r->rows, r->part), TAKE(r->seen_counts, r->merges + 1);
    TAKE(r->seen, (r->merges + 1) * capacity * (key + value)), TAKE(r->level, (r->merges + 1) * capacity);
    if (!capacity) return used;
    TAKE(slots->rows, room * slots->width), TAKE(slots->columns, (key + value) * room), TAKE(slots->cost, room * room);
    TAKE(slots->key_square, room), TAKE(slots->value_square, room), TAKE(slots->weight, room);
    TAKE(slots->inverse, room), TAKE(slots->spread, room), TAKE(slots->dots, 2 * ROWS * room);
    TAKE(slots->sums, slots->width + ROWS * key), TAKE(slots->metric, r->key.dim * key), TAKE(slots->changed, room);
    TAKE(slots->importance, room), TAKE(slots->query, r->key.dim + 1);
    TAKE(slots->place, room), TAKE(slots->least, room), TAKE(slots->nearest, room), TAKE(slots->removed, room);
    TAKE(slots->stale, room);
    TAKE(slots->order, room), TAKE(slots->chosen, room), TAKE(slots->partner, room), TAKE(slots->free, room);
    return used;
}

/* Return a row of a state's tensor, which has `rows` rows for each head. */
static char *row_of(const Reader *r, const Side *s, int tensor, long rows, long row) {
    return (char *)r->tensors[tensor + (s == &r->value)] + (r->state_index * rows + row) * s->width;
}

static REAL *near_row(const Reader *r, const Side *s, long place) { return s->near + (place - r->begin) * s->size; }

static char *sinks_of(const Reader *r, const Side *s) { return (char *)r->tensors[SINK_K + (s == &r->value)]; }

/* Write rows of zeros. */
static void write_zeros(const Side *s, char *rows, long count) {
    if (count) write_row(s, s->zeros, rows);
    for (long i = 1; i < count; i *= 2) memcpy(rows + i * s->width, rows, (i < count - i ? i : count - i) * s->width);
}

/* Read a state after `count` tokens; before the first token, write zeros. */
static void read_state(Reader *r, long count) {
    for (int v = 0; v < 2; v++) {
        Side *s = v ? &r->value : &r->key;
        if (count) {
            for (long i = 0; i < r->sinks && i < count; i++)
                read_sink(s, sinks_of(r, s), r->state_index * r->sinks + i, s->sinks + i * s->size);
            for (long p = count > r->window ? count - r->window : 0; p < count; p++) {
                REAL *row = near_row(r, s, p);
                if (p < r->sinks) memcpy(row, s->sinks + p * s->size, s->size * sizeof(REAL));
                else read_row(s, row_of(r, s, WINDOW_K, r->window, p % r->window), row);
            }
            continue;
        }
        for (long i = 0; i < r->sinks; i++) write_sink(s, s->zeros, sinks_of(r, s), r->state_index * r->sinks + i);
        write_zeros(s, row_of(r, s, WINDOW_K, r->window, 0), r->window);
    }
    Slots *slots = &r->slots;
    for (long i = 0; count && i < slots->capacity; i++) {
        REAL weight, spread;
        long index = r->state_index * slots->capacity + i;
        if (slots->bits < 8) {
            weight = ((int16_t *)r->tensors[WEIGHT])[index];
            spread = float_of_bits((uint32_t)((uint16_t *)r->tensors[SPREAD])[index] << 16);
        } else {
            weight = ((REAL *)r->tensors[WEIGHT])[index], spread = ((REAL *)r->tensors[SPREAD])[index];
        }
        if (!(weight > 0)) continue;
        add_slot(slots, weight, spread);
        REAL *seen = slots->seen + (slots->count - 1) * (slots->key + slots->value);
        memset(seen, 0, (slots->key + slots->value) * sizeof(REAL));
        read_row(&r->key, row_of(r, &r->key, SLOT_K, slots->capacity, i), seen);
        read_row(&r->value, row_of(r, &r->value, SLOT_K, slots->capacity, i), seen + slots->key);
    }
}

/* Write the rows from a place on, and the slots if they merged. */
static void write_state(Reader *r, long from, long to, int merged) {
    Slots *slots = &r->slots;
    for (int v = 0; v < 2; v++) {
        Side *s = v ? &r->value : &r->key;
        for (long p = from; p < to && p < r->sinks; p++)
            write_sink(s, s->sinks + p * s->size, sinks_of(r, s), r->state_index * r->sinks + p);
        for (long p = to - from > r->window ? to - r->window : from; p < to; p++)
            write_row(s, near_row(r, s, p), row_of(r, s, WINDOW_K, r->window, p % r->window));
        if (!merged) continue;
        const REAL *row = slots->seen + (v ? slots->key : 0);
        for (long i = 0; i < slots->count; i++, row += slots->key + slots->value)
            write_row(s, row, row_of(r, s, SLOT_K, slots->capacity, i));
        write_zeros(s, row_of(r, s, SLOT_K, slots->capacity, slots->count), slots->capacity - slots->count);
    }
    for (long i = 0; merged && i < slots->capacity; i++) {
        long index = r->state_index * slots->capacity + i;
        REAL weight = i < slots->count ? slots->weight[slots->order[i]] : 0;
        REAL spread = i < slots->count ? slots->spread[slots->order[i]] : 0;
        if (slots->bits < 8) {
            ((int16_t *)r->tensors[WEIGHT])[index] = (int16_t)weight;
            ((uint16_t *)r->tensors[SPREAD])[index] = bits_of(spread) >> 16;
        } else {
            ((REAL *)r->tensors[WEIGHT])[index] = weight, ((REAL *)r->tensors[SPREAD])[index] = spread;
        }
    }
}

/* Keep the near rows of the window before a place, and make room for the next part of a text. */
static void move_window(Reader *r, long place) {
    long begin = place > r->window ? place - r->window : 0;
    for (int v = 0; v < 2 && begin > r->begin; v++) {
        Side *s = v ? &r->value : &r->key;
        memmove(s->near, near_row(r, s, begin), (place - begin) * s->size * sizeof(REAL));
    }
    r->begin = begin, r->place = place;
}
"""
)
