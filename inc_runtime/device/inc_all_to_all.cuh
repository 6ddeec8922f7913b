// INC all-to-all, rank side. Twin: inc_runtime/collectives/inc_all_to_all.py; same four functions, PLANES switches of each role.
//
// Dispatch, a push: the blocks of the team put the microbatch once, in token order, into this rank's slot on the dispatch switch.
// Combine, a pull: the rank writes its partial sums over the rows it received and signals. Waits on: expert_rows_arrived,
// token_sums_arrived. Signals: tokens_arrived on the dispatch switch, partial_sums_ready on the combine switch. Reads: the
// caller's tokens [n, H]. Writes: tokens_header, tokens_routing here; inbox_tokens, inbox_routing, inbox_header there. On a
// direct link the rows go straight from the caller's memory; on NVSHMEM's they are staged in `tokens`, as the role program does.
// With local bypass a token is one warp's, which also writes its row where this rank's own experts read it (local_bypass.cuh).
// Why no rank calls quiet, and why a slot is free when its sums are back: see the twin.
// Cost: one remote store per row; results/data/collectives_*.csv.
#pragma once

#include "cut_through.cuh"
#include "sums.cuh"

namespace inc::inc_all_to_all {

// The sums of this rank's tokens, as they stand in the slot; with local bypass the rank's own partial sum is added last.
struct TokenSums {
    const char* rows;
    const char* own_rows = nullptr;
    const uint32_t* ranks = nullptr;

    // The sum of one token.
    struct OfToken {
        const char* row;
        const char* own_row;
        bool returned, kept;

        // Sixteen bytes of it: bfloat16, from column 8 * `column` on.
        __device__ uint4 words(const Heap&, int column) const {
            if constexpr (!LOCAL_BYPASS) return load_16_bytes(row + column * 16);
            const uint4 nothing = make_uint4(0, 0, 0, 0);
            const uint4 words[2] = {returned ? load_16_bytes(row + column * 16) : nothing,
                                    kept ? load_16_bytes(own_row + column * 16) : nothing};
            float sum[8] = {};
            add_row_words(sum, words[0]);
            add_row_words(sum, words[1]);
            return round_to_bf16(sum);
        }
    };

    __device__ OfToken of(const Heap& heap, int token) const {
        const uint64_t place = uint64_t(token) * heap.row_bytes;
        if constexpr (!LOCAL_BYPASS) return {rows + place, nullptr, true, false};
        return {rows + place, own_rows + place, needed_elsewhere(heap, ranks[token]), needed_here(heap, ranks[token])};
    }
};

// How one push is cut into units, one per warp: a token, row and record. Few tokens still keep many warps busy: then a row is cut
// into `parts`, and its record is a unit of its own.
struct PushUnits {
    int parts, part_bytes, units_per_token, num_units, num_blocks;

