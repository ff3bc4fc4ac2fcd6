// The LSTM recurrence of a whole sequence in one launch, for GPUs with thread block clusters (sm_90 and newer).
//
// A cluster of CL blocks holds W_hh in registers: a block owns H/CL = 32 units with their four gates. It computes
// groups of 8 rows of the batch, NS groups in turn, which hide each other's exchange. A step multiplies with
// mma.sync m16n8k16, whose tile of 16 rows holds 4 gates of 4 units, updates the cell in registers, and sends the
// new h to all blocks of the cluster: st.async into their shared memory, counted in bytes by an mbarrier. h is
// double-buffered; everyone needs h of everyone, so a step can overtake another by one at most and no barrier of the
// cluster is needed in the loop (docs/gpu.md). The backward pass keeps the same slice of W_hh, multiplies the
// gradients of its own gates, and sends partial sums of dh to the owners of the units.
//
// Compiled at run time (NVRTC) for one set of these macros:
//   DTYPE      0 bfloat16, 1 float16: operands, gates and outputs; sums and cells are float32
//   H, CL, NS  units (32 * CL), blocks of a cluster, groups of 8 rows of a cluster
//   SAVE       write what the backward pass needs, and compile that pass
//   TOKENS     gx is a table (V, H, 4) whose rows tokens name
//   LENGTHS    rows have a first and a last step
//   MASK       recurrent dropout: h * mask enters the product
//   ZONEOUT    0 none, 1 drawn, 2 expectation
//   NORM       layer norm of the recurrent product and of the cell
//   REAL       units without padding, which the norm is over
//   ACT, REC   activation of candidate and cell, and of the gates: place in ops.cell_options.ACTIVATIONS
// Layouts: row-major, gates innermost, in the order i f g o.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define SEND (CL == 4 ? 8 : 16)  // bytes of a message of h
#define THREADS 256
#define UNITS 32
#define AHEAD 6  // steps whose inputs are fetched into the L2 cache
static_assert(H == UNITS * CL, "a block owns 32 units");

struct Forward {
  const u16* whh;      // (4H, H), gates i f g o
  const u16* gx;       // (T, B, H, 4), or with TOKENS (V, H, 4)
  const i64* tokens;   // (T, B)
  const float* h0;     // (B, H)
  const float* c0;     // (B, H)
  const float* mask;   // (B, H)
  const i64* begins;   // (B)
  const i64* ends;     // (B)
  const i64* seed;     // (1)
  u16* first;          // (B, H): h0 as it enters
  u16* y;              // (T, B, H)
  float* hT;           // (B, H)
  float* cT;           // (B, H)
  u16* gates;          // (T, B, H, 4) activated
  float* cells;        // (T, B, H) after zoneout
  float* fresh;        // (T, B, H) before zoneout, with ZONEOUT only
  int T, B;
  u32 keep_h, keep_c;  // of 65536 draws
  float p_h, p_c;      // their expectations
  int V;               // rows of the table
  const float* gamma_hh;  // (H, 4), with NORM, as all below
  const float* gamma_c;   // (H)
  const float* beta_c;    // (H)
  u16* normed;            // (T, B, H, 4) recurrent product, normalised
  float4* moments;        // (T, B): 1/deviation of the product, mean and 1/deviation of the cell
};

struct Backward {
  const u16* whh;
  const u16* gates;
  const float* cells;
  const float* fresh;
  const float* c0;
  const u16* dy;       // (T, B, H)
  const float* dhT;    // (B, H) or null
  const float* dcT;    // (B, H) or null
  const float* mask;
  const i64* begins;
  const i64* ends;
  const i64* seed;
  u16* dgates;         // (T, B, H, 4), before the activations
  float* dh0;          // (B, H): the part that does not pass through W_hh
  float* dc0;          // (B, H)
  int T, B;
  u32 keep_h, keep_c;
  float p_h, p_c;
  const float* gamma_hh;
  const float* gamma_c;
  const float* beta_c;
  const u16* normed;
  const float4* moments;
  u16* dproduct;       // (T, B, H, 4): gradient of the recurrent product
  float* dnorm;        // (clusters, 8, H, 6): sums of the gradients of gamma_hh, gamma_c, beta_c
  float* dbias;        // (clusters, 4, H): sums of the gradients of the gates, without NORM
};

// --- 16-bit numbers ------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 r;
#if DTYPE == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}
__device__ __forceinline__ float low_of(u32 v) {
#if DTYPE == 0
  return __uint_as_float(v << 16);
#else
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(v));
  return f;
#endif
}
__device__ __forceinline__ float high_of(u32 v) {
#if DTYPE == 0
  return __uint_as_float(v & 0xffff0000u);
#else
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(v));
  return f;
#endif
}
__device__ __forceinline__ u16 narrow(float x) { return (u16)pack2(x, 0.f); }
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE == 0
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- activations, and their derivatives by their values -----------------------------------------

