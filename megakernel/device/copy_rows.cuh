// Grouped rows by copy: two warps of every block copy the rows of a microbatch into the order of the experts, so that MatMul 1 loads
// them in bulk. Stage 3 has written where each row comes from.
// Waits on: `grouped` of the microbatch. Signals: row_tile_arrival[row tile] grows by one per piece of PIECE_ROWS rows, from 0
// to PIECES_PER_TILE. Reads: token_rows through row_to_token. Writes: grouped rows [num_rows, H].
// Cost: one row read and one written per choice.
#pragma once

#include "bounded_wait.cuh"
#include "stage3_group.cuh"

namespace inc {

struct RowCopier {
  static constexpr int WARPS = 2;

  // Lanes keep eight loads of 16 bytes in flight. Rows beyond the expert's have row_to_token -1.
  static __device__ __forceinline__ void copy_row(const ExpertMatmulArguments& arguments, int row) {
    constexpr int AT_ONCE = 8;
    const int source = pointer<int32_t>(arguments.row_to_token)[row];
    if (source < 0) return;
    const int pieces = arguments.hidden / 8;
    const uint4* from = pointer<uint4>(arguments.token_rows) + int64_t(source) * pieces;
    uint4* to = pointer<uint4>(arguments.grouped_rows) + int64_t(row) * pieces;
    for (int first = threadIdx.x % 32; first < pieces; first += 32 * AT_ONCE) {
      uint4 words[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (first + i * 32 < pieces) words[i] = load_16_bytes(reinterpret_cast<const char*>(from + first + i * 32));
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (first + i * 32 < pieces) to[first + i * 32] = words[i];
    }
  }

  // One of the WARPS warps of a block, number `warp`: all microbatches. `opened` says of how many it has read the counts.
  static __device__ __forceinline__ void run(const LayerArguments& arguments, uint64_t first_magic, int warp, volatile int& opened,
                                             BoundedWait& wait) {
    const ExpertMatmulArguments& matmul = arguments.matmul;
    for (int number = 0; number < arguments.num_microbatches; ++number) {
      const Grouping& grouping = grouping_of(arguments, number);
      wait.until<POLL_NS>(WaitTag::GROUPED_ROWS, number,
                          [&] { return __all_sync(~0u, word_reached(&grouping.grouped, first_magic + number)); });
      if (wait.aborted()) return;
      const int first_row = number % GROUPED_SETS * arguments.grouped_capacity;
      const int num_pieces = grouping.num_row_tiles * PIECES_PER_TILE;
      __syncwarp();
      if (threadIdx.x % 32 == 0) opened = number + 1;
      for (int piece = blockIdx.x * WARPS + warp; piece < num_pieces; piece += gridDim.x * WARPS) {
        const int row = first_row + piece * PIECE_ROWS;
        for (int i = 0; i < PIECE_ROWS; ++i) copy_row(matmul, row + i);
        ptx::fence_proxy_async();  // bulk loads of other blocks read what these threads wrote
        __threadfence();
        __syncwarp();
        if (threadIdx.x % 32 == 0)
          atomicAdd(pointer<unsigned long long>(matmul.row_tile_arrival) + row / TILE_ROWS, 1ull);
      }
    }
  }

  static constexpr int POLL_NS = 200;
};

}  // namespace inc
