// The kernels of the Baseline: one per stage, whole tensors between them. The matrix products (stages 4 and 6) and the two
// collectives are library calls; launch_baseline.py launches these, gpu_baseline.py has the order.
// All arguments travel in one structure (baseline_arguments.py); every kernel takes any grid, but the blocks of group meet in a
// barrier over the grid and must be resident as a whole.
#include "baseline_stages/activate.cuh"
#include "baseline_stages/group.cuh"
#include "baseline_stages/pack.cuh"
#include "baseline_stages/route.cuh"
#include "baseline_stages/row_sums.cuh"

namespace inc {
constexpr int MOVER_THREADS = 512;   // pack and group: one block an SM, so that few blocks meet
constexpr int STREAM_THREADS = 512;  // the others
}  // namespace inc

#define BASELINE_KERNEL(name, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ inc::BaselineArguments arguments)

BASELINE_KERNEL(route_64_experts, inc::STREAM_THREADS) { inc::route<8>(arguments); }
BASELINE_KERNEL(route_128_experts, inc::STREAM_THREADS) { inc::route<16>(arguments); }
BASELINE_KERNEL(route_256_experts, inc::STREAM_THREADS) { inc::route<32>(arguments); }
BASELINE_KERNEL(route_given, inc::STREAM_THREADS) { inc::route_given(arguments); }
BASELINE_KERNEL(pack, inc::MOVER_THREADS) {
  __shared__ inc::PackShared shared;
  inc::pack(arguments, shared);
}
BASELINE_KERNEL(group, inc::MOVER_THREADS) {
  __shared__ inc::GroupShared shared;
  inc::group(arguments, shared);
}
BASELINE_KERNEL(swiglu, inc::STREAM_THREADS) { inc::activate(arguments); }
BASELINE_KERNEL(reduce, inc::STREAM_THREADS) { inc::reduce(arguments); }
BASELINE_KERNEL(global_reduce, inc::STREAM_THREADS) { inc::global_reduce(arguments); }
BASELINE_KERNEL(do_nothing, inc::STREAM_THREADS) {}  // what a launch costs
