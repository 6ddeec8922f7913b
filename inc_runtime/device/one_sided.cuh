// The verbs of the protocol on the device. Twin: inc_runtime/one_sided.py; same names, same ordering guarantees.
//
// A PE acts through a Team of blocks. A put of several segments is one packet: each warp copies its share with `put_row` and
// `put_words`, then every block that took part calls `finish_packet`; it returns true in the first warp of the last block, whose
// lanes signal. Ordering: the copies of a block happen before its barrier, the fence of its first warp and its arrival at the
// counter; the last block fences again before the words, so whoever sees a word sees the bytes of all blocks.
//
// Two links: DirectLink stores to and loads from the peers' mapped slabs; NvshmemLink goes through NVSHMEM's device API and
// stages every source in the heap. Waits on: flags of this PE. Writes: peers' regions, flags, and on failure the error record.
// Cost: results/data/collectives_*.csv.
#pragma once

#include "heap.cuh"

#if defined(INC_VERBS_NVSHMEM)
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

namespace inc {

// --- links --------------------------------------------------------------------------------------------------------------

// One warp reads `num_bytes` at `source` once and stores them to the target of every bit of `mask`.
template <int UNROLL, class TargetOf>
__device__ inline void store_to_all(const Heap& heap, const char* source, int num_bytes, int lane, uint32_t mask,
                                    TargetOf target_of) {
    for (int start = lane * 16; start < num_bytes; start += WARP * 16 * UNROLL) {
        uint4 words[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * WARP * 16 < num_bytes) words[u] = load_16_bytes(source + start + u * WARP * 16);
        for (uint32_t left = mask; left; left &= left - 1) {
            char* target = address(heap, target_of(__ffs(left) - 1)) + start;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (start + u * WARP * 16 < num_bytes) store_16_bytes(target + u * WARP * 16, words[u]);
        }
    }
}

// Loads of 16 bytes that a lane keeps in flight while it copies a row; a kernel with few registers defines it before.
#if !defined(INC_LOADS_IN_FLIGHT)
#define INC_LOADS_IN_FLIGHT 8
#endif
constexpr int LOADS_IN_FLIGHT = INC_LOADS_IN_FLIGHT;

// Peers whose slabs this PE has mapped: plain loads and stores.
struct DirectLink {
    static constexpr bool STAGED = false;

    // Copy `num_bytes` (a multiple of 16) at `source`, read once, to `target_of(bit)` for every bit of `mask`. One warp.
    template <class TargetOf>
    static __device__ void put_row(const Heap& heap, const char* source, int num_bytes, int lane, uint32_t mask,
                                   TargetOf target_of) {
        store_to_all<LOADS_IN_FLIGHT>(heap, source, num_bytes, lane, mask, target_of);
    }

    // The same for records and headers: a multiple of 8 bytes.
    template <class TargetOf>
    static __device__ void put_words(const Heap& heap, const char* source, int num_bytes, int lane, uint32_t mask,
                                     TargetOf target_of) {
        for (int start = lane * 8; start < num_bytes; start += WARP * 8) {
            const uint64_t word = *reinterpret_cast<const uint64_t*>(source + start);
            for (uint32_t left = mask; left; left &= left - 1)
                *reinterpret_cast<uint64_t*>(address(heap, target_of(__ffs(left) - 1)) + start) = word;
        }
    }

    // Where this warp can read a row of a peer: in place.
    static __device__ const char* get_row(const Heap& heap, Remote row, int num_bytes, char* landing) {
        return address(heap, row);
    }

    static __device__ void quiet() { fence_system(); }

    // Behind a `quiet` of the same thread.
    static __device__ void raise(const Heap& heap, Remote flag, uint64_t word) {
        store_word_after_fence(address(heap, flag), word);
    }
};

#if defined(INC_VERBS_NVSHMEM)
// Any peer that NVSHMEM reaches. Sources of puts lie in the heap.
struct NvshmemLink {
    static constexpr bool STAGED = true;

    template <class TargetOf>
    static __device__ void put_row(const Heap& heap, const char* source, int num_bytes, int lane, uint32_t mask,
                                   TargetOf target_of) {
        __syncwarp();
        for (uint32_t left = mask; left; left &= left - 1) {
            const Remote target = target_of(__ffs(left) - 1);
            nvshmemx_putmem_nbi_warp(address(heap, {heap.pe, target.offset}), source, num_bytes, target.pe);
        }
    }

    template <class TargetOf>
    static __device__ void put_words(const Heap& heap, const char* source, int num_bytes, int lane, uint32_t mask,
                                     TargetOf target_of) {
        put_row(heap, source, num_bytes, lane, mask, target_of);
    }

    static __device__ const char* get_row(const Heap& heap, Remote row, int num_bytes, char* landing) {
        nvshmemx_getmem_warp(landing, address(heap, {heap.pe, row.offset}), num_bytes, row.pe);
        return landing;
    }

    static __device__ void quiet() {
        nvshmem_quiet();
        fence_system();
    }

