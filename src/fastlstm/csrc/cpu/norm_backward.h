// The backward pass with layer norm: a step in three parts, then the gradients of the weights.
#pragma once

#include <initializer_list>

#include "cpu/lstm_backward.h"
#include "cpu/norm_forward.h"

namespace fastlstm::FASTLSTM_ISA {

// Sums over rows of a parameter's gradients, in the order of the gates or of the units.
struct NormSums {
  float *gamma_ih, *gamma_hh, *bias;  // [group][gate][lane]
  float *gamma_c, *beta_c;            // [group][lane]
};

// Scratch of one backward call behind `base`: `means` are a thread's own; gradients and partial
// sums belong to `lanes`, as in forward. With a null base only `bytes` counts.
template <typename Format>
struct NormBackwardScratch {
  NormBackwardScratch(void* base, const BackwardArgs& g, const Sizes<Format>& n, Range lanes,
                      int64_t thread) {
    Carver carver(base);
    blocks = ceil_div(g.B, kLaneBlock);
    const int64_t of_gate = blocks * n.gates, of_unit = blocks * n.hidden;
    first = {carver.take<float>(of_gate), carver.take<float>(of_gate), carver.take<float>(of_gate),
             carver.take<float>(of_unit), carver.take<float>(of_unit)};
    hidden = n.hidden;
    stride = round_up(g.B, kLanes);
    const int64_t of_thread = 4 * stride + kPage / 4;
    means = carver.take<float>(g.threads * of_thread) + thread * of_thread;
    Carver before(nullptr), whole(nullptr);
    take(before, n, {0, lanes.begin});
    take(whole, n, {0, g.B});
    bytes = carver.bytes() + whole.bytes() + g.threads * kPage;
    carver.take<char>(before.bytes() + (lanes.begin > 0 ? thread * kPage : 0));
    take(carver, n, lanes);
  }

  // Sum k over the features of lane b, divided by their number.
  float mean(int k, int64_t b) const { return means[k * stride + b]; }

  template <int kSums>
  void form_means(const PartialSums<kSums>& partial, Range lanes, int64_t features) const {
    const float share = 1.0f / static_cast<float>(features);
    for (int k = 0; k < kSums; ++k) {
      each_vector(lanes, [&](int64_t b) {
        Float32::store(means + k * stride + b, partial.total(k, b) * share);
      });
    }
  }

  // The sums over a block of lanes.
  NormSums sums(int64_t block) const {
    const int64_t at = block * hidden;
    return {first.gamma_ih + 4 * at, first.gamma_hh + 4 * at, first.bias + 4 * at,
            first.gamma_c + at, first.beta_c + at};
  }

  GateMatrix<float> d_gates;  // gradients of normalised cell and output gate, then of the gates
  PartialSums<2> of_cells;    // of dn, and of dn * n
  PartialSums<4> of_gates;    // the same for h * w_hh, then for x * w_ih
  NormSums first;             // of block 0, those of the others behind
  int64_t blocks, hidden;
  int64_t stride;
  float* means;
  int64_t bytes;

 private:
  void take(Carver& carver, const Sizes<Format>& n, Range lanes) {
    const int64_t first = lanes.begin, count = lanes.end - first;
    d_gates = {carver.take<float>(count * n.gates) - first * d_gates.kGroup, count, n.units};
    float* const cells = carver.take<float>(PartialSums<2>::size(n.units, count));
    float* const gates = carver.take<float>(PartialSums<4>::size(n.units, count));
    of_cells = {cells - first, n.units, count};
    of_gates = {gates - first, n.units, count};
  }
};

FASTLSTM_INLINE void add_to(float* sum, Vec v) { Float32::store(sum, Float32::load(sum) + v); }

template <typename Format>
void start_norm_backward(const NormBackwardScratch<Format>& ns, const Share& my) {
  for (int64_t b = my.lanes.begin; b < my.lanes.end; b += kLaneBlock) {
    const NormSums sums = ns.sums(b / kLaneBlock);
    for (int64_t u = my.units.begin; u < my.units.end; ++u) {
      for (int64_t k = 4 * u * kLanes; k < 4 * (u + 1) * kLanes; k += kLanes) {
        for (float* const sum : {sums.gamma_ih, sums.gamma_hh, sums.bias}) {
          Float32::store(sum + k, Vec{});
        }
      }
      for (float* const sum : {sums.gamma_c, sums.beta_c}) Float32::store(sum + u * kLanes, Vec{});
    }
  }
}

// A step's place in everything that is kept.
template <typename Format, typename Cell>
struct NormStep {
  using Element = typename Format::Element;
  NormStep(const BackwardArgs& g, const Sizes<Format>& n, const BackwardScratch<Format>& s,
           const Cell& rule, int64_t step)
      : cell(rule),
        t(step),
        gates{static_cast<Element*>(g.gates), s.steps * g.B, n.units},
        normed(g.cell_call->normed, g.T, g.B, s.steps, n.units),
        moments(g.cell_call->moments, g.T, g.B),
        cells(g.cells + t * g.B * n.hidden),
        chunk(t / s.steps),
        row(t % s.steps * g.B) {}

