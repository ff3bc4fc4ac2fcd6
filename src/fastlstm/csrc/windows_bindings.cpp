// Windows and names of a table in Python: addresses come in as integers from forecast/data/, whose
// window_index.py, window_loader.py and names.py know the sizes and keep the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "job_queue.h"
#include "memory.h"
#include "text_keys.h"
#include "windows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fastlstm {
namespace {

// What a copy of windows needs, apart from which.
struct Source {
  WindowIndex index;
  TableView table;
  int64_t length;
  Groups groups;

  Source(Address first_rows, Address ends, int64_t num_segments, int64_t stride, Address values,
         int cell, int64_t num_columns, Address scale, Address offset, int64_t length,
         Address group_ends, int64_t num_groups, uint64_t seed)
      : index{pointer<const int64_t>(first_rows), pointer<const int64_t>(ends), num_segments,
              stride},
        table{pointer<const void>(values), static_cast<Cell>(cell), num_columns,
              pointer<const float>(scale), pointer<const float>(offset)},
        length(length),
        groups{pointer<const int64_t>(group_ends), num_groups, seed} {
    if (cell < 0 || cell > 2) throw nb::value_error("unknown kind of cell");
  }

  void locate(std::optional<uint64_t> key, int64_t epoch, const int64_t* numbers, int64_t count,
              int64_t* rows, int64_t* segments) const {
    std::optional<Permutation> order;
    if (key) order.emplace(static_cast<uint64_t>(index.ends[index.num_segments - 1]), *key);
    locate_windows(index, order ? &*order : nullptr, groups, epoch, numbers, count, rows, segments);
  }
};

}  // namespace

void bind_windows(nb::module_& m) {
  nb::class_<Source>(m, "WindowSource")
      .def(nb::init<Address, Address, int64_t, int64_t, Address, int, int64_t, Address, Address,
                    int64_t, Address, int64_t, uint64_t>(),
           "first_rows"_a, "ends"_a, "num_segments"_a, "stride"_a, "values"_a, "cell"_a,
           "num_columns"_a, "scale"_a, "offset"_a, "length"_a, "group_ends"_a, "num_groups"_a,
           "seed"_a)
      .def(
          "locate",
          [](const Source& source, std::optional<uint64_t> key, int64_t epoch, Address numbers,
             int64_t count, Address rows, Address segments) {
            nb::gil_scoped_release release;
            source.locate(key, epoch, pointer<const int64_t>(numbers), count,
                          pointer<int64_t>(rows), pointer<int64_t>(segments));
          },
          "key"_a.none(), "epoch"_a, "numbers"_a, "count"_a, "rows"_a, "segments"_a)
      .def(
          "gather",
          [](const Source& source, Address rows, int64_t count, Address out) {
            nb::gil_scoped_release release;
            gather_windows(source.table, pointer<const int64_t>(rows), count, source.length,
                           pointer<float>(out));
          },
          "rows"_a, "count"_a, "out"_a);
  nb::class_<JobQueue>(m, "JobQueue")
      .def(nb::init<>())
      .def(
          "submit",
          [](JobQueue& queue, const Source& source, std::optional<uint64_t> key, int64_t epoch,
             Address numbers, int64_t count, Address rows, Address segments, Address out) {
            return queue.submit([source, key, epoch, numbers, count, rows, segments, out] {
              auto* where = pointer<int64_t>(rows);
              source.locate(key, epoch, pointer<const int64_t>(numbers), count, where,
                            pointer<int64_t>(segments));
              gather_windows(source.table, where, count, source.length, pointer<float>(out));
            });
          },
          "source"_a, "key"_a.none(), "epoch"_a, "numbers"_a, "count"_a, "rows"_a, "segments"_a,
          "out"_a)
      .def("wait", &JobQueue::wait, "number"_a, "timeout_s"_a,
           nb::call_guard<nb::gil_scoped_release>());
  nb::class_<TextKeys>(m, "TextKeys")
      .def(nb::init<uint64_t, uint64_t>(), "k0"_a, "k1"_a)
      .def(
          "find",
          [](TextKeys& seen, Address offsets, Address data, int64_t count, Address keys) {
            nb::gil_scoped_release release;
            return seen.find(pointer<const int64_t>(offsets), pointer<const char>(data), count,
                             pointer<int64_t>(keys));
          },
          "offsets"_a, "data"_a, "count"_a, "keys"_a);
}

}  // namespace fastlstm
