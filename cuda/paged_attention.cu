// Block read + attention (Kwon et al., 2023, §5.1), for one query row at a time: a decode, or a
// row of a prefill chunk.
//
//   out[row, head] = softmax(cap(scale * query[row, head] . keys)) . values
//
// over the positions first .. length - 1 of the row's sequence, read through its block table.
//
// Layout  keys, values: [block, kv_head, slot, HEAD_DIM] of ELEMENT, a row of HEAD_DIM contiguous
//         and 16-byte aligned; query: [row, head, HEAD_DIM] of ELEMENT; out: the same, contiguous.
//         All strides are in bytes, 64 bits wide: block id times stride passes 2^31.
// Grid    (row, KV head * parts + part, split). A thread block takes HEADS query heads of one KV
//         head together, so their keys and values are read once; `parts` is 1 unless more than 8
//         query heads share a KV head. Splits are runs of `tiles_per_split` tiles, counted from the
//         first tile the row sees, so where they lie depends on nothing but the row.
// Order   by tile, and inside one in a fixed tree: with tiles_per_split fixed, a row has the same
//         bits in any batch, chunking and block size.
// Bytes   2 * (length - first) * HEAD_DIM * sizeof(ELEMENT) for each (row, KV head, part).
//
// A tile is TILE tokens whatever the block size. Its keys and its values arrive by asynchronous
// copies, each in a ring of two buffers: three of the four are on their way while one is read.
// What the row must not see is never read: those slots are filled with zeros, so NaN in an unused
// slot stays where it is. Softmax is online, in base 2, in float.
//
// -D ELEMENT, HEAD_DIM, HEADS (1 .. 8), SHARED_BYTES (checked against what is used).

#include "device.cuh"

constexpr int THREADS = 128;
constexpr int NUM_WARPS = THREADS / WARP;
constexpr float LOG2_E = 1.44269504088896341f;

using Element = ELEMENT;
constexpr int VEC = Element::VEC;
constexpr int CHUNKS = HEAD_DIM / VEC;  // 16-byte pieces of a row
constexpr int TILE = HEAD_DIM * 64 / VEC > 2048 ? 32 : 64;  // at most 32 KiB of keys

// Scores: LANES neighbouring lanes share the dot products of TOKENS tokens.
constexpr int LANES = 8;
constexpr int TOKENS = TILE * LANES / THREADS;
// Weighted sum: a thread has one chunk of the head and every SUBSETS-th token of the tile.
constexpr int SUBSETS = THREADS / CHUNKS;
constexpr int HEADS_PER_WARP = (HEADS + NUM_WARPS - 1) / NUM_WARPS;
constexpr int WEIGHTS_STRIDE = HEADS > 4 ? 8 : HEADS > 2 ? 4 : HEADS;

static_assert(HEAD_DIM % VEC == 0 && CHUNKS <= THREADS && TILE % WARP == 0, "head size");
static_assert(HEADS >= 1 && HEADS <= 8, "query heads of a thread block");

struct Shared {
  uint4 keys[2][TILE * CHUNKS];
  uint4 values[2][TILE * CHUNKS];
  float4 query[HEADS][VEC / 4][CHUNKS];  // by halves of a chunk: lanes read side by side
  float weights[TILE][WEIGHTS_STRIDE];
  float scores[HEADS][TILE];
  float rescale[8];
  float row_max[8];
  float row_sum[8];
  int64 rows[2][TILE];  // bytes from the pool's begin; -1: not to be read
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES");
static_assert(sizeof(float) * SUBSETS * HEADS * HEAD_DIM <=
                  sizeof(Shared::keys) + sizeof(Shared::values),
              "the sums of all subsets take the place of the tiles");

// The part of a sequence one row sees, in tokens and tiles; and one split's share of it.
struct Span {
  int first, length;
  int begin_tile, end_tile;

  __device__ Span(int row_length, int window)
      : first(window > 0 && row_length > window ? row_length - window : 0),
        length(row_length),
        begin_tile(first / TILE),
        end_tile((row_length + TILE - 1) / TILE) {}

  __device__ bool sees(int position) const { return position >= first && position < length; }

