// The entry point of attention over pages. Compiled for any x86-64 CPU.
#include "paged/paged.h"

#include "attention/tasks.h"

namespace {

thread_local Memory memory;

}  // namespace

const PagedKernel &paged_kernel_of(int set, int type) {
    if (set >= AVX512) return type == BFLOAT16 ? avx512_paged_bfloat16 : avx512_paged_float32;
    return type == BFLOAT16 ? avx2_paged_bfloat16 : avx2_paged_float32;
}

// Computes attention over pages. Returns 0, or 1 if scratch could not be allocated; `out` is then incomplete.
extern "C" __attribute__((visibility("default"))) int shoal_paged(const Paged *call, int set, int type) {
    const PagedKernel &kernel = paged_kernel_of(set, type);
    const int64_t count = int64_t(call->sequences) * call->kv_heads;
    int64_t longest = 0;
    for (int i = 0; i < call->sequences; i++) longest = most(longest, call->cu_keys[i + 1] - call->cu_keys[i]);
    std::atomic<int64_t> next{0};
    std::atomic<bool> lacks_memory{false};
    const auto work = [&] {
        char *scratch = memory.at_least(kernel.room(*call, longest));
        if (scratch == nullptr) {
            lacks_memory = true;
            return;
        }
        for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            kernel.attend(*call, int32_t(number / call->kv_heads), int32_t(number % call->kv_heads), scratch);
    };
    const int64_t rows = call->cu_keys[call->sequences] - call->cu_keys[0];
    if (call->threads > 1 && rows * call->heads * call->dim >= MIN_PARALLEL_PRODUCTS) {
#pragma omp parallel num_threads(call->threads)
        work();
    } else {
        work();
    }
    return lacks_memory;
}
