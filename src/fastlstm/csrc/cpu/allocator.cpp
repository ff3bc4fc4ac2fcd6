#include "cpu/allocator.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace fastlstm {
namespace {

constexpr uintptr_t kHugePage = 2 << 20;

struct Block {
  void* memory;
  uintptr_t bytes;
};

// Given back to us and not to the system, the oldest first. Never destroyed: tensors may outlive
// it.
std::vector<Block>& kept_blocks() {
  static auto* const blocks = new std::vector<Block>;
  return *blocks;
}

void free_oldest() {
  std::free(kept_blocks().front().memory);
  kept_blocks().erase(kept_blocks().begin());
}

// Whole pages, with an eighth to spare: blocks of nearly the same size take each other's place.
uintptr_t block_bytes(uintptr_t bytes) {
  uintptr_t grain = kHugePage;
  while (grain * 16 <= bytes) grain *= 2;
  return (bytes + grain - 1) / grain * grain;
}

uintptr_t most_kept() {
  constexpr uintptr_t kMost = uintptr_t{1} << 30;
#if defined(__linux__)
  static const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return 0;
  return std::min(kMost, static_cast<uintptr_t>(pages) * static_cast<uintptr_t>(page) / 8);
#else
  return kMost;
#endif
}

}  // namespace

bool keep_freed_memory() {
#if defined(__GLIBC__)
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

void use_huge_pages(void* memory, uintptr_t bytes) {
#if defined(__linux__)
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

void* take_block(uintptr_t bytes) {
  bytes = block_bytes(bytes);
  auto& kept = kept_blocks();
  for (auto block = kept.rbegin(); block != kept.rend(); ++block) {
    if (block->bytes != bytes) continue;
    void* const memory = block->memory;
    kept.erase(std::next(block).base());
    return memory;
  }
#if defined(_WIN32)
  return nullptr;
#else
  void* memory = std::aligned_alloc(kHugePage, bytes);
  while (memory == nullptr && !kept.empty()) {
    free_oldest();
    memory = std::aligned_alloc(kHugePage, bytes);
  }
  if (memory != nullptr) use_huge_pages(memory, bytes);
  return memory;
#endif
}

void give_block(void* memory, uintptr_t bytes) {
  bytes = block_bytes(bytes);
  auto& kept = kept_blocks();
  if (bytes > most_kept()) return std::free(memory);
#if defined(__linux__)
  madvise(memory, bytes, MADV_FREE);
#endif
  kept.push_back({memory, bytes});
  uintptr_t total = 0;
  for (const Block& block : kept) total += block.bytes;
  for (; total > most_kept(); free_oldest()) total -= kept.front().bytes;
}

}  // namespace fastlstm
