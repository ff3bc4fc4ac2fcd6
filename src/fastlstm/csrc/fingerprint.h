// Whether memory still holds what it held: sums of weights that were packed or laid out anew.
//
// torch counts most changes of a tensor, but none through `.data`, NumPy or an address. So a check
// reads every byte, in blocks that threads share; a block has 16 sums of its words.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "lstm.h"

namespace fastlstm {

class Fingerprint {
 public:
  using Regions = std::vector<std::pair<uintptr_t, int64_t>>;  // address and bytes of each

  // Reads all of it. The memory must live as long as checks are made.
  Fingerprint(const Kernels& kernels, const Regions& regions, int threads);

  // Whether all of it holds what it held. Several threads may ask at once.
  bool is_still(int threads) const;

  // Whether a check is so short that a second thread gains nothing, nor another thread of Python.
  bool is_short() const { return bytes_ <= (1 << 20); }

 private:
  using Sums = std::array<uint64_t, kByteSums>;
  struct Block {
    const uint8_t* data;
    int64_t bytes;
    Sums sums;
  };

  const Kernels& kernels_;
  int64_t bytes_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace fastlstm