    __device__ int token(int unit) const { return unit / units_per_token; }
    __device__ int part(int unit) const { return unit % units_per_token; }
    __device__ bool has_record(int unit) const { return part(unit) == units_per_token - 1; }
    __device__ bool has_row(int unit) const { return part(unit) < parts; }
};

__device__ inline PushUnits units_of_push(const Heap& heap, const Team& team, int num_tokens) {
    const int parts = parts_of_row(num_tokens, team.num_warps() - 1, heap.row_bytes), per_token = parts > 1 ? parts + 1 : 1;
    const int units = num_tokens * per_token;
    return {parts, int(heap.row_bytes) / parts, per_token, units,
            max(1, min(team.num_blocks, (units + team.num_warps()) / team.num_warps()))};
}

// Tokens of a microbatch that a plane serves.
__device__ inline int share_of_plane(const Heap& heap, int num_tokens, int plane) {
    return PLANES > 1 ? max(0, min(num_tokens - first_token_of_plane(heap, plane), heap.plane_tokens)) : num_tokens;
}

// `visit(token)` for every token, in the warp that will put its record: it may still choose the token's experts.
template <class Visit>
__device__ inline void for_each_record(const Heap& heap, const Team& team, int num_tokens, Visit visit) {
    for (int plane = 0; plane < PLANES; ++plane) {
        const int first = first_token_of_plane(heap, plane);
        const PushUnits cut = units_of_push(heap, team, share_of_plane(heap, num_tokens, plane));
        if (team.block >= cut.num_blocks) continue;
        for (int unit = team.block * team.num_warps() + team.warp(); unit < cut.num_units;
             unit += cut.num_blocks * team.num_warps())
            if (cut.has_record(unit)) visit(first + cut.token(unit));
    }
}

// The header of the push. One warp.
__device__ inline void put_header(const Heap& heap, RoutedTokens routed, uint64_t magic, uint64_t inbox, int lane, int plane = 0) {
    int64_t* header = own<int64_t>(heap, RankRegion::tokens_header, slot_of(magic, heap.depth), plane);
    routed.num_tokens = share_of_plane(heap, routed.num_tokens, plane);
    write_header(heap, header, routed, magic, lane);
    Link::put_words(heap, reinterpret_cast<const char*>(header), HEADER_FIELDS * 8, lane, 1, [&](int) {
        return Remote{heap.dispatch_switch + plane, offset_of(heap, DispatchSwitchRegion::inbox_header, inbox)};
    });
}

// Put one token: its record and, where another rank needs it, its row; keep the record and, where an own expert needs it, the row. The
// row is read once. One warp.
__device__ inline void put_and_keep_token(const Heap& heap, const RoutedTokens& routed, uint64_t slot, uint64_t inbox, int token,
                                          int lane) {
    const uint32_t ranks = note_ranks(heap, slot, routed, token, lane);
    const bool here = needed_here(heap, ranks), elsewhere = needed_elsewhere(heap, ranks);
    warp_passes_port(heap, heap.pe, Port::EGRESS, heap.record_bytes + (elsewhere ? heap.row_bytes : 0), lane);
    const Remote record{heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_routing, inbox, token)};
    put_record(heap, own<char>(heap, RankRegion::tokens_routing, slot, token), record, routed, token, lane);
    const uint64_t kept = first_own_row(heap) + token;
    write_record(heap, own<char>(heap, RankRegion::expert_rows_routing, slot, kept), routed, token, lane);
    const char* source = routed.tokens + uint64_t(token) * heap.row_bytes;
    if (here || elsewhere)
        Link::put_row(heap, source, heap.row_bytes, lane, uint32_t(elsewhere) | uint32_t(here) << 1, [&](int copy) {
            return copy ? Remote{heap.pe, offset_of(heap, RankRegion::expert_rows, slot, kept)}
                        : Remote{heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_tokens, inbox, token)};
        });
}

// Put one token: its record and its row. One warp.
__device__ inline void put_token(const Heap& heap, const RoutedTokens& routed, uint64_t slot, uint64_t inbox, int token, int lane) {
    warp_passes_port(heap, heap.pe, Port::EGRESS, heap.record_bytes + heap.row_bytes, lane);
    const Remote record{heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_routing, inbox, token)};
    put_record(heap, own<char>(heap, RankRegion::tokens_routing, slot, token), record, routed, token, lane);
    Link::put_row(heap, routed.tokens + uint64_t(token) * heap.row_bytes, heap.row_bytes, lane, 1, [&](int) {
        return Remote{heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_tokens, inbox, token)};
    });
}

// With cut-through: the groups of this block.
__device__ inline void put_tokens_in_groups(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed,
                                            uint64_t inbox) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int lane = team.lane();
    cut_through::put_groups(
        heap, team, magic, routed.num_tokens,
        [&](int token) {
            if constexpr (LOCAL_BYPASS)
                put_and_keep_token(heap, routed, slot, inbox, token, lane);
            else
                put_token(heap, routed, slot, inbox, token, lane);
        },
        [&]() { put_header(heap, routed, magic, inbox, lane); });
}

// With local bypass. Every block has a part in the packet, also with few tokens.
__device__ inline void put_and_keep_tokens(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed,
                                           uint64_t inbox) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int lane = team.lane();
    for (int token = first_token_of_warp(heap, team); token < routed.num_tokens; token = next_token_of_warp(heap, team, token))
        put_and_keep_token(heap, routed, slot, inbox, token, lane);
    if (team.block == team.num_blocks - 1 && team.warp() == team.num_warps() - 1) put_header(heap, routed, magic, inbox, lane);
    if (finish_packet(heap, team, Packet::PUSH, slot, team.num_blocks) && lane == 0)
        signal(heap, {heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::tokens_arrived, slot, heap.pe)},
               signal_word(magic, routed.num_tokens > 0));
}

