// int8 operands: activations as 127 x + 128 in eight bits, weights with one factor per column.
//
// Sums are whole numbers, so that every instruction set and every order gives the same.
#pragma once

#include "cpu/activations.h"
#include "cpu/gemm.h"

namespace fastlstm::FASTLSTM_ISA {

using Bytes = uint8_t __attribute__((vector_size(kLanes)));
using Integers = int32_t __attribute__((vector_size(kLanes * 4)));

struct Int8 {
  using Element = uint8_t;
  static constexpr int kPair = 4;
  static constexpr int kInner = 64;  // what an AMX tile takes at once
  static constexpr uint8_t kZero = 128;

  static FASTLSTM_INLINE Vec load(const uint8_t* p) {
    Bytes bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    const Integers whole = __builtin_convertvector(bytes, Integers) - 128;
    return __builtin_convertvector(whole, Vec) * (1.0f / 127.0f);
  }
  // |v| <= 1; the whole number comes to stand in the low bits of 1.5 * 2^23 + n.
  static FASTLSTM_INLINE void store(uint8_t* p, Vec v) {
    const Words rounded = bits_of<Words>(v * 127.0f + (12582912.0f + 128.0f)) & 0xffu;
    const Bytes bytes = __builtin_convertvector(rounded, Bytes);
    __builtin_memcpy(p, &bytes, sizeof bytes);
  }
};

template <>
struct Exactly<Int8> : Exactly<Bfloat16> {};

#if defined(__AVX512BW__)
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  return sum + bits_of<Words>(_mm512_madd_epi16(bits_of<__m512i>(a), bits_of<__m512i>(b)));
}
#elif defined(__AVX2__)
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  return sum + bits_of<Words>(_mm256_madd_epi16(bits_of<__m256i>(a), bits_of<__m256i>(b)));
}
#elif defined(__aarch64__) && FASTLSTM_LANES == 4
// Products of a byte and a signed one fit 16 bits.
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  using Shorts = int16_t __attribute__((vector_size(kLanes * 4)));
  const Shorts products = bits_of<Shorts>(a) * bits_of<Shorts>(b);
  return bits_of<Words>(vpadalq_s16(bits_of<int32x4_t>(sum), bits_of<int16x8_t>(products)));
}
#else
// sum + a.low * b.low + a.high * b.high of signed halves
FASTLSTM_INLINE Words add_pairs(Words sum, Words a, Words b) {
  const auto low = [](Words x) { return bits_of<Integers>(x << 16) >> 16; };
  const auto high = [](Words x) { return bits_of<Integers>(x) >> 16; };
  return sum + bits_of<Words>(low(a) * low(b) + high(a) * high(b));
}
#endif

// sum + the products of four bytes of `a`, unsigned with VNNI, with four signed ones of `b`
#if defined(__AVX512VNNI__)
#define FASTLSTM_DOT_BYTES 1
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      _mm512_dpbusd_epi32(bits_of<__m512i>(sum), bits_of<__m512i>(a), bits_of<__m512i>(b)));
}
#elif defined(__AVXVNNI__)
#define FASTLSTM_DOT_BYTES 1
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      _mm256_dpbusd_avx_epi32(bits_of<__m256i>(sum), bits_of<__m256i>(a), bits_of<__m256i>(b)));
}
#elif defined(__ARM_FEATURE_DOTPROD) && FASTLSTM_LANES == 4
#define FASTLSTM_DOT_BYTES 1
FASTLSTM_INLINE Words dot_bytes(Words sum, Words a, Words b) {
  return bits_of<Words>(
      vdotq_s32(bits_of<int32x4_t>(sum), bits_of<int8x16_t>(a), bits_of<int8x16_t>(b)));
}
#endif

// Four activations in every lane, as `dot_quads` takes them.
#if defined(FASTLSTM_DOT_BYTES)
#if defined(__aarch64__)
inline constexpr bool kSignedSums = true;  // whether a sum lacks the offset 128 of activations
#else
inline constexpr bool kSignedSums = false;
#endif
using Quads = Words;
FASTLSTM_INLINE Quads quads_of(Words bytes) { return kSignedSums ? bytes ^ 0x80808080u : bytes; }
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) { return dot_bytes(sum, a, b); }
#elif defined(__AVX2__) && !defined(__AVX512BW__)
// |a| * (b with the sign of a): pairs of products of up to 127 * 127 fit the signed 16 bits in
// which the instruction sums them, where a + 128 would saturate.
inline constexpr bool kSignedSums = true;
struct Quads {
  Words bytes, magnitudes;
};
FASTLSTM_INLINE Quads quads_of(Words bytes) {
  const Words a = bytes ^ 0x80808080u;
  return {a, bits_of<Words>(_mm256_abs_epi8(bits_of<__m256i>(a)))};
}
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) {
  const __m256i signs = _mm256_sign_epi8(bits_of<__m256i>(b), bits_of<__m256i>(a.bytes));
  const __m256i pairs = _mm256_maddubs_epi16(bits_of<__m256i>(a.magnitudes), signs);
  return add_pairs(sum, bits_of<Words>(pairs), 0x00010001u - Words{});
}
#else
inline constexpr bool kSignedSums = false;
struct Quads {
  Words even, odd;
};
FASTLSTM_INLINE Quads quads_of(Words bytes) {
  return {bytes & 0x00ff00ffu, (bytes >> 8) & 0x00ff00ffu};
}
FASTLSTM_INLINE Words dot_quads(Words sum, Quads a, Words b) {
  using Shorts = int16_t __attribute__((vector_size(kLanes * 4)));
  const Shorts odd = bits_of<Shorts>(b) >> 8, even = (bits_of<Shorts>(b) << 8) >> 8;
  return add_pairs(add_pairs(sum, a.even, bits_of<Words>(even)), a.odd, bits_of<Words>(odd));
}
#endif

