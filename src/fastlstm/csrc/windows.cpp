#include "windows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <limits>

namespace fastlstm {
namespace {

// SplitMix64: the numbers a permutation is made of.
uint64_t next_random(uint64_t& state) {
  state += 0x9E3779B97F4A7C15ull;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 0x3FFu;
  if (exponent == 0) {  // zero and the numbers below the smallest normal one
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

void copy_rows(const TableView& table, int64_t row, int64_t length, float* out) {
  const int64_t C = table.num_columns, count = length * C;
  if (table.cell == Cell::f32) {
    std::memcpy(out, static_cast<const float*>(table.values) + row * C,
                static_cast<size_t>(count) * sizeof(float));
  } else if (table.cell == Cell::f16) {
    const auto* from = static_cast<const uint16_t*>(table.values) + row * C;
    for (int64_t i = 0; i < count; ++i) out[i] = from_half(from[i]);
  } else {
    const auto* from = static_cast<const int16_t*>(table.values) + row * C;
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t c = 0; c < C; ++c) {
        const int16_t cell = from[t * C + c];
        const bool is_missing = cell == std::numeric_limits<int16_t>::min();
        out[t * C + c] = is_missing ? std::numeric_limits<float>::quiet_NaN()
                                    : static_cast<float>(cell) * table.scale[c] + table.offset[c];
      }
    }
  }
}

int64_t cell_bytes(Cell cell) { return cell == Cell::f32 ? 4 : 2; }

}  // namespace

Permutation::Permutation(uint64_t size, uint64_t key) : size_(size) {
  const int bits = std::max(2, static_cast<int>(std::bit_width(size - 1)));
  mask_ = bits == 64 ? ~0ull : (1ull << bits) - 1;
  shift_ = (bits + 1) / 2;
  for (int round = 0; round < kRounds; ++round) {
    multipliers_[round] = next_random(key) | 1;
    offsets_[round] = next_random(key);
  }
}

uint64_t Permutation::operator()(uint64_t index) const {
  uint64_t x = index;
  do {
    for (int round = 0; round < kRounds; ++round) {
      x = (x * multipliers_[round] + offsets_[round]) & mask_;
      x ^= x >> shift_;
    }
  } while (x >= size_);
  return x;
}

int64_t Groups::window(int64_t draw, int64_t epoch) const {
  const int64_t all = ends[num_groups - 1], group = draw % num_groups;
  const int64_t turns = all / num_groups + (group < all % num_groups ? 1 : 0);
  const int64_t before = group == 0 ? 0 : ends[group - 1], size = ends[group] - before;
  const int64_t drawn = epoch * turns + draw / num_groups;
  uint64_t key = seed;  // of this group and this time through it
  for (const int64_t part : {group, drawn / size}) {
    key ^= static_cast<uint64_t>(part);
    key = next_random(key);
  }
  const Permutation order(static_cast<uint64_t>(size), key);
  return before + static_cast<int64_t>(order(static_cast<uint64_t>(drawn % size)));
}

void locate_windows(const WindowIndex& index, const Permutation* order, const Groups& groups,
                    int64_t epoch, const int64_t* numbers, int64_t count, int64_t* rows,
                    int64_t* segments) {
  for (int64_t i = 0; i < count; ++i) {
    auto number = static_cast<uint64_t>(numbers[i]);
    if (order != nullptr) number = (*order)(number);
    auto window = static_cast<int64_t>(number);
    if (groups.num_groups > 0) window = groups.window(window, epoch);
    const int64_t* end = std::upper_bound(index.ends, index.ends + index.num_segments, window);
    const int64_t segment = end - index.ends;
    const int64_t before = segment == 0 ? 0 : index.ends[segment - 1];
    rows[i] = index.first_rows[segment] + (window - before) * index.stride;
    segments[i] = segment;
  }
}

void gather_windows(const TableView& table, const int64_t* rows, int64_t count, int64_t length,
                    float* out) {
  constexpr int64_t kAhead = 4, kLine = 64;
  const int64_t row_bytes = table.num_columns * cell_bytes(table.cell);
  const int64_t ahead_bytes = std::min<int64_t>(length * row_bytes, 4096);
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {  // random places: none of their lines is on its way
      const auto* next = static_cast<const char*>(table.values) + rows[i + kAhead] * row_bytes;
      for (int64_t b = 0; b < ahead_bytes; b += kLine) __builtin_prefetch(next + b);
    }
    copy_rows(table, rows[i], length, out + i * length * table.num_columns);
  }
}

}  // namespace fastlstm
