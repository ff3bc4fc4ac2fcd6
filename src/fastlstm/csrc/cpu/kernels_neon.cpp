#define FASTLSTM_ISA neon
#define FASTLSTM_LANES 4

#include "cpu/decode_table.h"
#include "cpu/lstm_table.h"

namespace fastlstm {

const Kernels& lstm_f32__neon() {
  using namespace neon;
  return kernel_table<Float32, VectorEngine<Float32>>("neon");
}

const Kernels& lstm_bf16__neon() {
  using namespace neon;
  return kernel_table<Bfloat16, VectorEngine<Bfloat16>>("neon");
}

const DecodeKernels& decode_fp32__neon() {
  using namespace neon;
  return decode_table<Float32, VectorEngine<Float32>>("neon", WeightFormat::fp32);
}

const DecodeKernels& decode_bf16__neon() {
  using namespace neon;
  return decode_table<Bfloat16, VectorEngine<Bfloat16>>("neon", WeightFormat::bf16);
}

const DecodeKernels& decode_int8__neon() {
  using namespace neon;
  return decode_table<Int8, QuantizedEngine>("neon", WeightFormat::int8);
}

const DecodeKernels& decode_int4__neon() {
  using namespace neon;
  return decode_table<Int4, Int4Engine>("neon", WeightFormat::int4);
}

}  // namespace fastlstm
