// Gradients of weights: gate gradients (rows, G) transposed times what entered the gates.
//
// Works through the rows in chunks: the team transposes a chunk of every left operand together,
// then each thread packs its own gates of the chunk and multiplies. The sum over rows runs in
// order whatever the number of threads.
#pragma once

#include "cpu/lstm_forward.h"

namespace fastlstm::FASTLSTM_ISA {

// One left operand: `width` columns of `row(r)`, scaled by `mask` (lane r % lanes), whose gradient
// goes to `out` (4H, width). Without rows it is all ones and `out` is (4H): a bias. Rows of the
// input outside of their lane's steps count as zero whatever they hold: zero times NaN would be
// NaN.
template <typename Format>
struct Factor {
  using Element = typename Format::Element;
  int64_t width;
  float* out;
  const Element* rows;  // row r at rows + r * stride
  int64_t stride;
  const Element* first;  // replaces row r < lanes, and every row up to its lane's begin; or null
  const int64_t *begins, *ends;
  const float* mask;
  int64_t lanes;  // 0 where none of the four before is

  FASTLSTM_INLINE Vec load(int64_t r, int64_t k) const {
    if (rows == nullptr) return splat(1.0f);
    const int64_t b = lanes > 0 ? r % lanes : 0;
    const Element* row = rows + r * stride;
    if (first == nullptr) {
      if (lanes > 0 && !is_active(begins, ends, r / lanes, b)) return Vec{};
    } else if (r < lanes || (begins != nullptr && r / lanes <= begins[b])) {
      row = first + b * width;
    }
    Vec v = load_part<Format>(row + k, width - k);
    if (mask != nullptr) v *= load_part<Float32>(mask + b * width + k, width - k);
    return v;
  }
};

template <typename Format>
struct GradientScratch {
  using Element = typename Format::Element;
  static constexpr int64_t kChunk = 1024;
  // One more cache line: see ForwardScratch.
  static constexpr int64_t kStride = kChunk + 64 / int64_t{sizeof(Element)};

  static int64_t left_bytes(int64_t width) {
    return round_up(width, kLanes) * kStride * int64_t{sizeof(Element)};
  }
  static int64_t right_bytes() { return kStrips * kChunk * kLanes * int64_t{sizeof(Element)}; }
  static int64_t sum_bytes(int64_t width, const Sizes<Format>& n) {
    return round_up(width, kLanes) * n.gates * 4;
  }
  static int64_t bytes(int64_t width, const Sizes<Format>& n, int64_t threads) {
    return 2 * left_bytes(width) + threads * right_bytes() + sum_bytes(width, n);
  }

  GradientScratch(char* base, int64_t width, int64_t index, int64_t threads)
      : right(reinterpret_cast<Element*>(base + index * right_bytes())) {
    base += threads * right_bytes();
    left[0] = reinterpret_cast<Element*>(base);
    left[1] = reinterpret_cast<Element*>(base + left_bytes(width));
    sums = reinterpret_cast<float*>(base + 2 * left_bytes(width));
  }

