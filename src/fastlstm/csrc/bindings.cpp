// Python's way in: check, unwrap, release the GIL, call. No arithmetic here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu/allocator.h"
#include "cpu/copy_bandwidth.h"
#include "cpu/features.h"
#include "cpu/fma_peak.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fastlstm {
void bind_lstm(nb::module_& m);
void bind_decode(nb::module_& m);
void bind_windows(nb::module_& m);
}  // namespace fastlstm

namespace {

void check_threads(int threads) {
  if (threads < 1 || threads > 4096) throw nb::value_error("threads must be from 1 to 4096");
}

nb::dict peak_gflops(const std::string& isa, int threads, double seconds) {
  check_threads(threads);
  if (!(seconds > 0.0 && seconds <= 60.0)) throw nb::value_error("seconds must be from 0 to 60");
  const auto machine = fastlstm::peak_kernels(fastlstm::choose_isa(fastlstm::record_cpuid()));
  const auto wanted = fastlstm::peak_kernels(isa);
  if (wanted.empty()) throw nb::value_error("unknown instruction set");
  if (wanted.size() > machine.size()) {
    throw nb::value_error("this CPU cannot run that instruction set");
  }
  nb::dict result;
  for (const auto& kernel : wanted) {
    double gflops = 0.0;
    {
      nb::gil_scoped_release release;
      gflops = fastlstm::measure_peak_gflops(kernel, threads, seconds);
    }
    result[kernel.isa] = gflops;
  }
  return result;
}

using Bytes = nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A tensor on a block of memory, which goes back when the tensor does.
Bytes block_tensor(size_t bytes) {
  if (bytes >> 62 != 0) throw nb::value_error("more bytes than any machine has");
  struct Owned {
    void* memory;
    size_t bytes;
  };
  void* const memory = fastlstm::take_block(bytes);
  if (memory == nullptr) {
    throw std::runtime_error("not enough memory for " + std::to_string(bytes) + " bytes");
  }
  const nb::capsule owner(new Owned{memory, bytes}, [](void* p) noexcept {
    const auto* const owned = static_cast<Owned*>(p);
    fastlstm::give_block(owned->memory, owned->bytes);
    delete owned;
  });
  return Bytes(memory, {bytes}, owner);
}

double copy_gb_s(int threads, int64_t bytes_per_thread, int rounds) {
  check_threads(threads);
  if (bytes_per_thread < 1) throw nb::value_error("bytes_per_thread must be at least 1");
  if (rounds < 1) throw nb::value_error("rounds must be at least 1");
  nb::gil_scoped_release release;
  return fastlstm::measure_copy_gb_s(threads, bytes_per_thread, rounds);
}

}  // namespace

NB_MODULE(_native, m) {
  // Caches in Python hold kernels to the end of the process: static data, nothing is lost.
  nb::set_leak_warnings(false);
  m.doc() = "fastlstm's native code: what this machine can do, and how fast it does it.";
  using Record = fastlstm::CpuidRecord;
  nb::class_<Record>(m, "CpuidRecord")
      .def(nb::init<>())
      .def_rw("max_leaf", &Record::max_leaf)
      .def_rw("leaf1_ecx", &Record::leaf1_ecx)
      .def_rw("leaf7_ebx", &Record::leaf7_ebx)
      .def_rw("leaf7_ecx", &Record::leaf7_ecx)
      .def_rw("leaf7_edx", &Record::leaf7_edx)
      .def_rw("leaf7_1_eax", &Record::leaf7_1_eax)
      .def_rw("xcr0", &Record::xcr0)
      .def_rw("is_amx_permitted", &Record::is_amx_permitted)
      .def_rw("hwcap", &Record::hwcap)
      .def_rw("hwcap2", &Record::hwcap2)
      .def_rw("vendor", &Record::vendor)
      .def_rw("model", &Record::model);
  m.def("record_cpuid", &fastlstm::record_cpuid);
  m.def("usable_features", &fastlstm::usable_features, "record"_a);
  m.def("choose_isa", &fastlstm::choose_isa, "record"_a);
  m.def("peak_gflops", &peak_gflops, "isa"_a, "threads"_a, "seconds"_a = 0.2);
  m.def("keep_freed_memory", &fastlstm::keep_freed_memory);
  m.def("block_tensor", &block_tensor, "bytes"_a);
  m.def("copy_gb_s", &copy_gb_s, "threads"_a, "bytes_per_thread"_a, "rounds"_a = 5);
  fastlstm::bind_lstm(m);
  fastlstm::bind_decode(m);
  fastlstm::bind_windows(m);
}
