#include <immintrin.h>

#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {

// 12 sums cover latency 4 at two FMAs per cycle with room to spare.
float loop(int64_t iterations) {
  constexpr int kTile = 12;
  __m256 sum[kTile];
  for (int i = 0; i < kTile; ++i) sum[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 scale = _mm256_set1_ps(0.9999f);
  const __m256 shift = _mm256_set1_ps(0.5f);
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < kTile; ++i) sum[i] = _mm256_fmadd_ps(sum[i], scale, shift);
  }
  __m256 total = sum[0];
  for (int i = 1; i < kTile; ++i) total = _mm256_add_ps(total, sum[i]);
  return _mm256_cvtss_f32(total);
}

}  // namespace

PeakKernel fma_peak_f32__avx2() { return {"avx2", "f32", 2 * 8 * 12, loop}; }

}  // namespace fastlstm
