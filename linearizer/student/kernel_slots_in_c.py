"""Merging of slots in C: the rounding of vectors, and the slots of one head; kernel_state_in_c.py stores them.

Slots merge as in slots_merging.py, up to rounding; the costs of pairs are kept from one block to the next. A pair's
cost has the same bits whichever slot changed, so results do not depend on how a text was cut into calls.
"""

SOURCE = r"""
enum { ROWS_AT_ONCE = 48, PARTS = 3, PART_TOKENS = 256 };

static const REAL TINY = 1e-30, MOST_TOKENS = 32767, MOST_IMPORTANT = 20;

/* The slots of one head: rows of metric·k, v and k, each padded to whole vectors; and the terms of distances.
   A slot stays in one row as long as it exists, so that costs of pairs need not move; `order` has the rows in the order
   of tokens, and `seen` has k and v in that order. */
typedef struct {
    long count, used, unused, room, capacity;   /* slots; rows ever used, free again, and in all; slots after merging */
    long key, value, width;                     /* padded sizes */
    long key_dim, value_dim, bits, kept_bf16;
    REAL *rows, *columns;                       /* (room, width), (key + value, room) */
    REAL *cost, *seen;                          /* (room, room), (room, key + value) */
    REAL *key_square, *value_square, *weight, *inverse, *spread, *dots, *sums;
    REAL *metric;                               /* (key_dim, key), turned */
    REAL *importance, *query;                   /* query: the mean query, and its product with the mean key */
    REAL *place, *least, *nearest;              /* place, infinite in a free row; least cost with an earlier one, row */
    char *changed, *removed, *stale;            /* stale: its nearest slot changed or was removed */
    long *order, *chosen, *partner, *free;
} Slots;

static REAL limit_of(long bits) { return ((1 << bits) - 1) / (REAL)2; }

/* Return the scale of a vector: in 8 bits the least power of two with which its largest number fits. */
static REAL scale_of(const REAL *x, long dim, long bits) {
    if (bits < 8) return best_scale(x, dim, limit_of(bits));
    float top = (float)float_of_bits((bits_of(largest(x, dim)) + 0x1FFFF) & 0x7F800000u);
    top *= 0x1p-6f, top = top > 0x1p-24f ? top : 0x1p-24f;  /* fmaxf would be a call */
    return top < 0x1p121f ? top : 0x1p121f;
}

static void round_vector(REAL *x, long dim, long bits, long kept_bf16) {
    for (long d = 0; d < dim && kept_bf16; d++) x[d] = as_bf16(x[d]);
    if (bits == 16) return;
    REAL scale = scale_of(x, dim, bits), limit = limit_of(bits);
    const REAL inverse = 1 / scale;  /* exact in 8 bits */
    if (bits == 8)
        for (long d = 0; d < dim; d++) x[d] = ROUND(x[d] * inverse) * scale;
    else
        for (long d = 0; d < dim; d++) x[d] = code_of(x[d], scale, limit) * scale;
}

/* Return a free row for the newest slot; the caller writes v and k into it. */
static REAL *add_slot(Slots *s, REAL weight, REAL spread) {
    long i = s->unused ? s->free[--s->unused] : s->used++;
    s->weight[i] = weight, s->spread[i] = spread, s->changed[i] = 1, s->removed[i] = 0;
    s->place[i] = s->count, s->order[s->count++] = i;
    return s->rows + i * s->width;
}

/* Copy slots from rows into the order in which queries see them; or, with in_rows, back into rows. */
static void show_slots(Slots *s, int in_rows) {
    for (long o = 0; o < s->count; o++) {
        REAL *row = s->rows + s->order[o] * s->width, *seen = s->seen + o * (s->key + s->value);
        REAL *k = row + s->key + s->value, *v = row + s->key;
        memcpy(in_rows ? k : seen, in_rows ? seen : k, s->key * sizeof(REAL));
        memcpy(in_rows ? v : seen + s->key, in_rows ? seen + s->key : v, s->value * sizeof(REAL));
    }
}

/* Copy ROWS rows into columns, and add up their squares: side by side, since each sum is a long chain. */
static inline __attribute__((always_inline)) void copy_rows(REAL *const *rows, long size, REAL *columns, long room,
                                                            const long *indices, REAL *squares) {
    for (long d = 0; d < size; d++)
        for (int m = 0; m < ROWS; m++) {
            REAL x = rows[m][d];
            squares[m] += x * x, columns[d * room + indices[m]] = x;
        }
}

/* Complete up to ROWS slots with v and k in their rows; after `count` the first one comes again. */
static void measure_slots(Slots *s, const long *indices, long count) {
    const REAL *keys[ROWS];
    REAL *rows[ROWS], *values[ROWS], key[ROWS] = {0}, value[ROWS] = {0}, importance[ROWS];
    for (int m = 0; m < ROWS; m++) {
        rows[m] = s->rows + indices[m] * s->width, values[m] = rows[m] + s->key, keys[m] = values[m] + s->value;
        importance[m] = -s->query[s->key_dim];
    }
    multiply(keys, 1, s->key_dim, s->metric, s->key, s->key, s->sums, s->key, 0);
    for (long m = 0; m < count; m++) memcpy(rows[m], s->sums + m * s->key, s->key * sizeof(REAL));
    copy_rows(rows, s->key, s->columns, s->room, indices, key);
    copy_rows(values, s->value, s->columns + s->key * s->room, s->room, indices, value);
    for (long c = 0; c < s->key_dim; c++)
        for (int m = 0; m < ROWS; m++) importance[m] += keys[m][c] * s->query[c];
    for (long m = 0; m < count; m++) {
        long i = indices[m];
        REAL clamped = importance[m] > MOST_IMPORTANT ? MOST_IMPORTANT : importance[m];
        s->key_square[i] = key[m], s->value_square[i] = value[m], s->inverse[i] = 1 / s->weight[i];
        s->importance[i] = exp(clamped < -MOST_IMPORTANT ? -MOST_IMPORTANT : clamped);
    }
}

/* List the rows of changed slots in `partner`; the first of the last ROWS also fills what these lack. */
static long list_changed(Slots *s) {
    long found = 0;
    for (long i = 0; i < s->used; i++) s->partner[found] = i, found += s->changed[i];
    for (long r = found; r % ROWS; r++) s->partner[r] = s->partner[found / ROWS * ROWS];
    return found;
}

/* Multiply slots with all slots from row `begin` on, over some columns: the same bits whichever of a pair is a row. */
static void multiply_slots(const Slots *s, long from, long to, const long *indices, long begin, REAL *out) {
    const REAL *rows[ROWS], *columns = s->columns + from * s->room;
    for (int r = 0; r < ROWS; r++) rows[r] = columns + indices[r];
    multiply(rows, s->room, to - from, columns + begin, s->room, padded(s->used, LANES) - begin, out + begin, s->room,
             0);
}

/* The weight of an error of a slot, relative to the oldest slot (slots_merging.RECENCY). */
#define RECENCY(place) ((place) + 1)

static inline REAL least_of(vec x) {
    vec32 halves[BYTES / 32];
    memcpy(halves, &x, sizeof x);
    if (BYTES > 32) halves[0] = -larger(-halves[0], -halves[BYTES / 32 - 1]);
    REAL least = INFINITY;
    for (long l = 0; l < PARTIAL; l++) least = halves[0][l] < least ? halves[0][l] : least;
    return least;
}

/* Find the slot with the least cost, the first of equals: among those before a place, or among all, where errors of
   slots newer than the place count more. */
static inline __attribute__((always_inline)) long find_least(
    const Slots *s, const REAL *cost, REAL slot_place, int before, REAL *least) {
    vec best = (vec){0} + (REAL)INFINITY, first = best;
    for (long j = 0; j < padded(s->used, LANES); j += LANES) {
        vec x = *(vec *)(cost + j), place = *(vec *)(s->place + j);
        if (!before) x *= RECENCY(choose(place > slot_place, place, (vec){0} + slot_place));
        mask better = (x < best) | ((x == best) & (place < first));
        better &= place < (before ? slot_place : (REAL)INFINITY);
        best = choose(better, x, best), first = choose(better, place, first);
    }
    *least = least_of(best);
    REAL found = least_of(choose(best == *least, first, (vec){0} + (REAL)INFINITY));
    return found < INFINITY ? s->order[(long)found] : -1;
}

/* Compute the costs of pairs with a changed slot, and the least cost of every slot. */
static void measure_pairs(Slots *s) {
    long n = s->used, changed = list_changed(s), leading = 0;
    REAL *key = s->dots, *value = s->dots + ROWS * s->room;
    for (long i = 0; i < changed; i += ROWS) measure_slots(s, s->partner + i, changed - i < ROWS ? changed - i : ROWS);
    while (leading < changed && s->partner[leading] == leading) leading++;
    for (long i = 0; i < changed; i += ROWS) {
        const long *indices = s->partner + i;
        long begin = indices[0] < leading ? indices[0] / LANES * LANES : 0;  /* earlier rows measured their pairs */
        multiply_slots(s, 0, s->key, indices, begin, key);
        multiply_slots(s, s->key, s->key + s->value, indices, begin, value);
        for (long r = 0; r < ROWS && i + r < changed; r++) {
            REAL *cost = s->cost + indices[r] * s->room, *kk = key + r * s->room, *vv = value + r * s->room;
            REAL a = s->key_square[indices[r]], b = s->value_square[indices[r]], inverse = s->inverse[indices[r]];
            REAL important = s->importance[indices[r]];
            for (long j = begin; j < n; j++) {
                REAL x = a + s->key_square[j] - 2 * kk[j], y = b + s->value_square[j] - 2 * vv[j];
                x = x * x / (inverse + s->inverse[j]);
                x = x * x * (y > TINY ? y : TINY);
                cost[j] = x * (important > s->importance[j] ? important : s->importance[j]);
            }
            cost[indices[r]] = INFINITY;
        }
        const REAL *rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = s->cost + indices[r] * s->room;
        for (long j = begin; j < n; j++)  /* rows of costs are far apart: all columns at once */
            for (int r = 0; r < ROWS; r++) s->cost[j * s->room + indices[r]] = rows[r][j];
    }
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o], nearest = (long)s->nearest[i];
        s->stale[i] = s->changed[i] || nearest < 0 || s->removed[nearest] || s->changed[nearest];
    }
    for (long index = 0; index < changed; index++) {
        const long c = s->partner[index];
        for (long i = 0; i < n; i += LANES) {
            vec x = *(vec *)(s->cost + c * s->room + i), *least = (vec *)(s->least + i);
            vec *nearest = (vec *)(s->nearest + i);
            mask better = (x < *least) & (*(vec *)(s->place + i) > s->place[c]);
            *least = choose(better, x, *least), *nearest = choose(better, (vec){0} + (REAL)c, *nearest);
        }
    }
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o];
        if (s->stale[i]) s->nearest[i] = find_least(s, s->cost + i * s->room, s->place[i], 1, s->least + i);
    }
    memset(s->changed, 0, n);
}

/* Choose the slots to remove, and for each the slot it merges into. */
static void choose_pairs(Slots *s, long removals) {
    REAL least;
    for (long c = 0; c < removals; c++) {
        long i = find_least(s, s->least, 0, 0, &least);
        for (long o = 0; i < 0; o++)  /* no cost is a number */
            if (!s->removed[s->order[o]]) i = s->order[o];
        s->chosen[c] = i, s->removed[i] = 1, s->dots[c] = s->place[i], s->place[i] = INFINITY;
    }
    for (long c = 0; c < removals; c++)
        s->partner[c] = find_least(s, s->cost + s->chosen[c] * s->room, s->dots[c], 0, &least);
}

/* Merge removed slots into their targets. */
static void merge_pairs(Slots *s, long removals) {
    for (long o = 0; o < removals; o++) {
        long target = s->partner[o];
        if (target < 0) continue;
        REAL *row = s->rows + target * s->width, total = s->weight[target];
        REAL square = total * s->key_square[target], spread = total * s->spread[target];
        for (long d = 0; d < s->width; d++) s->sums[d] = total * row[d];
        for (long p = o; p < removals; p++) {
            if (s->partner[p] != target) continue;
            long source = s->chosen[p];
            REAL weight = s->weight[source], *source_row = s->rows + source * s->width;
            square += weight * s->key_square[source], spread += weight * s->spread[source], total += weight;
            for (long d = 0; d < s->width; d++) s->sums[d] += weight * source_row[d];
            s->partner[p] = -1;
        }
        for (long d = 0; d < s->width; d++) row[d] = s->sums[d] / total;
        spread = square / total + spread / total;
        REAL of_mean = 0;
        for (long d = 0; d < s->key; d++) of_mean += row[d] * row[d];
        spread = spread > of_mean ? spread - of_mean : 0;
        if (s->bits < 8) spread = as_bf16(spread), total = total > MOST_TOKENS ? MOST_TOKENS : total;
        s->weight[target] = total, s->spread[target] = spread, s->changed[target] = 1;
        round_vector(row + s->key, s->value_dim, s->bits, s->kept_bf16);
        round_vector(row + s->key + s->value, s->key_dim, s->bits, s->kept_bf16);
    }
}

/* Free the rows of removed slots, and number the remaining ones. */
static void close_gaps(Slots *s) {
    long remaining = 0;
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o];
        if (s->removed[i]) s->free[s->unused++] = i;
        else s->place[i] = remaining, s->order[remaining++] = i;
    }
    s->count = remaining;
}

/* Merge the cheapest pairs until the slots fit the capacity. */
static void merge_slots(Slots *s) {
    long removals = s->count - s->capacity;
    if (removals > 0) {
        measure_pairs(s);
        choose_pairs(s, removals);
        merge_pairs(s, removals);
        close_gaps(s);
    }
    show_slots(s, 0);
}
"""
