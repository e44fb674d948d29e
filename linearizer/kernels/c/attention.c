#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A vector fills a register; twice ROWS vectors fill all registers except those of the factors. */
#if defined(__AVX512F__) && WIDE
enum { BYTES = 64, ROWS = 8 };
#else
enum { BYTES = 32, ROWS = 4 };
#endif
typedef REAL vec __attribute__((vector_size(BYTES), aligned(BYTES), may_alias));
typedef __typeof__((vec){0} < (vec){0}) mask;
typedef REAL vec32 __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
typedef __typeof__((vec32){0} < (vec32){0}) mask32;
enum { LANES = BYTES / sizeof(REAL), TILE = 2 * LANES, PARTIAL = 32 / sizeof(REAL), TRIES = 3 };

static const REAL EMPTY = -1e30, TINIEST = 0x1p-100, TRIED[TRIES] = {1.0, 0.85, 0.7};

static long padded(long size, long by) { return (size + by - 1) / by * by; }

static const long MOST_KEPT = 1 << 24;
static pthread_key_t kept_memory;

__attribute__((constructor)) static void make_key(void) { pthread_key_create(&kept_memory, free); }

/* Return memory of this thread, kept from call to call, since new pages take as long as the work on them; 0: none. */
static char *take_memory(long size) {
    long *memory = pthread_getspecific(kept_memory);
    if (!memory || *memory < size) {
        free(memory);
        if ((memory = aligned_alloc(BYTES, padded(size, BYTES) + BYTES))) *memory = size;
        pthread_setspecific(kept_memory, memory);
    }
    return memory ? (char *)memory + BYTES : 0;
}

/* Free memory that is too large for many threads to keep. */
static void keep_little(void) {
    long *memory = pthread_getspecific(kept_memory);
    if (memory && *memory > MOST_KEPT) free(memory), pthread_setspecific(kept_memory, 0);
}

/* Choose the lanes of x where the mask `first` is set, and those of y elsewhere. */
static inline vec choose(mask first, vec x, vec y) { return (vec)((first & (mask)x) | (~first & (mask)y)); }

static uint32_t bits_of(REAL x) {
    float y = (float)x;
    uint32_t bits;
    memcpy(&bits, &y, 4);
    return bits;
}

