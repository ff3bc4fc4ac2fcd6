// Weights and activations in the order in which the block product reads them.
//
// A strip holds kLanes columns of the right operand: [inner / pair][kLanes][pair].
#pragma once

#include "cpu/gemm.h"
#include "lstm.h"

namespace fastlstm::FASTLSTM_ISA {

// Padded sizes of a layer for one memory format.
template <typename Format>
struct Sizes {
  Sizes(int64_t I, int64_t H)
      : units(ceil_div(H, kLanes)),
        hidden(units * kLanes),
        gates(4 * hidden),
        strips(ceil_div(4 * H, kLanes)),
        gate_inner(round_up(4 * H, Format::kInner)),
        rest(H - (units - 1) * kLanes),
        state_inner(round_up(H, Format::kInner)),
        input_inner(round_up(I, Format::kInner)),
        input_strips(ceil_div(I, kLanes)) {}

  // Units of a group, and the distance of its gates in packed weights and in gradients.
  FASTLSTM_INLINE int64_t width(int64_t group) const { return group == units - 1 ? rest : kLanes; }
  // The row of weights (4H, columns) of a gate in that order, or -1 for padding.
  FASTLSTM_INLINE int64_t row_of(int64_t gate) const {
    const int64_t u = gate / (4 * kLanes), first = u * kLanes, H = (units - 1) * kLanes + rest;
    const auto at = static_cast<uint32_t>(gate % (4 * kLanes)), count = static_cast<uint32_t>(rest);
    if (u < units - 1) return at / kLanes * H + first + at % kLanes;  // without a division
    return at < 4 * count ? at / count * H + first + at % count : -1;
  }
  FASTLSTM_INLINE Range strips_of(Range groups) const {
    return {min_of(4 * groups.begin, strips), min_of(4 * groups.end, strips)};
  }

  int64_t units;        // groups of kLanes hidden units
  int64_t hidden;       // H padded to whole groups
  int64_t gates;        // G of lstm.h
  int64_t strips;       // of gates
  int64_t gate_inner;   // gates as an inner dimension
  int64_t rest;         // units of the last group
  int64_t state_inner;  // H as an inner dimension
  int64_t input_inner;  // I as an inner dimension
  int64_t input_strips;
};

// Deals out scratch memory in whole cache lines. From a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    char* const here = base_ + bytes_;
    bytes_ += round_up(count * int64_t{sizeof(T)}, 64);
    return reinterpret_cast<T*>(here);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

// Strips of the forward pass, then the bias in the order of the gates.
template <typename Format>
struct ForwardWeights {
  using Element = typename Format::Element;
  ForwardWeights(const void* packed, const Sizes<Format>& n)
      : recurrent(static_cast<const Element*>(packed)),
        recurrent_stride(n.state_inner * kLanes),
        input(recurrent + n.strips * recurrent_stride),
        input_stride(n.input_inner * kLanes),
        bias(reinterpret_cast<const float*>(input + n.strips * input_stride)) {}

  const Element* recurrent;
  int64_t recurrent_stride;
  const Element* input;
  int64_t input_stride;
  const float* bias;  // [group][gate][kLanes]
};

// The sums of a group's four gates in a row of a panel; zero beyond the units.
class GateSums {
 public:
  template <typename Format>
  explicit GateSums(const Sizes<Format>& n) : last_(n.units - 1), rest_(n.rest) {
    for (int64_t l = 0; l < kLanes; ++l) inside_[l] = l < rest_ ? ~0u : 0u;
  }

  FASTLSTM_INLINE void load(const float* sums, int64_t u, Vec (&v)[4]) const {
    if (u != last_ || rest_ == kLanes) {
      for (int q = 0; q < 4; ++q) v[q] = Float32::load(sums + q * kLanes);
    } else {
      for (int q = 0; q < 4; ++q) {
        v[q] = bits_of<Vec>(bits_of<Words>(Float32::load(sums + q * rest_)) & inside_);
      }
    }
  }

