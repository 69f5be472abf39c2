// A whole transformer layer, for any number of rows. The result of a row depends neither on other rows nor on how threads share the
// work, because sums always run over the inputs in order.
//
// layer.cpp calls the steps one after the other, each for a tile of rows. Products read weights as oneDNN has packed them for AVX512
// (libs/kernels/native/panels.py): [panels of 64 outputs, units of inputs, 64 outputs], where a unit is one float32 or two bfloat16 of
// neighbouring inputs. Inputs are padded with zeros to multiples of 16 units, outputs to whole panels.
#pragma once
#include <cstring>

#include "rows/rows.h"

struct Linear {
    const uint32_t *weight;
    const void *bias;  // or null
    int64_t inputs, outputs;
};

// The constants of a layer. libs/kernels/native/layer.py packs them, without padding.
struct Layer {
    Linear qkv, out, up, down;
    const void *first_weight, *first_bias, *second_weight, *second_bias;  // norms before (with `post`: after) attention and the MLP
    const void *q_norm, *k_norm;                                          // norms of each head; or null
    int32_t heads, kv_heads, dim, left, right;
    int32_t post, rms, gated, gate_last, activation;
    float eps, shift, scale;
    int32_t unused;
};

// The pages of the sequences of a forward pass. With `attends`, queries attend to the keys in pages, and cu_keys counts all keys.
// Otherwise they attend to the rows of the call, which are also stored in pages.
struct PageTable {
    const int32_t *cu_rows, *pages;  // as in Paged
    int64_t row;
    int64_t attends;
};

struct LayerCall {
    const Layer *layer;
    const void *x;  // [rows, hidden]
    void *out;      // [queries, hidden]
    void *k_pages, *v_pages;  // of this layer
    const PageTable *table;   // or null: nothing is stored
    const int32_t *cu_queries, *cu_keys;
    const int32_t *chosen;  // [queries]: the rows that are needed after attention; or null: all rows
    const float *bias;      // as in Attention
    const float *cos, *sin;  // [rows, pairs]; or null
    int64_t bias_row, bias_zero;
    int32_t rows, queries, sequences, pairs, threads, unused;
};

namespace {

// The share [from, to) of one thread in `count` things that `threads` threads divide.
struct Share {
    int64_t from, to;
    Share(int64_t count, int thread, int threads) : from(count * thread / threads), to(count * (thread + 1) / threads) {}
};

}  // namespace

// Rows [from, to) of a step. `members` threads divide the outputs of these rows; `member` is the number of this thread.
struct Tile {
    int64_t from, to;
    int member, members;
    int64_t rows() const { return to - from; }
};

// Scratch of a step, in elements; `packed` is in units.
struct LayerScratch {
    char *qkv;                          // [rows, outputs of qkv]
    char *picked, *base;                // if rows are chosen: their queries and their x
    char *mixed;                        // attention's result for the queries
    char *total, *inner;                // for the rows of the tile
    char *normed, *packed;              // for the rows of the tile, private to each thread
};

struct LayerKernel {
    int element;  // bytes per element
    // Steps for all rows:
    void (*project)(const LayerCall &, const LayerScratch &, const Tile &);
    void (*turn)(const LayerCall &, const LayerScratch &, const Tile &);  // normalises and rotates heads
    // Steps for the queries:
    void (*pick)(const LayerCall &, const LayerScratch &, const Tile &);  // copies the chosen rows
    void (*attention_out)(const LayerCall &, const LayerScratch &, const Tile &);
    void (*up)(const LayerCall &, const LayerScratch &, const Tile &);
    void (*down)(const LayerCall &, const LayerScratch &, const Tile &);
    void (*end)(const LayerCall &, const LayerScratch &, const Tile &);  // applies the norm after the layer, with `post`
};

extern const LayerKernel avx512_bf16_layer_bfloat16, avx512_layer_float32;

