// What a kernel knows of the symmetric heap: the team of threads that acts for a PE, places on any PE, and loads and stores with
// their order. Twins: heap_layout.py (the table of places comes from it, through arguments.py) and protocol.py (through
// protocol.h). Waits on, signals: nothing. Cost: an address is a few integer operations on constants.
#pragma once

#include "arguments.h"
#include "protocol.h"

namespace inc {
using namespace protocol;

constexpr int WARP = 32;
#if defined(INC_DIRECT)  // a world without switches: direct.cuh
constexpr bool DIRECT = true;
#else
constexpr bool DIRECT = false;
#endif
#if defined(INC_LOCAL_BYPASS)  // rows of a rank's own experts stay on it: local_bypass.cuh
constexpr bool LOCAL_BYPASS = true;
#else
constexpr bool LOCAL_BYPASS = false;
#endif
#if defined(INC_CUT_THROUGH)  // the dispatch switch forwards groups of tokens as they arrive: cut_through.cuh
constexpr bool CUT_THROUGH = true;
#else
constexpr bool CUT_THROUGH = false;
#endif
// Switches of each role: plane p of both serves the same share of every microbatch, tokens p * plane_tokens on.
#if !defined(INC_PLANES)
#define INC_PLANES 1
#endif
constexpr int PLANES = INC_PLANES;
// Whether a sender's run in a slot may have places without a row: then a received row without a local expert is none.
constexpr bool GAPS = LOCAL_BYPASS || CUT_THROUGH;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// The threads of one block that act for the PE, and the block's place among its blocks.
struct Team {
    int block, num_blocks, thread, num_threads;

    __device__ int lane() const { return thread % WARP; }
    __device__ int warp() const { return thread / WARP; }
    __device__ int num_warps() const { return num_threads / WARP; }
    // Of all warps of all blocks; neighbours are in different blocks.
    __device__ int number_of_warp() const { return warp() * num_blocks + block; }
    __device__ int total_warps() const { return num_warps() * num_blocks; }
    __device__ void sync() const { asm volatile("bar.sync 1, %0;" ::"r"(num_threads) : "memory"); }
    // A barrier that returns true in every thread where `good` is true in every thread.
    __device__ bool all(bool good) const {
        uint32_t every;
        asm volatile(
            "{ .reg .pred mine, every; setp.ne.u32 mine, %1, 0; bar.red.and.pred every, 1, %2, mine; selp.u32 %0, 1, 0, every; }"
            : "=r"(every)
            : "r"(uint32_t(good)), "r"(num_threads)
            : "memory");
        return every != 0;
    }
};

__device__ inline Team whole_block() { return {int(blockIdx.x), int(gridDim.x), int(threadIdx.x), int(blockDim.x)}; }

// --- places -------------------------------------------------------------------------------------------------------------

__device__ inline const Place& place_of(const Heap& heap, RankRegion r) { return heap.rank_places[int(r)]; }
__device__ inline const Place& place_of(const Heap& heap, DispatchSwitchRegion r) { return heap.dispatch_places[int(r)]; }
__device__ inline const Place& place_of(const Heap& heap, CombineSwitchRegion r) { return heap.combine_places[int(r)]; }

template <class R>
__device__ inline uint64_t offset_of(const Heap& heap, R region, uint64_t i = 0, uint64_t j = 0, uint64_t k = 0, uint64_t l = 0) {
    const Place& place = place_of(heap, region);
    return place.offset + i * place.stride[0] + j * place.stride[1] + k * place.stride[2] + l * place.stride[3];
}

// A place on some PE; the region must be one of that PE's role.
struct Remote {
    int pe;
    uint64_t offset;
};

__device__ inline char* address(const Heap& heap, Remote remote) {
    return reinterpret_cast<char*>(heap.base[remote.pe] + remote.offset);
}

template <class T, class R>
__device__ inline T* own(const Heap& heap, R region, uint64_t i = 0, uint64_t j = 0, uint64_t k = 0, uint64_t l = 0) {
    return reinterpret_cast<T*>(address(heap, {heap.pe, offset_of(heap, region, i, j, k, l)}));
}

__device__ inline uint32_t every_rank(const Heap& heap) { return heap.num_ranks == MAX_RANKS ? ALL_LANES : (1u << heap.num_ranks) - 1; }

__device__ inline Workspace& workspace(const Heap& heap) { return *reinterpret_cast<Workspace*>(heap.workspace); }

// --- planes -------------------------------------------------------------------------------------------------------------

// Of this switch; 0 on a rank.
__device__ inline int own_plane(const Heap& heap) { return PLANES > 1 ? heap.plane : 0; }
__device__ inline int plane_tokens(const Heap& heap) { return PLANES > 1 ? heap.plane_tokens : heap.microbatch_tokens; }
__device__ inline int first_token_of_plane(const Heap& heap, int plane) { return PLANES > 1 ? plane * heap.plane_tokens : 0; }
// Where the rows of a plane begin in a slot of an expert rank, without phases.
__device__ inline uint64_t first_row_of_plane(const Heap& heap) {
    return PLANES > 1 ? uint64_t(heap.plane) * heap.num_ranks * heap.plane_tokens : 0;
}

// --- memory -------------------------------------------------------------------------------------------------------------

__device__ inline uint64_t load_word(const void* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline void store_word(void* word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Release and acquire for the whole system; with relaxed accesses around it.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline void store_word_after_fence(void* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Words between the blocks of one PE.
__device__ inline uint64_t load_word_of_gpu(const void* word) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline void store_word_of_gpu(void* word, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline uint4 load_16_bytes(const char* source) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source)
                 : "memory");
    return v;
}

__device__ inline void store_16_bytes(char* target, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ inline uint64_t timer_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

}  // namespace inc
