#include "decode_stream.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace fastlstm {
namespace {

constexpr uint32_t kFormat = 1;
constexpr int64_t kMostTokens = int64_t{1} << 62;  // ever read; far from an overflow
constexpr float kMostHidden = 1.001f;              // |h| is at most 1, rounding apart

// What save() writes before its arrays.
struct Header {
  uint32_t format;
  uint8_t knows_first, has_counts, unused[2];
  int64_t vocab_size, hidden_size, num_layers, num_given;
  uint64_t num_drawn;
  int64_t num_recent, num_written;
  int32_t recent[kRecent];
};

void require(bool is_so, const char* message) {
  if (!is_so) throw std::invalid_argument(message);
}

template <typename T>
void append(std::string& out, const std::vector<T>& values) {
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
const char* take(const char* from, std::vector<T>& values) {
  if (!values.empty()) std::memcpy(values.data(), from, values.size() * sizeof(T));
  return from + values.size() * sizeof(T);
}

// Refuses counts that no stream can have: the kernels index by them.
void check(const Header& h) {
  require(h.knows_first <= 1 && h.has_counts <= 1 && h.unused[0] == 0 && h.unused[1] == 0,
          "the state has unknown flags");
  require(h.num_written >= 0 && h.num_written <= h.num_recent && h.num_recent <= kMostTokens &&
              h.num_drawn <= static_cast<uint64_t>(h.num_written),
          "the state has token counts that contradict each other");
  require(h.knows_first == 0 || (h.num_given > 0 && h.num_written > 0),
          "the state lacks the token that was written last");
}

// Refuses what no cell puts out; `state` is (L, 2, H).
void check(const std::vector<float>& state, int64_t hidden_size) {
  const auto H = static_cast<size_t>(hidden_size);
  for (size_t k = 0; k < state.size(); ++k) {
    require(std::isfinite(state[k]), "the state is not finite");
    const bool is_hidden = k / H % 2 == 0;
    require(!is_hidden || std::fabs(state[k]) <= kMostHidden, "the state has an output beyond 1");
  }
}

}  // namespace

Stream::Stream(int64_t vocab_size, int64_t hidden_size, int64_t num_layers)
    : vocab_size(vocab_size), hidden_size(hidden_size), num_layers(num_layers) {
  require(vocab_size > 0 && hidden_size > 0 && num_layers > 0, "sizes must be positive");
  state.resize(static_cast<size_t>(num_layers * 2 * hidden_size));
}

void Stream::set(const Settings& s) {
  const auto is_token = [&](int32_t token) { return token >= 0 && token < vocab_size; };
  require(s.temperature >= 0.0f && std::isfinite(s.temperature), "temperature");
  require(s.top_p > 0.0f && s.top_p <= 1.0f, "top_p");
  require(s.min_p >= 0.0f && s.min_p <= 1.0f, "min_p");
  require(s.repetition_penalty > 0.0f && std::isfinite(s.repetition_penalty), "repetition_penalty");
  require(std::isfinite(s.frequency_penalty) && std::isfinite(s.presence_penalty), "penalties");
  require(s.top_k >= 0, "top_k");
  require(s.num_top >= -1 && s.num_top <= std::min<int64_t>(kMaxTop, vocab_size), "num_top");
  require(s.bias_tokens.size() == s.biases.size(), "biases");
  require(std::all_of(s.bias_tokens.begin(), s.bias_tokens.end(), is_token), "a token of a bias");
  for (const float bias : s.biases) require(std::isfinite(bias), "a bias");
  stops_.clear();
  for (const auto& stop : s.stops) {
    require(!stop.empty() && static_cast<int64_t>(stop.size()) <= kRecent, "length of a stop");
    require(std::all_of(stop.begin(), stop.end(), is_token), "a token of a stop");
    stops_.push_back(static_cast<int32_t>(stop.size()));
    stops_.insert(stops_.end(), stop.begin(), stop.end());
  }
  bias_tokens_ = s.bias_tokens;
  biases_ = s.biases;
  scores_given_ = s.scores_given;
  sampler_.temperature = s.temperature;
  sampler_.top_p = s.top_p;
  sampler_.min_p = s.min_p;
  sampler_.repetition_penalty = s.repetition_penalty;
  sampler_.frequency_penalty = s.frequency_penalty;
  sampler_.presence_penalty = s.presence_penalty;
  sampler_.top_k = s.top_k;
  sampler_.num_top = s.num_top;
  sampler_.seed = s.seed;
  sampler_.num_stops = static_cast<int64_t>(s.stops.size());
  use_counts();
}

void Stream::use_counts() {
  const bool counts = sampler_.frequency_penalty != 0.0f || sampler_.presence_penalty != 0.0f;
  if (counts && counts_.empty()) counts_.resize(static_cast<size_t>(vocab_size));
  if (!counts) counts_.clear();
}

void Stream::feed(const std::vector<int32_t>& tokens) {
  for (const int32_t token : tokens) {
    require(token >= 0 && token < vocab_size, "a token outside the vocabulary");
  }
  given.insert(given.end(), tokens.begin(), tokens.end());
  // A prompt begins a new turn: penalties count what is written in answer to it.
  if (!tokens.empty()) std::fill(counts_.begin(), counts_.end(), uint16_t{0});
}

void Stream::begin(int64_t tokens) {
  require(tokens >= 0, "room");
  require(!given.empty(), "there is nothing to read");
  room = tokens;
  status = RowStatus::running;
}

DecodeRow Stream::start(int64_t steps) {
  const auto size = static_cast<size_t>(std::max<int64_t>(0, std::min(steps, room.load())));
  const int64_t num_top = sampler_.num_top;
  new_tokens_.resize(size);
  if (num_top >= 0) {
    const size_t tokens = static_cast<size_t>(steps) + 1;
    new_scores_.resize(tokens);
    new_top_tokens_.resize(tokens * static_cast<size_t>(num_top));
    new_top_.resize(new_top_tokens_.size());
  }
  sampler_.counts = counts_.empty() ? nullptr : counts_.data();
  sampler_.bias_tokens = bias_tokens_.data();
  sampler_.biases = biases_.data();
  sampler_.num_biases = static_cast<int64_t>(biases_.size());
  sampler_.stops = stops_.data();
  DecodeRow row{};
  row.state = state.data();
  row.given = given.data();
  // The last token is read when something is to be written after it.
  row.num_given = static_cast<int64_t>(given.size()) - (room == 0 ? 1 : 0);
  row.knows_first = knows_first;
  row.scores_given = scores_given_ && num_top >= 0;
  row.sampler = &sampler_;
  row.written = new_tokens_.data();
  row.room = static_cast<int64_t>(size);
  row.scores = new_scores_.data();
  row.top_tokens = new_top_tokens_.data();
  row.top_scores = new_top_.data();
  row.status = row.num_given > 0 ? status.load() : RowStatus::full;
  return row;
}

void Stream::finish(const DecodeRow& row) {
  if (row.num_read > 0) {
    given.erase(given.begin(), given.begin() + row.num_read);
    knows_first = false;
  }
  if (row.num_written > 0) {
    written.insert(written.end(), row.written, row.written + row.num_written);
    given.assign(1, row.written[row.num_written - 1]);
    knows_first = true;
    room -= row.num_written;
  }
  const auto copy = [&](auto& to, const auto* from, int64_t per_token) {
    to.insert(to.end(), from, from + row.num_scored * per_token);
  };
  if (row.num_scored > 0) {
    copy(scores.own, row.scores, 1);
    copy(scores.top_tokens, row.top_tokens, sampler_.num_top);
    copy(scores.top, row.top_scores, sampler_.num_top);
  }
  // A row is full when the call's room is; the stream goes on while it has more.
  status = row.status == RowStatus::full && room > 0 ? RowStatus::running : row.status;
}

std::string Stream::save() const {
  Header header{};
  header.format = kFormat;
  header.knows_first = knows_first ? 1 : 0;
  header.has_counts = counts_.empty() ? 0 : 1;
  header.vocab_size = vocab_size;
  header.hidden_size = hidden_size;
  header.num_layers = num_layers;
  header.num_given = static_cast<int64_t>(given.size());
  header.num_drawn = sampler_.num_drawn;
  header.num_recent = sampler_.num_recent;
  header.num_written = sampler_.num_written;
  std::copy(std::begin(sampler_.recent), std::end(sampler_.recent), header.recent);
  std::string out(reinterpret_cast<const char*>(&header), sizeof header);
  append(out, state);
  append(out, given);
  append(out, counts_);
  return out;
}

void Stream::restore(const std::string& blob) {
  Header header;
  require(blob.size() >= sizeof header, "the state is cut short");
  std::memcpy(&header, blob.data(), sizeof header);
  require(header.format == kFormat, "the state has another format");
  require(header.vocab_size == vocab_size && header.hidden_size == hidden_size &&
              header.num_layers == num_layers,
          "the state is of a model of other sizes");
  const size_t rest = blob.size() - sizeof header;
  const size_t counts_size =
      header.has_counts != 0 ? static_cast<size_t>(vocab_size) * sizeof(uint16_t) : 0;
  const size_t fixed = state.size() * sizeof(float) + counts_size;
  require(header.num_given >= 0 && rest >= fixed &&
              (rest - fixed) / sizeof(int32_t) == static_cast<uint64_t>(header.num_given) &&
              (rest - fixed) % sizeof(int32_t) == 0,
          "the state has another length");
  check(header);
  std::vector<float> new_state(state.size());
  std::vector<int32_t> new_given(static_cast<size_t>(header.num_given));
  std::vector<uint16_t> new_counts(header.has_counts != 0 ? static_cast<size_t>(vocab_size) : 0);
  take(take(take(blob.data() + sizeof header, new_state), new_given), new_counts);
  const auto is_token = [&](int32_t token) { return token >= 0 && token < vocab_size; };
  require(std::all_of(new_given.begin(), new_given.end(), is_token) &&
              std::all_of(std::begin(header.recent), std::end(header.recent), is_token),
          "the state has a token outside the vocabulary");
  const size_t newest = static_cast<size_t>(header.num_recent + kRecent - 1) % kRecent;
  require(header.knows_first == 0 || new_given[0] == header.recent[newest],
          "the state lacks the token that was written last");
  check(new_state, hidden_size);
  state = std::move(new_state);
  given = std::move(new_given);
  counts_ = std::move(new_counts);
  if (counts_.empty()) use_counts();  // the settings may count where those before did not
  knows_first = header.knows_first != 0;
  sampler_.num_drawn = header.num_drawn;
  sampler_.num_recent = header.num_recent;
  sampler_.num_written = header.num_written;
  std::copy(std::begin(header.recent), std::end(header.recent), sampler_.recent);
  written.clear();
  scores = {};
  status = RowStatus::full;
  room = 0;
}

}  // namespace fastlstm