  // The new cell before zoneout.
  FASTLSTM_INLINE Vec fresh_cell(const Element* gate, Vec old) const {
    return new_cell(cell, Format::load(gate), Format::load(gate + kLanes),
                    Format::load(gate + 2 * kLanes), old);
  }
  FASTLSTM_INLINE Vec normed_cell(Vec c, int64_t at) const {
    return (c - moments.mean_c[at]) * moments.scale_c[at];
  }

  const Cell& cell;
  int64_t t;
  GateMatrix<Element> gates;
  Normed<Element> normed;
  KeptMoments moments;
  const float* cells;  // those the step began with
  int64_t chunk, row;
};

// dh from the next step's gradients, and what it gives to the output gate and the normalised cell.
template <typename Format, typename Cell, typename Engine>
void norm_backward_outputs(const BackwardArgs& g, const Sizes<Format>& n,
                           const BackwardWeights<Format>& w, const BackwardScratch<Format>& s,
                           const NormBackwardScratch<Format>& ns, const Share& my, Engine& engine,
                           const NormStep<Format, Cell>& step) {
  using Element = typename Format::Element;
  const Element* const dy = static_cast<const Element*>(g.dy);
  const bool has_lengths = g.begins != nullptr || g.ends != nullptr;
  const bool has_carry = has_lengths || step.cell.has_zoneout();
  const bool is_last = step.t == g.T - 1;
  // Not inlined: two places call it.
  const auto one = [&](int64_t b, int64_t u, const float* sums) __attribute__((noinline)) {
    const int64_t k = u * kLanes, count = g.H - k, at = step.t * g.B + b;
    Vec dh{};
    if (!is_last) {
      dh = Float32::load(sums);
      if (g.recurrent_mask != nullptr) {
        dh *= load_part<Float32>(g.recurrent_mask + b * g.H + k, count);
      }
    }
    float* const carry = s.carry.at(k, b);
    if (is_last || has_carry) dh += Float32::load(carry);
    float* const out = ns.d_gates.at(0, u, b);
    if (has_lengths && !is_active(g.begins, g.ends, step.t, b)) {
      Float32::store(carry, dh);
      Float32::store(out, Vec{});
      ns.of_cells.at(0, u, b) = ns.of_cells.at(1, u, b) = 0.0f;
      return;
    }
    if (dy != nullptr) {
      dh += load_part<Format>(dy + (g.row(step.t) + b) * g.y_stride + k, count);
    }
    Vec kept{};
    if (step.cell.has_zoneout()) kept = step.cell.keep(at, k).h * dh;
    if (has_carry) Float32::store(carry, kept);
    dh -= kept;
    const Element* const gate = step.gates.at(step.chunk, u, step.row + b);
    const Vec gamma = load_part<Float32>(g.cell_call->gamma_c + k, count);
    const Vec beta = load_part<Float32>(g.cell_call->beta_c + k, count);
    const Vec old = Float32::load(step.cells + k * g.B + b * kLanes);
    const Vec c = step.normed_cell(step.fresh_cell(gate, old), at);
    const Vec squashed = step.cell.squash(c * gamma + beta);
    const Vec dn = dh * Format::load(gate + 3 * kLanes) * step.cell.squash_slope(squashed);
    ns.of_cells.at(0, u, b) = sum_lanes(dn * gamma);
    ns.of_cells.at(1, u, b) = sum_lanes(dn * gamma * c);
    Float32::store(out, dn);
    Float32::store(out + kLanes, dh * squashed);
  };
  if (is_last) {
    for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
      for (int64_t u = my.units.begin; u < my.units.end; ++u) one(b, u, nullptr);
    }
    return;
  }
  const int64_t next = step.t + 1;
  multiply(engine, step.gates.left(next / s.steps, next % s.steps * g.B), my.lanes, w.recurrent,
           w.stride, {my.units.begin, my.units.end, next % 2 != 0}, n.gate_inner,
           [&](int64_t b, int64_t strip, int strips, const float* sums) {
             for (int q = 0; q < strips; ++q) one(b, strip + q, sums + q * kLanes);
           });
}

