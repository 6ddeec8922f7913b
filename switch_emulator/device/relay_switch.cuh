// The relay switch of the plain models: forwards each chunk as it lands, computes nothing, holds no microbatch.
// Twin: switch_emulator/relay_switch.py.
//
// Each warp serves cells of its own, up to 32, and each cell by itself: it copies the chunk to its destination, fences, raises the
// chunk's flag there and gives the cell back. Neighbouring cells belong to different blocks. The other warps of the SM copy while
// one waits for its fence. Waits on: relay_arrived of its cells, without limit, as a relay never knows that something must
// come; it watches stop and abort. When phased, a clerk opens the phases. Signals: expert_chunk_arrived or
// partial_chunk_arrived on the destination, relay_credits on the sender. Reads: its cells. Writes: expert_rows, its records and
// headers (dispatch) or received_partial_sums (combine).
// Cost: one local load and one remote store per row; results/data/collectives_*.csv, metric relayed.
#pragma once

#include "../../inc_runtime/device/relayed.cuh"
#include "phases.cuh"
#include "timeline.cuh"

namespace inc {

// A cell, and the number of the chunk that comes into it next.
struct RelayCell {
    int number, sender;
    uint64_t cell, next;
};

// The lane's cell of this warp; `number` is -1 where it has none. The workspace remembers what earlier launches have forwarded.
__device__ inline RelayCell cell_of_lane(const Heap& heap, const Team& team) {
    const int number = team.number_of_warp() + team.lane() * team.total_warps();
    if (number >= heap.num_ranks * heap.relay_cells) return {-1, 0, 0, 0};
    const uint64_t cell = number / heap.num_ranks, last = workspace(heap).forwarded[number];
    const uint64_t first = cell ? cell : heap.relay_cells;  // chunks are numbered from 1
    return {number, number % heap.num_ranks, cell, last ? last + heap.relay_cells : first};
}

// Where the rows of a chunk go on its destination.
template <class Region>
__device__ inline uint64_t target_of_rows(const Heap& heap, uint64_t slot, int sender, int first_row) {
    if constexpr (Relay<Region>::DISPATCH)
        return offset_of(heap, RankRegion::expert_rows, slot, uint64_t(sender) * heap.microbatch_tokens + first_row);
    else
        return offset_of(heap, RankRegion::received_partial_sums, slot, 0, sender, first_row);
}

// The records of a dispatched chunk, and with the first chunk the header of its message. One warp.
__device__ inline void forward_records(const Heap& heap, int sender, uint64_t cell, uint64_t slot, int destination, int first_row,
                                       int num_rows, int message_rows, int lane) {
    const uint64_t row = uint64_t(sender) * heap.microbatch_tokens + first_row;
    Link::put_words(heap, own<char>(heap, DispatchSwitchRegion::relay_routing, sender, cell), num_rows * heap.record_bytes, lane, 1,
                    [&](int) { return Remote{destination, offset_of(heap, RankRegion::expert_rows_routing, slot, row)}; });
    if (first_row != 0) return;
    int64_t* header = own<int64_t>(heap, DispatchSwitchRegion::relay_header, sender, cell);
    if (lane == 0) header[Header::NUM_ROWS] = message_rows;
    __syncwarp();
    Link::put_words(heap, reinterpret_cast<const char*>(header), HEADER_FIELDS * 8, lane, 1, [&](int) {
        return Remote{destination, offset_of(heap, RankRegion::expert_rows_header, slot, 0, sender)};
    });
}

// Count a chunk that has left, and close the phase of its request once all W messages of it have, W - 1 with local bypass. The counter holds messages begun
// in its upper half, and in the lower the chunks that they still lack; the order of chunks does not matter. One thread.
template <class Region>
__device__ inline void count_chunk(const Heap& heap, int sender, int destination, uint64_t magic, uint64_t number,
                                   int message_rows) {
    const int rank = Relay<Region>::DISPATCH ? sender : destination;
    const uint64_t slot = slot_of(magic, heap.depth), all = uint64_t(heap.num_ranks - LOCAL_BYPASS) << 32;
    const uint64_t more = number == 0 ? (1ull << 32) + num_chunks(heap, message_rows) - 1 : ~0ull;
    unsigned long long* left = reinterpret_cast<unsigned long long*>(&workspace(heap).chunks_left[slot][rank]);
    if (atomicAdd(left, (unsigned long long)more) + more != all) return;
    *left = 0;
    store_word_of_gpu(&workspace(heap).phase_closed[slot][rank], magic);
}

// Pass one chunk on to its destination and give its cell back. One warp.
template <class Region>
__device__ inline void forward(const Heap& heap, const RelayCell& from, const SwitchArguments& arguments, int lane) {
    const uint64_t arrived_ns = arguments.timeline ? timer_ns() : 0;
    const int64_t field = lane < CHUNK_FIELDS ? own<int64_t>(heap, Region::relay_chunk, from.sender, from.cell)[lane] : 0;
    const auto value = [&](Chunk::Field name) { return __shfl_sync(ALL_LANES, field, name); };
    const int destination = int(value(Chunk::DESTINATION)), first_row = int(value(Chunk::FIRST_ROW));
    const int num_rows = int(value(Chunk::NUM_ROWS)), message_rows = int(value(Chunk::MESSAGE_ROWS));
    const uint64_t magic = value(Chunk::MAGIC), number = value(Chunk::NUMBER), slot = slot_of(magic, heap.depth);
    if (num_rows) {
        warp_passes_port(heap, destination, Port::INGRESS, bytes_of_chunk<Region>(heap, num_rows), lane);
        if constexpr (Relay<Region>::DISPATCH)
            forward_records(heap, from.sender, from.cell, slot, destination, first_row, num_rows, message_rows, lane);
        Link::put_row(heap, own<char>(heap, Region::relay_rows, from.sender, from.cell), num_rows * int(heap.row_bytes), lane, 1,
                      [&](int) { return Remote{destination, target_of_rows<Region>(heap, slot, from.sender, first_row)}; });
    }
    finish_warp_packet();
    if (lane != 0) return;
    const RankRegion flags = Relay<Region>::DISPATCH ? RankRegion::expert_chunk_arrived : RankRegion::partial_chunk_arrived;
    signal(heap, {destination, offset_of(heap, flags, slot, 0, from.sender, number)}, signal_word(magic, num_rows > 0));
    signal(heap, {from.sender, offset_of(heap, RankRegion::relay_credits, Relay<Region>::INDEX, from.cell)},
           signal_word(from.next, true));
    workspace(heap).forwarded[from.number] = from.next;
    if (heap.phased) count_chunk<Region>(heap, from.sender, destination, magic, number, message_rows);
    atomicAdd(reinterpret_cast<unsigned long long*>(&workspace(heap).rows_sent), (unsigned long long)num_rows);
    record_moment(arguments, magic, arrived_ns, num_rows);
}

// The clerk of a phased relay: who may send its dispatch, or whose partial sums may be sent. One warp. A relay reports no missing
// rank: the ranks do.
template <class Region>
struct RelayClerk {
    static constexpr bool DISPATCH = Relay<Region>::DISPATCH;
    const Heap& heap;
    const int lane;
    PhaseQueue queue;
    InNetworkBarrier barrier;
    ClerkClock clock;
    const uint64_t stops_seen;

