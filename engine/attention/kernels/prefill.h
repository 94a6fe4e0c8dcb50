/* Prompt attention with window masses in one pass over the keys.
 *
 * A task is a query head and every n-th strip of its queries. A strip's probabilities are kept until the strip's softmax is
 * final, so each logit and each exponential is computed once and serves output and column sums alike.
 * They lie as [tile][panel][QROWS][PANEL]: whole vectors for the scores, constant distances for the values.
 */

#define VALUE_KEYS 128 /* keys whose values stay in the first cache while all tiles use them */

typedef struct {
    float *query, *top, *sum, *out, *columns, *score;
} prefill_scratch;

static int64_t prefill_floats(const qe_columns_call *c, prefill_scratch *at, float *scratch) {
    const qe_columns *p = c->columns;
    const int64_t d = p->head_dim, strip = c->strip, keys = (int64_t)c->panels * PANEL;
    if (at) {
        at->query = scratch;
        at->top = at->query + strip * d;
        at->sum = at->top + strip * W;
        at->out = at->sum + strip * W;
        at->columns = at->out + strip * d;
        at->score = at->columns + keys;
    }
    return 2 * strip * d + 2 * strip * W + keys + strip * keys;
}

static int64_t prefill_plan(qe_columns_call *c) {
    const qe_columns *p = c->columns;
    c->panel = PANEL;
    c->panels = (p->keys + PANEL - 1) / PANEL;
    c->strip = p->keys <= 8192 ? 24 : QROWS; /* the strip's probabilities should fit the second cache */
    c->strips = (p->queries + c->strip - 1) / c->strip;
    return prefill_floats(c, NULL, NULL);
}

/* Logits of one tile against one panel; -Inf where a query does not see a key. */
INLINE void prefill_scores(const float *q, const float *k, int d, float scale, float softcap, int64_t diagonal,
                           int64_t before, float *s, float *top) {
    vf acc[QROWS][2];
    UNROLL for (int r = 0; r < QROWS; r++) acc[r][0] = acc[r][1] = bc(0);
    for (int x = 0; x < d; x++) {
        vf a = ld(k + x * PANEL), b = ld(k + x * PANEL + W);
        UNROLL for (int r = 0; r < QROWS; r++) {
            vf y = bc(q[x * QROWS + r]);
            acc[r][0] = fma_(y, a, acc[r][0]);
            acc[r][1] = fma_(y, b, acc[r][1]);
        }
    }
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    UNROLL for (int r = 0; r < QROWS; r++) {
        vf a = acc[r][0] * bc(scale), b = acc[r][1] * bc(scale);
        if (softcap > 0) a = vcap(a, softcap), b = vcap(b, softcap);
        if (diagonal + r < PANEL - 1 || before > 0) { /* lanes from `before` to `diagonal + r` are seen by query r */
            vi low = bci((int32_t)before), high = bci((int32_t)(diagonal + r < PANEL ? diagonal + r : PANEL)), right = lane + bci(W);
            a = select_((lane <= high) & (lane >= low), a, bc(-INFINITY));
            b = select_((right <= high) & (right >= low), b, bc(-INFINITY));
        }
        st(s + r * PANEL, a), st(s + r * PANEL + W, b);
        st(top + r * W, vmax(ld(top + r * W), vmax(a, b)));
    }
}

/* out[QROWS][two vectors] += probabilities of `keys` keys of consecutive panels times their values. */
INLINE void prefill_values(const float *s, const float *v, int64_t row_stride, int keys, float *out, int d, const int wide) {
    vf acc[QROWS][2];
    UNROLL for (int r = 0; r < QROWS; r++) UNROLL for (int c = 0; c < wide; c++) acc[r][c] = ld(out + (int64_t)r * d + c * W);
    for (int panel = 0; panel < keys; panel += PANEL, s += QROWS * PANEL) {
        const int many = keys - panel < PANEL ? keys - panel : PANEL;
        for (int i = 0; i < many; i++, v += row_stride) {
            vf x[2];
            UNROLL for (int c = 0; c < wide; c++) x[c] = ld(v + c * W);
            UNROLL for (int r = 0; r < QROWS; r++) {
                vf y = bc(s[r * PANEL + i]);
                UNROLL for (int c = 0; c < wide; c++) acc[r][c] = fma_(y, x[c], acc[r][c]);
            }
        }
    }
    UNROLL for (int r = 0; r < QROWS; r++) UNROLL for (int c = 0; c < wide; c++) st(out + (int64_t)r * d + c * W, acc[r][c]);
}

