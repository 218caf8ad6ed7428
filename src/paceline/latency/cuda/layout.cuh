// What lies where in a thread block's shared memory.
#pragma once
#include "common.cuh"

struct Token {
  i64 slot;      // element of the caches where its K and V go
  int id, position;
  int row;       // of history and block table
  int first;     // first token of its sequence in this pass,
  int base;      // which stands at this position; keys before it are cached
  int keys;      // that it attends to; none when its row is inactive
  int splits;    // of those keys, at least one
};
// Of attention, see attention.cuh: one token, one KV head, one split of the keys.
struct Unit {
  int token;     // -1 behind the last
  int head;      // first element of the KV head among the KV heads
  int begin, end;        // keys of the split that the token attends to
  int base, first, position, splits;  // as in Token
  int query, fresh;      // in the exchange: the group's first query; the sequence's first new key
  i64 own;       // element of the caches where the token's K and V of the head go
};
// What a warp knows between phases: all its threads know the same.
struct Kept {
  u32 at, have, used, slot, parity, freed;  // of its stream, see ring.cuh
  u32 step;
  int layer, turn, side;
};

constexpr int RING = DEPTH * CHUNK;                       // bytes a warp
constexpr int SUMS_FLOATS = WARPS * GROUP * 16 * TOKENS;  // see products.cuh
constexpr int MERGE_STRIDE = HEAD_DIM + 2;  // floats; two more, or lanes would meet in banks
constexpr int MERGE_FLOATS =
    most(WARPS * HEAD_GROUP * (MERGE_STRIDE + 1), 2 * MAX_SPLITS + THREADS);
constexpr int MAX_UNITS = ceil_div(TOKENS * KV_HEADS * MAX_SPLITS, CTAS);  // of a thread block

constexpr int after(int end) { return ceil_div(end, 16) * 16; }
constexpr int S_BARRIERS = RING * WARPS;                  // the rings come first
constexpr int S_FREED = S_BARRIERS + WARPS * DEPTH * 8;   // chunks each warp is done with
constexpr int S_SUMS = after(S_FREED + WARPS * 4);
constexpr int S_PEAKS = S_SUMS + after(most(2 * SUMS_FLOATS, MERGE_FLOATS) * 4);
constexpr int S_SQUARES = S_PEAKS + after(HEAD_GROUP * WARPS * 4);
constexpr int S_RESIDUAL = S_SQUARES + 2 * WARPS * PANELS * 8 * 4;
constexpr int S_TURNS = S_RESIDUAL + after(OUT_HIDDEN * TOKENS * 4);
constexpr int S_LAYERS = S_TURNS + TOKENS * HEAD_DIM / 2 * 8;
constexpr int S_BIAS = S_LAYERS + after(LAYERS * (int)sizeof(LayerPointers));
constexpr int S_TOKENS = S_BIAS + after(QKV_BIAS * LAYERS * OUT_QKV * 2);
constexpr int S_UNITS = S_TOKENS + after(TOKENS * (int)sizeof(Token));
constexpr int S_COMBINES = S_UNITS + (MAX_UNITS + 1) * (int)sizeof(Unit);
constexpr int S_TABLE = S_COMBINES + 4;
constexpr int TABLE = ceil_div(SPLIT, KV_BLOCK) + 1;
constexpr int S_KEPT = after(S_TABLE + TABLE * 4);
constexpr int S_END = S_KEPT + WARPS * (int)sizeof(Kept);
static_assert(S_END <= SMEM, "plan.py asks for too little shared memory");

extern __shared__ __align__(128) char shared_memory[];
template <class T> __device__ __forceinline__ T* shared_at(int offset) {
  return (T*)(shared_memory + offset);
}
__device__ __forceinline__ u32 shared_address() {
  return (u32)__cvta_generic_to_shared(shared_memory);
}
// Sums of a product, two areas that take turns; or what attention merges.
__device__ __forceinline__ float* shared_sums() { return shared_at<float>(S_SUMS); }
// Of the warps' keys, [HEAD_GROUP][WARPS].
__device__ __forceinline__ float* shared_peaks() { return shared_at<float>(S_PEAKS); }
// Of a token's slice, [2][WARPS][PANELS * 8].
__device__ __forceinline__ float* shared_squares() { return shared_at<float>(S_SQUARES); }
// The residual stream of this block's outputs, [OUT_HIDDEN][TOKENS].
__device__ __forceinline__ float* shared_residual() { return shared_at<float>(S_RESIDUAL); }
// Cosine and sine of each pair of dimensions, [TOKENS][HEAD_DIM / 2].
__device__ __forceinline__ float2* shared_turns() { return shared_at<float2>(S_TURNS); }
__device__ __forceinline__ LayerPointers* shared_layers() {
  return shared_at<LayerPointers>(S_LAYERS);
}
// Of this block's qkv outputs, [LAYERS][OUT_QKV].
__device__ __forceinline__ u16* shared_bias() { return shared_at<u16>(S_BIAS); }
__device__ __forceinline__ Token* shared_tokens() { return shared_at<Token>(S_TOKENS); }
// This block's, ended by a token of -1.
__device__ __forceinline__ Unit* shared_units() { return shared_at<Unit>(S_UNITS); }
// Whether this block weighs splits of some token.
__device__ __forceinline__ int& shared_combines() { return *shared_at<int>(S_COMBINES); }
// Block ids of the first unit's split.
__device__ __forceinline__ int* shared_table() { return shared_at<int>(S_TABLE); }
__device__ __forceinline__ Kept& shared_kept(int warp) { return shared_at<Kept>(S_KEPT)[warp]; }
