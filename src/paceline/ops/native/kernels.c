/* What a decoder layer computes between its matrix products, one call each, for a CPU.
 *
 * Compiled on first use (build.py) and called through ctypes (library.py). Tensors are float32 or
 * bfloat16; sums, exponentials and everything else between rounding points are float32.
 *
 * Bits: the result of a row or token never depends on which others are computed with it. Every sum
 * has one order, and attention walks keys in tiles whose borders lie at fixed positions of the
 * sequence; keys that a query does not see add exact zeros. NaN and infinity are not hidden.
 */

#include <float.h>

#include "lanes.h"

#define MAX_HEAD_DIM 256
#define KEY_TILE 64  /* keys per step of the softmax; part of the order of sums */
#define ROW_CHUNK 64 /* queries times heads of a group that share converted keys and values */
#define ROW_BLOCK 4  /* rows multiplied at a time; with VECTORS each, sums stay in registers */
#if defined(__AVX__) && !defined(__AVX512F__)
#define VECTORS 2
#else
#define VECTORS 4
#endif
#define LOG2_E 1.44269504088896341f
#define LOWEST (-FLT_MAX)

/* Below these the calling thread works alone: waking others would cost more. */
#define MIN_PARALLEL_ELEMENTS 32768
#define MIN_PARALLEL_FLOPS 1000000

/* ---- element-wise --------------------------------------------------------------------------- */

/* One row: normed from x, or from residual + x, which then becomes the residual. */
INLINE void norm_row(const void *x, void *residual, const void *weight, void *normed, int64_t at,
                     int64_t size, float eps, int bf16) {
    lanes sum = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        int n = size - i < LANES ? (int)(size - i) : LANES;
        lanes v = load_some(x, at + i, n, bf16);
        if (residual) {
            v = round_to(v + load_some(residual, at + i, n, bf16), bf16);
            store_some(residual, at + i, v, n, bf16);
        }
        sum = multiply_add(v, v, sum);
    }
    const void *source = residual ? residual : x;
    float scale = 1.0f / sqrtf(sum_lanes(sum) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES) {
        int n = size - i < LANES ? (int)(size - i) : LANES;
        lanes v = round_to(load_some(source, at + i, n, bf16) * scale, bf16);
        store_some(normed, at + i, v * load_some(weight, i, n, bf16), n, bf16);
    }
}

static void norm_rows(const void *x, void *residual, const void *weight, void *normed,
                      int64_t rows, int64_t size, float eps, int bf16) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++) {
        if (bf16) norm_row(x, residual, weight, normed, row * size, size, eps, 1);
        else norm_row(x, residual, weight, normed, row * size, size, eps, 0);
    }
}

/* residual may be NULL. x, residual, normed: [rows, size]; weight: [size]. */
void paceline_rms_norm(const void *x, void *residual, const void *weight, void *normed,
                       int64_t rows, int64_t size, float eps, int bf16, int threads) {
    if (threads <= 1 || rows * size < MIN_PARALLEL_ELEMENTS) {
        norm_rows(x, residual, weight, normed, rows, size, eps, bf16);
        return;
    }
#pragma omp parallel num_threads(threads)
    norm_rows(x, residual, weight, normed, rows, size, eps, bf16);
}

INLINE void silu_row(const void *gate_up, void *out, int64_t row, int64_t size, int bf16) {
    int64_t gate = 2 * row * size, up = gate + size;
    for (int64_t i = 0; i < size; i += LANES) {
        int n = size - i < LANES ? (int)(size - i) : LANES;
        lanes x = load_some(gate_up, gate + i, n, bf16);
        lanes exponent = x * -LOG2_E;
        lanes silu = x / (1.0f + exp2_lanes(exponent));
        silu = pick(exponent > 127.0f, x * 0.0f, silu); /* beyond what exp2_lanes takes */
        lanes y = round_to(silu, bf16) * load_some(gate_up, up + i, n, bf16);
        store_some(out, row * size + i, y, n, bf16);
    }
}

