// The forward pass with layer norm: a step in three parts, between which a team of units meets.
#pragma once

#include "cpu/norm.h"

namespace fastlstm::FASTLSTM_ISA {

// Scratch of one forward call behind `base`: products and partial sums of the lanes that `s` has,
// moments of one thread. With a null base only `bytes` counts.
template <typename Format>
struct NormForwardScratch {
  NormForwardScratch(void* base, const ForwardArgs& g, const Sizes<Format>& n,
                     const ForwardScratch<Format>& s, Range lanes, int64_t thread) {
    const bool has_table = g.input.tokens != nullptr;
    const int64_t inputs = has_table ? g.input.num_rows : s.steps * g.B;
    Carver carver(base);
    for (int64_t k = 0; k < g.threads; ++k) {
      float* const of_hh = carver.take<float>(RowMoments::size(g.B));
      float* const of_ih = carver.take<float>(RowMoments::size(inputs));
      float* const of_c = carver.take<float>(RowMoments::size(g.B));
      carver.take<char>(kPage);
      if (k != thread) continue;
      hh = {of_hh, g.B};
      ih = {of_ih, inputs};
      c = {of_c, g.B};
    }
    if (has_table) partial_ih = sums(carver, n, {0, inputs});
    Carver before(nullptr), whole(nullptr);
    take(before, n, {0, lanes.begin}, has_table ? 0 : s.steps);
    take(whole, n, {0, g.B}, has_table ? 0 : s.steps);
    bytes = carver.bytes() + whole.bytes() + g.threads * kPage;
    carver.take<char>(before.bytes() + (lanes.begin > 0 ? thread * kPage : 0));
    take(carver, n, lanes, has_table ? 0 : s.steps);
  }

  GateMatrix<float> raw;  // h * w_hh of a step, then the new cell and the output gate
  PartialSums<2> partial_hh, partial_ih, partial_c;
  RowMoments hh, ih, c;
  int64_t bytes;

