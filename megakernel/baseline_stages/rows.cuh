// Rows of the Baseline's kernels: one warp moves or adds one row at a time, 16 bytes a lane and access.
// Included by the stages; holds no stage of its own.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "baseline_arguments.h"

namespace inc {

constexpr unsigned ALL_LANES = ~0u;
constexpr int LANES = 32;
constexpr int MAX_WARPS = 32;
constexpr int PART_WORDS = 8;  // of one lane: loads in flight; 32 lanes x 8 words are 2,048 elements

using Word = uint4;  // 8 bfloat16
constexpr int WORD_ELEMENTS = 8;

__device__ __forceinline__ int lane_id() { return threadIdx.x % LANES; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / LANES; }
__device__ __forceinline__ int warps_per_block() { return blockDim.x / LANES; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ uint32_t bits_below(int bit) { return (1u << bit) - 1; }

// The first error of a layer stays; the host reads it before the next call.
__device__ __forceinline__ void report(const BaselineArguments& arguments, BaselineError error, uint32_t detail) {
  const unsigned long long word = (unsigned long long)(static_cast<uint32_t>(error)) << 32 | detail;
  atomicCAS_system(reinterpret_cast<unsigned long long*>(arguments.error_word), 0ull, word);
}

// The rank that holds an expert: contiguous, the first E mod W ranks hold one more. Twin: routing.py, rank_of_experts.
__device__ __forceinline__ int rank_of_expert(const BaselineArguments& arguments, int expert) {
  const int boundary = arguments.larger_ranks * (arguments.smaller_share + 1);
  const bool beyond = expert >= boundary;
  const int share = beyond ? arguments.smaller_share : arguments.smaller_share + 1;
  return beyond ? arguments.larger_ranks + (expert - boundary) / share : expert / share;
}

// One part of a row in the registers of a warp.
struct RowPart {
  Word word[PART_WORDS];

  __device__ __forceinline__ void load(const void* row, int first_word, int num_words) {
#pragma unroll
    for (int i = 0; i < PART_WORDS; ++i) {
      const int w = first_word + i * LANES + lane_id();
      if (w < num_words) word[i] = __ldcs(static_cast<const Word*>(row) + w);
    }
  }

  __device__ __forceinline__ void store(void* row, int first_word, int num_words) const {
#pragma unroll
    for (int i = 0; i < PART_WORDS; ++i) {
      const int w = first_word + i * LANES + lane_id();
      if (w < num_words) static_cast<Word*>(row)[w] = word[i];
    }
  }
};

// Copies one row to the address that each lane of `takers` holds. `part` already has the first part of the row.
__device__ __forceinline__ void copy_row(RowPart& part, const void* row, uint64_t target, uint32_t takers, int num_words) {
  for (int first_word = 0; first_word < num_words; first_word += LANES * PART_WORDS) {
    if (first_word > 0) part.load(row, first_word, num_words);
    for (uint32_t left = takers; left != 0; left &= left - 1)
      part.store(reinterpret_cast<void*>(__shfl_sync(ALL_LANES, target, __ffs(left) - 1)), first_word, num_words);
  }
}

__device__ __forceinline__ void add_word(float (&sum)[WORD_ELEMENTS], const Word& word, float weight) {
  const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += weight * __uint_as_float(pairs[i] << 16);
    sum[2 * i + 1] += weight * __uint_as_float(pairs[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ Word rounded_word(const float (&sum)[WORD_ELEMENTS]) {
  return {rounded_pair(sum[0], sum[1]), rounded_pair(sum[2], sum[3]), rounded_pair(sum[4], sum[5]),
          rounded_pair(sum[6], sum[7])};
}

// target = the sum of weight * row over the lanes of `terms`, in lane order, in float32, rounded once. Each of those lanes
// holds the address and the weight of its row. Two rows of half a part each are in flight.
__device__ __forceinline__ void sum_rows(void* target, uint64_t row, float weight, uint32_t terms, int num_words) {
  constexpr int HALF = PART_WORDS / 2;
  for (int first_word = 0; first_word < num_words; first_word += LANES * HALF) {
    float sum[HALF][WORD_ELEMENTS] = {};
    for (uint32_t left = terms; left != 0;) {
      const int a = __ffs(left) - 1;
      left &= left - 1;
      const int b = left != 0 ? __ffs(left) - 1 : a;
      const bool two = left != 0;
      left &= left - 1;
      const Word* row_a = reinterpret_cast<const Word*>(__shfl_sync(ALL_LANES, row, a));
      const Word* row_b = reinterpret_cast<const Word*>(__shfl_sync(ALL_LANES, row, b));
      const float weight_a = __shfl_sync(ALL_LANES, weight, a), weight_b = __shfl_sync(ALL_LANES, weight, b);
      Word of_a[HALF], of_b[HALF];
#pragma unroll
      for (int i = 0; i < HALF; ++i) {
        const int w = first_word + i * LANES + lane_id();
        if (w < num_words) of_a[i] = __ldcs(row_a + w);
        if (two && w < num_words) of_b[i] = __ldcs(row_b + w);
      }
#pragma unroll
      for (int i = 0; i < HALF; ++i) add_word(sum[i], of_a[i], weight_a);
      if (two) {
#pragma unroll
        for (int i = 0; i < HALF; ++i) add_word(sum[i], of_b[i], weight_b);
      }
    }
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const int w = first_word + i * LANES + lane_id();
      if (w < num_words) static_cast<Word*>(target)[w] = rounded_word(sum[i]);
    }
  }
}

// Items of one list, dealt to the blocks in order and within a block to its warps in order, so that few items still
// reach all blocks: this warp's are [first, last).
struct Share {
  int first, last, first_of_block;

  __device__ __forceinline__ explicit Share(int num_items) {
    const int per_block = ceil_div(num_items, gridDim.x), per_warp = ceil_div(per_block, warps_per_block());
    const int end = min(int(blockIdx.x + 1) * per_block, num_items);
    first_of_block = min(int(blockIdx.x) * per_block, num_items);
    first = min(first_of_block + warp_id() * per_warp, end);
    last = min(first + per_warp, end);
  }
};

// The rows that this rank received, seen as one list: all of rank 0, then of rank 1, ... Lane r holds the run of rank r.
struct ReceivedRows {
  uint64_t rows, records;  // where the run begins
  int first, end;          // its rows in the list
  int total;

  __device__ __forceinline__ explicit ReceivedRows(const BaselineArguments& arguments) : rows(0), records(0) {
    int own = 0;
    if (lane_id() < arguments.num_ranks) {
      rows = arguments.received_rows[lane_id()], records = arguments.received_records[lane_id()];
      own = *reinterpret_cast<const int32_t*>(arguments.received_counts[lane_id()]);
    }
    end = own;
    for (int step = 1; step < LANES; step *= 2) {
      const int below = __shfl_up_sync(ALL_LANES, end, step);
      if (lane_id() >= step) end += below;
    }
    first = end - own;
    total = __shfl_sync(ALL_LANES, end, LANES - 1);
  }
};

// One of them. All lanes of a warp make theirs together; each may name another row.
struct ReceivedRow {
  uint64_t row;              // H bfloat16
  const int32_t* expert_ids;  // k, then k float32 weights
  int source, position;      // the rank that sent it, and its place in that rank's run

  __device__ __forceinline__ ReceivedRow(const BaselineArguments& arguments, const ReceivedRows& received, int number) {
    source = 0;
    for (int rank = 0; rank < arguments.num_ranks; ++rank)
      source += __shfl_sync(ALL_LANES, received.end, rank) <= number;
    source = min(source, arguments.num_ranks - 1);
    position = number - __shfl_sync(ALL_LANES, received.first, source);
    row = __shfl_sync(ALL_LANES, received.rows, source) + int64_t(position) * arguments.row_stride;
    expert_ids = reinterpret_cast<const int32_t*>(__shfl_sync(ALL_LANES, received.records, source) +
                                                  int64_t(position) * arguments.record_stride);
  }
};

}  // namespace inc
