/* The library's face: picks the unit for this processor and turns one call into tasks. */
#include "qevict.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

static const qe_unit *unit = NULL;
static int threads = 1;

static const qe_unit *best(void) {
#if defined(QE_HAS_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq"))
        return &qe_unit_avx512;
#endif
#if defined(QE_HAS_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return &qe_unit_avx2;
#endif
    return &qe_unit_portable;
}

EXPORT int qevict_abi(void) { return QE_ABI * 10000 + (int)(sizeof(qe_plan) + sizeof(qe_columns)); }

/* Takes a unit by name, "" for the best one. Returns 0, or 1 where this build or processor lacks it. */
EXPORT int qevict_use(const char *name) {
    const qe_unit *top = best();
    if (!*name) {
        unit = top;
        return 0;
    }
    if (!strcmp(name, "portable")) {
        unit = &qe_unit_portable;
        return 0;
    }
#if defined(QE_HAS_AVX2)
    if (!strcmp(name, "avx2") && (top == &qe_unit_avx2 || __builtin_cpu_supports("f16c")) && __builtin_cpu_supports("avx2")
        && __builtin_cpu_supports("fma")) {
        unit = &qe_unit_avx2;
        return 0;
    }
#endif
#if defined(QE_HAS_AVX512)
    if (!strcmp(name, "avx512") && top == &qe_unit_avx512) {
        unit = &qe_unit_avx512;
        return 0;
    }
#endif
    return 1;
}

EXPORT const char *qevict_isa(void) { return (unit ? unit : best())->name; }
EXPORT void qevict_set_threads(int count) { threads = count < 1 ? 1 : count; }
EXPORT void qevict_set_team(qe_team entry) { qe_set_team(entry); }
EXPORT int qevict_threads(void) { return threads; }

static int64_t rounded(int64_t floats) { return (floats + 15) & ~(int64_t)15; }

/* Threads pay when there is enough to read; below that the wake-up costs more than it gives. */
static int worth(int64_t bytes) {
    int64_t most = bytes / (192 << 10);
    return most < 1 ? 1 : most < threads ? (int)most : threads;
}

static void decode_body(void *context, int64_t task, int64_t next, float *scratch) {
    unit->decode_task((const qe_call *)context, task, next, scratch);
}

static void full_body(void *context, int64_t task, int64_t next, float *scratch) {
    unit->full_task((const qe_full *)context, task, next, scratch);
}

static void columns_body(void *context, int64_t task, int64_t next, float *scratch) {
    (void)next;
    unit->columns_task((const qe_columns_call *)context, task, scratch);
}

static void prefill_body(void *context, int64_t task, int64_t next, float *scratch) {
    (void)next;
    unit->prefill_task((const qe_columns_call *)context, task, scratch);
}

static void pack_body(void *context, int64_t task, int64_t next, float *scratch) {
    (void)next, (void)scratch;
    unit->columns_pack((const qe_columns_call *)context, task);
}

/* Writes the new token's key and value, [batch, kv_heads, d], into the open slot of every row. */
static void append(const qe_plan *p, const void *key, const void *value, int dtype, const int32_t *slots, int slot, int offset) {
    const int d = p->head_dim, heads = p->kv_heads / p->rows_per_batch, size = p->arena_dtype == QE_F32 ? 4 : 2;
    const int size_in = dtype == QE_F32 ? 4 : 2;
    float line[1024];
    for (int row = 0; row < p->batch * p->rows_per_batch; row++)
        for (int hd = 0; hd < heads; hd++) {
            const int64_t from = ((int64_t)row * heads + hd) * d * size_in;
            const int64_t to = ((((int64_t)row * heads + hd) * p->arena_slots + (slots ? slots[row] : slot)) * p->window + offset) * d * size;
            for (int which = 0; which < 2; which++) {
                const char *source = (const char *)(which ? value : key) + from;
                char *target = (char *)(which ? p->arena_v : p->arena_k) + to;
                if (dtype == p->arena_dtype) {
                    memcpy(target, source, (size_t)d * size);
                    continue;
                }
                unit->to_float(source, dtype, line, d, 1.0f);
                unit->from_float(line, p->arena_dtype, target, d);
            }
        }
}

