// A whole sequence forward: the time loop inside one team of threads.
//
// A thread begins every step with the same units, so that its part of the recurrent weights stays
// in its own cache, and meets the others once per step. Where the weights are small or the lanes
// many, it owns lanes instead and meets nobody.
#pragma once

#include "cpu/cell.h"
#include "cpu/items.h"
#include "cpu/pack.h"
#include "cpu/threads.h"

namespace fastlstm::FASTLSTM_ISA {

// A vector of floats for each group of units and each of some lanes.
struct Cells {
  FASTLSTM_INLINE float* at(int64_t k, int64_t b) const { return first + k * lanes + b * kLanes; }

  float* first;
  int64_t lanes;
};

// Scratch of one forward call. States, cells and projected input belong to `lanes`, those of one
// thread or of all. With a null base only `bytes` counts.
//
// A core fetches lines ahead of what it reads, up to the end of a page. Where the next line is
// another thread's, it travels from core to core at every step: so the lanes of a thread lie apart.
template <typename Format>
struct ForwardScratch {
  using Element = typename Format::Element;
  ForwardScratch(const ForwardArgs& g, const Sizes<Format>& n, Range lanes, int64_t thread)
      : num_lanes(lanes.end - lanes.begin) {
    // One more cache line than needed: rows at a power of two would share the same cache sets.
    state_stride = round_up(n.state_inner * int64_t{sizeof(Element)}, 64) / sizeof(Element) +
                   64 / sizeof(Element);
    steps = chunk_steps(g.T, g.B);
    const bool has_table = g.input.tokens != nullptr;
    Carver carver(g.workspace);
    items = carver.take<char>(Items::bytes(g.threads));
    if (has_table) projected.gates = carver.take<float>(g.input.num_rows * n.gates);
    const int64_t of_state = 2 * state_stride, of_input = has_table ? 0 : steps * n.gates;
    const int64_t of_cell = round_up(n.hidden, kLine);
    const int64_t of_lane = of_state * int64_t{sizeof(Element)} + (of_input + of_cell) * 4;
    bytes = carver.bytes() + g.B * of_lane + g.threads * kPage;
    carver.take<char>(lanes.begin * of_lane + thread * kPage);
    states = carver.take<Element>(num_lanes * of_state) - lanes.begin * state_stride;
    cells = {carver.take<float>(num_lanes * of_cell) - lanes.begin * kLanes, num_lanes};
    if (has_table) {
      projected = {projected.gates, g.input.num_rows, n.units};
    } else {
      float* const inputs = carver.take<float>(num_lanes * of_input);
      projected = {inputs - lanes.begin * projected.kGroup, steps * num_lanes, n.units};
    }
  }

  Element* state(int64_t step) const { return states + (step & 1) * num_lanes * state_stride; }

  int64_t num_lanes;     // of `lanes`
  int64_t state_stride;  // elements
  int64_t steps;         // of dense input that are projected at once
  Element* states;       // [2][lane][state_stride]: h_{t-1} as the recurrence sees it, and h_t
  GateMatrix<float> projected;  // input times w_ih, plus bias: of a chunk, or of every token
  Cells cells;                  // c_{t-1}
  char* items;
  int64_t bytes;
};

template <typename Format>
bool splits_lanes(int64_t B, int64_t H, int threads, bool has_norm) {
  const Sizes<Format> n(1, H);
  const int64_t bytes = n.gates * n.state_inner * int64_t{sizeof(typename Format::Element)};
  return splits_lanes(B, bytes, threads, has_norm);
}

// A row of the chunk of `steps` steps that begins at step t, counted in memory, by its number in
// the order of the steps, and the reverse: the same function.
struct ChunkOrder {
  template <typename Args>
  static ChunkOrder of(const Args& g, int64_t t, int64_t steps) {
    const int64_t first = g.is_reversed ? g.row(t + steps - 1) : g.row(t);
    return {first, static_cast<uint32_t>(g.B), static_cast<uint32_t>(steps), g.is_reversed};
  }

  FASTLSTM_INLINE int64_t operator()(int64_t row) const {
    if (!is_reversed) return shift + row;
    const auto at = static_cast<uint32_t>(row);
    return (steps - 1 - at / lanes) * lanes + at % lanes;
  }

