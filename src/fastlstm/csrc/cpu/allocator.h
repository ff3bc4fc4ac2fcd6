// Memory that a training step allocates and frees again and again.
#pragma once

#include <cstdint>

namespace fastlstm {

// Keeps freed memory in the process instead of giving it back to the system: glibc maps each large
// buffer anew, and the system zeroes every page of it on first touch. Returns false where the C
// library has no such switch (anything but glibc).
bool keep_freed_memory();

// Large blocks, kept when they are given back: up to 1 GiB and an eighth of the machine's memory;
// the system may take their pages at any time (MADV_FREE). `bytes` is the same in both calls.
// Callers hold the GIL. take_block returns null where there is no memory.
void* take_block(uintptr_t bytes);
void give_block(void* block, uintptr_t bytes);

// Asks for huge pages under a large buffer that is about to be written for the first time: fewer
// faults, fewer misses in the translation of addresses. Without effect where there are none.
void use_huge_pages(void* memory, uintptr_t bytes);

}  // namespace fastlstm
