// The decoding kernels alone, without Python: packs models of odd sizes and lets streams that
// differ in everything read and write, on every instruction set of this machine with 1 to 4
// threads. Built by sanitize.sh; here the texts of all teams must be equal. Then states that were
// tampered with: each is refused, or written on from.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/features.h"
#include "cpu/threads.h"
#include "decode_stream.h"

namespace fastlstm {
namespace {

struct Shape {
  int64_t V, E, H, L, R, streams;  // R: rank of the output, H where it has none
  bool has_table, has_norm, is_residual;
  int sparse_every = 0;  // every so many matrices are block-sparse; 0: none
};

constexpr Shape kShapes[] = {
    {5, 3, 7, 1, 7, 1, true, false, false},      {131, 17, 33, 2, 33, 7, true, true, false},
    {64, 16, 16, 3, 5, 40, true, false, true},   {257, 5, 65, 1, 19, 3, false, false, false},
    {100, 40, 40, 2, 40, 33, false, true, true}, {9, 300, 130, 2, 1, 17, false, false, true}};

// Exactly `size` bytes on the heap, aligned to 64.
struct Memory {
  explicit Memory(int64_t size) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, static_cast<size_t>(size > 0 ? size : 1)) != 0) std::abort();
    std::memset(p, 0xff, static_cast<size_t>(size));
    memory.reset(p);
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory;
};

class Model {
 public:
  Model(const DecodeKernels& kernels, const Shape& n)
      : kernels_(kernels), random_(n.V), sparse_every_(n.sparse_every) {
    const int64_t lanes = kernels.lanes, units = (n.H + lanes - 1) / lanes;
    const int64_t columns = kernels.padded_columns(n.V, false);
    for (int64_t k = 0; k < n.L; ++k) {
      const bool looks_up = k == 0 && n.has_table;
      layers_.push_back({looks_up ? DecodeMatrix{} : matrix(4 * n.H, k == 0 ? n.E : n.H, true),
                         matrix(4 * n.H, n.H, true), floats(units * 4 * lanes),
                         n.has_norm ? floats(n.H) : nullptr, n.has_norm ? floats(n.H) : nullptr});
    }
    float* const bias = floats(columns);
    for (int64_t k = n.V; k < columns; ++k) bias[k] = -std::numeric_limits<float>::infinity();
    const DecodeMatrix projection = n.R == n.H ? DecodeMatrix{} : matrix(n.R, n.H, false);
    model = {.V = n.V,
             .E = n.E,
             .H = n.H,
             .L = n.L,
             .R = n.R,
             .is_residual = n.is_residual,
             .table = n.has_table ? floats(n.V * units * 4 * lanes) : nullptr,
             .embedding = floats(n.V * n.E),
             .layers = layers_.data(),
             .projection = projection,
             .output = matrix(n.V, n.R, false),
             .output_bias = bias,
             .cell = {}};
    model.cell.activation = n.has_norm ? Activation::softsign : Activation::tanh;
    model.cell.recurrent_activation = n.has_norm ? Activation::hard_sigmoid : Activation::sigmoid;
  }

  DecodeModel model;

 private:
  float* floats(int64_t count) {
    kept_.emplace_back(count * 4);
    auto* const p = static_cast<float*>(kept_.back().memory.get());
    std::uniform_real_distribution<float> draw(-0.7f, 0.7f);
    for (int64_t k = 0; k < count; ++k) p[k] = draw(random_);
    return p;
  }

