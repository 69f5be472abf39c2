// AVX512-VNNI: sums of four products of bytes in one instruction.
#include <immintrin.h>

#include "int8/kernel.h"

namespace {

struct Vnni {
    static constexpr int LANES = 16, VECTORS = 4, ROWS = 6, GROUP = 4;
    using Floats = __m512;
    using Integers = __m512i;
    using Code = uint8_t;

    static INLINE Floats zero() { return _mm512_setzero_ps(); }
    static INLINE Floats set(float x) { return _mm512_set1_ps(x); }
    static INLINE Floats load(const float *p) { return _mm512_loadu_ps(p); }
    static INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a); }
    static INLINE float lowest(Floats a) { return _mm512_reduce_min_ps(a); }
    static INLINE float highest(Floats a) { return _mm512_reduce_max_ps(a); }
    static INLINE __mmask16 first(int64_t n) { return __mmask16((1u << n) - 1); }
    // Returns the first n lanes of `a` and the other lanes of `b`.
    static INLINE Floats keep(Floats a, Floats b, int64_t n) { return _mm512_mask_mov_ps(b, first(n), a); }

    static INLINE Integers none() { return _mm512_setzero_si512(); }
    static INLINE Integers codes(const int8_t *p) { return _mm512_loadu_si512(p); }
    static INLINE Integers repeat(const char *p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        return _mm512_set1_epi32(bits);
    }
    static INLINE Integers add_products(Integers acc, Integers q, Integers w) { return _mm512_dpbusd_epi32(acc, q, w); }
    static INLINE void store(int32_t *p, Integers a) { _mm512_store_si512(p, a); }
    static INLINE Floats floats(const int32_t *p) { return _mm512_cvtepi32_ps(_mm512_load_si512(p)); }
    static INLINE void write_codes(uint8_t *p, Floats x) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtusepi32_epi8(_mm512_cvtps_epu32(max(x, zero()))));
    }
};

struct Float32 : Vnni {
    using Element = float;
    static INLINE Floats read(const float *p) { return _mm512_loadu_ps(p); }
    static INLINE Floats read_some(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static INLINE void write(float *p, Floats x) { _mm512_storeu_ps(p, x); }
    static INLINE void write_some(float *p, Floats x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
};

struct Bfloat16 : Vnni {
    using Element = uint16_t;
    static INLINE Floats wide(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
    static INLINE __m256i narrow(Floats a) {  // rounded to nearest, ties to even
        const __m512i x = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
        __m512i high = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        high = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x7fc0));
        return _mm512_cvtepi32_epi16(high);
    }
    static INLINE Floats read(const uint16_t *p) { return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
    static INLINE Floats read_some(const uint16_t *p, int64_t n) { return wide(_mm256_maskz_loadu_epi16(first(n), p)); }
    static INLINE void write(uint16_t *p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrow(x)); }
    static INLINE void write_some(uint16_t *p, Floats x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
};

}  // namespace

const Int8Kernel int8_vnni_float32 = {COLUMNS<Vnni>, row_bytes<Vnni>, quantise<Float32>, multiply<Float32>};
const Int8Kernel int8_vnni_bfloat16 = {COLUMNS<Vnni>, row_bytes<Vnni>, quantise<Bfloat16>, multiply<Bfloat16>};
