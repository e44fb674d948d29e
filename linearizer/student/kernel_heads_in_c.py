"""The source of the kernel in C that reads with the heads of a layer; kernel_layer_in_c.py calls it."""

from __future__ import annotations

from .kernel_state_in_c import SOURCE as STATE

SOURCE = (
    STATE
    + r"""
enum { NEXT, GROUPS, TEXTS, TOKENS, QUERY_HEADS, SINKS, KEY_DIM, VALUE_DIM, KEEPS, STRIDES_Q, STRIDES_K = STRIDES_Q + 4,
       STRIDES_V = STRIDES_K + 4, STRIDES_OUT = STRIDES_V + 4, LAYER_SIZES = STRIDES_OUT + 4 };
enum { HEADS, WINDOW, SLOTS, BLOCK, KEY_BITS, VALUE_BITS, SLOT_BITS, KEPT_BF16, GROUP_SIZES };
enum { FACTORS, Q, K, V, OUT, COUNT, PRESENT, CALL, STEPS_K, MIDDLE_K, MIDDLE_V, LAYER_TENSORS };
enum { SCALE, ROOT };
/* Of threads that read together: counts, the function that starts them (GOMP_parallel), and the steps each shares. */
enum { THREADS, PARALLEL, BEGUN, FINISHED, CALL_HEADER = 8 };
enum { SEEN_BY_THREAD = 512 };  /* tokens and slots at least: fewer are not worth a thread */

typedef struct {
    const REAL *k, *v;
    long count, k_width, v_width;
} Part;

static Side side_of(const int64_t *sizes, const int64_t *group, void **tensors, int v, long head) {
    Side s = {.bits = group[KEY_BITS + v], .dim = sizes[KEY_DIM + v]};
    s.size = padded(s.dim, LANES), s.width = s.bits == 16 ? s.dim * (long)sizeof(REAL) : s.dim + 1;
    if (s.bits < 8) s.width = s.dim * s.bits / 8 + 2;
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
    while (call && __atomic_load_n(call + FINISHED, __ATOMIC_SEQ_CST) < heads) {
        for (Shared *shared = all_shared; shared < all_shared + call[THREADS]; shared++) help(shared);
        sched_yield();
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
"""
)
