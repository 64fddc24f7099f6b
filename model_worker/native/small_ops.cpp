// What a decoder does beside products and attention: norm, rotation, gate. Each row on its own.
//
// Layout   rows of `width` contiguous elements, float or bfloat16; arithmetic in float, rounded
//          once (twice in the norm, as its weight is applied to a rounded value by transformers).
// Order    a row's sum is sixteen chains over the row, then a fixed tree; the last, partial
//          vector is padded with zeros. Nothing depends on the other rows.
// Bytes    each row is read once and written once.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tile_pool.h"
#include "vectors.h"

namespace {

using namespace octavo;

// Rows are shared out only when there is enough to do to wake a thread for.
constexpr int64_t WORTH_A_THREAD = 1 << 15;  // elements
constexpr int64_t SHARES_PER_THREAD = 4;

inline vf load_some(const float* p, int64_t count) {
  if (count >= LANES) return load(p);
  alignas(64) float padded[LANES] = {};
  std::copy(p, p + count, padded);
  return load(padded);
}

inline vf load_some(const uint16_t* p, int64_t count) {
  if (count >= LANES) return load(p);
  alignas(64) uint16_t padded[LANES] = {};
  std::copy(p, p + count, padded);
  return load(padded);
}

inline void store_some(float* p, vf v, int64_t count) {
  if (count >= LANES) return store(p, v);
  alignas(64) float padded[LANES];
  store(padded, v);
  std::copy(padded, padded + count, p);
}

inline void store_some(uint16_t* p, vf v, int64_t count) {
  if (count >= LANES) return store(p, v);
  alignas(64) float padded[LANES];
  store(padded, v);
  narrow(padded, p, count);
}

// As if the vector had been written as elements of this type and read again.
inline vf rounded(vf v, const float*) { return v; }

inline vf rounded(vf v, const uint16_t*) {
  alignas(64) uint16_t half[LANES];
  store(half, v);
  return load(half);
}

// body(m) of every row, shared out when all their elements are worth it.
template <typename Body>
void each_row(int64_t num_rows, int64_t num_elements, int num_threads, const Body& body) {
  if (num_threads == 1 || num_elements < WORTH_A_THREAD) {
    for (int64_t m = 0; m < num_rows; ++m) body(m);
    return;
  }
  const int64_t num_shares = SHARES_PER_THREAD * num_threads;
  const int64_t share = (num_rows + num_shares - 1) / num_shares;
  TilePool::instance().run_each(num_rows, share, num_threads, body);
}

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* y, int64_t num_rows, int64_t width,
              float epsilon, int num_threads) {
  each_row(num_rows, num_rows * width, num_threads, [=](int64_t m) {
    const T* row = x + m * x_stride;
    vf squares = vf{};
    for (int64_t i = 0; i < width; i += LANES) {
      const vf v = load_some(row + i, width - i);
      squares += v * v;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / float(width) + epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
      const vf v = rounded(load_some(row + i, width - i) * factor, x);
      store_some(y + m * width + i, v * load_some(weight + i, width - i), width - i);
    }
  });
}

// x / (1 + exp(-x)), with no exp of anything positive.
inline vf silu(vf x) {
  const vf small = exp_nonpositive(x > vf{} ? -x : x);
  return (x > vf{} ? x : x * small) / (1.0f + small);
}

template <typename T>
void gate(const T* x, T* y, int64_t num_rows, int64_t width, int num_threads) {
  each_row(num_rows, num_rows * width, num_threads, [=](int64_t m) {
    const T* gates = x + m * 2 * width;
    const T* values = gates + width;
    for (int64_t i = 0; i < width; i += LANES)
      store_some(y + m * width + i,
                 silu(load_some(gates + i, width - i)) * load_some(values + i, width - i),
                 width - i);
  });
}

template <typename T>
void rotate(T* x, int64_t row_stride, int64_t num_rows, int64_t num_heads, int64_t head_dim,
            const T* cosines, const T* sines, int num_threads) {
  const int64_t half = head_dim / 2;
  each_row(num_rows, num_rows * num_heads * head_dim, num_threads, [=](int64_t m) {
    const T* c = cosines + m * head_dim;
    const T* s = sines + m * head_dim;
    for (int64_t head = 0; head < num_heads; ++head) {
      T* low = x + m * row_stride + head * head_dim;
      T* high = low + half;
      for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const vf a = load_some(low + i, left), b = load_some(high + i, left);
        const vf first = a * load_some(c + i, left) - b * load_some(s + i, left);
        const vf second = b * load_some(c + half + i, left) + a * load_some(s + half + i, left);
        store_some(low + i, first, left);
        store_some(high + i, second, left);
      }
    }
  });
}

}  // namespace

extern "C" {

// y = x / sqrt(mean(x^2) + epsilon) * weight. x: [num_rows, width], rows x_stride apart.
void octavo_rms_norm(const void* x, int64_t x_stride, const void* weight, int is_bfloat16, void* y,
                     int64_t num_rows, int64_t width, float epsilon, int num_threads) {
  if (is_bfloat16)
    rms_norm(static_cast<const uint16_t*>(x), x_stride, static_cast<const uint16_t*>(weight),
             static_cast<uint16_t*>(y), num_rows, width, epsilon, num_threads);
  else
    rms_norm(static_cast<const float*>(x), x_stride, static_cast<const float*>(weight),
             static_cast<float*>(y), num_rows, width, epsilon, num_threads);
}

// y = silu(x[:, :width]) * x[:, width:]. x: [num_rows, 2 * width], contiguous.
void octavo_gate(const void* x, int is_bfloat16, void* y, int64_t num_rows, int64_t width,
                 int num_threads) {
  if (is_bfloat16)
    gate(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(y), num_rows, width, num_threads);
  else
    gate(static_cast<const float*>(x), static_cast<float*>(y), num_rows, width, num_threads);
}

// In place on the first num_heads heads of each row; cosines, sines: [num_rows, head_dim].
void octavo_rotate(void* x, int64_t row_stride, int is_bfloat16, int64_t num_rows,
                   int64_t num_heads, int64_t head_dim, const void* cosines, const void* sines,
                   int num_threads) {
  if (is_bfloat16)
    rotate(static_cast<uint16_t*>(x), row_stride, num_rows, num_heads, head_dim,
           static_cast<const uint16_t*>(cosines), static_cast<const uint16_t*>(sines),
           num_threads);
  else
    rotate(static_cast<float*>(x), row_stride, num_rows, num_heads, head_dim,
           static_cast<const float*>(cosines), static_cast<const float*>(sines), num_threads);
}

// cosines[m][i] = scale * cos(positions[m] * frequencies[i % half]), likewise sines; float.
void octavo_rotations(const int64_t* positions, int64_t num_rows, const float* frequencies,
                      int64_t half, float scale, float* cosines, float* sines) {
  for (int64_t m = 0; m < num_rows; ++m)
    for (int64_t i = 0; i < half; ++i) {
      const float angle = float(positions[m]) * frequencies[i];
      const int64_t at = m * 2 * half + i;
      cosines[at] = cosines[at + half] = float(std::cos(double(angle))) * scale;
      sines[at] = sines[at + half] = float(std::sin(double(angle))) * scale;
    }
}
}
