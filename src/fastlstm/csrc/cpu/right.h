// The right operand of a decoding product, and how its sums become values.
#pragma once

#include "cpu/block_sparse.h"
#include "decode.h"

namespace fastlstm::FASTLSTM_ISA {

template <typename Format>
struct Right {
  using Element = typename Format::Element;
  Right(const DecodeMatrix& m, int64_t size, bool is_gates = true)
      : matrix(m),
        inner(round_up(size, Format::kInner)),
        stride(inner * kLanes),
        has_gates(is_gates) {}

  const Element* strips() const { return static_cast<const Element*>(matrix.strips); }
  bool is_sparse() const { return matrix.starts != nullptr; }

  // One vector of sums of `strip`; `scale` is that of the row.
  FASTLSTM_INLINE Vec value(const float* sums, int64_t strip, float scale) const {
    if constexpr (Format::kPair == 4) {
      Integers whole, offset;
      __builtin_memcpy(&whole, sums, sizeof whole);
      __builtin_memcpy(&offset, matrix.corrections + strip * kLanes, sizeof offset);
      const Vec exact = __builtin_convertvector(whole - offset, Vec);
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
  if (b.is_sparse()) {
    const BlockSparse<Format> lines{b.strips(), b.matrix.starts, b.matrix.indices, b.has_gates};
    multiply(a, rows, lines, strips, epilogue);
    return;
  }
  multiply(engine, a, rows, b.strips(), b.stride, strips, b.inner, epilogue);
}

}  // namespace fastlstm::FASTLSTM_ISA