static REAL float_of_bits(uint32_t bits) {
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static REAL as_bf16(REAL x) {
    uint32_t bits = bits_of(x);
    return float_of_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
}

#define ROUND(x) (sizeof(REAL) == 4 ? (REAL)rintf((float)(x)) : (REAL)rint(x))
#define MAGNITUDE(x) (sizeof(REAL) == 4 ? (REAL)fabsf((float)(x)) : (REAL)fabs(x))
#define ROUND_DOWN(x) (sizeof(REAL) == 4 ? (REAL)floorf((float)(x)) : (REAL)floor(x))

/* Round a number to a half-integer within a limit. */
static inline REAL code_of(REAL x, REAL scale, REAL limit) {
    REAL code = ROUND_DOWN(x / (scale > TINIEST ? scale : TINIEST)) + (REAL)0.5;
    return code < -limit ? -limit : code > limit ? limit : code;
}

/* Return the larger numbers: compilers do not know that a maximum may be taken in any order. */
static inline vec32 larger(vec32 x, vec32 y) {
    mask32 first = x > y;
    return (vec32)((first & (mask32)x) | (~first & (mask32)y));
}

static REAL largest(const REAL *x, long dim) {
    vec32 lanes = {0};
    long d = 0;
    for (; d + PARTIAL <= dim; d += PARTIAL) {
        vec32 chunk = *(const vec32 *)(x + d);
        lanes = larger(larger(chunk, -chunk), lanes);
    }
    REAL top = 0;
    for (long l = 0; l < PARTIAL; l++) top = lanes[l] > top ? lanes[l] : top;
    for (; d < dim; d++) top = MAGNITUDE(x[d]) > top ? MAGNITUDE(x[d]) : top;
    return top;
}

/* Return the square error of a vector that is rounded with a scale; the same bits in vectors of any width. */
static inline REAL error_of(const REAL *x, long dim, REAL scale, REAL limit) {
    REAL error = 0, lanes[PARTIAL] = {0};
    for (long d = 0; d < dim; d += PARTIAL)
        for (long l = 0; l < PARTIAL; l++) {
            REAL difference = code_of(x[d + l], scale, limit) * scale - x[d + l];
            lanes[l] += difference * difference;
        }
    for (long l = 0; l < PARTIAL; l++) error += lanes[l];
    return error;
}

/* Return the tried scale with the least error of a vector, the first of equals. */
static REAL best_scale(const REAL *x, long dim, REAL limit) {
    REAL top = largest(x, dim) / limit, scale[TRIES], error[TRIES];
    for (int t = 0; t < TRIES; t++) scale[t] = as_bf16(top * TRIED[t]), scale[t] = scale[t] > TINIEST ? scale[t] : 0;
    if (!((error[0] = error_of(x, dim, scale[0], limit)) > 0)) return scale[0];  /* it was rounded before */
    for (int t = 1; t < TRIES; t++) error[t] = error_of(x, dim, scale[t], limit);
    int best = 0;
    for (int t = 1; t < TRIES; t++) best = error[t] < error[best] ? t : best;
    return scale[best];
}

/* Return e^x for x up to 0; 0 where it nearly underflows. */
static inline REAL exponential(REAL x) {
    if (sizeof(REAL) == 8) return exp(x);
    float y = x < -87 ? -87 : x, exponent = rintf(y * 1.44269504f);
    float r = y - exponent * 0.693359375f + exponent * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f, sum = sum * r + 8.3334519073e-3f, sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f, sum = sum * r + 5.0000001201e-1f, sum = sum * r * r + r + 1;
    return x < -87 ? 0 : sum * (float)float_of_bits(((int32_t)exponent + 127) << 23);
}

static inline __attribute__((always_inline)) void add_and_subtract(REAL *x, long count, long apart) {
    for (long i = 0; i < count; i += 2 * apart)
        for (long j = i; j < i + apart; j++) {
            REAL a = x[j], b = x[j + apart];
            x[j] = a + b, x[j + apart] = a - b;
        }
}

/* Multiply vectors of `size` numbers, a power of two, `step` apart, by Hadamard's matrix of 1 and -1: by sums and
   differences of two numbers each, in loops of fixed steps that compilers vectorise. */
static void rotate(REAL *x, long count, long step, long size) {
    for (long apart = step; apart < size * step; apart *= 2) {
        if (apart == 1) add_and_subtract(x, count, 1);
        else if (apart == 2) add_and_subtract(x, count, 2);
        else if (apart == 4) add_and_subtract(x, count, 4);
        else if (apart == 8) add_and_subtract(x, count, 8);
        else add_and_subtract(x, count, apart);
    }
}

/* Multiply ROWS rows, with numbers `step` apart, by columns of a matrix, and add in the order of the matrix's rows: a
   row has the same bits whatever the other rows are. */
static inline __attribute__((always_inline)) void multiply_columns(
    const REAL *const *a, long step, long inner, const REAL *b, long width, int count, REAL *out, long out_width,
    int accumulate) {
    vec sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < count; c++) sum[r][c] = accumulate ? *(vec *)(out + r * out_width + c * LANES) : (vec){0};
    for (long d = 0; d < inner; d++)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < count; c++) sum[r][c] += a[r][d * step] * *(const vec *)(b + d * width + c * LANES);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < count; c++) *(vec *)(out + r * out_width + c * LANES) = sum[r][c];
}

/* Do the same with all columns, which fill whole vectors; with `accumulate` add to `out`. */
static void multiply(const REAL *const *a, long step, long inner, const REAL *b, long width, long columns, REAL *out,
                     long out_width, int accumulate) {
    long j = 0;
    for (; j + TILE <= columns; j += TILE)
        multiply_columns(a, step, inner, b + j, width, 2, out + j, out_width, accumulate);
    if (j < columns) multiply_columns(a, step, inner, b + j, width, 1, out + j, out_width, accumulate);
}
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

static inline REAL least_of(vec x) {
    vec32 halves[BYTES / 32];
    memcpy(halves, &x, sizeof x);
    if (BYTES > 32) halves[0] = -larger(-halves[0], -halves[BYTES / 32 - 1]);
    REAL least = INFINITY;
    for (long l = 0; l < PARTIAL; l++) least = halves[0][l] < least ? halves[0][l] : least;
    return least;
}

/* Find the slot with the least cost, the first of equals, among those before a place. */
static inline __attribute__((always_inline)) long find_least(
    const Slots *s, const REAL *cost, REAL end, REAL *least) {
    vec best = (vec){0} + (REAL)INFINITY, first = best;
    for (long j = 0; j < padded(s->used, LANES); j += LANES) {
        vec x = *(vec *)(cost + j), place = *(vec *)(s->place + j);
        mask better = (x < best) | ((x == best) & (place < first));
        better &= place < end;
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
        if (s->stale[i]) s->nearest[i] = find_least(s, s->cost + i * s->room, s->place[i], s->least + i);
    }
    memset(s->changed, 0, n);
}

