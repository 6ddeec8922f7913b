// A rank without a layer: pushes microbatches, takes a trivial expert, publishes, waits. Proves and times dispatch and combine
// alone, for the communication model that it is compiled for (collective.cuh). The megakernel calls the same four functions.
// Order of the stages: megakernel/pipeline.py, schedule.
//
// The trivial expert multiplies a row by the number of its choices that live on this rank, so that the sum of a token is its row
// times the number of its valid choices: exact in bfloat16 for small integers. Waits, signals, reads, writes: those of the model,
// and the caller's output [num_tokens, H]. With `verify` the tokens are hashes of (rank, magic, token, column), every received
// row and every sum is compared, and each stage may begin with a random delay.
#include <cuda_bf16.h>

#include "collective.cuh"

namespace inc {

constexpr int RANK_THREADS = 512;

__device__ inline uint32_t hash(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

// Sixteen bytes of the row of a token: eight integers from -8 to 7.
__device__ inline uint4 hashed_row(uint32_t seed, int rank, uint64_t magic, int token, int column) {
    uint32_t pairs[4];
    uint32_t bits = hash(seed ^ hash(uint32_t(magic) ^ hash(rank << 20 ^ token) ^ column * 0x9e3779b9u));
#pragma unroll
    for (int i = 0; i < 4; ++i, bits >>= 8) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(int(bits & 15) - 8, int(bits >> 4 & 15) - 8);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ inline uint32_t times(uint32_t pair, float factor) {
    const __nv_bfloat162 product =
        __floats2bfloat162_rn(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor);
    return *reinterpret_cast<const uint32_t*>(&product);
}

__device__ inline uint4 times(uint4 row, float factor) {
    return {times(row.x, factor), times(row.y, factor), times(row.z, factor), times(row.w, factor)};
}

__device__ inline bool differ(uint4 a, uint4 b) { return a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w; }

__device__ inline void count_wrong(uint64_t* counter, bool wrong) {
    if (wrong) atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull);
}

// State of one call on this rank.
struct Exchange {
    const Heap& heap;
    const ExchangeArguments& call;
    const Team team;
    const uint64_t first_magic;

    __device__ int first_token(int number) const { return min(cut_of(heap, call).first_token(number), call.num_tokens); }
    __device__ int num_tokens(int number) const { return first_token(number + 1) - first_token(number); }
    __device__ ExchangeResult& result() const { return *reinterpret_cast<ExchangeResult*>(call.result); }
    __device__ int first_warp() const { return team.block * team.num_warps() + team.warp(); }
    __device__ int num_warps() const { return team.num_blocks * team.num_warps(); }

    __device__ void note(int number, uint64_t ExchangeMoment::* stage) const {
        if (call.timeline && team.block == 0 && team.thread == 0)
            reinterpret_cast<ExchangeMoment*>(call.timeline)[number].*stage = clock64();
    }

    // A random wait before a stage, the same for all threads of a block, mostly short.
    __device__ void delay(int number, int stage) const {
        if (call.delay_ns == 0) return;
        const float draw =
            (hash(call.seed ^ hash(heap.pe << 8 ^ team.block) ^ hash(uint32_t(first_magic) + number * 4 + stage)) & 0xffff) /
            65536.0f;
        if (team.thread == 0) __nanosleep(uint32_t(draw * draw * draw * draw * call.delay_ns));
        team.sync();
    }
};

// With `verify` every block makes all tokens before it pushes, so that no warp reads what another block has yet to write.
__device__ inline void make_tokens(const Exchange& x, uint64_t magic, char* tokens, int num_tokens) {
    const int words = x.heap.row_bytes / 16;
    for (int at = x.team.thread; at < num_tokens * words; at += x.team.num_threads)
        store_16_bytes(tokens + at * 16ull, hashed_row(x.call.seed, x.heap.pe, magic, at / words, at % words));
    x.team.sync();
}

__device__ inline void send(const Exchange& x, int number) {
    const uint64_t magic = x.first_magic + number;
    const int first = x.first_token(number), num_tokens = x.num_tokens(number);
    char* tokens = reinterpret_cast<char*>(x.call.tokens) + uint64_t(first) * x.heap.row_bytes;
    x.delay(number, 0);
    if (x.call.verify) make_tokens(x, magic, tokens, num_tokens);
    x.note(number, &ExchangeMoment::push);
    const RoutedTokens routed{tokens,
                              reinterpret_cast<const int32_t*>(x.call.expert_ids) + first * x.call.top_k,
                              reinterpret_cast<const uint32_t*>(x.call.weights) + first * x.call.top_k,
                              num_tokens,
                              x.call.top_k,
                              x.call.num_experts,
                              x.call.bound_tokens,
                              x.call.layer,
                              x.call.edge_tokens};
    push_microbatch(x.heap, x.team, magic, routed);
}

// Choices of a record that live on this rank.
__device__ inline int local_choices(const Heap& heap, const char* record, int num_experts) {
    const int32_t* experts = reinterpret_cast<const int32_t*>(record + RoutingRecord::expert_ids_offset(heap.top_k));
    const int small = num_experts / heap.num_ranks, extra = num_experts % heap.num_ranks;
    const int first = heap.pe * small + min(heap.pe, extra), end = first + small + (heap.pe < extra);
    int count = 0;
    for (int choice = 0; choice < heap.top_k; ++choice) count += experts[choice] >= first && experts[choice] < end;
    return count;
}

__device__ inline bool experts(const Exchange& x, int number) {
    const uint64_t magic = x.first_magic + number;
    ReceivedRows received;
    if (!wait_for_expert_rows(x.heap, x.team, magic, received)) return false;
    x.note(number, &ExchangeMoment::rows);
    x.delay(number, 1);
    if (x.call.mode == int(ExchangeMode::DISPATCH) && !x.call.verify) return true;
    const int lane = x.team.lane();
    for (int i = x.first_warp(); i < received.num_rows; i += x.num_warps()) {
        const int row = received.row(i);
        const char* record = received.records + uint64_t(row) * x.heap.record_bytes;
        const int token = reinterpret_cast<const int32_t*>(record)[0], sender = reinterpret_cast<const int32_t*>(record)[1];
        const float factor = local_choices(x.heap, record, x.call.num_experts);
        if (GAPS && factor == 0) continue;  // a place without a row
        char* words = received.rows + uint64_t(row) * x.heap.row_bytes;
        for (int column = lane; column < x.heap.row_bytes / 16; column += WARP) {
            const uint4 word = load_16_bytes(words + column * 16);
            if (x.call.verify)
                count_wrong(&x.result().wrong_rows, differ(word, hashed_row(x.call.seed, sender, magic, token, column)));
            store_16_bytes(words + column * 16, times(word, factor));
        }
    }
    return true;
}

__device__ inline bool finish(const Exchange& x, int number) {
    const uint64_t magic = x.first_magic + number;
    const int first = x.first_token(number), num_tokens = x.num_tokens(number);
    TokenSums sums;
    if (!wait_for_token_sums(x.heap, x.team, magic, sums)) return false;
    x.note(number, &ExchangeMoment::sums);
    x.delay(number, 2);
    char* output = reinterpret_cast<char*>(x.call.output) + uint64_t(first) * x.heap.row_bytes;
    for (int token = first_token_of_warp(x.heap, x.team); token < num_tokens;
         token = next_token_of_warp(x.heap, x.team, token)) {
        const int32_t* ids = reinterpret_cast<const int32_t*>(x.call.expert_ids) + (first + token) * x.call.top_k;
        int valid = 0;
        for (int choice = 0; choice < x.call.top_k; ++choice) valid += ids[choice] >= 0;
        const TokenSums::OfToken sum = sums.of(x.heap, token);
        for (int column = x.team.lane(); column < x.heap.row_bytes / 16; column += WARP) {
            const uint64_t at = uint64_t(token) * x.heap.row_bytes + column * 16;
            const uint4 word = sum.words(x.heap, column);
            if (x.call.verify) {
                const uint4 row = hashed_row(x.call.seed, x.heap.pe, magic, token, column);
                count_wrong(&x.result().wrong_sums, differ(word, valid ? times(row, valid) : make_uint4(0, 0, 0, 0)));
            }
            store_16_bytes(output + at, word);
        }
    }
    return true;
}

// Microbatches that a rank sends ahead of those whose rows it takes. Half an exchange keeps the whole ring in flight; without sums
// a dispatch that nobody holds back until all ranks are there (relayed, cut through) must leave half of it free, as no one but the
// receivers says that the rows in a slot have been read.
__device__ inline int lag_of_experts(const Exchange& x, ExchangeMode mode) {
    if (mode == ExchangeMode::COMBINE) return 0;
    if (mode == ExchangeMode::BOTH) return (x.heap.depth - 1) / 2;
    return RELAYED || CUT_THROUGH ? max(0, x.heap.depth - 2) / 2 : x.heap.depth - 1;
}

// Without sums nothing else holds back a block that has nothing to send or to keep. Returns false after an abort.
__device__ inline bool all_blocks_are_through(const Exchange& x, int number) {
    const uint64_t magic = x.first_magic + number;
    return meet(x.heap, x.team, Packet::ROUTED, slot_of(magic, x.heap.depth), magic, [](int) { return true; });
}

// The stages of all microbatches in the order of megakernel/pipeline.py.
__device__ inline void run(const Exchange& x) {
    const ExchangeMode mode = ExchangeMode(x.call.mode);
    const int finish_lag = x.heap.depth - 1, experts_lag = lag_of_experts(x, mode);
    for (int step = 0; step < x.call.num_microbatches + finish_lag; ++step) {
        if (step < x.call.num_microbatches && mode != ExchangeMode::COMBINE) send(x, step);
        if (const int number = step - experts_lag; number >= 0 && number < x.call.num_microbatches) {
            if (mode != ExchangeMode::COMBINE && !experts(x, number)) return;
            if ((CUT_THROUGH || LOCAL_BYPASS) && mode == ExchangeMode::DISPATCH && !all_blocks_are_through(x, number)) return;
            x.note(number, &ExchangeMoment::publish);
            if (mode != ExchangeMode::DISPATCH) publish_partial_sums(x.heap, x.team, x.first_magic + number);
        }
        if (const int number = step - finish_lag; number >= 0 && mode != ExchangeMode::DISPATCH && !finish(x, number)) return;
    }
}

}  // namespace inc

// Launch: RANK_THREADS threads, as many blocks as the placement gives, all resident.
extern "C" __global__ void __launch_bounds__(inc::RANK_THREADS, 1)
    exchange_kernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::ExchangeArguments call) {
    using namespace inc;
    uint64_t* counter = own<uint64_t>(heap, RankRegion::magic);
    const Exchange exchange{heap, call, whole_block(), *counter + 1};
    if (aborted(heap)) return;
    ExchangeResult& result = exchange.result();
    const bool clerk = exchange.team.block == 0 && exchange.team.thread == 0;
    if (clerk) result.clock_begin = clock64(), result.timer_begin = timer_ns();
    run(exchange);
    if (clerk) result.clock_end = clock64(), result.timer_end = timer_ns();
    if (finish_packet(heap, exchange.team, Packet::LEAVE, 0, exchange.team.num_blocks) && exchange.team.thread == 0)
        *counter += call.num_microbatches;
}

// A rank leaves: its stop word on every switch says which magic it will not send. One thread.
extern "C" __global__ void stop_kernel(const __grid_constant__ inc::Heap heap) {
    using namespace inc;
    Link::quiet();
    const uint64_t word = signal_word(*own<uint64_t>(heap, RankRegion::magic) + 1, true);
    for (int plane = 0; plane < PLANES; ++plane) {
        signal(heap, {heap.dispatch_switch + plane, offset_of(heap, DispatchSwitchRegion::stop, heap.pe)}, word);
        signal(heap, {heap.combine_switch + plane, offset_of(heap, CombineSwitchRegion::stop, heap.pe)}, word);
    }
}