 private:
  static PartialSums<2> sums(Carver& carver, const Sizes<Format>& n, Range rows) {
    const int64_t count = rows.end - rows.begin;
    float* const taken = carver.take<float>(PartialSums<2>::size(n.units, count));
    return {taken - rows.begin, n.units, count};
  }
  // What belongs to some lanes; `steps` of dense input.
  void take(Carver& carver, const Sizes<Format>& n, Range lanes, int64_t steps) {
    const int64_t first = lanes.begin, count = lanes.end - first;
    raw = {carver.take<float>(count * n.gates) - first * raw.kGroup, count, n.units};
    partial_hh = sums(carver, n, lanes);
    partial_c = sums(carver, n, lanes);
    if (steps > 0) partial_ih = sums(carver, n, {first, first + steps * count});
  }
};

// Four vectors of gates of a (4H) parameter; zero beyond H.
FASTLSTM_INLINE void load_gates(const float* p, int64_t H, int64_t k, Vec (&out)[4]) {
  for (int q = 0; q < 4; ++q) out[q] = load_part<Float32>(p + q * H + k, H - k);
}

// h * w_hh and the partial moments of its rows.
template <typename Format, typename Engine>
void norm_products(const ForwardArgs& g, const Sizes<Format>& n, const ForwardWeights<Format>& w,
                   const ForwardScratch<Format>& s, const NormForwardScratch<Format>& ns,
                   const Share& my, Engine& engine, int64_t t) {
  const GateSums gate_sums(n);
  multiply(engine, plain(s.state(t), s.state_stride, n.state_inner), my.lanes, w.recurrent,
           w.recurrent_stride, {n.strips_of(my.units), t % 2 != 0}, n.state_inner,
           [&](int64_t b, int64_t strip, int, const float* sums) {
             const int64_t u = strip / 4;
             float* const raw = ns.raw.at(0, u, b);
             Vec v[4];
             gate_sums.load(sums, u, v);
             for (int q = 0; q < 4; ++q) Float32::store(raw + q * kLanes, v[q]);
             add_group(v, g.H - u * kLanes, ns.partial_hh, u, b);
           });
}

// Gates and new cells from the normalised products. With a branch in the place of kKeep, what is
// kept would decide which products GCC fuses with a sum, and so the last bit.
template <typename Format, bool kKeep, typename Cell>
void norm_gates(const ForwardArgs& g, const Sizes<Format>& n, const ForwardWeights<Format>& w,
                const ForwardScratch<Format>& s, const NormForwardScratch<Format>& ns,
                const Share& my, const Cell& cell, int64_t t, const Cells& kept_cells) {
  using Element = typename Format::Element;
  const GateMatrix<Element> gates{static_cast<Element*>(g.gates), s.steps * g.B, n.units};
  const Normed<Element> normed(g.cell_call->normed, g.T, g.B, s.steps, n.units);
  const int64_t first_row = t % s.steps * g.B, chunk = t / s.steps;
  const int64_t first_input = t % s.steps * s.num_lanes;
  const int64_t* const tokens = g.input.tokens == nullptr ? nullptr : g.input.tokens + g.row(t);
  const bool has_lengths = g.begins != nullptr || g.ends != nullptr;
  for (int64_t u = my.units.begin; u < my.units.end; ++u) {
    const int64_t k = u * kLanes, count = g.H - k;
    Vec gamma_hh[4], gamma_ih[4], bias[4];
    load_gates(g.cell_call->gamma_hh, g.H, k, gamma_hh);
    load_gates(g.cell_call->gamma_ih, g.H, k, gamma_ih);
    for (int q = 0; q < 4; ++q) bias[q] = Float32::load(w.bias + (4 * u + q) * kLanes);
    for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
      const int64_t input = tokens ? tokens[b] : first_input + b;
      float* const raw = ns.raw.at(0, u, b);
      const float* const in = s.projected.at(0, u, input);
      const float mean_hh = ns.hh.mean()[b], scale_hh = ns.hh.scale()[b];
      const float mean_ih = ns.ih.mean()[input], scale_ih = ns.ih.scale()[input];
      Vec a[4];
      for (int q = 0; q < 4; ++q) {
        const Vec hh = (Float32::load(raw + q * kLanes) - mean_hh) * scale_hh;
        const Vec ih = (Float32::load(in + q * kLanes) - mean_ih) * scale_ih;
        a[q] = hh * gamma_hh[q] + ih * gamma_ih[q] + bias[q];
        if constexpr (kKeep) {
          Format::stream(normed.hh.at(chunk, u, first_row + b) + q * kLanes, hh);
          Format::stream(normed.ih.at(chunk, u, first_row + b) + q * kLanes, ih);
        }
      }
      const Vec i = cell.gate(a[0]), f = cell.gate(a[1]), z = cell.squash(a[2]);
      const Vec o = cell.gate(a[3]);
      const Vec old = Float32::load(s.cells.at(k, b));
      const Vec fresh[1] = {new_cell(cell, i, f, z, old)};
      add_group(fresh, count, ns.partial_c, u, b);
      Float32::store(raw, fresh[0]);
      Float32::store(raw + kLanes, o);
      Vec c = fresh[0];
      if (cell.has_zoneout()) c = mix(cell.keep(t * g.B + b, k).c, old, c);
      if (has_lengths && !is_active(g.begins, g.ends, t, b)) c = old;
      Float32::store(s.cells.at(k, b), c);
      if constexpr (kKeep) {
        Float32::stream(kept_cells.at(k, b), c);
        Element* const kept = gates.at(chunk, u, first_row + b);
        Format::stream(kept, i);
        Format::stream(kept + kLanes, f);
        Format::stream(kept + 2 * kLanes, z);
        Format::stream(kept + 3 * kLanes, o);
      }
    }
  }
}

// Outputs from the normalised cells.
template <typename Format, typename Cell>
void norm_outputs(const ForwardArgs& g, const ForwardScratch<Format>& s,
                  const NormForwardScratch<Format>& ns, const Share& my, const Cell& cell,
                  int64_t t) {
  auto* const y = static_cast<typename Format::Element*>(g.y) + g.row(t) * g.y_stride;
  const auto* const state = s.state(t);
  auto* const new_state = s.state(t + 1);
  const bool has_lengths = g.begins != nullptr || g.ends != nullptr;
  for (int64_t u = my.units.begin; u < my.units.end; ++u) {
    const int64_t k = u * kLanes, count = g.H - k;
    const Vec gamma = load_part<Float32>(g.cell_call->gamma_c + k, count);
    const Vec beta = load_part<Float32>(g.cell_call->beta_c + k, count);
    for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
      const float* const raw = ns.raw.at(0, u, b);
      const Vec c = (Float32::load(raw) - ns.c.mean()[b]) * ns.c.scale()[b];
      Vec h = Float32::load(raw + kLanes) * cell.squash(c * gamma + beta);
      if (cell.has_zoneout()) {
        h = mix(cell.keep(t * g.B + b, k).h, output_before<Format>(g, t, b, k), h);
      }
      const bool active = !has_lengths || is_active(g.begins, g.ends, t, b);
      store_part<Format>(y + b * g.y_stride + k, active ? h : Vec{}, count);
      const int64_t at = b * s.state_stride + k;
      if (!active) {
        h = Format::load(state + at);
      } else if (g.recurrent_mask != nullptr) {
        h *= load_part<Float32>(g.recurrent_mask + b * g.H + k, count);
      }
      Format::store(new_state + at, h);
    }
  }
}

