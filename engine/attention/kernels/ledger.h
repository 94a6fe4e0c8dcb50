/* One task of the code pool: a few 16-window blocks of one decision row, all its KV heads.
 *
 * Keys, lane = window. A pre-RoPE key of offset j in a window is turned by base + j; rotations commute, so the
 * query is turned back by the offset (once per call, for all windows) and the key forward by the base. The base
 * folds into the window's scales and zeros, six factors for a pair of channels that serve all tokens and heads:
 *
 *   first  = cos sa * xa - sin sb * xb + (cos za - sin zb)
 *   second = sin sa * xa + cos sb * xb + (sin za + cos zb)      x: code, s: scale, z: zero
 *
 * so a turned key costs four operations and the logits are exact. Values, lane = channel. Scores of the task are
 * kept, so one softmax without rescaling serves it; tasks are merged afterwards.
 */

#define TOKENS_AT_ONCE(bits) ((bits) == 2 && W != 8 && HALVES != 4 ? 4 : 2)

typedef struct {
    int64_t codes, scale, value, value_scale; /* bytes from this unit's data to the next unit's */
} distance;

/* to[c * stride + i] = line[i][c]. */
static void transpose(const float *const *line, int lines, int columns, float *to, int stride) {
    int i = 0;
#if defined(__SSE2__)
    for (; i + 4 <= lines; i += 4) {
        int c = 0;
        for (; c + 4 <= columns; c += 4) {
            __m128 a = _mm_loadu_ps(line[i] + c), b = _mm_loadu_ps(line[i + 1] + c);
            __m128 e = _mm_loadu_ps(line[i + 2] + c), f = _mm_loadu_ps(line[i + 3] + c);
            _MM_TRANSPOSE4_PS(a, b, e, f);
            float *cell = to + (int64_t)c * stride + i;
            _mm_storeu_ps(cell, a), _mm_storeu_ps(cell + stride, b);
            _mm_storeu_ps(cell + 2 * stride, e), _mm_storeu_ps(cell + 3 * stride, f);
        }
        for (; c < columns; c++)
            for (int k = i; k < i + 4; k++) to[(int64_t)c * stride + k] = line[k][c];
    }
#endif
    for (; i < lines; i++)
        for (int c = 0; c < columns; c++) to[(int64_t)c * stride + i] = line[i][c];
}

/* cos and sin of the base position of 16 windows, [2][r2][16]; the sine of a negative position is flipped. */
static void base_rotation(const qe_plan *p, const int32_t *base, int lanes, float *out) {
    const int r2 = p->rotary_dim / 2;
    for (int table = 0; table < 2; table++) {
        const float *source = table ? p->sin : p->cos;
        const float *line[QE_LANES];
        for (int i = 0; i < QE_LANES; i++) {
            int at = base[i < lanes ? i : lanes - 1];
            line[i] = source + (int64_t)(at < 0 ? -at : at) * r2;
        }
        float *to = out + (int64_t)table * r2 * QE_LANES;
        transpose(line, QE_LANES, r2, to, QE_LANES);
        if (table)
            for (int i = 0; i < lanes; i++)
                if (base[i] < 0)
                    for (int c = 0; c < r2; c++) to[c * QE_LANES + i] = -to[c * QE_LANES + i];
    }
}

/* A KV head's queries turned back by every offset in a window: heads in fours, each [r2][window][heads][2]. */
static void turn_back(const qe_plan *p, const float *q, int g, float *out) {
    const int d = p->head_dim, r2 = p->rotary_dim / 2, window = p->window;
    float turned[2 * QE_HEADS * 512];
    const float *line[2 * QE_HEADS];
    for (int h0 = 0; h0 < g; h0 += QE_HEADS) {
        const int hg = g - h0 < QE_HEADS ? g - h0 : QE_HEADS;
        float *to = out + (int64_t)h0 * window * 2 * r2;
        for (int j = 0; j < window; j++) {
            const float *cosine = p->cos + (int64_t)j * r2, *sine = p->sin + (int64_t)j * r2;
            for (int h = 0; h < hg; h++) {
                const float *a = q + (int64_t)(h0 + h) * d, *b = a + r2;
                float *first = turned + (int64_t)2 * h * r2, *second = first + r2;
                line[2 * h] = first, line[2 * h + 1] = second;
                for (int c = 0; c < r2; c++) {
                    first[c] = a[c] * cosine[c] + b[c] * sine[c];
                    second[c] = b[c] * cosine[c] - a[c] * sine[c];
                }
            }
            transpose(line, 2 * hg, r2, to + (int64_t)j * hg * 2, window * hg * 2);
        }
    }
}

