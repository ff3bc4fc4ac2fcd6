// All tables of an instruction set, for a source file that has defined FASTLSTM_ISA and
// FASTLSTM_LANES; with FASTLSTM_ONLY_DECODES_INTEGERS those of int8 and int4 weights, with
// FASTLSTM_WITHOUT_FP32 all but those of float32.
#pragma once

#include "cpu/decode_table.h"
#include "cpu/lstm_table.h"

#define FASTLSTM_JOINED(name, isa) name##__##isa
#define FASTLSTM_OF(name, isa) FASTLSTM_JOINED(name, isa)
#define FASTLSTM_QUOTED(isa) #isa
#define FASTLSTM_TEXT(isa) FASTLSTM_QUOTED(isa)

namespace fastlstm {

#if !defined(FASTLSTM_ONLY_DECODES_INTEGERS)
#if !defined(FASTLSTM_WITHOUT_FP32)
const Kernels& FASTLSTM_OF(lstm_f32, FASTLSTM_ISA)() {
  using namespace FASTLSTM_ISA;
  return kernel_table<Float32, VectorEngine<Float32>>(FASTLSTM_TEXT(FASTLSTM_ISA));
}

const DecodeKernels& FASTLSTM_OF(decode_fp32, FASTLSTM_ISA)() {
  using namespace FASTLSTM_ISA;
  return decode_table<Float32, VectorEngine<Float32>>(FASTLSTM_TEXT(FASTLSTM_ISA),
                                                      WeightFormat::fp32);
}
#endif

const Kernels& FASTLSTM_OF(lstm_bf16, FASTLSTM_ISA)() {
  using namespace FASTLSTM_ISA;
  return kernel_table<Bfloat16, VectorEngine<Bfloat16>>(FASTLSTM_TEXT(FASTLSTM_ISA));
}

const DecodeKernels& FASTLSTM_OF(decode_bf16, FASTLSTM_ISA)() {
  using namespace FASTLSTM_ISA;
  return decode_table<Bfloat16, VectorEngine<Bfloat16>>(FASTLSTM_TEXT(FASTLSTM_ISA),
                                                        WeightFormat::bf16);
}
#endif

const DecodeKernels& FASTLSTM_OF(decode_int8, FASTLSTM_ISA)() {
  using namespace FASTLSTM_ISA;
  return decode_table<Int8, QuantizedEngine>(FASTLSTM_TEXT(FASTLSTM_ISA), WeightFormat::int8);
}

const DecodeKernels& FASTLSTM_OF(decode_int4, FASTLSTM_ISA)() {
  using namespace FASTLSTM_ISA;
  return decode_table<Int4, Int4Engine>(FASTLSTM_TEXT(FASTLSTM_ISA), WeightFormat::int4);
}

}  // namespace fastlstm
