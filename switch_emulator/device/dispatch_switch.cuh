// INC All-to-All-Dispatch, switch side: one copy of each token in, one packet per expert rank out.
// Twin: switch_emulator/dispatch_switch.py (serve_microbatch). Store-and-forward: nothing leaves before all ranks are in.
//
// Waits on: tokens_arrived of every rank. Signals: expert_rows_arrived on every rank, payload or not; plan_arrived on the combine
// switch. Reads: its inbox, each row once. Writes: expert_rows [rows, H] and its records and header on the expert ranks;
// plan_header and plan_routing on the combine switch.
// A row is loaded once into registers and stored to each rank; of few tokens, a row is cut over several warps. Records of
// neighbouring rows are written as one run: alone, each would cost four partial sectors of the link. The bulk copy engine was
// slower: DECISIONS.md. Cost: one load and one store per needing rank for each row; results/data/collectives_*.csv, metric
// egress.
#pragma once

#include "regroup.cuh"

namespace inc {

// What the copies of one tile have in common.
struct DispatchTile {
    const Heap& heap;
    const RegroupShared& shared;
    const Senders& senders;
    const Tile& tile;
    const uint64_t slot;
    const int place = -1;          // phased: the inbox slot of the sender
    const uint64_t first_row = 0;  // of the plane, or when phased of the sender's run, on every expert rank

    __device__ bool phased() const { return place >= 0; }
    __device__ int sender(int index) const { return sender_of(shared, tile.begin + index); }
    __device__ int row_of_sender(int index) const { return tile.begin + index - shared.first[sender(index)]; }
    __device__ uint64_t row_of_rank(int index, int rank) const { return first_row + tile.rows[index * heap.num_ranks + rank]; }
    __device__ const char* source(int index) const {
        const uint64_t inbox = phased() ? place : slot * heap.num_ranks + sender(index);
        return own<char>(heap, DispatchSwitchRegion::inbox_tokens, inbox, row_of_sender(index));
    }
    __device__ Remote target(int index, int rank) const {
        return {rank, offset_of(heap, RankRegion::expert_rows, slot) + row_of_rank(index, rank) * heap.row_bytes};
    }
};

// The record of one token, to every rank that needs the token and, without phases, to the combine switch. One warp.
__device__ inline void multicast_record(const DispatchTile& t, int index, int lane) {
    const int sender = t.sender(index);
    const uint64_t records = offset_of(t.heap, RankRegion::expert_rows_routing, t.slot), row = t.row_of_sender(index);
    const char* record = record_of(t.heap, t.senders, t.shared, t.tile.begin + index, sender);
    const Remote plan{t.heap.combine_switch,
                      offset_of(t.heap, CombineSwitchRegion::plan_routing, t.slot, own_plane(t.heap), sender) +
                          row * t.heap.record_bytes};
    Link::put_words(t.heap, record, t.heap.record_bytes, lane, t.tile.mask[index],
                    [&](int rank) { return Remote{rank, records + t.row_of_rank(index, rank) * t.heap.record_bytes}; });
    if (!t.phased()) Link::put_words(t.heap, record, t.heap.record_bytes, lane, 1, [&](int) { return plan; });
}

// Copy words 0 to `num_words` - 1 with all threads, several loads in flight each.
template <class SourceOf, class TargetOf>
__device__ inline void copy_words(const Team& team, int num_words, SourceOf source_of, TargetOf target_of) {
    constexpr int UNROLL = 4;
    for (int start = team.thread; start < num_words; start += team.num_threads * UNROLL) {
        uint64_t words[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * team.num_threads < num_words) words[u] = *source_of(start + u * team.num_threads);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * team.num_threads < num_words) *target_of(start + u * team.num_threads) = words[u];
    }
}

// The records of one tile: to each rank as one run of neighbours and, without phases, to the combine switch as they stand. All
// warps.
__device__ inline void multicast_records(const DispatchTile& t, const Team& team) {
    const int words = t.heap.record_bytes / 8;
    const auto word_of_token = [&](int index, int word) {
        return reinterpret_cast<const uint64_t*>(record_of(t.heap, t.senders, t.shared, t.tile.begin + index, t.sender(index))) +
               word;
    };
    for (int rank = 0; rank < t.heap.num_ranks; ++rank) {
        const int first_row = t.shared.first_rows[rank], num_rows = t.shared.before[rank] - first_row;
        const uint16_t* token_of_row = t.tile.token_of_row + rank * SWITCH_THREADS;
        uint64_t* target =
            reinterpret_cast<uint64_t*>(address(t.heap, {rank, offset_of(t.heap, RankRegion::expert_rows_routing, t.slot) +
                                                                   (t.first_row + first_row) * t.heap.record_bytes}));
        copy_words(
            team, num_rows * words, [&](int at) { return word_of_token(token_of_row[at / words], at % words); },
            [&](int at) { return target + at; });
    }
    if (t.phased()) return;
    copy_words(
        team, t.tile.num_tokens * words, [&](int at) { return word_of_token(at / words, at % words); },
        [&](int at) {
            const int index = at / words;
            const uint64_t records =
                offset_of(t.heap, CombineSwitchRegion::plan_routing, t.slot, own_plane(t.heap), t.sender(index));
            const Remote record{t.heap.combine_switch, records + uint64_t(t.row_of_sender(index)) * t.heap.record_bytes};
            return reinterpret_cast<uint64_t*>(address(t.heap, record)) + at % words;
        });
}