 private:
  int64_t last_, rest_;
  Words inside_;
};

// Rows of weights as torch has them lie far apart, so reading them costs more than reading strips:
// packing pays from some blocks of 6 rows on, sooner where a step after another reads them.
template <typename Format, typename Engine>
bool reads_unpacked(int64_t T, int64_t B, int64_t I, int64_t H) {
  if (!Engine::kHasGateBlock) return false;
  const int64_t most = kHas32Registers && T == 1 ? 16 : 4;
  return T * ceil_div(B, 6) <= most && I % kLanes == 0 && H % kLanes == 0;
}

// Strips of the backward pass: columns are hidden units and inputs, the inner dimension is gates.
template <typename Format>
struct BackwardWeights {
  using Element = typename Format::Element;
  BackwardWeights(const void* packed, const Sizes<Format>& n)
      : recurrent(static_cast<const Element*>(packed)),
        stride(n.gate_inner * kLanes),
        input(recurrent + n.units * stride) {}

  const Element* recurrent;
  int64_t stride;
  const Element* input;
};

// Gradients of a group's gates in a row, in the order of packed weights; zero beyond the units.
template <typename Format>
FASTLSTM_INLINE void store_gates(const Vec (&gates)[4], int64_t width,
                                 typename Format::Element* out) {
  if (width < kLanes) {
    for (int q = 0; q < 4; ++q) Format::store(out + q * kLanes, Vec{});
  }
  for (int q = 0; q < 4; ++q) Format::store(out + q * width, gates[q]);
}

// Rows of gates as lstm.h lays them out: a chunk of `rows`, group by group.
template <typename Element>
struct GateMatrix {
  static constexpr int64_t kGroup = 4 * kLanes;
  Element* gates;
  int64_t rows;    // of a chunk
  int64_t groups;  // U

