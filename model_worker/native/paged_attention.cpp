// Paged attention on a CPU: reads each KV block where it lies, once, for all the query heads
// that share it.
//
// Layout   keys, values: [num_blocks, num_kv_heads, block_size, head_dim], float or bfloat16.
//          key, value: [num_tokens, num_kv_heads, head_dim] of the same type, rows contiguous:
//          what the step adds, written to its slots before anything is read.
//          query: [num_tokens, num_heads, head_dim], float or bfloat16, rows contiguous.
//          out:   the same shape and type, contiguous.
// Work     one item per (sequence, partition of the context, tile of query rows, KV heads). A
//          partition is PARTITION tokens from a fixed position of the context on. An item of one
//          row takes all KV heads when there are items enough for the threads: a block's heads
//          lie side by side, and longer straight reads suit the memory.
// Order    every query row is reduced partition by partition, and inside one by position, in
//          an order that depends on nothing but the row's own context: not on the batch, the
//          chunking, the block size or the number of threads. So the decode and the prefill of
//          one position give the same bits.
// Bytes    a decode row of length L reads 2 * L * head_dim * sizeof(KV) per KV head.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "attention_kernels.h"
#include "tile_pool.h"
#include "vectors.h"

namespace {

using namespace octavo;

constexpr int ROW_TILE = 16;         // query rows of a prefill chunk that one item takes
constexpr int ITEMS_PER_THREAD = 4;  // below that, heads are shared out too
// Rows whose partials are merged in one go.
constexpr int64_t MERGED_ROWS = 4;

struct Problem {
  void* keys;
  void* values;
  const void* key;
  const void* value;
  const void* query;
  void* out;
  const int32_t* block_tables;  // [num_sequences, table_stride]
  const int32_t* query_starts;  // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t table_stride;
  int64_t block_stride;  // elements between blocks
  int64_t head_stride;   // elements between the KV heads of a block
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int32_t num_sequences;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t sliding_window;  // 0: none
  float scaling;
  float softcap;  // 0: none
  int32_t num_threads;
  int32_t kv_is_bfloat16;
  int32_t query_is_bfloat16;
};

struct Item {
  int32_t sequence;
  int32_t partition;
  int32_t first_row;  // of the sequence's rows in this batch
  int32_t num_rows;
  int32_t first_kv_head;
  int32_t num_kv_heads;
};

// The share of each partition in each (row, head): those of a row from start[row] on, in the
// order of its context, heads innermost. Accumulators are arranged.
struct Partials {
  std::vector<int64_t> start;  // [num_tokens + 1]
  std::unique_ptr<float[]> maxima, sums, accumulators;
};

// What one thread needs for one row: [heads, head_dim] and [heads, SCORE_STRIDE].
struct Scratch {
  std::vector<float> query, scores;
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

// One row over the tokens [first, last) of one partition, a run of neighbours at a time.
template <int VECTORS, typename KV>
class Row {
 public:
  Row(const Problem& p, const Item& item, Scratch& scratch)
      : p(p),
        item(item),
        table(p.block_tables + item.sequence * p.table_stride),
        group(p.num_heads / p.num_kv_heads),
        query(scratch.query.data()),
        scores(scratch.scores.data()) {}

  // query_at: where in p.query the row's first head of the item begins.
  void reduce(int64_t query_at, int first, int last, float* maxima, float* sums,
              float* accumulators) {
    const KV* keys = static_cast<const KV*>(p.keys) + item.first_kv_head * p.head_stride;
    const KV* values = static_cast<const KV*>(p.values) + item.first_kv_head * p.head_stride;
    const int num_heads = item.num_kv_heads * group;
    scale(query_at, num_heads);
    for_runs(keys, first, last, at(values, first),
             [&](int offset, int count, const KV* run, const KV* next) {
               each_group([&](auto heads, int kv_head, int head) {
                 const int64_t there = kv_head * p.head_stride;
                 score_run<VECTORS, heads.value>(query + head * DIM, run + there, next + there,
                                                 count, scores + head * SCORE_STRIDE + offset);
               });
             });
    for (int head = 0; head < num_heads; ++head)
      soften(scores + head * SCORE_STRIDE, last - first, p.softcap, maxima + head, sums + head);
    std::fill(accumulators, accumulators + num_heads * DIM, 0.0f);
    for_runs(values, first, last, at(values, last - 1),
             [&](int offset, int count, const KV* run, const KV* next) {
               each_group([&](auto heads, int kv_head, int head) {
                 const int64_t there = kv_head * p.head_stride;
                 weigh_run<VECTORS, heads.value>(scores + head * SCORE_STRIDE + offset,
                                                 run + there, next + there, count,
                                                 accumulators + head * DIM);
               });
             });
  }

