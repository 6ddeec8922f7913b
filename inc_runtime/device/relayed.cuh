// How a rank sends through a relay switch. Twin: inc_runtime/collectives/relayed.py. Without switches: direct.cuh.
//
// Each chunk of a message is one packet of one warp into a cell of the relay. The chunks of one microbatch are numbered through,
// message by message, and dealt to the warps of all blocks in turn; a warp waits for the credit of the cell that its chunk's number
// gives. Waits on: relay_credits. Signals: relay_arrived. Writes: relay_chunk, relay_header, relay_rows, relay_routing on the relay;
// chunk_header here. With local bypass the chunks of the message to this rank itself are written in place, without a credit.
// Cost: one remote store per row, a fence and a flag per chunk.
#pragma once

#include "direct.cuh"

namespace inc {

// Number the chunks of this microbatch behind all that this rank has sent through the relay. The first warp of one block.
template <class Region>
__device__ inline void number_chunks(const Heap& heap, uint64_t slot, int total_chunks, int lane) {
    if (DIRECT || lane != 0) return;
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

// Write one chunk of the dispatch message to this rank itself where the relay would, and raise its word. One warp.
template <class RowAt, class RecordAt>
__device__ inline void keep_chunk(const Heap& heap, uint64_t magic, const Messages& messages, const ChunkOf& part,
                                  const char* header, RowAt row_at, RecordAt record_at, int lane) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int message_rows = __shfl_sync(ALL_LANES, messages.rows, part.step);
    for (int row = part.first_row; row < part.first_row + part.num_rows; ++row) {
        Link::put_words(heap, record_at(row), heap.record_bytes, lane, 1, [&](int) { return record_on(heap, heap.pe, slot, row); });
        Link::put_row(heap, row_at(row), heap.row_bytes, lane, 1,
                      [&](int) { return row_on<DispatchSwitchRegion>(heap, heap.pe, slot, row); });
    }
    if (part.number == 0 && message_rows && lane < HEADER_FIELDS) {
        int64_t* kept = own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, heap.pe);
        kept[lane] = lane == Header::NUM_ROWS ? message_rows : reinterpret_cast<const int64_t*>(header)[lane];
    }
    finish_warp_packet();
    if (lane == 0)
        signal(heap, {heap.pe, offset_of(heap, RankRegion::expert_chunk_arrived, slot, 0, heap.pe, part.number)},
               signal_word(magic, part.num_rows > 0));
}

// Send all chunks of one microbatch, those of this team's warps. All blocks have met since `number_chunks`.
template <class Region, class RowAt, class RecordAt>
__device__ inline void send_messages(const Heap& heap, const Team& team, uint64_t magic, const Messages& messages,
                                     const char* header, RowAt row_at, RecordAt record_at) {
    if constexpr (DIRECT) return send_whole_messages<Region>(heap, team, magic, messages, header, row_at, record_at);
    const int lane = team.lane();
    const uint64_t before = workspace(heap).chunks_before[Relay<Region>::INDEX][slot_of(magic, heap.depth)];
    const int leaving = chunks_to_others(heap, messages);
    int i = team.number_of_warp();
    for (; i < leaving; i += team.total_warps()) {
        const uint64_t chunk = before + 1 + i;
        if (!wait_for_credit<Region>(heap, chunk, magic, lane)) return;
        const ChunkOf part = messages.chunk(heap, i, lane);
        const int destination = destination_of(heap, part.step);
        send_chunk<Region>(
            heap, chunk, magic, messages, part, header, [&](int row) { return row_at(destination, row); },
            [&](int row) { return record_at(destination, row); }, lane);
    }
    if constexpr (LOCAL_BYPASS && Relay<Region>::DISPATCH)
        for (; i < messages.total_chunks; i += team.total_warps())
            keep_chunk(
                heap, magic, messages, messages.chunk(heap, i, lane), header, [&](int row) { return row_at(heap.pe, row); },
                [&](int row) { return record_at(heap.pe, row); }, lane);
}

}  // namespace inc
