#include "fingerprint.h"

#include <algorithm>
#include <atomic>

#include "cpu/threads.h"

namespace fastlstm {
namespace {

constexpr int64_t kBlock = 128 << 10;

template <typename Blocks, typename Visit>
void each_block(Blocks& blocks, int threads, Visit&& visit) {
  const size_t count = blocks.size();
  run_team(threads, [&](Member me) {
    const size_t first = count * me.index / me.count, last = count * (me.index + 1) / me.count;
    for (size_t k = first; k < last; ++k) visit(blocks[k]);
  });
}

}  // namespace

Fingerprint::Fingerprint(const Kernels& kernels, const Regions& regions, int threads)
    : kernels_(kernels) {
  for (const auto& [address, bytes] : regions) {
    const auto* const data = reinterpret_cast<const uint8_t*>(address);
    for (int64_t at = 0; at < bytes; at += kBlock) {
      blocks_.push_back({data + at, std::min(kBlock, bytes - at), {}});
    }
    bytes_ += bytes;
  }
  each_block(blocks_, is_short() ? 1 : threads,
             [&](Block& block) { kernels_.sum_bytes(block.data, block.bytes, block.sums.data()); });
}

bool Fingerprint::is_still(int threads) const {
  std::atomic<bool> is_same{true};
  each_block(blocks_, is_short() ? 1 : threads, [&](const Block& block) {
    if (!is_same.load(std::memory_order_relaxed)) return;
    Sums sums;
    kernels_.sum_bytes(block.data, block.bytes, sums.data());
    if (sums != block.sums) is_same.store(false, std::memory_order_relaxed);
  });
  return is_same;
}

}  // namespace fastlstm
