// x86-64: SSE2 alone, AVX2 with FMA, AVX-512 (F, BW, VL, DQ), and what VNNI and BF16 add to them.
#pragma once

#include <immintrin.h>

#include "cpu/isa_portable.h"

namespace fastlstm::FASTLSTM_ISA {

// Flushes denormal numbers to zero while it lives: states and gradients that fade out would slow
// every multiplication down a hundredfold.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// Makes streamed stores visible to the other threads.
FASTLSTM_INLINE void stream_fence() { _mm_sfence(); }

#if defined(__AVX512F__)

inline constexpr bool kHas32Registers = true;  // of one vector each

// With a NaN the instruction returns its second operand. By intrinsics: GCC 12 turns the portable
// form into a comparison and a blend.
FASTLSTM_INLINE Vec min_of(Vec a, Vec b) {
  return bits_of<Vec>(_mm512_maskz_min_ps(0xffff, bits_of<__m512>(b), bits_of<__m512>(a)));
}
FASTLSTM_INLINE Vec max_of(Vec a, Vec b) {
  return bits_of<Vec>(_mm512_maskz_max_ps(0xffff, bits_of<__m512>(b), bits_of<__m512>(a)));
}
FASTLSTM_INLINE Vec reciprocal(Vec x) {
  const Vec r = bits_of<Vec>(_mm512_maskz_rcp14_ps(0xffff, bits_of<__m512>(x)));
  return r * (2.0f - x * r);
}
FASTLSTM_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
  return bits_of<Vec>(_mm512_fmadd_ps(bits_of<__m512>(a), bits_of<__m512>(b), bits_of<__m512>(c)));
}
FASTLSTM_INLINE float sum_lanes(Vec v) { return _mm512_reduce_add_ps(bits_of<__m512>(v)); }
FASTLSTM_INLINE float max_lane(Vec v) { return _mm512_reduce_max_ps(bits_of<__m512>(v)); }
FASTLSTM_INLINE bool is_any(Words w) {
  return _mm512_test_epi32_mask(bits_of<__m512i>(w), bits_of<__m512i>(w)) != 0;
}
FASTLSTM_INLINE bool has_nan(Vec v) {
  return _mm512_cmp_ps_mask(bits_of<__m512>(v), bits_of<__m512>(v), _CMP_UNORD_Q) != 0;
}
FASTLSTM_INLINE int64_t count_from(Vec v, float bound) {
  const auto mask = _mm512_cmp_ps_mask(bits_of<__m512>(v), _mm512_set1_ps(bound), _CMP_GE_OQ);
  return __builtin_popcount(mask);
}
FASTLSTM_INLINE int64_t store_between(const float* v, const float* w, float low, float high,
                                      float* to_v, float* to_w) {
  const auto values = load_bits<__m512>(v), beside = load_bits<__m512>(w);
  const auto mask = _mm512_cmp_ps_mask(values, _mm512_set1_ps(low), _CMP_GE_OQ) &
                    _mm512_cmp_ps_mask(values, _mm512_set1_ps(high), _CMP_LT_OQ);
  // In registers: a compressing store takes Zen 4 over a hundred cycles.
  _mm512_storeu_ps(to_v, _mm512_maskz_compress_ps(mask, values));
  _mm512_storeu_ps(to_w, _mm512_maskz_compress_ps(mask, beside));
  return __builtin_popcount(mask);
}

// By intrinsics: GCC 12 turns the portable conversion into two halves and their reunion.
FASTLSTM_INLINE Words widen(Halves h) {
  return bits_of<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, bits_of<__m256i>(h)));
}
FASTLSTM_INLINE void stream(float* p, Vec v) { _mm512_stream_ps(p, bits_of<__m512>(v)); }
FASTLSTM_INLINE void stream(void* p, Halves h) {
  _mm256_stream_si256(static_cast<__m256i*>(p), bits_of<__m256i>(h));
}

FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  return sum + bits_of<Words>(_mm512_madd_epi16(bits_of<__m512i>(a), bits_of<__m512i>(b)));
}
FASTLSTM_INLINE Shorts byte_products(Words a, Words b) {
  return bits_of<Shorts>(_mm512_maddubs_epi16(bits_of<__m512i>(a), bits_of<__m512i>(b)));
}
FASTLSTM_INLINE int32_t sum_of_64(const int8_t* p) {
  const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  const __m512i sums = _mm512_sad_epu8(bytes, _mm512_setzero_si512());
  return static_cast<int32_t>(_mm512_reduce_add_epi64(sums)) - 128 * 64;
}

