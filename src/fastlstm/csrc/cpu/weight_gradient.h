// Gradients of weights: gate gradients (rows, G) transposed times what entered the gates.
//
// Works through the rows in chunks: the team transposes a chunk of every left operand together,
// then each thread packs gates of the chunk, of some units, and multiplies. The sum over rows runs
// in order whatever the number of threads.
#pragma once

#include "cpu/lstm_forward.h"

namespace fastlstm::FASTLSTM_ISA {

// Rows of a batch, `lanes` of each step.
struct Rows {
  int64_t size, lanes;
};

// A chunk of rows, and where each is in the batch: divisions once for all columns.
struct RowChunk {
  static constexpr int64_t kMost = 1280;
  struct Row {
    int64_t gate;  // its gates of group 0 in a GateMatrix
    int32_t step, lane;
  };
  Row rows[kMost];
  int64_t begin = 0, end = 0;
  int64_t count = 0;

  // Moves on to the next of nearly equal chunks; false behind the last.
  template <typename Element>
  bool next(const Rows& all, const GateMatrix<Element>& gates) {
    const int64_t chunks = ceil_div(all.size, kMost);
    begin = end;
    if (begin == all.size) return false;
    end = min_of(begin + round_up(ceil_div(all.size, chunks), 64), all.size);
    count = end - begin;
    int64_t step = begin / all.lanes, lane = begin % all.lanes;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = begin + r;
      const int64_t gate = gates.at(at / gates.rows, 0, at % gates.rows) - gates.gates;
      rows[r] = {gate, static_cast<int32_t>(step), static_cast<int32_t>(lane)};
      if (++lane == all.lanes) lane = 0, ++step;
    }
    return true;
  }
};

// One left operand: `width` columns of `row(r)`, scaled by `mask` of its lane, whose gradient
// goes to `out` (4H, width). Without rows it is all ones and `out` is (4H): a bias. Rows of the
// input outside of their lane's steps count as zero whatever they hold: zero times NaN would be
// NaN.
template <typename Format>
struct Factor {
  using Element = typename Format::Element;
  int64_t width;
  float* out;
  const Element* rows;          // of step 0, lane 0
  int64_t step_stride, stride;  // elements from step to step, from lane to lane
  const Element* first;         // replaces every row up to its lane's begin; or null
  const int64_t *begins, *ends;
  const float* mask;
  bool has_padding;  // rows outside of their lane's steps count as zero

  FASTLSTM_INLINE void prefetch(const RowChunk::Row& r, int64_t k) const {
    if (rows != nullptr) __builtin_prefetch(row_of(r) + k, 0, 2);
  }
  FASTLSTM_INLINE const Element* row_of(const RowChunk::Row& r) const {
    return rows + r.step * step_stride + r.lane * stride;
  }
  FASTLSTM_INLINE Vec load(const RowChunk::Row& r, int64_t k) const {
    if (rows == nullptr) return splat(1.0f);
    const Element* row = row_of(r);
    if (first != nullptr) {
      if (r.step <= (begins == nullptr ? 0 : begins[r.lane])) row = first + r.lane * width;
    } else if (has_padding && !is_active(begins, ends, r.step, r.lane)) {
      return Vec{};
    }
    Vec v = load_part<Format>(row + k, width - k);
    if (mask != nullptr) v *= load_part<Float32>(mask + r.lane * width + k, width - k);
    return v;
  }
};

template <typename Format>
struct GradientScratch {
  using Element = typename Format::Element;
  static constexpr int64_t kChunk = RowChunk::kMost;
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

  GradientScratch(char* base, int64_t width, Member me)
      : right(reinterpret_cast<Element*>(base + me.index * right_bytes())) {
    base += me.count * right_bytes();
    left[0] = reinterpret_cast<Element*>(base);
    left[1] = reinterpret_cast<Element*>(base + left_bytes(width));
    sums = reinterpret_cast<float*>(base + 2 * left_bytes(width));
  }

  Element* left[2];  // [width][kStride], two chunks in turn
  Element* right;    // a thread's own: strips of one panel
  float* sums;       // [width][G]
};

