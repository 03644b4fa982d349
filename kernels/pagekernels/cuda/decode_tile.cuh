// One warp, one tile of K and V, 16 packed query rows: scores and weighted sum on tensor cores.
//
// S = Q K^T has the query rows as M, so its C fragment is already the A fragment of P V. d may be permuted in the
// products of Q and K if it is permuted alike in both: a lane takes 16 contiguous bytes of a K row, chunk 4 j + t of
// token g, as B fragments of consecutive k, and the same d of its query rows.
#pragma once
#include "decode_mma.cuh"

constexpr int kScoreTiles = kTile / 8;
constexpr int kChunks = kDim / 8;             // of 16 bytes in a native row
constexpr int kFp8Chunks = kDim / 16;         // in an FP8 row
constexpr int kSteps = (kChunks + 3) / 4;     // j in 4 j + t
constexpr int kFp8Steps = (kFp8Chunks + 3) / 4;
constexpr bool kUpper = kRows > 8;            // rows g + 8 exist
constexpr bool kQueriesInRegisters = kDim <= 128;
constexpr bool kFp8Order = kFp8 && kDim <= 128;  // FP8 tiles leave `out` in an order of their own
constexpr int kHeldSteps = kQueriesInRegisters ? kSteps : 1;

using Scores = float[kScoreTiles][4];

// A lane's query rows g and g + 8, as A fragments: 16 bytes of d a step and row. Rows that are not there are 0.
struct Queries {
  uint32_t address;  // of the warp's rows in shared memory
  bool has_low, has_high;
  uint4 low[kHeldSteps], high[kHeldSteps];
};

__device__ __forceinline__ uint4 query_chunk(const Queries& q, bool upper, int chunk, int g) {
  const bool there = (upper ? q.has_high : q.has_low) && chunk < kChunks;
  if (!there || (upper && !kUpper)) return {0, 0, 0, 0};
  return load_shared(q.address + ((g + (upper ? 8 : 0)) * kDim * 2) + chunk * 16);
}

__device__ __forceinline__ Queries load_query_fragments(const Shared& shared, int segment, int query_tile, int rows,
                                                        int lane) {
  Queries q;
  const int g = lane >> 2, t = lane & 3;
  q.address = shared_address(&shared.q[segment][query_tile * kRows * kDim]);
  q.has_low = g < kRows && query_tile * kRows + g < rows;
  q.has_high = g + 8 < kRows && query_tile * kRows + g + 8 < rows;
  if (kQueriesInRegisters) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) q.low[j] = query_chunk(q, false, 4 * j + t, g), q.high[j] = query_chunk(q, true, 4 * j + t, g);
  }
  return q;
}

__device__ __forceinline__ void native_scores(Scores& s, const Queries& q, uint32_t tile, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll(kQueriesInRegisters ? kSteps : 2)
  for (int j = 0; j < kSteps; ++j) {
    const int chunk = 4 * j + t;
    const uint4 low = kQueriesInRegisters ? q.low[j % kHeldSteps] : query_chunk(q, false, chunk, g);
    const uint4 high = kQueriesInRegisters ? q.high[j % kHeldSteps] : query_chunk(q, true, chunk, g);
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      uint4 k = {0, 0, 0, 0};
      const int row = n * 8 + g;
      if (kChunks % 4 == 0 || chunk < kChunks)
        k = load_shared(tile + row * kDim * 2 + (chunk ^ swizzle<kDim * 2>(row)) * 16);
      mma16<kF16>(s[n], {low.x, high.x, low.y, high.y}, k.x, k.y);
      mma16<kF16>(s[n], {low.z, high.z, low.w, high.w}, k.z, k.w);
    }
  }
}

// 4 d of a query row in f16, from 8 bytes of shared memory.
__device__ __forceinline__ uint2 half_query(const Queries& q, bool upper, int d, int g) {
  const bool there = (upper ? q.has_high : q.has_low) && d < kDim;
  if (!there || (upper && !kUpper)) return {0, 0};
  const uint2 native = load_shared_pair(q.address + ((g + (upper ? 8 : 0)) * kDim + d) * 2);
  return {half_pair(native.x), half_pair(native.y)};
}

__device__ __forceinline__ void fp8_scores(Scores& s, const Queries& q, uint32_t tile, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll(kQueriesInRegisters ? kFp8Steps : 1)
  for (int j = 0; j < kFp8Steps; ++j) {
    const int chunk = 4 * j + t;
    uint4 k[kScoreTiles];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const int row = n * 8 + g;
      k[n] = {0, 0, 0, 0};
      if (kFp8Chunks % 4 == 0 || chunk < kFp8Chunks)
        k[n] = load_shared(tile + row * kDim + (chunk ^ swizzle<kDim>(row)) * 16);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint2 low = half_query(q, false, chunk * 16 + u * 4, g), high = half_query(q, true, chunk * 16 + u * 4, g);
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        const uint32_t word = u == 0 ? k[n].x : u == 1 ? k[n].y : u == 2 ? k[n].z : k[n].w;
        mma16<true>(s[n], {low.x, high.x, low.y, high.y}, half_pair_of_fp8(word), half_pair_of_fp8(word >> 16));
      }
    }
  }
}

