// The kernels alone, without Python: packs, runs forward and backward on every instruction set of
// this machine with 1 to 4 threads. Built by sanitize.sh with a sanitizer, which checks memory and
// races; here the results of all teams must be equal bit for bit, and nothing may stay unwritten.
//
// A sanitizer does not see what AMX tiles load and store: tests/ops/backends/test_native_memory.py
// puts guard pages around the arguments for that.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/features.h"
#include "cpu/threads.h"
#include "projection.h"

namespace fastlstm {
namespace {

struct Shape {
  int64_t T, B, I, H;
};

constexpr Shape kShapes[] = {{1, 1, 1, 1},    {5, 3, 7, 9},    {3, 33, 32, 17}, {9, 16, 33, 31},
                             {2, 49, 5, 65},  {70, 5, 3, 16},  {2, 2, 6203, 5}, {2, 7, 3, 401},
                             {2, 33, 8, 300}, {41, 26, 5, 24}, {3, 40, 2, 300}, {3, 25, 40, 264},
                             {1, 24, 64, 32}, {3, 6, 16, 48}};
enum Option : unsigned {
  kTokens = 1,
  kLengths = 2,
  kMask = 4,
  kInitial = 8,
  kLast = 16,
  kNorm = 32,
  kZoneout = 64,
  kReversed = 128  // with rows of y that lie apart
};

// Exactly `size` bytes on the heap, aligned to 64, filled with a NaN of float and of bf16.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) : size_(size) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, static_cast<size_t>(size)) != 0) std::abort();
    std::memset(p, 0xff, static_cast<size_t>(size));
    memory_.reset(p);
  }
  template <typename T = void>
  T* get() const {
    return static_cast<T*>(memory_.get());
  }
  int64_t size() const { return size_; }
  bool is_written(bool is_bf16) const {
    if (is_bf16) {
      for (int64_t k = 0; k < size_ / 2; ++k) {
        if (get<uint16_t>()[k] == 0xffff) return false;
      }
      return true;
    }
    for (int64_t k = 0; k < size_ / 4; ++k) {
      if (std::isnan(get<float>()[k])) return false;
    }
    return true;
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int64_t whole(int64_t from, int64_t to) {
    return std::uniform_int_distribution<int64_t>(from, to)(engine_);
  }
  Buffer floats(int64_t count) {
    Buffer out(count * 4);
    for (int64_t k = 0; k < count; ++k) out.get<float>()[k] = value();
    return out;
  }
  // Rows of `columns` values, zero from there to `stride`.
  Buffer elements(int64_t rows, int64_t columns, int64_t stride, bool is_bf16) {
    Buffer out(rows * stride * (is_bf16 ? 2 : 4));
    for (int64_t k = 0; k < rows * stride; ++k) {
      const float x = k % stride < columns ? value() : 0.0f;
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      if (is_bf16) {
        out.get<uint16_t>()[k] = static_cast<uint16_t>(bits >> 16);
      } else {
        out.get<float>()[k] = x;
      }
    }
    return out;
  }

 private:
  float value() { return std::uniform_real_distribution<float>(-0.5f, 0.5f)(engine_); }
  std::mt19937 engine_;
};

struct Named {
  const char* name;
  bool is_bf16;
  Buffer value;
};

// Everything that one team computes.
std::vector<Named> run(const Kernels& kernel, Shape n, unsigned options, int threads) {
  const auto [T, B, I, H] = n;
  const bool is_bf16 = kernel.is_bf16;
  const int64_t size = is_bf16 ? 2 : 4;
  const int64_t padded = (H + kernel.lanes - 1) / kernel.lanes * kernel.lanes;
  const bool has_tokens = options & kTokens, is_reversed = options & kReversed;
  const int64_t y_stride = is_reversed ? H + 3 : H;
  const int64_t y_bytes = ((T * B - 1) * y_stride + H) * size;
  Random random(static_cast<unsigned>(H));
  std::vector<Named> found;
  const auto output = [&](const char* name, bool bf16, int64_t bytes) {
    found.push_back({name, bf16, Buffer(bytes)});
    return found.back().value.get();
  };
  // The columns of y; nothing may be written between its rows.
  const auto output_rows = [&](const char* name, const Buffer& y) {
    auto* const out = static_cast<char*>(output(name, is_bf16, T * B * H * size));
    for (int64_t row = 0; row < T * B; ++row) {
      const char* const from = y.get<char>() + row * y_stride * size;
      std::memcpy(out + row * H * size, from, static_cast<size_t>(H * size));
      for (int64_t k = H * size; k < y_stride * size && row + 1 < T * B; ++k) {
        if (from[k] == '\xff') continue;
        std::printf("%s %s is written beside row %d\n", kernel.isa, name, static_cast<int>(row));
        std::abort();
      }
    }
  };
  const auto optional = [&](unsigned option, int64_t count) {
    Buffer values = random.floats(count);
    return options & option ? std::move(values) : Buffer();
  };

  const Buffer w_ih = random.floats(4 * H * I), w_hh = random.floats(4 * H * H);
  const Buffer b_ih = optional(kInitial, 4 * H), b_hh = optional(kInitial, 4 * H);
  PackArgs pack{I,
                H,
                w_ih.get<float>(),
                w_hh.get<float>(),
                b_ih.get<float>(),
                b_hh.get<float>(),
                output("packed forward", is_bf16, kernel.forward_bytes(I, H))};
  run_team(threads, [&](Member me) { kernel.pack_forward(pack, me); });
  const void* const forward_weights = pack.out;
  pack.out = output("packed backward", is_bf16, kernel.backward_bytes(I, H));
  run_team(threads, [&](Member me) { kernel.pack_backward(pack, me); });

  const int64_t num_rows = has_tokens ? 7 : T * B;
  const int64_t stride = is_bf16 ? (I + 31) / 32 * 32 : I;
  const Buffer rows = random.elements(num_rows, I, stride, is_bf16);
  const Buffer dy = random.elements(T * B, H, y_stride, is_bf16);
  Buffer tokens, begins, ends;
  if (has_tokens) tokens = Buffer(T * B * 8);
  for (int64_t k = 0; k < tokens.size() / 8; ++k) {
    tokens.get<int64_t>()[k] = random.whole(0, num_rows - 1);
  }
  if (options & kLengths) begins = Buffer(B * 8), ends = Buffer(B * 8);
  for (int64_t b = 0; b < begins.size() / 8; ++b) {
    begins.get<int64_t>()[b] = random.whole(0, T);
    ends.get<int64_t>()[b] = random.whole(begins.get<int64_t>()[b], T);
  }
  const Buffer mask = optional(kMask, B * H), h0 = optional(kInitial, B * H);
  const Buffer c0 = optional(kInitial, B * H);
  const Buffer dh_last = optional(kLast, B * H), dc_last = optional(kLast, B * H);
  const Input input{rows.get(), num_rows, stride, tokens.get<int64_t>()};

  const Buffer gates(gate_rows(T, B) * 4 * padded * size);
  const Buffer gamma_ih = optional(kNorm, 4 * H), gamma_hh = optional(kNorm, 4 * H);
  const Buffer gamma_c = optional(kNorm, H), beta_c = optional(kNorm, H);
  const Buffer normed(options & kNorm ? 2 * gates.size() : 0);
  const Buffer moments(options & kNorm ? 4 * T * B * 4 : 0);
  const int64_t seed = random.whole(0, 1 << 20);
  const bool is_plain = (options & (kNorm | kZoneout)) == 0;
  const double zoneout = options & kZoneout ? 0.25 : 0.0;
  const bool is_soft = (options & kInitial) != 0;
  CellCall cell_call{is_soft ? Activation::softsign : Activation::tanh,
                     is_soft ? Activation::hard_sigmoid : Activation::sigmoid,
                     zoneout,
                     zoneout,
                     random.whole(0, 1000),
                     options & kMask ? &seed : nullptr,
                     gamma_ih.get<float>(),
                     gamma_hh.get<float>(),
                     gamma_c.get<float>(),
                     beta_c.get<float>(),
                     normed.get(),
                     moments.get<float>()};
  Buffer y;
  for (const bool keep : {false, true}) {
    y = Buffer(y_bytes);
    Buffer cells(keep ? (T + 1) * B * padded * 4 : 0);
    cell_call.normed = keep ? normed.get() : nullptr;
    cell_call.moments = keep ? moments.get<float>() : nullptr;
    ForwardArgs args{T,
                     B,
                     I,
                     H,
                     threads,
                     is_reversed,
                     input,
                     forward_weights,
                     h0.get<float>(),
                     c0.get<float>(),
                     mask.get<float>(),
                     begins.get<int64_t>(),
                     ends.get<int64_t>(),
                     y.get(),
                     y_stride,
                     static_cast<float*>(output("h_last", false, B * H * 4)),
                     static_cast<float*>(output("c_last", false, B * H * 4)),
                     keep ? gates.get() : nullptr,
                     keep ? cells.get<float>() : nullptr,
                     is_plain ? nullptr : &cell_call,
                     nullptr};
    const Buffer workspace(kernel.forward_workspace(args));
    args.workspace = workspace.get();
    run_team(threads, [&](Member me) { kernel.forward(args, me); });
    output_rows(keep ? "y kept" : "y", y);
    if (keep) found.push_back({"cells", false, std::move(cells)});
  }
  const auto* const cells = found.back().value.get<float>();

  const bool is_table = has_tokens || !is_bf16;
  // As torch has them in every second shape that allows it.
  const bool is_unpacked =
      (options & kNorm) == 0 && T % 2 == 1 && kernel.reads_unpacked(T, B, I, H);
  BackwardArgs args{T,
                    B,
                    I,
                    H,
                    threads,
                    is_reversed,
                    input,
                    is_unpacked ? nullptr : pack.out,
                    pack.w_ih,
                    pack.w_hh,
                    h0.get<float>(),
                    mask.get<float>(),
                    begins.get<int64_t>(),
                    ends.get<int64_t>(),
                    y.get(),
                    y_stride,
                    cells,
                    gates.get(),
                    options & kLast ? nullptr : dy.get(),
                    dh_last.get<float>(),
                    dc_last.get<float>(),
                    output("dx", !is_table, num_rows * I * (is_table ? 4 : 2)),
                    static_cast<float*>(output("dh0", false, B * H * 4)),
                    static_cast<float*>(output("dc0", false, B * H * 4)),
                    static_cast<float*>(output("dw_ih", false, 4 * H * I * 4)),
                    static_cast<float*>(output("dw_hh", false, 4 * H * H * 4)),
                    static_cast<float*>(output("db", false, 4 * H * 4)),
                    is_plain ? nullptr : &cell_call,
                    nullptr,
                    nullptr,
                    nullptr,
                    nullptr,
                    nullptr};
  if (options & kNorm) {
    args.dgamma_ih = static_cast<float*>(output("dgamma_ih", false, 4 * H * 4));
    args.dgamma_hh = static_cast<float*>(output("dgamma_hh", false, 4 * H * 4));
    args.dgamma_c = static_cast<float*>(output("dgamma_c", false, H * 4));
    args.dbeta_c = static_cast<float*>(output("dbeta_c", false, H * 4));
  }
  const Buffer workspace(kernel.backward_workspace(args));
  args.workspace = workspace.get();
  run_team(threads, [&](Member me) { kernel.backward(args, me); });
  return found;
}

struct ProjectionShape {
  int64_t N, H, V;
};

constexpr ProjectionShape kProjections[] = {{1, 1, 1},     {5, 15, 2},    {47, 17, 16},
                                            {49, 32, 31},  {130, 64, 33}, {513, 3, 17},
                                            {600, 16, 70}, {70, 5, 9000}, {100, 9, 65600}};

// What one team makes of an output projection: all at once, and in two calls by way of `d`.
std::vector<Named> project(const Kernels& kernel, ProjectionShape n, bool has_bias, int threads) {
  const int64_t N = n.N, V = n.V, size = kernel.is_bf16 ? 2 : 4;
  const int64_t H = kernel.is_bf16 ? (n.H + 31) / 32 * 32 : n.H;
  Random random(static_cast<unsigned>(V));
  const Buffer features = random.elements(N, H, H, kernel.is_bf16), weight = random.floats(V * H);
  const Buffer bias = has_bias ? random.floats(V) : Buffer();
  const Buffer targets(N * 8);
  for (int64_t k = 0; k < N; ++k) targets.get<int64_t>()[k] = random.whole(0, V - 1);
  std::vector<Named> found;
  const auto output = [&](const char* name, bool bf16, int64_t bytes) {
    found.push_back({name, bf16, Buffer(bytes)});
    return found.back().value.get();
  };
  const auto run = [&](const int64_t* given, float* nats, void* d, bool has_gradients) {
    ProjectionArgs args{N,
                        H,
                        V,
                        threads,
                        features.get(),
                        weight.get<float>(),
                        bias.get<float>(),
                        given,
                        nats,
                        d,
                        0.5f,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr};
    if (has_gradients) {
      args.df = output("df", kernel.is_bf16, N * H * size);
      args.dw = static_cast<float*>(output("dw", false, V * H * 4));
      args.db = static_cast<float*>(output("db", false, V * 4));
    }
    const Buffer workspace(kernel.projection_workspace(args));
    args.workspace = workspace.get();
    run_team(threads, [&](Member me) { kernel.project(args, me); });
  };
  const auto* const given = targets.get<int64_t>();
  run(given, static_cast<float*>(output("nats", false, N * 4)), nullptr, true);
  void* const d = output("d", kernel.is_bf16, N * logit_stride(V) * size);
  run(given, static_cast<float*>(output("nats kept", false, N * 4)), d, false);
  run(nullptr, nullptr, d, true);
  return found;
}

// Returns the number of outputs of the projection that are wrong, of every `part`-th case.
int compare_projections(const Kernels& kernel, int part) {
  int wrong = 0, index = 0;
  for (const ProjectionShape& n : kProjections) {
    for (const bool has_bias : {true, false}) {
      if (index++ % part != 0) continue;
      std::vector<Named> alone;
      for (const int threads : {1, 3}) {
        std::vector<Named> found = project(kernel, n, has_bias, threads);
        for (size_t k = 0; k < found.size(); ++k) {
          const Named& it = found[k];
          const auto bytes = static_cast<size_t>(it.value.size());
          const bool is_same =
              threads == 1 || std::memcmp(it.value.get(), alone[k].value.get(), bytes) == 0;
          if (is_same && it.value.is_written(it.is_bf16)) continue;
          ++wrong;
          std::printf("%s %s N=%d H=%d V=%d, %d threads: %s %s\n", kernel.isa,
                      kernel.is_bf16 ? "bf16" : "fp32", static_cast<int>(n.N),
                      static_cast<int>(n.H), static_cast<int>(n.V), threads, it.name,
                      is_same ? "is NaN or not written" : "differs from that of one thread");
        }
        if (threads == 1) alone = std::move(found);
      }
    }
  }
  return wrong;
}

// The relative norm of the difference of what two instruction sets computed; 0 where the layout is
// that of one of them.
double difference(const Named& own, const Named& other) {
  const std::string name(own.name);
  if (name.rfind("packed", 0) == 0 || name == "cells") return 0.0;
  double off = 0.0, size = 1e-12;
  const auto value = [&](const Named& it, int64_t k) {
    if (!it.is_bf16) return it.value.get<float>()[k];
    const uint32_t bits = uint32_t{it.value.get<uint16_t>()[k]} << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  for (int64_t k = 0; k < own.value.size() / (own.is_bf16 ? 2 : 4); ++k) {
    const double x = value(own, k), y = value(other, k);
    off += (x - y) * (x - y);
    size += y * y;
  }
  return std::sqrt(off / size);
}

// Returns the number of outputs that are wrong.
int compare(const Kernels& kernel, Shape n, unsigned options) {
  int wrong = 0;
  std::vector<Named> alone;
  for (int threads = 1; threads <= 4; ++threads) {
    std::vector<Named> found = run(kernel, n, options, threads);
    if (threads == 1) {
      const std::vector<Named> portable =
          run(*find_kernels("scalar", kernel.is_bf16), n, options, 1);
      for (size_t k = 0; k < found.size(); ++k) {
        const double error = difference(found[k], portable[k]);
        if (error <= (kernel.is_bf16 ? 0.05 : 1e-4)) continue;
        // A layer norm over one unit is zero: what is left is rounding.
        if (kernel.is_bf16 && n.H == 1 && (options & kNorm) != 0) continue;
        ++wrong;
        std::printf("%s %s T=%d B=%d I=%d H=%d options %u: %s differs by %g from scalar's\n",
                    kernel.isa, kernel.is_bf16 ? "bf16" : "fp32", static_cast<int>(n.T),
                    static_cast<int>(n.B), static_cast<int>(n.I), static_cast<int>(n.H), options,
                    found[k].name, error);
      }
    }
    for (size_t k = 0; k < found.size(); ++k) {
      const Named& it = found[k];
      const auto bytes = static_cast<size_t>(it.value.size());
      const bool is_same =
          threads == 1 || std::memcmp(it.value.get(), alone[k].value.get(), bytes) == 0;
      if (is_same && it.value.is_written(it.is_bf16)) continue;
      ++wrong;
      std::printf("%s %s T=%d B=%d I=%d H=%d options %u, %d threads: %s %s\n", kernel.isa,
                  kernel.is_bf16 ? "bf16" : "fp32", static_cast<int>(n.T), static_cast<int>(n.B),
                  static_cast<int>(n.I), static_cast<int>(n.H), options, threads, it.name,
                  is_same ? "is not fully written" : "differs from that of one thread");
    }
    if (threads == 1) alone = std::move(found);
  }
  return wrong;
}

int run_all(int part) {
  const std::string widest = choose_isa(record_cpuid());  // also asks Linux for AMX
  std::vector<const Kernels*> kernels;
  for (const char* isa :
       {"scalar", "neon", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx_bf16"}) {
    for (const bool is_bf16 : {false, true}) {
      const Kernels* found = find_kernels(isa, is_bf16);
      if (found != nullptr && isa == std::string(found->isa)) kernels.push_back(found);
    }
    if (isa == widest) break;
  }
  int wrong = 0, cases = 0, index = 0;
  for (const Kernels* kernel : kernels) {
    wrong += compare_projections(*kernel, part);
    for (const Shape& shape : kShapes) {
      const unsigned at = static_cast<unsigned>(index);
      for (const unsigned options :
           {0u, (at * 37 + 5) % 256, 31u - at % 4, 127u - at % 4, 255u - at % 8}) {
        if (index++ % part != 0) continue;
        wrong += compare(*kernel, shape, options);
        ++cases;
      }
    }
    std::printf("%s %s: done\n", kernel->isa, kernel->is_bf16 ? "bf16" : "fp32");
    std::fflush(stdout);
  }
  std::printf("%d cases on teams of 1 to 4 threads, %d wrong outputs\n", cases, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fastlstm

int main(int argc, char** argv) { return fastlstm::run_all(argc > 1 ? std::atoi(argv[1]) : 1); }
