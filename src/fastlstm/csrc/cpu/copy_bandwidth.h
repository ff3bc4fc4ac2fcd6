// Measured memory ceiling.
#pragma once

#include <cstdint>

namespace fastlstm {

// GB/s (1e9 bytes; read plus written) of memcpy on `threads` threads at once, each from and to its
// own buffer of `bytes_per_thread`, best of `rounds`. Choose buffers well beyond the last-level
// cache to measure memory. Throws std::bad_alloc when the buffers do not fit.
double measure_copy_gb_s(int threads, int64_t bytes_per_thread, int rounds);

}  // namespace fastlstm
