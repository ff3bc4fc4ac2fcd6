// One step of writing text, beside the matrix products: the LSTM cell, and the choice of the next token.
//
// A row is a stream. The cell names the token a row reads: of its prompt while there is one, else the one written
// last. The choice follows cpu/sampler.h rule by rule, with the same random numbers (Philox4x32-10 of the seed and the
// count of draws), so that a text depends on neither its neighbours nor the number of rows. Rows that do not run
// change nothing.
//
// Compiled at run time (NVRTC) for one set of these macros; with THREADS 1 it is plain C++, which tests compile.
//   OPERAND  number format of the products: 0 float32, 1 bfloat16, 2 float16; their sums are float32
//   THREADS  of a block of choose, which has one block per row: 1, 32 or a multiple

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if OPERAND == 0
typedef float Operand;
#else
typedef unsigned short Operand;
#endif

#define RECENT 64      // tokens that the repetition penalty looks back
#define MAX_STOPS 8    // stop sequences of a row, each behind its length
#define LOWEST 80.0f   // a score this far below the likeliest has no chance
#define INF __uint_as_float(0x7f800000u)

enum Status { kRunning, kFull, kStopped, kNotFinite, kPaused };
// Whole numbers of a row.
enum Field { kSeed, kDrawn, kNumRecent, kNumWritten, kRoom, kToken, kTopK, kNumStops, kCounts, kBiases, kFields };
enum Rate { kTemperature, kTopP, kMinP, kRepetition, kFrequency, kPresence, kRates };

// What is to be read in a launch: a number of tokens, with two flags.
#define KNOWS_FIRST (1 << 30)  // the first was written, and remembered, before
#define HAS_MORE (1 << 29)     // further tokens come in the next launch
#define NUM_GIVEN (HAS_MORE - 1)

struct Rows {
  int* status;     // (R)
  i64* fields;     // (R, kFields)
  int* num_given;  // (R) with flags
  int* given;      // (R, K)
};

struct Cell {
  Rows rows;
  const float* gates;  // (R, 4H) sums, in the order i f g o
  const float* added;  // (V, 4H) by token, or (4H)
  float* c;            // (R, H)
  Operand* h;          // (R, stride) operand of the next step
  Operand* above;      // (R, above_stride) operand of the next layer, or null
  float* output;       // (R, H) or null
  int* tokens;         // (R) that are read, or null
  int R, H, K, step, by_token, stride, above_stride;
};

struct Choose {
  Rows rows;
  float* logits;         // (R, stride); changed
  const float* bias;     // (V)
  const float* rates;    // (R, kRates)
  const float* biases;   // (R, V)
  const int* stops;      // (R, MAX_STOPS, 1 + RECENT)
  int* recent;           // (R, RECENT) ring
  int* counts;           // (R, V) times a token was written
  int* written;          // (K, R) tokens, or -1
  int R, V, K, step, stride;
};

__device__ __forceinline__ Operand operand(float x) {
  Operand r;
#if OPERAND == 0
  r = x;
#elif OPERAND == 1
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
  return r;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// One thread per unit of a row.
extern "C" __global__ void cell(const Cell a) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / a.H, unit = at % a.H;
  if (row >= a.R || a.rows.status[row] != kRunning) return;
  const bool is_given = a.step < (a.rows.num_given[row] & NUM_GIVEN);
  const int token = is_given ? a.rows.given[row * a.K + a.step] : (int)a.rows.fields[row * kFields + kToken];
  if (unit == 0 && a.tokens) a.tokens[row] = token;
  const float* const sums = a.gates + (i64)row * 4 * a.H + unit;
  const float* const added = a.added + (a.by_token ? (i64)token * 4 * a.H : 0) + unit;
  const float i = sigmoid(sums[0] + added[0]), f = sigmoid(sums[a.H] + added[a.H]);
  const float g = tanhf(sums[2 * a.H] + added[2 * a.H]), o = sigmoid(sums[3 * a.H] + added[3 * a.H]);
  const float c = f * a.c[at] + i * g, h = o * tanhf(c);
  a.c[at] = c;
  a.h[(i64)row * a.stride + unit] = operand(h);
  if (a.above) a.above[(i64)row * a.above_stride + unit] = operand(h);
  if (a.output) a.output[at] = h;
}

// --- sums, maxima and running sums of a block; everyone gets the result --------------------------

#if THREADS == 1
__device__ inline void meet() {}
__device__ inline double sum_of(double x) { return x; }
__device__ inline double max_of(double x) { return x; }
__device__ inline double running_sum(double x, double& total) { return total = x; }
#else
#define WARPS (THREADS / 32)
__shared__ double of_warps[32];

__device__ __forceinline__ void meet() { __syncthreads(); }

