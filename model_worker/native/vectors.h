// Sixteen floats at a time, in GCC's portable vectors: the compiler maps them to what the
// machine has.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

// For memory that is aligned like its elements only. (A memcpy instead makes GCC 12 go through
// the stack in two halves, which costs more than the arithmetic.)
typedef float unaligned_vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t unaligned_vh __attribute__((vector_size(32), aligned(2), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const unaligned_vf*>(p); }

// bfloat16 is the upper half of a float.
inline vf load(const uint16_t* p) {
  const vh half = *reinterpret_cast<const unaligned_vh*>(p);
  return reinterpret_cast<vf>(__builtin_convertvector(half, vu) << 16);
}

inline void store(float* p, vf v) { *reinterpret_cast<unaligned_vf*>(p) = v; }

inline vf splat(float x) { return x - vf{}; }

}  // namespace octavo