__device__ __forceinline__ float tanh_of(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <int A> __device__ __forceinline__ float activate(float x) {
  if (A == 0) return fmaf(tanh_of(0.5f * x), 0.5f, 0.5f);
  if (A == 1) return tanh_of(x);
  if (A == 2) return x != x ? x : fminf(fmaxf(fmaf(x, 1.f / 6.f, 0.5f), 0.f), 1.f);
  if (A == 3) return x < 0.f ? 0.f : x;
  if (A == 4) return x / (1.f + fabsf(x));
  return x;
}
// A gate as it is saved. hard_sigmoid is below 1 where it has a slope, which rounding must not change.
__device__ __forceinline__ float unsaturated(float y) {
  if (REC == 2 && y < 1.f) return fminf(y, DTYPE == 0 ? 0.99609375f : 0.99951171875f);
  return y;
}
template <int A> __device__ __forceinline__ float slope(float y) {
  if (A == 0) return y * (1.f - y);
  if (A == 1) return fmaf(-y, y, 1.f);
  if (A == 2) return y > 0.f && y < 1.f ? 1.f / 6.f : 0.f;
  if (A == 3) return y > 0.f ? 1.f : 0.f;
  if (A == 4) { const float r = 1.f - fabsf(y); return r * r; }
  return 1.f;
}

// --- zoneout: as ops.cell_call.zoneout_masks -----------------------------------------------------

__device__ __forceinline__ u32 hash32(u32 x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
__device__ __forceinline__ u32 draw(u64 seed, u32 row, u32 unit) {
  const u32 key = hash32(hash32(row ^ (u32)seed) + (u32)(seed >> 32));
  return hash32(unit * 0x9E3779B9u + key);
}

// --- clusters, barriers, messages ----------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) {
  u32 a;
  asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(a) : "l"(p));
  return a;
}
__device__ __forceinline__ u32 block_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void init_barriers(u32 first, int num, u32 bytes) {
  for (int i = 0; i < num; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(first + 8 * i) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  for (int i = 0; i < num; ++i) expect(first + 8 * i, bytes);
}
__device__ __forceinline__ bool is_over(u32 barrier, u32 parity) {
  u32 ok;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(ok)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ok;
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  if (!is_over(barrier, parity)) {
    const i64 began = clock64();
    while (!is_over(barrier, parity))
      if (clock64() - began > 60000000000LL) __trap();  // a lost message ends the kernel, not the GPU
  }
  __syncwarp();
}
__device__ __forceinline__ void send8(u32 to, u32 x, u32 y, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(to), "r"(x),
               "r"(y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send16(u32 to, u32 x, u32 y, u32 z, u32 w, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
               "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void fetch_ahead(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Rows of a cluster: group s is the rows 8 * (cluster + s * clusters) and the 7 after it.
struct Rows {
  int first, step, num;
  __device__ __forceinline__ Rows(int B) {
    const int clusters = gridDim.x / CL, cluster = blockIdx.x / CL, groups = (B + 7) / 8;
    first = 8 * cluster;
    step = 8 * clusters;
    num = (groups - cluster + clusters - 1) / clusters;
  }
};

// Byte of the 4 units of quad Q and row n in the h of a group (16 * H bytes).
__device__ __forceinline__ u32 place(u32 Q, u32 n) { return Q * 64 + ((n ^ (((Q >> 1) & 1) << 2)) << 3); }

#if NORM
// Two sums over all units of each row, for one of two kinds of each group: every block adds up its own units, and sends
// the result to all blocks. One buffer is enough: a block sends the next ones after it has h, or dh, of all warps, which
// they send after they have read these.
struct Sums {
  static constexpr u32 PARTS = 2 * NS * 8 * 8 * 8;        // of the warps of this block
  static constexpr u32 ALL = 2 * NS * CL * 8 * 8;         // of all blocks
  static constexpr u32 BYTES = PARTS + ALL + 2 * NS * 8;  // with barriers
  u32 base, rank, barriers;
  unsigned char* memory;
  u32 to;
  __device__ __forceinline__ Sums(unsigned char* at, u32 address, u32 rank_)
      : base(address), rank(rank_), barriers(address + PARTS + ALL), memory(at) {
    if (threadIdx.x == 0) init_barriers(barriers, 2 * NS, CL * 64);
    to = address_in(base, (threadIdx.x >> 3) & (CL - 1));
  }
  // x and y are sums over this warp's units of row n, in the lanes that have `is_first`.
  __device__ __forceinline__ void share(int kind, int s, int n, bool is_first, float x, float y) {
    const u32 slot = kind * NS + s;
    float2* parts = (float2*)(memory + slot * 512);
    if (is_first) parts[(threadIdx.x >> 5) * 8 + n] = make_float2(x, y);
    __syncthreads();
    if (threadIdx.x < 8 * CL) {
      const int row = threadIdx.x & 7;
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const float2 part = parts[w * 8 + row];
        a += part.x;
        b += part.y;
      }
      const u32 at = PARTS + (slot * CL + rank) * 64 + row * 8;
      send8(to + at, __float_as_uint(a), __float_as_uint(b), to + PARTS + ALL + 8 * slot);
    }
  }
  __device__ __forceinline__ float2 of(int kind, int s, int n, int step, bool is_last) {
    const u32 slot = kind * NS + s;
    await(barriers + 8 * slot, step & 1);
    if (threadIdx.x == 0 && !is_last) expect(barriers + 8 * slot, CL * 64);
    const float2* all = (const float2*)(memory + PARTS + slot * CL * 64);
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int k = 0; k < CL; ++k) {
      const float2 one = all[k * 8 + n];
      a += one.x;
      b += one.y;
    }
    return make_float2(a, b);
  }
};
#define EPSILON 1e-5f
// Mean and 1/deviation from a sum and a sum of squares of `num` values.
__device__ __forceinline__ float2 moments_of(float2 sums, float num) {
  const float mean = sums.x / num;
  return make_float2(mean, rsqrtf(fmaxf(sums.y / num - mean * mean, 0.f) + EPSILON));
}
#endif

struct Cell {
  float i, f, g, o, fresh;  // gates, activated, and the new cell before zoneout
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_forward(const Forward P) {
  constexpr int KS = H / 16;
  constexpr u32 HB = 16 * H;             // bytes of the h of a group
  constexpr u32 BARRIERS = 2 * NS * HB;  // behind both buffers
  constexpr int DESTINATIONS = SEND == 16 ? CL / 8 : CL / 4;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, q = lane >> 2, p = lane & 3;
  const u32 rank = block_rank();
  const int T = P.T, B = P.B;
  const Rows rows(B);
  const bool is_low = q < 4;
  const int n = 2 * p + (q >> 2);                   // row in the group of this thread's cell
  const int unit = rank * UNITS + w * 4 + (q & 3);  // its unit
  const u32 Q = rank * (UNITS / 4) + w;             // its quad

  u32 weights[KS][4];
  {
    const u16* first = P.whh + (size_t)(((q >> 2) * 2) * H + unit) * H + 4 * p;
    const u16* second = first + (size_t)H * H;
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      const uint2 x = *(const uint2*)(first + 16 * k), y = *(const uint2*)(second + 16 * k);
      weights[k][0] = x.x; weights[k][2] = x.y; weights[k][1] = y.x; weights[k][3] = y.y;
    }
  }
  for (int i = tid; i < 8 * rows.num * (H / 4); i += THREADS) {
    const int r = i / (H / 4), quad = i % (H / 4), row = rows.first + (r >> 3) * rows.step + (r & 7);
    float4 h = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row < B) {
      h = *(const float4*)(P.h0 + (size_t)row * H + 4 * quad);
      if (quad / (UNITS / 4) == rank)
        *(uint2*)(P.first + (size_t)row * H + 4 * quad) = make_uint2(pack2(h.x, h.y), pack2(h.z, h.w));
#if MASK
      const float4 m = *(const float4*)(P.mask + (size_t)row * H + 4 * quad);
      h.x *= m.x; h.y *= m.y; h.z *= m.z; h.w *= m.w;
#endif
    }
    *(uint2*)(memory + (r >> 3) * HB + place(quad, r & 7)) = make_uint2(pack2(h.x, h.y), pack2(h.z, h.w));
  }

  const size_t stride = (size_t)B * H;  // cells of a step
  float c[NS], h[NS];
  uint2 gx[NS];
  u32 cell[NS];  // of step 0; B * H < 2^32
  bool is_row[NS];
#if TOKENS
  i64 next[NS];
#endif
#if MASK
  float mask[NS];
#endif
#if LENGTHS
  int begin[NS], end[NS];
#endif
  auto projected = [&](int s, int t, i64 token) -> const uint2* {
#if TOKENS
    if ((u64)token >= (u64)P.V) __trap();  // as torch's embedding: an error, and no foreign memory
    return (const uint2*)(P.gx + ((size_t)token * H + unit) * 4);
#else
    return (const uint2*)(P.gx + ((size_t)t * stride + cell[s]) * 4);
#endif
  };
#pragma unroll
  for (int s = 0; s < NS; ++s) {
    const int row = rows.first + s * rows.step + n;
    is_row[s] = row < B;
    cell[s] = is_row[s] ? (u32)row * H + unit : 0;
    c[s] = is_row[s] ? P.c0[cell[s]] : 0.f;
    h[s] = is_row[s] ? P.h0[cell[s]] : 0.f;
    gx[s] = make_uint2(0, 0);
#if TOKENS
    next[s] = is_row[s] ? P.tokens[row] : 0;
    if (is_row[s]) gx[s] = __ldg(projected(s, 0, next[s]));
    next[s] = is_row[s] && T > 1 ? P.tokens[(size_t)B + row] : 0;
#else
    if (is_row[s]) gx[s] = __ldg(projected(s, 0, 0));
#endif
#if MASK
    mask[s] = is_row[s] ? P.mask[cell[s]] : 0.f;
#endif
#if LENGTHS
    begin[s] = is_row[s] ? (int)P.begins[row] : 0;
    end[s] = is_row[s] ? (int)P.ends[row] : 0;
#endif
  }
#if ZONEOUT == 1
  const u64 seed = (u64)P.seed[0];
#endif
  if (tid == 0) init_barriers(base + BARRIERS, 2 * NS, HB);
  u32 to[DESTINATIONS];
#pragma unroll
  for (int j = 0; j < DESTINATIONS; ++j)
    to[j] = address_in(base, (rank + (SEND == 16 ? q + 8 * j : (q & 3) + 4 * j)) & (CL - 1));
#if NORM
  Sums sums_of(memory + BARRIERS + 16 * NS, base + BARRIERS + 16 * NS, rank);
  const float4 gamma = *(const float4*)(P.gamma_hh + 4 * unit);
  const float gamma_c = P.gamma_c[unit], beta_c = P.beta_c[unit];
#endif
  __syncthreads();
  cluster_sync();

  // The recurrent product of a group: four gates of this thread's row and unit.
  auto product = [&](int s, int t, float (&z)[4]) {
    if (t > 0) {
      const u32 barrier = base + BARRIERS + 8 * (2 * s + (t & 1));
      await(barrier, ((t - 1) >> 1) & 1);
      if (tid == 0 && t + 2 < T) expect(barrier, HB);
    }
    float sums[4][4] = {};
    const unsigned char* from = memory + (t & 1) * NS * HB + s * HB + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      const uint2 b = *(const uint2*)(from + k * 256);
      mma(sums[k % 4], weights[k], b.x, b.y);
    }
    float a[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]);
    // Lanes q and q + 4 have two gates of two rows each: swap, so that each has four gates of one.
    const float r0 = __shfl_xor_sync(~0u, is_low ? a[1] : a[0], 16);
    const float r1 = __shfl_xor_sync(~0u, is_low ? a[3] : a[2], 16);
    z[0] = is_low ? a[0] : r0;
    z[1] = is_low ? a[2] : r1;
    z[2] = is_low ? r0 : a[1];
    z[3] = is_low ? r1 : a[3];
  };
  auto cell_of = [&](int s, const float (&z)[4]) {
    Cell k;
    k.i = activate<REC>(z[0] + low_of(gx[s].x));
    k.f = activate<REC>(z[1] + high_of(gx[s].x));
    k.g = activate<ACT>(z[2] + low_of(gx[s].y));
    k.o = activate<REC>(z[3] + high_of(gx[s].y));
    k.fresh = fmaf(k.f, c[s], k.i * k.g);
    return k;
  };
  // Forms h of `inner`, the cell as the output sees it, sends it, and stores what is asked for.
  auto finish = [&](int s, int t, const Cell& k, float inner) {
    float new_c = k.fresh, new_h = k.o * activate<ACT>(inner);
#if ZONEOUT == 1
    const u32 drawn = draw(seed, (u32)t * (u32)B + (u32)(rows.first + s * rows.step + n), unit);
    if ((drawn & 0xffffu) < P.keep_h) new_h = h[s];
    if ((drawn >> 16) < P.keep_c) new_c = c[s];
#elif ZONEOUT == 2
    new_h = P.p_h * h[s] + (1.f - P.p_h) * new_h;
    new_c = P.p_c * c[s] + (1.f - P.p_c) * new_c;
#endif
    float shown = new_h;
#if LENGTHS
    if (t < begin[s] || t >= end[s]) {
      new_h = h[s];
      new_c = c[s];
      shown = 0.f;
    }
#endif
    h[s] = new_h;
    c[s] = new_c;
#if MASK
    new_h *= mask[s];
#endif
    // Four lanes hold four units of a row: 8 bytes.
    auto four = [&](float mine) {
      const float other = __shfl_xor_sync(~0u, mine, 4);
      const u32 u = (q & 1) ? pack2(other, mine) : pack2(mine, other);
      const u32 v = __shfl_xor_sync(~0u, u, 8);
      return make_uint2((q & 2) ? v : u, (q & 2) ? u : v);
    };
    const uint2 out = four(new_h);
    if (t + 1 < T) {
      const u32 barrier = BARRIERS + 8 * (2 * s + ((t + 1) & 1)), then = ((t + 1) & 1) * NS * HB + s * HB;
#if CL == 4
      const u32 at = then + place(Q, n);
#pragma unroll
      for (int j = 0; j < DESTINATIONS; ++j) send8(to[j] + at, out.x, out.y, to[j] + barrier);
#else  // rows 2p and 2p + 1 are neighbours
      const u32 x = __shfl_xor_sync(~0u, out.x, 16), y = __shfl_xor_sync(~0u, out.y, 16), at = then + place(Q, 2 * p);
#pragma unroll
      for (int j = 0; j < DESTINATIONS; ++j)
        send16(to[j] + at, is_low ? out.x : x, is_low ? out.y : y, is_low ? x : out.x, is_low ? y : out.y,
               to[j] + barrier);
#endif
    }
#if MASK || LENGTHS
    const uint2 result = four(shown);
#else
    const uint2 result = out;
#endif
    const size_t at = (size_t)t * stride + cell[s];
    if (is_row[s]) {
      if ((q & 3) == 0) *(uint2*)(P.y + at) = result;
#if SAVE
      *(uint2*)(P.gates + at * 4) =
          make_uint2(pack2(unsaturated(k.i), unsaturated(k.f)), pack2(k.g, unsaturated(k.o)));
      P.cells[at] = new_c;
#if ZONEOUT
      P.fresh[at] = k.fresh;
#endif
#endif
      if (t + 1 < T) {
#if TOKENS
        gx[s] = __ldg(projected(s, t + 1, next[s]));
        if (t + 2 < T) next[s] = P.tokens[(size_t)(t + 2) * B + rows.first + s * rows.step + n];
#else
        gx[s] = __ldg(projected(s, t + 1, 0));
        if (t + AHEAD < T) fetch_ahead(projected(s, t + AHEAD, 0));
#endif
      }
    }
  };

  for (int t = 0; t < T; ++t) {
#if NORM
    float z[NS][4], deviation[NS];
    Cell k[NS];
    auto share = [&](int kind, int s, float x, float y) {
      x += __shfl_xor_sync(~0u, x, 4);
      y += __shfl_xor_sync(~0u, y, 4);
      x += __shfl_xor_sync(~0u, x, 8);
      y += __shfl_xor_sync(~0u, y, 8);
      sums_of.share(kind, s, n, (q & 3) == 0, x, y);
    };
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      product(s, t, z[s]);
      const float(&v)[4] = z[s];
      share(0, s, (v[0] + v[1]) + (v[2] + v[3]), (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]));
    }
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      const float2 m = moments_of(sums_of.of(0, s, n, t, t + 1 == T), 4.f * REAL);
      deviation[s] = m.y;
