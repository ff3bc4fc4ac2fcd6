// Numbers distinct texts in order of first appearance, over any number of calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastlstm {

class TextKeys {
 public:
  // Two secret words of a keyed hash, so that no table can be made of texts that collide.
  TextKeys(uint64_t k0, uint64_t k1) : k0_(k0), k1_(k1), slots_(64) {}

  // Text i is data[offsets[i]] to data[offsets[i + 1] - 1]; a text not seen before gets the next
  // key. Returns where these are. Throws std::length_error beyond 2^31 texts.
  std::vector<int64_t> find(const int64_t* offsets, const char* data, int64_t count, int64_t* keys);

 private:
  struct Slot {
    uint32_t hash = 0;
    uint32_t number = 0;  // key + 1; 0: empty
  };

  bool is_text(uint32_t key, const char* text, size_t bytes) const;
  void grow();

  uint64_t k0_, k1_;
  std::vector<Slot> slots_;  // open addressing, a power of two, at most half full
  std::vector<uint64_t> ends_;
  std::string texts_;
};

}  // namespace fastlstm
