// Output projection and cross-entropy: logits of a chunk of rows live in the caches only.
//
// Threads share the rows of a chunk for logits, softmax and the gradient of the features, and then
// blocks of the weight for its gradient, so that every sum runs over all rows in order
// whatever the number of threads.
#pragma once

#include "cpu/activations.h"
#include "cpu/items.h"
#include "cpu/pack.h"
#include "cpu/threads.h"
#include "projection.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr int64_t kMostRows = 512;  // of a chunk

// Sizes and scratch of one call, shared by the team. With a null base only `bytes` counts.
template <typename Format>
struct ProjectionScratch {
  using Element = typename Format::Element;

  explicit ProjectionScratch(const ProjectionArgs& g)
      : strips(ceil_div(g.V, kLanes)),
        feature_strips(ceil_div(g.H, kLanes)),
        inner(round_up(g.H, Format::kInner)),
        logit_inner(round_up(g.V, Format::kInner)),
        stride(logit_stride(g.V)) {
    constexpr int64_t kElements = 1 << 22, kGrain = 64;
    constexpr int64_t kCached = 512 << 10, kSome = 48;
    const int64_t fitting = kElements / stride / kGrain * kGrain;
    rows = fitting < kGrain ? kGrain : min_of(fitting, kMostRows);
    group = g.V * g.H * int64_t{sizeof(Element)} <= kCached ? kSome : rows;
    left_stride = rows + 64 / int64_t{sizeof(Element)};
    const bool has_gradient = g.df != nullptr || g.dw != nullptr || g.db != nullptr;
    const bool has_own = has_gradient && g.d == nullptr && Format::kPair == 2;
    Carver carver(g.workspace);
    weights = carver.take<Element>(g.targets == nullptr ? 0 : strips * inner * kLanes);
    transposed = carver.take<Element>(g.df == nullptr ? 0 : feature_strips * logit_inner * kLanes);
    logits = carver.take<float>(g.targets == nullptr ? 0 : rows * stride);
    d = carver.take<Element>(has_own ? rows * stride : 0);
    if (Format::kPair == 1) d = reinterpret_cast<Element*>(logits);
    const bool has_left = g.dw != nullptr || g.db != nullptr;
    left = carver.take<Element>(has_left ? strips * kLanes * left_stride : 0);
    right = carver.take<Element>(g.dw == nullptr ? 0 : g.threads * right_size());
    items = carver.take<char>(Items::bytes(g.threads));
    bytes = carver.bytes();
  }

  int64_t right_size() const { return kStrips * rows * kLanes; }

  int64_t strips, feature_strips;  // of V and H columns
  int64_t inner, logit_inner;      // H and V as inner dimensions
  int64_t stride;                  // of a row of logits or their gradients
  int64_t rows;                    // of a chunk
  int64_t group;                   // rows that go through it all while the weight is in the cache
  int64_t left_stride;             // one more cache line than rows: see ForwardScratch
  Element* weights;                // strips over V
  Element* transposed;             // strips over H
  float* logits;                   // [rows][stride]
  Element* d;                      // [rows][stride], for float32 in place of the logits
  Element* left;                   // [V][left_stride]: d transposed
  Element* right;                  // [thread]: a panel of features
  char* items;
  int64_t bytes;
};

// Strips of w (V, H) with V as the inner dimension: columns first, first + 1, ...
template <typename Format>
void pack_rows(const float* w, int64_t V, int64_t H, int64_t inner, int64_t first,
               typename Format::Element* strip) {
  const auto row = [&](int64_t v) {
    return v < V ? load_part<Float32>(w + v * H + first, H - first) : Vec{};
  };
  for (int64_t v = 0; v < inner; v += Format::kPair) {
    if constexpr (Format::kPair == 1) {
      Float32::store(strip + v * kLanes, row(v));
    } else {
      store_words(strip + v * kLanes, pair_rows(round_to_bf16(row(v)), round_to_bf16(row(v + 1))));
    }
  }
}

