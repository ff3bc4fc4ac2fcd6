// Matrix products on packed strips, a block of rows at a time.
//
// The right operand is packed into strips of kLanes columns, each [inner / pair][kLanes][pair]
// (cpu/pack.h). A block of rows against up to four strips goes to a small buffer in the first-level
// cache, from where the caller's epilogue takes it: an LSTM cell update, its gradient, or a store.
// Every sum runs over the inner dimension in order, whatever the block, so that results do not
// depend on how rows and strips are dealt out to threads.
#pragma once

#include "cpu/simd.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int kStrips = 4;

struct Range {
  int64_t begin, end;
};

// Part `index` of `count` nearly equal ones, cut at multiples of `grain`.
FASTLSTM_INLINE Range part_of(Range whole, int64_t index, int64_t count, int64_t grain = 1) {
  const int64_t grains = ceil_div(whole.end - whole.begin, grain);
  const int64_t begin = whole.begin + grains * index / count * grain;
  const int64_t end = whole.begin + grains * (index + 1) / count * grain;
  return {min_of(begin, whole.end), min_of(end, whole.end)};
}

// Sums in vector registers: 6 x 4 of 32 AVX-512 registers, 3 x 4 of 16 others.
template <typename Format>
struct VectorEngine {
  using Element = typename Format::Element;
  static constexpr int kRows = kLanes == 16 ? 6 : 3;

  VectorEngine() = default;

  // out[rows][strips * kLanes] = a[rows][inner] * b; strip s starts at b + s * strip_stride.
  static void block(const Element* a, int64_t lda, int rows, const Element* b, int64_t strip_stride,
                    int strips, int64_t inner, float* out) {
    by_rows<kRows>(a, lda, rows, b, strip_stride, strips, inner, out);
  }

 private:
  template <int kRow>
  static FASTLSTM_INLINE void by_rows(const Element* a, int64_t lda, int rows, const Element* b,
                                      int64_t strip_stride, int strips, int64_t inner, float* out) {
    if (rows == kRow) {
      switch (strips) {
        case 4:
          return tile<kRow, 4>(a, lda, b, strip_stride, inner, out);
        case 3:
          return tile<kRow, 3>(a, lda, b, strip_stride, inner, out);
        case 2:
          return tile<kRow, 2>(a, lda, b, strip_stride, inner, out);
        default:
          return tile<kRow, 1>(a, lda, b, strip_stride, inner, out);
      }
    }
    if constexpr (kRow > 1) by_rows<kRow - 1>(a, lda, rows, b, strip_stride, strips, inner, out);
  }

  template <int kRow, int kStrip>
  static __attribute__((noinline)) void tile(const float* a, int64_t lda, const float* b,
                                             int64_t strip_stride, int64_t inner, float* out) {
    Vec sum[kRow][kStrip] = {};
    for (int64_t k = 0; k < inner; ++k) {
      Vec right[kStrip];
#pragma GCC unroll 4
      for (int s = 0; s < kStrip; ++s) right[s] = Float32::load(b + s * strip_stride + k * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < kRow; ++r) {
        const Vec left = splat(a[r * lda + k]);
#pragma GCC unroll 4
        for (int s = 0; s < kStrip; ++s) sum[r][s] += left * right[s];
      }
    }
    write(sum, out);
  }

  template <int kRow, int kStrip>
  static __attribute__((noinline)) void tile(const uint16_t* a, int64_t lda, const uint16_t* b,
                                             int64_t strip_stride, int64_t inner, float* out) {
    Vec sum[kRow][kStrip] = {};
    for (int64_t k = 0; k < inner; k += 2) {
      Words right[kStrip];
#pragma GCC unroll 4
      for (int s = 0; s < kStrip; ++s) {
        __builtin_memcpy(&right[s], b + s * strip_stride + k * kLanes, sizeof right[s]);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRow; ++r) {
        uint32_t pair;
        __builtin_memcpy(&pair, a + r * lda + k, sizeof pair);
        const Words left = pair - Words{};
#pragma GCC unroll 4
        for (int s = 0; s < kStrip; ++s) sum[r][s] = dot_pairs(sum[r][s], left, right[s]);
      }
    }
    write(sum, out);
  }

  // sum + a.low * b.low + a.high * b.high in every lane
  static FASTLSTM_INLINE Vec dot_pairs(Vec sum, Words a, Words b) {
#if defined(__AVX512BF16__)
    return bits_of<Vec>(
        _mm512_dpbf16_ps(bits_of<__m512>(sum), bits_of<__m512bh>(a), bits_of<__m512bh>(b)));
#else
    sum += bits_of<Vec>(a << 16) * bits_of<Vec>(b << 16);
    return sum + bits_of<Vec>(a & 0xffff0000u) * bits_of<Vec>(b & 0xffff0000u);
#endif
  }

  template <int kRow, int kStrip>
  static FASTLSTM_INLINE void write(const Vec (&sum)[kRow][kStrip], float* out) {
#pragma GCC unroll 6
    for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrip; ++s) {
        Float32::store(out + (r * kStrip + s) * kLanes, sum[r][s]);
      }
    }
  }
};

// Left operand `a`, rows lda elements apart, times the strips of `b`. For each block calls
// epilogue(first row, rows, first strip, strips, block [rows][strips * kLanes]).
template <typename Engine, typename Epilogue>
FASTLSTM_INLINE void multiply(Engine& engine, const typename Engine::Element* a, int64_t lda,
                              Range rows, const typename Engine::Element* b, int64_t strip_stride,
                              Range strips, int64_t inner, Epilogue&& epilogue) {
  alignas(64) float out[Engine::kRows * kStrips * kLanes];
  const int64_t num_rows = rows.end - rows.begin;
  const int64_t blocks = ceil_div(num_rows, Engine::kRows);
  for (int64_t s = strips.begin; s < strips.end; s += kStrips) {
    const int num_strips = static_cast<int>(min_of(kStrips, strips.end - s));
    for (int64_t block = 0; block < blocks; ++block) {
      const Range part = Engine::kRows >= 16 ? part_of(rows, block, blocks, Engine::kRows)
                                             : part_of(rows, block, blocks);
      const int count = static_cast<int>(part.end - part.begin);
      engine.block(a + part.begin * lda, lda, count, b + s * strip_stride, strip_stride, num_strips,
                   inner, out);
      epilogue(part.begin, count, s, num_strips, out);
    }
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