#pragma unroll
      for (int e = 0; e < 4; ++e) z[s][e] = (z[s][e] - m.x) * m.y;
#if SAVE
      if (is_row[s])
        *(uint2*)(P.normed + ((size_t)t * stride + cell[s]) * 4) =
            make_uint2(pack2(z[s][0], z[s][1]), pack2(z[s][2], z[s][3]));
#endif
      z[s][0] *= gamma.x; z[s][1] *= gamma.y; z[s][2] *= gamma.z; z[s][3] *= gamma.w;
      k[s] = cell_of(s, z[s]);
      const float v = unit < REAL ? k[s].fresh : 0.f;  // of a padded unit, sigmoid(0) is not 0
      share(1, s, v, v * v);
    }
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      const float2 m = moments_of(sums_of.of(1, s, n, t, t + 1 == T), (float)REAL);
#if SAVE
      if (unit == 0 && is_row[s])
        P.moments[(size_t)t * B + rows.first + s * rows.step + n] = make_float4(deviation[s], m.x, m.y, 0.f);
#endif
      finish(s, t, k[s], fmaf((k[s].fresh - m.x) * m.y, gamma_c, beta_c));
    }
#else
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      float z[4];
      product(s, t, z);
      const Cell k = cell_of(s, z);
      finish(s, t, k, k.fresh);
    }