// Gradients of the activated gates' arguments.
template <typename Format, typename Cell>
void norm_backward_gates(const BackwardArgs& g, const BackwardScratch<Format>& s,
                         const NormBackwardScratch<Format>& ns, const Share& my,
                         const NormStep<Format, Cell>& step) {
  using Element = typename Format::Element;
  const bool has_lengths = g.begins != nullptr || g.ends != nullptr;
  const Cell& cell = step.cell;
  for (int64_t u = my.units.begin; u < my.units.end; ++u) {
    const int64_t k = u * kLanes, count = g.H - k;
    Vec gamma_hh[4], gamma_ih[4];
    load_gates(g.cell_call->gamma_hh, g.H, k, gamma_hh);
    load_gates(g.cell_call->gamma_ih, g.H, k, gamma_ih);
    const Vec gamma_c = load_part<Float32>(g.cell_call->gamma_c + k, count);
    Vec of_hh[4], of_ih[4], of_bias[4], of_gamma, of_beta;
    const auto lane = [&](int64_t b) {
      float* const d_gate = ns.d_gates.at(0, u, b);
      if (has_lengths && !is_active(g.begins, g.ends, step.t, b)) {
        for (int q = 0; q < 4; ++q) {
          Float32::store(d_gate + q * kLanes, Vec{});
          ns.of_gates.at(q, u, b) = 0.0f;
        }
        return;
      }
      const int64_t at = step.t * g.B + b;
      const Element* const gate = step.gates.at(step.chunk, u, step.row + b);
      const Vec i = Format::load(gate), f = Format::load(gate + kLanes);
      const Vec z = Format::load(gate + 2 * kLanes), o = Format::load(gate + 3 * kLanes);
      const Vec old = Float32::load(step.cells + k * g.B + b * kLanes);
      const Vec c = step.normed_cell(step.fresh_cell(gate, old), at);
      float* const dc_at = s.dc.at(k, b);
      Vec dc = Float32::load(dc_at), dc_kept{};
      if (cell.has_zoneout()) {
        dc_kept = cell.keep(at, k).c * dc;
        dc -= dc_kept;
      }
      const Vec dn = Float32::load(d_gate);
      of_gamma += dn * c;
      of_beta += dn;
      const Vec through = dn * gamma_c - ns.mean(0, b) - c * ns.mean(1, b);
      dc += first_lanes(through * step.moments.scale_c[at], count);
      const CellGradients d = new_cell_backward(cell, dc, i, f, z, old);
      Float32::store(dc_at, d.old + dc_kept);
      const Vec da[4] = {d.i, d.f, d.z, Float32::load(d_gate + kLanes) * cell.gate_slope(o)};
      const Element* const hh = step.normed.hh.at(step.chunk, u, step.row + b);
      const Element* const ih = step.normed.ih.at(step.chunk, u, step.row + b);
      Vec sum_hh{}, dot_hh{}, sum_ih{}, dot_ih{};
      for (int q = 0; q < 4; ++q) {
        const Vec n_hh = Format::load(hh + q * kLanes), n_ih = Format::load(ih + q * kLanes);
        Float32::store(d_gate + q * kLanes, da[q]);
        of_bias[q] += da[q];
        of_hh[q] += da[q] * n_hh;
        of_ih[q] += da[q] * n_ih;
        const Vec d_hh = da[q] * gamma_hh[q], d_ih = da[q] * gamma_ih[q];
        sum_hh += d_hh;
        dot_hh += d_hh * n_hh;
        sum_ih += d_ih;
        dot_ih += d_ih * n_ih;
      }
      ns.of_gates.at(0, u, b) = sum_lanes(sum_hh);
      ns.of_gates.at(1, u, b) = sum_lanes(dot_hh);
      ns.of_gates.at(2, u, b) = sum_lanes(sum_ih);
      ns.of_gates.at(3, u, b) = sum_lanes(dot_ih);
    };
    for (int64_t begin = my.lanes.begin; begin < my.lanes.end; begin += kLaneBlock) {
      for (int q = 0; q < 4; ++q) of_hh[q] = of_ih[q] = of_bias[q] = Vec{};
      of_gamma = of_beta = Vec{};
      for (int64_t b = begin; b < min_of(begin + kLaneBlock, my.lanes.end); ++b) lane(b);
      const NormSums sums = ns.sums(begin / kLaneBlock);
      for (int q = 0; q < 4; ++q) {
        const int64_t sum = (4 * u + q) * kLanes;
        add_to(sums.bias + sum, of_bias[q]);
        add_to(sums.gamma_hh + sum, of_hh[q]);
        add_to(sums.gamma_ih + sum, of_ih[q]);
      }
      add_to(sums.gamma_c + k, of_gamma);
      add_to(sums.beta_c + k, of_beta);
    }
  }
}

