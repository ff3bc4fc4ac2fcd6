// A whole sequence backward: the time loop, then the gradients of the weights.
#pragma once

#include "cpu/weight_gradient.h"

namespace fastlstm::FASTLSTM_ISA {

// Scratch of one backward call; `dc` and `carry` belong to `lanes`, those of one thread or of all,
// as in forward. With a null base only `bytes` counts.
template <typename Format>
struct BackwardScratch {
  using Element = typename Format::Element;

  BackwardScratch(const BackwardArgs& g, const Sizes<Format>& n, Range lanes, int64_t thread) {
    steps = chunk_steps(g.T, g.B);
    Carver carver(g.workspace);
    const bool has_tokens = g.input.tokens != nullptr;
    const int64_t table = has_tokens ? g.input.num_rows * n.gates : 0;
    first = carver.take<Element>(g.B * g.H);
    d_table = {carver.take<float>(table), g.input.num_rows, n.units};
    // Where a token occurs often, for an eighth of the gates' memory.
    is_compensated = Format::kPair == 1 && 8 * g.input.num_rows <= g.T * g.B;
    lost = {carver.take<float>(is_compensated ? table : 0), g.input.num_rows, n.units};
    d_table_elements = {carver.take<Element>(table), g.input.num_rows, n.units};
    width = round_up(g.H, kLanes) + round_up(g.I, kLanes) + kLanes;
    gradient = carver.take<char>(GradientScratch<Format>::bytes(width, n, g.threads));
    items = carver.take<char>(Items::bytes(g.threads));
    const int64_t num_lanes = lanes.end - lanes.begin, of_lane = round_up(n.hidden, kLine);
    bytes = carver.bytes() + 2 * g.B * of_lane * 4 + g.threads * kPage;
    carver.take<char>(2 * lanes.begin * of_lane * 4 + thread * kPage);
    dc = {carver.take<float>(num_lanes * of_lane) - lanes.begin * kLanes, num_lanes};
    carry = {carver.take<float>(num_lanes * of_lane) - lanes.begin * kLanes, num_lanes};
  }

  int64_t steps;              // whose dx is formed at once
  Cells dc;                   // gradient of the cells before the step
  Cells carry;                // dh that passes a step where its lane does nothing
  Element* first;             // [B][H]: h0 in memory format
  GateMatrix<float> d_table;  // gradient of the projected embedding
  GateMatrix<float> lost;     // what its sums lost to rounding
  bool is_compensated;
  GateMatrix<Element> d_table_elements;  // the same in memory format
  int64_t width;  // of the state, the input and a one: the left operands of the weights' gradients
  char *gradient, *items;
  int64_t bytes;
};

template <typename Format>
void start_backward(const BackwardArgs& g, const BackwardScratch<Format>& s, const Share& my) {
  for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
    for (int64_t k = my.units.begin * kLanes; k < my.units.end * kLanes; k += kLanes) {
      const int64_t count = g.H - k;
      const auto read = [&](const float* p) {
        return p == nullptr ? Vec{} : load_part<Float32>(p + b * g.H + k, count);
      };
      Float32::store(s.dc.at(k, b), read(g.dc_last));
      Float32::store(s.carry.at(k, b), read(g.dh_last));
      store_part<Format>(s.first + b * g.H + k, read(g.h0), count);
    }
  }
}

// Rows of gates times w_hh or w_ih, packed or as torch has them; epilogue as in gemm.h.
template <typename Format, typename Engine, typename Epilogue>
FASTLSTM_INLINE void multiply_gates(const BackwardArgs& g, const Sizes<Format>& n,
                                    const BackwardWeights<Format>& w, bool is_recurrent,
                                    Engine& engine, const Left<typename Format::Element>& gates,
                                    Range rows, Strips strips, Epilogue&& epilogue) {
  if constexpr (Engine::kHasGateBlock) {
    if (g.weights == nullptr) {
      return multiply_gates<Engine>(gates, rows, is_recurrent ? g.w_hh : g.w_ih,
                                    is_recurrent ? g.H : g.I, g.H, strips, epilogue);
    }
  }
  multiply(engine, gates, rows, is_recurrent ? w.recurrent : w.input, w.stride, strips,
           n.gate_inner, epilogue);
}

