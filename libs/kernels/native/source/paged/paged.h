// Attention over keys and values in pages, for decode steps: a sequence has few queries, and its keys were stored step by step.
//
// A page holds PAGE tokens of one layer: keys as [kv_heads][dim][PAGE], values as [kv_heads][PAGE][dim]. So lanes are keys while scores
// are computed, and dimensions while values are mixed; every number is read once for all heads that share it, and nothing is packed or
// transposed.
// paged.cpp divides sequences and heads among threads; each stores its own new keys and values before it reads them.
#pragma once
#include "rows/rows.h"

constexpr int64_t PAGE = 32;  // as in libs/kernels/attention/paged.py

// libs/kernels/native/paged.py packs it, without padding.
struct Paged {
    const void *q;         // [queries, heads, dim]; or null: keys and values are only stored
    const void *k, *v;     // [rows, kv_heads, dim] twice: the rows to store; or null: none
    void *out;             // [queries, heads, dim], contiguous
    void *k_pages, *v_pages;
    const int32_t *cu_queries, *cu_keys, *cu_rows;  // [sequences + 1]: ends of queries, of all keys, and of the rows to store (the last keys)
    const int32_t *table;                           // [sequences, table_row]: the pages of each sequence
    const float *bias;                              // as in Attention
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, table_row, bias_row, bias_zero;
    int32_t sequences, heads, kv_heads, dim;
    int32_t left, right, threads;
    float scale;
};

struct PagedKernel {
    size_t (*room)(const Paged &, int64_t keys);
    void (*attend)(const Paged &, int32_t sequence, int32_t kv_head, char *scratch);
};

const PagedKernel &paged_kernel_of(int set, int type);

extern const PagedKernel avx512_paged_float32, avx512_paged_bfloat16;
extern const PagedKernel avx2_paged_float32, avx2_paged_bfloat16;

namespace {

// Scratch: queries, scores and results of the heads that share keys, in rows of whole vectors.
template <class T>
struct PagedScratch {
    int64_t width, keys;
    float *query, *score, *mixed;

    static int64_t width_of(const Paged &c) { return up(c.dim, 2 * T::LANES); }
    static size_t room(const Paged &c, int64_t keys) {
        return size_t(4 * (c.heads / c.kv_heads) * (2 * width_of(c) + up(keys, PAGE) + PAGE));
    }
    PagedScratch(const Paged &c, int64_t keys, char *memory) : width(width_of(c)), keys(up(keys, PAGE) + PAGE) {
        query = reinterpret_cast<float *>(memory);
        mixed = query + c.heads / c.kv_heads * width;
        score = mixed + c.heads / c.kv_heads * width;
    }
};

template <class T, int G>
INLINE void page_scores(const PagedScratch<T> &s, const typename T::Element *keys, int64_t dim, const float *query, float *score) {
    constexpr int L = T::LANES;
    typename T::Floats acc[G][2], a, b;
    for (int64_t half = 0; half < PAGE; half += 2 * L) {
        UNROLL for (int g = 0; g < G; g++) acc[g][0] = acc[g][1] = T::zero();
#pragma GCC unroll 2
        for (int64_t d = 0; d < dim; d++) {
            T::get(keys + d * PAGE + half, 2 * L, a, b);
            UNROLL for (int g = 0; g < G; g++) {
                const auto q = T::set(query[g * s.width + d]);
                acc[g][0] = T::fmadd(a, q, acc[g][0]), acc[g][1] = T::fmadd(b, q, acc[g][1]);
            }
        }
        UNROLL for (int g = 0; g < G; g++) {
            T::store(score + g * s.keys + half, acc[g][0]), T::store(score + g * s.keys + half + L, acc[g][1]);
        }
    }
}

template <class T, int G>
INLINE void page_values(const PagedScratch<T> &s, const typename T::Element *values, int64_t dim, const float *weight, int64_t first,
                        int64_t last, float *mixed) {
    constexpr int L = T::LANES;
    wide<T>(0, dim, [&](int64_t at, int64_t n) INLINE_LAMBDA {
        typename T::Floats acc[G][2], a, b;
        UNROLL for (int g = 0; g < G; g++) acc[g][0] = T::load(mixed + g * s.width + at), acc[g][1] = T::load(mixed + g * s.width + at + L);
        for (int64_t j = first; j < last; j++) {
            T::get(values + j * dim + at, n, a, b);
            UNROLL for (int g = 0; g < G; g++) {
                const auto w = T::set(weight[g * s.keys + j]);
                acc[g][0] = T::fmadd(a, w, acc[g][0]), acc[g][1] = T::fmadd(b, w, acc[g][1]);
            }
        }
        UNROLL for (int g = 0; g < G; g++) {
            T::store(mixed + g * s.width + at, acc[g][0]), T::store(mixed + g * s.width + at + L, acc[g][1]);
        }
    });
}

template <int G>
struct Heads {
    static constexpr int COUNT = G;
};

// Calls step(number of heads, first head) for all heads, up to four at a time.
template <class Step>
INLINE void some_heads(int64_t heads, const Step &step) {
    int64_t g = 0;
    for (; g + 4 <= heads; g += 4) step(Heads<4>(), g);
    if (g + 2 <= heads) step(Heads<2>(), g), g += 2;
    if (g < heads) step(Heads<1>(), g);
}

template <class T>
struct PagedTask {
    using Element = typename T::Element;
    const Paged &c;
    const PagedScratch<T> s;
    const int32_t *table;
    int64_t kv_head, shared, keys;

