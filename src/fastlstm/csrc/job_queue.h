// Jobs that one thread of its own does in order, while whoever asked goes on.
#pragma once

#include <cstdint>
#include <functional>

namespace fastlstm {

class JobQueue {
 public:
  JobQueue();
  // Ends the thread after the job it is at; the others are dropped. In a child that fork() made
  // there is no thread to end, and what it left behind stays.
  ~JobQueue();
  JobQueue(const JobQueue&) = delete;
  JobQueue& operator=(const JobQueue&) = delete;

  // Returns the job's number; numbers count from 1. What the job reads and writes must stay until
  // wait() has said that it is done, or the queue is gone.
  int64_t submit(std::function<void()> job);
  // Returns whether the job was done within so many seconds.
  bool wait(int64_t number, double timeout_s);

 private:
  struct State;
  State* state_;
};

}  // namespace fastlstm
