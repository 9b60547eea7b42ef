// The fibers, the barriers and the device of include/cuda_runtime.h.
//
// With MAXRL_RACES defined, ThreadSanitizer takes every fiber for a thread (test_races.py). What
// orders the memory accesses of two fibers is then a barrier, or an atomic between two fences; an
// exchange within a warp does not, nor does it on a GPU.
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cuda_pipeline_primitives.h"
#include "cuda_runtime.h"

#ifdef MAXRL_RACES
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
#endif

namespace {

constexpr size_t kMaxShared = 227 << 10, kFence = 4 << 10,
                 kDefaultShared = 48 << 10;  // bytes per block of a Hopper GPU
constexpr unsigned char kPattern = 0xa5;
constexpr size_t kStack = kFindsRaces ? 128 << 10 : 64 << 10;
constexpr auto kPatience = std::chrono::seconds(60);

}  // namespace

namespace maxrl::cuda {
__attribute__((aligned(16))) thread_local unsigned char
    storage[kMaxShared + kFence];  // used by dynamic_shared of launch.h
}

thread_local dim3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {

unsigned cluster_size;
const int fault = std::getenv("MAXRL_FAULT") ? std::atoi(std::getenv("MAXRL_FAULT")) : -1;

void ignore_reads([[maybe_unused]] bool are_ignored) {
#ifdef MAXRL_RACES
  (are_ignored ? AnnotateIgnoreReadsBegin : AnnotateIgnoreReadsEnd)(__FILE__, __LINE__);
#endif
}

namespace {

[[noreturn]] void stop(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

// Where a fiber, or the scheduler of a block, goes on. `leave` returns when another one leaves for
// `from`; `start` leaves for a new fiber that calls `function`.
#ifdef MAXRL_RACES
struct Place {
  ucontext_t state;
  void* fiber = nullptr;  // ThreadSanitizer's
};
// Ordered after nothing that the host does.
void* const outside = __tsan_create_fiber(0);
void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
std::mutex of_fibers;
std::vector<void*> fibers;  // of the present launch: without its fiber, ThreadSanitizer forgets
                            // what a thread has done
void leave(Place& from, Place& to) {
  from.fiber = __tsan_get_current_fiber();
  switch_to(to.fiber);
  swapcontext(&from.state, &to.state);
}
void start(Place& from, Place& to, unsigned char* stack, void (*function)()) {
  getcontext(&to.state);
  to.state.uc_stack.ss_sp = stack;
  to.state.uc_stack.ss_size = kStack;
  to.state.uc_link = nullptr;
  makecontext(&to.state, function, 0);
  to.fiber = __tsan_create_fiber(0);
  {
    const std::lock_guard lock(of_fibers);
    fibers.push_back(to.fiber);
  }
  leave(from, to);
}
void* begin_launch() {
  void* const host = __tsan_get_current_fiber();
  switch_to(outside);
  void* const launch = __tsan_create_fiber(0);
  switch_to(launch);
  fibers.push_back(launch);
  return host;
}
void end_launch() {
  for (void* fiber : fibers) __tsan_destroy_fiber(fiber);
  fibers = std::vector<void*>();
}
#else  // faster than swapcontext, which asks the kernel for the signal mask each time
struct Place {
  jmp_buf state;
};
void leave(Place& from, Place& to) {
  if (_setjmp(from.state) == 0) _longjmp(to.state, 1);
}
void start(Place& from, Place&, unsigned char* stack, void (*function)()) {
  if (_setjmp(from.state) != 0) return;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, function, 0);
  setcontext(&context);
}
void* begin_launch() { return nullptr; }
void switch_to(void*) {}
void end_launch() {}
#endif

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  dim3 thread;
  std::vector<std::vector<Copy>> copies{1};  // groups, the oldest first; the last one is open
  Place place;
  std::unique_ptr<unsigned char[]> stack = std::make_unique<unsigned char[]>(kStack);
  bool is_started = false, is_done = false;
  bool has_waited = false;  // for the kernels before
  bool has_fenced = false;  // so that its next atomics tell others what it wrote before
  std::vector<void*>
      has_changed;  // the atomics since its last fence, which tell it what others wrote
};

// Those who meet, and how often all have met.
struct Meeting {
  unsigned size = 0, came = 0;
  uint64_t number = 0;
  char orders[2] =
      {};  // for ThreadSanitizer, by turns: some may come again before others have left
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
  Place scheduler;
  uint64_t steps = 0;  // of any fiber that were not waits
  bool waits_for_others = false;  // a fiber waits on a Barrier, on which other blocks may arrive
};
thread_local Block* here;
thread_local const std::function<void()>* work;
// For ThreadSanitizer: they order the host before all fibers, and all fibers before the host.
char begin_of_launch, end_of_launch;
bool must_wait;  // for the kernels before

void wait_for(Meeting& meeting, bool orders_memory) {
  const uint64_t number = meeting.number;
  char* order = &meeting.orders[number % 2];
  ++here->steps;
  if (orders_memory) __tsan_release(order);
  if (++meeting.came == meeting.size) {
    meeting.came = 0;
    ++meeting.number;
  }
  while (meeting.number == number) leave(here->running->place, here->scheduler);
  if (orders_memory) __tsan_acquire(order);
}

void enter() {
  ignore_reads(true);  // until the arguments are copied
  (*work)();
  if (must_wait && !here->running->has_waited) stop("an early launch that does not wait");
  __tsan_release(&end_of_launch);
  here->running->is_done = true;
  ++here->steps;
  leave(here->running->place, here->scheduler);
}

void resume(Fiber& fiber) {
  here->running = &fiber;
  threadIdx = fiber.thread;
  if (fiber.is_started)
    leave(here->scheduler, fiber.place);
  else
    start(here->scheduler, fiber.place, fiber.stack.get(), enter);
  fiber.is_started = true;
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
    block.fibers[t].has_waited = block.fibers[t].has_fenced = false;
    block.fibers[t].has_changed.clear();
  }
  const char* order = std::getenv("MAXRL_EMULATED_ORDER");
  const bool is_reverse = order && std::strcmp(order, "reverse") == 0;
  const char* named = std::getenv("MAXRL_EMULATED_LAG");  // a warp that runs where no other can
  const unsigned lags = named ? std::atoi(named) : size;
  auto moved = std::chrono::steady_clock::now();
  for (unsigned left = size; left > 0;) {
    const uint64_t before = block.steps;
    block.waits_for_others = false;
    const auto run_all = [&](bool runs_lagging) {
      for (unsigned i = 0; i < size; ++i) {
        const unsigned t = is_reverse ? size - 1 - i : i;
        Fiber& fiber = block.fibers[t];
        if (fiber.is_done || (t / kWarp == lags) != runs_lagging) continue;
        resume(fiber);
        left -= fiber.is_done;
      }
    };
    run_all(false);
    if (block.steps == before) run_all(true);
    if (left == 0 || block.steps != before) {
      moved = std::chrono::steady_clock::now();
    } else if (!block.waits_for_others || std::chrono::steady_clock::now() - moved > kPatience) {
      stop("a barrier that not all threads reach");
    } else {
      std::this_thread::yield();
    }
  }
  for (size_t i = 0; i < kFence; ++i)
    if (maxrl::cuda::storage[shared_bytes + i] != kPattern)
      stop("a write past the shared memory of a block");
}

