// INC All-to-All-Dispatch, cut-through, switch side: each group of tokens goes on as it arrives. Twin:
// switch_emulator/dispatch_switch_cut_through.py; chosen by INC_CUT_THROUGH.
//
// A unit is one group of one sender, microbatch after microbatch; unit u belongs to block u modulo blocks. The first warp of a block
// watches its units, a lane each, and the block forwards what has come: records to every rank and to the combine switch, rows to the
// ranks that need them, each read once. No block counts, and none waits for another. Waits on: group_arrived, without limit, as a
// rank may come late; it watches stop and abort, and the ranks report who is missing. Signals: expert_group_arrived on every rank;
// plan_arrived on the combine switch with the last group of a microbatch. Reads: its inbox. Writes: expert_rows, its records and
// headers in the sender's run; plan_header and plan_routing. Cost: one load and one store per needing rank for each row, a fence and W
// flags per group; not measured yet.
#pragma once

#include "dispatch_switch.cuh"
#include "phases.cuh"

namespace inc {

// What has come: one group of one microbatch.
struct RowGroup {
    int sender, group, first, num_tokens, num_experts;
    uint64_t magic, slot, inbox;
};

__device__ inline RowGroup row_group(const Heap& heap, int unit, uint64_t magic) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int sender = unit % heap.num_ranks, group = unit / heap.num_ranks;
    const uint64_t inbox = slot * heap.num_ranks + sender;
    const int64_t* header = own<int64_t>(heap, DispatchSwitchRegion::inbox_header, inbox);
    const bool payload = has_payload(load_word(own<char>(heap, DispatchSwitchRegion::group_arrived, slot, sender, group)));
    // A header that is not of this heap is refused by the ranks; here nothing may be written out of bounds.
    const int first = group * heap.row_group_tokens, all = int(min(header[Header::NUM_ROWS], int64_t(heap.microbatch_tokens)));
    const int count = payload ? max(0, min(heap.row_group_tokens, all - first)) : 0;
    return {sender, group, first, count, int(header[Header::NUM_EXPERTS]), magic, slot, inbox};
}

// The records of a group as one run to each rank and to the combine switch, and with the first group the header. A warp each.
__device__ inline void forward_records_of_group(const Heap& heap, const Team& team, const RowGroup& g) {
    const int lane = team.lane(), num_bytes = g.num_tokens * heap.record_bytes;
    const char* records = own<char>(heap, DispatchSwitchRegion::inbox_routing, g.inbox, g.first);
    const char* header = own<char>(heap, DispatchSwitchRegion::inbox_header, g.inbox);
    for (int target = team.warp(); target <= heap.num_ranks; target += team.num_warps()) {
        if (LOCAL_BYPASS && target == g.sender) continue;
        if (target == heap.num_ranks) {
            Link::put_words(heap, records, num_bytes, lane, 1, [&](int) {
                return Remote{heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_routing, g.slot, 0, g.sender, g.first)};
            });
            if (g.group != 0) continue;
            Link::put_words(heap, header, HEADER_FIELDS * 8, lane, 1, [&](int) {
                return Remote{heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_header, g.slot, 0, g.sender)};
            });
            continue;
        }
        if (g.num_tokens == 0) continue;
        warp_passes_port(heap, target, Port::INGRESS, num_bytes, lane);
        const uint64_t row = uint64_t(g.sender) * heap.microbatch_tokens + g.first;
        Link::put_words(heap, records, num_bytes, lane, 1,
                        [&](int) { return Remote{target, offset_of(heap, RankRegion::expert_rows_routing, g.slot, row)}; });
        if (g.group != 0) continue;
        Link::put_words(heap, header, HEADER_FIELDS * 8, lane, 1, [&](int) {
            return Remote{target, offset_of(heap, RankRegion::expert_rows_header, g.slot, 0, g.sender)};
        });
    }
}

// The ranks that get token `index` of a group from here; the same in all lanes.
__device__ inline uint32_t ranks_of_group_token(const Heap& heap, const RowGroup& g, int index) {
    const int token = g.first + index;
    const char* record = own<char>(heap, DispatchSwitchRegion::inbox_routing, g.inbox, token);
    const int32_t* ids = reinterpret_cast<const int32_t*>(record + RoutingRecord::expert_ids_offset(heap.top_k));
    const uint32_t ranks = ranks_of_token(heap, expert_owners(g.num_experts, heap.num_ranks), ids, heap.top_k,
                                          Tag::DISPATCH_TOKENS, g.magic, g.sender, token);
    return LOCAL_BYPASS ? ranks & ~(1u << g.sender) : ranks;
}

// The rows of a group; of few tokens a row is cut over several warps. Returns the rows that this warp has sent whole.
__device__ inline int forward_rows_of_group(const Heap& heap, const Team& team, const RowGroup& g) {
    const int parts = parts_of_row(g.num_tokens, team.num_warps(), heap.row_bytes), part_bytes = heap.row_bytes / parts;
    int rows = 0;
    for (int unit = team.warp(); unit < g.num_tokens * parts; unit += team.num_warps()) {
        const int index = unit / parts, first_byte = unit % parts * part_bytes;
        const uint32_t ranks = ranks_of_group_token(heap, g, index);
        if (ranks == 0) continue;
        if (paced(heap)) pass_port(heap, team.lane(), Port::INGRESS, ranks >> team.lane() & 1 ? part_bytes : 0);
        __syncwarp();
        const uint64_t row = uint64_t(g.sender) * heap.microbatch_tokens + g.first + index;
        const char* source = own<char>(heap, DispatchSwitchRegion::inbox_tokens, g.inbox, g.first + index) + first_byte;
        Link::put_row(heap, source, part_bytes, team.lane(), ranks, [&](int rank) {
            return Remote{rank, offset_of(heap, RankRegion::expert_rows, g.slot, row) + first_byte};
        });
        if (first_byte == 0) rows += __popc(ranks);
    }
    return rows;
}

