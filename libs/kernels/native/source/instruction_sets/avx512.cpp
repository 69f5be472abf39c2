// AVX512: float32, and bfloat16 by way of it.
#include "instruction_sets/avx512.h"
#include "resize/resize.h"

namespace {

struct Float32 : Avx512Single {
    using Element = float;
    static INLINE void get(const float *p, int64_t n, Floats &a, Floats &b) {
        a = _mm512_castsi512_ps(read(p, n)), b = _mm512_castsi512_ps(read(p + 16, n - 16));
    }
    static INLINE void put(float *p, int64_t n, Floats a, Floats b) {
        write(p, n, _mm512_castps_si512(a)), write(p + 16, n - 16, _mm512_castps_si512(b));
    }
    static INLINE Units read(const float *p, int64_t n) { return _mm512_castps_si512(_mm512_maskz_loadu_ps(__mmask16(first(n)), p)); }
    static INLINE void write(float *p, int64_t n, Units x) { _mm512_mask_storeu_ps(p, __mmask16(first(n)), _mm512_castsi512_ps(x)); }
};

struct Bfloat16 : Avx512Single {
    using Element = uint16_t;
    static INLINE void get(const uint16_t *p, int64_t n, Floats &a, Floats &b) {
        a = _mm512_castsi512_ps(read(p, n)), b = _mm512_castsi512_ps(read(p + 16, n - 16));
    }
    static INLINE void put(uint16_t *p, int64_t n, Floats a, Floats b) {
        write(p, n, _mm512_castps_si512(a)), write(p + 16, n - 16, _mm512_castps_si512(b));
    }
    static INLINE Units read(const uint16_t *p, int64_t n) {
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(first(n)), p)), 16);
    }
    static INLINE void write(uint16_t *p, int64_t n, Units x) {  // rounded to nearest, ties to even
        const Units odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
        Units high = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(x), _mm512_castsi512_ps(x), _CMP_UNORD_Q);
        high = _mm512_mask_blend_epi32(nan, high, _mm512_set1_epi32(0x7fc0));
        _mm256_mask_storeu_epi16(p, __mmask16(first(n)), _mm512_cvtepi32_epi16(high));
    }
};

}  // namespace

const Kernel avx512_float32 = {Scratch<Float32>::room, attend<Float32>};
const Kernel avx512_bfloat16 = {Scratch<Bfloat16>::room, attend<Bfloat16>};
const Rows avx512_rows_float32 = rows_of<Float32>, avx512_rows_bfloat16 = rows_of<Bfloat16>;
const LayerKernel avx512_layer_float32 = layer_of<Float32>;
const ResizeKernel avx512_resize = resize_kernel;
const PagedKernel avx512_paged_float32 = paged_of<Float32>, avx512_paged_bfloat16 = paged_of<Bfloat16>;