/* The six factors of one block and KV head, [r2][6][16]. */
static void fold_base(int r2, const float *cs, const uint16_t *scale, const uint16_t *zero, float *out) {
    for (int c = 0; c < r2; c++, out += 6 * QE_LANES) {
        UNROLL for (int v = 0; v < QE_LANES; v += W) {
            const int a = c * QE_LANES + v, b = a + r2 * QE_LANES;
            vf cosine = ld(cs + a), sine = ld(cs + b);
            vf sa = ld_f16(scale + a), sb = ld_f16(scale + b), za = ld_f16(zero + a), zb = ld_f16(zero + b);
            st(out + v, cosine * sa), st(out + QE_LANES + v, sine * sb);
            st(out + 2 * QE_LANES + v, fnma_(sine, zb, cosine * za));
            st(out + 3 * QE_LANES + v, sine * sa), st(out + 4 * QE_LANES + v, cosine * sb);
            st(out + 5 * QE_LANES + v, fma_(sine, za, cosine * zb));
        }
    }
}

/* Scores of one block: s[h][j][16] for all tokens j; heads are `head_floats` apart. */
INLINE void block_scores(const qe_plan *p, const float *q, const float *turned, const float *factor, const uint8_t *codes,
                         const uint16_t *scale, const uint16_t *zero, distance next, float *s, int64_t head_floats,
                         const int hg, const int bits) {
    const int d = p->head_dim, r2 = p->rotary_dim / 2, window = p->window, planes = window * bits / 8;
    const int per_byte = 8 / bits, many = TOKENS_AT_ONCE(bits);
    const char *ahead_scale = (const char *)scale + next.scale, *ahead_zero = (const char *)zero + next.scale;
    const char *ahead_codes = (const char *)codes + next.codes;
    for (int v = 0; v < HALVES; v++)
        for (int plane = 0; plane < planes; plane++)
            for (int first = 0; first < per_byte; first += many) {
                vf acc[QE_HEADS][4];
                const int j0 = plane * per_byte + first;
                UNROLL for (int h = 0; h < hg; h++) UNROLL for (int t = 0; t < many; t++) acc[h][t] = bc(0);
                for (int c = 0; c < r2; c++) {
                    const uint8_t *first_codes = codes + ((int64_t)c * planes + plane) * QE_LANES + v * W;
                    const uint8_t *second_codes = first_codes + (int64_t)r2 * planes * QE_LANES;
                    if (v == 0 && first == 0) { /* the next unit's data, spread over this one's work */
                        if (plane == 0) PREFETCH(ahead_scale + c * 64);
                        if (plane == (planes > 1)) PREFETCH(ahead_zero + c * 64);
                        if (c % 2 == 0) PREFETCH(ahead_codes + (int64_t)(plane * r2 + c) * 32);
                    }
                    vi xa = ld_codes(first_codes), xb = ld_codes(second_codes);
                    if (first) xa = xa >> 4, xb = xb >> 4;
                    const float *f = factor + (int64_t)c * 6 * QE_LANES + v * W;
                    const float *back = turned + ((int64_t)c * window + j0) * hg * 2;
                    UNROLL for (int t = 0; t < many; t++) {
                        vf ya = code(xa, t, bits), yb = code(xb, t, bits);
                        vf ka = fma_(ld(f), ya, fnma_(ld(f + QE_LANES), yb, ld(f + 2 * QE_LANES)));
                        vf kb = fma_(ld(f + 3 * QE_LANES), ya, fma_(ld(f + 4 * QE_LANES), yb, ld(f + 5 * QE_LANES)));
                        UNROLL for (int h = 0; h < hg; h++) {
                            acc[h][t] = fma_(bc(back[(t * hg + h) * 2]), ka, acc[h][t]);
                            acc[h][t] = fma_(bc(back[(t * hg + h) * 2 + 1]), kb, acc[h][t]);
                        }
                    }
                }
                for (int c = 2 * r2; c < d; c++) { /* channels that carry no position */
                    vi x = ld_codes(codes + ((int64_t)c * planes + plane) * QE_LANES + v * W);
                    vf sc = ld_f16(scale + (int64_t)c * QE_LANES + v * W), ze = ld_f16(zero + (int64_t)c * QE_LANES + v * W);
                    if (first) x = x >> 4;
                    UNROLL for (int t = 0; t < many; t++) {
                        vf k = fma_(sc, code(x, t, bits), ze);
                        UNROLL for (int h = 0; h < hg; h++) acc[h][t] = fma_(bc(q[(int64_t)h * d + c]), k, acc[h][t]);
                    }
                }
                UNROLL for (int h = 0; h < hg; h++) UNROLL for (int t = 0; t < many; t++)
                    st(s + h * head_floats + (j0 + t) * QE_LANES + v * W, acc[h][t]);
            }
}