namespace {

constexpr int64_t PANEL = 64, PART = 32;  // outputs of a panel, and outputs computed at once
constexpr int64_t MAX_BLOCK_ROWS = 14;    // with PART outputs, as many sums as fit in the registers
constexpr int64_t AHEAD = 64 * PANEL;     // distance of prefetching, in units of weights: covers the latency of main memory

struct Blocks {
    int64_t count, rows;  // `rows`: rows of a block; the last block may have fewer
    explicit Blocks(int64_t all) : count((all + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS), rows((all + count - 1) / most(1, count)) {}
};

template <class T>
INLINE int64_t padded_units(int64_t inputs) {
    return up((inputs + T::PER - 1) / T::PER, 16);
}

// Packs [rows, inputs] into blocks of [units][16 rows], padded with zeros.
template <class T>
void pack_rows(const typename T::Element *x, int64_t x_row, int64_t rows, int64_t inputs, Unit *to) {
    const Blocks blocks(rows);
    const int64_t units = padded_units<T>(inputs);
    for (int64_t block = 0; block < blocks.count; block++) {
        const int64_t from = block * blocks.rows, count = least(blocks.rows, rows - from);
        for (int64_t u = 0; u < units; u += 16, to += 16 * 16) {
            typename T::Units some[16];
            for (int64_t i = 0; i < 16; i++) some[i] = T::read(x + (from + i) * x_row + u * T::PER, i < count ? inputs - u * T::PER : 0);
            T::transpose(some);
            for (int64_t i = 0; i < 16; i++) T::store_units(to + i * 16, some[i]);
        }
    }
}

// Multiplies M packed rows with PART columns of weights -> [M][PART].
template <class T, int M>
void product(const Unit *rows, const Unit *weight, int64_t units, float *out) {
    constexpr int L = T::LANES, V = PART / L;
    typename T::Floats acc[M][V];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) acc[m][v] = T::zero();
#pragma GCC unroll 1
    for (int64_t u = 0; u < units; u++, rows += 16, weight += PANEL) {
        typename T::Units w[V];
        UNROLL for (int v = 0; v < V; v++) w[v] = T::load_units(weight + v * L);
        UNROLL for (int v = 0; v < V; v++) T::prefetch(weight + v * L + AHEAD);
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) acc[m][v] = T::mac(acc[m][v], w[v], rows[m]);
    }
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < V; v++) T::store(out + m * PART + v * L, acc[m][v]);
}

template <class T>
void product_of(int64_t count, const Unit *rows, const Unit *weight, int64_t units, float *out) {
    using Product = void (*)(const Unit *, const Unit *, int64_t, float *);
    static constexpr Product products[MAX_BLOCK_ROWS] = {product<T, 1>,  product<T, 2>,  product<T, 3>,  product<T, 4>, product<T, 5>,
                                                    product<T, 6>,  product<T, 7>,  product<T, 8>,  product<T, 9>, product<T, 10>,
                                                    product<T, 11>, product<T, 12>, product<T, 13>, product<T, 14>};
    products[count - 1](rows, weight, units, out);
}

// Computes this thread's outputs of one of: activation(x W + b); activation(gate) * up of the two halves of the outputs;
// x W + b + residual.
template <class T>
void multiply(const Linear &linear, const Unit *packed, int64_t rows, int activation, bool gated, bool gate_last,
              const typename T::Element *residual, typename T::Element *out, int thread, int threads) {
    constexpr int L = T::LANES;
    using Floats = typename T::Floats;
    using Element = typename T::Element;
    const Blocks blocks(rows);
    const int64_t units = padded_units<T>(linear.inputs), width = gated ? linear.outputs / 2 : linear.outputs;
    const auto *bias = static_cast<const Element *>(linear.bias);
    const auto weight_at = [&](int64_t column) { return linear.weight + column / PANEL * units * PANEL + column % PANEL; };
    const Share parts((width + PART - 1) / PART, thread, threads);
    alignas(64) float sums[MAX_BLOCK_ROWS * PART], others[MAX_BLOCK_ROWS * PART];
    for (int64_t part = parts.from; part < parts.to; part++) {
        const int64_t column = part * PART, n = least(PART, width - column);
        const int64_t first = column + (gated && gate_last ? width : 0), second = column + (gate_last ? 0 : width);
        Floats added[4] = {T::zero(), T::zero(), T::zero(), T::zero()};
        if (bias) T::get(bias + first, n, added[0], added[1]);
        if (bias && gated) T::get(bias + second, n, added[2], added[3]);
        for (int64_t block = 0; block < blocks.count; block++) {
            const int64_t from = block * blocks.rows, count = least(blocks.rows, rows - from);
            product_of<T>(count, packed + block * units * 16, weight_at(first), units, sums);
            if (gated) product_of<T>(count, packed + block * units * 16, weight_at(second), units, others);
            with_activation<T>(activation, [&](auto function) INLINE_LAMBDA {
                for (int64_t r = 0; r < count; r++) {
                    const int64_t at = (from + r) * width + column;
                    Floats a = function(T::add(T::load(sums + r * PART), added[0]));
                    Floats b = function(T::add(T::load(sums + r * PART + L), added[1]));
                    if (gated) {
                        a = T::mul(a, T::add(T::load(others + r * PART), added[2]));
                        b = T::mul(b, T::add(T::load(others + r * PART + L), added[3]));
                    }
                    if (residual) {
                        Floats c, d;
                        T::get(residual + at, n, c, d);
                        a = T::add(a, c), b = T::add(b, d);
                    }
                    T::put(out + at, n, a, b);
                }
            });
        }
    }
}

// The steps of a layer.
template <class T>
struct Steps {
    using Element = typename T::Element;

    static Element *of(char *scratch) { return reinterpret_cast<Element *>(scratch); }
    static const Element *x(const LayerCall &c) { return static_cast<const Element *>(c.x); }
    static Norm norm(const Layer &layer, const void *weight, const void *bias) { return {weight, bias, layer.eps, layer.shift, layer.rms}; }

