// Which stage ran when, noted by one thread per block and class of unit; compiled in with -DINC_TRACE, else nothing. The host
// turns the events into the timeline (megakernel/device_trace.py).
// Writes: trace [block, unit, event]. Cost: four clock reads and 40 bytes per event.
#pragma once

#include "bounded_wait.cuh"

namespace inc {

enum class TracedUnit : int { VECTOR = 0, MATRIX = 1 };
constexpr int TRACED_UNITS = 2;

#if defined(INC_TRACE)
struct StageTrace {
  TraceEvent* events;
  int length;
  bool writes;
  int count = 0;
  uint64_t begun = 0;
  int64_t begun_clock = 0;

  // `writes`: true in the one thread that notes events of this unit of the block.
  __device__ __forceinline__ StageTrace(uint64_t address, int length, TracedUnit unit, bool writes)
      : events(pointer<TraceEvent>(address) + (int64_t(blockIdx.x) * TRACED_UNITS + int(unit)) * length), length(length),
        writes(writes && address != 0) {}

  static __device__ __forceinline__ uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  }
  __device__ __forceinline__ void begin() {
    if (writes) begun = now(), begun_clock = clock64();
  }
  __device__ __forceinline__ void end(TracedStage stage, uint64_t magic, int rows) {
    if (!writes || count >= length) return;
    events[count++] = {begun, now(), uint64_t(clock64() - begun_clock), magic, uint32_t(stage), uint32_t(rows)};
  }
};
#else
struct StageTrace {
  __device__ __forceinline__ StageTrace(uint64_t, int, TracedUnit, bool) {}
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void end(TracedStage, uint64_t, int) {}
};
#endif

}  // namespace inc
