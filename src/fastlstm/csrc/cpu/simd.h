// Vectors of float for one instruction set, written once with the compiler's vector extension.
//
// A source file defines FASTLSTM_ISA (a namespace) and FASTLSTM_LANES, then includes the kernel
// headers: everything here lives in that namespace, so that code built for AVX-512 can never be
// linked into the path of a CPU without it. For the same reason these headers use no inline
// function of the standard library.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FASTLSTM_INLINE inline __attribute__((always_inline))

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int kLanes = FASTLSTM_LANES;
#if defined(__AVX512F__) || (defined(__aarch64__) && FASTLSTM_LANES == 4)
inline constexpr bool kHas32Registers = true;  // of one vector each
#else
inline constexpr bool kHas32Registers = false;
#endif

using Vec = float __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));

FASTLSTM_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
FASTLSTM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FASTLSTM_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <typename To, typename From>
FASTLSTM_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

FASTLSTM_INLINE Vec splat(float x) { return x - Vec{}; }
FASTLSTM_INLINE Vec min_of(Vec a, Vec b) { return b < a ? b : a; }  // keeps a NaN of `a`
FASTLSTM_INLINE Vec max_of(Vec a, Vec b) { return b > a ? b : a; }

// 1 / x to about 1 ulp for normal, finite x whose reciprocal is normal.
FASTLSTM_INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  const Vec r = bits_of<Vec>(_mm512_maskz_rcp14_ps(0xffff, bits_of<__m512>(x)));
  return r * (2.0f - x * r);
#else
  return 1.0f / x;
#endif
}

// By intrinsics: GCC 12 turns the portable conversion into two halves and their reunion.
FASTLSTM_INLINE Words widen(Halves h) {
#if defined(__AVX512F__)
  return bits_of<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, bits_of<__m256i>(h)));
#elif defined(__AVX2__)
  return bits_of<Words>(_mm256_cvtepu16_epi32(bits_of<__m128i>(h)));
#else
  return __builtin_convertvector(h, Words);
#endif
}

// bf16 to nearest even; a NaN stays one.
FASTLSTM_INLINE Halves round_to_bf16(Vec x) {
#if defined(__AVX512BF16__)
  return bits_of<Halves>(_mm512_cvtneps_pbh(bits_of<__m512>(x)));
#else
  const Words u = bits_of<Words>(x);
  const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Words quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector(x != x ? quiet : rounded, Halves);
#endif
}

FASTLSTM_INLINE Vec widen_bf16(Halves h) { return bits_of<Vec>(widen(h) << 16); }

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
  // Past the caches; `p` is aligned to the vector.
  static FASTLSTM_INLINE void stream(float* p, Vec v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, bits_of<__m512>(v));
#elif defined(__AVX2__)
    _mm256_stream_ps(p, bits_of<__m256>(v));
#else
    store(p, v);
#endif
  }
};

struct Bfloat16 {
  using Element = uint16_t;
  static constexpr int kPair = 2;
  static constexpr int kInner = 32;  // what an AMX tile takes at once
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
    const Halves h = round_to_bf16(v);
#if defined(__AVX512F__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits_of<__m256i>(h));
#elif defined(__AVX2__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), bits_of<__m128i>(h));
#else
    __builtin_memcpy(p, &h, sizeof h);
#endif
  }
};

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

FASTLSTM_INLINE float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(bits_of<__m512>(v));
#else
  float whole[kLanes];
  Float32::store(whole, v);
  for (int s = kLanes / 2; s > 0; s /= 2) {
    for (int k = 0; k < s; ++k) whole[k] += whole[k + s];
  }
  return whole[0];
#endif
}

// Makes streamed stores visible to the other threads.
FASTLSTM_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Flushes denormal numbers to zero while it lives: states and gradients that fade out would slow
// every multiplication down a hundredfold.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24));
  }
  ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};

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
