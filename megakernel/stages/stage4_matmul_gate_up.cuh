// Stage 4, MatMul 1 (gate and up) with SwiGLU (stage 5) in its epilogue: for each expert e,
// activation = swiglu(rows * gate_e^T, rows * up_e^T). A tile is 128 rows x (128 gate + the same 128 up columns), so both
// factors of an activation meet in one thread and only the bf16 activation is written.
// Waits on: row_tile_arrival[row tile] (if given) before it reads the rows of a tile.
// Signals: activation_flags[row tile, column tile] = magic, after the 128 x 128 activation of that tile is written.
// Reads: grouped rows [num_rows, H] bf16 (or token_rows through row_to_token), gate_up weights [E, 2I, H] bf16.
// Writes: activation [num_rows, I] bf16, only rows that belong to an expert.
// Cost: 4 * num_rows * H * I operations; results/data/expert_matmul_*.csv.
#pragma once

#include "matmul_pipeline.cuh"
#include "stage5_swiglu.cuh"

namespace inc {

struct MatmulGateUp {
  static constexpr int ACTIVATION_COLUMNS = TILE_COLUMNS / 2;  // of one tile
  static_assert(ACTIVATION_COLUMNS == 2 * CHUNK_COLUMNS);

  static __device__ __forceinline__ int num_k_blocks(const ExpertMatmulArguments& arguments) {
    return arguments.hidden / K_BLOCK;
  }
  static __device__ __forceinline__ int num_column_tiles(const ExpertMatmulArguments& arguments) {
    return arguments.intermediate / ACTIVATION_COLUMNS;
  }

  // Load warp, all lanes: have the rows that this block loads arrived? Acquires them.
  static __device__ __forceinline__ bool rows_ready(const ExpertMatmulArguments& arguments, const Tile& tile) {
    if (arguments.row_tile_arrival == 0) return true;
    const uint64_t* words = pointer<uint64_t>(arguments.row_tile_arrival);
    const bool ready = system_word_reached(words + tile.row_tile, PIECES_PER_TILE);
    return __all_sync(~0u, ready);
  }

  static __device__ __forceinline__ void load_rows(const ExpertMatmulArguments& arguments, SharedStorage& shared,
                                                const Tile& tile, int k, uint32_t stage) {
    load_row_boxes(shared, arguments.input_rows, tile, k, stage);
  }

  static __device__ __forceinline__ int first_column(const ExpertMatmulArguments& arguments, const Tile& tile) {
    return tile.expert * 2 * arguments.intermediate + tile.column_tile * ACTIVATION_COLUMNS;
  }
  static __device__ __forceinline__ void load_columns(const ExpertMatmulArguments& arguments, SharedStorage& shared,
                                                   const Tile& tile, int k, uint32_t stage) {
    const int gate = first_column(arguments, tile);
    load_column_boxes(shared, arguments.gate_up_weights, gate, gate + arguments.intermediate, k, stage);
  }

  // Matrix warpgroup: columns 0..127 of `result` are gate, 128..255 (accumulators 64..127) up.
  static __device__ __forceinline__ void epilogue(const ExpertMatmulArguments&, const float (&result)[ACCUMULATORS],
                                                  SharedStorage& shared, const Tile&, StagingPosition& turn, int half,
                                                  BoundedWait& wait) {
    stage_pair(shared, turn, half, wait, [&](int c, int j, float(&left)[4], float(&right)[4]) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {  // the four that swiglu joins lie in one row: rows must not touch each other's bits
        const int l = (c * 8 + j) * 4 + i, r = l + 4, up = ACCUMULATORS / 2;
        float out[4];
        swiglu({result[l], result[l + 1], result[r], result[r + 1]},
               {result[l + up], result[l + up + 1], result[r + up], result[r + up + 1]}, out);
        left[i] = out[0], left[i + 1] = out[1], right[i] = out[2], right[i + 1] = out[3];
      }
    });
  }

  // Store warp, all lanes: writes the staged activation of both halves and raises the tile's flag.
  static __device__ __forceinline__ void store(const ExpertMatmulArguments& arguments, SharedStorage& shared,
                                               const Tile& tile, StagingPosition& first, StagingPosition& second,
                                               BoundedWait& wait) {
    const StoreTarget target{arguments.activation_rows, pointer<__nv_bfloat16>(arguments.activation), arguments.intermediate,
                             tile.first_row, tile.num_rows, tile.column_tile * ACTIVATION_COLUMNS};
    store_pair(shared, first, 0, target, 0, wait);
    if (tile.num_rows > HALF_ROWS) store_pair(shared, second, 1, target, 0, wait);
    // All bulk stores done, then every lane's own stores, ordered before the bulk loads of whoever sees the flag.
    ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
    ptx::fence_proxy_async();
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(flags_of(arguments, tile.row_tile)[tile.column_tile])
          .store(tile.magic, cuda::memory_order_release);
    }
  }

  // One word per column tile; the activation of the row tile is complete when all have reached the microbatch's magic.
  static __device__ __forceinline__ uint64_t* flags_of(const ExpertMatmulArguments& arguments, int row_tile) {
    return pointer<uint64_t>(arguments.activation_flags) + int64_t(row_tile) * num_column_tiles(arguments);
  }
};

}  // namespace inc
