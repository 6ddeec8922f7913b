// Stage 1 of the Baseline, route: experts and weights of each token, from logits or from what the caller chose.
// Twin: inc_runtime/routing.py, route. Ids are equal to the twin's; weights agree within float32 rounding.
// Reads: logits [N, E] float32 (and bias [E] float32), or given_ids [N, k] int32 and given_weights [N, k] float32.
// Writes: records [N] of k ids (int32), then k weights (float32). Reports a logit that is not finite, an id that does not exist.
// One warp per token; lane l holds experts l, l + 32, ... A choice is the largest key, then the lowest expert that has it.
// Cost: see results/data/moe_layer_*.csv.
#pragma once

#include "rows.cuh"

namespace inc {

constexpr int NO_KEY = 0;  // below the key of every number
constexpr float SMALLEST_SUM = 1.17549435e-38f;  // sigmoids of logits below -103 are all 0: weigh nothing, not NaN

// Monotonic: keys compare as the numbers do. Adding 0 makes one of both zeros.
__device__ __forceinline__ uint32_t key_of(float number) {
  const uint32_t bits = __float_as_uint(number + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ uint64_t key_of(double number) {
  const uint64_t bits = uint64_t(__double_as_longlong(number + 0.0));
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

__device__ __forceinline__ uint32_t largest(uint32_t key) { return __reduce_max_sync(ALL_LANES, key); }
__device__ __forceinline__ uint64_t largest(uint64_t key) {
  const uint32_t high = __reduce_max_sync(ALL_LANES, uint32_t(key >> 32));
  const uint32_t low = __reduce_max_sync(ALL_LANES, key >> 32 == high ? uint32_t(key) : 0u);
  return uint64_t(high) << 32 | low;
}

__device__ __forceinline__ double sigmoid(float logit) { return 1.0 / (1.0 + exp(-double(logit))); }

// The k best experts; lane c gets the one of column c.
template <class Key, int SLOTS>
__device__ __forceinline__ int choose(Key (&keys)[SLOTS], int top_k) {
  int chosen = 0;
  for (int column = 0; column < top_k; ++column) {
    Key own = keys[0];
#pragma unroll
    for (int slot = 1; slot < SLOTS; ++slot) own = max(own, keys[slot]);
    const Key best = largest(own);
    int expert = INT32_MAX;
#pragma unroll
    for (int slot = SLOTS - 1; slot >= 0; --slot)
      if (keys[slot] == best) expert = slot * LANES + lane_id();
    expert = __reduce_min_sync(ALL_LANES, expert);
    if (lane_id() == column) chosen = expert;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      if (expert == slot * LANES + lane_id()) keys[slot] = NO_KEY;
  }
  return chosen;
}

__device__ __forceinline__ float sum_of_lanes(float value) {
  for (int step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

__device__ __forceinline__ float max_of_lanes(float value) {
  for (int step = LANES / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

__device__ __forceinline__ void write_record(const BaselineArguments& arguments, int token, int expert, float weight) {
  int32_t* record = reinterpret_cast<int32_t*>(arguments.records) + int64_t(token) * 2 * arguments.top_k;
  if (lane_id() < arguments.top_k) {
    record[lane_id()] = expert;
    record[arguments.top_k + lane_id()] = __float_as_int(weight);
  }
}

template <int SLOTS>
__device__ __forceinline__ void route_token(const BaselineArguments& arguments, int token) {
  const int num_experts = arguments.num_experts;
  const float* logits = reinterpret_cast<const float*>(arguments.logits) + int64_t(token) * num_experts;
  float logit[SLOTS];
  bool bad = false;
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    const int expert = slot * LANES + lane_id();
    logit[slot] = expert < num_experts ? __ldg(logits + expert) : -INFINITY;
    bad = bad || (expert < num_experts && !isfinite(logit[slot]));
  }
  if (__any_sync(ALL_LANES, bad) && lane_id() == 0) report(arguments, BaselineError::BAD_LOGIT, token);

  int expert;
  if (arguments.router == int(RouterKind::SIGMOID_WITH_BIAS)) {
    const float* bias = reinterpret_cast<const float*>(arguments.bias);
    uint64_t keys[SLOTS];
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int e = slot * LANES + lane_id();
      keys[slot] = e < num_experts ? key_of(sigmoid(logit[slot]) + double(__ldg(bias + e))) : NO_KEY;
    }
    expert = choose(keys, arguments.top_k);
  } else {
    uint32_t keys[SLOTS];
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
      keys[slot] = slot * LANES + lane_id() < num_experts ? key_of(logit[slot]) : NO_KEY;
    expert = choose(keys, arguments.top_k);
  }
  expert = min(expert, num_experts - 1);  // a logit that is not a number has been reported: stay inside the array

  const bool column = lane_id() < arguments.top_k;
  const float chosen = column ? __ldg(logits + expert) : 0.0f;
  float weight;
  if (arguments.router == int(RouterKind::SOFTMAX)) {
    float high = logit[0];
#pragma unroll
    for (int slot = 1; slot < SLOTS; ++slot) high = fmaxf(high, logit[slot]);
    high = max_of_lanes(high);
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) sum += expf(logit[slot] - high);
    weight = expf(chosen - high) / sum_of_lanes(sum);
  } else {
    weight = float(sigmoid(chosen));
  }
  if (arguments.renormalize) weight /= fmaxf(sum_of_lanes(column ? weight : 0.0f), SMALLEST_SUM);
  write_record(arguments, token, expert, weight);
}

template <int SLOTS>
__device__ __forceinline__ void route(const BaselineArguments& arguments) {
  const int num_warps = gridDim.x * warps_per_block();
  for (int token = blockIdx.x * warps_per_block() + warp_id(); token < arguments.num_tokens; token += num_warps)
    route_token<SLOTS>(arguments, token);
}

// The caller's choice as records; -1 contributes nothing, whatever its weight.
__device__ __forceinline__ void route_given(const BaselineArguments& arguments) {
  const int num_warps = gridDim.x * warps_per_block();
  for (int token = blockIdx.x * warps_per_block() + warp_id(); token < arguments.num_tokens; token += num_warps) {
    int expert = -1;
    float weight = 0.0f;
    if (lane_id() < arguments.top_k) {
      const int64_t place = int64_t(token) * arguments.top_k + lane_id();
      expert = __ldg(reinterpret_cast<const int32_t*>(arguments.given_ids) + place);
      if (expert < -1 || expert >= arguments.num_experts) {
        report(arguments, BaselineError::BAD_EXPERT, token);
        expert = -1;
      }
      if (expert >= 0) {
        weight = __ldg(reinterpret_cast<const float*>(arguments.given_weights) + place);
        if (!isfinite(weight)) report(arguments, BaselineError::BAD_WEIGHT, token);
      }
    }
    write_record(arguments, token, expert, weight);
  }
}

}  // namespace inc
