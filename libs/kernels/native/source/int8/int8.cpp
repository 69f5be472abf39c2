// Entry points of linear layers in int8, and the division of the work among threads. Compiled for any x86-64 CPU.
#include "int8/int8.h"

#include <omp.h>

#include <atomic>

namespace {

enum Set { AVX2 = 0, VNNI = 1 };  // as in libs/kernels/native/int8.py
enum Type { FLOAT32 = 0, BFLOAT16 = 1 };

constexpr int64_t MAX_TASK_ROWS = 96;  // so that the quantised rows of a task stay in the second-level cache
constexpr int64_t QUANTISE_ROWS = 16;  // rows that a thread quantises at a time
// Multiplications that take one thread about 2 us: with fewer, waking other threads takes longer than it saves.
constexpr int64_t MIN_PARALLEL_PRODUCTS = 500'000;

const Int8Kernel &kernel_of(int set, int type) {
    if (set == VNNI) return type == BFLOAT16 ? int8_vnni_bfloat16 : int8_vnni_float32;
    return type == BFLOAT16 ? int8_avx2_bfloat16 : int8_avx2_float32;
}

}  // namespace

// Returns the best instruction set of this CPU for int8 (a Set), or -1 if no kernel supports this CPU.
extern "C" __attribute__((visibility("default"))) int shoal_int8_set() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return -1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return VNNI;
    return AVX2;
}

extern "C" __attribute__((visibility("default"))) void shoal_int8_linear(const Int8Linear *call, int set, int type) {
    const Int8Kernel &kernel = kernel_of(set, type);
    const int64_t rows = call->rows, panels = (call->outputs + kernel.columns - 1) / kernel.columns;
    const int threads = rows * call->inputs * call->outputs < MIN_PARALLEL_PRODUCTS ? 1 : call->threads;
    if (threads == 1) {
        for (int64_t row = 0; row < rows; row += MAX_TASK_ROWS) {
            const int64_t last = row + MAX_TASK_ROWS < rows ? row + MAX_TASK_ROWS : rows;
            kernel.quantise(*call, row, last);
            kernel.multiply(*call, row, last, 0, panels);
        }
        return;
    }
    const int64_t blocks = (rows + MAX_TASK_ROWS - 1) / MAX_TASK_ROWS;
    // Use the fewest parts of the panels that give each thread about four tasks, so that all threads end at about the same time.
    int64_t parts = (4 * threads + blocks - 1) / blocks;
    parts = parts < panels ? parts : panels;
    std::atomic<int64_t> quantised{0}, multiplied{0};
#pragma omp parallel num_threads(threads)
    {
        for (int64_t row; (row = quantised.fetch_add(QUANTISE_ROWS, std::memory_order_relaxed)) < rows;)
            kernel.quantise(*call, row, row + QUANTISE_ROWS < rows ? row + QUANTISE_ROWS : rows);
#pragma omp barrier
        for (int64_t task; (task = multiplied.fetch_add(1, std::memory_order_relaxed)) < blocks * parts;) {
            const int64_t block = task / parts, part = task % parts;
            const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
            kernel.multiply(*call, first, last, panels * part / parts, panels * (part + 1) / parts);
        }
    }
}
