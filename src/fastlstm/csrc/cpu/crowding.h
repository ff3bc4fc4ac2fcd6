// Beside other busy processes: keeps the threads of libgomp from spinning on cores they need.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace fastlstm {

// The entry points of an OpenMP runtime that is already in the process.
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread_num)();
  int (*num_threads)();
  int num_cores;  // that it found, 0 where it does not say
};

// At the end of every parallel region, torch's and ours, libgomp spins 300,000 times, some 20 ms,
// before it sleeps: as long as a colleague without a core is kept from the one the spinner holds. A
// training step of 56 ms took 540 beside one busy process on two cores. With more threads than
// cores it spins 100 times, which costs 5 % on free cores, but beside others the step takes 120 ms.
//
// So the wait of this process' threads for cores is measured, and while there is one, a team of
// sleeping threads makes libgomp count more threads than cores. Results do not depend on it.
class Crowding {
 public:
  // Called before a team runs: twice a second it measures since the last time and decides.
  void look(const OpenMP& runtime, int threads);
  // Decides by the share of their time that `threads` threads waited for a core.
  void note(const OpenMP& runtime, int threads, double share);
  bool is_crowded() const { return is_crowded_; }

 private:
  void decide(const OpenMP& runtime, int threads, double share);
  void start_sleepers(const OpenMP& runtime, int threads);
  void end_sleepers();

  std::atomic<int64_t> due_ns_{0};
  std::atomic<bool> is_crowded_{false};
  std::mutex turn_;
  int64_t since_ns_ = 0, waited_ns_ = -1;  // the last measurement; -1 where there is none

  std::thread leader_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_asleep_ = false, is_over_ = false;
};

// Nanoseconds that the threads of this process have been ready to run without a core, all together;
// -1 where the system does not say.
int64_t core_wait_ns();

}  // namespace fastlstm
