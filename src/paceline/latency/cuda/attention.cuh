// Attention over paged K and V, and what stands between it and the qkv product.
//
// A unit is one token, one KV head and one split of the keys; its queries are the heads of the
// group, the 8 columns of the matrix instruction. Splits begin at fixed positions of a sequence,
// tiles of 16 keys at fixed places of a split, and the warps take tiles in turn: where a key is
// summed follows from its position alone, be it cached or new in this launch. So the bits of a
// token depend neither on how its sequence was cut into launches nor on other tokens.
//
// With one split its unit publishes the result. With several, units leave partial results, and one
// block a (token, head) weighs them ("Flash-Decoding", Dao et al., 2023).
//
// New keys and values lie in the exchange. Where heads have norms they lie there as they left the
// product, and every unit that reads one norms and rotates it itself; else the product's epilogue
// has rotated them. The unit of the token that they belong to writes them to the cache.
#pragma once
#include "exchange.cuh"
#include "layout.cuh"

constexpr int KEY_PIECES = HEAD_DIM / 32;  // of 16 bytes, that a lane holds of a query or key
constexpr int VALUE_PIECES = most(HEAD_DIM / 64, 1);
constexpr int DIM_TILES = HEAD_DIM / 16;   // of the output
constexpr float NO_KEY = -1e30f;
static_assert(SPLIT % 16 == 0, "a split is whole tiles");
static_assert(THREADS >= HEAD_DIM, "splits are weighed with a dimension a thread");
static_assert(!QK_NORM || HEAD_DIM >= 64, "four lanes hold both halves of a pair");

// 16 keys and their values. Of keys, a lane holds its quad's parts of keys `group` and `group` + 8;
// of values, its group's part of keys 2 quad, 2 quad + 1 and those 8 further.
struct Tile {
  uint4 low[KEY_PIECES], high[KEY_PIECES], values[4][VALUE_PIECES];
};
__device__ __forceinline__ int value_key(int i, const Place& at) {
  return 2 * at.quad + i % 2 + i / 2 * 8;
}
// The lane's part of a value vector. With heads of 32, two groups read the same 16 bytes.
__device__ __forceinline__ int value_part(const Place& at) {
  return HEAD_DIM == 32 ? at.group / 2 * 8 : at.group * 8;
}
// Word i of that part, two dimensions: those of rows `group` and `group` + 8 of output tile i.
__device__ __forceinline__ u32 value_word(const uint4 (&v)[VALUE_PIECES], int i, const Place& at) {
  const uint4& p = v[i / 4];
  if (HEAD_DIM == 32) return at.group % 2 ? (i ? p.w : p.z) : (i ? p.y : p.x);
  return i % 4 == 0 ? p.x : i % 4 == 1 ? p.y : i % 4 == 2 ? p.z : p.w;
}
__device__ __forceinline__ int output_dim(int tile, const Place& at) {  // and the next one
  return HEAD_DIM == 32 ? at.group * 4 + tile * 2 : tile / 4 * 64 + at.group * 8 + tile % 4 * 2;
}

// Norm with `weight` and rotate a head whose pieces four lanes hold. turn: cosine and sine of each
// pair of dimensions at the head's position. Rounds where the other backends do.
__device__ __forceinline__ void norm_and_rotate(uint4 (&x)[KEY_PIECES], const u16* weight,
                                                const float2* turn, const Place& at) {
  float sum = 0;
#pragma unroll
  for (int b = 0; b < KEY_PIECES; b++) {
    const u32* e = (const u32*)&x[b];
#pragma unroll
    for (int k = 0; k < 4; k++) sum += low(e[k]) * low(e[k]) + high(e[k]) * high(e[k]);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const float scale = rsqrtf(sum * (1.f / HEAD_DIM) + EPS);
#pragma unroll
  for (int b = 0; b < KEY_PIECES; b++) {
    const uint4 w = load_constant(weight + b * 32 + at.quad * 8);
    u32* e = (u32*)&x[b];
    const u32* f = (const u32*)&w;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 normed = pack(low(e[k]) * scale, high(e[k]) * scale);
      e[k] = pack(low(normed) * low(f[k]), high(normed) * high(f[k]));
    }
  }
#pragma unroll
  for (int b = 0; b < KEY_PIECES / 2; b++) {
    const float4* angle = (const float4*)(turn + b * 32 + at.quad * 8);
    u32 *e = (u32*)&x[b], *f = (u32*)&x[b + KEY_PIECES / 2];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float4 t = angle[k];
      const float a0 = low(e[k]), a1 = high(e[k]), b0 = low(f[k]), b1 = high(f[k]);
      e[k] = pack(a0 * t.x - b0 * t.y, a1 * t.z - b1 * t.w);
      f[k] = pack(b0 * t.x + a0 * t.y, b1 * t.z + a1 * t.w);
    }
  }
}

