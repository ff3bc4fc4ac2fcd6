// The LSTM kernels: what goes in, what comes out, how it lies in memory. One layer, one direction.
//
// Sizes: T steps, B lanes, I input, H hidden units. U = ceil(H / lanes) unit groups of `lanes`
// units (Kernels::lanes); G = 4 * U * lanes is the padded number of gates. An "element" is float or
// bf16 (uint16_t), as Kernels::is_bf16 says; states, sums and gradients of weights are always
// float.
//
// Kept for backward, in the order in which a thread goes over them: cells as [t][group][b][lane]
// for t = 0 (the initial ones) to T; gates as [chunk][group][row][i, f, g, o][lane], where a chunk
// is S = chunk_steps(T, B) steps and row counts the S * B lanes of its steps.
// Gradients of gates have the same order, but if the last group has r < lanes units, a row of it is
// [i, f, g, o][r] and zeros: packed weights are in that order, and no product runs over the gap.
//
// Every pointer may be null where "or null" is said and is otherwise valid for the whole call; no
// two arguments overlap unless said. Nothing outside the stated sizes is read or written.
#pragma once

#include <cstdint>

#include "projection.h"

namespace fastlstm {

class Barrier;

// Bytes between what two threads write: a core fetches lines ahead up to the end of a page.
constexpr int64_t kPage = 4096;

// Steps that a chunk holds: enough rows for an efficient product, one step for a large batch.
static inline int64_t chunk_steps(int64_t T, int64_t B) {
  constexpr int64_t kRows = 128;
  const int64_t steps = B > 0 ? (kRows + B - 1) / B : 1;
  return steps < T ? steps : (T > 0 ? T : 1);
}

// Rows of gates in whole chunks.
static inline int64_t gate_rows(int64_t T, int64_t B) {
  const int64_t steps = chunk_steps(T, B);
  return (T + steps - 1) / steps * steps * B;
}

// A thread of the team that runs a kernel; every member calls it with the same arguments.
struct Member {
  int index;
  int count;
  Barrier* barrier;
};

// Weights as torch has them: w_ih (4H, I), w_hh (4H, H), both biases (4H) or null; float.
struct PackArgs {
  int64_t I, H;
  const float* w_ih;
  const float* w_hh;
  const float* b_ih;
  const float* b_hh;
  void* out;  // packed_bytes(...), aligned to 64
};

// What the input of a layer is: dense rows, or tokens that name rows of an embedding.
struct Input {
  const void* rows;       // elements, num_rows x stride; columns from I on are zero
  int64_t num_rows;       // T * B, or the vocabulary size
  int64_t stride;         // in elements: at least I; for bf16 at least I rounded up to 32
  const int64_t* tokens;  // (T * B), each in [0, num_rows), or null for dense rows
};

// Activations by the place of their name in ops/cell_options.py.
enum class Activation : int { sigmoid, tanh, hard_sigmoid, relu, softsign, linear };

// What a layer computes beyond torch's cell: ops/cell_call.py says what.
struct CellCall {
  Activation activation;
  Activation recurrent_activation;
  double zoneout_h, zoneout_c;  // probabilities that a unit keeps its old output, its old cell
  int64_t first_row;            // added to row t * B + b where that decides what is drawn
  const int64_t* seed;          // (1) draws which, or null for the expectation
  const float* gamma_ih;        // (4H), or null with the next three: no layer norm
  const float* gamma_hh;        // (4H)
  const float* gamma_c;         // (H)
  const float* beta_c;          // (H)
  // Kept for backward, where a layer norm is and gates are kept:
  void* normed;    // normalised h * w_hh, then x * w_ih: 2 gate_rows(T, B) * G elements like gates;
                   // backward overwrites the second with gradients
  float* moments;  // (4, T * B): 1 / deviation of h * w_hh, of x * w_ih; mean, 1 / deviation of c
};

struct ForwardArgs {
  int64_t T, B, I, H;
  int64_t threads;   // the workspace is for a team of at most this many
  bool is_reversed;  // step t has the rows of step T - 1 - t of the input and of y
  Input input;
  const void* weights;          // packed by pack_forward
  const float* h0;              // (B, H) or null for zero
  const float* c0;              // (B, H) or null for zero
  const float* recurrent_mask;  // (B, H) factors of the state that enters the recurrence, or null
  const int64_t* begins;        // (B) first step of each lane, or null for 0
  const int64_t* ends;          // (B) one past the last step of each lane, or null for T
  void* y;                      // (T * B, H) elements; zero outside a lane's steps
  int64_t y_stride;             // elements from row to row of y, at least H
  float* h_last;                // (B, H)
  float* c_last;                // (B, H)
  void* gates;   // gate_rows(T, B) * G elements kept for backward, aligned to 64, or null
  float* cells;  // (T + 1) * B * U * lanes kept for backward, aligned to 64, or null with gates
  const CellCall* cell_call;  // or null for torch's cell
  void* workspace;            // forward_workspace(...) bytes, aligned to 64

