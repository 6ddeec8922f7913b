// Bulk tensor copies (TMA) between global and shared memory, completing on shared-memory barriers.
// Every tensor map of the matrix stages describes a row-major bf16 matrix in boxes of BOX_COLUMNS = 64 columns
// (128 bytes) with the 128-byte swizzle: 16-byte piece p of row r lies at piece p ^ (r % 8), which is what the matrix
// descriptors of wgmma.cuh read and what swizzled_offset gives to everyone else. Rows or columns beyond the matrix
// read as zero and are not written.
#pragma once

#include <cuda.h>
#include <cuda/ptx>

#include <cstdint>

namespace inc {

namespace ptx = cuda::ptx;

constexpr int BOX_COLUMNS = 64;      // bf16, one 128-byte swizzle row
constexpr int BOX_ROW_BYTES = 128;

// Byte offset of 16-byte piece `piece` (0..7) of row `row` in a box of 128-byte rows that starts at a multiple of 1,024.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int piece) {
  return row * BOX_ROW_BYTES + ((piece ^ (row & 7)) << 4);
}

// Fetches the map itself ahead of its first use.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at (row, column) to `target`; `barrier` of this block counts its bytes.
__device__ __forceinline__ void load_box(void* target, const CUtensorMap& map, int row, int column, uint64_t* barrier) {
  const int32_t coordinates[2] = {column, row};
  // PTX names the target space after the cluster; without one it is this block.
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, target, &map, coordinates, barrier);
}

// Writes the box at `source` to (row, column); the caller's thread commits and waits. Whoever filled `source` has
// executed fence_proxy_async before it told this thread.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int row, int column, const void* source) {
  const int32_t coordinates[2] = {column, row};
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &map, coordinates, source);
}

// Four 8 x 8 bf16 matrices, in the register layout of a product's result, to shared memory. Lane l gives the address
// of row l % 8 of matrix l / 8 (16 bytes). libcu++ has no wrapper.
__device__ __forceinline__ void store_matrices(uint32_t shared_address, uint32_t m0, uint32_t m1, uint32_t m2,
                                               uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address), "r"(m0),
               "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace inc
