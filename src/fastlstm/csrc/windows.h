// Windows of a table: which rows they are, in which order they come, and copying them.
#pragma once

#include <cstdint>

namespace fastlstm {

// A bijection of 0..size-1, drawn by a key: every number once, in an order without pattern, in no
// memory. Multiplications by odd numbers and shifts are bijections of the numbers of so many bits;
// a result beyond `size` is put through again until it lies within (at most twice on average).
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t key);
  uint64_t operator()(uint64_t index) const;

 private:
  static constexpr int kRounds = 4;
  uint64_t size_, mask_;
  int shift_;
  uint64_t multipliers_[kRounds], offsets_[kRounds];
};

// The windows of a table, numbered: segment by segment, from early to late.
//
//   first_rows[s]   row of the table where the first window of segment s begins
//   ends[s]         windows in the segments 0..s; increasing, so ends[num_segments - 1] is all
//   stride          rows from one window to the next of the same segment
struct WindowIndex {
  const int64_t* first_rows;
  const int64_t* ends;
  int64_t num_segments;
  int64_t stride;
};

// The windows of an index in groups that follow each other (a series each, however many segments it
// has), of which every epoch draws all equally often.
//
//   ends[g]   windows in the groups 0..g, so ends[num_groups - 1] is all; num_groups 0: no groups
//
// An epoch of N draws gives each of G groups N / G of them, one more to the first N % G. The draws
// of a group, counted on from epoch to epoch, go through its windows in ever new orders: each of
// them once before any comes again.
struct Groups {
  const int64_t* ends;
  int64_t num_groups;
  uint64_t seed;

  // The window that draw number `draw` of an epoch takes.
  int64_t window(int64_t draw, int64_t epoch) const;
};

// How a cell of a table is stored.
enum class Cell { f32 = 0, f16 = 1, i16 = 2 };

// Values, row after row: num_columns cells each. Cells of i16 stand for cell * scale[column] +
// offset[column], and the smallest one for a missing value, which is NaN in the other two.
struct TableView {
  const void* values;
  Cell cell;
  int64_t num_columns;
  const float* scale;
  const float* offset;
};

// Rows and segments of the windows number[0..count): through the permutation where there is one,
// then through the groups where there are any.
void locate_windows(const WindowIndex& index, const Permutation* order, const Groups& groups,
                    int64_t epoch, const int64_t* numbers, int64_t count, int64_t* rows,
                    int64_t* segments);

// Copies windows of `length` rows that begin at rows[0..count) into out: (count, length,
// num_columns) float32.
void gather_windows(const TableView& table, const int64_t* rows, int64_t count, int64_t length,
                    float* out);

}  // namespace fastlstm
