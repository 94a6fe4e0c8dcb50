/* A vector of W floats and the few operations that the kernels need, for the unit's instruction set.
 *
 * Knows AVX-512, AVX2+FMA+F16C, SSE2, NEON and plain GCC vectors; knows nothing of attention.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define W 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define W 8
#else
#define W 4
#endif
#define HALVES (QE_LANES / W)

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vfu __attribute__((vector_size(W * 4), aligned(4), may_alias));

INLINE vf ld(const float *p) { return *(const vfu *)p; }
INLINE void st(float *p, vf x) { *(vfu *)p = x; }

#if W == 16 /* ------------------------------------------------------------------ AVX-512 */

INLINE vf bc(float x) { return (vf)_mm512_set1_ps(x); }
INLINE vi bci(int32_t x) { return (vi)_mm512_set1_epi32(x); }
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf fnma_(vf a, vf b, vf c) { return (vf)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf ld_f16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf ld_bf16(const uint16_t *p) {
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vi ld_codes(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE float hsum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float hmax(vf x) { return _mm512_reduce_max_ps((__m512)x); }
/* The permute reads the index's low four bits alone, so one table yields the low 2-bit code, another the next one. */
INLINE vf code2(vi x, int t) {
    const __m512 low = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    const __m512 high = _mm512_setr_ps(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512i y = t >= 2 ? _mm512_srli_epi32((__m512i)x, 4) : (__m512i)x;
    return (vf)_mm512_permutexvar_ps(y, t % 2 ? high : low);
}
INLINE vf code4(vi x, int t) {
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps(t ? _mm512_srli_epi32((__m512i)x, 4) : (__m512i)x, all);
}
/* Sums of four vectors, stored side by side. */
INLINE void hsum4(vf a_, vf b_, vf c_, vf d_, float *out) {
    __m512 a = (__m512)a_, b = (__m512)b_, c = (__m512)c_, d = (__m512)d_;
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4E));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xB1));
    const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(pick, s)));
}

#elif W == 8 /* ------------------------------------------------------------------ AVX2 + FMA + F16C */

