// Entry points of operations on rows, and the division of rows among threads. Compiled for any x86-64 CPU.
#include "rows/rows.h"

#include "attention/tasks.h"

#define ENTRY extern "C" __attribute__((visibility("default"))) int

namespace {

// Elements that take one thread about 10 us: with fewer, waking other threads takes longer than it saves.
constexpr int64_t MIN_PARALLEL_ELEMENTS = 65'536;

const Rows &rows_for(int set, int type) {
    if (set == AVX512_BF16 && type == BFLOAT16) return avx512_bf16_rows_bfloat16;
    if (set >= AVX512) return type == BFLOAT16 ? avx512_rows_bfloat16 : avx512_rows_float32;
    return type == BFLOAT16 ? avx2_rows_bfloat16 : avx2_rows_float32;
}

int64_t bytes(int type) { return type == BFLOAT16 ? 2 : 4; }

// Divides `count` things of `size` elements among all threads, or gives all to this thread, and calls part(first, last) in each.
template <class Part>
void divided(int64_t count, int64_t size, int threads, const Part &part) {
    if (threads == 1 || count * size < MIN_PARALLEL_ELEMENTS) return part(int64_t(0), count);
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
        part(count * thread / all, count * (thread + 1) / all);
    }
}

const char *at(const void *x, int64_t bytes) { return static_cast<const char *>(x) + bytes; }
char *at(void *x, int64_t bytes) { return static_cast<char *>(x) + bytes; }

}  // namespace

// Norms over the last axis. [rows, heads, size], rows `x_row` apart and a row's heads adjacent -> [rows, heads, size]
ENTRY shoal_norm(int set, int type, int threads, const void *x, int64_t x_row, void *out, int64_t rows, int64_t heads, int64_t size,
                 const void *weight, const void *bias, float eps, float shift, int rms) {
    const Norm norm = {weight, bias, eps, shift, rms};
    divided(rows, heads * size, threads, [&](int64_t first, int64_t last) {
        if (heads == 1) {
            rows_for(set, type).norm(norm, at(x, first * x_row * bytes(type)), x_row, at(out, first * size * bytes(type)), last - first, size);
            return;
        }
        for (int64_t r = first; r < last; r++)
            rows_for(set, type).norm(norm, at(x, r * x_row * bytes(type)), size, at(out, r * heads * size * bytes(type)), heads, size);
    });
    return 0;
}

// [rows, 2 * size], rows `x_row` apart -> [rows, size]
ENTRY shoal_gate(int set, int type, int threads, const void *x, int64_t x_row, void *out, int64_t rows, int64_t size, int activation,
                 int gate_last) {
    divided(rows, size, threads, [&](int64_t first, int64_t last) {
        const char *from = at(x, first * x_row * bytes(type)), *second = from + size * bytes(type);
        rows_for(set, type).gate(activation, gate_last ? second : from, gate_last ? from : second, x_row,
                                 at(out, first * size * bytes(type)), last - first, size);
    });
    return 0;
}

// Rotates [rows, heads, dim], rows `x_row` apart, in place by cos and sin [rows, pairs].
ENTRY shoal_rotate(int set, int type, int threads, void *x, int64_t x_row, int64_t rows, int64_t heads, int64_t dim, const float *cos,
                   const float *sin, int64_t pairs) {
    divided(rows, heads * dim, threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++)
            rows_for(set, type).rotate(at(x, r * x_row * bytes(type)), heads, dim, cos + r * pairs, sin + r * pairs, pairs);
    });
    return 0;
}

// Sums (0), means (1) or maxima (2) over the rows ends[i]:ends[i + 1] of [rows, size] -> [sequences, size] float32. No sequence is empty.
ENTRY shoal_pool(int set, int type, int threads, const void *x, int64_t x_row, const int32_t *ends, float *out, int64_t sequences,
                 int64_t size, int how) {
    const int64_t rows = ends[sequences] - ends[0];
    std::atomic<int64_t> next{0};
    divided(threads, rows * size / threads + 1, threads, [&](int64_t, int64_t) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < sequences;) {
            const int64_t count = ends[i + 1] - ends[i];
            rows_for(set, type).pool(at(x, ends[i] * x_row * bytes(type)), x_row, count, 0, size, how == 2,
                                     how == 1 ? 1.0f / float(count) : 1.0f, out + i * size);
        }
    });
    return 0;
}

// Looks up rows of a table by number, and adds rows of a second table. Returns 1 if a number is not in its table.
ENTRY shoal_embed(int set, int type, int threads, const void *table, int64_t entries, const int32_t *numbers, const void *places,
                  int64_t positions, const int32_t *position, void *out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; r++)
        if (numbers[r] < 0 || numbers[r] >= entries || position[r] < 0 || position[r] >= positions) return 1;
    const int64_t row = size * bytes(type);
    divided(rows, size, threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++)
            rows_for(set, type).add(at(table, numbers[r] * row), at(places, position[r] * row), at(out, r * row), size);
    });
    return 0;
}
