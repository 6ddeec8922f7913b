// The rank-side functions of the communication model that a kernel is compiled for: push_microbatch, wait_for_expert_rows,
// publish_partial_sums, wait_for_token_sums. Twin: rank_programs in inc_runtime/collectives/__init__.py. Macros from
// compile_cache.py: INC_RELAYED for the plain models, INC_PHASED for the phased ones.
#pragma once

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
#include "inc_all_to_all.cuh"
#define INC_COLLECTIVE inc_all_to_all
#endif
#endif

namespace inc {

constexpr bool RELAYED = INC_RELAYED_OR_NOT;

using INC_COLLECTIVE::publish_partial_sums;
using INC_COLLECTIVE::push_microbatch;
using INC_COLLECTIVE::TokenSums;
using INC_COLLECTIVE::wait_for_expert_rows;
using INC_COLLECTIVE::wait_for_token_sums;

}  // namespace inc
