// Attention for every shape that the tuned kernels do not take. Twin: TwinOps.attend. Host side: attend.py.
//
// Rows are packed query rows of one KV head of one sequence: token * group + member. A CTA takes ROWS of them and one
// split of the tokens they see, in tiles of TOKENS that are widened to float32 in shared memory; online softmax
// (Milakov and Gimelshein, arXiv 1805.02867). Where the tokens are split, `merge` adds the parts up in their order, so
// the same inputs give the same bits. Grids come from the step's capacity: everything else is read from the batch.
//
// Defines: FORMAT (native), IO (element format of q and out: FORMAT or float32), K_DIM, V_DIM, ROWS (a multiple of 16),
// TOKENS (16 or 32), SHARED_BYTES.
#include "common.cuh"

using InOut = Element<IO>::type;
using Native = Element<FORMAT>::type;

constexpr int kThreads = 256, kLanes = 16;  // lanes share a row
constexpr int kLanesRows = kThreads / kLanes;
constexpr int kNumTokens = TOKENS / kLanes;  // of a lane's
constexpr int kKPad = (K_DIM + 3) / 4 * 4, kKStride = kKPad + (kKPad / 4 % 2 == 0 ? 4 : 0);  // odd vectors: no conflicts
constexpr int kVPad = (V_DIM + 63) / 64 * 64, kColumns = kVPad / kLanes;
constexpr int kPStride = TOKENS + 4;
constexpr int kEntries = TOKENS / 8;
constexpr int kMinTiles = 256 / TOKENS;  // worth a split
// Thread blocks of a multiprocessor that registers are spared for; large heads have no room for a second one.
constexpr int kResident = K_DIM > 128 || V_DIM > 128 ? 1 : ROWS > 16 ? 2 : 3;
constexpr int kPartial = ROWS * (V_DIM + 2);

struct Shared {
  float q[ROWS][kKStride];
  float k[TOKENS][kKStride];
  float v[TOKENS][kVPad];
  float p[ROWS][kPStride];
  uint32_t entries[2][kEntries];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "attend.py computes this");

struct AttendParams {
  const InOut* q;        // [T, Hq, K_DIM], strides in elements below
  InOut* out;            // [T, Hq, V_DIM]
  float* partials;       // [tiles, H, splits][kPartial]: (max, sum) of each row, then its weighted V
  const float* sinks;    // [Hq] or null
  const int32_t *cu_q_lens, *kv_lens;
  const uint32_t* tables;  // [S, table_stride]
  int64_t q_token, q_head, out_token, out_head;
  Slabs slabs;
  LayerPlace place;
  int table_stride, sequences, group, splits, window, chunk;
  float scale, softcap;
};

struct Tile {
  int sequence, q_start, q_len, kv_len;
  int first_row, rows;          // of the sequence's
  int begin, end;               // tiles of TOKENS that some row sees
  int first_token, last_token;  // that some row sees, and that exist
  int splits, per_split;
};

__device__ __forceinline__ int first_visible(const AttendParams& p, int position) {
  int first = p.window ? max(0, position - p.window + 1) : 0;
  if (p.chunk) first = max(first, position / p.chunk * p.chunk);
  return first;
}

