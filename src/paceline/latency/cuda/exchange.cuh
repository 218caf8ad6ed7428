// How thread blocks hand activations to one another.
//
// Values travel through a buffer in global memory that stays in L2. An element that has not been
// written holds the bits 0xFFFF, which `publish` never writes; a reader polls the very words that
// it needs. There is no barrier of the whole grid, no flag and no fence on the path.
//
// There are two buffers, for even and odd layers. While a layer runs, the other buffer is cleared:
// a block that has seen the sums after attention of every block knows that nobody still reads what
// the layer before left (service.cuh).
#pragma once
#include "common.cuh"

constexpr int X_QKV = 0;                             // as they leave the product, bias added
constexpr int X_ATTENDED = X_QKV + TOKENS * QKV_DIM;
constexpr int X_MIDDLE = X_ATTENDED + TOKENS * Q_DIM;  // residual stream after attention
constexpr int X_INNER = X_MIDDLE + TOKENS * HIDDEN;
constexpr int X_OUT = X_INNER + TOKENS * INNER;        // residual stream after the layer
constexpr int X_SIZE = X_OUT + TOKENS * HIDDEN;        // elements; a multiple of 8

__device__ __forceinline__ uint4 load_shared_value(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void publish(u16* p, float x) {
  const u16 v = (u16)pack(x, 0.f);
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
__device__ __forceinline__ void publish_pair(u16* p, float x, float y) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(pack(x, y)) : "memory");
}

__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 largest_half(uint4 v) {
  return max_halves(max_halves(v.x, v.y), max_halves(v.z, v.w));
}
__device__ __forceinline__ bool unset(u32 pair) {
  return (pair & 0xffffu) == 0xffffu || pair >= 0xffff0000u;
}
__device__ __forceinline__ bool unset(uint4 v) { return unset(largest_half(v)); }
__device__ __forceinline__ uint4 not_set() { return make_uint4(~0u, ~0u, ~0u, ~0u); }

// Whether a reader should stop waiting: another one did, or this one has polled SPIN_LIMIT times.
// The pass then runs to its end over values that are NaN, and the host finds the word.
__device__ __forceinline__ bool waited_enough(u32& spins, u32* state) {
  if (++spins % 1024 != 0) return false;
  u32 failed;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(failed) : "l"(state + FAILED) : "memory");
  if (failed == 0 && spins < SPIN_LIMIT) return false;
  asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(state + FAILED) : "memory");
  return true;
}

// Poll one piece until it is set: cheaper than all while nothing has come yet.
__device__ __forceinline__ void watch(const u16* p, u32* state, bool sleep = false) {
  u32 spins = 0;
  while (unset(load_shared_value(p))) {
    if (waited_enough(spins, state)) break;
    if (sleep) __nanosleep(100);
  }
}
// Load again those of the first `count` pieces (16 bytes, `stride` elements apart) that have
// elements not set yet, until none has.
template <int N> __device__ __forceinline__ bool any_unset(const uint4 (&v)[N], int count) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (i < count) largest = max_halves(largest, largest_half(v[i]));
  return unset(largest);
}
template <int N>
__device__ __forceinline__ void settle(uint4 (&v)[N], const u16* p, int stride, int count, bool on,
                                       u32* state) {
  u32 spins = 0;
  while (on && any_unset(v, count)) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i < count && unset(v[i])) v[i] = load_shared_value(p + i * stride);
    if (waited_enough(spins, state)) break;
  }
  __syncwarp();
}
template <int N>
__device__ __forceinline__ void request(uint4 (&v)[N], const u16* p, int stride, int count,
                                        bool on) {
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = on && i < count ? load_shared_value(p + i * stride) : zeros();
}
// Whether this lane group has a token in a panel, and whether that is the pass's last one.
__device__ __forceinline__ bool has_token(const Place& at, int panel) {
  return at.group + panel * 8 < TOKENS;
}
__device__ __forceinline__ bool has_last_token(const Place& at) {
  return at.group == (TOKENS - 1) % 8;
}
// Pieces of one token of every panel a lane group, tokens `token_stride` elements apart. With
// several tokens the lanes of the last one first watch a single piece, so that waiting costs little
// traffic.
template <int N>
__device__ __forceinline__ void receive(uint4 (&v)[PANELS][N], const u16* p, int token_stride,
                                        int stride, int count, const Place& at, u32* state) {
  const u16* last = p + (PANELS - 1) * 8 * token_stride;
  if (TOKENS > 1 && has_last_token(at) && count > 0) watch(last + (count - 1) * stride, state);
  __syncwarp();
#pragma unroll
  for (int n = 0; n < PANELS; n++)
    request(v[n], p + n * 8 * token_stride, stride, count, has_token(at, n));
#pragma unroll
  for (int n = 0; n < PANELS; n++)
    settle(v[n], p + n * 8 * token_stride, stride, count, has_token(at, n), state);
}
