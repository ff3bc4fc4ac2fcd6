#include "cpu/fma_peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <thread>

namespace fastlstm {

double run_together(int threads, const std::function<void(int)>& body) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> num_ready{0};
  std::atomic<bool> is_started{false};
  std::vector<std::thread> workers;
  for (int index = 1; index < threads; ++index) {
    workers.emplace_back([&, index] {
      num_ready.fetch_add(1);
      while (!is_started.load(std::memory_order_acquire)) std::this_thread::yield();
      body(index);
    });
  }
  while (num_ready.load() < threads - 1) std::this_thread::yield();
  const auto start = Clock::now();
  is_started.store(true, std::memory_order_release);
  body(0);
  for (auto& worker : workers) worker.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<PeakKernel> peak_kernels(const std::string& isa) {
  const std::vector<PeakKernel> built{
      fma_peak_f32__scalar(),
#if defined(FASTLSTM_HAS_NEON)
      fma_peak_f32__neon(),
#endif
#if defined(FASTLSTM_HAS_NEON_BF16)
      fma_peak_bf16__neon_bf16(),
#endif
#if defined(FASTLSTM_HAS_AVX2)
      fma_peak_f32__avx2(),
#endif
#if defined(FASTLSTM_HAS_AVX512)
      fma_peak_f32__avx512(),
#endif
#if defined(FASTLSTM_HAS_AVX512_BF16)
      fma_peak_bf16__avx512_bf16(),
#endif
#if defined(FASTLSTM_HAS_AMX_BF16)
      fma_peak_bf16__amx_bf16(),
#endif
  };
  constexpr const char* kOrder[] = {"scalar", "neon",        "neon_bf16", "avx2",
                                    "avx512", "avx512_bf16", "amx_bf16"};
  const auto rank = [&](const std::string& name) {
    return std::find(std::begin(kOrder), std::end(kOrder), name) - std::begin(kOrder);
  };
  std::vector<PeakKernel> usable;
  for (const PeakKernel& kernel : built) {
    if (rank(kernel.isa) <= rank(isa) && rank(isa) < std::ssize(kOrder)) usable.push_back(kernel);
  }
  return usable;
}

double measure_peak_gflops(const PeakKernel& kernel, int threads, double seconds) {
  constexpr int kRounds = 5;
  std::atomic<float> sink{0.0f};
  int64_t iterations = 1000;
  double elapsed = 0.0;
  const auto round = [&] {
    elapsed = run_together(threads, [&](int) { sink.store(kernel.loop(iterations)); });
  };
  // Grows until one round is long enough to hide the start of the threads.
  for (round(); elapsed < seconds / kRounds / 4 && iterations < (int64_t{1} << 40); round()) {
    iterations *= 2;
  }
  double best = 0.0;
  for (int index = 0; index < kRounds; ++index) {
    round();
    const double flop = static_cast<double>(kernel.flop_per_round) * iterations * threads;
    best = std::max(best, flop / elapsed / 1e9);
  }
  return best;
}

}  // namespace fastlstm
