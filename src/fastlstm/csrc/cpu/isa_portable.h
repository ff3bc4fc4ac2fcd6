// What instruction sets do by instructions of their own, in portable code. isa_x86.h and isa_arm.h
// name, for each set, what it takes from here.
#pragma once

#include "cpu/vectors.h"

namespace fastlstm::FASTLSTM_ISA::portable {

FASTLSTM_INLINE Vec min_of(Vec a, Vec b) { return b < a ? b : a; }  // keeps a NaN of `a`
FASTLSTM_INLINE Vec max_of(Vec a, Vec b) { return b > a ? b : a; }

// 1 / x to about 1 ulp for normal, finite x whose reciprocal is normal.
FASTLSTM_INLINE Vec reciprocal(Vec x) { return 1.0f / x; }

FASTLSTM_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }

FASTLSTM_INLINE float sum_lanes(Vec v) {
  float whole[kLanes];
  store_bits(whole, v);
  for (int s = kLanes / 2; s > 0; s /= 2) {
    for (int k = 0; k < s; ++k) whole[k] += whole[k + s];
  }
  return whole[0];
}

FASTLSTM_INLINE float max_lane(Vec v) {
  float whole[kLanes];
  store_bits(whole, v);
  for (int k = 1; k < kLanes; ++k) whole[0] = whole[k] > whole[0] ? whole[k] : whole[0];
  return whole[0];
}

FASTLSTM_INLINE bool is_any(Words w) {
  uint32_t any = 0;
  for (int l = 0; l < kLanes; ++l) any |= w[l];
  return any != 0;
}

FASTLSTM_INLINE bool has_nan(Vec v) { return !(sum_lanes(v * 0.0f) == 0.0f); }

FASTLSTM_INLINE int64_t count_from(Vec v, float bound) {
  const Words ones = v >= bound ? Words{} + 1u : Words{};
  int64_t count = 0;
  for (int l = 0; l < kLanes; ++l) count += ones[l];
  return count;
}

// Stores the kLanes values of `v` from `low` to below `high` side by side, and those of `w` beside
// them; returns their number. May write up to kLanes values.
FASTLSTM_INLINE int64_t store_between(const float* v, const float* w, float low, float high,
                                      float* to_v, float* to_w) {
  int64_t count = 0;
  for (int l = 0; l < kLanes; ++l) {
    const float value = v[l], beside = w[l];
    to_v[count] = value;
    to_w[count] = beside;
    count += value >= low && value < high ? 1 : 0;
  }
  return count;
}

FASTLSTM_INLINE Words widen(Halves h) { return __builtin_convertvector(h, Words); }

// bf16 to nearest even; a NaN stays one.
FASTLSTM_INLINE Halves round_to_bf16(Vec x) {
  const Words u = bits_of<Words>(x);
  const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Words quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector(x != x ? quiet : rounded, Halves);
}

// sum + a.low * b.low + a.high * b.high of bf16
FASTLSTM_INLINE Vec add_bf16_pairs(Vec sum, Words a, Words b) {
  sum += bits_of<Vec>(a << 16) * bits_of<Vec>(b << 16);
  return sum + bits_of<Vec>(a & 0xffff0000u) * bits_of<Vec>(b & 0xffff0000u);
}

// Past the caches; `p` is aligned to the vector.
template <typename Vector>
FASTLSTM_INLINE void stream(void* p, Vector v) {
  store_bits(p, v);
}

// sum + a.low * b.low + a.high * b.high of signed halves
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  const auto low = [](Words x) { return bits_of<Integers>(x << 16) >> 16; };
  const auto high = [](Words x) { return bits_of<Integers>(x) >> 16; };
  return sum + bits_of<Words>(low(a) * low(b) + high(a) * high(b));
}

// Pairs of products of unsigned bytes of `a` with signed ones of `b`, in 16 bits.
FASTLSTM_INLINE Shorts byte_products(Words a, Words b) {
  const Shorts even = bits_of<Shorts>(a & 0x00ff00ffu) * ((bits_of<Shorts>(b) << 8) >> 8);
  return even + bits_of<Shorts>((a >> 8) & 0x00ff00ffu) * (bits_of<Shorts>(b) >> 8);
}

// Sums of four products of bytes in every lane: activations, 127 x + 128 each, as `quads_of` makes
// them ready, with signed weights.
inline constexpr bool kHasOffset = true;  // whether a sum contains 128 times that of its weights
struct Quads {
  Words even, odd;
};
FASTLSTM_INLINE Quads quads_of(Words bytes) {
  return {bytes & 0x00ff00ffu, (bytes >> 8) & 0x00ff00ffu};
}
template <typename AddPairs>
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b, AddPairs&& add_pairs) {
  const Shorts odd = bits_of<Shorts>(b) >> 8, even = (bits_of<Shorts>(b) << 8) >> 8;
  return add_pairs(add_pairs(sum, a.even, bits_of<Words>(even)), a.odd, bits_of<Words>(odd));
}

FASTLSTM_INLINE int32_t sum_of_64(const int8_t* p) {
  int32_t sum = 0;
  for (int k = 0; k < 64; ++k) sum += p[k];
  return sum;
}

using Scale = float;  // as stored
FASTLSTM_INLINE Vec load_scales(const Scale* p) { return load_bits<Vec>(p); }
FASTLSTM_INLINE void store_scales(Scale* p, Vec v) { store_bits(p, v); }

using LinePart = uint64_t __attribute__((vector_size(16)));
FASTLSTM_INLINE LinePart product_of_halves(LinePart x) { return (x & 0xffffffffu) * (x >> 32); }

FASTLSTM_INLINE void keep_loaded(Words&) {}

}  // namespace fastlstm::FASTLSTM_ISA::portable
