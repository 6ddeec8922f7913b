// The persistent kernels of the switches: microbatch after microbatch of any number of layers, until all ranks stop.
// Twin: switch_emulator/run_switch.py. Launch: SWITCH_THREADS threads, as many blocks as the placement gives, all resident, with
// tile_bytes(num_ranks) of dynamic shared memory. The blocks meet only at the packets, so a fast block may be a packet ahead.
//
// Waits on: the flags of its role; idle waits have no limit and watch stop and abort. Signals, reads, writes: see the two .cuh
// files. The counter behind magic lives in the heap and is read on entry, so a kernel may be stopped and launched again.
#include "combine_switch_phased.cuh"
#include "dispatch_switch_cut_through.cuh"
#include "dispatch_switch_phased.cuh"
#include "relay_switch.cuh"

namespace inc {

// A block that starts late may find the counter behind microbatches that the others have finished: it had no part in them.
template <class Shared, class Serve>
__device__ inline void serve_until_stopped(const Heap& heap, const uint64_t* counter, Serve serve) {
    __shared__ Shared shared;
    extern __shared__ __align__(16) char dynamic[];
    const Team team = whole_block();
    const Tile tile = tile_in(dynamic, heap.num_ranks);
    if (aborted(heap)) return;
    for (int word = team.thread; word < int(sizeof(Shared) / 4); word += team.num_threads)
        reinterpret_cast<uint32_t*>(&shared)[word] = 0;
    team.sync();
    for (uint64_t magic = *counter + 1;; ++magic)
        if (serve(team, shared, tile, magic) != Outcome::ARRIVED) return;
}

// The threads of a block that copy; a phased switch has a warp more, of which that of the first block is the clerk.
__device__ inline Team copying_threads() { return {int(blockIdx.x), int(gridDim.x), int(threadIdx.x), SWITCH_THREADS}; }

// The warps of a relay end one by one; the last block remembers what ended them.
template <class Region>
__device__ inline void relay_until_stopped(const Heap& heap, const SwitchArguments& arguments) {
    const Team team = copying_threads();
    if (aborted(heap)) return;
    if (team.thread >= SWITCH_THREADS) {
        if (team.block == 0) relay_clerk<Region>(heap, team.lane()).serve();
        return;
    }
    serve_relay<Region>(heap, team, arguments);
    if (finish_packet(heap, team, Packet::LEAVE, 0, team.num_blocks)) remember_stops<Region>(heap, team.lane());
}

}  // namespace inc

extern "C" __global__ void __launch_bounds__(inc::SWITCH_THREADS, 1)
    dispatch_switch_kernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::SwitchArguments arguments) {
    using namespace inc;
#if defined(INC_CUT_THROUGH)
    __shared__ CutThroughShared shared;
    const Team team = whole_block();
    if (aborted(heap)) return;
    serve_cut_through(heap, team, shared, *own<uint64_t>(heap, DispatchSwitchRegion::magic) + 1, arguments);
    if (finish_packet(heap, team, Packet::LEAVE, 0, team.num_blocks)) remember_stops<DispatchSwitchRegion>(heap, team.lane());
#else
    serve_until_stopped<DispatchShared>(heap, own<uint64_t>(heap, DispatchSwitchRegion::magic),
                                        [&](const Team& team, DispatchShared& shared, const Tile& tile, uint64_t magic) {
                                            return serve_dispatch_microbatch(heap, team, shared, tile, magic, arguments);
                                        });
#endif
}

extern "C" __global__ void __launch_bounds__(inc::SWITCH_THREADS, 1)
    combine_switch_kernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::SwitchArguments arguments) {
    using namespace inc;
    serve_until_stopped<RegroupShared>(heap, own<uint64_t>(heap, CombineSwitchRegion::magic),
                                       [&](const Team& team, RegroupShared& shared, const Tile& tile, uint64_t magic) {
                                           return serve_combine_microbatch(heap, team, shared, tile, magic, arguments);
                                       });
}

extern "C" __global__ void __launch_bounds__(inc::SWITCH_THREADS + inc::WARP, 1)
    dispatch_phased_kernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::SwitchArguments arguments) {
    using namespace inc;
    __shared__ RegroupShared shared;
    extern __shared__ __align__(16) char dynamic[];
    const Team team = copying_threads();
    if (aborted(heap)) return;
    const uint64_t first_job = workspace(heap).jobs_done + 1;
    if (team.thread >= SWITCH_THREADS) {
        if (team.block == 0) dispatch_clerk(heap, team, team.lane()).serve();
        return;
    }
    for (uint64_t job = first_job;; ++job)
        if (serve_dispatch_job(heap, team, shared, tile_in(dynamic, heap.num_ranks), job, arguments) != Outcome::ARRIVED) return;
}

extern "C" __global__ void __launch_bounds__(inc::SWITCH_THREADS, 1)
    combine_phased_kernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::SwitchArguments arguments) {
    using namespace inc;
    __shared__ RegroupShared shared;
    extern __shared__ __align__(16) char dynamic[];
    const Team team = copying_threads();
    if (aborted(heap)) return;
    CombineLeader leader = combine_leader(heap, team);
    for (uint64_t job = workspace(heap).jobs_done + 1;; ++job) {
        if (team.block == 0 && team.warp() == 0) leader.open_next();
        if (serve_combine_job(heap, team, shared, tile_in(dynamic, heap.num_ranks), job, arguments) != Outcome::ARRIVED) return;
    }
}

extern "C" __global__ void __launch_bounds__(inc::SWITCH_THREADS + inc::WARP, 1)
    dispatch_relay_kernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::SwitchArguments arguments) {
    inc::relay_until_stopped<inc::DispatchSwitchRegion>(heap, arguments);
}

extern "C" __global__ void __launch_bounds__(inc::SWITCH_THREADS + inc::WARP, 1)
    combine_relay_kernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::SwitchArguments arguments) {
    inc::relay_until_stopped<inc::CombineSwitchRegion>(heap, arguments);
}
