// Operations on rows: norms, activations, rotations, pooling. Templates over the vectors of attention/kernel.h, which compute in float32
// and read and write elements of any type.
#pragma once
#include "attention/kernel.h"

enum Activation { NONE = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SILU = 4, QUICK_GELU = 5 };  // as in libs/kernels/native/rows.py

// LayerNorm, or RMSNorm with `rms`; the weights are `weight + shift`. `bias` may be null.
struct Norm {
    const void *weight, *bias;
    float eps, shift;
    int32_t rms;
};

// The row functions of one instruction set and one type of elements.
struct Rows {
    // [rows, size], rows `x_row` elements apart -> [rows, size], contiguous.
    void (*norm)(const Norm &, const void *x, int64_t x_row, void *out, int64_t rows, int64_t size);
    // activation(gate) * up, rows `in_row` elements apart -> [rows, size], contiguous.
    void (*gate)(int activation, const void *gate, const void *up, int64_t in_row, void *out, int64_t rows, int64_t size);
    // Rotates in place the first 2 * pairs elements of each of the row's heads, which are adjacent.
    void (*rotate)(void *row, int64_t heads, int64_t dim, const float *cos, const float *sin, int64_t pairs);
    // The sum (with `max`: the maximum) of `rows` rows in the columns [first, last), times `factor` -> float32.
    void (*pool)(const void *x, int64_t x_row, int64_t rows, int64_t first, int64_t last, bool max, float factor, float *out);
    // a + b
    void (*add)(const void *a, const void *b, void *out, int64_t size);
};

extern const Rows avx512_bf16_rows_bfloat16;
extern const Rows avx512_rows_float32, avx512_rows_bfloat16;
extern const Rows avx2_rows_float32, avx2_rows_bfloat16;

