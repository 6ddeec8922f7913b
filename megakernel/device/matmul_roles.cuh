// What each warp of a block does for the expert products (stages 4 to 6): load, gather, store, compute. The tiles of all
// microbatches of a launch form one sequence of tickets, so that no block waits for others between two microbatches.
// Roles of warps:
//   warpgroup 0: warp 0 loads operands, warp 1 stores results, warps 2 and 3 gather rows (or idle)
//   warpgroups 1 and 2: matrix products and epilogues of 64 rows each
// MatMul 2 of a row tile starts when the flags of its activation are raised; there is no barrier across the grid.
// Waits on, signals, reads, writes: the headers of the stages.
#pragma once

#include "gather_rows.cuh"
#include "stage4_matmul_gate_up.cuh"
#include "stage6_matmul_down.cuh"
#include "stage_trace.cuh"

namespace inc {

constexpr int MATMUL_THREADS = 384;
constexpr int LOAD_WARP = 0, STORE_WARP = 1, GATHER_WARP = 2, MATRIX_WARP = 4;
constexpr int DRAW_AHEAD = 4;  // K blocks before the end of a tile at which the next ticket is drawn (an atomic is ~1 us)

template <bool GATHER>
struct MatmulRoles {
  const ExpertMatmulArguments& arguments;
  SharedStorage& shared;
  BoundedWait wait;
  StageTrace trace;

  __device__ __forceinline__ TicketWord tickets() const { return {pointer<uint64_t>(arguments.ticket_word)}; }

  // All K blocks of one tile; draws the ticket of the next one on the way and returns it (valid in lane 0). Weights do not
  // wait for the rows: up to NUM_STAGES K blocks of them are loaded ahead while the rows are not ready.
  template <class Stage, bool LOADS_ROWS>
  __device__ __forceinline__ int load_tile(const Tile& tile, StagePosition& position, WaitTag tag) {
    const bool leader = threadIdx.x % 32 == 0;
    const int num_k = Stage::num_k_blocks(arguments);
    const uint32_t first = position.number;
    const uint32_t bytes = 2 * COLUMN_BOX_BYTES + (LOADS_ROWS ? row_bytes_of_stage(tile) : 0);
    bool ready = !LOADS_ROWS;
    int next_rows = LOADS_ROWS ? 0 : num_k;
    int ticket = 0;
#pragma unroll 1
    for (int k = 0; k < num_k; ++k, ++position.number) {
      const uint32_t stage = position.slot();
      if (leader && k == max(num_k - DRAW_AHEAD, 0)) ticket = tickets().draw();
      wait.on_barrier(&shared.empty[stage], position.parity() ^ 1, WaitTag::STAGE_EMPTY, k);
      if (wait.failed()) break;
      if (leader) {
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &shared.filled[stage], bytes);
        Stage::load_columns(arguments, shared, tile, k, stage);
      }
      if (!ready) {
        const bool last_chance = k - next_rows == NUM_STAGES - 1 || k == num_k - 1;
        ready = Stage::rows_ready(arguments, tile);
        if (!ready && last_chance) {
          wait.until(tag, tile.row_tile, [&] { return Stage::rows_ready(arguments, tile); });
          ready = true;
        }
        if (ready) {  // every lane has read flags by ordinary loads; one lane fetches the rows by bulk copies
          ptx::fence_proxy_async();
          __syncwarp();
        }
      }
      if (ready) {
#pragma unroll 1
        for (; next_rows <= k; ++next_rows)
          if (leader) Stage::load_rows(arguments, shared, tile, next_rows, (first + next_rows) % NUM_STAGES);
      }
      __syncwarp();  // no lane may fall two phases of a barrier behind
    }
    return ticket;
  }

