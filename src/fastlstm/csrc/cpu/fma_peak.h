// Measured arithmetic ceilings: multiply-adds on a tile that never leaves the registers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fastlstm {

// Runs `iterations` rounds of independent multiply-adds on registers and returns a value that
// depends on all of them, so that the compiler can drop none.
using PeakLoop = float (*)(int64_t iterations);

struct PeakKernel {
  const char* isa;         // instruction set of the loop, as choose_isa names it
  const char* dtype;       // "f32" or "bf16" (products of bf16 pairs summed in f32)
  int64_t flop_per_round;  // counted as two per multiply-add
  PeakLoop loop;
};

PeakKernel fma_peak_f32__scalar();
PeakKernel fma_peak_f32__neon();
PeakKernel fma_peak_bf16__neon_bf16();
PeakKernel fma_peak_f32__avx2();
PeakKernel fma_peak_f32__avx512();
PeakKernel fma_peak_bf16__avx512_bf16();
PeakKernel fma_peak_bf16__amx_bf16();

// The loops this build contains and `isa` (or wider) may run, narrow to wide. Calling a loop of a
// wider instruction set than choose_isa() allows ends the process; this list never holds one when
// `isa` comes from it.
std::vector<PeakKernel> peak_kernels(const std::string& isa);

// GFLOP/s of `kernel` on `threads` threads at once, best of rounds that take about `seconds` in
// all.
double measure_peak_gflops(const PeakKernel& kernel, int threads, double seconds);

// Runs body(thread) on `threads` threads that start together; returns seconds from start to the
// last one's end.
double run_together(int threads, const std::function<void(int)>& body);

}  // namespace fastlstm
