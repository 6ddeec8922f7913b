// All-to-All through a relay switch, rank side. Twin: inc_runtime/collectives/all_to_all.py; same four functions, one dispatch and
// one combine relay. Rows of a rank's own experts go through the relay, too, but for local bypass: then their message is written in
// place (relayed.cuh), and their partial sums are added where they stand.
//
// Dispatch: the blocks count the rows for each rank, meet, place every token in its messages, meet, and send. On a direct link rows
// go straight from the caller's memory; on NVSHMEM's they are packed first, as in the role program. Combine: all blocks meet
// once their partial sums are written, and return them. Waits on: the chunk flags, relay_credits. Signals: relay_arrived. Reads:
// the caller's tokens [n, H]. Writes: tokens_header, tokens_routing here; see relayed.cuh.
// Why a slot is free when its sums are back: every block has met in `push_microbatch` before the first row of the next microbatch
// in the slot leaves, hence has read its sums; and in `publish_partial_sums`, after it has read the counts of all senders.
// Cost: results/data/collectives_*.csv.
#pragma once

#include "relayed.cuh"
#include "routing.cuh"
#include "sums.cuh"

namespace inc::all_to_all {

// Where each token of a microbatch stands in the message to each rank, as `push_microbatch` has placed it.
struct Placed {
    int32_t* group_rows;    // [groups, W]: rows that a group of 32 tokens has for each rank
    int32_t* row_of_token;  // [m_b, W]: -1 where the rank gets none
    int32_t* token_of_row;  // [W, m_b]
};

__device__ inline Placed placed(const Heap& heap, uint64_t slot) {
    const uint64_t tokens = slot * heap.microbatch_tokens * heap.num_ranks;
    const uint64_t groups = slot * ((heap.microbatch_tokens + WARP - 1) / WARP) * heap.num_ranks;
    return {reinterpret_cast<int32_t*>(heap.group_rows) + groups, reinterpret_cast<int32_t*>(heap.row_of_token) + tokens,
            reinterpret_cast<int32_t*>(heap.token_of_row) + tokens};
}

// The sums of this rank's tokens: added from the partial sums of all ranks, in rank order, as they are read.
struct TokenSums {
    const char* partial;
    uint64_t rank_stride;
    const int32_t* row_of_token;
    const char* kept = nullptr;  // with local bypass, in place of this rank's own

    // The sum of one token. Where its partial sums stand is looked up once, for ranks 0 to AT_ONCE - 1.
    struct OfToken {
        static constexpr int AT_ONCE = 4;
        const TokenSums& sums;
        const int32_t* rows;
        int row[AT_ONCE];

        // Sixteen bytes of it: bfloat16, from column 8 * `column` on.
        __device__ uint4 words(const Heap& heap, int column) const {
            float sum[8] = {};
            for (int first = 0; first < heap.num_ranks; first += AT_ONCE) {
                uint4 words[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) words[i] = partial(heap, first + i, first ? place(heap, first + i) : row[i], column);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) add_row_words(sum, words[i]);
            }
            return round_to_bf16(sum);
        }
        __device__ int place(const Heap& heap, int rank) const { return rank < heap.num_ranks ? rows[rank] : -1; }
        __device__ uint4 partial(const Heap& heap, int rank, int row, int column) const {
            const char* first = LOCAL_BYPASS && rank == heap.pe ? sums.kept : sums.partial + rank * sums.rank_stride;
            return row >= 0 ? load_16_bytes(first + uint64_t(row) * heap.row_bytes + column * 16) : make_uint4(0, 0, 0, 0);
        }
    };

    __device__ OfToken of(const Heap& heap, int token) const {
        OfToken found{*this, row_of_token + uint64_t(token) * heap.num_ranks, {}};
#pragma unroll
        for (int i = 0; i < OfToken::AT_ONCE; ++i) found.row[i] = found.place(heap, i);
        return found;
    }
};

__device__ inline uint32_t ranks_of_own_token(const Heap& heap, const RoutedTokens& routed, uint64_t magic, int token) {
    if (token >= routed.num_tokens) return 0;
    return ranks_of_token(heap, expert_owners(routed.num_experts, heap.num_ranks), routed.expert_ids + token * routed.top_k,
                          routed.top_k, Tag::DISPATCH_TOKENS, magic, heap.pe, token);
}

