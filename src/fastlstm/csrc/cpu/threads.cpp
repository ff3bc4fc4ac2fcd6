#include "cpu/threads.h"

#include <dlfcn.h>

#include <climits>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastlstm {
namespace {

constexpr int kSpins = 2000;  // some 100 us: longer than colleagues that are running differ

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// std::atomic::wait yields a few times before it sleeps; beside a busy process every yield costs a
// whole time slice.
#if defined(__linux__)
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) { word.wait(value); }
void wake_all(std::atomic<uint32_t>& word) { word.notify_all(); }
#endif

// The entry points of an OpenMP runtime that is already in the process.
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
};
OpenMP openmp;

struct Call {
  void (*body)(void*, Member);
  void* context;
  Barrier barrier;
};

// Threads that sleep between calls. One call at a time; a second caller waits its turn.
class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  void run(int threads, Call& call) {
    std::lock_guard turn(turn_);
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1) {
        const int index = static_cast<int>(workers_.size()) + 1;
        workers_.emplace_back([this, index, seen = generation_] { serve(index, seen); });
      }
      call_ = &call;
      count_ = threads;
      pending_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    call.body(call.context, {0, threads, &call.barrier});
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return pending_ == 0; });
  }

 private:
  void serve(int index, uint64_t seen) {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return is_over_ || generation_ != seen; });
      if (is_over_) return;
      seen = generation_;
      if (index >= count_) continue;
      Call& call = *call_;
      const Member member{index, count_, &call.barrier};
      lock.unlock();
      call.body(call.context, member);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
  Call* call_ = nullptr;
  int count_ = 0;
  int pending_ = 0;
  uint64_t generation_ = 0;
  bool is_over_ = false;
};

Pool& pool() {
  // Never destroyed: its threads may still be asleep when the process ends.
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

void Barrier::wait(int count) {
  if (count == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(phase_);
    return;
  }
  for (int n = 0; n < kSpins; ++n) {
    if (phase_.load(std::memory_order_acquire) != phase) return;
    relax();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (phase_.load(std::memory_order_seq_cst) == phase) sleep_while(phase_, phase);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void run_team(int threads, void (*body)(void*, Member), void* context) {
  Call call{body, context, {}};
  if (threads <= 1) {
    body(context, {0, 1, &call.barrier});
  } else if (openmp.parallel != nullptr) {
    openmp.parallel(
        [](void* data) {
          auto& shared = *static_cast<Call*>(data);
          shared.body(shared.context, {openmp.thread_num(), openmp.num_threads(), &shared.barrier});
        },
        &call, static_cast<unsigned>(threads), 0);
  } else {
    pool().run(threads, call);
  }
}

bool use_openmp(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  OpenMP found;
  found.parallel = reinterpret_cast<decltype(found.parallel)>(dlsym(handle, "GOMP_parallel"));
  found.thread_num = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_thread_num"));
  found.num_threads = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_num_threads"));
  if (!found.parallel || !found.thread_num || !found.num_threads) return false;
  openmp = found;
  return true;
}

}  // namespace fastlstm
