// A loop of multiply-adds on vectors, for a source file built for one instruction set.
#pragma once

#include "cpu/fma_peak.h"

namespace fastlstm {
namespace {  // each file has its own: code of a wider set is never linked into a narrower path

// `kTile` sums hide the latency of `add`.
template <typename Vec, int kTile, typename Add>
inline __attribute__((always_inline)) float sum_up(int64_t iterations, Add&& add) {
  Vec sum[kTile];
  for (int i = 0; i < kTile; ++i) sum[i] = static_cast<float>(i) - Vec{};
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < kTile; ++i) sum[i] = add(sum[i]);
  }
  Vec total = sum[0];
  for (int i = 1; i < kTile; ++i) total += sum[i];
  return total[0];
}

template <typename Vec, int kTile>
PeakKernel vector_peak(const char* isa) {
  const PeakLoop loop = [](int64_t iterations) {
    return sum_up<Vec, kTile>(iterations, [](Vec sum) { return sum * 0.9999f + 0.5f; });
  };
  return {isa, "f32", 2 * int{sizeof(Vec) / sizeof(float)} * kTile, loop};
}

}  // namespace
}  // namespace fastlstm
