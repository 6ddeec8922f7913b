// INC All-to-All-Combine, switch side: pulls the partial sums of the ranks that are ready, adds them, returns one row per token.
// Twin: switch_emulator/combine_switch.py (serve_microbatch).
//
// Waits on: plan_arrived, then partial_sums_ready of every rank, in order of arrival or in rank order. Signals:
// token_sums_arrived on every rank. Reads: expert_rows [rows, H] of the expert ranks; its plan. Writes: token_sums [tokens, H] on
// the token ranks.
//
// A block takes the ranks that are ready when it looks as one pass and sums their rows of each of its tokens in registers, all
// ranks pulled at once. If all are ready the sum never leaves the registers; else the tokens that still lack a rank rest in the
// float32 accumulators until the next pass. In rank order a pass takes only the run of ranks that comes next, and adds in that
// order, so the sums equal those of the role program bit for bit. A pass costs at least a round trip, so a block that sees some
// ranks ready gives the others about that long: at worst it doubles the wait, at best it saves a pass. The role program's landing
// buffer has no counterpart on a direct link. Cost: one remote load per row pulled, one remote store per token;
// results/data/collectives_*.csv, metric ingress.
#pragma once

#include "../../inc_runtime/device/sums.cuh"
#include "regroup.cuh"

namespace inc {

constexpr int RANKS_AT_ONCE = 4, COLUMNS_AT_ONCE = 2;  // eight 16-byte loads in flight per thread: 64 KB per block

// One pass over the tokens of a block: the ranks pulled now, and those already in the accumulators.
struct Pass {
    uint32_t ready, done;
};

// Sum one part of a token's row over the ranks of `members`. `row_at(rank)` is where that rank's part can be read. The partial
// sum starts from and returns to `accumulator`, or ends as bfloat16 at `target`. One warp.
template <class RowAt>
__device__ inline void sum_part(uint32_t members, RowAt row_at, int num_bytes, float* accumulator, bool resume, char* target,
                                int lane) {
    constexpr int STEP = WARP * 16;
    for (int start = lane * 16; start < num_bytes; start += STEP * COLUMNS_AT_ONCE) {
        float sum[COLUMNS_AT_ONCE][8];
#pragma unroll
        for (int c = 0; c < COLUMNS_AT_ONCE; ++c) {
            const bool inside = start + c * STEP < num_bytes;
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[c][i] = resume && inside ? accumulator[(start + c * STEP) / 2 + i] : 0.0f;
        }
        for (uint32_t left = members; left;) {
            uint4 words[RANKS_AT_ONCE][COLUMNS_AT_ONCE];
#pragma unroll
            for (int g = 0; g < RANKS_AT_ONCE; ++g) {
                const char* row = left ? row_at(__ffs(left) - 1) : nullptr;
                left &= left - 1;
#pragma unroll
                for (int c = 0; c < COLUMNS_AT_ONCE; ++c) {
                    words[g][c] = make_uint4(0, 0, 0, 0);
                    if (row && start + c * STEP < num_bytes) words[g][c] = load_16_bytes(row + start + c * STEP);
                }
            }
#pragma unroll
            for (int g = 0; g < RANKS_AT_ONCE; ++g)
#pragma unroll
                for (int c = 0; c < COLUMNS_AT_ONCE; ++c) add_row_words(sum[c], words[g][c]);
        }
#pragma unroll
        for (int c = 0; c < COLUMNS_AT_ONCE; ++c) {
            if (start + c * STEP >= num_bytes) continue;
            if (target) {
                store_16_bytes(target + start + c * STEP, round_to_bf16(sum[c]));
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) accumulator[(start + c * STEP) / 2 + i] = sum[c][i];
            }
        }
    }
}

// Whether a token of no rank is returned, as zeros, in this pass. With local bypass nothing is.
__device__ inline bool returns_zeros(uint32_t members, const Pass& pass) { return !LOCAL_BYPASS && members == 0 && pass.done == 0; }

