// How a rank sends its messages where the world has no switches: straight to their destinations. Twin: _send_whole in
// inc_runtime/collectives/relayed.py; chosen by INC_DIRECT.
//
// A message is one packet that all blocks fill, row by row; the last block raises the flags of all destinations. Waits on: nothing;
// a slot is free when the sums of its last microbatch are back. Signals: expert_chunk_arrived, partial_chunk_arrived on the
// ranks. Writes: expert_rows, expert_rows_routing, expert_rows_header, received_partial_sums there; message_header here.
// With local bypass no partial sums go to this rank itself.
// Cost: one remote store per row, one fence per block and microbatch.
#pragma once

#include "messages.cuh"

namespace inc {

// Where row `row` of this rank's message stands on `destination`, and its record.
template <class Region>
__device__ inline Remote row_on(const Heap& heap, int destination, uint64_t slot, int row) {
    if constexpr (Relay<Region>::DISPATCH)
        return {destination, offset_of(heap, RankRegion::expert_rows, slot, uint64_t(heap.pe) * heap.microbatch_tokens + row)};
    else
        return {destination, offset_of(heap, RankRegion::received_partial_sums, slot, 0, heap.pe) + uint64_t(row) * heap.row_bytes};
}

__device__ inline Remote record_on(const Heap& heap, int destination, uint64_t slot, int row) {
    return {destination, offset_of(heap, RankRegion::expert_rows_routing, slot, uint64_t(heap.pe) * heap.microbatch_tokens + row)};
}

// One row to another rank, out of this rank's port and into its own. One warp.
template <class Region>
__device__ inline void pass_both_ports(const Heap& heap, int destination, int lane) {
    if (destination == heap.pe) return;
    const uint64_t num_bytes = heap.row_bytes + (Relay<Region>::DISPATCH ? heap.record_bytes : 0);
    warp_passes_port(heap, heap.pe, Port::EGRESS, num_bytes, lane);
    warp_passes_port(heap, destination, Port::INGRESS, num_bytes, lane);
}

// The header of the message to each rank, with the number of its rows, by one warp. `header`: that of the microbatch.
__device__ inline void put_headers(const Heap& heap, uint64_t slot, const Messages& messages, const char* header, int lane) {
    for (int step = 0; step < heap.num_ranks; ++step) {
        const int destination = destination_of(heap, step), rows = __shfl_sync(ALL_LANES, messages.rows, step);
        if (rows == 0) continue;
        int64_t* own_header = own<int64_t>(heap, RankRegion::message_header, slot, destination);
        if (lane < HEADER_FIELDS)
            own_header[lane] = lane == Header::NUM_ROWS ? rows : reinterpret_cast<const int64_t*>(header)[lane];
        __syncwarp();
        Link::put_words(heap, reinterpret_cast<const char*>(own_header), HEADER_FIELDS * 8, lane, 1, [&](int) {
            return Remote{destination, offset_of(heap, RankRegion::expert_rows_header, slot, 0, heap.pe)};
        });
    }
}

// Send the W messages of one microbatch. Every block of the team calls it. `row_at(destination, row)` is where a row of a message
// stands, `record_at` its record; one warp calls them for each row.
template <class Region, class RowAt, class RecordAt>
__device__ inline void send_whole_messages(const Heap& heap, const Team& team, uint64_t magic, const Messages& messages,
                                           const char* header, RowAt row_at, RecordAt record_at) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int lane = team.lane();
    const int steps = heap.num_ranks - (LOCAL_BYPASS && !Relay<Region>::DISPATCH);  // the message to this rank itself is the last
    int first = 0;  // number of the message's first row among those of all messages
    for (int step = 0; step < steps; ++step) {
        const int destination = destination_of(heap, step), rows = __shfl_sync(ALL_LANES, messages.rows, step);
        const int total = team.total_warps(), skip = (team.number_of_warp() - first % total + total) % total;
        for (int row = skip; row < rows; row += total) {
            pass_both_ports<Region>(heap, destination, lane);
            if constexpr (Relay<Region>::DISPATCH)
                Link::put_words(heap, record_at(destination, row), heap.record_bytes, lane, 1,
                                [&](int) { return record_on(heap, destination, slot, row); });
            Link::put_row(heap, row_at(destination, row), heap.row_bytes, lane, 1,
                          [&](int) { return row_on<Region>(heap, destination, slot, row); });
        }
        first += rows;
    }
    if constexpr (Relay<Region>::DISPATCH)
        if (team.block == 0 && team.warp() == team.num_warps() - 1) put_headers(heap, slot, messages, header, lane);
    constexpr Packet packet = Relay<Region>::DISPATCH ? Packet::PUSH : Packet::PUBLISH;
    constexpr RankRegion flags = Relay<Region>::DISPATCH ? RankRegion::expert_chunk_arrived : RankRegion::partial_chunk_arrived;
    if (finish_packet(heap, team, packet, slot, team.num_blocks) && lane < steps)
        signal(heap, {destination_of(heap, lane), offset_of(heap, flags, slot, 0, heap.pe)}, signal_word(magic, messages.rows > 0));
}

}  // namespace inc
