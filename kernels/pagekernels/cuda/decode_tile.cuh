// One warp, one tile of K and V, 8 or 16 packed query rows: scores and weighted sum on tensor cores.
//
// Query rows are the N of both products, since a group has few of them: S^T = K Q^T and out^T = V^T P^T, with tokens and d
// as M. d may be permuted in the product of K and Q if it is permuted alike in both: a lane takes 16 contiguous bytes of
// a K row, chunk 4 j + t of token g, as A fragments of consecutive k, and the same d of its query rows as B fragments.
#pragma once
#include "decode_mma.cuh"

constexpr int kTokenTiles = kTile / 8;
constexpr int kRowTiles = kRows > 8 ? 2 : 1;  // of 8 query rows
constexpr int kValueTiles = kDim / 16;
constexpr int kChunks = kDim / 8;             // of 16 bytes in a native row
constexpr int kFp8Chunks = kDim / 16;         // in an FP8 row
constexpr int kSteps = (kChunks + 3) / 4;     // j in 4 j + t
constexpr int kFp8Steps = (kFp8Chunks + 3) / 4;
constexpr bool kQueriesInRegisters = kDim <= 128;
constexpr int kHeldSteps = kQueriesInRegisters ? kSteps : 1;
constexpr int kHeldHalves = kQueriesInRegisters && kFp8 ? kFp8Steps * 4 : 1;
// Whether FP8 tiles are summed up apart, in an order of d of their own, where there are registers for it.
constexpr bool kApart = kFp8 && kDim <= 128 && kRows <= 8;

// Of the query rows 8 n + 2 t and 8 n + 2 t + 1: element i is of token 8 (i / 2) + g and row i % 2.
using Scores = float[kRowTiles][4];
// The same rows, elements of d; see native_values and fp8_values.
using Sums = float[kValueTiles][kRowTiles][4];

// A lane's query rows g and g + 8, as B fragments. Rows that are not there are 0.
struct Queries {
  uint32_t address;  // of the warp's rows in shared memory
  bool there[kRowTiles];
  uint4 native[kRowTiles][kHeldSteps];
  uint2 half[kRowTiles][kHeldHalves];  // in f16, in the order of FP8 rows: 4 d a step
};

__device__ __forceinline__ uint4 query_chunk(const Queries& q, int n, int chunk, int g) {
  if (!q.there[n] || chunk >= kChunks) return {0, 0, 0, 0};
  return load_shared(q.address + (8 * n + g) * kDim * 2 + chunk * 16);
}

// 4 d of a query row in f16, from 8 bytes of shared memory.
__device__ __forceinline__ uint2 half_query(const Queries& q, int n, int d, int g) {
  if (!q.there[n] || d >= kDim) return {0, 0};
  const uint2 native = load_shared_pair(q.address + ((8 * n + g) * kDim + d) * 2);
  return {half_pair(native.x), half_pair(native.y)};
}

__device__ __forceinline__ Queries load_query_fragments(const Shared& shared, int segment, int query_tile, int rows,
                                                        int lane) {
  Queries q;
  const int g = lane >> 2, t = lane & 3;
  q.address = shared_address(&shared.q[segment][query_tile * kRows * kDim]);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    q.there[n] = 8 * n + g < kRows && query_tile * kRows + 8 * n + g < rows;
    if (!kQueriesInRegisters) continue;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) q.native[n][j % kHeldSteps] = query_chunk(q, n, 4 * j + t, g);
#pragma unroll
    for (int i = 0; kFp8 && i < kFp8Steps * 4; ++i)
      q.half[n][i % kHeldHalves] = half_query(q, n, (i / 4 * 4 + t) * 16 + i % 4 * 4, g);
  }
  return q;
}

__device__ __forceinline__ void add_scores(Scores& s, const Scores& more) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] += more[n][i];
}

// Both make two sums side by side: one instruction that waits for the one before it takes longer than the two of them.
__device__ __forceinline__ void native_scores(Scores& s, const Queries& q, uint32_t tile, int lane) {
  const int g = lane >> 2, t = lane & 3;
  Scores other = {};
#pragma unroll(kQueriesInRegisters ? kSteps : 2)
  for (int j = 0; j < kSteps; ++j) {
    const int chunk = 4 * j + t;
    uint4 k[2] = {};
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const int row = i * 8 + g;
      if (kChunks % 4 == 0 || chunk < kChunks)
        k[i] = load_shared(tile + row * kDim * 2 + (chunk ^ swizzle<kDim * 2>(row)) * 16);
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const uint4 rows = kQueriesInRegisters ? q.native[n][j % kHeldSteps] : query_chunk(q, n, chunk, g);
      mma16<kF16>(s[n], {k[0].x, k[1].x, k[0].y, k[1].y}, rows.x, rows.y);
      mma16<kF16>(other[n], {k[0].z, k[1].z, k[0].w, k[1].w}, rows.z, rows.w);
    }
  }
  add_scores(s, other);
}

