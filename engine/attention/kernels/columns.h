/* Prefill column sums: for every key, the probability it received from all prompt queries.
 *
 * exp(q.k * scale - lse) summed over queries, below the causal diagonal only. Keys lie in packed panels,
 * lane = key; a tile is QROWS queries times one panel of two vectors, kept in registers.
 */

#if W == 16
#define QROWS 12
#elif W == 8
#define QROWS 6
#else
#define QROWS 4
#endif
#define PANEL (2 * W)

static int64_t columns_plan(qe_columns_call *c) {
    const qe_columns *p = c->columns;
    c->panel = PANEL;
    c->panels = (p->keys + PANEL - 1) / PANEL;
    c->strip = 192 / QROWS * QROWS;
    c->strips = (p->queries + c->strip - 1) / c->strip;
    return (int64_t)c->strip * (p->head_dim + 1) + (int64_t)c->panels * PANEL;
}

static void columns_pack(const qe_columns_call *c, int64_t task) {
    const qe_columns *p = c->columns;
    const int d = p->head_dim, kv = (int)(task / c->panels), panel = (int)(task % c->panels);
    const float *from = p->key + kv * p->key_head_stride;
    float *to = c->packed + task * d * PANEL;
    for (int i = 0; i < PANEL; i++) {
        const int key = panel * PANEL + i;
        if (key < p->keys)
            for (int x = 0; x < d; x++) to[x * PANEL + i] = from[key * p->key_row_stride + x];
        else
            for (int x = 0; x < d; x++) to[x * PANEL + i] = 0.0f;
    }
}

/* Adds one tile's probabilities to the panel's two column vectors. */
INLINE void columns_tile(const float *q, const float *k, int d, const float *bias, float scale, float softcap,
                         float power, int64_t diagonal, vf *left, vf *right) {
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
    const vf times = bc(softcap > 0 ? power : scale * power);
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    UNROLL for (int r = 0; r < QROWS; r++) {
        vf a = acc[r][0], b = acc[r][1];
        if (softcap > 0) a = vcap(a * bc(scale), softcap), b = vcap(b * bc(scale), softcap);
        a = vexp(fma_(a, times, bc(bias[r])));
        b = vexp(fma_(b, times, bc(bias[r])));
        if (diagonal + r < PANEL - 1) { /* lanes up to diagonal + r are seen by query r */
            a = keep(a, lane <= bci((int32_t)(diagonal + r)));
            b = keep(b, lane + bci(W) <= bci((int32_t)(diagonal + r)));
        }
        *left = *left + a;
        *right = *right + b;
    }
}

static void columns_strip(const qe_columns_call *c, int head, int strip, float *blocks, float *scratch) {
    const qe_columns *p = c->columns;
    const int d = p->head_dim;
    const int first = strip * c->strip, rows = p->queries - first < c->strip ? p->queries - first : c->strip;
    const int tiles = (rows + QROWS - 1) / QROWS, kv = head / (p->heads / p->kv_heads);
    float *queries = scratch, *bias = queries + (int64_t)c->strip * d, *sums = bias + c->strip;
    int used = 0;
    for (int i = 0; i < tiles * QROWS; i++) {
        const int t = first + i;
        float shift = -INFINITY;
        if (i < rows && p->first_column + t >= p->pad) {
            const float lse = p->lse[(int64_t)head * p->queries + t];
            if (lse > -INFINITY) shift = -lse * p->power + (p->weights ? logf(p->weights[t]) : 0.0f);
        }
        bias[i] = shift;
        used |= shift > -INFINITY;
        const float *from = p->query + head * p->query_head_stride + (int64_t)(i < rows ? t : first) * p->query_row_stride;
        float *to = queries + (int64_t)(i / QROWS) * QROWS * d + i % QROWS;
        for (int x = 0; x < d; x++) to[x * QROWS] = from[x];
    }
    if (!used) return;
    int keys = p->first_column + first + rows; /* the last query sees its own column */
    if (keys > p->keys) keys = p->keys;
    for (int panel = 0; panel * PANEL < keys; panel++) {
        const float *k = c->packed + ((int64_t)kv * c->panels + panel) * d * PANEL;
        vf left = bc(0), right = bc(0);
        int start = panel * PANEL - p->first_column - first; /* first query of the strip that sees the panel */
        for (int i = start > 0 ? start / QROWS : 0; i < tiles; i++)
            columns_tile(queries + (int64_t)i * QROWS * d, k, d, bias + i * QROWS, p->scale, p->softcap, p->power,
                         (int64_t)p->first_column + first + i * QROWS - panel * PANEL, &left, &right);
        st(sums + panel * PANEL, left);
        st(sums + panel * PANEL + W, right);
    }
    for (int i = p->pad; i < keys; i++) blocks[(i + p->grid_offset) / p->window] += sums[i];
}

static void columns_task(const qe_columns_call *c, int64_t task, float *scratch) {
    const int blocks = c->columns->blocks;
    float *mass = c->partial + task * blocks;
    for (int i = 0; i < blocks; i++) mass[i] = 0.0f;
    for (int strip = (int)(task % c->sections); strip < c->strips; strip += c->sections)
        columns_strip(c, (int)(task / c->sections), strip, mass, scratch);
}