// Put one plane's share of the microbatch into slot `inbox` of its dispatch switch: one packet. Every block of the team calls it;
// returns before it has landed.
__device__ inline void put_tokens(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed, uint64_t inbox,
                                  int plane = 0) {
    if constexpr (CUT_THROUGH) return put_tokens_in_groups(heap, team, magic, routed, inbox);
    if constexpr (LOCAL_BYPASS) return put_and_keep_tokens(heap, team, magic, routed, inbox);
    const uint64_t slot = slot_of(magic, heap.depth);
    const int first = first_token_of_plane(heap, plane), num_tokens = share_of_plane(heap, routed.num_tokens, plane);
    const PushUnits cut = units_of_push(heap, team, num_tokens);
    if (team.block >= cut.num_blocks) return;
    const int lane = team.lane(), dispatch_switch = heap.dispatch_switch + plane;
    for (int unit = team.block * team.num_warps() + team.warp(); unit < cut.num_units;
         unit += cut.num_blocks * team.num_warps()) {
        const int token = first + cut.token(unit), first_byte = cut.part(unit) * cut.part_bytes;
        const int row_bytes = cut.has_row(unit) ? cut.part_bytes : 0, record_bytes = cut.has_record(unit) ? int(heap.record_bytes) : 0;
        warp_passes_port(heap, heap.pe, Port::EGRESS, row_bytes + record_bytes, lane);
        if (cut.has_record(unit)) {
            const Remote target{dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_routing, inbox, token - first)};
            put_record(heap, own<char>(heap, RankRegion::tokens_routing, slot, token), target, routed, token, lane);
        }
        if (!cut.has_row(unit)) continue;
        const char* source = routed.tokens + uint64_t(token) * heap.row_bytes + first_byte;
        if constexpr (Link::STAGED) {
            char* staged = own<char>(heap, RankRegion::tokens, slot, token) + first_byte;
            for (int start = lane * 16; start < cut.part_bytes; start += WARP * 16)
                store_16_bytes(staged + start, load_16_bytes(source + start));
            source = staged;
        }
        Link::put_row(heap, source, cut.part_bytes, lane, 1, [&](int) {
            return Remote{dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_tokens, inbox, token - first) + first_byte};
        });
    }
    if (team.block == cut.num_blocks - 1 && team.warp() == team.num_warps() - 1)
        put_header(heap, routed, magic, inbox, lane, plane);
    if (finish_packet(heap, team, Packet::PUSH, slot * PLANES + plane, cut.num_blocks) && lane == 0)
        signal(heap, {dispatch_switch, offset_of(heap, DispatchSwitchRegion::tokens_arrived, slot, heap.pe)},
               signal_word(magic, num_tokens > 0));
}

// Put the microbatch into this rank's slot on every dispatch switch.
__device__ inline void push_microbatch(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed) {
    for (int plane = 0; plane < PLANES; ++plane)
        put_tokens(heap, team, magic, routed, slot_of(magic, heap.depth) * heap.num_ranks + heap.pe, plane);
}

// Wait for the packets of several dispatch switches, each in a run of its own. Returns false after an abort.
__device__ inline bool wait_for_planes(const Heap& heap, const Team& team, uint64_t magic, ReceivedRows& received) {
    const uint64_t slot = slot_of(magic, heap.depth), stride = place_of(heap, RankRegion::expert_rows_arrived).stride[1];
    const char* flags = own<char>(heap, RankRegion::expert_rows_arrived, slot, 0, 0);
    Watch watch{flags, stride, (1u << PLANES) - 1, true, Tag::EXPERT_ROWS, magic, nullptr};
    watch.sender = heap.dispatch_switch;
    if (wait_until_some(heap, team, watch).outcome != Outcome::ARRIVED) return false;
    int32_t* first = workspace(heap).received_first[slot];
    if (team.thread == 0) {
        first[0] = 0;  // every block writes the same
        for (int plane = 0; plane < PLANES; ++plane) {
            const int64_t* header = own<int64_t>(heap, RankRegion::expert_rows_header, slot, plane, 0);
            first[plane + 1] = first[plane] + (has_payload(load_word(flags + plane * stride)) ? int(header[Header::NUM_ROWS]) : 0);
        }
    }
    team.sync();
    received = {own<char>(heap, RankRegion::expert_rows, slot),
                own<char>(heap, RankRegion::expert_rows_routing, slot),
                first[PLANES],
                PLANES,
                heap.num_ranks * plane_tokens(heap),
                first};
    return true;
}

