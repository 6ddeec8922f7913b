// How a rank sends through a relay switch, and how it waits for what came through one. Twin:
// inc_runtime/collectives/relayed.py, and wait_for_message of all_to_all.py.
//
// A message is a run of rows to one rank, cut into chunks; each chunk is one packet of one warp into a cell of the relay. The
// chunks of one microbatch are numbered through, message by message, and dealt to the warps of all blocks in turn; a warp waits
// for the credit of the cell that its chunk's number gives. Waits on: relay_credits; the chunk flags of this rank. Signals:
// relay_arrived. Writes: relay_chunk, relay_header, relay_rows, relay_routing on the relay; chunk_header here.
// Cost: one remote store per row, a fence and a flag per chunk.
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

// Of these messages only the one to `destination`.
__device__ inline Messages only_message_to(const Heap& heap, const Messages& all, int destination, int lane) {
    const int step = (destination - heap.pe - 1 + heap.num_ranks) % heap.num_ranks;
    const int chunks = num_chunks(heap, __shfl_sync(ALL_LANES, all.rows, step));
    return {all.rows, lane >= step ? chunks : 0, chunks};
}

// Number the chunks of this microbatch behind all that this rank has sent through the relay. The first warp of one block.
template <class Region>
__device__ inline void number_chunks(const Heap& heap, uint64_t slot, int total_chunks, int lane) {
    if (lane != 0) return;
    uint64_t* sent = own<uint64_t>(heap, RankRegion::chunks_sent, Relay<Region>::INDEX);
    workspace(heap).chunks_before[Relay<Region>::INDEX][slot] = *sent;
    *sent += total_chunks;
}

// Wait until the chunk that stood in this chunk's cell has left. One warp. Returns false after an abort.
template <class Region>
__device__ inline bool wait_for_credit(const Heap& heap, uint64_t chunk, uint64_t magic, int lane) {
    const uint64_t cells = heap.relay_cells;
    if (chunk <= cells) return true;
    Watch watch{own<char>(heap, RankRegion::relay_credits, Relay<Region>::INDEX, chunk % cells),
                0,
                1,
                true,
                Tag::RELAY_CREDIT,
                chunk - cells,
                nullptr};
    watch.sender = Relay<Region>::pe(heap);
    watch.microbatch = magic;
    const bool arrived = poll(heap, watch, lane).outcome == Outcome::ARRIVED;
    __syncwarp();
    return arrived;
}

// Put `num_words` 8-byte words; `source_at(word)` and `target_at(word)` say where each stands. One warp, direct links.
template <class SourceAt, class TargetAt>
__device__ inline void put_scattered_words(int num_words, int lane, SourceAt source_at, TargetAt target_at) {
    constexpr int UNROLL = 4;
    for (int start = lane; start < num_words; start += WARP * UNROLL) {
        uint64_t words[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * WARP < num_words) words[u] = *source_at(start + u * WARP);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * WARP < num_words) *target_at(start + u * WARP) = words[u];
    }
}

// What a chunk costs on a port: its rows and, where it has them, their records.
template <class Region>
__device__ inline uint64_t bytes_of_chunk(const Heap& heap, int num_rows) {
    return uint64_t(num_rows) * (heap.row_bytes + (Relay<Region>::DISPATCH ? heap.record_bytes : 0));
}