// What a unit reads.
struct Keys {
  const u16 *keys, *values;  // the layer's caches, at the KV head
  const u16* fresh;          // the exchange's k at it, of the token at position `base`
  const u16* norm;
  const int* table;          // block ids, of the block of position 0 on
  int base, end;             // cached keys; keys up to the split's end
  int first;                 // token of the pass that stands at `base`
  int position;              // of the unit's token, whose own K and V are written:
  u16 *new_key, *new_value;
  u32* state;

  __device__ __forceinline__ bool is_fresh(int at) const { return at >= base && at < end; }
  __device__ __forceinline__ const u16* fresh_key(int at) const {
    return fresh + (at - base) * QKV_DIM;
  }
};
__device__ __forceinline__ Keys keys_of(const Params& P, const LayerPointers& L, u16* x,
                                        const Unit& unit, bool is_first) {
  const int* row = P.block_table + shared_tokens()[unit.token].row * P.table_stride;
  Keys k;
  k.keys = L.keys + unit.head;
  k.values = L.values + unit.head;
  k.fresh = x + unit.fresh;
  k.norm = L.head_norm + Q_DIM + unit.head;
  k.table = is_first ? shared_table() - (u32)unit.begin / KV_BLOCK : row;
  k.base = unit.base;
  k.end = unit.end;
  k.first = unit.first;
  k.position = unit.position;
  k.new_key = L.keys + unit.own;
  k.new_value = L.values + unit.own;
  k.state = P.state;
  return k;
}

// Where the tile of keys that begins at `start` lies in the caches, in elements, if any of it is
// cached.
__device__ __forceinline__ i64 cached_at(const Keys& k, int start) {
  const u32 block = start < k.base ? k.table[(u32)start / KV_BLOCK] : 0;
  return (i64)(block * (KV_BLOCK / 16) + (u32)start % KV_BLOCK / 16) * (16 * KV_DIM);
}
// Load a tile's cached keys; new ones become "not set", so that `settle` loads them.
__device__ __forceinline__ void load_keys(Tile& tile, const Keys& k, int start, i64 cached,
                                          const Place& at) {
  const u16* from = k.keys + cached + at.group * KV_DIM + at.quad * 8;
  const int left = min(k.base, k.end) - start - at.group;
  const uint4 none = k.base < k.end ? not_set() : zeros();
#pragma unroll
  for (int b = 0; b < KEY_PIECES; b++) {
    tile.low[b] = left > 0 ? load_constant(from + b * 32) : none;
    tile.high[b] = left > 8 ? load_constant(from + 8 * KV_DIM + b * 32) : none;
  }
}
__device__ __forceinline__ void load_values(Tile& tile, const Keys& k, int start, i64 cached,
                                            const Place& at) {
  const u16* from = k.values + cached + value_key(0, at) * KV_DIM + value_part(at);
  const int left = min(k.base, k.end) - start - value_key(0, at);
  const uint4 none = k.base < k.end ? not_set() : zeros();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int key = i % 2 + i / 2 * 8;
#pragma unroll
    for (int b = 0; b < VALUE_PIECES; b++)
      tile.values[i][b] = left > key ? load_constant(from + key * KV_DIM + b * 64) : none;
  }
}
// Ask for a tile's new keys and values; zeros behind the last.
__device__ __forceinline__ void request_fresh(Tile& tile, const Keys& k, int start,
                                              const Place& at) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4(&x)[KEY_PIECES] = half ? tile.high : tile.low;
    const int position = start + half * 8 + at.group;
    const u16* from = k.fresh_key(position) + at.quad * 8;
