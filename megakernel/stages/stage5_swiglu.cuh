// Stage 5, SwiGLU: silu(gate) * up on float32 results of MatMul 1, called by the epilogue of stage 4. Its input never
// leaves the registers.
// Waits on, signals, reads, writes: nothing of its own.
// Cost: 5 special-function operations for 4 activations. One exponential and one reciprocal each would be 8, and those
// units (16 results per clock and SM) bound the epilogue: 2,048 clocks a tile then, of 33,000 for its products.
#pragma once

namespace inc {

__device__ __forceinline__ float exponential_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// result[i] = gate[i] / (1 + exp(-gate[i])) * up[i], with one reciprocal for the product of the four denominators. The
// exponentials are capped at 2^30 so that the product stays finite: for gate < -20.8 the sigmoid is then 2^-30 rather
// than less, an absolute error below 1e-9 * |gate * up|. Elsewhere a few units of float32's last place; which, depends on
// the other three, so a caller that wants rows independent of each other passes four of one row. Finite denominators
// even for a NaN gate: a NaN stays in its own result.
__device__ __forceinline__ void swiglu(const float (&gate)[4], const float (&up)[4], float (&result)[4]) {
  constexpr float LOG2_E = 1.4426950408889634f;
  constexpr float LARGEST_EXPONENT = 30.0f;
  float denominator[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) denominator[i] = 1.0f + exponential_of_two(fminf(gate[i] * -LOG2_E, LARGEST_EXPONENT));
  const float low = denominator[0] * denominator[1];
  const float high = denominator[2] * denominator[3];
  const float inverse = reciprocal(low * high);
  const float inverse_low = inverse * high;
  const float inverse_high = inverse * low;
  result[0] = gate[0] * up[0] * (inverse_low * denominator[1]);
  result[1] = gate[1] * up[1] * (inverse_low * denominator[0]);
  result[2] = gate[2] * up[2] * (inverse_high * denominator[3]);
  result[3] = gate[3] * up[3] * (inverse_high * denominator[2]);
}

}  // namespace inc
