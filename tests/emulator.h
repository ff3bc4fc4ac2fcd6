// Runs a kernel of ops/cuda on the CPU: every thread of the GPU is a fiber, its machine instructions are C++.
//
// Fibers change where GPU threads wait for each other: in barriers, shuffles, products and polls. Which warp runs next
// is drawn, and a message to another block or to global memory arrives at a drawn time, some warps and messages late, so a
// step that reads or overwrites too early gives other numbers. A launch in which nothing can go on ends with an error.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED_MEMORY uint8_t* memory = current->block->shared.data()

struct Vector3 {
  unsigned x = 0, y = 0, z = 0;
};
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- fibers ------------------------------------------------------------------------------------

struct Meeting {  // threads that wait for each other, with what each of them brings
  unsigned size, arrived = 0, generation = 0;
  uint32_t brought[2][32][6];
};
struct Barrier {  // an mbarrier, in 8 bytes of shared memory
  int32_t bytes;
  int16_t pending;
  uint16_t phase;
};
struct Block {
  unsigned rank, cluster;
  std::vector<uint8_t> shared;
  Meeting all;
  std::vector<Meeting> warps;
};
struct Fiber {
  ucontext_t context;
  std::vector<uint8_t> stack;
  Block* block;
  Vector3 thread, index;
  bool is_over = false, has_progress = false;
  const Meeting* waits_for = nullptr;
  unsigned generation = 0;  // of that meeting
};
struct Message {
  std::function<void()> deliver;
  bool is_late;
};
static thread_local Fiber* current;
static ucontext_t scheduler;
static std::vector<std::unique_ptr<Block>> blocks;
static std::vector<Message> messages_on_their_way;
static std::mt19937 draws;
static Vector3 grid_size;
static unsigned cluster_size;
static bool is_trapped;
static std::function<void()> body;

#define threadIdx (current->thread)
#define blockIdx (current->index)
#define gridDim grid_size

static void give_way() { swapcontext(&current->context, &scheduler); }
// Waits for all threads of a meeting; returns the generation, which says where the brought words lie.
static unsigned meet(Meeting& of) {
  const unsigned generation = of.generation;
  current->has_progress = true;
  if (++of.arrived == of.size) {
    of.arrived = 0;
    ++of.generation;
  } else {
    current->waits_for = &of;
    current->generation = generation;
    while (of.generation == generation) give_way();
    current->waits_for = nullptr;
    current->has_progress = true;
  }
  return generation;
}
static Meeting& warp() { return current->block->warps[threadIdx.x / 32]; }
static void later(std::function<void()> deliver) { messages_on_their_way.push_back({std::move(deliver), draws() % 16 == 0}); }
static void start() {
  body();
  current->is_over = current->has_progress = true;
  give_way();
}

inline void __syncthreads() { meet(current->block->all); }
inline void __syncwarp() { meet(warp()); }
inline long long clock64() {
  give_way();
  return 0;
}
inline void __trap() {
  is_trapped = true;
  give_way();
}
template <class T> T __ldg(const T* p) { return *p; }
inline float __uint_as_float(uint32_t v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t v;
  memcpy(&v, &f, 4);
  return v;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline uint32_t __shfl_xor_sync(unsigned, uint32_t v, int lane_mask) {
  Meeting& of = warp();
  const unsigned lane = threadIdx.x % 32;
  of.brought[of.generation & 1][lane][0] = v;
  const unsigned generation = meet(of);
  return of.brought[generation & 1][lane ^ lane_mask][0];
}
inline float __shfl_xor_sync(unsigned mask, float v, int lane_mask) {
  return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(v), lane_mask));
}

// --- machine instructions ----------------------------------------------------------------------

#if DTYPE == 0
static uint16_t rounded(float f) {
  const uint32_t v = __float_as_uint(f);
  if (f != f) return 0x7fff;
  return (v + 0x7fff + ((v >> 16) & 1)) >> 16;
}
static float widened(uint16_t v) { return __uint_as_float((uint32_t)v << 16); }
#else
static uint16_t rounded(float f) {
  const _Float16 h = (_Float16)f;
  uint16_t v;
  memcpy(&v, &h, 2);
  return v;
}
static float widened(uint16_t v) {
  _Float16 h;
  memcpy(&h, &v, 2);
  return (float)h;
}
#endif
inline uint32_t pack2(float low, float high) { return rounded(low) | (uint32_t)rounded(high) << 16; }
inline float low_of(uint32_t v) { return widened(v & 0xffff); }
inline float high_of(uint32_t v) { return widened(v >> 16); }
inline float tanh_of(float x) { return tanhf(x); }
inline void fetch_ahead(const void*) {}
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Meeting& of = warp();
  const unsigned lane = threadIdx.x % 32, q = lane / 4, p = lane % 4;
  uint32_t(&mine)[6] = of.brought[of.generation & 1][lane];
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  mine[4] = b0;
  mine[5] = b1;
  const auto& all = of.brought[meet(of) & 1];
  for (int e = 0; e < 4; ++e) {
    const unsigned row = e / 2, column = 2 * p + e % 2;
    for (unsigned k = 0; k < 4; ++k)
      for (int half = 0; half < 2; ++half) {
        const uint32_t x = all[4 * q + k][row + 2 * half], y = all[4 * column + k][4 + half];
        d[e] += low_of(x) * low_of(y) + high_of(x) * high_of(y);
      }
  }
}

