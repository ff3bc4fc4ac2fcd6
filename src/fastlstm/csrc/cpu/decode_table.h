// The table of decoding kernels of one instruction set and weight format.
#pragma once

#include "cpu/decode_step.h"

namespace fastlstm::FASTLSTM_ISA {

template <typename Format>
int64_t decode_workspace(const DecodeArgs& g) {
  DecodeArgs counted = g;
  counted.workspace = nullptr;
  return DecodeScratch<Format>(counted).bytes;
}

template <typename Format, typename Engine>
void decode(const DecodeArgs& g, Member me) {
  FlushDenormals flush;
  DecodeLoop<Format, Engine>(g, me).run();
}

template <typename Format, typename Engine>
const DecodeKernels& decode_table(const char* isa, WeightFormat format) {
  static const DecodeKernels table{isa,
                                   format,
                                   kLanes,
                                   decode_matrix_bytes<Format>,
                                   decode_padded_columns<Format>,
                                   pack_decode<Format>,
                                   decode_workspace<Format>,
                                   decode<Format, Engine>};
  return table;
}

}  // namespace fastlstm::FASTLSTM_ISA
