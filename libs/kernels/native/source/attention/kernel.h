// The attention kernel. Everything here has internal linkage and calls only inlined functions of the standard library: otherwise the
// linker could merge copies of a function that were compiled for different instruction sets.
//
// Each lane is a query: a tile is 1 to T::VECTORS vectors of T::LANES queries, and a vector of scores holds the scores of one key.
//  - Scores: a unit of one key is broadcast from memory and multiplied by the queries' units, which are transposed once per tile.
//  - Softmax: each lane keeps its own maximum and sum over the keys; nothing is reduced across lanes.
//  - Values: a unit of one dimension is broadcast and multiplied by the weights, which are already in the layout for this.
//  - The result is transposed back as it is stored.
// A unit is 32 bits of T::PER elements: two bfloat16 that one instruction multiplies and adds, or one float. Keys are processed in
// blocks, and the running result is rescaled after each (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867), so that the
// scores of a tile stay in the first-level cache.
//
// T, a set of vector instructions for one type of elements:
//   LANES, VECTORS, PER: lanes of a vector, vectors of a tile, elements of a unit
//   KEYS(n): keys processed at once with n vectors of queries, as many as the registers hold
//   Element, Floats, Units: an element in memory, LANES floats, LANES units
//   zero set load store add sub mul fmadd fmsub max: of Floats; divide(a, b)
//   max_or_nan(a, b): NaN where either is; max(a, b) is b there
//   total(x): the sum of all lanes; select(x, a, b): in lanes where x >= 0 a, in others b
//   between(x, low, high, other): x in the lanes [low, high), `other` in all others; any integers
//   exp2(x): 2 to the power of x, for x <= 0; 0 where x is very low, NaN for NaN
//   mac(acc, a, unit): acc + a * unit, the unit broadcast to all lanes
//   load_units store_units: of the 32-bit numbers in scratch
//   read(p, n) write(p, n, units): LANES units from and to elements, of which only the first n (0 or less: none) are touched
//   get(p, n, a, b) put(p, n, a, b): the same of 2 * LANES elements, as floats
//   unit(a, b): from one float or two of each lane, its unit
//   interleave(a, b, to): PER 2: units of two rows of elements -> for each element of a row, a unit of both
//   transpose(Units[LANES])
#pragma once
#include "attention/attention.h"

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using Unit = uint32_t;

constexpr int BLOCK = 128;        // keys per block
constexpr int PAD = 16;           // packed keys are padded to multiples of this; a multiple of every KEYS
constexpr float UNSEEN = -1e30f;  // score of a masked key; finite, because -inf - -inf is NaN for a query without any visible key

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int lane(int64_t n) { return int(least(most(n, -1), 64)); }

// Scratch of one task. `units`: units of a head, padded to whole vectors. `padded`: keys, padded to a multiple of PAD. Every part
// begins at a multiple of 64 bytes.
template <class T>
struct Scratch {
    static constexpr int64_t WIDTH = int64_t(T::VECTORS) * T::LANES;
    int64_t units, padded;
    Unit *query;    // [units][vectors][LANES]
    float *score;   // [keys of a block][vectors][LANES]; overwritten by the weights, [keys of a block / PER][vectors][LANES]
    float *mixed;   // [units * PER][vectors][LANES]
    Unit *keys;     // [units / LANES][padded][LANES]
    Unit *values;   // [padded / PER][units * PER]

    static int64_t units_of(const Attention &c) { return up((c.dim + T::PER - 1) / T::PER, T::LANES); }

    static size_t room(const Attention &c, int64_t keys) {
        const int64_t units = units_of(c);
        return size_t(4 * (units * WIDTH * (1 + T::PER) + (BLOCK + PAD) * WIDTH + 2 * up(keys, PAD) * units));
    }

    Scratch(const Attention &c, int64_t keys, char *memory) : units(units_of(c)), padded(up(keys, PAD)) {
        query = reinterpret_cast<Unit *>(memory);
        score = reinterpret_cast<float *>(query + units * WIDTH);
        mixed = score + (BLOCK + PAD) * WIDTH;
        this->keys = reinterpret_cast<Unit *>(mixed + units * T::PER * WIDTH);
        values = this->keys + padded * units;
    }
};

