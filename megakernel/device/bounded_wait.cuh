// Waits that end. Every spin of the matrix stages goes through BoundedWait: when its clock runs out it writes one
// error record (who waited, for what), and nothing traps; the host must look at the record before it uses results.
// Two kinds:
//   - for words of other blocks or PEs (`until`): after `wait_limit_clocks` the thread goes on as if the word had come, and
//     never waits for words again. The stages' own barriers stay in step, so their roles end in order, with worthless results.
//   - for barriers in shared memory (`on_barrier`): those complete once words do, so eight limits without one mean a broken
//     pipeline: the thread arrives nowhere any more and takes no further tile, its partners follow, and the launch ends.
//     (Leaving by `exit` instead makes ptxas serialise the matrix products of the whole kernel.)
#pragma once

#include <cuda/atomic>
#include <cuda/ptx>

#include <cstdint>

#include "layer_arguments.h"

namespace inc {

namespace ptx = cuda::ptx;

// Addresses travel as integers in the structures that the host fills.
template <class T>
__device__ __forceinline__ T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// What a thread waited for: bits 32..39 of the error record. 0 is "no error".
enum class WaitTag : uint32_t {
  STAGE_FILLED = 1,       // matrix warps: a K block of operands has landed in shared memory
  STAGE_EMPTY = 2,        // load warp: all readers of a stage are done with it
  STAGING_FREE = 3,       // matrix warps: the staging buffer of the results has been read
  STAGING_FILLED = 4,     // store warp: a chunk of results lies in the staging buffer
  INPUT_ROWS = 5,         // load warp: the rows of this tile have been dispatched to this rank
  ACTIVATION_ROWS = 6,    // load warp: MatMul 1 has written the activation of this row tile
  TILE = 7,               // all other roles: the block's next tile
  TILE_FREE = 8,          // load warp: all roles have read the tile before last
  GROUPED_ROWS = 9,       // load warp: the rows of a microbatch are grouped by expert
  BLOCKS = 10,            // vector warps: all blocks have counted their rows
  EXPERT_OUTPUTS = 11,    // vector warps: MatMul 2 has written the rows of a token
  ORDER_READ = 12,        // vector warps: load and copy warps have read the counts of the microbatch
  ABORTED = 13,           // nothing: this or another PE had given up, and the launch ended early
};

// One acquire load of a growing 64-bit word written by another SM of this GPU.
__device__ __forceinline__ bool word_reached(const uint64_t* word, uint64_t at_least) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_device> reference(*const_cast<uint64_t*>(word));
  return reference.load(cuda::memory_order_acquire) >= at_least;
}

// The same for a word that another GPU or the host writes.
__device__ __forceinline__ bool system_word_reached(const uint64_t* word, uint64_t at_least) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system> reference(*const_cast<uint64_t*>(word));
  return reference.load(cuda::memory_order_acquire) >= at_least;
}

constexpr uint32_t POLLS_PER_ABORT_CHECK = 64;

struct BoundedWait {
  const ExpertMatmulArguments& arguments;  // limits and addresses stay in constant memory
  bool expired = false;                    // a word did not come in time
  bool broken = false;                     // a barrier did not complete in time

  __device__ __forceinline__ explicit BoundedWait(const ExpertMatmulArguments& arguments) : arguments(arguments) {}

  // Full warps; the same answer in every lane.
  __device__ __forceinline__ bool failed() const { return __any_sync(~0u, broken); }
  __device__ __forceinline__ bool aborted() const {
    return arguments.abort_word != 0 && __any_sync(~0u, system_word_reached(pointer<uint64_t>(arguments.abort_word), 1));
  }

  // A full warp spins on `ready`, which reads words in global memory and gives every lane the same answer. After an abort it
  // returns as if the word had come. SLEEP_NS: between looks, where many warps wait for long.
  template <int SLEEP_NS = 0, class Ready>
  __device__ __forceinline__ void until(WaitTag tag, uint32_t detail, Ready ready) {
    if (ready()) return;
    const int64_t start = clock64();
    for (uint32_t polls = 1; !ready(); ++polls) {
      if (polls % POLLS_PER_ABORT_CHECK == 0 && aborted()) return;
      if (__any_sync(~0u, expired || clock64() - start > arguments.wait_limit_clocks)) {
        if (!expired) record(tag, detail);
        expired = true;
        return;
      }
      if (SLEEP_NS) __nanosleep(SLEEP_NS);
    }
  }

  // Waits until the phase of `barrier` whose parity is `parity` has completed.
  __device__ __forceinline__ void on_barrier(uint64_t* barrier, uint32_t parity, WaitTag tag, uint32_t detail) {
    if (ptx::mbarrier_try_wait_parity(barrier, parity)) return;
    const int64_t start = clock64();
    while (!broken && !ptx::mbarrier_try_wait_parity(barrier, parity)) {
      if (clock64() - start > 8 * arguments.wait_limit_clocks) {
        record(tag, detail);
        broken = true;
      }
    }
  }

  // Arrives on a barrier that others wait for with on_barrier.
  __device__ __forceinline__ void arrive(uint64_t* barrier) const {
    if (!broken) ptx::mbarrier_arrive(barrier);
  }

  // The first of the launch wins; the record may live in pinned host memory, hence system scope.
  __device__ __forceinline__ void record(WaitTag tag, uint32_t detail) {
    uint64_t expected = 0;
    const uint64_t value = uint64_t(blockIdx.x) << 40 | uint64_t(tag) << 32 | detail;
    cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*pointer<uint64_t>(arguments.error_record))
        .compare_exchange_strong(expected, value, cuda::memory_order_relaxed);
    uint64_t none = 0;
    if (arguments.abort_word != 0)  // so that all other waits of this PE end
      cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*pointer<uint64_t>(arguments.abort_word))
          .compare_exchange_strong(none, arguments.abort_value, cuda::memory_order_relaxed);
  }
};

}  // namespace inc