#pragma unroll
    for (int b = 0; b < KEY_PIECES; b++) {
      if (k.is_fresh(position)) x[b] = load_shared_value(from + b * 32);
      else if (position >= k.end) x[b] = zeros();
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int position = start + value_key(i, at);
    const u16* from = k.fresh_key(position) + KV_DIM + value_part(at);
#pragma unroll
    for (int b = 0; b < VALUE_PIECES; b++) {
      if (k.is_fresh(position)) tile.values[i][b] = load_shared_value(from + b * 64);
      else if (position >= k.end) tile.values[i][b] = zeros();
    }
  }
}
// Wait for them, norm and rotate the keys, and write those of the unit's own token.
__device__ __forceinline__ void settle_keys(uint4 (&x)[KEY_PIECES], const Keys& k, int position,
                                            const Place& at) {
  const bool fresh = k.is_fresh(position);
  settle(x, k.fresh_key(position) + at.quad * 8, 32, KEY_PIECES, fresh, k.state);
  if constexpr (QK_NORM) {
    uint4 turned[KEY_PIECES];
#pragma unroll
    for (int b = 0; b < KEY_PIECES; b++) turned[b] = x[b];
    const int token = fresh ? k.first + position - k.base : 0;
    norm_and_rotate(turned, k.norm, shared_turns() + token * (HEAD_DIM / 2), at);
#pragma unroll
    for (int b = 0; b < KEY_PIECES; b++) x[b] = fresh ? turned[b] : x[b];
  }
  if (position == k.position) {
#pragma unroll
    for (int b = 0; b < KEY_PIECES; b++) *(uint4*)(k.new_key + at.quad * 8 + b * 32) = x[b];
  }
}
__device__ __forceinline__ void settle_fresh(Tile& tile, const Keys& k, int start,
                                             const Place& at) {
  if (start + 8 > k.base) settle_keys(tile.low, k, start + at.group, at);
  if (start + 8 < k.end) settle_keys(tile.high, k, start + 8 + at.group, at);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int position = start + value_key(i, at);
    const u16* from = k.fresh_key(position) + KV_DIM + value_part(at);
    settle(tile.values[i], from, 64, VALUE_PIECES, k.is_fresh(position), k.state);
    if (position == k.position) {
#pragma unroll
      for (int b = 0; b < VALUE_PIECES; b++)
        *(uint4*)(k.new_value + value_part(at) + b * 64) = tile.values[i][b];
    }
  }
}

// What a warp has summed up for its lanes' queries, 2 quad and 2 quad + 1.
struct Running {
  float peak[2] = {NO_KEY, NO_KEY}, sum[2] = {}, out[DIM_TILES][4] = {};
};

// Scores of 16 keys, in powers of two: s[0], s[1] of key `group`, s[2], s[3] of the one 8 further.
__device__ __forceinline__ void score(float (&s)[4], const Tile& tile, const uint4 (&q)[KEY_PIECES],
                                      int start, int end, const Place& at) {
#pragma unroll
  for (int k = 0; k < 4; k++) s[k] = 0;
#pragma unroll
  for (int b = 0; b < KEY_PIECES; b++) {
    mma(s, tile.low[b].x, tile.high[b].x, tile.low[b].y, tile.high[b].y, q[b].x, q[b].y);
    mma(s, tile.low[b].z, tile.high[b].z, tile.low[b].w, tile.high[b].w, q[b].z, q[b].w);
  }
  const float scale = 1.4426950408889634f * rsqrtf((float)HEAD_DIM);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const bool seen = start + at.group + k / 2 * 8 < end;
    s[k] = seen ? s[k] * scale : NO_KEY;
  }
}
// Turn scores into weights and bring what was summed before to the new peak.
__device__ __forceinline__ void weigh(float (&s)[4], Running& run) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float peak = fmaxf(s[j], s[j + 2]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
    peak = fmaxf(peak, run.peak[j]);
    const float less = exp2_fast(run.peak[j] - peak);
    run.peak[j] = peak;
    run.sum[j] *= less;
#pragma unroll
    for (int i = 0; i < DIM_TILES; i++) {
      run.out[i][j] *= less;
      run.out[i][j + 2] *= less;
    }
#pragma unroll
    for (int k = j; k < 4; k += 2) {
      s[k] = s[k] <= NO_KEY ? 0.f : exp2_fast(s[k] - peak);
      run.sum[j] += s[k];
    }
  }
}
// Add 16 values by their weights. The weights leave the first product as keys by queries and enter
// the second as queries by keys: movmatrix turns them.
__device__ __forceinline__ void add_values(Running& run, const Tile& tile, const float (&s)[4],
                                           const Place& at) {
  u32 p0, p1;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(p0) : "r"(pack(s[0], s[1])));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(p1) : "r"(pack(s[2], s[3])));
#pragma unroll
  for (int i = 0; i < DIM_TILES; i++) {
    const u32 v0 = value_word(tile.values[0], i, at), v1 = value_word(tile.values[1], i, at);
    const u32 v2 = value_word(tile.values[2], i, at), v3 = value_word(tile.values[3], i, at);
    mma(run.out[i], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632),
        __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632), p0, p1);
  }
}

// With small heads the first keys of a block's first unit are loaded before the qkv product; large
// ones leave no registers for that.
constexpr bool EARLY = HEAD_DIM <= 64;

