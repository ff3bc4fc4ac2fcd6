#define FASTLSTM_ISA avx512_vnni
#define FASTLSTM_LANES 16

#include "cpu/decode_table.h"

namespace fastlstm {

const DecodeKernels& decode_int8__avx512_vnni() {
  using namespace avx512_vnni;
  return decode_table<Int8, QuantizedEngine>("avx512_vnni", WeightFormat::int8);
}

const DecodeKernels& decode_int4__avx512_vnni() {
  using namespace avx512_vnni;
  return decode_table<Int4, Int4Engine>("avx512_vnni", WeightFormat::int4);
}

}  // namespace fastlstm