#endif
  }
#pragma unroll
  for (int s = 0; s < NS; ++s)
    if (s < rows.num && is_row[s]) {
      P.hT[cell[s]] = h[s];
      P.cT[cell[s]] = c[s];
    }
  cluster_sync();  // a block that ends loses its shared memory, to which others may still send
}

#if SAVE
extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_backward(const Backward P) {
  constexpr int TILES = H / 128;       // of 16 units of dh that a warp computes
  constexpr int KS = 8;                // 128 gates of this block
  constexpr u32 RB = CL * 512;         // bytes of the partial sums that a group receives
  constexpr u32 GB = UNITS * 64;       // bytes of the gradients of its own gates
  constexpr u32 OWN = 2 * NS * RB, BARRIERS = OWN + 2 * NS * GB;
  constexpr int HALF = CL / 2, PAIRS = TILES >= 2 ? TILES / 2 : 1;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, q = lane >> 2, p = lane & 3;
  const u32 rank = block_rank();
  const int T = P.T, B = P.B;
  const Rows rows(B);

  u32 weights[TILES][KS][4];
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    const int tile = w * TILES + m, u = (tile >> 1) * 32 + q * 4 + (tile & 1) * 2;  // row q is u, row q + 8 is u + 1
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      const size_t row = (size_t)(rank * UNITS + 4 * k + p);
      auto gates_of = [&](int first, int column) {
        const u32 low = P.whh[((size_t)first * H + row) * H + column];
        const u32 high = P.whh[((size_t)(first + 1) * H + row) * H + column];
        return low | high << 16;
      };
      weights[m][k][0] = gates_of(0, u); weights[m][k][1] = gates_of(0, u + 1);
      weights[m][k][2] = gates_of(2, u); weights[m][k][3] = gates_of(2, u + 1);
    }
  }
  // This thread's cell: word x of a message of 512 bytes. A word holds two rows; half of the lanes take each, and
  // each adds half of the messages.
  const int half = lane >> 4, x = w * 16 + (lane & 15);
  const int own = (x >> 4) * 4 + (x & 3), n = 2 * ((x >> 2) & 3) + half, unit = rank * UNITS + own;
  const u32 read_at = half * HALF * 512 + ((x ^ (half << 4)) << 2);
  const u32 own_at = OWN + own * 64 + ((n ^ (((own >> 1) & 1) << 2)) << 3);
  if (tid == 0) init_barriers(base + BARRIERS, 2 * NS, RB);
  u32 to[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) to[j] = address_in(base, TILES >= 2 ? w * PAIRS + j : w >> 1);
  const u32 write_at = rank * 512 + ((lane ^ ((rank / HALF) << 2)) << 4);

  const size_t stride = (size_t)B * H;
  float dc[NS], carried[NS], now_c[NS], before_c[NS], dy[NS];
  uint2 gates[NS];
  u32 cell[NS];
  bool is_row[NS];
