// Matrix products on packed strips, a block of rows at a time.
//
// The right operand is packed into strips of kLanes columns, each [inner / pair][kLanes][pair]
// (cpu/pack.h). A block of rows against up to four strips goes to a small buffer in the first-level
// cache, from where the caller's epilogue takes it: an LSTM cell update, its gradient, or a store.
// Every sum runs over the inner dimension in order, whatever the block, so that results do not
// depend on how rows and strips are dealt out to threads.
#pragma once

#include "cpu/squares.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int kStrips = 4;
inline constexpr int kInnerGrain = 64;  // whole blocks of gates, whole tiles

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

// The strips of a product, kStrips at a time or as asked for: a panel. Every other step of a loop
// goes over them from the last panel to the first, so that what a cache could not hold altogether
// is half there.
class Strips {
 public:
  FASTLSTM_INLINE Strips(Range all, bool is_reversed = false)
      : all_(all), is_reversed_(is_reversed) {}
  FASTLSTM_INLINE Strips(int64_t begin, int64_t end, bool is_reversed = false)
      : Strips({begin, end}, is_reversed) {}

  FASTLSTM_INLINE int64_t panels(int64_t size = kStrips) const {
    return ceil_div(all_.end - all_.begin, size);
  }
  FASTLSTM_INLINE Range panel(int64_t index, int64_t size = kStrips) const {
    const int64_t at = is_reversed_ ? panels(size) - 1 - index : index;
    const int64_t begin = all_.begin + at * size;
    return {begin, min_of(begin + size, all_.end)};
  }

 private:
  Range all_;
  bool is_reversed_;
};

// The left operand: rows `row_stride` apart, their inner dimension in blocks `block_stride` apart.
template <typename Element>
struct Left {
  const Element* rows;
  int64_t row_stride;
  int64_t block;  // values of the inner dimension that lie side by side
  int64_t block_stride;

  FASTLSTM_INLINE Left from_row(int64_t row) const {
    return {rows + row * row_stride, row_stride, block, block_stride};
  }
  // `count` values of the inner dimension from `at` on, where a block begins if there are several.
  FASTLSTM_INLINE Left part(int64_t at, int64_t count) const {
    if (block_stride == 0) return {rows + at, row_stride, count, 0};
    return {rows + at / block * block_stride, row_stride, block, block_stride};
  }
};

// A left operand whose rows are contiguous.
template <typename Element>
FASTLSTM_INLINE Left<Element> plain(const Element* rows, int64_t stride, int64_t inner) {
  return {rows, stride, inner, 0};
}

// Sums in vector registers: 6 rows x 4 strips of 32 registers; of 16 others 6 x 2 in two
// passes, so that strips from the second-level cache are read for six rows at once, or 3 x 4.
template <typename Format>
struct VectorEngine {
  using Element = typename Format::Element;
  static constexpr int kRows = 6;
  static constexpr int64_t kRowGrain = 1;         // rows are dealt out in multiples of this
  static constexpr int64_t kLeastFlop = 1 << 20;  // of an item: taking one costs some 50 ns
  // Whether gate_block forms the sums of block, bit for bit: dot products of pairs, not of squares.
  static constexpr bool kHasGateBlock = Format::kPair == 1 || !kHasSquares;
  // One row has twice as many sums at once: each waits for itself.
  static constexpr int kRowStrips = 2 * kStrips;

  // out[rows][strips * kLanes] = a * b over `inner` values, of which the last block of a may have
  // fewer; with `add` on top of what `out` holds. Strip s starts at b + s * strip_stride.
  static void block(Left<Element> a, int rows, const Element* b, int64_t strip_stride, int strips,
                    int64_t inner, bool add, float* out) {
    by_rows<kRows>(a, rows, b, strip_stride, strips, inner, add, out);
  }

