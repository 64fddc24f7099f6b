// Runs the kernels on a CPU, one fiber per CUDA thread, to check them without a GPU.
//
// Included before a .cu file by GCC, some of whose builtins it uses. It is strict, so that a mistake
// shows as a wrong result or an error and is not right by luck:
//   - threads run one at a time, each until it must wait, in an order drawn from a seed: where a
//     barrier is missing, one runs far ahead of the others, or behind them
//   - an asynchronous copy happens when its thread waits for it, not when it is started
//   - shared memory is NaN at first in every thread block, and allocated to the byte
//   - a barrier that some threads never reach, and copies that nobody waited for, are errors
// It cannot show a missing fence, or how fast anything is.
#pragma once

#define OCTAVO_HOST

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct dim3 {
  uint32_t x, y, z;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 256 * 1024;

enum class State { READY, AT_BARRIER, IN_SHUFFLE, DONE };

struct Copy {
  void* shared;
  const void* source;  // null: zeros
  int group;
};

struct Fiber {
  State state;
  dim3 thread;
  std::vector<Copy> copies;
  int num_groups;      // of copies, committed so far
  float shown[2];      // to the other lanes, by shuffles in turn
  int num_shuffles;
  void* resume[5];
  ucontext_t context;  // only to get onto the stack at first
  bool started = false;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
};

// One of each per library, that is per variant of a kernel.
static std::vector<Fiber> fibers;
static std::vector<int> ready;
static std::vector<int> num_in_shuffle;  // by warp
static int current, num_at_barrier;
static dim3 grid, block_shape, block;
static uint64_t seed, random_state;
static void* scheduler[5];
static const char* error;
static std::unique_ptr<unsigned char, void (*)(void*)> shared(nullptr, free);
static void (*body)(void*);
static void* body_argument;

inline Fiber& self() { return fibers[current]; }

// Seed 0 runs the threads upwards, 1 downwards, others at random.
inline int next_ready() {
  if (seed > 1) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    std::swap(ready[random_state % ready.size()], ready.back());
  }
  const int next = ready.back();
  ready.pop_back();
  return next;
}

inline void make_ready(int first, int count) {
  for (int i = 0; i < count; ++i) {
    const int id = seed == 0 ? first + count - 1 - i : first + i;
    fibers[id].state = State::READY;
    ready.push_back(id);
  }
}

// AddressSanitizer wants to know which stack is in use.
#ifdef __SANITIZE_ADDRESS__
static const void* scheduler_stack;
static size_t scheduler_stack_bytes;
#define LEAVING_FOR(stack, bytes) __sanitizer_start_switch_fiber(nullptr, stack, bytes)
#define ARRIVED(from, bytes) __sanitizer_finish_switch_fiber(nullptr, from, bytes)
#else
#define LEAVING_FOR(stack, bytes)
#define ARRIVED(from, bytes)
#endif

// GCC has no setjmp and longjmp in one function.
[[noreturn]] __attribute__((noipa)) static void to_scheduler() {
  LEAVING_FOR(scheduler_stack, scheduler_stack_bytes);
  __builtin_longjmp(scheduler, 1);
}

[[noreturn]] __attribute__((noipa)) static void to_fiber(Fiber& fiber) {
  LEAVING_FOR(fiber.stack.get(), STACK_BYTES);
  if (fiber.started) __builtin_longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
  abort();
}

__attribute__((noipa)) static void pause_fiber() {
  if (__builtin_setjmp(self().resume) == 0) to_scheduler();
  ARRIVED(&scheduler_stack, &scheduler_stack_bytes);
}

__attribute__((noipa)) static void resume_fiber(Fiber& fiber) {
  if (__builtin_setjmp(scheduler) == 0) to_fiber(fiber);
  ARRIVED(nullptr, nullptr);
}

// A fiber runs its thread of one block after another.
static void run_threads() {
  ARRIVED(&scheduler_stack, &scheduler_stack_bytes);
  for (;;) {
    body(body_argument);
    if (!self().copies.empty()) error = "a thread ended with copies it has not waited for";
    self().state = State::DONE;
    pause_fiber();
  }
}

inline void barrier() {
  self().state = State::AT_BARRIER;
  ++num_at_barrier;
  pause_fiber();
}

inline float shuffle_xor(float value, int mask) {
  const int turn = self().num_shuffles++ & 1, warp = current / LANES;
  self().shown[turn] = value;
  if (++num_in_shuffle[warp] == LANES) {
    num_in_shuffle[warp] = 0;
    make_ready(warp * LANES, LANES);
  } else {
    self().state = State::IN_SHUFFLE;
  }
  pause_fiber();
  return fibers[current ^ mask].shown[turn];
}

