// Vectors of 16 floats, what all AVX512 kernels share.
#pragma once
#include <immintrin.h>

#include "attention/kernel.h"
#include "layer/layer.h"
#include "paged/paged.h"
#include "rows/rows.h"

namespace {

struct Avx512 {
    static constexpr int LANES = 16, VECTORS = 4;
    static constexpr int KEYS(int vectors) { return vectors == 1 ? 16 : vectors == 4 ? 4 : 8; }
    using Floats = __m512;
    using Units = __m512i;

    static INLINE Floats zero() { return _mm512_setzero_ps(); }
    static INLINE Floats set(float x) { return _mm512_set1_ps(x); }
    static INLINE Floats load(const float *p) { return _mm512_loadu_ps(p); }
    static INLINE void store(float *p, Floats x) { _mm512_store_ps(p, x); }
    static INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static INLINE Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static INLINE Floats max_or_nan(Floats a, Floats b) { return _mm512_mask_max_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), a, b); }
    static INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static INLINE Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
    static INLINE Units load_units(const Unit *p) { return _mm512_load_si512(p); }
    static INLINE void store_units(Unit *p, Units x) { _mm512_store_si512(p, x); }

    static INLINE float total(Floats x) { return _mm512_reduce_add_ps(x); }
    static INLINE Floats select(Floats x, Floats a, Floats b) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_GE_OQ), b, a);
    }
    static INLINE void prefetch(const Unit *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1); }

    // The first n bits; n of any size.
    static INLINE uint32_t first(int64_t n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; }

    static INLINE Floats between(Floats x, int low, int high, Floats other) {
        return _mm512_mask_blend_ps(__mmask16(first(high) & ~first(low)), other, x);
    }

    static INLINE void transpose(Units r[16]) {
        Units t[16];
        UNROLL for (int i = 0; i < 8; i++) {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        UNROLL for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        UNROLL for (int i = 0; i < 4; i++) {
            const Units a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
            const Units c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
            t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
            t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
            t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
            t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
        }
        UNROLL for (int i = 0; i < 16; i++) r[i] = t[i];
    }
};

// Units of one float.
struct Avx512Single : Avx512 {
    static constexpr int PER = 1;

    // Relative error 7.5e-8.
    static INLINE Floats exp2(Floats x) {
        const Floats f = _mm512_reduce_ps(x, 0);  // less the nearest integer
        Floats p = set(0.0013276472f);
        p = fmadd(p, f, set(0.00967554133f));
        p = fmadd(p, f, set(0.0555071327f));
        p = fmadd(p, f, set(0.240221197f));
        p = fmadd(p, f, set(0.693146967f));
        p = fmadd(p, f, set(1.00000007f));
        return _mm512_scalef_ps(p, _mm512_roundscale_ps(x, 0));
    }
    static INLINE Floats mac(Floats acc, Units a, Unit unit) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(_mm512_set1_epi32(int(unit))), acc);
    }
    static INLINE Units unit(Floats a, Floats) { return _mm512_castps_si512(a); }
};

}  // namespace
