// Memory as the bindings handle it: addresses from Python, scratch from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "cpu/allocator.h"

namespace fastlstm {

using Address = uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Memory of one thread's calls, kept from one to the next: fresh pages would cost more than a short
// sequence. What is larger than kKept for each of its calls goes with them.
class Scratch {
 public:
  void* take(int64_t bytes) {
    const auto needed = static_cast<size_t>((bytes + 127) / 64 * 64);
    if (needed > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(std::aligned_alloc(64, needed));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = needed;
      use_huge_pages(memory_.get(), size_);
    }
    return memory_.get();
  }
  void give_back(size_t calls = 1) {
    if (size_ > calls * kKept) {
      memory_.reset();
      size_ = 0;
    }
  }
  void fill(int byte) { std::memset(memory_.get(), byte, size_); }

 private:
  static constexpr size_t kKept = 128 << 20;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

}  // namespace fastlstm
