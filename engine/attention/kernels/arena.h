/* One task over full-precision tokens: scores, softmax and values of a run of keys and values, lane = channel. */

INLINE void run_scores(const float *q, int d, const void *k, int64_t from, int tokens, int64_t ahead, float *s,
                       int64_t head_floats, const int hg, const int dtype) {
    int t = 0;
    for (; t + 4 <= tokens; t += 4) {
        vf acc[QE_HEADS][4];
        const int64_t row = (from + t) * d;
        UNROLL for (int h = 0; h < hg; h++) UNROLL for (int i = 0; i < 4; i++) acc[h][i] = bc(0);
        for (int c = 0; c < d; c += W) {
            vf key[4];
            UNROLL for (int i = 0; i < 4; i++) {
                PREFETCH((const char *)k + (row + i * d + c + ahead) * (dtype == QE_F32 ? 4 : 2));
                key[i] = ld_any(k, row + i * d + c, dtype);
            }
            UNROLL for (int h = 0; h < hg; h++) {
                vf x = ld(q + (int64_t)h * d + c);
                UNROLL for (int i = 0; i < 4; i++) acc[h][i] = fma_(x, key[i], acc[h][i]);
            }
        }
        UNROLL for (int h = 0; h < hg; h++) hsum4(acc[h][0], acc[h][1], acc[h][2], acc[h][3], s + h * head_floats + t);
    }
    for (; t < tokens; t++)
        for (int h = 0; h < hg; h++) {
            vf acc = bc(0);
            for (int c = 0; c < d; c += W) acc = fma_(ld(q + (int64_t)h * d + c), ld_any(k, (from + t) * d + c, dtype), acc);
            s[h * head_floats + t] = hsum(acc);
        }
}

INLINE void run_values(const void *v, int d, int64_t from, int tokens, int64_t ahead, const float *w,
                       int64_t head_floats, float *out, const int hg, const int tile, const int dtype) {
    vf acc[QE_HEADS][4];
    UNROLL for (int h = 0; h < hg; h++) UNROLL for (int c = 0; c < tile; c++) acc[h][c] = ld(out + (int64_t)h * d + c * W);
    for (int t = 0; t < tokens; t++) {
        vf x[4];
        UNROLL for (int c = 0; c < tile; c++) {
            PREFETCH((const char *)v + ((from + t) * d + c * W + ahead) * (dtype == QE_F32 ? 4 : 2));
            x[c] = ld_any(v, (from + t) * d + c * W, dtype);
        }
        UNROLL for (int h = 0; h < hg; h++) {
            vf weight = bc(w[h * head_floats + t]);
            UNROLL for (int c = 0; c < tile; c++) acc[h][c] = fma_(weight, x[c], acc[h][c]);
        }
    }
    UNROLL for (int h = 0; h < hg; h++) UNROLL for (int c = 0; c < tile; c++) st(out + (int64_t)h * d + c * W, acc[h][c]);
}

static __attribute__((noinline)) void run_scores_any(const float *q, int d, const void *k, int64_t from, int tokens,
                                                     int64_t ahead, float *s, int64_t head_floats, int hg, int dtype) {
#define CALL32(n) run_scores(q, d, k, from, tokens, ahead, s, head_floats, n, QE_F32)
#define CALL16(n) run_scores(q, d, k, from, tokens, ahead, s, head_floats, n, QE_F16)
#define CALLB(n) run_scores(q, d, k, from, tokens, ahead, s, head_floats, n, QE_BF16)
    if (dtype == QE_F32) { PER_HEADS(hg, CALL32) } else if (dtype == QE_F16) { PER_HEADS(hg, CALL16) } else { PER_HEADS(hg, CALLB) }
#undef CALL32
#undef CALL16
#undef CALLB
}

