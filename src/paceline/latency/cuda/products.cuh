// Matrix products: packed weights from the ring times the activations of the pass's tokens.
//
// A thread block computes OUT outputs of a product, each warp over its slice of the inputs; the
// warps' sums are then added in a fixed order. Weights are the 16 rows of m16n8k16 and tokens its 8
// columns, so the bits of a token do not depend on how many tokens there are. With more than 8, each
// item of weights is read once and multiplied with both panels.
//
// A tile is 16 outputs, or 8 gates and the 8 ups that belong to them. An item is a tile's weights
// for 32 inputs: one after another, 64 bytes an output. pack.py writes items in the order in which
// these loops read them; the last tile of a product has as few outputs as are left.
#pragma once
#include "exchange.cuh"
#include "ring.cuh"

// The pieces of 32 inputs that each warp multiplies: consecutive ones, the first warps one more
// where they do not divide.
template <int INPUTS> struct Slice {
  static constexpr int PIECES = INPUTS / 32, MOST = ceil_div(PIECES, WARPS);
  static constexpr int EACH = PIECES / WARPS, MORE = PIECES % WARPS;
  static __device__ __forceinline__ int first(int warp) {
    return MORE ? warp * EACH + min(warp, MORE) : warp * EACH;
  }
  static __device__ __forceinline__ int count(int warp) {
    return MORE ? EACH + (warp < MORE) : EACH;
  }
};

// The warps' partial sums of a group of tiles. Two areas take turns, so that one barrier a group,
// between writing and reading, is enough.
struct Sums {
  int side = 0;
  Place at;

  __device__ __forceinline__ void put(int tile, const float (&d)[PANELS][4]) const {
#pragma unroll
    for (int n = 0; n < PANELS; n++) put_panel(tile, n, d[n]);
  }
  __device__ __forceinline__ void put_panel(int tile, int panel, const float (&d)[4]) const {
    float* to = shared_sums() + side * SUMS_FLOATS + (at.warp * GROUP + tile) * 16 * TOKENS;
    const int token = panel * 8 + 2 * at.quad;
    if (token < TOKENS) {
      to[at.group * TOKENS + token] = d[0];
      to[(at.group + 8) * TOKENS + token] = d[2];
    }
    if (token + 1 < TOKENS) {
      to[at.group * TOKENS + token + 1] = d[1];
      to[(at.group + 8) * TOKENS + token + 1] = d[3];
    }
  }
  __device__ __forceinline__ float total(u32 tile, u32 row, u32 token) const {
    const float* from = shared_sums() + side * SUMS_FLOATS + (tile * 16 + row) * TOKENS + token;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += from[w * GROUP * 16 * TOKENS];
    return sum;
  }
  __device__ __forceinline__ void turn() { side ^= 1; }
};

// One item of LOW + HIGH outputs, at `offset` of the stream, times the activations of 32 inputs,
// which are piece `i` of every panel's.
template <int LOW, int HIGH, int N>
__device__ __forceinline__ void multiply(float (&d)[PANELS][4], float (&e)[PANELS][4],
                                         const Stream& stream, u32 offset,
                                         const uint4 (&x)[PANELS][N], int i) {
  const uint4 a = stream.read(offset);
  const uint4 b = HIGH ? stream.read(offset + LOW * 64) : zeros();
#pragma unroll
  for (int n = 0; n < PANELS; n++) {
    mma(d[n], a.x, b.x, a.y, b.y, x[n][i].x, x[n][i].y);
    mma(e[n], a.z, b.z, a.w, b.w, x[n][i].z, x[n][i].w);
  }
}
__device__ __forceinline__ void join(float (&d)[PANELS][4], const float (&e)[PANELS][4]) {
#pragma unroll
  for (int n = 0; n < PANELS; n++)
#pragma unroll
    for (int k = 0; k < 4; k++) d[n][k] += e[n][k];
}

// TILES tiles with the ring asked and told once.
template <int LOW, int HIGH, int TILES, int N>
__device__ __forceinline__ void tiles_at_once(Stream& stream, const uint4 (&x)[PANELS][N],
                                              int count, const Sums& sums, int tile) {
  constexpr u32 SIZE = (LOW + HIGH) * 64;
  const u32 mine = sums.at.group * 64 + sums.at.quad * 16;
  stream.need(TILES * count * SIZE);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    float d[PANELS][4] = {}, e[PANELS][4] = {};
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i < count) multiply<LOW, HIGH>(d, e, stream, mine + (t * count + i) * SIZE, x, i);
    join(d, e);
    sums.put(tile + t, d);
  }
  stream.done(TILES * count * SIZE);
}
// One tile, a few items at a time: for tiles that fill much of a ring.
template <int LOW, int HIGH, int N>
__device__ __forceinline__ void tile_in_steps(Stream& stream, const uint4 (&x)[PANELS][N],
                                              int count, const Sums& sums, int tile) {
  constexpr u32 SIZE = (LOW + HIGH) * 64;
  constexpr int STEP = N % 2 == 0 ? 2 : 1;
  const u32 mine = sums.at.group * 64 + sums.at.quad * 16;
  float d[PANELS][4] = {}, e[PANELS][4] = {};
#pragma unroll
  for (int i = 0; i < N; i += STEP) {
    const int now = min(STEP, count - i);
    if (now <= 0) break;
    stream.need(now * SIZE);
#pragma unroll
    for (int c = 0; c < STEP; c++)
      if (c < now) multiply<LOW, HIGH>(d, e, stream, mine + c * SIZE, x, i + c);
    stream.done(now * SIZE);
  }
  join(d, e);
  sums.put(tile, d);
}

