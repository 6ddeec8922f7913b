// Phases and the INC barrier, switch side: who may go next, in order of request, at most G at once. Twin: switch_emulator/phases.py.
//
// One warp of the switch, its clerk, does all of it and copies nothing, so that grants and barriers never wait for rows. Its lane r
// stands for rank r, its lane p for place p. What must outlive a launch rests in the workspace. Waits on: request words, the words
// that close a phase, barrier_joined. Signals: dispatch_grants or phase_opened; barrier_released. Cost: two round trips a phase.
#pragma once

#include "../../inc_runtime/device/one_sided.cuh"

namespace inc {

__device__ inline uint64_t load_word_relaxed(const void* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline uint64_t least_of_ranks(const Heap& heap, uint64_t value, int lane) {
    if (lane >= heap.num_ranks) value = ~0ull;
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) {
        const uint64_t other = __shfl_xor_sync(ALL_LANES, value, step);
        value = other < value ? other : value;
    }
    return value;
}

// Requests in order of arrival and the G places that serve them.
struct PhaseQueue {
    int num_places;
    uint64_t next_magic;   // lane r: of the request that rank r makes next
    uint32_t ticket = 0;   // lane r: its place in the line, 0 where it does not wait
    uint32_t tickets = 0;  // given so far
    int held_by = -1;      // lane p: the rank that holds place p
    uint64_t held_magic = 0;

    // `came`: in lane r, that the next request of rank r is here. True if one was new.
    __device__ bool queue_up(bool came, int lane) {
        const bool mine = came && ticket == 0;
        const uint32_t fresh = __ballot_sync(ALL_LANES, mine);
        if (mine) ticket = tickets + 1 + __popc(fresh & ((1u << lane) - 1)), ++next_magic;
        tickets += __popc(fresh);
        return fresh != 0;
    }

    // Give a free place to the oldest request. False where there is none of either.
    __device__ bool open_next(int& place, int& rank, uint64_t& magic, int lane) {
        const uint32_t free = __ballot_sync(ALL_LANES, lane < num_places && held_by < 0);
        const uint32_t oldest = __reduce_min_sync(ALL_LANES, ticket ? ticket : ~0u);
        if (free == 0 || oldest == ~0u) return false;
        place = __ffs(free) - 1;
        rank = __ffs(__ballot_sync(ALL_LANES, ticket == oldest)) - 1;
        magic = __shfl_sync(ALL_LANES, next_magic, rank) - 1;
        if (lane == rank) ticket = 0;
        if (lane == place) held_by = rank, held_magic = magic;
        return true;
    }

    __device__ uint32_t ranks_with_places() const { return __reduce_or_sync(ALL_LANES, held_by >= 0 ? 1u << held_by : 0u); }
};

// The INC barrier after a phased dispatch: releases all ranks once the last has joined.
struct InNetworkBarrier {
    uint64_t joined = 0;  // lane r
    uint64_t released;

    // True if all ranks were released. `word`: barrier_joined of this lane's rank.
    __device__ bool look(const Heap& heap, uint64_t word, int lane) {
        joined = magic_of(word);
        const uint64_t least = least_of_ranks(heap, joined, lane);
        if (least <= released) return false;
        released = least;
        fence_system();
        if (lane < heap.num_ranks)
            signal(heap, {lane, offset_of(heap, RankRegion::barrier_released, 0)}, signal_word(released, true));
        return true;
    }
};

// How long a clerk has seen no progress while something was under way.
struct ClerkClock {
    uint64_t begun = 0;
    uint32_t polls = 0;

    __device__ void restart() { begun = 0, polls = 0; }

    // True once the limit has passed. `idle`: nothing is under way. Sleeps a little where nothing has come for long.
    __device__ bool expired(const Heap& heap, bool idle) {
        if (++polls > POLLS_BEFORE_SLEEP / 4) __nanosleep(idle ? IDLE_SLEEP_NS : WAIT_SLEEP_NS);
        if (idle || polls % POLLS_PER_CHECK) return false;
        const uint64_t now = __shfl_sync(ALL_LANES, timer_ns(), 0);
        if (begun == 0) begun = now;
        return now > begun + heap.wait_limit_ns;
    }
};

// The ranks that are behind the others: `value` in lane r is how far rank r is.
__device__ inline uint32_t ranks_behind(const Heap& heap, uint64_t value, int lane) {
    const uint64_t least = least_of_ranks(heap, value, lane);
    const uint32_t behind = __ballot_sync(ALL_LANES, lane < heap.num_ranks && value == least);
    return behind == every_rank(heap) ? 0 : behind;
}

// Report that `missing` have not raised the words of `tag` for `magic`. The clerk's warp.
__device__ inline void report_missing(const Heap& heap, Tag tag, uint64_t magic, uint32_t missing, uint64_t word, int lane) {
    const Watch watch{nullptr, 0, missing, true, tag, magic, nullptr};
    report_timeout(heap, watch, word, 0, heap.wait_limit_ns, lane);
}

// True once every rank has raised its stop word since the last launch: then all that was sent has arrived. `seen`: in lane r the
// word of rank r that ended the last launch, read when this one began. One warp.
template <class Region>
__device__ inline bool all_have_stopped(const Heap& heap, uint64_t seen, int lane) {
    const bool rank = lane < heap.num_ranks;
    const uint64_t word = rank ? load_word(own<char>(heap, Region::stop, lane)) : 0;
    return __all_sync(ALL_LANES, !rank || word > seen);
}

// The stop words that end this launch do not end the next one. The last warp to end.
template <class Region>
__device__ inline void remember_stops(const Heap& heap, int lane) {
    if (lane < heap.num_ranks) workspace(heap).stops_seen[lane] = load_word(own<char>(heap, Region::stop, lane));
}

// What the clerk of an earlier launch has left, and what it leaves.
__device__ inline PhaseQueue resume_queue(const Heap& heap, int lane) {
    return {heap.ranks_per_phase, workspace(heap).requested[lane] + 1};
}

__device__ inline void leave_queue(const Heap& heap, const PhaseQueue& queue, int lane) {
    workspace(heap).requested[lane] = queue.next_magic - 1;
}

}  // namespace inc
