// Fused block copy (Kwon et al., 2023, §5.1): every copy-on-write pair of a step, in the keys and
// values of every layer, in one launch. With pools in pinned host memory on one side it swaps.
//
//   destination_pools[tensor][destination[pair]] = source_pools[tensor][source[pair]]
//
// Layout  a pool is [block, ...], block_bytes[tensor] contiguous bytes each, 16-byte aligned.
// Grid    (pair, tensor, slice): the slices of a block go round in steps of UNROLL * 16 bytes a
//         thread.
// Bytes   2 * block_bytes for each pair and tensor.
//
// The pairs run in any order: no destination may be given twice, none may also be a source.

#include "device.cuh"

constexpr int THREADS = 128;
constexpr int UNROLL = 4;  // loads in flight of a thread

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_blocks(const uint4* const* source_pools, uint4* const* destination_pools,
                const int64* block_bytes, const int* source, const int* destination) {
  const int64 num_chunks = block_bytes[blockIdx.y] / 16;
  const uint4* from = source_pools[blockIdx.y] + source[blockIdx.x] * num_chunks;
  uint4* to = destination_pools[blockIdx.y] + destination[blockIdx.x] * num_chunks;
  constexpr int STEP = THREADS * UNROLL;
  const int64 stride = static_cast<int64>(gridDim.z) * STEP;
  for (int64 begin = static_cast<int64>(blockIdx.z) * STEP; begin < num_chunks; begin += stride) {
    uint4 held[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64 at = begin + i * THREADS + threadIdx.x;
      if (at < num_chunks) held[i] = from[at];
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64 at = begin + i * THREADS + threadIdx.x;
      if (at < num_chunks) to[at] = held[i];
    }
  }
}

HOST_ENTRY(copy_blocks)
