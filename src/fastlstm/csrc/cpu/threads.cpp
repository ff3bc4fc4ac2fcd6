#include "cpu/threads.h"

#include "cpu/crowding.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#include <pthread.h>
#endif

#include <chrono>
#include <climits>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <link.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fastlstm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpinTime = std::chrono::microseconds(100);  // longer than running colleagues differ
constexpr int kSpins = 64;                                  // between two looks at the clock

// From 10 to 140 cycles: a number of calls is no time.
void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
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

std::atomic<const OpenMP*> openmp{nullptr};
// Never destroyed, as below.
std::atomic<Crowding*> crowding{new Crowding};

struct Call {
  void (*body)(void*, Member);
  void* context;
  Barrier barrier;
  const OpenMP* openmp;
};

// Threads that sleep between calls. One call at a time; a second caller waits its turn.
class Pool {
 public:
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
      wake_.wait(lock, [&] { return generation_ != seen; });
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
};

// Never destroyed: its threads may still be asleep when the process ends.
std::atomic<Pool*> pool{new Pool};
std::atomic<bool> is_forked{false};

// A child of fork() has one thread. The workers of the pool and of libgomp are not in it, whatever
// they were doing when it was made, and locks may be held by threads that it does not have. So it
// begins with a new pool, and stays with it: libgomp would wait for its workers for ever.
[[maybe_unused]] void start_anew() {
  pool = new Pool;
  crowding = new Crowding;
  openmp = nullptr;
  is_forked = true;
}
#if !defined(_WIN32)
[[maybe_unused]] const int handler = pthread_atfork(nullptr, nullptr, start_anew);
#endif

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
  Clock::time_point start{};
  do {
    for (int n = 0; n < kSpins; ++n) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      relax();
    }
    if (start == Clock::time_point{}) start = Clock::now();
  } while (Clock::now() - start < kSpinTime);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (phase_.load(std::memory_order_seq_cst) == phase) sleep_while(phase_, phase);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void run_team(int threads, void (*body)(void*, Member), void* context) {
  const OpenMP* const runtime = openmp;
  Call call{body, context, {}, runtime};
  if (threads <= 1) {
    body(context, {0, 1, &call.barrier});
  } else if (runtime != nullptr) {
    crowding.load()->look(*runtime, threads);
    runtime->parallel(
        [](void* data) {
          auto& shared = *static_cast<Call*>(data);
          const Member me{shared.openmp->thread_num(), shared.openmp->num_threads(),
                          &shared.barrier};
          shared.body(shared.context, me);
        },
        &call, static_cast<unsigned>(threads), 0);
  } else {
    pool.load()->run(threads, call);
  }
}

bool use_openmp([[maybe_unused]] const char* library) {
#if defined(_WIN32)
  return false;  // torch's OpenMP there is not libgomp
#else
  if (is_forked) return false;
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  OpenMP found;
  found.parallel = reinterpret_cast<decltype(found.parallel)>(dlsym(handle, "GOMP_parallel"));
  found.thread_num = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_thread_num"));
  found.num_threads = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_num_threads"));
  const auto num_cores = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_num_procs"));
  found.num_cores = num_cores == nullptr ? 0 : num_cores();
  if (!found.parallel || !found.thread_num || !found.num_threads) return false;
  openmp = new OpenMP(found);  // never deleted: a team may still run on the one before
  return true;
#endif
}

uint64_t libraries_loaded() {
  unsigned long long count = 0;
#if defined(__linux__)
  const auto read = [](dl_phdr_info* info, size_t, void* out) {
    *static_cast<unsigned long long*>(out) = info->dlpi_adds;
    return 1;
  };
  dl_iterate_phdr(read, &count);
#endif
  return count;
}

bool has_openmp() { return openmp.load() != nullptr; }

bool is_crowded() { return crowding.load()->is_crowded(); }

void note_core_wait(double share, int threads) {
  if (const OpenMP* const runtime = openmp) crowding.load()->note(*runtime, threads, share);
}

}  // namespace fastlstm
