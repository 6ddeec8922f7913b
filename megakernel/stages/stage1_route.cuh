// Stage 1, route: the experts and weights of each token, from router logits. One warp per token. Twin: inc_runtime/routing.py,
// route: softmax, or sigmoid with a bias that counts for the choice alone; experts in falling order, the lower id first on ties.
// Waits on: the other blocks, in the plain models. Signals: nothing. Reads: logits [num_tokens, E] float32 or bf16, bias [E].
// Writes: expert_ids, weights [num_tokens, k].
// Cost: k rounds of two warp reductions per token.
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

// The best expert that no lane has taken yet, the lower id on ties, in every lane. `key_of(expert)`: its key; `taken` has bit i
// set where this lane's i-th expert, number lane + 32 i, is used up.
template <class KeyOf>
__device__ inline int best_expert(int num_experts, uint32_t taken, int lane, KeyOf key_of) {
  decltype(key_of(0)) best = 0;  // below the key of any number
  int expert = num_experts;
  for (int e = lane; e < num_experts; e += WARP) {
    const auto key = key_of(e);
    if (!(taken >> e / WARP & 1) && key > best) best = key, expert = e;
  }
  const auto most = largest_of_warp(best);
  return __reduce_min_sync(ALL_LANES, best == most ? expert : num_experts);
}

// One warp. Returns the first expert whose logit is not finite, else -1.
__device__ inline int route_token(const LayerArguments& arguments, int token, int lane) {
  const int num_experts = arguments.num_experts, top_k = arguments.top_k;
  const int64_t row = int64_t(token) * num_experts;
  float largest = -INFINITY;
  int bad = num_experts;
  for (int expert = lane; expert < num_experts; expert += WARP) {
    const float x = logit_of(arguments, row + expert);
    if (!isfinite(x)) bad = min(bad, expert);
    largest = fmaxf(largest, x);
  }
  bad = __reduce_min_sync(ALL_LANES, bad);
  if (bad < num_experts) return bad;
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
  float total = 0;
  for (int expert = lane; expert < num_experts; expert += WARP) total += expf(logit_of(arguments, row + expert) - largest);
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(ALL_LANES, total, offset);

  const float* bias = pointer<const float>(arguments.bias);
  const bool by_score = arguments.sigmoid && bias != nullptr;
  uint32_t taken = 0;
  float weight = 0, sum = 0;  // lane c keeps the weight of choice c
  int choice = -1;
  for (int c = 0; c < top_k; ++c) {
    const int expert = by_score ? best_expert(num_experts, taken, lane,
                                              [&](int e) {
                                                const double x = logit_of(arguments, row + e);
                                                return sortable(sigmoid(x) + double(bias[e]));
                                              })
                                : best_expert(num_experts, taken, lane,
                                              [&](int e) { return sortable(logit_of(arguments, row + e)); });
    if (expert % WARP == lane) taken |= 1u << expert / WARP;
    const float x = logit_of(arguments, row + expert);
    const float score = arguments.sigmoid ? float(sigmoid(double(x))) : expf(x - largest) / total;
    sum += score;
    if (lane == c) weight = score, choice = expert;
  }
  if (lane < top_k) {
    const int64_t place = int64_t(token) * top_k + lane;
    pointer<int32_t>(arguments.expert_ids)[place] = choice;
    pointer<float>(arguments.weights)[place] = arguments.renormalize ? weight / fmaxf(sum, 1.17549435e-38f) : weight;
  }
  return -1;
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
