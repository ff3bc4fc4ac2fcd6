// Operations on the vectors of one instruction set: its header, the memory formats of operands,
// parts of vectors, transposition.
#pragma once

#if defined(__x86_64__)
#include "cpu/isa_x86.h"
#elif defined(__aarch64__)
#include "cpu/isa_arm.h"
#else
#error "fastlstm's kernels are for x86-64 and aarch64"
#endif

namespace fastlstm::FASTLSTM_ISA {

#if defined(__AMX_TILE__)
inline constexpr bool kHasTiles = true;
#else
inline constexpr bool kHasTiles = false;
#endif
#if defined(FASTLSTM_HAS_SQUARES)
inline constexpr bool kHasSquares = true;
#else
inline constexpr bool kHasSquares = false;
#endif

FASTLSTM_INLINE Vec widen_bf16(Halves h) { return bits_of<Vec>(widen(h) << 16); }

// An element in every lane.
FASTLSTM_INLINE Vec splat_element(float x) { return splat(x); }
FASTLSTM_INLINE Vec splat_element(uint16_t x) {
  return bits_of<Vec>((uint32_t{x} << 16) - Words{});
}

// Memory format of the matrix operands: load and store widen and round.
struct Float32 {
  using Element = float;
  static constexpr int kPair = 1;   // values of the inner dimension that stand side by side
  static constexpr int kInner = 1;  // the inner dimension is padded to a multiple of this
  static FASTLSTM_INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static FASTLSTM_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
  static FASTLSTM_INLINE void stream(float* p, Vec v) { FASTLSTM_ISA::stream(p, v); }
  static FASTLSTM_INLINE Vec rounded(Vec v) { return v; }
};

struct Bfloat16 {
  using Element = uint16_t;
  static constexpr int kPair = 2;
  static constexpr int kInner = kHasTiles ? 32 : kHasSquares ? 4 : 2;  // as a product takes it
  static FASTLSTM_INLINE Vec load(const uint16_t* p) {
    Halves h;
    __builtin_memcpy(&h, p, sizeof h);
    return widen_bf16(h);
  }
  static FASTLSTM_INLINE void store(uint16_t* p, Vec v) {
    const Halves h = round_to_bf16(v);
    __builtin_memcpy(p, &h, sizeof h);
  }
  static FASTLSTM_INLINE void stream(uint16_t* p, Vec v) {
    FASTLSTM_ISA::stream(p, round_to_bf16(v));
  }
  static FASTLSTM_INLINE Vec rounded(Vec v) { return widen_bf16(round_to_bf16(v)); }
};

// Two rows of bf16 as pairs: the left operand of a pair is in the low half.
FASTLSTM_INLINE Words pair_rows(Halves first, Halves second) {
  return widen(first) | (widen(second) << 16);
}

// The first `n` of the lanes; nothing beyond them is touched.
template <typename Format>
FASTLSTM_INLINE Vec load_part(const typename Format::Element* p, int64_t n) {
  if (n >= kLanes) return Format::load(p);
  typename Format::Element whole[kLanes] = {};
  for (int64_t k = 0; k < n; ++k) whole[k] = p[k];
  return Format::load(whole);
}

template <typename Format>
FASTLSTM_INLINE void store_part(typename Format::Element* p, Vec v, int64_t n) {
  if (n >= kLanes) {
    Format::store(p, v);
    return;
  }
  typename Format::Element whole[kLanes];
  Format::store(whole, v);
  for (int64_t k = 0; k < n; ++k) p[k] = whole[k];
}

// The first `n` lanes; the others zero.
FASTLSTM_INLINE Vec first_lanes(Vec v, int64_t n) {
  if (n >= kLanes) return v;
  float whole[kLanes];
  Float32::store(whole, v);
  for (int64_t k = n; k < kLanes; ++k) whole[k] = 0.0f;
  return Float32::load(whole);
}

namespace internal {

template <int... k>
struct Indices {};
template <int n, int... k>
struct MakeIndices : MakeIndices<n - 1, n - 1, k...> {};
template <int... k>
struct MakeIndices<0, k...> {
  using type = Indices<k...>;
};

// One exchange of a transpose: with stride s, lane k of the low result is a[k] where bit s of k is
// 0 and b[k - s] where it is 1; of the high one a[k + s] and b[k].
template <int s, int... k>
FASTLSTM_INLINE void exchange(Words& a, Words& b, Indices<k...>) {
  const Words low = __builtin_shufflevector(a, b, ((k & s) ? kLanes + k - s : k)...);
  const Words high = __builtin_shufflevector(a, b, ((k & s) ? kLanes + k : k + s)...);
  a = low;
  b = high;
}

template <int s>
FASTLSTM_INLINE void exchange_rows(Words (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if ((r & s) == 0) exchange<s>(rows[r], rows[r + s], typename MakeIndices<kLanes>::type{});
  }
}

}  // namespace internal

// Transposes kLanes x kLanes words in registers.
FASTLSTM_INLINE void transpose(Words (&rows)[kLanes]) {
  internal::exchange_rows<1>(rows);
  internal::exchange_rows<2>(rows);
  if constexpr (kLanes >= 8) internal::exchange_rows<4>(rows);
  if constexpr (kLanes >= 16) internal::exchange_rows<8>(rows);
}

}  // namespace fastlstm::FASTLSTM_ISA