// The sequence and rows of tile `index` of the step. Every warp finds out for itself.
__device__ bool find_rows(const AttendParams& p, int index, Tile& tile) {
  const int lane = threadIdx.x % 32;
  for (int base = 0, before = 0; base < p.sequences; base += 32) {
    const int s = min(base + lane, p.sequences - 1);
    const int start = p.cu_q_lens[s], queries = base + lane < p.sequences ? p.cu_q_lens[s + 1] - start : 0;
    const int count = (queries * p.group + ROWS - 1) / ROWS;
    int sum = count;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += other;
    }
    const unsigned reached = __ballot_sync(~0u, before + sum > index);
    if (reached) {
      const int found = __ffs(reached) - 1;
      tile.sequence = base + found;
      tile.q_start = __shfl_sync(~0u, start, found);
      tile.q_len = __shfl_sync(~0u, queries, found);
      tile.first_row = (index - before - __shfl_sync(~0u, sum - count, found)) * ROWS;
      tile.rows = min(ROWS, tile.q_len * p.group - tile.first_row);
      return true;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return false;
}

// False where there is nothing to attend to.
__device__ bool find_tile(const AttendParams& p, int index, Tile& tile) {
  if (!find_rows(p, index, tile)) return false;
  tile.kv_len = p.kv_lens[tile.sequence];
  const int first_position = tile.kv_len - tile.q_len + tile.first_row / p.group;
  tile.first_token = first_visible(p, max(first_position, 0));
  tile.last_token = tile.kv_len - tile.q_len + (tile.first_row + tile.rows - 1) / p.group + 1;
  tile.begin = tile.first_token / TOKENS;
  tile.end = (tile.last_token + TOKENS - 1) / TOKENS;
  const int tiles = tile.end - tile.begin;
  if (tile.last_token <= 0 || tiles <= 0) return false;
  tile.per_split = max((tiles + p.splits - 1) / p.splits, kMinTiles);
  tile.splits = (tiles + tile.per_split - 1) / tile.per_split;
  return true;
}

__device__ void load_queries(const AttendParams& p, const Tile& tile, int head, Shared& shared) {
  for (int i = threadIdx.x; i < tile.rows * kKPad; i += kThreads) {
    const int row = i / kKPad, d = i % kKPad, packed = tile.first_row + row;
    const int64_t token = tile.q_start + packed / p.group, q_head = head * p.group + packed % p.group;
    shared.q[row][d] = d < K_DIM ? to_float(p.q[token * p.q_token + q_head * p.q_head + d]) : 0.0f;
  }
  if (kKPad > K_DIM) {
    for (int i = threadIdx.x; i < TOKENS * 4; i += kThreads) {
      const int d = kKPad - 4 + i % 4;
      if (d >= K_DIM) shared.k[i / 4][d] = 0.0f;
    }
  }
}

// Only entries of existing tokens are read: what is beyond may be anything.
__device__ __forceinline__ void load_entries(const AttendParams& p, const Tile& tile, int t, uint32_t* entries) {
  const int shift = p.place.block_shift, block = (t * TOKENS >> shift) + threadIdx.x;
  if (threadIdx.x < kEntries && t < tile.end && block << shift < tile.last_token) {
    entries[threadIdx.x] = p.tables[int64_t(tile.sequence) * p.table_stride + block];
  }
}

__device__ __forceinline__ bool is_seen(const Tile& tile, int token) {
  return token >= tile.first_token && token < tile.last_token;
}

// Whether all blocks of tile t that are read are of the native format.
__device__ __forceinline__ bool is_native(const AttendParams& p, const Tile& tile, int t, const uint32_t* entries) {
  const int shift = p.place.block_shift, first_block = t * TOKENS >> shift;
  const int first = max(t * TOKENS, tile.first_token) >> shift, last = (min((t + 1) * TOKENS, tile.last_token) - 1) >> shift;
  bool native = true;
  for (int block = first; block <= last; ++block) native &= entry_format(entries[block - first_block]) == FORMAT;
  return native;
}

// A thread's share of K or V of a tile.
template <int dim>
struct Share {
  static constexpr int N = group_size(dim), per_row = dim / N, count = (TOKENS * per_row + kThreads - 1) / kThreads;
  Group<Native, N> groups[count];
};

template <int dim, bool is_k>
__device__ __forceinline__ Share<dim> fetch(const AttendParams& p, const Tile& tile, int t, int head,
                                            const uint32_t* entries) {
  using S = Share<dim>;
  S share{};
  const int shift = p.place.block_shift, first_block = t * TOKENS >> shift;
#pragma unroll
  for (int i = 0; i < S::count; ++i) {
    const int at = threadIdx.x + i * kThreads, token = t * TOKENS + at / S::per_row;
    if (at >= TOKENS * S::per_row || !is_seen(tile, token)) continue;
    const BlockRows rows = block_rows<K_DIM, V_DIM>(p.slabs, p.place, entries[(token >> shift) - first_block], head);
    share.groups[i] = load_stored<Native, S::N>(is_k ? rows.k : rows.v, token & ((1 << shift) - 1),
                                                at % S::per_row * S::N, dim);
  }
  return share;
}

template <int N>
__device__ __forceinline__ void put_group(float* to, const Group<float, N>& wide) {
  constexpr int run = kRun<float, N>;
#pragma unroll
  for (int e = 0; e < N; e += run) {
    *reinterpret_cast<Group<float, run>*>(to + e) = *reinterpret_cast<const Group<float, run>*>(&wide.item[e]);
  }
}

template <int dim, int stride>
__device__ __forceinline__ void put(const Share<dim>& share, float (*to)[stride]) {
  using S = Share<dim>;
#pragma unroll
  for (int i = 0; i < S::count; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at < TOKENS * S::per_row) put_group(&to[at / S::per_row][at % S::per_row * S::N], widened(share.groups[i], 1.0f));
  }
}

