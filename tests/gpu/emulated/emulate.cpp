// Runs the Baseline's kernels on the CPU: a process per block, a thread per CUDA thread. Global memory is memory that the
// caller shares with its children. Called through ctypes by tests/gpu/emulated_kernels.py.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "cuda_bf16.h"
//
#include "group.cuh"
#include "pack.cuh"
#include "route.cuh"
#include "row_sums.cuh"

namespace {

using Kernel = void (*)(const inc::BaselineArguments&);

void pack(const inc::BaselineArguments& arguments) {
  static inc::PackShared shared;
  inc::pack(arguments, shared);
}
void group(const inc::BaselineArguments& arguments) {
  static inc::GroupShared shared;
  inc::group(arguments, shared);
}

Kernel find(const char* name) {
  const struct {
    const char* name;
    Kernel kernel;
  } all[] = {{"route_64_experts", inc::route<8>}, {"route_128_experts", inc::route<16>}, {"route_256_experts", inc::route<32>},
             {"route_given", inc::route_given},   {"pack", pack},                       {"group", group},
             {"reduce", inc::reduce},             {"global_reduce", inc::global_reduce}};
  for (const auto& entry : all)
    if (std::strcmp(entry.name, name) == 0) return entry.kernel;
  return nullptr;
}

void run_block(Kernel kernel, const inc::BaselineArguments& arguments, unsigned number, unsigned num_threads) {
  block = new Block(num_threads);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < num_threads; ++t)
    threads.emplace_back([&, t] {
      threadIdx.x = t, blockIdx.x = number;
      kernel(arguments);
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace

// 0 if every block ended well.
extern "C" int launch(const char* name, const void* arguments, int num_blocks, int num_threads) {
  const Kernel kernel = find(name);
  if (kernel == nullptr) return -1;
  gridDim.x = unsigned(num_blocks), blockDim.x = unsigned(num_threads);
  std::vector<pid_t> children;
  for (int number = 0; number < num_blocks; ++number) {
    children.push_back(fork());
    if (children.back() == 0) {
      run_block(kernel, *static_cast<const inc::BaselineArguments*>(arguments), unsigned(number), unsigned(num_threads));
      _exit(0);
    }
  }
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed |= status;
  }
  return failed;
}