/* out[h][channels of the tile] += sum of weight * code over a run of windows. */
INLINE void block_values(const uint8_t *codes, int d, int planes, int64_t ahead, const float *w, int64_t head_floats,
                         int window, int windows, float *out, const int hg, const int tile, const int bits) {
    vf acc[QE_HEADS][4];
    const int per_byte = 8 / bits;
    UNROLL for (int h = 0; h < hg; h++) UNROLL for (int c = 0; c < tile; c++) acc[h][c] = ld(out + (int64_t)h * d + c * W);
    for (int i = 0; i < windows; i++) {
        const float *wi = w + (int64_t)(i / QE_LANES) * window * QE_LANES + i % QE_LANES;
        for (int plane = 0; plane < planes; plane++, codes += d) {
            vi x[4];
            PREFETCH(codes + ahead);
            UNROLL for (int c = 0; c < tile; c++) x[c] = ld_codes(codes + c * W);
            UNROLL for (int t = 0; t < per_byte; t++) {
                vf y[4];
                UNROLL for (int c = 0; c < tile; c++) y[c] = code(x[c], t, bits);
                UNROLL for (int h = 0; h < hg; h++) {
                    vf weight = bc(wi[h * head_floats + (plane * per_byte + t) * QE_LANES]);
                    UNROLL for (int c = 0; c < tile; c++) acc[h][c] = fma_(weight, y[c], acc[h][c]);
                }
            }
        }
    }
    UNROLL for (int h = 0; h < hg; h++) UNROLL for (int c = 0; c < tile; c++) st(out + (int64_t)h * d + c * W, acc[h][c]);
}

#define PER_HEADS(hg, CALL) \
    switch (hg) {           \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    default: CALL(4);       \
    }

static __attribute__((noinline)) void scores_any(const qe_plan *p, const float *q, const float *turned, const float *factor,
                                                 const uint8_t *codes, const uint16_t *scale, const uint16_t *zero,
                                                 distance next, float *s, int64_t head_floats, int hg) {
#define CALL2(n) block_scores(p, q, turned, factor, codes, scale, zero, next, s, head_floats, n, 2)
#define CALL4(n) block_scores(p, q, turned, factor, codes, scale, zero, next, s, head_floats, n, 4)
    if (p->bits == 2) { PER_HEADS(hg, CALL2) } else { PER_HEADS(hg, CALL4) }
#undef CALL2
#undef CALL4
}

static __attribute__((noinline)) void values_any(const uint8_t *codes, int d, int planes, int64_t ahead, const float *w,
                                                 int64_t head_floats, int window, int windows, float *out, int hg,
                                                 int tile, int bits) {
#define ARGS codes, d, planes, ahead, w, head_floats, window, windows, out
#define TILE4_2(n) block_values(ARGS, n, 4, 2)
#define TILE2_2(n) block_values(ARGS, n, 2, 2)
#define TILE1_2(n) block_values(ARGS, n, 1, 2)
#define TILE4_4(n) block_values(ARGS, n, 4, 4)
#define TILE2_4(n) block_values(ARGS, n, 2, 4)
#define TILE1_4(n) block_values(ARGS, n, 1, 4)
    if (bits == 2) {
        if (tile == 4) { PER_HEADS(hg, TILE4_2) } else if (tile == 2) { PER_HEADS(hg, TILE2_2) } else { PER_HEADS(hg, TILE1_2) }
    } else {
        if (tile == 4) { PER_HEADS(hg, TILE4_4) } else if (tile == 2) { PER_HEADS(hg, TILE2_4) } else { PER_HEADS(hg, TILE1_4) }
    }
#undef ARGS
}

