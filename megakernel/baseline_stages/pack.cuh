// Pack (the Baseline's extra stage before the dispatch): for each rank, a packet for every token that one of its experts
// takes, in the order of the tokens. A packet is the row, then its record; a block is a header with their number, then
// the packets. The block for this rank itself is written where it would be received.
// Twin: megakernel/baseline.py, pack.
// Every block counts the tokens before its own anew, rather than meet the others: a barrier over the grid cost 8 us.
// Reads: tokens [N, H] bf16, expert_ids, weights, token_ranks. Writes: send_blocks[rank]; sent_counts [W]; slots [N, W]: the
// place of a token's packet in the block, -1 where that rank does not get it.
// Cost: see results/data/moe_layer_*.csv.
#pragma once

#include "rows.cuh"

namespace inc {

struct PackShared {
  int rows_of_warp[MAX_WARPS][MAX_RANKS];  // this block's tokens
  int rows_before[MAX_WARPS][MAX_RANKS];   // tokens before this block, as each warp counted its part of them
};

// Lane r gets the mask of those of the 32 tokens from `first` on that go to rank r.
__device__ __forceinline__ uint32_t takers_of_ranks(const BaselineArguments& arguments, int first, int last) {
  const int token = first + lane_id();
  const uint32_t ranks = token < last ? __ldg(reinterpret_cast<const uint32_t*>(arguments.token_ranks) + token) : 0;
  uint32_t takers = 0;
  for (int rank = 0; rank < arguments.num_ranks; ++rank) {
    const uint32_t tokens = __ballot_sync(ALL_LANES, ranks >> rank & 1);
    if (lane_id() == rank) takers = tokens;
  }
  return takers;
}

// Lane r gets the number of the first `end` tokens that go to rank r, of the part that this warp counts.
__device__ __forceinline__ int rows_of_ranks(const BaselineArguments& arguments, int end) {
  constexpr int AT_ONCE = 4;  // loads in flight
  const uint32_t* token_ranks = reinterpret_cast<const uint32_t*>(arguments.token_ranks);
  int rows = 0;
  for (int first = warp_id() * LANES; first < end; first += AT_ONCE * warps_per_block() * LANES) {
    uint32_t ranks[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int token = first + i * warps_per_block() * LANES + lane_id();
      ranks[i] = token < end ? __ldg(token_ranks + token) : 0;
    }
    for (int rank = 0; rank < arguments.num_ranks; ++rank) {
      int of_rank = 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) of_rank += __popc(__ballot_sync(ALL_LANES, ranks[i] >> rank & 1));
      if (lane_id() == rank) rows += of_rank;
    }
  }
  return rows;
}

// The packet of a token to the address that lane r holds, for each rank r that it goes to.
__device__ __forceinline__ void send_packet(const BaselineArguments& arguments, int token, RowPart& part, bool goes,
                                            uint64_t packet, int num_words) {
  const uint32_t takers = __ballot_sync(ALL_LANES, goes);
  const int64_t row_bytes = int64_t(arguments.hidden_size) * sizeof(__nv_bfloat16);
  const int lane = lane_id(), top_k = arguments.top_k;
  const int64_t place = int64_t(token) * top_k + lane;
  int32_t expert = 0, weight = 0;
  if (lane < top_k) {
    expert = __ldg(reinterpret_cast<const int32_t*>(arguments.expert_ids) + place);
    weight = __ldg(reinterpret_cast<const int32_t*>(arguments.weights) + place);
  }
  copy_row(part, reinterpret_cast<const void*>(arguments.tokens + token * row_bytes), packet, takers, num_words);
  for (uint32_t left = takers; left != 0; left &= left - 1) {
    int32_t* record = reinterpret_cast<int32_t*>(__shfl_sync(ALL_LANES, packet, __ffs(left) - 1) + row_bytes);
    if (lane < top_k) record[lane] = expert, record[top_k + lane] = weight;
  }
}

__device__ __forceinline__ void pack(const BaselineArguments& arguments, PackShared& shared) {
  const int lane = lane_id(), warp = warp_id(), num_ranks = arguments.num_ranks;
  const int num_words = arguments.hidden_size / WORD_ELEMENTS;
  const int64_t row_bytes = int64_t(arguments.hidden_size) * sizeof(__nv_bfloat16);
  const Share share(arguments.num_tokens);

  RowPart part;  // the first row travels meanwhile
  if (share.first < share.last) part.load(reinterpret_cast<const void*>(arguments.tokens + share.first * row_bytes), 0, num_words);
  int rows = 0;  // lane r: those of this warp for rank r
  for (int first = share.first; first < share.last; first += LANES)
    rows += __popc(takers_of_ranks(arguments, first, share.last));
  shared.rows_of_warp[warp][lane] = rows;
  shared.rows_before[warp][lane] = rows_of_ranks(arguments, share.first_of_block);
  __syncthreads();
  int next = 0;  // lane r: the place of the next packet for rank r
  for (int w = 0; w < warps_per_block(); ++w) next += shared.rows_before[w][lane] + (w < warp ? shared.rows_of_warp[w][lane] : 0);
  if (blockIdx.x == gridDim.x - 1 && warp == warps_per_block() - 1 && lane < num_ranks) {
    *reinterpret_cast<int32_t*>(arguments.send_blocks[lane]) = next + rows;
    reinterpret_cast<int32_t*>(arguments.sent_counts)[lane] = next + rows;
  }

  const uint64_t packets = lane < num_ranks ? arguments.send_blocks[lane] + HEADER_BYTES : 0;
  int32_t* slots = reinterpret_cast<int32_t*>(arguments.slots);
  for (int first = share.first; first < share.last; first += LANES) {
    const uint32_t takers = takers_of_ranks(arguments, first, share.last);
    for (int token = first; token < min(first + LANES, share.last); ++token) {
      const bool goes = takers >> (token - first) & 1;
      const int position = next + __popc(takers & bits_below(token - first));
      if (lane < num_ranks) slots[int64_t(token) * num_ranks + lane] = goes ? position : -1;
      RowPart ahead;  // the next row travels while this one is stored
      if (token + 1 < share.last) ahead.load(reinterpret_cast<const void*>(arguments.tokens + (token + 1) * row_bytes), 0, num_words);
      send_packet(arguments, token, part, goes, packets + uint64_t(position) * arguments.row_stride, num_words);
      part = ahead;
    }
    next += __popc(takers);
  }
}

}  // namespace inc