/* Choose the slots to remove, and for each the slot it merges into. */
static void choose_pairs(Slots *s, long removals) {
    REAL least;
    for (long c = 0; c < removals; c++) {
        long i = find_least(s, s->least, INFINITY, &least);
        for (long o = 0; i < 0; o++)  /* no cost is a number */
            if (!s->removed[s->order[o]]) i = s->order[o];
        s->chosen[c] = i, s->removed[i] = 1, s->place[i] = INFINITY;
    }
    for (long c = 0; c < removals; c++)
        s->partner[c] = find_least(s, s->cost + s->chosen[c] * s->room, INFINITY, &least);
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

enum {  /* tensors of a group of heads */
       HEAD, METRIC, GAIN, MEAN_QUERY, SINK_K, SINK_V, WINDOW_K, WINDOW_V, SLOT_K, SLOT_V, WEIGHT, SPREAD,
       GROUP_TENSORS };

/* How the keys or the values of one head are turned and stored in rows of a state; and those kept exactly. */
typedef struct {
    long bits, dim, size, width;            /* of a row: padded numbers, bytes */
    int as_bf16;                            /* numbers of 16 bits have two bytes, not those of REAL */
    const REAL *steps, *middle;             /* of heads that turn vectors; values have no steps */
    REAL *turn, *turn_back;                 /* factors of vectors before and after their rotation */
    long rotated;                           /* numbers that are rotated together */
    REAL *sinks, *near, *zeros;             /* near: the window, then the tokens of a part; zeros: one row */
} Side;

/* Read and write numbers of two bytes. */
static void read_bf16(const Side *s, const char *row, REAL *x) {
    for (long d = 0; d < s->dim; d++) x[d] = float_of_bits((uint32_t)((const uint16_t *)row)[d] << 16);
}

static void write_bf16(const Side *s, const REAL *x, char *row) {
    for (long d = 0; d < s->dim; d++) ((uint16_t *)row)[d] = bits_of(x[d]) >> 16;
}

static void read_row(const Side *s, const char *row, REAL *x) {
    if (s->as_bf16) {
        read_bf16(s, row, x);
    } else if (s->bits == 16) {
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
    if (s->as_bf16) {
        write_bf16(s, x, row);
        return;
    }
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
    if (s->bits == 16) read_row(s, sinks + row * s->width, x);
    else read_bf16(s, sinks + row * s->dim * 2, x);
}

static void write_sink(const Side *s, const REAL *x, char *sinks, long row) {
    if (s->bits == 16) write_row(s, x, sinks + row * s->width);
    else write_bf16(s, x, sinks + row * s->dim * 2);
}

/* Rows of tokens that attend at once: the first in a part of a text, their number, their version of slots. */
typedef struct {
    long first, found, slots;
} Rows;

/* The memory in which a thread attends. */
typedef struct {
    REAL *queries, *logits, *top, *sum, *read, *left_out;  /* left_out: of scores, by the basis of keys */
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
    const REAL *q, *k, *v, *learned_sinks;  /* logits that take weight, of the query heads; 0: none */
    REAL *out, cap, root, query_scale, *seen, *level;  /* seen, level, seen_counts: of slots after each merge of a part */
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
    TAKE(scratch->sum, rows), TAKE(scratch->left_out, rows), TAKE(scratch->read, ROWS * r->value.size);
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

enum { NEXT, GROUPS, TEXTS, TOKENS, QUERY_HEADS, SINKS, KEY_DIM, VALUE_DIM, KEEPS, STRIDES_Q, STRIDES_K = STRIDES_Q + 4,
       STRIDES_V = STRIDES_K + 4, STRIDES_OUT = STRIDES_V + 4, LAYER_SIZES = STRIDES_OUT + 4 };
enum { HEADS, WINDOW, SLOTS, BLOCK, KEY_BITS, VALUE_BITS, SLOT_BITS, KEPT_BF16, GROUP_SIZES };
enum { FACTORS, Q, K, V, OUT, COUNT, PRESENT, CALL, LEARNED_SINKS, STEPS_K, MIDDLE_K, MIDDLE_V, LAYER_TENSORS };
enum { SCALE, ROOT, CAP };
enum { STORED_BF16 = 2 };  /* KEPT_BF16: a slot's mean is rounded to bf16; states may have its two bytes, too */
/* Of threads that read together: counts, the function that starts them (GOMP_parallel), and the steps each shares. */
enum { THREADS, PARALLEL, BEGUN, FINISHED, CALL_HEADER = 8 };
enum { SEEN_BY_THREAD = 512 };  /* tokens and slots at least: fewer are not worth a thread */
/* A thread without work looks for some so often at once, then again after so many nanoseconds: others need the core. */
enum { MOST_SPINS = 256, PAUSE = 20000 };

typedef struct {
    const REAL *k, *v;
    long count, k_width, v_width;
} Part;

static Side side_of(const int64_t *sizes, const int64_t *group, void **tensors, int v, long head) {
    Side s = {.bits = group[KEY_BITS + v], .dim = sizes[KEY_DIM + v]};
    s.size = padded(s.dim, LANES), s.width = s.bits == 16 ? s.dim * (long)sizeof(REAL) : s.dim + 1;
    if (s.bits < 8) s.width = s.dim * s.bits / 8 + 2;
    s.as_bf16 = group[KEPT_BF16] == STORED_BF16;
    if (s.as_bf16) s.width = s.dim * 2;
    if (s.bits < 16 && tensors[MIDDLE_K]) {
        s.middle = (REAL *)tensors[v ? MIDDLE_V : MIDDLE_K] + head * s.dim, s.rotated = s.dim & -s.dim;
        if (!v) s.steps = (REAL *)tensors[STEPS_K] + head * s.dim;
    }
    return s;
}

/* Compute the factors that divide vectors by their steps and scale their rotation, a matrix of 1 and -1. */
static void prepare_turns(Side *s) {
    const REAL factor = s->middle ? sqrt(1.0 / s->rotated) : 1;
    for (long d = 0; d < s->dim; d++) s->turn[d] = s->turn_back[d] = factor;
    for (long d = 0; d < s->dim && s->steps; d++) s->turn[d] *= 1 / s->steps[d], s->turn_back[d] *= s->steps[d];
}

/* Prefetch numbers that are read soon. */
static void fetch(const REAL *x, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(REAL)) __builtin_prefetch(x + i);
}

/* Hide a token from the rows from `from` to `to`. */
static void hide(REAL *logits, long from, long to) {
    for (long row = from > 0 ? from : 0; row < to; row++) logits[row] = EMPTY;
}

/* Take the keys or the values of up to ROWS tokens of a part, rounded as states store them. */
static void take_side(const Reader *r, const Side *s, const REAL *x, long stride, REAL factor, long first) {
    const long dim = s->dim, count = r->found - first < ROWS ? r->found - first : ROWS;
    REAL *rows = near_row(r, s, r->place + first);
    for (long m = first + ROWS; m < first + 2 * ROWS && m < r->found; m++) fetch(x + r->tokens[m] * stride, dim);
    for (long m = 0; m < count; m++) {
        REAL *restrict row = rows + m * s->size;
        const REAL *input = x + r->tokens[first + m] * stride, *turn = s->turn, *middle = s->middle;
        if (!middle) memcpy(row, input, dim * sizeof(REAL));
        else
            for (long d = 0; d < dim; d++) row[d] = (input[d] * factor - middle[d]) * turn[d];
    }
    if (s->middle) rotate(rows, count * s->size, 1, s->rotated);
    for (long p = r->place + first; p < r->place + first + count; p++, rows += s->size) {
        if (p >= r->sinks) {
            round_vector(rows, dim, s->bits, 0);
            continue;
        }
        for (long d = 0; d < dim && s->bits < 16; d++) rows[d] = as_bf16(rows[d]);
        memcpy(s->sinks + p * s->size, rows, s->size * sizeof(REAL));
    }
}

/* Take up to ROWS tokens of a part (a step). */
static void take_tokens(const Reader *r, const Scratch *scratch, long index) {
    take_side(r, &r->key, r->k, r->sizes[STRIDES_K + 3], r->root, index * ROWS);
    take_side(r, &r->value, r->v, r->sizes[STRIDES_V + 3], 1, index * ROWS);
}

static const REAL *query_of(const Reader *r, long token, long head) {
    return r->q + token * r->sizes[STRIDES_Q + 3] + head * r->sizes[STRIDES_Q + 2];
}

/* Return a score that the model caps. */
static inline REAL capped(REAL x, REAL cap) {
    REAL decay = exponential(-2 * MAGNITUDE(x) / cap), y = cap * (1 - decay) / (1 + decay);
    return x < 0 ? -y : y;
}

/* Attend with rows of tokens and write their outputs (a step), column after column: no row depends on another. */
static void attend(const Reader *r, const Scratch *scratch, long index) {
    const Slots *slots = &r->slots;
    const long first = r->rows[index].first, found = r->rows[index].found, version = r->rows[index].slots;
    const long *tokens = r->tokens + first, place = r->place + first;
    const long count = slots->capacity ? r->seen_counts[version] : 0;
    const REAL *level = r->level + version * slots->capacity;
    const REAL *seen = r->seen + version * slots->capacity * (slots->key + slots->value), *a[ROWS];
    const int64_t *sizes = r->sizes;
    long heads = r->query_heads, used = found * heads, rows = padded(used, LANES), last = place + found - 1;
    long merged = 0, j = 0;
    if (slots->capacity && place >= r->window) merged = ((place - r->window) / r->block + 1) * r->block;
    long from = slots->capacity ? merged : place - r->window + 1;
    long behind = slots->capacity ? merged : last - r->window + 1;
    from = from < 0 ? 0 : from > last + 1 || !r->window ? last + 1 : from, behind = behind < 0 ? 0 : behind;
    Part parts[PARTS] = {
        {r->key.sinks, r->value.sinks, behind < r->sinks ? behind : r->sinks, r->key.size, r->value.size},
        {near_row(r, &r->key, from), near_row(r, &r->value, from), last + 1 - from, r->key.size, r->value.size},
        {seen, seen + slots->key, count, slots->key + slots->value, slots->key + slots->value}};
    REAL *queries = scratch->queries, *logits = scratch->logits, *top = scratch->top, *sum = scratch->sum;
    REAL *left_out = scratch->left_out;
    for (long row = 0, t = 0, g = 0; row < rows; row += ROWS) {
        for (int m = 0; m < ROWS; m++) {
            a[m] = t < found ? query_of(r, tokens[t], g) : r->key.zeros;
            if (++g == heads) g = 0, t++;
        }
        for (long d = 0; d < r->key.dim; d++)
            for (int m = 0; m < ROWS; m++) queries[d * rows + row + m] = a[m][d] * r->query_scale;
    }
    for (long t = found; t < 2 * found && t < r->found - first; t++)
        for (long g = 0; g < heads; g++) fetch(query_of(r, tokens[t], g), r->key.dim);
    memset(left_out, 0, rows * sizeof(REAL));
    for (long d = 0; (r->cap > 0 || r->learned_sinks) && r->key.middle && d < r->key.dim; d++)
        for (long row = 0; row < rows; row++) left_out[row] += queries[d * rows + row] * r->key.middle[d];
    if (r->key.middle) {
        for (long d = 0; d < r->key.dim; d++)
            for (long row = 0; row < rows; row++) queries[d * rows + row] *= r->key.turn_back[d];
        rotate(queries, r->key.dim * rows, rows, r->key.rotated);
    }
    for (Part *part = parts; part < parts + PARTS; part++) {
        for (long i = 0; i < part->count; i += ROWS) {
            for (long m = 0; m < ROWS; m++) a[m] = part->k + (i + m < part->count ? i + m : i) * part->k_width;
            multiply(a, 1, r->key.dim, queries, rows, rows, logits + (j + i) * rows, rows, 0);
        }
        for (long i = 0; i < part->count; i++, j++) {
            REAL *column = logits + j * rows;
            long key_place = part == parts ? i : from + i;
            for (long row = 0; r->cap > 0 && row < rows; row++)
                column[row] = capped(column[row] + left_out[row], r->cap);
            if (part == parts + 2) {
                for (long row = 0; row < rows; row++) column[row] += level[i];
            } else if (part == parts) {
                if (!slots->capacity) hide(column, 0, (key_place + r->window - place) * heads);
            } else {
                hide(column, 0, (key_place - place) * heads);
                if (!slots->capacity) hide(column, (key_place + r->window - place) * heads, used);
            }
        }
    }
    memcpy(top, logits, rows * sizeof(REAL)), memset(sum, 0, rows * sizeof(REAL));
    for (REAL *column = logits; column < logits + j * rows; column += rows)
        for (long row = 0; row < rows; row++) top[row] = column[row] > top[row] ? column[row] : top[row];
    for (long row = 0; r->learned_sinks && row < rows; row++) {
        REAL sink = r->learned_sinks[row % heads] - (r->cap > 0 ? 0 : left_out[row]);
        top[row] = sink > top[row] ? sink : top[row], sum[row] = exponential(sink - top[row]);
    }
    for (REAL *column = logits; column < logits + j * rows; column += rows)
        for (long row = 0; row < rows; row++)
            column[row] = exponential(column[row] - top[row]), sum[row] += column[row];
    long size = r->value.size, t = 0, g = 0;
    REAL *read = scratch->read;
    for (long row = 0; row < used; row += ROWS) {
        j = 0;
        for (Part *part = parts; part < parts + PARTS; part++) {
            for (int m = 0; m < ROWS; m++) a[m] = logits + j * rows + row + m;
            if (part->count) multiply(a, rows, part->count, part->v, part->v_width, size, read, size, j > 0);
            j += part->count;
        }
        for (int m = 0; m < ROWS; m++)
            for (long d = 0; d < size; d++) read[m * size + d] /= sum[row + m];
        if (r->value.middle) rotate(read, ROWS * size, 1, r->value.rotated);
        for (long m = 0; m < ROWS && row + m < used; m++) {
            REAL *restrict out = r->out + tokens[t] * sizes[STRIDES_OUT + 3] + g * sizes[STRIDES_OUT + 2];
            if (++g == heads) g = 0, t++;
            const REAL *restrict mean = read + m * size, *restrict turn_back = r->value.turn_back;
            const REAL *restrict middle = r->value.middle;
            if (!middle) memcpy(out, mean, r->value.dim * sizeof(REAL));
            for (long d = 0; middle && d < r->value.dim; d++) out[d] = mean[d] * turn_back[d] + middle[d];
        }
    }
}

static void level_slots(Reader *r, REAL gain) {
    const Slots *s = &r->slots;
    REAL *level = r->level + r->version * s->capacity;
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o];
        level[o] = (sizeof(REAL) == 4 ? logf(s->weight[i]) : log(s->weight[i])) + gain * s->spread[i];
    }
    r->seen_counts[r->version] = s->count;
}

