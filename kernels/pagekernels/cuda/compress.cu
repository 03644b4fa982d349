// Blocks of the native format to FP8 blocks, and back. Twin: TwinOps.compress_blocks, decompress_blocks. Host side:
// compress.py.
//
// A warp takes the K or the V rows of one block, layer and head: a tile, with a scale of its own. Defines: FORMAT
// (native), BLOCK (tokens), K_DIM, V_DIM. Layers of one shape that follow each other are one launch.
#include "common.cuh"

using Native = Element<FORMAT>::type;

constexpr int kWarps = 8, kThreads = kWarps * 32, kResident = 2;
// Pairs of one launch: by value, since the parameters of a launch may have 4 KB.
constexpr int kPairs = 256;
constexpr float kLargest = E4M3_MAX, kLeastScale = MIN_SCALE;
constexpr uint32_t kInfinity = 0x7f800000, kNan = 0x7fc00000;

struct CompressParams {
  Slabs slabs;
  LayerPlace place;  // of the first layer
  int64_t layer_elements, layer_scales;  // from one layer to the next; the latter in bytes
  float* errors;     // [pairs][K, V], the worst of all tiles so far; not negative, so that bits compare like numbers
  int layers, pad;
  uint32_t sources[kPairs], targets[kPairs];
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The largest magnitude of groups. Without their signs the bits of numbers are in the order of the numbers, and infinity
// and NaN come last; two halves are compared at once.
template <typename T, int N>
struct Magnitude {
  static constexpr bool kPairs = sizeof(T) == 2 && N % 2 == 0;
  uint32_t bits = 0;

  __device__ __forceinline__ void take(const Group<T, N>& x) {
    if constexpr (kPairs) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(x.item);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) bits = __vmaxu2(bits, words[i] & 0x7fff7fff);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) bits = max(bits, __float_as_uint(to_float(x.item[i])) & 0x7fffffff);
    }
  }

  __device__ __forceinline__ float of_warp() const {
    if constexpr (kPairs) {
      const uint16_t most = __reduce_max_sync(~0u, max(bits & 0xffff, bits >> 16));
      return to_float(*reinterpret_cast<const T*>(&most));
    } else {
      return __uint_as_float(__reduce_max_sync(~0u, bits));
    }
  }
};

// How a warp walks over a tile: a lane keeps to a column of groups, and takes every kRows-th row of it.
template <int dim>
struct Walk {
  static constexpr int N = group_size(dim), kColumns = dim / N;
  static constexpr int kWide = kColumns > 16 ? 32 : kColumns > 8 ? 16 : kColumns > 4 ? 8 : kColumns > 2 ? 4 : kColumns;
  static constexpr int kRows = 32 / kWide, kTurns = (BLOCK + kRows - 1) / kRows, kPasses = (kColumns + 31) / 32;
  // What fits into registers is loaded once; the rest again each time, which then comes from the cache.
  static constexpr bool kHeld = kTurns * kPasses * N * int(sizeof(Native)) <= 256;
};

template <int dim>
struct Tile {
  using W = Walk<dim>;
  const uint8_t* rows;
  Group<Native, W::N> held[W::kHeld ? W::kTurns * W::kPasses : 1];

  __device__ __forceinline__ bool place(int pass, int turn, int& row, int& first) const {
    const int lane = threadIdx.x % 32, column = pass * 32 + lane % W::kWide;
    row = turn * W::kRows + lane / W::kWide;
    first = column * W::N;
    return row < BLOCK && column < W::kColumns;
  }

  __device__ __forceinline__ Group<Native, W::N> read(int row, int first) const {
    return load_stored<Native, W::N>(rows, row, first, dim);
  }

  __device__ __forceinline__ void load() {
    if constexpr (W::kHeld) {
#pragma unroll
      for (int pass = 0; pass < W::kPasses; ++pass)
#pragma unroll
        for (int turn = 0; turn < W::kTurns; ++turn) {
          int row, first;
          if (place(pass, turn, row, first)) held[pass * W::kTurns + turn] = read(row, first);
        }
    }
  }

