// Counter-based random numbers, the same as in maxrl_fast/rollout/__init__.py: they depend on a
// sample's own coordinates.
#pragma once
#include <cstdint>

#include "element_types.h"

namespace maxrl {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
MAXRL_HOST_DEVICE inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Returns the number in [0, 1), with 24 random bits, of the sample with this key for its token at
// `position`.
MAXRL_HOST_DEVICE inline float uniform(int64_t key, int64_t position) {
  const uint64_t bits =
      mix(static_cast<uint64_t>(key) + static_cast<uint64_t>(position + 1) * 0x9E3779B97F4A7C15u);
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

}  // namespace maxrl
