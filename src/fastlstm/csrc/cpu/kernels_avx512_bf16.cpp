#define FASTLSTM_ISA avx512_bf16
#define FASTLSTM_LANES 16

#include "cpu/decode_table.h"
#include "cpu/lstm_table.h"

namespace fastlstm {

const Kernels& lstm_bf16__avx512_bf16() {
  using namespace avx512_bf16;
  return kernel_table<Bfloat16, VectorEngine<Bfloat16>>("avx512_bf16");
}

const DecodeKernels& decode_bf16__avx512_bf16() {
  using namespace avx512_bf16;
  return decode_table<Bfloat16, VectorEngine<Bfloat16>>("avx512_bf16", WeightFormat::bf16);
}

}  // namespace fastlstm