    __device__ bool request_has_come() const {
        if (lane >= heap.num_ranks) return false;
        const char* flag;
        if constexpr (DISPATCH)
            flag = own<char>(heap, Region::dispatch_requests, lane);
        else
            flag = own<char>(heap, Region::combine_requests, slot_of(queue.next_magic, heap.depth), lane);
        return load_word_relaxed(flag) >= arrival_threshold(queue.next_magic);
    }

    // Tell the rank that holds a place, or all ranks whose partial sums they may send.
    __device__ void open(int place, int rank, uint64_t magic) const {
        const uint64_t word = signal_word(magic, true), slot = slot_of(magic, heap.depth);
        if (DISPATCH && lane == 0) signal(heap, {rank, offset_of(heap, RankRegion::dispatch_grants, 0, place)}, word);
        if (!DISPATCH && lane < heap.num_ranks)
            signal(heap, {lane, offset_of(heap, RankRegion::phase_opened, slot, 0, rank)}, word);
    }

    __device__ bool open_phases() {
        bool moved = false;
        if (queue.held_by >= 0) {
            const uint64_t slot = slot_of(queue.held_magic, heap.depth);
            if (load_word_of_gpu(&workspace(heap).phase_closed[slot][queue.held_by]) >= queue.held_magic)
                queue.held_by = -1, moved = true;
        }
        moved = __any_sync(ALL_LANES, moved);
        int place, rank;
        uint64_t magic;
        while (queue.open_next(place, rank, magic, lane)) {
            fence_system();
            open(place, rank, magic);
            moved = true;
        }
        return moved;
    }

