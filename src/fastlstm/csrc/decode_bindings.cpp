// Decoding in Python: addresses come in as integers from text/decoder.py, which knows the sizes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "cpu/threads.h"
#include "decode_stream.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fastlstm {
namespace {

// Keeps a stream from any other call while it lives: `run` reads and writes it without the GIL.
class Hold {
 public:
  explicit Hold(Stream& stream) : stream_(&stream) {
    if (stream.is_busy.exchange(true)) {
      throw std::runtime_error(
          "a stream is in use by another call, or given twice; wait for that call to return");
    }
  }
  Hold(Hold&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  ~Hold() {
    if (stream_ != nullptr) stream_->is_busy = false;
  }

 private:
  Stream* stream_;
};

// A model whose arrays someone else keeps.
class Model {
 public:
  Model(const DecodeKernels& kernels, int64_t V, int64_t E, int64_t H, int64_t R, bool is_residual,
        Address table, Address embedding, std::vector<DecodeLayer> layers,
        const DecodeMatrix& projection, const DecodeMatrix& output, Address output_bias,
        int activation, int recurrent_activation, int64_t weight_bytes)
      : kernels_(kernels), weight_bytes_(weight_bytes), layers_(std::move(layers)) {
    model_ = {V,
              E,
              H,
              static_cast<int64_t>(layers_.size()),
              R,
              is_residual,
              pointer<const float>(table),
              pointer<const float>(embedding),
              layers_.data(),
              projection,
              output,
              pointer<const float>(output_bias),
              {}};
    model_.cell.activation = static_cast<Activation>(activation);
    model_.cell.recurrent_activation = static_cast<Activation>(recurrent_activation);
  }

  // Has every stream read up to `steps` tokens, and write after them; returns the seconds.
  double run(const nb::list& streams, int64_t steps, int threads) {
    if (steps < 1 || threads < 1) throw nb::value_error("steps and threads must be at least 1");
    const nb::tuple kept(streams);  // the list may change
    std::vector<Stream*> found;
    for (const auto& item : kept) found.push_back(nb::cast<Stream*>(item));
    std::vector<Hold> holds;
    for (Stream* s : found) holds.emplace_back(*s);
    for (const Stream* s : found) {
      if (s->vocab_size != model_.V || s->hidden_size != model_.H || s->num_layers != model_.L) {
        throw nb::value_error("a stream of a model of other sizes");
      }
    }
    nb::gil_scoped_release release;
    std::vector<DecodeRow> rows;
    std::vector<Stream*> running;
    for (Stream* s : found) {
      if (s->status != RowStatus::running) continue;
      rows.push_back(s->start(steps));
      running.push_back(s);
    }
    if (rows.empty()) return 0.0;
    const auto begin = std::chrono::steady_clock::now();
    std::vector<DecodeArgs> parts = parts_of(rows, steps, threads);
    run_parts(parts, threads);
    for (size_t k = 0; k < rows.size(); ++k) running[k]->finish(rows[k]);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    return taken.count();
  }

 private:
  // All rows for one team, or parts that threads take one after the other. A thread with rows of
  // its own meets nobody, but reads all weights at every step: they must be in a cache, the rows
  // many.
  std::vector<DecodeArgs> parts_of(std::vector<DecodeRow>& rows, int64_t steps, int threads) const {
    // Several parts per thread: one whose core is busy takes fewer of them.
    constexpr int64_t kRows = 16, kPartsPerThread = 4;
    const auto count = static_cast<int64_t>(rows.size());
    const bool is_split = kernels_.splits_rows(count, weight_bytes_, threads);
    const int64_t per_thread = std::clamp(count / (kRows * threads), int64_t{1}, kPartsPerThread);
    const int64_t num_parts = is_split ? per_thread * threads : 1;
    std::vector<DecodeArgs> parts;
    for (int64_t k = 0; k < num_parts; ++k) {
      const int64_t begin = count * k / num_parts, end = count * (k + 1) / num_parts;
      parts.push_back(
          {&model_, rows.data() + begin, end - begin, steps, is_split ? 1 : threads, nullptr});
    }
    return parts;
  }

