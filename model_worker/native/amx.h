// bfloat16 products on Intel's AMX tiles, where the processor has them and the system lets us.
//
// Layout   W packed: [ceil(N / 32)][ceil(K / 32)][2][16 pairs of k][16 outputs][2 of the pair]:
//          what two tile registers take, 2 KiB in one line.
// Order    each output is one chain of TDPBF16PS over blocks of 32 k's, in order. A tile's rows
//          do not touch one another, so neither M nor the place in a tile changes a bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tile_pool.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo::amx {

#if defined(__AMX_BF16__) && defined(__linux__)

constexpr int BLOCK = 32;       // k's in a tile, and outputs in two
constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 1024;
constexpr int B_ELEMENTS = BLOCK * BLOCK;
constexpr int AHEAD = 8192;  // bytes of W to prefetch ahead

// The system keeps the tiles' state out of a process until it asks.
inline bool available() {
  static const bool granted = [] {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }();
  return granted;
}

inline int64_t blocks(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

inline int64_t packed_elements(int64_t num_outputs, int64_t depth) {
  return blocks(num_outputs) * blocks(depth) * B_ELEMENTS;
}

inline void pack(const uint16_t* weight, uint16_t* packed, int64_t num_outputs, int64_t depth,
                 int num_threads) {
  TilePool::instance().run_each(blocks(num_outputs), 1, num_threads, [=](int64_t nb) {
    uint16_t* target = packed + nb * blocks(depth) * B_ELEMENTS;
    for (int64_t kb = 0; kb < blocks(depth); ++kb)
      for (int half = 0; half < 2; ++half)
        for (int pair = 0; pair < TILE_ROWS; ++pair)
          for (int lane = 0; lane < TILE_ROWS; ++lane)
            for (int i = 0; i < 2; ++i) {
              const int64_t n = nb * BLOCK + half * TILE_ROWS + lane, k = kb * BLOCK + pair * 2 + i;
              *target++ = n < num_outputs && k < depth ? weight[n * depth + k] : 0;
            }
  });
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig() {
    for (int tile = 0; tile < 8; ++tile) row_bytes[tile] = 64, rows[tile] = TILE_ROWS;
  }
};

// Tiles 0-3 are sums (rows 0-15 and 16-31 by outputs 0-15 and 16-31), 4-5 of x, 6-7 of W. TWO:
// there are more than 16 rows. FIRST: W is not in the cache yet.
template <bool TWO, bool FIRST>
inline void multiply(const uint16_t* x, int64_t x_bytes, const uint16_t* w, int64_t num_blocks,
                     float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* low = reinterpret_cast<const char*>(x);
  const char* high = low + TILE_ROWS * x_bytes;
  const char* weights = reinterpret_cast<const char*>(w);
  for (int64_t kb = 0; kb < num_blocks; ++kb) {
    if (FIRST)
      for (int line = 0; line < 2 * TILE_BYTES; line += 64)
        __builtin_prefetch(weights + AHEAD + line, 0, 2);
    _tile_loadd(6, weights, 64);
    _tile_loadd(7, weights + TILE_BYTES, 64);
    _tile_loadd(4, low, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, high, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    low += 64, high += 64, weights += 2 * TILE_BYTES;
  }
  _tile_stored(0, sums, BLOCK * 4);
  _tile_stored(1, sums + TILE_ROWS, BLOCK * 4);
  if (TWO) {
    _tile_stored(2, sums + TILE_ROWS * BLOCK, BLOCK * 4);
    _tile_stored(3, sums + TILE_ROWS * BLOCK + TILE_ROWS, BLOCK * 4);
  }
}

inline void linear(const uint16_t* x, int64_t x_stride, const uint16_t* packed, const float* bias,
                   uint16_t* y, int64_t num_rows, int64_t depth, int64_t num_outputs,
                   int num_threads) {
  // Whole tiles of x, zeros where there is none.
  const int64_t width = blocks(depth) * BLOCK;
  const int64_t height = (num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
  std::vector<uint16_t> padded(height * width);
  for (int64_t m = 0; m < num_rows; ++m)
    std::memcpy(&padded[m * width], x + m * x_stride, depth * sizeof(uint16_t));
  const int64_t num_shares = (height + ROWS_PER_TILE - 1) / ROWS_PER_TILE;
  const uint16_t* const rows = padded.data();
  TilePool::instance().run(blocks(num_outputs) * num_shares, num_threads, [=](Tiles& tiles) {
    const TileConfig config;
    // GCC 12 believes that its intrinsic reads eight bytes.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    alignas(64) float sums[BLOCK * BLOCK];
    while (tiles.next()) {
      const int64_t nb = tiles.tile() / num_shares, share = tiles.tile() % num_shares;
      const uint16_t* w = packed + nb * blocks(depth) * B_ELEMENTS;
      const int64_t count = std::min<int64_t>(BLOCK, num_outputs - nb * BLOCK);
      const int64_t first = share * ROWS_PER_TILE, last = std::min(first + ROWS_PER_TILE, height);
      for (int64_t m = first; m < last; m += BLOCK) {
        const bool two = height - m > TILE_ROWS, cached = m > first;
        const auto kernel = two ? (cached ? multiply<true, false> : multiply<true, true>)
                                : (cached ? multiply<false, false> : multiply<false, true>);
        kernel(rows + m * width, width * 2, w, blocks(depth), sums);
        for (int64_t row = m; row < std::min<int64_t>(m + BLOCK, num_rows); ++row) {
          float* sum = sums + (row - m) * BLOCK;
          if (bias)
            for (int64_t n = 0; n < count; ++n) sum[n] += bias[nb * BLOCK + n];
          narrow(sum, y + row * num_outputs + nb * BLOCK, count);
        }
      }
    }
    _tile_release();
  });
}

#else

inline bool available() { return false; }
inline int64_t packed_elements(int64_t, int64_t) { return 0; }
inline void pack(const uint16_t*, uint16_t*, int64_t, int64_t, int) {}
inline void linear(const uint16_t*, int64_t, const uint16_t*, const float*, uint16_t*, int64_t,
                   int64_t, int64_t, int) {}

#endif

}  // namespace octavo::amx
