// One decoder forward as one kernel: from token ids in the rows' histories to float32 logits.
//
// CTAS thread blocks stay resident and walk all layers. Each owns fixed outputs of every product,
// each of its warps a fixed slice of the inputs; weights stream through shared memory (ring.cuh),
// activations travel between blocks (exchange.cuh), and the residual stream stays in float32 with
// the block that owns it. Besides the computing warps a block has a service warp, which clears the
// exchange and fetches small things into L2, and a copying warp.
#include "attention.cuh"
#include "products.cuh"

static_assert(X_SIZE % 8 == 0, "cleared 16 bytes at a time");

// Barriers besides the computing warps' own.
enum Barrier { START = 2, MAY_CLEAR, CLEARED };
__device__ __forceinline__ void sync_with_service(Barrier b) {
  asm volatile("bar.sync %0, %1;" ::"r"((int)b), "n"(THREADS + 32) : "memory");
}
__device__ __forceinline__ void signal(Barrier b) {
  asm volatile("bar.arrive %0, %1;" ::"r"((int)b), "n"(THREADS + 32) : "memory");
}

__device__ __forceinline__ Token read_token(const Params& P, int n) {
  Token token;
  const int place = n % P.query_len, row = P.rows[n / P.query_len];
  token.row = row;
  token.first = n - place;
  token.base = P.num_tokens[row] + P.offset;
  token.position = token.base + place;
  const int known = max(token.position, 0);
  token.id = P.history[row * P.history_stride + min(known, P.history_len - 1)];
  token.id = min(max(token.id, 0), VOCAB - 1);
  const bool live = token.position >= 0 && P.active[row] != 0 &&
                    token.position < min(P.table_len * KV_BLOCK, MAX_SPLITS * SPLIT);
  token.keys = live ? token.position + 1 : 0;
  token.splits = live ? token.position / SPLIT + 1 : 1;
  const int block = live ? P.block_table[row * P.table_stride + known / KV_BLOCK] : 0;
  token.slot = ((i64)block * KV_BLOCK + known % KV_BLOCK) * KV_DIM;
  return token;
}

// Unit `i` of the pass.
__device__ __forceinline__ Unit unit_of(int i) {
  const Token* tokens = shared_tokens();
  int token = 0;
  while (token < TOKENS && i >= KV_HEADS * tokens[token].splits)
    i -= KV_HEADS * tokens[token++].splits;
  Unit unit = {};
  unit.token = -1;
  if (token == TOKENS) return unit;
  const Token& t = tokens[token];
  const int kv_head = i % KV_HEADS, split = i / KV_HEADS;
  unit.token = token;
  unit.head = kv_head * HEAD_DIM;
  unit.begin = split * SPLIT;
  unit.end = min(t.keys, unit.begin + SPLIT);
  unit.base = t.base;
  unit.first = t.first;
  unit.position = t.position;
  unit.splits = t.splits;
  unit.query = X_QKV + token * QKV_DIM + unit.head * HEAD_GROUP;
  unit.fresh = X_QKV + t.first * QKV_DIM + Q_DIM + unit.head;
  unit.own = t.slot + unit.head;
  return unit;
}

// Everything that stays the same in all layers, by computing and service warps together.
__device__ __forceinline__ void prepare(const Params& P, int thread, int cta) {
  Token* tokens = shared_tokens();
  for (int i = thread; i < LAYERS * (int)(sizeof(LayerPointers) / 8); i += THREADS + 32)
    ((u64*)shared_layers())[i] = ((const u64*)P.layers)[i];
  if (thread < TOKENS) tokens[thread] = read_token(P, thread);
  sync_with_service(START);
  for (int i = thread; i < TOKENS * HEAD_DIM / 2; i += THREADS + 32) {
    const int token = i / (HEAD_DIM / 2);
    float2 turn;
    sincosf(max(tokens[token].position, 0) * P.frequencies[i % (HEAD_DIM / 2)], &turn.y, &turn.x);
    shared_turns()[i] = turn;
  }
  for (int i = thread; i < OUT_HIDDEN * TOKENS; i += THREADS + 32) {
    const int output = cta * OUT_HIDDEN + i / TOKENS;
    const u16* row = P.embedding + (i64)tokens[i % TOKENS].id * HIDDEN;
    shared_residual()[i] = output < HIDDEN ? widen(row[output]) : 0.f;
  }
  for (int i = thread; i < QKV_BIAS * LAYERS * OUT_QKV; i += THREADS + 32) {
    const int output = qkv_output(cta, i % OUT_QKV);
    shared_bias()[i] = output < QKV_DIM ? shared_layers()[i / OUT_QKV].qkv_bias[output] : 0;
  }
  for (int i = thread; i <= MAX_UNITS; i += THREADS + 32)
    shared_units()[i] = unit_of(cta + i * CTAS);
  if (thread < TABLE) {
    const Unit unit = unit_of(cta);
    const int at = unit.begin / KV_BLOCK + thread;
    if (unit.token >= 0 && at < P.table_len)
      shared_table()[thread] = P.block_table[tokens[unit.token].row * P.table_stride + at];
  }
  if (thread == 0) {
    int combines = 0;
    for (int i = CTAS - 1 - cta; i < TOKENS * HEADS; i += CTAS)
      combines |= tokens[i / HEADS].splits > 1;
    shared_combines() = combines;
  }
  sync_with_service(START);
}

