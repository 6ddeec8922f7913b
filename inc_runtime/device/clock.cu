// The clock of a GPU, read once, so that the host can set it against its own. Twin: clock_offset_ns in backends/nvshmem.py. One
// thread.
#include "heap.cuh"

extern "C" __global__ void clock_kernel(uint64_t* now) {
    *reinterpret_cast<volatile uint64_t*>(now) = inc::timer_ns();
    __threadfence_system();
}
