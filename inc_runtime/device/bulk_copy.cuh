// Rows through shared memory by the bulk copy engine: each row is loaded once and stored to any number of peers. Twin: none.
//
// One warp drives a ring of buffers for a few rows each. Lane 0 starts the loads, which complete on the buffer's barrier; then lane r starts
// the stores to target r. A buffer is loaded again once the stores have read it. Waits on: shared memory barriers.
// Reads: rows of this PE, which an acquire has made visible. Writes: rows on peers, complete on return.
// Cost: per operation about a quarter of a microsecond of an SM's engine, so neighbouring rows go as one; results/data/collectives_*.csv.
#pragma once

#include "one_sided.cuh"

namespace inc {

constexpr int STORES_BEHIND = 2;      // groups whose stores may still read their buffers while later groups are loaded
constexpr int MIN_ROW_BUFFERS = STORES_BEHIND + 1;
constexpr int MAX_ROW_BUFFERS = 16;
constexpr int RING_BYTES = 192 * 1024;

// How a block uses the engine: `warps` rings of `num_buffers` buffers, each of `rows` rows. No warps: rows are too wide for this path.
struct BulkShape {
    int warps, rows, num_buffers;
};

inline __host__ __device__ BulkShape bulk_shape(int row_bytes, int warps, int rows) {
    while (rows > 1 && RING_BYTES / (warps * rows * row_bytes) < MIN_ROW_BUFFERS + 1) rows /= 2;
    const int fit = rows && warps ? RING_BYTES / (warps * rows * row_bytes) : 0;
    return fit < MIN_ROW_BUFFERS ? BulkShape{0, 0, 0} : BulkShape{warps, rows, fit < MAX_ROW_BUFFERS ? fit : MAX_ROW_BUFFERS};
}

__device__ inline uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// One warp's ring. `turns` counts the groups of rows that have gone through it, over all calls, modulo two rounds.
struct RowRing {
    char* buffers;
    uint64_t* loaded;  // barriers, one per buffer
    int num_buffers, rows, row_bytes;
    uint32_t turns;

    __device__ void prepare(int lane) {
        if (lane < num_buffers) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(loaded + lane)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
    }

    __device__ uint32_t buffer(uint32_t turn) const { return shared_address(buffers) + turn % num_buffers * rows * row_bytes; }
    __device__ uint32_t barrier(uint32_t turn) const { return shared_address(loaded + turn % num_buffers); }

    __device__ void expect(uint32_t turn, int num_rows) const {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(turn)), "r"(num_rows * row_bytes) : "memory");
    }

    // Start the load of `num_rows` neighbouring rows into the buffer, behind its row `first`.
    __device__ void load(uint32_t turn, int first, int num_rows, const char* source) const {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         buffer(turn) + first * row_bytes),
                     "l"(source), "r"(num_rows * row_bytes), "r"(barrier(turn))
                     : "memory");
    }

    __device__ void wait_until_loaded(uint32_t turn) const {
        const uint32_t parity = turn / num_buffers & 1;
        uint32_t done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done)
                         : "r"(barrier(turn)), "r"(parity)
                         : "memory");
    }

    __device__ void store(uint32_t turn, int first, int num_rows, char* target) const {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(buffer(turn) + first * row_bytes),
                     "r"(num_rows * row_bytes)
                     : "memory");
    }
};

// Load rows [first, first + num_rows) of the tile: one operation per run of rows that are neighbours at their source. One lane.
template <class SourceOf>
__device__ inline void load_group(const RowRing& ring, uint32_t turn, int first, int num_rows, SourceOf source_of) {
    ring.expect(turn, num_rows);
    for (int i = 0; i < num_rows;) {
        const char* source = source_of(first + i);
        int run = 1;
        while (i + run < num_rows && source_of(first + i + run) == source + int64_t(run) * ring.row_bytes) ++run;
        ring.load(turn, i, run, source);
        i += run;
    }
}

// Send rows 0 to `num_rows` - 1 of a tile: row i from `source_of(i)` to `target_of(i, rank)` for every rank of `mask_of(i)`. Rows that go
// to the same rank one after another are neighbours there, and go as one. `ring_index` of `num_rings` warps that share the tile; returns
// when the stores of this warp are complete.
template <class SourceOf, class MaskOf, class TargetOf>
__device__ inline void multicast_rows(RowRing& ring, int ring_index, int num_rings, int num_rows, int lane, SourceOf source_of, MaskOf mask_of,
                                      TargetOf target_of) {
    const int num_groups = (num_rows + ring.rows - 1) / ring.rows, own_groups = (num_groups - ring_index + num_rings - 1) / num_rings;
    const int ahead = ring.num_buffers - STORES_BEHIND;
    const auto first_row = [&](int group) { return (group * num_rings + ring_index) * ring.rows; };
    const auto load = [&](int group) {
        load_group(ring, ring.turns + group, first_row(group), min(ring.rows, num_rows - first_row(group)), source_of);
    };
    asm volatile("fence.proxy.async;" ::: "memory");  // rows that peers stored, seen through a flag, are read by the copy engine
    if (lane == 0)
        for (int group = 0; group < ahead && group < own_groups; ++group) load(group);
    for (int group = 0; group < own_groups; ++group) {
        const int first = first_row(group), end = min(first + ring.rows, num_rows);
        ring.wait_until_loaded(ring.turns + group);
        for (int row = first; row < end;) {
            int run = 0;
            while (row + run < end && mask_of(row + run) >> lane & 1) ++run;
            if (run) ring.store(ring.turns + group, row - first, run, target_of(row, lane));
            row += run + 1;
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (group + ahead >= own_groups) continue;
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STORES_BEHIND) : "memory");
        __syncwarp();
        if (lane == 0) load(group + ahead);
    }
    ring.turns = (ring.turns + max(own_groups, 0)) % (2 * ring.num_buffers);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
}

}  // namespace inc