// left[k][r] = factor of row r of a chunk, column k, for the columns from k to k + kLanes.
template <typename Format>
void transpose_factor(const Factor<Format>& factor, int64_t k, const RowChunk& chunk,
                      int64_t padded, typename Format::Element* left) {
  constexpr int64_t kStride = GradientScratch<Format>::kStride;
  constexpr int64_t kPair = Format::kPair;
  const int64_t columns = min_of(kLanes, factor.width - k);
  for (int64_t r = 0; r < padded; r += kLanes * kPair) {
    Words block[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const auto row = [&](int64_t offset) {
        const int64_t at = r + j * kPair + offset, ahead = at + kLanes * kPair;
        if (ahead < chunk.count) factor.prefetch(chunk.rows[ahead], k);
        return at < chunk.count ? factor.load(chunk.rows[at], k) : Vec{};
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
void pack_gates(const GateMatrix<const typename Format::Element>& gates, const RowChunk& chunk,
                int64_t padded, int64_t group, typename Format::Element* out) {
  using Element = typename Format::Element;
  constexpr int64_t kChunk = GradientScratch<Format>::kChunk;
  constexpr int64_t kAhead = 48;
  static constexpr Element kZero[4 * kLanes] = {};
  const Element* const base = gates.at(0, group, 0);
  const auto row = [&](int64_t r) { return r < chunk.count ? base + chunk.rows[r].gate : kZero; };
  for (int64_t r = 0; r < padded; r += Format::kPair) {
    for (int64_t p = r + kAhead; p < r + kAhead + Format::kPair; ++p) {
      const Element* const ahead = row(p);
      for (int64_t line = 0; line < 4 * kLanes; line += 64 / int64_t{sizeof(Element)}) {
        __builtin_prefetch(ahead + line, 0, 2);
      }
    }
    const Element* const first = row(r);
    if constexpr (Format::kPair == 1) {
      for (int s = 0; s < 4; ++s) {
        Float32::store(out + (s * kChunk + r) * kLanes, Float32::load(first + s * kLanes));
      }
    } else {
      const Element* const second = row(r + 1);
      for (int s = 0; s < 4; ++s) {
        Halves low, high;
        __builtin_memcpy(&low, first + s * kLanes, sizeof low);
        __builtin_memcpy(&high, second + s * kLanes, sizeof high);
        store_words(out + (s * kChunk + r) * kLanes, pair_rows(low, high));
      }
    }
  }
}

// out[row of a gate][k] = sums[k][gate], for one strip.
template <typename Format>
void write_gradient(const Sizes<Format>& n, const float* sums, int64_t width, int64_t strip,
                    float* out) {
  for (int64_t k = 0; k < width; k += kLanes) {
    Words block[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      block[j] = k + j < width
                     ? bits_of<Words>(Float32::load(sums + (k + j) * n.gates + strip * kLanes))
                     : Words{};
    }
    transpose(block);
    for (int64_t l = 0; l < kLanes; ++l) {
      const int64_t row = n.row_of(strip * kLanes + l);
      if (row < 0) break;
      store_part<Float32>(out + row * width + k, bits_of<Vec>(block[l]), width - k);
    }
  }
}

inline constexpr int64_t kFewRows = 128;

// One factor's gradient over a few rows, one chunk, for the units of one thread: rows of the factor
// stand in `left` side by side, and every value of `out` is summed and written once. In float32 the
// sums are those of `weight_gradient` below, bit for bit.
template <typename Format>
void few_rows_gradient(const Sizes<Format>& n, const Factor<Format>& factor, const RowChunk& chunk,
                       Range units, const GateMatrix<const typename Format::Element>& gates,
                       float* left) {
  constexpr int kGates = 4, kVectors = 2;
  const int64_t width = round_up(factor.width, kVectors * kLanes);
  for (int64_t r = 0; r < chunk.count; ++r) {
    for (int64_t k = 0; k < width; k += kLanes) {
      const bool is_inside = k < factor.width;
      Float32::store(left + r * width + k, is_inside ? factor.load(chunk.rows[r], k) : Vec{});
    }
  }
  const auto tile = [&](int64_t u, int64_t first) {
    const auto* const group = gates.at(0, u, 0);
    for (int64_t k = 0; k < factor.width; k += kVectors * kLanes) {
      Vec sum[kGates][kVectors] = {};
      for (int64_t r = 0; r < chunk.count; ++r) {
        const auto* const gate = group + chunk.rows[r].gate + first;
        const float* const row = left + r * width + k;
        const Vec held[kVectors] = {Float32::load(row), Float32::load(row + kLanes)};
#pragma GCC unroll 4
        for (int j = 0; j < kGates; ++j) {
          const Vec one = splat_element(gate[j]);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[j][v] += held[v] * one;
        }
      }
      for (int64_t j = 0; j < kGates; ++j) {
        const int64_t at = n.row_of(4 * kLanes * u + first + j);
        if (at < 0) break;
        float* const out = factor.out + at * factor.width + k;
        for (int64_t v = 0; v < kVectors && k + v * kLanes < factor.width; ++v) {
          store_part<Float32>(out + v * kLanes, sum[j][v], factor.width - k - v * kLanes);
        }
      }
    }
  };
  for (int64_t u = units.begin; u < units.end; ++u) {
    for (int64_t first = 0; first < 4 * n.width(u); first += kGates) tile(u, first);
  }
}

// Every factor's gradient over some rows of gate gradients; factors of different calls have columns
// of their own among `width`, from `column` on. Calls beside(chunk, group) for every chunk and
// group of the thread while the gates are in its cache.
template <typename Format, typename Engine, typename Beside>
void weight_gradient(const Factor<Format>* factors, int num_factors, int64_t column, int64_t width,
                     const Rows& rows, const GateMatrix<const typename Format::Element>& gates,
                     const Sizes<Format>& n, char* scratch, Items& items, Engine& engine, Member me,
                     const Beside& beside) {
  const GradientScratch<Format> s(scratch, width, me);
  constexpr int64_t kChunk = GradientScratch<Format>::kChunk;
  constexpr int64_t kStride = GradientScratch<Format>::kStride;
  const Range units = part_of({0, n.units}, me.index, me.count);
  const Range strips = n.strips_of(units);
  float* const sums = s.sums + column * n.gates;
  int64_t columns = 0;
  for (int f = 0; f < num_factors; ++f) columns += round_up(factors[f].width, kLanes);
  const auto blocks =
      Blocks::of<Engine>(n.units, columns, me.count, 1, 8 * kLanes * min_of(rows.size, kChunk));
  RowChunk chunk;
  const int64_t widest = max_of(n.state_inner, n.input_inner);  // whichever gradients are wanted
  const int64_t row_bytes = (widest + 2 * kLanes) * int64_t{sizeof(float)};
  if (rows.size <= kFewRows && rows.size * row_bytes <= s.right_bytes()) {
    chunk.next(rows, gates);
    for (int f = 0; f < num_factors; ++f) {
      if (factors[f].out == nullptr) continue;
      few_rows_gradient(n, factors[f], chunk, units, gates, reinterpret_cast<float*>(s.right));
    }
    for (int64_t u = units.begin; u < units.end; ++u) beside(chunk, u);
    return;
  }
  for (int64_t number = 0; chunk.next(rows, gates); ++number) {
    const int64_t padded = round_up(chunk.count, Format::kInner);
    const bool is_first = chunk.begin == 0;
    auto* const left = s.left[number & 1];
    int64_t at = 0;
    for (int f = 0; f < num_factors; ++f) {
      const int64_t groups = ceil_div(factors[f].width, kLanes);
      const Range mine = part_of({0, groups}, me.index, me.count);
      for (int64_t k = mine.begin; k < mine.end; ++k) {
        transpose_factor(factors[f], k * kLanes, chunk, padded, left + at * kStride);
      }
      at += round_up(factors[f].width, kLanes);
    }
    me.barrier->wait(me.count);
    items.each(blocks, false, [&](const Share& item) __attribute__((noinline)) {
      for (int64_t u = item.units.begin; u < item.units.end; ++u) {
        pack_gates<Format>(gates, chunk, padded, u, s.right);
        if (item.lanes.begin == 0) beside(chunk, u);
        int64_t from = 0;
        for (int f = 0; f < num_factors; ++f) {
          const Range part{max_of(from, item.lanes.begin),
                           min_of(from + factors[f].width, item.lanes.end)};
          from += round_up(factors[f].width, kLanes);
          if (part.begin >= part.end) continue;
          multiply(engine, plain(left, kStride, padded), part, s.right, kChunk * kLanes,
                   {0, min_of(kStrips, n.strips - kStrips * u)}, padded,
                   [&](int64_t row, int64_t, int num, const float* block) {
                     for (int q = 0; q < num; ++q) {
                       float* to = sums + row * n.gates + (kStrips * u + q) * kLanes;
                       Vec v = Float32::load(block + q * kLanes);
                       if (!is_first) v += Float32::load(to);
                       Float32::store(to, v);
                     }
                   });
        }
      }
    });
  }
  me.barrier->wait(me.count);
  int64_t at = 0;
  for (int f = 0; f < num_factors; ++f) {
    for (int64_t strip = strips.begin; strip < strips.end && factors[f].out != nullptr; ++strip) {
      write_gradient(n, sums + at * n.gates, factors[f].width, strip, factors[f].out);
    }
    at += round_up(factors[f].width, kLanes);
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
