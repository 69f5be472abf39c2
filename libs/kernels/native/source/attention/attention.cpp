// The entry points of attention, and the choice of the instruction set. Compiled for any x86-64 CPU.
#include "attention/tasks.h"

namespace {

thread_local Memory memory;

}  // namespace

// Returns the best instruction set of this CPU and operating system (a Set), or -1 if no kernel supports this CPU.
extern "C" __attribute__((visibility("default"))) int shoal_instruction_set() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return -1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl"))
        return AVX2;
    return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
}

// Computes softmax attention. Returns 0, or 1 if scratch could not be allocated; `out` is then incomplete.
extern "C" __attribute__((visibility("default"))) int shoal_attention(const Attention *call, int set, int type) {
    const Kernel &kernel = kernel_of(set, type);
    const Tasks tasks(*call);
    const int64_t count = tasks.count();
    std::atomic<int64_t> next{0};
    std::atomic<bool> lacks_memory{false};
    const auto work = [&] {
        Task task;
        for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
            if (!tasks.get(number, task)) continue;
            const int64_t keys = call->cu_keys[task.sequence + 1] - call->cu_keys[task.sequence];
            char *scratch = memory.at_least(kernel.room(*call, keys));
            if (scratch == nullptr) {
                lacks_memory = true;
                return;
            }
            kernel.attend(*call, task, scratch);
        }
    };
    // Use all threads or one: libgomp ends the threads that a smaller team does not need, and the next large team would start them again.
    if (tasks.threads() > 1) {
#pragma omp parallel num_threads(tasks.threads())
        work();
    } else {
        work();
    }
    return lacks_memory;
}