// The queries at the positions [place, place + rows) among `keys` keys.
struct View {
    int64_t place, rows, keys, left, right;
    const float *bias;  // points to the number for distance 0 of this head; or null

    // True if no query of the view masks a key of [low, high).
    INLINE bool is_all(int64_t low, int64_t high) const {
        return high <= keys && low >= place + rows - 1 - left && high - 1 <= place + right;
    }
};

// Packs one head of keys and values into scratch as units. A unit of keys holds neighbouring elements of one key; a unit of values holds
// one element of T::PER neighbouring keys. Both are padded with zeros.
template <class T>
void pack(const Scratch<T> &s, int64_t dim, const typename T::Element *k, int64_t k_row, const typename T::Element *v, int64_t v_row,
          int64_t count) {
    constexpr int64_t STEP = T::LANES * T::PER;
    const int64_t width = s.units * T::PER;
    for (int64_t c = 0; c * T::LANES < s.units; c++) {
        const int64_t at = c * STEP;
        Unit *keys = s.keys + c * s.padded * T::LANES;
        for (int64_t j = 0; j < s.padded; j++)
            T::store_units(keys + j * T::LANES, T::read(k + j * k_row + at, j < count ? dim - at : 0));
        for (int64_t j = 0; j < s.padded; j += T::PER) {
            const auto value = T::read(v + j * v_row + at, j < count ? dim - at : 0);
            Unit *to = s.values + j / T::PER * width + at;
            if constexpr (T::PER == 1)
                T::store_units(to, value);
            else
                T::interleave(value, T::read(v + (j + 1) * v_row + at, j + 1 < count ? dim - at : 0), to);
        }
    }
}

// Computes and stores the scores of NK packed keys for all queries of the tile, and updates the maxima `top`. `key` is the position of
// the first key.
template <class T, int NQ, int NK>
INLINE void scores(const Scratch<T> &s, int64_t units, const Unit *keys, float *score, typename T::Floats top[NQ], const View &view,
                   int64_t key, typename T::Floats to_log2) {
    constexpr int L = T::LANES;
    typename T::Floats acc[NK][NQ];
    UNROLL for (int r = 0; r < NK; r++) UNROLL for (int n = 0; n < NQ; n++) acc[r][n] = T::zero();
    const Unit *query = s.query;
    for (int64_t left = units; left > 0; left -= L, keys += s.padded * L) {
        const int steps = int(least(left, L));
#pragma GCC unroll 1
        for (int u = 0; u < steps; u++, query += NQ * L) {
            typename T::Units q[NQ];
            UNROLL for (int n = 0; n < NQ; n++) q[n] = T::load_units(query + n * L);
            UNROLL for (int r = 0; r < NK; r++) {
                UNROLL for (int n = 0; n < NQ; n++) acc[r][n] = T::mac(acc[r][n], q[n], keys[r * L + u]);
            }
        }
    }
    if (!view.bias && view.is_all(key, key + NK)) {
        UNROLL for (int r = 0; r < NK; r++) UNROLL for (int n = 0; n < NQ; n++) {
            T::store(score + (r * NQ + n) * L, acc[r][n]);
            top[n] = T::max(top[n], acc[r][n]);
        }
        return;
    }
    // Store the scores before masking them, so that the accumulators above stay in registers.
    UNROLL for (int r = 0; r < NK; r++) UNROLL for (int n = 0; n < NQ; n++) T::store(score + (r * NQ + n) * L, acc[r][n]);
    for (int r = 0; r < NK; r++) {
        UNROLL for (int n = 0; n < NQ; n++) {
            const int64_t at = key + r, from = view.place + n * L;  // the position of lane 0
            const int high = at < view.keys ? lane(at + view.left - from + 1) : 0;
            auto x = T::load(score + (r * NQ + n) * L);
            if (view.bias) x = T::fmadd(x, to_log2, T::load(view.bias + (from - at)));
            x = T::between(x, lane(at - view.right - from), high, T::set(UNSEEN));
            T::store(score + (r * NQ + n) * L, x);
            top[n] = T::max(top[n], x);
        }
    }
}