using Scale = uint16_t;  // fp16
FASTLSTM_INLINE Vec load_scales(const Scale* p) {
  return bits_of<Vec>(_mm512_maskz_cvtph_ps(0xffff, load_bits<__m256i>(p)));
}
FASTLSTM_INLINE void store_scales(Scale* p, Vec v) {
  store_bits(p, _mm512_maskz_cvtps_ph(0xffff, bits_of<__m512>(v), 0));
}

using LinePart = uint64_t __attribute__((vector_size(64)));
FASTLSTM_INLINE LinePart product_of_halves(LinePart x) {
  return bits_of<LinePart>(
      _mm512_maskz_mul_epu32(0xff, bits_of<__m512i>(x), bits_of<__m512i>(x >> 32)));
}

// y = n + r with a whole n and |r| <= 1/2; r is 0 for an infinite y. `power` returns p * 2^n.
#define FASTLSTM_HAS_POWERS 1
FASTLSTM_INLINE Vec split(Vec y, Vec& n) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  n = bits_of<Vec>(_mm512_maskz_roundscale_ps(0xffff, bits_of<__m512>(y), kNearest));
  return bits_of<Vec>(_mm512_maskz_reduce_ps(0xffff, bits_of<__m512>(y), kNearest));
}
FASTLSTM_INLINE Vec power(Vec p, Vec n) {
  return bits_of<Vec>(_mm512_maskz_scalef_ps(0xffff, bits_of<__m512>(p), bits_of<__m512>(n)));
}
// 1 / d of a finite d. rcp14 alone would be off by 6e-5, which at x = 10 is as much as 1 -
// sigmoid: what a cell is to keep for thousands of steps would fade; and 1 - tanh^2 would turn
// negative.
FASTLSTM_INLINE Vec inverse(Vec d) {
  const Vec q = bits_of<Vec>(_mm512_maskz_rcp14_ps(0xffff, bits_of<__m512>(d)));
  return q + q * (1.0f - d * q);
}

#if defined(__AVX512BF16__)
FASTLSTM_INLINE Halves round_to_bf16(Vec x) {
  return bits_of<Halves>(_mm512_cvtneps_pbh(bits_of<__m512>(x)));
}
inline constexpr bool kHasBf16Pairs = true;
FASTLSTM_INLINE Vec add_bf16_pairs(Vec sum, Words a, Words b) {
  return bits_of<Vec>(
      _mm512_dpbf16_ps(bits_of<__m512>(sum), bits_of<__m512bh>(a), bits_of<__m512bh>(b)));
}
#else
using portable::add_bf16_pairs;
using portable::round_to_bf16;
inline constexpr bool kHasBf16Pairs = false;
#endif

#elif defined(__AVX2__)

inline constexpr bool kHas32Registers = false;
inline constexpr bool kHasBf16Pairs = false;
using portable::add_bf16_pairs;
using portable::has_nan;
using portable::is_any;
using portable::load_scales;
using portable::max_lane;
using portable::reciprocal;
using portable::round_to_bf16;
using portable::Scale;
using portable::store_scales;
using portable::sum_lanes;
using portable::sum_of_64;

FASTLSTM_INLINE Vec min_of(Vec a, Vec b) {  // as for AVX-512
  return bits_of<Vec>(_mm256_min_ps(bits_of<__m256>(b), bits_of<__m256>(a)));
}
FASTLSTM_INLINE Vec max_of(Vec a, Vec b) {
  return bits_of<Vec>(_mm256_max_ps(bits_of<__m256>(b), bits_of<__m256>(a)));
}
FASTLSTM_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
  return bits_of<Vec>(_mm256_fmadd_ps(bits_of<__m256>(a), bits_of<__m256>(b), bits_of<__m256>(c)));
}
FASTLSTM_INLINE int64_t count_from(Vec v, float bound) {
  const auto mask = _mm256_cmp_ps(bits_of<__m256>(v), _mm256_set1_ps(bound), _CMP_GE_OQ);
  return __builtin_popcount(_mm256_movemask_ps(mask));
}
// For every mask of 8 lanes the lanes it holds, side by side: a byte each.
inline constexpr auto kPlaces = [] {
  struct {
    uint64_t of[256];
  } places{};
  for (uint64_t mask = 0; mask < 256; ++mask) {
    int count = 0;
    for (uint64_t lane = 0; lane < 8; ++lane) {
      if (mask >> lane & 1) places.of[mask] |= lane << 8 * count++;
    }
  }
  return places;
}();
FASTLSTM_INLINE int64_t store_between(const float* v, const float* w, float low, float high,
                                      float* to_v, float* to_w) {
  const auto values = load_bits<__m256>(v), beside = load_bits<__m256>(w);
  const auto is_between = _mm256_and_ps(_mm256_cmp_ps(values, _mm256_set1_ps(low), _CMP_GE_OQ),
                                        _mm256_cmp_ps(values, _mm256_set1_ps(high), _CMP_LT_OQ));
  const int mask = _mm256_movemask_ps(is_between);
  const auto bytes = _mm_cvtsi64_si128(static_cast<int64_t>(kPlaces.of[mask]));
  const auto places = _mm256_cvtepu8_epi32(bytes);
  _mm256_storeu_ps(to_v, _mm256_permutevar8x32_ps(values, places));
  _mm256_storeu_ps(to_w, _mm256_permutevar8x32_ps(beside, places));
  return __builtin_popcount(mask);
}
FASTLSTM_INLINE Words widen(Halves h) {  // as for AVX-512
  return bits_of<Words>(_mm256_cvtepu16_epi32(bits_of<__m128i>(h)));
}
FASTLSTM_INLINE void stream(float* p, Vec v) { _mm256_stream_ps(p, bits_of<__m256>(v)); }
FASTLSTM_INLINE void stream(void* p, Halves h) {
  _mm_stream_si128(static_cast<__m128i*>(p), bits_of<__m128i>(h));
}
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  return sum + bits_of<Words>(_mm256_madd_epi16(bits_of<__m256i>(a), bits_of<__m256i>(b)));
}
FASTLSTM_INLINE Shorts byte_products(Words a, Words b) {
  return bits_of<Shorts>(_mm256_maddubs_epi16(bits_of<__m256i>(a), bits_of<__m256i>(b)));
}

