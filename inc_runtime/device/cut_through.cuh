// Cut-through dispatch, rank side: a microbatch goes in groups, each with a word of its own. Twin:
// inc_runtime/collectives/cut_through.py; chosen by INC_CUT_THROUGH.
//
// A block puts whole groups, so that no block waits for another; each brings the header, as groups come in any order. Waits on: expert_group_arrived of every group of every sender. Signals:
// group_arrived on the dispatch switch, also for a group without tokens. Reads, writes: as inc_all_to_all.cuh. Why a slot is free
// when its sums are back: see the twin. Cost: a fence and a flag per group; not measured yet.
#pragma once

#include "local_bypass.cuh"

namespace inc::cut_through {

// Put the groups of this block into slot `inbox` of the dispatch switch. `put_token(token)`: by one warp; `put_header()`: by one warp.
template <class PutToken, class PutHeader>
__device__ inline void put_groups(const Heap& heap, const Team& team, uint64_t magic, int num_tokens, PutToken put_token,
                                  PutHeader put_header) {
    const uint64_t slot = slot_of(magic, heap.depth);
    for (int group = team.block; group < heap.row_groups; group += team.num_blocks) {
        const int first = group * heap.row_group_tokens, end = min(first + heap.row_group_tokens, num_tokens);
        for (int token = first + team.warp(); token < end; token += team.num_warps()) put_token(token);
        if (team.warp() == team.num_warps() - 1) put_header();
        team.sync();
        if (team.warp() != 0) continue;
        Link::quiet();
        if (team.lane() == 0)
            signal(heap, {heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::group_arrived, slot, heap.pe, group)},
                   signal_word(magic, end > first));
    }
}

// Tokens that this lane's rank has sent; the word of its first group has arrived. With local bypass this rank's own are here.
__device__ inline int tokens_of_sender(const Heap& heap, uint64_t slot, int lane) {
    if (lane >= heap.num_ranks) return 0;
    if (LOCAL_BYPASS && lane == heap.pe) return num_own_tokens(heap, slot);
    const bool payload = has_payload(load_word(own<char>(heap, RankRegion::expert_group_arrived, slot, 0, lane)));
    return payload ? int(own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, lane)[Header::NUM_ROWS]) : 0;
}

// Compare the header of this lane's rank with this rank's own. Where it brought none the row count becomes 0, by one block.
__device__ inline bool check_sender(const Heap& heap, const Team& team, uint64_t slot, uint64_t magic, int sender, int num_tokens) {
    if (sender >= heap.num_ranks || (LOCAL_BYPASS && sender == heap.pe)) return true;
    if (num_tokens == 0) {
        if (team.block == 0) own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, sender)[Header::NUM_ROWS] = 0;
        return true;
    }
    return check_header_of_sender(heap, slot, magic, sender);
}

// Wait for every group of every sender, each in a run of its own; places without a local expert hold no row. Returns false after an
// abort.
__device__ inline bool wait_for_groups(const Heap& heap, const Team& team, uint64_t magic, ReceivedRows& received) {
    constexpr int AT_ONCE = WARP - 1;  // the last lane watches the abort word
    const uint64_t slot = slot_of(magic, heap.depth), stride = place_of(heap, RankRegion::expert_group_arrived).stride[3];
    bool good = true;
    int window = 0;
    for (int sender = 0; sender < heap.num_ranks; ++sender) {
        for (int group = 0; group < heap.row_groups; group += AT_ONCE, ++window) {
            if (!good || window % team.num_warps() != team.warp()) continue;
            const uint32_t pending = (1u << min(AT_ONCE, heap.row_groups - group)) - 1;
            const char* flags = own<char>(heap, RankRegion::expert_group_arrived, slot, 0, sender, group);
            Watch watch{flags, stride, pending, true, Tag::EXPERT_ROWS, magic, nullptr};
            watch.sender = sender;
            good = poll(heap, watch, team.lane()).outcome == Outcome::ARRIVED;
        }
    }
    if (!team.all(good)) return false;
    const int lane = team.lane(), num_tokens = tokens_of_sender(heap, slot, lane);
    if (team.warp() == 0) good = check_sender(heap, team, slot, magic, lane, num_tokens);
    received = received_runs(heap, team, slot, num_tokens);
    return team.all(good);
}

}  // namespace inc::cut_through