// All blocks of one rank in some clusters, whose first blocks are `begin` to `end`.
void run_rank(unsigned rank, unsigned begin, unsigned end, ClusterBarrier& cluster,
              size_t shared_bytes, const std::function<void()>& kernel) {
  auto block = std::make_unique<Block>();
  block->rank = rank;
  block->cluster = &cluster;
  block->fibers = std::vector<Fiber>(blockDim.x);
  here = block.get();
  work = &kernel;
  for (unsigned first = begin; first < end; first += cluster_size) {
    blockIdx = dim3(first + rank);
    run_block(*block, shared_bytes);
  }
  if (kFindsRaces) block.release();  // the stacks of unordered fibers must not get the same memory
}

void meet(ClusterBarrier& cluster) {
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

void run_clusters(unsigned begin, unsigned end, size_t shared_bytes,
                  const std::function<void()>& kernel) {
  auto made = std::make_unique<ClusterBarrier>();
  ClusterBarrier& cluster = *made;
  cluster.memory.resize(cluster_size);
  std::vector<std::thread> ranks;
  for (unsigned rank = 0; rank < cluster_size; ++rank)
    ranks.emplace_back([&, rank] {
      cluster.memory[rank] = maxrl::cuda::storage;
      meet(cluster);
      run_rank(rank, begin, end, cluster, shared_bytes, kernel);
    });
  for (auto& rank : ranks) rank.join();
  if (kFindsRaces) made.release();
}

std::map<const void*, size_t> allowed_shared;
std::set<const void*> large_clusters;  // kernels that may have more than 8 blocks

}  // namespace

unsigned cluster_rank() { return here->rank; }

void sync_block() { wait_for(here->all, true); }

void sync_warp() { wait_for(here->warps[threadIdx.x / kWarp].given, true); }

uint64_t exchange(uint64_t value, int from_lane) {
  Warp& warp = here->warps[threadIdx.x / kWarp];
  warp.values[lane()] = value;
  wait_for(warp.given, false);
  const uint64_t result = warp.values[from_lane];
  wait_for(warp.taken, false);
  return result;
}

void fence() {
  Fiber& fiber = *here->running;
  for (void* atomic : fiber.has_changed) __tsan_acquire(atomic);
  fiber.has_changed.clear();
  fiber.has_fenced = true;
}