  // Calls f(row, first element, group) for each group of the lane in one pass over the columns.
  template <typename F>
  __device__ __forceinline__ void each(int pass, const F& f) const {
    if constexpr (W::kHeld) {
#pragma unroll
      for (int turn = 0; turn < W::kTurns; ++turn) {
        int row, first;
        if (place(pass, turn, row, first)) f(row, first, held[pass * W::kTurns + turn]);
      }
    } else {
#pragma unroll 2
      for (int turn = 0; turn < W::kTurns; ++turn) {
        int row, first;
        if (place(pass, turn, row, first)) f(row, first, read(row, first));
      }
    }
  }

  // The largest magnitude; infinity or NaN if there is one.
  __device__ __forceinline__ float largest() const {
    Magnitude<Native, W::N> most;
#pragma unroll
    for (int pass = 0; pass < W::kPasses; ++pass) each(pass, [&](int, int, const auto& x) { most.take(x); });
    return most.of_warp();
  }

  // Means over the tokens of the lane's columns, of x * factor.
  __device__ __forceinline__ Group<float, W::N> means(int pass, float factor) const {
    Group<float, W::N> sum{};
    each(pass, [&](int, int, const Group<Native, W::N>& x) {
#pragma unroll
      for (int i = 0; i < W::N; ++i) sum.item[i] = fmaf(to_float(x.item[i]), factor, sum.item[i]);
    });
#pragma unroll
    for (int step = W::kWide; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < W::N; ++i) sum.item[i] += __shfl_xor_sync(~0u, sum.item[i], step);
#pragma unroll
    for (int i = 0; i < W::N; ++i) sum.item[i] *= 1.0f / BLOCK;
    return sum;
  }
};

// To nearest, ties to even; too large becomes the largest.
template <int N>
__device__ __forceinline__ Group<__nv_fp8_storage_t, N> encoded(const Group<float, N>& x) {
  Group<__nv_fp8_storage_t, N> stored;
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = {x.item[i], x.item[i + 1]};
      const __nv_fp8x2_storage_t both = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      stored.item[i] = both & 0xff;
      stored.item[i + 1] = both >> 8;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) stored.item[i] = __nv_cvt_float_to_fp8(x.item[i], __NV_SATFINITE, __NV_E4M3);
  }
  return stored;
}

// The squares of what a tile loses with this scale, and of what that is measured by; both over the scale, so that no
// square of a small number vanishes and none of a large one is infinite.
struct Loss {
  float lost, all;
};

template <int dim, bool centred>
__device__ __forceinline__ Loss store_tile(const Tile<dim>& tile, uint8_t* to, float scale) {
  using W = Walk<dim>;
  const float inverse = 1.0f / scale;
  Loss loss{};
#pragma unroll
  for (int pass = 0; pass < W::kPasses; ++pass) {
    Group<float, W::N> middle{};
    if constexpr (centred) middle = tile.means(pass, inverse);
    tile.each(pass, [&](int row, int first, const Group<Native, W::N>& group) {
      const Group<float, W::N> x = widened(group, inverse);
      const auto stored = encoded<W::N>(x);
      store_stored<__nv_fp8_storage_t, W::N>(to, row, first, dim, stored);
#pragma unroll
      for (int i = 0; i < W::N; ++i) {
        const float off = x.item[i] - to_float(stored.item[i]), deviation = x.item[i] - middle.item[i];
        loss.lost = fmaf(off, off, loss.lost);
        loss.all = fmaf(deviation, deviation, loss.all);
      }
    });
  }
  return {warp_sum(loss.lost), warp_sum(loss.all)};
}

template <int dim>
__device__ __forceinline__ void store_nothing(const Tile<dim>& tile, uint8_t* to) {
  using W = Walk<dim>;
#pragma unroll
  for (int pass = 0; pass < W::kPasses; ++pass)
    tile.each(pass, [&](int row, int first, const Group<Native, W::N>&) {
      store_stored<__nv_fp8_storage_t, W::N>(to, row, first, dim, Group<__nv_fp8_storage_t, W::N>{});
    });
}

