// The entry points of attention, and which instruction set there is. Compiled for any x86-64 CPU.
#include "attention/tasks.h"

namespace {

thread_local Memory memory;

}  // namespace

// The best instruction set of this CPU and operating system, a Set; -1: none that there is a kernel for.
extern "C" __attribute__((visibility("default"))) int shoal_instruction_set() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return -1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl"))
        return AVX2;
    return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
}

// 0: done. 1: no memory for scratch, and `out` is not complete.
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
    // All threads or one: libgomp ends threads that a smaller team leaves over, and the next team would have to start them anew.
    if (tasks.threads() > 1) {
#pragma omp parallel num_threads(tasks.threads())
        work();
    } else {
        work();
    }
    return lacks_memory;
}