// Adds to `mixed` the weights of `steps` units of keys times ND dimensions of their values.
template <class T, int NQ, int ND>
INLINE void values(const Unit *value, int64_t width, const Unit *weight, float *mixed, int64_t steps, bool is_first) {
    constexpr int L = T::LANES;
    typename T::Floats acc[ND][NQ];
    UNROLL for (int r = 0; r < ND; r++) UNROLL for (int n = 0; n < NQ; n++)
        acc[r][n] = is_first ? T::zero() : T::load(mixed + (r * NQ + n) * L);
#pragma GCC unroll 1
    for (int64_t i = 0; i < steps; i++, value += width, weight += NQ * L) {
        typename T::Units p[NQ];
        UNROLL for (int n = 0; n < NQ; n++) p[n] = T::load_units(weight + n * L);
        UNROLL for (int r = 0; r < ND; r++) UNROLL for (int n = 0; n < NQ; n++) acc[r][n] = T::mac(acc[r][n], p[n], value[r]);
    }
    UNROLL for (int r = 0; r < ND; r++) UNROLL for (int n = 0; n < NQ; n++) T::store(mixed + (r * NQ + n) * L, acc[r][n]);
}

// Replaces scores by weights 2^(score * factor - shift), in place, and adds them to the sums.
template <class T, int NQ>
INLINE void weigh(float *score, int64_t keys, typename T::Floats factor, const typename T::Floats shift[NQ], typename T::Floats sum[NQ]) {
    constexpr int L = T::LANES;
    for (int64_t j = 0; j < keys; j += T::PER) {
        UNROLL for (int n = 0; n < NQ; n++) {
            typename T::Floats e[2];
            UNROLL for (int i = 0; i < T::PER; i++) {
                e[i] = T::exp2(T::fmsub(T::load(score + ((j + i) * NQ + n) * L), factor, shift[n]));
                sum[n] = T::add(sum[n], e[i]);
            }
            T::store_units(reinterpret_cast<Unit *>(score) + (j / T::PER * NQ + n) * L, T::unit(e[0], e[T::PER - 1]));
        }
    }
}

// Computes one tile: queries of one head over the keys [low, high). Packed keys begin at position `base`.
template <class T, int NQ>
void tile(const Attention &c, const Scratch<T> &s, const typename T::Element *q, typename T::Element *out, const View &view, int64_t base,
          int64_t low, int64_t high) {
    constexpr int L = T::LANES, PER = T::PER, NK = T::KEYS(NQ), TAIL = NK < 4 ? NK : 4;
    const int64_t out_row = int64_t(c.heads) * c.dim, width = s.units * PER, units = (c.dim + PER - 1) / PER;
    typename T::Units block[L];
    for (int n = 0; n < NQ; n++)
        for (int64_t u = 0; u < s.units; u += L) {
            for (int i = 0; i < L; i++) {
                const int64_t row = n * L + i;
                block[i] = T::read(q + row * c.q_row + u * PER, row < view.rows ? c.dim - u * PER : 0);
            }
            T::transpose(block);
            for (int i = 0; i < L; i++) T::store_units(s.query + ((u + i) * NQ + n) * L, block[i]);
        }
    const auto to_log2 = T::set(c.scale * 1.44269504f);
    const auto factor = view.bias ? T::set(1.0f) : to_log2;  // scores with a bias are scaled before it is added
    typename T::Floats top[NQ], sum[NQ];
    UNROLL for (int n = 0; n < NQ; n++) top[n] = T::set(UNSEEN), sum[n] = T::zero();
    for (int64_t start = low; start < high; start += BLOCK) {
        const int64_t count = least(BLOCK, high - start), even = up(count, PER);
        const Unit *keys = s.keys + (start - base) * L, *value = s.values + (start - base) / PER * width;
        typename T::Floats before[NQ], shift[NQ];
        UNROLL for (int n = 0; n < NQ; n++) before[n] = top[n];
        int64_t j = 0;
        for (; j + NK <= count; j += NK) scores<T, NQ, NK>(s, units, keys + j * L, s.score + j * NQ * L, top, view, start + j, to_log2);
        for (; j < count; j += TAIL) scores<T, NQ, TAIL>(s, units, keys + j * L, s.score + j * NQ * L, top, view, start + j, to_log2);
        UNROLL for (int n = 0; n < NQ; n++) shift[n] = T::mul(top[n], factor);
        if (start > low)
            for (int n = 0; n < NQ; n++) {
                const auto less = T::exp2(T::fmsub(before[n], factor, shift[n]));
                sum[n] = T::mul(sum[n], less);
                for (int64_t d = 0; d < c.dim; d++) {
                    float *m = s.mixed + (d * NQ + n) * L;
                    T::store(m, T::mul(T::load(m), less));
                }
            }
        weigh<T, NQ>(s.score, even, factor, shift, sum);
        const Unit *weight = reinterpret_cast<const Unit *>(s.score);
        for (int64_t d = 0; d < c.dim; d += NK)
            values<T, NQ, NK>(value + d, width, weight, s.mixed + d * NQ * L, even / PER, start == low);
    }
    for (int n = 0; n < NQ; n++) {
        // Queries that see no key get zeros.
        const int seeing = low < high ? lane(view.keys + view.left - view.place - n * L) : 0;
        const auto norm = T::divide(T::set(1.0f), sum[n]);
        for (int64_t u = 0; u < units; u += L) {
            for (int i = 0; i < L; i++) {
                typename T::Floats m[2];
                for (int p = 0; p < PER; p++) {
                    m[p] = T::mul(T::load(s.mixed + (((u + i) * PER + p) * NQ + n) * L), norm);
                    m[p] = T::between(m[p], 0, seeing, T::zero());
                }
                block[i] = T::unit(m[0], m[PER - 1]);
            }
            T::transpose(block);
            for (int i = 0; i < L && n * L + i < view.rows; i++) T::write(out + (n * L + i) * out_row + u * PER, c.dim - u * PER, block[i]);
        }
    }
}

