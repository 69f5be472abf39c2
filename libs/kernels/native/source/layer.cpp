// The entry point of a whole layer: scratch, threads and the order of its steps. Compiled for any x86-64 CPU.
#include "layer.h"

#include "tasks.h"

namespace {

thread_local Memory shared_memory, memory;

const LayerKernel *layer_kernel_of(int set, int type) {
    if (type == BFLOAT16) return set == AVX512_BF16 ? &avx512_bf16_layer_bfloat16 : nullptr;
    return set >= AVX512 ? &avx512_layer_float32 : nullptr;
}

int64_t widest(const Layer &l) { return most(most(l.qkv.inputs, l.out.inputs), most(l.up.inputs, l.down.inputs)); }

// Divides memory into parts that begin at multiples of 64 bytes; called with none, counts the bytes.
struct Divided {
    char *memory;
    size_t used = 0;
    char *take(int64_t bytes) {
        char *part = memory + used;
        used += size_t(up(bytes, 64));
        return part;
    }
};

LayerScratch divide(Divided &shared, const LayerCall &c, int element) {
    const Layer &l = *c.layer;
    const int64_t own = int64_t(l.heads) * l.dim, hidden = l.qkv.inputs;
    LayerScratch s = {};
    s.qkv = shared.take(c.rows * l.qkv.outputs * element);
    s.picked = shared.take(c.chosen ? c.queries * own * element : 0);
    s.base = shared.take(c.chosen ? c.queries * hidden * element : 0);
    s.mixed = shared.take(c.queries * most(own, hidden) * element);
    s.total = shared.take(c.queries * hidden * element);
    s.inner = shared.take(c.queries * l.down.inputs * element);
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

}  // namespace

// 0: done. 1: no memory for scratch, or no kernel for this type; `out` is not complete.
extern "C" __attribute__((visibility("default"))) int shoal_layer(const LayerCall *given, int set, int type) {
    const LayerKernel *kernel = layer_kernel_of(set, type);
    if (kernel == nullptr) return 1;
    LayerCall call = *given;
    const Layer &layer = *call.layer;
    Divided counted = {nullptr};
    divide(counted, call, kernel->element);
    Divided shared = {shared_memory.at_least(counted.used)};
    if (shared.memory == nullptr) return 1;
    const LayerScratch scratch = divide(shared, call, kernel->element);
    const Attention attention = attention_of(call, scratch, kernel->element);
    const Kernel &attend = kernel_of(set, type);
    const Tasks tasks(attention);
    const int64_t normed = up(call.rows * layer.qkv.inputs * kernel->element, 64);
    const size_t own = size_t(normed + Blocks(call.rows).count * 16 * up(widest(layer), 16) * 4);
    int64_t longest = 0;
    for (int i = 0; i < call.sequences; i++) longest = most(longest, call.cu_keys[i + 1] - call.cu_keys[i]);
    const bool turns = layer.q_norm || call.cos;
    std::atomic<int64_t> next{0};
    std::atomic<bool> lacks_memory{false};
    const auto work = [&](int thread, const auto &wait) {
        char *mine = memory.at_least(own + attend.room(attention, longest));
        if (mine == nullptr) lacks_memory = true;
        wait();
        if (lacks_memory) return;
        LayerScratch s = scratch;
        s.normed = mine, s.packed = mine + normed;
        kernel->project(call, s, thread);
        wait();
        if (turns) kernel->turn(call, s, thread), wait();
        if (call.chosen) {
            if (thread == 0) kernel->pick(call, s);
            wait();
        }
        Task task;
        for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < tasks.count();)
            if (tasks.get(number, task)) attend.attend(attention, task, mine + own);
        wait();
        kernel->attention_out(call, s, thread);
        wait();
        kernel->up(call, s, thread);
        wait();
        kernel->down(call, s, thread);
        if (layer.post) wait(), kernel->end(call, s, thread);
    };
    if (call.threads > 1) {
#pragma omp parallel num_threads(given->threads)
        {
#pragma omp single
            call.threads = omp_get_num_threads();  // there may be fewer than were asked for
            work(omp_get_thread_num(), [] {
#pragma omp barrier
            });
        }
    } else {
        work(0, [] {});
    }
    return lacks_memory;
}
