// Teams of threads: run a kernel on all of them, let them meet.
#pragma once

#include <atomic>
#include <cstdint>

#include "lstm.h"

namespace fastlstm {

// Meeting point of a team. Waiting spins for a moment, then sleeps: on a machine with other work a
// member whose colleague is not running must give its core away, and get it back at once.
class Barrier {
 public:
  void wait(int count);

 private:
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> sleepers_{0};
};

// Calls body(context, member) on `threads` threads at once, the calling one among them, and
// returns when all are done. The team may be smaller than asked for; Member::count says.
void run_team(int threads, void (*body)(void* context, Member member), void* context);

template <typename Body>
void run_team(int threads, Body&& body) {
  run_team(
      threads, [](void* context, Member member) { (*static_cast<Body*>(context))(member); }, &body);
}

// From now on teams run on the OpenMP runtime loaded from `library`, which must be loaded already.
//
// A second pool of threads beside torch's would fight it for the cores: an OpenMP worker keeps
// spinning after its work is done. Returns false when the library is not there or has no
// GOMP_parallel; then teams run on threads of our own. So they do in a child of fork(): the
// threads of the runtime are not in it.
bool use_openmp(const char* library);
bool has_openmp();

// Whether the threads of this process lately waited for cores that others use; see cpu/crowding.h.
bool is_crowded();
// Says so, or the opposite, as a measurement would: for tests.
void note_core_wait(double share, int threads);

// How many libraries this process has loaded so far, those at its start included; 0 where the
// system does not say. While it stays, a library that was not found is still not there.
uint64_t libraries_loaded();

}  // namespace fastlstm
