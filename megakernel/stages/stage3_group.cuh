// Stage 3, group: where each row of a microbatch goes in the rows grouped by expert. Only positions are written: MatMul 1 gathers
// the rows themselves on load. Every expert begins at a whole row tile. Blocks take shares of the rows, meet once after
// counting, and the last to finish raises `grouped`. Which row of an expert comes first varies; no result depends on it.
// A set of the grouped rows serves again three microbatches later. Then the sums of its microbatch are back (combine comes at
// most two steps after group), so all blocks have published it, which a block does once its rows are reduced and its load warp
// has read the counts.
// Waits on: the other blocks. Signals: `grouped` = magic. Reads: expert_rows_routing. Writes: count, offset,
// row_to_token [grouped rows] (rows of all slots of expert_rows; -1 beyond an expert's), position [R, k], tiles_done = 0,
// row_tile_arrival = 0.
// Cost: two passes over the records; one meeting of the blocks where there are more than 128 rows.
#pragma once

#include "collective.cuh"
#include "bounded_wait.cuh"

namespace inc {

struct GroupScratch {
  int32_t next[MAX_LOCAL_EXPERTS];       // rows of this block's share; then their next place among the expert's rows
  int32_t first_row[MAX_LOCAL_EXPERTS];  // of the expert among the grouped rows of the set
};

__device__ inline Grouping& grouping_of(const LayerArguments& arguments, uint64_t number) {
  return pointer<Grouping>(arguments.groupings)[number % GROUPED_SETS];
}

// Row `i` of the received rows: for each choice on this rank `visit(choice, local expert)`.
template <class Visit>
__device__ inline void visit_local_choices(const Heap& heap, const LayerArguments& arguments, const ReceivedRows& received, int i,
                                           Visit visit) {
  const char* record = received.records + uint64_t(received.row(i)) * heap.record_bytes;
  const int32_t* ids = reinterpret_cast<const int32_t*>(record + RoutingRecord::expert_ids_offset(heap.top_k));
  for (int choice = 0; choice < arguments.top_k; ++choice) {
    const int expert = ids[choice] - arguments.first_expert;
    visit(choice, expert >= 0 && expert < arguments.matmul.num_experts ? expert : -1);
  }
}

__device__ inline int tallied(uint64_t word) { return int(word & ((1u << TALLY_BITS) - 1)); }

// Returns false after an abort.
__device__ inline bool group_microbatch(const Heap& heap, const Team& team, const LayerArguments& arguments, uint64_t magic,
                                        int number, const ReceivedRows& received, GroupScratch& scratch) {
  const int num_experts = arguments.matmul.num_experts, set = number % GROUPED_SETS;
  const int num_blocks = max(1, min(team.num_blocks, (received.num_rows + team.num_threads - 1) / team.num_threads));
  if (team.block >= num_blocks) return true;
  const Team takers{team.block, num_blocks, team.thread, team.num_threads};
  Grouping& grouping = grouping_of(arguments, number);
  const int share = (received.num_rows + num_blocks - 1) / num_blocks;
  const int begin = min(team.block * share, received.num_rows), end = min(begin + share, received.num_rows);

  for (int expert = team.thread; expert < num_experts; expert += team.num_threads) scratch.next[expert] = 0;
  team.sync();
  for (int i = begin + team.thread; i < end; i += team.num_threads)
    visit_local_choices(heap, arguments, received, i, [&](int, int expert) {
      if (expert >= 0) atomicAdd(&scratch.next[expert], 1);
    });
  team.sync();
  for (int expert = team.thread; expert < num_experts; expert += team.num_threads) {
    unsigned long long* tally = reinterpret_cast<unsigned long long*>(&grouping.tally[expert]);
    atomicMax(tally, static_cast<unsigned long long>(magic) << TALLY_BITS);
    scratch.next[expert] = tallied(atomicAdd(tally, static_cast<unsigned long long>(scratch.next[expert])));
  }
  if (!meet(heap, takers, Packet::ROWS_TALLIED, set, magic, [](int) { return true; })) return false;

  int32_t* row_to_token = pointer<int32_t>(arguments.matmul.row_to_token);
  // First row tile of each expert, by one warp.
  if (team.warp() == 0) {
    const int lane = team.lane();
    int before = 0;
    for (int base = 0; base < num_experts; base += WARP) {
      const int expert = base + lane;
      const int rows = expert < num_experts ? tallied(__ldcg(reinterpret_cast<const unsigned long long*>(&grouping.tally[expert]))) : 0;
      const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
      int sum = tiles;
#pragma unroll
      for (int offset = 1; offset < WARP; offset *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, sum, offset);
        if (lane >= offset) sum += below;
      }
      if (expert < num_experts) {
        const int first_row = set * arguments.grouped_capacity + (before + sum - tiles) * TILE_ROWS;
        scratch.first_row[expert] = first_row;
        if (team.block == 0) grouping.count[expert] = rows, grouping.offset[expert] = first_row;
        if (team.block == expert % num_blocks) {
          uint32_t* done = pointer<uint32_t>(arguments.matmul.tiles_done) + first_row / TILE_ROWS;
          uint64_t* arrival = pointer<uint64_t>(arguments.matmul.row_tile_arrival) + first_row / TILE_ROWS;
          for (int tile = 0; tile < tiles; ++tile) {
            done[tile] = 0;
            if (arguments.matmul.row_tile_arrival != 0) arrival[tile] = 0;
          }
          for (int row = rows; row < tiles * TILE_ROWS; ++row) row_to_token[first_row + row] = -1;
        }
      }
      before += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    if (team.block == 0 && lane == 0) grouping.num_row_tiles = before;
  }
  team.sync();
  const int first_of_slot = int(slot_of(magic, heap.depth)) * arguments.row_capacity;
  int32_t* position = pointer<int32_t>(arguments.position) + int64_t(set) * arguments.row_capacity * arguments.top_k;
  for (int i = begin + team.thread; i < end; i += team.num_threads)
    visit_local_choices(heap, arguments, received, i, [&](int choice, int expert) {
      int row = -1;
      if (expert >= 0) {
        row = scratch.first_row[expert] + atomicAdd(&scratch.next[expert], 1);
        row_to_token[row] = first_of_slot + received.row(i);
      }
      position[int64_t(i) * arguments.top_k + choice] = row;
    });
  if (finish_packet(heap, takers, Packet::ROWS_GROUPED, set, num_blocks) && team.lane() == 0)
    store_word_of_gpu(&grouping.grouped, magic);
  return true;
}

}  // namespace inc
