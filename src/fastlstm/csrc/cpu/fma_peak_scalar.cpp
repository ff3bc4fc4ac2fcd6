#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {

// What a portable build reaches: the compiler may use the baseline vector unit (SSE2, NEON),
// nothing wider.
float loop(int64_t iterations) {
  constexpr int kTile = 32;
  float sum[kTile];
  for (int i = 0; i < kTile; ++i) sum[i] = static_cast<float>(i);
  const float scale = 0.9999f;
  for (int64_t n = 0; n < iterations; ++n) {
    for (int i = 0; i < kTile; ++i) sum[i] = sum[i] * scale + 0.5f;
  }
  float total = 0.0f;
  for (int i = 0; i < kTile; ++i) total += sum[i];
  return total;
}

}  // namespace

PeakKernel fma_peak_f32__scalar() { return {"scalar", "f32", 2 * 32, loop}; }

}  // namespace fastlstm
