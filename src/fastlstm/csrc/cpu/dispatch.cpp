#include "cpu/dispatch.h"

namespace fastlstm {

const Kernels* find_kernels(const std::string& isa, bool is_bf16) {
#if defined(FASTLSTM_HAS_AMX_BF16)
  if (isa == "amx_bf16" && is_bf16) return &lstm_bf16__amx_bf16();
#endif
#if defined(FASTLSTM_HAS_AVX512_BF16)
  if (isa == "avx512_bf16" && is_bf16) return &lstm_bf16__avx512_bf16();
#endif
#if defined(FASTLSTM_HAS_AVX512)
  if (isa == "amx_bf16" || isa == "avx512_bf16" || isa == "avx512") {
    return is_bf16 ? &lstm_bf16__avx512() : &lstm_f32__avx512();
  }
#endif
#if defined(FASTLSTM_HAS_AVX2)
  if (isa == "avx2") return is_bf16 ? &lstm_bf16__avx2() : &lstm_f32__avx2();
#endif
#if defined(FASTLSTM_HAS_NEON_BF16)
  if (isa == "neon_bf16" && is_bf16) return &lstm_bf16__neon_bf16();
#endif
#if defined(FASTLSTM_HAS_NEON)
  if (isa == "neon_bf16" || isa == "neon") {
    return is_bf16 ? &lstm_bf16__neon() : &lstm_f32__neon();
  }
#endif
  if (isa == "scalar") return is_bf16 ? &lstm_bf16__scalar() : &lstm_f32__scalar();
  return nullptr;
}

}  // namespace fastlstm