// One step of some units and lanes: dh from the next step's gate gradients, then this step's.
template <typename Format, typename Engine, typename Cell>
void backward_step(const BackwardArgs& g, const Sizes<Format>& n, const BackwardWeights<Format>& w,
                   const BackwardScratch<Format>& s, const Share& my, Engine& engine, int64_t t,
                   const Cell& rule) {
  using Element = typename Format::Element;
  const GateMatrix<Element> gates{static_cast<Element*>(g.gates), s.steps * g.B, n.units};
  const float* const cells = g.cells + t * g.B * n.hidden;
  const float* const new_cells = cells + g.B * n.hidden;
  const Element* const dy =
      g.dy == nullptr ? nullptr : static_cast<const Element*>(g.dy) + g.row(t) * g.y_stride;
  const bool has_lengths = g.begins != nullptr || g.ends != nullptr;
  const bool has_zoneout = rule.has_zoneout(), is_last = t == g.T - 1;
  // Not inlined: three places call it.
  const auto cell = [&](int64_t b, int64_t strip, int strips,
                        const float* sums) __attribute__((noinline)) {
    for (int q = 0; q < strips; ++q) {
      const int64_t k = (strip + q) * kLanes;
      const int64_t count = g.H - k;
      Vec dh{};
      if (!is_last) {
        dh = Float32::load(sums + q * kLanes);
        if (g.recurrent_mask != nullptr) {
          dh *= load_part<Float32>(g.recurrent_mask + b * g.H + k, count);
        }
      }
      // Between its begin and its last step a lane hands nothing past a step.
      const bool active = !has_lengths || is_active(g.begins, g.ends, t, b);
      const bool is_first = is_last || (g.ends != nullptr && t + 1 == g.ends[b]);
      const bool takes = has_zoneout || is_first || !active;
      if (takes) dh += Float32::load(s.carry.at(k, b));
      Element* const gate = gates.at(t / s.steps, strip + q, t % s.steps * g.B + b);
      if (t > 0) {  // what the next step will read comes from memory
        const int64_t before = t - 1;
        const Element* const ahead =
            gates.at(before / s.steps, strip + q, before % s.steps * g.B + b);
        for (int64_t line = 0; line < 4 * kLanes; line += 64 / int64_t{sizeof(Element)}) {
          __builtin_prefetch(ahead + line, 1, 2);
        }
        __builtin_prefetch(cells - g.B * n.hidden + k * g.B + b * kLanes, 0, 2);
        if (dy != nullptr) {
          const int64_t ahead_of_dy = g.row(before) - g.row(t) + b;
          __builtin_prefetch(dy + ahead_of_dy * g.y_stride + k, 0, 2);
        }
      }
      if (has_lengths) {
        if (takes) Float32::store(s.carry.at(k, b), active ? Vec{} : dh);
        if (!active) {
          for (int j = 0; j < 4; ++j) Format::store(gate + j * kLanes, Vec{});
          continue;
        }
      }
      if (dy != nullptr) dh += load_part<Format>(dy + b * g.y_stride + k, count);
      const Vec i = Format::load(gate), f = Format::load(gate + kLanes);
      const Vec z = Format::load(gate + 2 * kLanes), o = Format::load(gate + 3 * kLanes);
      const Vec old = Float32::load(cells + k * g.B + b * kLanes);
      float* const at = s.dc.at(k, b);
      Vec c = Float32::load(new_cells + k * g.B + b * kLanes);
      Vec dc = Float32::load(at), dc_kept{};
      if (rule.has_zoneout()) {
        const Keep keep = rule.keep(t * g.B + b, k);
        c = new_cell(rule, i, f, z, old);
        dc_kept = keep.c * dc;
        dc -= dc_kept;
        Float32::store(s.carry.at(k, b), keep.h * dh);
        dh -= keep.h * dh;
      }
      const Vec squashed = rule.squash(c);
      dc += dh * o * rule.squash_slope(squashed);
      const CellGradients d = new_cell_backward(rule, dc, i, f, z, old);
      Float32::store(at, rule.has_zoneout() ? d.old + dc_kept : d.old);
      store_gates<Format>({d.i, d.f, d.z, dh * squashed * rule.gate_slope(o)}, n.width(strip + q),
                          gate);
    }
  };
  if (is_last) {
    for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
      for (int64_t u = my.units.begin; u < my.units.end; ++u) cell(b, u, 1, nullptr);
    }
    return;
  }
  const Left<Element> next = gates.left((t + 1) / s.steps, (t + 1) % s.steps * g.B);
  multiply_gates(g, n, w, true, engine, next, my.lanes, {my.units.begin, my.units.end, t % 2 != 0},
                 cell);
}

