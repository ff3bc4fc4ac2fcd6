// Streams forward, a token at a time: the loop inside one team of threads.
//
// A thread owns unit groups of every layer and columns of the output for the whole call, so that
// its part of the weights stays in its own cache, and a part of the rows for what concerns whole
// rows: layer norm and the choice of tokens. The team meets after each of these.
#pragma once

#include "cpu/cell.h"
#include "cpu/int4.h"
#include "cpu/pack.h"
#include "cpu/sampler.h"
#include "cpu/threads.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int64_t kCellLines = 32;     // of a product, take as long as 16 units' cell
inline constexpr float kNormEpsilon = 1e-5f;  // of torch's LayerNorm

template <typename Format>
int64_t decode_padded_columns(int64_t columns, bool is_gates) {
  return is_gates ? 4 * round_up(columns / 4, kLanes) : round_up(columns, kStrips * kLanes);
}

template <typename Format>
int64_t decode_matrix_bytes(int64_t columns, int64_t inner, bool is_gates) {
  if constexpr (is_int4<Format>) {
    const int64_t panels = decode_padded_columns<Format>(columns, is_gates) / (kStrips * kLanes);
    return panels * ceil_div(inner, Int4Group::kSize) * int64_t{sizeof(Int4Group)};
  }
  return decode_padded_columns<Format>(columns, is_gates) * round_up(inner, Format::kInner) *
         static_cast<int64_t>(sizeof(typename Format::Element));
}

template <typename Format>
void pack_decode(const DecodePackArgs& g, Member me) {
  using Element = typename Format::Element;
  const int64_t strips = decode_padded_columns<Format>(g.columns, g.is_gates) / kLanes;
  const int64_t inner = round_up(g.inner, Format::kInner);
  const Range mine = part_of({0, strips}, me.index, me.count);
  if constexpr (is_int4<Format>) return pack_int4(g, mine);
  auto* const out = static_cast<Element*>(g.strips);
  for (int64_t s = mine.begin; s < mine.end; ++s) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t row = row_of_column(g, s, lane);
      if constexpr (Format::kPair == 4) {
        const int8_t* const codes = g.codes + row * g.inner;
        Element* const panel = out + s / kStrips * kStrips * inner * kLanes;
        int32_t sum = 0;
        for (int64_t k = 0; k < inner; ++k) {
          const int8_t code = row >= 0 && k < g.inner ? codes[k] : int8_t{0};
          sum += code;
          panel[((k / 4 * kStrips + s % kStrips) * kLanes + lane) * 4 + k % 4] =
              static_cast<Element>(code);
        }
        g.factors[s * kLanes + lane] = row >= 0 ? g.scales[row] / 127.0f : 0.0f;
        g.corrections[s * kLanes + lane] = 128 * sum;
      } else {
        const float* const w = g.w + row * g.inner;
        for (int64_t k = 0; k < inner; ++k) {
          const float given = row >= 0 && k < g.inner ? w[k] : 0.0f;
          Element* const to = out + s * inner * kLanes +
                              (k / Format::kPair * kLanes + lane) * Format::kPair +
                              k % Format::kPair;
          if constexpr (Format::kPair == 1) {
            *to = given;
          } else {
            *to = round_to_bf16(splat(given))[0];
          }
        }
      }
    }
  }
}

