// Credits of the phased collectives and the INC barrier, rank side. Twin: inc_runtime/collectives/phases.py.
//
// Waits on: dispatch_grants, barrier_released. Signals: dispatch_requests, barrier_joined. Cost: a round trip and what the switch
// makes the rank wait.
#pragma once

#include "one_sided.cuh"

namespace inc {

// Ask the dispatch switch for a place, and wait for it. One warp of one block, once a microbatch. Returns -1 after an abort.
__device__ inline int request_grant(const Heap& heap, uint64_t magic, int lane) {
    fence_system();
    if (lane == 0)
        signal(heap, {heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::dispatch_requests, heap.pe)},
               signal_word(magic, true));
    const uint32_t places = heap.ranks_per_phase == MAX_RANKS ? ALL_LANES : (1u << heap.ranks_per_phase) - 1;
    Watch watch{own<char>(heap, RankRegion::dispatch_grants, 0, 0),
                place_of(heap, RankRegion::dispatch_grants).stride[1],
                places,
                false,
                Tag::DISPATCH_GRANT,
                magic,
                nullptr};
    watch.sender = heap.dispatch_switch;
    const Waited waited = poll(heap, watch, lane);
    return waited.outcome == Outcome::ARRIVED ? __ffs(waited.arrived) - 1 : -1;
}

// Meet, and let one block ask for a place; `place` is the same for all. Returns false after an abort.
__device__ inline bool meet_with_grant(const Heap& heap, const Team& team, Packet packet, uint64_t magic, int& place) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const bool good = meet(heap, team, packet, slot, magic, [&](int lane) {
        const int granted = request_grant(heap, magic, lane);
        if (lane == 0) workspace(heap).granted_place[slot] = granted;
        return granted >= 0;
    });
    place = workspace(heap).granted_place[slot];
    return good;
}

// The INC barrier: return once every rank holds all its rows of the microbatch. Every block calls it; the first one joins. Returns
// false after an abort.
__device__ inline bool join_barrier(const Heap& heap, const Team& team, uint64_t magic) {
    if (team.block == 0 && team.thread == 0)
        signal(heap, {heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::barrier_joined, heap.pe)},
               signal_word(magic, true));
    Watch watch{own<char>(heap, RankRegion::barrier_released, 0), 0, 1, true, Tag::DISPATCH_BARRIER, magic, nullptr};
    watch.sender = heap.dispatch_switch;
    return wait_until_some(heap, team, watch).outcome == Outcome::ARRIVED;
}

}  // namespace inc
