#define FASTLSTM_ISA avx512
#define FASTLSTM_LANES 16

#include "cpu/decode_table.h"
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

const DecodeKernels& decode_fp32__avx512() {
  using namespace avx512;
  return decode_table<Float32, VectorEngine<Float32>>("avx512", WeightFormat::fp32);
}

const DecodeKernels& decode_bf16__avx512() {
  using namespace avx512;
  return decode_table<Bfloat16, VectorEngine<Bfloat16>>("avx512", WeightFormat::bf16);
}

const DecodeKernels& decode_int8__avx512() {
  using namespace avx512;
  return decode_table<Int8, QuantizedEngine>("avx512", WeightFormat::int8);
}

const DecodeKernels& decode_int4__avx512() {
  using namespace avx512;
  return decode_table<Int4, Int4Engine>("avx512", WeightFormat::int4);
}

}  // namespace fastlstm
