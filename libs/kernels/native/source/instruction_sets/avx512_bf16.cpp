// AVX512-BF16: products of pairs of bfloat16, summed in float32.
#include "instruction_sets/avx512.h"

namespace {

struct Pairs : Avx512 {
    static constexpr int PER = 2;
    using Element = uint16_t;

    // Relative error 7.5e-5, a twenty-fifth of a weight's rounding to bfloat16.
    static INLINE Floats exp2(Floats x) {
        const Floats f = _mm512_reduce_ps(x, 1);  // less the integer below
        Floats p = set(0.0780245226f);
        p = fmadd(p, f, set(0.226067155f));
        p = fmadd(p, f, set(0.69583354f));
        p = fmadd(p, f, set(0.999925219f));
        return _mm512_scalef_ps(p, x);  // times 2 to the integer below
    }
    static INLINE Floats mac(Floats acc, Units a, Unit unit) {
        return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(int(unit)));
    }
    static INLINE Units unit(Floats a, Floats b) {
        const Units order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                             3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(order, (Units)_mm512_cvtne2ps_pbh(b, a));
    }
    static INLINE Units read(const uint16_t *p, int64_t n) { return _mm512_maskz_loadu_epi16(__mmask32(first(n)), p); }
    static INLINE void write(uint16_t *p, int64_t n, Units x) { _mm512_mask_storeu_epi16(p, __mmask32(first(n)), x); }
    static INLINE void get(const uint16_t *p, int64_t n, Floats &a, Floats &b) {
        const Units all = read(p, n);
        a = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(all)), 16));
        b = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(all, 1)), 16));
    }
    static INLINE void put(uint16_t *p, int64_t n, Floats a, Floats b) { write(p, n, (Units)_mm512_cvtne2ps_pbh(b, a)); }
    static INLINE void interleave(Units a, Units b, Unit *to) {
        const Units low_half = _mm512_set1_epi32(0xffff);
        const Units even = _mm512_or_si512(_mm512_and_si512(a, low_half), _mm512_slli_epi32(b, 16));
        const Units odd = _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_andnot_si512(low_half, b));
        const Units low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        store_units(to, _mm512_permutex2var_epi32(even, low, odd));
        store_units(to + 16, _mm512_permutex2var_epi32(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd));
    }
};

}  // namespace

const Kernel avx512_bf16_bfloat16 = {Scratch<Pairs>::room, attend<Pairs>};
const Rows avx512_bf16_rows_bfloat16 = rows_of<Pairs>;
const LayerKernel avx512_bf16_layer_bfloat16 = layer_of<Pairs>;