template <typename Format, typename Engine>
void norm_forward_loop(const ForwardArgs& g, Member me) {
  FlushDenormals flush;
  Engine engine;
  const Sizes<Format> n(g.I, g.H);
  const ForwardWeights<Format> w(g.weights, n);
  const bool is_alone = splits_lanes<Format>(g.B, g.H, me.count, true);
  const Share my = share_of(me, n.units, g.B, is_alone, kLaneBlock);
  const ForwardScratch<Format> s(g, n, my.lanes, is_alone ? me.index : 0);
  const NormForwardScratch<Format> ns(static_cast<char*>(g.workspace) + s.bytes, g, n, s, my.lanes,
                                      me.index);
  const auto meet = [&] {
    if (!is_alone) me.barrier->wait(me.count);
  };
  const GeneralCell<Format> cell(g.cell_call);
  const int64_t* const tokens = g.input.tokens;
  const auto add_moments = [&](int64_t row, int64_t u, Vec(&sum)[4]) {
    add_group(sum, g.H - u * kLanes, ns.partial_ih, u, row);
  };
  const auto merge_inputs = [&](int64_t steps) {
    if (!is_alone) return merge_groups<4>(ns.partial_ih, {0, steps * g.B}, g.H, ns.ih);
    for (int64_t k = 0; k < steps; ++k) {
      const int64_t first = k * s.num_lanes;
      const Range rows{first + my.lanes.begin, first + my.lanes.end};
      merge_groups<4>(ns.partial_ih, rows, g.H, ns.ih);
    }
  };
  const bool keeps = g.gates != nullptr;
  Cells kept_cells{g.cells, g.B};
  start_forward(g, n, s, my);
  if (tokens != nullptr) project_table(g, n, w, s, engine, me, add_moments);
  me.barrier->wait(me.count);
  if (tokens != nullptr) merge_groups<4>(ns.partial_ih, {0, g.input.num_rows}, g.H, ns.ih);
  for (int64_t t = 0; t < g.T; ++t) {
    const bool has_projected = tokens == nullptr && t % s.steps == 0;
    if (has_projected) project_chunk(g, n, w, s, my, engine, t, add_moments);
    norm_products(g, n, w, s, ns, my, engine, t);
    meet();
    if (has_projected) merge_inputs(min_of(s.steps, g.T - t));
    merge_groups<4>(ns.partial_hh, my.lanes, g.H, ns.hh);
    if (keeps) {
      kept_cells.first += g.B * n.hidden;
      norm_gates<Format, true>(g, n, w, s, ns, my, cell, t, kept_cells);
    } else {
      norm_gates<Format, false>(g, n, w, s, ns, my, cell, t, kept_cells);
    }
    meet();
    merge_groups<1>(ns.partial_c, my.lanes, g.H, ns.c);
    norm_outputs(g, s, ns, my, cell, t);
    if (keeps && (is_alone || me.index == 0)) {
      const KeptMoments kept(g.cell_call->moments, g.T, g.B);
      for (int64_t b = my.lanes.begin; b < my.lanes.end; ++b) {
        const int64_t input = tokens ? tokens[g.row(t) + b] : t % s.steps * s.num_lanes + b;
        kept.scale_hh[t * g.B + b] = ns.hh.scale()[b];
        kept.scale_ih[t * g.B + b] = ns.ih.scale()[input];
        kept.mean_c[t * g.B + b] = ns.c.mean()[b];
        kept.scale_c[t * g.B + b] = ns.c.scale()[b];
      }
    }
    meet();
  }
  finish_forward<Format>(g, s.cells, my);
  stream_fence();
}

template <typename Format>
int64_t forward_workspace(const ForwardArgs& g) {
  const Sizes<Format> n(g.I, g.H);
  const ForwardScratch<Format> s(g, n, {0, g.B}, 0);
  if (g.cell_call == nullptr || g.cell_call->gamma_hh == nullptr) return s.bytes;
  return s.bytes + NormForwardScratch<Format>(nullptr, g, n, s, {0, g.B}, 0).bytes;
}

template <typename Format, typename Engine>
void forward(const ForwardArgs& g, Member me) {
  if (g.cell_call == nullptr) {
    forward_loop<Format, Engine, PlainCell<Format>>(g, me);
  } else if (g.cell_call->gamma_hh == nullptr) {
    forward_loop<Format, Engine, GeneralCell<Format>>(g, me);
  } else {
    norm_forward_loop<Format, Engine>(g, me);
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
