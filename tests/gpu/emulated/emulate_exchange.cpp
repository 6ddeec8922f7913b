// Runs the kernels of ranks and switches on the CPU: a process per block, a thread per CUDA thread, all blocks of all PEs at once. The
// heaps are memory that the caller shares with its children. Called through ctypes by tests/gpu/emulated_exchange.py, which also
// replaces the inline assembly of the sources.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <vector>

#include "cuda_bf16.h"
//
#include "exchange_words.h"
//
#include "inc_runtime/device/exchange_kernel.cu"
#include "switch_emulator/device/switch_kernel.cu"

namespace {

template <class Arguments>
using Kernel = void (*)(inc::Heap, Arguments);

template <class Arguments>
pid_t start_block(Kernel<Arguments> kernel, const void* heap, const void* arguments, int number, int num_threads, int team_threads) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that is killed leaves nothing behind
  blockIdx.x = unsigned(number);
  block = new Block(unsigned(num_threads));
  team = new TeamMeeting(unsigned(team_threads));
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t)
    threads.emplace_back([&, t] {
      threadIdx.x = unsigned(t), blockIdx.x = unsigned(number);
      kernel(*static_cast<const inc::Heap*>(heap), *static_cast<const Arguments*>(arguments));
    });
  for (auto& thread : threads) thread.join();
  _exit(0);
}

Kernel<inc::SwitchArguments> switch_kernel(const std::string& name) {
  if (name == "dispatch_switch_kernel") return dispatch_switch_kernel;
  if (name == "combine_switch_kernel") return combine_switch_kernel;
  if (name == "dispatch_phased_kernel") return dispatch_phased_kernel;
  if (name == "combine_phased_kernel") return combine_phased_kernel;
  if (name == "dispatch_relay_kernel") return dispatch_relay_kernel;
  if (name == "combine_relay_kernel") return combine_relay_kernel;
  return nullptr;
}

void stop(inc::Heap heap, inc::SwitchArguments) { stop_kernel(heap); }

}  // namespace

extern "C" int switch_threads() { return inc::SWITCH_THREADS; }

// Starts a kernel; the process of each block goes to `pids`. Returns 0, or -1 where there is no such kernel.
extern "C" int start(const char* name, const void* heap, const void* arguments, int num_blocks, int num_threads, int team_threads,
                     int* pids) {
  gridDim.x = unsigned(num_blocks), blockDim.x = unsigned(num_threads);
  const Kernel<inc::SwitchArguments> kernel = std::string(name) == "stop_kernel" ? stop : switch_kernel(name);
  if (kernel == nullptr && std::string(name) != "exchange_kernel") return -1;
  for (int number = 0; number < num_blocks; ++number)
    pids[number] = kernel ? start_block(kernel, heap, arguments, number, num_threads, team_threads)
                          : start_block<inc::ExchangeArguments>(exchange_kernel, heap, arguments, number, num_threads, team_threads);
  return 0;
}

// Waits for a process; 0 if it ended well.
extern "C" int finish(int pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}