// A whole product with this warp's activations in registers. PAIRED: of two matrices, 8 outputs of
// each a tile. After each group of tiles `finish(first output, outputs)` reads the sums. At most
// AT_ONCE tiles are multiplied between two looks at the ring.
template <int INPUTS, int OUT, bool PAIRED, int AT_ONCE, int N, class Finish>
__device__ __forceinline__ void product(Stream& stream, const uint4 (&x)[PANELS][N], Sums& sums,
                                        Finish finish) {
  constexpr int PER_TILE = PAIRED ? 8 : 16, FULL = OUT / PER_TILE, REST = OUT % PER_TILE;
  constexpr int LOW = PAIRED ? REST : least(REST, 8), HIGH = PAIRED ? REST : REST - LOW;
  constexpr int TILES = FULL + (REST > 0), FIT = (DEPTH - 1) * CHUNK / (N * 1024);
  constexpr int ONCE = FIT < 2 ? 0 : least(least(FIT, AT_ONCE), least(GROUP, FULL));
  const int count = Slice<INPUTS>::count(sums.at.warp);
#pragma unroll 1
  for (int first = 0; first < TILES; first += GROUP) {
    const int full = min(GROUP, FULL - first);
    int tile = 0;
    if constexpr (ONCE > 0) {
#pragma unroll 1
      for (; tile + ONCE <= full; tile += ONCE)
        tiles_at_once<8, 8, ONCE>(stream, x, count, sums, tile);
    }
#pragma unroll 1
    for (; tile < full; tile++) tile_in_steps<8, 8>(stream, x, count, sums, tile);
    if constexpr (REST > 0) {
      if (first + GROUP >= TILES) tile_in_steps<LOW, HIGH>(stream, x, count, sums, tile);
    }
    sync_compute();
    finish(first * PER_TILE, min(GROUP * PER_TILE, OUT - first * PER_TILE));
    sums.turn();
  }
}

// Outputs of the tiles that `down` keeps in registers: all of them, since its inputs are too many
// to keep.
constexpr int DOWN_TILES = ceil_div(OUT_HIDDEN, 16);
static_assert(DOWN_TILES <= GROUP, "down's tiles are summed over the warps together");

template <int T, int N>
__device__ __forceinline__ void down_item(float (&d)[DOWN_TILES][PANELS][4],
                                          float (&e)[DOWN_TILES][PANELS][4], const Stream& stream,
                                          u32 mine, const uint4 (&x)[PANELS][N], int i) {
  if constexpr (T < DOWN_TILES) {
    constexpr int LEFT = OUT_HIDDEN - T * 16, LOW = least(LEFT, 8), HIGH = least(LEFT - LOW, 8);
    multiply<LOW, HIGH>(d[T], e[T], stream, mine + T * 1024, x, i);
    down_item<T + 1>(d, e, stream, mine, x, i);
  }
}

// The down product: leaves the warps' sums in `sums`. Its activations come from the exchange, all
// at once where they fit into registers, else a few under way while others are multiplied.
__device__ __forceinline__ void product_down(Stream& stream, const u16* inner, const Sums& sums,
                                             u32* state) {
  using Mine = Slice<INNER>;
  constexpr u32 SIZE = OUT_HIDDEN * 64;
  constexpr bool ALL = Mine::MOST <= 12 && Mine::MOST * SIZE <= (DEPTH - 1) * CHUNK;
  constexpr int N = ALL ? Mine::MOST : WARPS == 8 ? 8 : 4;
  const Place& at = sums.at;
  const int count = Mine::count(at.warp);
  const u32 mine = at.group * 64 + at.quad * 16;
  const u16* from = inner + at.group * INNER + Mine::first(at.warp) * 32 + at.quad * 8;
  float d[DOWN_TILES][PANELS][4] = {}, e[DOWN_TILES][PANELS][4] = {};
  uint4 x[PANELS][N];
  if (ALL || PANELS > 1) {
    const u16* last = from + (PANELS - 1) * 8 * INNER;
    if (has_last_token(at) && count > 0) watch(last + (count - 1) * 32, state, true);
    __syncwarp();
  }
  if constexpr (ALL) {
#pragma unroll
    for (int n = 0; n < PANELS; n++)
      request(x[n], from + n * 8 * INNER, 32, count, has_token(at, n));
#pragma unroll
    for (int n = 0; n < PANELS; n++)
      settle(x[n], from + n * 8 * INNER, 32, count, has_token(at, n), state);
    stream.need(count * SIZE);
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i < count) down_item<0>(d, e, stream, mine + i * SIZE, x, i);
    stream.done(count * SIZE);
  } else {
    uint4 next[PANELS][N];
#pragma unroll
    for (int n = 0; n < PANELS; n++)
      request(next[n], from + n * 8 * INNER, 32, count, has_token(at, n));
#pragma unroll 1
    for (int first = 0; first < count; first += N) {
#pragma unroll
      for (int n = 0; n < PANELS; n++) {
#pragma unroll
        for (int i = 0; i < N; i++) x[n][i] = next[n][i];
        const u16* now = from + n * 8 * INNER + first * 32;
        settle(x[n], now, 32, count - first, has_token(at, n), state);
        request(next[n], now + N * 32, 32, count - first - N, has_token(at, n));
      }
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (first + i < count) {
          stream.need(SIZE);
          down_item<0>(d, e, stream, mine, x, i);
          stream.done(SIZE);
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < DOWN_TILES; t++) {
    join(d[t], e[t]);
    sums.put(t, d[t]);
  }
}
