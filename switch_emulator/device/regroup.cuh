// Which expert ranks need each token, and where its row stands in their slots. Twin: rows_of_sender in dispatch_switch.py and
// CombinePlan in combine_plan.py; both switches run this on the same records, so they agree without exchanging positions.
//
// Tokens of one microbatch are numbered through, sender by sender. The row of a token in the slot of an expert rank is the number
// of earlier tokens that need that rank. The first block of a switch opens a microbatch: it alone watches the senders, reads the
// headers and says how many blocks take part, so that few tokens cost no meeting of blocks. Each of them counts the rows of its
// own run of tokens, adds the counts of the blocks before it, and places its tokens tile by tile. A busy dispatch switch counts
// the next microbatch before it copies the one in hand, so that no block waits for another's copies. Reads: headers and routing
// records of this PE's heap. Writes: shared memory, and its words in the workspace. Cost: one exchange of words between blocks;
// not measured alone yet.
#pragma once

#include "../../inc_runtime/device/microbatch.cuh"
#include "../../inc_runtime/device/routing.cuh"
#include "timeline.cuh"

namespace inc {

constexpr int SWITCH_THREADS = 512;
constexpr int SWITCH_WARPS = SWITCH_THREADS / WARP;

// Headers and records of the senders of one packet, as they stand in this heap: of all ranks, or of one when phased.
struct Senders {
    const char* headers;
    uint64_t header_stride;
    const char* records;
    uint64_t record_stride;  // from one sender's records to the next's
    Tag tag;
    uint64_t magic;
    uint32_t members = ALL_LANES;  // the ranks whose header counts
};

// Where the blocks keep what they tell each other about a packet. `key` grows by one with every packet of a switch: magic, or the
// number of the job when phased; blocks are never MAX_DEPTH packets apart.
__device__ inline uint64_t ring_of(uint64_t key) { return key % MAX_DEPTH; }

// The counter of a switch, behind a packet that is done: another block may have finished a later one before.
__device__ inline void advance_counter(uint64_t* counter, uint64_t magic) {
    atomicMax(reinterpret_cast<unsigned long long*>(counter), (unsigned long long)magic);
}

struct RegroupShared {
    int first[MAX_RANKS + 1];   // number of the first token of each sender; the last entry is the number of tokens
    int before[MAX_RANKS];      // rows of each expert rank before the next tile
    int first_rows[MAX_RANKS];  // and before the tile in hand
    int warp_rows[SWITCH_WARPS][MAX_RANKS];
    int num_experts;
    int num_blocks;  // blocks that take part in this microbatch; 0 where this block has nothing to do
    Outcome outcome;
};

// One tile: mask[i] the ranks that need token i, rows[i * num_ranks + rank] its row there. The tile's rows of a rank are
// neighbours in its slot: `first_rows[rank]` to `first_rows[rank] + num_rows[rank] - 1`, and token_of_row[rank * SWITCH_THREADS +
// i] is the token of the i-th.
struct Tile {
    uint32_t* mask;
    int* rows;
    uint16_t* token_of_row;
    int begin, num_tokens;
};

inline __host__ __device__ int tile_bytes(int num_ranks) { return SWITCH_THREADS * (4 + 4 * num_ranks + 2 * num_ranks); }

__device__ inline Tile tile_in(char* memory, int num_ranks) {
    uint32_t* mask = reinterpret_cast<uint32_t*>(memory);
    int* rows = reinterpret_cast<int*>(mask + SWITCH_THREADS);
    return {mask, rows, reinterpret_cast<uint16_t*>(rows + SWITCH_THREADS * num_ranks), 0, 0};
}

constexpr int TOKENS_PER_BLOCK = 4;  // at least, so that one token of each of four ranks is one block's work

__device__ inline int64_t header_field(const Senders& senders, int sender, int field) {
    return reinterpret_cast<const int64_t*>(senders.headers + sender * senders.header_stride)[field];
}

// Read all headers; the first warp. Returns false where one is refused: then this PE has aborted.
__device__ inline bool read_headers(const Heap& heap, const Senders& senders, bool replayed, RegroupShared& shared, int lane) {
    int64_t header[HEADER_FIELDS] = {}, first[HEADER_FIELDS];
    const bool rank = lane < heap.num_ranks, sends = rank && senders.members >> lane & 1;
    const int first_sender = __ffs(senders.members) - 1;
#pragma unroll
    for (int field = 0; field < HEADER_FIELDS; ++field) {
        if (sends) header[field] = header_field(senders, lane, field);
        first[field] = __shfl_sync(ALL_LANES, header[field], first_sender);
    }
    const bool good = !sends || check_header(heap, senders.tag, lane, header, first,
                                             replayed ? first[Header::STEP] : senders.magic);
    if (!__all_sync(ALL_LANES, good)) return false;
    int rows = int(header[Header::NUM_ROWS]);
    for (int step = 1; step < WARP; step *= 2) {
        const int lower = __shfl_up_sync(ALL_LANES, rows, step);
        if (lane >= step) rows += lower;
    }
    if (rank) shared.first[lane + 1] = rows;
    if (lane == 0) shared.first[0] = 0, shared.num_experts = int(first[Header::NUM_EXPERTS]);
    __syncwarp();
    return true;
}

// The blocks that take part in the microbatch that the first warp has read the headers of.
__device__ inline int blocks_for(const Heap& heap, const Team& team, const RegroupShared& shared) {
    return max(1, min(team.num_blocks, (shared.first[heap.num_ranks] + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK));
}

// What the word of the first block says of `magic` to this block. A block that has fallen behind had no part.
__device__ inline Outcome part_of_word(uint64_t word, uint64_t magic, int block, int& num_blocks) {
    const bool current = word >> 16 == magic;
    num_blocks = current && block < int(word & 0xffff) ? int(word & 0xffff) : 0;
    return current && (word & 0xffff) == 0 ? Outcome::STOPPED : Outcome::ARRIVED;
}

// The first block opens a microbatch, the others learn from its word whether they take part. `watch`: what the first block waits
// for. All threads; afterwards `shared.outcome`, `num_blocks` and `first` hold for the block.
__device__ inline void open_microbatch(const Heap& heap, const Team& team, const Watch& watch, const Senders& senders,
                                       bool replayed, RegroupShared& shared) {
    uint64_t& opened = workspace(heap).opened[ring_of(watch.magic)];
    const int lane = team.lane();
    if (team.thread < WARP) {
        Outcome outcome = Outcome::ARRIVED;
        int num_blocks = 0;
        if (team.block == 0) {
            outcome = poll(heap, watch, lane).outcome;
            if (outcome == Outcome::ARRIVED && !read_headers(heap, senders, replayed, shared, lane))
                outcome = Outcome::ABORTED;
            if (outcome == Outcome::ARRIVED) num_blocks = blocks_for(heap, team, shared);
            if (lane == 0 && outcome != Outcome::ABORTED) store_word_of_gpu(&opened, watch.magic << 16 | num_blocks);
        } else {
            uint64_t word = 0;
            for (uint32_t polls = 1; (word = load_word_of_gpu(&opened)) >> 16 < watch.magic; ++polls) {
                if (polls % POLLS_PER_CHECK) continue;
                if (aborted(heap)) break;
                if (polls > POLLS_BEFORE_SLEEP) __nanosleep(IDLE_SLEEP_NS);
            }
            outcome = word >> 16 < watch.magic ? Outcome::ABORTED : part_of_word(word, watch.magic, team.block, num_blocks);
            if (num_blocks && !read_headers(heap, senders, replayed, shared, lane)) outcome = Outcome::ABORTED;
        }
        if (lane == 0) shared.outcome = outcome, shared.num_blocks = num_blocks;
        if (lane < heap.num_ranks) shared.before[lane] = 0;
    }
    team.sync();
}

// The same without waiting: true in all threads if the microbatch is there already and this block takes part in it.
__device__ inline bool try_to_open(const Heap& heap, const Team& team, const Watch& watch, const Senders& senders,
                                   RegroupShared& shared) {
    uint64_t& opened = workspace(heap).opened[ring_of(watch.magic)];
    const int lane = team.lane();
    if (team.thread < WARP) {
        int num_blocks = 0;
        if (team.block == 0) {
            const bool here =
                lane >= heap.num_ranks || load_word(watch.flags + lane * watch.stride) >= arrival_threshold(watch.magic);
            if (__all_sync(ALL_LANES, here) && read_headers(heap, senders, false, shared, lane))
                num_blocks = blocks_for(heap, team, shared);
            if (lane == 0 && num_blocks) store_word_of_gpu(&opened, watch.magic << 16 | num_blocks);
        } else {
            // One lane looks for all, as the first block may write meanwhile.
            part_of_word(__shfl_sync(ALL_LANES, load_word_of_gpu(&opened), 0), watch.magic, team.block, num_blocks);
            if (num_blocks && !read_headers(heap, senders, false, shared, lane)) num_blocks = 0;
        }
        if (lane == 0) shared.outcome = Outcome::ARRIVED, shared.num_blocks = num_blocks;
        if (lane < heap.num_ranks) shared.before[lane] = 0;
    }
    team.sync();
    return shared.num_blocks != 0;
}

// The run of tokens of this block.
__device__ inline int2 run_of_block(const Heap& heap, const Team& team, const RegroupShared& shared) {
    const int64_t num_tokens = shared.first[heap.num_ranks];
    return {int(num_tokens * team.block / shared.num_blocks), int(num_tokens * (team.block + 1) / shared.num_blocks)};
}

__device__ inline int sender_of(const RegroupShared& shared, int token) {
    int sender = 0;
    while (token >= shared.first[sender + 1]) ++sender;
    return sender;
}

__device__ inline const char* record_of(const Heap& heap, const Senders& senders, const RegroupShared& shared, int token,
                                        int sender) {
    return senders.records + sender * senders.record_stride + uint64_t(token - shared.first[sender]) * heap.record_bytes;
}

// The expert ranks that get a token from a switch: those that need it, with local bypass without its sender.
__device__ inline uint32_t ranks_of_token(const Heap& heap, const Senders& senders, const RegroupShared& shared, int token) {
    const int sender = sender_of(shared, token);
    const int32_t* ids = reinterpret_cast<const int32_t*>(record_of(heap, senders, shared, token, sender) +
                                                          RoutingRecord::expert_ids_offset(heap.top_k));
    const uint32_t ranks = ranks_of_token(heap, expert_owners(shared.num_experts, heap.num_ranks), ids, heap.top_k, senders.tag,
                                          senders.magic, sender, token - shared.first[sender]);
    return LOCAL_BYPASS ? ranks & ~(1u << sender) : ranks;
}

// Count the rows of each rank in this block's run and tell the other blocks. Every block that takes part calls it, behind a
// barrier.
__device__ inline void count_run(const Heap& heap, const Team& team, const Senders& senders, RegroupShared& shared,
                                 uint64_t key) {
    if (shared.num_blocks == 1) return;
    const int2 run = run_of_block(heap, team, shared);
    const int lane = team.lane();
    int rows_of_lane = 0;
    for (int token = run.x + team.warp() * WARP; token < run.y; token += team.num_threads) {
        const uint32_t mask = token + lane < run.y ? ranks_of_token(heap, senders, shared, token + lane) : 0;
        for (int rank = 0; rank < heap.num_ranks; ++rank) {
            const int rows = __popc(__ballot_sync(ALL_LANES, mask >> rank & 1));
            if (lane == rank) rows_of_lane += rows;
        }
    }
    shared.warp_rows[team.warp()][lane] = rows_of_lane;
    team.sync();
    if (team.warp() != 0) return;
    int total = 0;
    for (int warp = 0; warp < team.num_warps(); ++warp) total += shared.warp_rows[warp][lane];
    workspace(heap).counted_rows[ring_of(key)][team.block][lane] = total;
    __syncwarp();
    if (lane == 0) store_word_of_gpu(&workspace(heap).counted[ring_of(key)][team.block], key);
}

// Let `shared.before` hold the rows of each rank before this block's run: the counts of the blocks before it. Returns false after
// an abort. Begins and ends with a barrier.
__device__ inline bool add_lower_runs(const Heap& heap, const Team& team, RegroupShared& shared, uint64_t key) {
    const int lane = team.lane(), lower_blocks = shared.num_blocks == 1 ? 0 : team.block;
    team.sync();
    if (team.warp() == 0) {
        bool good = true;
        for (int other = lane; other < lower_blocks; other += WARP)
            for (uint32_t polls = 1; good && load_word_of_gpu(&workspace(heap).counted[ring_of(key)][other]) < key; ++polls)
                good = polls % POLLS_PER_CHECK || !aborted(heap);
        good = __all_sync(ALL_LANES, good);
        __syncwarp();
        int before = 0;
        for (int other = 0; other < lower_blocks; ++other)
            before += *reinterpret_cast<volatile uint32_t*>(&workspace(heap).counted_rows[ring_of(key)][other][lane]);
        if (lane < heap.num_ranks) shared.before[lane] = before;
        if (lane == 0 && !good) shared.outcome = Outcome::ABORTED;
    }
    team.sync();
    return shared.outcome == Outcome::ARRIVED;
}

// Where the row of a token stands in a slot with cut-through: in its sender's run, whatever came before.
__device__ inline int row_in_run(const Heap& heap, const RegroupShared& shared, int token) {
    const int sender = sender_of(shared, token);
    return sender * heap.microbatch_tokens + token - shared.first[sender];
}

// Fill one tile and advance `shared.before` over it. Begins and ends with a barrier.
__device__ inline void place_tile(const Heap& heap, const Team& team, const Senders& senders, RegroupShared& shared,
                                  Tile& tile) {
    const int warp = team.warp(), lane = team.lane(), num_ranks = heap.num_ranks;
    team.sync();
    const bool present = team.thread < tile.num_tokens;
    const uint32_t mask = present ? ranks_of_token(heap, senders, shared, tile.begin + team.thread) : 0;
    if (present) tile.mask[team.thread] = mask;
    for (int rank = 0; rank < num_ranks; ++rank) {
        const uint32_t need = __ballot_sync(ALL_LANES, mask >> rank & 1);
        if (present) tile.rows[team.thread * num_ranks + rank] = __popc(need & ((1u << lane) - 1));
        if (lane == rank) shared.warp_rows[warp][rank] = __popc(need);
    }
    team.sync();
    if (warp == 0 && lane < num_ranks) {
        int rows = shared.before[lane];
        shared.first_rows[lane] = rows;
        for (int w = 0; w < team.num_warps(); ++w) {
            const int own = shared.warp_rows[w][lane];
            shared.warp_rows[w][lane] = rows;
            rows += own;
        }
        shared.before[lane] = rows;
    }
    team.sync();
    if (present) {
        for (int rank = 0; rank < num_ranks; ++rank) {
            int row = tile.rows[team.thread * num_ranks + rank] + shared.warp_rows[warp][rank];
            if constexpr (CUT_THROUGH) row = row_in_run(heap, shared, tile.begin + team.thread);
            tile.rows[team.thread * num_ranks + rank] = row;
            if constexpr (CUT_THROUGH) continue;
            if (mask >> rank & 1)
                tile.token_of_row[rank * SWITCH_THREADS + row - shared.first_rows[rank]] = uint16_t(team.thread);
        }
    }
    team.sync();
}

}  // namespace inc
