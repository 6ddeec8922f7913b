// What the blocks of one launch share: a barrier over the grid, and sums of counts over the blocks below one.
// The grid must be resident as a whole (the launcher checks). Cost of a barrier: about 1.5 us.
#pragma once

#include <cuda/atomic>
#include <cuda/ptx>

#include "rows.cuh"

namespace inc {

constexpr uint64_t BARRIER_LIMIT_NS = 2'000'000'000ull;

// Every thread calls it. `word` only grows, by gridDim.x a barrier, and is used with one grid size alone.
__device__ __forceinline__ void grid_barrier(const BaselineArguments& arguments, uint64_t word_address) {
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<uint64_t, cuda::thread_scope_device> word(*reinterpret_cast<uint64_t*>(word_address));
    __threadfence();
    const uint64_t target = (word.fetch_add(1, cuda::memory_order_acq_rel) / gridDim.x + 1) * gridDim.x;
    const uint64_t deadline = cuda::ptx::get_sreg_globaltimer() + BARRIER_LIMIT_NS;
    while (word.load(cuda::memory_order_acquire) < target) {
      if (cuda::ptx::get_sreg_globaltimer() > deadline) {
        report(arguments, BaselineError::GRID_BARRIER, blockIdx.x);
        break;
      }
    }
    __threadfence();
  }
  __syncthreads();
}

struct CountSums {
  int below, all;  // over the blocks below this one, and over all blocks
};

// `counts`: [gridDim.x] of one kind, written before a grid barrier. One warp; every lane gets the sums.
__device__ __forceinline__ CountSums sum_over_blocks(const int32_t* counts) {
  CountSums sums{0, 0};
#pragma unroll 4
  for (int block = lane_id(); block < gridDim.x; block += LANES) {
    const int count = __ldcg(counts + block);
    sums.all += count;
    if (block < blockIdx.x) sums.below += count;
  }
  for (int step = LANES / 2; step > 0; step /= 2) {
    sums.below += __shfl_xor_sync(ALL_LANES, sums.below, step);
    sums.all += __shfl_xor_sync(ALL_LANES, sums.all, step);
  }
  return sums;
}

}  // namespace inc