#if MASK
  float mask[NS];
#endif
#if LENGTHS
  int begin[NS], end[NS];
#endif
#if ZONEOUT == 1
  const u64 seed = (u64)P.seed[0];
#endif
  auto load = [&](int s, int t) {  // all but before_c
    const size_t at = (size_t)t * stride + cell[s];
    gates[s] = __ldg((const uint2*)(P.gates + at * 4));
    dy[s] = low_of((u32)__ldg(P.dy + at));
#if ZONEOUT
    now_c[s] = __ldg(P.fresh + at);
#endif
  };
#pragma unroll
  for (int s = 0; s < NS; ++s) {
    const int row = rows.first + s * rows.step + n;
    is_row[s] = s < rows.num && row < B;
    cell[s] = is_row[s] ? (u32)row * H + unit : 0;
    dc[s] = carried[s] = now_c[s] = before_c[s] = dy[s] = 0.f;
    gates[s] = make_uint2(0, 0);
#if MASK
    mask[s] = is_row[s] ? P.mask[cell[s]] : 0.f;
#endif
#if LENGTHS
    begin[s] = is_row[s] ? (int)P.begins[row] : 0;
    end[s] = is_row[s] ? (int)P.ends[row] : 0;
#endif
    if (!is_row[s]) continue;
    now_c[s] = P.cells[(size_t)(T - 1) * stride + cell[s]];
    load(s, T - 1);
    before_c[s] = T > 1 ? P.cells[(size_t)(T - 2) * stride + cell[s]] : P.c0[cell[s]];
    if (P.dhT) carried[s] = P.dhT[cell[s]];
    if (P.dcT) dc[s] = P.dcT[cell[s]];
  }
