// Many operations over the pool's threads. Exits with 1 and a line when a tile is not done exactly
// once before its operation is over, or by more threads than were asked for.
#include <cstdio>
#include <set>
#include <vector>

#include "tile_pool.h"

int main() {
  using octavo::Tiles;
  unsigned draw = 1;
  const auto drawn = [&](unsigned below) {
    draw = draw * 1664525u + 1013904223u;
    return int((draw >> 8) % below);
  };
  std::mutex seen;
  for (int operation = 0; operation < 3000; ++operation) {
    // The last one has more tiles than fit one word.
    const int64_t num_tiles = operation == 2999 ? (1 << 20) + 7 : drawn(40);
    const int num_threads = 1 + drawn(4);
    std::vector<int> done(num_tiles);  // plain: two writers, or one that is late, are a data race
    std::set<std::thread::id> threads;
    octavo::TilePool::instance().run(num_tiles, num_threads, [&](Tiles& tiles) {
      {
        const std::lock_guard<std::mutex> lock(seen);
        threads.insert(std::this_thread::get_id());
      }
      while (tiles.next()) {
        ++done[tiles.tile()];
        if (tiles.tile() % 7 == 3) std::this_thread::yield();
      }
    });
    for (int64_t tile = 0; tile < num_tiles; ++tile)
      if (done[tile] != 1) return std::printf("tile %ld done %d times\n", long(tile), done[tile]), 1;
    if (int(threads.size()) > num_threads)
      return std::printf("%zu threads, asked for %d\n", threads.size(), num_threads), 1;
  }
  // Two callers at once take turns.
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller)
    callers.emplace_back([&] {
      for (int operation = 0; operation < 500; ++operation)
        octavo::TilePool::instance().run(9, 3, [&](Tiles& tiles) {
          while (tiles.next()) total += tiles.tile();
        });
    });
  for (std::thread& caller : callers) caller.join();
  if (total != 2 * 500 * 36) return std::printf("a total of %ld\n", long(total)), 1;
  return 0;
}