// dh0 = gate gradients of the first step * w_hh; dc0 is what the loop left. Where they are wanted.
template <typename Format, typename Engine>
void finish_backward(const BackwardArgs& g, const Sizes<Format>& n,
                     const BackwardWeights<Format>& w, const BackwardScratch<Format>& s,
                     const Share& my, Engine& engine, bool has_carry) {
  using Element = typename Format::Element;
  const GateMatrix<Element> gates{static_cast<Element*>(g.gates), s.steps * g.B, n.units};
  for (int64_t b = my.lanes.begin; b < my.lanes.end && g.dc0 != nullptr; ++b) {
    for (int64_t k = my.units.begin * kLanes; k < my.units.end * kLanes; k += kLanes) {
      const Vec dc = Float32::load(s.dc.at(k, b));
      store_part<Float32>(g.dc0 + b * g.H + k, dc, g.H - k);
    }
  }
  if (g.dh0 == nullptr) return;
  multiply_gates(g, n, w, true, engine, gates.left(0, 0), my.lanes, {my.units.begin, my.units.end},
                 [&](int64_t b, int64_t strip, int strips, const float* sums) {
                   for (int q = 0; q < strips; ++q) {
                     const int64_t k = (strip + q) * kLanes, count = g.H - k;
                     Vec dh = Float32::load(sums + q * kLanes);
                     if (g.recurrent_mask != nullptr) {
                       dh *= load_part<Float32>(g.recurrent_mask + b * g.H + k, count);
                     }
                     if (has_carry) dh += Float32::load(s.carry.at(k, b));
                     store_part<Float32>(g.dh0 + b * g.H + k, dh, count);
                   }
                 });
}

// out (rows, I) = gate gradients * w_ih for some rows and strips, stored as in memory.
template <typename Format, typename Out, typename Engine>
void input_gradient(const BackwardArgs& g, const Sizes<Format>& n, const BackwardWeights<Format>& w,
                    Engine& engine, const Left<typename Format::Element>& gates, Range rows,
                    Range strips, const ChunkOrder& order, typename Out::Element* out) {
  multiply_gates(g, n, w, false, engine, gates, rows, {strips.begin, strips.end},
                 [&](int64_t row, int64_t strip, int num, const float* sums) {
                   auto* const to = out + order(row) * g.I;
                   for (int q = 0; q < num; ++q) {
                     const int64_t k = (strip + q) * kLanes;
                     store_part<Out>(to + k, Float32::load(sums + q * kLanes), g.I - k);
                   }
                 });
}