#if NORM
  Sums sums_of(memory + BARRIERS + 16 * NS, base + BARRIERS + 16 * NS, rank);
  const float4 gamma = *(const float4*)(P.gamma_hh + 4 * unit);
  const float gamma_c = P.gamma_c[unit], beta_c = P.beta_c[unit];
  float dnorm[6] = {};
  uint2 normed[NS];
  float4 moments[NS];
  auto load_norm = [&](int s, int t) {
    const size_t at = (size_t)t * stride + cell[s];
    normed[s] = __ldg((const uint2*)(P.normed + at * 4));
    moments[s] = __ldg(P.moments + (size_t)t * B + rows.first + s * rows.step + n);
  };
#pragma unroll
  for (int s = 0; s < NS; ++s) {
    normed[s] = make_uint2(0, 0);
    moments[s] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (is_row[s]) load_norm(s, T - 1);
  }
#endif
  __syncthreads();
  cluster_sync();

  // The gradient of h of a step: of the output, and of the next step.
  auto incoming = [&](int s, int it) {
    float dh = carried[s];
    if (it > 0) {
      const int buffer = (it - 1) & 1;
      const u32 barrier = base + BARRIERS + 8 * (2 * s + buffer);
      await(barrier, ((it - 1) >> 1) & 1);
      if (tid == 0 && it + 1 < T - 1) expect(barrier, RB);
      const unsigned char* from = memory + (buffer * NS + s) * RB + read_at;
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int j = 0; j < HALF; ++j) {
        const u32 v = *(const u32*)(from + j * 512);
        low += low_of(v);
        high += high_of(v);
      }
      const float other = __shfl_xor_sync(~0u, half ? low : high, 16);
      float sum = (half ? high : low) + other;
#if MASK
      sum *= mask[s];
#endif
      dh += sum;
    }
    return dh;
  };
  struct Kept {  // what a step keeps of h and c, and the gradients that pass it
    float h, c, dh, dc;
    bool is_idle;
  };
  auto kept_of = [&](int s, int t, float dh) {
    Kept k;
    k.h = k.c = 0.f;
#if ZONEOUT == 1
    const u32 drawn = draw(seed, (u32)t * (u32)B + (u32)(rows.first + s * rows.step + n), unit);
    k.h = (drawn & 0xffffu) < P.keep_h ? 1.f : 0.f;
    k.c = (drawn >> 16) < P.keep_c ? 1.f : 0.f;
#elif ZONEOUT == 2
    k.h = P.p_h;
    k.c = P.p_c;
#endif
    float shown = dy[s];
#if LENGTHS
    if (t < begin[s] || t >= end[s]) {
      k.h = k.c = 1.f;
      shown = 0.f;
    }
#endif
    dh += shown;
    // Selected, not multiplied: what a kept unit computed may be NaN.
    k.dh = k.h == 1.f ? 0.f : (1.f - k.h) * dh;
    k.dc = k.c == 1.f ? 0.f : (1.f - k.c) * dc[s];
#if NORM  // a unit that keeps its cell has a part in the norm of the others
    k.is_idle = false;
#if LENGTHS
    k.is_idle = t < begin[s] || t >= end[s];
#endif
#else
    k.is_idle = k.h == 1.f && k.c == 1.f;
#endif
    carried[s] = k.h == 0.f ? 0.f : k.h * dh;
    return k;
  };
  // The gradients of the gates before their activations; `a` is the activated cell, `dc_new` its gradient.
  auto gates_of = [&](int s, const Kept& k, float a, float dc_new, float (&d)[4]) {
    const float i_ = low_of(gates[s].x), f_ = high_of(gates[s].x), g_ = low_of(gates[s].y), o_ = high_of(gates[s].y);
    d[0] = k.is_idle ? 0.f : dc_new * g_ * slope<REC>(i_);
    d[1] = k.is_idle ? 0.f : dc_new * before_c[s] * slope<REC>(f_);
    d[2] = k.is_idle ? 0.f : dc_new * i_ * slope<ACT>(g_);
    d[3] = k.is_idle ? 0.f : k.dh * a * slope<REC>(o_);
    dc[s] = (k.is_idle ? 0.f : dc_new * f_) + (k.c == 0.f ? 0.f : k.c * dc[s]);
  };
  // Sends the products of this block's gates with W_hh, and loads the step before.
  auto finish = [&](int s, int it, uint2 dgates, uint2 dproduct) {
    const int t = T - 1 - it;
    const u32 offset = ((it & 1) * NS + s) * GB;
    *(uint2*)(memory + own_at + offset) = dproduct;
    if (is_row[s]) {
      const size_t at = (size_t)t * stride + cell[s];
      *(uint2*)(P.dgates + at * 4) = dgates;
#if NORM
      *(uint2*)(P.dproduct + at * 4) = dproduct;
#endif
      if (t > 0) {
        now_c[s] = before_c[s];
        load(s, t - 1);
#if NORM
        load_norm(s, t - 1);
        if (t > AHEAD) fetch_ahead(P.normed + (at - AHEAD * stride) * 4);
#endif
        before_c[s] = t > 1 ? P.cells[at - 2 * stride] : P.c0[cell[s]];
        if (t > AHEAD) {
          fetch_ahead(P.gates + (at - AHEAD * stride) * 4);
          fetch_ahead(P.cells + (at - (AHEAD + 1) * stride));
          fetch_ahead(P.dy + (at - AHEAD * stride));
        }
      }
    }
    __syncthreads();
    if (t > 0) {
      constexpr int NC = TILES >= 4 ? 1 : 4 / TILES;
      float sums[TILES][NC][4] = {};
      const unsigned char* from = memory + OWN + offset + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);
#pragma unroll
      for (int k = 0; k < KS; ++k) {
        const uint2 b = *(const uint2*)(from + k * 256);
#pragma unroll
        for (int m = 0; m < TILES; ++m) mma(sums[m][k % NC], weights[m][k], b.x, b.y);
      }
      u32 out[TILES][2];
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          e[i] = sums[m][0][i];
          if (NC >= 2) e[i] += sums[m][1 % NC][i];
          if (NC == 4) e[i] += sums[m][2 % NC][i] + sums[m][3 % NC][i];
        }
        out[m][0] = pack2(e[0], e[1]);
        out[m][1] = pack2(e[2], e[3]);
      }
      const u32 at = ((it & 1) * NS + s) * RB + write_at, barrier = BARRIERS + 8 * (2 * s + (it & 1));
      if (TILES >= 2) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
          const int m = (2 * j) % TILES, m1 = (2 * j + 1) % TILES;
          send16(to[j] + at, out[m][0], out[m][1], out[m1][0], out[m1][1], to[j] + barrier);
        }
      } else {
        send8(to[0] + at + (w & 1) * 8, out[0][0], out[0][1], to[0] + barrier);
      }
    }
  };

