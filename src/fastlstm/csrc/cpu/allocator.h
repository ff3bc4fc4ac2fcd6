// What the C library does with memory that is freed.
#pragma once

#include <cstdint>

namespace fastlstm {

// Keeps freed memory in the process instead of giving it back to the system.
//
// A training step allocates and frees the same large buffers again and again; glibc maps each one
// anew, and the system zeroes every page of it on first touch. Returns false where the C library
// has no such switch (anything but glibc).
bool keep_freed_memory();

// Asks for huge pages under a large buffer that is about to be written for the first time: fewer
// faults, fewer misses in the translation of addresses. Without effect where there are none.
void use_huge_pages(void* memory, uintptr_t bytes);

}  // namespace fastlstm
