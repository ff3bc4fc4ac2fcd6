// Small kernels of a training step: dropout, cross-entropy of a batch's logits, and what ends the step.
//
// Compiled at run time (NVRTC) for DTYPE: 0 bfloat16, 1 float16, the type of values and logits.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define WARPS 8  // rows of a block

struct CrossEntropy {
  const u16* logits;   // (N, V)
  const i64* targets;  // (N)
  float* nats;         // (N), written by the forward pass
  float* lse;          // (N) log of the sum of exponentials: written forward, read backward
  const float* scale;  // scalar, or null for 1
  u16* dlogits;        // (N, V), written by the backward pass
  i64 N;
  int V;
};

__device__ __forceinline__ float wide(u16 x) {
  float f;
#if DTYPE == 0
  f = __uint_as_float((u32)x << 16);
#else
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
#endif
  return f;
}
__device__ __forceinline__ u16 narrow(float x) {
  u16 r;
#if DTYPE == 0
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
  return r;
}

__device__ __forceinline__ float wide_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 narrow_bf16(float x) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

struct Masked {
  const uint4* x;     // (T, num): 8 values each
  const uint4* mask;  // (num)
  uint4* out;         // (T, num)
  int T, num;
  int blocks;         // of 256 threads for a step; the others have other steps
};

// x * mask. A thread reads its 8 values of the mask once.
extern "C" __global__ void __launch_bounds__(256) masked(const Masked P) {
  const int at = blockIdx.x % P.blocks * 256 + threadIdx.x, steps = gridDim.x / P.blocks;
  if (at >= P.num) return;
  union Pack {
    uint4 all;
    u16 each[8];
  };
  Pack mask, x;
  mask.all = P.mask[at];
  for (int t = blockIdx.x / P.blocks; t < P.T; t += steps) {
    x.all = P.x[(i64)t * P.num + at];
#pragma unroll
    for (int i = 0; i < 8; ++i) x.each[i] = narrow(wide(x.each[i]) * wide(mask.each[i]));
    P.out[(i64)t * P.num + at] = x.all;
  }
}

// A warp has a row; sums are taken in one order.
extern "C" __global__ void __launch_bounds__(32 * WARPS) cross_entropy_forward(const CrossEntropy P) {
  const i64 row = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (row >= P.N) return;
  const u16* logits = P.logits + row * P.V;
  float largest = -__int_as_float(0x7f800000), sum = 0.f;
  bool has_nan = false;
  for (int v = lane; v < P.V; v += 32) {
    const float x = wide(logits[v]);
    has_nan |= x != x;
    if (x > largest) {
      sum *= expf(largest - x);
      largest = x;
    }
    sum += x == largest ? 1.f : expf(x - largest);
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    const float other = __shfl_xor_sync(~0u, largest, step), more = __shfl_xor_sync(~0u, sum, step);
    const float top = fmaxf(largest, other);
    // A lane without a value has -inf and 0.
    const float own = sum == 0.f ? 0.f : sum * expf(largest - top);
    sum = own + (more == 0.f ? 0.f : more * expf(other - top));
    largest = top;
  }
  has_nan = __any_sync(~0u, has_nan);
  if (lane == 0) {
    const i64 target = P.targets[row];
    const bool is_row = (u64)target < (u64)P.V;
    const float nan = __int_as_float(0x7fffffff), lse = has_nan ? nan : largest + logf(sum);
    P.lse[row] = lse;
    P.nats[row] = is_row ? lse - wide(logits[target]) : nan;
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) cross_entropy_backward(const CrossEntropy P) {
  const i64 row = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (row >= P.N) return;
  const u16* logits = P.logits + row * P.V;
  u16* dlogits = P.dlogits + row * P.V;
  const float lse = P.lse[row], scale = P.scale ? *P.scale : 1.f;
  const i64 target = P.targets[row];
  for (int v = lane; v < P.V; v += 32)
    dlogits[v] = narrow((expf(wide(logits[v]) - lse) - (v == target ? 1.f : 0.f)) * scale);
}

struct StepEnd {
  const float* loss;
  const float* norms;     // (num) of the gradients, times the loss scale
  const float* scalars;   // factor of the learning rate, the same after a bad step; weight of an average, the same
  const float* scale;     // loss scale, or null
  const float* base;      // (num_rates) learning rates at factor 1
  float* found;           // loss, norm, norms
  float* rates;           // (num_rates)
  float* state;           // 1 after a good step: read and written
  float* inverse;         // what gradients are divided by
  float* is_bad;
  float* average;         // weight of the new values
  unsigned char* resets;  // 1 where the carried state is to be zero
  float max_norm;
  int num, num_rates;
};

extern "C" __global__ void __launch_bounds__(32) end_step(const StepEnd P) {
  const int lane = threadIdx.x;
  const float unscale = P.scale ? 1.f / *P.scale : 1.f, loss = *P.loss, was_good = *P.state;
  float squares = 0.f;
  for (int i = lane; i < P.num; i += 32) {
    const float norm = P.norms[i] * unscale;
    P.found[2 + i] = norm;
    squares += norm * norm;
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  const float norm = sqrtf(squares);
  const bool is_loss = loss - loss == 0.f, is_good = is_loss && norm - norm == 0.f;
  const float factor = was_good != 0.f ? P.scalars[0] : P.scalars[1];
  for (int i = lane; i < P.num_rates; i += 32) P.rates[i] = P.base[i] * factor;
  __syncwarp();
  if (lane == 0) {
    P.found[0] = loss;
    P.found[1] = norm;
    *P.state = is_good ? 1.f : 0.f;
    *P.inverse = 1.f / (fminf(P.max_norm / (norm + 1e-6f), 1.f) * unscale);
    *P.is_bad = is_good ? 0.f : 1.f;
    *P.average = is_good ? P.scalars[was_good != 0.f ? 2 : 3] : 0.f;
    *P.resets = P.scale ? !is_loss : !is_good;
  }
}

struct Muon {
  float* weight;         // (4, H, K), gates first
  const float* gradient;
  float* momentum;
  float* running;        // the next momentum
  u16* update;           // bfloat16, what is orthogonalised
  const u16* direction;  // bfloat16, orthogonalised; H and K swapped where they are there
  float* partial;        // (4, gridDim.x / 4): sums of squares
  const float* inverse;  // what the gradient is divided by
  const float* is_bad;
  const float* rate;
  float decay_momentum, scale, weight_decay, safety;
  i64 num;               // of a gate, H * K
  i64 row_stride, column_stride;  // of `direction` in a gate
  int K;
};

// V neighbouring values, read and written at once.
template <typename E, int V> struct __align__(sizeof(E) * V) Pack {
  E x[V];
};

// What a thread of a gate does, V values at a time: gridDim.x is 4 times the blocks of a gate.
template <int V, typename F> __device__ __forceinline__ void each_of_gate(const Muon& P, F work) {
  const int blocks = gridDim.x / 4, gate = blockIdx.x / blocks, block = blockIdx.x % blocks;
  for (i64 i = ((i64)block * 256 + threadIdx.x) * V; i < P.num; i += (i64)blocks * 256 * V) work(gate * P.num + i, i);
}

// Whether four neighbours are in one row of a gate, and lie where they can be read at once.
__device__ __forceinline__ bool is_wide(const Muon& P) {
  const u64 floats = (u64)P.weight | (u64)P.gradient | (u64)P.momentum | (u64)P.running;
  return P.K % 4 == 0 && floats % 16 == 0 && ((u64)P.update | (u64)P.direction) % 8 == 0;
}

template <int V> __device__ __forceinline__ float begin_update(const Muon& P) {
  const float factor = 1.f / *P.inverse;
  float squares = 0.f;
  each_of_gate<V>(P, [&](i64 at, i64) {
    const Pack<float, V> gradient = *(const Pack<float, V>*)(P.gradient + at);
    const Pack<float, V> before = *(const Pack<float, V>*)(P.momentum + at);
    Pack<float, V> running;
    Pack<u16, V> update;
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const float g = gradient.x[e] * factor, b = before.x[e], r = b + (1.f - P.decay_momentum) * (g - b);
      const float u = g + P.decay_momentum * (r - g);
      running.x[e] = r;
      update.x[e] = narrow_bf16(u);
      squares += u * u;
    }
    *(Pack<float, V>*)(P.running + at) = running;
    *(Pack<u16, V>*)(P.update + at) = update;
  });
  return squares;
}

extern "C" __global__ void __launch_bounds__(256) muon_begin(const Muon P) {
  float squares = is_wide(P) ? begin_update<4>(P) : begin_update<1>(P);
  __shared__ float sums[8];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = squares;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.f;
    for (int w = 0; w < 8; ++w) sum += sums[w];
    P.partial[blockIdx.x] = sum;
  }
}

