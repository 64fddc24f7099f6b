// y = x W^T + b on a CPU, every output in an order of its own.
//
// Layout   W is packed once: [ceil(N / TILE)][K][TILE], padded with zeros, so that a tile is
//          read in one straight line. x: [M, K], y: [M, N], rows contiguous.
// Work     tiles of TILE outputs over the threads; inside one, ROWS rows at a time share every
//          load of W. W is read from memory once however many rows there are, as long as a
//          tile (K * TILE floats) fits the L2 cache.
// Order    each output is one chain of fused multiply-adds over k = 0 .. K-1, whatever M is and
//          wherever its row stands: the same bits alone and in any batch.
// Bytes    N * K * sizeof(weight) + M * (N + K) * sizeof(float).

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

using namespace octavo;

constexpr int VECTORS = 4;
constexpr int TILE = VECTORS * LANES;
constexpr int ROWS = 6;  // 6 * 4 accumulators and 4 vectors of W fit 32 registers

template <int M, typename Weight>
inline void tile_rows(const float* x, int64_t x_stride, const Weight* w, int64_t depth,
                      const float* bias, float* y, int64_t y_stride, int64_t width) {
  vf acc[M][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[m][v] = vf{};
  for (int64_t k = 0; k < depth; ++k, w += TILE) {
    vf weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) weights[v] = load(w + v * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf xs = splat(x[m * x_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[m][v] += xs * weights[v];
    }
  }
  alignas(64) float row[TILE];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(row + v * LANES, acc[m][v]);
    float* out = y + m * y_stride;
    if (bias)
      for (int64_t n = 0; n < width; ++n) out[n] = row[n] + bias[n];
    else
      std::copy(row, row + width, out);
  }
}

template <typename Weight>
void linear(const float* x, int64_t x_stride, const Weight* packed, const float* bias, float* y,
            int64_t num_rows, int64_t depth, int64_t num_outputs, int num_threads) {
  const int64_t num_tiles = (num_outputs + TILE - 1) / TILE;
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const Weight* w = packed + tile * depth * TILE;
    const int64_t first = tile * TILE, width = std::min<int64_t>(TILE, num_outputs - first);
    const float* b = bias ? bias + first : nullptr;
    int64_t m = 0;
    for (; m + ROWS <= num_rows; m += ROWS)
      tile_rows<ROWS>(x + m * x_stride, x_stride, w, depth, b, y + m * num_outputs + first,
                      num_outputs, width);
    const float* rest = x + m * x_stride;
    float* out = y + m * num_outputs + first;
    switch (num_rows - m) {
      case 5: tile_rows<5>(rest, x_stride, w, depth, b, out, num_outputs, width); break;
      case 4: tile_rows<4>(rest, x_stride, w, depth, b, out, num_outputs, width); break;
      case 3: tile_rows<3>(rest, x_stride, w, depth, b, out, num_outputs, width); break;
      case 2: tile_rows<2>(rest, x_stride, w, depth, b, out, num_outputs, width); break;
      case 1: tile_rows<1>(rest, x_stride, w, depth, b, out, num_outputs, width); break;
    }
  }
}

}  // namespace

extern "C" {

// Elements of the packed weight of a [num_outputs, depth] matrix.
int64_t octavo_packed_elements(int64_t num_outputs, int64_t depth) {
  return (num_outputs + TILE - 1) / TILE * TILE * depth;
}

// weight: [num_outputs, depth] of element_bytes each, contiguous.
void octavo_pack(const char* weight, char* packed, int64_t num_outputs, int64_t depth,
                 int64_t element_bytes) {
  const int64_t num_tiles = (num_outputs + TILE - 1) / TILE;
  for (int64_t tile = 0; tile < num_tiles; ++tile)
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t lane = 0; lane < TILE; ++lane) {
        const int64_t n = tile * TILE + lane;
        char* target = packed + ((tile * depth + k) * TILE + lane) * element_bytes;
        if (n < num_outputs)
          std::memcpy(target, weight + (n * depth + k) * element_bytes, element_bytes);
        else
          std::memset(target, 0, element_bytes);
      }
}

void octavo_linear(const float* x, int64_t x_stride, const void* packed, int weight_is_bfloat16,
                   const float* bias, float* y, int64_t num_rows, int64_t depth,
                   int64_t num_outputs, int num_threads) {
  if (weight_is_bfloat16)
    linear(x, x_stride, static_cast<const uint16_t*>(packed), bias, y, num_rows, depth,
           num_outputs, num_threads);
  else
    linear(x, x_stride, static_cast<const float*>(packed), bias, y, num_rows, depth, num_outputs,
           num_threads);
}
}
