// The port of each rank, no faster than a given rate in either direction: a token bucket per direction, in the rank's own heap.
// Twin: none on the host, whose link model has ports of its own; the rates come from placement.py.
//
// Egress of a rank: what it puts, and what the combine switch pulls from it. Ingress: rows and sums that switches and relays put to
// it. Rows and routing records are charged; headers and flags are not. Whoever moves the bytes asks before it moves them: it adds
// their cost to the rank's word and waits until what was charged before is due. The word is a time on the clock of the host, so
// that movers on several GPUs agree (Heap::clock_offset_ns); an idle port keeps the credit of a short burst.
// Waits on: the clock, and the abort word. Writes: `ports` of a rank. Cost: one atomic per batch of rows, remote for a switch; no
// instruction but a test of the rate where pacing is off.
#pragma once

#include "one_sided.cuh"

namespace inc {

enum class Port : int { EGRESS = 0, INGRESS = 1 };

constexpr uint64_t BURST_PS = 10'000'000;  // of credit that an idle port keeps: 10 us
constexpr int ROWS_AT_ONCE = 8;            // for which a warp of a switch asks together
constexpr uint32_t PACE_SLEEP_NS = 64;

__device__ inline bool paced(const Heap& heap) { return heap.port_ps_per_kib != 0; }

__device__ inline uint64_t host_clock_ps(const Heap& heap) { return (timer_ns() + uint64_t(heap.clock_offset_ns)) * 1000; }

// Wait until `num_bytes` may pass a port of `rank`. Any lanes, each for itself; a lane without bytes does not wait.
__device__ inline void pass_port(const Heap& heap, int rank, Port port, uint64_t num_bytes) {
    if (!paced(heap) || num_bytes == 0) return;
    const uint64_t cost = num_bytes * heap.port_ps_per_kib >> 10, oldest = host_clock_ps(heap) - BURST_PS;
    auto* word = reinterpret_cast<unsigned long long*>(address(heap, {rank, offset_of(heap, RankRegion::ports, uint64_t(port))}));
    uint64_t due = atomicAdd_system(word, (unsigned long long)cost);
    if (due < oldest) {
        atomicMax_system(word, (unsigned long long)(oldest + cost));
        due = oldest;
    }
    for (uint32_t polls = 1; host_clock_ps(heap) < due; ++polls) {
        if (polls % POLLS_PER_CHECK == 0 && aborted(heap)) return;
        __nanosleep(PACE_SLEEP_NS);
    }
}

// The same by one warp for one packet of its own.
__device__ inline void warp_passes_port(const Heap& heap, int rank, Port port, uint64_t num_bytes, int lane) {
    if (!paced(heap)) return;
    if (lane == 0) pass_port(heap, rank, port, num_bytes);
    __syncwarp();
}

// Let the next units of this warp, ROWS_AT_ONCE of them at most, pass the ports of all ranks: `needs(unit, rank)` says whether a unit
// of `unit_bytes` goes through the port of a rank, which is this lane's.
template <class Needs>
__device__ inline void pass_ports(const Heap& heap, Port port, int unit, int end, int step, uint64_t unit_bytes, int lane,
                                  Needs needs) {
    int units = 0;
    if (lane < heap.num_ranks)
        for (int i = 0; i < ROWS_AT_ONCE && unit + i * step < end; ++i) units += needs(unit + i * step, lane);
    pass_port(heap, lane, port, units * unit_bytes);
    __syncwarp();
}

}  // namespace inc
