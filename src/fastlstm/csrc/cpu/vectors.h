// Vectors of float for one instruction set, written once with the compiler's vector extension.
//
// A source file defines FASTLSTM_ISA (a namespace) and FASTLSTM_LANES, then includes the kernel
// headers: everything here lives in that namespace, so that code built for AVX-512 can never be
// linked into the path of a CPU without it. For the same reason these headers use no inline
// function of the standard library.
#pragma once

#include <cstdint>

#define FASTLSTM_INLINE inline __attribute__((always_inline))

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int kLanes = FASTLSTM_LANES;

using Vec = float __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Integers = int32_t __attribute__((vector_size(kLanes * 4)));
using Shorts = int16_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));

FASTLSTM_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
FASTLSTM_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
FASTLSTM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FASTLSTM_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <typename To, typename From>
FASTLSTM_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <typename Vector>
FASTLSTM_INLINE Vector load_bits(const void* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <typename Vector>
FASTLSTM_INLINE void store_bits(void* p, Vector v) {
  __builtin_memcpy(p, &v, sizeof v);
}

FASTLSTM_INLINE Vec splat(float x) { return x - Vec{}; }

}  // namespace fastlstm::FASTLSTM_ISA