// The same for tiles with blocks of other formats, a group at a time.
template <int dim, int stride, bool is_k>
__device__ __forceinline__ void load_mixed(const AttendParams& p, const Tile& tile, int t, int head,
                                           const uint32_t* entries, float (*to)[stride]) {
  constexpr int N = group_size(dim), per_row = dim / N;
  const int shift = p.place.block_shift, first_block = t * TOKENS >> shift;
#pragma unroll 1
  for (int i = threadIdx.x; i < TOKENS * per_row; i += kThreads) {
    const int j = i / per_row, d = i % per_row * N, token = t * TOKENS + j;
    Group<float, N> wide{};
    if (is_seen(tile, token)) {
      const BlockRows rows = block_rows<K_DIM, V_DIM>(p.slabs, p.place, entries[(token >> shift) - first_block], head);
      wide = load_wide<N>(rows.format, is_k ? rows.k : rows.v, token & ((1 << shift) - 1), d, dim,
                          is_k ? rows.k_scale : rows.v_scale);
    }
    put_group(&to[j][d], wide);
  }
}

// K and V of tile t, with zeros for tokens that no row sees. All loads of a native tile are on their way together.
__device__ __forceinline__ void load_tile(const AttendParams& p, const Tile& tile, int t, int head,
                                          const uint32_t* entries, Shared& shared) {
  if (is_native(p, tile, t, entries)) {
    const Share<K_DIM> k = fetch<K_DIM, true>(p, tile, t, head, entries);
    const Share<V_DIM> v = fetch<V_DIM, false>(p, tile, t, head, entries);
    put(k, shared.k);
    put(v, shared.v);
  } else {
    load_mixed<K_DIM, kKStride, true>(p, tile, t, head, entries, shared.k);
    load_mixed<V_DIM, kVPad, false>(p, tile, t, head, entries, shared.v);
  }
}

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ __forceinline__ void add(float4& to, float weight, const float4& v) {
  to.x = fmaf(weight, v.x, to.x);
  to.y = fmaf(weight, v.y, to.y);
  to.z = fmaf(weight, v.z, to.z);
  to.w = fmaf(weight, v.w, to.w);
}

// A thread's part of the online softmax: rows threadIdx.x / 16 + 16 i, and of each V row the columns 64 c + 4 lane.
template <int R>
struct State {
  float4 out[R][kColumns / 4];
  float max[R], sum[R];  // sum: of this lane's tokens
  int position[R];
};