// The service warp. Cached K and V of the next layer are fetched into L2 by all blocks together.
__device__ __forceinline__ void warm_cache(const Params& P, const LayerPointers& next, int lane,
                                           int cta) {
  constexpr int LINES = KV_BLOCK * KV_DIM * 2 / 128;  // of a cache block, K or V
  for (int n = 0; n < TOKENS; n++) {
    const Token& token = shared_tokens()[n];
    if (token.first != n || token.keys == 0) continue;  // a sequence's tokens read the same
    const int blocks = min(ceil_div(token.base, KV_BLOCK), WARM_BYTES / (TOKENS * LINES * 256));
    const int start = (cta + n * (CTAS / TOKENS)) % CTAS * 32 + lane;
    for (int i = start; i < blocks * LINES; i += CTAS * 32) {
      const int block = __ldg(P.block_table + token.row * P.table_stride + i / LINES);
      const i64 at = ((i64)block * LINES + i % LINES) * 64;
      warm(next.keys + at);
      warm(next.values + at);
    }
  }
}
__device__ __forceinline__ void warm_vector(const u16* v, int size, int lane) {
  for (int i = lane * 64; i < size; i += 32 * 64) warm(v + i);
}
__device__ __forceinline__ void serve(const Params& P, u32 launches, int lane, int cta) {
  for (int layer = 0; layer < LAYERS; layer++) {
    sync_with_service(MAY_CLEAR);
    uint4* other = (uint4*)(P.exchange + ((launches * LAYERS + layer + 1) & 1) * X_SIZE);
    for (int i = cta * 32 + lane; i < X_SIZE / 8; i += CTAS * 32)
      other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    __threadfence();
    signal(CLEARED);
    if (layer + 1 == LAYERS) break;
    const LayerPointers& next = shared_layers()[layer + 1];
    if (cta == 0) warm_vector(next.input_norm, HIDDEN, lane);
    if (cta == 1) warm_vector(next.mlp_norm, HIDDEN, lane);
    warm_cache(P, next, lane, cta);
  }
}

// What a computing thread knows between phases.
struct Compute {
  const Params& P;
  Place at;
  u32 step;       // layers run since the buffers were made
  int layer = 0;
  int turn = 0;   // of the squares
  Sums sums = {};
  Stream stream = {};

  // Begin a phase. The compiler does not know that the place is the same: what it derives from it
  // is derived again, and does not take registers through all other phases.
  __device__ __forceinline__ void begin() {
    u32 thread = at.thread;
    asm volatile("" : "+r"(thread));
    at = sums.at = stream.place = place_of(thread);
  }
  __device__ __forceinline__ void mark(int point) const { ::mark(P, at, layer, point); }
  __device__ __forceinline__ u16* exchange(int parity) const {
    return P.exchange + (parity & 1) * X_SIZE;
  }

  // This warp's slice of a token a lane group, times the norm's weight, as bfloat16. The norm's
  // scale, a factor of the whole token, follows after the product.
  template <int N>
  __device__ __forceinline__ void load_normed(uint4 (&x)[PANELS][N], const u16* stored,
                                              const u16* weight) {
    using Mine = Slice<HIDDEN>;
    const int start = Mine::first(at.warp) * 32 + at.quad * 8, count = Mine::count(at.warp);
    constexpr bool EARLY_WEIGHT = (PANELS + 1) * N <= 26;  // beside the activations in registers
    uint4 w[N];
    const auto load_weight = [&](int i) {
      w[i] = i < count ? load_constant(weight + start + i * 32) : zeros();
    };
    if (EARLY_WEIGHT) {
#pragma unroll
      for (int i = 0; i < N; i++) load_weight(i);
    }
    if (stored) {
      receive(x, stored + at.group * HIDDEN + start, HIDDEN, 32, count, at, P.state);
    } else {  // the first layer's input is the embedding
#pragma unroll
      for (int n = 0; n < PANELS; n++) {
        const bool on = has_token(at, n);
        const int id = on ? shared_tokens()[n * 8 + at.group].id : 0;
        const u16* row = P.embedding + (i64)id * HIDDEN + start;
#pragma unroll
        for (int i = 0; i < N; i++)
          x[n][i] = on && i < count ? load_constant(row + i * 32) : zeros();
      }
    }
    turn ^= 1;
    float sums_of[PANELS] = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (!EARLY_WEIGHT) load_weight(i);
      const u32* f = (const u32*)&w[i];
#pragma unroll
      for (int n = 0; n < PANELS; n++) {
        u32* e = (u32*)&x[n][i];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float a = low(e[k]), c = high(e[k]);
          sums_of[n] += a * a + c * c;
          e[k] = pack(a * low(f[k]), c * high(f[k]));
        }
      }
    }
