// Threads that share out the tiles of one operation after another.
//
// An operation is over when its tiles are, and not when every thread has come to its end as with
// OpenMP. So a thread may be put aside between two tiles without holding the others up, and the
// threads offer that: a process that waits for a core (the scheduler, the memory service) gets it
// between two tiles, and the others go on with the tiles meanwhile. Of the time that such processes
// take from one of two cores, a decode step gets longer by half, where it was all of it before.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>

namespace octavo {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Rows of a product that make a tile at most, so that a thread gives way in time also in a long
// prompt.
constexpr int64_t ROWS_PER_TILE = 128;

class TilePool;

// One thread's share of an operation: while (tiles.next()) do(tiles.tile());
class Tiles {
 public:
  // Whether there is another tile to do. The one before is done.
  inline bool next();
  int64_t tile() const { return base_ + tile_; }

 private:
  friend class TilePool;
  inline Tiles(TilePool& pool, uint64_t operation, int64_t first, bool gives_way);

  TilePool& pool_;
  const uint64_t operation_;
  // Of the whole operation's tiles, the first that this one has.
  const int64_t base_;
  int64_t tile_;
  const bool gives_way_;
  bool is_first_ = true;
};

class TilePool {
 public:
  // That of this process.
  static TilePool& instance() {
    // Never destroyed: its threads do not end.
    static TilePool* const pool = new TilePool;
    return *pool;
  }

  // body(Tiles&) on this thread, and on num_threads - 1 others unless there is nothing left for
  // them; returns when all tiles are done. One operation at a time: others wait their turn.
  template <typename Body>
  void run(int64_t num_tiles, int num_threads, Body&& body) {
    const std::lock_guard<std::mutex> turn(turn_);
    // Nearly always once.
    for (base_ = 0; base_ < num_tiles; base_ += MAX_TILES) {
      const int64_t count = num_tiles - base_ < MAX_TILES ? num_tiles - base_ : MAX_TILES;
      const uint64_t operation = begin(count, num_threads - 1, &body, [](void* it, Tiles& tiles) {
        (*static_cast<std::remove_reference_t<Body>*>(it))(tiles);
      });
      const int64_t tile = take(operation);
      if (tile >= 0) {
        Tiles tiles(*this, operation, tile, false);
        body(tiles);
      }
      for (int spins = 0; num_done_.load(std::memory_order_acquire) < count; ++spins) {
        relax();
        if (spins >= SPINS) sched_yield();
      }
    }
  }

  // body(i) for every i below count, `share` of them a tile.
  template <typename Body>
  void run_each(int64_t count, int64_t share, int num_threads, const Body& body) {
    run((count + share - 1) / share, num_threads, [&](Tiles& tiles) {
      while (tiles.next()) {
        const int64_t first = tiles.tile() * share;
        const int64_t last = first + share < count ? first + share : count;
        for (int64_t i = first; i < last; ++i) body(i);
      }
    });
  }

 private:
  friend class Tiles;
  using Run = void (*)(void*, Tiles&);
  using Clock = std::chrono::steady_clock;

  // The operation under way in one word, so that nobody takes a tile of another one than it has
  // looked at: the operation's number, how many tiles it has, and which is the next to be taken.
  static constexpr int COUNT_BITS = 20;
  static constexpr uint64_t COUNT_MASK = (uint64_t(1) << COUNT_BITS) - 1;
  static constexpr int64_t MAX_TILES = COUNT_MASK;
  static uint64_t operation_of(uint64_t word) { return word >> 2 * COUNT_BITS; }
  static uint64_t count_of(uint64_t word) { return word >> COUNT_BITS & COUNT_MASK; }
  static uint64_t next_of(uint64_t word) { return word & COUNT_MASK; }

  // A helper waits awake for so long, about a millisecond, which bridges the gap to the next
  // operation of the same forward. Every SPINS_PER_TURN it offers its core to whoever waits for it.
  static constexpr int SPINS = 20000;
  static constexpr int SPINS_PER_TURN = 512;
  // How often a helper that works offers its core. An offer that nobody takes costs 0.5 us.
  static constexpr auto GIVES_WAY_EVERY = std::chrono::microseconds(100);

  uint64_t begin(int64_t num_tiles, int num_helpers, void* body, Run run) {
    for (; num_helpers_started_ < num_helpers; ++num_helpers_started_)
      std::thread([this, number = num_helpers_started_] { help(number); }).detach();
    body_ = body;
    run_ = run;
    num_helpers_.store(num_helpers, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    const uint64_t operation = operation_of(word_.load(std::memory_order_relaxed) +
                                            (uint64_t(1) << 2 * COUNT_BITS));
    word_.store(operation << 2 * COUNT_BITS | uint64_t(num_tiles) << COUNT_BITS);
    if (num_helpers > 0 && num_sleeping_.load()) {
      const std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    return operation;
  }

  // The next tile of `operation`, or -1.
  int64_t take(uint64_t operation) {
    uint64_t word = word_.load(std::memory_order_acquire);
    while (operation_of(word) == operation && next_of(word) < count_of(word))
      if (word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel))
        return int64_t(next_of(word));
    return -1;
  }

  // What is known of the operation under way is what `begin` wrote, once a tile of it was taken:
  // before that is done there is no other.
  void help(int number) {
    for (;;) {
      const uint64_t word = word_.load(std::memory_order_acquire);
      const bool is_asked = number < num_helpers_.load(std::memory_order_relaxed);
      const int64_t tile = is_asked ? take(operation_of(word)) : -1;
      if (tile >= 0) {
        Tiles tiles(*this, operation_of(word), tile, true);
        run_(body_, tiles);
      } else {
        wait_for_another(operation_of(word));
      }
    }
  }

  void wait_for_another(uint64_t operation) {
    const auto is_there = [&] { return operation_of(word_.load()) != operation; };
    for (int spins = 1; spins <= SPINS; ++spins) {
      if (is_there()) return;
      relax();
      if (spins % SPINS_PER_TURN == 0) sched_yield();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    num_sleeping_.fetch_add(1);
    wake_.wait(lock, is_there);
    num_sleeping_.fetch_sub(1);
  }

  void give_way() {
    thread_local Clock::time_point last;
    const Clock::time_point now = Clock::now();
    if (now - last < GIVES_WAY_EVERY) return;
    last = now;
    sched_yield();
  }

  std::mutex turn_;
  int num_helpers_started_ = 0;
  int64_t base_ = 0;
  void* body_ = nullptr;
  Run run_ = nullptr;
  std::atomic<int> num_helpers_{0};
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  std::atomic<int> num_sleeping_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

inline Tiles::Tiles(TilePool& pool, uint64_t operation, int64_t first, bool gives_way)
    : pool_(pool),
      operation_(operation),
      base_(pool.base_),
      tile_(first),
      gives_way_(gives_way) {}

inline bool Tiles::next() {
  if (!is_first_) {
    pool_.num_done_.fetch_add(1, std::memory_order_release);
    if (gives_way_) pool_.give_way();
    tile_ = pool_.take(operation_);
  }
  is_first_ = false;
  return tile_ >= 0;
}

}  // namespace octavo
