// aarch64: NEON, and what dotprod, BF16 and I8MM add to it; with FASTLSTM_PORTABLE none of them.
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
using portable::count_from;
using portable::has_nan;
using portable::is_any;
using portable::keep_loaded;
using portable::LinePart;
using portable::load_scales;
using portable::max_lane;
using portable::max_of;
using portable::min_of;
using portable::multiply_add;
using portable::product_of_halves;
using portable::reciprocal;
using portable::Scale;
using portable::store_between;
using portable::store_scales;
using portable::stream;
using portable::sum_lanes;
using portable::sum_of_64;
using portable::widen;

#if defined(FASTLSTM_PORTABLE)
using portable::add_pairs;
using portable::byte_products;
using portable::kHasOffset;
using portable::Quads;
using portable::quads_of;
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) {
  return portable::dot_quads(sum, a, b, add_pairs);
}
#else
// Products of signed bytes fit 16 bits, and a pair of them unless all four are -128.
FASTLSTM_INLINE Shorts byte_products(Words a, Words b) {
  const auto x = bits_of<int8x16_t>(a), y = bits_of<int8x16_t>(b);
  const auto low = vmull_s8(vget_low_s8(x), vget_low_s8(y));
  return bits_of<Shorts>(vpaddq_s16(low, vmull_high_s8(x, y)));
}
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  const Shorts products = bits_of<Shorts>(a) * bits_of<Shorts>(b);
  return bits_of<Words>(vpadalq_s16(bits_of<int32x4_t>(sum), bits_of<int16x8_t>(products)));
}

using Quads = Words;
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define FASTLSTM_HAS_DOT_BYTES 1
// Four unsigned bytes of `a` in every lane by four signed ones of `b`, added to `sum`.
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      vusdotq_s32(bits_of<int32x4_t>(sum), bits_of<uint8x16_t>(a), bits_of<int8x16_t>(b)));
}
inline constexpr bool kHasOffset = true;
FASTLSTM_INLINE Quads quads_of(Words bytes) { return bytes; }
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) { return dot_bytes(sum, a, b); }
#else
inline constexpr bool kHasOffset = false;
FASTLSTM_INLINE Quads quads_of(Words bytes) { return bytes ^ 0x80808080u; }
#if defined(__ARM_FEATURE_DOTPROD)
#define FASTLSTM_HAS_DOT_BYTES 1
// The same with signed bytes of `a`.
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      vdotq_s32(bits_of<int32x4_t>(sum), bits_of<int8x16_t>(a), bits_of<int8x16_t>(b)));
}
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) { return dot_bytes(sum, a, b); }
#else
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) {
  return add_pairs(sum, bits_of<Words>(byte_products(a, b)), 0x00010001u - Words{});
}
#endif
#endif
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8) && \
    !defined(FASTLSTM_PORTABLE)
FASTLSTM_INLINE Halves round_to_bf16(Vec x) {
  return bits_of<Halves>(vcvt_bf16_f32(bits_of<float32x4_t>(x)));
}
inline constexpr bool kHasBf16Pairs = true;
FASTLSTM_INLINE Vec add_bf16_pairs(Vec sum, Words a, Words b) {
  return bits_of<Vec>(
      vbfdotq_f32(bits_of<float32x4_t>(sum), bits_of<bfloat16x8_t>(a), bits_of<bfloat16x8_t>(b)));
}

// Two rows by two columns, for squares.h: sums [row][column] of `a`, [row][8 bytes], and `b`,
// [column][8 bytes]. The bits are those of two dot products, one after the other.
#define FASTLSTM_HAS_SQUARES 1
FASTLSTM_INLINE Vec add_square(Vec sum, Words a, Words b) {  // of bf16
  return bits_of<Vec>(
      vbfmmlaq_f32(bits_of<float32x4_t>(sum), bits_of<bfloat16x8_t>(a), bits_of<bfloat16x8_t>(b)));
}
FASTLSTM_INLINE Words add_square(Words sum, Words a, Words b) {  // of bytes
  return bits_of<Words>(
      vusmmlaq_s32(bits_of<int32x4_t>(sum), bits_of<uint8x16_t>(a), bits_of<int8x16_t>(b)));
}
FASTLSTM_INLINE Vec add_dots(Vec sum, Words a, Words b) { return add_bf16_pairs(sum, a, b); }
FASTLSTM_INLINE Words add_dots(Words sum, Words a, Words b) { return dot_bytes(sum, a, b); }
FASTLSTM_INLINE Words two_rows(const void* first, const void* second) {
  const auto low = vcombine_u64(vld1_u64(static_cast<const uint64_t*>(first)), vdup_n_u64(0));
  return bits_of<Words>(vld1q_lane_u64(static_cast<const uint64_t*>(second), low, 1));
}
#else
using portable::add_bf16_pairs;
using portable::round_to_bf16;
inline constexpr bool kHasBf16Pairs = false;
#endif

}  // namespace fastlstm::FASTLSTM_ISA
