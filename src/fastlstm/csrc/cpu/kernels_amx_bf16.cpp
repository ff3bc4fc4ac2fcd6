#define FASTLSTM_ISA amx_bf16
#define FASTLSTM_LANES 16

#include "cpu/decode_table.h"
#include "cpu/gemm_amx.h"
#include "cpu/lstm_table.h"
#include "cpu/quantized_amx.h"

namespace fastlstm {

const Kernels& lstm_bf16__amx_bf16() {
  using namespace amx_bf16;
  return kernel_table<Bfloat16, TileEngine>("amx_bf16");
}

const DecodeKernels& decode_bf16__amx_bf16() {
  using namespace amx_bf16;
  return decode_table<Bfloat16, TileEngine>("amx_bf16", WeightFormat::bf16);
}

const DecodeKernels& decode_int8__amx_bf16() {
  using namespace amx_bf16;
  return decode_table<Int8, QuantizedTileEngine>("amx_bf16", WeightFormat::int8);
}

}  // namespace fastlstm
