// Where threads that own lanes keep their states, cells and gradients: prints a line per mistake.
//
// What one thread writes must be a page from what the next one writes, and within the workspace.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#define FASTLSTM_ISA scalar
#define FASTLSTM_LANES 4
#define FASTLSTM_PORTABLE
#include "cpu/norm_backward.h"

namespace {

using namespace fastlstm;
using namespace fastlstm::scalar;

constexpr int64_t kBase = int64_t{1} << 40;

struct Extent {
  template <typename T>
  void add(T* memory, int64_t count) {
    const int64_t at = reinterpret_cast<int64_t>(memory);
    begin = min_of(begin, at);
    end = max_of(end, at + count * int64_t{sizeof(T)});
  }
  int64_t begin = INT64_MAX, end = 0;
};

template <typename Format>
Extent extent(const ForwardArgs& g, const Sizes<Format>& n, Range lanes, int64_t thread,
              int64_t* bytes) {
  const ForwardScratch<Format> s(g, n, lanes, thread);
  const int64_t count = lanes.end - lanes.begin;
  Extent e;
  e.add(s.states + lanes.begin * s.state_stride, 2 * count * s.state_stride);
  e.add(s.cells.at(0, lanes.begin), count * n.hidden);
  if (g.input.tokens == nullptr) {
    e.add(s.projected.at(0, 0, lanes.begin), s.steps * count * n.gates);
  }
  *bytes = s.bytes;
  return e;
}

template <typename Format>
Extent norm_extent(const ForwardArgs& g, const Sizes<Format>& n, Range lanes, int64_t thread,
                   int64_t* bytes) {
  const ForwardScratch<Format> s(g, n, lanes, thread);
  const NormForwardScratch<Format> ns(g.workspace, g, n, s, lanes, thread);
  const int64_t count = lanes.end - lanes.begin;
  Extent e;
  e.add(ns.raw.at(0, 0, lanes.begin), count * n.gates);
  for (const auto& sums : {ns.partial_hh, ns.partial_c}) {
    e.add(&sums.at(0, 0, lanes.begin), PartialSums<2>::size(n.units, count));
  }
  if (g.input.tokens == nullptr) {
    e.add(&ns.partial_ih.at(0, 0, lanes.begin), PartialSums<2>::size(n.units, s.steps * count));
  }
  *bytes = ns.bytes;
  return e;
}

template <typename Format>
Extent norm_extent(const BackwardArgs& g, const Sizes<Format>& n, Range lanes, int64_t thread,
                   int64_t* bytes) {
  const NormBackwardScratch<Format> ns(g.workspace, g, n, lanes, thread);
  const int64_t count = lanes.end - lanes.begin;
  Extent e;
  e.add(ns.d_gates.at(0, 0, lanes.begin), count * n.gates);
  e.add(&ns.of_cells.at(0, 0, lanes.begin), PartialSums<2>::size(n.units, count));
  e.add(&ns.of_gates.at(0, 0, lanes.begin), PartialSums<4>::size(n.units, count));
  *bytes = ns.bytes;
  return e;
}

template <typename Format>
Extent extent(const BackwardArgs& g, const Sizes<Format>& n, Range lanes, int64_t thread,
              int64_t* bytes) {
  const BackwardScratch<Format> s(g, n, lanes, thread);
  Extent e;
  e.add(s.dc.at(0, lanes.begin), (lanes.end - lanes.begin) * n.hidden);
  e.add(s.carry.at(0, lanes.begin), (lanes.end - lanes.begin) * n.hidden);
  *bytes = s.bytes;
  return e;
}

template <typename Format, typename Args>
void check(const char* what, int64_t B, int64_t H, int threads, int running, bool has_tokens,
           bool has_norm) {
  if (has_norm && B < kLaneBlock * running) return;  // threads own units then
  static const int64_t token = 0;
  Args g{};
  g.T = 7, g.B = B, g.I = 3, g.H = H, g.threads = threads;
  g.input.num_rows = has_tokens ? 11 : g.T * B;
  g.input.tokens = has_tokens ? &token : nullptr;
  g.workspace = reinterpret_cast<void*>(kBase);
  const Sizes<Format> n(g.I, H);
  int64_t last = kBase - kPage, bytes = 0;
  for (int k = 0; k < running; ++k) {
    const Range lanes = part_of({0, B}, k, running, has_norm ? kLaneBlock : 1);
    const Extent e =
        has_norm ? norm_extent(g, n, lanes, k, &bytes) : extent(g, n, lanes, k, &bytes);
    if (e.begin % 64 != 0 || e.begin < last + kPage || e.end > kBase + bytes) {
      std::printf("%s: B %d, H %d, thread %d of %d, %d bytes after the one before\n", what,
                  static_cast<int>(B), static_cast<int>(H), k, running,
                  static_cast<int>(e.begin - last));
    }
    last = e.end;
  }
}

}  // namespace

int main() {
  for (const int64_t B : {1, 8, 17, 33, 130}) {
    for (const int64_t H : {1, 20, 128, 203}) {
      for (const int threads : {1, 2, 3, 8}) {
        for (int running = 1; running <= threads && running <= B; ++running) {
          for (const bool has_tokens : {false, true}) {
            for (const bool has_norm : {false, true}) {
              check<Float32, ForwardArgs>("forward", B, H, threads, running, has_tokens, has_norm);
              check<Bfloat16, ForwardArgs>("forward, bf16", B, H, threads, running, has_tokens,
                                           has_norm);
              check<Float32, BackwardArgs>("backward", B, H, threads, running, has_tokens,
                                           has_norm);
            }
          }
        }
      }
    }
  }
}
