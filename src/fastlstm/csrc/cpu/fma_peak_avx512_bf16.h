// The measured ceiling of VDPBF16PS.
#pragma once

#include <immintrin.h>

#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {

// VDPBF16PS: 16 lanes, two products each.
float loop(int64_t iterations) {
  constexpr int kTile = 24;
  __m512 sum[kTile];
  for (int i = 0; i < kTile; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 ones = _mm512_set1_ps(1.0f);
  const __m512bh pairs = _mm512_cvtne2ps_pbh(ones, ones);
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < kTile; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], pairs, pairs);
  }
  __m512 total = sum[0];
  for (int i = 1; i < kTile; ++i) total = _mm512_add_ps(total, sum[i]);
  return _mm512_cvtss_f32(total);
}

}  // namespace

PeakKernel fma_peak_bf16__avx512_bf16() { return {"avx512_bf16", "bf16", 2 * 32 * 24, loop}; }

}  // namespace fastlstm
