// The rank-side functions of the communication model that this file is compiled for: push_microbatch, wait_for_expert_rows,
// publish_partial_sums, wait_for_token_sums. Twin: rank_programs in inc_runtime/collectives/__init__.py. Macros from
// compile_cache.py: INC_RELAYED for the plain models.
#pragma once

#if defined(INC_RELAYED)
#include "all_to_all.cuh"
namespace inc {
constexpr bool RELAYED = true;
}
#else
#include "inc_all_to_all.cuh"
namespace inc {
constexpr bool RELAYED = false;
}
#endif
