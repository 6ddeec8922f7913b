// INC All-to-All-Combine (Phased), switch side: one phase per G requests, so that only G microbatches are held.
// Twin: switch_emulator/combine_switch_phased.py.
//
// The first block watches the requests; once G have come, or all that are left, it makes a job of each owner in order of request. All
// blocks serve job after job: they wait until the ranks that hold rows of their tokens are ready, pull from all of them at once and
// add in rank order in registers, so the accumulators of G microbatches have no counterpart here. Waits on: combine_requests: each
// brings the routing of a rank's tokens and says that its partial sums are ready. Signals: token_sums_arrived on the owner. Reads:
// expert_rows of the ranks that hold experts of the owner's tokens. Writes: token_sums.
// Cost: as combine_switch.cuh; results/data/collectives_*.csv.
#pragma once

#include "combine_switch.cuh"
#include "dispatch_switch_phased.cuh"

namespace inc {

// The requests of one microbatch, in the first warp of the first block. Its lane r stands for rank r.
struct CombineLeader {
    const Heap& heap;
    const Team& team;
    const int lane;
    uint64_t magic, last_job;
    uint32_t unserved;     // owners of `magic` that no phase has taken yet
    int open = 0;          // owners of the phase in hand whose job is still to be made
    uint32_t ticket = 0, tickets = 0;
    const uint64_t stops_seen;

    // Wait until a whole phase has asked. One warp.
    __device__ Outcome wait_for_phase() {
        const uint64_t slot = slot_of(magic, heap.depth);
        const int wanted = min(heap.ranks_per_phase, __popc(unserved));
        ClerkClock clock;
        while (true) {
            const bool watching = unserved >> lane & 1 && ticket == 0;
            const uint64_t word = watching ? load_word(own<char>(heap, CombineSwitchRegion::combine_requests, slot, lane)) : 0;
            const bool came = watching && word >= arrival_threshold(magic);
            const uint32_t fresh = __ballot_sync(ALL_LANES, came);
            if (came) ticket = tickets + 1 + __popc(fresh & ((1u << lane) - 1));
            tickets += __popc(fresh);
            const uint32_t waiting = __ballot_sync(ALL_LANES, ticket != 0);
            if (__popc(waiting) >= wanted) break;
            if (fresh) clock.restart();
            const bool idle = unserved == every_rank(heap) && waiting == 0;
            if (clock.expired(heap, idle)) report_missing(heap, Tag::COMBINE_REQUEST, magic, unserved & ~waiting, word, lane);
            if (clock.polls % POLLS_PER_CHECK) continue;
            if (__any_sync(ALL_LANES, lane == 0 && aborted(heap))) return Outcome::ABORTED;
            if (idle && clock.polls % POLLS_PER_STOP_CHECK == 0 &&
                all_have_stopped<CombineSwitchRegion>(heap, stops_seen, lane))
                return Outcome::STOPPED;
        }
        __syncwarp();
        open = wanted;
        return Outcome::ARRIVED;
    }

