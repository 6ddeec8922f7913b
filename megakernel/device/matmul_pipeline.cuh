// The machinery that both expert products share: the ring of operand stages in shared memory, the main loop of a
// matrix warpgroup, and the staging buffers through which results leave.
//
// A block computes 128 x 256 results: matrix warpgroup `half` (0 or 1) owns 64 of the rows. A stage holds one K block
// of 64: rows [128, 64] (16 KB) and columns, i.e. weight rows, [256, 64] (32 KB). NUM_STAGES = 4 stages and 2 x 2
// staging buffers of 8 KB fill the 227 KB of a Hopper SM.
// Barriers: filled[s] completes when the bytes of a K block have landed (the load warp arms it), empty[s] when all
// matrix warps have read it. A ring of two tiles tells every role the block's next one. Waits are bounded.
#pragma once

#include <cuda_bf16.h>

#include "bounded_wait.cuh"
#include "tensor_map.cuh"
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace inc {

constexpr int HALF_ROWS = 64;                              // rows of one matrix warpgroup
constexpr int TILE_COLUMNS = 256;
constexpr int BOX_WEIGHT_ROWS = 128;                       // weight rows of one load
constexpr int K_BLOCK = BOX_COLUMNS;
constexpr int NUM_STAGES = 4;
constexpr int ROW_BOX_BYTES = HALF_ROWS * BOX_ROW_BYTES;              // 8 KB
constexpr int COLUMN_BOX_BYTES = BOX_WEIGHT_ROWS * BOX_ROW_BYTES;     // 16 KB
constexpr int CHUNK_COLUMNS = BOX_COLUMNS;                            // results leave in chunks of 64 x 64
constexpr int MATRIX_WARPS = 8;

// The first thing in dynamic shared memory, which begins at a multiple of 1,024: so do all boxes.
struct SharedStorage {
  uint8_t rows[NUM_STAGES][2 * ROW_BOX_BYTES];
  uint8_t columns[NUM_STAGES][2 * COLUMN_BOX_BYTES];
  uint8_t staging[2][2][ROW_BOX_BYTES];  // [half][chunk of a pair]
  TileOrder order;
  uint64_t filled[NUM_STAGES], empty[NUM_STAGES];
  uint64_t staging_filled[2], staging_free[2][2];
  uint64_t tile_filled[2], tile_free[2];
  Tile tile[2];
};
static_assert(sizeof(SharedStorage) <= 232448, "more than the 227 KB that a block can have");

// A running number of K blocks (or of other turns) gives the place in a ring of SIZE and the parity of its phase there.
template <int SIZE>
struct RingPosition {
  uint32_t number = 0;
  __device__ __forceinline__ uint32_t slot() const { return number % SIZE; }
  __device__ __forceinline__ uint32_t parity() const { return (number / SIZE) & 1; }
};
using StagePosition = RingPosition<NUM_STAGES>;
using StagingPosition = RingPosition<1>;  // of a pair of chunks
using TurnPosition = RingPosition<2>;

// `fillers`: arrivals per K block on filled[s]; `tile_readers`: warps that follow the load warp.
__device__ __forceinline__ void initialize_barriers(SharedStorage& shared, int fillers, int tile_readers) {
  for (int stage = 0; stage < NUM_STAGES; ++stage) {
    ptx::mbarrier_init(&shared.filled[stage], fillers);
    ptx::mbarrier_init(&shared.empty[stage], MATRIX_WARPS);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(&shared.staging_filled[i], MATRIX_WARPS / 2);
    ptx::mbarrier_init(&shared.staging_free[i][0], 1);
    ptx::mbarrier_init(&shared.staging_free[i][1], 1);
    ptx::mbarrier_init(&shared.tile_filled[i], 1);
    ptx::mbarrier_init(&shared.tile_free[i], tile_readers);
  }
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
}

// --- the block's next tile --------------------------------------------------------------------------------------

// Load warp, all lanes with the same tile: tells the other roles. A tile without rows ends their work.
__device__ __forceinline__ void publish_tile(SharedStorage& shared, TurnPosition& turn, const Tile& tile,
                                             BoundedWait& wait) {
  const uint32_t slot = turn.slot();
  wait.on_barrier(&shared.tile_free[slot], turn.parity() ^ 1, WaitTag::TILE_FREE, turn.number);
  if (threadIdx.x % 32 == 0) {
    shared.tile[slot] = tile;
    wait.arrive(&shared.tile_filled[slot]);
  }
  ++turn.number;
}

// Other roles, full warps: false when the work of this block is done.
__device__ __forceinline__ bool take_tile(SharedStorage& shared, TurnPosition& turn, Tile& tile, BoundedWait& wait) {
  const uint32_t slot = turn.slot();
  wait.on_barrier(&shared.tile_filled[slot], turn.parity(), WaitTag::TILE, turn.number);
  tile = shared.tile[slot];
  __syncwarp();
  if (threadIdx.x % 32 == 0) wait.arrive(&shared.tile_free[slot]);
  ++turn.number;
  return tile.num_rows > 0 && !wait.failed();
}

// --- load warp, one lane ---------------------------------------------------------------------------------------

// Rows [first_row, +128) of K block `k`. The second box is left out where it holds no row of the expert: its matrix
// warpgroup does not read it.
__device__ __forceinline__ void load_row_boxes(SharedStorage& shared, const CUtensorMap& map, const Tile& tile, int k,
                                               uint32_t stage) {
  uint8_t* target = shared.rows[stage];
  load_box(target, map, tile.first_row, k * K_BLOCK, &shared.filled[stage]);
  if (tile.num_rows > HALF_ROWS)
    load_box(target + ROW_BOX_BYTES, map, tile.first_row + HALF_ROWS, k * K_BLOCK, &shared.filled[stage]);
}

// The two boxes of 128 weight rows, from weight rows `first` and `second`.
__device__ __forceinline__ void load_column_boxes(SharedStorage& shared, const CUtensorMap& map, int first, int second,
                                                  int k, uint32_t stage) {
  uint8_t* target = shared.columns[stage];
  load_box(target, map, first, k * K_BLOCK, &shared.filled[stage]);
  load_box(target + COLUMN_BOX_BYTES, map, second, k * K_BLOCK, &shared.filled[stage]);
}

__device__ __forceinline__ uint32_t row_bytes_of_stage(const Tile& tile) {
  return tile.num_rows > HALF_ROWS ? 2 * ROW_BOX_BYTES : ROW_BOX_BYTES;
}

// --- matrix warpgroups -----------------------------------------------------------------------------------------

// Tells the load warp that this warp has read the stage.
__device__ __forceinline__ void release_stage(SharedStorage& shared, uint32_t stage, const BoundedWait& wait) {
  if (threadIdx.x % 32 == 0) wait.arrive(&shared.empty[stage]);
}

// result = rows of this half times the 256 columns, over `num_k_blocks` stages. Half a K block of products stays in flight
// while the rows of the next half are read: a stage is released when the next one's first products have been issued.
__device__ __forceinline__ void multiply(float (&result)[ACCUMULATORS], SharedStorage& shared, StagePosition& position,
                                         int num_k_blocks, int half, BoundedWait& wait) {
  constexpr int HALVES = 2, STEPS = K_BLOCK / 16 / HALVES, UNITS_PER_STEP = 2;  // 16 bf16 are 32 bytes, two units of 16
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const uint32_t rows = static_cast<uint32_t>(__cvta_generic_to_shared(shared.rows[0] + half * ROW_BOX_BYTES));
  const uint64_t columns = swizzled_descriptor(shared.columns[0]);
  uint32_t fragment[HALVES][STEPS][4];
#pragma unroll 1
  for (int k = 0; k < num_k_blocks; ++k, ++position.number) {
    const uint32_t stage = position.slot();
    wait.on_barrier(&shared.filled[stage], position.parity(), WaitTag::STAGE_FILLED, k);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
        load_matrices(fragment[h][s], rows + stage * (2 * ROW_BOX_BYTES) +
                                          swizzled_offset(row, (h * STEPS + s) * UNITS_PER_STEP + lane / 16));
      pin_accumulators(result);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const uint64_t b = columns + stage * (2 * COLUMN_BOX_BYTES / 16) + (h * STEPS + s) * UNITS_PER_STEP;
        wgmma_64x128x16<0>(result, fragment[h][s], b, (k | h | s) != 0);
        wgmma_64x128x16<ACCUMULATORS / 2>(result, fragment[h][s], b + COLUMN_BOX_BYTES / 16, (k | h | s) != 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (h == 0 && k > 0) release_stage(shared, (position.number - 1) % NUM_STAGES, wait);
    }
  }
  wgmma_wait<0>();
  pin_accumulators(result);
  release_stage(shared, (position.number - 1) % NUM_STAGES, wait);
}

// What a warpgroup without rows does in place of `multiply`: lets the stages pass.
__device__ __forceinline__ void skip_stages(SharedStorage& shared, StagePosition& position, int num_k_blocks,
                                            BoundedWait& wait) {
#pragma unroll 1
  for (int k = 0; k < num_k_blocks; ++k, ++position.number) {
    wait.on_barrier(&shared.filled[position.slot()], position.parity(), WaitTag::STAGE_FILLED, k);
    release_stage(shared, position.slot(), wait);
    __syncwarp();  // no lane may fall two phases of a barrier behind
  }
}

__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Puts one chunk of 64 x 64 results into `buffer`. `values(j, left, right)` gives results 0..3 (layout of wgmma.cuh) of the
// chunk's blocks j and j + 1 (j = 0, 2, 4, 6) of eight columns; j is a compile-time constant after unrolling.
template <class Values>
__device__ __forceinline__ void put_chunk(uint8_t* buffer, Values values) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane % 16;  // matrices 0 and 2: rows 0..7 of the warp; 1 and 3: rows 8..15
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(buffer));
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    float left[4], right[4];
    values(j, left, right);
    store_matrices(base + swizzled_offset(row, j + lane / 16), pack_bfloat16(left[0], left[1]),
                   pack_bfloat16(left[2], left[3]), pack_bfloat16(right[0], right[1]),
                   pack_bfloat16(right[2], right[3]));
  }
}

