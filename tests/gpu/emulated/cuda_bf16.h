// CUDA's words for a compiler that knows none of them: lanes are threads, a warp votes and shuffles over a barrier of 32, a
// block is one process. Slow, and only as strict as x86 is; it runs the index arithmetic of kernels where there is no GPU.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

using std::isfinite;
using std::max;
using std::min;

struct Index {
  unsigned x;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct Meeting {
  explicit Meeting(unsigned threads) { pthread_barrier_init(&barrier, nullptr, threads); }
  void wait() { pthread_barrier_wait(&barrier); }
  pthread_barrier_t barrier;
};
struct Warp {
  Meeting meet{32};
  uint64_t said[32];
};
struct Block {
  explicit Block(unsigned threads) : meet(threads), warps(new Warp[threads / 32]) {}
  Meeting meet;
  Warp* warps;
};
inline thread_local Index threadIdx, blockIdx;
inline Index blockDim, gridDim;
inline Block* block;

// What every lane said, handed to `answer` once all have spoken.
template <class T, class Answer>
auto after_all_lanes(T value, Answer answer) {
  Warp& warp = block->warps[threadIdx.x / 32];
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  warp.said[threadIdx.x % 32] = bits;
  warp.meet.wait();
  T all[32];
  for (int lane = 0; lane < 32; ++lane) std::memcpy(&all[lane], &warp.said[lane], sizeof(T));
  warp.meet.wait();
  return answer(all);
}

template <class T> T __shfl_sync(unsigned, T value, int lane) {
  return after_all_lanes(value, [&](const T* all) { return all[lane & 31]; });
}
template <class T> T __shfl_up_sync(unsigned, T value, int step) {
  const int own = threadIdx.x % 32;
  return after_all_lanes(value, [&](const T* all) { return own >= step ? all[own - step] : value; });
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  return after_all_lanes(value, [&](const T* all) { return all[(threadIdx.x % 32) ^ mask]; });
}
inline unsigned __ballot_sync(unsigned, int vote) {
  return after_all_lanes(vote, [](const int* all) {
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= unsigned(all[lane] != 0) << lane;
    return mask;
  });
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline unsigned __match_any_sync(unsigned, int value) {
  return after_all_lanes(value, [&](const int* all) {
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= unsigned(all[lane] == value) << lane;
    return mask;
  });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return after_all_lanes(value, [](const unsigned* all) { return *std::max_element(all, all + 32); });
}
inline int __reduce_min_sync(unsigned, int value) {
  return after_all_lanes(value, [](const int* all) { return *std::min_element(all, all + 32); });
}
inline void __syncwarp() { block->warps[threadIdx.x / 32].meet.wait(); }
inline void __syncthreads() { block->meet.wait(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned long long atomicCAS_system(unsigned long long* word, unsigned long long expected, unsigned long long wanted) {
  __atomic_compare_exchange_n(word, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldcs(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(int(value)); }

template <class To, class From> To same_bits(From value) {
  To result;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
inline float __uint_as_float(uint32_t value) { return same_bits<float>(value); }
inline float __int_as_float(int32_t value) { return same_bits<float>(value); }
inline uint32_t __float_as_uint(float value) { return same_bits<uint32_t>(value); }
inline int32_t __float_as_int(float value) { return same_bits<int32_t>(value); }
inline int64_t __double_as_longlong(double value) { return same_bits<int64_t>(value); }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 rounded(float value) {
  const uint32_t bits = same_bits<uint32_t>(value);
  return {uint16_t(std::isnan(value) ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {rounded(low), rounded(high)}; }
