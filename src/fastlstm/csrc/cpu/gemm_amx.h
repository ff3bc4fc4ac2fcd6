// The block product on AMX tiles: 32 rows x 4 strips as two passes of 2 x 2 tiles.
#pragma once

#include "cpu/gemm.h"

namespace fastlstm::FASTLSTM_ISA {

// Owns the tile configuration of its thread while it lives.
class TileEngine {
 public:
  using Element = uint16_t;
  static constexpr int kRows = 32;

  TileEngine() = default;
  TileEngine(const TileEngine&) = delete;
  TileEngine& operator=(const TileEngine&) = delete;
  ~TileEngine() {
    if (configured_rows_ != 0) _tile_release();
  }

  // As VectorEngine::block; `inner` is a multiple of 32.
  void block(const uint16_t* a, int64_t lda, int rows, const uint16_t* b, int64_t strip_stride,
             int strips, int64_t inner, float* out) {
    configure(rows);
    const int64_t ldo = strips * kLanes;
    for (int s = 0; s < strips; s += 2) {
      const uint16_t* right = b + s * strip_stride;
      float* to = out + s * kLanes;
      if (rows > 16) {
        if (s + 1 < strips) {
          pass<2, 2>(a, lda, right, strip_stride, inner, to, ldo);
        } else {
          pass<2, 1>(a, lda, right, strip_stride, inner, to, ldo);
        }
      } else if (s + 1 < strips) {
        pass<1, 2>(a, lda, right, strip_stride, inner, to, ldo);
      } else {
        pass<1, 1>(a, lda, right, strip_stride, inner, to, ldo);
      }
    }
  }

 private:
  // Tiles: 0..3 sums [row tile][strip], 4..5 left operand, 6..7 right operand.
  template <int kTiles, int kStrip>
  static FASTLSTM_INLINE void pass(const uint16_t* a, int64_t lda, const uint16_t* b,
                                   int64_t strip_stride, int64_t inner, float* out, int64_t ldo) {
    const int64_t a_bytes = lda * 2;
    _tile_zero(0);
    if constexpr (kStrip > 1) _tile_zero(1);
    if constexpr (kTiles > 1) _tile_zero(2);
    if constexpr (kTiles > 1 && kStrip > 1) _tile_zero(3);
    for (int64_t k = 0; k < inner; k += 32) {
      const uint16_t* right = b + k * kLanes;
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(6, right, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kStrip > 1) {
        _tile_loadd(7, right + strip_stride, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTiles > 1) {
        _tile_loadd(5, a + 16 * lda + k, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kStrip > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, ldo * 4);
    if constexpr (kStrip > 1) _tile_stored(1, out + kLanes, ldo * 4);
    if constexpr (kTiles > 1) _tile_stored(2, out + 16 * ldo, ldo * 4);
    if constexpr (kTiles > 1 && kStrip > 1) _tile_stored(3, out + 16 * ldo + kLanes, ldo * 4);
  }

  // Layout of the operand of LDTILECFG.
  struct alignas(64) Config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
  };

  // Row counts of the tiles for a block of `rows`: nothing beyond its last row is read.
  void configure(int rows) {
    if (rows == configured_rows_) return;
    configured_rows_ = rows;
    const auto first = static_cast<uint8_t>(min_of(rows, 16));
    const auto second = static_cast<uint8_t>(rows > 16 ? rows - 16 : 1);
    Config config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.column_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = first;
    config.rows[2] = config.rows[3] = config.rows[5] = second;
    // GCC's intrinsic names only the first bytes as its input; without this the others may never
    // be stored.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }

  int configured_rows_ = 0;
};

}  // namespace fastlstm::FASTLSTM_ISA
