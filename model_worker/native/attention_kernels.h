// The three loops of attention over one partition of a context: scores, weights, weighted values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace octavo {

constexpr int PARTITION = 256;  // tokens; two of K and V of one head fit an L2 cache well
constexpr int KEYS = 4;         // scored at once, so that their sums share shuffles
// From the scores of one head to the next; the last group of keys may write past the partition.
constexpr int SCORE_STRIDE = PARTITION + LANES;

// Query heads whose accumulators fit the registers.
constexpr int heads_at_once(int vectors) { return vectors <= 4 ? 4 : vectors <= 8 ? 2 : 1; }

// The rows that will be read when this many more have been: no hardware prefetcher can guess
// where the next block lies. Into the L2 cache only; the L1 has too few buffers for lines on
// their way, and prefetching into it held the loads up (1.55 times the limit, now 1.2).
template <int DIM, typename KV>
inline void prefetch_row(const KV* row) {
  for (int line = 0; line < DIM * int(sizeof(KV)); line += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + line, 0, 2);
}

// Scores of HEADS query heads, [HEADS, DIM] arranged, with `count` keys that lie one after the
// other. `next`: rows to prefetch meanwhile.
template <int VECTORS, int HEADS, typename KV>
__attribute__((noinline)) void score_run(const float* query, const KV* keys, const KV* next,
                                         int count, float* scores) {
  constexpr int DIM = VECTORS * LANES;
  vf q[HEADS][VECTORS];
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; ++h) load_row(query + h * DIM, q[h]);
  for (int i = 0; i < count; i += KEYS) {
    vf dot[HEADS][KEYS];
#pragma GCC unroll 16
    for (int k = 0; k < KEYS; ++k) {
      const int at = std::min(i + k, count - 1);
      prefetch_row<DIM>(next + at * DIM);
      vf row[VECTORS];
      load_row(keys + at * DIM, row);
#pragma GCC unroll 16
      for (int h = 0; h < HEADS; ++h) dot[h][k] = q[h][0] * row[0];
#pragma GCC unroll 16
      for (int v = 1; v < VECTORS; ++v)
#pragma GCC unroll 16
        for (int h = 0; h < HEADS; ++h) dot[h][k] += q[h][v] * row[v];
    }
#pragma GCC unroll 16
    for (int h = 0; h < HEADS; ++h)
      *reinterpret_cast<unaligned_v4*>(scores + h * SCORE_STRIDE + i) =
          sum4(dot[h][0], dot[h][1], dot[h][2], dot[h][3]);
  }
}

// Adds `count` values, weighted, to the accumulators of HEADS heads, [HEADS, DIM] arranged.
template <int VECTORS, int HEADS, typename KV>
__attribute__((noinline)) void weigh_run(const float* weights, const KV* values, const KV* next,
                                         int count, float* accumulators) {
  constexpr int DIM = VECTORS * LANES;
  vf acc[HEADS][VECTORS];
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; ++h) load_row(accumulators + h * DIM, acc[h]);
  for (int i = 0; i < count; ++i) {
    prefetch_row<DIM>(next + i * DIM);
    vf row[VECTORS];
    load_row(values + i * DIM, row);
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v)
#pragma GCC unroll 16
      for (int h = 0; h < HEADS; ++h) acc[h][v] += weights[h * SCORE_STRIDE + i] * row[v];
  }
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; ++h) store_row(accumulators + h * DIM, acc[h]);
}

// Turns `count` scores into weights exp(score - maximum); gives the maximum and the weights' sum.
inline void soften(float* scores, int count, float softcap, float* maximum_out, float* sum_out) {
  const int padded = (count + LANES - 1) / LANES * LANES;
  std::fill(scores + count, scores + padded, -INFINITY);
  if (softcap > 0)
    for (int i = 0; i < count; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
  vf high = splat(-INFINITY);
  for (int i = 0; i < padded; i += LANES) {
    const vf s = load(scores + i);
    high = s > high ? s : high;
  }
  float maximum = high[0];
  for (int lane = 1; lane < LANES; ++lane) maximum = std::max(maximum, high[lane]);
  vf total = vf{};
  for (int i = 0; i < padded; i += LANES) {
    const vf weights = exp_nonpositive(load(scores + i) - maximum);
    store(scores + i, weights);
    total += weights;
  }
  *maximum_out = maximum;
  *sum_out = sum(total);
}

}  // namespace octavo
