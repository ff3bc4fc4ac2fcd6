// Sums of the words of a block of memory, for fingerprint.h.
#pragma once

#include "cpu/simd.h"
#include "lstm.h"

namespace fastlstm::FASTLSTM_ISA {

// A line of 64 bytes in the vectors that this instruction set has: LinePart.
constexpr int64_t kLineBytes = 64;
constexpr int kLineParts = kLineBytes / sizeof(LinePart);

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
constexpr uint64_t kLineKeys[8] = {0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de,
                                   0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
                                   0x8e2443f7744608b8, 0x4c263a81e69035e0};

// By the vector: GCC would copy a whole line in smaller pieces, and wait for them to be stored.
FASTLSTM_INLINE LinePart part_at(const void* line, int k) {
  LinePart part;
  __builtin_memcpy(&part, static_cast<const char*>(line) + k * sizeof part, sizeof part);
  return part;
}

// Eight plain sums of words: a write to one value changes one of them, always. Eight sums of the
// products of XXH3 (Y. Collet), with keys that depend on the place of the line, so that values that
// change places, or changes that add up to nothing, change these.
inline void sum_bytes(const uint8_t* data, int64_t bytes, uint64_t* out) {
  LinePart words[kLineParts] = {}, products[kLineParts] = {}, keys[kLineParts];
  for (int k = 0; k < kLineParts; ++k) keys[k] = part_at(kLineKeys, k);
  const auto add = [&](const void* line) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int k = 0; k < kLineParts; ++k) {
      const LinePart part = part_at(line, k);
      words[k] += part;
      products[k] += product_of_halves(part ^ keys[k]);
      keys[k] += kOdd;
    }
  };
  const uint8_t* const end = data + bytes / kLineBytes * kLineBytes;
  for (; data < end; data += kLineBytes) add(data);
  if (bytes % kLineBytes != 0) {
    uint8_t rest[kLineBytes] = {};
    __builtin_memcpy(rest, data, bytes % kLineBytes);
    add(rest);
  }
  __builtin_memcpy(out, words, sizeof words);
  __builtin_memcpy(out + 8, products, sizeof products);
}

}  // namespace fastlstm::FASTLSTM_ISA