#if !NORM
  float dbias[4] = {};
#endif
  for (int it = 0; it < T; ++it) {
    const int t = T - 1 - it;
#if NORM
    Kept k[NS];
    float inner[NS], d[NS][4];  // the normalised cell; gradients
    auto share = [&](int kind, int s, float x, float y) {
      x += __shfl_xor_sync(~0u, x, 1);
      y += __shfl_xor_sync(~0u, y, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      y += __shfl_xor_sync(~0u, y, 2);
      sums_of.share(kind, s, n, (lane & 3) == 0, x, y);
    };
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      k[s] = kept_of(s, t, incoming(s, it));
      inner[s] = (now_c[s] - moments[s].y) * moments[s].z;
      const float o_ = high_of(gates[s].y), a = activate<ACT>(fmaf(inner[s], gamma_c, beta_c));
      const float dinner = k[s].h == 1.f ? 0.f : k[s].dh * o_ * slope<ACT>(a);
      dnorm[4] += k[s].h == 1.f ? 0.f : dinner * inner[s];
      dnorm[5] += dinner;
      d[s][0] = dinner * gamma_c;
      share(0, s, d[s][0], k[s].h == 1.f ? 0.f : d[s][0] * inner[s]);
    }
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      const float2 m = sums_of.of(0, s, n, it, it + 1 == T);
      const float a = activate<ACT>(fmaf(inner[s], gamma_c, beta_c));
      const float through = moments[s].z * (d[s][0] - (m.x + inner[s] * m.y) * (1.f / REAL));
      gates_of(s, k[s], a, k[s].is_idle ? 0.f : k[s].dc + through, d[s]);
      const float x0 = low_of(normed[s].x), x1 = high_of(normed[s].x), x2 = low_of(normed[s].y), x3 = high_of(normed[s].y);
      dnorm[0] += d[s][0] * x0; dnorm[1] += d[s][1] * x1; dnorm[2] += d[s][2] * x2; dnorm[3] += d[s][3] * x3;
      const float e0 = d[s][0] * gamma.x, e1 = d[s][1] * gamma.y, e2 = d[s][2] * gamma.z, e3 = d[s][3] * gamma.w;
      share(1, s, (e0 + e1) + (e2 + e3), (e0 * x0 + e1 * x1) + (e2 * x2 + e3 * x3));
    }
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      const float2 m = sums_of.of(1, s, n, it, it + 1 == T);
      const float mean = m.x * (0.25f / REAL), slope_ = m.y * (0.25f / REAL), r = moments[s].x;
      const float x0 = low_of(normed[s].x), x1 = high_of(normed[s].x), x2 = low_of(normed[s].y), x3 = high_of(normed[s].y);
      finish(s, it, make_uint2(pack2(d[s][0], d[s][1]), pack2(d[s][2], d[s][3])),
             make_uint2(pack2(r * (d[s][0] * gamma.x - mean - x0 * slope_), r * (d[s][1] * gamma.y - mean - x1 * slope_)),
                        pack2(r * (d[s][2] * gamma.z - mean - x2 * slope_), r * (d[s][3] * gamma.w - mean - x3 * slope_))));
    }