/* Merge the block of tokens from a place on, which leaves the window, and show the new slots next to the old ones. */
static void merge_block(Reader *r, long from, REAL gain) {
    Slots *s = &r->slots;
    for (long p = from < r->sinks ? r->sinks : from; p < from + r->block; p++) {
        REAL *row = add_slot(s, 1, 0);
        memcpy(row + r->key.size, near_row(r, &r->value, p), r->value.size * sizeof(REAL));
        memcpy(row + r->key.size + r->value.size, near_row(r, &r->key, p), r->key.size * sizeof(REAL));
    }
    r->version = (r->version + 1) % (r->merges + 1);
    s->seen = r->seen + r->version * s->capacity * (s->key + s->value);
    merge_slots(s), level_slots(r, gain);
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

/* Do steps that no thread has begun. */
static void do_steps(Shared *shared, const Reader *r, const Scratch *scratch) {
    Step *step = shared->step;
    for (long i, count = shared->count; (i = __atomic_fetch_add(&shared->next, 1, __ATOMIC_SEQ_CST)) < count;)
        step(r, scratch, i);
}

/* Do steps together with idle threads, and return when all are done. */
static void share_steps(const Reader *r, const Scratch *scratch, Step *step, long count) {
    Shared *shared = r->shared;
    if (!shared || count < 2) {
        for (long i = 0; i < count; i++) step(r, scratch, i);
        return;
    }
    shared->step = step, shared->count = count, shared->next = 0;
    __atomic_store_n(&shared->reader, r, __ATOMIC_SEQ_CST);
    do_steps(shared, r, scratch);
    __atomic_store_n(&shared->reader, 0, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&shared->inside, __ATOMIC_SEQ_CST)) sched_yield();
}

