// Stage 5 of the Baseline, SwiGLU: activations = silu(gate) * up, one warp per grouped row.
// Twin: megakernel/experts.py, swiglu. The arithmetic is the fused kernel's (stages/stage5_swiglu.cuh).
// Reads: projections [pairs, 2I] bf16, gate columns first; expert_ends. Writes: activations [pairs, I] bf16.
// Cost: see results/data/moe_layer_*.csv.
#pragma once

#include "../stages/stage5_swiglu.cuh"
#include "rows.cuh"

namespace inc {

__device__ __forceinline__ Word activate_word(const Word& gates, const Word& ups) {
  const uint32_t gate_pairs[4] = {gates.x, gates.y, gates.z, gates.w}, up_pairs[4] = {ups.x, ups.y, ups.z, ups.w};
  float result[WORD_ELEMENTS];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float gate[4], up[4], four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t g = gate_pairs[half * 2 + i / 2], u = up_pairs[half * 2 + i / 2];
      gate[i] = __uint_as_float(i % 2 ? g & 0xFFFF0000u : g << 16);
      up[i] = __uint_as_float(i % 2 ? u & 0xFFFF0000u : u << 16);
    }
    swiglu(gate, up, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) result[half * 4 + i] = four[i];
  }
  return rounded_word(result);
}

__device__ __forceinline__ void activate(const BaselineArguments& arguments) {
  constexpr int IN_FLIGHT = 4;
  const int num_words = arguments.intermediate_size / WORD_ELEMENTS, lane = lane_id();
  const int num_rows = __ldg(reinterpret_cast<const int32_t*>(arguments.expert_ends) + arguments.num_local_experts - 1);
  const int num_warps = gridDim.x * warps_per_block();
  for (int row = blockIdx.x * warps_per_block() + warp_id(); row < num_rows; row += num_warps) {
    const Word* gate = reinterpret_cast<const Word*>(arguments.projections) + int64_t(row) * 2 * num_words;
    Word* target = reinterpret_cast<Word*>(arguments.activations) + int64_t(row) * num_words;
    for (int first = lane; first < num_words; first += LANES * IN_FLIGHT) {
      Word gates[IN_FLIGHT], ups[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int w = first + i * LANES;
        if (w < num_words) gates[i] = __ldcs(gate + w), ups[i] = __ldcs(gate + num_words + w);
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int w = first + i * LANES;
        if (w < num_words) target[w] = activate_word(gates[i], ups[i]);
      }
    }
  }
}

}  // namespace inc
