// Arguments of the expert products (stages 4 to 6), one struct passed by value as a __grid_constant__ parameter.
// The host mirrors it field by field; keep the order.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace inc {

struct ExpertMatmulArguments {
  // Tensor maps: bf16, boxes of 64 columns, 128-byte swizzle (tensor_map.cuh). H hidden, I intermediate, E experts.
  CUtensorMap input_rows;       // [num_rows, H], boxes of 64 rows; unused where rows are gathered
  CUtensorMap gate_up_weights;  // [E * 2I, H], boxes of 128 rows; per expert I gate rows, then I up rows
  CUtensorMap activation_rows;  // [num_rows, I], boxes of 64 rows; loads and stores
  CUtensorMap down_weights;     // [E * H, I], boxes of 128 rows
  CUtensorMap output_rows;      // [num_rows, H], boxes of 64 rows

  // Regions.
  const __nv_bfloat16* token_rows;   // [num_tokens, H], read only where rows are gathered
  const int32_t* row_to_token;       // [num_rows]: grouped row -> row of token_rows; only where rows are gathered
  __nv_bfloat16* activation;         // [num_rows, I]
  __nv_bfloat16* output;             // [num_rows, H]
  const float* routing_weight;       // [num_rows] or null: output rows are multiplied by it before rounding
  const int32_t* expert_row_offset;  // [E] first grouped row of each expert
  const int32_t* expert_row_count;   // [E] rows of each expert, 0 allowed
  const uint64_t* row_tile_arrival;  // [num_row_tiles] or null: input rows of a tile are there at a word >= arrival_word
  uint64_t* activation_flags;        // [num_row_tiles, I / 128]: one writer each, grow with `magic`, never reset
  uint64_t* ticket_word;             // one word for all blocks (tile_scheduler.cuh); grows with `magic`, never reset
  uint64_t* error_record;            // 0, or what a wait that ran out of time was for (bounded_wait.cuh)

  // Run time.
  uint64_t arrival_word;
  uint64_t magic;                // of this launch; larger than of any earlier one on the same words; below 2^40
  int64_t wait_limit_clocks;
  int32_t num_experts;           // 1..128
  int32_t hidden;                // H, a multiple of 256
  int32_t intermediate;          // I, a multiple of 128
  int32_t lag_tiles;             // tile_scheduler.cuh
};

}  // namespace inc
