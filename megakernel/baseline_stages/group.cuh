// Stage 3 of the Baseline, group: a copy of every received row for each of its experts here, rows of one expert together.
// Twin: megakernel/experts.py, group. The order within an expert is that of the received rows (by sender, then by packet).
// Reads: received rows, records and counts. Writes: grouped [pairs, H] bf16;
// pair_positions [rows, k]: the grouped row of a choice, -1 where
// it is none of this rank's; expert_ends [E / W] int32: where the rows of each expert end.
// Cost: see results/data/moe_layer_*.csv.
#pragma once

#include "grid.cuh"

namespace inc {

struct GroupShared {
  int expert_rows[MAX_WARPS][MAX_EXPERTS];  // of each warp, then of the warps before it, then the next free one
  int below[MAX_EXPERTS], all[MAX_EXPERTS];  // rows of the blocks before this one, of all blocks
  int first_row[MAX_EXPERTS];  // grouped row where this block's part of an expert begins
};

// The pairs (row, column) of up to 32 / k rows, one in each lane.
struct Pairs {
  uint64_t row;    // address of the lane's row
  int expert;      // of this rank, or -1
  uint32_t peers;  // lanes with the same expert
  int num_rows;

  __device__ __forceinline__ Pairs(const BaselineArguments& arguments, const ReceivedRows& received, int first, int last) {
    const int top_k = arguments.top_k, number = first + lane_id() / top_k;
    num_rows = min(LANES / top_k, last - first);
    const bool valid = lane_id() < num_rows * top_k;
    const ReceivedRow from(arguments, received, valid ? number : first);
    row = from.row, expert = -1;
    if (valid) {
      const int local = __ldg(from.expert_ids + lane_id() % top_k) - arguments.first_expert;
      if (local >= 0 && local < arguments.num_local_experts) expert = local;
    }
    peers = __match_any_sync(ALL_LANES, expert);
  }
  __device__ __forceinline__ int place_among_peers() const { return __popc(peers & bits_below(lane_id())); }
  __device__ __forceinline__ bool leads() const { return expert >= 0 && place_among_peers() == 0; }
};

// How many rows of each expert lie before this block's, in the whole rank. After the grid barrier.
__device__ __forceinline__ void find_first_rows(const BaselineArguments& arguments, GroupShared& shared) {
  const int num_experts = arguments.num_local_experts, lane = lane_id();
  const int32_t* counts = reinterpret_cast<const int32_t*>(arguments.group_counts);
  for (int expert = warp_id(); expert < num_experts; expert += warps_per_block()) {
    const CountSums sums = sum_over_blocks(counts + expert * gridDim.x);
    if (lane == 0) shared.below[expert] = sums.below, shared.all[expert] = sums.all;
  }
  __syncthreads();
  if (warp_id() == 0) {
    int start = 0;
    for (int first = 0; first < num_experts; first += LANES) {
      const int expert = first + lane, own = expert < num_experts ? shared.all[expert] : 0;
      int end = own;
      for (int step = 1; step < LANES; step *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end += below;
      }
      if (expert < num_experts) {
        shared.first_row[expert] = start + end - own + shared.below[expert];
        if (blockIdx.x == 0) reinterpret_cast<int32_t*>(arguments.expert_ends)[expert] = start + end;
      }
      start += __shfl_sync(ALL_LANES, end, LANES - 1);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void group(const BaselineArguments& arguments, GroupShared& shared) {
  const int lane = lane_id(), warp = warp_id(), top_k = arguments.top_k, num_experts = arguments.num_local_experts;
  const int num_words = arguments.hidden_size / WORD_ELEMENTS, step = LANES / top_k;
  const uint64_t row_bytes = uint64_t(arguments.hidden_size) * sizeof(__nv_bfloat16);
  const ReceivedRows received(arguments);
  const Share share(received.total);
  int32_t* counts = reinterpret_cast<int32_t*>(arguments.group_counts);  // [E / W, gridDim.x]
  int* expert_rows = shared.expert_rows[warp];

  for (int expert = lane; expert < num_experts; expert += LANES) expert_rows[expert] = 0;
  __syncwarp();
  Pairs pairs(arguments, received, share.first, max(share.last, share.first));
  RowPart part;  // the first row travels while the blocks meet
  if (share.first < share.last)
    part.load(reinterpret_cast<const void*>(__shfl_sync(ALL_LANES, pairs.row, 0)), 0, num_words);
  const Pairs first_pairs = pairs;
  for (int first = share.first; first < share.last; first += step) {
    if (first > share.first) pairs = Pairs(arguments, received, first, share.last);
    if (pairs.leads()) expert_rows[pairs.expert] += __popc(pairs.peers);
    __syncwarp();
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    int below = 0;
    for (int w = 0; w < warps_per_block(); ++w) {
      const int own = shared.expert_rows[w][expert];
      shared.expert_rows[w][expert] = below;
      below += own;
    }
    counts[expert * gridDim.x + blockIdx.x] = below;
  }
  grid_barrier(arguments, arguments.group_barrier);
  find_first_rows(arguments, shared);

  int32_t* positions = reinterpret_cast<int32_t*>(arguments.pair_positions);
  pairs = first_pairs;
  for (int first = share.first; first < share.last; first += step) {
    const bool more = first + step < share.last;
    const Pairs following = more ? Pairs(arguments, received, first + step, share.last) : pairs;
    int position = -1;
    if (pairs.expert >= 0)
      position = shared.first_row[pairs.expert] + expert_rows[pairs.expert] + pairs.place_among_peers();
    __syncwarp();
    if (pairs.leads()) expert_rows[pairs.expert] += __popc(pairs.peers);
    __syncwarp();
    if (lane < pairs.num_rows * top_k) positions[int64_t(first) * top_k + lane] = position;
    const uint64_t target = arguments.grouped + uint64_t(max(position, 0)) * row_bytes;
    const uint32_t takers = __ballot_sync(ALL_LANES, position >= 0);
    for (int row = 0; row < pairs.num_rows; ++row) {
      const void* source = reinterpret_cast<const void*>(__shfl_sync(ALL_LANES, pairs.row, row * top_k));
      const bool last = row + 1 == pairs.num_rows;
      const uint64_t next_row = last ? __shfl_sync(ALL_LANES, following.row, 0) : __shfl_sync(ALL_LANES, pairs.row, (row + 1) * top_k);
      RowPart ahead;  // the next row travels while this one is stored
      if (!last || more) ahead.load(reinterpret_cast<const void*>(next_row), 0, num_words);
      const uint32_t columns = top_k < LANES ? bits_below(top_k) << (row * top_k) : ALL_LANES;
      copy_row(part, source, target, takers & columns, num_words);
      part = ahead;
    }
    pairs = following;
  }
}

}  // namespace inc
