// Shares of a step by count of work: how equal are they for 1 to 64 threads?
//
// Prints a line per size and number of threads: work of all threads / (threads * the most that one
// has), of the forward step, the backward step and a chunk of the weights' gradients.
#include <cstdio>
#include <initializer_list>

#define FASTLSTM_ISA scalar
#define FASTLSTM_LANES 4
#include "cpu/items.h"

namespace {

using namespace fastlstm::scalar;

struct Engine {
  static constexpr int64_t kRowGrain = 1, kLeastFlop = 1 << 20;
};

// Items in order, the next to whoever is done first; every thread is equally fast.
double useful(const Blocks& blocks, int threads) {
  double work[64] = {}, all = 0, most = 0;
  for (int64_t k = 0; k < blocks.size(); ++k) {
    const Share item = blocks[k];
    double* first = work;
    for (int t = 1; t < threads; ++t) first = work[t] < *first ? work + t : first;
    const double size = static_cast<double>(item.units.end - item.units.begin) *
                        static_cast<double>(item.lanes.end - item.lanes.begin);
    *first += size;
    all += size;
  }
  for (int t = 0; t < threads; ++t) most = work[t] > most ? work[t] : most;
  return all / (most * threads);
}

}  // namespace

int main() {
  for (const int64_t lanes : {8, 16}) {
    for (const int64_t H : {256, 512, 1024}) {
      for (const int threads : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64}) {
        const int64_t B = 128, units = H / lanes, gates = 4 * H;
        const auto of = [&](int64_t columns, int64_t rows, int64_t panel, int64_t flop) {
          return useful(Blocks::of<Engine>(columns, rows, threads, panel, flop), threads);
        };
        std::printf("%d %d %d %.3f %.3f %.3f\n", static_cast<int>(lanes), static_cast<int>(H),
                    threads, of(units, B, 1, 8 * lanes * H), of(units, B, 4, 2 * lanes * gates),
                    of(units, 2 * H, 1, 8 * lanes * 1280));
      }
    }
  }
}
