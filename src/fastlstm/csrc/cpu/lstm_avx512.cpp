#define FASTLSTM_ISA avx512
#define FASTLSTM_LANES 16

#include "cpu/lstm_table.h"

namespace fastlstm {

const Kernels& lstm_f32__avx512() {
  using namespace avx512;
  return kernel_table<Float32, VectorEngine<Float32>>("avx512");
}

const Kernels& lstm_bf16__avx512() {
  using namespace avx512;
  return kernel_table<Bfloat16, VectorEngine<Bfloat16>>("avx512");
}

}  // namespace fastlstm
