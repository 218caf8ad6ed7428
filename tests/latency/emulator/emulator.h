// What the latency kernel needs of a CUDA card, on one CPU thread: every CUDA thread is a fiber.
//
// A fiber runs until it waits for others: at a barrier, at an instruction of its whole warp, or when
// it polls. Memory is sequentially consistent and copies finish at once, so this tests what the
// kernel computes and that it cannot wait for ever, not its fences.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <type_traits>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

struct Barrier { int arrived = 0; u64 generation = 0; };
struct Warp {
  u32 in[32][12], out[32][4];
  int arrived = 0;
  u64 generation = 0;
};
struct Block {
  std::vector<char> memory;
  std::vector<Warp> warps;
  Barrier barriers[16];
  u32 landed[4096] = {};  // phases of the memory barriers, by address / 8
  int first_barrier = -1;
};
struct Fiber { void* stack_pointer; char* stack; Block* block; int block_index, thread; bool done; };

constexpr size_t STACK = 64 * 1024;
static std::vector<Fiber> fibers;
static Fiber* current;
static void* scheduler;
static void (*entry)();

extern "C" void emulator_switch(void** from, void* to);
__asm__(
    ".text\n.globl emulator_switch\nemulator_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static inline void yield() { emulator_switch(&current->stack_pointer, scheduler); }
static void start() {
  entry();
  current->done = true;
  for (;;) yield();
}

// All threads of all blocks to their end; 0, or 1 when they wait for ever.
static int run(int blocks, int threads, size_t shared, void (*function)()) {
  entry = function;
  std::vector<Block> all(blocks);
  fibers.assign((size_t)blocks * threads, Fiber{});
  char* stacks = (char*)malloc(STACK * fibers.size());
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& f = fibers[i];
    f.block_index = i / threads;
    f.thread = i % threads;
    f.block = &all[f.block_index];
    if (f.thread == 0) {
      f.block->memory.assign(shared, (char)0xee);
      f.block->warps.resize(threads / 32);
    }
    f.stack = stacks + i * STACK;
    void** top = (void**)(f.stack + STACK - 64);
    top[-1] = nullptr;  // where `start` would return to; keeps the stack aligned as after a call
    top[-2] = (void*)start;
    f.stack_pointer = top - 8;
  }
  size_t left = fibers.size();
  u64 rounds = 0;
  for (; left && rounds < 4000000; rounds++) {
    for (Fiber& f : fibers) {
      if (f.done) continue;
      current = &f;
      emulator_switch(&scheduler, f.stack_pointer);
      left -= f.done;
    }
  }
  free(stacks);
  return left != 0;
}

static inline void bar_sync(int id, int count) {
  Barrier& b = current->block->barriers[id];
  const u64 generation = b.generation;
  if (++b.arrived == count) {
    b.arrived = 0;
    b.generation++;
  }
  while (b.generation == generation) yield();
}
static inline void bar_arrive(int id, int count) {
  Barrier& b = current->block->barriers[id];
  if (++b.arrived == count) {
    b.arrived = 0;
    b.generation++;
  }
}

// An instruction of the whole warp: each lane gives its operands, the last one computes.
template <class Compute> static void collective(const u32* in, int count, u32* out, int results,
                                                Compute compute) {
  Warp& warp = current->block->warps[current->thread / 32];
  const int lane = current->thread % 32;
  for (int i = 0; i < count; i++) warp.in[lane][i] = in[i];
  const u64 generation = warp.generation;
  if (++warp.arrived == 32) {
    compute(warp);
    warp.arrived = 0;
    warp.generation++;
  }
  while (warp.generation == generation) yield();
  for (int i = 0; i < results; i++) out[i] = warp.out[lane][i];
  // Nobody may give new operands before all have their results.
  const u64 taken = warp.generation;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    warp.generation++;
  }
  while (warp.generation == taken) yield();
}

