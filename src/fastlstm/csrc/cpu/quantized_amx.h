// int8 products on AMX tiles: 32 rows x 4 strips as two passes of 2 x 2 tiles; few rows on VNNI.
#pragma once

#include "cpu/quantized.h"
#include "cpu/tiles.h"

namespace fastlstm::FASTLSTM_ISA {

class QuantizedTileEngine {
 public:
  using Element = uint8_t;
  static constexpr int kRows = 32;
  static constexpr int kFewRows = 6;

  void block(const uint8_t* a, int64_t stride, int rows, const uint8_t* b, int64_t inner,
             int32_t* out) {
    if (rows <= kFewRows) {
      QuantizedEngine::block(a, stride, rows, b, inner, out);
      return;
    }
    tiles_.configure(rows);
    pass(a, stride, b, inner, out);
    pass(a, stride, b + 2 * kLanes * 4, inner, out + 2 * kLanes);
  }

 private:
  // Tiles: 0..3 sums [row tile][strip], 4..5 left operand, 6..7 right operand.
  void pass(const uint8_t* a, int64_t stride, const uint8_t* b, int64_t inner, int32_t* out) {
    constexpr int64_t kPanel = kStrips * kLanes * 4;
    const bool has_second = tiles_.has_second();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inner; k += 64) {
      _tile_loadd(4, a + k, stride);
      _tile_loadd(6, b, kPanel);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(7, b + kLanes * 4, kPanel);
      _tile_dpbusd(1, 4, 7);
      if (has_second) {
        _tile_loadd(5, a + 16 * stride + k, stride);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      }
      b += 16 * kPanel;
    }
    constexpr int64_t kRow = kStrips * kLanes;
    _tile_stored(0, out, kRow * 4);
    _tile_stored(1, out + kLanes, kRow * 4);
    if (has_second) {
      _tile_stored(2, out + 16 * kRow, kRow * 4);
      _tile_stored(3, out + 16 * kRow + kLanes, kRow * 4);
    }
  }

  Tiles tiles_;
};

template <typename Epilogue>
FASTLSTM_INLINE void multiply(QuantizedTileEngine& engine, Left<uint8_t> a, Range rows,
                              const uint8_t* b, int64_t strip_stride, Strips strips, int64_t inner,
                              Epilogue&& epilogue) {
  multiply_quantized(engine, a, rows, b, strip_stride, strips, inner, epilogue);
}

}  // namespace fastlstm::FASTLSTM_ISA
