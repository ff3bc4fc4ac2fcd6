// The block product on AMX tiles: 32 rows x 4 strips as two passes of 2 x 2 tiles.
#pragma once

#include "cpu/gemm.h"
#include "cpu/tiles.h"

namespace fastlstm::FASTLSTM_ISA {

class TileEngine {
 public:
  using Element = uint16_t;
  static constexpr int kRows = 32;
  static constexpr int64_t kRowGrain = 16;
  static constexpr bool kHasGateBlock = false;
  static constexpr int64_t kLeastFlop = 1 << 25;  // the epilogue of an item's last block waits

  // out[rows][strips * kLanes] = a * b over `inner` values, whole tiles; calls beside() after every
  // product of tiles that is under way.
  template <typename Beside>
  FASTLSTM_INLINE void block(Left<uint16_t> a, int rows, const uint16_t* b, int64_t strip_stride,
                             int strips, int64_t inner, float* out, Beside&& beside) {
    tiles_.configure(rows);
    const int64_t ldo = strips * kLanes;
    for (int s = 0; s < strips; s += 2) {
      const uint16_t* right = b + s * strip_stride;
      float* to = out + s * kLanes;
      if (s + 1 < strips) {
        pass<2>(a, right, strip_stride, inner, to, ldo, beside);
      } else {
        pass<1>(a, right, strip_stride, inner, to, ldo, beside);
      }
    }
  }

 private:
  // Tiles: 0..3 sums [row tile][strip], 4..5 left operand, 6..7 right operand.
  template <int kStrip, typename Beside>
  FASTLSTM_INLINE void pass(Left<uint16_t> a, const uint16_t* b, int64_t strip_stride,
                            int64_t inner, float* out, int64_t ldo, Beside&& beside) {
    const bool has_second = tiles_.has_second();
    const int64_t a_bytes = a.row_stride * 2;
    _tile_zero(0);
    if constexpr (kStrip > 1) _tile_zero(1);
    _tile_zero(2);
    if constexpr (kStrip > 1) _tile_zero(3);
    for (int64_t at = 0; at < inner; at += a.block) {
      const int64_t count = min_of(a.block, inner - at);
      for (int64_t k = 0; k < count; k += 32) {
        _tile_loadd(4, a.rows + k, a_bytes);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kStrip > 1) {
          _tile_loadd(7, b + strip_stride, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (has_second) {
          _tile_loadd(5, a.rows + 16 * a.row_stride + k, a_bytes);
          _tile_dpbf16ps(2, 5, 6);
          if constexpr (kStrip > 1) _tile_dpbf16ps(3, 5, 7);
        }
        b += 32 * kLanes;
        beside();
      }
      a.rows += a.block_stride;
    }
    _tile_stored(0, out, ldo * 4);
    if constexpr (kStrip > 1) _tile_stored(1, out + kLanes, ldo * 4);
    if (has_second) {
      _tile_stored(2, out + 16 * ldo, ldo * 4);
      if constexpr (kStrip > 1) _tile_stored(3, out + 16 * ldo + kLanes, ldo * 4);
    }
  }

  Tiles tiles_;
};

// As multiply in gemm.h. The epilogue of a block runs on the vector units while the tiles of the
// next block are multiplied: neither waits for the other.
template <typename Epilogue>
FASTLSTM_INLINE void multiply(TileEngine& engine, Left<uint16_t> a, Range rows, const uint16_t* b,
                              int64_t strip_stride, Strips strips, int64_t inner,
                              Epilogue&& epilogue) {
  constexpr int64_t kRows = TileEngine::kRows;
  alignas(64) float out[2][kRows * kStrips * kLanes];
  struct {
    int64_t row, end, strip;
    int strips;
    const float* sums;
  } pending{};
  const auto finish_row = [&] {
    epilogue(pending.row, pending.strip, pending.strips, pending.sums);
    pending.sums += pending.strips * kLanes;
    ++pending.row;
  };
  int turn = 0;
  for (int64_t n = 0; n < strips.panels(); ++n) {
    const int64_t s = strips.panel(n).begin;
    const int num_strips = static_cast<int>(strips.panel(n).end - s);
    const int64_t steps = ceil_div(num_strips, 2) * (inner / 32);
    for (int64_t first = rows.begin; first < rows.end; first += kRows) {
      const int count = static_cast<int>(min_of(kRows, rows.end - first));
      const int64_t waiting = pending.end - pending.row;
      int64_t credit = 0;
      engine.block(a.from_row(first), count, b + s * strip_stride, strip_stride, num_strips, inner,
                   out[turn], [&] {
                     for (credit += waiting; credit >= steps; credit -= steps) finish_row();
                   });
      while (pending.row < pending.end) finish_row();
      pending = {first, first + count, s, num_strips, out[turn]};
      turn ^= 1;
    }
  }
  while (pending.row < pending.end) finish_row();
}

}  // namespace fastlstm::FASTLSTM_ISA
