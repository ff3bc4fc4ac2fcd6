#include "fingerprint.h"

#include <algorithm>

#include "cpu/threads.h"

namespace fastlstm {
namespace {

constexpr int64_t kLinesPerSet = 64;  // few enough for the shortest call
constexpr int64_t kWhole = 32 << 10;  // bytes that the shortest call can read

int64_t share(int64_t count, Member me, int which) { return count * (me.index + which) / me.count; }

}  // namespace

int64_t Fingerprint::Region::sets_read(int64_t rows) const {
  const auto num_sets = static_cast<int64_t>(sums.size());
  return std::clamp<int64_t>((num_sets * std::min(rows, kRows) + kRows - 1) / kRows, 1, num_sets);
}

Fingerprint::Fingerprint(const Kernels& kernels, const Regions& regions, int threads)
    : kernels_(kernels) {
  for (const auto& [address, bytes] : regions) {
    Region& r = regions_.emplace_back(reinterpret_cast<const uint8_t*>(address), bytes);
    // Odd, so that the lines of a set fall on all columns of a matrix.
    const int64_t num_sets = std::min(bytes / (kLineBytes * kLinesPerSet) | 1, kMaxLineSets);
    r.sums.resize(bytes <= kWhole ? 1 : num_sets);
  }
  run_team(bytes_read(kRows) > kAlone ? threads : 1, [&](Member me) {
    for (Region& r : regions_) {
      const auto num_sets = static_cast<int64_t>(r.sums.size());
      const int64_t first = share(num_sets, me, 0), last = share(num_sets, me, 1);
      kernels_.sum_lines(r.data, r.bytes, num_sets, first, last - first, r.sums.data() + first);
    }
  });
}

bool Fingerprint::is_still(int64_t rows, int threads) {
  if (!is_same_) return false;
  std::vector<int64_t> turns;
  for (Region& r : regions_) turns.push_back(r.turn.fetch_add(r.sets_read(rows)));
  run_team(bytes_read(rows) > kAlone ? threads : 1, [&](Member me) {
    for (size_t k = 0; k < regions_.size(); ++k) {
      const Region& r = regions_[k];
      const auto num_sets = static_cast<int64_t>(r.sums.size());
      const int64_t count = r.sets_read(rows), turn = turns[k] % num_sets;
      const auto check = [&](int64_t first, int64_t last) {
        if (first >= last) return;
        uint64_t found[kMaxLineSets];
        kernels_.sum_lines(r.data, r.bytes, num_sets, first, last - first, found);
        if (!std::equal(found, found + (last - first), r.sums.data() + first)) is_same_ = false;
      };
      const int64_t first = turn + share(count, me, 0), last = turn + share(count, me, 1);
      check(first, std::min(last, num_sets));
      check(std::max(first - num_sets, int64_t{0}), last - num_sets);
    }
  });
  return is_same_;
}

int64_t Fingerprint::bytes_read(int64_t rows) const {
  int64_t total = 0;
  for (const Region& r : regions_) {
    total += r.bytes * r.sets_read(rows) / static_cast<int64_t>(r.sums.size());
  }
  return total;
}

}  // namespace fastlstm