/* One layer, one step. Returns 0; 1 without memory; 2 where a ledger window lies beyond the position table. */
EXPORT int qevict_decode(const qe_plan *p, const void *query, int query_dtype, const void *key, const void *value,
                         int kv_dtype, const int32_t *slots, int slot, int offset, int seq_len, float *out, float *lse,
                         float *arena_mass, float *ledger_mass) {
    if (!unit) unit = best();
    qe_call c = {.plan = p, .seq_len = seq_len};
    const int d = p->head_dim;
    c.group = p->q_heads / p->kv_heads;
    c.heads_per_row = p->kv_heads / p->rows_per_batch;
    c.rows = p->batch * p->rows_per_batch;
    c.want_mass = arena_mass != NULL;
    c.ledger_chunk = 512 / (QE_LANES * p->window) > 1 ? 512 / (QE_LANES * p->window) : 1;
    c.arena_chunk = 256 / p->window > 1 ? 256 / p->window : 1;
    int arena_most = 0, ledger_most = 0;
    int64_t bytes = 0;
    for (int row = 0; row < c.rows; row++) {
        const int a = p->arena_count[row], b = p->live_count ? p->live_count[row] : 0;
        if (a > arena_most) arena_most = a;
        if (b > ledger_most) ledger_most = b;
        const int32_t *ids = p->ledger_ids + (int64_t)row * p->ledger_blocks * QE_LANES;
        for (int i = 0; i < b; i++) /* the table serves block starts, either side of 0, and the window's offsets */
            if (ids[i] < 0 || (int64_t)ids[i] * p->window - p->grid_offset - p->first_column[row] >= p->max_positions)
                return 2;
        bytes += ((int64_t)a * p->window * (p->arena_dtype == QE_F32 ? 8 : 4) + (int64_t)b * (p->window * p->bits / 4 + 5)) * d * c.heads_per_row;
    }
    c.arena_chunks = (arena_most + c.arena_chunk - 1) / c.arena_chunk;
    c.ledger_chunks = (ledger_most + QE_LANES * c.ledger_chunk - 1) / (QE_LANES * c.ledger_chunk);
    const int chunks = c.arena_chunks + c.ledger_chunks;
    const int64_t heads = (int64_t)p->batch * p->q_heads, kv = (int64_t)p->batch * p->kv_heads;
    c.partial_floats = rounded((int64_t)c.group * (d + 2));
    const int64_t lanes = p->ledger_blocks * QE_LANES;
    const int64_t raw = c.want_mass ? rounded(heads * p->arena_slots) + heads * lanes : 0;
    const int64_t query_floats = rounded(heads * d);
    const int turned = p->rope_scale != 1.0f;
    const int64_t turned_floats = ledger_most ? heads * p->rotary_dim * p->window : 0;
    float *memory = qe_scratch(1, query_floats * (1 + turned) + turned_floats + kv * chunks * c.partial_floats + raw);
    if (!memory) return 1;
    if (key) append(p, key, value, kv_dtype, slots, slot, offset);
    unit->to_float(query, query_dtype, memory, heads * d, p->scale);
    c.query = c.ledger_query = memory;
    c.turned_query = memory + query_floats * (1 + turned);
    c.partial = c.turned_query + turned_floats;
    if (turned) {
        float *copy = memory + query_floats;
        for (int64_t i = 0; i < heads * d; i++) copy[i] = memory[i] * (i % d < p->rotary_dim ? p->rope_scale : 1.0f);
        c.ledger_query = copy;
    }
    if (ledger_most)
        for (int64_t i = 0; i < kv; i++)
            unit->turn_back(p, c.ledger_query + i * c.group * d, c.group, c.turned_query + i * c.group * p->rotary_dim * p->window);
    c.arena_raw = c.partial + kv * chunks * c.partial_floats;
    c.ledger_raw = c.arena_raw + rounded(heads * p->arena_slots);
    if (qe_run(decode_body, &c, (int64_t)c.rows * chunks, unit->task_floats(&c), worth(bytes))) return 1;
    for (int64_t i = 0; i < kv; i++)
        unit->merge(c.partial + i * chunks * c.partial_floats, c.partial_floats, chunks, c.group, d,
                    out + i * c.group * d, lse + i * c.group);
    if (c.want_mass)
        for (int row = 0; row < c.rows; row++)
            unit->mass(&c, row, lse + (int64_t)row * c.heads_per_row * c.group, arena_mass + (int64_t)row * p->arena_slots,
                       ledger_mass + row * lanes);
    return 0;
}

static uint64_t sum_words(const void *from, int64_t bytes) {
    uint64_t total = 0;
    const char *at = from;
    for (int64_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word;
        memcpy(&word, at + i, 8);
        total += word;
    }
    return total;
}

typedef struct {
    const qe_plan *plan;
    uint64_t total;
} reading;

