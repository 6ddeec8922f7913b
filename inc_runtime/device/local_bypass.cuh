// Local bypass, rank side: rows of a rank's own experts stay on it. Twin: inc_runtime/collectives/local_bypass.py; chosen by
// INC_LOCAL_BYPASS. Here what the in-network models do; the plain ones send no message to themselves (relayed.cuh, direct.cuh).
//
// Token t is pushed, kept and finished by one warp (first_token_of_warp), whatever the microbatch: so a warp that
// writes an own row over that of the slot's last microbatch has itself added its partial sum before, and no block waits for another.
// That all own rows stand is proved by the words of the dispatch switch: it raises them once this rank's push is there, too.
// Waits on, signals: nothing. Reads: the caller's tokens and choices. Writes: expert_rows, expert_rows_routing of this rank's own run;
// the table of ranks. Cost: one local store per own row, one record per token; not measured yet.
#pragma once

#include <climits>

#include "microbatch.cuh"
#include "routing.cuh"

namespace inc {

// The tokens of a microbatch that are this warp's, in rising order: every so many, or with cut-through those of its block's groups.
__device__ inline int first_token_of_warp(const Heap& heap, const Team& team) {
    if constexpr (!CUT_THROUGH) return team.number_of_warp();
    return team.warp() < heap.row_group_tokens ? team.block * heap.row_group_tokens + team.warp() : INT_MAX;
}

__device__ inline int next_token_of_warp(const Heap& heap, const Team& team, int token) {
    if constexpr (!CUT_THROUGH) return token + team.total_warps();
    const int group = token / heap.row_group_tokens, next = token + team.num_warps();
    if (next < (group + 1) * heap.row_group_tokens) return next;
    return (group + team.num_blocks) * heap.row_group_tokens + team.warp();
}

// Where the row of own token 0 stands in a slot: behind all that the switch can pack, or in the run of this rank.
__device__ inline uint64_t first_own_row(const Heap& heap) {
    return uint64_t(heap.phased || CUT_THROUGH ? heap.pe : heap.num_ranks - 1) * heap.microbatch_tokens;
}

// The ranks that need each own token of a microbatch, as a mask: [m_b].
__device__ inline uint32_t* ranks_of_own_tokens(const Heap& heap, uint64_t slot) {
    return reinterpret_cast<uint32_t*>(heap.ranks_of_token) + slot * heap.microbatch_tokens;
}

// Of a mask of ranks: whether this rank is among them, and whether another is.
__device__ inline bool needed_here(const Heap& heap, uint32_t ranks) { return ranks >> heap.pe & 1; }
__device__ inline bool needed_elsewhere(const Heap& heap, uint32_t ranks) { return (ranks & ~(1u << heap.pe)) != 0; }

// Note the ranks that need a token; the same in all lanes. One warp. An expert that does not exist is the switch's to report.
__device__ inline uint32_t note_ranks(const Heap& heap, uint64_t slot, const RoutedTokens& routed, int token, int lane) {
    const ExpertOwners owners = expert_owners(routed.num_experts, heap.num_ranks);
    uint32_t ranks = 0;
    for (int choice = lane; choice < routed.top_k; choice += WARP) {
        const int expert = routed.expert_ids[token * routed.top_k + choice];
        if (expert >= 0 && expert < routed.num_experts) ranks |= 1u << owners.rank_of(expert);
    }
    ranks = __reduce_or_sync(ALL_LANES, ranks);
    if (lane == 0) ranks_of_own_tokens(heap, slot)[token] = ranks;
    return ranks;
}

// Tokens that this rank itself brought to the microbatch in a slot. Twin: num_tokens_of.
__device__ inline int num_own_tokens(const Heap& heap, uint64_t slot) {
    return int(own<int64_t>(heap, RankRegion::tokens_header, slot, 0)[Header::NUM_ROWS]);
}

// What came in one packet through the switch, `num_rows` rows, then the run of the own tokens, those without an own expert too: no
// choice of them is local. Every warp calls it.
__device__ inline ReceivedRows with_own_rows(const Heap& heap, const Team& team, uint64_t slot, int num_rows) {
    int32_t* first = workspace(heap).received_first[slot];
    const int total = num_rows + num_own_tokens(heap, slot);
    if (team.thread == 0) first[0] = 0, first[1] = num_rows, first[2] = total;  // every block writes the same
    team.sync();
    return {own<char>(heap, RankRegion::expert_rows, slot),
            own<char>(heap, RankRegion::expert_rows_routing, slot),
            total,
            2,
            int(first_own_row(heap)),
            first};
}

}  // namespace inc
