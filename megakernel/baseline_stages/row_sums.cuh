// Stage 7 of the Baseline, reduce, and its extra stage after the combine, global reduce: sums of rows in float32, in a fixed
// order, rounded once. One warp per row.
// Twins: megakernel/experts.py, reduce (order of the columns of choice here); megakernel/baseline.py (order of the ranks).
// Reduce reads: expert_outputs [pairs, H] bf16, pair_positions, received records; writes: partial_blocks[rank],
// rows of H bf16 in the order of that rank's rows. Global reduce reads: returned_blocks[rank], slots; writes: output [N, H].
// Cost: see results/data/moe_layer_*.csv.
#pragma once

#include "rows.cuh"

namespace inc {

__device__ __forceinline__ void reduce(const BaselineArguments& arguments) {
  const int lane = lane_id(), top_k = arguments.top_k, num_words = arguments.hidden_size / WORD_ELEMENTS;
  const uint64_t row_bytes = uint64_t(arguments.hidden_size) * sizeof(__nv_bfloat16);
  const ReceivedRows received(arguments);
  const uint64_t partials = lane < arguments.num_ranks ? arguments.partial_blocks[lane] : 0;
  const int32_t* positions = reinterpret_cast<const int32_t*>(arguments.pair_positions);
  const int num_warps = gridDim.x * warps_per_block();
  for (int row = blockIdx.x * warps_per_block() + warp_id(); row < received.total; row += num_warps) {
    const ReceivedRow from(arguments, received, row);
    int position = -1;
    float weight = 0.0f;
    if (lane < top_k) {
      position = __ldg(positions + int64_t(row) * top_k + lane);
      weight = __int_as_float(__ldg(from.expert_ids + top_k + lane));
    }
    const uint64_t target = __shfl_sync(ALL_LANES, partials, from.source) + from.position * row_bytes;
    sum_rows(reinterpret_cast<void*>(target), arguments.expert_outputs + uint64_t(max(position, 0)) * row_bytes, weight,
             __ballot_sync(ALL_LANES, position >= 0), num_words);
  }
}

__device__ __forceinline__ void global_reduce(const BaselineArguments& arguments) {
  const int lane = lane_id(), num_ranks = arguments.num_ranks, num_words = arguments.hidden_size / WORD_ELEMENTS;
  const uint64_t row_bytes = uint64_t(arguments.hidden_size) * sizeof(__nv_bfloat16);
  const uint64_t returned = lane < num_ranks ? arguments.returned_blocks[lane] : 0;
  const int32_t* slots = reinterpret_cast<const int32_t*>(arguments.slots);
  const int num_warps = gridDim.x * warps_per_block();
  for (int token = blockIdx.x * warps_per_block() + warp_id(); token < arguments.num_tokens; token += num_warps) {
    const int slot = lane < num_ranks ? __ldg(slots + int64_t(token) * num_ranks + lane) : -1;
    sum_rows(reinterpret_cast<void*>(arguments.output + token * row_bytes), returned + uint64_t(max(slot, 0)) * row_bytes,
             1.0f, __ballot_sync(ALL_LANES, slot >= 0), num_words);
  }
}

}  // namespace inc
