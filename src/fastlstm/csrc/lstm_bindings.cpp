// The LSTM kernels in Python: addresses come in as integers from
// ops/native_call.py and nn/prepared.py, which know the sizes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <vector>

#include "cpu/dispatch.h"
#include "cpu/features.h"
#include "cpu/threads.h"
#include "fingerprint.h"
#include "lstm.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fastlstm {
namespace {

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

const Kernels& kernels(const std::string& isa, bool is_bf16) {
  const Kernels* found = find_kernels(isa, is_bf16);
  if (found == nullptr) {
    throw nb::value_error(("this build lacks " + isa + "; install it on this CPU").c_str());
  }
  return *found;
}

void pack(const Kernels& k, int threads, bool is_backward, int64_t I, int64_t H, Address w_ih,
          Address w_hh, Address b_ih, Address b_hh, Address out) {
  const PackArgs args{I,
                      H,
                      pointer<const float>(w_ih),
                      pointer<const float>(w_hh),
                      pointer<const float>(b_ih),
                      pointer<const float>(b_hh),
                      pointer<void>(out)};
  const auto body = is_backward ? k.pack_backward : k.pack_forward;
  nb::gil_scoped_release release;
  run_team(threads, [&](Member me) { body(args, me); });
}

// The fields of a call one by one, from a tuple of sizes and addresses.
class Fields {
 public:
  struct AnyPointer {
    Address value;
    template <typename T>
    operator T*() const {
      return pointer<T>(value);
    }
  };

  Fields(nb::handle tuple, int64_t count) : tuple_(tuple) {
    const int64_t found = nb::isinstance<nb::tuple>(tuple) ? PyTuple_Size(tuple.ptr()) : 0;
    if (found != count) {
      const auto text =
          "a call has " + std::to_string(found) + " fields, expected " + std::to_string(count);
      throw nb::value_error(text.c_str());
    }
  }
  int64_t size() {
    const int64_t value = PyLong_AsLongLong(PyTuple_GetItem(tuple_.ptr(), at_++));
    if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return value;
  }
  AnyPointer address() { return {static_cast<Address>(size())}; }
  Input input() { return {address(), size(), size(), address()}; }

 private:
  nb::handle tuple_;
  int64_t at_ = 0;
};

// Braces evaluate from left to right.
ForwardArgs forward_args(nb::handle tuple, int threads) {
  Fields f(tuple, 22);
  return {f.size(),    f.size(),    f.size(),    f.size(),    threads,     f.size() != 0,
          f.input(),   f.address(), f.address(), f.address(), f.address(), f.address(),
          f.address(), f.address(), f.size(),    f.address(), f.address(), f.address(),
          f.address(), f.address(), nullptr};
}

BackwardArgs backward_args(nb::handle tuple, int threads) {
  Fields f(tuple, 34);
  return {f.size(),    f.size(),    f.size(),    f.size(),    threads,     f.size() != 0,
          f.input(),   f.address(), f.address(), f.address(), f.address(), f.address(),
          f.address(), f.address(), f.address(), f.size(),    f.address(), f.address(),
          f.address(), f.address(), f.address(), f.address(), f.address(), f.address(),
          f.address(), f.address(), f.address(), f.address(), f.address(), f.address(),
          f.address(), f.address(), nullptr};
}

// Runs calls, the directions of a layer, on one team: side by side on `members` threads each if the
// team has so many, otherwise one after the other on all.
template <typename Args>
void run_calls(int threads, int members, std::vector<Args>& calls,
               int64_t (*workspace_bytes)(const Args&), void (*run)(const Args&, Member)) {
  nb::gil_scoped_release release;
  int64_t bytes = 0;
  const auto bytes_of = [&](const Args& call) { return (workspace_bytes(call) + 63) / 64 * 64; };
  for (const Args& call : calls) bytes += bytes_of(call);
  auto* memory = static_cast<char*>(scratch().take(bytes));
  for (Args& call : calls) {
    call.workspace = memory;
    memory += bytes_of(call);
  }
  const int count = static_cast<int>(calls.size());
  std::vector<Barrier> barriers(calls.size());
  run_team(threads, [&](Member me) {
    if (count * members > me.count) {
      for (const Args& call : calls) run(call, me);
      return;
    }
    const int which = me.index / members;
    if (which < count) run(calls[which], {me.index % members, members, &barriers[which]});
  });
  scratch().give_back(calls.size());
}

void forward(const Kernels& k, int threads, int members, nb::args calls) {
  std::vector<ForwardArgs> all;
  for (nb::handle call : calls) all.push_back(forward_args(call, threads));
  run_calls(threads, members, all, k.forward_workspace, k.forward);
}

void backward(const Kernels& k, int threads, int members, nb::args calls) {
  std::vector<BackwardArgs> all;
  for (nb::handle call : calls) all.push_back(backward_args(call, threads));
  run_calls(threads, members, all, k.backward_workspace, k.backward);
}

void project(const Kernels& k, int threads, int64_t N, int64_t H, int64_t V, Address features,
             Address weight, Address bias, Address targets, Address nats, Address d, float scale,
             Address df, Address dw, Address db) {
  ProjectionArgs args{N,
                      H,
                      V,
                      threads,
                      pointer<const void>(features),
                      pointer<const float>(weight),
                      pointer<const float>(bias),
                      pointer<const int64_t>(targets),
                      pointer<float>(nats),
                      pointer<void>(d),
                      scale,
                      pointer<void>(df),
                      pointer<float>(dw),
                      pointer<float>(db),
                      nullptr};
  nb::gil_scoped_release release;
  args.workspace = scratch().take(k.projection_workspace(args));
  run_team(threads, [&](Member me) { k.project(args, me); });
  scratch().give_back();
}

void make_cell_call(CellCall* self, int activation, int recurrent_activation, double zoneout_h,
                    double zoneout_c, int64_t first_row, Address seed, Address gamma_ih,
                    Address gamma_hh, Address gamma_c, Address beta_c, Address normed,
                    Address moments) {
  new (self) CellCall{static_cast<Activation>(activation),
                      static_cast<Activation>(recurrent_activation),
                      zoneout_h,
                      zoneout_c,
                      first_row,
                      pointer<const int64_t>(seed),
                      pointer<const float>(gamma_ih),
                      pointer<const float>(gamma_hh),
                      pointer<const float>(gamma_c),
                      pointer<const float>(beta_c),
                      pointer<void>(normed),
                      pointer<float>(moments)};
}

}  // namespace

