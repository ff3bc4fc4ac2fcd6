#define FASTLSTM_ISA avx2
#define FASTLSTM_LANES 8

#include "cpu/decode_table.h"
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

const DecodeKernels& decode_fp32__avx2() {
  using namespace avx2;
  return decode_table<Float32, VectorEngine<Float32>>("avx2", WeightFormat::fp32);
}

const DecodeKernels& decode_bf16__avx2() {
  using namespace avx2;
  return decode_table<Bfloat16, VectorEngine<Bfloat16>>("avx2", WeightFormat::bf16);
}

const DecodeKernels& decode_int8__avx2() {
  using namespace avx2;
  return decode_table<Int8, QuantizedEngine>("avx2", WeightFormat::int8);
}

const DecodeKernels& decode_int4__avx2() {
  using namespace avx2;
  return decode_table<Int4, Int4Engine>("avx2", WeightFormat::int4);
}

}  // namespace fastlstm