inline void wait_for_copies(int newer) {
  std::vector<Copy>& copies = self().copies;
  size_t kept = 0;
  for (const Copy& copy : copies) {
    if (copy.group >= self().num_groups - newer)
      copies[kept++] = copy;
    else if (copy.source)
      memcpy(copy.shared, copy.source, 16);
    else
      memset(copy.shared, 0, 16);
  }
  copies.resize(kept);
}

static void run_block(int num_threads, size_t shared_bytes) {
  memset(shared.get(), 0xff, shared_bytes);  // NaN in every type
  for (int id = 0; id < num_threads; ++id) {
    fibers[id].copies.clear();
    fibers[id].num_groups = fibers[id].num_shuffles = 0;
  }
  num_in_shuffle.assign(num_threads / LANES, 0);
  num_at_barrier = 0;
  make_ready(0, num_threads);
  while (!error) {
    while (!ready.empty()) {
      current = next_ready();
      resume_fiber(fibers[current]);
    }
    if (num_at_barrier == 0) break;
    if (num_at_barrier != num_threads) error = "some threads wait at a barrier others never reach";
    num_at_barrier = 0;
    make_ready(0, num_threads);
  }
  for (int id = 0; id < num_threads; ++id)
    if (!error && fibers[id].state != State::DONE) error = "a warp waits in a shuffle for ever";
}

static void make_fibers(size_t count) {
  if (fibers.size() == count && !error) return;
  fibers = std::vector<Fiber>(count);
  for (size_t id = 0; id < count; ++id) {
    Fiber& fiber = fibers[id];
    fiber.thread = {uint32_t(id), 0, 0};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, run_threads, 0);
  }
}

struct Launch {
  dim3 grid;
  uint32_t num_threads;  // a multiple of 32, in one dimension
  uint32_t num_arguments;
  uint64_t shared_bytes, seed;
  void* const* arguments;
  const uint64_t* argument_bytes;
};

template <class... A>
struct Call {
  void (*kernel)(A...);
  void* const* arguments;

  template <size_t... I>
  void run(std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
  }
  static void body(void* call) { static_cast<Call*>(call)->run(std::index_sequence_for<A...>{}); }
};

// What went wrong, or null.
template <class... A>
const char* launch(void (*kernel)(A...), const Launch& what) {
  const uint64_t sizes[] = {sizeof(A)...};
  if (what.num_arguments != sizeof...(A)) return "wrong number of arguments";
  for (size_t i = 0; i < sizeof...(A); ++i)
    if (what.argument_bytes[i] != sizes[i]) return "an argument of another size";
  Call<A...> call{kernel, what.arguments};
  make_fibers(what.num_threads);
  body = Call<A...>::body, body_argument = &call;
  grid = what.grid, block_shape = {what.num_threads, 1, 1};
  seed = what.seed, random_state = what.seed * 0x9e3779b97f4a7c15u + 1;
  shared.reset(static_cast<unsigned char*>(aligned_alloc(16, what.shared_bytes ? what.shared_bytes : 16)));
  error = nullptr;
  ready.clear();
  const uint64_t num_blocks = uint64_t(grid.x) * grid.y * grid.z;
  for (uint64_t i = 0; i < num_blocks && !error; ++i) {
    const uint64_t at = seed & 1 ? num_blocks - 1 - i : i;
    block = {uint32_t(at % grid.x), uint32_t(at / grid.x % grid.y), uint32_t(at / grid.x / grid.y)};
    run_block(int(what.num_threads), what.shared_bytes);
  }
  return error;
}

}  // namespace emulator

#define threadIdx (emulator::self().thread)
#define blockIdx (emulator::block)
#define blockDim (emulator::block_shape)
#define gridDim (emulator::grid)
#define DYNAMIC_SHARED(name) unsigned char* name = emulator::shared.get()
#define HOST_ENTRY(kernel)                                                       \
  extern "C" const char* launch_##kernel(const emulator::Launch* what) {         \
    return emulator::launch(kernel, *what);                                      \
  }

inline void __syncthreads() { emulator::barrier(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  return emulator::shuffle_xor(value, mask);
}

inline void copy_async_16(void* shared, const void* source, bool wanted) {
  emulator::Fiber& fiber = emulator::self();
  fiber.copies.push_back({shared, wanted ? source : nullptr, fiber.num_groups});
}
inline void commit_copies() { ++emulator::self().num_groups; }
template <int NEWER>
void wait_for_copies() {
  emulator::wait_for_copies(NEWER);
}

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float float_of_bits(unsigned bits) { return bits_as<float>(bits); }
inline float float_of_half(unsigned short bits) { return bits_as<_Float16>(bits); }
inline unsigned short half_of_float(float wide) {
  return bits_as<unsigned short>(static_cast<_Float16>(wide));
}
inline unsigned short bfloat16_of_float(float wide) {
  const unsigned bits = bits_as<unsigned>(wide);
  if (std::isnan(wide)) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // ties to even
}
