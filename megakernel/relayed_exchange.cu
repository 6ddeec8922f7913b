// Dispatch and combine of the Baseline where ranks share a GPU and the library has no collectives: one launch each, on stream,
// through the relay switches, so that the bytes cross the same ports as everyone else's. One microbatch is the whole batch, on a
// heap of depth 1. The four functions are those of the communication model (inc_runtime/device/collective.cuh).
// Waits on, signals: as all_to_all.cuh. Reads: the caller's tokens, ids and weights; the partial sums over the received rows.
// Writes: expert_rows, expert_rows_routing, received_partial_sums of this heap.
// Cost: not measured yet (right on one GPU with two ranks and two relays: tests/gpu/relayed_baseline_program.py).
#include "collective.cuh"

namespace inc {
constexpr int EXCHANGE_THREADS = 512;
}

// Launch: EXCHANGE_THREADS threads, as many blocks as the placement gives, all resident. Rows and records of all ranks are here
// when it ends.
extern "C" __global__ void __launch_bounds__(inc::EXCHANGE_THREADS, 1)
    relayed_dispatch(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::ExchangeArguments call) {
    using namespace inc;
    const Team team = whole_block();
    const uint64_t magic = *own<uint64_t>(heap, RankRegion::magic) + 1;
    if (aborted(heap)) return;
    push_microbatch(heap, team, magic,
                    {reinterpret_cast<const char*>(call.tokens), reinterpret_cast<const int32_t*>(call.expert_ids),
                     reinterpret_cast<const uint32_t*>(call.weights), call.num_tokens, call.top_k, call.num_experts,
                     call.bound_tokens, call.layer, 0});
    ReceivedRows received;
    wait_for_expert_rows(heap, team, magic, received);
}

// Launch: as above. The sums of all ranks are here when it ends; then the counter of microbatches goes on.
extern "C" __global__ void __launch_bounds__(inc::EXCHANGE_THREADS, 1)
    relayed_combine(const __grid_constant__ inc::Heap heap) {
    using namespace inc;
    const Team team = whole_block();
    uint64_t* counter = own<uint64_t>(heap, RankRegion::magic);
    const uint64_t magic = *counter + 1;
    if (aborted(heap)) return;
    publish_partial_sums(heap, team, magic);
    TokenSums sums;
    if (!wait_for_token_sums(heap, team, magic, sums)) return;
    if (finish_packet(heap, team, Packet::LEAVE, 0, team.num_blocks) && team.thread == 0) *counter = magic;
}
