// The measured ceiling of AMX: products of tiles that never leave the registers.
#pragma once

#include <immintrin.h>

#include <array>

#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {

// Layout of the operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> column_bytes{};
  std::array<uint8_t, 16> rows{};
};
static_assert(sizeof(TileConfig) == 64);

// Four sums (16x16 f32), two left and two right operands (16x32 bf16): the tile shape a GEMM would
// use.
float loop(int64_t iterations) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.column_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  // GCC's intrinsic names only the first bytes as its input; without this the others may never be
  // stored.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t n = 0; n < iterations; ++n) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) std::array<float, 256> out{};
  _tile_stored(0, out.data(), 64);
  _tile_release();
  return out[0];
}

}  // namespace

PeakKernel fma_peak_bf16__amx_bf16() {
  return {"amx_bf16", "bf16", int64_t{2} * 16 * 16 * 32 * 4, loop};
}

}  // namespace fastlstm
