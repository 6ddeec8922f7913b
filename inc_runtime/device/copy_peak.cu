// The yardstick of every measurement of a switch: a plain copy between two GPUs by the same number of blocks, pushed or pulled.
// Twin: none. Reads and writes whole 16-byte words; four loads in flight per thread. Launch: any grid; RANK_THREADS or more
// threads.
#include "one_sided.cuh"

extern "C" __global__ void __launch_bounds__(1024, 1)
    copy_kernel(char* target, const char* source, uint64_t num_bytes, int repeats) {
    using namespace inc;
    constexpr int UNROLL = 4;
    const uint64_t step = uint64_t(gridDim.x) * blockDim.x * 16, begin = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        for (uint64_t at = begin; at < num_bytes; at += step * UNROLL) {
            uint4 words[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (at + u * step < num_bytes) words[u] = load_16_bytes(source + at + u * step);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (at + u * step < num_bytes) store_16_bytes(target + at + u * step, words[u]);
        }
    }
    __threadfence_system();
}