namespace {

// Calls step(at, n) for WIDE elements at a time. n is a compile-time constant except in the last call, which has fewer.
template <class T, class Step>
INLINE void wide(int64_t from, int64_t to, const Step &step) {
    constexpr int64_t WIDE = 2 * T::LANES;
    int64_t at = from;
    for (; at + WIDE <= to; at += WIDE) step(at, WIDE);
    if (at < to) step(at, to - at);
}

template <class T>
INLINE typename T::Floats sigmoid(typename T::Floats x) {
    const auto size = T::max(x, T::sub(T::zero(), x)), one = T::set(1.0f);
    const auto e = T::exp2(T::mul(size, T::set(-1.44269504f)));
    return T::divide(T::select(x, one, e), T::add(one, e));
}

template <class T, int ACTIVATION>
INLINE typename T::Floats activated(typename T::Floats x) {
    if constexpr (ACTIVATION == NONE) return x;
    // max with its arguments in this order keeps NaN. -infinity gives NaN except with RELU, as in torch.
    if constexpr (ACTIVATION == RELU) return T::max(T::zero(), x);
    if constexpr (ACTIVATION == SILU) return T::mul(x, sigmoid<T>(x));
    if constexpr (ACTIVATION == QUICK_GELU) return T::mul(x, sigmoid<T>(T::mul(x, T::set(1.702f))));
    if constexpr (ACTIVATION == GELU_TANH) {
        const auto cube = T::mul(T::mul(x, x), x);
        return T::mul(x, sigmoid<T>(T::mul(T::set(1.59576912f), T::fmadd(cube, T::set(0.044715f), x))));
    }
    if constexpr (ACTIVATION == GELU) {
        // x (1 + erf(x / sqrt(2))) / 2, where erf(z) = 1 - p(t) exp(-z z) for z >= 0 (Abramowitz and Stegun 7.1.26, error 1.5e-7).
        const auto size = T::max(x, T::sub(T::zero(), x)), half = T::set(0.5f);
        const auto low = T::max(T::set(-20.0f), T::sub(T::zero(), size));  // -|x|, limited to where exp is not 0
        const auto t = T::divide(T::set(1.0f), T::fmadd(low, T::set(-0.3275911f * 0.70710678f), T::set(1.0f)));
        auto p = T::set(1.061405429f);
        p = T::fmadd(p, t, T::set(-1.453152027f));
        p = T::fmadd(p, t, T::set(1.421413741f));
        p = T::fmadd(p, t, T::set(-0.284496736f));
        p = T::fmadd(p, t, T::set(0.254829592f));
        const auto e = T::exp2(T::mul(T::mul(low, low), T::set(-0.72134752f)));
        return T::fmadd(T::mul(T::mul(low, half), T::mul(p, t)), e, T::fmadd(x, half, T::mul(size, half)));
    }
}

// Selects the activation once for many vectors: calls apply(function of one vector).
template <class T, class Apply>
INLINE void with_activation(int activation, const Apply &apply) {
    using Floats = typename T::Floats;
    switch (activation) {
        case GELU: apply([](Floats x) INLINE_LAMBDA { return activated<T, GELU>(x); }); break;
        case GELU_TANH: apply([](Floats x) INLINE_LAMBDA { return activated<T, GELU_TANH>(x); }); break;
        case RELU: apply([](Floats x) INLINE_LAMBDA { return activated<T, RELU>(x); }); break;
        case SILU: apply([](Floats x) INLINE_LAMBDA { return activated<T, SILU>(x); }); break;
        case QUICK_GELU: apply([](Floats x) INLINE_LAMBDA { return activated<T, QUICK_GELU>(x); }); break;
        default: apply([](Floats x) INLINE_LAMBDA { return x; });
    }
}

template <class T>
void norm_row(const Norm &norm, const typename T::Element *x, typename T::Element *out, int64_t size) {
    using Floats = typename T::Floats;
    using Element = typename T::Element;
    constexpr int L = T::LANES;
    const auto *weight = static_cast<const Element *>(norm.weight), *bias = static_cast<const Element *>(norm.bias);
    Floats sum[2] = {T::zero(), T::zero()};
    Floats mean = T::zero(), a, b;
    if (!norm.rms) {
        wide<T>(0, size, [&](int64_t at, int64_t n) INLINE_LAMBDA {
            T::get(x + at, n, a, b);
            sum[0] = T::add(sum[0], a), sum[1] = T::add(sum[1], b);
        });
        mean = T::set(T::total(T::add(sum[0], sum[1])) / float(size));
        sum[0] = sum[1] = T::zero();
    }
    wide<T>(0, size, [&](int64_t at, int64_t n) INLINE_LAMBDA {
        T::get(x + at, n, a, b);
        a = T::sub(a, mean), b = T::sub(b, mean);
        if (n < 2 * L) a = T::between(a, 0, int(n), T::zero()), b = T::between(b, 0, int(n) - L, T::zero());
        sum[0] = T::fmadd(a, a, sum[0]), sum[1] = T::fmadd(b, b, sum[1]);
    });
    const Floats scale = T::set(1.0f / __builtin_sqrtf(T::total(T::add(sum[0], sum[1])) / float(size) + norm.eps));
    const Floats shift = T::set(norm.shift);
    wide<T>(0, size, [&](int64_t at, int64_t n) INLINE_LAMBDA {
        Floats w[2], added[2] = {T::zero(), T::zero()};
        T::get(x + at, n, a, b);
        T::get(weight + at, n, w[0], w[1]);
        if (bias) T::get(bias + at, n, added[0], added[1]);
        a = T::mul(T::sub(a, mean), scale), b = T::mul(T::sub(b, mean), scale);
        T::put(out + at, n, T::fmadd(a, T::add(w[0], shift), added[0]), T::fmadd(b, T::add(w[1], shift), added[1]));
    });
}

template <class T>
void norm_rows(const Norm &norm, const void *x, int64_t x_row, void *out, int64_t rows, int64_t size) {
    using Element = typename T::Element;
    for (int64_t r = 0; r < rows; r++)
        norm_row<T>(norm, static_cast<const Element *>(x) + r * x_row, static_cast<Element *>(out) + r * size, size);
}

template <class T>
void gate_rows(int activation, const void *gate, const void *up, int64_t in_row, void *out, int64_t rows, int64_t size) {
    using Element = typename T::Element;
    with_activation<T>(activation, [&](auto function) INLINE_LAMBDA {
        for (int64_t r = 0; r < rows; r++) {
            const auto *first = static_cast<const Element *>(gate) + r * in_row, *second = static_cast<const Element *>(up) + r * in_row;
            auto *to = static_cast<Element *>(out) + r * size;
            wide<T>(0, size, [&](int64_t at, int64_t n) INLINE_LAMBDA {
                typename T::Floats a, b, c, d;
                T::get(first + at, n, a, b);
                T::get(second + at, n, c, d);
                T::put(to + at, n, T::mul(function(a), c), T::mul(function(b), d));
            });
        }
    });
}

template <class T>
void rotate_row(void *row, int64_t heads, int64_t dim, const float *cos, const float *sin, int64_t pairs) {
    constexpr int L = T::LANES;
    using Floats = typename T::Floats;
    auto *x = static_cast<typename T::Element *>(row);
    wide<T>(0, pairs, [&](int64_t at, int64_t n) INLINE_LAMBDA {
        alignas(64) float part[4 * L] = {};
        Floats c[2], s[2];
        if (n == 2 * L) {
            c[0] = T::load(cos + at), c[1] = T::load(cos + at + L), s[0] = T::load(sin + at), s[1] = T::load(sin + at + L);
        } else {
            for (int64_t i = 0; i < n; i++) part[i] = cos[at + i], part[2 * L + i] = sin[at + i];
            c[0] = T::load(part), c[1] = T::load(part + L), s[0] = T::load(part + 2 * L), s[1] = T::load(part + 3 * L);
        }
        for (int64_t h = 0; h < heads; h++) {
            auto *low = x + h * dim + at, *high = low + pairs;
            Floats a[2], b[2];
            T::get(low, n, a[0], a[1]);
            T::get(high, n, b[0], b[1]);
            T::put(low, n, T::fmsub(a[0], c[0], T::mul(b[0], s[0])), T::fmsub(a[1], c[1], T::mul(b[1], s[1])));
            T::put(high, n, T::fmadd(b[0], c[0], T::mul(a[0], s[0])), T::fmadd(b[1], c[1], T::mul(a[1], s[1])));
        }
    });
}

template <class T>
void pool_rows(const void *rows_of, int64_t x_row, int64_t rows, int64_t first, int64_t last, bool max, float factor, float *out) {
    constexpr int L = T::LANES;
    constexpr int64_t FEW = 128;  // rows summed before their sum is added to the total, so that long sequences are as precise as short ones
    using Floats = typename T::Floats;
    const auto *x = static_cast<const typename T::Element *>(rows_of);
    wide<T>(first, last, [&](int64_t at, int64_t n) INLINE_LAMBDA {
        Floats total[2], a, b;
        if (max) {
            T::get(x + at, n, total[0], total[1]);
            for (int64_t r = 1; r < rows; r++) {
                T::get(x + r * x_row + at, n, a, b);
                total[0] = T::max_or_nan(total[0], a), total[1] = T::max_or_nan(total[1], b);
            }
        } else {
            total[0] = total[1] = T::zero();
            for (int64_t r = 0; r < rows;) {
                Floats sum[2] = {T::zero(), T::zero()};
                for (const int64_t end = least(rows, r + FEW); r < end; r++) {
                    T::get(x + r * x_row + at, n, a, b);
                    sum[0] = T::add(sum[0], a), sum[1] = T::add(sum[1], b);
                }
                total[0] = T::add(total[0], sum[0]), total[1] = T::add(total[1], sum[1]);
            }
        }
        alignas(64) float some[2 * L];
        T::store(some, T::mul(total[0], T::set(factor))), T::store(some + L, T::mul(total[1], T::set(factor)));
        for (int64_t i = 0; i < n; i++) out[at + i] = some[i];
    });
}

template <class T>
void add_row(const void *a, const void *b, void *out, int64_t size) {
    using Element = typename T::Element;
    wide<T>(0, size, [&](int64_t at, int64_t n) INLINE_LAMBDA {
        typename T::Floats p, q, r, s;
        T::get(static_cast<const Element *>(a) + at, n, p, q);
        T::get(static_cast<const Element *>(b) + at, n, r, s);
        T::put(static_cast<Element *>(out) + at, n, T::add(p, r), T::add(q, s));
    });
}

template <class T>
constexpr Rows rows_of = {norm_rows<T>, gate_rows<T>, rotate_row<T>, pool_rows<T>, add_row<T>};

}  // namespace