  // The same for rows of gates, `a`, and weights (4H, columns) as torch has them, from a column on.
  static void gate_block(Left<Element> a, int rows, const float* w, int64_t columns, int64_t H,
                         int strips, float* out) {
    gates_by_rows<kRows>(a, rows, w, columns, H, strips, out);
  }

 private:
  template <int kRow>
  static FASTLSTM_INLINE void gates_by_rows(Left<Element> a, int rows, const float* w,
                                            int64_t columns, int64_t H, int strips, float* out) {
    if (rows == kRow) {
      const int64_t row = strips * kLanes;
      for (int s = 0; s < strips; s += kPass<kRow>) {
        gates_by_strips<kRow, kPass<kRow>>(a, strips - s, w + s * kLanes, columns, H,
                                           out + s * kLanes, row);
      }
      return;
    }
    if constexpr (kRow > 1) gates_by_rows<kRow - 1>(a, rows, w, columns, H, strips, out);
  }

  template <int kRow, int kStrip>
  static FASTLSTM_INLINE void gates_by_strips(Left<Element> a, int strips, const float* w,
                                              int64_t columns, int64_t H, float* out,
                                              int64_t out_stride) {
    if (strips >= kStrip) return gate_tile<kRow, kStrip>(a, w, columns, H, out, out_stride);
    if constexpr (kStrip > 1) {
      gates_by_strips<kRow, kStrip - 1>(a, strips, w, columns, H, out, out_stride);
    }
  }

  template <int kRow, int kStrip>
  static __attribute__((noinline)) void gate_tile(Left<Element> a, const float* w, int64_t columns,
                                                  int64_t H, float* out, int64_t out_stride) {
    constexpr int64_t kStep = kHasBf16Pairs ? Format::kPair : 1;
    Vec sum[kRow][kStrip] = {};
    for (int64_t unit = 0; unit < H; unit += kLanes) {
      for (int64_t gate = 0; gate < 4; ++gate) {
        const Element* const left = a.rows + gate * kLanes;
        const float* right = w + (gate * H + unit) * columns;
        for (int64_t k = 0; k < kLanes; k += kStep, right += kStep * columns) {
          const auto at = [&](int64_t row, int s) {
            return Float32::load(right + row * columns + s * kLanes);
          };
          if constexpr (kStep == 2) {
            add_pair_products(sum, left + k, a.row_stride, [&](int s) {
              return pair_rows(round_to_bf16(at(0, s)), round_to_bf16(at(1, s)));
            });
          } else {
            add_products(
                sum, [&](int r) { return splat_element(left[r * a.row_stride + k]); },
                [&](int s) { return Format::rounded(at(0, s)); });
          }
        }
      }
      a.rows += a.block_stride;
    }
    write(sum, out, out_stride);
  }

  template <int kRow>
  static constexpr int kPass = kRow == 1                      ? kRowStrips
                               : kHas32Registers || kRow <= 3 ? kStrips
                                                              : 2;

  template <int kRow>
  static FASTLSTM_INLINE void by_rows(Left<Element> a, int rows, const Element* b,
                                      int64_t strip_stride, int strips, int64_t inner, bool add,
                                      float* out) {
    if (rows == kRow) {
      const int64_t row = strips * kLanes;
      for (int s = 0; s < strips; s += kPass<kRow>) {
        by_strips<kRow, kPass<kRow>>(a, strips - s, b + s * strip_stride, strip_stride, inner, add,
                                     out + s * kLanes, row);
      }
      return;
    }
    if constexpr (kRow > 1) by_rows<kRow - 1>(a, rows, b, strip_stride, strips, inner, add, out);
  }

  template <int kRow, int kStrip>
  static FASTLSTM_INLINE void by_strips(Left<Element> a, int strips, const Element* b,
                                        int64_t strip_stride, int64_t inner, bool add, float* out,
                                        int64_t out_stride) {
    if (strips >= kStrip)
      return tile<kRow, kStrip>(a, b, strip_stride, inner, add, out, out_stride);
    if constexpr (kStrip > 1) {
      by_strips<kRow, kStrip - 1>(a, strips, b, strip_stride, inner, add, out, out_stride);
    }
  }

