// Rows times a weight, softmax, cross-entropy, and the gradients of it all, a chunk of rows at a
// time. Elements are those of lstm.h.
#pragma once

#include <cstdint>

namespace fastlstm {

// Elements from one row of gradients of logits to the next.
static inline int64_t logit_stride(int64_t V) { return (V + 31) / 32 * 32; }

struct ProjectionArgs {
  int64_t N, H, V;
  int64_t threads;         // the workspace is for a team of at most this many
  const void* features;    // (N, H) elements; H is a multiple of 32 for bf16
  const float* weight;     // (V, H)
  const float* bias;       // (V) or null
  const int64_t* targets;  // (N), each in [0, V), or null: `d` is given
  float* nats;             // (N): -log softmax at the targets; null without targets
  void* d;          // (N, logit_stride(V)) elements: gradients of the logits; or null: not kept
  float scale;      // factor of the three gradients below
  void* df;         // (N, H) elements or null
  float* dw;        // (V, H) or null
  float* db;        // (V) or null
  void* workspace;  // projection_workspace(...) bytes, aligned to 64
};

}  // namespace fastlstm
