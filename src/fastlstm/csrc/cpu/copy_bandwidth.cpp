#include "cpu/copy_bandwidth.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/fma_peak.h"

namespace fastlstm {

double measure_copy_gb_s(int threads, int64_t bytes_per_thread, int rounds) {
  std::vector<std::vector<char>> sources(threads), targets(threads);
  for (int index = 0; index < threads; ++index) {
    sources[index].resize(bytes_per_thread);
    targets[index].resize(bytes_per_thread);
  }
  double best = 0.0;
  for (int round = 0; round < rounds; ++round) {
    const double elapsed = run_together(threads, [&](int index) {
      std::memcpy(targets[index].data(), sources[index].data(), bytes_per_thread);
    });
    const double bytes = 2.0 * static_cast<double>(bytes_per_thread) * threads;
    best = std::max(best, bytes / elapsed / 1e9);
  }
  return best;
}

}  // namespace fastlstm