// Pull and add one part of one token in one pass; return it to its owner once no rank is missing. `first_row`: of the owner's run
// on every expert rank, where each has its own. One warp.
__device__ inline void combine_token(const Heap& heap, const Team& team, const RegroupShared& shared, const Tile& tile,
                                     const Pass& pass, int index, int part, int part_bytes, uint64_t slot,
                                     uint64_t first_row) {
    const uint32_t members = tile.mask[index], pulled = members & pass.ready;
    const bool complete = (members & ~(pass.ready | pass.done)) == 0;
    if (pulled == 0 && !returns_zeros(members, pass)) return;
    const int token = tile.begin + index, owner = sender_of(shared, token), row = token - shared.first[owner];
    const int* rows = tile.rows + index * heap.num_ranks;
    const uint64_t expert_rows = offset_of(heap, RankRegion::expert_rows, slot, first_row) + part * part_bytes;
    const auto remote_row = [&](int rank) { return Remote{rank, expert_rows + uint64_t(rows[rank]) * heap.row_bytes}; };
    float* accumulator = reinterpret_cast<float*>(heap.accumulators) +
                         (uint64_t(owner) * plane_tokens(heap) + row) * heap.hidden_size + part * part_bytes / 2;
    const int token_of_owner = first_token_of_plane(heap, own_plane(heap)) + row;
    const Remote sum{owner, offset_of(heap, RankRegion::token_sums, slot, token_of_owner) + part * part_bytes};
    const bool resume = (members & pass.done) != 0;
    if constexpr (!Link::STAGED) {
        sum_part(
            pulled, [&](int rank) -> const char* { return address(heap, remote_row(rank)); }, part_bytes, accumulator, resume,
            complete ? address(heap, sum) : nullptr, team.lane());
    } else {
        const uint64_t warp = uint64_t(team.block) * team.num_warps() + team.warp();
        char* landing = reinterpret_cast<char*>(heap.landing) + warp * heap.num_ranks * heap.row_bytes;
        for (uint32_t left = pulled; left; left &= left - 1) {
            const int rank = __ffs(left) - 1;
            Link::get_row(heap, remote_row(rank), part_bytes, landing + rank * heap.row_bytes);
        }
        __syncwarp();
        char* staged = own<char>(heap, CombineSwitchRegion::sums_out, owner, row) + part * part_bytes;
        sum_part(
            pulled, [&](int rank) -> const char* { return landing + rank * heap.row_bytes; }, part_bytes, accumulator, resume,
            complete ? staged : nullptr, team.lane());
        if (complete) Link::put_row(heap, staged, part_bytes, team.lane(), 1, [&](int) { return sum; });
        __syncwarp();
    }
}

// Pull and add the tokens of one tile in one pass. All warps.
__device__ inline void combine_tile(const Heap& heap, const Team& team, const RegroupShared& shared, const Tile& tile,
                                    const Pass& pass, uint64_t slot, uint64_t first_row = 0) {
    const int parts = parts_of_row(tile.num_tokens, team.num_warps(), heap.row_bytes), part_bytes = heap.row_bytes / parts;
    const int end = tile.num_tokens * parts, step = team.num_warps(), lane = team.lane();
    int paid = 0;
    for (int unit = team.warp(); unit < end; unit += step) {
        if (paced(heap) && paid-- == 0) {
            paid = ROWS_AT_ONCE - 1;
            pass_ports(heap, Port::EGRESS, unit, end, step, part_bytes, lane,
                       [&](int at, int rank) { return tile.mask[at / parts] & pass.ready & 1u << rank ? 1 : 0; });
            pass_ports(heap, Port::INGRESS, unit, end, step, part_bytes, lane, [&](int at, int rank) {
                const uint32_t members = tile.mask[at / parts];
                const bool complete = (members & ~(pass.ready | pass.done)) == 0;
                const bool now = complete && (members & pass.ready || returns_zeros(members, pass));
                return now && sender_of(shared, tile.begin + at / parts) == rank ? 1 : 0;
            });
        }
        combine_token(heap, team, shared, tile, pass, unit / parts, unit % parts, part_bytes, slot, first_row);
    }
}

constexpr int64_t GRACE_CYCLES = 3000;

// The ranks of the next pass: those that are ready, or in rank order the ready run that comes next.
__device__ inline Waited next_ranks(const Heap& heap, const Team& team, uint32_t pending, uint64_t slot, uint64_t magic,
                                    bool rank_order) {
    const Watch watch{own<char>(heap, CombineSwitchRegion::partial_sums_ready, slot, 0),
                      place_of(heap, CombineSwitchRegion::partial_sums_ready).stride[1],
                      rank_order ? pending & -pending : pending,
                      false,
                      Tag::COMBINE_PARTIAL_SUMS,
                      magic,
                      nullptr,
                      GRACE_CYCLES};
    Waited waited = wait_until_some(heap, team, watch);
    if (!rank_order || waited.outcome != Outcome::ARRIVED) return waited;
    Watch more = watch;
    more.pending = pending;
    waited = wait_until_some(heap, team, more);
    const uint32_t gaps = pending & ~waited.arrived;
    waited.arrived = gaps ? waited.arrived & ((gaps & -gaps) - 1) : waited.arrived;
    return waited;
}