  // Lane 0 of step t is this row of the input and of y.
  int64_t row(int64_t t) const { return (is_reversed ? T - 1 - t : t) * B; }
};

// T and B are at least 1.
struct BackwardArgs {
  int64_t T, B, I, H;
  int64_t threads;   // the workspace is for a team of at most this many
  bool is_reversed;  // as in forward; holds for dy and dx too
  Input input;
  const void* weights;          // packed by pack_backward, or null with the next two
  const float* w_ih;            // (4H, I) as torch has it: Kernels::reads_unpacked
  const float* w_hh;            // (4H, H)
  const float* h0;              // as in forward
  const float* recurrent_mask;  // as in forward
  const int64_t* begins;        // as in forward
  const int64_t* ends;          // as in forward
  const void* y;                // of forward
  int64_t y_stride;             // as in forward; holds for dy too
  const float* cells;           // of forward
  void* gates;                  // of forward; overwritten with their gradients
  const void* dy;               // (T * B, H) elements or null for zero
  const float* dh_last;         // (B, H) or null for zero
  const float* dc_last;         // (B, H) or null for zero
  void* dx;                     // dense: (T * B, I) elements, or null;
                                // tokens: (num_rows, I) float, or null
  float* dh0;                   // (B, H) or null
  float* dc0;                   // (B, H) or null
  float* dw_ih;                 // (4H, I) or null
  float* dw_hh;                 // (4H, H) or null
  float* db;                    // (4H) or null
  const CellCall* cell_call;    // as in forward
  float* dgamma_ih;             // (4H), or null with the next three: no layer norm
  float* dgamma_hh;             // (4H)
  float* dgamma_c;              // (H)
  float* dbeta_c;               // (H)
  void* workspace;              // backward_workspace(...) bytes, aligned to 64

  int64_t row(int64_t t) const { return (is_reversed ? T - 1 - t : t) * B; }  // as in forward
};

constexpr int kByteSums = 16;

// The kernels of one instruction set and element.
struct Kernels {
  const char* isa;
  bool is_bf16;
  int lanes;
  // Whether the forward pass deals lanes out to the threads, and not units.
  bool (*splits_lanes)(int64_t B, int64_t H, int threads, bool has_norm);
  // Whether a backward pass without layer norm reads weights as torch has them: packing costs more.
  bool (*reads_unpacked)(int64_t T, int64_t B, int64_t I, int64_t H);
  int64_t (*forward_bytes)(int64_t I, int64_t H);   // of pack_forward
  int64_t (*backward_bytes)(int64_t I, int64_t H);  // of pack_backward
  void (*pack_forward)(const PackArgs&, Member);
  void (*pack_backward)(const PackArgs&, Member);
  int64_t (*forward_workspace)(const ForwardArgs&);
  int64_t (*backward_workspace)(const BackwardArgs&);
  void (*forward)(const ForwardArgs&, Member);
  void (*backward)(const BackwardArgs&, Member);
  int64_t (*projection_workspace)(const ProjectionArgs&);
  void (*project)(const ProjectionArgs&, Member);
  // Sums of a block of memory, `kByteSums` of them. All instruction sets agree.
  void (*sum_bytes)(const uint8_t* data, int64_t bytes, uint64_t* out);
};

const Kernels& lstm_f32__scalar();
const Kernels& lstm_bf16__scalar();
const Kernels& lstm_f32__neon();
const Kernels& lstm_bf16__neon();
const Kernels& lstm_bf16__neon_bf16();
const Kernels& lstm_f32__avx2();
const Kernels& lstm_bf16__avx2();
const Kernels& lstm_f32__avx512();
const Kernels& lstm_bf16__avx512();
const Kernels& lstm_bf16__avx512_bf16();
const Kernels& lstm_bf16__amx_bf16();

}  // namespace fastlstm
