"""The kernel in C that reads with the heads of a layer, which kernel_layer_in_c.py calls: the source, after that of
states."""

from __future__ import annotations

from .kernel_state_in_c import SOURCE as STATE

SOURCE = (
    STATE
    + r"""
enum { NEXT, GROUPS, TEXTS, TOKENS, EACH, SINKS, KEY_DIM, VALUE_DIM, KEEPS, OF_Q, OF_K = OF_Q + 4, OF_V = OF_K + 4,
       OF_OUT = OF_V + 4, LAYER_SIZES = OF_OUT + 4 };
enum { HEADS, WINDOW, SLOTS, BLOCK, KEY_BITS, VALUE_BITS, SLOT_BITS, KEPT_BF16, GROUP_SIZES };
enum { FACTORS, Q, K, V, OUT, COUNT, PRESENT, CALL, STEPS_K, MIDDLE_K, MIDDLE_V, LAYER_TENSORS };
enum { SCALE, ROOT };
/* Of threads that read together: counts, what begins them (GOMP_parallel), and what each shares. */
enum { THREADS, PARALLEL, BEGUN, FINISHED, OF_CALL = 8 };
enum { SEEN_BY_THREAD = 512 };  /* tokens and slots, at least */

typedef struct {
    const REAL *k, *v;
    long count, k_width, v_width;
} Part;

static Side side_of(const int64_t *sizes, const int64_t *group, void **tensors, void **of, int v, long head) {
    Side s = {.bits = group[KEY_BITS + v], .dim = sizes[KEY_DIM + v]};
    s.size = padded(s.dim, LANES), s.width = s.bits == 16 ? s.dim * (long)sizeof(REAL) : s.dim + 1;
    if (s.bits < 8) s.width = s.dim * s.bits / 8 + 2;
    if (s.bits < 16 && tensors[MIDDLE_K]) {
        s.middle = (REAL *)tensors[v ? MIDDLE_V : MIDDLE_K] + head * s.dim, s.rotated = s.dim & -s.dim;
        if (!v) s.steps = (REAL *)tensors[STEPS_K] + head * s.dim;
    }
    return s;
}

/* Compute the factors by which vectors are divided by their steps and rotated; the rotation is of 1 and -1. */
static void prepare_turns(Side *s) {
    const REAL by = s->middle ? sqrt(1.0 / s->rotated) : 1;
    for (long d = 0; d < s->dim; d++) s->enter[d] = s->back[d] = by;
    for (long d = 0; d < s->dim && s->steps; d++) s->enter[d] *= 1 / s->steps[d], s->back[d] *= s->steps[d];
}

/* Ask for numbers that are read soon, so that they come from memory meanwhile. */
static void fetch(const REAL *x, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(REAL)) __builtin_prefetch(x + i);
}

/* Hide a token from some rows. */
static void hide(REAL *logits, long from, long to) {
    for (long row = from > 0 ? from : 0; row < to; row++) logits[row] = EMPTY;
}

/* Take the keys or the values of up to ROWS tokens of a part, as they will be kept. */
static void take_side(const Reader *r, const Side *s, const REAL *x, long apart, REAL factor, long first) {
    const long dim = s->dim, some = r->found - first < ROWS ? r->found - first : ROWS;
    REAL *rows = near_row(r, s, r->place + first);
    for (long m = first + ROWS; m < first + 2 * ROWS && m < r->found; m++) fetch(x + r->tokens[m] * apart, dim);
    for (long m = 0; m < some; m++) {
        REAL *restrict row = rows + m * s->size;
        const REAL *given = x + r->tokens[first + m] * apart, *enter = s->enter, *middle = s->middle;
        if (!middle) memcpy(row, given, dim * sizeof(REAL));
        else
            for (long d = 0; d < dim; d++) row[d] = (given[d] * factor - middle[d]) * enter[d];
    }
    if (s->middle) rotate(rows, some * s->size, 1, s->rotated);
    for (long p = r->place + first; p < r->place + first + some; p++, rows += s->size) {
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
    take_side(r, &r->key, r->k, r->sizes[OF_K + 3], r->root, index * ROWS);
    take_side(r, &r->value, r->v, r->sizes[OF_V + 3], 1, index * ROWS);
}

static const REAL *query_of(const Reader *r, const long *tokens, long row) {
    return r->q + tokens[row / r->each] * r->sizes[OF_Q + 3] + row % r->each * r->sizes[OF_Q + 2];
}

/* Let rows of tokens attend, and put out what they read (a step); column after column, so that no row depends on
   another. */
static void attend(const Reader *r, const Scratch *scratch, long index) {
    const Slots *slots = &r->slots;
    const long first = r->rows[index].first, found = r->rows[index].found, shown = r->rows[index].slots;
    const long *of_tokens = r->tokens + first, place = r->place + first, count = slots->most ? r->shows[shown] : 0;
    const REAL *level = r->level + shown * slots->most;
    const REAL *seen = r->seen + shown * slots->most * (slots->key + slots->value), *a[ROWS];
    const int64_t *sizes = r->sizes;
    long each = r->each, used = found * each, rows = padded(used, LANES), last = place + found - 1, merged = 0, j = 0;
    if (slots->most && place >= r->window) merged = ((place - r->window) / r->block + 1) * r->block;
    long from = slots->most ? merged : place - r->window + 1, behind = slots->most ? merged : last - r->window + 1;
    from = from < 0 ? 0 : from > last + 1 || !r->window ? last + 1 : from, behind = behind < 0 ? 0 : behind;
    Part parts[PARTS] = {
        {r->key.sinks, r->value.sinks, behind < r->sinks ? behind : r->sinks, r->key.size, r->value.size},
        {near_row(r, &r->key, from), near_row(r, &r->value, from), last + 1 - from, r->key.size, r->value.size},
        {seen, seen + slots->key, count, slots->key + slots->value, slots->key + slots->value}};
    REAL *asks = scratch->asks, *logits = scratch->logits, *top = scratch->top, *sum = scratch->sum;
    for (long row = 0; row < rows; row++) {
        const REAL *own = query_of(r, of_tokens, row < used ? row : 0);
        for (long d = 0; d < r->key.dim; d++) asks[d * rows + row] = row < used ? own[d] * r->by : 0;
    }
    for (long row = used; row < 2 * used && row / each < r->found - first; row++)
        fetch(query_of(r, of_tokens, row), r->key.dim);
    if (r->key.middle) {
        for (long d = 0; d < r->key.dim; d++)
            for (long row = 0; row < rows; row++) asks[d * rows + row] *= r->key.back[d];
        rotate(asks, r->key.dim * rows, rows, r->key.rotated);
    }
    for (Part *part = parts; part < parts + PARTS; part++) {
        for (long i = 0; i < part->count; i += ROWS) {
            for (long m = 0; m < ROWS; m++) a[m] = part->k + (i + m < part->count ? i + m : i) * part->k_width;
            multiply(a, 1, r->key.dim, asks, rows, rows, logits + (j + i) * rows, rows, 0);
        }
        for (long i = 0; i < part->count; i++, j++) {
            REAL *own = logits + j * rows;
            long at = part == parts ? i : from + i;
            if (part == parts + 2) {
                for (long row = 0; row < rows; row++) own[row] += level[i];
            } else if (part == parts) {
                if (!slots->most) hide(own, 0, (at + r->window - place) * each);
            } else {
                hide(own, 0, (at - place) * each);
                if (!slots->most) hide(own, (at + r->window - place) * each, used);
            }
        }
    }
    memcpy(top, logits, rows * sizeof(REAL)), memset(sum, 0, rows * sizeof(REAL));
    for (REAL *own = logits; own < logits + j * rows; own += rows)
        for (long row = 0; row < rows; row++) top[row] = own[row] > top[row] ? own[row] : top[row];
    for (REAL *own = logits; own < logits + j * rows; own += rows)
        for (long row = 0; row < rows; row++) own[row] = exponential(own[row] - top[row]), sum[row] += own[row];
    long size = r->value.size;
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
            long token = of_tokens[(row + m) / each], query = (row + m) % each;
            REAL *restrict own = r->out + token * sizes[OF_OUT + 3] + query * sizes[OF_OUT + 2];
            const REAL *restrict given = read + m * size, *restrict back = r->value.back;
            const REAL *restrict middle = r->value.middle;
            if (!middle) memcpy(own, given, r->value.dim * sizeof(REAL));
            for (long d = 0; middle && d < r->value.dim; d++) own[d] = given[d] * back[d] + middle[d];
        }
    }
}

static void level_slots(Reader *r, REAL gain) {
    const Slots *s = &r->slots;
    REAL *level = r->level + r->shown * s->most;
    for (long o = 0; o < s->count; o++) {
        long i = s->order[o];
        level[o] = (sizeof(REAL) == 4 ? logf(s->weight[i]) : log(s->weight[i])) + gain * s->spread[i];
    }
    r->shows[r->shown] = s->count;
}

/* Let a block of tokens from a place on leave the window, and show the slots that it leaves beside those of before. */
static void merge_block(Reader *r, long from, REAL gain) {
    Slots *s = &r->slots;
    for (long p = from < r->sinks ? r->sinks : from; p < from + r->block; p++) {
        REAL *row = add_slot(s, 1, 0);
        memcpy(row + r->key.size, near_row(r, &r->value, p), r->value.size * sizeof(REAL));
        memcpy(row + r->key.size + r->value.size, near_row(r, &r->key, p), r->key.size * sizeof(REAL));
    }
    r->shown = (r->shown + 1) % (r->merges + 1);
    s->seen = r->seen + r->shown * s->most * (s->key + s->value);
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

/* Do steps that nobody has begun. */
static void do_steps(Shared *shared, const Reader *r, const Scratch *scratch) {
    Step *step = shared->step;
    for (long i, count = shared->count; (i = __atomic_fetch_add(&shared->next, 1, __ATOMIC_SEQ_CST)) < count;)
        step(r, scratch, i);
}

/* Do steps together with threads that have nothing else to do, and return when all are done. */
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

/* Read a part of a text whose tokens are taken, as rows that see the same slots. */
static void read_part(Reader *r, const Scratch *scratch, long h, int *prepared) {
    Slots *slots = &r->slots;
    long count = 0, dim = r->key.dim, place = r->place, end = place + r->found;
    for (; place < end; place += r->rows[count++].found) {
        long limit = end - place < r->chunk ? end - place : r->chunk;
        if (slots->most) {
            long gone = place - r->window, ahead = gone < 0 ? -gone : r->block - gone % r->block;
            limit = ahead < limit ? ahead : limit;
            if (gone >= 0 && ahead == r->block) {
                REAL factor = r->key.middle ? 1 : r->root, *metric = r->of[METRIC], *query = r->of[MEAN_QUERY];
                if (!*prepared) prepare_merging(slots, metric + h * dim * dim, query + h * (dim + 1), factor);
                *prepared = 1;
                merge_block(r, gone, ((REAL *)r->of[GAIN])[h]);
            }
        }
        r->rows[count] = (Rows){place - r->place, limit, r->shown};
    }
    share_steps(r, scratch, attend, count);
}

/* Let one head of a text read. */
static int read_head(const int64_t *sizes, void **tensors, const int64_t *group, void **of, long b, long h,
                     Shared *shared) {
    const double *factors = tensors[FACTORS];
    long head = ((int64_t *)of[HEAD])[h], tokens = sizes[TOKENS], zeros;
    int prepared = 0;
    Reader r = {side_of(sizes, group, tensors, of, 0, head), side_of(sizes, group, tensors, of, 1, head)};
    Slots *slots = &r.slots;
    Scratch scratch;
    r.sizes = sizes, r.of = of, r.shared = shared, r.window = group[WINDOW], r.block = group[BLOCK];
    r.sinks = sizes[SINKS], r.each = sizes[EACH], r.own = b * group[HEADS] + h;
    r.chunk = ROWS_AT_ONCE / r.each > 0 ? ROWS_AT_ONCE / r.each : 1, r.chunk = r.chunk < tokens ? r.chunk : tokens;
    r.part = tokens < PART_TOKENS ? tokens : PART_TOKENS;
    slots->most = group[SLOTS], slots->room = slots->most ? padded(slots->most + r.block, TILE) : 0;
    slots->key = r.key.size, slots->value = r.value.size, slots->width = 2 * r.key.size + r.value.size;
    slots->key_dim = r.key.dim, slots->value_dim = r.value.dim, slots->bits = group[SLOT_BITS];
    slots->kept_bf16 = group[KEPT_BF16], r.merges = slots->most ? (r.part - 1) / r.block + 1 : 0;
    char *memory = take_memory(lay_out(&r, 0, &zeros) + lay_scratch(&r, &scratch, 0));
    if (!memory) return 0;
    lay_scratch(&r, &scratch, memory + lay_out(&r, memory, &zeros)), memset(memory, 0, zeros);
    prepare_turns(&r.key), prepare_turns(&r.value);
    for (long i = 0; i < slots->room; i++) slots->place[i] = INFINITY;
    slots->seen = r.seen;

    r.q = (REAL *)tensors[Q] + b * sizes[OF_Q] + head * sizes[OF_Q + 1];
    r.k = (REAL *)tensors[K] + b * sizes[OF_K] + head * sizes[OF_K + 1];
    r.v = (REAL *)tensors[V] + b * sizes[OF_V] + head * sizes[OF_V + 1];
    r.out = (REAL *)tensors[OUT] + b * sizes[OF_OUT] + head * sizes[OF_OUT + 1];
    const uint8_t *present = tensors[PRESENT] ? (uint8_t *)tensors[PRESENT] + b * tokens : 0;
    r.root = factors[ROOT], r.by = r.key.middle ? factors[SCALE] / factors[ROOT] : factors[SCALE];
    long before = sizes[KEEPS] ? ((int64_t *)tensors[COUNT])[b] : 0, place = before;
    r.begin = before > r.window ? before - r.window : 0;
    if (sizes[KEEPS]) read_state(&r, before);
    if (slots->most) level_slots(&r, ((REAL *)of[GAIN])[h]);
    for (long t = 0; t < tokens; place += r.found) {
        move_window(&r, place);
        for (r.found = 0; t < tokens && r.found < r.part; t++) {
            if (!present || present[t]) {
                r.tokens[r.found++] = t;
                continue;
            }
            for (long g = 0; g < r.each; g++)
                memset(r.out + t * sizes[OF_OUT + 3] + g * sizes[OF_OUT + 2], 0, r.value.dim * sizeof(REAL));
        }
        share_steps(&r, &scratch, take_tokens, (r.found + ROWS - 1) / ROWS);
        read_part(&r, &scratch, h, &prepared);
    }
    if (sizes[KEEPS]) write_state(&r, before, place, prepared || !before);
    return 1;
}

/* The layer that threads read together. */
typedef struct {
    int64_t *sizes;
    void **tensors;
    int done;
} Layer;

/* Let heads read that no other thread has begun; then help those that have. */
static void read_some(void *given) {
    Layer *layer = given;
    int64_t *sizes = layer->sizes, *call = layer->tensors[CALL], heads = 0;
    int64_t *groups = sizes + LAYER_SIZES, *end = groups + sizes[GROUPS] * GROUP_SIZES;
    Shared *all = call ? (Shared *)(call + OF_CALL) : 0;
    Shared *own = call ? all + __atomic_fetch_add(call + BEGUN, 1, __ATOMIC_SEQ_CST) : 0;
    for (int64_t *group = groups; group < end; group += GROUP_SIZES) heads += sizes[TEXTS] * group[HEADS];
    for (long next; (next = __atomic_fetch_add(sizes + NEXT, 1, __ATOMIC_SEQ_CST)) < heads;) {
        int64_t *group = groups;
        void **of = layer->tensors + LAYER_TENSORS;
        for (; next >= sizes[TEXTS] * group[HEADS]; group += GROUP_SIZES, of += GROUP_TENSORS)
            next -= sizes[TEXTS] * group[HEADS];
        long text = next / group[HEADS], head = next % group[HEADS];
        if (!read_head(sizes, layer->tensors, group, of, text, head, own)) layer->done = 0;
        if (call) __atomic_fetch_add(call + FINISHED, 1, __ATOMIC_SEQ_CST);
    }
    while (call && __atomic_load_n(call + FINISHED, __ATOMIC_SEQ_CST) < heads) {
        for (Shared *shared = all; shared < all + call[THREADS]; shared++) help(shared);
        sched_yield();
    }
    keep_little();
}

/* How many threads are worth their beginning, for what all tokens see. */
static long count_threads(const int64_t *sizes, long most) {
    const int64_t *group = sizes + LAYER_SIZES, *end = group + sizes[GROUPS] * GROUP_SIZES;
    long seen = 0;
    for (; group < end; group += GROUP_SIZES) seen += group[HEADS] * (group[WINDOW] + group[SLOTS]);
    seen = seen * sizes[TEXTS] * sizes[TOKENS] / SEEN_BY_THREAD + 1;
    return seen < most ? seen : most;
}

/* Let all heads of a layer read, or, in one of several threads that others begin, some of them. */
int read_heads(int64_t *sizes, void **tensors) {
    int64_t *call = tensors[CALL];
    Layer layer = {sizes, tensors, 1};
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = call ? (void *)call[PARALLEL] : 0;
    long threads = parallel ? count_threads(sizes, call[THREADS]) : 1;
    if (threads > 1) parallel(read_some, &layer, threads, 0);
    else read_some(&layer);
    return layer.done;
}
"""
)
