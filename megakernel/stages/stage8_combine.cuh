// Stage 8, combine: the sums of this rank's tokens go from the slot to the caller's memory. The exchange itself is the
// collective's (wait_for_token_sums, and the combine switch).
// Waits on: token_sums_arrived. Reads: token_sums. Writes: output [num_tokens, H] of the caller.
// Cost: one row read and one written per token.
#pragma once

#include "bounded_wait.cuh"
#include "collective.cuh"

namespace inc {

__device__ inline bool combine_microbatch(const Heap& heap, const Team& team, const LayerArguments& arguments, uint64_t magic,
                                          int first_token, int num_tokens) {
  const char* sums = wait_for_token_sums(heap, team, magic);
  if (sums == nullptr) return false;
  char* output = pointer<char>(arguments.output) + uint64_t(first_token) * heap.row_bytes;
  for (int token = team.block * team.num_warps() + team.warp(); token < num_tokens; token += team.num_blocks * team.num_warps()) {
    const uint64_t row = uint64_t(token) * heap.row_bytes;
    copy_row<LOADS_IN_FLIGHT>(output + row, sums + row, heap.row_bytes, team.lane());
  }
  return true;
}

}  // namespace inc
