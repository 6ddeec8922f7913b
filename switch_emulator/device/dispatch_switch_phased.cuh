// INC All-to-All-Dispatch (Phased), switch side: G inbox slots, multicast of each microbatch as it arrives.
// Twin: switch_emulator/dispatch_switch_phased.py.
//
// The clerk grants places and, when the tokens of a rank are in its place, makes a job of them; all other warps multicast job after
// job, each with the code of the collective for a microbatch of one sender. Waits on: dispatch_requests, tokens_arrived of the ranks
// that hold a place, barrier_joined. Signals: dispatch_grants, expert_rows_arrived (one flag per sender, payload or not),
// barrier_released. Reads: its inbox of G slots. Writes: expert_rows in the sender's own run.
// Cost: as dispatch_switch.cuh, and two round trips a phase; results/data/collectives_*.csv.
#pragma once

#include "dispatch_switch.cuh"
#include "phases.cuh"

namespace inc {

// Hand a job to the blocks; returns its number. The clerk's warp. `num_blocks`: those that take part, 0 to end.
__device__ inline uint64_t open_job(const Heap& heap, uint64_t job, const Job& what, int num_blocks, int lane) {
    if (lane == 0) {
        if (num_blocks) workspace(heap).jobs[ring_of(job)] = what;
        store_word_of_gpu(&workspace(heap).opened[ring_of(job)], job << 16 | num_blocks);
    }
    __syncwarp();
    return job;
}

// Wait for a job. All threads; afterwards `shared.outcome` and `shared.num_blocks` hold: 0 where this block has no part.
__device__ inline void wait_for_job(const Heap& heap, const Team& team, uint64_t job, RegroupShared& shared) {
    team.sync();
    if (team.thread < WARP) {
        const uint64_t* opened = &workspace(heap).opened[ring_of(job)];
        uint64_t word = 0;
        for (uint32_t polls = 1; (word = load_word_of_gpu(opened)) >> 16 < job; ++polls) {
            if (polls % POLLS_PER_CHECK) continue;
            if (aborted(heap)) break;
            if (polls > POLLS_BEFORE_SLEEP) __nanosleep(IDLE_SLEEP_NS);
        }
        word = __shfl_sync(ALL_LANES, word, 0);
        int num_blocks = 0;
        const Outcome outcome = word >> 16 < job ? Outcome::ABORTED : part_of_word(word, job, team.block, num_blocks);
        if (team.lane() == 0) shared.outcome = outcome, shared.num_blocks = num_blocks;
        if (team.lane() < heap.num_ranks) shared.before[team.lane()] = 0;
    }
    team.sync();
}

// Blocks for `num_rows` tokens of one sender; twin of blocks_for.
__device__ inline int blocks_for_job(const Team& team, int64_t num_rows) {
    return int(max(int64_t(1), min(int64_t(team.num_blocks), (num_rows + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK)));
}

// Multicast the microbatch of one sender. Every block of the switch calls it.
__device__ inline Outcome serve_dispatch_job(const Heap& heap, const Team& team, RegroupShared& shared, Tile tile, uint64_t key,
                                             const SwitchArguments& arguments) {
    wait_for_job(heap, team, key, shared);
    if (shared.outcome != Outcome::ARRIVED || shared.num_blocks == 0) return shared.outcome;
    const uint64_t arrived_ns = timer_ns();
    const Job job = workspace(heap).jobs[ring_of(key)];
    const uint64_t slot = slot_of(job.magic, heap.depth);
    const Senders senders{own<char>(heap, DispatchSwitchRegion::inbox_header, job.place),
                          0,
                          own<char>(heap, DispatchSwitchRegion::inbox_routing, job.place),
                          0,
                          Tag::DISPATCH_TOKENS,
                          job.magic,
                          1u << job.sender};
    bool good = true;
    if (team.warp() == 0) good = read_headers(heap, senders, false, shared, team.lane());
    if (!team.all(good)) return Outcome::ABORTED;
    count_run(heap, team, senders, shared, key);
    if (!add_lower_runs(heap, team, shared, key)) return Outcome::ABORTED;
    const int2 run = run_of_block(heap, team, shared);
    for (tile.begin = run.x; tile.begin < run.y; tile.begin += SWITCH_THREADS) {
        tile.num_tokens = min(SWITCH_THREADS, run.y - tile.begin);
        place_tile(heap, team, senders, shared, tile);
        multicast_tile({heap, shared, senders, tile, slot, job.place, uint64_t(job.sender) * heap.microbatch_tokens}, team);
    }
    if (team.block == shared.num_blocks - 1) put_packet_headers(heap, team, shared, senders, slot, key, job.sender);
    if (finish_packet(heap, team, Packet::DISPATCH, ring_of(key), shared.num_blocks)) {
        signal_expert_ranks(heap, shared, slot, job.magic, key, job.sender, team.lane());
        __syncwarp();
        if (team.lane() == 0) {
            store_word_of_gpu(&workspace(heap).job_done[ring_of(key)], key);
            record_moment(arguments, job.magic, arrived_ns, shared.first[heap.num_ranks]);
        }
    }
    return Outcome::ARRIVED;
}

// The clerk of the dispatch switch, and its places: lane p knows the job that place p waits for.
struct DispatchClerk {
    const Heap& heap;
    const Team& team;  // of the blocks that do the jobs
    const int lane;
    PhaseQueue queue;
    InNetworkBarrier barrier;
    ClerkClock clock;
    uint64_t job_of_place, last_job;
    const uint64_t stops_seen;

    __device__ uint64_t word_of_rank(DispatchSwitchRegion region) const {
        return lane < heap.num_ranks ? load_word_relaxed(own<char>(heap, region, lane)) : 0;
    }

    // Places whose job is done become free, and the oldest requests take them.
    __device__ bool grant() {
        const bool done = job_of_place && load_word_of_gpu(&workspace(heap).job_done[ring_of(job_of_place)]) >= job_of_place;
        if (done) queue.held_by = -1, job_of_place = 0;
        bool granted = __any_sync(ALL_LANES, done);
        int place, rank;
        uint64_t magic;
        if (granted) fence_system();  // the slot has been read before the next rank may write it
        while (queue.open_next(place, rank, magic, lane)) {
            granted = true;
            if (lane == 0)
                signal(heap, {rank, offset_of(heap, RankRegion::dispatch_grants, 0, place)}, signal_word(magic, true));
        }
        return granted;
    }

    // Compare the header in a place with the first of its microbatch.
    __device__ bool check_first(const Job& job) const {
        int64_t* kept = workspace(heap).first_headers[slot_of(job.magic, heap.depth)];
        const int64_t* here = own<int64_t>(heap, DispatchSwitchRegion::inbox_header, job.place);
        const bool first = kept[Header::STEP] != int64_t(job.magic);
        int64_t header[HEADER_FIELDS], wanted[HEADER_FIELDS];
#pragma unroll
        for (int field = 0; field < HEADER_FIELDS; ++field)
            header[field] = here[field], wanted[field] = first ? here[field] : kept[field];
        __syncwarp();
        if (first && lane < HEADER_FIELDS) kept[lane] = here[lane];
        __syncwarp();
        const bool good = lane != 0 || check_header(heap, Tag::DISPATCH_TOKENS, job.sender, header, wanted, job.magic);
        return __all_sync(ALL_LANES, good);
    }

    // Make jobs of the places whose tokens are here.
    __device__ bool open_jobs() {
        bool here = queue.held_by >= 0 && job_of_place == 0;
        if (here) {
            const uint64_t slot = slot_of(queue.held_magic, heap.depth);
            const char* flag = own<char>(heap, DispatchSwitchRegion::tokens_arrived, slot, queue.held_by);
            here = load_word_relaxed(flag) >= arrival_threshold(queue.held_magic);
        }
        const uint32_t arrived = __ballot_sync(ALL_LANES, here);
        if (arrived) fence_system();
        for (uint32_t left = arrived; left; left &= left - 1) {
            const int place = __ffs(left) - 1;
            const Job job{__shfl_sync(ALL_LANES, queue.held_magic, place), __shfl_sync(ALL_LANES, queue.held_by, place), place};
            if (!check_first(job)) return true;
            const int64_t rows = own<int64_t>(heap, DispatchSwitchRegion::inbox_header, place)[Header::NUM_ROWS];
            last_job = open_job(heap, last_job + 1, job, blocks_for_job(team, rows), lane);
            if (lane == place) job_of_place = last_job;
        }
        return arrived != 0;
    }

    __device__ void report() {
        const uint64_t request = word_of_rank(DispatchSwitchRegion::dispatch_requests);
        const uint32_t silent = queue.ranks_with_places(), behind = ranks_behind(heap, queue.next_magic, lane);
        const uint64_t magic = least_of_ranks(heap, queue.next_magic, lane);
        if (silent)
            report_missing(heap, Tag::DISPATCH_TOKENS, magic, silent, request, lane);
        else if (behind)
            report_missing(heap, Tag::DISPATCH_REQUEST, magic, behind, request, lane);
        else
            report_missing(heap, Tag::DISPATCH_BARRIER, barrier.released + 1, ranks_behind(heap, barrier.joined, lane),
                           word_of_rank(DispatchSwitchRegion::barrier_joined), lane);
    }

    // Serve until every rank has stopped. One warp.
    __device__ void serve() {
        while (true) {
            const uint64_t request = word_of_rank(DispatchSwitchRegion::dispatch_requests);
            bool moved = queue.queue_up(lane < heap.num_ranks && request >= arrival_threshold(queue.next_magic), lane);
            moved |= barrier.look(heap, word_of_rank(DispatchSwitchRegion::barrier_joined), lane);
            moved |= grant();
            moved |= open_jobs();
            if (moved) {
                clock.restart();
                if (__any_sync(ALL_LANES, lane == 0 && aborted(heap))) return;
                continue;
            }
            const bool idle = queue.ranks_with_places() == 0 && ranks_behind(heap, queue.next_magic, lane) == 0 &&
                              ranks_behind(heap, barrier.joined, lane) == 0;
            if (clock.expired(heap, idle)) report();
            if (clock.polls % POLLS_PER_CHECK) continue;
            if (__any_sync(ALL_LANES, lane == 0 && aborted(heap))) return;
            if (idle && clock.polls % POLLS_PER_STOP_CHECK == 0 && all_have_stopped<DispatchSwitchRegion>(heap, stops_seen, lane))
                break;
        }
        open_job(heap, last_job + 1, {}, 0, lane);
        leave_queue(heap, queue, lane);
        if (lane == 0) workspace(heap).jobs_done = last_job, workspace(heap).barrier_released = barrier.released;
        remember_stops<DispatchSwitchRegion>(heap, lane);
    }
};

__device__ inline DispatchClerk dispatch_clerk(const Heap& heap, const Team& team, int lane) {
    return {heap, team, lane, resume_queue(heap, lane), {0, workspace(heap).barrier_released}, {}, 0, workspace(heap).jobs_done,
            workspace(heap).stops_seen[lane]};
}

}  // namespace inc