__device__ __forceinline__ void fp8_scores(Scores& s, const Queries& q, uint32_t tile, int lane) {
  const int g = lane >> 2, t = lane & 3;
  Scores other = {};
#pragma unroll(kQueriesInRegisters ? kFp8Steps : 1)
  for (int j = 0; j < kFp8Steps; ++j) {
    const int chunk = 4 * j + t;
    uint4 k[2] = {};
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const int row = i * 8 + g;
      if (kFp8Chunks % 4 == 0 || chunk < kFp8Chunks)
        k[i] = load_shared(tile + row * kDim + (chunk ^ swizzle<kDim>(row)) * 16);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint32_t low = word_of(k[0], u), high = word_of(k[1], u);
      const uint32_t a[4] = {half_pair_of_fp8(low), half_pair_of_fp8(high), half_pair_of_fp8(low >> 16),
                             half_pair_of_fp8(high >> 16)};
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const uint2 rows =
            kQueriesInRegisters ? q.half[n][(j * 4 + u) % kHeldHalves] : half_query(q, n, chunk * 16 + u * 4, g);
        mma16<true>(u % 2 ? other[n] : s[n], a, rows.x, rows.y);
      }
    }
  }
  add_scores(s, other);
}

// Weights as the B fragments of out^T = V^T P^T, times `factor`: pairs of query rows of one token become pairs of tokens.
struct Weights {
  uint32_t pair[kRowTiles][kTokenTiles];
};

template <bool kHalf>
__device__ __forceinline__ Weights pack_weights(const Scores& s, float factor) {
  Weights weights;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
      weights.pair[n][i] = transposed(pack_pair<kHalf>(s[n][2 * i] * factor, s[n][2 * i + 1] * factor));
  return weights;
}

template <bool kHalf>
__device__ __forceinline__ void add_values(float (&sums)[kRowTiles][4], const uint32_t (&v)[4], const Weights& weights) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
    mma_tokens<kHalf>(sums[n], v, weights.pair[n][0], weights.pair[n][kTokenTiles - 1]);
}

// sums += V^T P^T. Value tile c holds d 16 c + g in its elements 0 and 1, and 16 c + 8 + g in 2 and 3.
__device__ __forceinline__ void native_values(Sums& sums, const Weights& weights, uint32_t tile, int lane) {
  const int row = (lane & 7) + (kTile == 16 ? lane >> 4 << 3 : 0), right = lane >> 3 & 1;
#pragma unroll
  for (int c = 0; c < kValueTiles; ++c) {
    uint32_t v[2 * kTokenTiles], a[4] = {};
    load_transposed(v, tile + row * kDim * 2 + ((2 * c + right) ^ swizzle<kDim * 2>(row)) * 16);
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i) a[i] = v[i];
    add_values<kF16>(sums[c], a, weights);
  }
}

// sums += V^T P^T. A transposed pair of FP8 V is (d, d + 1) of one token, so that value tile c has d 16 c + 2 g in its
// elements 0 and 1, and 16 c + 2 g + 1 in 2 and 3. Sums that are not kept apart need the order of native_values instead,
// and the values brought into it by shuffles.
__device__ __forceinline__ void fp8_values(Sums& sums, const Weights& weights, uint32_t tile, int lane) {
  const int row = lane & (kTile - 1), from = (lane >> 3 << 2) | (lane & 3);
  const uint32_t pick = lane & 4 ? 0x4431 : 0x4420;  // bytes of d 2 n + 1, of d 2 n
#pragma unroll
  for (int c = 0; c < kFp8Chunks; ++c) {
    uint32_t v[kTokenTiles], a[4] = {};
    load_transposed(v, tile + row * kDim + (c ^ swizzle<kDim>(row)) * 16);
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      if (kApart) {
        const uint32_t parted = __byte_perm(v[i], 0, 0x3120);
        a[2 * i] = half_pair_of_fp8(parted), a[2 * i + 1] = half_pair_of_fp8(parted >> 16);
      } else {
        a[2 * i] = half_pair_of_fp8(__byte_perm(__shfl_sync(~0u, v[i], from), 0, pick));
        a[2 * i + 1] = half_pair_of_fp8(__byte_perm(__shfl_sync(~0u, v[i], from + 16), 0, pick));
      }
    }
    add_values<true>(sums[c], a, weights);
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