// Rows of all groups before `group` for this lane's rank.
__device__ inline int rows_before(const Heap& heap, const Placed& placed, int group, int lane) {
    int rows = 0;
    if (lane < heap.num_ranks)
#pragma unroll 8
        for (int lower = 0; lower < group; ++lower) rows += placed.group_rows[lower * heap.num_ranks + lane];
    return rows;
}

// Count the rows of a group for each rank. One warp.
__device__ inline void count_group(const Heap& heap, const RoutedTokens& routed, uint64_t magic, int group, int lane) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const uint32_t mask = ranks_of_own_token(heap, routed, magic, group * WARP + lane);
    int rows = 0;
    for (int rank = 0; rank < heap.num_ranks; ++rank) {
        const int need = __popc(__ballot_sync(ALL_LANES, mask >> rank & 1));
        if (lane == rank) rows = need;
    }
    if (lane < heap.num_ranks) placed(heap, slot).group_rows[group * heap.num_ranks + lane] = rows;
}

// Place the tokens of a group in their messages, in token order. One warp.
__device__ inline void place_group(const Heap& heap, const RoutedTokens& routed, uint64_t magic, int group, int lane) {
    const Placed tables = placed(heap, slot_of(magic, heap.depth));
    const int before = rows_before(heap, tables, group, lane), token = group * WARP + lane;
    const uint32_t mask = ranks_of_own_token(heap, routed, magic, token);
    for (int rank = 0; rank < heap.num_ranks; ++rank) {
        const uint32_t need = __ballot_sync(ALL_LANES, mask >> rank & 1);
        const int row = __shfl_sync(ALL_LANES, before, rank) + __popc(need & ((1u << lane) - 1));
        const bool needed = need >> lane & 1;
        if (token < routed.num_tokens) tables.row_of_token[token * heap.num_ranks + rank] = needed ? row : -1;
        if (needed) tables.token_of_row[rank * heap.microbatch_tokens + row] = token;
    }
}

// The extra stage before the dispatch: where each token goes. All blocks meet twice, the second time in `meet_to_send`. Returns the
// messages; none after an abort.
template <class MeetToSend>
__device__ inline Messages pack(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed,
                                MeetToSend meet_to_send) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int groups = (routed.num_tokens + WARP - 1) / WARP, lane = team.lane();
    for (int group = team.number_of_warp(); group < groups; group += team.total_warps())
        count_group(heap, routed, magic, group, lane);
    // Backwards, so that few tokens keep other warps busy than those that count.
    for (int token = team.total_warps() - 1 - team.number_of_warp(); token < routed.num_tokens; token += team.total_warps())
        write_record(heap, own<char>(heap, RankRegion::tokens_routing, slot, token), routed, token, lane);
    if (team.block == 0 && team.warp() == team.num_warps() - 1)
        write_header(heap, own<int64_t>(heap, RankRegion::tokens_header, slot, 0), routed, magic, lane);
    const bool counted = meet(heap, team, Packet::ROWS_COUNTED, slot, magic, [&](int) {
        const int rows = rows_before(heap, placed(heap, slot), groups, lane);
        workspace(heap).total_rows[slot][lane] = rows;
        number_chunks<DispatchSwitchRegion>(heap, slot, chunks_to_others(heap, messages_to(heap, rows, lane)), lane);
        return true;
    });
    if (!counted) return {0, 0, 0};
    for (int group = team.number_of_warp(); group < groups; group += team.total_warps())
        place_group(heap, routed, magic, group, lane);
    if (!meet_to_send()) return {0, 0, 0};
    return messages_to(heap, workspace(heap).total_rows[slot][lane], lane);
}

// Send each rank its tokens, the next rank first. Every block of the team calls it; returns before they have landed.
// `meet_to_send`: the last meeting of the blocks before they send, where the phased form waits for a grant.
template <class MeetToSend>
__device__ inline void push_messages(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed,
                                     MeetToSend meet_to_send) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const Messages messages = pack(heap, team, magic, routed, meet_to_send);
    const Placed tables = placed(heap, slot);
    const auto token_at = [&](int destination, int row) {
        return tables.token_of_row[destination * heap.microbatch_tokens + row];
    };
    send_messages<DispatchSwitchRegion>(
        heap, team, magic, messages, own<char>(heap, RankRegion::tokens_header, slot, 0),
        [&](int destination, int row) -> const char* {
            const char* source = routed.tokens + uint64_t(token_at(destination, row)) * heap.row_bytes;
            if constexpr (!Link::STAGED) return source;
            char* packed = own<char>(heap, RankRegion::packed_tokens, slot, destination, row);
            for (int start = team.lane() * 16; start < heap.row_bytes; start += WARP * 16)
                store_16_bytes(packed + start, load_16_bytes(source + start));
            return packed;
        },
        [&](int destination, int row) -> const char* {
            return own<char>(heap, RankRegion::tokens_routing, slot, token_at(destination, row));
        });
}

