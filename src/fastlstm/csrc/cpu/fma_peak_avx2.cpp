#include "cpu/fma_peak_vectors.h"

namespace fastlstm {

namespace {
using Vec = float __attribute__((vector_size(32)));
}  // namespace

// 12 sums cover latency 4 at two FMAs per cycle with room to spare.
PeakKernel fma_peak_f32__avx2() { return vector_peak<Vec, 12>("avx2"); }

}  // namespace fastlstm