template <typename Join>
__device__ __forceinline__ double joined(double x, Join join) {
  for (int n = 16; n > 0; n /= 2) x = join(x, __shfl_xor_sync(~0u, x, n));
#if WARPS > 1
  meet();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  meet();
  x = of_warps[0];
  for (int w = 1; w < WARPS; ++w) x = join(x, of_warps[w]);
#endif
  return x;
}
__device__ __forceinline__ double sum_of(double x) {
  return joined(x, [](double a, double b) { return a + b; });
}
__device__ __forceinline__ double max_of(double x) {
  return joined(x, [](double a, double b) { return a > b ? a : b; });
}
__device__ __forceinline__ double running_sum(double x, double& total) {
  const int lane = threadIdx.x % 32;
  for (int n = 1; n < 32; n *= 2) {
    const double other = __shfl_up_sync(~0u, x, n);
    if (lane >= n) x += other;
  }
  total = __shfl_sync(~0u, x, 31);
#if WARPS > 1
  meet();
  if (lane == 31) of_warps[threadIdx.x / 32] = x;
  meet();
  double before = 0.0;
  total = 0.0;
  for (int w = 0; w < WARPS; ++w) {
    if (w == threadIdx.x / 32) before = total;
    total += of_warps[w];
  }
  x += before;
#endif
  return x;
}
#endif

#define EACH(k, size) for (int k = threadIdx.x; k < (size); k += THREADS)

__device__ inline double uniform(u64 seed, u64 number) {
  u32 c[4] = {(u32)number, (u32)(number >> 32), 0, 0}, key0 = (u32)seed, key1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)0xD2511F53u * c[0], b = (u64)0xCD9E8D57u * c[2];
    const u32 next[4] = {(u32)(b >> 32) ^ c[1] ^ key0, (u32)b, (u32)(a >> 32) ^ c[3] ^ key1, (u32)a};
    for (int k = 0; k < 4; ++k) c[k] = next[k];
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return (double)(((u64)c[0] << 32 | c[1]) >> 11) * (1.0 / 9007199254740992.0);
}

__device__ inline double highest(const float* l, int V) {
  double top = -INF;
  EACH(k, V) top = l[k] > top ? l[k] : top;
  return max_of(top);
}

// Adds the output's bias; returns whether a logit is NaN or plus infinity.
__device__ inline bool is_damaged(float* l, const float* bias, int V) {
  double damage = 0.0;
  EACH(k, V) {
    l[k] += bias[k];
    if (!(l[k] < INF)) damage = 1.0;
  }
  return max_of(damage) > 0.0;
}

__device__ inline void apply_penalties(float* l, const Choose& a, const i64* fields, const float* rates, int row) {
  const int* const recent = a.recent + row * RECENT;
  if (rates[kRepetition] != 1.0f) {
    const double top = highest(l, a.V);
    double sum = 0.0;
    EACH(k, a.V) sum += expf(l[k] - (float)top);
    const float total = (float)(top + log(sum_of(sum)));
    const int count = fields[kNumRecent] < RECENT ? (int)fields[kNumRecent] : RECENT;
    float before[(RECENT + THREADS - 1) / THREADS];  // a token that came twice is changed once
    meet();
    EACH(k, count) before[k / THREADS] = l[recent[k]];
    meet();
    EACH(k, count) l[recent[k]] = total + (before[k / THREADS] - total) * rates[kRepetition];
    meet();
  }
  if (fields[kCounts]) {
    const int* const counts = a.counts + (i64)row * a.V;
    EACH(k, a.V) if (counts[k] > 0) l[k] -= rates[kPresence] + rates[kFrequency] * (float)counts[k];
  }
  if (fields[kBiases]) EACH(k, a.V) l[k] += a.biases[(i64)row * a.V + k];
}

__device__ __forceinline__ float weight_of(float depth) { return depth > LOWEST ? 0.0f : expf(-depth); }
__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

// What is kept lies at most this deep below the likeliest; `l` are depths.
template <typename Weight>
__device__ inline float deepest(const float* l, int V, float limit, double wanted, Weight weight) {
  u32 low = 0, high = __float_as_uint(limit);
  while (low < high) {  // numbers from 0 on are ordered as their bits are
    const u32 middle = low + (high - low) / 2;
    const float bound = as_float(middle);
    double sum = 0.0;
    EACH(k, V) if (l[k] <= bound) sum += weight(l[k]);
    if (sum_of(sum) >= wanted) high = middle;
    else low = middle + 1;
  }
  return as_float(high);
}

