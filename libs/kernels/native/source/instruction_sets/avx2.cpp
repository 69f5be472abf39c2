// AVX2 and FMA: float32, and bfloat16 by way of it. Vectors of 8 floats.
#include <immintrin.h>

#include <cstring>

#include "attention/kernel.h"
#include "paged/paged.h"
#include "resize/resize.h"
#include "rows/rows.h"

namespace {

struct Avx2 {
    static constexpr int LANES = 8, VECTORS = 3, PER = 1;
    static constexpr int KEYS(int vectors) { return vectors == 1 ? 8 : 4; }
    using Floats = __m256;
    using Units = __m256i;

    static INLINE Floats zero() { return _mm256_setzero_ps(); }
    static INLINE Floats set(float x) { return _mm256_set1_ps(x); }
    static INLINE Floats load(const float *p) { return _mm256_loadu_ps(p); }
    static INLINE void store(float *p, Floats x) { _mm256_store_ps(p, x); }
    static INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static INLINE Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static INLINE Floats max_or_nan(Floats a, Floats b) { return _mm256_blendv_ps(max(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
    static INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static INLINE Floats fmsub(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
    static INLINE Units load_units(const Unit *p) { return _mm256_load_si256(reinterpret_cast<const __m256i *>(p)); }
    static INLINE void store_units(Unit *p, Units x) { _mm256_store_si256(reinterpret_cast<__m256i *>(p), x); }

    static INLINE float total(Floats x) {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    static INLINE Floats select(Floats x, Floats a, Floats b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, zero(), _CMP_GE_OQ)); }

    // All bits of the lanes [low, high).
    static INLINE Units lanes(int low, int high) {
        const Units own = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), own), _mm256_cmpgt_epi32(_mm256_set1_epi32(high), own));
    }
    static INLINE Floats between(Floats x, int low, int high, Floats other) {
        return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(lanes(low, high)));
    }
    static INLINE Floats exp2(Floats x) {  // relative error 7.5e-8
        x = _mm256_max_ps(set(-127.0f), x);  // NaN stays NaN in this order
        const Floats whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(x, whole);
        Floats p = set(0.0013276472f);
        p = fmadd(p, f, set(0.00967554133f));
        p = fmadd(p, f, set(0.0555071327f));
        p = fmadd(p, f, set(0.240221197f));
        p = fmadd(p, f, set(0.693146967f));
        p = fmadd(p, f, set(1.00000007f));
        const Units power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
        return mul(p, _mm256_castsi256_ps(power));
    }
    static INLINE Floats mac(Floats acc, Units a, Unit unit) {
        return fmadd(_mm256_castsi256_ps(a), _mm256_castsi256_ps(_mm256_set1_epi32(int(unit))), acc);
    }
    static INLINE Units unit(Floats a, Floats) { return _mm256_castps_si256(a); }

    static INLINE void transpose(Units r[8]) {
        Units t[8];
        UNROLL for (int i = 0; i < 4; i++) {
            t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        UNROLL for (int i = 0; i < 8; i += 4) {
            r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        UNROLL for (int i = 0; i < 4; i++) {
            t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
            t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
        }
        UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
    }
};

struct Float32 : Avx2 {
    using Element = float;
    static INLINE void get(const float *p, int64_t n, Floats &a, Floats &b) {
        a = _mm256_castsi256_ps(read(p, n)), b = _mm256_castsi256_ps(read(p + 8, n - 8));
    }
    static INLINE void put(float *p, int64_t n, Floats a, Floats b) {
        if (n >= 16) {
            _mm256_storeu_ps(p, a), _mm256_storeu_ps(p + 8, b);
        } else {
            write(p, n, _mm256_castps_si256(a)), write(p + 8, n - 8, _mm256_castps_si256(b));
        }
    }
    static INLINE Units read(const float *p, int64_t n) {
        return n >= 8 ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)) : _mm256_castps_si256(_mm256_maskload_ps(p, lanes(0, lane(n))));
    }
    static INLINE void write(float *p, int64_t n, Units x) {
        _mm256_maskstore_ps(p, lanes(0, lane(n)), _mm256_castsi256_ps(x));
    }
};

struct Bfloat16 : Avx2 {
    using Element = uint16_t;
    static INLINE void get(const uint16_t *p, int64_t n, Floats &a, Floats &b) {
        a = _mm256_castsi256_ps(read(p, n)), b = _mm256_castsi256_ps(read(p + 8, n - 8));
    }
    static INLINE void put(uint16_t *p, int64_t n, Floats a, Floats b) {
        write(p, n, _mm256_castps_si256(a)), write(p + 8, n - 8, _mm256_castps_si256(b));
    }
    static INLINE Units read(const uint16_t *p, int64_t n) {
        alignas(16) uint16_t some[8] = {};
        if (n < 8) memcpy(some, p, size_t(most(n, 0)) * 2), p = some;
        return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16);
    }
    static INLINE void write(uint16_t *p, int64_t n, Units x) {  // rounded to nearest, ties to even
        const Units odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
        Units high = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const Floats nan = _mm256_cmp_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(x), _CMP_UNORD_Q);
        high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
        const __m128i all = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        if (n >= 8) return _mm_storeu_si128(reinterpret_cast<__m128i *>(p), all);
        alignas(16) uint16_t some[8];
        _mm_store_si128(reinterpret_cast<__m128i *>(some), all);
        memcpy(p, some, size_t(most(n, 0)) * 2);
    }
};

}  // namespace

const Kernel avx2_float32 = {Scratch<Float32>::room, attend<Float32>};
const Kernel avx2_bfloat16 = {Scratch<Bfloat16>::room, attend<Bfloat16>};
const Rows avx2_rows_float32 = rows_of<Float32>, avx2_rows_bfloat16 = rows_of<Bfloat16>;
const ResizeKernel avx2_resize = resize_kernel;
const PagedKernel avx2_paged_float32 = paged_of<Float32>, avx2_paged_bfloat16 = paged_of<Bfloat16>;