#if GRID
static void post(uint8_t* to, uint32_t x, uint32_t y, uint32_t step) {
  const uint64_t first = x | (uint64_t)step << 32, second = y | (uint64_t)step << 32;
  later([=] { memcpy(to, &first, 8); });  // no order among pairs
  later([=] { memcpy(to + 8, &second, 8); });
}
static bool peek(const uint8_t* from, uint32_t step, uint32_t& x) {
  uint32_t found[2];
  memcpy(found, from, 8);
  x = found[0];
  return found[1] == step;
}
static bool peek(const uint8_t* from, uint32_t step, uint32_t& x, uint32_t& y) {
  return peek(from, step, x) & peek(from + 8, step, y);
}
#else
// An address of shared memory is the block's rank and one, and 24 bits of its place.
static uint32_t shared_address(const void* p) {
  return (current->block->rank + 1) << 24 | (uint32_t)((const uint8_t*)p - current->block->shared.data());
}
static uint8_t* at_address(unsigned cluster, uint32_t address) {
  return blocks[cluster * cluster_size + (address >> 24) - 1]->shared.data() + (address & 0xffffff);
}
static uint32_t block_rank() { return current->block->rank; }
static uint32_t address_in(uint32_t address, uint32_t rank) { return (address & 0xffffff) | (rank + 1) << 24; }
static std::vector<Meeting> clusters;
static void cluster_sync() { meet(clusters[current->block->cluster]); }
static void advance(Barrier* b) {
  if (b->pending || b->bytes) return;
  ++b->phase;
  b->pending = 1;
}
static Barrier* barrier_at(uint32_t address) { return (Barrier*)at_address(current->block->cluster, address); }
static void expect(uint32_t barrier, uint32_t bytes) {
  Barrier* b = barrier_at(barrier);
  b->bytes += bytes;
  --b->pending;
  advance(b);
}
static void init_barriers(uint32_t first, int num) {
  for (int i = 0; i < num; ++i) *barrier_at(first + 8 * i) = {0, 1, 0};
}
static bool is_over(uint32_t barrier, uint32_t parity) { return (barrier_at(barrier)->phase & 1) != parity; }
static void send(uint32_t to, std::vector<uint32_t> words, uint32_t barrier) {
  const unsigned cluster = current->block->cluster;
  later([=] {
    memcpy(at_address(cluster, to), words.data(), 4 * words.size());
    Barrier* b = (Barrier*)at_address(cluster, barrier);
    b->bytes -= 4 * words.size();
    advance(b);
  });
}
static void send8(uint32_t to, uint32_t x, uint32_t y, uint32_t barrier) { send(to, {x, y}, barrier); }
static void send16(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w, uint32_t barrier) {
  send(to, {x, y, z, w}, barrier);
}
#endif

// --- launch ------------------------------------------------------------------------------------

// Runs `body` in every thread; returns 0, 1 where nothing can go on, or 2 after a trap.
static int run(unsigned num_clusters, unsigned size, unsigned threads, unsigned shared_bytes, unsigned seed) {
  constexpr size_t STACK = 96 << 10;
  cluster_size = size;
  grid_size.x = num_clusters * size;
  draws.seed(seed);
  is_trapped = false;
  blocks.clear();
  messages_on_their_way.clear();
#if !GRID
  clusters.assign(num_clusters, Meeting{size * threads});
#endif
  std::vector<Fiber> fibers(grid_size.x * threads);
  for (unsigned i = 0; i < grid_size.x; ++i) {
    blocks.emplace_back(new Block{i % size, i / size, std::vector<uint8_t>(shared_bytes + 1024, 0xff), {threads}, {}});
    blocks.back()->warps.assign(threads / 32, Meeting{32});
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = fibers[i * threads + t];
      f.stack.resize(STACK);
      f.block = blocks.back().get();
      f.thread.x = t;
      f.index.x = i;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = STACK;
      makecontext(&f.context, start, 0);
    }
  }
  constexpr unsigned PATIENCE = 16;  // of what is late: one turn in so many is taken
  const unsigned num_warps = fibers.size() / 32;
  std::vector<bool> is_late(num_warps);
  for (unsigned i = 0; i < num_warps; ++i) is_late[i] = draws() % 8 == 0;
  unsigned left = fibers.size();
  for (uint64_t idle = 0; left && !is_trapped;) {
    const unsigned first = draws() % num_warps * 32;
    bool has_progress = false;
    for (bool goes_on = !is_late[first / 32] || draws() % PATIENCE == 0; goes_on && !is_trapped;) {
      goes_on = false;
      for (unsigned i = first; i < first + 32; ++i) {
        Fiber& f = fibers[i];
        if (f.is_over || (f.waits_for && f.waits_for->generation == f.generation)) continue;
        f.has_progress = false;
        current = &f;
        swapcontext(&scheduler, &f.context);
        left -= f.is_over;
        goes_on |= f.has_progress;
      }
      has_progress |= goes_on;
      goes_on &= draws() % 4 != 0;
    }
    const size_t num = std::min<size_t>(messages_on_their_way.size(), draws() % 16);
    for (size_t n = 0; n < num; ++n) {
      std::swap(messages_on_their_way[draws() % messages_on_their_way.size()], messages_on_their_way.back());
      if (messages_on_their_way.back().is_late && draws() % PATIENCE) continue;
      messages_on_their_way.back().deliver();
      messages_on_their_way.pop_back();
    }
    idle = has_progress || num ? 0 : idle + 1;
    if (idle > 4000 * num_warps && messages_on_their_way.empty()) return 1;
  }
  return is_trapped ? 2 : 0;
}
