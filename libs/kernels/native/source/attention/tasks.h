// Shared by the entry points: the choice of a kernel, scratch, and the division of attention among threads. Compiled for any x86-64 CPU.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstdlib>

#include "attention/attention.h"

namespace {

enum Set { AVX2 = 0, AVX512 = 1, AVX512_BF16 = 2 };  // as in libs/kernels/native/library.py
enum Type { FLOAT32 = 0, BFLOAT16 = 1 };

constexpr int MAX_TASK_QUERIES = 256, MIN_TASK_QUERIES = 64;  // so that threads share a long sequence
// Multiplications that take one thread about 2 us: with fewer, waking other threads takes longer than it saves.
constexpr int64_t MIN_PARALLEL_PRODUCTS = 100'000;

inline const Kernel &kernel_of(int set, int type) {
    if (set == AVX512_BF16 && type == BFLOAT16) return avx512_bf16_bfloat16;
    if (set >= AVX512) return type == BFLOAT16 ? avx512_bfloat16 : avx512_float32;
    return type == BFLOAT16 ? avx2_bfloat16 : avx2_float32;
}

// The scratch of a thread. It grows, and is freed when the thread ends.
class Memory {
  public:
    char *at_least(size_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + bytes / 4 + 63) / 64 * 64;
            memory_ = static_cast<char *>(std::aligned_alloc(64, size_));
            if (memory_ == nullptr) size_ = 0;
        }
        return memory_;
    }
    ~Memory() { std::free(memory_); }

  private:
    char *memory_ = nullptr;
    size_t size_ = 0;
};

// The tasks of a call, by number. The last sequences have the first numbers: batches are sorted by length, and long tasks that start
// first leave no thread working alone at the end.
class Tasks {
  public:
    explicit Tasks(const Attention &call) : call_(call), shared_(call.heads / call.kv_heads) {
        int longest = 1;
        for (int i = 0; i < call.sequences; i++) {
            const int queries = call.cu_queries[i + 1] - call.cu_queries[i];
            products_ += int64_t(queries) * (call.cu_keys[i + 1] - call.cu_keys[i]);
            longest = queries > longest ? queries : longest;
        }
        products_ *= int64_t(call.heads) * call.dim;
        // Use the fewest tasks that keep all threads busy, because each task packs its keys again.
        const auto too_few = [&] { return count() < 4 * int64_t(call.threads) && threads() > 1; };
        const auto divide = [&](int queries) { queries_ = queries, chunks_ = (longest + queries - 1) / queries; };
        divide(MAX_TASK_QUERIES);
        if (too_few()) heads_ = 1;
        while (too_few() && queries_ > MIN_TASK_QUERIES) divide(queries_ / 2);
    }

    int threads() const { return products_ < MIN_PARALLEL_PRODUCTS ? 1 : call_.threads; }
    int64_t count() const { return int64_t(call_.sequences) * (call_.heads / heads()) * chunks_; }

    // Returns false if the number is of a chunk beyond the end of its sequence.
    bool get(int64_t number, Task &task) const {
        number = count() - 1 - number;
        const int parts = call_.heads / heads(), part = int(number / chunks_);
        task.sequence = part / parts, task.head = part % parts * heads(), task.heads = heads();
        const int queries = call_.cu_queries[task.sequence + 1] - call_.cu_queries[task.sequence];
        task.first = int(number % chunks_) * queries_;
        task.last = task.first + queries_ < queries ? task.first + queries_ : queries;
        return task.first < queries;
    }

  private:
    int heads() const { return heads_ == 0 ? shared_ : heads_; }

    const Attention &call_;
    const int shared_;  // heads that share their keys
    int64_t products_ = 0;
    int heads_ = 0;  // heads of a task; 0: all heads that share their keys
    int queries_ = 0, chunks_ = 0;
};

}  // namespace
