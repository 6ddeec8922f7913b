// INC All-to-All-Dispatch, switch side: one copy of each token in, one packet per expert rank out.
// Twin: switch_emulator/dispatch_switch.py (serve_microbatch). Store-and-forward: nothing leaves before all ranks are in.
//
// Waits on: tokens_arrived of every rank. Signals: expert_rows_arrived on every rank, payload or not; plan_arrived on the combine
// switch. Reads: its inbox, each row once. Writes: expert_rows [rows, H] and its records and header on the expert ranks;
// plan_header and plan_routing on the combine switch.
// Cost: one load and one store per needing rank for each row; results/data/collectives_*.csv, metric egress.
#pragma once

#include "regroup.cuh"

namespace inc {

// Send one token to every rank that needs it, and its record to the combine switch as well. One warp, one part of the row.
__device__ inline void multicast_token(const Heap& heap, const RegroupShared& shared, const Senders& senders, const Tile& tile, int index,
                                       int part, int part_bytes, uint64_t slot, int lane) {
    const int token = tile.begin + index, sender = sender_of(shared, token), row = token - shared.first[sender];
    const uint32_t mask = tile.mask[index];
    const int* rows = tile.rows + index * heap.num_ranks;
    const char* source = own<char>(heap, DispatchSwitchRegion::inbox_tokens, slot * heap.num_ranks + sender, row) + part * part_bytes;
    const uint64_t expert_rows = offset_of(heap, RankRegion::expert_rows, slot) + part * part_bytes;
    Link::put_row(heap, source, part_bytes, lane, mask,
                  [&](int rank) { return Remote{rank, expert_rows + uint64_t(rows[rank]) * heap.row_bytes}; });
    if (part != 0) return;
    const char* record = record_of(heap, senders, shared, token, sender);
    const uint64_t records = offset_of(heap, RankRegion::expert_rows_routing, slot);
    Link::put_words(heap, record, heap.record_bytes, lane, mask,
                    [&](int rank) { return Remote{rank, records + uint64_t(rows[rank]) * heap.record_bytes}; });
    Link::put_words(heap, record, heap.record_bytes, lane, 1, [&](int) {
        return Remote{heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_routing, slot, 0, sender) + uint64_t(row) * heap.record_bytes};
    });
}

// Header of the packet of each expert rank, once the totals are known: the first sender's with NUM_ROWS replaced.
__device__ inline void put_packet_headers(const Heap& heap, const Team& team, const RegroupShared& shared, const Senders& senders, uint64_t slot) {
    for (int rank = team.warp(); rank < heap.num_ranks; rank += team.num_warps()) {
        const int total = shared.before[rank];
        if (team.lane() == 0) workspace(heap).total_rows[slot][rank] = total;
        if (total == 0) continue;
        int64_t* header = own<int64_t>(heap, DispatchSwitchRegion::outbox_header, slot, rank, 0);
        if (team.lane() < HEADER_FIELDS)
            header[team.lane()] = team.lane() == Header::NUM_ROWS ? total : header_field(senders, 0, team.lane());
        __syncwarp();
        Link::put_words(heap, reinterpret_cast<const char*>(header), HEADER_FIELDS * 8, team.lane(), 1,
                        [&](int) { return Remote{rank, offset_of(heap, RankRegion::expert_rows_header, slot, 0, 0)}; });
    }
}

// The headers of all senders for the combine switch; the records travel with the tokens.
__device__ inline void forward_plan_headers(const Heap& heap, const Team& team, const Senders& senders, uint64_t slot) {
    for (int sender = team.warp(); sender < heap.num_ranks; sender += team.num_warps())
        Link::put_words(heap, senders.headers + sender * senders.header_stride, HEADER_FIELDS * 8, team.lane(), 1, [&](int) {
            return Remote{heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_header, slot, 0, sender)};
        });
}

// Words of one microbatch, by the last block: every rank is signalled, also one that gets no row.
__device__ inline void signal_dispatched(const Heap& heap, const Team& team, uint64_t slot, uint64_t magic) {
    volatile uint32_t* totals = workspace(heap).total_rows[slot];
    if (team.thread < heap.num_ranks) {
        const bool payload = totals[team.thread] > 0;
        atomicAdd(reinterpret_cast<unsigned long long*>(&workspace(heap).rows_sent), (unsigned long long)totals[team.thread]);
        signal(heap, {team.thread, offset_of(heap, RankRegion::expert_rows_arrived, slot, 0, 0)}, signal_word(magic, payload));
    } else if (team.thread == heap.num_ranks) {
        signal(heap, {heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_arrived, slot, 0)}, signal_word(magic, true));
        *own<uint64_t>(heap, DispatchSwitchRegion::magic) = magic;
    }
}

// Collect one microbatch of all ranks and multicast it. Every block of the switch calls it.
__device__ inline Outcome serve_dispatch_microbatch(const Heap& heap, const Team& team, RegroupShared& shared, Tile tile, uint64_t magic,
                                                    const SwitchArguments& arguments) {
    const uint64_t slot = slot_of(magic, heap.depth), inbox = slot * heap.num_ranks;
    const Place& flags = place_of(heap, DispatchSwitchRegion::tokens_arrived);
    const uint32_t everyone = heap.num_ranks == MAX_RANKS ? ALL_LANES : (1u << heap.num_ranks) - 1;
    const Waited waited = wait_until_some(heap, team,
                                          {own<char>(heap, DispatchSwitchRegion::tokens_arrived, slot, 0), flags.stride[1], everyone, true,
                                           Tag::DISPATCH_TOKENS, magic, own<char>(heap, DispatchSwitchRegion::stop)});
    if (waited.outcome != Outcome::ARRIVED) return waited.outcome;
    const uint64_t arrived_ns = timer_ns();
    const Senders senders{own<char>(heap, DispatchSwitchRegion::inbox_header, inbox),
                          place_of(heap, DispatchSwitchRegion::inbox_header).stride[0],
                          own<char>(heap, DispatchSwitchRegion::inbox_routing, inbox),
                          place_of(heap, DispatchSwitchRegion::inbox_routing).stride[0], Tag::DISPATCH_TOKENS};
    if (!read_headers(heap, team, senders, magic, shared)) return Outcome::ABORTED;
    const int num_tokens = shared.first[heap.num_ranks];
    const int begin = int(int64_t(num_tokens) * team.block / team.num_blocks), end = int(int64_t(num_tokens) * (team.block + 1) / team.num_blocks);
    const bool last_run = team.block == team.num_blocks - 1;
    if (begin < end || last_run) count_rows_before(heap, team, senders, shared, begin, magic);
    for (tile.begin = begin; tile.begin < end; tile.begin += SWITCH_THREADS) {
        tile.num_tokens = min(SWITCH_THREADS, end - tile.begin);
        place_tile(heap, team, senders, shared, tile, magic);
        const int parts = parts_of_row(tile.num_tokens, team.num_warps(), heap.row_bytes), part_bytes = heap.row_bytes / parts;
        for (int unit = team.warp(); unit < tile.num_tokens * parts; unit += team.num_warps())
            multicast_token(heap, shared, senders, tile, unit / parts, unit % parts, part_bytes, slot, team.lane());
    }
    if (team.block == 0) forward_plan_headers(heap, team, senders, slot);
    if (last_run) put_packet_headers(heap, team, shared, senders, slot);
    if (finish_packet(heap, team, Packet::DISPATCH, slot)) {
        signal_dispatched(heap, team, slot, magic);
        if (team.thread == 0) record_moment(arguments, magic, arrived_ns, num_tokens);
    }
    return Outcome::ARRIVED;
}

}  // namespace inc