  FASTLSTM_INLINE Element* at(int64_t chunk, int64_t group, int64_t row) const {
    return gates + ((chunk * groups + group) * rows + row) * kGroup;
  }
  // Rows from `row` of a chunk on as a left operand, gates as the inner dimension.
  FASTLSTM_INLINE Left<Element> left(int64_t chunk, int64_t row) const {
    return {at(chunk, 0, row), kGroup, kGroup, rows * kGroup};
  }
};

template <typename Format>
int64_t forward_bytes(int64_t I, int64_t H) {
  const Sizes<Format> n(I, H);
  const int64_t elements = n.strips * kLanes * (n.state_inner + n.input_inner);
  return elements * static_cast<int64_t>(sizeof(typename Format::Element)) + n.gates * 4;
}

template <typename Format>
int64_t backward_bytes(int64_t I, int64_t H) {
  const Sizes<Format> n(I, H);
  const int64_t elements = n.gate_inner * kLanes * (n.units + n.input_strips);
  return elements * static_cast<int64_t>(sizeof(typename Format::Element));
}

// Words of `count` (at most kLanes * pair) floats in memory format, zero from there on.
template <typename Format>
FASTLSTM_INLINE Words load_words(const float* p, int64_t count) {
  if constexpr (Format::kPair == 1) {
    return bits_of<Words>(count <= 0 ? Vec{} : load_part<Float32>(p, count));
  } else {
    const Vec low = count <= 0 ? Vec{} : load_part<Float32>(p, count);
    const int64_t rest = count - kLanes;
    const Vec high = rest <= 0 ? Vec{} : load_part<Float32>(p + kLanes, rest);
    Halves both[2] = {round_to_bf16(low), round_to_bf16(high)};
    Words words;
    __builtin_memcpy(&words, both, sizeof words);
    return words;
  }
}

FASTLSTM_INLINE void store_words(void* p, Words w) { __builtin_memcpy(p, &w, sizeof w); }

// One strip of w (rows, columns): column l is row row_of(l), zero where that is negative.
template <typename Format, typename RowOf>
void pack_row_strip(const float* w, int64_t columns, int64_t inner, RowOf&& row_of,
                    typename Format::Element* strip) {
  constexpr int64_t kStep = kLanes * Format::kPair;
  int64_t of[kLanes];
  for (int l = 0; l < kLanes; ++l) of[l] = row_of(l);
  for (int64_t k = 0; k < round_up(inner, kStep); k += kStep) {
    Words rows[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      rows[l] = of[l] < 0 ? Words{} : load_words<Format>(w + of[l] * columns + k, columns - k);
    }
    transpose(rows);
    const int64_t count = min_of(kLanes, ceil_div(inner - k, Format::kPair));
    for (int64_t j = 0; j < count; ++j)
      store_words(strip + (k + j * Format::kPair) * kLanes, rows[j]);
  }
}

// One strip of w (4H, columns) with gates as the inner dimension: columns first, first + 1, ...
template <typename Format>
void pack_column_strip(const Sizes<Format>& n, const float* w, int64_t columns, int64_t first,
                       typename Format::Element* strip) {
  constexpr int64_t kGroup = 4 * kLanes;
  const float* rows[kGroup];
  const auto row = [&](int64_t k) {
    return rows[k] == nullptr ? Vec{} : load_part<Float32>(rows[k] + first, columns - first);
  };
  for (int64_t at = 0; at < n.gate_inner; at += kGroup) {
    for (int64_t k = 0; k < kGroup; ++k) {
      const int64_t of = n.row_of(at + k);
      rows[k] = of < 0 ? nullptr : w + of * columns;
    }
    const int64_t count = min_of(kGroup, n.gate_inner - at);
    for (int64_t k = 0; k < count; k += Format::kPair) {
      if constexpr (Format::kPair == 1) {
        Float32::store(strip + (at + k) * kLanes, row(k));
      } else {
        store_words(strip + (at + k) * kLanes,
                    pair_rows(round_to_bf16(row(k)), round_to_bf16(row(k + 1))));
      }
    }
  }
}

template <typename Format>
void pack_forward(const PackArgs& args, Member me) {
  using Element = typename Format::Element;
  const Sizes<Format> n(args.I, args.H);
  const ForwardWeights<Format> packed(args.out, n);
  const Range mine = part_of({0, n.strips}, me.index, me.count);
  for (int64_t s = mine.begin; s < mine.end; ++s) {
    const auto row_of = [&](int64_t lane) { return n.row_of(s * kLanes + lane); };
    pack_row_strip<Format>(args.w_hh, args.H, n.state_inner, row_of,
                           const_cast<Element*>(packed.recurrent) + s * packed.recurrent_stride);
    pack_row_strip<Format>(args.w_ih, args.I, n.input_inner, row_of,
                           const_cast<Element*>(packed.input) + s * packed.input_stride);
  }
  const Range biases = part_of({0, 4 * n.units}, me.index, me.count);
  for (int64_t s = biases.begin; s < biases.end; ++s) {
    Vec bias{};
    const int64_t k = s / 4 * kLanes, at = s % 4 * args.H + k, count = args.H - k;
    if (args.b_ih != nullptr) bias += load_part<Float32>(args.b_ih + at, count);
    if (args.b_hh != nullptr) bias += load_part<Float32>(args.b_hh + at, count);
    Float32::store(const_cast<float*>(packed.bias) + s * kLanes, bias);
  }
}

template <typename Format>
void pack_backward(const PackArgs& args, Member me) {
  using Element = typename Format::Element;
  const Sizes<Format> n(args.I, args.H);
  const BackwardWeights<Format> packed(args.out, n);
  const Range mine = part_of({0, n.units + n.input_strips}, me.index, me.count);
  for (int64_t s = mine.begin; s < mine.end; ++s) {
    const bool is_recurrent = s < n.units;
    const int64_t first = (is_recurrent ? s : s - n.units) * kLanes;
    pack_column_strip(n, is_recurrent ? args.w_hh : args.w_ih, is_recurrent ? args.H : args.I,
                      first, const_cast<Element*>(packed.recurrent) + s * packed.stride);
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