  DecodeMatrix matrix(int64_t columns, int64_t inner, bool is_gates) {
    const int64_t padded = kernels_.padded_columns(columns, is_gates);
    const float* const w = floats(columns * inner);
    kept_.emplace_back(columns * inner);
    auto* const codes = static_cast<int8_t*>(kept_.back().memory.get());
    const int largest = kernels_.format == WeightFormat::int4 ? 7 : 127;
    for (int64_t k = 0; k < columns * inner; ++k) {
      codes[k] = static_cast<int8_t>(std::lround(w[k] / 0.7f * static_cast<float>(largest)));
    }
    kept_.emplace_back(columns * ((inner + 63) / 64) * 4);
    auto* const scales = static_cast<float*>(kept_.back().memory.get());
    for (int64_t k = 0; k < columns * ((inner + 63) / 64); ++k) {
      scales[k] = kernels_.format == WeightFormat::int4 ? 0.125f : 0.7f / 127.0f;
    }
    kept_.emplace_back(kernels_.matrix_bytes(columns, inner, is_gates));
    void* const strips = kept_.back().memory.get();
    kept_.emplace_back(padded * 4);
    auto* const factors = static_cast<float*>(kept_.back().memory.get());
    kept_.emplace_back(padded * 4);
    auto* const corrections = static_cast<int32_t*>(kept_.back().memory.get());
    const DecodePackArgs args{w,        codes,  scales,  columns,    inner,
                              is_gates, strips, factors, corrections};
    run_team(3, [&](Member me) { kernels_.pack(args, me); });
    if (sparse_every_ != 0 && num_matrices_++ % sparse_every_ == 0)
      return blocks(columns, inner, is_gates, factors, corrections);
    return {strips, factors, corrections, nullptr, nullptr};
  }

  // Lines of about a fifth of the blocks, none of some strips, in memory of just their size.
  DecodeMatrix blocks(int64_t columns, int64_t inner, bool is_gates, const float* factors,
                      const int32_t* corrections) {
    const int64_t across = (inner + 3) / 4;
    const int64_t strips = is_gates ? (columns / 4 + 15) / 16 * 4 : (columns + 63) / 64 * 4;
    std::vector<uint16_t> indices;
    kept_.emplace_back((strips + 1) * 4);
    auto* const starts = static_cast<int32_t*>(kept_.back().memory.get());
    starts[0] = 0;
    for (int64_t s = 0; s < strips; ++s) {
      const unsigned rarity = s % 5 == 3 ? 0 : 5;
      for (int64_t k = 0; k < across; ++k) {
        if (rarity != 0 && random_() % rarity == 0) indices.push_back(static_cast<uint16_t>(k));
      }
      starts[s + 1] = static_cast<int32_t>(indices.size());
    }
    const auto num = static_cast<int64_t>(indices.size());
    kept_.emplace_back(num * 2);
    auto* const stored = static_cast<uint16_t*>(kept_.back().memory.get());
    std::copy(indices.begin(), indices.end(), stored);
    const WeightFormat format = kernels_.format;
    const int64_t size = format == WeightFormat::fp32 ? 4 : format == WeightFormat::bf16 ? 2 : 1;
    kept_.emplace_back(num * 64 * size);
    auto* const lines = static_cast<char*>(kept_.back().memory.get());
    std::uniform_real_distribution<float> draw(-0.7f, 0.7f);
    for (int64_t k = 0; k < num * 64; ++k) {
      const float value = draw(random_);
      const auto code = static_cast<int8_t>(value * 180.0f);
      const char* const from = reinterpret_cast<const char*>(&value);
      std::memcpy(lines + k * size,
                  size == 1 ? reinterpret_cast<const char*>(&code) : from + 4 - size,
                  static_cast<size_t>(size));  // bf16 is the upper half
    }
    return {lines, factors, corrections, starts, stored};
  }

  const DecodeKernels& kernels_;
  std::mt19937 random_;
  int sparse_every_, num_matrices_ = 0;
  std::vector<Memory> kept_;
  std::vector<DecodeLayer> layers_;
};

// Everything that the streams of a model have written and become.
std::string texts(const DecodeKernels& kernels, const Model& m, const Shape& n, int threads) {
  std::vector<std::unique_ptr<Stream>> streams;
  for (int64_t k = 0; k < n.streams; ++k) {
    streams.push_back(std::make_unique<Stream>(n.V, n.H, n.L));
    Settings settings;
    settings.temperature = 0.3f * static_cast<float>(k % 5);
    settings.top_k = k % 3 * 4;
    settings.top_p = k % 2 == 0 ? 1.0f : 0.8f;
    settings.repetition_penalty = k % 4 == 1 ? 1.2f : 1.0f;
    settings.presence_penalty = k % 4 == 2 ? 0.5f : 0.0f;
    settings.num_top = k % 5 - 1;
    settings.scores_given = k % 2 == 0;
    settings.seed = static_cast<uint64_t>(k);
    settings.stops = {{static_cast<int32_t>(k % n.V), 1}};
    streams.back()->set(settings);
    streams.back()->feed(std::vector<int32_t>(static_cast<size_t>(1 + k % 7), 2));
    streams.back()->begin(k % 6 * 4);
  }
  std::string all;
  for (int call = 0; call < 6; ++call) {
    std::vector<DecodeRow> rows;
    std::vector<Stream*> running;
    for (const auto& s : streams) {
      if (s->status != RowStatus::running) continue;
      rows.push_back(s->start(5));
      running.push_back(s.get());
    }
    if (rows.empty()) break;
    DecodeArgs args{&m.model, rows.data(), static_cast<int64_t>(rows.size()), 5, threads, nullptr};
    const Memory workspace(kernels.workspace(args));
    args.workspace = workspace.memory.get();
    run_team(threads, [&](Member me) { kernels.decode(args, me); });
    for (size_t k = 0; k < rows.size(); ++k) running[k]->finish(rows[k]);
  }
  for (const auto& s : streams) {
    all += s->save();
    for (const int32_t token : s->written) all += std::to_string(token) + " ";
    for (const float score : s->scores.own) all += std::isfinite(score) ? "f" : "NaN";
  }
  return all;
}

