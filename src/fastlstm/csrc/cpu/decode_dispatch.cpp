#include <string>

#include "decode.h"

namespace fastlstm {

const DecodeKernels& decode_fp32__scalar();
const DecodeKernels& decode_bf16__scalar();
const DecodeKernels& decode_int8__scalar();
const DecodeKernels& decode_int4__scalar();
const DecodeKernels& decode_fp32__neon();
const DecodeKernels& decode_bf16__neon();
const DecodeKernels& decode_int8__neon();
const DecodeKernels& decode_int4__neon();
const DecodeKernels& decode_int8__neon_dotprod();
const DecodeKernels& decode_int4__neon_dotprod();
const DecodeKernels& decode_bf16__neon_bf16();
const DecodeKernels& decode_int8__neon_bf16();
const DecodeKernels& decode_int4__neon_bf16();
const DecodeKernels& decode_fp32__avx2();
const DecodeKernels& decode_bf16__avx2();
const DecodeKernels& decode_int8__avx2();
const DecodeKernels& decode_int4__avx2();
const DecodeKernels& decode_int8__avx_vnni();
const DecodeKernels& decode_int4__avx_vnni();
const DecodeKernels& decode_fp32__avx512();
const DecodeKernels& decode_bf16__avx512();
const DecodeKernels& decode_int8__avx512();
const DecodeKernels& decode_int4__avx512();
const DecodeKernels& decode_int8__avx512_vnni();
const DecodeKernels& decode_int4__avx512_vnni();
const DecodeKernels& decode_bf16__avx512_bf16();
const DecodeKernels& decode_bf16__amx_bf16();
const DecodeKernels& decode_int8__amx_bf16();

namespace {

using Find = const DecodeKernels& (*)();

const DecodeKernels* chosen(WeightFormat format, Find fp32, Find bf16, Find int8, Find int4) {
  const Find found[] = {fp32, bf16, int8, int4};
  return &found[static_cast<int>(format)]();
}

}  // namespace

const DecodeKernels* find_decode_kernels(const char* name, WeightFormat format) {
  const std::string isa(name);
#if defined(FASTLSTM_HAS_AMX_BF16)
  if (isa == "amx_bf16") {
    return chosen(format, decode_fp32__avx512, decode_bf16__amx_bf16, decode_int8__amx_bf16,
                  decode_int4__avx512_vnni);
  }
#endif
#if defined(FASTLSTM_HAS_AVX512_BF16)
  if (isa == "avx512_bf16") {
    return chosen(format, decode_fp32__avx512, decode_bf16__avx512_bf16, decode_int8__avx512_vnni,
                  decode_int4__avx512_vnni);
  }
#endif
#if defined(FASTLSTM_HAS_AVX512_VNNI)
  if (isa == "avx512_vnni") {
    return chosen(format, decode_fp32__avx512, decode_bf16__avx512, decode_int8__avx512_vnni,
                  decode_int4__avx512_vnni);
  }
#endif
#if defined(FASTLSTM_HAS_AVX512)
  if (isa == "avx512") {
    return chosen(format, decode_fp32__avx512, decode_bf16__avx512, decode_int8__avx512,
                  decode_int4__avx512);
  }
#endif
#if defined(FASTLSTM_HAS_AVX_VNNI)
  if (isa == "avx_vnni") {
    return chosen(format, decode_fp32__avx2, decode_bf16__avx2, decode_int8__avx_vnni,
                  decode_int4__avx_vnni);
  }
#endif
#if defined(FASTLSTM_HAS_AVX2)
  if (isa == "avx2") {
    return chosen(format, decode_fp32__avx2, decode_bf16__avx2, decode_int8__avx2,
                  decode_int4__avx2);
  }
#endif
#if defined(FASTLSTM_HAS_NEON_BF16)
  if (isa == "neon_bf16") {
    return chosen(format, decode_fp32__neon, decode_bf16__neon_bf16, decode_int8__neon_bf16,
                  decode_int4__neon_bf16);
  }
#endif
#if defined(FASTLSTM_HAS_NEON_DOTPROD)
  if (isa == "neon_dotprod") {
    return chosen(format, decode_fp32__neon, decode_bf16__neon, decode_int8__neon_dotprod,
                  decode_int4__neon_dotprod);
  }
#endif
#if defined(FASTLSTM_HAS_NEON)
  if (isa == "neon") {
    return chosen(format, decode_fp32__neon, decode_bf16__neon, decode_int8__neon,
                  decode_int4__neon);
  }
#endif
  if (isa == "scalar") {
    return chosen(format, decode_fp32__scalar, decode_bf16__scalar, decode_int8__scalar,
                  decode_int4__scalar);
  }
  // A set that this compiler could not build.
  if (isa == "avx512_vnni") return find_decode_kernels("avx512", format);
  if (isa == "avx_vnni") return find_decode_kernels("avx2", format);
  if (isa == "neon_bf16") return find_decode_kernels("neon_dotprod", format);
  if (isa == "neon_dotprod") return find_decode_kernels("neon", format);
  return nullptr;
}

}  // namespace fastlstm
