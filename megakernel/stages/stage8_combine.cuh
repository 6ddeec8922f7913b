// Stage 8, combine: the sums of this rank's tokens go from the slot to the caller's memory; without in-network computing they
// are added on the way (global reduce). The exchange itself is the collective's (wait_for_token_sums, and the switch).
// Waits on, reads: what wait_for_token_sums does. Writes: output [num_tokens, H] of the caller.
// Cost: one row read and one written per token.
#pragma once

#include "bounded_wait.cuh"
#include "collective.cuh"

namespace inc {

__device__ inline bool combine_microbatch(const Heap& heap, const Team& team, const LayerArguments& arguments, uint64_t magic,
                                          int first_token, int num_tokens) {
  // A piece of a relayed sum is several loads, one of a sum with the own partial sum two.
  constexpr int PIECES = RELAYED ? 2 : LOCAL_BYPASS ? LOADS_IN_FLIGHT / 2 : LOADS_IN_FLIGHT;
  TokenSums sums;
  if (!wait_for_token_sums(heap, team, magic, sums)) return false;
  char* output = pointer<char>(arguments.output) + uint64_t(first_token) * heap.row_bytes;
  const int columns = heap.row_bytes / 16;
  for (int token = first_token_of_warp(heap, team); token < num_tokens; token = next_token_of_warp(heap, team, token)) {
    char* row = output + uint64_t(token) * heap.row_bytes;
    const TokenSums::OfToken sum = sums.of(heap, token);
    for (int first = team.lane(); first < columns; first += WARP * PIECES) {
      uint4 words[PIECES];
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
        if (first + p * WARP < columns) words[p] = sum.words(heap, first + p * WARP);
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
        if (first + p * WARP < columns) store_16_bytes(row + (first + p * WARP) * 16, words[p]);
    }
  }
  return true;
}

}  // namespace inc