/* Help with steps of a head, if its thread shares some. */
static void help(Shared *shared) {
    if (!__atomic_load_n(&shared->reader, __ATOMIC_SEQ_CST)) return;
    __atomic_fetch_add(&shared->inside, 1, __ATOMIC_SEQ_CST);  /* from here on its thread waits for this one */
    const Reader *r = __atomic_load_n(&shared->reader, __ATOMIC_SEQ_CST);
    Scratch scratch;
    char *memory = r && shared->next < shared->count ? take_memory(lay_scratch(r, &scratch, 0)) : 0;
    if (memory) lay_scratch(r, &scratch, memory), do_steps(shared, r, &scratch);
    __atomic_fetch_sub(&shared->inside, 1, __ATOMIC_SEQ_CST);
}

/* Read a part of a text, after its tokens were taken, in groups of rows that see the same slots. */
static void read_part(Reader *r, const Scratch *scratch, long h, int *prepared) {
    Slots *slots = &r->slots;
    long count = 0, dim = r->key.dim, place = r->place, end = place + r->found;
    for (; place < end; place += r->rows[count++].found) {
        long limit = end - place < r->chunk ? end - place : r->chunk;
        if (slots->capacity) {
            long leaving = place - r->window, until_merge = leaving < 0 ? -leaving : r->block - leaving % r->block;
            limit = until_merge < limit ? until_merge : limit;
            if (leaving >= 0 && until_merge == r->block) {
                REAL factor = r->key.middle ? 1 : r->root;
                REAL *metric = r->tensors[METRIC], *query = r->tensors[MEAN_QUERY];
                if (!*prepared) prepare_merging(slots, metric + h * dim * dim, query + h * (dim + 1), factor);
                *prepared = 1;
                merge_block(r, leaving, ((REAL *)r->tensors[GAIN])[h]);
            }
        }
        r->rows[count] = (Rows){place - r->place, limit, r->version};
    }
    share_steps(r, scratch, attend, count);
}