// Scratch of one call. With a null base only `bytes` counts.
template <typename Format>
struct DecodeScratch {
  using Element = typename Format::Element;
  explicit DecodeScratch(const DecodeArgs& g) {
    const DecodeModel& m = *g.model;
    rows = g.num_rows;
    units = ceil_div(m.H, kLanes);
    hidden = units * kLanes;
    // One more cache line than needed: rows at a power of two would share the same cache sets.
    const int64_t line = 64 / static_cast<int64_t>(sizeof(Element));
    state_stride = round_up(round_up(m.H, Format::kInner), line) + line;
    input_stride = round_up(round_up(m.E > m.H ? m.E : m.H, Format::kInner), line) + line;
    value_stride = round_up(m.E > m.H ? m.E : m.H, kStrips * kLanes);
    logit_stride = round_up(m.V, kStrips * kLanes);
    Carver carver(g.workspace);
    states = carver.take<Element>(2 * m.L * rows * state_stride);
    inputs = carver.take<Element>(rows * input_stride);
    scales = carver.take<float>(rows);
    values = carver.take<float>(rows * value_stride);
    cells = carver.take<float>(m.L * rows * hidden);
    projected = {carver.take<float>(rows * 4 * hidden), rows, units};
    logits = carver.take<float>(rows * logit_stride);
    choices = carver.take<float>(g.threads * (kRooms + 1) * logit_stride);
    tokens = carver.take<int32_t>(rows);
    num_offsets = is_int4<Format> ? rows * ceil_div(m.E > m.H ? m.E : m.H, Format::kInner) : 0;
    offsets = carver.take<int32_t>(g.threads * num_offsets);
    flags = carver.take<uint8_t>(rows);
    broken = carver.take<uint8_t>(rows);
    shares = carver.take<Range>(g.threads * m.L);
    bytes = carver.bytes();
  }

  Element* state(int64_t layer, int64_t step) const {
    return states + (2 * layer + (step & 1)) * rows * state_stride;
  }
  float* cell(int64_t layer, int64_t unit, int64_t row) const {
    return cells + ((layer * units + unit) * rows + row) * kLanes;
  }
  float* value(int64_t row) const { return values + row * value_stride; }

  int64_t rows, units, hidden, state_stride, input_stride, value_stride, logit_stride;
  Element* states;  // [layer][2][row][state_stride]: h before and after a step
  Element* inputs;  // [row][input_stride] of a layer, the projection or the output, if not a state
  float* scales;    // [row] of `inputs`
  float* values;    // [row][value_stride] what `inputs` was made of
  float* cells;     // [layer][group][row][lane]
  GateMatrix<float> projected;  // input times w_ih, plus bias
  float* logits;                // [row][logit_stride]
  float* choices;               // [thread][kRooms + 1][logit_stride]
  int32_t* tokens;              // [row] to be read
  int64_t num_offsets;
  int32_t* offsets;  // int4: [thread][num_offsets] of Int4Engine
  uint8_t* flags;    // [row] what a row does in this step
  uint8_t* broken;   // [row] whether a value was met that is not finite
  Range* shares;     // [thread][layer] its unit groups
  int64_t bytes;
};

enum RowFlags : uint8_t { kActive = 1, kReports = 2, kWrites = 4 };

template <typename Format, typename Engine>
class DecodeLoop {
 public:
  using Element = typename Format::Element;
  DecodeLoop(const DecodeArgs& g, Member me)
      : g_(g),
        m_(*g.model),
        me_(me),
        s_(g),
        my_units_(s_.shares + me.index * m_.L),
        my_projected_(share_of_columns(m_.projection, m_.H, m_.R)),
        my_strips_(share_of_columns(m_.output, m_.R, m_.V)),
        my_rows_(part_of({0, s_.rows}, me.index, me.count)) {
    for (int64_t k = 0; k < m_.L; ++k) my_units_[k] = share_of_layer(k);
    if constexpr (is_int4<Format>) engine_.offsets = s_.offsets + me.index * s_.num_offsets;
  }

  void run() {
    load_states();
    for (int64_t row = my_rows_.begin; row < my_rows_.end; ++row) begin_row(row);
    for (int64_t step = 0; step < g_.steps; ++step) {
      meet();
      bool is_over = true, has_output = false;
      for (int64_t row = 0; row < s_.rows; ++row) {
        is_over &= (s_.flags[row] & kActive) == 0;
        has_output |= (s_.flags[row] & (kReports | kWrites)) != 0;
      }
      if (is_over) break;
      for (int64_t k = 0; k < m_.L; ++k) {
        layer(k, step);
        meet();
        if (needs_values(k)) {
          for (int64_t row = my_rows_.begin; row < my_rows_.end; ++row) between(k, row);
          meet();
        }
      }
      if (has_output) {
        if (has_projection()) {
          project(step);
          meet();
          for (int64_t row = my_rows_.begin; row < my_rows_.end; ++row) {
            if ((s_.flags[row] & (kReports | kWrites)) != 0) set_input(row, m_.R);
          }
          meet();
        }
        multiply_output(step);
        meet();
      }
      for (int64_t row = my_rows_.begin; row < my_rows_.end; ++row) finish_row(row);
      steps_ = step + 1;
    }
    meet();
    store_states();
  }