  // sum[r][s] += left(r) * right(s). The fewer of both stay in registers, the others come one at a
  // time: beside the sums 4 + 1 of 32 registers for 6 x 4; 2 + 1 of 16 for 6 x 2, 3 + 1 for 3 x 4.
  template <int kRow, int kStrip, typename LeftAt, typename RightAt>
  static FASTLSTM_INLINE void add_products(Vec (&sum)[kRow][kStrip], LeftAt&& left,
                                           RightAt&& right) {
    if constexpr (kRow < kStrip) {
      Vec held[kRow];
#pragma GCC unroll 6
      for (int r = 0; r < kRow; ++r) held[r] = left(r);
#pragma GCC unroll 8
      for (int s = 0; s < kStrip; ++s) {
        const Vec one = right(s);
#pragma GCC unroll 6
        for (int r = 0; r < kRow; ++r) sum[r][s] += held[r] * one;
      }
    } else {
      Vec held[kStrip];
#pragma GCC unroll 8
      for (int s = 0; s < kStrip; ++s) held[s] = right(s);
#pragma GCC unroll 6
      for (int r = 0; r < kRow; ++r) {
        const Vec one = left(r);
#pragma GCC unroll 8
        for (int s = 0; s < kStrip; ++s) sum[r][s] += one * held[s];
      }
    }
  }

  // sum[r][s] += the pair at left + r * row_stride times right(s).
  template <int kRow, int kStrip, typename RightAt>
  static FASTLSTM_INLINE void add_pair_products(Vec (&sum)[kRow][kStrip], const uint16_t* left,
                                                int64_t row_stride, RightAt&& right) {
    Words held[kStrip];
#pragma GCC unroll 8
    for (int s = 0; s < kStrip; ++s) held[s] = right(s);
#pragma GCC unroll 6
    for (int r = 0; r < kRow; ++r) {
      uint32_t pair;
      __builtin_memcpy(&pair, left + r * row_stride, sizeof pair);
      const Words one = pair - Words{};
#pragma GCC unroll 8
      for (int s = 0; s < kStrip; ++s) sum[r][s] = add_bf16_pairs(sum[r][s], one, held[s]);
    }
  }

  template <int kRow, int kStrip>
  static __attribute__((noinline)) void tile(Left<float> a, const float* b, int64_t strip_stride,
                                             int64_t inner, bool add, float* out,
                                             int64_t out_stride) {
    Vec sum[kRow][kStrip];
    read(sum, add, out, out_stride);
    // The hardware does not foresee where the next block of the rows lies, or the next rows.
    for (int64_t at = 0; at < inner; at += a.block) {
      const float* ahead = a.rows + (a.block_stride == 0 ? kRow * a.row_stride : a.block_stride);
      const int64_t count = min_of(a.block, inner - at);
      for (int64_t k = 0; k < count; ++k) {
        __builtin_prefetch(ahead, 0, 3);
        ahead += kRow;
        add_products(
            sum, [&](int r) { return splat(a.rows[r * a.row_stride + k]); },
            [&](int s) { return Float32::load(b + s * strip_stride); });
        b += kLanes;
      }
      a.rows += a.block_stride;
    }
    write(sum, out, out_stride);
  }