    static __device__ void raise(const Heap& heap, Remote flag, uint64_t word) {
        nvshmemx_signal_op(reinterpret_cast<uint64_t*>(address(heap, {heap.pe, flag.offset})), word, NVSHMEM_SIGNAL_SET, flag.pe);
    }
};
using Link = NvshmemLink;
#else
using Link = DirectLink;
#endif

// Into how many parts a row is cut, so that few rows still keep every warp of a block busy.
__device__ inline int parts_of_row(int num_rows, int num_warps, int row_bytes) {
    int parts = 1;
    while (parts < 8 && num_rows * parts * 2 <= num_warps && row_bytes % (parts * 32) == 0 && row_bytes >= parts * 1024)
        parts *= 2;
    return parts;
}

// --- errors -------------------------------------------------------------------------------------------------------------

__device__ inline ErrorRecord& error_record(const Heap& heap) { return *reinterpret_cast<ErrorRecord*>(heap.error_record); }

// True in the first thread of this PE that has something to report.
__device__ inline bool claim_error(const Heap& heap) { return atomicCAS(&workspace(heap).error_claimed, 0u, 1u) == 0u; }

// Raise the abort word of every PE in this PE's name. One thread.
__device__ inline void raise_abort(const Heap& heap) {
    Link::quiet();
    const uint64_t offset = offset_of(heap, RankRegion::abort);  // the first region of every role
    for (int pe = 0; pe < heap.num_pes; ++pe) Link::raise(heap, {pe, offset}, signal_word(heap.pe + 1, true));
}

// Publish the record that the claimant has filled, and raise the abort words. The first abort wins.
__device__ inline void publish_error(const Heap& heap) {
    fence_system();
    *const_cast<volatile uint32_t*>(&error_record(heap).state) = 1;
    raise_abort(heap);
}

__device__ inline bool aborted(const Heap& heap) { return load_word(own<char>(heap, RankRegion::abort)) != 0; }

// Report a value of `sender` that must not be: `field` of its header, or an expert of one of its tokens. One thread.
__device__ inline void report_value(const Heap& heap, ErrorKind kind, Tag tag, uint64_t magic, int sender, int field,
                                    uint64_t expected, uint64_t seen) {
    if (!claim_error(heap)) return;
    ErrorRecord& record = error_record(heap);
    record.kind = uint32_t(kind);
    record.tag = uint32_t(tag);
    record.magic = magic;
    record.sender = sender;
    record.field = field;
    record.expected = expected;
    record.seen[0] = seen;
    publish_error(heap);
}

// --- waits --------------------------------------------------------------------------------------------------------------

enum class Outcome : int { ARRIVED, STOPPED, ABORTED };

// What a wait returns: `arrived` is the mask of the watched flags that have come.
struct Waited {
    Outcome outcome;
    uint32_t arrived;
};

// Flags of this PE, one per lane: flag i stands `stride` bytes behind flag i - 1.
struct Watch {
    const char* flags;
    uint64_t stride;
    uint32_t pending;
    bool all;  // wait for all of `pending`, else for one at least
    Tag tag;
    uint64_t magic;
    const char* stop_words;  // a switch while idle: no limit until the first arrival, ends when all ranks have stopped
    int64_t grace = 0;       // clock cycles to wait for the rest of `pending` once some have come
    int sender = -1;         // who raises all of these flags, where lane i is not for rank i
    uint64_t microbatch = 0; // magic that an error names, where the flags count something else
};

constexpr uint32_t POLLS_PER_CHECK = 16;       // the clock is read once in so many polls
constexpr uint32_t POLLS_PER_STOP_CHECK = 64;  // and the stop words
constexpr uint32_t POLLS_BEFORE_SLEEP = 4096;
constexpr uint32_t WAIT_SLEEP_NS = 100, IDLE_SLEEP_NS = 1000;

__device__ inline void report_timeout(const Heap& heap, const Watch& watch, uint64_t word, uint32_t arrived, uint64_t waited_ns,
                                      int lane) {
    const bool claimed = __shfl_sync(ALL_LANES, lane == 0 && claim_error(heap), 0);
    if (!claimed) return;
    ErrorRecord& record = error_record(heap);
    record.seen[lane] = word;
    __syncwarp();
    if (lane != 0) return;
    record.kind = uint32_t(ErrorKind::TIMEOUT);
    record.tag = uint32_t(watch.tag);
    record.magic = watch.microbatch ? watch.microbatch : watch.magic;
    record.sender = watch.sender;
    record.expected = arrival_threshold(watch.magic);
    record.missing = watch.pending & ~arrived;
    record.waited_ns = waited_ns;
    publish_error(heap);
}

// One warp waits. Acquire: what the senders put before their words is visible to the warp, and after a barrier to the team. The
// last lane watches the abort word, where it has no flag.
__device__ inline Waited poll(const Heap& heap, const Watch& watch, int lane) {
    const bool watching = watch.pending >> lane & 1, sentinel = lane == WARP - 1 && !watching;
    const char* word_of_lane = sentinel ? own<char>(heap, RankRegion::abort) : watch.flags + lane * watch.stride;
    const uint64_t threshold = arrival_threshold(watch.magic);
    uint64_t begun = 0;
    int64_t first_arrival = 0;
    for (uint32_t polls = 1;; ++polls) {
        const uint64_t word = watching || sentinel ? load_word(word_of_lane) : 0;
        const uint32_t arrived = __ballot_sync(ALL_LANES, watching && word >= threshold);
        if (arrived == watch.pending) return {Outcome::ARRIVED, arrived};
        if (arrived && !watch.all) {
            const int64_t now = clock64();
            if (first_arrival == 0) first_arrival = now;
            if (__shfl_sync(ALL_LANES, now - first_arrival >= watch.grace, 0)) return {Outcome::ARRIVED, arrived};
        }
        if (__any_sync(ALL_LANES, sentinel && word != 0)) return {Outcome::ABORTED, 0};
        if (polls % POLLS_PER_CHECK) continue;
        if (watch.pending >> (WARP - 1) && aborted(heap)) return {Outcome::ABORTED, 0};
        const bool idle = watch.stop_words != nullptr && arrived == 0;
        const uint64_t now = __shfl_sync(ALL_LANES, timer_ns(), 0);
        if (idle) {
            if (polls % POLLS_PER_STOP_CHECK == 0) {
                const bool stopped = lane >= heap.num_ranks || load_word(watch.stop_words + 8 * lane) >= threshold;
                if (__all_sync(ALL_LANES, stopped)) return {Outcome::STOPPED, 0};
            }
        } else if (begun == 0) {
            begun = now;
        } else if (now > begun + heap.wait_limit_ns) {
            report_timeout(heap, watch, word, arrived, now - begun, lane);
            return {Outcome::ABORTED, 0};
        }
        if (polls > POLLS_BEFORE_SLEEP) __nanosleep(idle ? IDLE_SLEEP_NS : WAIT_SLEEP_NS);
    }
}

// The whole team waits; every thread gets the same answer.
__device__ inline Waited wait_until_some(const Heap& heap, const Team& team, const Watch& watch) {
    __shared__ Waited answer;
    if (team.thread < WARP) {
        const Waited waited = poll(heap, watch, team.lane());
        if (team.thread == 0) answer = waited;
    }
    team.sync();
    const Waited waited = answer;
    team.sync();
    return waited;
}

__device__ inline bool wait_until(const Heap& heap, const Team& team, const char* flag, Tag tag, uint64_t magic) {
    return wait_until_some(heap, team, {flag, 0, 1, true, tag, magic, nullptr}).outcome == Outcome::ARRIVED;
}

// --- packets ------------------------------------------------------------------------------------------------------------

// Each of the `num_blocks` blocks that fill a packet calls it once it has copied its share. Begins with a barrier. True in all
// lanes of the first warp of the last block, which then signal; false elsewhere.
__device__ inline bool finish_packet(const Heap& heap, const Team& team, Packet packet, uint64_t slot, int num_blocks) {
    team.sync();
    if (team.warp() != 0) return false;
    Link::quiet();
    if (num_blocks == 1) return true;
    bool last = false;
    if (team.lane() == 0) {
        unsigned long long* finished = reinterpret_cast<unsigned long long*>(&workspace(heap).finished[int(packet)][slot]);
        last = atomicAdd(finished, 1ull) == num_blocks - 1;
        if (last) *finished = 0;  // used again a whole ring later, behind the words that this block raises
    }
    last = __shfl_sync(ALL_LANES, last, 0);
    if (last) fence_system();
    return last;
}

// The same for a packet that one warp fills alone: it may signal afterwards.
__device__ inline void finish_warp_packet() {
    __syncwarp();
    Link::quiet();
    __syncwarp();
}

// All blocks of the team meet, so that each sees what the others wrote before. `last`, called by the first warp of the last block
// to come, does what must be done once, and returns false after an abort; its writes are seen by all, too. `key` grows with every
// meeting at this packet and slot. Returns false after an abort. Begins and ends with a barrier.
template <class Last>
__device__ inline bool meet(const Heap& heap, const Team& team, Packet packet, uint64_t slot, uint64_t key, Last last) {
    team.sync();
    bool good = true;
    if (team.warp() == 0) {
        unsigned long long* finished = reinterpret_cast<unsigned long long*>(&workspace(heap).finished[int(packet)][slot]);
        uint64_t& met = workspace(heap).met[int(packet)][slot];
        __threadfence();
        int came = 0;
        if (team.lane() == 0) came = int(atomicAdd(finished, 1ull)) + 1;
        if (__shfl_sync(ALL_LANES, came, 0) == team.num_blocks) {
            __threadfence();
            if (team.lane() == 0) *finished = 0;
            good = last(team.lane());
            __syncwarp();
            if (good && team.lane() == 0) store_word_of_gpu(&met, key);
        } else {
            for (uint32_t polls = 1; good && load_word_of_gpu(&met) < key; ++polls) good = polls % POLLS_PER_CHECK || !aborted(heap);
        }
    }
    return team.all(good);
}

// Raise a flag behind `finish_packet`. One lane.
__device__ inline void signal(const Heap& heap, Remote flag, uint64_t word) { Link::raise(heap, flag, word); }

}  // namespace inc
