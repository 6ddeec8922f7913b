// The messages of a plain model: a run of rows from every rank to every rank, cut into chunks. Twin: num_chunks in
// inc_runtime/collectives/relayed.py, and wait_for_message of all_to_all.py.
//
// Waits on: the chunk flags of this rank. Signals, writes: nothing. Cost: small.
#pragma once

#include "microbatch.cuh"

namespace inc {

// The relay of the dispatch or of the combine, by the regions of its role.
template <class Region>
struct Relay {
    static constexpr bool DISPATCH = false;
    static constexpr int INDEX = 1;
    static __device__ int pe(const Heap& heap) { return heap.combine_switch; }
};
template <>
struct Relay<DispatchSwitchRegion> {
    static constexpr bool DISPATCH = true;
    static constexpr int INDEX = 0;
    static __device__ int pe(const Heap& heap) { return heap.dispatch_switch; }
};

__device__ inline int num_chunks(const Heap& heap, int num_rows) {
    return max(1, (num_rows + heap.rows_per_chunk - 1) / heap.rows_per_chunk);
}

// One chunk of one message.
struct ChunkOf {
    int step, number, first_row, num_rows;
};

// The W messages of one microbatch in the order in which they are sent; message number `step` is held by that lane of each warp.
struct Messages {
    int rows;  // of this lane's message
    int end;   // chunks of this lane's message and of those before it
    int total_chunks;

    // The i-th chunk, equal in all lanes.
    __device__ ChunkOf chunk(const Heap& heap, int i, int lane) const {
        const int step = __popc(__ballot_sync(ALL_LANES, lane < heap.num_ranks && end <= i));
        const int message_rows = __shfl_sync(ALL_LANES, rows, step);
        const int number = i - (__shfl_sync(ALL_LANES, end, step) - num_chunks(heap, message_rows));
        const int first_row = number * heap.rows_per_chunk;
        return {step, number, first_row, min(heap.rows_per_chunk, message_rows - first_row)};
    }
};

// To whom message number `step` goes: the next rank first. Twin: push_microbatch and publish_partial_sums.
__device__ inline int destination_of(const Heap& heap, int step) { return (heap.pe + 1 + step) % heap.num_ranks; }

// `rows_for`: in the lane of each rank the rows that it gets.
__device__ inline Messages messages_to(const Heap& heap, int rows_for, int lane) {
    Messages messages;
    messages.rows = __shfl_sync(ALL_LANES, rows_for, lane < heap.num_ranks ? destination_of(heap, lane) : 0);
    messages.end = lane < heap.num_ranks ? num_chunks(heap, messages.rows) : 0;
    for (int step = 1; step < WARP; step *= 2) {
        const int lower = __shfl_up_sync(ALL_LANES, messages.end, step);
        if (lane >= step) messages.end += lower;
    }
    messages.total_chunks = __shfl_sync(ALL_LANES, messages.end, heap.num_ranks - 1);
    return messages;
}

// Chunks that leave this rank. With local bypass those of the message to itself, the last one, do not.
__device__ inline int chunks_to_others(const Heap& heap, const Messages& messages) {
    return LOCAL_BYPASS ? __shfl_sync(ALL_LANES, messages.end, heap.num_ranks - 2) : messages.total_chunks;
}

// Of these messages only the one to `destination`.
__device__ inline Messages only_message_to(const Heap& heap, const Messages& all, int destination, int lane) {
    const int step = (destination - heap.pe - 1 + heap.num_ranks) % heap.num_ranks;
    const int chunks = num_chunks(heap, __shfl_sync(ALL_LANES, all.rows, step));
    return {all.rows, lane >= step ? chunks : 0, chunks};
}

// Wait for every chunk of the messages of `senders`, a mask of ranks. `flags`: chunk 0 of rank 0's message here. First chunk 0 of each; then
// `rows_of()` says in the lane of each rank how many rows its message has, which every warp calls. Returns false after an abort.
template <class RowsOf>
__device__ inline bool wait_for_messages(const Heap& heap, const Team& team, RankRegion flags, uint32_t senders, uint64_t magic,
                                         Tag tag, RowsOf rows_of) {
    constexpr int AT_ONCE = WARP - 1;  // the last lane watches the abort word
    const uint64_t slot = slot_of(magic, heap.depth);
    const Place& place = place_of(heap, flags);
    const Watch first{own<char>(heap, flags, slot), place.stride[2], senders, true, tag, magic, nullptr};
    if (wait_until_some(heap, team, first).outcome != Outcome::ARRIVED) return false;
    const int rows = rows_of();
    bool good = true;
    int window = 0;
    for (int rank = 0; rank < heap.num_ranks; ++rank) {
        if (LOCAL_BYPASS && !(senders >> rank & 1)) continue;
        const int chunks = num_chunks(heap, __shfl_sync(ALL_LANES, rows, rank));
        for (int chunk = 1; good && chunk < chunks; chunk += AT_ONCE, ++window) {
            if (window % team.num_warps() != team.warp()) continue;
            const uint32_t pending = (1u << min(AT_ONCE, chunks - chunk)) - 1;
            Watch watch{own<char>(heap, flags, slot, 0, rank, chunk), place.stride[3], pending, true, tag, magic, nullptr};
            watch.sender = rank;
            good = poll(heap, watch, team.lane()).outcome == Outcome::ARRIVED;
        }
    }
    return team.all(good);
}

}  // namespace inc
