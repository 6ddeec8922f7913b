// Stage 6, MatMul 2 (down): for each expert e, output = activation * down_e^T, each row multiplied in float32 by its
// routing weight (if given) before it is rounded. A tile is 128 rows x 256 columns of H.
// Waits on: activation_flags[row tile, all column tiles] >= the tile's magic (stage 4).
// Signals: tiles_done[row tile] grows by one per column tile (if given): the reduce stage takes its rows from here.
// Reads: activation [num_rows, I] bf16, down weights [E, H, I] bf16, routing_weight [num_rows] float32.
// Writes: output [num_rows, H] bf16, only rows that belong to an expert.
// Cost: 2 * num_rows * H * I operations; results/data/expert_matmul_*.csv.
#pragma once

#include "matmul_pipeline.cuh"
#include "stage4_matmul_gate_up.cuh"

namespace inc {

struct MatmulDown {
  static constexpr int NUM_PAIRS = TILE_COLUMNS / (2 * CHUNK_COLUMNS);

  static __device__ __forceinline__ int num_k_blocks(const ExpertMatmulArguments& arguments) {
    return arguments.intermediate / K_BLOCK;
  }
  static __device__ __forceinline__ int num_column_tiles(const ExpertMatmulArguments& arguments) {
    return arguments.hidden / TILE_COLUMNS;
  }

  // Load warp, all lanes: is the activation of the whole row tile written? Acquires it.
  static __device__ __forceinline__ bool rows_ready(const ExpertMatmulArguments& arguments, const Tile& tile) {
    const uint64_t* flags = MatmulGateUp::flags_of(arguments, tile.row_tile);
    bool ready = true;
#pragma unroll 1
    for (int column_tile = threadIdx.x % 32; column_tile < MatmulGateUp::num_column_tiles(arguments); column_tile += 32)
      ready = ready && word_reached(flags + column_tile, tile.magic);
    return __all_sync(~0u, ready);
  }

  static __device__ __forceinline__ void load_rows(const ExpertMatmulArguments& arguments, SharedStorage& shared,
                                                const Tile& tile, int k, uint32_t stage) {
    load_row_boxes(shared, arguments.activation_rows, tile, k, stage);
  }

  static __device__ __forceinline__ int first_column(const ExpertMatmulArguments& arguments, const Tile& tile) {
    return tile.expert * arguments.hidden + tile.column_tile * TILE_COLUMNS;
  }
  static __device__ __forceinline__ void load_columns(const ExpertMatmulArguments& arguments, SharedStorage& shared,
                                                   const Tile& tile, int k, uint32_t stage) {
    const int first = first_column(arguments, tile);
    load_column_boxes(shared, arguments.down_weights, first, first + BOX_WEIGHT_ROWS, k, stage);
  }

  // Matrix warpgroup. Rows of a half beyond the expert's are staged with weight 1 and not stored.
  static __device__ __forceinline__ void epilogue(const ExpertMatmulArguments& arguments,
                                                  const float (&result)[ACCUMULATORS], SharedStorage& shared,
                                                  const Tile& tile, StagingPosition& turn, int half, BoundedWait& wait) {
    float weight[2] = {1.0f, 1.0f};  // of the thread's two rows
    if (arguments.routing_weight != 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = half * HALF_ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i * 8;
        if (row < tile.num_rows) weight[i] = pointer<float>(arguments.routing_weight)[tile.first_row + row];
      }
    }
#pragma unroll
    for (int pair = 0; pair < NUM_PAIRS; ++pair) {
      stage_pair(shared, turn, half, wait, [&](int c, int j, float(&left)[4], float(&right)[4]) {
        const int first = ((pair * 2 + c) * 8 + j) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          left[i] = result[first + i] * weight[i / 2];
          right[i] = result[first + 4 + i] * weight[i / 2];
        }
      });
    }
  }

  // Store warp, all lanes: writes the staged results of both halves.
  static __device__ __forceinline__ void store(const ExpertMatmulArguments& arguments, SharedStorage& shared,
                                               const Tile& tile, StagingPosition& first, StagingPosition& second,
                                               BoundedWait& wait) {
    const StoreTarget target{arguments.output_rows, pointer<__nv_bfloat16>(arguments.output), arguments.hidden,
                             tile.first_row, tile.num_rows, tile.column_tile * TILE_COLUMNS};
#pragma unroll 1
    for (int pair = 0; pair < NUM_PAIRS; ++pair) {
      store_pair(shared, first, 0, target, pair, wait);
      if (tile.num_rows > HALF_ROWS) store_pair(shared, second, 1, target, pair, wait);
    }
    if (arguments.tiles_done == 0) return;
    ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(pointer<uint32_t>(arguments.tiles_done)[tile.row_tile])
          .fetch_add(1, cuda::memory_order_release);
  }
};

}  // namespace inc
