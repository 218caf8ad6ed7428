// Names, sizes and single instructions that all parts of the forward share.
//
// Given with -D by plan.py:
//   model    HIDDEN HEADS KV_HEADS HEAD_DIM INNER VOCAB LAYERS QK_NORM QKV_BIAS EPS
//   pass     TOKENS (1 to 16) of the pass; KV_BLOCK tokens of a cache block; SPLIT keys of a split
//   grid     CTAS thread blocks, WARPS of each that compute
//   ring     DEPTH chunks of CHUNK bytes a warp, FLIGHT of them under way, PACE clocks apart
//   tiles    GROUP tiles of a product that are summed over the warps at once
//   WARM_BYTES of cached K and V of a layer that are fetched into L2 ahead; SPIN_LIMIT polls before
//   a reader gives up; TRACE clocks at every mark; SMEM bytes of shared memory
#pragma once

typedef unsigned short u16;  // the bits of a bfloat16
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }

constexpr int THREADS = WARPS * 32;  // that compute; a service warp and a copying warp follow
constexpr int Q_DIM = HEADS * HEAD_DIM, KV_DIM = KV_HEADS * HEAD_DIM, QKV_DIM = Q_DIM + 2 * KV_DIM;
constexpr int HEAD_GROUP = HEADS / KV_HEADS;  // query heads of a KV head

// Outputs of each product that one thread block computes; the last blocks may have fewer.
// Of q and k, pairs of dimensions that rotate together stay together; values follow.
constexpr int PAIRS = ceil_div((Q_DIM + KV_DIM) / 2, CTAS), OUT_VALUES = ceil_div(KV_DIM, CTAS);
constexpr int OUT_QKV = 2 * PAIRS + OUT_VALUES, OUT_HIDDEN = ceil_div(HIDDEN, CTAS);
constexpr int OUT_INNER = ceil_div(INNER, CTAS), OUT_VOCAB = ceil_div(VOCAB, CTAS);

// Tokens are the n8 side of the matrix instruction: a panel is 8 of them.
constexpr int PANELS = ceil_div(TOKENS, 8);
static_assert(TOKENS >= 1 && PANELS <= 2, "activations of more panels find no registers");
static_assert(HIDDEN % 32 == 0 && INNER % 32 == 0 && Q_DIM % 32 == 0, "inputs go in pieces of 32");
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128, "see attention.cuh");
static_assert(HEADS % KV_HEADS == 0 && HEAD_GROUP <= 8, "heads of a group are an n8 side too");
static_assert(KV_BLOCK % 16 == 0, "16 keys that are read together lie in one cache block");

template <int N> struct Int { static constexpr int value = N; };

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
// Two floats as bfloat16, a in the low half. NaN becomes 0x7FFF, whatever its bits were.
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

// Which of q, k and v output `i` of a block's qkv product is; QKV_DIM or more for padding.
__device__ __forceinline__ u32 qkv_output(u32 cta, u32 i) {
  if (i >= 2 * PAIRS) {
    const u32 value = cta * OUT_VALUES + i - 2 * PAIRS;
    return value < KV_DIM ? Q_DIM + KV_DIM + value : QKV_DIM;
  }
  const u32 pair = cta * PAIRS + i / 2;
  if (pair >= (Q_DIM + KV_DIM) / 2) return QKV_DIM;
  return pair / (HEAD_DIM / 2) * HEAD_DIM + pair % (HEAD_DIM / 2) + i % 2 * (HEAD_DIM / 2);
}

// 16 bytes that nothing writes during a launch.
__device__ __forceinline__ uint4 load_constant(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void warm(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
// Every computing warp of the block.
__device__ __forceinline__ void sync_compute() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
// d += A B, A 16 x 16 in a0..a3, B 16 x 8 in b0 and b1. Which of the 16 inner places is which
// does not matter as long as A and B agree: both are read 16 bytes, 8 inner places, a lane.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where a computing thread is. In a fragment of the matrix instruction, `group` is the row of A or
// the column of B, the token of a panel; `quad` says which 8 of 32 inner places the lane holds.
struct Place {
  int cta, thread, warp, lane, group, quad;
};

__device__ __forceinline__ Place place_of(u32 thread) {
  const u32 lane = thread % 32;
  return {(int)blockIdx.x, (int)thread,     (int)(thread / 32),
          (int)lane,       (int)(lane / 4), (int)(lane % 4)};
}

struct LayerPointers {
  const u16 *input_norm, *mlp_norm, *qkv_bias, *head_norm;
  u16 *keys, *values;  // [blocks][KV_BLOCK][KV_HEADS][HEAD_DIM]
};

struct Params {
  const LayerPointers* layers;
  const u16 *embedding, *final_norm;
  const char* weights;   // packed, see pack.py
  const i64* streams;    // per warp: where its weights start, and bytes of one thread block's
  const float* frequencies;  // [HEAD_DIM / 2] angle per position
  const int *history, *rows, *num_tokens, *active, *block_table;
  i64 history_stride, table_stride;
  int history_len, table_len, query_len, offset;
  u16* exchange;        // see exchange.cuh
  float *partials, *partial_weights;  // of splits, see attention.cuh
  u32 *partial_flags, *state;
  float* logits;        // [TOKENS][VOCAB]
  u64* trace;
};
enum Word { LAUNCHES, FINISHED, FAILED };  // of Params::state

// Clocks at points of a layer, [CTAS][LAYERS][16], when built with TRACE.
__device__ __forceinline__ void mark(const Params& P, const Place& at, int layer, int point) {
#if TRACE
  if (at.thread == 0) P.trace[(at.cta * LAYERS + layer) * 16 + point] = clock64();
#endif
}
