// Stage 1, route: the experts and weights of each token, from router logits. One warp per token. Twin: inc_runtime/routing.py,
// route: softmax, or sigmoid with a bias that counts for the choice alone; experts in falling order, the lower id first on ties.
// Waits on, signals: nothing. Reads: logits [num_tokens, E] float32 or bf16, bias [E]. Writes: expert_ids, weights [num_tokens, k].
// Cost: k rounds of five shuffles per token and warp.
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

// The best expert that no lane has taken yet: its key and id in every lane. `key_of(i)` is the key of this lane's i-th expert,
// number lane + 32 i; `taken` has bit i set where it is used up.
template <class Key, class KeyOf>
__device__ inline int best_expert(int num_experts, uint32_t taken, int lane, KeyOf key_of) {
  Key best = 0;
  int expert = num_experts;
  for (int i = 0; lane + WARP * i < num_experts; ++i) {
    const Key key = key_of(i);
    if (!(taken >> i & 1) && (expert == num_experts || key > best)) best = key, expert = lane + WARP * i;
  }
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    const Key other_best = __shfl_xor_sync(ALL_LANES, best, offset);
    const int other = __shfl_xor_sync(ALL_LANES, expert, offset);
    if (other < num_experts && (expert == num_experts || other_best > best || (other_best == best && other < expert)))
      best = other_best, expert = other;
  }
  return expert;
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
    const int expert =
        by_score ? best_expert<double>(num_experts, taken, lane,
                                       [&](int i) {
                                         const int e = lane + WARP * i;
                                         return sigmoid(double(logit_of(arguments, row + e))) + double(bias[e]);
                                       })
                 : best_expert<float>(num_experts, taken, lane, [&](int i) { return logit_of(arguments, row + lane + WARP * i); });
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

// The choices of the microbatch's tokens, each by the warp that will put the token's record. Nothing where they are given.
__device__ inline void route_microbatch(const Heap& heap, const Team& team, const LayerArguments& arguments, uint64_t magic,
                                        int first_token, int num_tokens) {
  if (arguments.logits == 0) return;
  for_each_record(heap, team, num_tokens, [&](int token) {
    const int bad = route_token(arguments, first_token + token, team.lane());
    if (bad >= 0 && team.lane() == 0)
      report_value(heap, ErrorKind::BAD_LOGIT, Tag(0), magic, heap.pe, first_token + token, arguments.num_experts, bad);
    __syncwarp();
  });
}

}  // namespace inc