#define DEFINE_VALUES(NAME, DTYPE)                                                                               \
    static __attribute__((noinline)) void NAME(const void *v, int d, int64_t from, int tokens, int64_t ahead,    \
                                               const float *w, int64_t head_floats, float *out, int hg, int tile) { \
        switch (tile * 8 + hg) {                                                                                 \
        case 33: run_values(v, d, from, tokens, ahead, w, head_floats, out, 1, 4, DTYPE); break;                 \
        case 34: run_values(v, d, from, tokens, ahead, w, head_floats, out, 2, 4, DTYPE); break;                 \
        case 35: run_values(v, d, from, tokens, ahead, w, head_floats, out, 3, 4, DTYPE); break;                 \
        case 36: run_values(v, d, from, tokens, ahead, w, head_floats, out, 4, 4, DTYPE); break;                 \
        case 17: run_values(v, d, from, tokens, ahead, w, head_floats, out, 1, 2, DTYPE); break;                 \
        case 18: run_values(v, d, from, tokens, ahead, w, head_floats, out, 2, 2, DTYPE); break;                 \
        case 19: run_values(v, d, from, tokens, ahead, w, head_floats, out, 3, 2, DTYPE); break;                 \
        case 20: run_values(v, d, from, tokens, ahead, w, head_floats, out, 4, 2, DTYPE); break;                 \
        case 9: run_values(v, d, from, tokens, ahead, w, head_floats, out, 1, 1, DTYPE); break;                  \
        case 10: run_values(v, d, from, tokens, ahead, w, head_floats, out, 2, 1, DTYPE); break;                 \
        case 11: run_values(v, d, from, tokens, ahead, w, head_floats, out, 3, 1, DTYPE); break;                 \
        default: run_values(v, d, from, tokens, ahead, w, head_floats, out, 4, 1, DTYPE); break;                 \
        }                                                                                                        \
    }
DEFINE_VALUES(values_f32, QE_F32)
DEFINE_VALUES(values_f16, QE_F16)
DEFINE_VALUES(values_bf16, QE_BF16)

static void run_values_any(const void *v, int d, int64_t from, int tokens, int64_t ahead, const float *w,
                           int64_t head_floats, float *out, int hg, int dtype) {
    for (int c = 0; c < d;) {
        int tile = d - c >= 4 * W && (HALVES < 4 || hg <= 2) ? 4 : d - c >= 2 * W ? 2 : 1;
        if (dtype == QE_F32) values_f32((const float *)v + c, d, from, tokens, ahead, w, head_floats, out + c, hg, tile);
        else if (dtype == QE_F16) values_f16((const uint16_t *)v + c, d, from, tokens, ahead, w, head_floats, out + c, hg, tile);
        else values_bf16((const uint16_t *)v + c, d, from, tokens, ahead, w, head_floats, out + c, hg, tile);
        c += tile * W;
    }
}

typedef struct {
    int from, tokens;
} run;

/* One head group over the valid runs of a chunk of `width` tokens (a multiple of the lanes, padded with -Inf). */
static void run_part(const float *q, int d, const void *k, const void *v, int64_t from, const run *runs, int count,
                     int width, int64_t ahead, float softcap, float *s, float *partial, int g, int h0, int hg, int dtype) {
    for (int64_t i = 0; i < (int64_t)hg * width; i += W) st(s + i, bc(-INFINITY));
    for (int r = 0; r < count; r++)
        run_scores_any(q, d, k, from + runs[r].from, runs[r].tokens, ahead, s + runs[r].from, width, hg, dtype);
    for (int h = 0; h < hg; h++) {
        float *slot = partial + (int64_t)g * d + h0 + h;
        slot[g] = softmax_part(s + (int64_t)h * width, width, softcap, slot);
        for (int i = 0; i < d; i++) partial[(int64_t)(h0 + h) * d + i] = 0.0f;
    }
    for (int r = 0; r < count; r++)
        run_values_any(v, d, from + runs[r].from, runs[r].tokens, ahead, s + runs[r].from, width,
                       partial + (int64_t)h0 * d, hg, dtype);
}