static void silu_rows(const void *gate_up, void *out, int64_t rows, int64_t size, int bf16) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++) {
        if (bf16) silu_row(gate_up, out, row, size, 1);
        else silu_row(gate_up, out, row, size, 0);
    }
}

/* gate_up: [rows, 2 * size]; out: [rows, size]. */
void paceline_silu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int bf16,
                       int threads) {
    if (threads <= 1 || rows * size < MIN_PARALLEL_ELEMENTS / 2) {
        silu_rows(gate_up, out, rows, size, bf16);
        return;
    }
#pragma omp parallel num_threads(threads)
    silu_rows(gate_up, out, rows, size, bf16);
}

/* ---- attention ------------------------------------------------------------------------------ */

/* What a layer is; the same in every pass. */
struct heads {
    const void *norm; /* [num_heads + num_kv_heads, head_dim], or NULL */
    float scale, eps;
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t window; /* 0: none */
    int32_t bf16;
};

/* One pass; the same for every layer. */
struct pass {
    const int32_t *tiles;       /* [num_tiles, 2] sequence, first of its query tokens */
    const int32_t *query_start; /* [S + 1] */
    const int32_t *seq_lens;    /* [S] */
    const int32_t *block_table; /* [S, table_width] */
    const int64_t *slots;       /* [num_tokens] */
    int64_t pairs;              /* sum of query length * sequence length, for the thread choice */
    int32_t table_width, num_tokens, num_tiles, tile_tokens, block_size;
};

/* A block holds, head after head, K as [head_dim, block_size] and V as [block_size, head_dim]:
 * scores of LANES keys at once need no sum across lanes. */
INLINE int64_t page(const struct heads *h, const struct pass *p, int64_t block, int head) {
    return (block * h->num_kv_heads + head) * p->block_size * h->head_dim;
}

