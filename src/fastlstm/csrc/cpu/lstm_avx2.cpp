#define FASTLSTM_ISA avx2
#define FASTLSTM_LANES 8

#include "cpu/lstm_table.h"

namespace fastlstm {

const Kernels& lstm_f32__avx2() {
  using namespace avx2;
  return kernel_table<Float32, VectorEngine<Float32>>("avx2");
}

const Kernels& lstm_bf16__avx2() {
  using namespace avx2;
  return kernel_table<Bfloat16, VectorEngine<Bfloat16>>("avx2");
}

}  // namespace fastlstm
