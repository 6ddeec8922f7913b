// Stage 1, route: the experts and weights of each token, from router logits. One warp per token. Twin: inc_runtime/routing.py,
// route: softmax, or sigmoid with a bias that counts for the choice alone; experts in falling order, the lower id first on ties.
// Waits on: the other blocks, in the plain models. Signals: nothing. Reads: logits [num_tokens, E] float32 or bf16, bias [E].
// Writes: expert_ids, weights [num_tokens, k].
// Cost: one read of the logits, then k rounds of two warp reductions per token.
#pragma once

#include <cuda_bf16.h>

#include "bounded_wait.cuh"
#include "collective.cuh"

namespace inc {

__device__ inline float logit_of(const LayerArguments& arguments, int64_t index) {
  if (arguments.logits_are_bfloat16) return __bfloat162float(pointer<const __nv_bfloat16>(arguments.logits)[index]);
  return pointer<const float>(arguments.logits)[index];
}

// Scores of a sigmoid router saturate in float32 (logits 18 and 25 tie), so choices by score are made in float64.
__device__ inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// Grows with x, for every x that is not a NaN.
__device__ inline uint32_t sortable(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 and 0 are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline uint64_t sortable(double x) {
  const uint64_t bits = __double_as_longlong(x + 0.0);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

__device__ inline uint32_t largest_of_warp(uint32_t key) { return __reduce_max_sync(ALL_LANES, key); }
__device__ inline uint64_t largest_of_warp(uint64_t key) {
  const uint32_t high = __reduce_max_sync(ALL_LANES, uint32_t(key >> 32));
  return uint64_t(high) << 32 | __reduce_max_sync(ALL_LANES, uint32_t(key >> 32) == high ? uint32_t(key) : 0u);
}

// The logits of one token: expert lane + 32 i is the i-th of its lane. Held in registers, PER_LANE of them, where they fit: read again
// for every choice they come from L2, as the polls of other warps empty L1, and a token takes 8 us. PER_LANE = 0: read again.
template <int PER_LANE>
struct TokenLogits {
  const LayerArguments& arguments;
  const int64_t row;
  const int lane;
  float held[PER_LANE ? PER_LANE : 1];

  __device__ __forceinline__ TokenLogits(const LayerArguments& arguments, int token, int lane)
      : arguments(arguments), row(int64_t(token) * arguments.num_experts), lane(lane) {
    if constexpr (PER_LANE > 0) visit([&](int i, int expert) { held[i] = logit_of(arguments, row + expert); });
  }

  // `visit(i, expert)` for every expert of this lane.
  template <class Visit>
  __device__ __forceinline__ void visit(Visit visit) const {
    if constexpr (PER_LANE > 0) {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (lane + i * WARP < arguments.num_experts) visit(i, lane + i * WARP);
    } else {
      for (int i = 0; lane + i * WARP < arguments.num_experts; ++i) visit(i, lane + i * WARP);
    }
  }
  __device__ __forceinline__ float at(int i, int expert) const {
    if constexpr (PER_LANE > 0) return held[i];
    return logit_of(arguments, row + expert);
  }

  // The top_k experts by key, the lower id on ties: choice c and its logit in lane c. `key_of(expert, logit)` of a number is above 0.
  template <class KeyOf>
  __device__ __forceinline__ void choose(KeyOf key_of, int& choice, float& logit) const {
    uint32_t taken = 0;  // bit i: the i-th expert of this lane
    for (int c = 0; c < arguments.top_k; ++c) {
      decltype(key_of(0, 0.0f)) best = 0;
      float of_best = 0;
      int expert = arguments.num_experts;
      visit([&](int i, int e) {
        const float x = at(i, e);
        const auto key = key_of(e, x);
        if (!(taken >> i & 1) && key > best) best = key, of_best = x, expert = e;
      });
      const auto most = largest_of_warp(best);
      const int chosen = __reduce_min_sync(ALL_LANES, best == most ? expert : arguments.num_experts);
      const float of_chosen = __shfl_sync(ALL_LANES, of_best, chosen % WARP);
      if (chosen % WARP == lane) taken |= 1u << chosen / WARP;
      if (lane == c) choice = chosen, logit = of_chosen;
    }
  }
};

// One warp. Returns the first expert whose logit is not finite, else -1.
template <int PER_LANE>
__device__ __forceinline__ int route_token_of(const LayerArguments& arguments, int token, int lane) {
  const TokenLogits<PER_LANE> logits(arguments, token, lane);
  const int num_experts = arguments.num_experts, top_k = arguments.top_k;
  float largest = -INFINITY, total = 0;
  int bad = num_experts;
  logits.visit([&](int i, int expert) {
    const float x = logits.at(i, expert);
    if (!isfinite(x)) bad = min(bad, expert);
    largest = fmaxf(largest, x);
  });
  bad = __reduce_min_sync(ALL_LANES, bad);
  if (bad < num_experts) return bad;
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
  logits.visit([&](int i, int expert) { total += expf(logits.at(i, expert) - largest); });
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(ALL_LANES, total, offset);

  const float* bias = pointer<const float>(arguments.bias);
  int choice = -1;
  float logit = 0;
  if (arguments.sigmoid && bias != nullptr)
    logits.choose([&](int expert, float x) { return sortable(sigmoid(x) + double(bias[expert])); }, choice, logit);
  else
    logits.choose([](int, float x) { return sortable(x); }, choice, logit);

  const float weight = arguments.sigmoid ? float(sigmoid(double(logit))) : expf(logit - largest) / total;
  float sum = 1;
  if (arguments.renormalize) {
    sum = 0;
    for (int c = 0; c < top_k; ++c) sum += __shfl_sync(ALL_LANES, weight, c);
    sum = fmaxf(sum, 1.17549435e-38f);
  }
  if (lane < top_k) {
    const int64_t place = int64_t(token) * top_k + lane;
    pointer<int32_t>(arguments.expert_ids)[place] = choice;
    pointer<float>(arguments.weights)[place] = weight / sum;
  }
  return -1;
}

__device__ inline int route_token(const LayerArguments& arguments, int token, int lane) {
  if (arguments.num_experts <= 2 * WARP) return route_token_of<2>(arguments, token, lane);
  if (arguments.num_experts <= 4 * WARP) return route_token_of<4>(arguments, token, lane);
  return route_token_of<0>(arguments, token, lane);
}

// The choices of the microbatch's tokens. Nothing where they are given. Returns false after an abort.
__device__ inline bool route_microbatch(const Heap& heap, const Team& team, const LayerArguments& arguments, uint64_t magic,
                                        int first_token, int num_tokens) {
  if (arguments.logits == 0) return true;
  return for_each_token_to_push(heap, team, magic, num_tokens, [&](int token) {
    const int bad = route_token(arguments, first_token + token, team.lane());
    if (bad >= 0 && team.lane() == 0)
      report_value(heap, ErrorKind::BAD_LOGIT, Tag::DISPATCH_TOKENS, magic, heap.pe, first_token + token, arguments.num_experts, bad);
    __syncwarp();
  });
}

}  // namespace inc