template <int R>
__device__ __forceinline__ void score_tile(const AttendParams& p, int t, Shared& shared, State<R>& state) {
  const int lane = threadIdx.x % kLanes, ty = threadIdx.x / kLanes;
  float scores[R][kNumTokens] = {};
#pragma unroll 4
  for (int d = 0; d < kKPad; d += 4) {
    float4 k[kNumTokens];
#pragma unroll
    for (int n = 0; n < kNumTokens; ++n) k[n] = *reinterpret_cast<const float4*>(&shared.k[lane + kLanes * n][d]);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const float4 q = *reinterpret_cast<const float4*>(&shared.q[ty + kLanesRows * i][d]);
#pragma unroll
      for (int n = 0; n < kNumTokens; ++n) scores[i][n] = dot(q, k[n], scores[i][n]);
    }
  }
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int first = first_visible(p, state.position[i]);
    float highest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kNumTokens; ++n) {
      const int token = t * TOKENS + lane + kLanes * n;
      float s = scores[i][n] * p.scale;
      if (p.softcap != 0.0f) s = p.softcap * tanhf(s / p.softcap);
      scores[i][n] = token >= first && token <= state.position[i] ? s : -INFINITY;
      highest = fmaxf(highest, scores[i][n]);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask; mask /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, mask));
    highest = fmaxf(highest, state.max[i]);
    const float base = highest == -INFINITY ? 0.0f : highest;  // a row that sees nothing yet
    const float rescale = expf(state.max[i] - base);
    state.max[i] = highest;
    state.sum[i] *= rescale;
#pragma unroll
    for (int n = 0; n < kNumTokens; ++n) {
      const float weight = expf(scores[i][n] - base);
      state.sum[i] += weight;
      shared.p[ty + kLanesRows * i][lane + kLanes * n] = weight;
    }
#pragma unroll
    for (int c = 0; c < kColumns / 4; ++c) {
      float4& o = state.out[i][c];
      o.x *= rescale, o.y *= rescale, o.z *= rescale, o.w *= rescale;
    }
  }
  __syncwarp();  // the lanes of a row are of one warp
}

template <int R>
__device__ __forceinline__ void add_values(Shared& shared, State<R>& state) {
  const int lane = threadIdx.x % kLanes, ty = threadIdx.x / kLanes;
#pragma unroll 2
  for (int j = 0; j < TOKENS; j += 4) {
    float4 weights[R];
#pragma unroll
    for (int i = 0; i < R; ++i) weights[i] = *reinterpret_cast<const float4*>(&shared.p[ty + kLanesRows * i][j]);
#pragma unroll
    for (int c = 0; c < kColumns / 4; ++c) {
#pragma unroll
      for (int jj = 0; jj < 4; ++jj) {
        const float4 v = *reinterpret_cast<const float4*>(&shared.v[j + jj][64 * c + 4 * lane]);
#pragma unroll
        for (int i = 0; i < R; ++i) {
          add(state.out[i][c], jj == 0 ? weights[i].x : jj == 1 ? weights[i].y : jj == 2 ? weights[i].z : weights[i].w, v);
        }
      }
    }
  }
}

// Where row `packed` of a sequence goes in `out`, and its sink.
__device__ __forceinline__ InOut* out_row(const AttendParams& p, const Tile& tile, int head, int packed) {
  const int64_t token = tile.q_start + packed / p.group, q_head = head * p.group + packed % p.group;
  return p.out + token * p.out_token + q_head * p.out_head;
}

// The sum of a row's weights, its sink's included, relative to `highest`, which rises to the sink.
__device__ __forceinline__ float add_sink(const AttendParams& p, int head, int packed, float& highest, float sum) {
  if (p.sinks == nullptr) return sum;
  const float sink = p.sinks[head * p.group + packed % p.group], raised = fmaxf(highest, sink);
  sum = sum * expf(highest - raised) + expf(sink - raised);
  highest = raised;
  return sum;
}

