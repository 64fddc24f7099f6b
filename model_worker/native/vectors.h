// Sixteen floats at a time, in GCC's portable vectors: the compiler maps them to what the
// machine has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace octavo {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef float v8 __attribute__((vector_size(32)));

// For memory that is aligned like its elements only. (A memcpy instead makes GCC 12 go through
// the stack in two halves, which costs more than the arithmetic.)
typedef float unaligned_vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t unaligned_vh __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t unaligned_vu __attribute__((vector_size(64), aligned(2), may_alias));
typedef float unaligned_v4 __attribute__((vector_size(16), aligned(4), may_alias));

inline vf splat(float x) { return x - vf{}; }

inline vf load(const float* p) { return *reinterpret_cast<const unaligned_vf*>(p); }

// bfloat16 is the upper half of a float.
inline vf load(const uint16_t* p) {
  const vh half = *reinterpret_cast<const unaligned_vh*>(p);
  return reinterpret_cast<vf>(__builtin_convertvector(half, vu) << 16);
}

inline void store(float* p, vf v) { *reinterpret_cast<unaligned_vf*>(p) = v; }

// A row of VECTORS * 16 elements, in the order that is cheapest to load. Of bfloat16 that is the
// even, then the odd elements of each 32: a shift and a mask, where widening them in place would
// keep the one shuffle port busy. `arrange` brings a plain row into the order of load_row<KV>,
// `store_arranged` writes such a row in plain order again.
template <int VECTORS>
inline void load_row(const float* p, vf (&row)[VECTORS]) {
#pragma GCC unroll 16
  for (int v = 0; v < VECTORS; ++v) row[v] = load(p + v * LANES);
}

template <int VECTORS>
inline void load_row(const uint16_t* p, vf (&row)[VECTORS]) {
#pragma GCC unroll 16
  for (int v = 0; v + 1 < VECTORS; v += 2) {
    const vu pairs = *reinterpret_cast<const unaligned_vu*>(p + v * LANES);
    row[v] = reinterpret_cast<vf>(pairs << 16);
    row[v + 1] = reinterpret_cast<vf>(pairs & 0xffff0000u);
  }
  if (VECTORS % 2) row[VECTORS - 1] = load(p + (VECTORS - 1) * LANES);
}

template <int VECTORS>
inline void store_row(float* p, const vf (&row)[VECTORS]) {
#pragma GCC unroll 16
  for (int v = 0; v < VECTORS; ++v) store(p + v * LANES, row[v]);
}

template <typename KV, int VECTORS>
inline void arrange(vf (&row)[VECTORS]) {
  if (sizeof(KV) != 2) return;
#pragma GCC unroll 16
  for (int v = 0; v + 1 < VECTORS; v += 2) {
    const vf a = row[v], b = row[v + 1];
    row[v] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14,  //
                                     16, 18, 20, 22, 24, 26, 28, 30);
    row[v + 1] = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                         17, 19, 21, 23, 25, 27, 29, 31);
  }
}

template <typename KV, int VECTORS>
inline void store_arranged(float* p, vf (&row)[VECTORS]) {
  if (sizeof(KV) == 2) {
#pragma GCC unroll 16
    for (int v = 0; v + 1 < VECTORS; v += 2) {
      const vf even = row[v], odd = row[v + 1];
      row[v] = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19,  //
                                       4, 20, 5, 21, 6, 22, 7, 23);
      row[v + 1] = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27,  //
                                           12, 28, 13, 29, 14, 30, 15, 31);
    }
  }
  store_row(p, row);
}

inline float widen(float x) { return x; }

inline float widen(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof bits);
  return result;
}

// To the nearest bfloat16, halves to the even one; NaN stays NaN.
inline uint16_t round_to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40u);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// The same for sixteen.
inline void store(uint16_t* p, vf v) {
  const vu bits = reinterpret_cast<vu>(v);
  const vu near = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const vu quiet = bits >> 16 | 0x40u;
  const vu chosen = (bits & 0x7fffffffu) > 0x7f800000u ? quiet : near;
  *reinterpret_cast<unaligned_vh*>(p) = __builtin_convertvector(chosen, vh);
}

inline void narrow(const float* from, float* to, int64_t count) {
  std::copy(from, from + count, to);
}

inline void narrow(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = round_to_bfloat16(from[i]);
}

// A fixed tree: lane i with i + 8, then + 4, + 2, + 1.
inline float sum(vf v) {
  const v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// The sums of four vectors, each by that tree, for less than the price of two.
inline v4 sum4(vf a, vf b, vf c, vf d) {
  const vf ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7,  //
                                        16, 17, 18, 19, 20, 21, 22, 23) +
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                        24, 25, 26, 27, 28, 29, 30, 31);
  const vf cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7,  //
                                        16, 17, 18, 19, 20, 21, 22, 23) +
                __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                        24, 25, 26, 27, 28, 29, 30, 31);
  const vf four = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11,  //
                                          16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15,  //
                                          20, 21, 22, 23, 28, 29, 30, 31);
  const vf two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1, 6, 7, 4, 5,  //
                                                10, 11, 8, 9, 14, 15, 12, 13);
  const vf one = two + __builtin_shufflevector(two, two, 1, 0, 3, 2, 5, 4, 7, 6,  //
                                               9, 8, 11, 10, 13, 12, 15, 14);
  return __builtin_shufflevector(one, one, 0, 4, 8, 12);
}

// exp for x <= 0, to about 1 ulp: 2^k * p(r), |r| <= ln 2 / 2. Below -87 it is 0.
inline vf exp_nonpositive(vf x) {
  const vf too_small = splat(-87.0f);
  const vf clamped = x > too_small ? x : too_small;
  const vf scaled = clamped * 1.44269504088896341f;
  const vi k = __builtin_convertvector(scaled - 0.5f, vi);  // towards zero of <= 0: rounds
  const vf kf = __builtin_convertvector(k, vf);
  const vf r = clamped - kf * 0.693359375f + kf * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vi power = (k + 127) << 23;
  const vf result = p * reinterpret_cast<vf>(power);
  return x > too_small ? result : vf{};
}

}  // namespace octavo