// Adds gate gradients of some rows to the table row of their token, for one group. A frequent token
// has thousands of rows: plain sums would round off the last three bits (Kahan 1965).
template <typename Format>
void sum_by_token(const BackwardArgs& g, const BackwardScratch<Format>& s,
                  const GateMatrix<const typename Format::Element>& gates, const RowChunk& chunk,
                  int64_t group) {
  constexpr int64_t kGroup = 4 * kLanes;
  float* const sums = s.d_table.at(0, group, 0);
  float* const all_lost = s.is_compensated ? s.lost.at(0, group, 0) : nullptr;
  for (int64_t r = 0; r < chunk.count; ++r) {
    const RowChunk::Row& row = chunk.rows[r];
    const auto* const gate = gates.at(0, group, 0) + row.gate;
    const int64_t at = g.input.tokens[g.row(row.step) + row.lane] * kGroup;
    for (int64_t k = at; k < at + kGroup; k += kLanes) {
      const Vec old = Float32::load(sums + k);
      Vec v = Format::load(gate + k - at);
      if (all_lost != nullptr) {
        v -= Float32::load(all_lost + k);
        Float32::store(all_lost + k, (old + v - old) - v);
      }
      Float32::store(sums + k, old + v);
    }
  }
}

template <typename Format>
void sum_by_token(const BackwardArgs& g, const BackwardScratch<Format>& s,
                  const GateMatrix<const typename Format::Element>& gates, Range units) {
  RowChunk chunk;
  while (chunk.next({g.T * g.B, g.B}, gates)) {
    for (int64_t u = units.begin; u < units.end; ++u) {
      sum_by_token(g, s, gates, chunk, u);
    }
  }
}

// What weight_gradient is to do beside, if anything: one type, so that it is compiled once.
template <typename Format>
struct SumsByToken {
  void operator()(const RowChunk& chunk, int64_t group) const {
    if (is_wanted) sum_by_token(g, s, gates, chunk, group);
  }
  const BackwardArgs& g;
  const BackwardScratch<Format>& s;
  const GateMatrix<const typename Format::Element>& gates;
  bool is_wanted;
};

template <typename Format>
void clear_table(const BackwardScratch<Format>& s, Range units) {
  const int64_t values = s.d_table.rows * s.d_table.kGroup;
  for (int64_t u = units.begin; u < units.end; ++u) {
    for (int64_t k = 0; k < values; k += kLanes) {
      Float32::store(s.d_table.at(0, u, 0) + k, Vec{});
      if (s.is_compensated) Float32::store(s.lost.at(0, u, 0) + k, Vec{});
    }
  }
}

// The sums by token in memory format.
template <typename Format>
void round_table(const BackwardScratch<Format>& s, Range units) {
  const int64_t values = s.d_table.rows * s.d_table.kGroup;
  for (int64_t u = units.begin; u < units.end; ++u) {
    const float* const sums = s.d_table.at(0, u, 0);
    auto* const out = s.d_table_elements.at(0, u, 0);
    for (int64_t k = 0; k < values; k += kLanes) Format::store(out + k, Float32::load(sums + k));
  }
}

// dw_hh, and with tokens the gradient of the projected embedding, from the same pass over gates.
template <typename Format, typename Engine>
void recurrent_gradient(const BackwardArgs& g, const Sizes<Format>& n,
                        const BackwardScratch<Format>& s, Factor<Format>* factors, int count,
                        Items& items, Engine& engine, Member me) {
  using Element = typename Format::Element;
  const GateMatrix<const Element> gates{static_cast<const Element*>(g.gates), s.steps * g.B,
                                        n.units};
  const bool has_tokens = g.input.tokens != nullptr;
  const Range units = part_of({0, n.units}, me.index, me.count);
  if (has_tokens) clear_table(s, units);
  const SumsByToken<Format> beside{g, s, gates, has_tokens};
  if (count > 0) {
    weight_gradient(factors, count, 0, s.width, {g.T * g.B, g.B}, gates, n, s.gradient, items,
                    engine, me, beside);
  } else if (has_tokens) {
    sum_by_token(g, s, gates, units);
  }
  if (has_tokens) round_table(s, units);
}

