// AVX2 and FMA: products of 16-bit numbers, because the AVX2 instruction for bytes saturates. Weight codes are widened when they are read.
#include <immintrin.h>

#include "int8/kernel.h"

namespace {

struct Avx2 {
    static constexpr int LANES = 8, VECTORS = 2, ROWS = 5, GROUP = 2;
    using Floats = __m256;
    using Integers = __m256i;
    using Code = uint16_t;

    static INLINE Floats zero() { return _mm256_setzero_ps(); }
    static INLINE Floats set(float x) { return _mm256_set1_ps(x); }
    static INLINE Floats load(const float *p) { return _mm256_loadu_ps(p); }
    static INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
    static INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    template <class F>
    static INLINE float reduce(Floats a, F f) {
        alignas(32) float lane[8];
        _mm256_store_ps(lane, a);
        float found = lane[0];
        for (int i = 1; i < 8; i++) found = f(found, lane[i]);
        return found;
    }
    static INLINE float sum(Floats a) { return reduce(a, [](float x, float y) { return x + y; }); }
    static INLINE float lowest(Floats a) { return reduce(a, [](float x, float y) { return x < y ? x : y; }); }
    static INLINE float highest(Floats a) { return reduce(a, [](float x, float y) { return x > y ? x : y; }); }
    static INLINE __m256i first(int64_t n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    }
    // Returns the first n lanes of `a` and the other lanes of `b`.
    static INLINE Floats keep(Floats a, Floats b, int64_t n) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(first(n))); }

    static INLINE Integers none() { return _mm256_setzero_si256(); }
    static INLINE Integers codes(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
    static INLINE Integers repeat(const char *p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        return _mm256_set1_epi32(bits);
    }
    static INLINE Integers add_products(Integers acc, Integers q, Integers w) {
        return _mm256_add_epi32(acc, _mm256_madd_epi16(q, w));
    }
    static INLINE void store(int32_t *p, Integers a) { _mm256_store_si256(reinterpret_cast<__m256i *>(p), a); }
    static INLINE Floats floats(const int32_t *p) { return _mm256_cvtepi32_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(p))); }
    static INLINE void write_codes(uint16_t *p, Floats x) {
        const __m256i codes = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(x, zero()), set(255.0f)));
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), packed);
    }
};

struct Float32 : Avx2 {
    using Element = float;
    static INLINE Floats read(const float *p) { return _mm256_loadu_ps(p); }
    static INLINE Floats read_some(const float *p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
    static INLINE void write(float *p, Floats x) { _mm256_storeu_ps(p, x); }
    static INLINE void write_some(float *p, Floats x, int64_t n) { _mm256_maskstore_ps(p, first(n), x); }
};

struct Bfloat16 : Avx2 {
    using Element = uint16_t;
    static INLINE Floats wide(const uint16_t *p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16));
    }
    static INLINE __m128i narrow(Floats a) {  // rounded to nearest, ties to even
        const __m256i x = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
        __m256i high = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
        return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    }
    static INLINE Floats read(const uint16_t *p) { return wide(p); }
    static INLINE Floats read_some(const uint16_t *p, int64_t n) {
        uint16_t some[8] = {};
        __builtin_memcpy(some, p, size_t(n) * 2);
        return wide(some);
    }
    static INLINE void write(uint16_t *p, Floats x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), narrow(x)); }
    static INLINE void write_some(uint16_t *p, Floats x, int64_t n) {
        uint16_t some[8];
        write(some, x);
        __builtin_memcpy(p, some, size_t(n) * 2);
    }
};

}  // namespace

const Int8Kernel int8_avx2_float32 = {COLUMNS<Avx2>, row_bytes<Avx2>, quantise<Float32>, multiply<Float32>};
const Int8Kernel int8_avx2_bfloat16 = {COLUMNS<Avx2>, row_bytes<Avx2>, quantise<Bfloat16>, multiply<Bfloat16>};
