// Gather on load: fills the row part of a stage with rows of token_rows chosen by row_to_token, by two warps with
// 16-byte asynchronous copies, in the swizzle that the matrix warps read. Replaces the bulk loads of
// stage 4's rows (and the grouped copy before it) where rows are not grouped in memory.
// Waits on: row_tile_arrival as stage 4; empty[stage]. Signals: 64 arrivals on filled[stage] per K block, each when the copies of
// its thread have landed. Rows reach the products through registers (ldmatrix), so no proxy fence is needed.
// Cost: 16 copies per thread and K block; results/data/expert_matmul_*.csv compares it with grouped rows.
#pragma once

#include "stage4_matmul_gate_up.cuh"

namespace inc {

__device__ __forceinline__ void copy_16_bytes_async(uint32_t shared_address, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address), "l"(source) : "memory");
}

// Arrives on `barrier` once this thread's copies so far have landed; counts as one of the arrivals it expects.
__device__ __forceinline__ void arrive_when_copied(uint64_t* barrier) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address) : "memory");
}

struct RowGatherer {
  static constexpr int WARPS = 2;
  static constexpr int ARRIVALS = WARPS * 32;  // per K block of any tile on filled[stage]

  // Follows the stages of a tile that needs no gathering, and arrives for each: a gatherer that fell two rounds behind could not
  // tell a stage from the same one later.
  static __device__ __forceinline__ void pass_tile(SharedStorage& shared, StagePosition& position, int num_k,
                                                   BoundedWait& wait) {
#pragma unroll 1
    for (int k = 0; k < num_k; ++k, ++position.number) {
      wait.on_barrier(&shared.empty[position.slot()], position.parity() ^ 1, WaitTag::STAGE_EMPTY, k);
      if (threadIdx.x % 32 == 0 && !wait.broken) ptx::mbarrier_arrive(&shared.filled[position.slot()], 32);
      __syncwarp();
    }
  }

  // All K blocks of one tile of stage 4. Thread t copies 16-byte piece t % 8 of rows t / 8, t / 8 + 8, ...; rows beyond the
  // expert's repeat its last one (their results are never stored).
  static __device__ __forceinline__ void fill_tile(const ExpertMatmulArguments& arguments, SharedStorage& shared,
                                                   const Tile& tile, StagePosition& position, BoundedWait& wait) {
    const int piece = threadIdx.x % 8;
    const int first_row = threadIdx.x % 64 / 8;
    const int pieces_per_row = arguments.hidden / 8;
    uint32_t source[16];  // in pieces of 16 bytes: half the registers of addresses
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = tile.first_row + min(first_row + 8 * i, tile.num_rows - 1);
      source[i] = uint32_t(pointer<int32_t>(arguments.row_to_token)[row]) * pieces_per_row + piece;
    }
    const uint4* pieces = pointer<uint4>(arguments.token_rows);
    wait.until(WaitTag::INPUT_ROWS, tile.row_tile, [&] { return MatmulGateUp::rows_ready(arguments, tile); });
    const int num_k = MatmulGateUp::num_k_blocks(arguments);
    const bool second_half = tile.num_rows > HALF_ROWS;
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared.rows[0])) +
                          swizzled_offset(first_row, piece);  // rows 8 apart have the same swizzle
#pragma unroll 1
    for (int k = 0; k < num_k; ++k, ++position.number) {
      const uint32_t stage = position.slot();
      wait.on_barrier(&shared.empty[stage], position.parity() ^ 1, WaitTag::STAGE_EMPTY, k);
      const uint32_t target = base + stage * (2 * ROW_BOX_BYTES);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (i < 8 || second_half) copy_16_bytes_async(target + i * 8 * BOX_ROW_BYTES, pieces + (source[i] + k * (K_BLOCK / 8)));
      if (!wait.broken) arrive_when_copied(&shared.filled[stage]);
    }
  }
};

}  // namespace inc
