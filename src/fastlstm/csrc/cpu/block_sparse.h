// Products with a matrix of which only the blocks are stored that are not all zero.
//
// A block is 16 columns x 4 inner values, whatever kLanes: its line is [4 / pair][16][pair], one
// cache line of int8. The lines of 16 columns (a strip of blocks) stand in the order of the inner
// dimension, and so do the sums: int8 sums are exact, and those of floats take the same products in
// the same order as the dense kernels, without those that add 0. So both give the same bits, except
// in bf16 on AMX, whose tiles have an order of their own, and where a row is not finite: 0 * NaN is
// missing here, and the caller looks for such rows.
#pragma once

#include "cpu/quantized.h"
#include "decode.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int kBlockColumns = 16;
inline constexpr int kBlockInner = 4;
inline constexpr int kBlockVectors = kBlockColumns / kLanes;
// Strips of kLanes columns in a panel: four strips of blocks, so all gates of 16 units.
inline constexpr int kSparseStrips = kStrips * kBlockVectors;

template <typename Format>
struct BlockSparse {
  using Element = typename Format::Element;
  const Element* lines;
  const int32_t* starts;    // first line of each strip of blocks, then the end; whole panels
  const uint16_t* indices;  // of each line: inner index / 4
  bool is_gates;            // strips of blocks are the gates of 16 units, strip 4 u + gate
};

// Lines of a matrix before panel `p` of four strips of blocks; all there would be of a dense one.
FASTLSTM_INLINE int64_t lines_before(const DecodeMatrix& m, int64_t inner, int64_t p) {
  if (m.starts != nullptr) return m.starts[p * kStrips];
  return m.strips == nullptr ? 0 : p * kStrips * ceil_div(inner, kBlockInner);
}

// sum += 4 inner values of `a` times vector `v` of a line.
FASTLSTM_INLINE void add_block(Words& sum, const uint8_t* a, const uint8_t* line, int v) {
  Words right;
  __builtin_memcpy(&right, line + v * kLanes * 4, sizeof right);
  sum = dot_quads(sum, load_quads(a), right);
}

FASTLSTM_INLINE void add_block(Vec& sum, const float* a, const float* line, int v) {
#pragma GCC unroll 4
  for (int k = 0; k < kBlockInner; ++k) {
    sum += splat(a[k]) * Float32::load(line + k * kBlockColumns + v * kLanes);
  }
}

FASTLSTM_INLINE void add_block(Vec& sum, const uint16_t* a, const uint16_t* line, int v) {
#pragma GCC unroll 2
  for (int k = 0; k < kBlockInner; k += 2) {
    uint32_t pair;
    __builtin_memcpy(&pair, a + k, sizeof pair);
    Words right;
    __builtin_memcpy(&right, line + k * kBlockColumns + v * kLanes * 2, sizeof right);
    sum = add_bf16_pairs(sum, pair - Words{}, right);
  }
}

template <typename Element>
struct BlockSum {
  using type = Vec;
};
template <>
struct BlockSum<uint8_t> {
  using type = Words;
};

template <typename Format>
struct SparseEngine {
  using Element = typename Format::Element;
  using Sum = typename BlockSum<Element>::type;
  static constexpr int kRows = 6;
  static constexpr int64_t kLine = kBlockColumns * kBlockInner;

  // out[rows][kSparseStrips * kLanes] = the rows of `a` times panel `p`.
  static void block(Left<Element> a, int rows, const BlockSparse<Format>& b, int64_t p,
                    float* out) {
    by_rows<kRows>(a, rows, b, p, out);
  }

 private:
  // Strips that are added to by turns: a sum takes its products one after the other, and few rows
  // would wait for it. Sums in registers: 4 to 6 of 32, or 8 to 12 of 16.
  template <int kRow>
  static constexpr int kTogether = kRow == 1   ? 4
                                   : kRow <= 3 ? 2
                                               : 1;

  template <int kRow>
  static FASTLSTM_INLINE void by_rows(Left<Element> a, int rows, const BlockSparse<Format>& b,
                                      int64_t p, float* out) {
    if (rows == kRow) {
      for (int s = 0; s < kStrips; s += kTogether<kRow>) {
        tile<kRow, kTogether<kRow>>(a, b, b.starts + p * kStrips + s, s, out);
      }
      return;
    }
    if constexpr (kRow > 1) by_rows<kRow - 1>(a, rows, b, p, out);
  }

  template <int kRow, int kStrip>
  static __attribute__((noinline)) void tile(Left<Element> a, const BlockSparse<Format>& b,
                                             const int32_t* starts, int first, float* out) {
    Sum sum[kStrip][kRow][kBlockVectors] = {};
    int64_t shared = starts[1] - starts[0];
    for (int s = 1; s < kStrip; ++s) shared = min_of(shared, starts[s + 1] - starts[s]);
    const Element* lines[kStrip];
    const uint16_t* indices[kStrip];
    for (int s = 0; s < kStrip; ++s) {
      lines[s] = b.lines + starts[s] * kLine;
      indices[s] = b.indices + starts[s];
    }
    for (int64_t n = 0; n < shared; ++n) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrip; ++s) {
        add<kRow>(sum[s], a, lines[s] + n * kLine, indices[s][n]);
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrip; ++s) {
      if constexpr (kStrip > 1) {
        for (int64_t n = shared; n < starts[s + 1] - starts[s]; ++n) {
          add<kRow>(sum[s], a, lines[s] + n * kLine, indices[s][n]);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kBlockVectors; ++v) {
          const int strip = b.is_gates ? v * kStrips + first + s : (first + s) * kBlockVectors + v;
          __builtin_memcpy(out + (r * kSparseStrips + strip) * kLanes, &sum[s][r][v], sizeof(Sum));
        }
      }
    }
  }

  template <int kRow>
  static FASTLSTM_INLINE void add(Sum (&sum)[kRow][kBlockVectors], Left<Element> a,
                                  const Element* line, int64_t index) {
#pragma GCC unroll 6
    for (int r = 0; r < kRow; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v) {
        add_block(sum[r][v], a.rows + r * a.row_stride + index * kBlockInner, line, v);
      }
    }
  }
};

// As multiply in gemm.h; `strips` begin at a panel and end at one or at the last strip there is.
template <typename Format, typename Epilogue>
FASTLSTM_INLINE void multiply(Left<typename Format::Element> a, Range rows,
                              const BlockSparse<Format>& b, Strips strips, Epilogue&& epilogue) {
  using Engine = SparseEngine<Format>;
  alignas(64) float out[Engine::kRows * kSparseStrips * kLanes];
  const int64_t blocks = ceil_div(rows.end - rows.begin, Engine::kRows);
  for (int64_t n = 0; n < strips.panels(kSparseStrips); ++n) {
    const Range panel = strips.panel(n, kSparseStrips);
    for (int64_t block = 0; block < blocks; ++block) {
      const Range mine = part_of(rows, block, blocks);
      Engine::block(a.from_row(mine.begin), static_cast<int>(mine.end - mine.begin), b,
                    panel.begin / kSparseStrips, out);
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        const float* sums = out + (row - mine.begin) * kSparseStrips * kLanes;
        for (int64_t s = panel.begin; s < panel.end; s += kStrips, sums += kStrips * kLanes) {
          epilogue(row, s, static_cast<int>(min_of(kStrips, panel.end - s)), sums);
        }
      }
    }
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