/* A task is a decision row and one of its KV heads: everything that a step reads of it. */
static void read_body(void *context, int64_t task, int64_t next, float *scratch) {
    (void)next, (void)scratch;
    reading *r = context;
    const qe_plan *p = r->plan;
    const int64_t heads = p->kv_heads / p->rows_per_batch, row = task / heads, blocks = p->ledger_blocks;
    const int64_t slot = (int64_t)p->window * p->head_dim * (p->arena_dtype == QE_F32 ? 4 : 2);
    const int64_t arena = p->arena_count[row] * slot, first = task * p->arena_slots * slot;
    uint64_t total = sum_words((const char *)p->arena_k + first, arena) + sum_words((const char *)p->arena_v + first, arena);
    const int64_t live = p->live_count ? (p->live_count[row] + QE_LANES - 1) / QE_LANES : 0;
    const int64_t codes = (int64_t)p->head_dim * p->window * p->bits / 8 * QE_LANES, scales = (int64_t)p->head_dim * QE_LANES * 2;
    const int64_t pairs = (int64_t)p->value_groups * p->window * QE_LANES * 2;
    if (live) {
        const void *pools[] = {p->k_codes, p->v_codes, p->k_scale, p->k_zero, p->v_scale, p->v_zero};
        const int64_t sizes[] = {codes, codes, scales, scales, pairs, pairs};
        for (int i = 0; i < 6; i++) total += sum_words((const char *)pools[i] + task * blocks * sizes[i], live * sizes[i]);
    }
    __atomic_fetch_add(&r->total, total, __ATOMIC_RELAXED);
}

/* Reads once, and only reads, what a decode step would: the least that any kernel needs. Returns a sum of it all. */
EXPORT uint64_t qevict_read(const qe_plan *p) {
    reading r = {p, 0};
    int64_t bytes = 0;
    for (int row = 0; row < p->batch * p->rows_per_batch; row++)
        bytes += (int64_t)p->arena_count[row] * p->window * p->head_dim * 4 * (p->kv_heads / p->rows_per_batch);
    qe_run(read_body, &r, (int64_t)p->batch * p->kv_heads, 1, worth(bytes));
    return r.total;
}

/* Attention of one query over a whole contiguous cache [batch, kv_heads, keys, d]. */
EXPORT int qevict_full(const void *query, int query_dtype, const void *k, const void *v, int dtype, int batch, int q_heads,
                       int kv_heads, int d, int keys, float scale, float softcap, float *out, float *lse) {
    if (!unit) unit = best();
    qe_full f = {.k = k, .v = v};
    const int64_t kv = (int64_t)batch * kv_heads, heads = (int64_t)batch * q_heads;
    f.dtype = dtype, f.head_dim = d, f.group = q_heads / kv_heads, f.kv_heads = kv_heads, f.keys = keys;
    f.softcap = softcap, f.chunk = 256, f.chunks = (keys + 255) / 256;
    f.partial_floats = rounded((int64_t)f.group * (d + 2));
    const int64_t query_floats = rounded(heads * d);
    float *memory = qe_scratch(1, query_floats + kv * f.chunks * f.partial_floats);
    if (!memory) return 1;
    unit->to_float(query, query_dtype, memory, heads * d, scale);
    f.query = memory;
    f.partial = memory + query_floats;
    const int64_t bytes = kv * keys * d * (dtype == QE_F32 ? 8 : 4);
    if (qe_run(full_body, &f, kv * f.chunks, unit->full_floats(&f), worth(bytes))) return 1;
    for (int64_t i = 0; i < kv; i++)
        unit->merge(f.partial + i * f.chunks * f.partial_floats, f.partial_floats, f.chunks, f.group, d, out + i * f.group * d,
                    lse + i * f.group);
    return 0;
}

/* Packs the keys, runs one body for every head and strip, and adds the tasks' masses in a fixed order. */
static int columns(const qe_columns *p, int64_t (*plan)(qe_columns_call *), qe_body body) {
    qe_columns_call c = {.columns = p};
    const int64_t scratch = plan(&c);
    c.sections = c.strips < 16 ? c.strips : 16;
    const int64_t packed = (int64_t)p->kv_heads * c.panels * c.panel * p->head_dim, tasks = (int64_t)p->heads * c.sections;
    float *memory = qe_scratch(1, packed + (p->mass ? tasks * p->blocks : 0));
    if (!memory) return 1;
    c.packed = memory;
    c.partial = memory + packed;
    if (qe_run(pack_body, &c, (int64_t)p->kv_heads * c.panels, 1, threads) || qe_run(body, &c, tasks, scratch, threads)) return 1;
    const int per_group = p->heads / p->groups;
    for (int64_t i = 0; p->mass && i < tasks; i++) {
        float *to = p->mass + i / c.sections / per_group * p->blocks;
        for (int b = 0; b < p->blocks; b++) to[b] += c.partial[i * p->blocks + b] / (float)per_group;
    }
    return 0;
}

/* Adds to mass [groups, blocks] what each block received from the prompt's queries, mean over the group's heads. */
EXPORT int qevict_columns(const qe_columns *p) {
    if (!unit) unit = best();
    return columns(p, unit->columns_plan, columns_body);
}

/* Causal attention of a prompt: out, lse and, where asked for, the same masses. */
EXPORT int qevict_prefill(const qe_columns *p) {
    if (!unit) unit = best();
    return columns(p, unit->prefill_plan, prefill_body);
}
