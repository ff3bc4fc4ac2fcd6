// A loop of multiply-adds on vectors, for a source file built for one instruction set.
#pragma once

#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {  // each file has its own: code of a wider set is never linked into a narrower path

// `kTile` sums hide the latency of a multiply-add.
template <typename Vec, int kTile>
float vector_loop(int64_t iterations) {
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

template <typename Vec, int kTile>
PeakKernel vector_peak(const char* isa) {
  return {isa, "f32", 2 * int{sizeof(Vec) / sizeof(float)} * kTile, vector_loop<Vec, kTile>};
}

}  // namespace
}  // namespace fastlstm
