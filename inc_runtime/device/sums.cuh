// Sums of bfloat16 rows in float32, sixteen bytes at a time. Twins: wait_for_token_sums in all_to_all.py, pull_and_add in
// combine_switch.py. Waits on, signals: nothing.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace inc {

__device__ inline void add_row_words(float (&sum)[8], uint4 words, float weight = 1.0f) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += weight * __uint_as_float(pairs[i] << 16);
        sum[2 * i + 1] += weight * __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

__device__ inline uint4 round_to_bf16(const float (&sum)[8]) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

}  // namespace inc
