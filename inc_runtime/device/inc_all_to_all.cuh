// INC all-to-all, rank side. Twin: inc_runtime/collectives/inc_all_to_all.py; same four functions, one dispatch and one combine
// switch.
//
// Dispatch, a push: the blocks of the team put the microbatch once, in token order, into this rank's slot on the dispatch switch.
// Combine, a pull: the rank writes its partial sums over the rows it received and signals. Waits on: expert_rows_arrived,
// token_sums_arrived. Signals: tokens_arrived on the dispatch switch, partial_sums_ready on the combine switch. Reads: the
// caller's tokens [n, H]. Writes: tokens_header, tokens_routing here; inbox_tokens, inbox_routing, inbox_header there. On a
// direct link the rows go straight from the caller's memory; on NVSHMEM's they are staged in `tokens`, as the role program does.
// Why no rank calls quiet, and why a slot is free when its sums are back: see the twin.
// Cost: one remote store per row; results/data/collectives_*.csv.
#pragma once

#include "one_sided.cuh"

namespace inc {

// Tokens of one microbatch of this rank: tokens [n, H] bfloat16, expert_ids [n, top_k] int32, weights [n, top_k] float32.
struct RoutedTokens {
    const char* tokens;
    const int32_t* expert_ids;
    const uint32_t* weights;
    int num_tokens, top_k, num_experts, bound_tokens, layer;
};

// Rows of one microbatch on its expert rank, packed from row 0: rows [n, H], records [n]. Partial sums overwrite the rows.
struct ReceivedRows {
    char* rows;
    const char* records;
    int num_rows;

    // Where the i-th row stands in the slot.
    __device__ int row(int i) const { return i; }
};

// One routing record, written here and put there by one warp; unused columns hold expert -1. Twin: write_routing in
// microbatch.py.
__device__ inline void put_record(const Heap& heap, char* record, Remote target, const RoutedTokens& routed, int token,
                                  int lane) {
    for (int word = lane; word < 2 + 2 * heap.top_k; word += WARP) {
        const int column = word < 2 + heap.top_k ? word - 2 : word - 2 - heap.top_k;
        const bool id = word < 2 + heap.top_k, used = column < routed.top_k;
        uint32_t value = id ? ALL_LANES : 0;  // expert -1, weight 0
        if (word == 0)
            value = token;
        else if (word == 1)
            value = heap.pe;
        else if (used)
            value =
                id ? uint32_t(routed.expert_ids[token * routed.top_k + column]) : routed.weights[token * routed.top_k + column];
        reinterpret_cast<uint32_t*>(record)[word] = value;
        if constexpr (!Link::STAGED) reinterpret_cast<uint32_t*>(address(heap, target))[word] = value;
    }
    if constexpr (Link::STAGED) {
        __syncwarp();
        Link::put_words(heap, record, heap.record_bytes, lane, 1, [&](int) { return target; });
    }
}

// The header of this rank's put, by one warp. Twin: write_header in microbatch.py.
__device__ inline void write_header(const Heap& heap, int64_t* header, const RoutedTokens& routed, uint64_t magic, int lane) {
    const int64_t fields[HEADER_FIELDS] = {routed.num_tokens,  int64_t(magic), routed.bound_tokens, heap.microbatch_tokens,
                                           routed.num_experts, routed.top_k,   heap.hidden_size,    routed.layer};
#pragma unroll
    for (int field = 0; field < HEADER_FIELDS; ++field)
        if (lane == field) header[field] = fields[field];
    __syncwarp();
}

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

// `visit(token)` for every token, in the warp that will put its record: it may still choose the token's experts.
template <class Visit>
__device__ inline void for_each_record(const Heap& heap, const Team& team, int num_tokens, Visit visit) {
    const PushUnits cut = units_of_push(heap, team, num_tokens);
    if (team.block >= cut.num_blocks) return;
    for (int unit = team.block * team.num_warps() + team.warp(); unit < cut.num_units; unit += cut.num_blocks * team.num_warps())
        if (cut.has_record(unit)) visit(cut.token(unit));
}

// Put the microbatch into this rank's slot on the dispatch switch. Every block of the team calls it; returns before it has
// landed.
__device__ inline void push_microbatch(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed) {
    const uint64_t slot = slot_of(magic, heap.depth), inbox = slot * heap.num_ranks + heap.pe;
    const PushUnits cut = units_of_push(heap, team, routed.num_tokens);
    if (team.block >= cut.num_blocks) return;
    const int lane = team.lane();
    for (int unit = team.block * team.num_warps() + team.warp(); unit < cut.num_units;
         unit += cut.num_blocks * team.num_warps()) {
        const int token = cut.token(unit), first_byte = cut.part(unit) * cut.part_bytes;
        if (cut.has_record(unit)) {
            const Remote target{heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_routing, inbox, token)};
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
            return Remote{heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_tokens, inbox, token) + first_byte};
        });
    }
    if (team.block == cut.num_blocks - 1 && team.warp() == team.num_warps() - 1) {
        int64_t* header = own<int64_t>(heap, RankRegion::tokens_header, slot, 0);
        write_header(heap, header, routed, magic, lane);
        Link::put_words(heap, reinterpret_cast<const char*>(header), HEADER_FIELDS * 8, lane, 1, [&](int) {
            return Remote{heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::inbox_header, inbox)};
        });
    }
    if (finish_packet(heap, team, Packet::PUSH, slot, cut.num_blocks) && lane == 0)
        signal(heap, {heap.dispatch_switch, offset_of(heap, DispatchSwitchRegion::tokens_arrived, slot, heap.pe)},
               signal_word(magic, routed.num_tokens > 0));
}

// Wait for the packet of the dispatch switch. Rows are packed by sender, in token order. Returns false after an abort.
__device__ inline bool wait_for_expert_rows(const Heap& heap, const Team& team, uint64_t magic, ReceivedRows& received) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const char* flag = own<char>(heap, RankRegion::expert_rows_arrived, slot, 0, 0);
    if (!wait_until(heap, team, flag, Tag::EXPERT_ROWS, magic)) return false;
    const int64_t* header = own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, 0);
    received.num_rows = has_payload(load_word(flag)) ? int(header[Header::NUM_ROWS]) : 0;
    received.rows = own<char>(heap, RankRegion::expert_rows, slot);
    received.records = own<char>(heap, RankRegion::expert_rows_routing, slot);
    return true;
}

// Tell the combine switch that the partial sums stand in expert_rows. Every block calls it once it has written its share, also
// one that had none: a rank's blocks meet here once per microbatch, so none of them can fall a whole ring behind and read a
// header of a later one.
__device__ inline void publish_partial_sums(const Heap& heap, const Team& team, uint64_t magic) {
    const uint64_t slot = slot_of(magic, heap.depth);
    if (finish_packet(heap, team, Packet::PUBLISH, slot, team.num_blocks) && team.lane() == 0)
        signal(heap, {heap.combine_switch, offset_of(heap, CombineSwitchRegion::partial_sums_ready, slot, heap.pe)},
               signal_word(magic, true));
}

// Wait for the sums of this rank's tokens: [num_tokens, H] bfloat16 in the slot, or nullptr after an abort.
__device__ inline const char* wait_for_token_sums(const Heap& heap, const Team& team, uint64_t magic) {
    const uint64_t slot = slot_of(magic, heap.depth);
    if (!wait_until(heap, team, own<char>(heap, RankRegion::token_sums_arrived, slot, 0), Tag::TOKEN_SUMS, magic)) return nullptr;
    return own<char>(heap, RankRegion::token_sums, slot);
}

}  // namespace inc
