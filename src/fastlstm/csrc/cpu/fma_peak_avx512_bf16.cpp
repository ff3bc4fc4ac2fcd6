#include <immintrin.h>

#include "cpu/fma_peak_vectors.h"

namespace fastlstm {

// VDPBF16PS: 16 lanes, two products each.
PeakKernel fma_peak_bf16__avx512_bf16() {
  using Vec = float __attribute__((vector_size(64)));
  const PeakLoop loop = [](int64_t iterations) {
    const __m512 ones = _mm512_set1_ps(1.0f);
    const __m512bh pairs = _mm512_cvtne2ps_pbh(ones, ones);
    return sum_up<Vec, 24>(iterations,
                           [&](Vec sum) { return _mm512_dpbf16_ps(sum, pairs, pairs); });
  };
  return {"avx512_bf16", "bf16", 2 * 32 * 24, loop};
}

}  // namespace fastlstm
