// The table of kernels of one instruction set and memory format.
#pragma once

#include "cpu/byte_sums.h"
#include "cpu/norm_backward.h"
#include "cpu/projection.h"

namespace fastlstm::FASTLSTM_ISA {

template <typename Format, typename Engine>
const Kernels& kernel_table(const char* isa) {
  static const Kernels table{isa,
                             Format::kPair == 2,
                             kLanes,
                             splits_lanes<Format>,
                             reads_unpacked<Format, Engine>,
                             forward_bytes<Format>,
                             backward_bytes<Format>,
                             pack_forward<Format>,
                             pack_backward<Format>,
                             forward_workspace<Format>,
                             backward_workspace<Format>,
                             forward<Format, Engine>,
                             backward<Format, Engine>,
                             projection_workspace<Format>,
                             project<Format, Engine>,
                             sum_bytes};
  return table;
}

}  // namespace fastlstm::FASTLSTM_ISA