// Gradients of the two products, over the gates and over the normalised input.
template <typename Format, typename Cell>
void norm_backward_products(const BackwardArgs& g, const NormBackwardScratch<Format>& ns,
                            const Share& my, const NormStep<Format, Cell>& step) {
  using Element = typename Format::Element;
  const bool has_lengths = g.begins != nullptr || g.ends != nullptr;
  for (int64_t u = my.units.begin; u < my.units.end; ++u) {
    const int64_t k = u * kLanes, count = g.H - k;
    Vec gamma_hh[4], gamma_ih[4];
    load_gates(g.cell_call->gamma_hh, g.H, k, gamma_hh);
    load_gates(g.cell_call->gamma_ih, g.H, k, gamma_ih);
    for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
      const int64_t at = step.t * g.B + b;
      const float* const d_gate = ns.d_gates.at(0, u, b);
      const bool active = !has_lengths || is_active(g.begins, g.ends, step.t, b);
      Element* const gate = step.gates.at(step.chunk, u, step.row + b);
      const Element* const hh = step.normed.hh.at(step.chunk, u, step.row + b);
      Element* const ih = step.normed.ih.at(step.chunk, u, step.row + b);
      const float scale_hh = step.moments.scale_hh[at], scale_ih = step.moments.scale_ih[at];
      Vec all_hh[4], all_ih[4];
      for (int q = 0; q < 4; ++q) {
        const Vec da = Float32::load(d_gate + q * kLanes);
        const Vec n_hh = Format::load(hh + q * kLanes), n_ih = Format::load(ih + q * kLanes);
        const Vec d_hh = da * gamma_hh[q] - ns.mean(0, b) - n_hh * ns.mean(1, b);
        const Vec d_ih = da * gamma_ih[q] - ns.mean(2, b) - n_ih * ns.mean(3, b);
        // What an idle lane was given is not looked at: it may be NaN.
        all_hh[q] = active ? first_lanes(d_hh * scale_hh, count) : Vec{};
        all_ih[q] = active ? first_lanes(d_ih * scale_ih, count) : Vec{};
      }
      store_gates<Format>(all_hh, min_of(count, kLanes), gate);
      store_gates<Format>(all_ih, min_of(count, kLanes), ih);
    }
  }
}

// Gradients of everything but states and dense input.
template <typename Format, typename Engine>
void norm_weight_gradients(const BackwardArgs& g, const Sizes<Format>& n,
                           const BackwardWeights<Format>& w, const BackwardScratch<Format>& s,
                           const NormBackwardScratch<Format>& ns,
                           const GateMatrix<const typename Format::Element>& d_hh,
                           const GateMatrix<const typename Format::Element>& d_ih, Items& items,
                           Engine& engine, Member me) {
  using F = Factor<Format>;
  const SumsByToken<Format> none{g, s, d_hh, false};
  const Range units = part_of({0, n.units}, me.index, me.count);
  for (int64_t u = units.begin; u < units.end; ++u) {
    const int64_t k = u * kLanes, count = g.H - k;
    const auto add_blocks = [&](const float* sums, int64_t stride, int64_t from, float* to) {
      Vec total{};
      for (int64_t b = 0; b < ns.blocks; ++b) total += Float32::load(sums + b * stride + from);
      store_part<Float32>(to, total, count);
    };
    add_blocks(ns.first.gamma_c, n.hidden, k, g.dgamma_c + k);
    add_blocks(ns.first.beta_c, n.hidden, k, g.dbeta_c + k);
    for (int64_t q = 0; q < 4; ++q) {
      const int64_t from = (4 * u + q) * kLanes, to = q * g.H + k;
      add_blocks(ns.first.gamma_hh, n.gates, from, g.dgamma_hh + to);
      add_blocks(ns.first.gamma_ih, n.gates, from, g.dgamma_ih + to);
      if (g.db != nullptr) add_blocks(ns.first.bias, n.gates, from, g.db + to);
    }
  }
  const F recurrent = recurrent_factor(g, s), dense = input_factor<Format>(g);
  const Rows rows{g.T * g.B, g.B};
  if (g.dw_hh != nullptr) {
    weight_gradient(&recurrent, 1, 0, s.width, rows, d_hh, n, s.gradient, items, engine, me, none);
  }
  me.barrier->wait(me.count);  // the scratch can be used anew
  if (g.input.tokens != nullptr) {
    clear_table(s, units);
    sum_by_token(g, s, d_ih, units);
    round_table(s, units);
    table_gradients(g, n, w, s, &dense, g.dw_ih != nullptr ? 1 : 0, items, engine, me);
  } else if (g.dw_ih != nullptr) {
    weight_gradient(&dense, 1, 0, s.width, rows, d_ih, n, s.gradient, items, engine, me, none);
  }
}