    PagedTask(const Paged &c, int64_t sequence, int64_t kv_head, char *memory)
        : c(c), s(c, c.cu_keys[sequence + 1] - c.cu_keys[sequence], memory), table(c.table + sequence * c.table_row), kv_head(kv_head),
          shared(c.heads / c.kv_heads), keys(c.cu_keys[sequence + 1] - c.cu_keys[sequence]) {}

    Element *of_page(void *pages, int64_t page) const {
        return static_cast<Element *>(pages) + (int64_t(table[page]) * c.kv_heads + kv_head) * c.dim * PAGE;
    }

    void store(int64_t from, int64_t to) const {
        for (int64_t row = from; row < to; row++) {
            const int64_t position = keys - (to - row), at = position % PAGE;
            Element *k_page = of_page(c.k_pages, position / PAGE) + at, *v_page = of_page(c.v_pages, position / PAGE) + at * c.dim;
            const Element *k = static_cast<const Element *>(c.k) + row * c.k_row + kv_head * c.k_head;
            const Element *v = static_cast<const Element *>(c.v) + row * c.v_row + kv_head * c.v_head;
            for (int64_t d = 0; d < c.dim; d++) k_page[d * PAGE] = k[d], v_page[d] = v[d];
        }
    }

    // Replaces the scores [low, high) of head g by weights, and the others of the pages by zeros. Returns 1 / the sum of the weights.
    float weigh(int64_t g, int64_t base, int64_t low, int64_t high, int64_t position) const {
        constexpr int L = T::LANES;
        float *score = s.score + g * s.keys;
        if (c.bias) {
            const float *bias = c.bias + (kv_head * shared + g) * c.bias_row + c.bias_zero;
            for (int64_t j = low; j < high; j++) score[j - base] += bias[position - j];
        }
        const int64_t end = up(high - base, PAGE);
        const auto unseen = T::set(UNSEEN);
        auto top = unseen;
        for (int64_t j = 0; j < end; j += L) {
            const auto x = T::between(T::load(score + j), lane(low - base - j), lane(high - base - j), unseen);
            T::store(score + j, x);
            top = T::max(top, x);
        }
        alignas(64) float some[L];
        T::store(some, top);
        float most_ = UNSEEN;
        for (int i = 0; i < L; i++) most_ = some[i] > most_ ? some[i] : most_;
        const auto shift = T::set(most_);
        auto sum = T::zero();
        for (int64_t j = 0; j < end; j += L) {
            const auto e = T::exp2(T::sub(T::load(score + j), shift));
            T::store(score + j, e);
            sum = T::add(sum, e);
        }
        return 1.0f / T::total(sum);
    }

    void attend(int64_t query, int64_t position) const {
        constexpr int L = T::LANES;
        const int64_t low = most(0, position - c.left), high = least(keys, position + c.right + 1), base = low / PAGE * PAGE;
        const auto factor = T::set(c.scale * 1.44269504f);
        const Element *q = static_cast<const Element *>(c.q) + query * c.q_row + kv_head * shared * c.q_head;
        Element *out = static_cast<Element *>(c.out) + (query * c.heads + kv_head * shared) * c.dim;
        typename T::Floats a, b;
        for (int64_t g = 0; g < shared; g++)
            wide<T>(0, c.dim, [&](int64_t at, int64_t n) INLINE_LAMBDA {
                T::get(q + g * c.q_head + at, n, a, b);
                T::store(s.query + g * s.width + at, T::mul(a, factor)), T::store(s.query + g * s.width + at + L, T::mul(b, factor));
                T::store(s.mixed + g * s.width + at, T::zero()), T::store(s.mixed + g * s.width + at + L, T::zero());
            });
        for (int64_t at = base; at < high; at += PAGE) {
            const Element *page = of_page(c.k_pages, at / PAGE);
            some_heads(shared, [&](auto some, int64_t g) INLINE_LAMBDA {
                page_scores<T, decltype(some)::COUNT>(s, page, c.dim, s.query + g * s.width, s.score + g * s.keys + at - base);
            });
        }
        float scales[64];
        for (int64_t first = 0; first < shared; first += 64) {
            const int64_t count = least(64, shared - first);
            for (int64_t g = 0; g < count; g++) scales[g] = weigh(first + g, base, low, high, position);
            for (int64_t at = base; at < high; at += PAGE) {
                const Element *page = of_page(c.v_pages, at / PAGE);
                const int64_t from = most(low - at, 0), to = least(high - at, PAGE);
                some_heads(count, [&](auto some, int64_t g) INLINE_LAMBDA {
                    page_values<T, decltype(some)::COUNT>(s, page, c.dim, s.score + (first + g) * s.keys + at - base, from, to,
                                                          s.mixed + (first + g) * s.width);
                });
            }
            for (int64_t g = first; g < first + count; g++) {
                const auto scale = T::set(scales[g - first]);
                wide<T>(0, c.dim, [&](int64_t at, int64_t n) INLINE_LAMBDA {
                    const float *m = s.mixed + g * s.width + at;
                    T::put(out + g * c.dim + at, n, T::mul(T::load(m), scale), T::mul(T::load(m + L), scale));
                });
            }
        }
    }
};

template <class T>
void attend_pages(const Paged &c, int32_t sequence, int32_t kv_head, char *memory) {
    const PagedTask<T> task(c, sequence, kv_head, memory);
    if (c.k) task.store(c.cu_rows[sequence], c.cu_rows[sequence + 1]);
    if (!c.q) return;
    const int64_t from = c.cu_queries[sequence], to = c.cu_queries[sequence + 1];
    for (int64_t query = from; query < to; query++) task.attend(query, task.keys - (to - query));
}

template <class T>
constexpr PagedKernel paged_of = {PagedScratch<T>::room, attend_pages<T>};

}  // namespace