// All keys of a unit that are this warp's. tile: its first keys, if `loaded`.
__device__ __forceinline__ void attend(Running& run, Tile tile, bool loaded, const Keys& k,
                                       const u16* query, const u16* query_norm, const float2* turn,
                                       int begin, const Place& at) {
  int start = begin + at.warp * 16;
  if (start >= k.end) return;
  const bool mine = at.group < HEAD_GROUP;
  uint4 q[KEY_PIECES];
  request(q, query, 32, KEY_PIECES, mine);
  const i64 where = cached_at(k, start);
  if (!loaded) load_keys(tile, k, start, where, at);
  load_values(tile, k, start, where, at);
  bool have_q = false;
#pragma unroll 1
  while (true) {
    const int next = start + WARPS * 16;
    const bool more = next < k.end;
    const i64 cached = more ? cached_at(k, next) : 0;
    const bool fresh = start + 16 > k.base;
    if (fresh) request_fresh(tile, k, start, at);
    if (!have_q) {
      have_q = true;
      settle(q, query, 32, KEY_PIECES, mine, k.state);
      if constexpr (QK_NORM) norm_and_rotate(q, query_norm, turn, at);
    }
    if (fresh) settle_fresh(tile, k, start, at);
    float s[4];
    score(s, tile, q, start, k.end, at);
    if (more) load_keys(tile, k, next, cached, at);
    weigh(s, run);
    add_values(run, tile, s, at);
    if (!more) break;
    load_values(tile, k, next, cached, at);
    start = next;
  }
}

// Where a unit's result goes, and how a split's is marked as ready.
struct Outlet {
  u16* attended;  // exchange, [TOKENS][Q_DIM]
  float *partials, *weights;
  u32* flags;
  u32 ready;      // unlike in any other layer or launch
};

// Add the warps' sums in their order; publish, or leave a split's part.
__device__ __forceinline__ void merge(Running& run, const Unit& unit, const Outlet& outlet,
                                      const Place& at) {
  // Even heads first, then odd ones: the heads that lanes write together lie in different banks.
  const auto place = [](u32 head) { return head % 2 * ((HEAD_GROUP + 1) / 2) + head / 2; };
  float* area = shared_sums();
  float* sums = area + WARPS * HEAD_GROUP * MERGE_STRIDE;  // [HEAD_GROUP][WARPS]
  float* peaks = shared_peaks();
  if (at.group == 0) {
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (2 * at.quad + j < HEAD_GROUP) peaks[(2 * at.quad + j) * WARPS + at.warp] = run.peak[j];
  }
  sync_compute();  // the sums of the product before have been read, too
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const u32 head = min(2 * at.quad + j, HEAD_GROUP - 1);
    float peak = NO_KEY;
#pragma unroll
    for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, peaks[head * WARPS + w]);
    const float less = exp2_fast(run.peak[j] - peak);
    float sum = run.sum[j] * less;
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (2 * at.quad + j >= HEAD_GROUP) continue;
    float* to = area + (at.warp * HEAD_GROUP + place(head)) * MERGE_STRIDE;
#pragma unroll
    for (int i = 0; i < DIM_TILES; i++)
      *(float2*)(to + output_dim(i, at)) =
          make_float2(run.out[i][j] * less, run.out[i][j + 2] * less);
    if (at.group == 0) sums[head * WARPS + at.warp] = sum;
  }
  sync_compute();
  for (u32 i = at.thread; i < HEAD_GROUP * HEAD_DIM / 2; i += THREADS) {
    const u32 head = i / (HEAD_DIM / 2), dim = i % (HEAD_DIM / 2) * 2;
    float sum = 0, peak = NO_KEY;
    float2 out = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* from = area + (w * HEAD_GROUP + place(head)) * MERGE_STRIDE + dim;
      const float2 part = *(const float2*)from;
      out.x += part.x;
      out.y += part.y;
      sum += sums[head * WARPS + w];
    }
    const u32 which = unit.token * HEADS + unit.head / HEAD_DIM * HEAD_GROUP + head;
    if (unit.splits == 1) {
      const float scale = sum == 0 ? 0.f : __fdividef(1.f, sum);
      publish_pair(outlet.attended + which * HEAD_DIM + dim, out.x * scale, out.y * scale);
    } else {
      const i64 part = which * MAX_SPLITS + (u32)unit.begin / SPLIT;
      *(float2*)(outlet.partials + part * HEAD_DIM + dim) = out;
#pragma unroll
      for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, peaks[head * WARPS + w]);
      if (dim == 0) *(float2*)(outlet.weights + part * 2) = make_float2(peak, sum);
    }
  }
  sync_compute();
  if (unit.splits > 1 && at.thread == 0) {
    const u32 head = unit.token * KV_HEADS + unit.head / HEAD_DIM;
    u32* flag = outlet.flags + head * MAX_SPLITS + (u32)unit.begin / SPLIT;
    __threadfence();
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(outlet.ready) : "memory");
  }
}