/* Read a text with one head; return whether there was memory. */
static int read_head(const int64_t *sizes, void **tensors, const int64_t *group, void **group_tensors, long b, long h,
                     Shared *shared) {
    const double *factors = tensors[FACTORS];
    long head = ((int64_t *)group_tensors[HEAD])[h], tokens = sizes[TOKENS], zeros;
    int prepared = 0;
    Reader r = {side_of(sizes, group, tensors, 0, head), side_of(sizes, group, tensors, 1, head)};
    Slots *slots = &r.slots;
    Scratch scratch;
    r.sizes = sizes, r.tensors = group_tensors, r.shared = shared, r.window = group[WINDOW], r.block = group[BLOCK];
    r.sinks = sizes[SINKS], r.query_heads = sizes[QUERY_HEADS], r.state_index = b * group[HEADS] + h;
    r.chunk = ROWS_AT_ONCE / r.query_heads > 0 ? ROWS_AT_ONCE / r.query_heads : 1;
    r.chunk = r.chunk < tokens ? r.chunk : tokens;
    r.part = tokens < PART_TOKENS ? tokens : PART_TOKENS;
    slots->capacity = group[SLOTS], slots->room = slots->capacity ? padded(slots->capacity + r.block, TILE) : 0;
    slots->key = r.key.size, slots->value = r.value.size, slots->width = 2 * r.key.size + r.value.size;
    slots->key_dim = r.key.dim, slots->value_dim = r.value.dim, slots->bits = group[SLOT_BITS];
    slots->kept_bf16 = group[KEPT_BF16], r.merges = slots->capacity ? (r.part - 1) / r.block + 1 : 0;
    char *memory = take_memory(lay_out(&r, 0, &zeros) + lay_scratch(&r, &scratch, 0));
    if (!memory) return 0;
    lay_scratch(&r, &scratch, memory + lay_out(&r, memory, &zeros)), memset(memory, 0, zeros);
    prepare_turns(&r.key), prepare_turns(&r.value);
    for (long i = 0; i < slots->room; i++) slots->place[i] = INFINITY;
    slots->seen = r.seen;

    r.q = (REAL *)tensors[Q] + b * sizes[STRIDES_Q] + head * sizes[STRIDES_Q + 1];
    r.k = (REAL *)tensors[K] + b * sizes[STRIDES_K] + head * sizes[STRIDES_K + 1];
    r.v = (REAL *)tensors[V] + b * sizes[STRIDES_V] + head * sizes[STRIDES_V + 1];
    r.out = (REAL *)tensors[OUT] + b * sizes[STRIDES_OUT] + head * sizes[STRIDES_OUT + 1];
    const uint8_t *present = tensors[PRESENT] ? (uint8_t *)tensors[PRESENT] + b * tokens : 0;
    r.cap = factors[CAP];
    r.learned_sinks = tensors[LEARNED_SINKS] ? (REAL *)tensors[LEARNED_SINKS] + head * r.query_heads : 0;
    r.root = factors[ROOT], r.query_scale = r.key.middle ? factors[SCALE] / factors[ROOT] : factors[SCALE];
    long before = sizes[KEEPS] ? ((int64_t *)tensors[COUNT])[b] : 0, place = before;
    r.begin = before > r.window ? before - r.window : 0;
    if (sizes[KEEPS]) read_state(&r, before);
    if (slots->capacity) level_slots(&r, ((REAL *)group_tensors[GAIN])[h]);
    for (long t = 0; t < tokens; place += r.found) {
        move_window(&r, place);
        for (r.found = 0; t < tokens && r.found < r.part; t++) {
            if (!present || present[t]) {
                r.tokens[r.found++] = t;
                continue;
            }
            for (long g = 0; g < r.query_heads; g++)
                memset(r.out + t * sizes[STRIDES_OUT + 3] + g * sizes[STRIDES_OUT + 2], 0, r.value.dim * sizeof(REAL));
        }
        share_steps(&r, &scratch, take_tokens, (r.found + ROWS - 1) / ROWS);
        read_part(&r, &scratch, h, &prepared);
    }
    if (sizes[KEEPS]) write_state(&r, before, place, prepared || !before);
    return 1;
}

