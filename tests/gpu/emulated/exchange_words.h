// More of CUDA's words, for the kernels of ranks and switches. See cuda_bf16.h.
#pragma once

#include <sched.h>

#include <chrono>
#include <string>
#include <thread>

#define __host__
#define __align__(bytes) alignas(bytes)

struct int2 {
  int x, y;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// The threads of a block that act for the PE; a clerk is a warp beside them.
struct TeamMeeting {
  explicit TeamMeeting(unsigned threads) : meet(threads), count(threads) {}
  void wait() { meet.wait(); }
  bool all(unsigned thread, bool good) {
    said[thread] = good;
    meet.wait();
    bool every = true;
    for (unsigned t = 0; t < count; ++t) every = every && said[t];
    meet.wait();
    return every;
  }
  Meeting meet;
  unsigned count;
  bool said[1024];
};
inline TeamMeeting* team;

inline uint64_t now_ns() { return uint64_t(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1)); }
inline int64_t clock64() { return int64_t(now_ns()); }
inline void __nanosleep(unsigned ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return after_all_lanes(value, [](const unsigned* all) {
    unsigned result = 0;
    for (int lane = 0; lane < 32; ++lane) result |= all[lane];
    return result;
  });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return after_all_lanes(value, [](const unsigned* all) { return *std::min_element(all, all + 32); });
}

template <class T>
T atomicAdd(T* word, T value) {
  return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
}
template <class T>
T replace_if(T* word, T value, bool (*better)(T, T)) {
  T seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
  while (better(value, seen) && !__atomic_compare_exchange_n(word, &seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return seen;
}
template <class T>
T atomicMax(T* word, T value) {
  return replace_if<T>(word, value, [](T a, T b) { return a > b; });
}
template <class T>
T atomicMin(T* word, T value) {
  return replace_if<T>(word, value, [](T a, T b) { return a < b; });
}
template <class T>
T atomicAdd_system(T* word, T value) {
  return atomicAdd(word, value);
}
template <class T>
T atomicMax_system(T* word, T value) {
  return atomicMax(word, value);
}
inline unsigned atomicCAS(unsigned* word, unsigned expected, unsigned wanted) {
  __atomic_compare_exchange_n(word, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