// Puts two chunks, 128 columns, into the staging buffers of this half. `values(c, j, left, right)`: chunk c (0, 1).
// One proxy fence for both: it costs more than the stores.
template <class Values>
__device__ __forceinline__ void stage_pair(SharedStorage& shared, StagingPosition& turn, int half, BoundedWait& wait,
                                           Values values) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    wait.on_barrier(&shared.staging_free[half][c], turn.parity() ^ 1, WaitTag::STAGING_FREE, turn.number);
    put_chunk(shared.staging[half][c], [&](int j, float(&left)[4], float(&right)[4]) { values(c, j, left, right); });
  }
  ptx::fence_proxy_async(ptx::space_shared);
  __syncwarp();
  if (threadIdx.x % 32 == 0) wait.arrive(&shared.staging_filled[half]);
  ++turn.number;
}

// --- store warps -----------------------------------------------------------------------------------------------

// Where the results of a tile go: [., row_stride] bf16, also described by `map`.
struct StoreTarget {
  const CUtensorMap& map;
  __nv_bfloat16* matrix;
  int row_stride;
  int first_row;
  int num_rows;  // rows of the tile that belong to the expert
  int first_column;
};

// 16-byte stores of the first `num_rows` rows of one staged chunk to (first_row, column); a full warp.
__device__ __forceinline__ void copy_valid_rows(const uint8_t* source, const StoreTarget& target, int first_row,
                                                int num_rows, int column) {
  const int piece = threadIdx.x % 8;
  for (int row = threadIdx.x % 32 / 8; row < num_rows; row += 4) {
    const uint4 value = *reinterpret_cast<const uint4*>(source + swizzled_offset(row, piece));
    const int64_t element = int64_t(first_row + row) * target.row_stride + column + piece * 8;
    *reinterpret_cast<uint4*>(target.matrix + element) = value;
  }
}

