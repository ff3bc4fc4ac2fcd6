// The right operand of a decoding product, and how its sums become values.
#pragma once

#include "cpu/block_sparse.h"
#include "decode.h"

namespace fastlstm::FASTLSTM_ISA {

struct Int4;  // cpu/int4.h
template <typename Format>
inline constexpr bool is_int4 = false;
template <>
inline constexpr bool is_int4<Int4> = true;

template <typename Format>
struct Right {
  using Element = typename Format::Element;
  Right(const DecodeMatrix& m, int64_t size, bool is_gates = true)
      : matrix(m),
        inner(round_up(size, Format::kInner)),
        stride(inner * kLanes),
        has_gates(is_gates) {}

  const Element* strips() const { return static_cast<const Element*>(matrix.strips); }

  // One vector of sums of `strip`; `scale` is that of the row.
  FASTLSTM_INLINE Vec value(const float* sums, int64_t strip, float scale) const {
    if constexpr (is_int4<Format>) {
      return Float32::load(sums) * (scale * (1.0f / 127.0f));
    } else if constexpr (Format::kPair == 4) {
      Integers whole, offset;
      __builtin_memcpy(&whole, sums, sizeof whole);
      __builtin_memcpy(&offset, matrix.corrections + strip * kLanes, sizeof offset);
      const Vec exact = __builtin_convertvector(kHasOffset ? whole - offset : whole, Vec);
      return exact * (Float32::load(matrix.factors + strip * kLanes) * scale);
    } else {
      return Float32::load(sums);
    }
  }

  DecodeMatrix matrix;
  int64_t inner;   // padded
  int64_t stride;  // elements from strip to strip
  bool has_gates;  // strip 4 u + gate
};

// Rows of `a` times the strips of `b`; epilogue as in gemm.h, its sums for `b.value`.
template <typename Format, typename Engine, typename Epilogue>
FASTLSTM_INLINE void multiply(Engine& engine, Left<typename Format::Element> a, Range rows,
                              const Right<Format>& b, Strips strips, Epilogue&& epilogue) {
  if constexpr (!is_int4<Format>) {
    if (b.matrix.starts != nullptr) {
      const BlockSparse<Format> lines{b.strips(), b.matrix.starts, b.matrix.indices, b.has_gates};
      return multiply(a, rows, lines, strips, epilogue);
    }
  }
  multiply(engine, a, rows, b.strips(), b.stride, strips, b.inner, epilogue);
}

// The row of `w` or `codes` that becomes column `lane` of `strip`, or -1 for padding.
FASTLSTM_INLINE int64_t row_of_column(const DecodePackArgs& g, int64_t strip, int64_t lane) {
  if (!g.is_gates) {
    const int64_t row = strip * kLanes + lane;
    return row < g.columns ? row : -1;
  }
  const int64_t H = g.columns / 4, unit = strip / 4 * kLanes + lane;
  return unit < H ? strip % 4 * H + unit : -1;
}

}  // namespace fastlstm::FASTLSTM_ISA
