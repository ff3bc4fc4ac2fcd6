// int4 weights: whole numbers from -7 to 7 and a scale per column and group of 64 inner values;
// activations in 8 bits, as signed bytes.
//
// Weights are the unsigned operand, as code + 8; the sums of a group start at -8 times the sum of
// its activations, so that each group's sum is an exact whole number. Times its scale it is added
// to a sum in float, group by group, whatever the block of rows.
#pragma once

#include "cpu/right.h"

namespace fastlstm::FASTLSTM_ISA {

struct Int4 {
  using Element = int8_t;
  static constexpr int kPair = 4;
  static constexpr int kInner = 64;  // a group

  static FASTLSTM_INLINE Vec load(const int8_t* p) {
    int8_t __attribute__((vector_size(kLanes))) bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Integers), Vec) * (1.0f / 127.0f);
  }
  // |v| <= 1, see Int8::store.
  static FASTLSTM_INLINE void store(int8_t* p, Vec v) {
    const Words rounded = bits_of<Words>(v * 127.0f + 12582912.0f) & 0xffu;
    const Bytes bytes = __builtin_convertvector(rounded, Bytes);
    __builtin_memcpy(p, &bytes, sizeof bytes);
  }
};

template <>
struct Exactly<Int4> : Exactly<Int8> {};

// A group of a panel in memory: [line][strip][lane][4] bytes, then [strip][lane] scales. Line j
// holds the inner values 4 j … 4 j + 3 in its low halves of bytes, 32 further ones in its high
// ones.
struct Int4Group {
  static constexpr int64_t kSize = 64;
  static constexpr int64_t kLines = kSize / 8;
  uint8_t lines[kLines][kStrips][kLanes * 4];
  Scale scales[kStrips][kLanes];
};

// Sums of products of four weights and four activations per lane; at most 8 such products.
struct Int4Sums {
#if defined(FASTLSTM_HAS_DOT_BYTES)
  Words words;
  FASTLSTM_INLINE void begin(int32_t first) { words = static_cast<uint32_t>(first) - Words{}; }
  FASTLSTM_INLINE void add(Words weights, Words left) { words = dot_bytes(words, weights, left); }
  FASTLSTM_INLINE Words total() const { return words; }
#else
  // Pairs in 16 bits: 8 of them are at most 8 * 2 * 15 * 128 = 30720.
  Shorts pairs;
  int32_t first;
  FASTLSTM_INLINE void begin(int32_t value) {
    pairs = Shorts{};
    first = value;
  }
  FASTLSTM_INLINE void add(Words weights, Words left) { pairs += byte_products(weights, left); }
  FASTLSTM_INLINE Words total() const {
    return add_pairs(static_cast<uint32_t>(first) - Words{}, bits_of<Words>(pairs),
                     0x00010001u - Words{});
  }
#endif
};

class Int4Engine {
 public:
  using Element = int8_t;
  static constexpr bool kHasDotBytes =
#if defined(FASTLSTM_HAS_DOT_BYTES)
      true;
#else
      false;
#endif
  // Of a block. Registers of sums in float and in whole numbers: 12 + 12 of 32 (with pairs in 16
  // bits 8 + 16), or 4 + 8 of 16.
  static constexpr int kRows = !kHas32Registers ? 1 : kHasDotBytes ? 3 : 2;

  // GCC loads lines ahead, more than there are registers for beside pairs or on Arm.
  static constexpr int kLinesAtOnce = kHasDotBytes && kLanes > 4 ? 8 : 1;

  int32_t* offsets = nullptr;  // (rows, groups) scratch: what the weights' offset 8 adds to sums

  // What is added to the sums of `rows` for `groups` groups.
  void set_offsets(Left<int8_t> a, Range rows, int64_t groups) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int8_t* const from = a.rows + row * a.row_stride;
      for (int64_t g = 0; g < groups; ++g) {
        offsets[row * groups + g] = -8 * sum_of_64(from + g * Int4Group::kSize);
      }
    }
  }

  // out[rows][kStrips * kLanes] of rows [first, first + rows) times one panel.
  void block(Left<int8_t> a, int64_t first, int rows, const Int4Group* b, int64_t groups,
             float* out) const {
    by_rows<kRows>(a.rows + first * a.row_stride, a.row_stride, rows, offsets + first * groups, b,
                   groups, out);
  }

 private:
  static FASTLSTM_INLINE Words load_line(const uint8_t* p) {
    Words words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
  }
  static FASTLSTM_INLINE Words splat_four(const int8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return four - Words{};
  }
  static FASTLSTM_INLINE Vec as_float(Words whole) {
    return __builtin_convertvector(bits_of<Integers>(whole), Vec);
  }

  template <int kRow>
  static FASTLSTM_INLINE void by_rows(const int8_t* a, int64_t stride, int rows,
                                      const int32_t* offset, const Int4Group* b, int64_t groups,
                                      float* out) {
    if (rows == kRow) return tile<kRow>(a, stride, offset, b, groups, out);
    if constexpr (kRow > 1) by_rows<kRow - 1>(a, stride, rows, offset, b, groups, out);
  }

  // One row would wait for its own sums: it has two sets of them. So have pairs in 16 bits.
  template <int kRow>
  static __attribute__((noinline)) void tile(const int8_t* a, int64_t stride, const int32_t* offset,
                                             const Int4Group* b, int64_t groups, float* out) {
    constexpr int kSets = kRow == 1 || !kHasDotBytes ? 2 : 1;
    constexpr bool is_shifted =
        kHasDotBytes && kHasOffset && kSets == 2;  // the second set's sums are 16 times theirs
    Vec sum[kRow][kStrips] = {};
    for (int64_t g = 0; g < groups; ++g, ++b, a += Int4Group::kSize) {
      Int4Sums sums[kSets][kRow][kStrips];
#pragma GCC unroll 3
      for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          sums[0][r][s].begin(offset[r * groups + g]);
          if constexpr (kSets == 2) sums[1][r][s].begin(0);
        }
      }
