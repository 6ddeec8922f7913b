// All-to-All phased through a relay switch, rank side. Twin: inc_runtime/collectives/all_to_all_phased.py.
//
// Dispatch: the last meeting of the blocks before they send waits for a grant. Combine: one block asks the relay for this rank's
// phase; then the blocks meet once for each phase that the relay opens, in whatever order, and return that rank its partial sums.
// Waits on: dispatch_grants, barrier_released, phase_opened, and what all_to_all.cuh waits on. Signals: dispatch_requests,
// barrier_joined, combine_requests. Cost: results/data/collectives_*.csv.
#pragma once

#include "all_to_all.cuh"
#include "phases.cuh"

namespace inc::all_to_all_phased {

using all_to_all::TokenSums;
using all_to_all::wait_for_token_sums;

// Send each rank its tokens once the relay has granted this rank a place.
__device__ inline void push_microbatch(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed) {
    int place;
    all_to_all::push_messages(heap, team, magic, routed,
                              [&]() { return meet_with_grant(heap, team, Packet::ROWS_PLACED, magic, place); });
}

// Wait for the messages of all ranks, then join the barrier if the call has one. Returns false after an abort.
__device__ inline bool wait_for_expert_rows(const Heap& heap, const Team& team, uint64_t magic, ReceivedRows& received) {
    if (!all_to_all::wait_for_expert_rows(heap, team, magic, received)) return false;
    return !heap.barrier_after_dispatch || join_barrier(heap, team, magic);
}

// Meet once one of the phases in `pending` is open; `owner` is the rank that it serves. Returns false after an abort.
__device__ inline bool meet_for_phase(const Heap& heap, const Team& team, uint64_t magic, const Messages& messages,
                                      uint32_t pending, int& owner) {
    const uint64_t slot = slot_of(magic, heap.depth), key = magic * (MAX_RANKS + 1) + heap.num_ranks - __popc(pending);
    const Watch watch{own<char>(heap, RankRegion::phase_opened, slot, 0, 0),
                      place_of(heap, RankRegion::phase_opened).stride[2],
                      pending,
                      false,
                      Tag::RELAY_PHASE,
                      magic,
                      nullptr};
    const bool good = meet(heap, team, Packet::PHASE_OPENED, slot, key, [&](int lane) {
        const Waited waited = poll(heap, watch, lane);
        if (waited.outcome != Outcome::ARRIVED) return false;
        const int opened = __ffs(waited.arrived) - 1;
        const int chunks = chunks_to_others(heap, only_message_to(heap, messages, opened, lane));
        number_chunks<CombineSwitchRegion>(heap, slot, chunks, lane);
        if (lane == 0) workspace(heap).granted_place[slot] = opened;
        return true;
    });
    owner = workspace(heap).granted_place[slot];
    return good;
}

// Ask for this rank's phase, and return partial sums to each token rank as its phase opens. Every block calls it once it has written
// its share.
__device__ inline void publish_partial_sums(const Heap& heap, const Team& team, uint64_t magic) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int lane = team.lane();
    const Messages messages = messages_to(heap, all_to_all::rows_received(heap, slot, lane), lane);
    bool good = meet(heap, team, Packet::SUMS_WRITTEN, slot, magic, [&](int) {
        fence_system();
        if (lane == 0)
            signal(heap, {heap.combine_switch, offset_of(heap, CombineSwitchRegion::combine_requests, slot, heap.pe)},
                   signal_word(magic, true));
        return true;
    });
    int owner;
    for (uint32_t pending = every_rank(heap); good && pending; pending &= ~(1u << owner)) {
        good = meet_for_phase(heap, team, magic, messages, pending, owner);
        if (good) all_to_all::return_partial_sums(heap, team, magic, only_message_to(heap, messages, owner, lane));
    }
}

}  // namespace inc::all_to_all_phased