  int64_t first;  // row of the chunk's begin in memory
  uint32_t lanes, steps;
  bool is_reversed;
  int64_t shift = 0;  // added to the number of a row
};

FASTLSTM_INLINE bool is_active(const int64_t* begins, const int64_t* ends, int64_t t, int64_t b) {
  return (begins == nullptr || t >= begins[b]) && (ends == nullptr || t < ends[b]);
}

// Brings h0 and c0 into the scratch, for the lanes and units of one thread.
template <typename Format>
void start_forward(const ForwardArgs& g, const Sizes<Format>& n, const ForwardScratch<Format>& s,
                   const Share& my) {
  using Element = typename Format::Element;
  const int64_t from = my.units.begin * kLanes;
  const int64_t to = my.units.end * kLanes;
  for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
    for (int64_t k = from; k < to; k += kLanes) {
      const int64_t count = g.H - k;
      Vec h = g.h0 == nullptr ? Vec{} : load_part<Float32>(g.h0 + b * g.H + k, count);
      if (g.recurrent_mask != nullptr) {
        h *= load_part<Float32>(g.recurrent_mask + b * g.H + k, count);
      }
      const Vec c = g.c0 == nullptr ? Vec{} : load_part<Float32>(g.c0 + b * g.H + k, count);
      store_part<Format>(s.state(0) + b * s.state_stride + k, h, n.state_inner - k);
      Float32::store(s.cells.at(k, b), c);
      if (g.cells != nullptr) Float32::stream(Cells{g.cells, g.B}.at(k, b), c);
    }
    if (to == n.hidden) {  // the padding of both states is this thread's too
      for (int64_t t = 0; t < 2; ++t) {
        Element* const row = s.state(t) + b * s.state_stride;
        for (int64_t k = n.hidden; k < n.state_inner; ++k) row[k] = 0;
      }
    }
  }
}

// Lane b's output before step t, as the layer shows it (the recurrence may see it masked).
template <typename Format>
FASTLSTM_INLINE Vec output_before(const ForwardArgs& g, int64_t t, int64_t b, int64_t k) {
  const int64_t count = g.H - k;
  if (t > (g.begins == nullptr ? 0 : g.begins[b])) {
    const auto* const y = static_cast<const typename Format::Element*>(g.y);
    return load_part<Format>(y + (g.row(t - 1) + b) * g.y_stride + k, count);
  }
  return g.h0 == nullptr ? Vec{} : load_part<Float32>(g.h0 + b * g.H + k, count);
}