// Numbers that arithmetic and comparisons go wrong with.
constexpr int64_t kExtremes[] = {0,
                                 1,
                                 -1,
                                 63,
                                 64,
                                 65,
                                 INT32_MAX,
                                 INT32_MIN,
                                 UINT32_MAX,
                                 int64_t{1} << 61,
                                 (int64_t{1} << 62) + 1,
                                 INT64_MAX,
                                 INT64_MAX - 1,
                                 INT64_MAX - 63,
                                 INT64_MIN,
                                 INT64_MIN + 64};
constexpr size_t kHeader = 64 + kRecent * sizeof(int32_t);  // of a saved stream

// A saved stream with bits changed, whole fields replaced, its end cut off or grown.
std::string tampered(std::string blob, std::mt19937& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (size_t changes = 1 + below(3); changes > 0; --changes) {
    const size_t kind = below(8);
    if (blob.size() < kHeader || kind == 0) {
      blob.resize(below(2 * blob.size() + 8), static_cast<char>(random()));
    } else if (kind < 3) {
      blob[below(blob.size())] ^= static_cast<char>(1 << below(8));
    } else if (kind < 6) {  // the eight-byte fields behind the format and the flags
      int64_t value = kExtremes[below(std::size(kExtremes))];
      if (below(4) == 0) value = static_cast<int64_t>(below(1000));
      std::memcpy(blob.data() + 8 * (1 + below(7)), &value, sizeof value);
    } else {  // a token, a float, two counts
      const float floats[] = {1e30f, -2.0f, INFINITY, NAN, 0.5f};
      int32_t value = static_cast<int32_t>(kExtremes[below(std::size(kExtremes))]);
      if (kind == 7) std::memcpy(&value, &floats[below(std::size(floats))], sizeof value);
      std::memcpy(blob.data() + 4 * below(blob.size() / 4), &value, sizeof value);
    }
  }
  return blob;
}

// Settings by which a stream looks at everything that it remembers.
Settings looking_back(int64_t vocab_size) {
  Settings settings;
  settings.repetition_penalty = 1.3f;
  settings.frequency_penalty = 0.2f;
  settings.top_k = 5;
  settings.num_top = 2;
  settings.stops = {std::vector<int32_t>(kRecent, 1), {1, 2, static_cast<int32_t>(vocab_size - 1)}};
  return settings;
}

