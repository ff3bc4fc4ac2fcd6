// The next token from a row of logits, on vectors: no sort, no allocation.
//
// Scores are log probabilities divided by the temperature, 0 for the likeliest. What top-k, top-p
// and min-p keep are the scores above some bound; it is found by halving the range in which it lies
// until no score is left between. Numbers are drawn by Philox4x32-10 (Salmon et al. 2011) from the
// seed and the count of draws.
#pragma once

#include "cpu/quantized.h"
#include "decode.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr float kLowest = -80.0f;  // a score below it has no chance

FASTLSTM_INLINE Vec exp(Vec x) {
  Vec scale;
  const Vec e = reduced_expm1(max_of(x, splat(kLowest)), scale);
  return x < kLowest ? Vec{} : scale + scale * e;
}

template <typename Mask>
FASTLSTM_INLINE Vec where(Mask mask, Vec v) {
  return mask ? v : Vec{};
}

FASTLSTM_INLINE double uniform(uint64_t seed, uint64_t number) {
  uint32_t c[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), 0, 0};
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(a)};
    for (int k = 0; k < 4; ++k) c[k] = next[k];
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c[0]} << 32 | c[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

inline constexpr int kRooms = 4;  // of a Scores

// Logits of one row, `size` of them in whole vectors, and room for as many floats four times.
struct Scores {
  Scores(float* given, int64_t count, float* room)
      : logits(given),
        weights(room),
        sums(room + count),
        top_scores(room + 2 * count),
        top_weights(room + 3 * count),
        size(count) {}

  float* logits;
  float* weights;
  float* sums;         // of every vector of weights
  float* top_scores;   // the scores that may be kept, side by side
  float* top_weights;  // theirs
  int64_t size;

  FASTLSTM_INLINE Vec at(int64_t k) const { return Float32::load(logits + k); }

  float highest() const {
    Vec top = at(0);
    for (int64_t k = kLanes; k < size; k += kLanes) top = max_of(top, at(k));
    return max_lane(top);
  }
  // A NaN or plus infinity anywhere.
  bool is_damaged() const {
    Words bad{};
    for (int64_t k = 0; k < size; k += kLanes) {
      const Words bits = bits_of<Words>(at(k));
      bad |= (bits & 0x7f800000u) == 0x7f800000u ? (bits ^ 0xff800000u) : Words{};
    }
    return is_any(bad);
  }
  // log sum exp
  float total(float top) const {
    double sum = 0.0;
    for (int64_t k = 0; k < size; k += kLanes) sum += sum_lanes(FASTLSTM_ISA::exp(at(k) - top));
    return top + static_cast<float>(__builtin_log(sum));
  }
};

// How many scores are at least a bound, and what they weigh.
struct Kept {
  int64_t count;
  float weight;
};

// Scores among which a bound lies, and what is above all of them.
struct Pool {
  const float* scores;
  const float* weights;
  int64_t size;
  Kept above;
};

// What is kept by each of some bounds; without `kWeighs` the weights count for nothing.
template <bool kWeighs, int kBounds>
FASTLSTM_INLINE void kept_above(const Pool& pool, const float (&bounds)[kBounds],
                                Kept (&kept)[kBounds]) {
  int64_t counts[kBounds] = {};
  Vec weights[kBounds] = {};
  for (int64_t k = 0; k < pool.size; k += kLanes) {
    const Vec score = Float32::load(pool.scores + k);
#pragma GCC unroll 3
    for (int n = 0; n < kBounds; ++n) {
      counts[n] += count_from(score, bounds[n]);
      if constexpr (kWeighs) {
        weights[n] += where(score >= bounds[n], Float32::load(pool.weights + k));
      }
    }
  }
#pragma GCC unroll 3
  for (int n = 0; n < kBounds; ++n) {
    kept[n] = {pool.above.count + counts[n],
               kWeighs ? pool.above.weight + sum_lanes(weights[n]) : 0.0f};
  }
}

template <bool kWeighs>
FASTLSTM_INLINE Kept kept_above(const Pool& pool, float bound) {
  const float bounds[1] = {bound};
  Kept kept[1];
  kept_above<kWeighs>(pool, bounds, kept);
  return kept[0];
}

// The scores from `low` to below `high`, side by side in the room of `s`; `above`: from `high` on.
// The pool may lie there already: a whole vector is stored, never beyond the one that was read.
FASTLSTM_INLINE Pool narrowed(const Scores& s, const Pool& pool, float low, float high,
                              Kept above) {
  int64_t count = 0;
  for (int64_t k = 0; k < pool.size; k += kLanes) {
    count += store_between(pool.scores + k, pool.weights + k, low, high, s.top_scores + count,
                           s.top_weights + count);
  }
  const int64_t whole = round_up(count, kLanes);
  for (int64_t k = count; k < whole; ++k) {
    s.top_scores[k] = 2.0f * kLowest;
    s.top_weights[k] = 0.0f;
  }
  return {s.top_scores, s.top_weights, whole, above};
}

FASTLSTM_INLINE void cut_in_four(float low, float high, float (&bounds)[3]) {
  const float step = 0.25f * (high - low);
  for (int n = 0; n < 3; ++n) bounds[n] = low + static_cast<float>(n + 1) * step;
}

// The highest bound >= `low` above which enough of the pool is kept; at most `below` scores are
// above `low`. The range is cut in four at a time: three counts in one pass cost little more than
// one. Of a large vocabulary only what still lies in the range is looked at again.
template <bool kWeighs, typename Enough>
FASTLSTM_INLINE float highest_bound(const Scores& s, Pool pool, float low, int64_t below,
                                    Enough&& enough) {
  constexpr int64_t kLarge = 512;
  float high = 1.0f;  // no score is that high
  Kept above{};
  float bounds[3] = {-12.0f, -6.0f, -2.0f};  // where it mostly lies
  if (low >= bounds[0]) cut_in_four(low, high, bounds);
  while (below - above.count > 1) {
    if (bounds[0] <= low || bounds[2] >= high) break;  // equal scores
    Kept kept[3];
    kept_above<kWeighs>(pool, bounds, kept);
    for (int n = 2; n >= 0; --n) {
      if (enough(kept[n])) {
        low = bounds[n];
        below = kept[n].count;
        break;
      }
      high = bounds[n];
      above = kept[n];
    }
    if (pool.size > kLarge && 2 * (below - above.count) < pool.size) {
      pool = narrowed(s, pool, low, high, above);
    }
    cut_in_four(low, high, bounds);
  }
  return low;
}

FASTLSTM_INLINE int32_t draw(const Scores& s, Sampler& sampler) {
  double total = 0.0;
  for (int64_t k = 0; k < s.size; k += kLanes) total += s.sums[k / kLanes];
  const double wanted = uniform(sampler.seed, sampler.num_drawn++) * total;
  double sum = 0.0;
  int64_t last = 0;
  for (int64_t k = 0; k < s.size; k += kLanes) {
    const float part = s.sums[k / kLanes];
    if (part == 0.0f) continue;
    last = k;
    if (sum + part > wanted) break;
    sum += part;
  }
  int64_t found = last;
  for (int64_t k = last; k < last + kLanes; ++k) {
    if (s.weights[k] == 0.0f) continue;
    found = k;
    sum += s.weights[k];
    if (sum > wanted) break;
  }
  return static_cast<int32_t>(found);
}

inline void apply_penalties(const Scores& s, const Sampler& sampler, int64_t V) {
  float* const l = s.logits;
  if (sampler.repetition_penalty != 1.0f) {
    const float total = s.total(s.highest());
    const int64_t count = min_of(sampler.num_recent, kRecent);
    float before[kRecent];  // a token that came twice is changed once
    for (int64_t k = 0; k < count; ++k) before[k] = l[sampler.recent[k]];
    for (int64_t k = 0; k < count; ++k) {
      l[sampler.recent[k]] = total + (before[k] - total) * sampler.repetition_penalty;
    }
  }
  if (sampler.counts != nullptr) {
    for (int64_t k = 0; k < V; k += kLanes) {
      Halves times{};
      __builtin_memcpy(&times, sampler.counts + k, min_of(kLanes, V - k) * sizeof(uint16_t));
      const Vec count = __builtin_convertvector(__builtin_convertvector(times, Integers), Vec);
      const Vec off = sampler.presence_penalty + sampler.frequency_penalty * count;
      Float32::store(l + k, s.at(k) - where(count > 0.0f, off));
    }
  }
  for (int64_t k = 0; k < sampler.num_biases; ++k) l[sampler.bias_tokens[k]] += sampler.biases[k];
}

// The lowest score that top-k and then top-p keep.
inline float lowest_kept(const Scores& s, const Sampler& sampler, bool has_top_k, bool has_top_p) {
  Pool pool{s.logits, s.weights, s.size, {}};
  float bound = kLowest;
  if (has_top_k) {
    bound = highest_bound<false>(s, pool, bound, s.size,
                                 [&](Kept kept) { return kept.count >= sampler.top_k; });
  }
  if (has_top_p) {
    if (bound > kLowest) pool = narrowed(s, pool, bound, 1.0f, {});
    const Kept found = kept_above<true>(pool, bound);
    const float wanted = sampler.top_p * found.weight;
    bound = highest_bound<true>(s, pool, bound, found.count,
                                [&](Kept kept) { return kept.weight >= wanted; });
  }
  return bound;
}

// The next token by the sampler's rules, -1 where none has a chance; changes the logits.
inline int32_t choose(const Scores& s, Sampler& sampler, int64_t V) {
  apply_penalties(s, sampler, V);
  const float top = s.highest();
  if (!(top > -__builtin_inff())) return -1;
  if (sampler.temperature == 0.0f) {
    for (int64_t k = 0; k < V; ++k) {
      if (s.logits[k] == top) return static_cast<int32_t>(k);
    }
  }
  const float rate = 1.0f / (sampler.temperature > 1e-6f ? sampler.temperature : 1e-6f);
  for (int64_t k = 0; k < s.size; k += kLanes) {
    const Vec score = max_of((s.at(k) - top) * rate, splat(2.0f * kLowest));
    const Vec weight = FASTLSTM_ISA::exp(score);
    Float32::store(s.logits + k, score);
    Float32::store(s.weights + k, weight);
    s.sums[k / kLanes] = sum_lanes(weight);
  }
  float bound = kLowest;
  const bool has_top_k = sampler.top_k > 0 && sampler.top_k < V, has_top_p = sampler.top_p < 1.0f;
  if (has_top_k || has_top_p) bound = lowest_kept(s, sampler, has_top_k, has_top_p);
  if (sampler.min_p > 0.0f) {
    const float lowest = static_cast<float>(__builtin_log(sampler.min_p));
    bound = lowest > bound ? lowest : bound;
  }
  if (bound > kLowest) {
    for (int64_t k = 0; k < s.size; k += kLanes) {
      const Vec weight = where(s.at(k) >= bound, Float32::load(s.weights + k));
      Float32::store(s.weights + k, weight);
      s.sums[k / kLanes] = sum_lanes(weight);
    }
  }
  return draw(s, sampler);
}

// Whether what was written ends with one of the stop sequences.
inline bool is_stopped(const Sampler& sampler) {
  const int32_t* stop = sampler.stops;
  for (int64_t n = 0; n < sampler.num_stops; ++n) {
    const int64_t length = *stop++;
    bool is_end = length <= sampler.num_written;
    for (int64_t k = 0; is_end && k < length; ++k) {
      is_end = sampler.recent[(sampler.num_recent - length + k) % kRecent] == stop[k];
    }
    if (is_end) return true;
    stop += length;
  }
  return false;
}

// Remembers a token that the stream reads or writes.
inline void remember(Sampler& sampler, int32_t token, bool is_written) {
  sampler.recent[sampler.num_recent++ % kRecent] = token;
  if (!is_written) return;
  ++sampler.num_written;
  if (sampler.counts != nullptr && sampler.counts[token] < 65535) ++sampler.counts[token];
}

// Reports the log probability of `token` and of the likeliest; logits as the model gave them.
inline void report(const Scores& s, DecodeRow& row, int32_t token, float total) {
  const int64_t num_top = row.sampler->num_top, at = row.num_scored++;
  row.scores[at] = s.logits[token] - total;
  float last = __builtin_inff();
  int64_t last_token = -1;
  for (int64_t n = 0; n < num_top; ++n) {  // the next below (last, last_token)
    float best = -__builtin_inff();
    int64_t found = -1;
    for (int64_t k = 0; k < s.size; ++k) {
      const float l = s.logits[k];
      const bool is_left = l < last || (l == last && k > last_token);
      if (is_left && l > best) {
        best = l;
        found = k;
      }
    }
    row.top_tokens[at * num_top + n] = static_cast<int32_t>(found);
    row.top_scores[at * num_top + n] = best - total;
    last = best;
    last_token = found;
  }
}

}  // namespace fastlstm::FASTLSTM_ISA
