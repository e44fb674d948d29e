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
        s.enter = (REAL *)turns[0] + head * s.dim, s.back = (REAL *)turns[1] + head * s.dim;
        s.middle = (REAL *)turns[2] + head * s.dim, s.rotated = s.dim & -s.dim;
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
    REAL *read = r->read;
    for (long row = 0; row < used; row += ROWS) {
        j = 0;
        for (Part *part = parts; part < parts + PARTS; part++) {
            for (int m = 0; m < ROWS; m++) a[m] = logits + j * rows + row + m;
            if (part->count) multiply(a, rows, part->count, part->v, part->v_width, size, read, size, j > 0);
            j += part->count;
        }
        for (int m = 0; m < ROWS; m++)
            for (long d = 0; d < size; d++) read[m * size + d] /= r->sum[row + m];
        if (r->value.back) rotate(read, ROWS * size, 1, r->value.rotated);
        for (long m = 0; m < ROWS && row + m < used; m++) {
            REAL *own = out + r->tokens[(row + m) / each] * sizes[OF_OUT + 3] + (row + m) % each * sizes[OF_OUT + 2];
            const REAL *given = read + m * size;
            for (long d = 0; d < r->value.dim; d++)
                own[d] = r->value.back ? given[d] * r->value.back[d] + r->value.middle[d] : given[d];
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
