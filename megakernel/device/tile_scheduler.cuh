// Which tile a block works on next. The tiles of both products stand in one fixed order, computed from the experts' row
// counts in device memory; blocks draw the next number (ticket) from one atomic word, so that a slow tile, or rows that
// arrive late, hold up one block and not a share of the work. There is no barrier across the grid.
//
// The order covers one microbatch. An expert with n rows has ceil(n / 128) row tiles; empty experts have none and cost one comparison.
// Order: the segments (product, expert). MatMul 1 of all experts in turn; MatMul 2 of expert e follows as soon as
// `lag_tiles` tiles of MatMul 1 come between, so that its rows are normally complete when it starts and still in L2.
// Inside a segment: groups of ROW_GROUP row tiles, within a group column by column, so that one sweep over an
// expert's weights serves ROW_GROUP row tiles (at H = 2048: 8 MB of rows, of 60 MB L2).
// A tile waits only for tiles earlier in the order, and those have been drawn by blocks that run.
#pragma once

#include <cstdint>

#include "layer_arguments.h"

namespace inc {

constexpr int ROW_GROUP = 16;        // row tiles that share one sweep over the columns

enum class Product : int32_t { GATE_UP = 0, DOWN = 1 };

struct Tile {
  Product product;
  int expert;
  int row_tile;     // number of this row tile among all grouped rows
  int column_tile;
  int first_row;    // in the grouped rows
  int num_rows;     // 1..128: rows of this tile that belong to the expert; 0: no tile
  uint64_t magic;   // of its microbatch
};

// Lives in shared memory; written by one warp, then constant.
struct TileOrder {
  int32_t num_tiles;
  int32_t first_row_tile[MAX_LOCAL_EXPERTS + 1];
  int32_t first_tile[2 * MAX_LOCAL_EXPERTS + 1];  // per segment
  uint8_t segment[2 * MAX_LOCAL_EXPERTS];         // expert * 2 + product
  static_assert(2 * MAX_LOCAL_EXPERTS <= 256);

  // Executed by one full warp.
  __device__ void build(const int32_t* expert_row_count, int num_experts, int columns_gate_up, int columns_down,
                        int lag_tiles) {
    const int lane = threadIdx.x % 32;
    int carry = 0;
#pragma unroll 1
    for (int base = 0; base < num_experts; base += 32) {
      const int expert = base + lane;
      const int rows = expert < num_experts ? max(expert_row_count[expert], 0) : 0;
      int sum = (rows + TILE_ROWS - 1) / TILE_ROWS;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += below;
      }
      if (expert < num_experts) first_row_tile[expert + 1] = carry + sum;
      carry += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) first_row_tile[0] = 0;
    __syncwarp();
    const int32_t* first = first_row_tile;
#pragma unroll 1
    for (int expert = lane; expert < num_experts; expert += 32) {
      // MatMul 1 of this expert comes after MatMul 2 of the experts that the lag has released by then.
      int released = expert;
#pragma unroll 1
      while (released > 0 && (first[expert] - first[released]) * columns_gate_up < lag_tiles) --released;
      segment[expert + released] = expert * 2;
      first_tile[expert + released] = first[expert] * columns_gate_up + first[released] * columns_down;
      // MatMul 2 of this expert comes after MatMul 1 of expert `last`.
      int last = expert;
#pragma unroll 1
      while (last < num_experts - 1 && (first[last + 1] - first[expert + 1]) * columns_gate_up < lag_tiles) ++last;
      segment[expert + last + 1] = expert * 2 + 1;
      first_tile[expert + last + 1] = first[last + 1] * columns_gate_up + first[expert] * columns_down;
    }
    if (lane == 0) {
      num_tiles = carry * (columns_gate_up + columns_down);
      first_tile[2 * num_experts] = num_tiles;
    }
  }
};

// Finds tiles by number, for the load warp; numbers must grow from call to call. Costs ~1,200 clocks (divisions, two loads),
// which is why the other roles get whole tiles from it.
struct TileFinder {
  const TileOrder& order;
  const int32_t* expert_row_offset;
  const int32_t* expert_row_count;
  int columns_gate_up;  // column tiles of the two products
  int columns_down;
  uint64_t magic;
  int row_tiles_before = 0;  // of the grouped rows of earlier sets
  int segment = 0;

  // A tile of no rows when the order has no tile `number`.
  __device__ __forceinline__ Tile find(int number) {
    Tile tile = {};
    if (number >= order.num_tiles) return tile;
    while (number >= order.first_tile[segment + 1]) ++segment;
    const int code = order.segment[segment];
    const int expert = code / 2;
    const int columns = (code & 1) == 0 ? columns_gate_up : columns_down;
    const int first_row_tile = order.first_row_tile[expert];
    const int row_tiles = order.first_row_tile[expert + 1] - first_row_tile;
    const int index = number - order.first_tile[segment];
    const int group = index / (ROW_GROUP * columns);
    const int in_group = index - group * ROW_GROUP * columns;
    const int group_size = min(ROW_GROUP, row_tiles - group * ROW_GROUP);
    tile.column_tile = in_group / group_size;
    const int row_tile = group * ROW_GROUP + in_group - tile.column_tile * group_size;
    tile.product = static_cast<Product>(code & 1);
    tile.expert = expert;
    tile.row_tile = row_tiles_before + first_row_tile + row_tile;
    tile.first_row = expert_row_offset[expert] + row_tile * TILE_ROWS;
    tile.num_rows = min(TILE_ROWS, expert_row_count[expert] - row_tile * TILE_ROWS);
    tile.magic = magic;
    return tile;
  }
};

// The atomic word that tickets are drawn from: magic of the launch above TALLY_BITS, tickets drawn so far below. It
// only grows, so no launch has to reset it. Executed by one thread of each block.
struct TicketWord {
  uint64_t* word;

  __device__ __forceinline__ void open(uint64_t magic) const {
    atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(magic << TALLY_BITS));
  }
  // Every block starts with the tile of its own number, without drawing.
  __device__ __forceinline__ int draw() const {
    const uint64_t drawn = atomicAdd(reinterpret_cast<unsigned long long*>(word), 1ull);
    return static_cast<int>(drawn & ((1u << TALLY_BITS) - 1)) + static_cast<int>(gridDim.x);
  }
};

}  // namespace inc