// out += P V. Column tile c of out holds d 8 c .. 8 c + 7 in order.
__device__ __forceinline__ void native_values(float (&out)[kColumnTiles][4], const uint32_t (&weights)[4],
                                              uint32_t tile, int lane) {
  const int row = kTile == 16 ? lane & 15 : lane & 7, right = kTile == 16 ? lane >> 4 : lane >> 3 & 1;
#pragma unroll
  for (int c = 0; c < kColumnTiles; c += 2) {
    const uint32_t address = tile + row * kDim * 2 + ((c + right) ^ swizzle<kDim * 2>(row)) * 16;
    uint32_t v[kTile == 16 ? 4 : 2];
    load_transposed(v, address);
    constexpr int kNext = kTile == 16 ? 2 : 1;
    mma_tokens<kF16>(out[c], weights, v[0], v[kNext - 1]);
    mma_tokens<kF16>(out[c + 1], weights, v[kNext], v[2 * kNext - 1]);
  }
}

// out += P V. A transposed pair of FP8 V is (d, d + 1) of one token, so column n of tile 2 c holds d 16 c + 2 n and of
// tile 2 c + 1 d 16 c + 2 n + 1: another order than native_values, see reorder. Heads too large to reorder in registers
// have their values brought into the native order by shuffles instead.
__device__ __forceinline__ void fp8_values(float (&out)[kColumnTiles][4], const uint32_t (&weights)[4], uint32_t tile,
                                           int lane) {
  const int row = lane & (kTile - 1), half = (lane >> 3 << 2) | (lane & 3);
  const uint32_t pick = lane & 4 ? 0x4431 : 0x4420;  // bytes of d 2 n + 1, of d 2 n
#pragma unroll
  for (int c = 0; c < kFp8Chunks; ++c) {
    uint32_t v[kScoreTiles], even[kScoreTiles], odd[kScoreTiles];
    load_transposed(v, tile + row * kDim + (c ^ swizzle<kDim>(row)) * 16);
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      if (kFp8Order) {
        const uint32_t parted = __byte_perm(v[n], 0, 0x3120);
        even[n] = half_pair_of_fp8(parted), odd[n] = half_pair_of_fp8(parted >> 16);
      } else {
        even[n] = half_pair_of_fp8(__byte_perm(__shfl_sync(~0u, v[n], half), 0, pick));
        odd[n] = half_pair_of_fp8(__byte_perm(__shfl_sync(~0u, v[n], half + 16), 0, pick));
      }
    }
    mma_tokens<true>(out[2 * c], weights, even[0], even[kScoreTiles - 1]);
    mma_tokens<true>(out[2 * c + 1], weights, odd[0], odd[kScoreTiles - 1]);
  }
}

// Between the two orders of d in `out`: a lane's (2t, 2t+1 | 8+2t, 9+2t) of 16 against (4t, 4t+2 | 4t+1, 4t+3).
__device__ __forceinline__ void reorder(float (&out)[kColumnTiles][4], bool to_fp8) {
  int lane;  // asked for anew: what follows from it must not be kept in registers from one call to the next
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int t = lane & 3, quad = lane & ~3;
#pragma unroll
  for (int c = 0; c < kColumnTiles; c += 2)
#pragma unroll
    for (int upper = 0; upper < 4; upper += 2) {
      float now[4] = {out[c][upper], out[c][upper + 1], out[c + 1][upper], out[c + 1][upper + 1]}, next[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Element i of `next` is d; `from` holds d at position `at`.
        const int d = to_fp8 ? 4 * t + (i & 1) * 2 + (i >> 1) : (i >> 1) * 8 + 2 * t + (i & 1);
        const int from = to_fp8 ? (d & 7) >> 1 : d >> 2;
        const int at = to_fp8 ? (d >> 3) * 2 + (d & 1) : (d & 1) * 2 + (d >> 1 & 1);
        next[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float value = __shfl_sync(~0u, now[j], quad | from);
          if (at == j) next[i] = value;
        }
      }
      out[c][upper] = next[0], out[c][upper + 1] = next[1], out[c + 1][upper] = next[2], out[c + 1][upper + 1] = next[3];
    }
}

// Unused token rows of V may hold NaN, and 0 times NaN is NaN: write zeros over them in shared memory.
__device__ __forceinline__ void clear_unused(unsigned char* values, int used, int row_bytes, int lane) {
  uint4* const end = reinterpret_cast<uint4*>(values + kTile * row_bytes);
  for (uint4* at = reinterpret_cast<uint4*>(values + used * row_bytes) + lane; at < end; at += 32) *at = {0, 0, 0, 0};
#if BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}