/* Softmax numerators of n floats in place; returns their sum, hands back the maximum. */
static float softmax_part(float *s, int64_t n, float cap, float *maximum) {
    vf top = bc(-INFINITY), total = bc(0);
    if (cap > 0)
        for (int64_t i = 0; i < n; i += W) {
            vf x = ld(s + i);
            vi real = x > bc(-INFINITY);
            st(s + i, select_(real, vcap(x, cap), x));
        }
    for (int64_t i = 0; i < n; i += W) top = vmax(ld(s + i), top);
    float m = hmax(top);
    *maximum = m;
    vf shift = bc(m > -INFINITY ? m : 0.0f);
    for (int64_t i = 0; i < n; i += W) {
        vf e = vexp(ld(s + i) - shift);
        st(s + i, e);
        total = total + e;
    }
    return hsum(total);
}

/* Scores of tokens without a window behind them, or before the row's first position, become -Inf. */
static void mask_block(float *s, int window, int lanes, const int32_t *base) {
    for (int i = 0; i < QE_LANES; i++) {
        int from = i >= lanes ? window : base[i] < 0 ? (-base[i] < window ? -base[i] : window) : 0;
        for (int j = 0; j < from; j++) s[j * QE_LANES + i] = -INFINITY;
    }
}

typedef struct {
    float *rotation, *factor, *score, *weight;
} ledger_scratch;

static int64_t ledger_floats(const qe_call *c, ledger_scratch *out, float *scratch) {
    const qe_plan *p = c->plan;
    int64_t tokens = (int64_t)c->ledger_chunk * QE_LANES * p->window;
    int64_t rotation = (int64_t)c->ledger_chunk * p->rotary_dim * QE_LANES;
    int64_t factor = (int64_t)3 * p->rotary_dim * QE_LANES;
    int64_t score = QE_HEADS * tokens;
    if (out) {
        out->rotation = scratch;
        out->factor = out->rotation + rotation;
        out->score = out->factor + factor;
        out->weight = p->value_groups > 1 ? out->score + score : out->score;
    }
    return rotation + factor + score * (p->value_groups > 1 ? 2 : 1);
}