/* A layer that threads read together. */
typedef struct {
    int64_t *sizes;
    void **tensors;
    int done;
} Layer;

/* Read with heads that no other thread has begun; then help the other threads. */
static void read_remaining(void *argument) {
    Layer *layer = argument;
    int64_t *sizes = layer->sizes, *call = layer->tensors[CALL], heads = 0;
    int64_t *groups = sizes + LAYER_SIZES, *end = groups + sizes[GROUPS] * GROUP_SIZES;
    Shared *all_shared = call ? (Shared *)(call + CALL_HEADER) : 0;
    Shared *own_shared = call ? all_shared + __atomic_fetch_add(call + BEGUN, 1, __ATOMIC_SEQ_CST) : 0;
    for (int64_t *group = groups; group < end; group += GROUP_SIZES) heads += sizes[TEXTS] * group[HEADS];
    for (long next; (next = __atomic_fetch_add(sizes + NEXT, 1, __ATOMIC_SEQ_CST)) < heads;) {
        int64_t *group = groups;
        void **group_tensors = layer->tensors + LAYER_TENSORS;
        for (; next >= sizes[TEXTS] * group[HEADS]; group += GROUP_SIZES, group_tensors += GROUP_TENSORS)
            next -= sizes[TEXTS] * group[HEADS];
        long text = next / group[HEADS], head = next % group[HEADS];
        if (!read_head(sizes, layer->tensors, group, group_tensors, text, head, own_shared)) layer->done = 0;
        if (call) __atomic_fetch_add(call + FINISHED, 1, __ATOMIC_SEQ_CST);
    }
    const struct timespec pause = {0, PAUSE};
    for (long waited = 0; call && __atomic_load_n(call + FINISHED, __ATOMIC_SEQ_CST) < heads; waited++) {
        for (Shared *shared = all_shared; shared < all_shared + call[THREADS]; shared++) help(shared);
        if (waited < MOST_SPINS) sched_yield();
        else nanosleep(&pause, 0);
    }
    keep_little();
}

