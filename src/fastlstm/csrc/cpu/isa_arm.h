// aarch64: NEON, and what dotprod adds to it; with FASTLSTM_PORTABLE neither.
#pragma once

#include <arm_neon.h>

#include "cpu/isa_portable.h"

namespace fastlstm::FASTLSTM_ISA {

// See isa_x86.h.
class FlushDenormals {
 public:
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24));
  }
  ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
};

FASTLSTM_INLINE void stream_fence() {}

inline constexpr bool kHas32Registers = true;
inline constexpr bool kHasBf16Pairs = false;
using portable::add_bf16_pairs;
using portable::byte_products;
using portable::count_from;
using portable::has_nan;
using portable::is_any;
using portable::keep_loaded;
using portable::LinePart;
using portable::load_scales;
using portable::max_lane;
using portable::multiply_add;
using portable::product_of_halves;
using portable::reciprocal;
using portable::round_to_bf16;
using portable::Scale;
using portable::store_between;
using portable::store_scales;
using portable::stream;
using portable::sum_lanes;
using portable::sum_of_64;
using portable::widen;

#if !defined(FASTLSTM_PORTABLE)
// Products of a byte and a signed one fit 16 bits.
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  const Shorts products = bits_of<Shorts>(a) * bits_of<Shorts>(b);
  return bits_of<Words>(vpadalq_s16(bits_of<int32x4_t>(sum), bits_of<int16x8_t>(products)));
}
#else
using portable::add_pairs;
#endif

#if defined(__ARM_FEATURE_DOTPROD) && !defined(FASTLSTM_PORTABLE)
#define FASTLSTM_HAS_DOT_BYTES 1
// Four signed bytes of `a` in every lane by four of `b`, added to `sum`.
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      vdotq_s32(bits_of<int32x4_t>(sum), bits_of<int8x16_t>(a), bits_of<int8x16_t>(b)));
}
inline constexpr bool kHasOffset = false;
using Quads = Words;
FASTLSTM_INLINE Quads quads_of(Words bytes) { return bytes ^ 0x80808080u; }
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) { return dot_bytes(sum, a, b); }
#else
using portable::kHasOffset;
using portable::Quads;
using portable::quads_of;
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) {
  return portable::dot_quads(sum, a, b, add_pairs);
}
#endif

}  // namespace fastlstm::FASTLSTM_ISA
