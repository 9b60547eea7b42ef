// Numbers of the kernels that were computed or guessed, each with the experiment of bench.ab that
// will set it; its variants are built with other values of the macros. maxrl_fast/runtime/tuning.py
// has those of Python.
#pragma once
#include <cstdint>

// Bytes of a row's part in a block's shared memory, at most: with 40 KiB four blocks of a
// multiprocessor hide each other's waits. `storage`
#ifndef MAXRL_STORAGE
#define MAXRL_STORAGE 40960
#endif
// Chunks of a thread on their way to shared memory. `ahead`
#ifndef MAXRL_AHEAD
#define MAXRL_AHEAD 4
#endif
// Percent of a multiprocessor's memory that such a kernel has as shared memory rather than as
// cache; -1: the driver's choice. `carveout`
#ifndef MAXRL_CARVEOUT
#define MAXRL_CARVEOUT 100
#endif

namespace maxrl::cuda {

constexpr int64_t kPreferredStorage = MAXRL_STORAGE;
constexpr int kAhead = MAXRL_AHEAD;
constexpr int kCarveout = MAXRL_CARVEOUT;
// Of a row for one warp, at most: all rows at work fit into the L2 cache.
constexpr int64_t kWarpRowBytes = 8 << 10;

}  // namespace maxrl::cuda
