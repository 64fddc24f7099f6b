// Sixteen floats at a time, in GCC's portable vectors: the compiler maps them to what the
// machine has.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// bfloat16 is the upper half of a float.
inline vf load(const uint16_t* p) {
  vh h;
  std::memcpy(&h, p, sizeof h);
  vu wide = __builtin_convertvector(h, vu) << 16;
  vf v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vf splat(float x) { return x - vf{}; }

}  // namespace octavo