// Has the packet of every dispatch switch come? With cut-through: have the last groups, ahead of which others may still be under way?
// Whoever takes the rows waits for all.
__device__ inline bool expert_rows_arrived(const Heap& heap, uint64_t magic) {
    if constexpr (CUT_THROUGH || PLANES > 1) {
        bool all = true;
        for (int i = 0; i < (CUT_THROUGH ? heap.num_ranks : PLANES); ++i) {
            const uint64_t slot = slot_of(magic, heap.depth);
            const char* flag = CUT_THROUGH ? own<char>(heap, RankRegion::expert_group_arrived, slot, 0, i, heap.row_groups - 1)
                                           : own<char>(heap, RankRegion::expert_rows_arrived, slot, i, 0);
            all = all && load_word(flag) >= signal_word(magic, false);
        }
        return all;
    }
    return load_word(own<char>(heap, RankRegion::expert_rows_arrived, slot_of(magic, heap.depth), 0, 0)) >= signal_word(magic, false);
}

// Wait for the packet of the dispatch switch. Rows are packed by sender, in token order. Returns false after an abort.
__device__ inline bool wait_for_expert_rows(const Heap& heap, const Team& team, uint64_t magic, ReceivedRows& received) {
    if constexpr (PLANES > 1) return wait_for_planes(heap, team, magic, received);
    if constexpr (CUT_THROUGH) return cut_through::wait_for_groups(heap, team, magic, received);
    const uint64_t slot = slot_of(magic, heap.depth);
    const char* flag = own<char>(heap, RankRegion::expert_rows_arrived, slot, 0, 0);
    if (!wait_until(heap, team, flag, Tag::EXPERT_ROWS, magic)) return false;
    const int64_t* header = own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, 0);
    const int num_rows = has_payload(load_word(flag)) ? int(header[Header::NUM_ROWS]) : 0;
    if constexpr (LOCAL_BYPASS) {
        received = with_own_rows(heap, team, slot, num_rows);
        return true;
    }
    received = {own<char>(heap, RankRegion::expert_rows, slot), own<char>(heap, RankRegion::expert_rows_routing, slot), num_rows};
    return true;
}

// Tell every combine switch that the partial sums stand in expert_rows. Every block calls it once it has written its share, also
// one that had none: a rank's blocks meet here once per microbatch, so none of them can fall a whole ring behind and read a
// header of a later one.
__device__ inline void publish_partial_sums(const Heap& heap, const Team& team, uint64_t magic) {
    const uint64_t slot = slot_of(magic, heap.depth);
    if (finish_packet(heap, team, Packet::PUBLISH, slot, team.num_blocks) && team.lane() < PLANES)
        signal(heap, {heap.combine_switch + team.lane(), offset_of(heap, CombineSwitchRegion::partial_sums_ready, slot, heap.pe)},
               signal_word(magic, true));
}

// Wait for the sums of this rank's tokens. Returns false after an abort.
__device__ inline bool wait_for_token_sums(const Heap& heap, const Team& team, uint64_t magic, TokenSums& sums) {
    const uint64_t slot = slot_of(magic, heap.depth);
    Watch watch{own<char>(heap, RankRegion::token_sums_arrived, slot, 0), 0, 1, true, Tag::TOKEN_SUMS, magic, nullptr};
    if constexpr (PLANES > 1) {
        watch.stride = place_of(heap, RankRegion::token_sums_arrived).stride[1];
        watch.pending = (1u << PLANES) - 1, watch.sender = heap.combine_switch;
    }
    if (wait_until_some(heap, team, watch).outcome != Outcome::ARRIVED) return false;
    sums.rows = own<char>(heap, RankRegion::token_sums, slot);
    if constexpr (LOCAL_BYPASS) {
        sums.own_rows = own<char>(heap, RankRegion::expert_rows, slot, first_own_row(heap));
        sums.ranks = ranks_of_own_tokens(heap, slot);
    }
    return true;
}

}  // namespace inc::inc_all_to_all