    // Applies a linear layer to the rows of the tile.
    static void linear(const Linear &linear, const LayerScratch &s, const Tile &t, const Element *x, Element *out,
                       const Element *residual = nullptr, int activation = NONE, bool gated = false, bool gate_last = false) {
        Unit *packed = reinterpret_cast<Unit *>(s.packed);
        pack_rows<T>(x, linear.inputs, t.rows(), linear.inputs, packed);
        multiply<T>(linear, packed, t.rows(), activation, gated, gate_last, residual, out, t.member, t.members);
    }

    static void project(const LayerCall &c, const LayerScratch &s, const Tile &t) {
        const Layer &l = *c.layer;
        const Element *in = x(c) + t.from * l.qkv.inputs;
        if (!l.post && l.first_weight) {
            norm_rows<T>(norm(l, l.first_weight, l.first_bias), in, l.qkv.inputs, s.normed, t.rows(), l.qkv.inputs);
            in = of(s.normed);
        }
        linear(l.qkv, s, t, in, of(s.qkv) + t.from * l.qkv.outputs);
    }

    static void turn(const LayerCall &c, const LayerScratch &s, const Tile &t) {
        const Layer &l = *c.layer;
        const Share rows(t.rows(), t.member, t.members);
        const int64_t own = int64_t(l.heads) * l.dim;
        for (int64_t r = t.from + rows.from; r < t.from + rows.to; r++) {
            Element *q = of(s.qkv) + r * l.qkv.outputs, *k = q + own;
            if (l.q_norm) {
                norm_rows<T>(norm(l, l.q_norm, nullptr), q, l.dim, q, l.heads, l.dim);
                norm_rows<T>(norm(l, l.k_norm, nullptr), k, l.dim, k, l.kv_heads, l.dim);
            }
            if (c.cos) rotate_row<T>(q, l.heads + l.kv_heads, l.dim, c.cos + r * c.pairs, c.sin + r * c.pairs, c.pairs);
        }
    }

    static void pick(const LayerCall &c, const LayerScratch &s, const Tile &t) {
        const Layer &l = *c.layer;
        const Share queries(t.rows(), t.member, t.members);
        const int64_t own = int64_t(l.heads) * l.dim, hidden = l.qkv.inputs;
        for (int64_t i = t.from + queries.from; i < t.from + queries.to; i++) {
            std::memcpy(of(s.picked) + i * own, of(s.qkv) + c.chosen[i] * l.qkv.outputs, size_t(own) * sizeof(Element));
            std::memcpy(of(s.base) + i * hidden, x(c) + c.chosen[i] * hidden, size_t(hidden) * sizeof(Element));
        }
    }

    static void attention_out(const LayerCall &c, const LayerScratch &s, const Tile &t) {
        const Layer &l = *c.layer;
        const Element *base = (c.chosen ? of(s.base) : x(c)) + t.from * l.out.outputs;
        linear(l.out, s, t, of(s.mixed) + t.from * l.out.inputs, of(s.total), base);
    }

    static void up(const LayerCall &c, const LayerScratch &s, const Tile &t) {
        const Layer &l = *c.layer;
        const void *weight = l.post ? l.first_weight : l.second_weight, *bias = l.post ? l.first_bias : l.second_bias;
        const Element *in = of(s.total);
        if (weight) {
            norm_rows<T>(norm(l, weight, bias), in, l.up.inputs, s.normed, t.rows(), l.up.inputs);
            in = of(s.normed);
        }
        linear(l.up, s, t, in, of(s.inner), nullptr, l.activation, l.gated, l.gate_last);
    }

    // With `post`, the output overwrites `total`, because a norm follows.
    static void down(const LayerCall &c, const LayerScratch &s, const Tile &t) {
        const Layer &l = *c.layer;
        const Element *residual = l.post && l.first_weight ? of(s.normed) : of(s.total);
        Element *out = l.post ? of(s.total) : static_cast<Element *>(c.out) + t.from * l.down.outputs;
        linear(l.down, s, t, of(s.inner), out, residual);
    }

    static void end(const LayerCall &c, const LayerScratch &s, const Tile &t) {
        const Layer &l = *c.layer;
        const int64_t hidden = l.qkv.inputs;
        const Share rows(t.rows(), t.member, t.members);
        norm_rows<T>(norm(l, l.second_weight, l.second_bias), of(s.total) + rows.from * hidden, hidden,
                     static_cast<Element *>(c.out) + (t.from + rows.from) * hidden, rows.to - rows.from, hidden);
    }
};

template <class T>
constexpr LayerKernel layer_of = {
    sizeof(typename T::Element), Steps<T>::project, Steps<T>::turn, Steps<T>::pick, Steps<T>::attention_out, Steps<T>::up,
    Steps<T>::down,              Steps<T>::end,
};

}  // namespace
