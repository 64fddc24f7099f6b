// Paged attention on a CPU: reads each KV block where it lies, once, for all the query heads
// that share it.
//
// Layout   keys, values: [num_blocks, num_kv_heads, block_size, head_dim], float or bfloat16.
//          query: [num_tokens, num_heads, head_dim], float, rows of head_dim contiguous.
//          out:   the same shape, float, contiguous.
// Work     one item per (sequence, KV head, partition of the context, tile of query rows).
//          A partition is PARTITION tokens from a fixed position of the context on.
// Order    every query row is reduced partition by partition, and inside one by position, in
//          an order that depends on nothing but the row's own context: not on the batch, the
//          chunking, the block size or the number of threads. So the decode and the prefill of
//          one position give the same bits.
// Bytes    a decode row of length L reads 2 * L * head_dim * sizeof(KV) per KV head.
//
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

using namespace octavo;

constexpr int PARTITION = 256;  // tokens; two of K and V of one head fit an L2 cache well
constexpr int ROW_TILE = 16;    // query rows of a prefill chunk that one item takes
constexpr int HEADS_AT_ONCE = 4;  // query heads whose accumulators fit the registers

// A fixed tree: lane i with i + 8, then + 4, + 2, + 1.
inline float sum(vf v) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// exp for x <= 0, to about 1 ulp: 2^k * p(r), |r| <= ln 2 / 2. Below -87 it is 0.
inline vf exp_nonpositive(vf x) {
  const vf too_small = splat(-87.0f);
  vf clamped = x > too_small ? x : too_small;
  vf scaled = clamped * 1.44269504088896341f;
  vi k = __builtin_convertvector(scaled - 0.5f, vi);  // towards zero of a value <= 0: rounds
  vf kf = __builtin_convertvector(k, vf);
  vf r = clamped - kf * 0.693359375f + kf * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vi power = (k + 127) << 23;
  const vf result = p * reinterpret_cast<vf>(power);
  return x > too_small ? result : vf{};
}

struct Problem {
  const void* keys;
  const void* values;
  const float* query;
  float* out;
  const int32_t* block_tables;  // [num_sequences, table_stride]
  const int32_t* query_starts;  // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  int64_t table_stride;
  int64_t block_stride;  // elements between blocks
  int64_t head_stride;   // elements between the KV heads of a block
  int64_t query_token_stride;
  int64_t query_head_stride;
  int32_t num_sequences;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t sliding_window;  // 0: none
  float scaling;
  float softcap;  // 0: none
  int32_t num_threads;
};

// Scores and weighted sum of HEADS query heads of one row over tokens [first, last) of one
// partition, first and last relative to the context. Leaves max, sum and weighted values.
template <int VECTORS, int HEADS, typename KV>
__attribute__((noinline)) void reduce_row(const Problem& p, const int32_t* table, int kv_head,
                                          const float* query, int first, int last, float* maxima,
                                          float* sums, float* accumulators) {
  const KV* keys = static_cast<const KV*>(p.keys) + kv_head * p.head_stride;
  const KV* values = static_cast<const KV*>(p.values) + kv_head * p.head_stride;
  constexpr int DIM = VECTORS * LANES;
  alignas(64) float scores[HEADS][PARTITION];
  const int count = last - first;
  const int padded = (count + LANES - 1) / LANES * LANES;

  vf q[HEADS][VECTORS];
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) q[h][v] = load(query + h * p.query_head_stride + v * LANES) * p.scaling;

  for (int at = first; at < last;) {
    const int offset = at % p.block_size;
    const int run = std::min(p.block_size - offset, last - at);
    const KV* k = keys + table[at / p.block_size] * p.block_stride + int64_t(offset) * DIM;
    // The next block lies anywhere: no hardware prefetcher can guess it.
    const KV* next = at + run < last
                         ? keys + table[(at + run) / p.block_size] * p.block_stride
                         : values + table[first / p.block_size] * p.block_stride;
    for (int slot = 0; slot < run; ++slot, k += DIM, next += DIM) {
      for (int line = 0; line < DIM * int(sizeof(KV)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(next) + line);
      vf dot[HEADS];
#pragma GCC unroll 16
      for (int h = 0; h < HEADS; ++h) dot[h] = vf{};
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v) {
        const vf kv = load(k + v * LANES);
#pragma GCC unroll 16
        for (int h = 0; h < HEADS; ++h) dot[h] += q[h][v] * kv;
      }
#pragma GCC unroll 16
      for (int h = 0; h < HEADS; ++h) scores[h][at - first + slot] = sum(dot[h]);
    }
    at += run;
  }

