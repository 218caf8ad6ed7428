// The weights' way into shared memory.
//
// What one warp multiplies in one forward is one contiguous stream in global memory. A copying warp
// moves the streams of all warps, in chunks, into a ring each, at a bounded pace, and goes on while
// the computing warps wait for activations: a wait shorter than a full ring costs no bandwidth.
#pragma once
#include "layout.cuh"

static_assert(FLIGHT <= DEPTH && DEPTH >= 3, "a ring holds what is under way");

// Whether a chunk has landed; BLOCKING: after waiting for a while.
template <bool BLOCKING> __device__ __forceinline__ bool landed(u32 barrier, u32 parity) {
  u32 ok;
  if (BLOCKING)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ok) : "r"(barrier), "r"(parity) : "memory");
  else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ok) : "r"(barrier), "r"(parity) : "memory");
  return ok;
}

// A warp's stream, seen through its ring.
struct Stream {
  u32 at = 0, have = 0, used = 0;  // next byte; bytes landed from it on; bytes used of its chunk
  u32 slot = 0, parity = 0, freed = 0;
  Place place;

  // Wait until that many bytes have landed; at most a ring's.
  __device__ __forceinline__ void need(u32 bytes) {
    while (have < bytes) {
      const u32 barrier = shared_address() + S_BARRIERS + (place.warp * DEPTH + slot) * 8;
      while (!landed<true>(barrier, parity)) {}
      if (++slot == DEPTH) { slot = 0; parity ^= 1; }
      have += CHUNK;
    }
  }
  __device__ __forceinline__ uint4 read(u32 offset) const {
    const u32 plain = at + offset;
    const u32 ring = shared_address() + place.warp * RING;
    return load_shared(ring + min(plain, plain - RING));  // as unsigned numbers: wraps once
  }
  __device__ __forceinline__ void done(u32 bytes) {
    at += bytes;
    if (at >= RING) at -= RING;
    have -= bytes;
    used += bytes;
    if (used >= CHUNK) {
      freed += used / CHUNK;
      used %= CHUNK;
      __syncwarp();
      if (place.lane == 0) *(volatile u32*)shared_at<u32>(S_FREED + place.warp * 4) = freed;
    }
  }
};

// The copying warp: lane i fills warp i's ring. No more than FLIGHT chunks are under way, so that
// the small loads of the exchange do not queue behind weights; the first ring and the output head,
// where nothing is waited for, go at full speed.
__device__ __forceinline__ void copy_weights(const Params& P, int lane, int cta, u32 head_bytes) {
  if (lane >= WARPS) return;
  const u32 shared = shared_address();
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const u32 ring = shared + lane * RING, barriers = shared + S_BARRIERS + lane * DEPTH * 8;
  const volatile u32* freed = shared_at<u32>(S_FREED + lane * 4);
  const i64 size = P.streams[2 * lane + 1];
  const char* source = P.weights + P.streams[2 * lane] + cta * size;
  const u32 total = (u32)(size / CHUNK), head_from = total - head_bytes / CHUNK;
  u32 issued = 0, arrived = 0, slot = 0, oldest = 0, parity = 0;
  u32 last = clock() - lane * (PACE / WARPS);
  while (issued < total) {
    bool go = true;
    if (issued - arrived >= (issued >= head_from ? DEPTH : FLIGHT)) {
      go = landed<false>(barriers + oldest * 8, parity);
      if (go) {
        arrived++;
        if (++oldest == DEPTH) { oldest = 0; parity ^= 1; }
      }
    }
    if (PACE && go && issued >= DEPTH && issued < head_from &&
        (u32)clock() - last < PACE)
      go = false;
    if (!go) continue;
    if (issued - *freed >= DEPTH) continue;
    const u32 barrier = barriers + slot * 8;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 ::"r"(barrier), "n"(CHUNK) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;"
        ::"r"(ring + slot * CHUNK), "l"(source), "n"(CHUNK), "r"(barrier), "l"(policy) : "memory");
    source += CHUNK;
    issued++;
    last = clock();
    if (++slot == DEPTH) slot = 0;
  }
}