#else
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      const Kept k = kept_of(s, t, incoming(s, it));
      const float a = activate<ACT>(now_c[s]);
      float d[4];
      gates_of(s, k, a, k.h == 1.f ? k.dc : fmaf(k.dh * high_of(gates[s].y), slope<ACT>(a), k.dc), d);
#pragma unroll
      for (int e = 0; e < 4; ++e) dbias[e] += d[e];
      const uint2 gradients = make_uint2(pack2(d[0], d[1]), pack2(d[2], d[3]));
      finish(s, it, gradients, gradients);
    }
#endif
  }
#if NORM
#pragma unroll
  for (int e = 0; e < 6; ++e) P.dnorm[(((size_t)(blockIdx.x / CL) * 8 + n) * H + unit) * 6 + e] = dnorm[e];
#else
#pragma unroll
  for (int e = 0; e < 4; ++e)  // lanes that differ in these bits have the 8 rows of a unit
    for (int step = 4; step <= 16; step <<= 1) dbias[e] += __shfl_xor_sync(~0u, dbias[e], step);
  if ((lane & 28) == 0)
    for (int e = 0; e < 4; ++e) P.dbias[((size_t)(blockIdx.x / CL) * 4 + e) * H + unit] = dbias[e];
#endif
#pragma unroll
  for (int s = 0; s < NS; ++s)
    if (is_row[s]) {
      P.dh0[cell[s]] = carried[s];
      P.dc0[cell[s]] = dc[s];
    }
  cluster_sync();
}
#endif  // SAVE
