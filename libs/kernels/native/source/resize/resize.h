// Resizing images of bytes, bit for bit as Pillow does it: weights of 22 fractional bits, sums in int32, rounded to bytes after the
// columns and again after the rows. Plain loops of a fixed length, which the compiler makes vectors of in each instruction set's file.
#pragma once
#include <cstdint>

constexpr int RESIZE_ROWS = 16;  // rows that are resized at once: a vector holds one byte of each
constexpr int RESIZE_BITS = 22;  // fractional bits of a weight

// The weights along one axis. Output `i` is the sum over the `count[i]` inputs that begin at `first[i]`, with the weights that begin at
// `i * most`.
struct ResizeWeights {
    const int32_t *first, *count, *weight;
    int32_t most;
};

struct ResizeKernel {
    // [width, 3, RESIZE_ROWS] -> [columns, 3, RESIZE_ROWS]
    void (*columns)(const uint8_t *x, const ResizeWeights &, int64_t columns, uint8_t *out);
    // Computes row `row` of the output: [height, size], rows `size` bytes apart -> [size]
    void (*row)(const uint8_t *x, const ResizeWeights &, int64_t row, int64_t size, uint8_t *out);
};

extern const ResizeKernel avx2_resize, avx512_resize;

namespace {

// Computes `LANES` weighted sums over `count` vectors that are `step` bytes apart.
template <int LANES>
inline void resize_sum(const uint8_t *x, int64_t step, const int32_t *weight, int count, uint8_t *out) {
    int32_t sum[LANES];
    for (int i = 0; i < LANES; i++) sum[i] = 1 << (RESIZE_BITS - 1);
    for (int t = 0; t < count; t++, x += step)
        for (int i = 0; i < LANES; i++) sum[i] += weight[t] * int32_t(x[i]);
    for (int i = 0; i < LANES; i++) {
        const int32_t whole = sum[i] >> RESIZE_BITS;
        out[i] = uint8_t(whole < 0 ? 0 : whole > 255 ? 255 : whole);
    }
}

inline void resize_columns(const uint8_t *x, const ResizeWeights &weights, int64_t columns, uint8_t *out) {
    constexpr int LANES = 3 * RESIZE_ROWS;
    for (int64_t i = 0; i < columns; i++)
        resize_sum<LANES>(x + int64_t(weights.first[i]) * LANES, LANES, weights.weight + i * weights.most, weights.count[i], out + i * LANES);
}

inline void resize_row(const uint8_t *x, const ResizeWeights &weights, int64_t row, int64_t size, uint8_t *out) {
    const int32_t *weight = weights.weight + row * weights.most, count = weights.count[row];
    x += weights.first[row] * size;
    int64_t at = 0;
    for (; at + 64 <= size; at += 64) resize_sum<64>(x + at, size, weight, count, out + at);
    for (; at + 16 <= size; at += 16) resize_sum<16>(x + at, size, weight, count, out + at);
    for (; at < size; at++) resize_sum<1>(x + at, size, weight, count, out + at);
}

constexpr ResizeKernel resize_kernel = {resize_columns, resize_row};

}  // namespace