template <int R>
__device__ __forceinline__ void store(const AttendParams& p, const Tile& tile, int head, State<R>& state) {
  const int lane = threadIdx.x % kLanes, ty = threadIdx.x / kLanes;
  const int64_t part = (int64_t(blockIdx.x) * p.place.kv_heads + head) * p.splits + blockIdx.z;
  float* const partial = p.partials + part * kPartial;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int row = ty + kLanesRows * i, packed = tile.first_row + row;
    float sum = state.sum[i], highest = state.max[i];
#pragma unroll
    for (int mask = kLanes / 2; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (row >= tile.rows) continue;
    float factor = 1.0f;
    if (tile.splits == 1) {
      const float total = add_sink(p, head, packed, highest, sum);
      factor = expf(state.max[i] - highest) / total;
    } else if (lane == 0) {
      partial[2 * row] = highest;
      partial[2 * row + 1] = sum;
    }
    InOut* const to = out_row(p, tile, head, packed);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = 64 * (c / 4) + 4 * lane + c % 4;
      if (d >= V_DIM) continue;
      const float value = (&state.out[i][c / 4].x)[c % 4] * factor;
      if (tile.splits == 1) from_float(value, to[d]);
      else partial[2 * ROWS + row * V_DIM + d] = value;
    }
  }
}

template <int R>
__device__ void run(const AttendParams& p, const Tile& tile, Shared& shared) {
  const int head = blockIdx.y, ty = threadIdx.x / kLanes;
  const int begin = tile.begin + blockIdx.z * tile.per_split, end = min(tile.end, begin + tile.per_split);
  State<R> state = {};
#pragma unroll
  for (int i = 0; i < R; ++i) {
    state.max[i] = -INFINITY;
    state.position[i] = tile.kv_len - tile.q_len + (tile.first_row + ty + kLanesRows * i) / p.group;
  }
  load_entries(p, tile, begin, shared.entries[begin % 2]);
  load_queries(p, tile, head, shared);
  for (int t = begin; t < end; ++t) {
    __syncthreads();
    load_tile(p, tile, t, head, shared.entries[t % 2], shared);
    load_entries(p, tile, t + 1, shared.entries[(t + 1) % 2]);
    __syncthreads();
    score_tile<R>(p, t, shared, state);
    add_values<R>(shared, state);
  }
  store<R>(p, tile, head, state);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) attend(const __grid_constant__ AttendParams p) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Tile tile;
  if (!find_tile(p, blockIdx.x, tile) || blockIdx.z >= tile.splits) return;
  if (ROWS > 16 && tile.rows > 16) run<ROWS / 16>(p, tile, shared);
  else run<1>(p, tile, shared);
}

constexpr int kMaxSplits = 64, kMergeThreads = 128;

// Adds up the splits of one row (blockIdx.z) of a tile and KV head, in their order.
extern "C" __global__ void __launch_bounds__(kMergeThreads) merge(const __grid_constant__ AttendParams p) {
  Tile tile;
  const int head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32;
  if (!find_tile(p, blockIdx.x, tile) || tile.splits == 1 || row >= tile.rows) return;
  const float* const parts = p.partials + (int64_t(blockIdx.x) * p.place.kv_heads + head) * p.splits * kPartial;
  __shared__ float weights[kMaxSplits];
  float maxima[kMaxSplits / 32], sum = 0.0f, highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int s = lane + 32 * i;
    maxima[i] = s < tile.splits ? parts[s * kPartial + 2 * row] : -INFINITY;
    highest = fmaxf(highest, maxima[i]);
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, mask));
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int s = lane + 32 * i;
    if (s >= tile.splits) continue;
    const float weight = expf(maxima[i] - highest);
    sum = fmaf(parts[s * kPartial + 2 * row + 1], weight, sum);
    if (threadIdx.x < 32) weights[s] = weight;
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  __syncthreads();
  float raised = highest;
  const float total = add_sink(p, head, tile.first_row + row, raised, sum);
  const float factor = expf(highest - raised) / total;
  for (int d = threadIdx.x; d < V_DIM; d += kMergeThreads) {
    float value = 0.0f;
#pragma unroll 8
    for (int s = 0; s < tile.splits; ++s) {
      value = fmaf(parts[s * kPartial + 2 * ROWS + row * V_DIM + d], weights[s], value);
    }
    from_float(value * factor, out_row(p, tile, head, tile.first_row + row)[d]);
  }
}