INLINE vf bc(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vi bci(int32_t x) { return (vi)_mm256_set1_epi32(x); }
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf fnma_(vf a, vf b, vf c) { return (vf)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf ld_f16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf ld_bf16(const uint16_t *p) {
    return (vf)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vi ld_codes(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE void hsum4(vf a, vf b, vf c, vf d, float *out) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
INLINE float hsum(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE float hmax(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
/* The in-lane permute reads the index's low two bits alone: the unpacking needs no mask. */
INLINE vf code2(vi x, int t) {
    const __m256 table = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3);
    return (vf)_mm256_permutevar_ps(table, t ? _mm256_srli_epi32((__m256i)x, 2 * t) : (__m256i)x);
}
INLINE vf code4(vi x, int t) {
    __m256i y = t ? _mm256_srli_epi32((__m256i)x, 4) : _mm256_and_si256((__m256i)x, _mm256_set1_epi32(15));
    return (vf)_mm256_cvtepi32_ps(y);
}

#else /* ------------------------------------------------------------------ four lanes: SSE2, NEON, anything */

INLINE vf bc(float x) { return (vf){x, x, x, x}; }
INLINE vi bci(int32_t x) { return (vi){x, x, x, x}; }
#if defined(__aarch64__)
INLINE vf fma_(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf fnma_(vf a, vf b, vf c) { return (vf)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf vmax(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf ld_f16(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE vi ld_u16(const uint16_t *p) { return (vi)vmovl_u16(vld1_u16(p)); }
INLINE vi ld_codes(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
}
#else
INLINE vf fma_(vf a, vf b, vf c) { return a * b + c; }
INLINE vf fnma_(vf a, vf b, vf c) { return c - a * b; }
#if defined(__SSE2__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vi ld_u16(const uint16_t *p) {
    return (vi)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128());
}
INLINE vi ld_codes(const uint8_t *p) {
    int32_t word;
    memcpy(&word, p, 4);
    __m128i x = _mm_unpacklo_epi8(_mm_cvtsi32_si128(word), _mm_setzero_si128());
    return (vi)_mm_unpacklo_epi16(x, _mm_setzero_si128());
}
#else
INLINE vf vmax(vf a, vf b) {
    vi more = a > b;
    return (vf)(((vi)a & more) | ((vi)b & ~more));
}
INLINE vi ld_u16(const uint16_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
INLINE vi ld_codes(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
#endif
INLINE vf ld_f16(const uint16_t *p) {
    vi h = ld_u16(p), magnitude = (h & bci(0x7fff)) << 13;
    vi special = (magnitude >= bci(0x0f800000)) & bci(0x7f800000); /* Inf and NaN keep their exponent */
    return (vf)((vi)((vf)magnitude * bc(0x1p112f)) | special | ((h & bci(0x8000)) << 16));
}
#endif
INLINE vf ld_bf16(const uint16_t *p) { return (vf)(ld_u16(p) << 16); }
INLINE float hsum(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
INLINE float hmax(vf x) { return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])); }
INLINE void hsum4(vf a, vf b, vf c, vf d, float *out) {
#if defined(__SSE2__)
    __m128 p = (__m128)a, q = (__m128)b, r = (__m128)c, s = (__m128)d;
    _MM_TRANSPOSE4_PS(p, q, r, s);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(p, q), _mm_add_ps(r, s)));
#else
    out[0] = hsum(a), out[1] = hsum(b), out[2] = hsum(c), out[3] = hsum(d);
#endif
}
INLINE vf code2(vi x, int t) { return __builtin_convertvector((x >> (2 * t)) & bci(3), vf); }
INLINE vf code4(vi x, int t) { return __builtin_convertvector((x >> (4 * t)) & bci(15), vf); }

#endif

INLINE vf ld_any(const void *p, int64_t i, int dtype) {
    if (dtype == QE_F32) return ld((const float *)p + i);
    return dtype == QE_F16 ? ld_f16((const uint16_t *)p + i) : ld_bf16((const uint16_t *)p + i);
}
INLINE vf code(vi x, int t, int bits) { return bits == 2 ? code2(x, t) : code4(x, t); }
INLINE vf keep(vf x, vi mask) { return (vf)((vi)x & mask); }
INLINE vf select_(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

#define PREFETCH(p) __builtin_prefetch((const void *)(p), 0, 3)

/* exp for x <= about 88, relative error about 1e-7; 0 below -87 (-Inf among them). */
INLINE vf vexp(vf x) {
    vi alive = x >= bc(-87.0f);
    vf y = vmax(x, bc(-87.0f));
    vf t = fma_(y, bc(1.44269504088896341f), bc(12582912.0f)); /* the sum's low bits hold the rounded exponent */
    vf n = t - bc(12582912.0f);
    vf r = fnma_(n, bc(0.693359375f), y);
    r = fnma_(n, bc(-2.12194440e-4f), r);
    vf p = fma_(r, bc(1.9875691500e-4f), bc(1.3981999507e-3f));
    p = fma_(p, r, bc(8.3334519073e-3f));
    p = fma_(p, r, bc(4.1665795894e-2f));
    p = fma_(p, r, bc(1.6666665459e-1f));
    p = fma_(p, r, bc(5.0000001201e-1f));
    p = fma_(p, r * r, r) + bc(1.0f);
    return keep((vf)((vi)p + ((vi)t << 23)), alive);
}

INLINE vf vcap(vf x, float cap) { /* cap * tanh(x / cap) */
    vf y = vmax(vmax(x, -x) * bc(-2.0f / cap), bc(-87.0f));
    vf e = vexp(y);
    vf tanh_ = (bc(1.0f) - e) / (bc(1.0f) + e);
    vi negative = x < bc(0.0f);
    return select_(negative, -tanh_, tanh_) * bc(cap);
}
