#define FASTLSTM_ISA scalar
#define FASTLSTM_LANES 8

#include "cpu/lstm_table.h"

namespace fastlstm {

const Kernels& lstm_f32__scalar() {
  using namespace scalar;
  return kernel_table<Float32, VectorEngine<Float32>>("scalar");
}

const Kernels& lstm_bf16__scalar() {
  using namespace scalar;
  return kernel_table<Bfloat16, VectorEngine<Bfloat16>>("scalar");
}

}  // namespace fastlstm
