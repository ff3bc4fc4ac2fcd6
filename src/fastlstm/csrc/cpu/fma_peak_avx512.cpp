#include "cpu/fma_peak_vectors.h"

namespace fastlstm {

namespace {
using Vec = float __attribute__((vector_size(64)));
}  // namespace

PeakKernel fma_peak_f32__avx512() { return vector_peak<Vec, 24>("avx512"); }

}  // namespace fastlstm