template <int V> __device__ __forceinline__ void scale_update(const Muon& P, float factor) {
  each_of_gate<V>(P, [&](i64 at, i64) {
    Pack<u16, V> update = *(const Pack<u16, V>*)(P.update + at);
#pragma unroll
    for (int e = 0; e < V; ++e) update.x[e] = narrow_bf16(wide_bf16(update.x[e]) * factor);
    *(Pack<u16, V>*)(P.update + at) = update;
  });
}

// Divides each gate's update by its norm, in place.
extern "C" __global__ void __launch_bounds__(256) muon_normalise(const Muon P) {
  const int blocks = gridDim.x / 4, gate = blockIdx.x / blocks;
  float sum = 0.f;
  for (int b = threadIdx.x & 31; b < blocks; b += 32) sum += P.partial[gate * blocks + b];
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  const float factor = 1.f / (P.safety * sqrtf(sum) + 1e-7f);
  if (is_wide(P)) scale_update<4>(P, factor);
  else scale_update<1>(P, factor);
}

template <int V> __device__ __forceinline__ void end_update(const Muon& P) {
  const float rate = *P.rate, step = rate * P.scale, keep = 1.f - rate * P.weight_decay;
  const bool is_swapped = P.column_stride != 1;
  each_of_gate<V>(P, [&](i64 at, i64 i) {
    Pack<u16, V> direction;
    if (is_swapped) {
      const u32 row = (u32)i / (u32)P.K, column = (u32)i % (u32)P.K;
      const u16* from = P.direction + (at - i) + row * P.row_stride + column * P.column_stride;
#pragma unroll
      for (int e = 0; e < V; ++e) direction.x[e] = from[e * P.column_stride];
    } else {
      direction = *(const Pack<u16, V>*)(P.direction + at);
    }
    Pack<float, V> weight = *(const Pack<float, V>*)(P.weight + at);
#pragma unroll
    for (int e = 0; e < V; ++e) weight.x[e] = weight.x[e] * keep - step * wide_bf16(direction.x[e]);
    *(Pack<float, V>*)(P.weight + at) = weight;
    *(Pack<float, V>*)(P.momentum + at) = *(const Pack<float, V>*)(P.running + at);
  });
}

extern "C" __global__ void __launch_bounds__(256) muon_end(const Muon P) {
  if (*P.is_bad != 0.f) return;
  if (is_wide(P)) end_update<4>(P);
  else end_update<1>(P);
}