  template <int kRow, int kStrip>
    requires(kHasBf16Pairs)
  static __attribute__((noinline)) void tile(Left<uint16_t> a, const uint16_t* b,
                                             int64_t strip_stride, int64_t inner, bool add,
                                             float* out, int64_t out_stride) {
    constexpr bool is_square = kHasSquares && kRow > 1;
    constexpr int64_t kStep = is_square ? 4 : 2;
    Vec sum[kRow][kStrip];
    read(sum, add, out, out_stride);
    if constexpr (is_square) to_squares(sum);
    for (int64_t at = 0; at < inner; at += a.block) {
      const uint16_t* ahead = a.rows + (a.block_stride == 0 ? kRow * a.row_stride : a.block_stride);
      const int64_t count = min_of(a.block, inner - at);
      for (int64_t k = 0; k < count; k += kStep, b += kStep * kLanes) {
        __builtin_prefetch(ahead, 0, 3);
        ahead += kStep * kRow;
        if constexpr (is_square) {
          add_squares(sum, a.rows + k, a.row_stride, [&](int s, int half) {
            return load_words(b + s * strip_stride + 2 * half * kLanes);
          });
          continue;
        }
        add_pair_products(sum, a.rows + k, a.row_stride,
                          [&](int s) { return load_words(b + s * strip_stride); });
      }
      a.rows += a.block_stride;
    }
    if constexpr (is_square) to_squares(sum, true);
    write(sum, out, out_stride);
  }

  // Without an instruction for pairs, both halves are products of float32: the rows of a block are
  // widened once, into the first-level cache, and a pair of a strip once for all rows.
  template <int kRow, int kStrip>
    requires(!kHasBf16Pairs)
  static __attribute__((noinline)) void tile(Left<uint16_t> a, const uint16_t* b,
                                             int64_t strip_stride, int64_t inner, bool add,
                                             float* out, int64_t out_stride) {
    constexpr int64_t kWide = 128;
    alignas(64) float wide[kRow][kWide];
    Vec sum[kRow][kStrip];
    read(sum, add, out, out_stride);
    for (int64_t at = 0; at < inner; at += a.block) {
      const uint16_t* ahead = a.rows + (a.block_stride == 0 ? kRow * a.row_stride : a.block_stride);
      const int64_t block = min_of(a.block, inner - at);
      for (int64_t first = 0; first < block; first += kWide) {
        const int64_t count = min_of(kWide, block - first);
        for (int r = 0; r < kRow; ++r) {
          const uint16_t* const row = a.rows + r * a.row_stride + first;
          for (int64_t k = 0; k < count; k += kLanes) {
            Float32::store(wide[r] + k, Bfloat16::load(row + k));
          }
        }
        for (int64_t k = 0; k < count; k += 2) {
          __builtin_prefetch(ahead, 0, 3);
          ahead += 2 * kRow;
          add_products(
              sum, [&](int r) { return splat(wide[r][k]); },
              [&](int s) { return bits_of<Vec>(load_words(b + s * strip_stride) << 16); });
          add_products(
              sum, [&](int r) { return splat(wide[r][k + 1]); },
              [&](int s) { return bits_of<Vec>(load_words(b + s * strip_stride) & 0xffff0000u); });
          b += 2 * kLanes;
        }
      }
      a.rows += a.block_stride;
    }
    write(sum, out, out_stride);
  }

  static FASTLSTM_INLINE Words load_words(const uint16_t* p) {
    Words words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
  }

  template <int kRow, int kStrip>
  static FASTLSTM_INLINE void read(Vec (&sum)[kRow][kStrip], bool add, const float* out,
                                   int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 8
      for (int s = 0; s < kStrip; ++s) {
        sum[r][s] = add ? Float32::load(out + r * stride + s * kLanes) : Vec{};
      }
    }
  }

  template <int kRow, int kStrip>
  static FASTLSTM_INLINE void write(const Vec (&sum)[kRow][kStrip], float* out, int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 8
      for (int s = 0; s < kStrip; ++s) {
        Float32::store(out + r * stride + s * kLanes, sum[r][s]);
      }
    }
  }
};

// The strips of one row as an epilogue takes them, up to kStrips at a time.
template <typename Visit>
FASTLSTM_INLINE void each_panel(int64_t first, int strips, const float* sums, Visit&& visit) {
  for (int s = 0; s < strips; s += kStrips) {
    visit(first + s, strips - s < kStrips ? strips - s : kStrips, sums + s * kLanes);
  }
}