// Send the tokens of one tile. All warps of the block.
__device__ inline void multicast_tile(const DispatchTile& t, const Team& team) {
    const int num_tokens = t.tile.num_tokens, num_warps = team.num_warps();
    const bool records_as_run = !Link::STAGED && num_tokens > num_warps / 2;
    if (records_as_run) multicast_records(t, team);
    const int parts = parts_of_row(num_tokens, num_warps - num_tokens, t.heap.row_bytes), part_bytes = t.heap.row_bytes / parts;
    const int units = records_as_run ? parts : parts + 1;
    int paid = 0;
    for (int unit = team.warp(); unit < num_tokens * units; unit += num_warps) {
        if (paced(t.heap) && paid-- == 0) {
            paid = ROWS_AT_ONCE - 1;
            pass_ports(t.heap, Port::INGRESS, unit, num_tokens * units, num_warps, (t.heap.row_bytes + t.heap.record_bytes) / parts,
                       team.lane(),
                       [&](int at, int rank) { return at % units < parts && (t.tile.mask[at / units] >> rank & 1); });
        }
        const int i = unit / units, part = unit % units, first_byte = part * part_bytes;
        if (part == parts)
            multicast_record(t, i, team.lane());
        else
            Link::put_row(t.heap, t.source(i) + first_byte, part_bytes, team.lane(), t.tile.mask[i],
                          [&](int rank) { return Remote{rank, t.target(i, rank).offset + first_byte}; });
    }
}

// Header of the packet of each expert rank, once the totals are known: the first sender's with NUM_ROWS replaced. `sender`: 0 where
// one packet has the rows of all.
__device__ inline void put_packet_headers(const Heap& heap, const Team& team, const RegroupShared& shared, const Senders& senders,
                                          uint64_t slot, uint64_t key, int sender) {
    const int lane = team.lane();
    for (int rank = team.warp(); rank < heap.num_ranks; rank += team.num_warps()) {
        const int total = shared.before[rank];
        if (lane == 0) workspace(heap).total_rows[ring_of(key)][rank] = total;
        if (total == 0 || lane >= HEADER_FIELDS) continue;
        const int64_t field = lane == Header::NUM_ROWS ? total : header_field(senders, 0, lane);
        const Remote target{rank, offset_of(heap, RankRegion::expert_rows_header, slot, own_plane(heap), sender)};
        int64_t* staged = own<int64_t>(heap, DispatchSwitchRegion::outbox_header, slot, rank, sender);
        staged[lane] = field;
        if constexpr (!Link::STAGED) reinterpret_cast<int64_t*>(address(heap, target))[lane] = field;
    }
    if constexpr (Link::STAGED) {
        __syncwarp();
        for (int rank = team.warp(); rank < heap.num_ranks; rank += team.num_warps())
            if (shared.before[rank])
                Link::put_words(
                    heap, own<char>(heap, DispatchSwitchRegion::outbox_header, slot, rank, sender), HEADER_FIELDS * 8, lane, 1,
                    [&](int) { return Remote{rank, offset_of(heap, RankRegion::expert_rows_header, slot, own_plane(heap), sender)}; });
    }
}

// The headers of all senders for the combine switch; the records travel with the tokens.
__device__ inline void forward_plan_headers(const Heap& heap, const Team& team, const Senders& senders, uint64_t slot) {
    for (int sender = team.warp(); sender < heap.num_ranks; sender += team.num_warps())
        Link::put_words(heap, senders.headers + sender * senders.header_stride, HEADER_FIELDS * 8, team.lane(), 1, [&](int) {
            return Remote{heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_header, slot, own_plane(heap), sender)};
        });
}