// Restores states that were tampered with and writes on from those that are taken; returns how
// many were taken.
int64_t restore_all(int64_t count) {
  const Shape shapes[] = {{5, 3, 7, 1, 4, 1, true, false, false},
                          {70, 9, 20, 2, 20, 1, true, true, true}};
  std::mt19937 random(1);
  int64_t num_taken = 0;
  for (const Shape& n : shapes) {
    const WeightFormat format = n.L == 1 ? WeightFormat::int8 : WeightFormat::fp32;
    const DecodeKernels& kernels = *find_decode_kernels("scalar", format);
    const Model m(kernels, n);
    const auto write = [&](Stream& stream, int64_t room) {
      stream.begin(room);
      while (stream.status == RowStatus::running) {
        DecodeRow row = stream.start(room + 1);
        DecodeArgs args{&m.model, &row, 1, room + 1, 1, nullptr};
        const Memory workspace(kernels.workspace(args));
        args.workspace = workspace.memory.get();
        run_team(1, [&](Member me) { kernels.decode(args, me); });
        stream.finish(row);
      }
    };
    std::vector<std::string> blobs;
    for (int kind = 0; kind < 4; ++kind) {
      Stream stream(n.V, n.H, n.L);
      if (kind % 2 == 1) stream.set(looking_back(n.V));
      stream.feed({1, 2, 3});
      if (kind > 0) write(stream, 40 * kind);
      blobs.push_back(stream.save());
    }
    for (int64_t k = 0; k < count / 2; ++k) {
      Stream stream(n.V, n.H, n.L);
      stream.set(looking_back(n.V));
      try {
        stream.restore(tampered(blobs[random() % blobs.size()], random));
      } catch (const std::invalid_argument&) {
        continue;
      }
      ++num_taken;
      stream.feed({0});
      write(stream, 3);
    }
  }
  return num_taken;
}

int run_all(int part) {
  const int64_t kTampered = 100000 / part;
  const int64_t num_taken = restore_all(kTampered);
  std::printf("decoding: %lld states tampered with, %lld taken and written on from\n",
              static_cast<long long>(kTampered), static_cast<long long>(num_taken));
  if (num_taken < kTampered / 100) return 1;  // what is taken is to reach the kernels
  const CpuidRecord record = record_cpuid();  // also asks Linux for AMX
  const std::string widest = choose_isa(record);
  std::vector<std::string> features = usable_features(record);
#if defined(FASTLSTM_RUNS_AVX_VNNI)
  features.push_back("avx_vnni");
#endif
  int cases = 0, wrong = 0;
  std::string before;  // the instruction set before
  bool was_feature = false;
  std::vector<std::string> texts_before, all;
  for (const std::string isa : {"scalar", "neon_dotprod", "neon", "neon_bf16", "avx_vnni", "avx2",
                                "avx512_vnni", "avx512", "avx512_bf16", "amx_bf16"}) {
    const bool is_feature = isa == "neon_dotprod" || isa == "avx_vnni" || isa == "avx512_vnni";
    if (is_feature && std::find(features.begin(), features.end(), isa) == features.end()) continue;
    int index = 0;
    for (const auto format :
         {WeightFormat::int8, WeightFormat::int4, WeightFormat::fp32, WeightFormat::bf16}) {
      const DecodeKernels* const kernels = find_decode_kernels(isa.c_str(), format);
      if (kernels == nullptr || kernels->isa != isa) continue;
      for (Shape shape : kShapes) {
        for (const int sparse_every : {0, 1, 2}) {
          if (sparse_every != 0 && format == WeightFormat::int4) continue;
          if (index++ % part != 0) continue;
          shape.sparse_every = sparse_every;
          const Model model(*kernels, shape);
          const auto check = [&](const std::string& found, const std::string& expected,
                                 const std::string& by) {
            ++cases;
            if (found == expected && found.find("NaN") == std::string::npos) return;
            ++wrong;
            std::printf("%s format %d V=%d H=%d, every %d. matrix sparse: %s differ\n", isa.c_str(),
                        static_cast<int>(format), static_cast<int>(shape.V),
                        static_cast<int>(shape.H), sparse_every, by.c_str());
          };
          all.push_back(texts(*kernels, model, shape, 1));
          for (int threads = 2; threads <= 4; ++threads) {
            check(texts(*kernels, model, shape, threads), all.back(),
                  std::to_string(threads) + " threads");
          }
          // Sums of whole numbers are exact: a set with products of bytes changes nothing. (The
          // corrections of blocks drawn here are not theirs.)
          const bool is_whole = format == WeightFormat::int8 || format == WeightFormat::int4;
          if ((was_feature || isa == "neon_bf16") && is_whole && sparse_every == 0 &&
              all.size() <= texts_before.size()) {
            check(all.back(), texts_before[all.size() - 1], before);
          }
        }
      }
    }
    before = isa;
    was_feature = is_feature;
    texts_before.swap(all);
    all.clear();
    if (isa == widest) break;
  }
  std::printf("decoding: %d cases on teams of 2 to 4 threads, %d differ\n", cases, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fastlstm

int main(int argc, char** argv) { return fastlstm::run_all(argc > 1 ? std::atoi(argv[1]) : 1); }
