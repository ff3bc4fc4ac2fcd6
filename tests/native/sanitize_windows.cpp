// Windows of a table without Python: the order, the groups, the places and the copies of all three
// kinds of cell, checked against what they are said to be, the queue of jobs used from several
// threads, and the keys of texts. Built by sanitize.sh, whose sanitizers check memory and races.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "job_queue.h"
#include "text_keys.h"
#include "windows.h"

namespace fastlstm {
namespace {

int wrong = 0;

void expect(bool is_right, const char* what, int64_t which) {
  if (is_right) return;
  ++wrong;
  std::printf("%s: wrong at %lld\n", what, static_cast<long long>(which));
}

void check_permutations() {
  for (const uint64_t size : {1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097}) {
    for (const uint64_t key : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      const Permutation order(size, key);
      std::vector<int> seen(size);
      for (uint64_t k = 0; k < size; ++k) {
        const uint64_t number = order(k);
        if (number < size) ++seen[number];
      }
      const bool is_whole = std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; });
      expect(is_whole, "permutation", static_cast<int64_t>(size));
    }
  }
  const uint64_t most = uint64_t{1} << 63;
  const Permutation huge(most, 7);
  for (uint64_t k = 0; k < 100; ++k) expect(huge(most - 1 - k) < most, "huge permutation", 0);
}

// Ends of parts of these sizes.
std::vector<int64_t> ends_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> ends(sizes.size());
  std::partial_sum(sizes.begin(), sizes.end(), ends.begin());
  return ends;
}

void check_groups() {
  const std::vector<std::vector<int64_t>> cases = {{1}, {5}, {1, 1, 1}, {7, 1, 30, 2}, {300, 4}};
  for (const auto& sizes : cases) {
    const std::vector<int64_t> ends = ends_of(sizes);
    const auto num = static_cast<int64_t>(sizes.size());
    const Groups groups{ends.data(), num, 11};
    std::vector<std::vector<int>> seen(sizes.size());
    for (int64_t g = 0; g < num; ++g) seen[static_cast<size_t>(g)].resize(sizes[g]);
    for (int64_t epoch = 0; epoch < 20; ++epoch) {
      for (int64_t draw = 0; draw < ends.back(); ++draw) {
        const int64_t g = draw % num, before = g == 0 ? 0 : ends[g - 1];
        const int64_t window = groups.window(draw, epoch);
        const bool is_within = window >= before && window < ends[g];
        expect(is_within, "group", draw);
        if (is_within) ++seen[static_cast<size_t>(g)][static_cast<size_t>(window - before)];
      }
    }
    for (const auto& counts : seen) {
      const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
      expect(*most - *least <= 1, "turns of a group", num);
    }
  }
}

// A table on the heap without a byte to spare, and what its cells stand for.
template <typename Element>
struct Table {
  Table(int64_t rows, int64_t columns, Cell cell) : values(new Element[rows * columns]) {
    std::mt19937 engine(static_cast<unsigned>(rows));
    for (int64_t k = 0; k < rows * columns; ++k) {
      const auto bits = static_cast<uint32_t>(engine());
      std::memcpy(&values[k], &bits, sizeof(Element));
    }
    for (int64_t c = 0; c < columns; ++c) {
      scale.push_back(0.5f + static_cast<float>(c));
      offset.push_back(static_cast<float>(c) - 1.0f);
    }
    view = {values.get(), cell, columns, scale.data(), offset.data()};
  }
  float meaning(int64_t row, int64_t column) const {
    const Element cell = values[row * view.num_columns + column];
    if (view.cell == Cell::f32) {
      return std::bit_cast<float>(static_cast<uint32_t>(bits(cell)));
    }
    if (view.cell == Cell::i16) {
      const auto whole = static_cast<int16_t>(bits(cell));
      if (whole == std::numeric_limits<int16_t>::min()) return std::nanf("");
      const auto c = static_cast<size_t>(column);
      return static_cast<float>(whole) * scale[c] + offset[c];
    }
    const auto half = static_cast<uint32_t>(bits(cell));
    const int exponent = static_cast<int>(half >> 10 & 31);
    const auto fraction = static_cast<float>(half & 1023);
    const float sign = half >> 15 != 0 ? -1.0f : 1.0f;
    if (exponent == 31) {
      return fraction > 0 ? std::nanf("") : sign * std::numeric_limits<float>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(fraction, -24);
    return sign * std::ldexp(1024.0f + fraction, exponent - 25);
  }

  std::unique_ptr<Element[]> values;
  std::vector<float> scale, offset;
  TableView view;

 private:
  static uint32_t bits(Element cell) {
    uint32_t found = 0;
    std::memcpy(&found, &cell, sizeof cell);
    return found;
  }
};

bool is_same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= 1e-6f * std::abs(b) || a == b;
}