using LinePart = uint64_t __attribute__((vector_size(32)));
FASTLSTM_INLINE LinePart product_of_halves(LinePart x) {
  return bits_of<LinePart>(_mm256_mul_epu32(bits_of<__m256i>(x), bits_of<__m256i>(x >> 32)));
}

#else

inline constexpr bool kHas32Registers = false;
inline constexpr bool kHasBf16Pairs = false;
using portable::add_bf16_pairs;
using portable::add_pairs;
using portable::byte_products;
using portable::count_from;
using portable::has_nan;
using portable::is_any;
using portable::load_scales;
using portable::max_lane;
using portable::max_of;
using portable::min_of;
using portable::multiply_add;
using portable::reciprocal;
using portable::round_to_bf16;
using portable::Scale;
using portable::store_between;
using portable::store_scales;
using portable::stream;
using portable::sum_lanes;
using portable::sum_of_64;
using portable::widen;

using LinePart = uint64_t __attribute__((vector_size(16)));
FASTLSTM_INLINE LinePart product_of_halves(LinePart x) {
  return bits_of<LinePart>(_mm_mul_epu32(bits_of<__m128i>(x), bits_of<__m128i>(x >> 32)));
}

#endif

// Four unsigned bytes of `a` in every lane by four signed ones of `b`, added to `sum`.
#if defined(__AVX512VNNI__)
#define FASTLSTM_HAS_DOT_BYTES 1
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      _mm512_dpbusd_epi32(bits_of<__m512i>(sum), bits_of<__m512i>(a), bits_of<__m512i>(b)));
}
#elif defined(__AVXVNNI__)
#define FASTLSTM_HAS_DOT_BYTES 1
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      _mm256_dpbusd_avx_epi32(bits_of<__m256i>(sum), bits_of<__m256i>(a), bits_of<__m256i>(b)));
}
#endif

#if defined(FASTLSTM_HAS_DOT_BYTES)
inline constexpr bool kHasOffset = true;
using Quads = Words;
FASTLSTM_INLINE Quads quads_of(Words bytes) { return bytes; }
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) { return dot_bytes(sum, a, b); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
// |a| * (b with the sign of a): pairs of products of up to 127 * 127 fit the signed 16 bits in
// which the instruction sums them, where 127 x + 128 would saturate.
inline constexpr bool kHasOffset = false;
struct Quads {
  Words bytes, magnitudes;
};
FASTLSTM_INLINE Quads quads_of(Words bytes) {
  const Words a = bytes ^ 0x80808080u;
  return {a, bits_of<Words>(_mm256_abs_epi8(bits_of<__m256i>(a)))};
}
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) {
  const Words signs =
      bits_of<Words>(_mm256_sign_epi8(bits_of<__m256i>(b), bits_of<__m256i>(a.bytes)));
  return add_pairs(sum, bits_of<Words>(byte_products(a.magnitudes, signs)), 0x00010001u - Words{});
}
#else
using portable::kHasOffset;
using portable::Quads;
using portable::quads_of;
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) {
  return portable::dot_quads(sum, a, b, add_pairs);
}
#endif

// Keeps `w` in a register: GCC would load it once per use.
FASTLSTM_INLINE void keep_loaded(Words& w) {
#if defined(__AVX2__)
  __asm__("" : "+v"(w));
#else
  (void)w;
#endif
}

}  // namespace fastlstm::FASTLSTM_ISA
