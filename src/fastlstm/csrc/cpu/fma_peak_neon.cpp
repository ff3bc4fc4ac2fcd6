#include "cpu/fma_peak_vectors.h"

namespace fastlstm {

namespace {
using Vec = float __attribute__((vector_size(16)));
}  // namespace

// 24 sums cover latency 4 at four FMAs per cycle with room to spare.
PeakKernel fma_peak_f32__neon() { return vector_peak<Vec, 24>("neon"); }

}  // namespace fastlstm
