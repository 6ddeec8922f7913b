// Which expert ranks need each token, and where its row stands in their slots. Twin: rows_of_sender in dispatch_switch.py and
// CombinePlan in combine_plan.py; both switches run this on the same records, so they agree without exchanging positions.
//
// Tokens of one microbatch are numbered through, sender by sender. The row of a token in the slot of an expert rank is the number
// of earlier tokens that need that rank. Each block of the switch has a run of tokens, counts the tokens before it, then places its
// own tile by tile. Reads: headers and routing records of this PE's heap. Writes: shared memory.
// Cost: each block reads the expert ids of all tokens before its own; not measured alone yet.
#pragma once

#include "../../inc_runtime/device/one_sided.cuh"

namespace inc {

constexpr int SWITCH_THREADS = 512;
constexpr int SWITCH_WARPS = SWITCH_THREADS / WARP;

// The rule of LayerShape.experts_of_rank: contiguous, the first E mod W ranks hold one more.
struct ExpertOwners {
    int num_experts, small, extra;

    __device__ int rank_of(int expert) const {
        const int cut = extra * (small + 1);
        return expert < cut ? expert / (small + 1) : extra + (expert - cut) / small;
    }
};

__device__ inline ExpertOwners expert_owners(int num_experts, int num_ranks) {
    return {num_experts, num_experts / num_ranks, num_experts % num_ranks};
}

// Headers and records of all senders of one microbatch, as they stand in this heap.
struct Senders {
    const char* headers;
    uint64_t header_stride;
    const char* records;
    uint64_t record_stride;  // from one sender's records to the next's
    Tag tag;
};

struct RegroupShared {
    int first[MAX_RANKS + 1];  // number of the first token of each sender; the last entry is the number of tokens
    int before[MAX_RANKS];     // rows of each expert rank before the next tile
    int warp_rows[SWITCH_WARPS][MAX_RANKS];
    int num_experts;
};

// One tile: mask[i] the ranks that need token i, rows[i * num_ranks + rank] its row there. In dynamic shared memory.
struct Tile {
    uint32_t* mask;
    int* rows;
    int begin, num_tokens;
};

inline constexpr int tile_bytes(int num_ranks) { return SWITCH_THREADS * 4 * (1 + num_ranks); }

__device__ inline int64_t header_field(const Senders& senders, int sender, int field) {
    return reinterpret_cast<const int64_t*>(senders.headers + sender * senders.header_stride)[field];
}

// Refuse a header that disagrees with the heap or with sender 0's. Twin: check_header in serving.py. One thread per sender.
__device__ inline bool check_header(const Heap& heap, const Senders& senders, int sender, uint64_t magic) {
    const int fields[] = {Header::STEP, Header::BOUND_TOKENS, Header::MICROBATCH_TOKENS, Header::NUM_EXPERTS, Header::TOP_K, Header::HIDDEN_SIZE};
    for (int field : fields) {
        int64_t wanted = header_field(senders, 0, field);
        if (field == Header::STEP) wanted = magic;
        if (field == Header::MICROBATCH_TOKENS) wanted = heap.microbatch_tokens;
        if (field == Header::HIDDEN_SIZE) wanted = heap.hidden_size;
        const int64_t seen = header_field(senders, sender, field);
        if (seen == wanted) continue;
        report_value(heap, ErrorKind::MISMATCH, senders.tag, magic, sender, field, wanted, seen);
        return false;
    }
    const int64_t rows = header_field(senders, sender, Header::NUM_ROWS);
    if (rows >= 0 && rows <= heap.microbatch_tokens) return true;
    report_value(heap, ErrorKind::MISMATCH, senders.tag, magic, sender, Header::NUM_ROWS, heap.microbatch_tokens, rows);
    return false;
}

// Read all headers. Returns false where one is refused: then this PE has aborted.
__device__ inline bool read_headers(const Heap& heap, const Team& team, const Senders& senders, uint64_t magic, RegroupShared& shared) {
    bool good = true;
    if (team.thread < heap.num_ranks) {
        good = check_header(heap, senders, team.thread, magic);
        shared.first[team.thread + 1] = good ? int(header_field(senders, team.thread, Header::NUM_ROWS)) : 0;
        shared.before[team.thread] = 0;
    }
    if (team.thread == 0) {
        shared.first[0] = 0;
        shared.num_experts = int(header_field(senders, 0, Header::NUM_EXPERTS));
    }
    good = __syncthreads_and(good);
    if (team.thread == 0)
        for (int sender = 0; sender < heap.num_ranks; ++sender) shared.first[sender + 1] += shared.first[sender];
    team.sync();
    return good;
}

__device__ inline int sender_of(const RegroupShared& shared, int token) {
    int sender = 0;
    while (token >= shared.first[sender + 1]) ++sender;
    return sender;
}

__device__ inline const char* record_of(const Heap& heap, const Senders& senders, const RegroupShared& shared, int token, int sender) {
    return senders.records + sender * senders.record_stride + uint64_t(token - shared.first[sender]) * heap.record_bytes;
}

// The expert ranks that need a token. An expert that does not exist is reported and reaches nobody.
__device__ inline uint32_t ranks_of_token(const Heap& heap, const Senders& senders, const RegroupShared& shared, int token, uint64_t magic) {
    const int sender = sender_of(shared, token);
    if (!heap.selective) return heap.num_ranks == MAX_RANKS ? ALL_LANES : (1u << heap.num_ranks) - 1;
    const int* experts = reinterpret_cast<const int*>(record_of(heap, senders, shared, token, sender) + RoutingRecord::expert_ids_offset(heap.top_k));
    const ExpertOwners owners = expert_owners(shared.num_experts, heap.num_ranks);
    uint32_t mask = 0;
    for (int choice = 0; choice < heap.top_k; ++choice) {
        const int expert = experts[choice];
        if (expert >= 0 && expert < owners.num_experts) {
            mask |= 1u << owners.rank_of(expert);
        } else if (expert != -1) {
            report_value(heap, ErrorKind::BAD_EXPERT, senders.tag, magic, sender, token - shared.first[sender], owners.num_experts, expert);
        }
    }
    return mask;
}

// Advance `shared.before` over the tokens before `begin`. Starts from zero; ends with a barrier.
__device__ inline void count_rows_before(const Heap& heap, const Team& team, const Senders& senders, RegroupShared& shared, int begin, uint64_t magic) {
    int own_rank = 0;
    for (int token = team.warp() * WARP; token < begin; token += team.num_threads) {
        const int mine = token + team.lane();
        const uint32_t mask = mine < begin ? ranks_of_token(heap, senders, shared, mine, magic) : 0;
        for (int rank = 0; rank < heap.num_ranks; ++rank) {
            const int rows = __popc(__ballot_sync(ALL_LANES, mask >> rank & 1));
            if (team.lane() == rank) own_rank += rows;
        }
    }
    if (team.lane() < heap.num_ranks && own_rank) atomicAdd(&shared.before[team.lane()], own_rank);
    team.sync();
}

// Fill one tile and advance `shared.before` over it. Begins and ends with a barrier.
__device__ inline void place_tile(const Heap& heap, const Team& team, const Senders& senders, RegroupShared& shared, Tile& tile, uint64_t magic) {
    const int warp = team.warp(), lane = team.lane(), num_ranks = heap.num_ranks;
    team.sync();
    const bool present = team.thread < tile.num_tokens;
    const uint32_t mask = present ? ranks_of_token(heap, senders, shared, tile.begin + team.thread, magic) : 0;
    if (present) tile.mask[team.thread] = mask;
    for (int rank = 0; rank < num_ranks; ++rank) {
        const uint32_t need = __ballot_sync(ALL_LANES, mask >> rank & 1);
        if (present) tile.rows[team.thread * num_ranks + rank] = __popc(need & ((1u << lane) - 1));
        if (lane == rank) shared.warp_rows[warp][rank] = __popc(need);
    }
    team.sync();
    if (warp == 0 && lane < num_ranks) {
        int rows = shared.before[lane];
        for (int w = 0; w < team.num_warps(); ++w) {
            const int own = shared.warp_rows[w][lane];
            shared.warp_rows[w][lane] = rows;
            rows += own;
        }
        shared.before[lane] = rows;
    }
    team.sync();
    if (present)
        for (int rank = 0; rank < num_ranks; ++rank) tile.rows[team.thread * num_ranks + rank] += shared.warp_rows[warp][rank];
    team.sync();
}

// Note in the timeline when the tokens of a microbatch were there and when its words went out. One thread.
__device__ inline void record_moment(const SwitchArguments& arguments, uint64_t magic, uint64_t arrived_ns, int num_tokens) {
    if (!arguments.timeline) return;
    SwitchMoment* timeline = reinterpret_cast<SwitchMoment*>(arguments.timeline);
    timeline[magic % arguments.timeline_length] = {magic, arrived_ns, timer_ns(), uint64_t(num_tokens)};
}

}  // namespace inc