#pragma GCC unroll 16
  for (int h = 0; h < HEADS; ++h) {
    for (int i = count; i < padded; ++i) scores[h][i] = -INFINITY;
    if (p.softcap > 0)
      for (int i = 0; i < count; ++i) scores[h][i] = p.softcap * std::tanh(scores[h][i] / p.softcap);
    vf high = splat(-INFINITY);
    for (int i = 0; i < padded; i += LANES) {
      const vf s = load(scores[h] + i);
      high = s > high ? s : high;
    }
    float maximum = high[0];
    for (int lane = 1; lane < LANES; ++lane) maximum = std::max(maximum, high[lane]);
    vf total = vf{};
    for (int i = 0; i < padded; i += LANES) {
      const vf w = exp_nonpositive(load(scores[h] + i) - maximum);
      store(scores[h] + i, w);
      total += w;
    }
    maxima[h] = maximum;
    sums[h] = sum(total);
  }

  vf acc[HEADS][VECTORS];
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) acc[h][v] = vf{};
  for (int at = first; at < last;) {
    const int offset = at % p.block_size;
    const int run = std::min(p.block_size - offset, last - at);
    const KV* val = values + table[at / p.block_size] * p.block_stride + int64_t(offset) * DIM;
    const KV* next = at + run < last ? values + table[(at + run) / p.block_size] * p.block_stride
                                     : val;
    for (int slot = 0; slot < run; ++slot, val += DIM, next += DIM) {
      for (int line = 0; line < DIM * int(sizeof(KV)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(next) + line);
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v) {
        const vf vv = load(val + v * LANES);
#pragma GCC unroll 16
        for (int h = 0; h < HEADS; ++h) acc[h][v] += scores[h][at - first + slot] * vv;
      }
    }
    at += run;
  }
#pragma GCC unroll 16
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) store(accumulators + h * DIM + v * LANES, acc[h][v]);
}

// One partition's share of a (row, head).
struct Item {
  int32_t sequence;
  int32_t kv_head;
  int32_t partition;
  int32_t first_row;  // of the sequence's rows in this batch
  int32_t num_rows;
};

// Where the partials of a row lie: partition_start[row] + partition, then by head.
struct Partials {
  std::vector<int64_t> start;  // [num_tokens + 1]
  std::vector<float> maxima, sums, accumulators;
};

struct Window {
  int first, last;  // keys that a row sees
};

inline Window visible(const Problem& p, int position) {
  const int first = p.sliding_window > 0 ? std::max(0, position + 1 - p.sliding_window) : 0;
  return {first, position + 1};
}

inline int row_position(const Problem& p, int sequence, int row) {
  const int num_rows = p.query_starts[sequence + 1] - p.query_starts[sequence];
  return p.context_lens[sequence] - num_rows + row;
}

template <int VECTORS, typename KV>
void run_item(const Problem& p, const Item& item, Partials& partials) {
  constexpr int DIM = VECTORS * LANES;
  const int group = p.num_heads / p.num_kv_heads;
  const int32_t* table = p.block_tables + item.sequence * p.table_stride;
  for (int row = item.first_row; row < item.first_row + item.num_rows; ++row) {
    const Window window = visible(p, row_position(p, item.sequence, row));
    const int first = std::max(window.first, item.partition * PARTITION);
    const int last = std::min(window.last, (item.partition + 1) * PARTITION);
    if (first >= last) continue;
    const int64_t token = p.query_starts[item.sequence] + row;
    const int64_t part = partials.start[token] + item.partition - window.first / PARTITION;
    for (int h = 0; h < group; h += HEADS_AT_ONCE) {
      const int head = item.kv_head * group + h;
      const float* query =
          p.query + token * p.query_token_stride + head * p.query_head_stride;
      const int64_t slot = part * p.num_heads + head;
      float* m = &partials.maxima[slot];
      float* s = &partials.sums[slot];
      float* a = &partials.accumulators[slot * DIM];
      switch (std::min(HEADS_AT_ONCE, group - h)) {
        case 1:
          reduce_row<VECTORS, 1, KV>(p, table, item.kv_head, query, first, last, m, s, a);
          break;
        case 2:
          reduce_row<VECTORS, 2, KV>(p, table, item.kv_head, query, first, last, m, s, a);
          break;
        case 3:
          reduce_row<VECTORS, 3, KV>(p, table, item.kv_head, query, first, last, m, s, a);
          break;
        default:
          reduce_row<VECTORS, 4, KV>(p, table, item.kv_head, query, first, last, m, s, a);
      }
    }
  }
}

