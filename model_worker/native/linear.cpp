// y = x W^T + b on a CPU, every output in an order of its own.
//
// Layout   x: [M, K], rows contiguous, y: [M, N], of W's type. W is packed once, padded with
//          zeros, in tiles that are read in one straight line:
//          float, and bfloat16 without AMX: [ceil(N / TILE)][K][TILE];
//          bfloat16 with AMX: amx.h says how.
// Work     tiles of TILE outputs over the threads, and of many rows in shares of them; inside one,
//          up to ROWS rows at a time share every load of W. W is read from memory once however
//          many rows there are, as long as a tile fits the L2 cache.
// Order    each output is one chain of fused multiply-adds over k = 0 .. K-1 (with AMX: over
//          blocks of 32 of them), whatever M is and wherever its row stands: the same bits alone
//          and in any batch.
// Bytes    N * K * sizeof(weight) + M * (N + K) * sizeof(weight).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <sys/mman.h>

#include "amx.h"
#include "tile_pool.h"
#include "vectors.h"

namespace {

using namespace octavo;

// 48 divides the sizes of most models, so that threads get even shares; 8 * 3 accumulators, 3
// vectors of W and one of x fit 32 registers.
constexpr int VECTORS = 3;
constexpr int TILE = VECTORS * LANES;
constexpr int ROWS = 8;
// Bytes of W ahead of the arithmetic; a tile is one line, but its 4 KiB pages are not to the
// hardware's prefetcher.
constexpr int AHEAD = 4096;

template <typename Weight>
struct Rows {
  const float* x;
  int64_t x_stride;
  const float* bias;  // of this tile, or null
  Weight* y;
  int64_t y_stride;
  int64_t width;  // outputs of this tile that exist
};

template <int M, typename Weight>
inline void tile_rows(const Rows<Weight>& rows, const Weight* w, int64_t depth) {
  vf acc[M][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) acc[m][v] = vf{};
  for (int64_t k = 0; k < depth; ++k, w += TILE) {
    vf weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + v * LANES) + AHEAD, 0, 2);
      weights[v] = load(w + v * LANES);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf xs = splat(rows.x[m * rows.x_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[m][v] += xs * weights[v];
    }
  }
  alignas(64) float row[TILE];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    store_row(row, acc[m]);
    if (rows.bias)
      for (int64_t n = 0; n < rows.width; ++n) row[n] += rows.bias[n];
    narrow(row, rows.y + m * rows.y_stride, rows.width);
  }
}

// The first num_rows rows of `rows`, which is moved along.
template <typename Weight>
void some_rows(Rows<Weight>& rows, const Weight* w, int64_t num_rows, int64_t depth) {
  // Parts of nearly equal size: 9 rows are 5 and 4, not 8 and 1.
  for (int64_t left = num_rows; left > 0;) {
    const int64_t parts = (left + ROWS - 1) / ROWS;
    const int64_t count = (left + parts - 1) / parts;
    switch (count) {
      case 1: tile_rows<1>(rows, w, depth); break;
      case 2: tile_rows<2>(rows, w, depth); break;
      case 3: tile_rows<3>(rows, w, depth); break;
      case 4: tile_rows<4>(rows, w, depth); break;
      case 5: tile_rows<5>(rows, w, depth); break;
      case 6: tile_rows<6>(rows, w, depth); break;
      case 7: tile_rows<7>(rows, w, depth); break;
      default: tile_rows<8>(rows, w, depth);
    }
    rows.x += count * rows.x_stride;
    rows.y += count * rows.y_stride;
    left -= count;
  }
}

