// The table of decoding kernels of one instruction set and weight format.
#pragma once

#include "cpu/decode_step.h"
#include "cpu/items.h"

namespace fastlstm::FASTLSTM_ISA {

template <typename Format>
int64_t decode_workspace(const DecodeArgs& g) {
  DecodeArgs counted = g;
  counted.workspace = nullptr;
  return DecodeScratch<Format>(counted).bytes;
}

template <typename Format, typename Engine>
void decode(const DecodeArgs& g, Member me) {
  FlushDenormals flush;
  DecodeLoop<Format, Engine>(g, me).run();
}

// The rule of layers; about half of the weights that a step reads are recurrent.
inline bool splits_rows(int64_t rows, int64_t bytes, int64_t threads) {
  return threads > 1 && splits_lanes(rows, bytes / 2, threads, false);
}

// Reads whole vectors and does next to nothing with them: what the caches can deliver.
inline uint32_t read_all(const void* from, int64_t bytes) {
  constexpr int64_t kAtOnce = 8;
  Words sums[kAtOnce] = {};
  const auto* const words = static_cast<const char*>(from);
  constexpr int64_t kBytes = sizeof(Words);
  for (int64_t k = 0; k + kAtOnce * kBytes <= bytes; k += kAtOnce * kBytes) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kAtOnce; ++j) {
      Words w;
      __builtin_memcpy(&w, words + k + j * kBytes, sizeof w);
      sums[j] ^= w;
    }
  }
  for (int64_t j = 1; j < kAtOnce; ++j) sums[0] ^= sums[j];
  uint32_t all = 0;
  for (int l = 0; l < kLanes; ++l) all ^= sums[0][l];
  return all;
}

template <typename Format, typename Engine>
const DecodeKernels& decode_table(const char* isa, WeightFormat format) {
  static const DecodeKernels table{isa,
                                   format,
                                   kLanes,
                                   decode_matrix_bytes<Format>,
                                   decode_padded_columns<Format>,
                                   pack_decode<Format>,
                                   decode_workspace<Format>,
                                   decode<Format, Engine>,
                                   splits_rows,
                                   read_all};
  return table;
}

}  // namespace fastlstm::FASTLSTM_ISA