// Words of one microbatch, by one warp.
__device__ inline void signal_combined(const Heap& heap, const RegroupShared& shared, uint64_t slot, uint64_t magic, int lane) {
    if (lane < heap.num_ranks) {
        const bool payload = shared.first[lane + 1] > shared.first[lane];
        signal(heap, {lane, offset_of(heap, RankRegion::token_sums_arrived, slot, own_plane(heap))}, signal_word(magic, payload));
    }
    if (lane == 0) advance_counter(own<uint64_t>(heap, CombineSwitchRegion::magic), magic);
}

// The run of tokens of one block, and how far it is.
struct CombineRun {
    const Senders& senders;
    int begin, end;
    uint64_t slot, magic;

    __device__ bool single_tile() const { return end - begin <= SWITCH_THREADS; }
};

// One pass of a block over its run. A single tile was placed before the first rank was ready; more are placed anew in every pass.
__device__ inline bool combine_run(const Heap& heap, const Team& team, const CombineRun& run, RegroupShared& shared, Tile& tile,
                                   const Pass& pass) {
    if (!run.single_tile() && !add_lower_runs(heap, team, shared, run.magic)) return false;
    for (tile.begin = run.begin; tile.begin < run.end; tile.begin += SWITCH_THREADS) {
        tile.num_tokens = min(SWITCH_THREADS, run.end - tile.begin);
        if (!run.single_tile()) place_tile(heap, team, run.senders, shared, tile);
        combine_tile(heap, team, shared, tile, pass, run.slot, first_row_of_plane(heap));
    }
    return true;
}

// Sum and return one microbatch. Every block of the switch calls it.
__device__ inline Outcome serve_combine_microbatch(const Heap& heap, const Team& team, RegroupShared& shared, Tile tile,
                                                   uint64_t magic, const SwitchArguments& arguments) {
    const uint64_t slot = slot_of(magic, heap.depth);
    const Watch watch{own<char>(heap, CombineSwitchRegion::plan_arrived, slot, own_plane(heap)),
                      0,
                      1,
                      true,
                      Tag::COMBINE_PLAN,
                      magic,
                      own<char>(heap, CombineSwitchRegion::stop)};
    const Senders senders{own<char>(heap, CombineSwitchRegion::plan_header, slot, own_plane(heap), 0),
                          place_of(heap, CombineSwitchRegion::plan_header).stride[2],
                          own<char>(heap, CombineSwitchRegion::plan_routing, slot, own_plane(heap), 0),
                          place_of(heap, CombineSwitchRegion::plan_routing).stride[2],
                          Tag::COMBINE_PLAN,
                          magic};
    open_microbatch(heap, team, watch, senders, arguments.replay_plan, shared);
    if (shared.outcome != Outcome::ARRIVED || shared.num_blocks == 0) return shared.outcome;
    const int num_blocks = shared.num_blocks, num_tokens = shared.first[heap.num_ranks];
    const int2 tokens = run_of_block(heap, team, shared);
    const CombineRun run{senders, tokens.x, tokens.y, slot, magic};
    count_run(heap, team, senders, shared, magic);
    if (run.single_tile()) {
        if (!add_lower_runs(heap, team, shared, magic)) return Outcome::ABORTED;
        tile.begin = run.begin, tile.num_tokens = run.end - run.begin;
        place_tile(heap, team, senders, shared, tile);
    }
    uint32_t pending = every_rank(heap);
    Pass pass{0, 0};
    uint64_t arrived_ns = 0;
    while (pending) {
        const Waited waited = next_ranks(heap, team, pending, slot, magic, arguments.rank_order);
        if (waited.outcome != Outcome::ARRIVED) return waited.outcome;
        if (arrived_ns == 0) arrived_ns = timer_ns();
        pass = {waited.arrived, pass.done | pass.ready};
        pending &= ~waited.arrived;
        if (!combine_run(heap, team, run, shared, tile, pass)) return Outcome::ABORTED;
    }
    if (team.block == num_blocks - 1 && team.thread < heap.num_ranks)  // the last run has counted all rows
        atomicAdd(reinterpret_cast<unsigned long long*>(&workspace(heap).rows_pulled),
                  (unsigned long long)shared.before[team.thread]);
    if (finish_packet(heap, team, Packet::COMBINE, slot, num_blocks)) {
        signal_combined(heap, shared, slot, magic, team.lane());
        if (team.lane() == 0) record_moment(arguments, magic, arrived_ns, num_tokens);
    }
    return Outcome::ARRIVED;
}

}  // namespace inc