  __device__ void take_split(int split, int tiles_per_split) {
    begin_tile += split * tiles_per_split;
    if (end_tile - begin_tile > tiles_per_split) end_tile = begin_tile + tiles_per_split;
  }
};

// Where the KV of one (row, KV head) is.
struct Pool {
  const unsigned char* keys;
  const unsigned char* values;
  const int* table;
  int64 block_stride, head_offset;
  int block_size;

  // One thread per token of the tile works out where its row begins.
  __device__ void find_rows(Shared& shared, const Span& span, int tile) const {
    if (threadIdx.x >= TILE) return;
    const int position = tile * TILE + static_cast<int>(threadIdx.x);
    int64 row = -1;
    if (tile < span.end_tile && span.sees(position)) {
      const int64 block = table[position / block_size];
      const int slot = position % block_size;
      row = block * block_stride + head_offset + slot * (CHUNKS * 16);
    }
    shared.rows[tile & 1][threadIdx.x] = row;
  }

  // Start copying one tile of keys or of values. A group of copies in any case, empty or not:
  // waiting counts groups.
  __device__ void fetch(Shared& shared, const Span& span, int tile, bool keys_wanted) const {
    if (tile < span.end_tile) {
      uint4* to = keys_wanted ? shared.keys[tile & 1] : shared.values[tile & 1];
      const unsigned char* from = keys_wanted ? keys : values;
      for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        const int64 row = shared.rows[tile & 1][i / CHUNKS];
        const bool wanted = row >= 0;
        copy_async_16(to + i, from + (wanted ? row + i % CHUNKS * 16 : 0), wanted);
      }
    }
    commit_copies();
  }
};

// Sum values[t] over LANES neighbouring lanes, for TOKENS of them at once: each step halves the
// values a lane still has. The lane is left with the total of t = part % TOKENS.
__device__ __forceinline__ float sum_over_lanes(float (&values)[TOKENS], int part) {
#pragma unroll
  for (int step = 1; step < TOKENS; step *= 2) {
    const bool upper = part & step;
#pragma unroll
    for (int i = 0; i < TOKENS / 2 / step; ++i) {
      const float sent = upper ? values[2 * i] : values[2 * i + 1];
      const float kept = upper ? values[2 * i + 1] : values[2 * i];
      values[i] = kept + __shfl_xor_sync(ALL_LANES, sent, step);
    }
  }
#pragma unroll
  for (int step = TOKENS; step < LANES; step *= 2)
    values[0] += __shfl_xor_sync(ALL_LANES, values[0], step);
  return values[0];
}

// The scores of a tile, in units of log 2; -infinity where the row does not see.
__device__ __forceinline__ void score_tile(Shared& shared, const Span& span, int tile,
                                           float softcap) {
  const int part = threadIdx.x % LANES;
  const int first_token = threadIdx.x / LANES * TOKENS;
  const uint4* keys = shared.keys[tile & 1] + first_token * CHUNKS;
  float dots[HEADS][TOKENS] = {};
  for (int chunk = part; chunk < CHUNKS; chunk += LANES) {
    float key[TOKENS][VEC];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) Element::widen(keys[t * CHUNKS + chunk], key[t]);
#pragma unroll
    for (int head = 0; head < HEADS; ++head)
#pragma unroll
      for (int four = 0; four < VEC / 4; ++four) {
        const float4 query = shared.query[head][four][chunk];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          dots[head][t] += query.x * key[t][4 * four];
          dots[head][t] += query.y * key[t][4 * four + 1];
          dots[head][t] += query.z * key[t][4 * four + 2];
          dots[head][t] += query.w * key[t][4 * four + 3];
        }
      }
  }
  const int token = first_token + part % TOKENS;
  const bool seen = span.sees(tile * TILE + token);
#pragma unroll
  for (int head = 0; head < HEADS; ++head) {
    float score = sum_over_lanes(dots[head], part);
    if (softcap > 0.0f) score = softcap * tanhf(score / softcap) * LOG2_E;
    // LANES / TOKENS lanes have the same total; they take turns at writing.
    if (part / TOKENS == head % (LANES / TOKENS))
      shared.scores[head][token] = seen ? score : float_of_bits(0xff800000u);
  }
}

