// Stage 1 of the Baseline, route: experts and weights of each token, from logits or from what the caller chose.
// Twin: inc_runtime/routing.py, route. Ids are equal to the twin's; weights agree within float32 rounding.
// Reads: logits [N, E] float32 (and bias [E] float32), or given_ids [N, k] int32 and given_weights [N, k] float32.
// Writes: expert_ids [N, k] int32, weights [N, k] float32. Reports a logit that is not finite, an id that does not exist.
// Writes too: token_ranks [N]: the mask of the ranks whose experts a token takes.
// G lanes hold a token, 8 neighbouring experts each, so that a warp routes 32 / G tokens at once. A choice is the largest key,
// then the lowest expert that has it: the lowest lane, then the lowest of its 8.
// Cost: bound by comparisons, which issue at half rate, not by bytes. Measured at 4,096 / 16,384 / 65,536 tokens: one warp per
// token 8.0 / 14.7 / 36.7 us, 32 / G tokens a warp with unsorted lanes 9.3 / 12.0 / 34.2; sorted lanes: not measured yet.
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

__device__ __forceinline__ double sigmoid(float logit) { return 1.0 / (1.0 + exp(-double(logit))); }

constexpr int EXPERTS_OF_LANE = 8;

// Over the G lanes of a token.
template <int G, class T, class Join>
__device__ __forceinline__ T join_lanes(T value, Join join) {
#pragma unroll
  for (int step = G / 2; step > 0; step /= 2) value = join(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

template <class Key>
__device__ __forceinline__ Key largest(Key a, Key b) { return a > b ? a : b; }

// The 8 experts of a lane, best first; equal keys stay in the order of their numbers.
template <class Key>
struct SortedLane {
  Key keys[EXPERTS_OF_LANE];
  uint32_t places;  // of the keys among the 8, four bits each, the first in the lowest

  __device__ __forceinline__ explicit SortedLane(const Key (&unsorted)[EXPERTS_OF_LANE]) {
    uint32_t place[EXPERTS_OF_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i) keys[i] = unsorted[i], place[i] = i;
#pragma unroll
    for (int phase = 0; phase < EXPERTS_OF_LANE; ++phase) {
#pragma unroll
      for (int i = phase % 2; i + 1 < EXPERTS_OF_LANE; i += 2) {  // neighbours alone, so that the order of equals is kept
        const bool swap = keys[i] < keys[i + 1];
        const Key key = keys[i];
        keys[i] = swap ? keys[i + 1] : key;
        keys[i + 1] = swap ? key : keys[i + 1];
        const uint32_t number = place[i];
        place[i] = swap ? place[i + 1] : number;
        place[i + 1] = swap ? number : place[i + 1];
      }
    }
    places = 0;
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i) places |= place[i] << 4 * i;
  }

  // The best expert that is left over the G lanes of a token, on all of them; it is taken out.
  template <int G>
  __device__ __forceinline__ int take_best() {
    const Key best = join_lanes<G>(keys[0], [](Key a, Key b) { return largest(a, b); });
    const int first_lane = lane_id() / G * G;
    const uint32_t group = G == LANES ? ALL_LANES : bits_below(G % LANES) << first_lane;
    const int leader = __ffs(__ballot_sync(ALL_LANES, keys[0] == best) & group) - 1;
    const int place = __shfl_sync(ALL_LANES, int(places & 15), leader);
    if (lane_id() == leader) {
#pragma unroll
      for (int i = 0; i + 1 < EXPERTS_OF_LANE; ++i) keys[i] = keys[i + 1];
      keys[EXPERTS_OF_LANE - 1] = NO_KEY;
      places >>= 4;
    }
    return (leader - first_lane) * EXPERTS_OF_LANE + place;
  }
};

// Writes the choice of column `c`, which one lane holds, and the mask of the ranks.
__device__ __forceinline__ void write_choice(const BaselineArguments& arguments, int token, int c, int expert, float weight) {
  const int64_t place = int64_t(token) * arguments.top_k + c;
  reinterpret_cast<int32_t*>(arguments.expert_ids)[place] = expert;
  reinterpret_cast<float*>(arguments.weights)[place] = weight;
}

// Columns beyond the first G belong to the same lanes again. All lanes of the warp call it.
template <int G, class Key>
__device__ __forceinline__ void choose_and_weigh(const BaselineArguments& arguments, int token, bool valid, const float* logits,
                                                 SortedLane<Key> sorted, float high, float sum) {
  constexpr int COLUMNS = LANES / G;
  const int place = lane_id() % G, top_k = arguments.top_k;
  int chosen[COLUMNS];
  float weight[COLUMNS], all = 0.0f;
  uint32_t ranks = 0;
#pragma unroll
  for (int part = 0; part < COLUMNS; ++part) {
    if (part * G >= top_k) break;
    for (int c = 0; c < G && part * G + c < top_k; ++c) {
      const int expert = sorted.template take_best<G>();
      if (c == place) chosen[part] = expert;
    }
    if (valid && part * G + place < top_k) {
      chosen[part] = min(chosen[part], arguments.num_experts - 1);  // logits that are no numbers: stay inside the array
      const float logit = __ldg(logits + chosen[part]);
      weight[part] = arguments.router == int(RouterKind::SOFTMAX) ? expf(logit - high) / sum : float(sigmoid(logit));
      all += weight[part];
      ranks |= 1u << rank_of_expert(arguments, chosen[part]);
    }
  }
  float scale = 1.0f;
  if (arguments.renormalize) scale = fmaxf(join_lanes<G>(all, [](float a, float b) { return a + b; }), SMALLEST_SUM);
  ranks = join_lanes<G>(ranks, [](uint32_t a, uint32_t b) { return a | b; });
#pragma unroll
  for (int part = 0; part < COLUMNS; ++part) {
    const int c = part * G + place;
    if (valid && c < top_k) write_choice(arguments, token, c, chosen[part], arguments.renormalize ? weight[part] / scale : weight[part]);
  }
  if (valid && place == 0) reinterpret_cast<uint32_t*>(arguments.token_ranks)[token] = ranks;
}

__device__ __forceinline__ void load_logits(float (&logit)[EXPERTS_OF_LANE], const float* logits, int first, int num_experts) {
  if (num_experts % EXPERTS_OF_LANE == 0 && first < num_experts) {
    const float4 low = __ldg(reinterpret_cast<const float4*>(logits + first));
    const float4 high = __ldg(reinterpret_cast<const float4*>(logits + first) + 1);
    logit[0] = low.x, logit[1] = low.y, logit[2] = low.z, logit[3] = low.w;
    logit[4] = high.x, logit[5] = high.y, logit[6] = high.z, logit[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i) logit[i] = first + i < num_experts ? __ldg(logits + first + i) : 0.0f;
  }
}

template <int G>
__device__ __forceinline__ void route_tokens(const BaselineArguments& arguments, int first_token) {
  constexpr float LOG2_E = 1.4426950408889634f;
  const int token = first_token + lane_id() / G, num_experts = arguments.num_experts;
  const int first = lane_id() % G * EXPERTS_OF_LANE, own = min(max(num_experts - first, 0), EXPERTS_OF_LANE);
  const bool valid = token < arguments.num_tokens;
  const float* logits = reinterpret_cast<const float*>(arguments.logits) + int64_t(valid ? token : first_token) * num_experts;
  float logit[EXPERTS_OF_LANE];
  load_logits(logit, logits, first, num_experts);

  float high = -INFINITY, finite = 0.0f;  // `finite` becomes NaN where a logit is not finite
#pragma unroll
  for (int i = 0; i < EXPERTS_OF_LANE; ++i) {
    if (i < own) high = fmaxf(high, logit[i]);
    finite = fmaf(logit[i], 0.0f, finite);
  }
  if (valid && finite != 0.0f) report(arguments, BaselineError::BAD_LOGIT, token);
  if (arguments.router == int(RouterKind::SIGMOID_WITH_BIAS)) {
    const float* bias = reinterpret_cast<const float*>(arguments.bias);
    uint64_t keys[EXPERTS_OF_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i)
      keys[i] = i < own ? key_of(sigmoid(logit[i]) + double(__ldg(bias + first + i))) : NO_KEY;
    choose_and_weigh<G>(arguments, token, valid, logits, SortedLane<uint64_t>(keys), 0.0f, 1.0f);
  } else {
    high = join_lanes<G>(high, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0.0f;
    uint32_t keys[EXPERTS_OF_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; ++i) {
      if (i < own) sum += exp2f((logit[i] - high) * LOG2_E);
      keys[i] = i < own ? key_of(logit[i]) : NO_KEY;
    }
    sum = join_lanes<G>(sum, [](float a, float b) { return a + b; });
    choose_and_weigh<G>(arguments, token, valid, logits, SortedLane<uint32_t>(keys), high, sum);
  }
}

template <int G>
__device__ __forceinline__ void route(const BaselineArguments& arguments) {
  constexpr int TOKENS = LANES / G;  // of one warp at once
  const int num_warps = gridDim.x * warps_per_block();
  for (int first = (blockIdx.x * warps_per_block() + warp_id()) * TOKENS; first < arguments.num_tokens; first += num_warps * TOKENS)
    route_tokens<G>(arguments, first);
}

// The caller's choice as records; -1 contributes nothing, whatever its weight. One warp per token.
__device__ __forceinline__ void route_given(const BaselineArguments& arguments) {
  const int num_warps = gridDim.x * warps_per_block(), lane = lane_id();
  for (int token = blockIdx.x * warps_per_block() + warp_id(); token < arguments.num_tokens; token += num_warps) {
    int expert = -1;
    float weight = 0.0f;
    if (lane < arguments.top_k) {
      const int64_t place = int64_t(token) * arguments.top_k + lane;
      expert = __ldg(reinterpret_cast<const int32_t*>(arguments.given_ids) + place);
      if (expert < -1 || expert >= arguments.num_experts) {
        report(arguments, BaselineError::BAD_EXPERT, token);
        expert = -1;
      }
      if (expert >= 0) {
        weight = __ldg(reinterpret_cast<const float*>(arguments.given_weights) + place);
        if (!isfinite(weight)) report(arguments, BaselineError::BAD_WEIGHT, token);
      }
      write_choice(arguments, token, lane, expert, weight);
    }
    const uint32_t own = expert >= 0 ? 1u << rank_of_expert(arguments, expert) : 0;
    const uint32_t ranks = join_lanes<LANES>(own, [](uint32_t a, uint32_t b) { return a | b; });
    if (lane == 0) reinterpret_cast<uint32_t*>(arguments.token_ranks)[token] = ranks;
  }
}

}  // namespace inc
