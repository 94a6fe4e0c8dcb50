/* The kernels' contract: what Python hands over, and what each instruction-set unit offers.
 *
 * A "decision row" r = b * rows_per_batch + group owns heads_per_row KV heads; every pool tensor of one
 * layer is one contiguous slice of decision rows. Layouts (Ω = window, KB = Ω * bits / 8, 16 lanes):
 *
 *   arena keys, values  [rows, Hd, slots, Ω, d]           post-RoPE, fp32 / fp16 / bf16
 *   arena ids           [rows, slots]                     block id, -1 empty; valid blocks are a prefix
 *   key codes           [rows, Hd, NB, d, KB, 16] u8      lane = window; byte k holds tokens k*8/bits ...
 *   key scale, zero     [rows, Hd, NB, d, 16]     fp16
 *   value codes         [rows, Hd, NB*16, KB, d]  u8      lane = channel, packed along tokens
 *   value scale, zero   [rows, Hd, NB, GV, Ω, 16] fp16    one pair per token and channel group
 *   ledger ids          [rows, NB*16]                     live entries are a prefix
 *
 * Token j of block b stands in column b*Ω + j - grid_offset; its position is the column less the row's
 * left padding. Ledger keys are pre-RoPE; value = zero + scale * code.
 */
#ifndef QEVICT_H
#define QEVICT_H

#include <stdint.h>

#define QE_ABI 5
#define QE_LANES 16
#define QE_HEADS 4 /* query heads that one pass over the data serves */

enum { QE_F32 = 0, QE_F16 = 1, QE_BF16 = 2 };

/* Mirrors engine/attention/native_library.py: keep the order. */
typedef struct {
    int32_t batch, q_heads, kv_heads, head_dim;
    int32_t rows_per_batch, window, bits, value_groups;
    int32_t rotary_dim, grid_offset, max_positions, arena_dtype;
    int32_t arena_slots, ledger_blocks;
    float scale, softcap, rope_scale, unused;
    void *arena_k, *arena_v;
    const int32_t *arena_ids, *arena_count, *first_column;
    const uint8_t *k_codes, *v_codes;
    const uint16_t *k_scale, *k_zero, *v_scale, *v_zero;
    const int32_t *ledger_ids, *live_count;
    const float *cos, *sin; /* [max_positions, rotary_dim / 2], unit norm */
} qe_plan;

typedef struct {
    int32_t heads, kv_heads, head_dim, queries, keys, dtype;
    int32_t first_column; /* column of query 0 */
    int32_t pad;          /* columns before it are never scored */
    int32_t window, grid_offset, blocks, groups;
    float scale, softcap, power;
    int32_t unused;
    const float *query, *key;   /* [heads, queries, d], [kv_heads, keys, d], rows contiguous */
    int64_t query_head_stride, query_row_stride, key_head_stride, key_row_stride;
    const float *lse;           /* [heads, queries] */
    const float *weights;       /* [queries] or NULL */
    float *mass;                /* [groups, blocks], added to; prompt attention alone may leave it NULL */
    const float *value;         /* [kv_heads, keys, d]; from here on for prompt attention only */
    float *out, *lse_out;       /* [heads, queries, d], [heads, queries] */
    int64_t value_head_stride, value_row_stride, out_head_stride, out_row_stride;
} qe_columns;

/* Column sums in flight: keys packed into panels once. A task is a query head and every `sections`-th strip of its
 * queries, so that tasks cost alike below the diagonal and their sums stay few. */
typedef struct {
    const qe_columns *columns;
    int32_t panel, panels, strip, strips, sections; /* keys of a panel, queries of a strip */
    float *packed;                        /* [kv_heads, panels, d, panel] */
    float *partial;                       /* [heads, sections, blocks] */
} qe_columns_call;

/* One call's view, shared by the threads that work on it. */
typedef struct {
    const qe_plan *plan;
    int32_t seq_len, group, heads_per_row, rows, want_mass;
    int32_t arena_chunk, ledger_chunk;   /* slots and 16-lane blocks of one task */
    int32_t arena_chunks, ledger_chunks; /* tasks per row */
    int64_t partial_floats;              /* floats of one partial: g*d + 2g, rounded up */
    const float *query;                  /* [batch, q_heads, d] fp32, times the softmax scale */
    const float *ledger_query;           /* the same with rope_scale on the rotated channels */
    float *turned_query;                 /* the same turned back by each offset in a window, see ledger.h */
    float *partial;                      /* [rows*Hd, chunks, partial_floats] */
    float *arena_raw, *ledger_raw;       /* [rows*Hd*g, slots], [rows*Hd*g, NB*16] */
} qe_call;

typedef struct {
    const void *k, *v; /* [kv_heads of all rows, keys, d] */
    const float *query;
    float *partial;
    int64_t partial_floats, head_stride, batch_stride;
    int32_t dtype, head_dim, group, kv_heads, keys, chunk, chunks;
    float softcap;
} qe_full;

typedef struct {
    const char *name;
    int64_t (*task_floats)(const qe_call *);
    void (*turn_back)(const qe_plan *, const float *query, int group, float *out);
    void (*decode_task)(const qe_call *, int64_t task, int64_t next, float *scratch);
    int64_t (*full_floats)(const qe_full *);
    void (*full_task)(const qe_full *, int64_t task, int64_t next, float *scratch);
    int64_t (*columns_plan)(qe_columns_call *);
    void (*columns_pack)(const qe_columns_call *, int64_t task);
    void (*columns_task)(const qe_columns_call *, int64_t task, float *scratch);
    int64_t (*prefill_plan)(qe_columns_call *);
    void (*prefill_task)(const qe_columns_call *, int64_t task, float *scratch);
    void (*to_float)(const void *from, int dtype, float *to, int64_t n, float times);
    void (*from_float)(const float *from, int dtype, void *to, int64_t n);
    void (*merge)(const float *partial, int64_t stride, int chunks, int group, int d, float *out, float *lse);
    void (*mass)(const qe_call *, int row, const float *lse, float *arena_mass, float *ledger_mass);
} qe_unit;

extern const qe_unit qe_unit_portable, qe_unit_avx2, qe_unit_avx512;

/* pool.c: runs body(context, task, next, scratch) for every task; `next` is the task this thread takes after it. */
typedef void (*qe_body)(void *context, int64_t task, int64_t next, float *scratch);
int qe_run(qe_body body, void *context, int64_t tasks, int64_t scratch_floats, int threads);
typedef void (*qe_team)(void (*body)(void *), void *context, unsigned threads, unsigned flags); /* GOMP_parallel */
void qe_set_team(qe_team entry);
float *qe_scratch(int which, int64_t floats);

#endif
