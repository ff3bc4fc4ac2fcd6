// Layer norm over features that a team holds in groups: partial moments, then those of whole rows.
//
// Every thread forms the moments of all rows it works on from the partial ones of all groups, in
// the order of the groups: results do not depend on the number of threads. Where
// `splits_lanes` says so, it owns lanes, in whole blocks, and meets nobody in a step.
#pragma once

#include "cpu/lstm_forward.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr float kEpsilon = 1e-5f;  // EPSILON of ops/cell_call.py

// Calls body(first) for vectors of kLanes rows that cover `rows`: at least kLanes rows, or rows
// from 0 on, with padding behind them.
template <typename Body>
FASTLSTM_INLINE void each_vector(Range rows, Body&& body) {
  for (int64_t row = rows.begin; row < rows.end; row += kLanes) {
    body(max_of(min_of(row, rows.end - kLanes), rows.begin));
  }
}

// `kSums` sums per row and group: [sum][group][row], rows padded to whole vectors.
template <int kSums>
struct PartialSums {
  static int64_t size(int64_t groups, int64_t rows) {
    return kSums * groups * round_up(rows, kLanes);
  }
  FASTLSTM_INLINE float& at(int sum, int64_t group, int64_t row) const {
    return sums[(sum * groups + group) * round_up(rows, kLanes) + row];
  }
  // Sum `sum` over all groups, for the kLanes rows from `row` on.
  FASTLSTM_INLINE Vec total(int sum, int64_t row) const {
    Vec v{};
    for (int64_t u = 0; u < groups; ++u) v += Float32::load(&at(sum, u, row));
    return v;
  }

  float* sums;
  int64_t groups, rows;
};

// Mean and 1 / deviation of rows; a thread's own.
struct RowMoments {
  static int64_t size(int64_t rows) { return 2 * round_up(rows, kLanes); }
  float* mean() const { return values; }
  float* scale() const { return values + round_up(rows, kLanes); }

  float* values;
  int64_t rows;
};

// Sum, and sum of squares about the group's own mean, of the first `count` lanes of some vectors.
template <int kVectors>
FASTLSTM_INLINE void add_group(const Vec (&given)[kVectors], int64_t count,
                               const PartialSums<2>& out, int64_t group, int64_t row) {
  const int64_t lanes = min_of(count, kLanes);
  Vec total{}, squares{};
#pragma GCC unroll 4
  for (int q = 0; q < kVectors; ++q) total += given[q];
  const float sum = sum_lanes(first_lanes(total, count));
  const float mean = sum / static_cast<float>(kVectors * lanes);
#pragma GCC unroll 4
  for (int q = 0; q < kVectors; ++q) squares += (given[q] - mean) * (given[q] - mean);
  out.at(0, group, row) = sum;
  out.at(1, group, row) = sum_lanes(first_lanes(squares, count));
}

// Moments of rows of kVectors * H features from the partial sums of add_group.
template <int kVectors>
void merge_groups(const PartialSums<2>& partial, Range rows, int64_t H, const RowMoments& out) {
  const float share = 1.0f / static_cast<float>(kVectors * H);
  each_vector(rows, [&](int64_t row) {
    const Vec mean = partial.total(0, row) * share;
    Vec squares = partial.total(1, row);
    for (int64_t u = 0; u < partial.groups; ++u) {
      const auto features = static_cast<float>(kVectors * min_of(kLanes, H - u * kLanes));
      const Vec offset = Float32::load(&partial.at(0, u, row)) * (1.0f / features) - mean;
      squares += offset * offset * features;
    }
    Vec scale = squares * share + kEpsilon;
    for (int l = 0; l < kLanes; ++l) scale[l] = 1.0f / __builtin_sqrtf(scale[l]);
    Float32::store(out.mean() + row, mean);
    Float32::store(out.scale() + row, scale);
  });
}

// Where the kept moments of all steps lie in CellCall::moments.
struct KeptMoments {
  KeptMoments(float* values, int64_t T, int64_t B)
      : scale_hh(values),
        scale_ih(values + T * B),
        mean_c(values + 2 * T * B),
        scale_c(values + 3 * T * B) {}
  float *scale_hh, *scale_ih, *mean_c, *scale_c;
};

// The normalised products in CellCall::normed.
template <typename Element>
struct Normed {
  Normed(void* values, int64_t T, int64_t B, int64_t chunk, int64_t units)
      : hh{static_cast<Element*>(values), chunk * B, units},
        ih{values == nullptr ? nullptr : hh.gates + gate_rows(T, B) * units * hh.kGroup, chunk * B,
           units} {}
  GateMatrix<Element> hh, ih;
};

}  // namespace fastlstm::FASTLSTM_ISA