void bind_lstm(nb::module_& m) {
  nb::class_<CellCall>(m, "LSTMCellCall")
      .def("__init__", &make_cell_call)
      .def_prop_ro("address", [](const CellCall& v) { return reinterpret_cast<Address>(&v); });
  nb::class_<Kernels>(m, "Kernels")
      .def_prop_ro("isa", [](const Kernels& k) { return std::string(k.isa); })
      .def_ro("is_bf16", &Kernels::is_bf16)
      .def_ro("lanes", &Kernels::lanes)
      .def("forward_bytes",
           [](const Kernels& k, int64_t I, int64_t H) { return k.forward_bytes(I, H); })
      .def("backward_bytes",
           [](const Kernels& k, int64_t I, int64_t H) { return k.backward_bytes(I, H); })
      .def("splits_lanes", [](const Kernels& k, int64_t B, int64_t H, int threads,
                              bool has_norm) { return k.splits_lanes(B, H, threads, has_norm); })
      .def("reads_unpacked", [](const Kernels& k, int64_t T, int64_t B, int64_t I,
                                int64_t H) { return k.reads_unpacked(T, B, I, H); })
      .def_static("gate_rows", &gate_rows)
      .def("pack", &pack)
      .def("forward", &forward)
      .def("backward", &backward)
      .def_static("logit_stride", &logit_stride)
      .def("project", &project);
  nb::class_<Fingerprint>(m, "Fingerprint")
      .def(nb::init<const Kernels&, const Fingerprint::Regions&, int>(),
           nb::call_guard<nb::gil_scoped_release>())
      .def("is_still", [](const Fingerprint& f, int threads) {
        if (f.is_short()) return f.is_still(threads);
        nb::gil_scoped_release release;
        return f.is_still(threads);
      });
  m.def("lstm_kernels", &kernels, "isa"_a, "is_bf16"_a, nb::rv_policy::reference);
  m.def(
      "fill_scratch", [](int byte) { scratch().fill(byte); }, "byte"_a,
      "Overwrites what this thread's calls left in their scratch; for tests.");
  m.def(
      "use_openmp", [](const std::string& library) { return use_openmp(library.c_str()); },
      "library"_a);
  m.def("has_openmp", &has_openmp);
  m.def("libraries_loaded", &libraries_loaded);
  m.def("is_crowded", &is_crowded);
  m.def("note_core_wait", &note_core_wait, "share"_a, "threads"_a);
}

}  // namespace fastlstm