template <typename Format, typename Engine>
void norm_backward_loop(const BackwardArgs& g, Member me) {
  using Element = typename Format::Element;
  using Cell = GeneralCell<Format>;
  FlushDenormals flush;
  Engine engine;
  const Sizes<Format> n(g.I, g.H);
  const BackwardWeights<Format> w(g.weights, n);
  const bool is_alone =
      splits_lanes(g.B, n.gates * n.hidden * int64_t{sizeof(Element)}, me.count, true);
  const Share my = share_of(me, n.units, g.B, is_alone, kLaneBlock);
  const BackwardScratch<Format> s(g, n, my.lanes, is_alone ? me.index : 0);
  const NormBackwardScratch<Format> ns(static_cast<char*>(g.workspace) + s.bytes, g, n, my.lanes,
                                       me.index);
  const auto meet = [&] {
    if (!is_alone) me.barrier->wait(me.count);
  };
  Items items(s.items, me);
  const auto dx_blocks = Blocks::of<Engine>(n.input_strips, s.steps * g.B, me.count, kStrips,
                                            2 * kLanes * n.gate_inner);
  const Cell cell(g.cell_call);
  const GateMatrix<Element> d_hh{static_cast<Element*>(g.gates), s.steps * g.B, n.units};
  const GateMatrix<Element> d_ih =
      Normed<Element>(g.cell_call->normed, g.T, g.B, s.steps, n.units).ih;
  const bool has_dx = g.input.tokens == nullptr && g.dx != nullptr;
  start_backward(g, s, my);
  start_norm_backward(ns, my);
  for (int64_t t = g.T - 1; t >= 0; --t) {
    const NormStep<Format, Cell> step(g, n, s, cell, t);
    norm_backward_outputs(g, n, w, s, ns, my, engine, step);
    meet();
    ns.form_means(ns.of_cells, my.lanes, g.H);
    norm_backward_gates(g, s, ns, my, step);
    meet();
    ns.form_means(ns.of_gates, my.lanes, 4 * g.H);
    norm_backward_products(g, ns, my, step);
    meet();
    if (!has_dx || t % s.steps != 0) continue;
    if (is_alone) {
      chunk_input_gradient(g, n, w, s, my.lanes, engine, t, d_ih);
    } else {
      chunk_input_gradient(g, n, w, s, dx_blocks, items, engine, t, d_ih);
    }
  }
  const bool has_carry = g.begins != nullptr || g.ends != nullptr || cell.has_zoneout();
  finish_backward(g, n, w, s, my, engine, has_carry);
  me.barrier->wait(me.count);
  norm_weight_gradients<Format>(g, n, w, s, ns, {d_hh.gates, d_hh.rows, d_hh.groups},
                                {d_ih.gates, d_ih.rows, d_ih.groups}, items, engine, me);
}

template <typename Format>
int64_t backward_workspace(const BackwardArgs& g) {
  const Sizes<Format> n(g.I, g.H);
  const BackwardScratch<Format> s(g, n, {0, g.B}, 0);
  if (g.cell_call == nullptr || g.cell_call->gamma_hh == nullptr) return s.bytes;
  return s.bytes + NormBackwardScratch<Format>(nullptr, g, n, {0, g.B}, 0).bytes;
}

template <typename Format, typename Engine>
void backward(const BackwardArgs& g, Member me) {
  if (g.cell_call == nullptr) {
    backward_loop<Format, Engine, PlainCell<Format>>(g, me);
  } else if (g.cell_call->gamma_hh == nullptr) {
    backward_loop<Format, Engine, GeneralCell<Format>>(g, me);
  } else {
    norm_backward_loop<Format, Engine>(g, me);
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
