// The configuration of AMX tiles for two left operands by two right ones.
#pragma once

#include "cpu/simd.h"

namespace fastlstm::FASTLSTM_ISA {

// Layout of the operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};

// Tiles 0..3 sums [row tile][strip], 4..5 left operand, 6..7 right operand, for a block of 1 to 32
// rows: nothing beyond its last row is read.
FASTLSTM_INLINE void load_tile_config(int rows) {
  const auto first = static_cast<uint8_t>(min_of(rows, 16));
  const auto second = static_cast<uint8_t>(rows > 16 ? rows - 16 : 1);
  TileConfig config{};
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

// The tile configuration of a thread while it lives.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_ != 0) _tile_release();
  }

  // For a block of so many rows, from now on.
  FASTLSTM_INLINE void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    load_tile_config(rows);
  }
  bool has_second() const { return rows_ > 16; }

 private:
  int rows_ = 0;
};

}  // namespace fastlstm::FASTLSTM_ISA