// One warp per head: weights relative to the greatest score so far, and the factor by which what
// was summed under the old one shrinks.
__device__ __forceinline__ void weigh_tile(Shared& shared, float (&row_max)[HEADS_PER_WARP],
                                           float (&row_sum)[HEADS_PER_WARP]) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < HEADS_PER_WARP; ++i) {
    const int head = threadIdx.x / WARP + i * NUM_WARPS;
    if (head >= HEADS) break;
    float score[TILE / WARP];
    float highest = row_max[i];
#pragma unroll
    for (int j = 0; j < TILE / WARP; ++j) {
      score[j] = shared.scores[head][lane + j * WARP];
      highest = fmaxf(highest, score[j]);
    }
    highest = warp_max(highest);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TILE / WARP; ++j) {
      const float weight = exp2f(score[j] - highest);
      shared.weights[lane + j * WARP][head] = weight;
      sum += weight;
    }
    const float shrink = exp2f(row_max[i] - highest);
    row_sum[i] = row_sum[i] * shrink + warp_sum(sum);
    row_max[i] = highest;
    if (lane == 0) shared.rescale[head] = shrink;
  }
}

__device__ __forceinline__ void accumulate_tile(const Shared& shared, int tile,
                                                float (&sums)[HEADS][VEC]) {
  const int chunk = threadIdx.x % CHUNKS;
  const int subset = threadIdx.x / CHUNKS;
  if (subset >= SUBSETS) return;
#pragma unroll
  for (int head = 0; head < HEADS; ++head)
#pragma unroll
    for (int i = 0; i < VEC; ++i) sums[head][i] *= shared.rescale[head];
  for (int token = subset; token < TILE; token += SUBSETS) {
    float value[VEC];
    Element::widen(shared.values[tile & 1][token * CHUNKS + chunk], value);
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
      const float weight = shared.weights[token][head];
#pragma unroll
      for (int i = 0; i < VEC; ++i) sums[head][i] += weight * value[i];
    }
  }
}

// A split leaves, for the merge: stats [row, head, split] of (greatest score, sum of weights) and
// partial_out [row, head, split, HEAD_DIM] of float, not yet divided by the sum.
//
// The 1 in the launch bounds: without it the compiler aims at more thread blocks than shared memory
// has room for, and spills.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_attention(const unsigned char* keys, const unsigned char* values,
                    const unsigned char* query, unsigned char* out, float2* stats,
                    float* partial_out, const int* block_tables, const int* row_sequences,
                    const int* row_lengths, int64 table_stride, int64 block_stride,
                    int64 head_stride, int64 query_row_stride, int64 query_head_stride,
                    int block_size, int num_heads, int group, int parts, int window,
                    int tiles_per_split, float scale, float softcap) {
  DYNAMIC_SHARED(bytes);
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int64 row = blockIdx.x;
  const int kv_head = blockIdx.y / parts;
  const int part = blockIdx.y % parts;
  const int split = blockIdx.z;
  const int num_splits = gridDim.z;

  Span span(row_lengths[row], window);
  span.take_split(split, tiles_per_split);
  if (span.begin_tile >= span.end_tile) return;

  const Pool pool = {keys,         values,
                     block_tables + row_sequences[row] * table_stride,
                     block_stride, kv_head * head_stride,
                     block_size};
  const int first_head = kv_head * group + part * HEADS;
  const int present_heads = group - part * HEADS < HEADS ? group - part * HEADS : HEADS;
  const float query_scale = softcap > 0.0f ? scale : scale * LOG2_E;
  for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
    const int head = i / HEAD_DIM, at = i % HEAD_DIM;
    const unsigned char* from = query + row * query_row_stride +
                                (first_head + head) * query_head_stride + at * (16 / VEC);
    float* four = &shared.query[head][at % VEC / 4][at / VEC].x;
    four[at % 4] = head < present_heads ? Element::load(from) * query_scale : 0.0f;
  }
  pool.find_rows(shared, span, span.begin_tile);
  pool.find_rows(shared, span, span.begin_tile + 1);
  __syncthreads();
  pool.fetch(shared, span, span.begin_tile, true);
  pool.fetch(shared, span, span.begin_tile, false);
  pool.fetch(shared, span, span.begin_tile + 1, true);

  float row_max[HEADS_PER_WARP], row_sum[HEADS_PER_WARP] = {};
