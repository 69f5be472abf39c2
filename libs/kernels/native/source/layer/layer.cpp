// The entry point of a whole layer: scratch, threads and the order of its steps. Compiled for any x86-64 CPU.
#include "layer/layer.h"

#include "paged/paged.h"

#include "attention/tasks.h"

namespace {

constexpr int64_t TILE_BYTES = 2 << 20, TILE_ROWS = 252;  // maximum size of a tile; smaller tiles read the weights too often
constexpr int64_t GROUP_ROWS = 128;                       // rows for which it pays that one thread reads all weights
constexpr size_t MAX_KEPT_BYTES = 16 << 20;  // scratch that stays allocated for the next call; larger scratch is freed

thread_local Memory shared_memory, memory;

const LayerKernel *layer_kernel_of(int set, int type) {
    if (type == BFLOAT16) return set == AVX512_BF16 ? &avx512_bf16_layer_bfloat16 : nullptr;
    return set >= AVX512 ? &avx512_layer_float32 : nullptr;
}

int64_t widest(const Layer &l) { return most(most(l.qkv.inputs, l.out.inputs), most(l.up.inputs, l.down.inputs)); }

// Divides memory into parts that begin at multiples of 64 bytes. With a null pointer it only counts the bytes.
struct Divided {
    char *memory;
    size_t used = 0;
    char *take(int64_t bytes) {
        char *part = memory + used;
        used += size_t(up(bytes, 64));
        return part;
    }
};

// How threads share the rows of a step:
// 1. With many rows, each thread takes tiles of rows.
// 2. With too few rows per thread to pay for reading all weights, each group of threads takes one tile and divides its outputs.
// Blocks of rows are never divided.
struct Division {
    int64_t rows, blocks, tiles;
    int groups, members;