// One step of some units and lanes: gates = projected input + state * w_hh, then the cell.
template <typename Format, typename Engine, typename Cell>
void forward_step(const ForwardArgs& g, const Sizes<Format>& n, const ForwardWeights<Format>& w,
                  const ForwardScratch<Format>& s, const Share& my, Engine& engine, int64_t t,
                  const Cell& cell, const Cells& kept_cells) {
  using Element = typename Format::Element;
  const Element* const state = s.state(t);
  Element* const new_state = s.state(t + 1);
  Element* const y = static_cast<Element*>(g.y) + g.row(t) * g.y_stride;
  const GateMatrix<Element> gates{static_cast<Element*>(g.gates), s.steps * g.B, n.units};
  const int64_t first_row = t % s.steps * s.num_lanes;
  const int64_t* const tokens = g.input.tokens == nullptr ? nullptr : g.input.tokens + g.row(t);
  const bool has_lengths = g.begins != nullptr || g.ends != nullptr;
  Element* const all_kept =
      g.gates == nullptr ? nullptr : gates.at(t / s.steps, my.units.begin, t % s.steps * g.B);
  const auto finish = [&](int64_t b, int64_t k, Vec o, Vec c, Vec old) {
    const int64_t count = g.H - k;
    Vec h = o * cell.squash(c);
    if (cell.has_zoneout()) {
      const Keep keep = cell.keep(t * g.B + b, k);
      c = mix(keep.c, old, c);
      h = mix(keep.h, output_before<Format>(g, t, b, k), h);
    }
    Vec out = h;
    if (has_lengths && !is_active(g.begins, g.ends, t, b)) {
      c = old;
      out = Vec{};
      Format::store(new_state + b * s.state_stride + k,
                    Format::load(state + b * s.state_stride + k));
    } else {
      if (g.recurrent_mask != nullptr) {
        h *= load_part<Float32>(g.recurrent_mask + b * g.H + k, count);
      }
      Format::store(new_state + b * s.state_stride + k, h);
    }
    Float32::store(s.cells.at(k, b), c);
    if (kept_cells.first != nullptr) Float32::stream(kept_cells.at(k, b), c);
    store_part<Format>(y + b * g.y_stride + k, out, count);
  };
  // A row is finished while the gates of the next one are formed: a core waits for neither.
  struct {
    int64_t lane = -1, unit;
    Vec o, c, old;
  } last;
  const GateSums gate_sums(n);
  multiply(engine, plain(state, s.state_stride, n.state_inner), my.lanes, w.recurrent,
           w.recurrent_stride, {n.strips_of(my.units), t % 2 != 0}, n.state_inner,
           [&](int64_t b, int64_t strip, int, const float* sums) {
             const int64_t u = strip / 4, k = u * kLanes;
             const float* const in = s.projected.at(0, u, tokens ? tokens[b] : first_row + b);
             Vec gate[4];
             gate_sums.load(sums, u, gate);
             for (int q = 0; q < 4; ++q) gate[q] += Float32::load(in + q * kLanes);
             const Vec i = cell.gate(gate[0]), f = cell.gate(gate[1]), z = cell.squash(gate[2]);
             const Vec o = cell.gate(gate[3]);
             const Vec old = Float32::load(s.cells.at(k, b));
             if (all_kept != nullptr) {
               Element* const kept =
                   all_kept + ((u - my.units.begin) * gates.rows + b) * gates.kGroup;
               Format::stream(kept, i);
               Format::stream(kept + kLanes, f);
               Format::stream(kept + 2 * kLanes, z);
               Format::stream(kept + 3 * kLanes, o);
             }
             if (last.lane >= 0) finish(last.lane, last.unit, last.o, last.c, last.old);
             last = {b, k, o, new_cell(cell, i, f, z, old), old};
           });
  if (last.lane >= 0) finish(last.lane, last.unit, last.o, last.c, last.old);
}

// A type and not a lambda, so that project_input is compiled once for all cells.
template <typename Format>
struct AddBias {
  FASTLSTM_INLINE void operator()(int64_t, int64_t u, Vec (&sum)[4]) const {
    for (int q = 0; q < 4; ++q) sum[q] += Float32::load(w.bias + (4 * u + q) * kLanes);
  }
  const ForwardWeights<Format>& w;
};

// Rows of the input times w_ih for the units of one thread, stored in the order of the steps;
// finish(row, group, sums) completes the four sums of a group before.
template <typename Format, typename Engine, typename Finish>
void project_input(const ForwardArgs& g, const Sizes<Format>& n, const ForwardWeights<Format>& w,
                   Engine& engine, Range rows, Range units, const void* input,
                   const ChunkOrder& order, const GateMatrix<float>& projected, Finish&& finish) {
  const auto* const elements = static_cast<const typename Format::Element*>(input);
  const GateSums gate_sums(n);
  multiply(engine, plain(elements, g.input.stride, n.input_inner), rows, w.input, w.input_stride,
           n.strips_of(units), n.input_inner,
           [&](int64_t row, int64_t strip, int, const float* sums) {
             const int64_t at = order(row);
             float* const out = projected.at(0, strip / 4, at);
             Vec sum[4];
             gate_sums.load(sums, strip / 4, sum);
             finish(at, strip / 4, sum);
             for (int q = 0; q < 4; ++q) Float32::store(out + q * kLanes, sum[q]);
           });
}