// Two batches at a time through a queue, each from a thread of its own, against the cells.
template <typename Element>
void check_copies(Cell cell, int64_t columns, int64_t length, bool has_groups) {
  const std::vector<int64_t> sizes = {40, 1, 17};
  const std::vector<int64_t> ends = ends_of(sizes);
  const int64_t stride = 2, all = ends.back(), batch = 7;
  std::vector<int64_t> first_rows;
  int64_t rows = 0;
  for (const int64_t size : sizes) {
    first_rows.push_back(rows);
    rows += (size - 1) * stride + length;
  }
  const Table<Element> table(rows, columns, cell);
  const WindowIndex index{first_rows.data(), ends.data(), static_cast<int64_t>(sizes.size()),
                          stride};
  const Groups groups{has_groups ? ends.data() : nullptr, has_groups ? index.num_segments : 0, 3};
  const Permutation order(static_cast<uint64_t>(all), 5);
  JobQueue queue;
  std::atomic<int64_t> num_wrong = 0;
  const auto read = [&](int64_t begin) {
    for (int64_t first = begin; first < all; first += 2 * batch) {
      const int64_t count = std::min(batch, all - first);
      const auto size = static_cast<size_t>(count);
      std::vector<int64_t> numbers(size), at(size), segments(size);
      std::iota(numbers.begin(), numbers.end(), first);
      std::unique_ptr<float[]> out(new float[size * static_cast<size_t>(length * columns)]);
      const int64_t job = queue.submit([&] {
        locate_windows(index, &order, groups, 2, numbers.data(), count, at.data(), segments.data());
        gather_windows(table.view, at.data(), count, length, out.get());
      });
      while (!queue.wait(job, 0.01)) {
      }
      for (int64_t i = 0; i < count * length * columns; ++i) {
        const int64_t row = at[static_cast<size_t>(i / (length * columns))];
        const float want = table.meaning(row + i / columns % length, i % columns);
        if (!is_same(out[static_cast<size_t>(i)], want)) ++num_wrong;
      }
      for (size_t i = 0; i < size; ++i) {
        const auto s = static_cast<size_t>(segments[i]);
        const int64_t within = at[i] - first_rows[s];
        if (within < 0 || within % stride != 0 || within / stride >= sizes[s]) ++num_wrong;
      }
    }
  };
  std::thread other(read, batch);
  read(0);
  other.join();
  expect(num_wrong == 0, "copies", num_wrong);
}

// A queue that goes while jobs wait: none of them may run afterwards.
void check_queue() {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> done = 0;
    int64_t last = 0;
    {
      JobQueue queue;
      std::thread other([&] {
        for (int k = 0; k < 20; ++k) queue.submit([&] { ++done; });
      });
      for (int k = 0; k < 20; ++k) last = queue.submit([&] { ++done; });
      other.join();
      if (round % 2 == 0) {
        while (!queue.wait(40, 0.01)) {
        }
        expect(done == 40, "jobs", done);
      }
    }
    const int at_end = done;
    expect(last >= 20 && at_end <= 40, "jobs of a queue that went", at_end);
  }
}

void check_texts() {
  TextKeys keys(1, 2);
  std::map<std::string, int64_t> expected;
  std::mt19937_64 random(0);
  for (const int64_t count : {0, 1, 63, 64, 65, 5000}) {
    std::string data;
    std::vector<int64_t> offsets{0}, found(count);
    std::vector<std::string> texts;
    for (int64_t i = 0; i < count; ++i) {
      texts.push_back(std::string(random() % 20, 'x') + std::to_string(random() % 2000));
      if (random() % 100 == 0) texts.back().clear();
      data += texts.back();
      offsets.push_back(static_cast<int64_t>(data.size()));
    }
    const std::unique_ptr<char[]> exact(new char[data.size()]);  // a read beyond it is found
    std::memcpy(exact.get(), data.data(), data.size());
    keys.find(offsets.data(), exact.get(), count, found.data());
    for (int64_t i = 0; i < count; ++i) {
      const auto key = expected.emplace(texts[i], expected.size()).first->second;
      expect(found[i] == key, "texts", i);
    }
  }
}

int run_all() {
  check_permutations();
  check_texts();
  check_groups();
  for (const bool has_groups : {false, true}) {
    for (const int64_t columns : {1, 3, 17}) {
      for (const int64_t length : {1, 5, 90}) {
        check_copies<float>(Cell::f32, columns, length, has_groups);
        check_copies<uint16_t>(Cell::f16, columns, length, has_groups);
        check_copies<int16_t>(Cell::i16, columns, length, has_groups);
      }
    }
  }
  check_queue();
  std::printf("windows, groups, jobs and texts: %d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fastlstm

int main() { return fastlstm::run_all(); }