/* One head in x: normalised (weight not NULL), then its halves rotated against each other. */
INLINE void turn_head(float *x, const void *weight, const float *cosine, const float *sine,
                      const struct heads *h, int bf16) {
    int size = h->head_dim, half = size / 2;
    if (weight) {
        lanes sum = {0};
        for (int i = 0; i < size; i += LANES)
            sum = multiply_add(load_floats(x + i), load_floats(x + i), sum);
        float scale = 1.0f / sqrtf(sum_lanes(sum) / (float)size + h->eps);
        float w[MAX_HEAD_DIM];
        widen(w, weight, 0, size, bf16);
        for (int i = 0; i < size; i += LANES) {
            lanes v = round_to(load_floats(x + i) * scale, bf16);
            store_floats(x + i, round_to(v * load_floats(w + i), bf16));
        }
    }
    float y[MAX_HEAD_DIM];
    for (int i = 0; i < half; i++) {
        y[i] = x[i] * cosine[i] + x[i + half] * sine[i];
        y[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
    }
    memcpy(x, y, 4 * (size_t)size);
}

/* Norm and rotation of a token's q (in place) and k; K and V to their slot, if they have one. */
INLINE void turn_token(const struct heads *h, const struct pass *p, void *qkv, const void *cosine,
                       const void *sine, void *keys, void *values, int64_t token, int bf16) {
    int size = h->head_dim, rotated = h->num_heads + h->num_kv_heads, bytes = bf16 ? 2 : 4;
    int64_t at = token * (rotated + h->num_kv_heads) * size;
    int64_t slot = p->slots[token], block = slot / p->block_size, offset = slot % p->block_size;
    float c[MAX_HEAD_DIM], s[MAX_HEAD_DIM];
    widen(c, cosine, token * size, size, bf16);
    widen(s, sine, token * size, size, bf16);
    for (int head = 0; head < rotated; head++, at += size) {
        float x[MAX_HEAD_DIM];
        memset(x, 0, sizeof(lanes) + 4 * (size_t)(size / LANES * LANES));
        widen(x, qkv, at, size, bf16);
        const char *weight = h->norm ? (const char *)h->norm + (int64_t)head * size * bytes : NULL;
        turn_head(x, weight, c, s, h, bf16);
        narrow(qkv, at, x, size, bf16);
        if (head < h->num_heads || block == 0) continue;
        int64_t column = page(h, p, block, head - h->num_heads) + offset;
        for (int i = 0; i < size; i++) {
            if (bf16) ((uint16_t *)keys)[column + i * p->block_size] = ((uint16_t *)qkv)[at + i];
            else ((float *)keys)[column + i * p->block_size] = ((float *)qkv)[at + i];
        }
    }
    for (int head = 0; head < h->num_kv_heads && block; head++, at += size)
        memcpy((char *)values + (page(h, p, block, head) + offset * size) * bytes,
               (char *)qkv + at * bytes, (size_t)(size * bytes));
}

/* c = c * scale + a b, or a b without a scale; depth terms, in order. a: [rows, depth] float32. Row
 * i of b is the vectors at b[0], b[1], ... plus i * b_row elements. */
INLINE void multiply_block(int rows, int vecs, const float *a, int a_row, const void *const *b,
                           int b_row, float *c, int c_row, int depth, const float *scale,
                           int bf16) {
    lanes sum[ROW_BLOCK][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sum[r][v] = scale ? load_floats(c + r * c_row + v * LANES) * scale[r] : splat(0.0f);
    for (int64_t i = 0, at = 0; i < depth; i++, at += b_row) {
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            lanes column = load(b[v], at, bf16);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sum[r][v] = multiply_add(splat(a[r * a_row + i]), column, sum[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) store_floats(c + r * c_row + v * LANES, sum[r][v]);
}

/* multiply_block for 1 to ROW_BLOCK rows and 1 to VECTORS vectors, each a loop of its own; once. */
__attribute__((noinline)) static void multiply(int rows, int vecs, const float *a, int a_row,
                                               const void *const *b, int b_row, float *c,
                                               int c_row, int depth, const float *scale,
                                               int bf16) {
#define CASE(R, V) \
    case 8 * R + V: \
        if (bf16) multiply_block(R, V, a, a_row, b, b_row, c, c_row, depth, scale, 1); \
        else multiply_block(R, V, a, a_row, b, b_row, c, c_row, depth, scale, 0); \
        break;
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)
    switch (8 * rows + vecs) { CASES(1) CASES(2) CASES(3) CASES(4) }
}

/* The same for any number of columns of one matrix, up to whole vectors. */
INLINE void multiply_matrix(int rows, int columns, const float *a, int a_row, const void *b,
                            int b_row, float *c, int c_row, int depth, const float *scale,
                            int bf16) {
    for (int at = 0; at < columns; at += VECTORS * LANES) {
        const void *vectors[4] = {0};
        for (int v = 0; v < VECTORS; v++)
            vectors[v] = (const char *)b + (at + v * LANES) * (bf16 ? 2 : 4);
        int vecs = (columns - at + LANES - 1) / LANES;
        multiply(rows, vecs < VECTORS ? vecs : VECTORS, a, a_row, vectors, b_row, c + at, c_row,
                 depth, scale, bf16);
    }
}

/* Up to ROW_CHUNK pairs of a query token and a head of one group, and what was summed for them. */
struct chunk {
    float queries[ROW_CHUNK * MAX_HEAD_DIM];
    float sums[ROW_CHUNK * MAX_HEAD_DIM]; /* of values, weighted with 2^(score - top) */
    lanes total[ROW_CHUNK];               /* of weights */
    float top[ROW_CHUNK];                 /* largest score so far */
    int32_t first[ROW_CHUNK], end[ROW_CHUNK]; /* positions a row sees; none for padding */
    float keys[MAX_HEAD_DIM * KEY_TILE];      /* [head_dim, KEY_TILE] */
    float values[KEY_TILE * MAX_HEAD_DIM];    /* [KEY_TILE, stride] */
};

/* K and V of positions [start, end) of a sequence, as float32. */
INLINE void load_tile(struct chunk *w, const struct heads *h, const struct pass *p,
                      const void *keys, const void *values, const int32_t *blocks, int head,
                      int start, int end, int stride, int bf16) {
    int size = h->head_dim;
    for (int position = start; position < end;) {
        int offset = position % p->block_size, room = p->block_size - offset;
        int run = end - position < room ? end - position : room;
        int64_t at = page(h, p, blocks[position / p->block_size], head);
        /* Whole vectors where the block has them: what lies behind the end is masked later. */
        int wide = (run + LANES - 1) / LANES * LANES;
        if (wide > room || position - start + wide > KEY_TILE) wide = run;
        float *to = w->keys + position - start;
        int64_t column = at + offset;
        if (wide == LANES)
            for (int i = 0; i < size; i++, to += KEY_TILE, column += p->block_size)
                store_floats(to, load(keys, column, bf16));
        else
            for (int i = 0; i < size; i++, to += KEY_TILE, column += p->block_size)
                widen(to, keys, column, wide, bf16);
        to = w->values + (position - start) * stride;
        at += offset * size;
        if (stride == size) widen(to, values, at, run * size, bf16);
        else
            for (int i = 0; i < run; i++) widen(to + i * stride, values, at + i * size, size, bf16);
        position += run;
    }
}

/* Asks for K and V of positions [start, end) before they are needed: from pass to pass the weights
 * push them out of the cache, and blocks are too short for the processor to see them coming. */
INLINE void fetch_tile(const struct heads *h, const struct pass *p, const void *keys,
                       const void *values, const int32_t *blocks, int head, int start, int end) {
    int bytes = h->bf16 ? 2 : 4, size = p->block_size * h->head_dim * bytes;
    for (int block = start / p->block_size; block * p->block_size < end; block++) {
        int64_t at = page(h, p, blocks[block], head) * bytes;
        for (int i = 0; i < size; i += 64) __builtin_prefetch((const char *)keys + at + i, 0, 2);
        for (int i = 0; i < size; i += 64) __builtin_prefetch((const char *)values + at + i, 0, 2);
    }
}

/* Scores of keys from start on become weights; returns what earlier weights are multiplied by. */
INLINE float soften(float *scores, int columns, int start, struct chunk *w, int row) {
    int first = w->first[row] - start, end = w->end[row] - start;
    lanes top = splat(LOWEST), total = {0};
    ints index;
    for (int i = 0; i < LANES; i++) index[i] = i;
    for (int i = 0; i < columns; i += LANES) {
        lanes score = load_floats(scores + i);
        if (i < first || i + LANES > end) {
            ints seen = (index + i >= first) & (index + i < end);
            score = pick(seen, score, splat(-INFINITY));
            store_floats(scores + i, score);
        }
        top = pick(score > top, score, top);
    }
    float before = w->top[row], now = max_lanes(top);
    if (now < before) now = before;
    for (int i = 0; i < columns; i += LANES) {
        lanes weight = exp2_lanes(load_floats(scores + i) - now);
        total += weight;
        store_floats(scores + i, weight);
    }
    float kept = exp2_lanes(splat(before - now))[0];
    w->top[row] = now;
    w->total[row] = w->total[row] * kept + total;
    return kept;
}

/* All rows of a chunk over one tile of keys, which were converted for them. */
INLINE void attend_tile(struct chunk *w, const struct heads *h, int rows, int start, int end,
                        int stride) {
    for (int row = 0; row < rows; row += ROW_BLOCK) {
        int count = rows - row < ROW_BLOCK ? rows - row : ROW_BLOCK;
        int from = INT32_MAX, to = 0;
        for (int r = row; r < row + count; r++) {
            if (w->first[r] < from) from = w->first[r];
            if (w->end[r] > to) to = w->end[r];
        }
        to = to < end ? to : end;
        if (to <= start || from >= end) continue;
        float scores[ROW_BLOCK * KEY_TILE], kept[ROW_BLOCK];
        multiply_matrix(count, to - start, w->queries + row * stride, stride, w->keys, KEY_TILE,
                        scores, KEY_TILE, h->head_dim, NULL, 0);
        for (int r = 0; r < count; r++)
            kept[r] = soften(scores + r * KEY_TILE, to - start, start, w, row + r);
        multiply_matrix(count, stride, scores, KEY_TILE, w->values, stride, w->sums + row * stride,
                        stride, to - start, kept, 0);
    }
}

/* The same for few rows, which read K and V where they lie: converting them first would cost more
 * than it saves, and waiting for memory would not overlap with work. */
INLINE void attend_pages(struct chunk *w, const struct heads *h, const struct pass *p,
                         const void *keys, const void *values, const int32_t *blocks, int head,
                         int row, int rows, int start, int end, int bf16) {
    int bytes = bf16 ? 2 : 4, size = h->head_dim;
    float scores[ROW_BLOCK * KEY_TILE], kept[ROW_BLOCK];
    for (int at = start; at < end; at += VECTORS * LANES) {
        const void *vectors[4] = {0};
        int vecs = 0;
        for (int i = at; i < end && vecs < VECTORS; i += LANES)
            vectors[vecs++] = (const char *)keys +
                (page(h, p, blocks[i / p->block_size], head) + i % p->block_size) * bytes;
        multiply(rows, vecs, w->queries + row * size, size, vectors, p->block_size,
                 scores + at - start, KEY_TILE, size, NULL, bf16);
    }
    for (int r = 0; r < rows; r++)
        kept[r] = soften(scores + r * KEY_TILE, end - start, start, w, row + r);
    for (int at = start; at < end;) {
        int offset = at % p->block_size, room = p->block_size - offset;
        int run = end - at < room ? end - at : room;
        int64_t first = page(h, p, blocks[at / p->block_size], head) + (int64_t)offset * size;
        multiply_matrix(rows, size, scores + at - start, KEY_TILE,
                        (const char *)values + first * bytes, size, w->sums + row * size, size,
                        run, kept, bf16);
        for (int r = 0; r < rows; r++) kept[r] = 1.0f;
        at += run;
    }
}

/* Query tokens of one tile for the heads of one KV head. */
INLINE void attend_queries(const struct heads *h, const struct pass *p, const void *qkv, void *out,
                           const void *keys, const void *values, int tile, int kv_head, int bf16) {
    struct chunk w;
    int size = h->head_dim, stride = (size + LANES - 1) / LANES * LANES;
    int group = h->num_heads / h->num_kv_heads;
    int sequence = p->tiles[2 * tile], token = p->tiles[2 * tile + 1];
    int stop = p->query_start[sequence + 1];
    int position = p->seq_lens[sequence] - stop; /* of a token, less its index */
    int tokens = stop - token < p->tile_tokens ? stop - token : p->tile_tokens;
    int64_t width = (int64_t)(h->num_heads + 2 * h->num_kv_heads) * size;
    const int32_t *blocks = p->block_table + (int64_t)sequence * p->table_width;
    float scale = h->scale * LOG2_E;
    for (int done = 0; done < tokens * group; done += ROW_CHUNK) {
        int rows = tokens * group - done < ROW_CHUNK ? tokens * group - done : ROW_CHUNK;
        int from = INT32_MAX, to = 0;
        for (int r = 0; r < rows; r++) {
            int t = token + (done + r) / group, head = kv_head * group + (done + r) % group;
            int real = p->slots[t] >= p->block_size; /* else sent to the null block: padding */
            w.end[r] = real ? position + t + 1 : 0;
            w.first[r] = h->window && w.end[r] > h->window ? w.end[r] - h->window : 0;
            if (real && w.first[r] < from) from = w.first[r];
            if (w.end[r] > to) to = w.end[r];
            w.top[r] = LOWEST;
            w.total[r] = splat(0.0f);
            widen(w.queries + r * stride, qkv, t * width + head * size, size, bf16);
            for (int i = 0; i < size; i++) w.queries[r * stride + i] *= scale;
            memset(w.sums + r * stride, 0, 4 * (size_t)stride);
        }
        int few = rows <= 2 * ROW_BLOCK && size == stride && p->block_size % LANES == 0;
        for (int start = from / KEY_TILE * KEY_TILE; start < to; start += KEY_TILE) {
            int end = to - start < KEY_TILE ? to : start + KEY_TILE;
            if (few) {
                int next = to - end < KEY_TILE ? to : end + KEY_TILE;
                fetch_tile(h, p, keys, values, blocks, kv_head, end, next);
                for (int r = 0; r < rows; r += ROW_BLOCK)
                    attend_pages(&w, h, p, keys, values, blocks, kv_head, r,
                                 rows - r < ROW_BLOCK ? rows - r : ROW_BLOCK, start, end, bf16);
                continue;
            }
            load_tile(&w, h, p, keys, values, blocks, kv_head, start, end, stride, bf16);
            attend_tile(&w, h, rows, start, end, stride);
        }
        for (int r = 0; r < rows; r++) {
            int64_t t = token + (done + r) / group, head = kv_head * group + (done + r) % group;
            float share = w.end[r] ? 1.0f / sum_lanes(w.total[r]) : 0.0f;
            for (int i = 0; i < size; i++) w.sums[r * stride + i] *= share;
            narrow(out, (t * h->num_heads + head) * size, w.sums + r * stride, size, bf16);
        }
    }
}

/* The first tile of keys of an item of work, if it is a decode row's. */
INLINE void fetch_item(const struct heads *h, const struct pass *p, const void *keys,
                       const void *values, int64_t item) {
    if (item < 0 || p->num_tiles != p->num_tokens) return;
    int sequence = p->tiles[2 * (item / h->num_kv_heads)], end = p->seq_lens[sequence];
    int from = h->window && end > h->window ? (end - h->window) / KEY_TILE * KEY_TILE : 0;
    fetch_tile(h, p, keys, values, p->block_table + (int64_t)sequence * p->table_width,
               (int)(item % h->num_kv_heads), from, end - from < KEY_TILE ? end : from + KEY_TILE);
}

static void attend(const struct heads *h, const struct pass *p, void *qkv, void *out,
                   const void *cosine, const void *sine, void *keys, void *values, int threads) {
#pragma omp for
    for (int64_t token = 0; token < p->num_tokens; token++) {
        if (h->bf16) turn_token(h, p, qkv, cosine, sine, keys, values, token, 1);
        else turn_token(h, p, qkv, cosine, sine, keys, values, token, 0);
    }
    /* Later tiles see more keys: they come first, so that the last ones left are short. */
#pragma omp for schedule(dynamic)
    for (int64_t item = (int64_t)p->num_tiles * h->num_kv_heads - 1; item >= 0; item--) {
        int tile = (int)(item / h->num_kv_heads), head = (int)(item % h->num_kv_heads);
        fetch_item(h, p, keys, values, item - threads); /* where threads take turns, this one's */
        if (h->bf16) attend_queries(h, p, qkv, out, keys, values, tile, head, 1);
        else attend_queries(h, p, qkv, out, keys, values, tile, head, 0);
    }
}

/* qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], its q and k changed; cosine, sine:
 * [num_tokens, head_dim]; out: [rows, num_heads * head_dim]. Rows behind num_tokens are padding:
 * zeros come out. */
void paceline_attend(const struct heads *h, const struct pass *p, void *qkv, void *out,
                     const void *cosine, const void *sine, void *keys, void *values, int64_t rows,
                     int threads) {
    int64_t bytes = (int64_t)h->num_heads * h->head_dim * (h->bf16 ? 2 : 4);
    memset((char *)out + p->num_tokens * bytes, 0, (size_t)((rows - p->num_tokens) * bytes));
    if (threads <= 1 || 4 * p->pairs * h->num_heads * h->head_dim < MIN_PARALLEL_FLOPS) {
        attend(h, p, qkv, out, cosine, sine, keys, values, 1);
        return;
    }
#pragma omp parallel num_threads(threads)
    attend(h, p, qkv, out, cosine, sine, keys, values, threads);
}