// The dense input of the chunk that begins at step t, for some units and lanes.
template <typename Format, typename Engine, typename Finish>
void project_chunk(const ForwardArgs& g, const Sizes<Format>& n, const ForwardWeights<Format>& w,
                   const ForwardScratch<Format>& s, const Share& my, Engine& engine, int64_t t,
                   Finish&& finish) {
  const int64_t steps = min_of(s.steps, g.T - t);
  const auto order = ChunkOrder::of(g, t, steps);
  const auto* const rows =
      static_cast<const typename Format::Element*>(g.input.rows) + order.first * g.input.stride;
  if (my.lanes.end - my.lanes.begin == g.B) {
    project_input(g, n, w, engine, {0, steps * g.B}, my.units, rows, order, s.projected, finish);
    return;
  }
  for (int64_t k = 0; k < steps; ++k) {
    const int64_t at = g.is_reversed ? steps - 1 - k : k;
    project_input(g, n, w, engine, my.lanes, my.units, rows + k * g.B * g.input.stride,
                  {0, 0, 0, false, at * s.num_lanes}, s.projected, finish);
  }
}

// The whole embedding: the part of one thread.
template <typename Format, typename Engine, typename Finish>
void project_table(const ForwardArgs& g, const Sizes<Format>& n, const ForwardWeights<Format>& w,
                   const ForwardScratch<Format>& s, Engine& engine, Member me, Finish&& finish) {
  const Range rows = part_of({0, g.input.num_rows}, me.index, me.count, Engine::kRows);
  project_input(g, n, w, engine, rows, {0, n.units}, g.input.rows, ChunkOrder{}, s.projected,
                finish);
}

// h_last and c_last of the lanes and units of one thread.
template <typename Format>
void finish_forward(const ForwardArgs& g, const Cells& cells, const Share& my) {
  using Element = typename Format::Element;
  const auto* const y = static_cast<const Element*>(g.y);
  for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
    const int64_t begin = g.begins == nullptr ? 0 : g.begins[b];
    const int64_t end = g.ends == nullptr ? g.T : g.ends[b];
    for (int64_t k = my.units.begin * kLanes; k < my.units.end * kLanes; k += kLanes) {
      const int64_t count = g.H - k;
      Vec h{};
      if (end > begin) {
        h = load_part<Format>(y + (g.row(end - 1) + b) * g.y_stride + k, count);
      } else if (g.h0 != nullptr) {
        h = load_part<Float32>(g.h0 + b * g.H + k, count);
      }
      store_part<Float32>(g.h_last + b * g.H + k, h, count);
      store_part<Float32>(g.c_last + b * g.H + k, Float32::load(cells.at(k, b)), count);
    }
  }
}

template <typename Format, typename Engine, typename Cell>
void forward_loop(const ForwardArgs& g, Member me) {
  FlushDenormals flush;
  Engine engine;
  const Sizes<Format> n(g.I, g.H);
  const ForwardWeights<Format> w(g.weights, n);
  const bool is_alone = splits_lanes<Format>(g.B, g.H, me.count, false);
  const Share my = share_of(me, n.units, g.B, is_alone);
  const ForwardScratch<Format> s(g, n, my.lanes, is_alone ? me.index : 0);
  Items items(s.items, me);
  const auto blocks =
      Blocks::of<Engine>(n.units, g.B, me.count, 1, 8 * kLanes * int64_t{n.state_inner});
  const Cell cell(g.cell_call);
  const bool is_dense = g.input.tokens == nullptr;
  const AddBias<Format> add_bias{w};
  Cells kept_cells{g.cells, g.B};
  start_forward(g, n, s, my);
  if (!is_dense) project_table(g, n, w, s, engine, me, add_bias);
  me.barrier->wait(me.count);
  for (int64_t t = 0; t < g.T; ++t) {
    if (g.cells != nullptr) kept_cells.first += g.B * n.hidden;
    const auto step = [&](const Share& item) __attribute__((noinline)) {
      if (is_dense && t % s.steps == 0) project_chunk(g, n, w, s, item, engine, t, add_bias);
      forward_step(g, n, w, s, item, engine, t, cell, kept_cells);
    };
    if (is_alone) {
      step(my);
    } else {
      items.each(blocks, t % 2 != 0, step);
      me.barrier->wait(me.count);
    }
  }
  finish_forward<Format>(g, s.cells, my);
  stream_fence();
}

}  // namespace fastlstm::FASTLSTM_ISA