    __device__ void serve() {
        while (true) {
            bool moved = queue.queue_up(request_has_come(), lane);
            if constexpr (DISPATCH) {
                const char* joined = own<char>(heap, Region::barrier_joined, lane < heap.num_ranks ? lane : 0);
                moved |= barrier.look(heap, load_word_relaxed(joined), lane);
            }
            moved |= open_phases();
            if (moved) clock.restart();
            clock.expired(heap, true);
            if (moved || clock.polls % POLLS_PER_CHECK) continue;
            if (__any_sync(ALL_LANES, lane == 0 && aborted(heap))) return;
            if (clock.polls % POLLS_PER_STOP_CHECK == 0 && all_have_stopped<Region>(heap, stops_seen, lane)) break;
        }
        leave_queue(heap, queue, lane);
        if (lane == 0) workspace(heap).barrier_released = barrier.released;
    }
};

template <class Region>
__device__ inline RelayClerk<Region> relay_clerk(const Heap& heap, int lane) {
    return {heap, lane, resume_queue(heap, lane), {0, workspace(heap).barrier_released}, {}, workspace(heap).stops_seen[lane]};
}

// Serve until every rank has stopped. Every warp of every block calls it.
template <class Region>
__device__ inline void serve_relay(const Heap& heap, const Team& team, const SwitchArguments& arguments) {
    const int lane = team.lane();
    RelayCell mine = cell_of_lane(heap, team);
    const bool watching = mine.number >= 0;
    const uint64_t stops_seen = workspace(heap).stops_seen[lane];
    const char* flag = own<char>(heap, Region::relay_arrived, mine.sender, mine.cell);
    for (uint32_t polls = 1;; ++polls) {
        const uint64_t word = watching ? load_word(flag) : 0;
        const uint32_t arrived = __ballot_sync(ALL_LANES, watching && word >= arrival_threshold(mine.next));
        __syncwarp();
        for (uint32_t left = arrived; left; left &= left - 1) {
            const int at = __ffs(left) - 1;
            const RelayCell from{__shfl_sync(ALL_LANES, mine.number, at), __shfl_sync(ALL_LANES, mine.sender, at),
                                 __shfl_sync(ALL_LANES, mine.cell, at), __shfl_sync(ALL_LANES, mine.next, at)};
            forward<Region>(heap, from, arguments, lane);
            __syncwarp();
            if (lane == at) mine.next += heap.relay_cells;
        }
        if (arrived) polls = 0;
        if (polls % POLLS_PER_CHECK) continue;
        if (__any_sync(ALL_LANES, lane == 0 && aborted(heap))) return;
        if (polls % POLLS_PER_STOP_CHECK == 0 && all_have_stopped<Region>(heap, stops_seen, lane)) return;
        if (polls > POLLS_BEFORE_SLEEP) __nanosleep(IDLE_SLEEP_NS);
    }
}

}  // namespace inc