template <typename Weight>
void linear(const float* x, int64_t x_stride, const Weight* packed, const float* bias, Weight* y,
            int64_t num_rows, int64_t depth, int64_t num_outputs, int num_threads) {
  const int64_t num_tiles = (num_outputs + TILE - 1) / TILE;
  const int64_t num_shares = (num_rows + ROWS_PER_TILE - 1) / ROWS_PER_TILE;
  TilePool::instance().run_each(num_tiles * num_shares, 1, num_threads, [=](int64_t i) {
    const int64_t tile = i / num_shares, first_row = i % num_shares * ROWS_PER_TILE;
    const Weight* w = packed + tile * depth * TILE;
    const int64_t first = tile * TILE;
    Rows<Weight> rows{x + first_row * x_stride,
                      x_stride,
                      bias ? bias + first : nullptr,
                      y + first_row * num_outputs + first,
                      num_outputs,
                      std::min<int64_t>(TILE, num_outputs - first)};
    some_rows(rows, w, std::min(ROWS_PER_TILE, num_rows - first_row), depth);
  });
}

// weight: [num_outputs, depth], contiguous, of elements of any type.
template <typename Element>
void pack(const Element* weight, Element* packed, int64_t num_outputs, int64_t depth,
          int num_threads) {
  const int64_t num_tiles = (num_outputs + TILE - 1) / TILE;
  TilePool::instance().run_each(num_tiles, 1, num_threads, [=](int64_t tile) {
    for (int64_t lane = 0; lane < TILE; ++lane) {
      const int64_t n = tile * TILE + lane;
      Element* target = packed + tile * depth * TILE + lane;
      for (int64_t k = 0; k < depth; ++k)
        target[k * TILE] = n < num_outputs ? weight[n * depth + k] : Element(0);
    }
  });
}

}  // namespace

extern "C" {

// 1 when bfloat16 products run on AMX tiles; the packed layout depends on it.
int octavo_has_amx() { return amx::available(); }

// Elements of the packed weight of a [num_outputs, depth] matrix.
int64_t octavo_packed_elements(int64_t num_outputs, int64_t depth, int is_bfloat16) {
  if (is_bfloat16 && amx::available()) return amx::packed_elements(num_outputs, depth);
  return (num_outputs + TILE - 1) / TILE * TILE * depth;
}

// weight: [num_outputs, depth], contiguous. packed: aligned to 64 bytes.
void octavo_pack(const void* weight, void* packed, int64_t num_outputs, int64_t depth,
                 int is_bfloat16, int num_threads) {
  if (!is_bfloat16)
    pack(static_cast<const float*>(weight), static_cast<float*>(packed), num_outputs, depth,
         num_threads);
  else if (amx::available())
    amx::pack(static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(packed), num_outputs,
              depth, num_threads);
  else
    pack(static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(packed), num_outputs, depth,
         num_threads);
}

// x, packed and y are all bfloat16 or all float; x_stride in elements; bias: float or null.
void octavo_linear(const void* x, int64_t x_stride, const void* packed, int is_bfloat16,
                   const float* bias, void* y, int64_t num_rows, int64_t depth,
                   int64_t num_outputs, int num_threads) {
  if (!is_bfloat16) {
    linear(static_cast<const float*>(x), x_stride, static_cast<const float*>(packed), bias,
           static_cast<float*>(y), num_rows, depth, num_outputs, num_threads);
    return;
  }
  const uint16_t* rows = static_cast<const uint16_t*>(x);
  const uint16_t* weights = static_cast<const uint16_t*>(packed);
  uint16_t* out = static_cast<uint16_t*>(y);
  if (amx::available()) {
    amx::linear(rows, x_stride, weights, bias, out, num_rows, depth, num_outputs, num_threads);
    return;
  }
  std::vector<float> widened(num_rows * depth);
  for (int64_t m = 0; m < num_rows; ++m)
    for (int64_t k = 0; k < depth; ++k) widened[m * depth + k] = widen(rows[m * x_stride + k]);
  linear(widened.data(), depth, weights, bias, out, num_rows, depth, num_outputs, num_threads);
}

// Ask for large pages under [start, start + num_bytes): reading weights through small ones costs
// a tenth of the bandwidth. The system may refuse, which changes nothing else.
void octavo_advise_huge_pages(void* start, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = 4096, from = (reinterpret_cast<uintptr_t>(start) + page - 1) & ~(page - 1);
  const uintptr_t to = (reinterpret_cast<uintptr_t>(start) + num_bytes) & ~(page - 1);
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)start, (void)num_bytes;
#endif
}
}