template <typename Format>
void pack_projection(const ProjectionArgs& g, const ProjectionScratch<Format>& s, Member me) {
  if (g.targets != nullptr) {
    const Range mine = part_of({0, s.strips}, me.index, me.count);
    for (int64_t u = mine.begin; u < mine.end; ++u) {
      const auto row_of = [&](int64_t lane) {
        const int64_t row = u * kLanes + lane;
        return row < g.V ? row : -1;
      };
      pack_row_strip<Format>(g.weight, g.H, s.inner, row_of, s.weights + u * s.inner * kLanes);
    }
  }
  if (g.df == nullptr) return;
  const Range mine = part_of({0, s.feature_strips}, me.index, me.count);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    pack_rows<Format>(g.weight, g.V, g.H, s.logit_inner, u * kLanes,
                      s.transposed + u * s.logit_inner * kLanes);
  }
}

// Turns a row of logits into the gradient of its cross-entropy, which it returns.
template <typename Format>
float softmax_row(float* logits, int64_t V, int64_t stride, int64_t target,
                  typename Format::Element* d) {
  Vec most = splat(-__builtin_inff());
  for (int64_t k = 0; k < V; k += kLanes) most = max_of(Float32::load(logits + k), most);
  float lanes[kLanes], highest = -__builtin_inff();
  Float32::store(lanes, most);
  for (int64_t l = 0; l < kLanes; ++l) highest = lanes[l] > highest ? lanes[l] : highest;
  const float at_target = logits[target];
  Vec sums{};
  for (int64_t k = 0; k < V; k += kLanes) {
    const Vec x = max_of(Float32::load(logits + k) - highest, splat(-80.0f));
    Vec scale;
    const Vec e = reduced_expm1(x, scale);
    const Vec power = first_lanes(scale + scale * e, V - k);
    Float32::store(logits + k, power);
    sums += power;
  }
  const float sum = sum_lanes(sums);
  if (d != nullptr) {
    const float share = 1.0f / sum;
    logits[target] -= sum;
    for (int64_t k = 0; k < V; k += kLanes) {
      Format::store(d + k, Float32::load(logits + k) * share);
    }
    for (int64_t k = round_up(V, kLanes); k < stride; k += kLanes) Format::store(d + k, Vec{});
  }
  return __builtin_logf(sum) + (highest - at_target);
}

// Logits of some rows of a chunk, then what softmax makes of them.
template <typename Format, typename Engine>
void project_rows(const ProjectionArgs& g, const ProjectionScratch<Format>& s, Engine& engine,
                  int64_t first, Range rows, typename Format::Element* d) {
  const auto* const features =
      static_cast<const typename Format::Element*>(g.features) + first * g.H;
  multiply(engine, plain(features, g.H, s.inner), rows, s.weights, s.inner * kLanes, {0, s.strips},
           s.inner, [&](int64_t row, int64_t strip, int num, const float* sums) {
             for (int q = 0; q < num; ++q) {
               const int64_t k = (strip + q) * kLanes;
               Vec v = Float32::load(sums + q * kLanes);
               if (g.bias != nullptr) v += load_part<Float32>(g.bias + k, g.V - k);
               Float32::store(s.logits + row * s.stride + k, v);
             }
           });
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* const logits = s.logits + row * s.stride;
    const int64_t pad = round_up(g.V, kLanes);
    for (int64_t k = g.V; k < pad; ++k) logits[k] = -__builtin_inff();
    g.nats[first + row] = softmax_row<Format>(logits, g.V, s.stride, g.targets[first + row],
                                              d == nullptr ? nullptr : d + row * s.stride);
  }
}

