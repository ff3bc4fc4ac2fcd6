// One token at a time, for many streams: what goes in, what comes out, how it lies in memory.
//
// A language model of L layers: the first layer's input is a row of a table (embedding * w_ih +
// bias, made once) or an embedding; then per layer h * w_hh, the cell, optionally layer norm and
// residual; then the output, with a projection before it where its rank is low, and the choice of
// the next token. Sizes: V tokens, E embedding, H hidden units, R values that the output reads.
// `lanes`, U and "element" as in lstm.h; an int8 element of an activation is 127 x + 128 for x in
// [-1, 1], an int4 one 127 x.
//
// A stream's results do not depend on the streams beside it, the number of threads, or how its
// steps are dealt out to calls.
#pragma once

#include <cstdint>

#include "lstm.h"

namespace fastlstm {

enum class WeightFormat : int { fp32, bf16, int8, int4 };

// A right operand: strips of `lanes` columns; int8 and int4 strips stand in fours side by side.
// Block-sparse: only the lines (16 columns x 4 inner values) that are not all zero.
struct DecodeMatrix {
  const void* strips;          // or null: there is no such matrix
  const float* factors;        // int8: (columns) of a sum, at a row scale of 1; else null
  const int32_t* corrections;  // int8: (columns) what the offset 128 adds to a sum; else null
  const int32_t* starts;       // block-sparse: first line of each 16 columns, then the end; or null
  const uint16_t* indices;     // block-sparse: (lines) inner index / 4; else null
};

struct DecodeLayer {
  DecodeMatrix input;      // strip 4 u + gate, like `recurrent`; none in a first layer with a table
  DecodeMatrix recurrent;  // (H, 4H)
  const float* bias;       // [group][gate][lane], with `input`
  const float* gamma;      // (H) layer norm of the output, or null with beta
  const float* beta;       // (H)
};

struct DecodeModel {
  int64_t V, E, H, L, R;   // R is H where there is no projection
  bool is_residual;        // where input and output of a layer have one width, they are added
  const float* table;      // (V) x [group][gate][lane]: embedding * w_ih + bias; or null
  const float* embedding;  // (V, E), where there is no table or a residual needs it
  const DecodeLayer* layers;
  DecodeMatrix projection;   // (H, R), or none
  DecodeMatrix output;       // (R, V)
  const float* output_bias;  // (V), then minus infinity up to a multiple of 4 lanes
  CellCall cell;             // its activations; where elements are int8 or int4, within [-1, 1]
};

inline constexpr int64_t kRecent = 64;  // tokens that the repetition penalty looks back
inline constexpr int kMaxTop = 20;

// How a stream chooses tokens, and what it remembers for it.
struct Sampler {
  float temperature = 1.0f;  // 0 takes the likeliest
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;  // factor of the log probabilities of recent tokens
  float frequency_penalty = 0.0f;   // taken off per time a token was written
  float presence_penalty = 0.0f;    // taken off where a token was written
  int64_t top_k = 0;                // 0: all
  int64_t num_top = -1;             // alternatives to report per token; -1 reports nothing
  uint64_t seed = 0;
  uint64_t num_drawn = 0;
  int32_t recent[kRecent] = {};  // ring of the last tokens read
  int64_t num_recent = 0;        // ever
  int64_t num_written = 0;       // ever
  uint16_t* counts = nullptr;    // (V) times a token was written; null without these penalties
  const int32_t* bias_tokens = nullptr;
  const float* biases = nullptr;
  int64_t num_biases = 0;
  const int32_t* stops = nullptr;  // sequences, each behind its length (at most kRecent)
  int64_t num_stops = 0;
};

enum class RowStatus : int { running, full, stopped, not_finite, bad_token };

// A stream in a call. It reads `given`, then writes, then reads what it wrote, and so on; the last
// token written is not read.
struct DecodeRow {
  float* state;  // (L, 2, H): h and c of every layer; changed
  const int32_t* given;
  int64_t num_given;     // at least 1 in a row that is running
  int64_t num_read = 0;  // of `given`
  bool knows_first;      // the first token given was written, and remembered, by an earlier call
  bool scores_given;     // reports every given token after the first, too
  Sampler* sampler;
  int32_t* written;  // `room` tokens
  int64_t room;      // 0: read only
  int64_t num_written = 0;
  // Of given tokens after the first (where asked for), then of written ones; where num_top >= 0.
  float* scores;        // (·) log probability of the token itself, without any penalty
  int32_t* top_tokens;  // (·, num_top) likeliest first
  float* top_scores;    // (·, num_top)
  int64_t num_scored = 0;
  RowStatus status = RowStatus::running;
};

struct DecodeArgs {
  const DecodeModel* model;
  DecodeRow* rows;
  int64_t num_rows;
  int64_t steps;    // tokens each row may read
  int64_t threads;  // the workspace is for a team of at most this many
  void* workspace;  // decode_workspace(...) bytes, aligned to 64
};

// A matrix as torch has it, (columns, inner), to be laid out; with `is_gates` the columns are 4H
// gates in torch's order.
struct DecodePackArgs {
  const float* w;       // fp32, bf16
  const int8_t* codes;  // int8, int4: (columns, inner) whole numbers from -127 or -7 on
  const float* scales;  // int8: (columns); int4: (columns, inner / 64 rounded up), fp16 values
  int64_t columns, inner;
  bool is_gates;
  void* strips;          // matrix_bytes(...), aligned to 64
  float* factors;        // int8: padded columns
  int32_t* corrections;  // int8: padded columns
};

struct DecodeKernels {
  const char* isa;
  WeightFormat format;
  int lanes;
  int64_t (*matrix_bytes)(int64_t columns, int64_t inner, bool is_gates);
  int64_t (*padded_columns)(int64_t columns, bool is_gates);
  void (*pack)(const DecodePackArgs&, Member);
  int64_t (*workspace)(const DecodeArgs&);
  void (*decode)(const DecodeArgs&, Member);
  // Whether each thread decodes rows of its own, and not all threads all rows. `bytes`: of the
  // weights that a step reads.
  bool (*splits_rows)(int64_t rows, int64_t bytes, int64_t threads);
  uint32_t (*read_all)(const void*, int64_t bytes);  // for measuring; the result means nothing
};

// The kernels for an instruction set ("avx512_vnni" is one more, for int8), or null.
const DecodeKernels* find_decode_kernels(const char* isa, WeightFormat format);

}  // namespace fastlstm