template <int dim, bool centred>
__device__ __forceinline__ void compress_tile(const uint8_t* from, uint8_t* to, float* scale, float* error) {
  Tile<dim> tile{from};
  tile.load();
  const float most = tile.largest();
  const bool finite = __float_as_uint(most) < kInfinity;
  const float factor = !finite ? __uint_as_float(kNan) : most == 0.0f ? 1.0f : fmaxf(most / kLargest, kLeastScale);
  Loss loss{};
  if (finite) loss = store_tile<dim, centred>(tile, to, factor);
  else store_nothing(tile, to);
  if (threadIdx.x % 32 != 0) return;
  *scale = factor;
  const float found = loss.lost == 0.0f ? 0.0f : sqrtf(loss.lost / loss.all);
  const bool known = finite && found <= 3.4e38f;  // neither infinite, nor measured by nothing
  atomicMax(reinterpret_cast<unsigned int*>(error), known ? __float_as_uint(found) : kInfinity);
}

struct Where {
  int pair, head, is_v;
  int64_t elements, scales;
};

// Which tile the warp takes; false if there is none left for it.
__device__ __forceinline__ bool find(const CompressParams& p, Where& at) {
  const int item = blockIdx.x * kWarps + threadIdx.x / 32, tiles = 2 * p.place.kv_heads;
  const int layer = item / tiles;
  at.pair = blockIdx.y;
  at.head = item % tiles / 2;
  at.is_v = item % 2;
  at.elements = p.place.elements + layer * p.layer_elements + int64_t(at.head) * (K_DIM + V_DIM) * BLOCK +
                at.is_v * int64_t(K_DIM) * BLOCK;
  at.scales = p.place.scales + layer * p.layer_scales + at.head * 8 + at.is_v * 4;
  return layer < p.layers;
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) compress_blocks(const __grid_constant__ CompressParams p) {
  Where at;
  if (!find(p, at)) return;
  const uint8_t* source = block_address(p.slabs, p.sources[at.pair], p.place.unit_bytes) + at.elements * sizeof(Native);
  uint8_t* target = block_address(p.slabs, p.targets[at.pair], p.place.unit_bytes);
  float* scale = reinterpret_cast<float*>(target + at.scales);
  float* error = p.errors + 2 * at.pair + at.is_v;
  if (at.is_v) compress_tile<V_DIM, false>(source, target + at.elements, scale, error);
  else compress_tile<K_DIM, true>(source, target + at.elements, scale, error);
}

template <int dim>
__device__ __forceinline__ void decompress_tile(const uint8_t* from, uint8_t* to, float scale) {
  constexpr int N = group_size(dim), kColumns = dim / N, kCount = BLOCK * kColumns, kAhead = 4;
#pragma unroll 1
  for (int base = threadIdx.x % 32; base < kCount; base += 32 * kAhead) {
    Group<__nv_fp8_storage_t, N> held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * 32;
      if (at < kCount) held[i] = load_stored<__nv_fp8_storage_t, N>(from, at / kColumns, at % kColumns * N, dim);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * 32;
      if (at >= kCount) continue;
      const auto back = narrowed<Native, N>(widened(held[i], scale));
      store_stored<Native, N>(to, at / kColumns, at % kColumns * N, dim, back);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) decompress_blocks(const __grid_constant__ CompressParams p) {
  Where at;
  if (!find(p, at)) return;
  const uint8_t* source = block_address(p.slabs, p.sources[at.pair], p.place.unit_bytes);
  uint8_t* target = block_address(p.slabs, p.targets[at.pair], p.place.unit_bytes) + at.elements * sizeof(Native);
  const float scale = *reinterpret_cast<const float*>(source + at.scales);
  if (at.is_v) decompress_tile<V_DIM>(source + at.elements, target, scale);
  else decompress_tile<K_DIM>(source + at.elements, target, scale);
}