#pragma unroll
  for (int i = 0; i < HEADS_PER_WARP; ++i) row_max[i] = float_of_bits(0xff800000u);
  float sums[HEADS][VEC] = {};

  for (int tile = span.begin_tile; tile < span.end_tile; ++tile) {
    wait_for_copies<2>();  // this tile's keys
    __syncthreads();       // everyone's; and everyone is done with the tile before
    pool.fetch(shared, span, tile + 1, false);
    pool.find_rows(shared, span, tile + 2);
    score_tile(shared, span, tile, softcap);
    __syncthreads();  // scores and rows are there, this tile's keys are done with
    pool.fetch(shared, span, tile + 2, true);
    weigh_tile(shared, row_max, row_sum);
    wait_for_copies<3>();  // this tile's values
    __syncthreads();       // everyone's, and the weights
    accumulate_tile(shared, tile, sums);
  }

  if (threadIdx.x % WARP == 0)
#pragma unroll
    for (int i = 0; i < HEADS_PER_WARP; ++i) {
      const int head = threadIdx.x / WARP + i * NUM_WARPS;
      if (head >= HEADS) break;
      shared.row_max[head] = row_max[i];
      shared.row_sum[head] = row_sum[i];
    }
  __syncthreads();  // the last tile is done with: its place is taken by the sums
  float* all_sums = reinterpret_cast<float*>(shared.keys);
  const int chunk = threadIdx.x % CHUNKS, subset = threadIdx.x / CHUNKS;
  if (subset < SUBSETS)
#pragma unroll
    for (int head = 0; head < HEADS; ++head)
#pragma unroll
      for (int i = 0; i < VEC; ++i)
        all_sums[(subset * HEADS + head) * HEAD_DIM + chunk * VEC + i] = sums[head][i];
  __syncthreads();

  for (int i = threadIdx.x; i < present_heads * HEAD_DIM; i += THREADS) {
    const int head = i / HEAD_DIM, at = i % HEAD_DIM;
    float sum = 0.0f;
    for (int s = 0; s < SUBSETS; ++s) sum += all_sums[(s * HEADS + head) * HEAD_DIM + at];
    const int64 place = row * num_heads + first_head + head;
    if (num_splits == 1) {
      Element::store(out + (place * HEAD_DIM + at) * (16 / VEC), sum / shared.row_sum[head]);
    } else {
      partial_out[(place * num_splits + split) * HEAD_DIM + at] = sum;
      if (at == 0)
        stats[place * num_splits + split] =
            make_float2(shared.row_max[head], shared.row_sum[head]);
    }
  }
}

HOST_ENTRY(paged_attention)

// Adds up what the splits of a row left. Grid (row, head); reads (HEAD_DIM + 2) floats a split.
extern "C" __global__ void __launch_bounds__(THREADS)
    merge_splits(unsigned char* out, const float2* stats, const float* partial_out,
                 const int* row_lengths, int max_splits, int window, int tiles_per_split) {
  const int64 place = static_cast<int64>(blockIdx.x) * gridDim.y + blockIdx.y;
  const Span span(row_lengths[blockIdx.x], window);
  const int num_tiles = span.end_tile - span.begin_tile;
  const int num_splits = (num_tiles + tiles_per_split - 1) / tiles_per_split;
  stats += place * max_splits;
  partial_out += place * max_splits * HEAD_DIM;

  float highest = stats[0].x;
  for (int split = 1; split < num_splits; ++split) highest = fmaxf(highest, stats[split].x);
  float total = 0.0f;
  for (int split = 0; split < num_splits; ++split)
    total += stats[split].y * exp2f(stats[split].x - highest);
  for (int at = threadIdx.x; at < HEAD_DIM; at += THREADS) {
    float sum = 0.0f;
    for (int split = 0; split < num_splits; ++split)
      sum += partial_out[split * HEAD_DIM + at] * exp2f(stats[split].x - highest);
    Element::store(out + (place * HEAD_DIM + at) * (16 / VEC), sum / total);
  }
}

HOST_ENTRY(merge_splits)
