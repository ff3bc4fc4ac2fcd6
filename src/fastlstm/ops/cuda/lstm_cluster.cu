// The LSTM recurrence of a whole sequence in one launch: on thread block clusters (sm_90 and newer), or with GRID on
// blocks that exchange h through global memory (sm_80 and newer, and up to 1,024 units).
//
// A cluster of CL blocks holds W_hh in registers: a block owns H/CL = 32 units with their four gates. It computes
// groups of 8 rows of the batch, NS groups in turn, which hide each other's exchange. A step multiplies with
// mma.sync m16n8k16, whose tile of 16 rows holds 4 gates of 4 units, updates the cell in registers, and sends the
// new h to all blocks of the cluster: st.async into their shared memory, counted in bytes by an mbarrier. h is
// double-buffered; everyone needs h of everyone, so a step can overtake another by one at most and no barrier of the
// cluster is needed in the loop (docs/gpu.md). Of 3 groups and more one is multiplied while another updates its cells
// and sends. What is loaded is used a step later; the L2 cache has it by then. The backward pass keeps the same slice of W_hh, multiplies the
// gradients of its own gates, and sends partial sums of dh to the owners of the units.
//
// With GRID, a cluster is CL blocks of a cooperative launch. A message is stored in the L2 cache as pairs of a value
// and the number of its step, 8 bytes that are written and read at once, so a receiver polls the values themselves and
// no fence or counter is needed. Above 512 units a block owns 16 units: two halves of its warps multiply half of h each.
//
// Compiled at run time (NVRTC) for one set of these macros:
//   DTYPE      0 bfloat16, 1 float16: operands, gates and outputs; sums and cells are float32
//   GRID       blocks exchange through global memory, not within a cluster
//   H, UNITS   units, and those of a block: 32, with GRID also 16
//   CL, NS     blocks of a cluster (H / UNITS), groups of 8 rows of a cluster
//   SAVE       write what the backward pass needs, and compile that pass
//   TOKENS     gx is a table (V, H, 4) whose rows tokens name
//   LENGTHS    rows have a first and a last step
//   MASK       recurrent dropout: h * mask enters the product
//   ZONEOUT    0 none, 1 drawn, 2 expectation
//   NORM       layer norm of the recurrent product and of the cell
//   REAL       units without padding, which the norm is over
//   ACT, REC   activation of candidate and cell, and of the gates: place in ops.cell_options.ACTIVATIONS
// Layouts: row-major, gates innermost, in the order i f g o.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define SEND (CL == 4 ? 8 : 16)  // bytes of a message of h
#define THREADS 256
#define NUM_CELLS (8 * UNITS)       // of a block and a group
#define OVERLAP (NS >= 3 && !NORM)  // forward, the product of a group with the cells of another; all clusters run NS
#define IS_LATE (NS == 1 && !NORM)  // backward, memory is reached while messages are on their way
#define AHEAD 6  // steps whose inputs are fetched into the L2 cache
// What a block saves of a group and a step, by threads of the backward kernel: places in bytes, as Variant.saved_bytes.
#define GATES 0                                // activated, 4 x 16 bits
#define CELLS (8 * NUM_CELLS)                  // float, after zoneout
#define FRESH (12 * NUM_CELLS)                 // float, before zoneout, with ZONEOUT only
#define NORMED (FRESH + (ZONEOUT ? 4 * NUM_CELLS : 0))  // recurrent product, normalised, 4 x 16 bits, with NORM only
#define SAVED (NORMED + (NORM ? 8 * NUM_CELLS : 0))     // bytes
static_assert(H == UNITS * CL, "the blocks of a cluster own all units");
static_assert(UNITS == 32 || (GRID && UNITS == 16), "a block owns 32 units, with GRID also 16");

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
  u8* saved;           // (T, groups, CL, SAVED)
  int T, B;
  u32 keep_h, keep_c;  // of 65536 draws
  float p_h, p_c;      // their expectations
  int V;               // rows of the table
  const float* gamma_hh;  // (H, 4), with NORM, as all below
  const float* gamma_c;   // (H)
  const float* beta_c;    // (H)
  float4* moments;        // (T, B): 1/deviation of the product, mean and 1/deviation of the cell
  int clusters, first_cluster;  // with GRID: of all launches of this pass; of this launch
  u8* messages;  // with GRID: (groups, 2, 2H) messages of h, zeros before the launch; 16 bytes each
  u8* sums;      // with GRID and NORM: (groups, 2, CL, 8) messages of sums, likewise
};

struct Backward {
  const u16* whh;
  const u8* saved;
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
  const float4* moments;
  u16* dproduct;       // (T, B, H, 4): gradient of the recurrent product
  float* dnorm;        // (clusters, 8, H, 6): sums of the gradients of gamma_hh, gamma_c, beta_c
  float* dbias;        // (clusters, 4, H): sums of the gradients of the gates, without NORM
  int clusters, first_cluster;
  u8* messages;  // with GRID: (groups, 2, CL receivers, CL senders, UNITS / 2 * 4) messages of dh
  u8* sums;
};

// --- machine instructions ------------------------------------------------------------------------

