// The expert products of one rank, both in one launch: MatMul 1 (gate and up) with SwiGLU, then MatMul 2 (down), over
// rows grouped by expert (stages 4 to 6). Persistent: one block per SM that the rank may use.
// Roles of a block of 384 threads:
//   warpgroup 0: warp 0 loads operands, warp 1 stores results, warps 2 and 3 gather rows (or idle)
//   warpgroups 1 and 2: matrix products and epilogues of 64 rows each
// MatMul 2 of a row tile starts when the flags of its activation are raised; there is no barrier across the grid.
// Waits on, signals, reads, writes: the headers of the stages.
// Cost: see results/data/expert_matmul_*.csv.
#include "device/gather_rows.cuh"
#include "stages/stage4_matmul_gate_up.cuh"
#include "stages/stage6_matmul_down.cuh"

namespace inc {

constexpr int EXPERT_MATMUL_THREADS = 384;
constexpr int MOVER_REGISTERS = 88;    // 128 * 88 + 256 * 208 = 64,512 of 65,536
constexpr int MATRIX_REGISTERS = 208;
constexpr int DRAW_AHEAD = 4;          // K blocks before the end of a tile at which the next ticket is drawn (an atomic is ~1 us)

template <bool GATHER>
struct ExpertMatmul {
  const ExpertMatmulArguments& arguments;
  SharedStorage& shared;
  BoundedWait wait;

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
      if (leader && k == max(num_k - DRAW_AHEAD, 0)) ticket = TicketWord{arguments.ticket_word}.draw();
      wait.on_barrier(&shared.empty[stage], position.parity() ^ 1, WaitTag::STAGE_EMPTY, k);
      if (wait.broken) break;
      if (leader) {
        // Where rows can be gathered, `filled` counts the gatherer's arrivals too; where none are, they are made here.
        if (GATHER && LOADS_ROWS) ptx::mbarrier_arrive(&shared.filled[stage], RowGatherer::ARRIVALS);
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

  __device__ __forceinline__ void load() {
    TileFinder tiles{shared.order, arguments.expert_row_offset, arguments.expert_row_count,
                     MatmulGateUp::num_column_tiles(arguments), MatmulDown::num_column_tiles(arguments)};
    StagePosition position;
    TurnPosition turn;
    int ticket = blockIdx.x;
    if (threadIdx.x % 32 == 0) TicketWord{arguments.ticket_word}.open(arguments.magic);
    while (!wait.broken) {
      const Tile tile = tiles.find(ticket);
      publish_tile(shared, turn, tile, wait);
      if (tile.num_rows == 0) return;
      if (tile.product == Product::GATE_UP)
        ticket = load_tile<MatmulGateUp, !GATHER>(tile, position, WaitTag::INPUT_ROWS);
      else
        ticket = load_tile<MatmulDown, true>(tile, position, WaitTag::ACTIVATION_ROWS);
      ticket = __shfl_sync(~0u, ticket, 0);
    }
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
      multiply(result, shared, position, num_k, half, wait);
      if (gate_up)
        MatmulGateUp::epilogue(arguments, result, shared, tile, staging, half, wait);
      else
        MatmulDown::epilogue(arguments, result, shared, tile, staging, half, wait);
    }
  }
};

// What the first tile would otherwise wait for one after the other. One warp.
__device__ __forceinline__ void prefetch_start(const ExpertMatmulArguments& arguments) {
  const int lane = threadIdx.x % 32;
  if (lane < 5) prefetch_map((&arguments.input_rows)[lane]);
  for (int expert = lane; expert < arguments.num_experts; expert += 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(arguments.expert_row_offset + expert));
}

template <bool GATHER>
__device__ __forceinline__ void run_expert_matmul(const ExpertMatmulArguments& arguments) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    shared.order.build(arguments.expert_row_count, arguments.num_experts, MatmulGateUp::num_column_tiles(arguments),
                       MatmulDown::num_column_tiles(arguments), arguments.lag_tiles);
  } else if (warp == 2) {
    prefetch_start(arguments);
  } else if (threadIdx.x == 32) {
    initialize_barriers(shared, GATHER ? 1 + RowGatherer::ARRIVALS : 1, MATRIX_WARPS + 1 + (GATHER ? RowGatherer::WARPS : 0));
  }
  __syncthreads();

  ExpertMatmul<GATHER> role{arguments, shared, {arguments.wait_limit_clocks, arguments.error_record}};
  if (warp < 4) {
    give_up_registers<MOVER_REGISTERS>();
    if (warp == 0) role.load();
    if (warp == 1) role.store();
    if (GATHER && warp > 1) role.gather();
  } else {
    take_registers<MATRIX_REGISTERS>();
    role.compute(warp / 4 - 1);
  }
}

}  // namespace inc

// Entry points. Dynamic shared memory: sizeof(inc::SharedStorage). Grid: any; more than one block per SM only queue.
extern "C" __global__ void __launch_bounds__(inc::EXPERT_MATMUL_THREADS, 1)
    expert_matmul(const __grid_constant__ inc::ExpertMatmulArguments arguments) {
  inc::run_expert_matmul<false>(arguments);
}
extern "C" __global__ void __launch_bounds__(inc::EXPERT_MATMUL_THREADS, 1)
    expert_matmul_gather(const __grid_constant__ inc::ExpertMatmulArguments arguments) {
  inc::run_expert_matmul<true>(arguments);
}
