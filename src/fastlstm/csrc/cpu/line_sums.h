// Sums of lines of memory, for fingerprint.h.
#pragma once

#include "cpu/simd.h"
#include "lstm.h"

namespace fastlstm::FASTLSTM_ISA {

// A line, or a running sum, in the vectors that this instruction set has.
#if defined(__AVX512F__)
using LinePart = uint64_t __attribute__((vector_size(64)));
#elif defined(__AVX2__)
using LinePart = uint64_t __attribute__((vector_size(32)));
#else
using LinePart = uint64_t __attribute__((vector_size(16)));
#endif
constexpr int kLineParts = kLineBytes / sizeof(LinePart);

struct Line {
  LinePart parts[kLineParts];
};

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

// The product of the two halves of every word; compilers make a full 64-bit product of the plain
// expression, three times the work.
FASTLSTM_INLINE LinePart product_of_halves(LinePart x) {
#if defined(__AVX512F__)
  return bits_of<LinePart>(
      _mm512_maskz_mul_epu32(0xff, bits_of<__m512i>(x), bits_of<__m512i>(x >> 32)));
#elif defined(__AVX2__)
  return bits_of<LinePart>(_mm256_mul_epu32(bits_of<__m256i>(x), bits_of<__m256i>(x >> 32)));
#elif defined(__SSE2__)
  return bits_of<LinePart>(_mm_mul_epu32(bits_of<__m128i>(x), bits_of<__m128i>(x >> 32)));
#else
  return (x & 0xffffffffu) * (x >> 32);
#endif
}

// What the line at a place adds to a sum: the products of XXH3 (Y. Collet), with keys that depend
// on the place, so that lines that change places change the sum.
FASTLSTM_INLINE void add_line(Line& sum, const void* line, int64_t place) {
#pragma GCC unroll 4
  for (int k = 0; k < kLineParts; ++k) {
    const LinePart part = part_at(line, k);
    const LinePart key = part_at(kLineKeys, k) + static_cast<uint64_t>(place) * kOdd;
    sum.parts[k] += part + product_of_halves(part ^ key);
  }
}

FASTLSTM_INLINE uint64_t folded(const Line& sum) {
  uint64_t words[8], result = 0;
  __builtin_memcpy(words, &sum, sizeof words);
  for (uint64_t word : words) result = (result ^ (result >> 29) ^ word) * kOdd;
  return result;
}

inline void sum_lines(const uint8_t* data, int64_t bytes, int64_t num_sets, int64_t first,
                      int64_t count, uint64_t* out) {
  const int64_t whole = bytes / kLineBytes;
  Line sums[kMaxLineSets];
  for (int64_t k = 0; k < count; ++k) sums[k] = Line{};
  if (count == 1) {
    Line sum{};
    for (int64_t place = first; place < whole; place += num_sets) {
      add_line(sum, data + place * kLineBytes, place);
    }
    sums[0] = sum;
  } else {
    for (int64_t base = first; base < whole; base += num_sets) {
      const int64_t end = min_of(base + count, whole);
      for (int64_t place = base; place < end; ++place) {
        add_line(sums[place - base], data + place * kLineBytes, place);
      }
    }
  }
  const int64_t place_of_rest = whole % num_sets - first;
  if (bytes % kLineBytes != 0 && place_of_rest >= 0 && place_of_rest < count) {
    uint8_t rest[kLineBytes] = {};
    __builtin_memcpy(rest, data + whole * kLineBytes, bytes % kLineBytes);
    add_line(sums[place_of_rest], rest, whole);
  }
  for (int64_t k = 0; k < count; ++k) out[k] = folded(sums[k]);
}

}  // namespace fastlstm::FASTLSTM_ISA
