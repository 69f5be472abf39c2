// Linear layers in int8 on CPUs: the arguments from Python, and the interface of each instruction set.
//
// int8.cpp has the entry points, divides the work among threads and is compiled for any x86-64 CPU. kernel.h has the kernel,
// once, as templates over vectors; avx2.cpp and vnni.cpp instantiate it, each compiled with its own instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

// The arguments of x W' + b, followed by GELU or a residual. Each row of x is quantised to bytes q with x = low + step * q, and each row
// of W to codes w with W = scale * w. So x W' = (step * scale) * (q . w) + low * (scale * sum of w), where q . w is an exact integer.
// libs/kernels/native/int8.py packs it, field by field, without padding: pointers first, then 64-bit, then 32-bit numbers.
struct Int8Linear {
    const void *x;         // [rows, inputs]; the elements of a row are adjacent
    const void *residual;  // [rows, outputs], contiguous, or null: none
    void *out;             // [rows, outputs], contiguous
    const int8_t *codes;   // [panels, groups, columns of a panel, inputs of a group], padded with zeros
    const float *factors;  // [3, panels * columns of a panel]: scale, scale * sum of codes, bias
    char *scratch;         // rows * (row_bytes + 8) bytes, aligned to 64
    int64_t rows, inputs, outputs, x_row;  // x_row: stride in elements
    int32_t threads, gelu;
};

// The kernel of one instruction set and one element type of x, residual and out.
struct Int8Kernel {
    int64_t columns;                        // columns of a panel
    int64_t (*row_bytes)(int64_t inputs);   // bytes of a quantised row
    void (*quantise)(const Int8Linear &, int64_t first, int64_t last);  // quantises rows of x to scratch
    void (*multiply)(const Int8Linear &, int64_t first, int64_t last, int64_t panel, int64_t end);  // computes rows and panels of the product
};

extern const Int8Kernel int8_vnni_float32, int8_vnni_bfloat16;
extern const Int8Kernel int8_avx2_float32, int8_avx2_bfloat16;
