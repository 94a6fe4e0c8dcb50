/* One instruction-set unit: included once by each unit_*.c after UNIT and UNIT_NAME are defined. */
#include "qevict.h"
#include "vector.h"
#include "ledger.h"
#include "arena.h"
#include "columns.h"
#include "prefill.h"

static int64_t task_floats(const qe_call *c) {
    int64_t ledger = ledger_floats(c, NULL, NULL), arena = (int64_t)QE_HEADS * arena_width(c);
    return ledger > arena ? ledger : arena;
}

/* A task is a row and one of its chunks; chunks past the row's count leave an empty partial. */
static void decode_task(const qe_call *c, int64_t task, int64_t next, float *scratch) {
    const qe_plan *p = c->plan;
    const int chunks = c->arena_chunks + c->ledger_chunks;
    const int row = (int)(task / chunks), chunk = (int)(task % chunks);
    int next_row = next < 0 ? -1 : (int)(next / chunks), next_chunk = next < 0 ? 0 : (int)(next % chunks);
    const int coded = chunk >= c->arena_chunks, then_coded = next_chunk >= c->arena_chunks;
    const int lying = coded ? (chunk - c->arena_chunks) * c->ledger_chunk * QE_LANES : chunk * c->arena_chunk;
    if ((coded ? p->live_count[row] : p->arena_count[row]) <= lying) {
        for (int hd = 0; hd < c->heads_per_row; hd++) {
            float *partial = c->partial + (((int64_t)row * c->heads_per_row + hd) * chunks + chunk) * c->partial_floats;
            for (int h = 0; h < c->group; h++) {
                partial[(int64_t)c->group * p->head_dim + h] = -INFINITY;
                partial[(int64_t)c->group * (p->head_dim + 1) + h] = 0;
            }
        }
        return;
    }
    if (coded != then_coded) next_row = -1;
    if (coded) ledger_task(c, row, chunk - c->arena_chunks, next_row, next_chunk - c->arena_chunks, scratch);
    else arena_task(c, row, chunk, next_row, next_chunk, scratch);
}

static void to_float(const void *from, int dtype, float *to, int64_t n, float times) {
    for (int64_t i = 0; i < n; i += W) st(to + i, ld_any(from, i, dtype) * bc(times));
}

static uint16_t half(float x) {
    uint32_t u, sign, result;
    memcpy(&u, &x, 4);
    sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u >= 0x7f800000) result = u > 0x7f800000 ? 0x7e00 : 0x7c00;
    else if (u >= 0x477ff000) result = 0x7c00;          /* rounds beyond 65504 */
    else if (u >= 0x38800000) result = (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
    else {                                               /* subnormal: let the adder round */
        float y;
        memcpy(&y, &u, 4);
        y += 0.5f;
        memcpy(&result, &y, 4);
        result -= 0x3f000000;
    }
    return (uint16_t)(sign | result);
}

static void from_float(const float *from, int dtype, void *to, int64_t n) {
    if (dtype == QE_F32) {
        memcpy(to, from, (size_t)n * 4);
        return;
    }
    uint16_t *out = to;
    for (int64_t i = 0; i < n; i++) {
        if (dtype == QE_F16) {
            out[i] = half(from[i]);
            continue;
        }
        uint32_t u;
        memcpy(&u, from + i, 4);
        out[i] = (u & 0x7fffffff) > 0x7f800000 ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
}

/* Chunks of one KV head become out [g, d] and lse [g]. */
static void merge(const float *partial, int64_t stride, int chunks, int g, int d, float *out, float *lse) {
    for (int h = 0; h < g; h++) {
        const float *tops = partial + (int64_t)g * d + h;
        float top = -INFINITY, sum = 0;
        for (int i = 0; i < chunks; i++) top = fmaxf(top, tops[i * stride]);
        float *to = out + (int64_t)h * d;
        for (int c = 0; c < d; c += W) st(to + c, bc(0));
        if (top == -INFINITY) {
            lse[h] = -INFINITY;
            continue;
        }
        for (int i = 0; i < chunks; i++) {
            if (tops[i * stride] == -INFINITY) continue;
            float factor = expf(tops[i * stride] - top);
            const float *from = partial + i * stride + (int64_t)h * d;
            sum += factor * tops[i * stride + g];
            for (int c = 0; c < d; c += W) st(to + c, fma_(bc(factor), ld(from + c), ld(to + c)));
        }
        for (int c = 0; c < d; c += W) st(to + c, ld(to + c) * bc(1.0f / sum));
        lse[h] = top + logf(sum);
    }
}

/* Window masses of one row: each chunk's sums, brought to the final log-sum-exp, mean over the row's query heads. */
static void mass(const qe_call *c, int row, const float *lse, float *arena_mass, float *ledger_mass) {
    const qe_plan *p = c->plan;
    const int g = c->group, n = c->heads_per_row * g, chunks = c->arena_chunks + c->ledger_chunks;
    const int slots = p->arena_slots, lanes = p->ledger_blocks * QE_LANES;
    for (int h = 0; h < n; h++) {
        const int64_t head = (int64_t)row * n + h;
        const float *tops = c->partial + ((int64_t)row * c->heads_per_row + h / g) * chunks * c->partial_floats
                            + (int64_t)g * p->head_dim + h % g;
        if (lse[h] == -INFINITY) continue;
        for (int i = 0; i < chunks; i++) {
            const float top = tops[i * c->partial_floats];
            if (top == -INFINITY) continue;
            const float factor = expf(top - lse[h]) / (float)n;
            const int coded = i >= c->arena_chunks;
            int first = coded ? (i - c->arena_chunks) * c->ledger_chunk * QE_LANES : i * c->arena_chunk;
            int last = first + (coded ? c->ledger_chunk * QE_LANES : c->arena_chunk);
            const int count = coded ? p->live_count[row] : p->arena_count[row];
            if (last > count) last = count;
            const float *raw = coded ? c->ledger_raw + head * lanes : c->arena_raw + head * slots;
            float *to = coded ? ledger_mass : arena_mass;
            for (; first + W <= last; first += W) st(to + first, fma_(bc(factor), ld(raw + first), ld(to + first)));
            for (; first < last; first++) to[first] += factor * raw[first];
        }
    }
}

const qe_unit UNIT = {UNIT_NAME, task_floats, turn_back, decode_task, full_floats, full_task, columns_plan,
                      columns_pack, columns_task, prefill_plan, prefill_task, to_float, from_float, merge, mass};