  // `microbatches.open(number, tiles, wait)` waits for the grouped rows of a microbatch and gives their places; false after an
  // abort. `opened(number)`: the order of its tiles is built, its counts will be read for these tiles only.
  template <class Microbatches>
  __device__ __forceinline__ void load(const Microbatches& microbatches) {
    StagePosition position;
    TurnPosition turn;
    int ticket = blockIdx.x, before = 0;  // tickets of earlier microbatches
    if (threadIdx.x % 32 == 0) tickets().open(microbatches.first_magic);
#pragma unroll 1
    for (int number = 0; number < microbatches.count && !wait.failed(); ++number) {
      TileFinder tiles{shared.order, nullptr, nullptr, MatmulGateUp::num_column_tiles(arguments),
                       MatmulDown::num_column_tiles(arguments), microbatches.first_magic + number};
      if (!microbatches.open(number, tiles, wait)) break;
      shared.order.build(tiles.expert_row_count, arguments.num_experts, tiles.columns_gate_up, tiles.columns_down,
                         arguments.lag_tiles);
      __syncwarp();
      microbatches.opened(number);
      const int num_tiles = shared.order.num_tiles;
#pragma unroll 1
      while (!wait.failed() && ticket - before < num_tiles) {
        const Tile tile = tiles.find(ticket - before);
        publish_tile(shared, turn, tile, wait);
        if (tile.product == Product::GATE_UP)
          ticket = load_tile<MatmulGateUp, !GATHER>(tile, position, WaitTag::INPUT_ROWS);
        else
          ticket = load_tile<MatmulDown, true>(tile, position, WaitTag::ACTIVATION_ROWS);
        ticket = __shfl_sync(~0u, ticket, 0);
      }
      before += num_tiles;
      __syncwarp();
    }
    publish_tile(shared, turn, Tile{}, wait);
  }

  __device__ __forceinline__ void gather() {
    StagePosition position;
    TurnPosition turn;
    Tile tile;
    while (take_tile(shared, turn, tile, wait)) {
      if (tile.product == Product::GATE_UP)
        RowGatherer::fill_tile(arguments, shared, tile, position, wait);
      else
        RowGatherer::pass_tile(shared, position, MatmulDown::num_k_blocks(arguments), wait);
    }
  }

  __device__ __forceinline__ void store() {
    StagingPosition first, second;  // of the two halves
    TurnPosition turn;
    Tile tile;
    while (take_tile(shared, turn, tile, wait)) {
      if (tile.product == Product::GATE_UP)
        MatmulGateUp::store(arguments, shared, tile, first, second, wait);
      else
        MatmulDown::store(arguments, shared, tile, first, second, wait);
    }
    ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
  }

  __device__ __forceinline__ void compute(int half) {
    StagePosition position;
    StagingPosition staging;
    TurnPosition turn;
    Tile tile;
    float result[ACCUMULATORS];
    while (take_tile(shared, turn, tile, wait)) {
      const bool gate_up = tile.product == Product::GATE_UP;
      const int num_k = gate_up ? MatmulGateUp::num_k_blocks(arguments) : MatmulDown::num_k_blocks(arguments);
      if (half * HALF_ROWS >= tile.num_rows) {
        skip_stages(shared, position, num_k, wait);
        continue;
      }
      trace.begin();
      multiply(result, shared, position, num_k, half, wait);
      if (gate_up)
        MatmulGateUp::epilogue(arguments, result, shared, tile, staging, half, wait);
      else
        MatmulDown::epilogue(arguments, result, shared, tile, staging, half, wait);
      trace.end(gate_up ? TracedStage::MATMUL_GATE_UP : TracedStage::MATMUL_DOWN, tile.magic, tile.num_rows);
    }
  }

  // The warps of warpgroup 0.
  template <class Microbatches>
  __device__ __forceinline__ void move(int warp, const Microbatches& microbatches) {
    if (warp == LOAD_WARP) load(microbatches);
    if (warp == STORE_WARP) store();
    if (GATHER && warp >= GATHER_WARP) gather();
  }

  // One thread, before the block's first barrier.
  static __device__ __forceinline__ void initialize(SharedStorage& shared) {
    initialize_barriers(shared, GATHER ? 1 + RowGatherer::ARRIVALS : 1, MATRIX_WARPS + 1 + (GATHER ? RowGatherer::WARPS : 0));
  }
};

// What the first tile would otherwise wait for one after the other. One warp.
__device__ __forceinline__ void prefetch_maps(const ExpertMatmulArguments& arguments) {
  if (threadIdx.x % 32 < 5) prefetch_map((&arguments.input_rows)[threadIdx.x % 32]);
}

}  // namespace inc
