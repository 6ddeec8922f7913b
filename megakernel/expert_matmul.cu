// The expert products of one rank alone, both in one launch: MatMul 1 (gate and up) with SwiGLU, then MatMul 2 (down), over
// rows grouped by expert (stages 4 to 6), to check and to time them without a layer. The layer: megakernel.cu.
// Persistent: one block of 384 threads per SM that the rank may use; roles: device/matmul_roles.cuh.
// Cost: see results/data/expert_matmul_*.csv.
#include "matmul_roles.cuh"

namespace inc {

constexpr int MOVER_REGISTERS = 88;  // 128 * 88 + 256 * 208 = 64,512 of 65,536
constexpr int MATRIX_REGISTERS = 208;

// The rows are grouped before the launch, as one microbatch.
struct GroupedBefore {
  const ProductsArguments& arguments;
  uint64_t first_magic;
  int count = 1;

  __device__ __forceinline__ bool open(int, TileFinder& tiles, BoundedWait&) const {
    tiles.expert_row_offset = pointer<int32_t>(arguments.expert_row_offset);
    tiles.expert_row_count = pointer<int32_t>(arguments.expert_row_count);
    return true;
  }
  __device__ __forceinline__ void opened(int) const {}
};

template <bool GATHER>
__device__ __forceinline__ void run_products(const ProductsArguments& arguments) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) MatmulRoles<GATHER>::initialize(shared);
  if (warp == 1) prefetch_maps(arguments.matmul);
  __syncthreads();
  MatmulRoles<GATHER> role{arguments.matmul, shared, BoundedWait(arguments.matmul), StageTrace(0, 0, TracedUnit::MATRIX, false)};
  if (warp < MATRIX_WARP) {
    give_up_registers<MOVER_REGISTERS>();
    role.move(warp, GroupedBefore{arguments, arguments.magic});
  } else {
    take_registers<MATRIX_REGISTERS>();
    role.compute(warp / 4 - 1);
  }
}

}  // namespace inc

// Entry points. Dynamic shared memory: sizeof(inc::SharedStorage). Grid: any; more than one block per SM only queue.
extern "C" __global__ void __launch_bounds__(inc::MATMUL_THREADS, 1)
    expert_matmul(const __grid_constant__ inc::ProductsArguments arguments) {
  inc::run_products<false>(arguments);
}
extern "C" __global__ void __launch_bounds__(inc::MATMUL_THREADS, 1)
    expert_matmul_gather(const __grid_constant__ inc::ProductsArguments arguments) {
  inc::run_products<true>(arguments);
}