__device__ inline void push_microbatch(const Heap& heap, const Team& team, uint64_t magic, const RoutedTokens& routed) {
    push_messages(heap, team, magic, routed, [&]() {
        return meet(heap, team, Packet::ROWS_PLACED, slot_of(magic, heap.depth), magic, [](int) { return true; });
    });
}

// Rows that the message of this lane's rank has brought; chunk 0 of all has arrived.
__device__ inline int rows_received(const Heap& heap, uint64_t slot, int lane) {
    if (lane >= heap.num_ranks) return 0;
    const bool payload = has_payload(load_word(own<char>(heap, RankRegion::expert_chunk_arrived, slot, 0, lane)));
    return payload ? int(own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, lane)[Header::NUM_ROWS]) : 0;
}

// Wait for the messages of all ranks; each sender has a run of its own. Returns false after an abort.
__device__ inline bool wait_for_expert_rows(const Heap& heap, const Team& team, uint64_t magic, ReceivedRows& received) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int lane = team.lane();
    bool good = true;
    int rows = 0;
    const bool arrived = wait_for_messages(heap, team, RankRegion::expert_chunk_arrived, every_rank(heap), magic, Tag::EXPERT_ROWS, [&]() {
        rows = rows_received(heap, slot, lane);
        if (team.warp() == 0 && rows) good = check_header_of_sender(heap, slot, magic, lane);
        return good ? rows : 0;
    });
    if (!arrived) return false;
    received = received_runs(heap, team, slot, rows);
    if (team.block == 0 && team.warp() == 0 && lane < heap.num_ranks && rows == 0)
        own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, lane)[Header::NUM_ROWS] = 0;
    return team.all(good);
}

// Send the partial sums of `messages`. All blocks have met since they were written.
__device__ inline void return_partial_sums(const Heap& heap, const Team& team, uint64_t magic, const Messages& messages) {
    send_messages<CombineSwitchRegion>(
        heap, team, magic, messages, nullptr,
        [&](int owner, int row) -> const char* {
            return own<char>(heap, RankRegion::expert_rows, slot_of(magic, heap.depth),
                             uint64_t(owner) * heap.microbatch_tokens + row);
        },
        [](int, int) -> const char* { return nullptr; });
}

// Return the partial sums to every token rank, the next rank first; a rank that sent nothing gets a signal alone. Every block
// calls it once it has written its share, also one that had none.
__device__ inline void publish_partial_sums(const Heap& heap, const Team& team, uint64_t magic) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const Messages messages = messages_to(heap, rows_received(heap, slot, team.lane()), team.lane());
    const bool written = meet(heap, team, Packet::SUMS_WRITTEN, slot, magic, [&](int lane) {
        number_chunks<CombineSwitchRegion>(heap, slot, chunks_to_others(heap, messages), lane);
        return true;
    });
    if (written) return_partial_sums(heap, team, magic, messages);
}

// Wait for the partial sums of all ranks. Returns false after an abort.
__device__ inline bool wait_for_token_sums(const Heap& heap, const Team& team, uint64_t magic, TokenSums& sums) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const int rows = workspace(heap).total_rows[slot][team.lane()];
    const uint32_t senders = LOCAL_BYPASS ? every_rank(heap) & ~(1u << heap.pe) : every_rank(heap);
    if (!wait_for_messages(heap, team, RankRegion::partial_chunk_arrived, senders, magic, Tag::TOKEN_SUMS, [&]() { return rows; }))
        return false;
    sums = {own<char>(heap, RankRegion::received_partial_sums, slot),
            place_of(heap, RankRegion::received_partial_sums).stride[2], placed(heap, slot).row_of_token};
    if constexpr (LOCAL_BYPASS)
        sums.kept = own<char>(heap, RankRegion::expert_rows, slot, uint64_t(heap.pe) * heap.microbatch_tokens);
    return true;
}

}  // namespace inc::all_to_all