 private:
  void meet() { me_.barrier->wait(me_.count); }

  // This thread's unit groups of layer `k`; whole panels of 16 units where there are lines.
  Range share_of_layer(int64_t k) const {
    const DecodeLayer& layer = m_.layers[k];
    if (layer.recurrent.starts == nullptr && layer.input.starts == nullptr) {
      return part_of({0, s_.units}, me_.index, me_.count);
    }
    const auto before = [&](int64_t panel) {
      return lines_before(layer.recurrent, m_.H, panel) +
             lines_before(layer.input, width_into(k), panel) + panel * kCellLines;
    };
    return even_share(ceil_div(s_.units, kBlockVectors), kBlockVectors, s_.units, before);
  }

  // This thread's strips of a matrix that has no gates.
  Range share_of_columns(const DecodeMatrix& m, int64_t inner, int64_t columns) const {
    const int64_t strips = round_up(columns, kStrips * kLanes) / kLanes;
    if (m.starts == nullptr) return part_of({0, strips}, me_.index, me_.count, kStrips);
    const auto before = [&](int64_t panel) { return lines_before(m, inner, panel) + panel; };
    return even_share(ceil_div(strips, kSparseStrips), kSparseStrips, strips, before);
  }

  // This thread's part of `panels` of `size` each, `end` at most, by what comes before each.
  template <typename Before>
  Range even_share(int64_t panels, int64_t size, int64_t end, Before&& before) const {
    const int64_t all = before(panels);
    const auto cut = [&](int64_t part) {
      int64_t p = 0;
      while (p < panels && (before(p) + before(p + 1)) * me_.count <= 2 * all * part) ++p;
      return min_of(p * size, end);
    };
    return {cut(me_.index), cut(me_.index + 1)};
  }

  bool needs_values(int64_t k) const { return m_.layers[k].gamma != nullptr || m_.is_residual; }
  bool has_projection() const { return m_.projection.strips != nullptr; }
  int64_t width_into(int64_t k) const { return k == 0 ? m_.E : m_.H; }

  void load_states() {
    for (int64_t row = 0; row < s_.rows; ++row) {
      for (int64_t k = 0; k < m_.L; ++k) {
        const float* const h = g_.rows[row].state + 2 * k * m_.H;
        Element* const to = s_.state(k, 0) + row * s_.state_stride;
        for (int64_t u = my_units_[k].begin; u < my_units_[k].end; ++u) {
          const int64_t at = u * kLanes, count = m_.H - at;
          Format::store(to + at, load_part<Float32>(h + at, count));
          Float32::store(s_.cell(k, u, row), load_part<Float32>(h + m_.H + at, count));
        }
        if (my_units_[k].end != s_.units || my_units_[k].begin == my_units_[k].end) continue;
        for (int64_t t = 0; t < 2; ++t) {  // the padding is this thread's
          Element* const padded = s_.state(k, t) + row * s_.state_stride;
          for (int64_t i = s_.hidden; i < s_.state_stride; ++i) padded[i] = 0;
        }
      }
    }
  }

  void store_states() {
    for (int64_t row = 0; row < s_.rows; ++row) {
      for (int64_t k = 0; k < m_.L; ++k) {
        float* const h = g_.rows[row].state + 2 * k * m_.H;
        const Element* const from = s_.state(k, steps_) + row * s_.state_stride;
        for (int64_t u = my_units_[k].begin; u < my_units_[k].end; ++u) {
          const int64_t at = u * kLanes, count = m_.H - at;
          store_part<Float32>(h + at, Format::load(from + at), count);
          store_part<Float32>(h + m_.H + at, Float32::load(s_.cell(k, u, row)), count);
        }
      }
    }
  }