// Words of one packet to each rank, by one warp: every rank is signalled, also one that gets no row.
__device__ inline void signal_expert_ranks(const Heap& heap, const RegroupShared& shared, uint64_t slot, uint64_t magic,
                                           uint64_t key, int sender, int lane) {
    if (lane >= heap.num_ranks) return;
    const uint32_t total = shared.num_blocks == 1
                               ? shared.before[lane]
                               : *reinterpret_cast<volatile uint32_t*>(&workspace(heap).total_rows[ring_of(key)][lane]);
    signal(heap, {lane, offset_of(heap, RankRegion::expert_rows_arrived, slot, own_plane(heap), sender)},
           signal_word(magic, total > 0));
    atomicAdd(reinterpret_cast<unsigned long long*>(&workspace(heap).rows_sent), (unsigned long long)total);
}

// Words of one microbatch, by one warp.
__device__ inline void signal_dispatched(const Heap& heap, const RegroupShared& shared, uint64_t slot, uint64_t magic, int lane) {
    signal_expert_ranks(heap, shared, slot, magic, magic, 0, lane);
    if (lane == 0) {
        signal(heap, {heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_arrived, slot, own_plane(heap))},
               signal_word(magic, true));
        advance_counter(own<uint64_t>(heap, DispatchSwitchRegion::magic), magic);
    }
}

// What a dispatch switch waits for, and what it then reads, in one microbatch.
__device__ inline Watch watch_senders(const Heap& heap, uint64_t magic) {
    return {own<char>(heap, DispatchSwitchRegion::tokens_arrived, slot_of(magic, heap.depth), 0),
            place_of(heap, DispatchSwitchRegion::tokens_arrived).stride[1],
            every_rank(heap),
            true,
            Tag::DISPATCH_TOKENS,
            magic,
            own<char>(heap, DispatchSwitchRegion::stop)};
}

__device__ inline Senders senders_in_inbox(const Heap& heap, uint64_t magic) {
    const uint64_t inbox = slot_of(magic, heap.depth) * heap.num_ranks;
    return {own<char>(heap, DispatchSwitchRegion::inbox_header, inbox),
            place_of(heap, DispatchSwitchRegion::inbox_header).stride[0],
            own<char>(heap, DispatchSwitchRegion::inbox_routing, inbox),
            place_of(heap, DispatchSwitchRegion::inbox_routing).stride[0],
            Tag::DISPATCH_TOKENS,
            magic};
}

// Headers and counts of the microbatch in hand and of the next, by the low bit of magic; `counted`: up to which magic this block
// is.
struct DispatchShared {
    RegroupShared of[2];
    uint64_t counted;
};

// If the next microbatch is there already, count it before the copies of the one in hand.
__device__ inline void look_ahead(const Heap& heap, const Team& team, DispatchShared& shared, uint64_t magic) {
    const Senders senders = senders_in_inbox(heap, magic);
    RegroupShared& next = shared.of[magic & 1];
    if (heap.depth == 1 || !try_to_open(heap, team, watch_senders(heap, magic), senders, next)) return;
    count_run(heap, team, senders, next, magic);
    if (team.thread == 0) shared.counted = magic;
}

// Collect one microbatch of all ranks and multicast it. Every block of the switch calls it.
__device__ inline Outcome serve_dispatch_microbatch(const Heap& heap, const Team& team, DispatchShared& both, Tile tile,
                                                    uint64_t magic, const SwitchArguments& arguments) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const Senders senders = senders_in_inbox(heap, magic);
    RegroupShared& shared = both.of[magic & 1];
    if (both.counted != magic) {
        open_microbatch(heap, team, watch_senders(heap, magic), senders, false, shared);
        if (shared.outcome != Outcome::ARRIVED || shared.num_blocks == 0) return shared.outcome;
        count_run(heap, team, senders, shared, magic);
    }
    const uint64_t arrived_ns = timer_ns();
    if (!add_lower_runs(heap, team, shared, magic)) return Outcome::ABORTED;
    const int num_blocks = shared.num_blocks;
    const int2 run = run_of_block(heap, team, shared);
    if (num_blocks > 1) look_ahead(heap, team, both, magic + 1);
    for (tile.begin = run.x; tile.begin < run.y; tile.begin += SWITCH_THREADS) {
        tile.num_tokens = min(SWITCH_THREADS, run.y - tile.begin);
        place_tile(heap, team, senders, shared, tile);
        multicast_tile({heap, shared, senders, tile, slot, -1, first_row_of_plane(heap)}, team);
    }
    if (team.block == 0) forward_plan_headers(heap, team, senders, slot);
    if (team.block == num_blocks - 1) put_packet_headers(heap, team, shared, senders, slot, magic, 0);
    if (finish_packet(heap, team, Packet::DISPATCH, slot, num_blocks)) {
        signal_dispatched(heap, shared, slot, magic, team.lane());
        if (team.lane() == 0) record_moment(arguments, magic, arrived_ns, shared.first[heap.num_ranks]);
    }
    return Outcome::ARRIVED;
}

}  // namespace inc
