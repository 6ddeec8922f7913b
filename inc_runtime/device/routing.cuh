// Which expert ranks a token goes to. Twin: inc_runtime/routing.py (expert_rank_membership) and LayerShape.experts_of_rank.
//
// Waits on, signals: nothing. Reads: expert ids of one token. Cost: loads of top_k ids, eight at a time.
#pragma once

#include "one_sided.cuh"

namespace inc {

// Experts are contiguous on a rank, the first E mod W ranks hold one more.
struct ExpertOwners {
    int num_experts, small, extra;

    __device__ int rank_of(int expert) const {
        const int cut = extra * (small + 1);
        return expert < cut ? expert / (small + 1) : extra + (expert - cut) / small;
    }
};

__device__ inline ExpertOwners expert_owners(int num_experts, int num_ranks) {
    return {num_experts, num_experts / num_ranks, num_experts % num_ranks};
}

// The ranks that hold an expert among `ids` [top_k], as a mask; -1 does not count. `bad`: an id that no rank holds, else -1.
__device__ inline uint32_t ranks_of_choices(const ExpertOwners& owners, const int32_t* ids, int top_k, int& bad) {
    constexpr int AT_ONCE = 8;  // ids loaded before the first is looked at
    uint32_t mask = 0;
    for (int start = 0; start < top_k; start += AT_ONCE) {
        int some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) some[i] = start + i < top_k ? ids[start + i] : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (some[i] >= 0 && some[i] < owners.num_experts)
                mask |= 1u << owners.rank_of(some[i]);
            else if (some[i] != -1)
                bad = some[i];
        }
    }
    return mask;
}

// The ranks that token number `token` of `sender` goes to. An expert that does not exist is reported and reaches nobody.
__device__ inline uint32_t ranks_of_token(const Heap& heap, const ExpertOwners& owners, const int32_t* ids, int top_k, Tag tag,
                                          uint64_t magic, int sender, int token) {
    if (!heap.selective) return every_rank(heap);
    int bad = -1;
    const uint32_t mask = ranks_of_choices(owners, ids, top_k, bad);
    if (bad != -1) report_value(heap, ErrorKind::BAD_EXPERT, tag, magic, sender, token, owners.num_experts, bad);
    return mask;
}

}  // namespace inc