// What the gradient of the projected embedding gives: those of the embedding and of `factors`.
template <typename Format, typename Engine>
void table_gradients(const BackwardArgs& g, const Sizes<Format>& n,
                     const BackwardWeights<Format>& w, const BackwardScratch<Format>& s,
                     const Factor<Format>* factors, int count, Items& items, Engine& engine,
                     Member me) {
  const int64_t num_rows = g.input.num_rows;
  me.barrier->wait(me.count);  // the table is whole, and the scratch can be used anew
  if (g.dx != nullptr) {
    const Range rows = part_of({0, num_rows}, me.index, me.count, Engine::kRows);
    input_gradient<Format, Float32>(g, n, w, engine, s.d_table_elements.left(0, 0), rows,
                                    {0, n.input_strips}, ChunkOrder{}, static_cast<float*>(g.dx));
  }
  if (count == 0) return;
  const GateMatrix<const typename Format::Element> table{s.d_table_elements.gates, num_rows,
                                                         n.units};
  weight_gradient(factors, count, round_up(g.H, kLanes), s.width, {num_rows, num_rows}, table, n,
                  s.gradient, items, engine, me, SumsByToken<Format>{g, s, table, false});
}

// The state: row r is y of the step before.
template <typename Format>
Factor<Format> recurrent_factor(const BackwardArgs& g, const BackwardScratch<Format>& s) {
  const auto* const y = static_cast<const typename Format::Element*>(g.y);
  const int64_t step = (g.is_reversed ? -g.B : g.B) * g.y_stride;
  return {g.H,      g.dw_hh,    y + g.row(0) * g.y_stride - step,
          step,     g.y_stride, s.first,
          g.begins, nullptr,    g.recurrent_mask,
          false};
}

template <typename Format>
Factor<Format> input_factor(const BackwardArgs& g) {
  const bool is_dense = g.input.tokens == nullptr;
  const bool has_padding = is_dense && (g.begins != nullptr || g.ends != nullptr);
  const auto* const rows = static_cast<const typename Format::Element*>(g.input.rows);
  return {g.I,
          g.dw_ih,
          rows + (is_dense ? g.row(0) : 0) * g.input.stride,
          (g.is_reversed ? -g.B : g.B) * g.input.stride,
          g.input.stride,
          nullptr,
          g.begins,
          g.ends,
          nullptr,
          has_padding};
}

template <typename Format, typename Engine>
void all_weight_gradients(const BackwardArgs& g, const Sizes<Format>& n,
                          const BackwardWeights<Format>& w, const BackwardScratch<Format>& s,
                          Items& items, Engine& engine, Member me) {
  using F = Factor<Format>;
  const F recurrent = recurrent_factor(g, s);
  const F dense = input_factor<Format>(g);
  const F bias{1, g.db, nullptr, 0, 0, nullptr, nullptr, nullptr, nullptr, false};
  F first[3], second[2];
  int num_first = 0, num_second = 0;
  if (g.dw_hh != nullptr) first[num_first++] = recurrent;
  const bool has_tokens = g.input.tokens != nullptr;
  if (g.dw_ih != nullptr) (has_tokens ? second[num_second++] : first[num_first++]) = dense;
  if (g.db != nullptr) (has_tokens ? second[num_second++] : first[num_first++]) = bias;
  recurrent_gradient(g, n, s, first, num_first, items, engine, me);
  if (has_tokens) table_gradients(g, n, w, s, second, num_second, items, engine, me);
}