  Element* left[2];  // [width][kStride], two chunks in turn
  Element* right;    // a thread's own: strips of one panel
  float* sums;       // [width][G]
};

// left[k][r] = factor of row `begin + r`, column k, for the columns from k to k + kLanes.
template <typename Format>
void transpose_factor(const Factor<Format>& factor, int64_t k, Range rows, int64_t padded,
                      typename Format::Element* left) {
  constexpr int64_t kStride = GradientScratch<Format>::kStride;
  constexpr int64_t kPair = Format::kPair;
  const int64_t columns = min_of(kLanes, factor.width - k);
  for (int64_t r = 0; r < padded; r += kLanes * kPair) {
    Words block[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const auto row = [&](int64_t offset) {
        const int64_t at = rows.begin + r + j * kPair + offset;
        return at < rows.end ? factor.load(at, k) : Vec{};
      };
      if constexpr (kPair == 1) {
        block[j] = bits_of<Words>(row(0));
      } else {
        block[j] = pair_rows(round_to_bf16(row(0)), round_to_bf16(row(1)));
      }
    }
    transpose(block);
    for (int64_t j = 0; j < columns; ++j) store_words(left + (k + j) * kStride + r, block[j]);
  }
}

// Packs rows of the gate gradients of a group as four strips: [padded / pair][kLanes][pair] each.
template <typename Format>
void pack_gates(const GateMatrix<const typename Format::Element>& gates, Range rows, int64_t padded,
                int64_t group, typename Format::Element* out) {
  using Element = typename Format::Element;
  constexpr int64_t kChunk = GradientScratch<Format>::kChunk;
  static constexpr Element kZero[4 * kLanes] = {};
  const auto row = [&](int64_t r) {
    return r < rows.end ? gates.at(r / gates.rows, group, r % gates.rows) : kZero;
  };
  for (int64_t r = 0; r < padded; r += Format::kPair) {
    const Element* const first = row(rows.begin + r);
    if constexpr (Format::kPair == 1) {
      for (int s = 0; s < 4; ++s) {
        Float32::store(out + (s * kChunk + r) * kLanes, Float32::load(first + s * kLanes));
      }
    } else {
      const Element* const second = row(rows.begin + r + 1);
      for (int s = 0; s < 4; ++s) {
        Halves low, high;
        __builtin_memcpy(&low, first + s * kLanes, sizeof low);
        __builtin_memcpy(&high, second + s * kLanes, sizeof high);
        store_words(out + (s * kChunk + r) * kLanes, pair_rows(low, high));
      }
    }
  }
}

// out[gate * H + unit][k] = sums[first + k][gates of the unit], for one strip.
template <typename Format>
void write_gradient(const float* sums, int64_t num_gates, int64_t width, int64_t strip, int64_t H,
                    float* out) {
  const int64_t gate = strip % 4, unit = strip / 4 * kLanes;
  const int64_t units = min_of(kLanes, H - unit);
  for (int64_t k = 0; k < width; k += kLanes) {
    Words block[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      block[j] = k + j < width
                     ? bits_of<Words>(Float32::load(sums + (k + j) * num_gates + strip * kLanes))
                     : Words{};
    }
    transpose(block);
    for (int64_t l = 0; l < units; ++l) {
      float* const row = out + (gate * H + unit + l) * width + k;
      store_part<Float32>(row, bits_of<Vec>(block[l]), width - k);
    }
  }
}

// Every factor's gradient over `num_rows` rows of gate gradients. Calls beside(rows, group) for
// every chunk and group of the thread while the gates are in its cache.
template <typename Format, typename Engine, typename Beside>
void weight_gradient(const Factor<Format>* factors, int num_factors, int64_t num_rows, int64_t H,
                     const GateMatrix<const typename Format::Element>& gates,
                     const Sizes<Format>& n, char* scratch, Engine& engine, Member me,
                     Beside&& beside) {
  int64_t total = 0;
  for (int f = 0; f < num_factors; ++f) total += round_up(factors[f].width, kLanes);
  const GradientScratch<Format> s(scratch, total, me.index, me.count);
  constexpr int64_t kChunk = GradientScratch<Format>::kChunk;
  const Range units = part_of({0, n.units}, me.index, me.count);
  const Range strips{4 * units.begin, 4 * units.end};
  int64_t chunk = 0;
  for (int64_t begin = 0; begin < num_rows; begin += kChunk, ++chunk) {
    const Range rows{begin, min_of(begin + kChunk, num_rows)};
    const int64_t padded = round_up(rows.end - rows.begin, Format::kInner);
    auto* const left = s.left[chunk & 1];
    int64_t at = 0;
    for (int f = 0; f < num_factors; ++f) {
      const int64_t groups = ceil_div(factors[f].width, kLanes);
      const Range mine = part_of({0, groups}, me.index, me.count);
      for (int64_t k = mine.begin; k < mine.end; ++k) {
        transpose_factor(factors[f], k * kLanes, rows, padded,
                         left + at * GradientScratch<Format>::kStride);
      }
      at += round_up(factors[f].width, kLanes);
    }
    me.barrier->wait(me.count);
    for (int64_t strip = strips.begin; strip < strips.end; strip += kStrips) {
      pack_gates<Format>(gates, rows, padded, strip / 4, s.right);
      beside(rows, strip / 4);
      at = 0;
      for (int f = 0; f < num_factors; ++f) {
        multiply(engine, plain(left, GradientScratch<Format>::kStride, padded),
                 {at, at + factors[f].width}, s.right, kChunk * kLanes, {0, kStrips}, padded,
                 [&](int64_t row, int64_t, int, const float* block) {
                   float* const sum = s.sums + row * n.gates + strip * kLanes;
                   for (int q = 0; q < kStrips; ++q) {
                     Vec v = Float32::load(block + q * kLanes);
                     if (chunk != 0) v += Float32::load(sum + q * kLanes);
                     Float32::store(sum + q * kLanes, v);
                   }
                 });
        at += round_up(factors[f].width, kLanes);
      }
    }
  }
  int64_t at = 0;
  for (int f = 0; f < num_factors; ++f) {
    for (int64_t strip = strips.begin; strip < strips.end && factors[f].out != nullptr; ++strip) {
      write_gradient<Format>(s.sums + at * n.gates, n.gates, factors[f].width, strip, H,
                             factors[f].out);
    }
    at += round_up(factors[f].width, kLanes);
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