// Send one chunk: the fields, for a dispatch `header` and records, the rows. `row_at(i)` is where row i of the message stands,
// `record_at(i)` its record. One warp, which has the credit of the cell.
template <class Region, class RowAt, class RecordAt>
__device__ inline void send_chunk(const Heap& heap, uint64_t chunk, uint64_t magic, const Messages& messages, const ChunkOf& part,
                                  const char* header, RowAt row_at, RecordAt record_at, int lane) {
    const int relay = Relay<Region>::pe(heap);
    const uint64_t cell = chunk % heap.relay_cells;
    const int message_rows = __shfl_sync(ALL_LANES, messages.rows, part.step);
    const int64_t fields[CHUNK_FIELDS] = {destination_of(heap, part.step), int64_t(magic), part.number,
                                          num_chunks(heap, message_rows),  part.first_row, part.num_rows,
                                          message_rows};
    int64_t* own_fields = own<int64_t>(heap, RankRegion::chunk_header, Relay<Region>::INDEX, cell);
#pragma unroll
    for (int field = 0; field < CHUNK_FIELDS; ++field)
        if (lane == field) own_fields[field] = fields[field];
    __syncwarp();
    const auto put_fixed = [&](const char* source, int num_bytes, Region region) {
        Link::put_words(heap, source, num_bytes, lane, 1,
                        [&](int) { return Remote{relay, offset_of(heap, region, heap.pe, cell)}; });
    };
    warp_passes_port(heap, heap.pe, Port::EGRESS, bytes_of_chunk<Region>(heap, part.num_rows), lane);
    put_fixed(reinterpret_cast<const char*>(own_fields), CHUNK_FIELDS * 8, Region::relay_chunk);
    if constexpr (Relay<Region>::DISPATCH) {
        put_fixed(header, HEADER_FIELDS * 8, Region::relay_header);
        const uint64_t records = offset_of(heap, Region::relay_routing, heap.pe, cell);
        if constexpr (Link::STAGED) {
            for (int i = 0; i < part.num_rows; ++i)
                Link::put_words(heap, record_at(part.first_row + i), heap.record_bytes, lane, 1,
                                [&](int) { return Remote{relay, records + uint64_t(i) * heap.record_bytes}; });
        } else {
            const int words = heap.record_bytes / 8;
            uint64_t* target = reinterpret_cast<uint64_t*>(address(heap, {relay, records}));
            put_scattered_words(
                part.num_rows * words, lane,
                [&](int at) { return reinterpret_cast<const uint64_t*>(record_at(part.first_row + at / words)) + at % words; },
                [&](int at) { return target + at; });
        }
    }
    for (int i = 0; i < part.num_rows; ++i)
        Link::put_row(heap, row_at(part.first_row + i), heap.row_bytes, lane, 1,
                      [&](int) { return Remote{relay, offset_of(heap, Region::relay_rows, heap.pe, cell, i)}; });
    finish_warp_packet();
    if (lane == 0)
        signal(heap, {relay, offset_of(heap, Region::relay_arrived, heap.pe, cell)}, signal_word(chunk, part.num_rows > 0));
}

// Send all chunks of one microbatch, those of this team's warps. All blocks have met since `number_chunks`.
template <class Region, class RowAt, class RecordAt>
__device__ inline void send_messages(const Heap& heap, const Team& team, uint64_t magic, const Messages& messages,
                                     const char* header, RowAt row_at, RecordAt record_at) {
    const int lane = team.lane();
    const uint64_t before = workspace(heap).chunks_before[Relay<Region>::INDEX][slot_of(magic, heap.depth)];
    for (int i = team.number_of_warp(); i < messages.total_chunks; i += team.total_warps()) {
        const uint64_t chunk = before + 1 + i;
        if (!wait_for_credit<Region>(heap, chunk, magic, lane)) return;
        const ChunkOf part = messages.chunk(heap, i, lane);
        const int destination = destination_of(heap, part.step);
        send_chunk<Region>(
            heap, chunk, magic, messages, part, header, [&](int row) { return row_at(destination, row); },
            [&](int row) { return record_at(destination, row); }, lane);
    }
}

// Wait for every chunk of the messages of all ranks. `flags`: chunk 0 of rank 0's message here. First chunk 0 of each; then
// `rows_of()` says in the lane of each rank how many rows its message has, which every warp calls. Returns false after an abort.
template <class RowsOf>
__device__ inline bool wait_for_messages(const Heap& heap, const Team& team, RankRegion flags, uint64_t magic, Tag tag,
                                         RowsOf rows_of) {
    constexpr int AT_ONCE = WARP - 1;  // the last lane watches the abort word
    const uint64_t slot = slot_of(magic, heap.depth);
    const Place& place = place_of(heap, flags);
    const Watch first{own<char>(heap, flags, slot), place.stride[2], every_rank(heap), true, tag, magic, nullptr};
    if (wait_until_some(heap, team, first).outcome != Outcome::ARRIVED) return false;
    const int rows = rows_of();
    bool good = true;
    int window = 0;
    for (int rank = 0; rank < heap.num_ranks; ++rank) {
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