  void begin_row(int64_t at) {
    DecodeRow& row = g_.rows[at];
    s_.flags[at] = s_.broken[at] = 0;
    s_.tokens[at] = 0;
    for (int64_t k = 0; k < m_.L; ++k) check_finite(at, row.state + 2 * k * m_.H, m_.H);
    if (row.status == RowStatus::running) read_next(at, row.given[row.num_read]);
  }

  // Has row `at` read `token` in the coming step.
  __attribute__((noinline)) void read_next(int64_t at, int32_t token) {
    DecodeRow& row = g_.rows[at];
    if (token < 0 || token >= m_.V) {
      row.status = RowStatus::bad_token;
      s_.flags[at] = 0;
      return;
    }
    s_.tokens[at] = token;
    uint8_t flags = kActive;
    if (row.num_read + 1 < row.num_given) {
      if (row.scores_given) flags |= kReports;
    } else if (row.room > 0) {
      flags |= kWrites;
    }
    s_.flags[at] = flags;
    if (m_.embedding == nullptr) return;
    float* const value = s_.value(at);
    const float* const x = m_.embedding + token * m_.E;
    for (int64_t k = 0; k < m_.E; k += kLanes) {
      Float32::store(value + k, load_part<Float32>(x + k, m_.E - k));
    }
    set_input(at, m_.E);
  }

  // A row that is not finite ends, whether or not a product meets the place.
  __attribute__((noinline)) void check_finite(int64_t at, const float* values, int64_t size) {
    Vec zeros{};
    for (int64_t k = 0; k < size; k += kLanes) {
      zeros += load_part<Float32>(values + k, size - k) * 0.0f;
    }
    if (has_nan(zeros)) s_.broken[at] = 1;
  }

  // Makes the values of a row an operand.
  __attribute__((noinline)) void set_input(int64_t at, int64_t size) {
    const float* const value = s_.value(at);
    check_finite(at, value, size);
    float rate = 1.0f;
    if constexpr (Format::kPair == 4) {
      Vec most{};
      for (int64_t k = 0; k < size; k += kLanes) {
        const Vec v = Float32::load(value + k);
        most = max_of(max_of(v, -v), most);
      }
      const float largest = max_lane(most);
      s_.scales[at] = largest;
      rate = largest > 0.0f ? 1.0f / largest : 0.0f;
    } else {
      s_.scales[at] = 1.0f;
    }
    Element* const to = s_.inputs + at * s_.input_stride;
    for (int64_t k = 0; k < round_up(size, kLanes); k += kLanes) {
      Format::store(to + k, Float32::load(value + k) * rate);
    }
    for (int64_t k = round_up(size, kLanes); k < round_up(size, Format::kInner); ++k) to[k] = 0;
  }

  // The left operand that holds the output of layer `k`, and whether its rows have scales.
  Left<Element> output_of(int64_t k, int64_t step, int64_t inner) const {
    if (needs_values(k))
      return plain(const_cast<const Element*>(s_.inputs), s_.input_stride, inner);
    return plain(const_cast<const Element*>(s_.state(k, step + 1)), s_.state_stride, inner);
  }