  void run_parts(std::vector<DecodeArgs>& parts, int threads) const {
    thread_local Scratch scratch;
    int64_t bytes = 0;
    for (const DecodeArgs& part : parts) bytes += kernels_.workspace(part) + kPage;
    auto* memory = static_cast<char*>(scratch.take(bytes));
    for (DecodeArgs& part : parts) {
      part.workspace = memory;
      memory += kernels_.workspace(part) + kPage;
    }
    std::atomic<size_t> next{0};
    run_team(threads, [&](Member me) {
      if (parts.size() == 1) return kernels_.decode(parts[0], me);
      Barrier alone;
      for (size_t k = next++; k < parts.size(); k = next++) {
        kernels_.decode(parts[k], {0, 1, &alone});
      }
    });
    scratch.give_back();
  }

  const DecodeKernels& kernels_;
  int64_t weight_bytes_;
  std::vector<DecodeLayer> layers_;
  DecodeModel model_;
};

DecodeMatrix matrix(Address strips, Address factors, Address corrections, Address starts,
                    Address indices) {
  return {pointer<const void>(strips), pointer<const float>(factors),
          pointer<const int32_t>(corrections), pointer<const int32_t>(starts),
          pointer<const uint16_t>(indices)};
}

DecodeLayer layer(const DecodeMatrix& input, const DecodeMatrix& recurrent, Address bias,
                  Address gamma, Address beta) {
  return {input, recurrent, pointer<const float>(bias), pointer<const float>(gamma),
          pointer<const float>(beta)};
}

const DecodeKernels& decode_kernels(const std::string& isa, int format) {
  const DecodeKernels* found = nullptr;
  if (format >= 0 && format <= 3) {
    found = find_decode_kernels(isa.c_str(), static_cast<WeightFormat>(format));
  }
  if (found == nullptr) {
    throw nb::value_error(("this build lacks " + isa + "; install it on this CPU").c_str());
  }
  return *found;
}

void pack_matrix(const DecodeKernels& k, int threads, Address w, Address codes, Address scales,
                 int64_t columns, int64_t inner, bool is_gates, Address strips, Address factors,
                 Address corrections) {
  const DecodePackArgs args{pointer<const float>(w),
                            pointer<const int8_t>(codes),
                            pointer<const float>(scales),
                            columns,
                            inner,
                            is_gates,
                            pointer<void>(strips),
                            pointer<float>(factors),
                            pointer<int32_t>(corrections)};
  nb::gil_scoped_release release;
  run_team(threads, [&](Member me) { k.pack(args, me); });
}

// GB/s at which a team reads `bytes` each, over and over: that of the cache they lie in.
double read_gb_s(const DecodeKernels& k, int threads, int64_t bytes, int rounds) {
  if (threads < 1 || bytes < 4096 || rounds < 1) throw nb::value_error("a size is too small");
  nb::gil_scoped_release release;
  std::vector<char> memory(static_cast<size_t>(threads * bytes), 1);
  std::atomic<uint32_t> sum{0};
  double seconds = 0.0;
  run_team(threads, [&](Member me) {
    const char* const mine = memory.data() + me.index * bytes;
    uint32_t own = k.read_all(mine, bytes);
    me.barrier->wait(me.count);
    const auto begin = std::chrono::steady_clock::now();
    for (int n = 0; n < rounds; ++n) own += k.read_all(mine, bytes);
    me.barrier->wait(me.count);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (me.index == 0) seconds = taken.count() * threads / me.count;
    sum += own;
  });
  return sum == 1 ? 0.0 : static_cast<double>(threads * bytes) * rounds / seconds / 1e9;
}

const char* status_name(const Stream& s) {
  switch (s.status) {
    case RowStatus::running:
      return "running";
    case RowStatus::full:
      return "length";
    case RowStatus::stopped:
      return "stop";
    case RowStatus::not_finite:
      return "not finite";
    default:
      return "bad token";
  }
}

// Moves a vector out to Python.
template <typename T>
std::vector<T> taken(std::vector<T>& values) {
  std::vector<T> out;
  out.swap(values);
  return out;
}

}  // namespace

void bind_decode(nb::module_& m) {
  nb::class_<DecodeKernels>(m, "DecodeKernels")
      .def_prop_ro("isa", [](const DecodeKernels& k) { return std::string(k.isa); })
      .def_ro("lanes", &DecodeKernels::lanes)
      .def("matrix_bytes", [](const DecodeKernels& k, int64_t columns, int64_t inner,
                              bool is_gates) { return k.matrix_bytes(columns, inner, is_gates); })
      .def("padded_columns", [](const DecodeKernels& k, int64_t columns,
                                bool is_gates) { return k.padded_columns(columns, is_gates); })
      .def("pack", &pack_matrix)
      .def("read_gb_s", &read_gb_s, "threads"_a, "bytes"_a, "rounds"_a);
  m.def("decode_kernels", &decode_kernels, "isa"_a, "format"_a, nb::rv_policy::reference);
  nb::class_<DecodeMatrix>(m, "DecodeMatrix")
      .def(nb::new_(&matrix), "strips"_a = 0, "factors"_a = 0, "corrections"_a = 0, "starts"_a = 0,
           "indices"_a = 0);
  nb::class_<DecodeLayer>(m, "DecodeLayer")
      .def(nb::new_(&layer), "input"_a, "recurrent"_a, "bias"_a, "gamma"_a, "beta"_a);
  nb::class_<Model>(m, "DecodeModel")
      .def(nb::init<const DecodeKernels&, int64_t, int64_t, int64_t, int64_t, bool, Address,
                    Address, std::vector<DecodeLayer>, const DecodeMatrix&, const DecodeMatrix&,
                    Address, int, int, int64_t>())
      .def("run", &Model::run, "streams"_a, "steps"_a, "threads"_a);
  nb::class_<Settings>(m, "DecodeSettings")
      .def(nb::init<>())
      .def_rw("temperature", &Settings::temperature)
      .def_rw("top_p", &Settings::top_p)
      .def_rw("min_p", &Settings::min_p)
      .def_rw("repetition_penalty", &Settings::repetition_penalty)
      .def_rw("frequency_penalty", &Settings::frequency_penalty)
      .def_rw("presence_penalty", &Settings::presence_penalty)
      .def_rw("top_k", &Settings::top_k)
      .def_rw("num_top", &Settings::num_top)
      .def_rw("seed", &Settings::seed)
      .def_rw("scores_given", &Settings::scores_given)
      .def_rw("bias_tokens", &Settings::bias_tokens)
      .def_rw("biases", &Settings::biases)
      .def_rw("stops", &Settings::stops);
  nb::class_<Stream>(m, "DecodeStream")
      .def(nb::init<int64_t, int64_t, int64_t>(), "vocab_size"_a, "hidden_size"_a, "num_layers"_a)
      .def("set",
           [](Stream& s, const Settings& settings) {
             const Hold hold(s);
             s.set(settings);
           })
      .def("feed",
           [](Stream& s, const std::vector<int32_t>& tokens) {
             const Hold hold(s);
             s.feed(tokens);
           })
      .def("begin",
           [](Stream& s, int64_t room) {
             const Hold hold(s);
             s.begin(room);
           })
      .def_prop_ro("status", &status_name)
      .def_prop_ro("room", [](const Stream& s) { return s.room.load(); })
      .def_prop_ro("num_waiting",
                   [](Stream& s) {
                     const Hold hold(s);
                     return s.given.size();
                   })
      .def("take",
           [](Stream& s) {
             const Hold hold(s);
             const std::vector<int32_t> written = taken(s.written);
             return nb::bytes(written.data(), written.size() * sizeof(int32_t));
           })
      .def("take_scores",
           [](Stream& s) {
             const Hold hold(s);
             return nb::make_tuple(taken(s.scores.own), taken(s.scores.top_tokens),
                                   taken(s.scores.top));
           })
      .def_prop_ro("state_address",
                   [](const Stream& s) { return reinterpret_cast<Address>(s.state.data()); })
      .def("save",
           [](Stream& s) {
             const Hold hold(s);
             const std::string blob = s.save();
             return nb::bytes(blob.data(), blob.size());
           })
      .def("restore", [](Stream& s, const nb::bytes& blob) {
        const Hold hold(s);
        s.restore(std::string(blob.c_str(), blob.size()));
      });
}

}  // namespace fastlstm