// The gradient of the features of some rows of a chunk.
template <typename Format, typename Engine>
void project_back(const ProjectionArgs& g, const ProjectionScratch<Format>& s, Engine& engine,
                  int64_t first, Range rows, const typename Format::Element* d) {
  auto* const df = static_cast<typename Format::Element*>(g.df) + first * g.H;
  multiply(engine, plain(d, s.stride, s.logit_inner), rows, s.transposed, s.logit_inner * kLanes,
           {0, s.feature_strips}, s.logit_inner,
           [&](int64_t row, int64_t strip, int num, const float* sums) {
             for (int q = 0; q < num; ++q) {
               const int64_t k = (strip + q) * kLanes;
               store_part<Format>(df + row * g.H + k, Float32::load(sums + q * kLanes) * g.scale,
                                  g.H - k);
             }
           });
}

// Where the rows of a chunk are that the gradients of the weights are formed of.
template <typename Element>
struct ChunkRows {
  // Rows first to first + count; `own` are their gradients where g.d keeps none.
  ChunkRows(const ProjectionArgs& g, int64_t first, int64_t count, int64_t stride,
            const Element* own) {
    const auto* const all = static_cast<const Element*>(g.features);
    const auto* const kept = static_cast<const Element*>(g.d);
    for (int64_t r = 0; r < count; ++r) {
      features[r] = all + (first + r) * g.H;
      d[r] = kept == nullptr ? own + r * stride : kept + (first + r) * stride;
    }
  }

  const Element* features[kMostRows];
  const Element* d[kMostRows];
};

// left[v][row] = d[row][v] for some rows of a chunk that has `count`; zero from there on, as far as
// the product reads.
template <typename Format>
void transpose_gradient(const ProjectionScratch<Format>& s, Range rows, int64_t count,
                        const ChunkRows<typename Format::Element>& at) {
  constexpr int64_t kPair = Format::kPair;
  const int64_t end = rows.end == count ? round_up(count, Format::kInner) : rows.end;
  for (int64_t r = rows.begin; r < end; r += kLanes * kPair) {
    for (int64_t k = 0; k < s.strips * kLanes; k += kLanes) {
      Words block[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        const int64_t row = r + j * kPair;
        if constexpr (kPair == 1) {
          block[j] = row < count ? bits_of<Words>(Float32::load(at.d[row] + k)) : Words{};
        } else {
          Halves low{}, high{};
          if (row < count) __builtin_memcpy(&low, at.d[row] + k, sizeof low);
          if (row + 1 < count) __builtin_memcpy(&high, at.d[row + 1] + k, sizeof high);
          block[j] = pair_rows(low, high);
        }
      }
      transpose(block);
      for (int64_t j = 0; j < kLanes; ++j) {
        store_words(s.left + (k + j) * s.left_stride + r, block[j]);
      }
    }
  }
}

// A panel of features as a right operand: strips [row / pair][lane][pair], zero from `count` on.
template <typename Format>
void pack_features(const ProjectionArgs& g, const ProjectionScratch<Format>& s,
                   const ChunkRows<typename Format::Element>& at, int64_t count, int64_t padded,
                   Range strips, typename Format::Element* right) {
  using Element = typename Format::Element;
  for (int64_t q = 0; q < strips.end - strips.begin; ++q) {
    const int64_t k = (strips.begin + q) * kLanes;
    Element* const strip = right + q * s.rows * kLanes;
    for (int64_t r = 0; r < padded; r += Format::kPair) {
      if constexpr (Format::kPair == 1) {
        Float32::store(strip + r * kLanes, load_part<Float32>(at.features[r] + k, g.H - k));
      } else {
        Halves low{}, high{};
        if (r < count) __builtin_memcpy(&low, at.features[r] + k, sizeof low);
        if (r + 1 < count) __builtin_memcpy(&high, at.features[r + 1] + k, sizeof high);
        store_words(strip + r * kLanes, pair_rows(low, high));
      }
    }
  }
}

