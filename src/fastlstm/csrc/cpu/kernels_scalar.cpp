#define FASTLSTM_ISA scalar
#define FASTLSTM_LANES 8

#include "cpu/decode_table.h"
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

const DecodeKernels& decode_fp32__scalar() {
  using namespace scalar;
  return decode_table<Float32, VectorEngine<Float32>>("scalar", WeightFormat::fp32);
}

const DecodeKernels& decode_bf16__scalar() {
  using namespace scalar;
  return decode_table<Bfloat16, VectorEngine<Bfloat16>>("scalar", WeightFormat::bf16);
}

const DecodeKernels& decode_int8__scalar() {
  using namespace scalar;
  return decode_table<Int8, QuantizedEngine>("scalar", WeightFormat::int8);
}

const DecodeKernels& decode_int4__scalar() {
  using namespace scalar;
  return decode_table<Int4, Int4Engine>("scalar", WeightFormat::int4);
}

}  // namespace fastlstm