// The words of a group, by one warp behind its fence; with the last group of a microbatch the combine switch has the whole plan.
__device__ inline void signal_group(const Heap& heap, const RowGroup& g, int lane) {
    if (lane < heap.num_ranks) {
        const bool payload = g.num_tokens > 0 && !(LOCAL_BYPASS && lane == g.sender);
        signal(heap, {lane, offset_of(heap, RankRegion::expert_group_arrived, g.slot, 0, g.sender, g.group)},
               signal_word(g.magic, payload));
    }
    if (lane != 0) return;
    auto* finished = reinterpret_cast<unsigned long long*>(&workspace(heap).finished[int(Packet::DISPATCH)][g.slot]);
    if (atomicAdd(finished, 1ull) + 1 < uint64_t(heap.num_ranks) * heap.row_groups) return;
    *finished = 0;  // used again a whole ring later, behind the sums that this plan brings about
    fence_system();
    signal(heap, {heap.combine_switch, offset_of(heap, CombineSwitchRegion::plan_arrived, g.slot, 0)}, signal_word(g.magic, true));
    advance_counter(own<uint64_t>(heap, DispatchSwitchRegion::magic), g.magic);
}

// Forward one group. All warps of the block.
__device__ inline void forward_group(const Heap& heap, const Team& team, const RowGroup& g, const SwitchArguments& arguments) {
    const uint64_t arrived_ns = timer_ns();
    const int rows = forward_rows_of_group(heap, team, g);
    forward_records_of_group(heap, team, g);
    if (rows && team.lane() == 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(&workspace(heap).rows_sent), (unsigned long long)rows);
    team.sync();
    if (team.warp() != 0) return;
    Link::quiet();
    signal_group(heap, g, team.lane());
    if (team.lane() == 0) record_moment(arguments, g.magic, arrived_ns, g.num_tokens);
}

// What the first warp of a block tells the others: the units that have come, by lane, and the microbatch of each.
struct CutThroughShared {
    uint32_t arrived;
    Outcome outcome;
    uint64_t magic[WARP];
};

// Wait until units of this block have come, or all ranks have stopped. The first warp; `next`: of its lane's unit.
__device__ inline void watch_units(const Heap& heap, const Team& team, CutThroughShared& shared, int unit, uint64_t next,
                                   uint64_t stops_seen) {
    const int lane = team.lane();
    const bool watching = unit < heap.num_ranks * heap.row_groups;
    const char* flag = own<char>(heap, DispatchSwitchRegion::group_arrived, slot_of(next, heap.depth),
                                 watching ? unit % heap.num_ranks : 0, watching ? unit / heap.num_ranks : 0);
    Outcome outcome = Outcome::ARRIVED;
    uint32_t arrived = 0;
    for (uint32_t polls = 1; arrived == 0 && outcome == Outcome::ARRIVED; ++polls) {
        const uint64_t word = watching ? load_word(flag) : 0;
        arrived = __ballot_sync(ALL_LANES, watching && word >= arrival_threshold(next));
        if (arrived || polls % POLLS_PER_CHECK) continue;
        if (__any_sync(ALL_LANES, lane == 0 && aborted(heap))) outcome = Outcome::ABORTED;
        if (polls % POLLS_PER_STOP_CHECK == 0 && all_have_stopped<DispatchSwitchRegion>(heap, stops_seen, lane))
            outcome = Outcome::STOPPED;
        if (polls > POLLS_BEFORE_SLEEP) __nanosleep(IDLE_SLEEP_NS);
    }
    shared.magic[lane] = next;
    if (lane == 0) shared.arrived = arrived, shared.outcome = outcome;
}

// Serve until every rank has stopped. Every block of the switch calls it.
__device__ inline void serve_cut_through(const Heap& heap, const Team& team, CutThroughShared& shared, uint64_t first_magic,
                                         const SwitchArguments& arguments) {
    const int unit_of_lane = team.block + team.lane() * team.num_blocks;
    const uint64_t stops_seen = workspace(heap).stops_seen[team.lane()];
    uint64_t next = first_magic;
    while (true) {
        if (team.warp() == 0) watch_units(heap, team, shared, unit_of_lane, next, stops_seen);
        team.sync();
        const uint32_t arrived = shared.arrived;
        if (shared.outcome != Outcome::ARRIVED) return;
        for (uint32_t left = arrived; left; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            forward_group(heap, team, row_group(heap, team.block + lane * team.num_blocks, shared.magic[lane]), arguments);
        }
        team.sync();  // before the first warp writes `shared` again
        if (arrived >> team.lane() & 1) ++next;
    }
}

}  // namespace inc
