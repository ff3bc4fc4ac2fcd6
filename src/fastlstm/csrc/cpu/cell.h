// The cell of a layer: torch's, or one with options (CellCall in lstm.h).
#pragma once

#include "cpu/activations.h"
#include "lstm.h"

namespace fastlstm::FASTLSTM_ISA {

// Share of its old value that a unit keeps in a step: of its output, of its cell.
struct Keep {
  Vec h, c;
};

// An infinite value that is not kept leaves no trace.
FASTLSTM_INLINE Vec mix(Vec keep, Vec old, Vec fresh) {
  const Vec mixed = keep * old + (1.0f - keep) * fresh;
  return keep == 1.0f ? old : (keep == 0.0f ? fresh : mixed);
}

template <typename Format>
struct PlainCell {
  static constexpr bool kIsPlain = true;
  explicit PlainCell(const CellCall*) {}

  static FASTLSTM_INLINE Vec gate(Vec x) { return Exactly<Format>::sigmoid(x); }
  static FASTLSTM_INLINE Vec squash(Vec x) { return Exactly<Format>::tanh(x); }
  // Derivatives by their functions' values.
  static FASTLSTM_INLINE Vec gate_slope(Vec y) { return y * (1.0f - y); }
  static FASTLSTM_INLINE Vec squash_slope(Vec y) { return 1.0f - y * y; }
  static constexpr bool has_zoneout() { return false; }
  static FASTLSTM_INLINE Keep keep(int64_t, int64_t) { return {Vec{}, Vec{}}; }
};

template <typename T>
FASTLSTM_INLINE T hash32(T x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

template <typename Format>
class GeneralCell {
 public:
  static constexpr bool kIsPlain = false;
  explicit GeneralCell(const CellCall* v)
      : squash_(v->activation),
        gate_(v->recurrent_activation),
        zoneout_h_(static_cast<float>(v->zoneout_h)),
        zoneout_c_(static_cast<float>(v->zoneout_c)),
        threshold_h_(threshold(v->zoneout_h)),
        threshold_c_(threshold(v->zoneout_c)),
        first_row_(static_cast<uint32_t>(v->first_row)),
        seed_(v->seed == nullptr ? 0 : static_cast<uint64_t>(*v->seed)),
        is_random_(v->seed != nullptr) {}

  FASTLSTM_INLINE Vec gate(Vec x) const { return activate(gate_, x); }
  FASTLSTM_INLINE Vec squash(Vec x) const { return activate(squash_, x); }
  FASTLSTM_INLINE Vec gate_slope(Vec y) const { return slope(gate_, y); }
  FASTLSTM_INLINE Vec squash_slope(Vec y) const { return slope(squash_, y); }
  FASTLSTM_INLINE bool has_zoneout() const { return zoneout_h_ != 0.0f || zoneout_c_ != 0.0f; }

  // Of the units from `unit` on in row t * B + b: drawn from the seed, the same in both passes.
  FASTLSTM_INLINE Keep keep(int64_t row, int64_t unit) const {
    if (!is_random_) return {splat(zoneout_h_), splat(zoneout_c_)};
    const auto low = static_cast<uint32_t>(seed_), high = static_cast<uint32_t>(seed_ >> 32);
    const uint32_t key = hash32(hash32((first_row_ + static_cast<uint32_t>(row)) ^ low) + high);
    Words units{};
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) units[l] = static_cast<uint32_t>(unit + l);
    const Words drawn = hash32(units * 0x9e3779b9u + key);
    return {one_where((drawn & 0xffffu) < threshold_h_), one_where((drawn >> 16) < threshold_c_)};
  }

 private:
  // Of 65,536 draws, how many keep the old value: CellCall.thresholds of ops/cell_call.py.
  static FASTLSTM_INLINE uint32_t threshold(double p) {
    return static_cast<uint32_t>(__builtin_rint(p * 65536.0));
  }

  template <typename Mask>
  static FASTLSTM_INLINE Vec one_where(Mask mask) {
    return mask ? splat(1.0f) : Vec{};
  }

  static FASTLSTM_INLINE Vec activate(Activation which, Vec x) {
    switch (which) {
      case Activation::sigmoid:
        return Exactly<Format>::sigmoid(x);
      case Activation::tanh:
        return Exactly<Format>::tanh(x);
      case Activation::hard_sigmoid:
        return min_of(max_of(x * (1.0f / 6.0f) + 0.5f, Vec{}), splat(1.0f));
      case Activation::relu:
        return max_of(x, Vec{});
      case Activation::softsign:
        return x / (1.0f + magnitude(x));
      default:
        return x;
    }
  }

  static FASTLSTM_INLINE Vec slope(Activation which, Vec y) {
    switch (which) {
      case Activation::sigmoid:
        return y * (1.0f - y);
      case Activation::tanh:
        return 1.0f - y * y;
      case Activation::hard_sigmoid:
        return ((y > 0.0f) & (y < 1.0f)) ? splat(1.0f / 6.0f) : Vec{};
      case Activation::relu:
        return y > 0.0f ? splat(1.0f) : Vec{};
      case Activation::softsign: {
        const Vec rest = 1.0f - magnitude(y);
        return rest * rest;
      }
      default:
        return splat(1.0f);
    }
  }

  static FASTLSTM_INLINE Vec magnitude(Vec x) {
    return bits_of<Vec>(bits_of<Words>(x) & 0x7fffffffu);
  }

  Activation squash_, gate_;
  float zoneout_h_, zoneout_c_;
  uint32_t threshold_h_, threshold_c_;
  uint32_t first_row_;
  uint64_t seed_;
  bool is_random_;
};

// The new cell before zoneout, of the activated gates and the old cell.
template <typename Cell>
FASTLSTM_INLINE Vec new_cell(const Cell&, Vec i, Vec f, Vec z, Vec old) {
  return f * old + i * z;
}

// What the gradient of a new cell gives: to the arguments of its gates, to the old cell.
struct CellGradients {
  Vec i, f, z, old;
};

template <typename Cell>
FASTLSTM_INLINE CellGradients new_cell_backward(const Cell& cell, Vec dc, Vec i, Vec f, Vec z,
                                                Vec old) {
  return {dc * z * cell.gate_slope(i), dc * old * cell.gate_slope(f), dc * i * cell.squash_slope(z),
          dc * f};
}

}  // namespace fastlstm::FASTLSTM_ISA