// Adds a chunk's part to the gradients of weight and bias: the part of one thread.
template <typename Format, typename Engine>
void project_weights(const ProjectionArgs& g, const ProjectionScratch<Format>& s, Engine& engine,
                     const ChunkRows<typename Format::Element>& at, int64_t first, int64_t count,
                     Items& items, Member me) {
  const int64_t padded = round_up(count, Format::kInner);
  const bool is_new = first == 0;
  if (g.dw != nullptr) {
    auto* const right = s.right + me.index * s.right_size();
    const auto blocks =
        Blocks::of<Engine>(s.feature_strips, g.V, me.count, kStrips, 2 * kLanes * padded);
    items.each(blocks, false, [&](const Share& item) __attribute__((noinline)) {
      for (int64_t strip = item.units.begin; strip < item.units.end; strip += kStrips) {
        const Range panel{strip, min_of(strip + kStrips, item.units.end)};
        pack_features(g, s, at, count, padded, panel, right);
        multiply(engine, plain(s.left, s.left_stride, padded), item.lanes, right, s.rows * kLanes,
                 {0, panel.end - panel.begin}, padded,
                 [&](int64_t v, int64_t, int num, const float* sums) {
                   for (int q = 0; q < num; ++q) {
                     const int64_t k = (strip + q) * kLanes;
                     float* const out = g.dw + v * g.H + k;
                     Vec sum = Float32::load(sums + q * kLanes) * g.scale;
                     if (!is_new) sum += load_part<Float32>(out, g.H - k);
                     store_part<Float32>(out, sum, g.H - k);
                   }
                 });
      }
    });
  }
  if (g.db == nullptr) return;
  const Range mine = part_of({0, g.V}, me.index, me.count);
  for (int64_t v = mine.begin; v < mine.end; ++v) {
    Vec sums{};
    for (int64_t r = 0; r < count; r += kLanes) {
      sums += Format::load(s.left + v * s.left_stride + r);
    }
    g.db[v] = (is_new ? 0.0f : g.db[v]) + sum_lanes(sums) * g.scale;
  }
}

template <typename Format>
int64_t projection_workspace(const ProjectionArgs& g) {
  return ProjectionScratch<Format>(g).bytes;
}

template <typename Format, typename Engine>
void project(const ProjectionArgs& g, Member me) {
  using Element = typename Format::Element;
  FlushDenormals flush;
  Engine engine;
  const ProjectionScratch<Format> s(g);
  const bool has_left = g.dw != nullptr || g.db != nullptr;
  const bool has_gradient = g.d != nullptr || g.df != nullptr || has_left;
  Items items(s.items, me);
  pack_projection(g, s, me);
  me.barrier->wait(me.count);
  for (int64_t first = 0; first < g.N; first += s.rows) {
    const int64_t count = min_of(s.rows, g.N - first);
    Element* d = nullptr;
    if (has_gradient) d = g.d == nullptr ? s.d : static_cast<Element*>(g.d) + first * s.stride;
    const auto blocks = Blocks::of<Engine>(1, count, me.count, 1, 2 * g.V * g.H);
    items.each(blocks, false, [&](const Share& item) __attribute__((noinline)) {
      for (int64_t begin = item.lanes.begin; begin < item.lanes.end; begin += s.group) {
        const Range some{begin, min_of(begin + s.group, item.lanes.end)};
        if (g.targets != nullptr) project_rows(g, s, engine, first, some, d);
        if (g.df != nullptr) project_back(g, s, engine, first, some, d);
      }
    });
    if (has_left) {
      const ChunkRows<Element> at(g, first, count, s.stride, d);
      me.barrier->wait(me.count);
      const Range mine = part_of({0, count}, me.index, me.count, kLanes * Format::kPair);
      transpose_gradient(s, mine, count, at);
      me.barrier->wait(me.count);
      project_weights(g, s, engine, at, first, count, items, me);
    }
    me.barrier->wait(me.count);  // a shorter chunk is shared out otherwise
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
