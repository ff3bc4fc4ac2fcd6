#define FASTLSTM_ISA amx_bf16
#define FASTLSTM_LANES 16

#include "cpu/gemm_amx.h"
#include "cpu/lstm_table.h"

namespace fastlstm {

const Kernels& lstm_bf16__amx_bf16() {
  using namespace amx_bf16;
  return kernel_table<Bfloat16, TileEngine>("amx_bf16");
}

}  // namespace fastlstm