static inline float bits(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline float half(u32 pair, int which) { return bits(which ? pair & 0xffff0000u : pair << 16); }

static inline void mma(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3,
                       u32 b0, u32 b1) {
  const u32 in[] = {bits(d0), bits(d1), bits(d2), bits(d3), a0, a1, a2, a3, b0, b1};
  u32 out[4];
  collective(in, 10, out, 4, [](Warp& w) {
    for (int lane = 0; lane < 32; lane++) {
      for (int c = 0; c < 4; c++) {
        const int row = lane / 4 + c / 2 * 8, column = lane % 4 * 2 + c % 2;
        double sum = bits(w.in[lane][c]);
        for (int k = 0; k < 16; k++) {
          const u32 a = w.in[row % 8 * 4 + k % 8 / 2][4 + row / 8 + k / 8 * 2];
          const u32 b = w.in[column * 4 + k % 8 / 2][8 + k / 8];
          sum += (double)half(a, k % 2) * half(b, k % 2);
        }
        w.out[lane][c] = bits((float)sum);
      }
    }
  });
  d0 = bits(out[0]);
  d1 = bits(out[1]);
  d2 = bits(out[2]);
  d3 = bits(out[3]);
}
static inline void movmatrix(u32& d, u32 s) {
  collective(&s, 1, &d, 1, [](Warp& w) {
    const auto element = [&](int row, int column) {
      return w.in[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffffu;
    };
    for (int lane = 0; lane < 32; lane++) {
      const int row = lane / 4, column = lane % 4 * 2;
      w.out[lane][0] = element(column, row) | element(column + 1, row) << 16;
    }
  });
}
static inline u32 shuffle(u32 value, int lanes) {
  const u32 in[] = {value, (u32)lanes};
  u32 out;
  collective(in, 2, &out, 1, [](Warp& w) {
    for (int lane = 0; lane < 32; lane++) w.out[lane][0] = w.in[lane ^ w.in[lane][1]][0];
  });
  return out;
}

static inline u32 round_to_bf16(float x) {
  if (x != x) return 0x7fff;
  const u32 b = bits(x);
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
static inline void pack(u32& r, float high, float low) {
  r = round_to_bf16(high) << 16 | round_to_bf16(low);
}
static inline void exp2_fast(float& r, float x) { r = exp2f(x); }
static inline void max_halves(u32& r, u32 a, u32 b) {
  const u32 low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
  r = (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
}
static inline void load_16(u32& x, u32& y, u32& z, u32& w, const void* p) {
  if ((size_t)p % 16) abort();
  const u32* from = (const u32*)p;
  x = from[0], y = from[1], z = from[2], w = from[3];
}
static inline void poll_16(u32& x, u32& y, u32& z, u32& w, const void* p) {
  yield();
  load_16(x, y, z, w, p);
}
static inline char* shared(u32 address) {
  if (address >= current->block->memory.size()) abort();
  return current->block->memory.data() + address;
}
static inline void load_shared(u32& x, u32& y, u32& z, u32& w, u32 address) {
  memcpy(&x, shared(address), 4), memcpy(&y, shared(address + 4), 4);
  memcpy(&z, shared(address + 8), 4), memcpy(&w, shared(address + 12), 4);
}
static inline void poll_4(u32& r, const void* p) { yield(), r = *(const u32*)p; }
static inline void store_2(void* p, u16 v) { *(u16*)p = v; }
static inline void store_4(void* p, u32 v) { *(u32*)p = v; }
static inline void store_one(void* p) { *(u32*)p = 1; }
static inline u32& phase(u32 barrier) { return current->block->landed[barrier / 8 % 4096]; }
static inline void barrier_init(u32 barrier) { phase(barrier) = 0; }
static inline void barrier_expect(u32, u32) {}
static inline void barrier_test(u32& ok, u32 barrier, u32 parity) {
  yield();
  ok = (phase(barrier) & 1) != parity;
}
static inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
  shared(to + bytes - 1);
  memcpy(shared(to), from, bytes);
  phase(barrier)++;
}
static inline void thread_index(u32& r) { r = current->thread; }
template <class... T> static inline void nothing(T&&...) {}

struct Index { u32 x; };

}  // namespace emulator

#define threadIdx (emulator::Index{(u32)emulator::current->thread})
#define blockIdx (emulator::Index{(u32)emulator::current->block_index})
#define shared_memory (emulator::current->block->memory.data())

template <class A, class B> static constexpr auto min(A a, B b) -> std::common_type_t<A, B> {
  using C = std::common_type_t<A, B>;
  return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B> static constexpr auto max(A a, B b) -> std::common_type_t<A, B> {
  using C = std::common_type_t<A, B>;
  return (C)a > (C)b ? (C)a : (C)b;
}
static inline float __uint_as_float(u32 x) { return emulator::bits(x); }
static inline float __shfl_xor_sync(u32, float x, int lanes) {
  return emulator::bits(emulator::shuffle(emulator::bits(x), lanes));
}
static inline void __syncwarp() { emulator::shuffle(0, 0); }
static inline void __syncthreads() { emulator::bar_sync(0, (WARPS + 2) * 32); }
static inline void __threadfence() {}
static inline void __nanosleep(u32) { emulator::yield(); }
static inline u32 clock_now() { static u32 now = 0; return now += 16; }
#define clock clock_now
#define clock64 clock_now
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline size_t __cvta_generic_to_shared(const void*) { return 0; }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
static inline u32 atomicAdd(u32* p, u32 x) { const u32 old = *p; *p += x; return old; }
static inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
  const u64 both = (u64)y << 32 | x;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(both >> ((selector >> 4 * i & 7) * 8) & 0xff) << 8 * i;
  return r;
}