  void layer(int64_t k, int64_t step) {
    const DecodeLayer& layer = m_.layers[k];
    const bool is_looked_up = layer.input.strips == nullptr;
    const bool has_values = needs_values(k), has_scales = k == 0 || needs_values(k - 1);
    const Strips strips{4 * my_units_[k].begin, 4 * my_units_[k].end, step % 2 != 0};
    if (!is_looked_up) {
      const Right<Format> input(layer.input, width_into(k));
      const auto left =
          k == 0 ? plain(const_cast<const Element*>(s_.inputs), s_.input_stride, input.inner)
                 : output_of(k - 1, step, input.inner);
      multiply(engine_, left, {0, s_.rows}, input, strips,
               [&](int64_t row, int64_t strip, int, const float* sums) {
                 float* const out = s_.projected.at(0, strip / 4, row);
                 const float scale = has_scales ? s_.scales[row] : 1.0f;
                 for (int q = 0; q < 4; ++q) {
                   const Vec bias = Float32::load(layer.bias + (strip + q) * kLanes);
                   Float32::store(out + q * kLanes,
                                  input.value(sums + q * kLanes, strip + q, scale) + bias);
                 }
               });
    }
    const Right<Format> recurrent(layer.recurrent, m_.H);
    const Element* const state = s_.state(k, step);
    Element* const new_state = s_.state(k, step + 1);
    using Plain = PlainCell<Format>;
    const GeneralCell<Format> cell_of(&m_.cell);
    const bool is_plain = m_.cell.activation == Activation::tanh &&
                          m_.cell.recurrent_activation == Activation::sigmoid;
    const auto sigma = [&](Vec x) { return is_plain ? Plain::gate(x) : cell_of.gate(x); };
    const auto squash = [&](Vec x) { return is_plain ? Plain::squash(x) : cell_of.squash(x); };
    multiply(engine_, plain(state, s_.state_stride, recurrent.inner), {0, s_.rows}, recurrent,
             strips, [&](int64_t row, int64_t strip, int, const float* sums) {
               const int64_t u = strip / 4, at = row * s_.state_stride + u * kLanes;
               if ((s_.flags[row] & kActive) == 0) {
                 __builtin_memcpy(new_state + at, state + at, kLanes * sizeof(Element));
                 return;
               }
               const float* const in = is_looked_up
                                           ? m_.table + (s_.tokens[row] * s_.units + u) * 4 * kLanes
                                           : s_.projected.at(0, u, row);
               const auto gate = [&](int q) {
                 return recurrent.value(sums + q * kLanes, strip + q, 1.0f) +
                        Float32::load(in + q * kLanes);
               };
               const Vec i = sigma(gate(0)), f = sigma(gate(1));
               const Vec z = squash(gate(2)), o = sigma(gate(3));
               float* const cell = s_.cell(k, u, row);
               const Vec c = f * Float32::load(cell) + i * z;
               const Vec h = o * squash(c);
               Float32::store(cell, c);
               Format::store(new_state + at, h);
               if (has_values) {  // in the place of the input's product: `between` takes it
                 Float32::store(s_.projected.at(0, u, row), first_lanes(h, m_.H - u * kLanes));
               }
               if (has_nan(h)) __atomic_store_n(&s_.broken[row], 1, __ATOMIC_RELAXED);
             });
  }