static void ledger_task(const qe_call *c, int row, int chunk, int next_row, int next_chunk, float *scratch) {
    const qe_plan *p = c->plan;
    const int d = p->head_dim, r2 = p->rotary_dim / 2, window = p->window, planes = window * p->bits / 8;
    const int nb = p->ledger_blocks, groups = p->value_groups, g = c->group, heads = c->heads_per_row;
    const int first = chunk * c->ledger_chunk;
    int live = p->live_count[row] - first * QE_LANES;
    if (live > c->ledger_chunk * QE_LANES) live = c->ledger_chunk * QE_LANES;
    const int blocks = (live + QE_LANES - 1) / QE_LANES, chunks = c->arena_chunks + c->ledger_chunks;
    const int64_t block_tokens = (int64_t)QE_LANES * window, tokens = blocks * block_tokens;
    const int64_t code_bytes = (int64_t)d * planes * QE_LANES, scale_items = (int64_t)d * QE_LANES;
    const int64_t value_items = (int64_t)groups * block_tokens;
    const int32_t *ids = p->ledger_ids + ((int64_t)row * nb + first) * QE_LANES;
    const int shift = p->grid_offset + p->first_column[row];
    ledger_scratch at;
    int32_t base[16 * QE_LANES];
    int before = 0;
    ledger_floats(c, &at, scratch);
    for (int i = 0; i < live; i++) {
        base[i] = ids[i] * window - shift;
        before |= base[i] < 0;
    }
    for (int b = 0; b < blocks; b++) {
        int lanes = live - b * QE_LANES;
        base_rotation(p, base + b * QE_LANES, lanes < QE_LANES ? lanes : QE_LANES, at.rotation + (int64_t)b * 2 * r2 * QE_LANES);
    }
    for (int hd = 0; hd < heads; hd++) {
        const int64_t unit = ((int64_t)row * heads + hd) * nb + first;
        int64_t after = unit + nb; /* the next head's data, else the next task's */
        if (hd + 1 == heads) after = next_row < 0 ? unit : (int64_t)next_row * heads * nb + (int64_t)next_chunk * c->ledger_chunk;
        distance next = {(after - unit) * code_bytes, (after - unit) * scale_items * 2, (after - unit) * code_bytes,
                         (after - unit) * value_items * 2};
        float *partial = c->partial + (((int64_t)row * heads + hd) * chunks + c->arena_chunks + chunk) * c->partial_floats;
        for (int h0 = 0; h0 < g; h0 += QE_HEADS) {
            const int hg = g - h0 < QE_HEADS ? g - h0 : QE_HEADS;
            const int64_t head = ((int64_t)row * heads + hd) * g + h0; /* rows follow each other: also the query head */
            const float *q = c->ledger_query + head * d;
            const float *turned = c->turned_query + head * window * 2 * r2;
            for (int b = 0; b < blocks; b++) {
                const int64_t block = unit + b;
                const int lanes = live - b * QE_LANES < QE_LANES ? live - b * QE_LANES : QE_LANES;
                fold_base(r2, at.rotation + (int64_t)b * 2 * r2 * QE_LANES, p->k_scale + block * scale_items,
                          p->k_zero + block * scale_items, at.factor);
                scores_any(p, q, turned, at.factor, p->k_codes + block * code_bytes, p->k_scale + block * scale_items,
                           p->k_zero + block * scale_items, next, at.score + b * block_tokens, tokens, hg);
                if (lanes < QE_LANES || before)
                    for (int h = 0; h < hg; h++)
                        mask_block(at.score + h * tokens + b * block_tokens, window, lanes, base + b * QE_LANES);
            }
            for (int h = 0; h < hg; h++) {
                float *s = at.score + h * tokens, maximum;
                float sum = softmax_part(s, tokens, p->softcap, &maximum);
                partial[(int64_t)g * d + h0 + h] = maximum;
                partial[(int64_t)g * d + g + h0 + h] = sum;
                if (c->want_mass) {
                    float *raw = c->ledger_raw + (head + h) * nb * QE_LANES + first * QE_LANES;
                    for (int b = 0; b < blocks; b++)
                        for (int v = 0; v < HALVES; v++) {
                            vf total = bc(0);
                            for (int j = 0; j < window; j++) total = total + ld(s + b * block_tokens + j * QE_LANES + v * W);
                            st(raw + b * QE_LANES + v * W, total);
                        }
                }
            }
            for (int gv = 0; gv < groups; gv++) {
                float offset[QE_HEADS];
                vf zeros[QE_HEADS] = {bc(0), bc(0), bc(0), bc(0)};
                for (int b = 0; b < blocks; b++) { /* fold the value scale into the probabilities, sum the zero points */
                    const uint16_t *scale = p->v_scale + (unit + b) * value_items + gv * block_tokens;
                    const uint16_t *zero = p->v_zero + (unit + b) * value_items + gv * block_tokens;
                    const float *s = at.score + b * block_tokens;
                    float *w = at.weight + b * block_tokens;
                    const int whole = live - b * QE_LANES >= QE_LANES;
                    for (int64_t i = 0; i < block_tokens; i += W) {
                        if (i % 32 == 0) {
                            PREFETCH((const char *)(scale + i) + next.value_scale);
                            PREFETCH((const char *)(zero + i) + next.value_scale);
                        }
                        vf a = ld_f16(scale + i), z = ld_f16(zero + i);
                        for (int h = 0; h < hg; h++) {
                            vf e = ld(s + h * tokens + i);
                            vi used = e > bc(0); /* what lies in unused lanes may be anything */
                            st(w + h * tokens + i, whole ? e * a : keep(e * a, used));
                            zeros[h] = fma_(e, whole ? z : keep(z, used), zeros[h]);
                        }
                    }
                }
                for (int h = 0; h < hg; h++) offset[h] = hsum(zeros[h]);
                const int width = d / groups;
                float *out = partial + (int64_t)h0 * d + gv * width;
                for (int h = 0; h < hg; h++)
                    for (int i = 0; i < width; i++) out[(int64_t)h * d + i] = 0.0f;
                for (int i = 0; i < width;) {
                    int tile = width - i >= 4 * W && HALVES < 4 ? 4 : width - i >= 2 * W ? 2 : 1;
                    values_any(p->v_codes + unit * code_bytes + gv * width + i, d, planes, next.value, at.weight, tokens,
                               window, live, out + i, hg, tile, p->bits);
                    i += tile * W;
                }
                for (int h = 0; h < hg; h++)
                    for (int i = 0; i < width; i++) out[(int64_t)h * d + i] += offset[h];
            }
        }
    }
}