// One unit, by all computing warps.
__device__ __forceinline__ void attend_unit(const Params& P, const LayerPointers& L, u16* x,
                                            const Unit& unit, const Tile& tile, bool is_first,
                                            u32 ready, const Place& at) {
  const Keys k = keys_of(P, L, x, unit, is_first);
  const int head = unit.head * HEAD_GROUP;  // first element of the group among query heads
  const u16* query = x + unit.query + at.group * HEAD_DIM + at.quad * 8;
  const u16* query_norm = L.head_norm + head + min(at.group, HEAD_GROUP - 1) * HEAD_DIM;
  const float2* turn = shared_turns() + unit.token * (HEAD_DIM / 2);
  Running run;
  attend(run, tile, EARLY && is_first, k, query, query_norm, turn, unit.begin, at);
  const Outlet outlet = {x + X_ATTENDED, P.partials, P.partial_weights, P.partial_flags, ready};
  merge(run, unit, outlet, at);
}

// Weigh the splits of one head of one token, in their order.
__device__ __forceinline__ void combine(const Params& P, u16* attended, int token, int head,
                                        u32 ready, u32 thread) {
  constexpr int PARTS = THREADS / HEAD_DIM;
  const int splits = shared_tokens()[token].splits;
  float *weights = shared_sums(), *sums = weights + MAX_SPLITS, *outs = sums + MAX_SPLITS;
  const i64 part = (i64)(token * HEADS + head) * MAX_SPLITS;
  const u32* flags = P.partial_flags + (token * KV_HEADS + head / HEAD_GROUP) * MAX_SPLITS;
  sync_compute();  // the sums have been read
  for (int c = thread; c < splits; c += THREADS) {
    u32 spins = 0, flag;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(flag) : "l"(flags + c) : "memory");
    } while (flag != ready && !waited_enough(spins, P.state));
    const float2 w = __ldcg((const float2*)(P.partial_weights + (part + c) * 2));
    weights[c] = w.x;
    sums[c] = w.y;
  }
  sync_compute();
  float peak = NO_KEY, sum = 0, out = 0;
  for (int c = 0; c < splits; c++) peak = fmaxf(peak, weights[c]);
  const int dim = thread % HEAD_DIM, mine = thread / HEAD_DIM;
  if (mine < PARTS) {
    const float* from = P.partials + part * HEAD_DIM + dim;
#pragma unroll 8
    for (int c = mine; c < splits; c += PARTS)
      out += exp2_fast(weights[c] - peak) * __ldcg(from + (i64)c * HEAD_DIM);
    outs[thread] = out;
  }
  sync_compute();
  if (thread < HEAD_DIM) {
    out = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) out += outs[p * HEAD_DIM + dim];
    for (int c = 0; c < splits; c++) sum += exp2_fast(weights[c] - peak) * sums[c];
    const float result = sum == 0 ? 0.f : __fdividef(out, sum);
    publish(attended + (token * HEADS + head) * HEAD_DIM + dim, result);
  }
  sync_compute();
}

// Before the qkv product: the first keys of the block's first unit.
__device__ __forceinline__ void attend_early(const Params& P, Tile& tile, int layer,
                                             const Place& at) {
  const Unit& unit = *shared_units();
  const int start = unit.begin + at.warp * 16;
  if (unit.token < 0 || start >= unit.end) return;
  const Keys k = keys_of(P, shared_layers()[layer], nullptr, unit, true);
  load_keys(tile, k, start, cached_at(k, start), at);
}

// This block's part of a layer's attention. step: layers run before it, in this launch and others.
__device__ __forceinline__ void attend_units(const Params& P, const Tile& tile, u32 step, int layer,
                                             const Place& at) {
  const LayerPointers& L = shared_layers()[layer];
  u16* x = P.exchange + (step & 1) * X_SIZE;
#pragma unroll 1
  for (const Unit* unit = shared_units(); unit->token >= 0; unit++)
    attend_unit(P, L, x, *unit, tile, unit == shared_units(), step + 1, at);
  if (!shared_combines()) return;
#pragma unroll 1
  for (int i = CTAS - 1 - at.cta; i < TOKENS * HEADS; i += CTAS)
    if (shared_tokens()[i / HEADS].splits > 1)
      combine(P, x + X_ATTENDED, i / HEADS, i % HEADS, step + 1, at.thread);
}
