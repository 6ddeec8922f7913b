// When the packets of a microbatch came and left, for the benchmarks. Twin: none; read by launch_switch.py.
#pragma once

#include "../../inc_runtime/device/one_sided.cuh"

namespace inc {

// Note that a packet of `magic`, there since `arrived_ns`, leaves now. A microbatch of several packets keeps the first arrival and
// the last departure. One thread.
__device__ inline void record_moment(const SwitchArguments& arguments, uint64_t magic, uint64_t arrived_ns, int num_rows) {
    if (!arguments.timeline) return;
    SwitchMoment& moment = reinterpret_cast<SwitchMoment*>(arguments.timeline)[magic % arguments.timeline_length];
    moment.magic = magic;
    atomicMin(reinterpret_cast<unsigned long long*>(&moment.arrived), (unsigned long long)arrived_ns);
    atomicMax(reinterpret_cast<unsigned long long*>(&moment.done), (unsigned long long)timer_ns());
    atomicAdd(reinterpret_cast<unsigned long long*>(&moment.num_tokens), (unsigned long long)num_rows);
}

}  // namespace inc
