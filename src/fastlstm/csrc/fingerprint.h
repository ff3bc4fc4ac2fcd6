// Whether memory still holds what it held: sums of weights that were packed or laid out anew.
//
// torch counts most changes of a tensor, but none through `.data`, NumPy or an address. A region of
// memory is cut into lines of 64 bytes and these are dealt out to `sets`, line k to set k mod sets;
// a sum is kept for every set. A check reads some sets, the next check the ones after them. So a
// change of everything is seen at once, and any change by the time all sets had their turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "lstm.h"

namespace fastlstm {

class Fingerprint {
 public:
  using Regions = std::vector<std::pair<uintptr_t, int64_t>>;  // address and bytes of each

  // What a layer computes before every set has been read: T * B of its calls, added up.
  static constexpr int64_t kRows = 4096;

  // A check that reads more than this many bytes is shared out to threads.
  static constexpr int64_t kAlone = 1 << 20;

  // Reads all of it. The memory must live as long as checks are made.
  Fingerprint(const Kernels& kernels, const Regions& regions, int threads);
  Fingerprint(const Fingerprint&) = delete;

  // Whether what the next sets hold is what they held; all sets where `rows` is at least kRows.
  // Once it is not, it never is again. Several threads may ask at once.
  bool is_still(int64_t rows, int threads);

  // Bytes that a check reads.
  int64_t bytes_read(int64_t rows) const;

 private:
  struct Region {
    const uint8_t* data;
    int64_t bytes;
    std::vector<uint64_t> sums;    // of every set
    std::atomic<int64_t> turn{0};  // sets read so far

    int64_t sets_read(int64_t rows) const;
  };

  const Kernels& kernels_;
  std::deque<Region> regions_;
  std::atomic<bool> is_same_{true};
};

}  // namespace fastlstm