#ifndef EMULATED  // tests/emulator.h has all of these in C++
#define SHARED_MEMORY extern __shared__ __align__(1024) u8 memory[]
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
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE == 0
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float tanh_of(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif  // EMULATED

// --- activations, and their derivatives by their values -----------------------------------------

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

#ifndef EMULATED
__device__ __forceinline__ void fetch_ahead(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#if GRID
// Two words, each beside the number of its step: 8 bytes are stored and loaded at once.
__device__ __forceinline__ void post(u8* to, u32 x, u32 y, u32 step) {
  asm volatile(
      "{.reg .b64 a, b; mov.b64 a, {%1,%3}; mov.b64 b, {%2,%3}; st.relaxed.gpu.global.v2.b64 [%0], {a,b};}" ::"l"(to),
      "r"(x), "r"(y), "r"(step)
      : "memory");
}
__device__ __forceinline__ bool peek(const u8* from, u32 step, u32& x, u32& y) {
  u32 a, b;
  asm volatile(
      "{.reg .b64 l, h; ld.relaxed.gpu.global.v2.b64 {l,h}, [%4]; mov.b64 {%0,%1}, l; mov.b64 {%2,%3}, h;}"
      : "=r"(x), "=r"(a), "=r"(y), "=r"(b)
      : "l"(from)
      : "memory");
  return a == step && b == step;
}
__device__ __forceinline__ bool peek(const u8* from, u32 step, u32& x) {
  u32 a;
  asm volatile("{.reg .b64 l; ld.relaxed.gpu.global.b64 l, [%2]; mov.b64 {%0,%1}, l;}"
               : "=r"(x), "=r"(a)
               : "l"(from)
               : "memory");
  return a == step;
}
#else
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
__device__ __forceinline__ void init_barriers(u32 first, int num) {
  for (int i = 0; i < num; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(first + 8 * i) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Waits as CUTLASS does, at the scope of the block: a wait at cluster scope discards the L1 cache each time.
__device__ __forceinline__ bool is_over(u32 barrier, u32 parity) {
  u32 ok;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(ok)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ok;
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
#endif
#endif  // EMULATED

#if GRID
__device__ __forceinline__ u32 block_rank() { return blockIdx.x % CL; }
__device__ __forceinline__ void cluster_sync() {}
// Repeats `look` until it finds what it looks for.
template <class Look> __device__ __forceinline__ void poll(Look look) {
  if (look()) return;
  const i64 began = clock64();
  while (!look())
    if (clock64() - began > 60000000000LL) __trap();  // a lost message ends the kernel, not the GPU
}
#else
__device__ __forceinline__ void expect_each(u32 first, int num, u32 bytes) {
  for (int i = 0; i < num; ++i) expect(first + 8 * i, bytes);
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
  if (!is_over(barrier, parity)) {
    const i64 began = clock64();
    while (!is_over(barrier, parity))
      if (clock64() - began > 60000000000LL) __trap();  // a lost message ends the kernel, not the GPU
  }
  __syncwarp();
}
#endif

// Rows of a cluster: group s is the rows 8 * (cluster + s * clusters) and the 7 after it.
struct Rows {
  int first, step, num, groups, cluster, clusters;
  template <class Pass> __device__ __forceinline__ Rows(const Pass& P, bool is_full) {
    const int B = P.B;
    clusters = GRID ? P.clusters : gridDim.x / CL;
    cluster = (GRID ? P.first_cluster : 0) + blockIdx.x / CL;
    groups = (B + 7) / 8;
    first = 8 * cluster;
    step = 8 * clusters;
    num = is_full ? NS : (groups - cluster + clusters - 1) / clusters;
  }
  // Bytes that are saved of a step, and of the groups between two of this block's.
  __device__ __forceinline__ size_t saved_of_step() const { return (size_t)groups * CL * SAVED; }
  __device__ __forceinline__ size_t saved_between() const { return (size_t)(GRID ? clusters * CL : gridDim.x) * SAVED; }
  // Where this block saves its first group of step 0.
  __device__ __forceinline__ size_t saved_first() const {
    return (size_t)(GRID ? cluster * CL + block_rank() : blockIdx.x) * SAVED;
  }
  __device__ __forceinline__ int group(int s) const { return cluster + s * clusters; }
};

// Byte of the 4 units of quad Q and row n in the h of a group (16 * H bytes).
__device__ __forceinline__ u32 place(u32 Q, u32 n) { return Q * 64 + ((n ^ (((Q >> 1) & 1) << 2)) << 3); }

#if NORM
// Two sums over all units of each row, for one of two kinds of each group: every block adds up its own units, and sends
// the result to all blocks. One buffer is enough: a block sends the next ones after it has h, or dh, of all warps, which
// they send after they have read these.
struct Sums {
  static constexpr u32 PARTS = 2 * NS * 8 * 8 * 8;  // of the warps of this block
  u8* memory;
  u32 rank;
#if GRID
  u8* all;
  const Rows& rows;
  __device__ __forceinline__ Sums(u8* at, u8* all_, const Rows& rows_, u32 rank_)
      : memory(at), rank(rank_), all(all_), rows(rows_) {}
  __device__ __forceinline__ u8* message(int kind, int s, int block, int row) const {
    return all + ((size_t)((rows.group(s) * 2 + kind) * CL + block) * 8 + row) * 16;
  }
#else
  static constexpr u32 ALL = 2 * NS * CL * 8 * 8;         // of all blocks
  u32 base, barriers, to;
  __device__ __forceinline__ Sums(u8* at, u32 address, u32 rank_)
      : memory(at), rank(rank_), base(address), barriers(address + PARTS + ALL) {
    if (threadIdx.x == 0) {
      init_barriers(barriers, 2 * NS);
      expect_each(barriers, 2 * NS, CL * 64);
    }
    to = address_in(base, (threadIdx.x >> 3) & (CL - 1));
  }
#endif
  // x and y are sums over this warp's units of row n, in the lanes that have `is_first`.
  __device__ __forceinline__ void share(int kind, int s, int n, int step, bool is_first, float x, float y) {
    const u32 slot = kind * NS + s;
    float2* parts = (float2*)(memory + slot * 512);
    if (is_first) parts[(threadIdx.x >> 5) * 8 + n] = make_float2(x, y);
    __syncthreads();
    if (threadIdx.x < (GRID ? 8 : 8 * CL)) {
      const int row = threadIdx.x & 7;
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const float2 part = parts[w * 8 + row];
        a += part.x;
        b += part.y;
      }
#if GRID
      post(message(kind, s, rank, row), __float_as_uint(a), __float_as_uint(b), step + 1);
#else
      const u32 at = PARTS + (slot * CL + rank) * 64 + row * 8;
      send8(to + at, __float_as_uint(a), __float_as_uint(b), to + PARTS + ALL + 8 * slot);
#endif
    }
  }
  __device__ __forceinline__ float2 of(int kind, int s, int n, int step, bool is_last) {
    float a = 0.f, b = 0.f;
#if GRID  // thread by thread 8 rows of CL blocks, then by way of the parts' memory
    constexpr int EACH = (8 * CL + THREADS - 1) / THREADS;
    float2* found = (float2*)(memory + PARTS);
    __syncthreads();  // all have read the sums before these
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int i = threadIdx.x + j * THREADS;
      u32 x, y;
      if (i < 8 * CL) {
        poll([&] { return peek(message(kind, s, i >> 3, i & 7), step + 1, x, y); });
        found[i] = make_float2(__uint_as_float(x), __uint_as_float(y));
      }
    }
    __syncthreads();
    const float2* all_sums = found;
#else
    const u32 slot = kind * NS + s;
    await(barriers + 8 * slot, step & 1);
    if (threadIdx.x == 0 && !is_last) expect(barriers + 8 * slot, CL * 64);
    const float2* all_sums = (const float2*)(memory + PARTS + slot * CL * 64);
#endif
#pragma unroll
    for (int k = 0; k < CL; ++k) {
      const float2 one = all_sums[k * 8 + n];
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
  constexpr int SPLIT = 32 / UNITS;        // parts of h that parts of the warps multiply
  constexpr int KS = H / 16 / SPLIT;
  constexpr u32 HB = 16 * H;             // bytes of the h of a group
  constexpr u32 BARRIERS = 2 * NS * HB;  // behind both buffers; with SPLIT, the sums of half of the warps
  SHARED_MEMORY;
  const int tid = threadIdx.x, lane = tid & 31, q = lane >> 2, p = lane & 3;
  const int warp = tid >> 5, w = warp & (8 / SPLIT - 1), part = warp / (8 / SPLIT);
  const bool is_cell = part == 0;  // whether this warp updates cells
  const u32 rank = block_rank();
  const int T = P.T, B = P.B;
  const Rows rows(P, OVERLAP);
  const bool is_low = q < 4;
  const int n = 2 * p + (q >> 2);                   // row in the group of this thread's cell
  const int unit = rank * UNITS + w * 4 + (q & 3);  // its unit
  const u32 Q = rank * (UNITS / 4) + w;             // its quad
#if UNITS == 32
  const int place_saved = w * 32 + (q >> 2) * 16 + p * 4 + (q & 3);  // of the backward kernel's cell
#else
  const int place_saved = (2 * w + ((q & 3) >> 1)) * 16 + (q >> 2) * 8 + p * 2 + (q & 1);
#endif

  u32 weights[KS][4];
  {
    const u16* first = P.whh + (size_t)(((q >> 2) * 2) * H + unit) * H + part * KS * 16 + 4 * p;
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

  const size_t stride = (size_t)B * H;     // cells of a step
  const u32 between = (u32)rows.step * H;  // cells from a group of this cluster to its next
  float c[NS], h[NS];
  uint2 gx[NS];
  u32 cell[NS];  // of step 0
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
#if TOKENS
  auto projected = [&](int s, i64 token) -> const uint2* {
    if ((u64)token >= (u64)P.V) __trap();  // as torch's embedding: an error, and no foreign memory
    return (const uint2*)(P.gx + ((size_t)token * H + unit) * 4);
  };
  const i64* token_at = P.tokens + rows.first + n;  // of the step after the next
#else
  constexpr int LINES = UNITS / 16;  // of this block's gates of a row
  // Of this thread's cell in group 0, one step ahead; and of the line of 128 bytes that it fetches into the L2 cache.
  const u16 *gx_at = P.gx + ((size_t)(rows.first + n) * H + unit) * 4,
            *line_at = P.gx + ((size_t)(AHEAD * B + rows.first + warp * rows.step + lane / LINES) * H + rank * UNITS) * 4 +
                       lane % LINES * 64;
  // Warp s has those of group s.
  const bool has_line = lane < 8 * LINES && rows.first + warp * rows.step + lane / LINES < B;
#endif
#pragma unroll
  for (int s = 0; s < NS; ++s) {
    const int row = rows.first + s * rows.step + n;
    is_row[s] = row < B && is_cell;
    cell[s] = is_row[s] ? (u32)row * H + unit : 0;
    c[s] = is_row[s] ? P.c0[cell[s]] : 0.f;
    h[s] = is_row[s] ? P.h0[cell[s]] : 0.f;
    gx[s] = make_uint2(0, 0);
#if TOKENS
    next[s] = is_row[s] ? P.tokens[row] : 0;
    if (is_row[s]) gx[s] = __ldg(projected(s, next[s]));
    next[s] = is_row[s] && T > 1 ? P.tokens[(size_t)B + row] : 0;
#else
    if (is_row[s]) gx[s] = __ldg((const uint2*)(gx_at + (size_t)s * between * 4));
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
#if GRID
  u8* messages = P.messages + (size_t)rows.cluster * 4 * HB;  // of group 0
  const size_t messages_between = (size_t)rows.clusters * 4 * HB;
#else
  const u32 base = shared_address(memory);
  constexpr int DESTINATIONS = SEND == 16 ? CL / 8 : CL / 4;
  if (tid == 0) {
    init_barriers(base + BARRIERS, 2 * NS);
    expect_each(base + BARRIERS, 2 * NS, HB);
  }
  u32 to[DESTINATIONS];
#pragma unroll
  for (int j = 0; j < DESTINATIONS; ++j)
    to[j] = address_in(base, (rank + (SEND == 16 ? q + 8 * j : (q & 3) + 4 * j)) & (CL - 1));
#endif
#if NORM
#if GRID
  Sums sums_of(memory + BARRIERS + (SPLIT - 1) * 2048, P.sums, rows, rank);
#else
  Sums sums_of(memory + BARRIERS + 16 * NS, base + BARRIERS + 16 * NS, rank);
#endif
  const float4 gamma = *(const float4*)(P.gamma_hh + 4 * unit);
  const float gamma_c = P.gamma_c[unit], beta_c = P.beta_c[unit];
#endif
  __syncthreads();
  cluster_sync();

  // Waits until the h that enters a step is in shared memory.
  auto await_step = [&](int s, int t) {
#if GRID
    if (t > 0 && t < T) {
      constexpr int EACH = HB / 8 / THREADS;
      const u8* from = messages + s * messages_between + (t & 1) * 2 * HB + tid * 16;
      uint2 found[EACH];
      poll([&] {
        bool is_here = true;
#pragma unroll
        for (int j = 0; j < EACH; ++j) is_here &= peek(from + j * THREADS * 16, t, found[j].x, found[j].y);
        return is_here;
      });
      uint2* h_of = (uint2*)(memory + ((t & 1) * NS + s) * HB);
#pragma unroll
      for (int j = 0; j < EACH; ++j) h_of[tid + j * THREADS] = found[j];
    }
    __syncthreads();
#else
    if (t == 0 || t == T) return;
    const u32 barrier = base + BARRIERS + 8 * (2 * s + (t & 1));
    await(barrier, ((t - 1) >> 1) & 1);
    if (tid == 0 && t + 2 < T) expect(barrier, HB);
#endif
  };
  // The recurrent product of a group: four gates of this thread's row and unit.
  auto product = [&](int s, int t, float (&z)[4]) {
    float sums[4][4] = {};
    const u8* from = memory + (t & 1) * NS * HB + s * HB + part * KS * 256 + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      const uint2 b = *(const uint2*)(from + k * 256);
      mma(sums[k % 4], weights[k], b.x, b.y);
    }
    float a[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]);
#if UNITS == 16
    float4* others = (float4*)(memory + BARRIERS) + (tid & 127);
    if (!is_cell) *others = make_float4(a[0], a[1], a[2], a[3]);
    __syncthreads();  // the next product is behind that of `await_step`
    if (is_cell) {
      const float4 other = *others;
      a[0] += other.x; a[1] += other.y; a[2] += other.z; a[3] += other.w;
    } else {
      a[0] = a[1] = a[2] = a[3] = 0.f;
    }
#endif
    // Lanes q and q + 4 have two gates of two rows each: swap, so that each has four gates of one.
    const float r0 = __shfl_xor_sync(~0u, is_low ? a[1] : a[0], 16);
    const float r1 = __shfl_xor_sync(~0u, is_low ? a[3] : a[2], 16);
    z[0] = is_low ? a[0] : r0;
    z[1] = is_low ? a[2] : r1;
    z[2] = is_low ? r0 : a[1];
    z[3] = is_low ? r1 : a[3];
  };
  auto cell_of = [&](int s, int t, const float (&z)[4]) {
    Cell k;
    k.i = activate<REC>(z[0] + low_of(gx[s].x));
    k.f = activate<REC>(z[1] + high_of(gx[s].x));
    k.g = activate<ACT>(z[2] + low_of(gx[s].y));
    k.o = activate<REC>(z[3] + high_of(gx[s].y));
    k.fresh = fmaf(k.f, c[s], k.i * k.g);
    return k;
  };
  struct State {  // of four units of a row, in the compute dtype
    uint2 h, shown;
  };
  // Forms h and c of `inner`, the cell as the output sees it.
  auto update = [&](int s, int t, const Cell& k, float inner) {
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
    State state;
    state.h = state.shown = four(new_h);
#if MASK || LENGTHS
    state.shown = four(shown);
#endif
    return state;
  };
  u16* y_at = P.y + (size_t)(rows.first + n) * H + unit;
#if SAVE  // of this thread's gates; a cell has half as many bytes
  u8* saved_of = P.saved + rows.saved_first() + 8 * place_saved;
#endif
  // Sends h to all blocks, stores what is asked for, and loads the inputs of the next step.
  auto finish = [&](int s, int t, const Cell& k, const State& state) {
    const uint2 out = state.h;
    if (t + 1 < T) {
#if GRID
      if (is_cell && (q & 3) == 0)
        post(messages + s * messages_between + ((t + 1) & 1) * 2 * HB + 2 * place(Q, n), out.x, out.y, t + 1);
#else
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
#endif
    }
    if (is_row[s]) {
      if ((q & 3) == 0) *(uint2*)(y_at + s * between) = state.shown;
      if (t + 1 < T) {
#if TOKENS
        gx[s] = __ldg(projected(s, next[s]));
        if (t + 2 < T) next[s] = token_at[s * rows.step];
#else
        gx[s] = __ldg((const uint2*)(gx_at + (size_t)s * between * 4));
#endif
      }
    }
#if !TOKENS
    if (warp == s && has_line && t + AHEAD < T) fetch_ahead(line_at);
#endif
#if SAVE
    if (OVERLAP && rows.first + s * rows.step >= B) return;  // a group without rows has no place
    if (!is_cell) return;
    u8* saved = saved_of + s * rows.saved_between();
    *(uint2*)(saved + GATES) = make_uint2(pack2(unsaturated(k.i), unsaturated(k.f)), pack2(k.g, unsaturated(k.o)));
    *(float*)(saved + CELLS - 4 * place_saved) = c[s];
#if ZONEOUT
    *(float*)(saved + FRESH - 4 * place_saved) = k.fresh;
#endif
#endif
  };

#if OVERLAP
  float z[4];
  await_step(0, 0);
  product(0, 0, z);
#endif
#if TOKENS
  token_at += B;
#endif
  for (int t = 0; t < T; ++t) {
#if TOKENS
    token_at += B;
#else
    gx_at += stride * 4;
#endif
#if NORM
    float z[NS][4], deviation[NS];
    Cell k[NS];
    auto share = [&](int kind, int s, float x, float y) {
      x += __shfl_xor_sync(~0u, x, 4);
      y += __shfl_xor_sync(~0u, y, 4);
      x += __shfl_xor_sync(~0u, x, 8);
      y += __shfl_xor_sync(~0u, y, 8);
      sums_of.share(kind, s, n, t, (q & 3) == 0, x, y);
    };
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      await_step(s, t);
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
      if (is_cell) *(uint2*)(saved_of + s * rows.saved_between() + NORMED) =
          make_uint2(pack2(z[s][0], z[s][1]), pack2(z[s][2], z[s][3]));
#endif
      z[s][0] *= gamma.x; z[s][1] *= gamma.y; z[s][2] *= gamma.z; z[s][3] *= gamma.w;
      k[s] = cell_of(s, t, z[s]);
      const float v = unit < REAL && is_cell ? k[s].fresh : 0.f;  // of a padded unit, sigmoid(0) is not 0
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
      finish(s, t, k[s], update(s, t, k[s], fmaf((k[s].fresh - m.x) * m.y, gamma_c, beta_c)));
    }
#elif OVERLAP  // a group is multiplied while the one before it updates its cells
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      const int next = (s + 1) % NS, then = t + (s + 1) / NS;
      await_step(next, then);
      const Cell k = cell_of(s, t, z);
      const State state = update(s, t, k, k.fresh);
      product(next, then, z);  // behind the last step of what lies there, without use
      finish(s, t, k, state);
    }
#else
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      float z[4];
      await_step(s, t);
      product(s, t, z);
      const Cell k = cell_of(s, t, z);
      finish(s, t, k, update(s, t, k, k.fresh));
    }
#endif
    y_at += stride;
#if !TOKENS
    line_at += stride * 4;
#endif
#if SAVE
    saved_of += rows.saved_of_step();
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
  constexpr int KS = UNITS / 4;        // 4 * UNITS gates of this block
  constexpr u32 RB = CL * 512;         // bytes of the partial sums that a group receives in a cluster
  constexpr u32 GB = UNITS * 64;       // bytes of the gradients of its own gates
  constexpr u32 OWN = GRID ? 0 : 2 * NS * RB, BARRIERS = OWN + 2 * NS * GB;
  constexpr int PARTS = 64 / UNITS, LANES = 32 / PARTS;  // threads that add up a word, words of a warp
  constexpr int HALF = CL / PARTS, PAIRS = TILES >= 2 ? TILES / 2 : 1;
  constexpr u32 R = UNITS / 8;         // words that a lane has of a message
  SHARED_MEMORY;
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, q = lane >> 2, p = lane & 3;
  const u32 rank = block_rank();
  const int T = P.T, B = P.B;
  const Rows rows(P, false);

  u32 weights[TILES][KS][4];
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    // Row q is unit u, row q + 8 is u + 1.
    const int tile = w * TILES + m, u = UNITS == 32 ? (tile >> 1) * 32 + q * 4 + (tile & 1) * 2 : tile * 16 + q * 2;
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
  // This thread's cell: word x of a message. A word holds two rows; half of the lanes take each, and each adds half of
  // the messages. With 16 units of a block, a quarter of the lanes each; the second half of a warp has no cell.
  const u32 quarter = (u32)lane / LANES, x = w * LANES + (u32)lane % LANES;
  const bool is_cell = UNITS == 32 || quarter < 2;
  const int half = quarter & 1, own = x / (4 * R) * R + x % R, n = 2 * (x / R & 3) + half, unit = rank * UNITS + own;
  const int place_saved = UNITS == 32 ? tid : w * UNITS + lane % UNITS;
  const u32 own_at = OWN + own * 64 + ((n ^ (((own >> 1) & 1) << 2)) << 3);
#if GRID
  constexpr u32 BOX = UNITS * 32;  // bytes of a message with its numbers of steps
  const u32 place_read = UNITS == 32 ? (x >> 1 & 1) * 64 + (x >> 2) * 2 + (x & 1) : x;
  u8* messages = P.messages + (size_t)rows.cluster * 2 * CL * CL * BOX;  // of group 0
  const size_t messages_between = (size_t)rows.clusters * 2 * CL * CL * BOX;
#else
  const u32 base = shared_address(memory);
  const u32 read_at = half * HALF * 512 + ((x ^ (half << 4)) << 2);
  if (tid == 0) {
    init_barriers(base + BARRIERS, 2 * NS);
    expect_each(base + BARRIERS, 2 * NS, RB);
  }
  u32 to[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) to[j] = address_in(base, TILES >= 2 ? w * PAIRS + j : w >> 1);
  const u32 write_at = rank * 512 + ((lane ^ ((rank / HALF) << 2)) << 4);
#endif

  const size_t stride = (size_t)B * H;
  struct Inputs {
    uint2 gates;
    float c, before;  // the cell of a step, and the one before it
    u16 dy;           // gradient of its output
    uint2 normed;
    float4 moments;
  };
  Inputs inputs[NS];
  float dc[NS], carried[NS];
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
  const u32 between = (u32)rows.step * H;
  // Of this thread's cell in group 0, of the step to load.
  const u8* saved_of = P.saved + (T - 1) * rows.saved_of_step() + rows.saved_first() + 8 * place_saved;
  const u16* dy_at = P.dy + (T - 1) * stride + (size_t)(rows.first + n) * H + unit;
  u16* dgates_at = P.dgates + ((T - 1) * stride + (size_t)(rows.first + n) * H + unit) * 4;  // of the step computed
  auto cell_of = [&](const u8* saved, int s) {
    return __ldg((const float*)(saved + s * rows.saved_between() + CELLS - 4 * place_saved));
  };
  // Loads what a step needs but its cell, which the step after it had as the one before. Nothing, not even a
  // conversion, may be computed of what is loaded before it is used: the warp would wait for it.
  auto load = [&](int s, int t) {
    const u8* from = saved_of + s * rows.saved_between();
    Inputs& in = inputs[s];
    in.gates = __ldg((const uint2*)(from + GATES));
#if ZONEOUT
    in.c = __ldg((const float*)(from + FRESH - 4 * place_saved));
#else
    in.c = in.before;
#endif
    in.dy = 0;
    if (is_row[s]) in.dy = __ldg(dy_at + s * between);
#if NORM
    in.normed = __ldg((const uint2*)(from + NORMED));
    in.moments = make_float4(0.f, 0.f, 0.f, 0.f);
    if (is_row[s]) in.moments = __ldg(P.moments + (size_t)t * B + rows.first + s * rows.step + n);
#endif
  };
#pragma unroll
  for (int s = 0; s < NS; ++s) {
    const int row = rows.first + s * rows.step + n;
    is_row[s] = s < rows.num && row < B && is_cell;
    cell[s] = is_row[s] ? (u32)row * H + unit : 0;
    dc[s] = carried[s] = 0.f;
#if MASK
    mask[s] = is_row[s] ? P.mask[cell[s]] : 0.f;
#endif
#if LENGTHS
    begin[s] = is_row[s] ? (int)P.begins[row] : 0;
    end[s] = is_row[s] ? (int)P.ends[row] : 0;
#endif
    if (s >= rows.num) continue;
    inputs[s].before = cell_of(saved_of, s);
    load(s, T - 1);
    inputs[s].before = T > 1 ? cell_of(saved_of - rows.saved_of_step(), s) : is_row[s] ? P.c0[cell[s]] : 0.f;
    if (!is_row[s]) continue;
    if (P.dhT) carried[s] = P.dhT[cell[s]];
    if (P.dcT) dc[s] = P.dcT[cell[s]];
  }
#if NORM
#if GRID
  Sums sums_of(memory + BARRIERS, P.sums, rows, rank);
#else
  Sums sums_of(memory + BARRIERS + 16 * NS, base + BARRIERS + 16 * NS, rank);
#endif
  const float4 gamma = *(const float4*)(P.gamma_hh + 4 * unit);
  const float gamma_c = P.gamma_c[unit], beta_c = P.beta_c[unit];
  float dnorm[6] = {};
#endif
  __syncthreads();
  cluster_sync();

  auto await_step = [&](int s, int it) {
#if !GRID
    if (it == 0) return;
    const u32 barrier = base + BARRIERS + 8 * (2 * s + ((it - 1) & 1));
    await(barrier, ((it - 1) >> 1) & 1);
    if (tid == 0 && it + 1 < T - 1) expect(barrier, RB);
#endif
  };
  // The gradient of h of a step: of the output, and of the next step.
  auto incoming = [&](int s, int it) {
    float low = 0.f, high = 0.f;
#if GRID
    if (it == 0) return carried[s];
    const u8* from =
        messages + s * messages_between + ((((it + 1) & 1) * CL + rank) * CL + quarter * HALF) * BOX + place_read * 8;
    u32 found[HALF];
    poll([&] {
      bool is_here = true;
#pragma unroll
      for (int j = 0; j < HALF; ++j) is_here &= peek(from + j * BOX, it, found[j]);
      return is_here;
    });
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
      low += low_of(found[j]);
      high += high_of(found[j]);
    }
#if UNITS == 16
    low += __shfl_xor_sync(~0u, low, 16);
    high += __shfl_xor_sync(~0u, high, 16);
#endif
#else
    const u8* from = memory + (((it + 1) & 1) * NS + s) * RB + read_at;
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
      const u32 v = *(const u32*)(from + j * 512);
      low += low_of(v);
      high += high_of(v);
    }
#endif
    const float other = __shfl_xor_sync(~0u, half ? low : high, LANES);
    float sum = (half ? high : low) + other;
#if MASK
    sum *= mask[s];
#endif
    return it > 0 ? carried[s] + sum : carried[s];  // before the first message the memory holds anything
  };
  struct Kept {  // what a step keeps of h and c, and the gradients that pass it
    float h, c, dh, dc;
    bool is_idle;
  };
  auto kept_of = [&](int s, int t, float dh, float shown) {
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
  auto gates_of = [&](int s, const Kept& k, const Inputs& in, float a, float dc_new, float (&d)[4]) {
    const float i_ = low_of(in.gates.x), f_ = high_of(in.gates.x), g_ = low_of(in.gates.y), o_ = high_of(in.gates.y);
    d[0] = k.is_idle ? 0.f : dc_new * g_ * slope<REC>(i_);
    d[1] = k.is_idle ? 0.f : dc_new * in.before * slope<REC>(f_);
    d[2] = k.is_idle ? 0.f : dc_new * i_ * slope<ACT>(g_);
    d[3] = k.is_idle ? 0.f : k.dh * a * slope<REC>(o_);
    dc[s] = (k.is_idle ? 0.f : dc_new * f_) + (k.c == 0.f ? 0.f : k.c * dc[s]);
  };
  auto own_gates = [&](int s, int it) { return ((it & 1) * NS + s) * GB; };
  auto store = [&](int s, uint2 dgates, uint2 dproduct) {
    if (!is_row[s]) return;
    *(uint2*)(dgates_at + (size_t)s * between * 4) = dgates;
#if NORM
    *(uint2*)(dgates_at + (size_t)s * between * 4 + (P.dproduct - P.dgates)) = dproduct;
#endif
  };
  const bool has_row = lane < 8 && rows.first + w * rows.step + lane < B;
  auto load_next = [&](int s, int it) {
    const int t = T - 2 - it;
    if (t < 0) return;
    load(s, t);
    inputs[s].before = t > 0 ? cell_of(saved_of - rows.saved_of_step(), s) : is_row[s] ? P.c0[cell[s]] : 0.f;
    if (w != s || t < AHEAD) return;  // a warp fetches lines of 128 bytes for all
    const u8* line = saved_of - 8 * place_saved + s * rows.saved_between() - AHEAD * rows.saved_of_step();
    for (int at = lane * 128; at < SAVED; at += 32 * 128) fetch_ahead(line + at);
    if (has_row) fetch_ahead(dy_at + s * between - AHEAD * stride + (lane - n) * H - own);
  };
  // The products of this block's gates with W_hh: of two units and two rows each.
  auto product = [&](int s, int it, u32 (&out)[TILES][2]) {
    constexpr int NC = TILES >= 4 ? 1 : 4 / TILES;
    float sums[TILES][NC][4] = {};
    const u8* from = memory + OWN + own_gates(s, it) + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      const uint2 b = *(const uint2*)(from + k * 256);
#pragma unroll
      for (int m = 0; m < TILES; ++m) mma(sums[m][k % NC], weights[m][k], b.x, b.y);
    }
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
  };
  auto send = [&](int s, int it, const u32 (&out)[TILES][2]) {
#if GRID
    u8* to = messages + s * messages_between + ((size_t)(it & 1) * CL * CL + rank) * BOX;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int tile = w * TILES + m, owner = UNITS == 32 ? tile >> 1 : tile;
      const int place = (UNITS == 32 ? (tile & 1) * 64 : 0) + lane * 2;  // whole sectors of a warp
      post(to + (size_t)owner * CL * BOX + place * 8, out[m][0], out[m][1], it + 1);
    }
#else
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
#endif
  };
  auto finish = [&](int s, int it, uint2 dgates, uint2 dproduct) {
    if (is_cell) *(uint2*)(memory + own_at + own_gates(s, it)) = dproduct;
    if (!IS_LATE) {
      store(s, dgates, dproduct);
      load_next(s, it);
    }
    __syncthreads();
    if (it + 1 < T) {
      u32 out[TILES][2];
      product(s, it, out);
      send(s, it, out);
    }
    if (IS_LATE) {
      store(s, dgates, dproduct);
      load_next(s, it);
    }
  };

#if !NORM
  float dbias[4] = {};
  auto gradients_of = [&](int s, int it) {
    const Inputs in = inputs[s];
    const Kept k = kept_of(s, T - 1 - it, incoming(s, it), low_of(in.dy));
    const float a = activate<ACT>(in.c);
    float d[4];
    gates_of(s, k, in, a, k.h == 1.f ? k.dc : fmaf(k.dh * high_of(in.gates.y), slope<ACT>(a), k.dc), d);
#pragma unroll
    for (int e = 0; e < 4; ++e) dbias[e] += d[e];
    return make_uint2(pack2(d[0], d[1]), pack2(d[2], d[3]));
  };
#endif
  for (int it = 0; it < T; ++it) {
    saved_of -= rows.saved_of_step();
    dy_at -= stride;
#if NORM
    const int t = T - 1 - it;
    Kept k[NS];
    float inner[NS], d[NS][4];  // the normalised cell; gradients
    auto share = [&](int kind, int s, float x, float y) {
#pragma unroll
      for (int step = 1; step < R; step <<= 1) {
        x += __shfl_xor_sync(~0u, x, step);
        y += __shfl_xor_sync(~0u, y, step);
      }
      sums_of.share(kind, s, n, it, lane % R == 0 && is_cell, x, y);
    };
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      await_step(s, it);
      k[s] = kept_of(s, t, incoming(s, it), low_of(inputs[s].dy));
      inner[s] = (inputs[s].c - inputs[s].moments.y) * inputs[s].moments.z;
      const float o_ = high_of(inputs[s].gates.y), a = activate<ACT>(fmaf(inner[s], gamma_c, beta_c));
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
      const float through = inputs[s].moments.z * (d[s][0] - (m.x + inner[s] * m.y) * (1.f / REAL));
      gates_of(s, k[s], inputs[s], a, k[s].is_idle ? 0.f : k[s].dc + through, d[s]);
      const float x0 = low_of(inputs[s].normed.x), x1 = high_of(inputs[s].normed.x), x2 = low_of(inputs[s].normed.y), x3 = high_of(inputs[s].normed.y);
      dnorm[0] += d[s][0] * x0; dnorm[1] += d[s][1] * x1; dnorm[2] += d[s][2] * x2; dnorm[3] += d[s][3] * x3;
      const float e0 = d[s][0] * gamma.x, e1 = d[s][1] * gamma.y, e2 = d[s][2] * gamma.z, e3 = d[s][3] * gamma.w;
      share(1, s, (e0 + e1) + (e2 + e3), (e0 * x0 + e1 * x1) + (e2 * x2 + e3 * x3));
    }
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      const float2 m = sums_of.of(1, s, n, it, it + 1 == T);
      const float mean = m.x * (0.25f / REAL), slope_ = m.y * (0.25f / REAL), r = inputs[s].moments.x;
      const float x0 = low_of(inputs[s].normed.x), x1 = high_of(inputs[s].normed.x), x2 = low_of(inputs[s].normed.y), x3 = high_of(inputs[s].normed.y);
      finish(s, it, make_uint2(pack2(d[s][0], d[s][1]), pack2(d[s][2], d[s][3])),
             make_uint2(pack2(r * (d[s][0] * gamma.x - mean - x0 * slope_), r * (d[s][1] * gamma.y - mean - x1 * slope_)),
                        pack2(r * (d[s][2] * gamma.z - mean - x2 * slope_), r * (d[s][3] * gamma.w - mean - x3 * slope_))));
    }
#else
#pragma unroll
    for (int s = 0; s < NS; ++s) {
      if (s >= rows.num) break;
      await_step(s, it);
      const uint2 dgates = gradients_of(s, it);
      finish(s, it, dgates, dgates);
    }
#endif
    dgates_at -= stride * 4;
  }
#if NORM
#pragma unroll
  for (int e = 0; e < 6; ++e)
    if (is_cell) P.dnorm[(((size_t)rows.cluster * 8 + n) * H + unit) * 6 + e] = dnorm[e];
#else
#pragma unroll
  for (int e = 0; e < 4; ++e)  // lanes that differ in these bits have the 8 rows of a unit
    for (int step = R; step < 8 * R; step <<= 1) dbias[e] += __shfl_xor_sync(~0u, dbias[e], step);
  if (lane < R)
    for (int e = 0; e < 4; ++e) P.dbias[((size_t)rows.cluster * 4 + e) * H + unit] = dbias[e];
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
