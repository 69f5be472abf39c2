// Varlen attention on CPUs: what Python calls, and what each instruction set implements.
//
// attention.cpp has the entry points, divides the work into tasks and is compiled for any x86-64 CPU. kernel.h has the kernel, once,
// as templates over vectors; the files in instruction_sets/ instantiate it, each compiled with its own instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

// softmax(q k' scale + bias) v within each sequence. Queries end where the keys end; with fewer keys than queries they begin together.
// libs/kernels/native/attention.py packs it, field by field, without padding: pointers first, then 64-bit, then 32-bit numbers.
struct Attention {
    const void *q, *k, *v;  // [queries, heads, dim], [keys, kv_heads, dim] twice; the elements of a head are adjacent
    void *out;              // [queries, heads, dim], contiguous
    const int32_t *cu_queries, *cu_keys;  // [sequences + 1]: where the rows of each sequence begin
    // Added to the scores, times log2(e): of each head, at `bias_zero + query - key`, with 32 numbers to spare at both ends; or null.
    const float *bias;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides in elements
    int64_t bias_row, bias_zero;
    int32_t sequences, heads, kv_heads, dim;
    int32_t left, right;  // keys that a query sees before and after its own position
    int32_t threads;
    float scale;
};

// Queries [first, last) of one sequence, for `heads` heads from `head` on, which share one head of keys and values.
struct Task {
    int32_t sequence, head, heads, first, last;
};

// Of one instruction set and one type of elements. `room`: bytes of scratch, aligned to 64, that a task over so many keys needs.
struct Kernel {
    size_t (*room)(const Attention &, int64_t keys);
    void (*attend)(const Attention &, const Task &, char *scratch);
};

extern const Kernel avx512_bf16_bfloat16;
extern const Kernel avx512_float32, avx512_bfloat16;
extern const Kernel avx2_float32, avx2_bfloat16;