#pragma unroll
    for (int n = 0; n < PANELS; n++) {
      float sum = sums_of[n];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (at.quad == 0) squares(at.warp)[n * 8 + at.group] = sum;
    }
  }
  // Of the current turn, one a token.
  __device__ __forceinline__ float* squares(int warp) const {
    return shared_squares() + (turn * WARPS + warp) * PANELS * 8;
  }
  __device__ __forceinline__ float norm_scale(int token) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += squares(w)[token];
    return rsqrtf(sum * (1.f / HIDDEN) + EPS);
  }
  // Add this block's outputs of a product to the residual stream, and publish it.
  __device__ __forceinline__ void add_residual(u16* to, u32 first, u32 outputs) {
    for (u32 i = at.thread; i < outputs * TOKENS; i += THREADS) {
      const u32 row = i / TOKENS, token = i % TOKENS;
      const u32 output = at.cta * OUT_HIDDEN + first + row;
      float* kept = shared_residual() + (first + row) * TOKENS + token;
      const float sum = sums.total(row / 16, row % 16, token) + *kept;
      *kept = sum;
      if (HIDDEN % CTAS == 0 || output < HIDDEN) publish(to + token * HIDDEN + output, sum);
    }
  }

  // Output `i` of the block's qkv product, row `row` of the sums: a value, or both of a pair.
  __device__ __forceinline__ void publish_qkv(u16* to, u32 i, u32 row, u32 token) const {
    const u32 output = qkv_output(at.cta, i);
    const bool value = i >= 2 * PAIRS;
    if (output >= QKV_DIM || (!value && i % 2 == 1)) return;
    const u16* bias = shared_bias() + layer * OUT_QKV + i;
    const float scale = norm_scale(token);
    const auto result = [&](u32 next) {
      const float sum = sums.total((row + next) / 16, (row + next) % 16, token) * scale;
      return QKV_BIAS ? sum + widen(bias[next]) : sum;
    };
    const float a = result(0);
    if (value) return publish(to + output, a);
    const float b = result(1);
    float2 turn = make_float2(1, 0);  // where heads have norms they are rotated later
    if (!QK_NORM) turn = shared_turns()[token * (HEAD_DIM / 2) + output % HEAD_DIM];
    publish(to + output, a * turn.x - b * turn.y);
    publish(to + output + HEAD_DIM / 2, b * turn.x + a * turn.y);
  }
  __device__ __forceinline__ void run_qkv() {
    begin();
    const LayerPointers& L = shared_layers()[layer];
    u16* x = exchange(step);
    uint4 in[PANELS][Slice<HIDDEN>::MOST];
    mark(0);
    load_normed(in, layer ? exchange(step + 1) + X_OUT : nullptr, L.input_norm);
    mark(1);
    product<HIDDEN, OUT_QKV, false, 16>(stream, in, sums, [&](u32 first, u32 outputs) {
      for (u32 i = at.thread; i < outputs * TOKENS; i += THREADS) {
        const u32 row = i / TOKENS, token = i % TOKENS;
        publish_qkv(x + X_QKV + token * QKV_DIM, first + row, row, token);
      }
    });
    mark(2);
  }

  // Attention takes all registers. Blocks that have a part in it keep what they know in memory
  // meanwhile; left to the compiler, it would be there all the time.
  __device__ __forceinline__ void run_attention(const Tile& early) {
    if (shared_units()->token < 0 && !shared_combines()) return;
    volatile Kept& kept = shared_kept(at.warp);
    if (at.lane == 0) {
      kept.at = stream.at;
      kept.have = stream.have;
      kept.used = stream.used;
      kept.slot = stream.slot;
      kept.parity = stream.parity;
      kept.freed = stream.freed;
      kept.step = step;
      kept.layer = layer;
      kept.turn = turn;
      kept.side = sums.side;
    }
    attend_units(P, early, step, layer, at);
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    at = place_of(thread);
    const volatile Kept& same = shared_kept(at.warp);
    stream.at = same.at;
    stream.have = same.have;
    stream.used = same.used;
    stream.slot = same.slot;
    stream.parity = same.parity;
    stream.freed = same.freed;
    step = same.step;
    layer = same.layer;
    turn = same.turn;
    sums.side = same.side;
  }

  __device__ __forceinline__ void run_output() {
    begin();
    mark(3);
    u16* x = exchange(step);
    using Mine = Slice<Q_DIM>;
    uint4 in[PANELS][Mine::MOST];
    const u16* from = x + X_ATTENDED + at.group * Q_DIM + Mine::first(at.warp) * 32 + at.quad * 8;
    receive(in, from, Q_DIM, 32, Mine::count(at.warp), at, P.state);
    mark(4);
    product<Q_DIM, OUT_HIDDEN, false, 16>(stream, in, sums, [&](u32 first, u32 outputs) {
      add_residual(x + X_MIDDLE, first, outputs);
    });
    mark(5);
  }

  // SiLU of a gate times the up that belongs to it.
  __device__ __forceinline__ float gated(u32 row, u32 token) const {
    const float scale = norm_scale(token);
    const float gate = sums.total(row / 8, row % 8, token) * scale;
    const float up = sums.total(row / 8, row % 8 + 8, token) * scale;
    return __fdividef(gate, 1.f + exp2_fast(-1.4426950408889634f * gate)) * up;
  }
  __device__ __forceinline__ void run_mlp() {
    begin();
    u16* x = exchange(step);
    {
      uint4 in[PANELS][Slice<HIDDEN>::MOST];
      load_normed(in, x + X_MIDDLE, shared_layers()[layer].mlp_norm);
      mark(6);
      product<HIDDEN, OUT_INNER, true, 16>(stream, in, sums, [&](u32 first, u32 outputs) {
        if (first == 0) {
          mark(7);
          signal(MAY_CLEAR);
        }
        for (u32 i = at.thread; i < outputs * TOKENS; i += THREADS) {
          const u32 row = i / TOKENS, token = i % TOKENS;
          const u32 output = at.cta * OUT_INNER + first + row;
          if (INNER % CTAS != 0 && output >= INNER) break;
          publish(x + X_INNER + token * INNER + output, gated(row, token));
        }
      });
    }
    mark(8);
    begin();
    product_down(stream, x + X_INNER, sums, P.state);
    mark(9);
    sync_with_service(CLEARED);
    add_residual(x + X_OUT, 0, OUT_HIDDEN);
    sums.turn();
    mark(10);
  }

  __device__ __forceinline__ void run_head() {
    begin();
    uint4 in[PANELS][Slice<HIDDEN>::MOST];
    load_normed(in, exchange(step + 1) + X_OUT, P.final_norm);
    product<HIDDEN, OUT_VOCAB, false, 1>(stream, in, sums, [&](u32 first, u32 outputs) {
      for (u32 i = at.thread; i < outputs * TOKENS; i += THREADS) {
        const u32 row = i / TOKENS, token = i % TOKENS;
        const u32 output = at.cta * OUT_VOCAB + first + row;
        if (VOCAB % CTAS != 0 && output >= VOCAB) break;
        const float sum = sums.total(row / 16, row % 16, token);
        P.logits[(i64)token * VOCAB + output] = sum * norm_scale(token);
      }
    });
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
    forward(const __grid_constant__ Params P) {
  const Place at = place_of(threadIdx.x);
  for (int i = at.thread; i < WARPS * DEPTH; i += THREADS + 64)
    asm volatile("mbarrier.init.shared.b64 [%0], 1;"
                 ::"r"(shared_address() + S_BARRIERS + i * 8) : "memory");
  if (at.thread < WARPS) shared_at<u32>(S_FREED)[at.thread] = 0;
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  if (at.warp == WARPS + 1) {
    copy_weights(P, at.lane, at.cta, Slice<HIDDEN>::count(at.lane) * OUT_VOCAB * 64);
    return;
  }
  const u32 launches = P.state[LAUNCHES];
  prepare(P, at.thread, at.cta);
  if (at.warp == WARPS) {
    serve(P, launches, at.lane, at.cta);
    return;
  }

  Compute c = {P, at, launches * LAYERS};
#pragma unroll 1
  for (; c.layer < LAYERS; c.layer++, c.step++) {
    Tile early;
    if (EARLY) attend_early(P, early, c.layer, c.at);
    c.run_qkv();
    c.run_attention(early);
    c.run_output();
    c.run_mlp();
  }
  c.run_head();
  sync_compute();
  if (at.thread == 0 && atomicAdd(P.state + FINISHED, 1u) == CTAS - 1) {
    P.state[FINISHED] = 0;
    P.state[LAUNCHES] += 1;
  }
}
