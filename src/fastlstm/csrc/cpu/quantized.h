// int8 operands: activations as 127 x + 128 in eight bits, weights with one factor per column.
//
// Sums are whole numbers, so that every instruction set and every order gives the same.
#pragma once

#include "cpu/activations.h"
#include "cpu/gemm.h"

namespace fastlstm::FASTLSTM_ISA {

struct Int8 {
  using Element = uint8_t;
  static constexpr int kPair = 4;
  static constexpr int kInner = kHasTiles ? 64 : 8;  // what a product takes at once
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
    constexpr bool is_square = kHasSquares && kRow > 1;
    constexpr int kSets = kRow * 2 <= kRows && !is_square ? 2 : 1;
    constexpr int kStep = is_square ? 8 : 4 * kSets;
    Words sum[kSets][kRow][kStrips] = {};
    for (int64_t k = 0; k < inner; k += kStep) {
      if constexpr (is_square) {
        add_squares(sum[0], a + k, stride, [&](int s, int half) {
          return load_bits<Words>(b + (half * kStrips + s) * kLanes * 4);
        });
        b += 2 * kStrips * kLanes * 4;
        continue;
      }
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
    if constexpr (is_square) to_squares(sum[0], true);
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