 private:
  static constexpr int DIM = VECTORS * LANES;

  const KV* at(const KV* pool, int position) const {
    return pool + table[position / p.block_size] * p.block_stride +
           int64_t(position % p.block_size) * DIM;
  }

  // Calls work(offset in [first, last), count, first row, first row of the next run).
  template <typename Work>
  void for_runs(const KV* pool, int first, int last, const KV* after, Work work) const {
    for (int start = first; start < last;) {
      const int count = std::min(p.block_size - start % p.block_size, last - start);
      const KV* next = start + count < last ? at(pool, start + count) : after;
      work(start - first, count, at(pool, start), next);
      start += count;
    }
  }

  // Calls work(number of heads as a type, KV head, first query head), both within the item.
  template <typename Work>
  void each_group(Work work) const {
    constexpr int MOST = heads_at_once(VECTORS);
    for (int kv_head = 0; kv_head < item.num_kv_heads; ++kv_head)
      for (int h = 0; h < group; h += MOST) {
        const int head = kv_head * group + h;
        switch (std::min(MOST, group - h)) {
          case 1: work(std::integral_constant<int, 1>(), kv_head, head); break;
          case 2: work(std::integral_constant<int, std::min(2, MOST)>(), kv_head, head); break;
          case 3: work(std::integral_constant<int, std::min(3, MOST)>(), kv_head, head); break;
          default: work(std::integral_constant<int, MOST>(), kv_head, head);
        }
      }
  }

  // The item's heads of the query that begins `from` elements into p.query.
  void scale(int64_t from, int num_heads) {
    for (int head = 0; head < num_heads; ++head) {
      const int64_t start = from + head * p.query_head_stride;
      vf row[VECTORS];
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v)
        row[v] = p.query_is_bfloat16
                     ? load(static_cast<const uint16_t*>(p.query) + start + v * LANES)
                     : load(static_cast<const float*>(p.query) + start + v * LANES);
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v) row[v] *= p.scaling;
      arrange<KV>(row);
      store_row(query + head * DIM, row);
    }
  }

  const Problem& p;
  const Item& item;
  const int32_t* table;
  const int group;
  float* query;
  float* scores;
};

template <int VECTORS, typename KV>
void run_item(const Problem& p, const Item& item, Partials& partials, Scratch& scratch) {
  const int first_head = item.first_kv_head * (p.num_heads / p.num_kv_heads);
  for (int row = item.first_row; row < item.first_row + item.num_rows; ++row) {
    const Window window = visible(p, row_position(p, item.sequence, row));
    const int first = std::max(window.first, item.partition * PARTITION);
    const int last = std::min(window.last, (item.partition + 1) * PARTITION);
    if (first >= last) continue;
    const int64_t token = p.query_starts[item.sequence] + row;
    const int64_t part = partials.start[token] + item.partition - window.first / PARTITION;
    const int64_t slot = part * p.num_heads + first_head;
    const int64_t query_at = token * p.query_token_stride + first_head * p.query_head_stride;
    Row<VECTORS, KV>(p, item, scratch)
        .reduce(query_at, first, last, &partials.maxima[slot], &partials.sums[slot],
                &partials.accumulators[slot * p.head_dim]);
  }
}

// The partials of one row, in the order of its context.
template <int VECTORS, typename KV>
void merge_row(const Problem& p, const Partials& partials, int64_t token) {
  const int64_t first = partials.start[token], last = partials.start[token + 1];
  for (int head = 0; head < p.num_heads; ++head) {
    float maximum = -INFINITY;
    for (int64_t part = first; part < last; ++part)
      maximum = std::max(maximum, partials.maxima[part * p.num_heads + head]);
    vf out[VECTORS] = {};
    float total = 0;
    for (int64_t part = first; part < last; ++part) {
      const int64_t slot = part * p.num_heads + head;
      const float weight = std::exp(partials.maxima[slot] - maximum);
      total += weight * partials.sums[slot];
      vf share[VECTORS];
      load_row(&partials.accumulators[slot * p.head_dim], share);
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v) out[v] += weight * share[v];
    }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) out[v] /= total;
    alignas(64) float plain[VECTORS * LANES];
    store_arranged<KV>(plain, out);
    const int64_t at = (token * p.num_heads + head) * p.head_dim;
    if (p.query_is_bfloat16)
      narrow(plain, static_cast<uint16_t*>(p.out) + at, p.head_dim);
    else
      narrow(plain, static_cast<float*>(p.out) + at, p.head_dim);
  }
}

