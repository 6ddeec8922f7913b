// Rows through shared memory by the bulk copy engine: each row is loaded once and stored to any number of peers. Twin: none.
//
// One warp drives a ring of row buffers. Lane 0 starts the loads, which complete on the buffer's barrier; then lane r starts the store to
// target r, if the row has one. A buffer is loaded again once the stores of its row have read it. Waits on: shared memory barriers.
// Reads: rows of this PE, which an acquire has made visible. Writes: rows on peers, complete on return.
// Cost: one thread moves 46 GB/s over a link; 16 blocks of 4 such warps are measured in results/data/collectives_*.csv.
#pragma once

#include "one_sided.cuh"

namespace inc {

constexpr int BULK_WARPS = 4;         // warps of a block that drive a ring each; the others copy records
constexpr int MAX_ROW_BUFFERS = 12;   // 48 rows of 4 KB in flight per block
constexpr int STORES_BEHIND = 4;      // rows whose stores may still read their buffers while later rows are loaded
constexpr int MIN_ROW_BUFFERS = STORES_BEHIND + 2;
constexpr int RING_BYTES = 200 * 1024;

// Buffers that each ring has for rows of this size; below MIN_ROW_BUFFERS rows are too wide for this path.
inline __host__ __device__ int row_buffers(int row_bytes) {
    const int fit = RING_BYTES / (BULK_WARPS * row_bytes);
    return fit < MAX_ROW_BUFFERS ? fit : MAX_ROW_BUFFERS;
}

__device__ inline uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// One warp's ring. `turns` counts the rows that have gone through it, over all calls, modulo two rounds.
struct RowRing {
    char* buffers;
    uint64_t* loaded;  // barriers, one per buffer
    int num_buffers, row_bytes;
    uint32_t turns;

    __device__ void prepare(int lane) {
        if (lane < num_buffers) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(loaded + lane)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
    }

    __device__ uint32_t buffer(uint32_t turn) const { return shared_address(buffers) + turn % num_buffers * row_bytes; }
    __device__ uint32_t barrier(uint32_t turn) const { return shared_address(loaded + turn % num_buffers); }

    // Start the load of a row. One lane.
    __device__ void load(uint32_t turn, const char* source) const {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(turn)), "r"(row_bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(buffer(turn)),
                     "l"(source), "r"(row_bytes), "r"(barrier(turn))
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

    __device__ void store(uint32_t turn, char* target) const {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(buffer(turn)), "r"(row_bytes) : "memory");
    }
};

// Send `num_rows` rows: row i from `source_of(i)` to `target_of(i, rank)` for every rank of `mask_of(i)`. One warp; returns when all
// stores are complete.
template <class SourceOf, class MaskOf, class TargetOf>
__device__ inline void multicast_rows(RowRing& ring, int num_rows, int lane, SourceOf source_of, MaskOf mask_of, TargetOf target_of) {
    const int ahead = ring.num_buffers - STORES_BEHIND;
    asm volatile("fence.proxy.async;" ::: "memory");  // rows that peers stored, seen through a flag, are read by the copy engine
    if (lane == 0)
        for (int i = 0; i < ahead && i < num_rows; ++i) ring.load(ring.turns + i, source_of(i));
    for (int i = 0; i < num_rows; ++i) {
        ring.wait_until_loaded(ring.turns + i);
        if (mask_of(i) >> lane & 1) ring.store(ring.turns + i, target_of(i, lane));
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (i + ahead >= num_rows) continue;
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STORES_BEHIND) : "memory");
        __syncwarp();
        if (lane == 0) ring.load(ring.turns + i + ahead, source_of(i + ahead));
    }
    ring.turns = (ring.turns + num_rows) % (2 * ring.num_buffers);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
}

}  // namespace inc
