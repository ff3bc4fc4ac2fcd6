#include "text_keys.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace fastlstm {
namespace {

constexpr int64_t kBlock = 64;  // texts whose slots are fetched side by side

// SipHash-1-3 (Aumasson and Bernstein 2012), the upper half of the result.
uint32_t hash_of(uint64_t k0, uint64_t k1, const char* text, size_t bytes) {
  uint64_t a = k0 ^ 0x736f6d6570736575, b = k1 ^ 0x646f72616e646f6d;
  uint64_t c = k0 ^ 0x6c7967656e657261, d = k1 ^ 0x7465646279746573;
  const auto round = [&] {
    a += b, b = std::rotl(b, 13) ^ a, a = std::rotl(a, 32);
    c += d, d = std::rotl(d, 16) ^ c;
    a += d, d = std::rotl(d, 21) ^ a;
    c += b, b = std::rotl(b, 17) ^ c, c = std::rotl(c, 32);
  };
  size_t at = 0;
  uint64_t word;
  for (; at + 8 <= bytes; at += 8) {
    std::memcpy(&word, text + at, 8);
    d ^= word;
    round();
    a ^= word;
  }
  word = static_cast<uint64_t>(bytes) << 56;
  for (int shift = 0; at < bytes; ++at, shift += 8)
    word |= static_cast<uint64_t>(static_cast<unsigned char>(text[at])) << shift;
  d ^= word;
  round();
  a ^= word;
  c ^= 0xff;
  for (int i = 0; i < 3; ++i) round();
  return static_cast<uint32_t>((a ^ b ^ c ^ d) >> 32);
}

}  // namespace

bool TextKeys::is_text(uint32_t key, const char* text, size_t bytes) const {
  const uint64_t begin = key == 0 ? 0 : ends_[key - 1];
  return ends_[key] - begin == bytes &&
         (bytes == 0 || std::memcmp(texts_.data() + begin, text, bytes) == 0);
}

void TextKeys::grow() {
  std::vector<Slot> slots(2 * slots_.size());
  for (const Slot& slot : slots_) {
    if (slot.number == 0) continue;
    size_t place = slot.hash;
    while (slots[place &= slots.size() - 1].number != 0) ++place;
    slots[place] = slot;
  }
  slots_.swap(slots);
}

std::vector<int64_t> TextKeys::find(const int64_t* offsets, const char* data, int64_t count,
                                    int64_t* keys) {
  std::vector<int64_t> added;
  std::array<uint32_t, kBlock> hashes;
  const auto bytes_of = [&](int64_t i) { return static_cast<size_t>(offsets[i + 1] - offsets[i]); };
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t end = std::min(first + kBlock, count);
    while (slots_.size() < 2 * (ends_.size() + kBlock)) grow();
    for (int64_t i = first; i < end; ++i) {
      const char* text = data + offsets[i];
      const size_t bytes = bytes_of(i);
      if (i > first && bytes == bytes_of(i - 1) && std::memcmp(text, text - bytes, bytes) == 0) {
        hashes[i - first] = hashes[i - 1 - first];  // rows of one series
        continue;
      }
      hashes[i - first] = hash_of(k0_, k1_, text, bytes);
      __builtin_prefetch(&slots_[hashes[i - first] & (slots_.size() - 1)]);
    }
    for (int64_t i = first; i < end; ++i) {
      const char* text = data + offsets[i];
      const uint32_t hash = hashes[i - first];
      size_t place = hash & (slots_.size() - 1);
      for (; slots_[place].number != 0; place = (place + 1) & (slots_.size() - 1))
        if (slots_[place].hash == hash && is_text(slots_[place].number - 1, text, bytes_of(i)))
          break;
      Slot& slot = slots_[place];
      if (slot.number == 0) {
        if (ends_.size() >= INT32_MAX) throw std::length_error("more than 2^31 names in a column");
        texts_.append(text, bytes_of(i));
        ends_.push_back(texts_.size());
        slot = {hash, static_cast<uint32_t>(ends_.size())};
        added.push_back(i);
      }
      keys[i] = slot.number - 1;
    }
  }
  return added;
}

}  // namespace fastlstm