// dx of the chunk that begins at step t: the part of one thread.
template <typename Format, typename Engine>
void chunk_input_gradient(const BackwardArgs& g, const Sizes<Format>& n,
                          const BackwardWeights<Format>& w, const BackwardScratch<Format>& s,
                          const Blocks& blocks, Items& items, Engine& engine, int64_t t,
                          const GateMatrix<typename Format::Element>& gates) {
  const int64_t steps = min_of(s.steps, g.T - t);
  const auto order = ChunkOrder::of(g, t, steps);
  auto* const dx = static_cast<typename Format::Element*>(g.dx) + order.first * g.I;
  const auto chunk = gates.left(t / s.steps, 0);
  items.each(blocks, t % 2 != 0, [&](const Share& item) __attribute__((noinline)) {
    const Range rows{item.lanes.begin, min_of(item.lanes.end, steps * g.B)};
    if (rows.begin < rows.end) {
      input_gradient<Format, Format>(g, n, w, engine, chunk, rows, item.units, order, dx);
    }
  });
}

// The same for a thread that owns lanes.
template <typename Format, typename Engine>
void chunk_input_gradient(const BackwardArgs& g, const Sizes<Format>& n,
                          const BackwardWeights<Format>& w, const BackwardScratch<Format>& s,
                          Range lanes, Engine& engine, int64_t t,
                          const GateMatrix<typename Format::Element>& gates) {
  const int64_t steps = min_of(s.steps, g.T - t);
  const auto order = ChunkOrder::of(g, t, steps);
  auto* const dx = static_cast<typename Format::Element*>(g.dx) + order.first * g.I;
  for (int64_t k = 0; k < steps; ++k) {
    const Range rows{k * g.B + lanes.begin, k * g.B + lanes.end};
    input_gradient<Format, Format>(g, n, w, engine, gates.left(t / s.steps, 0), rows,
                                   {0, n.input_strips}, order, dx);
  }
}

template <typename Format, typename Engine, typename Cell>
void backward_loop(const BackwardArgs& g, Member me) {
  using Element = typename Format::Element;
  FlushDenormals flush;
  Engine engine;
  const Sizes<Format> n(g.I, g.H);
  const BackwardWeights<Format> w(g.weights, n);
  const bool is_alone =
      splits_lanes(g.B, n.gates * n.hidden * int64_t{sizeof(Element)}, me.count, false);
  const Share my = share_of(me, n.units, g.B, is_alone);
  const BackwardScratch<Format> s(g, n, my.lanes, is_alone ? me.index : 0);
  Items items(s.items, me);
  const auto blocks_of = [&](int64_t units, int64_t rows) {
    return Blocks::of<Engine>(units, rows, me.count, kStrips, 2 * kLanes * n.gate_inner);
  };
  const Blocks blocks = blocks_of(n.units, g.B),
               dx_blocks = blocks_of(n.input_strips, s.steps * g.B);
  const Cell cell(g.cell_call);
  const GateMatrix<Element> gates{static_cast<Element*>(g.gates), s.steps * g.B, n.units};
  const bool has_dx = g.input.tokens == nullptr && g.dx != nullptr;
  start_backward(g, s, my);
  for (int64_t t = g.T - 1; t >= 0; --t) {
    const auto step = [&](const Share& item) __attribute__((noinline)) {
      backward_step(g, n, w, s, item, engine, t, cell);
    };
    if (is_alone) {
      step(my);
      if (has_dx && t % s.steps == 0) {
        chunk_input_gradient(g, n, w, s, my.lanes, engine, t, gates);
      }
      continue;
    }
    if (t == g.T - 1) {
      step(my);
    } else {
      items.each(blocks, t % 2 != 0, step);
    }
    me.barrier->wait(me.count);
    if (has_dx && t % s.steps == 0) {
      chunk_input_gradient(g, n, w, s, dx_blocks, items, engine, t, gates);
    }
  }
  const bool has_carry = g.begins != nullptr || g.ends != nullptr || cell.has_zoneout();
  finish_backward(g, n, w, s, my, engine, has_carry);
  me.barrier->wait(me.count);
  all_weight_gradients(g, n, w, s, items, engine, me);
}

}  // namespace fastlstm::FASTLSTM_ISA
