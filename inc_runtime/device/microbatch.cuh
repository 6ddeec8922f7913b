// What passes between a kernel and a collective, and the pieces that all rank-side programs share. Twin:
// inc_runtime/collectives/microbatch.py.
//
// Waits on, signals: nothing. Writes: tokens_header and tokens_routing of this PE, and what `put_record` puts. Cost: small.
#pragma once

#include "pacing.cuh"

namespace inc {

// Tokens of one microbatch of this rank: tokens [n, H] bfloat16, expert_ids [n, top_k] int32, weights [n, top_k] float32.
struct RoutedTokens {
    const char* tokens;
    const int32_t* expert_ids;
    const uint32_t* weights;
    int num_tokens, top_k, num_experts, bound_tokens, layer, edge_tokens;
};

// How a call is cut into microbatches. Twin: Pipeline.first_token.
struct MicrobatchCut {
    int bound_tokens, microbatch_tokens, num_microbatches, edge_tokens, ramp_steps;

    __device__ int ramp(int steps) const { return ((1 << steps) - 1) * edge_tokens; }
    __device__ int first_token(int number) const {
        const int behind = num_microbatches - number;
        if (behind <= ramp_steps) return bound_tokens - ramp(behind);
        const int ramped = min(number, ramp_steps);
        return min(ramp(ramped) + (number - ramped) * microbatch_tokens, bound_tokens);
    }
};

template <class Arguments>
__device__ inline MicrobatchCut cut_of(const Heap& heap, const Arguments& call) {
    return {call.bound_tokens, heap.microbatch_tokens, call.num_microbatches, call.edge_tokens, call.ramp_steps};
}

// Rows of one microbatch on its expert rank. `rows` [capacity, H] and `records` [capacity] are the slot itself; the i-th received
// row, 0 <= i < num_rows, stands at `row(i)` of it, in order of sender, then token. Partial sums overwrite the rows in place.
struct ReceivedRows {
    char* rows;
    const char* records;
    int num_rows;
    // Where each sender has a run of its own: run s begins at s * rows_per_run, and `first[s]` rows stand in lower runs.
    int num_runs = 1, rows_per_run = 0;
    const int32_t* first = nullptr;

    __device__ int row(int i) const {
        if (num_runs == 1) return i;
        int run = 0;
        while (run + 1 < num_runs && i >= first[run + 1]) ++run;
        return run * rows_per_run + i - first[run];
    }
};

// The received rows of a slot where every sender has a run of its own; `rows`: in the lane of each rank how many it sent. Every warp
// calls it, and a barrier must follow. Twin: received_rows.
__device__ inline ReceivedRows received_runs(const Heap& heap, const Team& team, uint64_t slot, int rows) {
    const int lane = team.lane();
    int before = rows;
    for (int step = 1; step < WARP; step *= 2) {
        const int lower = __shfl_up_sync(ALL_LANES, before, step);
        if (lane >= step) before += lower;
    }
    int32_t* first = workspace(heap).received_first[slot];
    if (team.warp() == 0 && lane < heap.num_ranks) {
        first[lane + 1] = before;  // every block writes the same
        if (lane == 0) first[0] = 0;
    }
    return {own<char>(heap, RankRegion::expert_rows, slot),
            own<char>(heap, RankRegion::expert_rows_routing, slot),
            __shfl_sync(ALL_LANES, before, heap.num_ranks - 1),
            heap.num_ranks,
            heap.microbatch_tokens,
            first};
}

// One word of a routing record. Unused columns hold expert -1. Twin: write_routing.
__device__ inline uint32_t record_word(const Heap& heap, const RoutedTokens& routed, int token, int word) {
    const int column = word < 2 + heap.top_k ? word - 2 : word - 2 - heap.top_k;
    const bool id = word < 2 + heap.top_k;
    if (word == 0) return token;
    if (word == 1) return heap.pe;
    if (column >= routed.top_k) return id ? ALL_LANES : 0;  // expert -1, weight 0
    return id ? uint32_t(routed.expert_ids[token * routed.top_k + column]) : routed.weights[token * routed.top_k + column];
}

// One routing record, written here by one warp.
__device__ inline void write_record(const Heap& heap, char* record, const RoutedTokens& routed, int token, int lane) {
    for (int word = lane; word < 2 + 2 * heap.top_k; word += WARP)
        reinterpret_cast<uint32_t*>(record)[word] = record_word(heap, routed, token, word);
}

// The same, also put to `target`.
__device__ inline void put_record(const Heap& heap, char* record, Remote target, const RoutedTokens& routed, int token,
                                  int lane) {
    for (int word = lane; word < 2 + 2 * heap.top_k; word += WARP) {
        const uint32_t value = record_word(heap, routed, token, word);
        reinterpret_cast<uint32_t*>(record)[word] = value;
        if constexpr (!Link::STAGED) reinterpret_cast<uint32_t*>(address(heap, target))[word] = value;
    }
    if constexpr (Link::STAGED) {
        __syncwarp();
        Link::put_words(heap, record, heap.record_bytes, lane, 1, [&](int) { return target; });
    }
}

// The header of this rank's put, by one warp. Twin: write_header.
__device__ inline void write_header(const Heap& heap, int64_t* header, const RoutedTokens& routed, uint64_t magic, int lane) {
    const int64_t fields[HEADER_FIELDS] = {routed.num_tokens,  int64_t(magic), routed.bound_tokens, heap.microbatch_tokens,
                                           routed.num_experts, routed.top_k,   heap.hidden_size,    routed.layer,
                                           routed.edge_tokens};
#pragma unroll
    for (int field = 0; field < HEADER_FIELDS; ++field)
        if (lane == field) header[field] = fields[field];
    __syncwarp();
}

// Refuse a header of `sender` that disagrees with the heap or with `first`, another one of the same microbatch. One thread.
// Returns false where it is refused: then this PE has aborted. Twin: check_header.
__device__ inline bool check_header(const Heap& heap, Tag tag, int sender, const int64_t (&header)[HEADER_FIELDS],
                                    const int64_t (&first)[HEADER_FIELDS], uint64_t magic) {
    int bad = -1;
    int64_t expected = 0, seen = 0;
#pragma unroll
    for (int field = 0; field < HEADER_FIELDS; ++field) {
        int64_t wanted = first[field];
        if (field == Header::STEP) wanted = magic;
        if (field == Header::MICROBATCH_TOKENS) wanted = heap.microbatch_tokens;
        if (field == Header::HIDDEN_SIZE) wanted = heap.hidden_size;
        bool good = header[field] == wanted;
        if (field == Header::NUM_ROWS) good = header[field] >= 0 && header[field] <= heap.microbatch_tokens;
        if (!good) bad = field, expected = wanted, seen = header[field];
    }
    if (bad >= 0) report_value(heap, ErrorKind::MISMATCH, tag, magic, sender, bad, expected, seen);
    return bad < 0;
}

// Compare the header that `sender` left on this rank with this rank's own. One thread. Returns false where it is refused.
__device__ inline bool check_header_of_sender(const Heap& heap, uint64_t slot, uint64_t magic, int sender) {
    const int64_t* theirs = own<int64_t>(heap, RankRegion::expert_rows_header, slot, 0, sender);
    const int64_t* ours = own<int64_t>(heap, RankRegion::tokens_header, slot, 0);
    int64_t header[HEADER_FIELDS], first[HEADER_FIELDS];
#pragma unroll
    for (int field = 0; field < HEADER_FIELDS; ++field) header[field] = theirs[field], first[field] = ours[field];
    return check_header(heap, Tag::EXPERT_ROWS, sender, header, first, magic);
}

}  // namespace inc
