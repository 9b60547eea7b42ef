// All that the bindings need.
#pragma once
using cudaStream_t = void*;