// Splits a sequence's rows into items of all KV heads.
void plan_items(const Problem& p, int sequence, std::vector<Item>& items) {
  const int num_rows = p.query_starts[sequence + 1] - p.query_starts[sequence];
  for (int row = 0; row < num_rows; row += ROW_TILE) {
    const int rows = std::min(ROW_TILE, num_rows - row);
    const int from = visible(p, row_position(p, sequence, row)).first / PARTITION;
    const int to = row_position(p, sequence, row + rows - 1) / PARTITION;
    for (int partition = from; partition <= to; ++partition)
      items.push_back({sequence, partition, row, rows, 0, p.num_kv_heads});
  }
}

// A tile of several rows reads a head's partition again and again, which has to stay cached.
std::vector<Item> split_heads(const Problem& p, const std::vector<Item>& items) {
  const bool few = int64_t(items.size()) < int64_t(ITEMS_PER_THREAD) * p.num_threads;
  std::vector<Item> split;
  for (Item item : items) {
    if (!few && item.num_rows == 1) {
      split.push_back(item);
      continue;
    }
    item.num_kv_heads = 1;
    for (item.first_kv_head = 0; item.first_kv_head < p.num_kv_heads; ++item.first_kv_head)
      split.push_back(item);
  }
  return split;
}

template <int VECTORS, typename KV>
void attend(const Problem& p) {
  std::vector<Item> items;
  Partials partials;
  const int64_t num_tokens = p.query_starts[p.num_sequences];
  partials.start.resize(num_tokens + 1);
  int64_t num_partials = 0;
  for (int sequence = 0; sequence < p.num_sequences; ++sequence) {
    for (int64_t token = p.query_starts[sequence]; token < p.query_starts[sequence + 1]; ++token) {
      const Window window =
          visible(p, row_position(p, sequence, int(token - p.query_starts[sequence])));
      partials.start[token] = num_partials;
      num_partials += (window.last - 1) / PARTITION - window.first / PARTITION + 1;
    }
    plan_items(p, sequence, items);
  }
  items = split_heads(p, items);
  partials.start[num_tokens] = num_partials;
  // Written whole before they are read, so they need no zeros.
  partials.maxima.reset(new float[num_partials * p.num_heads]);
  partials.sums.reset(new float[num_partials * p.num_heads]);
  partials.accumulators.reset(new float[num_partials * p.num_heads * p.head_dim]);
  TilePool& pool = TilePool::instance();
  pool.run(items.size(), p.num_threads, [&](Tiles& tiles) {
    Scratch scratch;
    scratch.query.resize(p.num_heads * p.head_dim);
    scratch.scores.resize(p.num_heads * SCORE_STRIDE);
    while (tiles.next()) run_item<VECTORS, KV>(p, items[tiles.tile()], partials, scratch);
  });
  pool.run_each(num_tokens, MERGED_ROWS, p.num_threads,
                [&](int64_t token) { merge_row<VECTORS, KV>(p, partials, token); });
}

template <typename KV>
int dispatch(const Problem& p) {
  switch (p.head_dim) {
    case 16: attend<1, KV>(p); return 0;
    case 32: attend<2, KV>(p); return 0;
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

// The keys or the values of the step's tokens into their slots.
template <typename KV>
void write_slots(const Problem& p, const void* source, int64_t token_stride, int64_t head_stride,
                 void* pool) {
  const int64_t num_tokens = p.query_starts[p.num_sequences];
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t slot = p.slot_mapping[token];
    KV* target = static_cast<KV*>(pool) + slot / p.block_size * p.block_stride +
                 slot % p.block_size * p.head_dim;
    const KV* from = static_cast<const KV*>(source) + token * token_stride;
    for (int32_t head = 0; head < p.num_kv_heads; ++head)
      std::memcpy(target + head * p.head_stride, from + head * head_stride,
                  p.head_dim * sizeof(KV));
  }
}

template <typename KV>
int write_and_attend(const Problem& p) {
  write_slots<KV>(p, p.key, p.key_token_stride, p.key_head_stride, p.keys);
  write_slots<KV>(p, p.value, p.value_token_stride, p.value_head_stride, p.values);
  return dispatch<KV>(p);
}

}  // namespace

// 0, or 1 when there is no variant for the head size.
extern "C" int octavo_paged_attention(const Problem* problem) {
  return problem->kv_is_bfloat16 ? write_and_attend<uint16_t>(*problem)
                                 : write_and_attend<float>(*problem);
}