FASTLSTM_INLINE Quads load_quads(const uint8_t* a) {
  uint32_t four;
  __builtin_memcpy(&four, a, sizeof four);
  return quads_of(four - Words{});
}

// Rows of activations against four strips that stand side by side: [inner / 4][strip][lane][4].
struct QuantizedEngine {
  using Element = uint8_t;
  static constexpr int kRows = kHas32Registers ? 6 : 3;

  static void block(const uint8_t* a, int64_t stride, int rows, const uint8_t* b, int64_t inner,
                    int32_t* out) {
    by_rows<kRows>(a, stride, rows, b, inner, out);
  }

 private:
  template <int kRow>
  static FASTLSTM_INLINE void by_rows(const uint8_t* a, int64_t stride, int rows, const uint8_t* b,
                                      int64_t inner, int32_t* out) {
    if (rows == kRow) return tile<kRow>(a, stride, b, inner, out);
    if constexpr (kRow > 1) by_rows<kRow - 1>(a, stride, rows, b, inner, out);
  }

  // Up to three rows would wait for their own sums: they have two sets of them.
  template <int kRow>
  static __attribute__((noinline)) void tile(const uint8_t* a, int64_t stride, const uint8_t* b,
                                             int64_t inner, int32_t* out) {
    constexpr int kSets = kRow * 2 <= kRows ? 2 : 1;
    Words sum[kSets][kRow][kStrips] = {};
    for (int64_t k = 0; k < inner; k += 4 * kSets) {
#pragma GCC unroll 2
      for (int set = 0; set < kSets; ++set) {
        Words right[kStrips];
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s)
          __builtin_memcpy(&right[s], b + s * kLanes * 4, sizeof right[s]);
        b += kStrips * kLanes * 4;
#pragma GCC unroll 6
        for (int r = 0; r < kRow; ++r) {
          const Quads left = load_quads(a + r * stride + k + 4 * set);
#pragma GCC unroll 4
          for (int s = 0; s < kStrips; ++s)
            sum[set][r][s] = dot_quads(sum[set][r][s], left, right[s]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        if constexpr (kSets == 2) sum[0][r][s] += sum[1][r][s];
        __builtin_memcpy(out + (r * kStrips + s) * kLanes, &sum[0][r][s], sizeof(Words));
      }
    }
  }
};

// As multiply in gemm.h; `strips` are whole fours. The sums are whole numbers in the place of
// floats.
template <typename Engine, typename Epilogue>
FASTLSTM_INLINE void multiply_quantized(Engine& engine, Left<uint8_t> a, Range rows,
                                        const uint8_t* b, int64_t strip_stride, Strips strips,
                                        int64_t inner, Epilogue&& epilogue) {
  alignas(64) int32_t out[Engine::kRows * kStrips * kLanes];
  const int64_t blocks = ceil_div(rows.end - rows.begin, Engine::kRows);
  for (int64_t n = 0; n < strips.panels(); ++n) {
    const int64_t s = strips.panel(n).begin;
    for (int64_t block = 0; block < blocks; ++block) {
      const Range mine = part_of(rows, block, blocks);
      engine.block(a.rows + mine.begin * a.row_stride, a.row_stride,
                   static_cast<int>(mine.end - mine.begin), b + s * strip_stride, inner, out);
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        epilogue(row, s, kStrips,
                 reinterpret_cast<const float*>(out + (row - mine.begin) * kStrips * kLanes));
      }
    }
  }
}

template <typename Epilogue>
FASTLSTM_INLINE void multiply(QuantizedEngine& engine, Left<uint8_t> a, Range rows,
                              const uint8_t* b, int64_t strip_stride, Strips strips, int64_t inner,
                              Epilogue&& epilogue) {
  multiply_quantized(engine, a, rows, b, strip_stride, strips, inner, epilogue);
}

}  // namespace fastlstm::FASTLSTM_ISA
