// The linear layer in int8, as templates over a type T of vectors (`Avx2`, `Vnni`):
//   LANES: floats or 32-bit integers in a vector; VECTORS: vectors of columns in a panel; ROWS: rows of x in a tile;
//   Code: type of a quantised element of x in scratch; GROUP: codes in 32 bits; Element: type of x, residual and out.
#pragma once
#include "int8/int8.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace {

template <class T>
constexpr int64_t COLUMNS = T::LANES *T::VECTORS;

template <class T>
int64_t groups_of(int64_t inputs) {
    return (inputs + T::GROUP - 1) / T::GROUP;
}

template <class T>
int64_t row_bytes(int64_t inputs) {
    return (groups_of<T>(inputs) * 4 + 63) / 64 * 64;
}

// Returns the address of each row's `step` and `low` (two floats), which follow the rows' bytes in scratch.
template <class T>
INLINE float *ranges(const Int8Linear &c) {
    return reinterpret_cast<float *>(c.scratch + c.rows * row_bytes<T>(c.inputs));
}

template <class T>
void quantise(const Int8Linear &c, int64_t first, int64_t last) {
    constexpr int L = T::LANES;
    for (int64_t row = first; row < last; row++) {
        const auto *x = static_cast<const typename T::Element *>(c.x) + row * c.x_row;
        const int64_t whole = c.inputs / L * L, rest = c.inputs - whole;
        // An infinity or NaN makes the range of the row NaN, and so all its results: wrong input is not hidden by quantisation.
        auto bad = T::zero();
        auto low = T::set(__builtin_inff()), high = T::set(-__builtin_inff());
        for (int64_t k = 0; k < whole; k += L) {
            const auto v = T::read(x + k);
            low = T::min(low, v), high = T::max(high, v), bad = T::fmadd(v, T::zero(), bad);
        }
        if (rest) {
            const auto v = T::read_some(x + whole, rest);
            low = T::keep(T::min(low, v), low, rest), high = T::keep(T::max(high, v), high, rest);
            bad = T::fmadd(v, T::zero(), bad);
        }
        const float none = T::sum(bad), least = T::lowest(low) + none, step = (T::highest(high) - least) * (1.0f / 255.0f);
        const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
        float *range = ranges<T>(c) + 2 * row;
        range[0] = step, range[1] = least;
        auto *codes = reinterpret_cast<typename T::Code *>(c.scratch + row * row_bytes<T>(c.inputs));
        const auto by = T::set(inverse), less = T::set(-least * inverse);
        for (int64_t k = 0; k < whole; k += L) T::write_codes(codes + k, T::fmadd(T::read(x + k), by, less));
        // The codes after the last input are arbitrary, but within the row's bytes; the weights' codes there are zeros.
        if (rest) T::write_codes(codes + whole, T::fmadd(T::read_some(x + whole, rest), by, less));
    }
}

// GELU, x / 2 (1 + erf(x / sqrt(2))), with an absolute error of 7e-5, less than the rounding error of a bfloat16 of 0.02. It is a
// polynomial that was fitted with reweighted least squares to minimise the maximum error, with the value 1/2 at the bound of x.
template <class T>
INLINE typename T::Floats gelu(typename T::Floats x) {
    const auto z = T::min(T::max(x, T::set(-4.2f)), T::set(4.2f)), u = T::mul(z, z);
    auto p = T::set(4.9239151e-11f);
    p = T::fmadd(p, u, T::set(-4.79575624e-09f));
    p = T::fmadd(p, u, T::set(2.07251745e-07f));
    p = T::fmadd(p, u, T::set(-5.2896703e-06f));
    p = T::fmadd(p, u, T::set(8.98377475e-05f));
    p = T::fmadd(p, u, T::set(-0.00108648092f));
    p = T::fmadd(p, u, T::set(0.0097411368f));
    p = T::fmadd(p, u, T::set(-0.0662234128f));
    p = T::fmadd(p, u, T::set(0.398842633f));
    return T::mul(x, T::fmadd(p, z, T::set(0.5f)));
}

// Computes R rows, beginning at `row`, of one panel.
template <class T, int R>
void tile(const Int8Linear &c, int64_t row, int64_t panel) {
    constexpr int L = T::LANES, V = T::VECTORS;
    const int64_t groups = groups_of<T>(c.inputs), width = row_bytes<T>(c.inputs);
    const int8_t *codes = c.codes + panel * groups * COLUMNS<T> * T::GROUP;
    const char *rows = c.scratch + row * width;
    typename T::Integers acc[R][V];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) acc[r][v] = T::none();
    for (int64_t g = 0; g < groups; g++, codes += COLUMNS<T> * T::GROUP) {
        typename T::Integers w[V];
        UNROLL for (int v = 0; v < V; v++) w[v] = T::codes(codes + v * L * T::GROUP);
        UNROLL for (int r = 0; r < R; r++) {
            const auto q = T::repeat(rows + r * width + g * 4);
            UNROLL for (int v = 0; v < V; v++) acc[r][v] = T::add_products(acc[r][v], q, w[v]);
        }
    }
    // Copy the sums to memory, so that they stay in registers in the loop above however the compiler translates the loops below.
    alignas(64) int32_t sums[R * COLUMNS<T>];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) T::store(sums + (r * V + v) * L, acc[r][v]);
    const float *range = ranges<T>(c) + 2 * row;
    const int64_t padded = (c.outputs + COLUMNS<T> - 1) / COLUMNS<T> * COLUMNS<T>;
    for (int v = 0; v < V; v++) {
        const int64_t column = panel * COLUMNS<T> + v * L, left = c.outputs - column;
        if (left <= 0) break;
        const auto scale = T::load(c.factors + column), sum = T::load(c.factors + padded + column);
        const auto bias = T::load(c.factors + 2 * padded + column);
        for (int r = 0; r < R; r++) {
            const auto shift = T::fmadd(T::set(range[2 * r + 1]), sum, bias);
            auto y = T::fmadd(T::floats(sums + (r * V + v) * L), T::mul(T::set(range[2 * r]), scale), shift);
            if (c.gelu) y = gelu<T>(y);
            const int64_t at = (row + r) * c.outputs + column;
            if (c.residual) {
                const auto *residual = static_cast<const typename T::Element *>(c.residual) + at;
                y = T::add(y, left >= L ? T::read(residual) : T::read_some(residual, left));
            }
            auto *out = static_cast<typename T::Element *>(c.out) + at;
            if (left >= L)
                T::write(out, y);
            else
                T::write_some(out, y, left);
        }
    }
}

template <class T>
void multiply(const Int8Linear &c, int64_t first, int64_t last, int64_t panel, int64_t end) {
    constexpr int R = T::ROWS;
    for (; panel < end; panel++) {
        int64_t row = first;
        for (; row + R <= last; row += R) tile<T, R>(c, row, panel);
        switch (last - row) {
            case 5: if constexpr (R > 5) tile<T, 5>(c, row, panel); break;
            case 4: tile<T, 4>(c, row, panel); break;
            case 3: tile<T, 3>(c, row, panel); break;
            case 2: tile<T, 2>(c, row, panel); break;
            case 1: tile<T, 1>(c, row, panel); break;
        }
    }
}

}  // namespace
