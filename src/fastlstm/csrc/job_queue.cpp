#include "job_queue.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace fastlstm {

struct JobQueue::State {
  std::mutex mutex;
  std::condition_variable is_work, is_done;
  std::deque<std::function<void()>> jobs;
  int64_t submitted = 0, done = 0;
  bool is_closed = false;
  const pid_t process = getpid();
  std::thread thread;

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      is_work.wait(lock, [&] { return is_closed || !jobs.empty(); });
      if (is_closed) return;
      const std::function<void()> job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
      lock.lock();
      ++done;
      is_done.notify_all();
    }
  }
};

JobQueue::JobQueue() : state_(new State) {
  state_->thread = std::thread([state = state_] { state->work(); });
}

JobQueue::~JobQueue() {
  if (getpid() != state_->process)
    return;  // a mutex may be locked, a condition have waiters: leave
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_closed = true;
    state_->jobs.clear();
  }
  state_->is_work.notify_one();
  state_->thread.join();
  delete state_;
}

int64_t JobQueue::submit(std::function<void()> job) {
  const std::lock_guard lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  state_->is_work.notify_one();
  return ++state_->submitted;
}

bool JobQueue::wait(int64_t number, double timeout_s) {
  std::unique_lock lock(state_->mutex);
  return state_->is_done.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                  [&] { return state_->done >= number; });
}

}  // namespace fastlstm
