#include "cpu/crowding.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <system_error>

#if defined(__linux__)
#include <dirent.h>
#endif

namespace fastlstm {
namespace {

constexpr int64_t kInterval_ns = 500'000'000;
// Shares of the threads' time. Alone 0.03; beside niced processes, where spinning keeps the core
// and is faster, 0.11; beside one busy process on two cores 0.5 as libgomp spins by default, then
// 0.3.
constexpr double kCrowded = 0.25, kFree = 0.15;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Crowding::look(const OpenMP& runtime, int threads) {
  const int64_t now = now_ns();
  if (now < due_ns_.load(std::memory_order_relaxed)) return;
  std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn) return;
  due_ns_ = now + kInterval_ns;
  const int64_t waited = core_wait_ns(), before = waited_ns_, since = since_ns_;
  waited_ns_ = waited;
  since_ns_ = now;
  if (waited < 0 || before < 0) return;
  // A thread that has ended takes its wait with it.
  const double share = static_cast<double>(std::max<int64_t>(waited - before, 0)) /
                       (static_cast<double>(now - since) * threads);
  decide(runtime, threads, share);
}

void Crowding::note(const OpenMP& runtime, int threads, double share) {
  std::lock_guard turn(turn_);
  due_ns_ = now_ns() + kInterval_ns;
  waited_ns_ = -1;
  decide(runtime, threads, share);
}

void Crowding::decide(const OpenMP& runtime, int threads, double share) {
  if (share > kCrowded && !is_crowded_) {
    start_sleepers(runtime, threads);
  } else if (share < kFree && is_crowded_) {
    end_sleepers();
  }
}

void Crowding::start_sleepers(const OpenMP& runtime, int threads) {
  if (runtime.num_cores == 0) return;
  // With the calling team that is one thread more than the runtime has cores for.
  const int count = std::max(2, runtime.num_cores - threads + 2);
  is_asleep_ = is_over_ = false;
  try {
    leader_ = std::thread([this, &runtime, count] {
      runtime.parallel([](void*) {}, nullptr, static_cast<unsigned>(count), 0);
      std::unique_lock lock(mutex_);
      is_asleep_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return is_over_; });
    });
  } catch (const std::system_error&) {
    return;  // no thread to be had: as before, and tried again
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_asleep_; });
  is_crowded_ = true;
}

void Crowding::end_sleepers() {
  {
    std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  leader_.join();  // its end takes its team with it
  is_crowded_ = false;
}

int64_t core_wait_ns() {
#if defined(__linux__)
  DIR* const tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return -1;
  int64_t sum = 0;
  bool is_known = false;
  while (const dirent* const entry = readdir(tasks)) {
    if (entry->d_name[0] == '.') continue;
    const std::string path = std::string("/proc/self/task/") + entry->d_name + "/schedstat";
    FILE* const file = std::fopen(path.c_str(), "re");
    if (file == nullptr) continue;
    unsigned long long ran = 0, waited = 0;
    if (std::fscanf(file, "%llu %llu", &ran, &waited) == 2) {
      sum += static_cast<int64_t>(waited);
      is_known = true;
    }
    std::fclose(file);
  }
  closedir(tasks);
  return is_known ? sum : -1;
#else
  return -1;
#endif
}

}  // namespace fastlstm
