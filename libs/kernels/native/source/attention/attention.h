// Attention over packed sequences of different lengths on CPUs: the arguments from Python, and the interface of each instruction set.
//
// attention.cpp has the entry points, divides the work into tasks and is compiled for any x86-64 CPU. kernel.h has the kernel, once,
// as templates over vectors; the files in instruction_sets/ instantiate it, each compiled with its own instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

// The arguments of softmax(q k' * scale + bias) v within each sequence. The last query is at the position of the last key; with fewer
// keys than queries, the first query is at the position of the first key.
// libs/kernels/native/attention.py packs it, field by field, without padding: pointers first, then 64-bit, then 32-bit numbers.
struct Attention {
    const void *q, *k, *v;  // [queries, heads, dim], [keys, kv_heads, dim] twice; the elements of a head are adjacent
    void *out;              // [queries, heads, dim], contiguous
    const int32_t *cu_queries, *cu_keys;  // [sequences + 1]: where the rows of each sequence begin
    // [heads, bias_row], already multiplied by log2(e), or null. A score gets the number at `bias_zero + query - key`; at both ends of a
    // row 32 more numbers are readable, because vectors are loaded whole.
    const float *bias;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides in elements
    int64_t bias_row, bias_zero;
    int32_t sequences, heads, kv_heads, dim;
    int32_t left, right;  // number of keys that a query attends to before and after its own position
    int32_t threads;
    float scale;
};

// A unit of work: queries [first, last) of one sequence, for the heads [head, head + heads), which share one head of keys and values.
struct Task {
    int32_t sequence, head, heads, first, last;
};

// The kernel of one instruction set and one element type. `room` returns the bytes of scratch (aligned to 64) for a task with `keys` keys.
struct Kernel {
    size_t (*room)(const Attention &, int64_t keys);
    void (*attend)(const Attention &, const Task &, char *scratch);
};

extern const Kernel avx512_bf16_bfloat16;
extern const Kernel avx512_float32, avx512_bfloat16;
extern const Kernel avx2_float32, avx2_bfloat16;