// Writes the next staged pair of chunks, number `pair` of its tile, of this half: bulk stores where all 64 rows belong to the
// expert, else ordinary stores of the rows that do. Executed by the full store warp. Hands each buffer back when read.
__device__ __forceinline__ void store_pair(SharedStorage& shared, StagingPosition& turn, int half,
                                           const StoreTarget& target, int pair, BoundedWait& wait) {
  const bool leader = threadIdx.x % 32 == 0;
  const int first_row = target.first_row + half * HALF_ROWS;
  const int num_rows = target.num_rows - half * HALF_ROWS;
  const int column = target.first_column + pair * 2 * CHUNK_COLUMNS;
  wait.on_barrier(&shared.staging_filled[half], turn.parity(), WaitTag::STAGING_FILLED, turn.number);
  if (num_rows >= HALF_ROWS) {
    if (leader) {
      for (int c = 0; c < 2; ++c) {
        store_box(target.map, first_row, column + c * CHUNK_COLUMNS, shared.staging[half][c]);
        ptx::cp_async_bulk_commit_group();
      }
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
      wait.arrive(&shared.staging_free[half][0]);
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
      wait.arrive(&shared.staging_free[half][1]);
    }
  } else {
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      copy_valid_rows(shared.staging[half][c], target, first_row, num_rows, column + c * CHUNK_COLUMNS);
      __syncwarp();
      if (leader) wait.arrive(&shared.staging_free[half][c]);
    }
  }
  __syncwarp();  // no lane may fall two phases of a barrier behind
  ++turn.number;
}

}  // namespace inc