static void prefill_strip(const qe_columns_call *c, int head, int strip, float *blocks, float *scratch) {
    const qe_columns *p = c->columns;
    const int d = p->head_dim;
    const int first = strip * c->strip, rows = p->queries - first < c->strip ? p->queries - first : c->strip;
    const int tiles = (rows + QROWS - 1) / QROWS, padded = tiles * QROWS, kv = head / (p->heads / p->kv_heads);
    prefill_scratch at;
    prefill_floats(c, &at, scratch);
    int keys = p->first_column + first + rows;
    if (keys > p->keys) keys = p->keys;
    const int panels = (keys + PANEL - 1) / PANEL;
    const int64_t tile_floats = (int64_t)panels * QROWS * PANEL;
    for (int i = 0; i < padded; i++) {
        const float *from = p->query + head * p->query_head_stride + (int64_t)(first + (i < rows ? i : 0)) * p->query_row_stride;
        float *to = at.query + (int64_t)(i / QROWS) * QROWS * d + i % QROWS;
        for (int x = 0; x < d; x++) to[x * QROWS] = from[x];
        st(at.top + i * W, bc(-INFINITY));
        st(at.sum + i * W, bc(0));
        for (int x = 0; x < d; x += W) st(at.out + (int64_t)i * d + x, bc(0));
    }
    for (int panel = 0; panel < panels; panel++) {
        const float *k = c->packed + ((int64_t)kv * c->panels + panel) * d * PANEL;
        for (int i = 0; i < tiles; i++)
            prefill_scores(at.query + (int64_t)i * QROWS * d, k, d, p->scale, p->softcap,
                           (int64_t)p->first_column + first + i * QROWS - panel * PANEL, (int64_t)p->pad - panel * PANEL,
                           at.score + i * tile_floats + (int64_t)panel * QROWS * PANEL, at.top + i * QROWS * W);
    }
    float top[24], factor[24];
    for (int i = 0; i < padded; i++) {
        float m = hmax(ld(at.top + i * W));
        top[i] = m > -INFINITY ? m : 0.0f;
    }
    for (int i = 0; i < tiles; i++)
        for (int panel = 0; panel < panels; panel++)
            for (int r = 0; r < QROWS; r++) {
                float *s = at.score + i * tile_floats + ((int64_t)panel * QROWS + r) * PANEL, *sum = at.sum + (i * QROWS + r) * W;
                vf m = bc(top[i * QROWS + r]);
                vf a = vexp(ld(s) - m), b = vexp(ld(s + W) - m);
                st(s, a), st(s + W, b);
                st(sum, ld(sum) + (a + b));
            }
    for (int i = 0; i < padded; i++) {
        const float sum = hsum(ld(at.sum + i * W));
        factor[i] = i < rows && sum > 0 ? 1.0f / sum : 0.0f;
        if (i < rows) p->lse_out[(int64_t)head * p->queries + first + i] = sum > 0 ? top[i] + logf(sum) : -INFINITY;
    }
    for (int from = 0; from < keys; from += VALUE_KEYS) {
        const int many = keys - from < VALUE_KEYS ? keys - from : VALUE_KEYS;
        const float *v = p->value + kv * p->value_head_stride + (int64_t)from * p->value_row_stride;
        for (int x = 0; x < d; x += 2 * W)
            for (int i = 0; i < tiles; i++) {
                const float *s = at.score + i * tile_floats + (int64_t)from * QROWS;
                float *out = at.out + (int64_t)i * QROWS * d + x;
                if (d - x >= 2 * W) prefill_values(s, v + x, p->value_row_stride, many, out, d, 2);
                else prefill_values(s, v + x, p->value_row_stride, many, out, d, 1);
            }
    }
    for (int i = 0; i < rows; i++) {
        float *to = p->out + head * p->out_head_stride + (int64_t)(first + i) * p->out_row_stride;
        for (int x = 0; x < d; x += W) st(to + x, ld(at.out + (int64_t)i * d + x) * bc(factor[i]));
    }
    if (!blocks) return;
    for (int i = 0; i < padded; i++) { /* a query that is padding itself scores nothing */
        if (i >= rows || p->first_column + first + i < p->pad) factor[i] = 0.0f;
        else if (p->weights) factor[i] *= p->weights[first + i];
    }
    for (int panel = 0; panel < panels; panel++) {
        vf left = bc(0), right = bc(0);
        for (int i = 0; i < tiles; i++) {
            const float *s = at.score + i * tile_floats + (int64_t)panel * QROWS * PANEL;
            UNROLL for (int r = 0; r < QROWS; r++) {
                vf f = bc(factor[i * QROWS + r]);
                left = fma_(f, ld(s + r * PANEL), left);
                right = fma_(f, ld(s + r * PANEL + W), right);
            }
        }
        st(at.columns + panel * PANEL, left);
        st(at.columns + panel * PANEL + W, right);
    }
    for (int i = p->pad; i < keys; i++) blocks[(i + p->grid_offset) / p->window] += at.columns[i];
}

static void prefill_task(const qe_columns_call *c, int64_t task, float *scratch) {
    const int blocks = c->columns->blocks;
    float *mass = c->columns->mass ? c->partial + task * blocks : NULL;
    for (int i = 0; mass && i < blocks; i++) mass[i] = 0.0f;
    for (int strip = (int)(task % c->sections); strip < c->strips; strip += c->sections)
        prefill_strip(c, (int)(task / c->sections), strip, mass, scratch);
}
