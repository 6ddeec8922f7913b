// Stage 7, reduce: the partial sum of a received row, over its choices on this rank, in the order of the choices, float32,
// rounded once. It overwrites the row, in the slot. One warp per row; a warp takes 32 rows at a time and sums those whose
// experts are done, so that rows leave while the last tiles of a microbatch still run.
// Waits on: `grouped` (stage 3), tiles_done of the row tiles (stage 6). Signals: nothing; publish_partial_sums follows.
// Reads: expert outputs [grouped rows, H] bf16, position [R, k], weights in expert_rows_routing. Writes: expert_rows.
// Cost: reads one row per choice on this rank, writes one row.
#pragma once

#include "stage3_group.cuh"
#include "stage6_matmul_down.cuh"
#include "sums.cuh"

namespace inc {

constexpr int POLL_NS = 1000;  // every vector warp of the GPU polls here for most of a microbatch

// One warp. `place` in lane c: grouped row of choice c, or -1; `weight` its weight.
__device__ __forceinline__ void reduce_row(const Heap& heap, const char* outputs, char* row, int place, float weight, int lane) {
  constexpr int PIECES = 2, AT_ONCE = 3;  // 16-byte pieces of a row per lane, and choices whose loads fly together
  const uint32_t local = __ballot_sync(ALL_LANES, place >= 0);
  if (GAPS && local == 0) return;  // a place without a row
  for (uint32_t start = 0; start < heap.row_bytes; start += WARP * 16 * PIECES) {
    float sum[PIECES][8] = {};
    for (uint32_t left = local; left;) {
      uint4 words[AT_ONCE][PIECES] = {};
      float factor[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        const int choice = left ? __ffs(left) - 1 : 0;
        factor[n] = left ? __shfl_sync(ALL_LANES, weight, choice) : 0.0f;
        const uint64_t source = uint64_t(uint32_t(__shfl_sync(ALL_LANES, place, choice))) * heap.row_bytes;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
          const uint32_t byte = start + (p * WARP + lane) * 16;
          if (left && byte < heap.row_bytes) words[n][p] = load_16_bytes(outputs + source + byte);
        }
        left &= left - 1;
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
        for (int p = 0; p < PIECES; ++p) add_row_words(sum[p], words[n][p], factor[n]);
    }
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const uint32_t byte = start + (p * WARP + lane) * 16;
      if (byte < heap.row_bytes) store_16_bytes(row + byte, round_to_bf16(sum[p]));
    }
  }
}

// Follows the choices of one row in turn, one lane each: a look costs one load, of the first tile that was not done at the last.
struct OutputsOfRow {
  const int32_t* position;  // [k] of the row
  int choice = 0, place = -1;

  __device__ __forceinline__ bool done(const LayerArguments& arguments) {
    const uint32_t column_tiles = MatmulDown::num_column_tiles(arguments.matmul);
    while (true) {
      if (place >= 0) {
        uint32_t& word = pointer<uint32_t>(arguments.matmul.tiles_done)[place / TILE_ROWS];
        if (cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(word).load(cuda::memory_order_acquire) < column_tiles) return false;
      }
      if (choice == arguments.top_k) return true;
      place = position[choice++];
    }
  }
};

// Returns false in warps that had to leave rows out.
__device__ inline bool reduce_microbatch(const Heap& heap, const Team& team, const LayerArguments& arguments, uint64_t magic,
                                         int number, const ReceivedRows& received, BoundedWait& wait) {
  const int lane = team.lane(), num_warps = team.num_blocks * team.num_warps();
  const int32_t* position =
      pointer<int32_t>(arguments.position) + int64_t(number % GROUPED_SETS) * arguments.row_capacity * arguments.top_k;
  const char* outputs = pointer<const char>(arguments.matmul.output);
  wait.until(WaitTag::GROUPED_ROWS, number, [&] {
    return __all_sync(ALL_LANES, word_reached(&grouping_of(arguments, number).grouped, magic));
  });
  for (int first = team.block * team.num_warps() + team.warp(); first < received.num_rows; first += num_warps * WARP) {
    const int row_of_lane = first + lane * num_warps;
    OutputsOfRow outputs_of_lane{position + int64_t(row_of_lane) * arguments.top_k};
    uint32_t pending = __ballot_sync(ALL_LANES, row_of_lane < received.num_rows);
    while (pending) {
      uint32_t ready = 0;
      wait.until<POLL_NS>(WaitTag::EXPERT_OUTPUTS, number, [&] {
        ready = __ballot_sync(ALL_LANES, (pending >> lane & 1) && outputs_of_lane.done(arguments));
        return ready != 0;
      });
      __syncwarp();  // a lane has acquired what the others read
      if (ready == 0) return false;
      pending &= ~ready;
      for (; ready; ready &= ready - 1) {
        const int i = first + (__ffs(ready) - 1) * num_warps;
        const uint64_t row = received.row(i);
        const char* record = received.records + row * heap.record_bytes + RoutingRecord::weights_offset(heap.top_k);
        const bool used = lane < arguments.top_k;
        const int place = used ? position[int64_t(i) * arguments.top_k + lane] : -1;
        const float weight = used ? reinterpret_cast<const float*>(record)[lane] : 0.0f;
        reduce_row(heap, outputs, received.rows + row * heap.row_bytes, place, weight, lane);
      }
    }
  }
  return true;
}

}  // namespace inc
