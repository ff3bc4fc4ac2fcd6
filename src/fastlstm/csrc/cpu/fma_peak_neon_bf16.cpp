#include <arm_neon.h>

#include "cpu/fma_peak_vectors.h"

namespace fastlstm {

// BFMMLA: 4 lanes, four products each.
PeakKernel fma_peak_bf16__neon_bf16() {
  using Vec = float __attribute__((vector_size(16)));
  const PeakLoop loop = [](int64_t iterations) {
    const bfloat16x8_t ones = vdupq_n_bf16(vcvth_bf16_f32(1.0f));
    return sum_up<Vec, 24>(iterations, [&](Vec sum) { return vbfmmlaq_f32(sum, ones, ones); });
  };
  return {"neon_bf16", "bf16", 2 * 16 * 24, loop};
}

}  // namespace fastlstm
