// Fused reshape + block write (Kwon et al., 2023, §5.1): the keys and values a step made go to
// their slots.
//
//   keys[block, kv_head, slot] = key[token, kv_head], block * block_size + slot = slot_mapping[token]
//
// Layout  key, value: [token, kv_head, row], rows contiguous; keys, values: [block, kv_head, slot, row].
//         All strides are in bytes, 64 bits wide; a row is row_chunks * 16 bytes, 16-byte aligned.
// Grid    one thread block per token.
// Bytes   keys and values of a step, once in and once out.
//
// Rows are copied as they are, so there is one variant for every type and head size.

#include "device.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
    write_kv(const unsigned char* key, const unsigned char* value, unsigned char* keys,
             unsigned char* values, const int64* slot_mapping, int64 key_token_stride,
             int64 key_head_stride, int64 value_token_stride, int64 value_head_stride,
             int64 block_stride, int64 head_stride, int num_kv_heads, int row_chunks,
             int block_size) {
  const int64 token = blockIdx.x;
  const int64 block = slot_mapping[token] / block_size;
  const int64 slot = slot_mapping[token] % block_size;
  const int64 begin = block * block_stride + slot * row_chunks * 16;
  for (int i = threadIdx.x; i < num_kv_heads * row_chunks; i += THREADS) {
    const int64 head = i / row_chunks, at = i % row_chunks * 16;
    const int64 to = begin + head * head_stride + at;
    *reinterpret_cast<uint4*>(keys + to) = *reinterpret_cast<const uint4*>(
        key + token * key_token_stride + head * key_head_stride + at);
    *reinterpret_cast<uint4*>(values + to) = *reinterpret_cast<const uint4*>(
        value + token * value_token_stride + head * value_head_stride + at);
  }
}

HOST_ENTRY(write_kv)