    Division(int64_t rows, int64_t most_rows, int threads) : rows(rows), blocks((rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS) {
        members = int(threads / least(threads, most(1, rows / GROUP_ROWS)));
        groups = threads / members;
        tiles = members > 1 ? groups : least(blocks, up((rows + most_rows - 1) / most_rows, groups));
    }
    int64_t most_rows() const { return (blocks + tiles - 1) / tiles * MAX_BLOCK_ROWS; }
    Tile tile(int64_t number, int member) const {
        const Share share(blocks, int(number), int(tiles));
        return {share.from * MAX_BLOCK_ROWS, least(rows, share.to * MAX_BLOCK_ROWS), member, members};
    }
};

int64_t tile_rows(const Layer &l, int element) {
    return least(TILE_ROWS, most(1, TILE_BYTES / (widest(l) * element * 16)) * MAX_BLOCK_ROWS);
}

LayerScratch divide_shared(Divided &shared, const LayerCall &c, const Division &after, int element) {
    const Layer &l = *c.layer;
    const int64_t own = int64_t(l.heads) * l.dim, hidden = l.qkv.inputs;
    LayerScratch s = {};
    s.qkv = shared.take(c.rows * l.qkv.outputs * element);
    s.picked = shared.take(c.chosen ? c.queries * own * element : 0);
    s.base = shared.take(c.chosen ? c.queries * hidden * element : 0);
    s.mixed = shared.take(c.queries * own * element);
    s.total = shared.take(after.members > 1 ? c.queries * hidden * element : 0);
    s.inner = shared.take(after.members > 1 ? c.queries * l.down.inputs * element : 0);
    return s;
}

// Adds a thread's private scratch to the shared scratch.
LayerScratch divide_own(Divided &own, LayerScratch s, const LayerCall &c, const Division &before, const Division &after, int element) {
    const Layer &l = *c.layer;
    const int64_t rows = most(before.most_rows(), after.most_rows());
    s.normed = own.take(rows * l.qkv.inputs * element);
    s.packed = own.take(Blocks(rows).count * 16 * up(widest(l), 16) * 4);
    if (after.members == 1) {
        s.total = own.take(rows * l.qkv.inputs * element);
        s.inner = own.take(rows * l.down.inputs * element);
    }
    return s;
}

Attention attention_of(const LayerCall &c, const LayerScratch &s, int element) {
    const Layer &l = *c.layer;
    const int64_t own = int64_t(l.heads) * l.dim, shared = int64_t(l.kv_heads) * l.dim;
    Attention a = {};
    a.q = c.chosen ? s.picked : s.qkv, a.q_row = c.chosen ? own : l.qkv.outputs;
    a.k = s.qkv + own * element, a.v = s.qkv + (own + shared) * element, a.out = s.mixed;
    a.k_row = a.v_row = l.qkv.outputs, a.q_head = a.k_head = a.v_head = l.dim;
    a.cu_queries = c.cu_queries, a.cu_keys = c.cu_keys;
    a.bias = c.bias, a.bias_row = c.bias_row, a.bias_zero = c.bias_zero;
    a.sequences = c.sequences, a.heads = l.heads, a.kv_heads = l.kv_heads, a.dim = l.dim;
    a.left = l.left, a.right = l.right, a.threads = c.threads, a.scale = l.scale;
    return a;
}

Paged pages_of(const LayerCall &c, const LayerScratch &s, int element) {
    const Layer &l = *c.layer;
    const int64_t own = int64_t(l.heads) * l.dim, shared = int64_t(l.kv_heads) * l.dim;
    Paged p = {};
    if (c.table->attends) p.q = c.chosen ? s.picked : s.qkv, p.q_row = c.chosen ? own : l.qkv.outputs;
    p.k = s.qkv + own * element, p.v = s.qkv + (own + shared) * element, p.out = s.mixed;
    p.k_row = p.v_row = l.qkv.outputs, p.q_head = p.k_head = p.v_head = l.dim;
    p.k_pages = c.k_pages, p.v_pages = c.v_pages, p.table = c.table->pages, p.table_row = c.table->row;
    p.cu_queries = c.cu_queries, p.cu_keys = c.cu_keys, p.cu_rows = c.table->cu_rows;
    p.bias = c.bias, p.bias_row = c.bias_row, p.bias_zero = c.bias_zero;
    p.sequences = c.sequences, p.heads = l.heads, p.kv_heads = l.kv_heads, p.dim = l.dim;
    p.left = l.left, p.right = l.right, p.threads = c.threads, p.scale = l.scale;
    return p;
}

}  // namespace

// Computes a layer. Returns 0, or 1 if scratch could not be allocated or no kernel supports this type; `out` is then incomplete.
extern "C" __attribute__((visibility("default"))) int shoal_layer(const LayerCall *given, int set, int type) {
    const LayerKernel *kernel = layer_kernel_of(set, type);
    if (kernel == nullptr) return 1;
    LayerCall call = *given;
    const Layer &layer = *call.layer;
    const bool turns = layer.q_norm || call.cos;
    int64_t longest = 0;
    for (int i = 0; i < call.sequences; i++) longest = most(longest, call.cu_keys[i + 1] - call.cu_keys[i]);
    const Kernel &attend = kernel_of(set, type);
    const int64_t most_rows = tile_rows(layer, kernel->element);
    // The size also suffices if fewer threads start than were requested: no more is shared then.
    const Division asked(call.queries, most_rows, call.threads);
    Divided counted = {nullptr}, shared = {nullptr};
    divide_shared(counted, call, asked, kernel->element);
    Memory given_back;
    shared.memory = (counted.used > MAX_KEPT_BYTES ? given_back : shared_memory).at_least(counted.used);
    if (shared.memory == nullptr) return 1;
    LayerScratch scratch = divide_shared(shared, call, asked, kernel->element);
    const Attention attention = attention_of(call, scratch, kernel->element);
    const Tasks tasks(attention);
    const bool stores = call.table != nullptr, is_paged = stores && call.table->attends;
    const PagedKernel &pages = paged_kernel_of(set, type);
    const Paged paged = stores ? pages_of(call, scratch, kernel->element) : Paged{};
    const int64_t paged_tasks = stores ? int64_t(call.sequences) * layer.kv_heads : 0, own_tasks = is_paged ? 0 : tasks.count();
    const size_t room = most(is_paged ? 0 : attend.room(attention, longest), is_paged ? pages.room(paged, longest) : 0);
    std::atomic<int64_t> next[4] = {};
    std::atomic<bool> lacks_memory{false};
    const auto work = [&](int thread, const auto &wait) {
        const Division before(call.rows, most_rows, call.threads), after(call.queries, most_rows, call.threads);
        Divided sizes = {nullptr}, own = {nullptr};
        divide_own(sizes, scratch, call, before, after, kernel->element);
        own.memory = memory.at_least(sizes.used + room);
        if (own.memory == nullptr) lacks_memory = true;
        wait();
        if (lacks_memory) return;
        const LayerScratch s = divide_own(own, scratch, call, before, after, kernel->element);
        // Calls of(scratch, tile, wait) for the tiles of this thread. With groups, all threads of a group call it for the same tile at once.
        const auto tiles_of = [&](const Division &division, std::atomic<int64_t> &next, const auto &of) {
            if (division.members == 1) {
                for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < division.tiles;)
                    of(s, division.tile(number, 0), [] {});
            } else {
                const int group = thread / division.members;
                Tile tile = {0, 0, 0, 1};  // the empty tile of a thread that belongs to no group
                if (group < division.groups) tile = division.tile(group, thread % division.members);
                LayerScratch mine = s;
                mine.total += tile.from * layer.qkv.inputs * kernel->element;
                mine.inner += tile.from * layer.down.inputs * kernel->element;
                of(mine, tile, wait);
            }
        };
        tiles_of(before, next[0], [&](const LayerScratch &s, const Tile &tile, const auto &wait) {
            kernel->project(call, s, tile);
            if (turns) wait(), kernel->turn(call, s, tile);
        });
        wait();
        if (call.chosen) {
            kernel->pick(call, s, {0, call.queries, thread, call.threads});
            wait();
        }
        for (int64_t number; (number = next[3].fetch_add(1, std::memory_order_relaxed)) < paged_tasks;)
            pages.attend(paged, int32_t(number / layer.kv_heads), int32_t(number % layer.kv_heads), own.memory + own.used);
        Task task;
        for (int64_t number; (number = next[1].fetch_add(1, std::memory_order_relaxed)) < own_tasks;)
            if (tasks.get(number, task)) attend.attend(attention, task, own.memory + own.used);
        wait();
        tiles_of(after, next[2], [&](const LayerScratch &s, const Tile &tile, const auto &wait) {
            kernel->attention_out(call, s, tile);
            wait();
            kernel->up(call, s, tile);
            wait();
            kernel->down(call, s, tile);
            if (layer.post) wait(), kernel->end(call, s, tile);
        });
    };
    if (call.threads > 1) {
#pragma omp parallel num_threads(given->threads)
        {
#pragma omp single
            call.threads = omp_get_num_threads();  // may be fewer than requested
            work(omp_get_thread_num(), [] {
#pragma omp barrier
            });
        }
    } else {
        work(0, [] {});
    }
    return lacks_memory;
}
