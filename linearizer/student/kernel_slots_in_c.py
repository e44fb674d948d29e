"""Slots that merge, in C: how vectors are rounded, and the slots of one head; kernel_state_in_c.py keeps them.

Slots merge as slots_merging.py says, up to rounding; what pairs cost is kept from one block to the next. A pair costs
the same bits whichever of both has changed, so that results do not depend on how a text was cut into calls.
"""

SOURCE = r"""
enum { ROWS_AT_ONCE = 48, PARTS = 3, PART_TOKENS = 256 };

static const REAL TINY = 1e-30, MOST_TOKENS = 32767, MOST_IMPORTANT = 20;

/* The slots of one head: rows of metric·k, v and k, each padded to whole vectors; and what distances are made of.
   A slot stays in its row while it lives, so that what pairs cost need not be moved; `order` has the rows in the order
   of tokens, and `seen` holds k and v in that order. */
typedef struct {
    long count, used, unused, room, most;       /* slots; rows ever used, free again, and in all; slots that stay */
    long key, value, width;                     /* padded sizes */
    long key_dim, value_dim, bits, kept_bf16;
    REAL *rows, *columns;                       /* (room, width), (key + value, room) */
    REAL *cost, *seen;                          /* (room, room), (room, key + value) */
    REAL *key_square, *value_square, *weight, *inverse, *spread, *dots, *sums;
    REAL *metric;                               /* (key_dim, key), turned */
    REAL *importance, *query;                   /* query: the mean query, and its product with the mean key */
    REAL *place, *least, *nearest;              /* place, infinite in a free row; least cost before it, with what */
    char *changed, *gone, *lost;                /* lost: what was nearest to it */
    long *order, *chosen, *partner, *free;
} Slots;

static REAL limit_of(long bits) { return ((1 << bits) - 1) / (REAL)2; }

/* The scale of a vector: in 8 bits a power of two, the least with which its largest number fits. */
static REAL scale_of(const REAL *x, long dim, long bits) {
    if (bits < 8) return best_scale(x, dim, limit_of(bits));
    float top = (float)of_bits((bits_of(largest(x, dim)) + 0x1FFFF) & 0x7F800000u);
    return fminf(fmaxf(top * 0x1p-6f, 0x1p-24f), 0x1p121f);
}

static void round_vector(REAL *x, long dim, long bits, long kept_bf16) {
    for (long d = 0; d < dim && kept_bf16; d++) x[d] = as_bf16(x[d]);
    if (bits == 16) return;
    REAL scale = scale_of(x, dim, bits), limit = limit_of(bits);
    if (bits == 8)
        for (long d = 0; d < dim; d++) x[d] = ROUND(x[d] / scale) * scale;
    else
        for (long d = 0; d < dim; d++) x[d] = code_of(x[d], scale, limit) * scale;
}

/* Take a free row for the newest slot; v and k are to be written into it. */
static REAL *add_slot(Slots *s, REAL weight, REAL spread) {
    long i = s->unused ? s->free[--s->unused] : s->used++;
    s->weight[i] = weight, s->spread[i] = spread, s->changed[i] = 1, s->gone[i] = 0;
    s->place[i] = s->count, s->order[s->count++] = i;
    return s->rows + i * s->width;
}

/* Lay out in their order the slots that queries see; or, before the first merge, those of a state in rows. */
static void show_slots(Slots *s, int in_rows) {
    for (long o = 0; o < s->count; o++) {
        REAL *row = s->rows + s->order[o] * s->width, *seen = s->seen + o * (s->key + s->value);
        REAL *k = row + s->key + s->value, *v = row + s->key;
        memcpy(in_rows ? k : seen, in_rows ? seen : k, s->key * sizeof(REAL));
        memcpy(in_rows ? v : seen + s->key, in_rows ? seen + s->key : v, s->value * sizeof(REAL));
    }
}

/* Complete up to ROWS slots whose v and k are in their rows: side by side, since each of the sums is a long chain. */
static void measure_slots(Slots *s, const long *some, long found) {
    const REAL *keys[ROWS];
    REAL *rows[ROWS], key[ROWS] = {0}, value[ROWS] = {0}, asked[ROWS];
    for (int m = 0; m < ROWS; m++) {
        rows[m] = s->rows + some[m] * s->width, keys[m] = rows[m] + s->key + s->value;
        asked[m] = -s->query[s->key_dim];
    }
    multiply(keys, 1, s->key_dim, s->metric, s->key, s->key, s->sums, s->key, 0);
    for (long m = 0; m < found; m++) memcpy(rows[m], s->sums + m * s->key, s->key * sizeof(REAL));
    for (long d = 0; d < s->key; d++)
        for (int m = 0; m < ROWS; m++) key[m] += rows[m][d] * rows[m][d];
    for (long d = 0; d < s->value; d++)
        for (int m = 0; m < ROWS; m++) value[m] += rows[m][s->key + d] * rows[m][s->key + d];
    for (long c = 0; c < s->key_dim; c++)
        for (int m = 0; m < ROWS; m++) asked[m] += keys[m][c] * s->query[c];
    for (long m = 0; m < found; m++) {
        long i = some[m];
        REAL most = asked[m] > MOST_IMPORTANT ? MOST_IMPORTANT : asked[m];
        s->key_square[i] = key[m], s->value_square[i] = value[m], s->inverse[i] = 1 / s->weight[i];
        s->importance[i] = exp(most < -MOST_IMPORTANT ? -MOST_IMPORTANT : most);
    }
    for (long d = 0; d < s->key + s->value; d++)
        for (long m = 0; m < found; m++) s->columns[d * s->room + some[m]] = rows[m][d];
}

/* The next slots from a row on that have changed, at most ROWS; the first of them stands for those that are missing. */
static long find_changed(const Slots *s, long *from, long *some) {
    long found = 0;
    for (; *from < s->used && found < ROWS; ++*from)
        if (s->changed[*from]) some[found++] = *from;
    for (long r = found; r < ROWS && found; r++) some[r] = some[0];
    return found;
}

/* Products of some slots with all from a row on, over some of the columns: the same bits for a pair, whichever of both
   is a row. */
static void multiply_slots(const Slots *s, long from, long to, const long *some, long begin, REAL *out) {
    const REAL *rows[ROWS], *columns = s->columns + from * s->room;
    for (int r = 0; r < ROWS; r++) rows[r] = columns + some[r];
    multiply(rows, s->room, to - from, columns + begin, s->room, padded(s->used, LANES) - begin, out + begin, s->room,
             0);
}

/* By what an error of a slot counts for more than one of the oldest (slots_merging.RECENCY). */
#define RECENCY(place) ((place) + 1)

/* Find the slot with which merging a slot from a place costs least, the first of those that cost the same: of those
   before it, or of all, where errors of newer slots count for more. */
static inline __attribute__((always_inline)) long find_least(
    const Slots *s, long i, REAL own, int before, REAL *least) {
    vec best = (vec){0} + (REAL)INFINITY, first = best, at = {0};
    for (long j = 0; j < padded(s->used, LANES); j += LANES) {
        vec x = *(vec *)(s->cost + i * s->room + j), place = *(vec *)(s->place + j);
        if (!before) x *= RECENCY(either(place > own, place, (vec){0} + own));
        mask better = (x < best) | ((x == best) & (place < first));
        better &= place < (before ? own : (REAL)INFINITY);
        best = either(better, x, best), first = either(better, place, first);
        at = either(better, (vec){0} + (REAL)j, at);
    }
    long found = 0;
    for (long l = 1; l < LANES; l++)
        if (best[l] < best[found] || (best[l] == best[found] && first[l] < first[found])) found = l;
    *least = best[found];
    return first[found] < INFINITY ? (long)at[found] + found : -1;
}

/* Compute what merging costs each pair of which a slot has changed, and the least cost of every slot. */
static void measure_pairs(Slots *s) {
    long n = s->used, found, some[ROWS], whole = 0;
    REAL *key = s->dots, *value = s->dots + ROWS * s->room;
    for (long i = 0; (found = find_changed(s, &i, some));) measure_slots(s, some, found);
    while (whole < n && s->changed[whole]) whole++;
    for (long i = 0; (found = find_changed(s, &i, some));) {
        long begin = some[0] < whole ? some[0] / LANES * LANES : 0;  /* earlier rows have measured their pairs */
        multiply_slots(s, 0, s->key, some, begin, key);
        multiply_slots(s, s->key, s->key + s->value, some, begin, value);
        for (long r = 0; r < found; r++) {
            REAL *cost = s->cost + some[r] * s->room, *kk = key + r * s->room, *vv = value + r * s->room;
            REAL a = s->key_square[some[r]], b = s->value_square[some[r]], own = s->inverse[some[r]];
            REAL important = s->importance[some[r]];
            for (long j = begin; j < n; j++) {
                REAL x = a + s->key_square[j] - 2 * kk[j], y = b + s->value_square[j] - 2 * vv[j];
                x = x * x / (own + s->inverse[j]);
                x = x * x * (y > TINY ? y : TINY);
                cost[j] = x * (important > s->importance[j] ? important : s->importance[j]);
            }
            cost[some[r]] = INFINITY;
        }
        for (long j = begin; j < n; j++)  /* a row of costs is far from the next: all columns at once */
            for (long r = 0; r < found; r++) s->cost[j * s->room + some[r]] = s->cost[some[r] * s->room + j];
    }
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o], nearest = (long)s->nearest[i];
        s->lost[i] = s->changed[i] || nearest < 0 || s->gone[nearest] || s->changed[nearest];
    }
    for (long c = 0; c < n; c++) {
        for (long i = 0; s->changed[c] && i < n; i += LANES) {
            vec x = *(vec *)(s->cost + c * s->room + i), *least = (vec *)(s->least + i);
            vec *nearest = (vec *)(s->nearest + i);
            mask better = (x < *least) & (*(vec *)(s->place + i) > s->place[c]);
            *least = either(better, x, *least), *nearest = either(better, (vec){0} + (REAL)c, *nearest);
        }
    }
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o];
        if (s->lost[i]) s->nearest[i] = find_least(s, i, s->place[i], 1, s->least + i);
    }
    memset(s->changed, 0, n);
}

/* Choose which slots go, and into which that stay. */
static void choose_pairs(Slots *s, long most) {
    long chosen = 0;
    for (long o = 0; o < s->count; o++) {
        REAL least = s->dots[o] = s->least[s->order[o]] * RECENCY(o);
        long at = chosen < most ? chosen : most;
        while (at > 0 && least < s->dots[s->partner[at - 1]]) at--;
        if (at == most) continue;
        chosen = chosen < most ? chosen + 1 : most;
        for (long c = chosen - 1; c > at; c--) s->partner[c] = s->partner[c - 1];
        s->partner[at] = o;
    }
    for (long c = 0; c < most; c++) {
        long i = s->chosen[c] = s->order[s->partner[c]];
        s->gone[i] = 1, s->dots[c] = s->place[i], s->place[i] = INFINITY;
    }
    REAL least;
    for (long c = 0; c < most; c++) s->partner[c] = find_least(s, s->chosen[c], s->dots[c], 0, &least);
}

/* Merge what goes into what stays. */
static void merge_pairs(Slots *s, long most) {
    for (long o = 0; o < most; o++) {
        long into = s->partner[o];
        if (into < 0) continue;
        REAL *row = s->rows + into * s->width, total = s->weight[into];
        REAL square = total * s->key_square[into], spread = total * s->spread[into];
        for (long d = 0; d < s->width; d++) s->sums[d] = total * row[d];
        for (long p = o; p < most; p++) {
            if (s->partner[p] != into) continue;
            long from = s->chosen[p];
            REAL weight = s->weight[from], *other = s->rows + from * s->width;
            square += weight * s->key_square[from], spread += weight * s->spread[from], total += weight;
            for (long d = 0; d < s->width; d++) s->sums[d] += weight * other[d];
            s->partner[p] = -1;
        }
        for (long d = 0; d < s->width; d++) row[d] = s->sums[d] / total;
        spread = square / total + spread / total;
        REAL of_mean = 0;
        for (long d = 0; d < s->key; d++) of_mean += row[d] * row[d];
        spread = spread > of_mean ? spread - of_mean : 0;
        if (s->bits < 8) spread = as_bf16(spread), total = total > MOST_TOKENS ? MOST_TOKENS : total;
        s->weight[into] = total, s->spread[into] = spread, s->changed[into] = 1;
        round_vector(row + s->key, s->value_dim, s->bits, s->kept_bf16);
        round_vector(row + s->key + s->value, s->key_dim, s->bits, s->kept_bf16);
    }
}

/* Free the rows of slots that went, and number those that stay. */
static void close_gaps(Slots *s) {
    long kept = 0;
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o];
        if (s->gone[i]) s->free[s->unused++] = i;
        else s->place[i] = kept, s->order[kept++] = i;
    }
    s->count = kept;
}

/* Merge the cheapest pairs until as many slots are left as may stay. */
static void merge_slots(Slots *s) {
    long most = s->count - s->most;
    if (most > 0) {
        measure_pairs(s);
        choose_pairs(s, most);
        merge_pairs(s, most);
        close_gaps(s);
    }
    show_slots(s, 0);
}
"""
