// The matrix unit of Hopper: warpgroup products (wgmma) and the register hand-over between roles (setmaxnreg).
// libcu++ has no wrapper for either, hence inline PTX.
// A product is D[64, 128] += A[64, 16] * B[128, 16]^T: A bf16 in registers, B bf16 in shared memory, K contiguous, in the
// 128-byte swizzle that the tensor maps write; D float32 in registers, 64 a thread. A warpgroup computes 64 x 256 results by two
// products with one A: from registers, so that A is read once for both. (One product of 64 x 256 needs 154 registers at launch,
// so that no fourth warpgroup fits.) In D, thread t of the warpgroup (warp w = t / 32, lane l = t % 32) holds, for every block j
// of 8 columns:
//   d[4j + 0, 1]: row 16w + l/4,     columns 8j + 2(l%4) + {0, 1}
//   d[4j + 2, 3]: row 16w + l/4 + 8, the same columns.
// Cost: 64 clocks per instruction and SM when shared memory keeps up (1,024 bf16 multiply-adds per clock and SM).
#pragma once

#include <cstdint>

namespace inc {

constexpr int ACCUMULATORS = 128;  // float32 registers of 64 x 256 results per thread

// Matrix descriptor of a K-contiguous operand in the 128-byte swizzle. `address` is in shared memory; its tile starts
// at a multiple of 1,024 bytes. Rows lie 128 bytes apart, groups of eight rows 1,024 bytes (64 units of 16 bytes).
__device__ __forceinline__ uint64_t swizzled_descriptor(const void* address) {
  const uint32_t shared_address = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  constexpr uint64_t SWIZZLE_128_BYTES = 1ull << 62;
  constexpr uint64_t ROW_GROUP_STRIDE = 64ull << 32;
  constexpr uint64_t UNUSED_WHEN_SWIZZLED = 1ull << 16;
  return SWIZZLE_128_BYTES | ROW_GROUP_STRIDE | UNUSED_WHEN_SWIZZLED | ((shared_address & 0x3FFFFu) >> 4);
}

// Orders register and shared-memory accesses before the next products of this warpgroup.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most `PENDING` committed groups of this warpgroup are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from reading or moving accumulators across the wait that makes them valid.
__device__ __forceinline__ void pin_accumulators(float (&d)[ACCUMULATORS]) {
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[FIRST, FIRST + 64) = A * B^T + (accumulate ? the same : 0), asynchronous: d is undefined until wgmma_wait, and `a` must not
// change until then.
template <int FIRST>
__device__ __forceinline__ void wgmma_64x128x16(float (&d)[ACCUMULATORS], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
      :
          "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]),
          "+f"(d[FIRST + 4]), "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]),
          "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]), "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]),
          "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]), "+f"(d[FIRST + 15]),
          "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
          "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]),
          "+f"(d[FIRST + 24]), "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]),
          "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]), "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]),
          "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]), "+f"(d[FIRST + 35]),
          "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
          "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]),
          "+f"(d[FIRST + 44]), "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]),
          "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]), "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]),
          "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]), "+f"(d[FIRST + 55]),
          "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
          "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// Four 8 x 8 matrices of A from shared memory to the registers that a product reads. Lane l gives the address of row l % 8 of
// matrix l / 8 (16 bytes).
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address)
               : "memory");
}

// Changes the registers of every thread of the executing warpgroup. All four of its warps must execute it.
template <int REGISTERS>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace inc
