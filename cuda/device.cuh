// What the kernels share: the types of KV elements, asynchronous copies, warp reductions.
//
// Compiled by NVRTC for a GPU without any header of CUDA's, or by a C++ compiler behind
// host/emulator.h, which brings its own version of the part between #ifndef and #endif.

#ifndef OCTAVO_HOST

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define HOST_ENTRY(kernel)

__device__ __forceinline__ float float_of_bits(unsigned bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}

__device__ __forceinline__ unsigned short half_of_float(float wide) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
  return bits;
}

__device__ __forceinline__ unsigned short bfloat16_of_float(float wide) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
  return bits;
}

// 16 bytes from global to shared memory, past the registers and L1; zeros when not `wanted`,
// and `source` is not read then. There once the thread has waited for the group it is in.
__device__ __forceinline__ void copy_async_16(void* shared, const void* source, bool wanted) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int num_bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
               "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until all but this thread's newest NEWER groups of copies are there.
template <int NEWER>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NEWER) : "memory");
}

#endif  // OCTAVO_HOST

typedef long long int64;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// KV elements. VEC of them make one 16-byte access.
struct float32 {
  static constexpr int VEC = 4;
  static __device__ __forceinline__ void widen(uint4 raw, float (&out)[VEC]) {
    out[0] = float_of_bits(raw.x);
    out[1] = float_of_bits(raw.y);
    out[2] = float_of_bits(raw.z);
    out[3] = float_of_bits(raw.w);
  }
  static __device__ __forceinline__ float load(const unsigned char* address) {
    return *reinterpret_cast<const float*>(address);
  }
  static __device__ __forceinline__ void store(unsigned char* address, float value) {
    *reinterpret_cast<float*>(address) = value;
  }
};

struct float16 {
  static constexpr int VEC = 8;
  static __device__ __forceinline__ void widen(uint4 raw, float (&out)[VEC]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = float_of_half(static_cast<unsigned short>(words[i]));
      out[2 * i + 1] = float_of_half(static_cast<unsigned short>(words[i] >> 16));
    }
  }
  static __device__ __forceinline__ float load(const unsigned char* address) {
    return float_of_half(*reinterpret_cast<const unsigned short*>(address));
  }
  static __device__ __forceinline__ void store(unsigned char* address, float value) {
    *reinterpret_cast<unsigned short*>(address) = half_of_float(value);
  }
};

// The upper half of a float.
struct bfloat16 {
  static constexpr int VEC = 8;
  static __device__ __forceinline__ void widen(uint4 raw, float (&out)[VEC]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = float_of_bits(words[i] << 16);
      out[2 * i + 1] = float_of_bits(words[i] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ float load(const unsigned char* address) {
    return float_of_bits(static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(address))
                         << 16);
  }
  static __device__ __forceinline__ void store(unsigned char* address, float value) {
    *reinterpret_cast<unsigned short*>(address) = bfloat16_of_float(value);
  }
};

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = WARP / 2; step; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}
