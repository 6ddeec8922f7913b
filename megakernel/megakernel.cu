// The MoE layer of one rank in one launch: roles of warps and blocks only. Persistent: one block of 512 threads per SM that the
// rank may use; all must be resident.
//   warpgroups 0 to 2: the expert products of all microbatches (device/matmul_roles.cuh)
//   warpgroup 3: the vector stages: route, push (dispatch), group, reduce, publish, combine
// The vector warps take the stages of the microbatches in the order of megakernel/pipeline.py, device_lags, and keep up to
// `depth` microbatches in flight; the matrix warps follow the words that group and MatMul 1 raise. No SM is set apart for
// communication.
// Waits on, signals, reads, writes: the headers of the stages and of the collective.
// Cost: results/data/moe_layer_*.csv.
#define INC_LOADS_IN_FLIGHT 4  // the vector warps have 96 registers

#include "copy_rows.cuh"
#include "matmul_roles.cuh"
#include "stage1_route.cuh"
#include "stage3_group.cuh"
#include "stage7_reduce.cuh"
#include "stage8_combine.cuh"

namespace inc {

constexpr int LAYER_THREADS = 512, VECTOR_THREADS = LAYER_THREADS - MATMUL_THREADS;
constexpr int VECTOR_WARP = MATMUL_THREADS / WARP;
constexpr int MATRIX_REGISTERS = 176, MOVER_REGISTERS = 64, VECTOR_REGISTERS = 96;  // 128 * (2 * 176 + 64 + 96) = 65,536

#if defined(INC_COPIES_ROWS)
constexpr bool GATHER = false;  // two warps copy the rows into the order of the experts before MatMul 1
#else
constexpr bool GATHER = true;  // they gather the rows of each tile on load
#endif

struct LayerStorage {
  SharedStorage matmul;
  GroupScratch group;
  ReceivedRows received[2];  // a microbatch is reduced one step after it is grouped, at most
  uint64_t first_magic;
  volatile int opened[1 + RowCopier::WARPS];  // microbatches whose counts the load warp, and the warps that copy, have read
  bool aborted;

  // True once none of this block's warps will read the counts of microbatch `number` for the first time.
  __device__ bool counts_read(int number) const {
    return opened[0] > number && (GATHER || (opened[1] > number && opened[2] > number));
  }
};
static_assert(sizeof(LayerStorage) <= 232448 - 1024, "more than the 227 KB of a block, less a kilobyte for its static variables");

// The grouped rows of each microbatch, as stage 3 leaves them.
struct GroupedMicrobatches {
  const LayerArguments& arguments;
  LayerStorage& shared;
  uint64_t first_magic;
  int count;

  __device__ __forceinline__ bool open(int number, TileFinder& tiles, BoundedWait& wait) const {
    const Grouping& grouping = grouping_of(arguments, number);
    wait.until(WaitTag::GROUPED_ROWS, number,
               [&] { return __all_sync(ALL_LANES, word_reached(&grouping.grouped, first_magic + number)); });
    tiles.expert_row_offset = grouping.offset;
    tiles.expert_row_count = grouping.count;
    tiles.row_tiles_before = number % GROUPED_SETS * (arguments.grouped_capacity / TILE_ROWS);
    return !wait.aborted();
  }
  __device__ __forceinline__ void opened(int number) const {
    if (threadIdx.x % WARP == 0) shared.opened[0] = number + 1;
  }
};

// The stages of warpgroup 3. Every function returns false after an abort.
struct VectorStages {
  const Heap& heap;
  const LayerArguments& arguments;
  LayerStorage& shared;
  const Team team;
  StageTrace trace;

  __device__ uint64_t magic_of(int number) const { return shared.first_magic + number; }
  __device__ int total_tokens() const {
    return arguments.token_count ? max(0, min(*pointer<const int32_t>(arguments.token_count), arguments.num_tokens)) : arguments.num_tokens;
  }
  __device__ int first_token(int number) const { return min(cut_of(heap, arguments).first_token(number), total_tokens()); }
  __device__ int num_tokens(int number) const { return first_token(number + 1) - first_token(number); }

  __device__ bool route(int number) {
    const uint64_t magic = magic_of(number);
    trace.begin();
    if (!route_microbatch(heap, team, arguments, magic, first_token(number), num_tokens(number))) return false;
    trace.end(TracedStage::ROUTE, magic, num_tokens(number));
    return true;
  }

  __device__ bool push(int number) {
    const uint64_t magic = magic_of(number);
    const int first = first_token(number), count = num_tokens(number);
    trace.begin();
    const int64_t choices = int64_t(first) * arguments.top_k;
    push_microbatch(heap, team, magic,
                    {pointer<const char>(arguments.tokens) + uint64_t(first) * heap.row_bytes,
                     pointer<const int32_t>(arguments.expert_ids) + choices, pointer<const uint32_t>(arguments.weights) + choices,
                     count, arguments.top_k, arguments.num_experts, arguments.bound_tokens, arguments.layer,
                     arguments.edge_tokens});
    trace.end(TracedStage::DISPATCH, magic, count);
    return true;
  }

  __device__ bool group(int number) {
    const uint64_t magic = magic_of(number);
    ReceivedRows received;
    trace.begin();
    if (!wait_for_expert_rows(heap, team, magic, received)) return false;
    if (team.thread == 0) shared.received[number % 2] = received;
    team.sync();
    trace.end(TracedStage::WAIT, magic, 0);
    trace.begin();
    if (!group_microbatch(heap, team, arguments, magic, number, received, shared.group)) return false;
    trace.end(TracedStage::GROUP, magic, received.num_rows);
    return true;
  }