void wait_for_predecessor() {
  __tsan_acquire(&begin_of_launch);
  here->running->has_waited = true;
}

unsigned long long add_atomically(unsigned long long* to, unsigned long long value) {
  Fiber& fiber = *here->running;
  if (fiber.has_fenced) __tsan_release(to);
  fiber.has_changed.push_back(to);
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

void copy(void* to, const void* from, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    stop("a misaligned asynchronous copy");
  const char* when = std::getenv("MAXRL_EMULATED_COPIES");
  if (when && std::strcmp(when, "early") == 0)
    std::memcpy(to, from, bytes);
  else
    here->running->copies.back().push_back({to, from, bytes});
}

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
  if (threadIdx.x == 0) meet(*here->cluster);
  sync_block();
}

// Not a mutex, which would order memory for ThreadSanitizer.
std::atomic_flag of_barriers = ATOMIC_FLAG_INIT;
template <typename Use>
void with_barriers(const Use& use) {
  while (of_barriers.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  use();
  of_barriers.clear(std::memory_order_release);
}

void arrive(Barrier& barrier, int threads, int bytes) {
  __tsan_release(&barrier);
  with_barriers([&] {
    barrier.left -= static_cast<int16_t>(threads);
    barrier.bytes += static_cast<int16_t>(bytes);
    if (barrier.left < 0) stop("more threads at a barrier than it expects");
    if (barrier.left == 0 && barrier.bytes == 0) {
      barrier.left = barrier.expected;
      ++barrier.phase;
    }
  });
  ++here->steps;
}

void wait(Barrier& barrier, unsigned parity) {
  for (;;) {
    bool has_ended = false;
    with_barriers([&] { has_ended = (barrier.phase & 1) != static_cast<int>(parity); });
    if (has_ended) break;
    here->waits_for_others = true;
    leave(here->running->place, here->scheduler);
  }
  ++here->steps;
  __tsan_acquire(&barrier);
}

// Variables of a thread lie at the same distances from one another in every thread.
void* of_rank(void* mine, unsigned rank) {
  return here->cluster->memory[rank] + (static_cast<unsigned char*>(mine) - maxrl::cuda::storage);
}

void run(dim3 grid, dim3 block, unsigned blocks_of_cluster, size_t shared_bytes, bool starts_early,
         const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  gridDim = grid;
  blockDim = block;
  cluster_size = blocks_of_cluster;
  must_wait = starts_early;
  __tsan_release(&begin_of_launch);
  void* const host = begin_launch();
  if (!starts_early) __tsan_acquire(&begin_of_launch);
  // To find races, every cluster gets threads of its own, in whose shared memory no other block has
  // written.
  const unsigned at_once = kFindsRaces ? cluster_size : grid.x;
  for (unsigned begin = 0; begin < grid.x; begin += at_once)
    run_clusters(begin, begin + at_once, shared_bytes, kernel);
  __tsan_release(&end_of_launch);
  switch_to(host);
  __tsan_acquire(&end_of_launch);
  end_launch();
}

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMaxShared) return cudaErrorInvalidValue;
  allowed_shared[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

cudaError_t allow_large_clusters(const void* kernel) {
  large_clusters.insert(kernel);
  return cudaSuccess;
}

unsigned largest_cluster() {
  const char* major = std::getenv("MAXRL_EMULATED_CAPABILITY");
  const char* size = major ? std::strchr(major, '/') : nullptr;
  return size ? std::atoi(size + 1) : 16;
}

cudaError_t check(const cudaLaunchConfig_t& config, const void* kernel) {
  const auto allowed = allowed_shared.find(kernel);
  const size_t most =
      allowed == allowed_shared.end() ? kDefaultShared : std::max(allowed->second, kDefaultShared);
  const unsigned threads = config.blockDim.x, blocks = config.gridDim.x;
  const unsigned blocks_of_cluster = config.numAttrs > 0 ? config.attrs[0].val.clusterDim.x : 1;
  if (config.dynamicSmemBytes > most) return cudaErrorInvalidValue;
  if (threads == 0 || threads > 1024 || threads % kWarp || blocks == 0 || blocks_of_cluster == 0 ||
      blocks_of_cluster > largest_cluster() || blocks % blocks_of_cluster ||
      (blocks_of_cluster > 8 && !large_clusters.count(kernel)))
    return cudaErrorInvalidConfiguration;
  return cudaSuccess;
}

}  // namespace emulation

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                : "invalid argument";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* major = std::getenv("MAXRL_EMULATED_CAPABILITY");  // 8: no clusters
  if (attribute == cudaDevAttrComputeCapabilityMajor) *value = major ? std::atoi(major) : 9;
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = static_cast<int>(kMaxShared);
  if (attribute == cudaDevAttrMultiProcessorCount)
    *value = kFindsRaces ? 1 : 6;  // few, so that blocks take several rows
  return cudaSuccess;
}