    // Make the next job. One warp.
    __device__ void open_next() {
        const Outcome outcome = open ? Outcome::ARRIVED : wait_for_phase();
        if (outcome == Outcome::ABORTED) return;
        if (outcome == Outcome::STOPPED) {
            open_job(heap, last_job + 1, {}, 0, lane);
            if (lane == 0) workspace(heap).jobs_done = last_job;
            return remember_stops<CombineSwitchRegion>(heap, lane);
        }
        const uint32_t oldest = __reduce_min_sync(ALL_LANES, ticket ? ticket : ~0u);
        const int owner = __ffs(__ballot_sync(ALL_LANES, ticket == oldest)) - 1;
        const uint64_t slot = slot_of(magic, heap.depth);
        const int64_t rows = own<int64_t>(heap, CombineSwitchRegion::plan_header, slot, 0, owner)[Header::NUM_ROWS];
        last_job = open_job(heap, last_job + 1, {magic, owner, 0}, blocks_for_job(team, rows), lane);
        if (lane == owner) ticket = 0;
        unserved &= ~(1u << owner);
        --open;
        if (unserved == 0) ++magic, unserved = every_rank(heap);
    }
};

__device__ inline CombineLeader combine_leader(const Heap& heap, const Team& team) {
    const int lane = team.lane();
    return {heap,
            team,
            lane,
            *own<uint64_t>(heap, CombineSwitchRegion::magic) + 1,
            workspace(heap).jobs_done,
            every_rank(heap),
            0,
            0,
            0,
            workspace(heap).stops_seen[lane]};
}

// The ranks that hold a row of some token of the tile; every warp finds the same.
__device__ inline uint32_t ranks_of_tile(const Tile& tile, int lane) {
    uint32_t ranks = 0;
    for (int index = lane; index < tile.num_tokens; index += WARP) ranks |= tile.mask[index];
    return __reduce_or_sync(ALL_LANES, ranks);
}

// Sum and return the tokens of one owner. Every block of the switch calls it.
__device__ inline Outcome serve_combine_job(const Heap& heap, const Team& team, RegroupShared& shared, Tile tile, uint64_t key,
                                            const SwitchArguments& arguments) {
    wait_for_job(heap, team, key, shared);
    if (shared.outcome != Outcome::ARRIVED || shared.num_blocks == 0) return shared.outcome;
    const uint64_t arrived_ns = timer_ns();
    const Job job = workspace(heap).jobs[ring_of(key)];
    const uint64_t slot = slot_of(job.magic, heap.depth);
    const Senders senders{own<char>(heap, CombineSwitchRegion::plan_header, slot, 0, job.sender),
                          0,
                          own<char>(heap, CombineSwitchRegion::plan_routing, slot, 0, job.sender),
                          0,
                          Tag::COMBINE_PLAN,
                          job.magic,
                          1u << job.sender};
    bool good = true;
    if (team.warp() == 0) good = read_headers(heap, senders, arguments.replay_plan, shared, team.lane());
    if (!team.all(good)) return Outcome::ABORTED;
    count_run(heap, team, senders, shared, key);
    if (!add_lower_runs(heap, team, shared, key)) return Outcome::ABORTED;
    const int2 run = run_of_block(heap, team, shared);
    for (tile.begin = run.x; tile.begin < run.y; tile.begin += SWITCH_THREADS) {
        tile.num_tokens = min(SWITCH_THREADS, run.y - tile.begin);
        place_tile(heap, team, senders, shared, tile);
        const uint32_t ranks = ranks_of_tile(tile, team.lane());
        const Watch ready{own<char>(heap, CombineSwitchRegion::combine_requests, slot, 0),
                          place_of(heap, CombineSwitchRegion::combine_requests).stride[1],
                          ranks,
                          true,
                          Tag::COMBINE_PARTIAL_SUMS,
                          job.magic,
                          nullptr};
        if (ranks && wait_until_some(heap, team, ready).outcome != Outcome::ARRIVED) return Outcome::ABORTED;
        combine_tile(heap, team, shared, tile, {ranks, 0}, slot, uint64_t(job.sender) * heap.microbatch_tokens);
    }
    if (team.block == shared.num_blocks - 1 && team.thread < heap.num_ranks)
        atomicAdd(reinterpret_cast<unsigned long long*>(&workspace(heap).rows_pulled),
                  (unsigned long long)shared.before[team.thread]);
    if (finish_packet(heap, team, Packet::COMBINE, ring_of(key), shared.num_blocks) && team.lane() == 0) {
        const int num_tokens = shared.first[heap.num_ranks];
        signal(heap, {job.sender, offset_of(heap, RankRegion::token_sums_arrived, slot, 0)},
               signal_word(job.magic, num_tokens > 0));
        advance_counter(own<uint64_t>(heap, CombineSwitchRegion::magic), job.magic);
        record_moment(arguments, job.magic, arrived_ns, num_tokens);
    }
    return Outcome::ARRIVED;
}

}  // namespace inc
