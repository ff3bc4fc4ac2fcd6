// exp, sigmoid and tanh on vectors. Measured over all finite floats in
// tests/ops/backends/test_native.py.
#pragma once

#include "cpu/simd.h"

namespace fastlstm::FASTLSTM_ISA {

// x = n ln2 + r with |r| <= ln2 / 2: returns e^r - 1 and sets `scale` to 2^n. |x| <= 80.
//
// Polynomial: Cephes expf (S. L. Moshier). A NaN comes through in the return value.
FASTLSTM_INLINE Vec reduced_expm1(Vec x, Vec& scale) {
  // 1.5 * 2^23 rounds to an integer in the low bits; the added 127 makes these the exponent of 2^n.
  constexpr float kRound = 12582912.0f + 127.0f;
  const Vec shifted = x * 1.44269504088896341f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  scale = bits_of<Vec>(bits_of<Words>(shifted) << 23);
  return r + r * r * p;
}

// 1 / (1 + e^-x), to 3e-7 relative.
FASTLSTM_INLINE Vec sigmoid(Vec x) {
  const Vec y = min_of(max_of(-x, splat(-80.0f)), splat(80.0f));
  Vec scale;
  const Vec e = reduced_expm1(y, scale);
  return reciprocal(1.0f + (scale + scale * e));
}

// (e^2x - 1) / (e^2x + 1), to 4e-7 relative: e^2x - 1 is formed without cancellation.
FASTLSTM_INLINE Vec tanh(Vec x) {
  const Vec y = min_of(max_of(x + x, splat(-30.0f)), splat(30.0f));
  Vec scale;
  const Vec e = reduced_expm1(y, scale);
  const Vec expm1 = (scale - 1.0f) + scale * e;
  return expm1 * reciprocal(expm1 + 2.0f);
}

// Sigmoid and tanh as exact as a memory format needs them.
template <typename Format>
struct Exactly {
  static FASTLSTM_INLINE Vec sigmoid(Vec x) { return FASTLSTM_ISA::sigmoid(x); }
  static FASTLSTM_INLINE Vec tanh(Vec x) { return FASTLSTM_ISA::tanh(x); }
};

#if defined(FASTLSTM_HAS_POWERS)
// Results next to operands of 8 bits: 1e-4 relative is a fortieth of their rounding. What is left
// to 1 is as exact as float32 stores it, 1e-4 relative or its spacing. Fewer instructions; AMX is
// so fast that these are what a step waits for.
template <>
struct Exactly<Bfloat16> {
  // 2^y = 2^n 2^r, polynomials fitted for the least relative error over |r| <= 1/2.
  static FASTLSTM_INLINE Vec sigmoid(Vec x) {
    Vec n;  // 2^126 at most: infinity times its inverse is no number
    const Vec r = split(min_of(x * -1.44269504f, splat(126.0f)), n);
    const Vec p = ((0.05517132f * r + 0.24261054f) * r + 0.69326099f) * r + 0.99992811f;
    return inverse(1.0f + power(p, n));
  }

  static FASTLSTM_INLINE Vec tanh(Vec x) {
    Vec n;
    const Vec r = split(min_of(x * 2.88539008f, splat(40.0f)), n);
    const Vec q = ((0.00961809f * r + 0.05583721f) * r + 0.24023252f) * r + 0.69313686f;
    const Vec whole = power(splat(1.0f), n);
    const Vec expm1 = whole * (q * r) + (whole - 1.0f);
    return expm1 * inverse(expm1 + 2.0f);
  }
};
#endif

}  // namespace fastlstm::FASTLSTM_ISA