// The partials of one row, in the order of its context.
void merge_row(const Problem& p, const Partials& partials, int64_t token) {
  const int64_t first = partials.start[token], last = partials.start[token + 1];
  for (int head = 0; head < p.num_heads; ++head) {
    float maximum = -INFINITY;
    for (int64_t part = first; part < last; ++part)
      maximum = std::max(maximum, partials.maxima[part * p.num_heads + head]);
    float* out = p.out + (token * p.num_heads + head) * p.head_dim;
    float total = 0;
    std::fill(out, out + p.head_dim, 0.0f);
    for (int64_t part = first; part < last; ++part) {
      const int64_t slot = part * p.num_heads + head;
      const float weight = std::exp(partials.maxima[slot] - maximum);
      total += weight * partials.sums[slot];
      const float* a = &partials.accumulators[slot * p.head_dim];
      for (int d = 0; d < p.head_dim; ++d) out[d] += weight * a[d];
    }
    for (int d = 0; d < p.head_dim; ++d) out[d] /= total;
  }
}

template <int VECTORS, typename KV>
void attend(const Problem& p) {
  std::vector<Item> items;
  Partials partials;
  const int64_t num_tokens = p.query_starts[p.num_sequences];
  partials.start.resize(num_tokens + 1);
  int64_t num_partials = 0;
  for (int sequence = 0; sequence < p.num_sequences; ++sequence) {
    const int num_rows = p.query_starts[sequence + 1] - p.query_starts[sequence];
    for (int row = 0; row < num_rows; ++row) {
      const Window window = visible(p, row_position(p, sequence, row));
      partials.start[p.query_starts[sequence] + row] = num_partials;
      num_partials += (window.last - 1) / PARTITION - window.first / PARTITION + 1;
    }
    for (int row = 0; row < num_rows; row += ROW_TILE) {
      const int rows = std::min(ROW_TILE, num_rows - row);
      const int from = visible(p, row_position(p, sequence, row)).first / PARTITION;
      const int to = row_position(p, sequence, row + rows - 1) / PARTITION;
      for (int partition = from; partition <= to; ++partition)
        for (int head = 0; head < p.num_kv_heads; ++head)
          items.push_back({sequence, head, partition, row, rows});
    }
  }
  partials.start[num_tokens] = num_partials;
  partials.maxima.resize(num_partials * p.num_heads);
  partials.sums.resize(num_partials * p.num_heads);
  partials.accumulators.resize(num_partials * p.num_heads * p.head_dim);
#pragma omp parallel num_threads(p.num_threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < int64_t(items.size()); ++i) run_item<VECTORS, KV>(p, items[i], partials);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < num_tokens; ++token) merge_row(p, partials, token);
  }
}

template <typename KV>
int dispatch(const Problem& p) {
  switch (p.head_dim) {
    case 64: attend<4, KV>(p); return 0;
    case 80: attend<5, KV>(p); return 0;
    case 96: attend<6, KV>(p); return 0;
    case 112: attend<7, KV>(p); return 0;
    case 128: attend<8, KV>(p); return 0;
    case 160: attend<10, KV>(p); return 0;
    case 192: attend<12, KV>(p); return 0;
    case 256: attend<16, KV>(p); return 0;
  }
  return 1;
}

}  // namespace

extern "C" {

// 0, or 1 when there is no variant for the head size. kv_is_bfloat16: else float.
int octavo_paged_attention(const Problem* problem, int kv_is_bfloat16) {
  return kv_is_bfloat16 ? dispatch<uint16_t>(*problem) : dispatch<float>(*problem);
}

// Write the keys or the values of num_tokens tokens into their slots; strides in bytes, one
// head's row being contiguous on both sides.
void octavo_write_slots(const char* source, int64_t token_stride, int64_t head_stride, char* pool,
                        int64_t pool_block_stride, int64_t pool_head_stride, int64_t row_bytes,
                        int32_t block_size, const int64_t* slot_mapping, int32_t num_tokens,
                        int32_t num_kv_heads) {
  for (int32_t token = 0; token < num_tokens; ++token) {
    const int64_t slot = slot_mapping[token];
    char* target = pool + slot / block_size * pool_block_stride + slot % block_size * row_bytes;
    for (int32_t head = 0; head < num_kv_heads; ++head)
      std::memcpy(target + head * pool_head_stride,
                  source + token * token_stride + head * head_stride, row_bytes);
  }
}
}
