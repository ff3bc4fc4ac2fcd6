// One text being written: its state, what it is still to read, what it has written.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "decode.h"

namespace fastlstm {

// Scores of one token, where the stream reports them.
struct TokenScores {
  std::vector<float> own;           // (tokens)
  std::vector<int32_t> top_tokens;  // (tokens, num_top)
  std::vector<float> top;           // (tokens, num_top)
};

// How a stream chooses; the settings of Sampler that are not memory.
struct Settings {
  float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f;
  float repetition_penalty = 1.0f, frequency_penalty = 0.0f, presence_penalty = 0.0f;
  int64_t top_k = 0, num_top = -1;
  uint64_t seed = 0;
  bool scores_given = false;
  std::vector<int32_t> bias_tokens;
  std::vector<float> biases;
  std::vector<std::vector<int32_t>> stops;
};

class Stream {
 public:
  Stream(int64_t vocab_size, int64_t hidden_size, int64_t num_layers);

  void set(const Settings& settings);  // std::invalid_argument where one has no meaning
  void feed(const std::vector<int32_t>& tokens);
  void begin(int64_t room);  // may write `room` tokens from now on; forgets an earlier end

  // A call of the kernels between these two; no other may come in between.
  DecodeRow start(int64_t steps);
  void finish(const DecodeRow& row);

  // Everything that decides what comes next, settings apart; and back.
  std::string save() const;
  void restore(const std::string& blob);  // std::invalid_argument for what save() did not write

  int64_t vocab_size, hidden_size, num_layers;
  std::vector<float> state;      // (L, 2, H)
  std::vector<int32_t> given;    // to be read; the first was written where knows_first
  std::vector<int32_t> written;  // since the caller last looked
  TokenScores scores;
  // These two may be looked at while a call runs.
  std::atomic<RowStatus> status{RowStatus::full};
  std::atomic<int64_t> room{0};  // tokens that may still be written
  bool knows_first = false;
  std::atomic<bool> is_busy{false};

 private:
  void use_counts();

  Sampler sampler_;
  bool scores_given_ = false;
  std::vector<int32_t> bias_tokens_, stops_;
  std::vector<float> biases_;
  std::vector<uint16_t> counts_;
  std::vector<int32_t> new_tokens_, new_top_tokens_;
  std::vector<float> new_scores_, new_top_;
};

}  // namespace fastlstm
