"""What heads take and keep, in C: rows of numbers or bytes, slots that merge, and the state of one head.

Slots merge as slots_merging.py says, up to rounding; what pairs cost is kept from one block to the next. A pair costs
the same bits whichever of both has changed, so that results do not depend on how a text was cut into calls.
kernel_heads_in_c.py reads with it.
"""

SOURCE = r"""
enum {  /* tensors of a group of heads */
       HEAD, METRIC, GAIN, MEAN_QUERY, SINK_K, SINK_V, WINDOW_K, WINDOW_V, SLOT_K, SLOT_V, WEIGHT, SPREAD,
       GROUP_TENSORS };
enum { ROWS_AT_ONCE = 48, PARTS = 4 };

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

/* How the keys or the values of one head are taken, and kept in rows of a state; and what is exact of them. */
typedef struct {
    long bits, dim, size, width;            /* of a row: padded numbers, bytes */
    const REAL *enter, *back, *middle;      /* of heads that turn what they take */
    REAL *sinks, *ring, *taken, *turned;
} Side;

static void read_row(const Side *s, const char *row, REAL *x) {
    if (s->bits == 16) {
        memcpy(x, row, s->width);
    } else if (s->bits == 8) {
        REAL scale = of_bits((uint32_t)(((const int8_t *)row)[s->dim] + 127) << 23);
        for (long d = 0; d < s->dim; d++) x[d] = ((const int8_t *)row)[d] * scale;
    } else {
        const uint8_t *bytes = (const uint8_t *)row;
        REAL scale = of_bits((uint32_t)(bytes[s->width - 2] | bytes[s->width - 1] << 8) << 16);
        REAL limit = limit_of(s->bits);
        long half = s->dim / 2, more = s->bits - 4, part = s->dim * more / 8;  /* bytes of what is above four bits */
        uint8_t whole[s->dim];
        for (long d = 0; d < half; d++) whole[d] = bytes[d] & 15, whole[half + d] = bytes[d] >> 4;
        const uint64_t high = ((1 << more) - 1) * 0x0101010101010101u;  /* of eight bytes at once */
        for (long shift = 0, d = 0; d < s->dim && more; shift += more, d += part) {
            long p = 0;
            for (uint64_t x, y; p + 8 <= part; p += 8) {
                memcpy(&x, bytes + half + p, 8), memcpy(&y, whole + d + p, 8);
                y |= (x >> shift & high) << 4, memcpy(whole + d + p, &y, 8);
            }
            for (; p < part; p++) whole[d + p] |= (bytes[half + p] >> shift & high & 255) << 4;
        }
        for (long d = 0; d < s->dim; d++) x[d] = ((REAL)whole[d] - limit) * scale;
    }
}

/* Write a vector that was rounded before. */
static void write_row(const Side *s, const REAL *x, char *row) {
    if (s->bits == 16) {
        memcpy(row, x, s->width);
        return;
    }
    REAL scale = scale_of(x, s->dim, s->bits), limit = limit_of(s->bits);
    if (s->bits == 8) {
        for (long d = 0; d < s->dim; d++) row[d] = (int8_t)ROUND(x[d] / scale);
        row[s->dim] = (int8_t)((int32_t)(bits_of(scale) >> 23) - 127);
    } else {
        uint8_t *bytes = (uint8_t *)row, whole[s->dim];
        long half = s->dim / 2, more = s->bits - 4, part = s->dim * more / 8;
        memset(bytes, 0, s->width);
        for (long d = 0; d < s->dim; d++) whole[d] = (uint8_t)(code_of(x[d], scale, limit) + limit);
        for (long d = 0; d < half; d++) bytes[d] = (whole[d] & 15) | whole[half + d] << 4;
        for (long shift = 0, d = 0; d < s->dim && more; shift += more, d += part)
            for (long p = 0; p < part; p++) bytes[half + p] |= (whole[d + p] >> 4) << shift;
        bytes[s->width - 2] = bits_of(scale) >> 16, bytes[s->width - 1] = bits_of(scale) >> 24;
    }
}

/* Sinks are exact, or of 16 bits where the others have fewer. */
static void read_sink(const Side *s, const char *sinks, long row, REAL *x) {
    if (s->bits == 16) memcpy(x, sinks + row * s->width, s->width);
    for (long d = 0; d < s->dim && s->bits < 16; d++)
        x[d] = of_bits((uint32_t)((const uint16_t *)sinks)[row * s->dim + d] << 16);
}

static void write_sink(const Side *s, const REAL *x, char *sinks, long row) {
    if (s->bits == 16) memcpy(sinks + row * s->width, x, s->width);
    for (long d = 0; d < s->dim && s->bits < 16; d++) ((uint16_t *)sinks)[row * s->dim + d] = bits_of(x[d]) >> 16;
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

typedef struct {
    Side key, value;
    Slots slots;
    long window, block, room, sinks, each, own, chunk;  /* room: of the rings; own: the head in a state */
    void **of;                                          /* tensors of the group */
    REAL *asks, *logits, *top, *sum, *read, *level;
    long *tokens;
} Reader;

/* The row of a state's tensor; there are `rows` for each head. */
static char *row_of(const Reader *r, const Side *s, int tensor, long rows, long row) {
    return (char *)r->of[tensor + (s == &r->value)] + (r->own * rows + row) * s->width;
}

static char *sinks_of(const Reader *r, const Side *s) { return (char *)r->of[SINK_K + (s == &r->value)]; }

/* Lay out what reading takes in memory, and count its bytes; the first part begins with zeros. */
static long lay_out(Reader *r, char *memory, long *zeros) {
    long used = 0, most = r->slots.most, room = r->slots.room, key = r->key.size, value = r->value.size;
    long rows = padded(r->chunk * r->each, LANES), tokens = r->sinks + r->room + room + PARTS * ROWS;
    Slots *slots = &r->slots;
#define TAKE(x, count) (x = (void *)(memory + used), used += padded((count) * (long)sizeof *(x), BYTES))
    TAKE(r->key.sinks, r->sinks * key), TAKE(r->value.sinks, r->sinks * value);
    TAKE(r->key.ring, r->room * key), TAKE(r->value.ring, r->room * value);
    TAKE(r->key.taken, ROWS * key), TAKE(r->value.taken, ROWS * value);
    *zeros = used;
    TAKE(r->key.turned, ROWS * key), TAKE(r->value.turned, ROWS * value), TAKE(r->tokens, r->chunk);
    TAKE(r->asks, 2 * padded(r->key.dim, ROWS) * rows), TAKE(r->logits, tokens * rows), TAKE(r->top, rows);
    TAKE(r->sum, rows), TAKE(r->read, 2 * ROWS * value), TAKE(r->level, room);
    if (!most) return used;
    TAKE(slots->rows, room * slots->width), TAKE(slots->columns, (key + value) * room), TAKE(slots->cost, room * room);
    TAKE(slots->key_square, room), TAKE(slots->value_square, room), TAKE(slots->weight, room);
    TAKE(slots->inverse, room), TAKE(slots->spread, room), TAKE(slots->dots, 2 * ROWS * room);
    TAKE(slots->sums, slots->width + ROWS * key), TAKE(slots->metric, r->key.dim * key), TAKE(slots->changed, room);
    TAKE(slots->importance, room), TAKE(slots->query, r->key.dim + 1), TAKE(slots->seen, room * (key + value));
    TAKE(slots->place, room), TAKE(slots->least, room), TAKE(slots->nearest, room), TAKE(slots->gone, room);
    TAKE(slots->lost, room);
    TAKE(slots->order, room), TAKE(slots->chosen, room), TAKE(slots->partner, room), TAKE(slots->free, room);
#undef TAKE
    return used;
}

/* Write rows of zeros. */
static void write_zeros(const Side *s, char *rows, long count) {
    memset(s->taken, 0, s->size * sizeof(REAL));
    if (count) write_row(s, s->taken, rows);
    for (long i = 1; i < count; i++) memcpy(rows + i * s->width, rows, s->width);
}

/* Read what a state holds after `count` tokens; before the first, write zeros. */
static void read_state(Reader *r, long count) {
    for (int v = 0; v < 2; v++) {
        Side *s = v ? &r->value : &r->key;
        if (count) {
            for (long i = 0; i < r->sinks && i < count; i++)
                read_sink(s, sinks_of(r, s), r->own * r->sinks + i, s->sinks + i * s->size);
            for (long p = count > r->window ? count - r->window : 0; p < count; p++) {
                REAL *row = s->ring + p % r->room * s->size;
                if (p < r->sinks) memcpy(row, s->sinks + p * s->size, s->size * sizeof(REAL));
                else read_row(s, row_of(r, s, WINDOW_K, r->window, p % r->window), row);
            }
            continue;
        }
        for (long i = 0; i < r->sinks; i++) write_sink(s, s->taken, sinks_of(r, s), r->own * r->sinks + i);
        write_zeros(s, row_of(r, s, WINDOW_K, r->window, 0), r->window);
    }
    Slots *slots = &r->slots;
    for (long i = 0; count && i < slots->most; i++) {
        REAL weight, spread;
        long at = r->own * slots->most + i;
        if (slots->bits < 8) {
            weight = ((int16_t *)r->of[WEIGHT])[at];
            spread = of_bits((uint32_t)((uint16_t *)r->of[SPREAD])[at] << 16);
        } else {
            weight = ((REAL *)r->of[WEIGHT])[at], spread = ((REAL *)r->of[SPREAD])[at];
        }
        if (!(weight > 0)) continue;
        add_slot(slots, weight, spread);
        REAL *seen = slots->seen + (slots->count - 1) * (slots->key + slots->value);
        memset(seen, 0, (slots->key + slots->value) * sizeof(REAL));
        read_row(&r->key, row_of(r, &r->key, SLOT_K, slots->most, i), seen);
        read_row(&r->value, row_of(r, &r->value, SLOT_K, slots->most, i), seen + slots->key);
    }
}

/* Write what has changed from a place on. */
static void write_state(Reader *r, long from, long to, int merged) {
    Slots *slots = &r->slots;
    for (int v = 0; v < 2; v++) {
        Side *s = v ? &r->value : &r->key;
        for (long p = from; p < to && p < r->sinks; p++)
            write_sink(s, s->sinks + p * s->size, sinks_of(r, s), r->own * r->sinks + p);
        for (long p = to - from > r->window ? to - r->window : from; p < to; p++)
            write_row(s, s->ring + p % r->room * s->size, row_of(r, s, WINDOW_K, r->window, p % r->window));
        if (!merged) continue;
        const REAL *row = slots->seen + (v ? slots->key : 0);
        for (long i = 0; i < slots->count; i++, row += slots->key + slots->value)
            write_row(s, row, row_of(r, s, SLOT_K, slots->most, i));
        write_zeros(s, row_of(r, s, SLOT_K, slots->most, slots->count), slots->most - slots->count);
    }
    for (long i = 0; merged && i < slots->most; i++) {
        long at = r->own * slots->most + i;
        REAL weight = i < slots->count ? slots->weight[slots->order[i]] : 0;
        REAL spread = i < slots->count ? slots->spread[slots->order[i]] : 0;
        if (slots->bits < 8) {
            ((int16_t *)r->of[WEIGHT])[at] = (int16_t)weight, ((uint16_t *)r->of[SPREAD])[at] = bits_of(spread) >> 16;
        } else {
            ((REAL *)r->of[WEIGHT])[at] = weight, ((REAL *)r->of[SPREAD])[at] = spread;
        }
    }
}

/* Take the keys or the values of some tokens into the ring, as they will be kept. */
static void take_tokens(Reader *r, Side *s, const REAL *x, long apart, long found, REAL factor, long place) {
    const REAL *rows[ROWS];
    for (int m = 0; m < ROWS; m++) rows[m] = s->taken + m * s->size;
    for (long i = 0; i < found; i += ROWS) {
        long some = found - i < ROWS ? found - i : ROWS;
        for (long m = 0; m < some; m++) {
            REAL *row = s->taken + m * s->size;
            memcpy(row, x + r->tokens[i + m] * apart, s->dim * sizeof(REAL));
            if (s->enter)
                for (long d = 0; d < s->dim; d++) row[d] = row[d] * factor - s->middle[d];
        }
        if (s->enter) multiply(rows, 1, s->dim, s->enter, s->size, s->size, s->turned, s->size, 0);
        for (long m = 0; m < some; m++) {
            long p = place + i + m;
            REAL *row = s->ring + p % r->room * s->size;
            memcpy(row, (s->enter ? s->turned : s->taken) + m * s->size, s->size * sizeof(REAL));
            if (p >= r->sinks) {
                round_vector(row, s->dim, s->bits, 0);
                continue;
            }
            for (long d = 0; d < s->dim && s->bits < 16; d++) row[d] = as_bf16(row[d]);
            memcpy(s->sinks + p * s->size, row, s->size * sizeof(REAL));
        }
    }
}
"""
