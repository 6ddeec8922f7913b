// INC all-to-all phased, rank side. Twin: inc_runtime/collectives/inc_all_to_all_phased.py; one dispatch and one combine switch.
//
// Dispatch: the blocks meet, one of them asks for a place on the switch, and all put the microbatch into it. Combine: the request of
// a rank carries the routing of its tokens and says that its own partial sums are ready. Waits on: dispatch_grants,
// expert_rows_arrived of every sender, barrier_released, token_sums_arrived. Signals: dispatch_requests, tokens_arrived,
// barrier_joined, combine_requests. Writes: as inc_all_to_all.cuh, and plan_header and plan_routing on the combine switch.
// Cost: results/data/collectives_*.csv.
#pragma once

#include "inc_all_to_all.cuh"
#include "phases.cuh"

namespace inc::inc_all_to_all_phased {

using inc_all_to_all::TokenSums;
using inc_all_to_all::wait_for_token_sums;

// Put the microbatch into the inbox slot that the dispatch switch grants. Waits for the grant.
__device__ inline void push_microbatch(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed) {
    int place;
    if (meet_with_grant(heap, team, Packet::PLACE_GRANTED, magic, place))
        inc_all_to_all::put_tokens(heap, team, magic, routed, place);
}

// Rows that this lane's rank has sent; its word has arrived. A word of a later microbatch says that this one brought nothing: who
// sent rows here cannot be further before their partial sums are back.
__device__ inline int rows_received(const Heap& heap, uint64_t magic, int lane) {
    const uint64_t slot = slot_of(magic, heap.depth);
    if (lane >= heap.num_ranks) return 0;
    if (LOCAL_BYPASS && lane == heap.pe) return num_own_tokens(heap, slot);
    const uint64_t word = load_word(own<char>(heap, RankRegion::expert_rows_arrived, slot, 0, lane));
    if (word != signal_word(magic, true)) return 0;
    return int(own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, lane)[Header::NUM_ROWS]);
}

// Wait for the rows of every sender, each in a run of its own, then join the INC barrier if the call has one. Returns false after an
// abort.
__device__ inline bool wait_for_expert_rows(const Heap& heap, const Team& team, uint64_t magic, ReceivedRows& received) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const Watch watch{own<char>(heap, RankRegion::expert_rows_arrived, slot, 0, 0),
                      place_of(heap, RankRegion::expert_rows_arrived).stride[2],
                      every_rank(heap),
                      true,
                      Tag::EXPERT_ROWS,
                      magic,
                      nullptr};
    if (wait_until_some(heap, team, watch).outcome != Outcome::ARRIVED) return false;
    received = received_runs(heap, team, slot, rows_received(heap, magic, team.lane()));
    team.sync();
    return !heap.barrier_after_dispatch || join_barrier(heap, team, magic);
}

// Send the combine switch the request of this rank. Every block calls it once it has written its share of the partial sums.
__device__ inline void publish_partial_sums(const Heap& heap, const Team& team, uint64_t magic) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int64_t* header = own<int64_t>(heap, RankRegion::tokens_header, slot, 0);
    const int num_tokens = int(header[Header::NUM_ROWS]), lane = team.lane();
    const auto plan = [&](int first_token) {
        return Remote{heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_routing, slot, 0, heap.pe, first_token)};
    };
    for (int first = team.number_of_warp() * WARP; first < num_tokens; first += team.total_warps() * WARP) {
        const int num_bytes = min(WARP, num_tokens - first) * heap.record_bytes;
        warp_passes_port(heap, heap.pe, Port::EGRESS, num_bytes, lane);
        Link::put_words(heap, own<char>(heap, RankRegion::tokens_routing, slot, first), num_bytes, lane, 1,
                        [&](int) { return plan(first); });
    }
    if (team.block == 0 && team.warp() == 0)
        Link::put_words(heap, reinterpret_cast<const char*>(header), HEADER_FIELDS * 8, lane, 1, [&](int) {
            return Remote{heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_header, slot, 0, heap.pe)};
        });
    if (finish_packet(heap, team, Packet::PUBLISH, slot, team.num_blocks) && lane == 0)
        signal(heap, {heap.combine_switch, offset_of(heap, CombineSwitchRegion::combine_requests, slot, heap.pe)},
               signal_word(magic, true));
}

}  // namespace inc::inc_all_to_all_phased
