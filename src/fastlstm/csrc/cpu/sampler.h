// The next token from a row of logits, on vectors: no sort, no allocation.
//
// Scores are log probabilities divided by the temperature, 0 for the likeliest. What top-k, top-p
// and min-p keep are the scores above some bound; it is found by halving the range in which it lies
// until no score is left between. Numbers are drawn by Philox4x32-10 (Salmon et al. 2011) from the
// seed and the count of draws.
#pragma once

#include "cpu/activations.h"
#include "decode.h"

namespace fastlstm::FASTLSTM_ISA {

inline constexpr float kLowest = -80.0f;  // a score below it has no chance

FASTLSTM_INLINE Vec exp(Vec x) {
  Vec scale;
  const Vec e = reduced_expm1(max_of(x, splat(kLowest)), scale);
  return x < kLowest ? Vec{} : scale + scale * e;
}

FASTLSTM_INLINE float max_lane(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bits_of<__m512>(v));
#else
  float whole[kLanes];
  Float32::store(whole, v);
  for (int k = 1; k < kLanes; ++k) whole[0] = whole[k] > whole[0] ? whole[k] : whole[0];
  return whole[0];
#endif
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

// Logits of one row, `size` of them in whole vectors, and room for as many floats twice.
struct Scores {
  float* logits;
  float* weights;
  float* sums;  // of every vector of weights
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
    uint32_t any = 0;
    for (int l = 0; l < kLanes; ++l) any |= bad[l];
    return any != 0;
  }
  // log sum exp
  float total(float top) const {
    double sum = 0.0;
    for (int64_t k = 0; k < size; k += kLanes) sum += sum_lanes(FASTLSTM_ISA::exp(at(k) - top));
    return top + static_cast<float>(__builtin_log(sum));
  }
};

// How many scores are at least `bound`, and what they weigh.
struct Kept {
  float count, weight;
};

FASTLSTM_INLINE Kept kept_above(const Scores& s, float bound) {
  Vec count{}, weight{};
  for (int64_t k = 0; k < s.size; k += kLanes) {
    const auto mask = s.at(k) >= bound;
    count += where(mask, splat(1.0f));
    weight += where(mask, Float32::load(s.weights + k));
  }
  return {sum_lanes(count), sum_lanes(weight)};
}

// The highest bound >= `low` above which enough is kept. `low` is one such bound.
template <typename Enough>
FASTLSTM_INLINE float highest_bound(const Scores& s, float low, Enough&& enough) {
  float high = 1.0f;  // no score is that high
  float below = kept_above(s, low).count, above = 0.0f;
  while (below - above > 1.0f) {
    const float middle = 0.5f * (low + high);
    if (middle <= low || middle >= high) break;  // equal scores
    const Kept kept = kept_above(s, middle);
    if (enough(kept)) {
      low = middle;
      below = kept.count;
    } else {
      high = middle;
      above = kept.count;
    }
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
    for (int64_t k = 0; k < V; ++k) {
      const uint16_t times = sampler.counts[k];
      if (times == 0) continue;
      l[k] -= sampler.presence_penalty + sampler.frequency_penalty * static_cast<float>(times);
    }
  }
  for (int64_t k = 0; k < sampler.num_biases; ++k) l[sampler.bias_tokens[k]] += sampler.biases[k];
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
  if (sampler.top_k > 0 && sampler.top_k < V) {
    const auto k = static_cast<float>(sampler.top_k);
    if (kept_above(s, bound).count > k) {
      bound = highest_bound(s, bound, [&](Kept kept) { return kept.count >= k; });
    }
  }
  if (sampler.top_p < 1.0f) {
    const float wanted = sampler.top_p * kept_above(s, bound).weight;
    bound = highest_bound(s, bound, [&](Kept kept) { return kept.weight >= wanted; });
  }
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
