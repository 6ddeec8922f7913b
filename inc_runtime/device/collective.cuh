// The rank-side functions of the communication model that a kernel is compiled for: push_microbatch, wait_for_expert_rows,
// publish_partial_sums, wait_for_token_sums. Twin: rank_programs in inc_runtime/collectives/__init__.py. Macros from
// compile_cache.py: INC_RELAYED for the plain models, INC_PHASED for the phased ones.
#pragma once

#include "inc_all_to_all.cuh"

#if defined(INC_RELAYED)
#define INC_RELAYED_OR_NOT true
#if defined(INC_PHASED)
#include "all_to_all_phased.cuh"
#define INC_COLLECTIVE all_to_all_phased
#else
#include "all_to_all.cuh"
#define INC_COLLECTIVE all_to_all
#endif
#else
#define INC_RELAYED_OR_NOT false
#if defined(INC_PHASED)
#include "inc_all_to_all_phased.cuh"
#define INC_COLLECTIVE inc_all_to_all_phased
#else
#define INC_COLLECTIVE inc_all_to_all
#endif
#endif

namespace inc {

constexpr bool RELAYED = INC_RELAYED_OR_NOT;

#if defined(INC_PHASED)
constexpr bool PHASED = true;
#else
constexpr bool PHASED = false;
#endif

using inc_all_to_all::expert_rows_arrived;
using INC_COLLECTIVE::publish_partial_sums;
using INC_COLLECTIVE::push_microbatch;
using INC_COLLECTIVE::TokenSums;
using INC_COLLECTIVE::wait_for_expert_rows;
using INC_COLLECTIVE::wait_for_token_sums;

// `visit(token)` for every token of a microbatch, by one warp each, before `push_microbatch`: it may still choose the token's
// experts. All blocks of the team call it; returns false after an abort.
template <class Visit>
__device__ inline bool for_each_token_to_push(const Heap& heap, const Team& team, uint64_t magic, int num_tokens, Visit visit) {
    if constexpr (!RELAYED && !GAPS) {  // the warp that visits a token is the one that puts its record
        inc_all_to_all::for_each_record(heap, team, num_tokens, visit);
        return true;
    } else {
        for (int token = first_token_of_warp(heap, team); token < num_tokens; token = next_token_of_warp(heap, team, token))
            visit(token);
        if (!RELAYED) return true;  // with local bypass or cut-through, too
        return meet(heap, team, Packet::ROUTED, slot_of(magic, heap.depth), magic, [](int) { return true; });
    }
}

}  // namespace inc
