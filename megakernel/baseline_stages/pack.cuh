// Pack (the Baseline's extra stage before the dispatch): for each rank, a packet for every token that one of its experts
// takes, in the order of the tokens. A packet is the row, then its record; a block is a header with their number, then
// the packets. The block for this rank itself is written where it would be received.
// Twin: megakernel/baseline.py, pack.
// Reads: tokens [N, H] bf16, records. Writes: send_blocks[rank]; sent_counts [W]; slots [N, W]: the place of a token's
// packet in the block, -1 where that rank does not get it.
// Cost: see results/data/moe_layer_*.csv.
#pragma once

#include "grid.cuh"

namespace inc {

struct PackShared {
  int warp_rows[MAX_WARPS][MAX_RANKS];  // rows of the warps before, per rank
  int block_rows[MAX_RANKS];
  int first_row[MAX_RANKS];  // of this block, in the block of that rank
};

// The ranks that get a token, as a mask.
__device__ __forceinline__ uint32_t ranks_of_token(const BaselineArguments& arguments, int token) {
  const int32_t* ids = reinterpret_cast<const int32_t*>(arguments.records) + int64_t(token) * 2 * arguments.top_k;
  uint32_t ranks = 0;
  for (int column = 0; column < arguments.top_k; ++column) {
    const int expert = __ldg(ids + column);
    if (expert >= 0) ranks |= 1u << rank_of_expert(arguments, expert);
  }
  return ranks;
}

// Lane r gets the mask of those of the 32 tokens from `first` on that go to rank r.
__device__ __forceinline__ uint32_t takers_of_ranks(const BaselineArguments& arguments, int first, int last) {
  const int token = first + lane_id();
  const uint32_t ranks = token < last ? ranks_of_token(arguments, token) : 0;
  uint32_t takers = 0;
  for (int rank = 0; rank < arguments.num_ranks; ++rank) {
    const uint32_t tokens = __ballot_sync(ALL_LANES, ranks >> rank & 1);
    if (lane_id() == rank) takers = tokens;
  }
  return takers;
}

__device__ __forceinline__ void send_packet(const BaselineArguments& arguments, int token, RowPart& part, bool goes,
                                            uint64_t packet, int num_words) {
  const uint32_t takers = __ballot_sync(ALL_LANES, goes);
  const int64_t row_bytes = int64_t(arguments.hidden_size) * sizeof(__nv_bfloat16);
  copy_row(part, reinterpret_cast<const void*>(arguments.tokens + token * row_bytes), packet, takers, num_words);
  const int record_words = 2 * arguments.top_k;
  const int32_t* record = reinterpret_cast<const int32_t*>(arguments.records) + int64_t(token) * record_words;
  for (int first = 0; first < record_words; first += LANES) {
    const int w = first + lane_id();
    const int32_t value = w < record_words ? __ldg(record + w) : 0;
    for (uint32_t left = takers; left != 0; left &= left - 1) {
      const uint64_t target = __shfl_sync(ALL_LANES, packet, __ffs(left) - 1) + row_bytes;
      if (w < record_words) reinterpret_cast<int32_t*>(target)[w] = value;
    }
  }
}

__device__ __forceinline__ void pack(const BaselineArguments& arguments, PackShared& shared) {
  const int lane = lane_id(), warp = warp_id(), num_ranks = arguments.num_ranks;
  const int num_words = arguments.hidden_size / WORD_ELEMENTS;
  const int64_t row_bytes = int64_t(arguments.hidden_size) * sizeof(__nv_bfloat16);
  const Share share(arguments.num_tokens);
  int32_t* counts = reinterpret_cast<int32_t*>(arguments.pack_counts);  // [W, gridDim.x]

  RowPart part;  // the first row travels while the blocks meet
  if (share.first < share.last) part.load(reinterpret_cast<const void*>(arguments.tokens + share.first * row_bytes), 0, num_words);
  int rows = 0;  // lane r: those of this warp for rank r
  for (int first = share.first; first < share.last; first += LANES)
    rows += __popc(takers_of_ranks(arguments, first, share.last));
  shared.warp_rows[warp][lane] = rows;
  __syncthreads();
  if (warp == 0) {
    int below = 0;
    for (int w = 0; w < warps_per_block(); ++w) {
      const int own = shared.warp_rows[w][lane];
      shared.warp_rows[w][lane] = below;
      below += own;
    }
    shared.block_rows[lane] = below;
    if (lane < num_ranks) counts[lane * gridDim.x + blockIdx.x] = below;
  }
  grid_barrier(arguments, arguments.pack_barrier);
  for (int rank = warp; rank < num_ranks; rank += warps_per_block()) {
    const CountSums sums = sum_over_blocks(counts + rank * gridDim.x);
    if (lane == 0) shared.first_row[rank] = sums.below;
    if (lane == 0 && blockIdx.x == 0) {
      *reinterpret_cast<int32_t*>(arguments.send_blocks[rank]) = sums.all;
      reinterpret_cast<int32_t*>(arguments.sent_counts)[rank] = sums.all;
    }
  }
  __syncthreads();

  const uint64_t packets = lane < num_ranks ? arguments.send_blocks[lane] + HEADER_BYTES : 0;
  int next = lane < num_ranks ? shared.first_row[lane] + shared.warp_rows[warp][lane] : 0;
  int32_t* slots = reinterpret_cast<int32_t*>(arguments.slots);
  for (int first = share.first; first < share.last; first += LANES) {
    const uint32_t takers = takers_of_ranks(arguments, first, share.last);
    for (int token = first; token < min(first + LANES, share.last); ++token) {
      const bool goes = takers >> (token - first) & 1;
      const int position = next + __popc(takers & bits_below(token - first));
      if (lane < num_ranks) slots[int64_t(token) * num_ranks + lane] = goes ? position : -1;
      if (token > share.first) part.load(reinterpret_cast<const void*>(arguments.tokens + token * row_bytes), 0, num_words);
      send_packet(arguments, token, part, goes, packets + uint64_t(position) * arguments.packet_bytes, num_words);
    }
    next += __popc(takers);
  }
}

}  // namespace inc