  __device__ bool reduce(int number) {
    const uint64_t magic = magic_of(number);
    const ReceivedRows received = shared.received[number % 2];
    trace.begin();
    BoundedWait wait(arguments.matmul);
    bool good = reduce_microbatch(heap, team, arguments, magic, number, received, wait);
    if (team.warp() == 0) {
      wait.until(WaitTag::ORDER_READ, number, [&] { return shared.counts_read(number); });
      good = good && !wait.expired && !wait.aborted();
    }
    if (!team.all(good)) return false;
    publish_partial_sums(heap, team, magic);
    trace.end(TracedStage::REDUCE, magic, received.num_rows);
    return true;
  }

  __device__ bool combine(int number) {
    const uint64_t magic = magic_of(number);
    trace.begin();
    if (!combine_microbatch(heap, team, arguments, magic, first_token(number), num_tokens(number))) return false;
    trace.end(TracedStage::COMBINE, magic, num_tokens(number));
    return true;
  }

  __device__ bool due(int number) const { return number >= 0 && number < arguments.num_microbatches; }

  // Are the rows of a microbatch grouped before those of a later one are pushed? Products may wait for them. Where they are there
  // already; each block decides for itself, as no block waits for others in a push to the switch. In the plain models blocks do:
  // those group first where the rows come straight from the ranks, and last where they take long through a relay.
  __device__ bool groups_first(int number) const {
    if constexpr (RELAYED || PHASED) return DIRECT && !PHASED;
    return team.all(expert_rows_arrived(heap, magic_of(number)));
  }

  // Returns false after an abort.
  __device__ bool run() {
    for (int step = 0; step < arguments.num_microbatches + arguments.combine_lag; ++step) {
      const int grouped = step - arguments.group_lag;
      if (due(step) && !route(step)) return false;
      const bool early = grouped < step && due(step) && due(grouped) && groups_first(grouped);
      if (early && !group(grouped)) return false;
      if (due(step) && !push(step)) return false;
      if (!early && due(grouped) && !group(grouped)) return false;
      if (due(step - arguments.reduce_lag) && !reduce(step - arguments.reduce_lag)) return false;
      if (due(step - arguments.combine_lag) && !combine(step - arguments.combine_lag)) return false;
    }
    return true;
  }
};

// The launch has no result: the host of this rank is told, and the other PEs are, where this one gave up. One thread.
__device__ inline void report_abort(const Heap& heap, const LayerArguments& arguments) {
  BoundedWait(arguments.matmul).record(WaitTag::ABORTED, 0);
  if (load_word(own<char>(heap, RankRegion::abort)) == arguments.matmul.abort_value) raise_abort(heap);
}

__device__ __forceinline__ void run_vector_warps(const Heap& heap, const LayerArguments& arguments, LayerStorage& shared) {
  const Team team{int(blockIdx.x), int(gridDim.x), int(threadIdx.x) - MATMUL_THREADS, VECTOR_THREADS};
  const StageTrace trace(arguments.trace, arguments.trace_length, TracedUnit::VECTOR, team.thread == 0);
  if (!VectorStages{heap, arguments, shared, team, trace}.run()) {
    if (team.thread == 0) report_abort(heap, arguments);
    return;
  }
  if (finish_packet(heap, team, Packet::LEAVE, 0, team.num_blocks) && team.lane() == 0)
    *own<uint64_t>(heap, RankRegion::magic) = shared.first_magic + arguments.num_microbatches - 1;
}

__device__ __forceinline__ void run_layer(const Heap& heap, const LayerArguments& arguments) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  LayerStorage& shared = *reinterpret_cast<LayerStorage*>(shared_bytes);
  const int warp = threadIdx.x / WARP;
  if (threadIdx.x == 0) {
    MatmulRoles<GATHER>::initialize(shared.matmul);
    shared.first_magic = *own<uint64_t>(heap, RankRegion::magic) + 1;
    for (volatile int& opened : shared.opened) opened = 0;
    shared.aborted = aborted(heap);
  }
  if (warp == 1) prefetch_maps(arguments.matmul);
  __syncthreads();
  if (shared.aborted) {
    if (threadIdx.x == 0) report_abort(heap, arguments);
    return;
  }
  const StageTrace trace(arguments.trace, arguments.trace_length, TracedUnit::MATRIX, threadIdx.x == MATRIX_WARP * WARP);
  MatmulRoles<GATHER> role{arguments.matmul, shared.matmul, BoundedWait(arguments.matmul), trace};
  if (warp < MATRIX_WARP) {
    give_up_registers<MOVER_REGISTERS>();
    if (!GATHER && warp >= GATHER_WARP) {
      const int copier = warp - GATHER_WARP;
      RowCopier::run(arguments, shared.first_magic, copier, shared.opened[1 + copier], role.wait);
    }
    role.move(warp, GroupedMicrobatches{arguments, shared, shared.first_magic, arguments.num_microbatches});
  } else if (warp < VECTOR_WARP) {
    take_registers<MATRIX_REGISTERS>();
    role.compute(warp / 4 - 1);
  } else {
    give_up_registers<VECTOR_REGISTERS>();
    run_vector_warps(heap, arguments, shared);
  }
}

}  // namespace inc

// Dynamic shared memory: sizeof(inc::LayerStorage).
extern "C" __global__ void __launch_bounds__(inc::LAYER_THREADS, 1)
    megakernel(const __grid_constant__ inc::Heap heap, const __grid_constant__ inc::LayerArguments arguments) {
  inc::run_layer(heap, arguments);
}