static int arena_width(const qe_call *c) {
    return (c->arena_chunk * c->plan->window + QE_LANES - 1) / QE_LANES * QE_LANES;
}

static void arena_task(const qe_call *c, int row, int chunk, int next_row, int next_chunk, float *scratch) {
    const qe_plan *p = c->plan;
    const int d = p->head_dim, window = p->window, slots = p->arena_slots, g = c->group, heads = c->heads_per_row;
    const int first = chunk * c->arena_chunk, chunks = c->arena_chunks + c->ledger_chunks, width = arena_width(c);
    int count = p->arena_count[row] - first, runs = 0;
    if (count > c->arena_chunk) count = c->arena_chunk;
    run list[257];
    const int pad = p->first_column[row], o = p->grid_offset;
    for (int i = 0; i < count; i++) {
        const int block = p->arena_ids[(int64_t)row * slots + first + i];
        if (block < 0) continue;
        int64_t column = (int64_t)block * window - o;
        int64_t low = pad - column, high = c->seq_len - column;
        int lo = low < 0 ? 0 : low > window ? window : (int)low;
        if (column + lo < 0) lo = (int)-column; /* the grid starts before column 0 */
        int hi = high < 0 ? 0 : high > window ? window : (int)high;
        if (hi <= lo) continue;
        if (runs && list[runs - 1].from + list[runs - 1].tokens == i * window + lo) list[runs - 1].tokens += hi - lo;
        else list[runs++] = (run){i * window + lo, hi - lo};
    }
    for (int hd = 0; hd < heads; hd++) {
        const int64_t unit = ((int64_t)row * heads + hd) * slots + first;
        int64_t after = unit + slots;
        if (hd + 1 == heads) after = next_row < 0 ? unit : (int64_t)next_row * heads * slots + (int64_t)next_chunk * c->arena_chunk;
        const int64_t ahead = (after - unit) * window * d;
        float *partial = c->partial + (((int64_t)row * heads + hd) * chunks + chunk) * c->partial_floats;
        for (int h0 = 0; h0 < g; h0 += QE_HEADS) {
            const int hg = g - h0 < QE_HEADS ? g - h0 : QE_HEADS;
            const int64_t head = ((int64_t)row * heads + hd) * g + h0;
            run_part(c->query + head * d, d, p->arena_k, p->arena_v, unit * window, list, runs, width, ahead, p->softcap,
                     scratch, partial, g, h0, hg, p->arena_dtype);
            if (c->want_mass)
                for (int h = 0; h < hg; h++)
                    for (int i = 0; i < count; i++) {
                        float total = 0;
                        for (int j = 0; j < window; j++) total += scratch[(int64_t)h * width + i * window + j];
                        c->arena_raw[(head + h) * slots + first + i] = total;
                    }
        }
    }
}

static void full_task(const qe_full *f, int64_t task, int64_t next, float *scratch) {
    const int d = f->head_dim, g = f->group;
    const int64_t kv = task / f->chunks, chunk = task % f->chunks;
    const int64_t from = kv * f->keys + chunk * f->chunk;
    const int64_t rest = f->keys - chunk * f->chunk;
    const run whole = {0, (int)(rest < f->chunk ? rest : f->chunk)};
    const int64_t after = next < 0 ? from : next / f->chunks * f->keys + next % f->chunks * f->chunk;
    for (int h0 = 0; h0 < g; h0 += QE_HEADS)
        run_part(f->query + (kv * g + h0) * d, d, f->k, f->v, from, &whole, 1, f->chunk, (after - from) * d, f->softcap,
                 scratch, f->partial + task * f->partial_floats, g, h0, g - h0 < QE_HEADS ? g - h0 : QE_HEADS, f->dtype);
}

static int64_t full_floats(const qe_full *f) { return (int64_t)QE_HEADS * f->chunk; }
