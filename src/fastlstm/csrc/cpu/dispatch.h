// Finds the LSTM kernels for an instruction set.
#pragma once

#include <string>

#include "lstm.h"

namespace fastlstm {

// The kernels that `isa` (a name of choose_isa) runs for bf16 or float operands, or null where this
// build has none. A set without kernels of its own uses those of the next narrower one.
const Kernels* find_kernels(const std::string& isa, bool is_bf16);

}  // namespace fastlstm
