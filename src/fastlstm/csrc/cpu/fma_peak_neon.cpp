#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {

using Vec = float __attribute__((vector_size(16)));

// 24 sums cover latency 4 at four FMAs per cycle with room to spare.
float loop(int64_t iterations) {
  constexpr int kTile = 24;
  Vec sum[kTile];
  for (int i = 0; i < kTile; ++i) sum[i] = static_cast<float>(i) - Vec{};
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < kTile; ++i) sum[i] = sum[i] * 0.9999f + 0.5f;
  }
  Vec total = sum[0];
  for (int i = 1; i < kTile; ++i) total += sum[i];
  return total[0];
}

}  // namespace

PeakKernel fma_peak_f32__neon() { return {"neon", "f32", 2 * 4 * 24, loop}; }

}  // namespace fastlstm
