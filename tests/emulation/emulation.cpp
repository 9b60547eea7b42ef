// The fibers, the barriers and the device behind include/cuda_runtime.h.
#include <ucontext.h>

#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_pipeline_primitives.h"
#include "cuda_runtime.h"

namespace {

constexpr size_t kMaxShared = 227 << 10, kFence = 4 << 10, kDefaultShared = 48 << 10;  // bytes per block of a Hopper GPU
constexpr unsigned char kPattern = 0xa5;
constexpr size_t kStack = 64 << 10;
constexpr auto kPatience = std::chrono::seconds(60);

}  // namespace

namespace maxrl::cuda {
__attribute__((aligned(16))) thread_local unsigned char storage[kMaxShared + kFence];  // used by dynamic_shared of launch.h
}

thread_local dim3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {

unsigned cluster_size;

namespace {

[[noreturn]] void stop(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  dim3 thread;
  std::vector<std::vector<Copy>> copies{1};  // groups, the oldest first; the last one is open
  jmp_buf state;
  std::unique_ptr<unsigned char[]> stack = std::make_unique<unsigned char[]>(kStack);
  bool is_started = false, is_done = false;
};

// Those who meet, and how often all have met.
struct Meeting {
  unsigned size = 0, came = 0;
  uint64_t number = 0;
};

struct Warp {
  Meeting given, taken;
  uint64_t values[kWarp];
};

// The barrier of a cluster's blocks, and where the shared memory of each lies.
struct ClusterBarrier {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned came = 0;
  uint64_t number = 0;
  std::vector<unsigned char*> memory;
};

struct Block {
  unsigned rank;
  ClusterBarrier* cluster;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting all;
  Fiber* running = nullptr;
  jmp_buf scheduler;
  uint64_t steps = 0;  // of any fiber that were not waits
};
thread_local Block* here;
thread_local const std::function<void()>* work;

void yield() {
  if (_setjmp(here->running->state) == 0) _longjmp(here->scheduler, 1);
}

void wait_for(Meeting& meeting) {
  const uint64_t number = meeting.number;
  ++here->steps;
  if (++meeting.came == meeting.size) {
    meeting.came = 0;
    ++meeting.number;
    return;
  }
  while (meeting.number == number) yield();
}

void enter() {
  (*work)();
  here->running->is_done = true;
  ++here->steps;
  _longjmp(here->scheduler, 1);
}

void resume(Fiber& fiber) {
  here->running = &fiber;
  threadIdx = fiber.thread;
  if (_setjmp(here->scheduler) != 0) return;
  if (fiber.is_started) _longjmp(fiber.state, 1);
  fiber.is_started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

void run_block(Block& block, size_t shared_bytes) {
  std::memset(maxrl::cuda::storage, kPattern, shared_bytes + kFence);
  const unsigned size = blockDim.x;
  block.all = {size, 0, 0};
  block.warps.assign((size + kWarp - 1) / kWarp, {});
  for (auto& warp : block.warps) warp.given.size = warp.taken.size = kWarp;
  for (unsigned t = 0; t < size; ++t) {
    block.fibers[t].thread = dim3(t);
    block.fibers[t].is_started = block.fibers[t].is_done = false;
    block.fibers[t].copies.assign(1, {});
  }
  const char* order = std::getenv("MAXRL_EMULATED_ORDER");
  const bool is_reverse = order && std::strcmp(order, "reverse") == 0;
  for (unsigned left = size; left > 0;) {
    const uint64_t before = block.steps;
    for (unsigned i = 0; i < size; ++i) {
      Fiber& fiber = block.fibers[is_reverse ? size - 1 - i : i];
      if (fiber.is_done) continue;
      resume(fiber);
      left -= fiber.is_done;
    }
    if (left > 0 && block.steps == before) stop("a barrier that not all threads reach");
  }
  for (size_t i = 0; i < kFence; ++i)
    if (maxrl::cuda::storage[shared_bytes + i] != kPattern) stop("a write behind the shared memory of a block");
}

// All blocks of one rank in their clusters.
void run_rank(unsigned rank, ClusterBarrier& cluster, size_t shared_bytes, const std::function<void()>& kernel) {
  Block block{};
  block.rank = rank;
  block.cluster = &cluster;
  block.fibers = std::vector<Fiber>(blockDim.x);
  cluster.memory[rank] = maxrl::cuda::storage;
  here = &block;
  work = &kernel;
  for (unsigned first = 0; first < gridDim.x; first += cluster_size) {
    blockIdx = dim3(first + rank);
    run_block(block, shared_bytes);
  }
}

std::map<const void*, size_t> allowed_shared;

}  // namespace

unsigned cluster_rank() { return here->rank; }

void sync_block() { wait_for(here->all); }

uint64_t exchange(uint64_t value, int from_lane) {
  Warp& warp = here->warps[threadIdx.x / kWarp];
  warp.values[lane()] = value;
  wait_for(warp.given);
  const uint64_t result = warp.values[from_lane];
  wait_for(warp.taken);
  return result;
}

void copy_later(void* to, const void* from, size_t bytes) { here->running->copies.back().push_back({to, from, bytes}); }

void commit_copies() { here->running->copies.emplace_back(); }

void finish_copies(size_t but) {
  auto& groups = here->running->copies;
  while (groups.size() > but + 1) {
    for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    groups.erase(groups.begin());
  }
}

void sync_cluster() {
  sync_block();
  if (threadIdx.x == 0) {
    ClusterBarrier& cluster = *here->cluster;
    std::unique_lock lock(cluster.mutex);
    const uint64_t number = cluster.number;
    if (++cluster.came == cluster_size) {
      cluster.came = 0;
      ++cluster.number;
      cluster.changed.notify_all();
    } else if (!cluster.changed.wait_for(lock, kPatience, [&] { return cluster.number != number; })) {
      stop("a barrier that not all blocks of the cluster reach");
    }
  }
  sync_block();
}

// Variables of a thread lie at the same distances from one another in every thread.
void* of_rank(void* mine, unsigned rank) {
  return here->cluster->memory[rank] + (static_cast<unsigned char*>(mine) - maxrl::cuda::storage);
}

void run(dim3 grid, dim3 block, unsigned blocks_of_cluster, size_t shared_bytes, const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  gridDim = grid;
  blockDim = block;
  cluster_size = blocks_of_cluster;
  ClusterBarrier cluster;
  cluster.memory.resize(cluster_size);
  std::vector<std::thread> ranks;
  for (unsigned rank = 0; rank < cluster_size; ++rank)
    ranks.emplace_back([&, rank] {
      cluster.memory[rank] = maxrl::cuda::storage;
      {
        std::unique_lock lock(cluster.mutex);  // wait until all have started
        if (++cluster.came == cluster_size) {
          cluster.came = 0;
          ++cluster.number;
          cluster.changed.notify_all();
        } else {
          const uint64_t number = cluster.number;
          cluster.changed.wait(lock, [&] { return cluster.number != number; });
        }
      }
      run_rank(rank, cluster, shared_bytes, kernel);
    });
  for (auto& rank : ranks) rank.join();
}

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMaxShared) return cudaErrorInvalidValue;
  allowed_shared[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

cudaError_t check(const cudaLaunchConfig_t& config, const void* kernel) {
  const auto allowed = allowed_shared.find(kernel);
  const size_t most = allowed == allowed_shared.end() ? kDefaultShared : std::max(allowed->second, kDefaultShared);
  const unsigned threads = config.blockDim.x, blocks = config.gridDim.x;
  const unsigned blocks_of_cluster = config.numAttrs > 0 ? config.attrs[0].val.clusterDim.x : 1;
  if (config.dynamicSmemBytes > most) return cudaErrorInvalidValue;
  if (threads == 0 || threads > 1024 || threads % kWarp || blocks == 0 || blocks_of_cluster == 0 || blocks_of_cluster > 8 ||
      blocks % blocks_of_cluster)
    return cudaErrorInvalidConfiguration;
  return cudaSuccess;
}

}  // namespace emulation

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "invalid argument";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* major = std::getenv("MAXRL_EMULATED_CAPABILITY");  // 8: a GPU without clusters
  if (attribute == cudaDevAttrComputeCapabilityMajor) *value = major ? std::atoi(major) : 9;
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = static_cast<int>(kMaxShared);
  if (attribute == cudaDevAttrMultiProcessorCount) *value = 6;  // few, so that blocks take several rows
  return cudaSuccess;
}
