// The declarations that the bindings need.
#pragma once
using cudaStream_t = void*;