  // Layer norm and residual of layer `k`, whole rows.
  void between(int64_t k, int64_t row) {
    const DecodeLayer& layer = m_.layers[k];
    float* const value = s_.value(row);
    const bool adds = m_.is_residual && width_into(k) == m_.H;
    float mean = 0.0f, scale = 1.0f;
    if (layer.gamma != nullptr) {
      Vec sum{}, squares{};
      for (int64_t u = 0; u < s_.units; ++u) sum += Float32::load(s_.projected.at(0, u, row));
      mean = sum_lanes(sum) / static_cast<float>(m_.H);
      for (int64_t u = 0; u < s_.units; ++u) {
        const Vec offset = Float32::load(s_.projected.at(0, u, row)) - mean;
        squares += first_lanes(offset * offset, m_.H - u * kLanes);
      }
      scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(m_.H) + kNormEpsilon);
    }
    for (int64_t u = 0; u < s_.units; ++u) {
      const int64_t at = u * kLanes, count = m_.H - at;
      Vec y = Float32::load(s_.projected.at(0, u, row));
      if (layer.gamma != nullptr) {
        y = (y - mean) * scale * load_part<Float32>(layer.gamma + at, count) +
            load_part<Float32>(layer.beta + at, count);
      }
      if (adds) y += Float32::load(value + at);
      Float32::store(value + at, first_lanes(y, count));
    }
    set_input(row, m_.H);
  }

  // What the last layer puts out, times the projection: `set_input` makes it an operand.
  void project(int64_t step) {
    const Right<Format> projection(m_.projection, m_.H, false);
    const bool has_scales = needs_values(m_.L - 1);
    multiply(engine_, output_of(m_.L - 1, step, projection.inner), {0, s_.rows}, projection,
             {my_projected_.begin, my_projected_.end, step % 2 != 0},
             [&](int64_t row, int64_t strip, int num, const float* sums) {
               const float scale = has_scales ? s_.scales[row] : 1.0f;
               for (int64_t q = strip; q < strip + num; ++q) {
                 Float32::store(s_.value(row) + q * kLanes,
                                projection.value(sums + (q - strip) * kLanes, q, scale));
               }
             });
  }

  void multiply_output(int64_t step) {
    const Right<Format> output(m_.output, m_.R, false);
    const bool has_scales = has_projection() || needs_values(m_.L - 1);
    const auto left = has_projection() ? plain(const_cast<const Element*>(s_.inputs),
                                               s_.input_stride, output.inner)
                                       : output_of(m_.L - 1, step, output.inner);
    multiply(engine_, left, {0, s_.rows}, output, {my_strips_.begin, my_strips_.end, step % 2 != 0},
             [&](int64_t row, int64_t strip, int num, const float* sums) {
               const float scale = has_scales ? s_.scales[row] : 1.0f;
               float* const out = s_.logits + row * s_.logit_stride;
               for (int64_t q = strip; q < strip + num; ++q) {
                 const Vec bias = Float32::load(m_.output_bias + q * kLanes);
                 Float32::store(out + q * kLanes,
                                output.value(sums + (q - strip) * kLanes, q, scale) + bias);
               }
             });
  }

  // What follows from the logits of a row: scores, the next token, or the row's end.
  void finish_row(int64_t at) {
    DecodeRow& row = g_.rows[at];
    const uint8_t flags = s_.flags[at];
    if ((flags & kActive) == 0) return;
    s_.flags[at] = 0;
    if (row.num_read < row.num_given) {
      if (row.num_read > 0 || !row.knows_first) {
        remember(*row.sampler, row.given[row.num_read], false);
      }
      ++row.num_read;
    }
    if (s_.broken[at] != 0) {
      row.status = RowStatus::not_finite;
      return;
    }
    int32_t next = row.num_read < row.num_given ? row.given[row.num_read] : -1;
    if ((flags & (kReports | kWrites)) != 0) {
      const Scores scores(s_.logits + at * s_.logit_stride, s_.logit_stride, room());
      if (scores.is_damaged()) {
        row.status = RowStatus::not_finite;
        return;
      }
      if ((flags & kWrites) != 0) {
        next = write(row, scores);
        if (row.status != RowStatus::running) return;
      } else {
        report(scores, row, next, scores.total(scores.highest()));
      }
    } else if (next < 0) {  // nothing is to be written, and all was read
      row.status = RowStatus::full;
      return;
    }
    read_next(at, next);
  }

  // This thread's room for choosing.
  float* room() const { return s_.choices + me_.index * (kRooms + 1) * s_.logit_stride; }

  int32_t write(DecodeRow& row, const Scores& scores) {
    Sampler& sampler = *row.sampler;
    const bool reports = sampler.num_top >= 0;
    const Scores given(room() + kRooms * s_.logit_stride, s_.logit_stride, room());
    if (reports) {  // choosing changes the logits
      __builtin_memcpy(given.logits, scores.logits, s_.logit_stride * sizeof(float));
    }
    const int32_t token = choose(scores, sampler, m_.V);
    if (token < 0) {
      row.status = RowStatus::not_finite;
      return token;
    }
    if (reports) report(given, row, token, given.total(given.highest()));
    row.written[row.num_written++] = token;
    remember(sampler, token, true);
    if (is_stopped(sampler)) {
      row.status = RowStatus::stopped;
    } else if (row.num_written == row.room) {
      row.status = RowStatus::full;
    }
    return token;
  }

  const DecodeArgs& g_;
  const DecodeModel& m_;
  const Member me_;
  const DecodeScratch<Format> s_;
  Range* const my_units_;  // [layer]
  const Range my_projected_, my_strips_, my_rows_;
  Engine engine_;
  int64_t steps_ = 0;
};

}  // namespace fastlstm::FASTLSTM_ISA