#pragma GCC unroll kLinesAtOnce
      for (int64_t j = 0; j < Int4Group::kLines; ++j) {
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          Words both = load_line(b->lines[j][s]);
          keep_loaded(both);
          const Words low = both & 0x0f0f0f0fu;
          const Words high = is_shifted ? both & 0xf0f0f0f0u : (both >> 4) & 0x0f0f0f0fu;
#pragma GCC unroll 3
          for (int r = 0; r < kRow; ++r) {
            const int8_t* const left = a + r * stride + 4 * j;
            sums[0][r][s].add(low, splat_four(left));
            sums[kSets - 1][r][s].add(high, splat_four(left + Int4Group::kSize / 2));
          }
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        const Vec scale = load_scales(b->scales[s]);
#pragma GCC unroll 3
        for (int r = 0; r < kRow; ++r) {
          Words whole = sums[0][r][s].total();
          if constexpr (kSets == 2) {
            const Words high = sums[1][r][s].total();
            whole += is_shifted ? bits_of<Words>(bits_of<Integers>(high) >> 4) : high;
          }
          sum[r][s] = multiply_add(as_float(whole), scale, sum[r][s]);
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) Float32::store(out + (r * kStrips + s) * kLanes, sum[r][s]);
    }
  }
};

// As the one in right.h; `strips` are whole fours.
template <typename Epilogue>
FASTLSTM_INLINE void multiply(Int4Engine& engine, Left<int8_t> a, Range rows, const Right<Int4>& b,
                              Strips strips, Epilogue&& epilogue) {
  constexpr int64_t kPanel = kStrips * kLanes;
  alignas(64) float out[Int4Engine::kRows * kPanel];
  const int64_t groups = b.inner / Int4Group::kSize;
  const int64_t blocks = ceil_div(rows.end - rows.begin, Int4Engine::kRows);
  engine.set_offsets(a, rows, groups);
  for (int64_t n = 0; n < strips.panels(); ++n) {
    const int64_t s = strips.panel(n).begin;
    const auto* const panel = static_cast<const Int4Group*>(b.matrix.strips) + s / kStrips * groups;
    for (int64_t block = 0; block < blocks; ++block) {
      const Range mine = part_of(rows, block, blocks);
      engine.block(a, mine.begin, static_cast<int>(mine.end - mine.begin), panel, groups, out);
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        epilogue(row, s, kStrips, out + (row - mine.begin) * kPanel);
      }
    }
  }
}

// Codes and scales of `g`, panel by panel.
inline void pack_int4(const DecodePackArgs& g, Range strips) {
  const int64_t groups = ceil_div(g.inner, Int4Group::kSize);
  for (int64_t s = strips.begin; s < strips.end; ++s) {
    auto* const panel = static_cast<Int4Group*>(g.strips) + s / kStrips * groups;
    for (int64_t at = 0; at < groups; ++at) {
      Int4Group& group = panel[at];
      alignas(64) float scales[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t row = row_of_column(g, s, lane);
        const auto code = [&](int64_t k) {
          const int64_t inner = at * Int4Group::kSize + k;
          return row >= 0 && inner < g.inner ? g.codes[row * g.inner + inner] + 8 : 8;
        };
        for (int64_t k = 0; k < Int4Group::kSize / 2; ++k) {
          group.lines[k / 4][s % kStrips][lane * 4 + k % 4] =
              static_cast<uint8_t>(code(k) | code(k + Int4Group::kSize / 2) << 4);
        }
        scales[lane] = row >= 0 ? g.scales[row * groups + at] : 0.0f;
      }
      store_scales(group.scales[s % kStrips], Float32::load(scales));
    }
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