/* Count the threads that are worth starting for the tokens and slots that all tokens see. */
static long count_threads(const int64_t *sizes, long most) {
    const int64_t *group = sizes + LAYER_SIZES, *end = group + sizes[GROUPS] * GROUP_SIZES;
    long seen = 0;
    for (; group < end; group += GROUP_SIZES) seen += group[HEADS] * (group[WINDOW] + group[SLOTS]);
    seen = seen * sizes[TEXTS] * sizes[TOKENS] / SEEN_BY_THREAD + 1;
    return seen < most ? seen : most;
}

/* Read with all heads of a layer; or with some of them, in one of several threads that the caller starts. */
int read_heads(int64_t *sizes, void **tensors) {
    int64_t *call = tensors[CALL];
    Layer layer = {sizes, tensors, 1};
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = call ? (void *)call[PARALLEL] : 0;
    long threads = parallel ? count_threads(sizes, call[THREADS]) : 1;
    if (threads > 1) parallel(read_remaining, &layer, threads, 0);
    else read_remaining(&layer);
    return layer.done;
}

/* A text whose states lie in a row of a pool: its first token in the inputs, its tokens, and those it has read. */
typedef struct {
    int64_t row, first, tokens, read;
} PooledText;

typedef struct {
    const int64_t *sizes;
    void **tensors;  /* those of states are in row 0 */
    const PooledText *texts;
    int64_t count, row_bytes, next;
    int done;
} Pool;

static const int INPUTS[] = {Q, K, V, OUT}, INPUT_STRIDES[] = {STRIDES_Q, STRIDES_K, STRIDES_V, STRIDES_OUT};

/* Read one text, alone or with the threads of `call`. */
static void read_pooled_text(Pool *pool, const PooledText *text, int64_t *call) {
    const int64_t groups = pool->sizes[GROUPS];
    int64_t sizes[LAYER_SIZES + groups * GROUP_SIZES];
    void *tensors[LAYER_TENSORS + groups * GROUP_TENSORS], **of_group = tensors + LAYER_TENSORS;
    memcpy(sizes, pool->sizes, sizeof sizes), memcpy(tensors, pool->tensors, sizeof tensors);
    sizes[NEXT] = 0, sizes[TEXTS] = 1, sizes[TOKENS] = text->tokens, tensors[COUNT] = (void *)&text->read;
    for (int i = 0; i < 4; i++)
        tensors[INPUTS[i]] = (REAL *)tensors[INPUTS[i]] + text->first * sizes[INPUT_STRIDES[i] + 3];
    for (long g = 0; g < groups; g++, of_group += GROUP_TENSORS)
        for (int t = SINK_K; t < GROUP_TENSORS; t++) of_group[t] = (char *)of_group[t] + text->row * pool->row_bytes;
    if (call) memset(call + BEGUN, 0, (CALL_HEADER - BEGUN) * sizeof *call + call[THREADS] * sizeof(Shared));
    tensors[CALL] = call;
    if (!read_heads(sizes, tensors)) pool->done = 0;
}

/* Read texts of one token that no other thread has begun. */
static void read_pooled_tokens(void *argument) {
    Pool *pool = argument;
    for (long i; (i = __atomic_fetch_add(&pool->next, 1, __ATOMIC_SEQ_CST)) < pool->count;)
        read_pooled_text(pool, pool->texts + i, 0);
}

/* Read the tokens of texts, those with one token first, with their states in rows of a pool. */
int read_rows(int64_t *sizes, void **tensors, const PooledText *texts, int64_t count, int64_t row_bytes) {
    int64_t *call = tensors[CALL], single = 0;
    Pool pool = {sizes, tensors, texts, count, row_bytes, 0, 1};
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = call ? (void *)call[PARALLEL] : 0;
    while (single < count && texts[single].tokens == 1) single++;
    pool.count = single > 1 ? single : 0;
    if (pool.count && parallel) parallel(read_pooled_tokens, &pool, call[THREADS], 0);
    else read_pooled_tokens(&pool);
    for (int64_t i = pool.count; i < count; i++) read_pooled_text(&pool, texts + i, call);
    return pool.done;
}
