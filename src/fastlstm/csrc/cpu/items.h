// How a team shares the work between two barriers: as items, each some units of some rows.
//
// A thread begins with items of its own, the same in every round, so that its part of the weights
// stays in its own cache. When it has none left it takes items of threads that are late: their
// cores may be slower, or busy with other processes. Results do not depend on who computes an item.
#pragma once

#include "cpu/gemm.h"
#include "lstm.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int64_t kLine = 16;       // floats of a cache line
inline constexpr int64_t kLaneBlock = 16;  // with layer norm sums over lanes are those of blocks

// Whether threads own lanes, and not units. A thread that owns lanes reads all recurrent weights
// (`bytes`) at every step: from its own cache, or with lanes enough from the one that all share.
// Tiles multiply too fast for the shared one.
FASTLSTM_INLINE bool splits_lanes(int64_t num_lanes, int64_t bytes, int64_t threads,
                                  bool has_norm) {
  constexpr int64_t kOwn = (kHasTiles ? 512 : 768) << 10, kShared = kHasTiles ? 0 : 4 << 20;
  const int64_t least = has_norm ? kLaneBlock : bytes <= kOwn ? 8 : 16;
  return num_lanes >= least * threads && bytes <= max_of(kOwn, kShared);
}

// Units, or other strips of columns, and rows.
struct Share {
  Range units, lanes;
};

// The part of one thread: some units with all rows, or with `by_rows` all units of some rows, cut
// at multiples of `grain`.
FASTLSTM_INLINE Share share_of(Member me, int64_t units, int64_t rows, bool by_rows,
                               int64_t grain = 1) {
  if (by_rows) return {{0, units}, part_of({0, rows}, me.index, me.count, grain)};
  return {part_of({0, units}, me.index, me.count), {0, rows}};
}

// Units and rows cut into items of nearly equal work.
class Blocks {
 public:
  // `flop`: of one unit in one row. A panel of a product has `panel` units.
  template <typename Engine>
  static Blocks of(int64_t units, int64_t rows, int64_t threads, int64_t panel, int64_t flop) {
    constexpr int64_t kMostParts = 32, kEdge = 2;  // what the edge of an item costs, in rows
    Blocks best{units, rows, Engine::kRowGrain, max_of(units, 1), 1};
    if (threads == 1 || units == 0 || rows == 0) return best;
    const int64_t grains = ceil_div(rows, Engine::kRowGrain);
    const int64_t ideal = 2 * units * rows / threads;
    int64_t least = INT64_MAX;
    for (int64_t parts = 1; parts <= min_of(kMostParts, grains); ++parts) {
      const int64_t height = ceil_div(grains, parts) * Engine::kRowGrain;
      const int64_t share = ceil_div(units * parts, threads);
      const int64_t most = min_of(units, round_up(share, panel));
      int64_t size =
          min_of(min_of(most, share), ceil_div(Engine::kLeastFlop, max_of(flop * height, 1)));
      for (; size <= most; ++size) {
        if (size > panel && size % panel != 0 && size != share) continue;
        const Blocks cut{units, rows, Engine::kRowGrain, size, parts};
        const bool is_odd = panel > 1 && size % 2 != 0;  // a panel of one strip has too few sums
        const int64_t cost = ceil_div(cut.size(), threads) * (2 * size + is_odd) *
                             (height + (parts > 1 ? kEdge : 0));
        if (cost < least) least = cost, best = cut;
      }
      if (100 * least <= 103 * ideal) break;
    }
    return best;
  }

  int64_t size() const { return ceil_div(units_, width_) * parts_; }
  Share operator[](int64_t item) const {
    const int64_t first = item / parts_ * width_;
    return {{first, min_of(first + width_, units_)},
            part_of({0, rows_}, item % parts_, parts_, grain_)};
  }

 private:
  Blocks(int64_t units, int64_t rows, int64_t grain, int64_t width, int64_t parts)
      : units_(units), rows_(rows), grain_(grain), width_(width), parts_(parts) {}

  int64_t units_, rows_, grain_;
  int64_t width_, parts_;  // units of an item; parts of the rows
};

// Deals out the items of one call, round by round. A barrier must separate every round from the
// second round after it.
class Items {
 public:
  static int64_t bytes(int64_t threads) { return kSets * threads * kLine; }

  // `memory`: of the team. Its first round comes after a barrier.
  Items(void* memory, Member me) : memory_(static_cast<char*>(memory)), me_(me) {
    for (int64_t k = 0; k < kSets; ++k) __atomic_store_n(taken(me.index, k), 0, __ATOMIC_RELAXED);
  }

  // Calls body(share) for items of `blocks` until all are taken.
  template <typename Body>
  void each(const Blocks& blocks, bool is_reversed, Body&& body) {
    const Range all{0, blocks.size()};
    const Range own = part_of(all, me_.index, me_.count);
    if (all.end <= me_.count) {
      if (own.begin < own.end) body(blocks[own.begin]);
      return;
    }
    const int64_t round = round_++;
    __atomic_store_n(taken(me_.index, round + 2), 0, __ATOMIC_RELAXED);
    for (int64_t step = 0; step < me_.count; step = step == 0 ? 1 : 2 * step) {
      const int64_t thread = (me_.index + step) % me_.count;
      const Range theirs = part_of(all, thread, me_.count);
      const int64_t count = theirs.end - theirs.begin;
      int64_t* const next = taken(thread, round);
      while (__atomic_load_n(next, __ATOMIC_RELAXED) < count) {
        const int64_t at = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (at < count) body(blocks[is_reversed ? theirs.end - 1 - at : theirs.begin + at]);
      }
    }
  }

 private:
  static constexpr int64_t kSets = 4, kLine = 64;

  int64_t* taken(int64_t thread, int64_t round) const {
    return reinterpret_cast<int64_t*>(memory_ + (round % kSets * me_.count + thread) * kLine);
  }

  char* memory_;
  Member me_;
  int64_t round_ = 0;
};

}  // namespace fastlstm::FASTLSTM_ISA
