// Products by instructions that multiply two rows by two columns, 8 bytes of the inner dimension at
// once: BFMMLA and USMMLA of Arm.
//
// The sums of rows 2 p and 2 p + 1 with a strip are held as [row][columns 0, 2] and [row][columns
// 1, 3]. Columns come as vectors of pairs or fours of all columns, as the strips have them: an
// exchange of words of two such vectors makes the right operands. A last odd row takes dot
// products. Registers for 6 x 4: 24 sums, 3 left and 2 right operands, 2 loaded.
#pragma once

#include "cpu/simd.h"

namespace fastlstm::FASTLSTM_ISA {

template <int stride, typename Sum>
FASTLSTM_INLINE void exchange(Sum& a, Sum& b) {
  Words low = bits_of<Words>(a), high = bits_of<Words>(b);
  internal::exchange<stride>(low, high, internal::MakeIndices<kLanes>::type{});
  a = bits_of<Sum>(low);
  b = bits_of<Sum>(high);
}

// From rows to squares, and back.
template <int kRow, int kStrip, typename Sum>
FASTLSTM_INLINE void to_squares(Sum (&sum)[kRow][kStrip], bool is_back = false) {
#pragma GCC unroll 3
  for (int r = 0; r + 1 < kRow; r += 2) {
#pragma GCC unroll 4
    for (int s = 0; s < kStrip; ++s) {
      if (is_back) exchange<1>(sum[r][s], sum[r + 1][s]);
      exchange<2>(sum[r][s], sum[r + 1][s]);
      if (!is_back) exchange<1>(sum[r][s], sum[r + 1][s]);
    }
  }
}

// sum += 8 bytes of each row of `a`, `stride` apart, by those of the columns: right(strip, half).
template <int kRow, int kStrip, typename Sum, typename Element, typename RightAt>
FASTLSTM_INLINE void add_squares(Sum (&sum)[kRow][kStrip], const Element* a, int64_t stride,
                                 RightAt&& right) {
  Words left[kRow / 2];
#pragma GCC unroll 3
  for (int p = 0; p < kRow / 2; ++p) {
    left[p] = two_rows(a + 2 * p * stride, a + (2 * p + 1) * stride);
  }
  uint32_t last[2];
  __builtin_memcpy(last, a + (kRow - 1) * stride, sizeof last);
#pragma GCC unroll 4
  for (int s = 0; s < kStrip; ++s) {
    Words even = right(s, 0), odd = right(s, 1);
    if constexpr (kRow % 2 == 1) {
      sum[kRow - 1][s] = add_dots(sum[kRow - 1][s], last[0] - Words{}, even);
      sum[kRow - 1][s] = add_dots(sum[kRow - 1][s], last[1] - Words{}, odd);
    }
    exchange<1>(even, odd);
#pragma GCC unroll 3
    for (int p = 0; p < kRow / 2; ++p) {
      sum[2 * p][s] = add_square(sum[2 * p][s], left[p], even);
      sum[2 * p + 1][s] = add_square(sum[2 * p + 1][s], left[p], odd);
    }
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