template <class T>
void attend(const Attention &c, const Task &task, char *memory) {
    using Element = typename T::Element;
    const int64_t q0 = c.cu_queries[task.sequence], k0 = c.cu_keys[task.sequence], keys = c.cu_keys[task.sequence + 1] - k0;
    const int64_t offset = most(0, keys - (c.cu_queries[task.sequence + 1] - q0)), shared = task.head / (c.heads / c.kv_heads);
    const auto low_of = [&](int64_t place) { return least(most(place - c.left, 0), keys) / T::PER * T::PER; };
    const auto high_of = [&](int64_t place) { return least(place + c.right + 1, keys); };
    const int64_t base = low_of(offset + task.first), count = most(0, high_of(offset + task.last - 1) - base);
    const Scratch<T> s(c, count, memory);
    pack<T>(s, c.dim, static_cast<const Element *>(c.k) + (k0 + base) * c.k_row + shared * c.k_head, c.k_row,
            static_cast<const Element *>(c.v) + (k0 + base) * c.v_row + shared * c.v_head, c.v_row, count);
    // Tiles begin at multiples of their size, so that they and their blocks of keys do not depend on how a sequence is divided.
    constexpr int64_t TILE = int64_t(T::VECTORS) * T::LANES;
    for (int64_t head = task.head; head < task.head + task.heads; head++)
        for (int64_t from = task.first; from < task.last; from += TILE) {
            const int64_t to = least(task.last, from + TILE);
            const float *bias = c.bias ? c.bias + head * c.bias_row + c.bias_zero : nullptr;
            const View view = {offset + from, to - from, keys, c.left, c.right, bias};
            const auto *q = static_cast<const Element *>(c.q) + (q0 + from) * c.q_row + head * c.q_head;
            auto *out = static_cast<Element *>(c.out) + ((q0 + from) * c.heads + head) * c.dim;
            const int64_t low = low_of(offset + from), high = most(low, high_of(offset + to - 1));
            switch ((to - from + T::LANES - 1) / T::LANES) {
                case 1: tile<T, 1>(c, s, q, out, view, base, low, high); break;
                case 2: tile<T, 2>(c, s, q, out, view, base, low, high); break;
                case 3: tile<T, 3>(c, s, q, out, view, base, low, high); break;
                default:
                    if constexpr (T::VECTORS == 4) tile<T, 4>(c, s, q, out, view, base, low, high);
            }
        }
}

}  // namespace