// Rows of `a` times the strips of `b`. Calls epilogue(row, first strip, strips,
// sums [strips * kLanes]) for every row and panel of up to kStrips strips.
//
// A panel of strips that is too long for the second-level cache goes over a group of rows in parts.
template <typename Engine, typename Epilogue>
FASTLSTM_INLINE void multiply(Engine& engine, Left<typename Engine::Element> a, Range rows,
                              const typename Engine::Element* b, int64_t strip_stride,
                              Strips strips, int64_t inner, Epilogue&& epilogue) {
  constexpr int64_t kPanelBytes = 512 << 10;
  constexpr int64_t kPart =
      kPanelBytes / (kStrips * kLanes * int64_t{sizeof(typename Engine::Element)});
  constexpr int64_t kGroup = 24;  // blocks
  alignas(64) float out[kGroup][Engine::kRows * kStrips * kLanes];
  const int64_t blocks = ceil_div(rows.end - rows.begin, Engine::kRows);
  const int64_t parts = ceil_div(inner, kPart + kPart / 2);
  const int64_t group = parts == 1 ? 1 : kGroup;
  const int64_t size = rows.end - rows.begin == 1 ? Engine::kRowStrips : kStrips;
  for (int64_t n = 0; n < strips.panels(size); ++n) {
    const int64_t s = strips.panel(n, size).begin;
    const int num_strips = static_cast<int>(strips.panel(n, size).end - s);
    for (int64_t first = 0; first < blocks; first += group) {
      const int64_t last = min_of(first + group, blocks);
      for (int64_t p = 0; p < parts; ++p) {
        const Range part = part_of({0, inner}, p, parts, kInnerGrain);
        const auto left = a.part(part.begin, part.end - part.begin);
        const auto* const right = b + s * strip_stride + part.begin * kLanes;
        for (int64_t block = first; block < last; ++block) {
          const Range mine = part_of(rows, block, blocks);
          engine.block(left.from_row(mine.begin), static_cast<int>(mine.end - mine.begin), right,
                       strip_stride, num_strips, part.end - part.begin, p > 0, out[block - first]);
        }
      }
      for (int64_t block = first; block < last; ++block) {
        const Range mine = part_of(rows, block, blocks);
        const float* sums = out[block - first];
        for (int64_t row = mine.begin; row < mine.end; ++row, sums += num_strips * kLanes) {
          each_panel(s, num_strips, sums, [&](auto... panel) { epilogue(row, panel...); });
        }
      }
    }
  }
}

// Rows of gates times weights (4H, columns) as torch has them: the sums of `multiply` on their
// packed strips, bit for bit.
template <typename Engine, typename Epilogue>
FASTLSTM_INLINE void multiply_gates(Left<typename Engine::Element> a, Range rows, const float* w,
                                    int64_t columns, int64_t H, Strips strips,
                                    Epilogue&& epilogue) {
  alignas(64) float out[Engine::kRows * kStrips * kLanes];
  const int64_t blocks = ceil_div(rows.end - rows.begin, Engine::kRows);
  const int64_t size = rows.end - rows.begin == 1 ? Engine::kRowStrips : kStrips;
  for (int64_t n = 0; n < strips.panels(size); ++n) {
    const int64_t s = strips.panel(n, size).begin;
    const int num_strips = static_cast<int>(strips.panel(n, size).end - s);
    for (int64_t block = 0; block < blocks; ++block) {
      const Range mine = part_of(rows, block, blocks);
      Engine::gate_block(a.from_row(mine.begin), static_cast<int>(mine.end - mine.begin),
                         w + s * kLanes, columns, H, num_strips, out);
      const float* sums = out;
      for (int64_t row = mine.begin; row < mine.end; ++row, sums += num_strips * kLanes) {
        each_panel(s, num_strips, sums, [&](auto... panel) { epilogue(row, panel...); });
      }
    }
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
