#include <immintrin.h>

#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {

float loop(int64_t iterations) {
  constexpr int kTile = 24;
  __m512 sum[kTile];
  for (int i = 0; i < kTile; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 scale = _mm512_set1_ps(0.9999f);
  const __m512 shift = _mm512_set1_ps(0.5f);
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < kTile; ++i) sum[i] = _mm512_fmadd_ps(sum[i], scale, shift);
  }
  __m512 total = sum[0];
  for (int i = 1; i < kTile; ++i) total = _mm512_add_ps(total, sum[i]);
  return _mm512_cvtss_f32(total);
}

}  // namespace

PeakKernel fma_peak_f32__avx512() { return {"avx512", "f32", 2 * 16 * 24, loop}; }

}  // namespace fastlstm