__device__ inline float kept_depth(const float* l, int V, i64 top_k, const float* rates) {
  float limit = LOWEST;
  if (top_k > 0 && top_k < V) {
    limit = deepest(l, V, limit, (double)top_k, [](float) { return 1.0f; });
  }
  if (rates[kTopP] < 1.0f) {
    double sum = 0.0;
    EACH(k, V) if (l[k] <= limit) sum += weight_of(l[k]);
    limit = deepest(l, V, limit, rates[kTopP] * sum_of(sum), weight_of);
  }
  if (rates[kMinP] > 0.0f && -logf(rates[kMinP]) < limit) limit = -logf(rates[kMinP]);
  return limit;
}

__device__ inline bool is_stopped(const int* stops, const i64* fields, const int* recent) {
  for (int n = 0; n < fields[kNumStops]; ++n, stops += 1 + RECENT) {
    const int length = stops[0];
    bool is_end = length <= fields[kNumWritten];
    for (int k = 0; is_end && k < length; ++k) {
      is_end = recent[(fields[kNumRecent] - length + k) % RECENT] == stops[1 + k];
    }
    if (is_end) return true;
  }
  return false;
}

// One thread of a block: the row writes a token.
__device__ inline void write(const Choose& a, i64* fields, int row, int token) {
  int* const recent = a.recent + row * RECENT;
  a.written[a.step * a.R + row] = token;
  recent[fields[kNumRecent]++ % RECENT] = token;
  ++fields[kNumWritten];
  fields[kToken] = token;
  int* const count = a.counts + (i64)row * a.V + token;
  if (fields[kCounts] && *count < 65535) ++*count;
  if (--fields[kRoom] == 0) a.rows.status[row] = kFull;
  if (is_stopped(a.stops + row * MAX_STOPS * (1 + RECENT), fields, recent)) a.rows.status[row] = kStopped;
}

// The thread that holds the token at `place` of the running sum of weights writes it.
__device__ inline void draw(const Choose& a, const float* l, i64* fields, int row, float limit) {
  const int each = (a.V + THREADS - 1) / THREADS, first = threadIdx.x * each;
  const int end = first + each < a.V ? first + each : a.V;
  double own = 0.0, total;
  for (int k = first; k < end; ++k) if (l[k] <= limit) own += weight_of(l[k]);
  const double after = running_sum(own, total);
  const double place = uniform((u64)fields[kSeed], (u64)fields[kDrawn]) * total;
  double owner = -max_of(own > 0.0 && after > place ? -(double)threadIdx.x : -(double)THREADS);
  if (owner == THREADS) owner = max_of(own > 0.0 ? (double)threadIdx.x : 0.0);  // by rounding
  if (threadIdx.x != (int)owner) return;
  double sum = after - own;
  int token = first;
  for (int k = first; k < end; ++k) {
    const float weight = l[k] <= limit ? weight_of(l[k]) : 0.0f;
    if (weight == 0.0f) continue;
    token = k;
    sum += weight;
    if (sum > place) break;
  }
  ++fields[kDrawn];
  write(a, fields, row, token);
}

// One block per row.
extern "C" __global__ void choose(const Choose a) {
  const int row = blockIdx.x, V = a.V;
  i64* const fields = a.rows.fields + row * kFields;
  const float* const rates = a.rates + row * kRates;
  float* const l = a.logits + (i64)row * a.stride;
  const bool is_first = threadIdx.x == 0, is_running = a.rows.status[row] == kRunning;
  if (is_first) a.written[a.step * a.R + row] = -1;
  if (!is_running) return;
  const int flags = a.rows.num_given[row], num_given = flags & NUM_GIVEN;
  const bool is_last = a.step + 1 >= num_given && !(flags & HAS_MORE), writes = is_last && fields[kRoom] > 0;
  meet();
  if (is_first && a.step < num_given && !(a.step == 0 && flags & KNOWS_FIRST)) {
    a.recent[row * RECENT + fields[kNumRecent]++ % RECENT] = a.rows.given[row * a.K + a.step];
  }
  if (!writes) {
    if (is_first && is_last) a.rows.status[row] = kFull;
    return;
  }
  meet();
  if (is_damaged(l, a.bias, V)) {
    if (is_first) a.rows.status[row] = kNotFinite;
    return;
  }
  apply_penalties(l, a, fields, rates, row);
  const float top = (float)highest(l, V);
  if (!(top > -INF)) {
    if (is_first) a.rows.status[row] = kNotFinite;
  } else if (rates[kTemperature] == 0.0f) {
    double found = -(double)V;
    EACH(k, V) if (l[k] == top && -(double)k > found) found = -(double)k;
    found = max_of(found);
    if (is_first) write(a, fields, row, -(int)found);
  } else {
    const float rate = 1.0f / (rates[kTemperature] > 1e-6f ? rates[kTemperature] : 1e-6f);
    EACH(k, V) l[k] = fminf((top - l[k]) * rate, 2.0f * LOWEST);
    meet();
    const float limit = kept_depth(l, V, fields[kTopK], rates);
    draw(a, l, fields, row, limit);
  }
}
