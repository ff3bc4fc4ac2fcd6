// Weights of an LSTM layer as lstm_cluster.cu takes them, and their gradients back, in one launch each.
//
// Compiled at run time (NVRTC) for DTYPE: 0 bfloat16, 1 float16. Torch's layout has gates first, (4, H, K); the kernels'
// have them innermost but one, (H, 4, K).

typedef unsigned short u16;
typedef long long i64;

struct Weights {
  const float* w_ih;  // (4, H, I)
  const float* w_hh;  // (4, H, H)
  const float* b_ih;  // (4, H) or null
  const float* b_hh;
  u16* to_ih;         // (H, 4, I)
  u16* to_hh;         // (4, H, H)
  u16* to_bias;       // (H, 4): their sum
  int H, I;
};
struct Gradients {
  const float* w_ih;  // (H, 4, I) or null
  const float* w_hh;  // (H, 4, H) or null
  float* to_ih;       // (4, H, I)
  float* to_hh;       // (4, H, H)
  int H, I;
};

__device__ __forceinline__ u16 narrow(float x) {
  u16 r;
#if DTYPE == 0
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
  return r;
}

// A block has a row: gate g of unit u.
extern "C" __global__ void __launch_bounds__(128) pack_weights(const Weights P) {
  const int g = blockIdx.x / P.H, u = blockIdx.x % P.H;
  const i64 from = blockIdx.x, to = (i64)u * 4 + g;
  for (int k = threadIdx.x; k < P.I; k += blockDim.x) P.to_ih[to * P.I + k] = narrow(P.w_ih[from * P.I + k]);
  for (int k = threadIdx.x; k < P.H; k += blockDim.x) P.to_hh[from * P.H + k] = narrow(P.w_hh[from * P.H + k]);
  if (threadIdx.x == 0 && P.b_ih) P.to_bias[to] = narrow(P.b_ih[from] + P.b_hh[from]);
}

extern "C" __global__ void __launch_bounds__(128) unpack_gradients(const Gradients P) {
  const int g = blockIdx.x / P.H, u = blockIdx.x % P.H;
  const i64 to = blockIdx.x, from = (i64)u * 4 + g;
  if (P.w_ih)
    for (int k = threadIdx.x; k < P.I; k += blockDim.x) P.to_ih[to * P.I + k] = P.w_ih[from * P.I + k];
  if (P.w_hh)
    for (int k = threadIdx.x; k < P.H; k += blockDim.x) P.to_hh[to * P.H + k] = P.w_hh[from * P.H + k];
}
