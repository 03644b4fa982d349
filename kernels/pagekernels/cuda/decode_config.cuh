// What decode.cu is compiled for, and its shared memory. Every macro comes from decode.py.
#pragma once
#include <cstdint>

#include "plan.cuh"

constexpr int kDim = HEAD_DIM;              // of K and V
constexpr int kBlock = BLOCK_SIZE;          // tokens
constexpr int kGroup = GROUP;               // query heads of a KV head
constexpr int kRows = ROWS;                 // packed query rows (token * group + head) of one MMA tile, at most 16
constexpr int kQueryTiles = QUERY_TILES;    // MMA tiles that share a loaded K and V tile, one warp each
constexpr int kStreams = STREAMS;           // K and V tiles worked on at a time
constexpr int kSlots = SLOTS;               // K and V tiles in shared memory
constexpr bool kF16 = KV_F16;               // native format f16, else bf16
constexpr bool kFp8 = FP8;                  // may meet FP8 blocks
constexpr bool kFeatures = FEATURES;        // window, chunk, softcap, sinks
constexpr bool kBulk = BULK;                // cp.async.bulk, else cp.async

constexpr int kTile = kBlock < 16 ? kBlock : 16;
constexpr int kTilesPerBlock = kBlock / kTile;
constexpr int kTileBytes = kTile * kDim * 2;  // K or V of a native tile
constexpr int kSuperRows = kRows * kQueryTiles;
constexpr int kWarps = kStreams * kQueryTiles;
constexpr int kThreads = kWarps * 32;         // that compute; one more warp loads
constexpr int kSegments = 2;                  // whose query rows are in shared memory
// Records of segments: read in shared memory until the warps have merged, when the query rows have long been given
// back. The record that takes a place waits for the tiles of the segment kSegments before it, those for that merge.
constexpr int kSegmentRecords = 2 * kSegments;
constexpr int kPending = 2;                   // pairs that a range shares: at either end
constexpr int kLoads = !kBulk ? 1 : kSlots < 8 ? kSlots : 8;  // tiles whose copies lanes start side by side

static_assert(kDim % 16 == 0 && kDim <= 256 && kBlock % 8 == 0 && kRows <= 16, "see decode_shape.py");
// A slot belongs to one stream: a warp of another could come to wait for its second round while the first is still on its
// way, and take the round before that, which has the same parity, for the one it waits for.
static_assert(kSlots % kStreams == 0, "see decode_shape.py");

// Tiles of 16 columns that warps exchange at a time when they merge: what fits into some 20 KB.
constexpr int exchanged_tiles() {
  int tiles = kDim / 16;
  while (tiles % 2 == 0 && kWarps * kRows * (tiles * 16 + 4) * 4 > 20480) tiles /= 2;
  return tiles;
}
constexpr int kExchangedTiles = exchanged_tiles();
constexpr int kExchangeStride = kExchangedTiles * 16 + 4;  // floats; the 4 spread rows over the banks

// A run of a CTA's tiles that belong to one pair.
struct Segment {
  int first_item, last_item;  // of the CTA's tiles
  int first_tile;             // of the pair's
  int head, row, rows;        // KV head, first packed query row, number of rows
  int q_start, q_len, kv_len;
  int range, first_range;     // this one, and the first one with a part of this pair
  int sharers;                // ranges with a part of this pair; 1: this one holds all
  int stop;                   // 1: there is no more, all else is undefined
};

struct alignas(128) Shared {
  unsigned char ring[kSlots][2 * kTileBytes];  // K rows, then V rows
  uint16_t q[kSegments][kSuperRows * kDim];
  float exchange[kWarps * kRows * kExchangeStride];
  float2 max_sum[kWarps][kRows];
  alignas(16) float2 scales[kSlots][2];  // K's and V's of an FP8 tile, of its head and the one that shares 16 bytes with it
  Segment segments[kSegmentRecords];
  uint32_t formats[kSlots];
  uint64_t full[kSlots], empty[kSlots], segment_full[kSegments], segment_empty[kSegments];
  Segment pending[kPending];  // whose partials are written, but not yet told of
  uint32_t arrived[kPending];
  int pending_pairs;  // how many of these there are; the first computing thread's, until the range's end
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "decode.py computes this");

struct DecodeParams {
  const uint16_t* q;        // [T, Hq, D], strides below
  uint16_t* out;            // [T, Hq, D]
  float* lse;               // [T, Hq] contiguous, or null: natural log of the softmax's denominator
  const uint32_t* tables;   // [S, table_stride]
  const Range* plan;        // this layer kind's
  float* partials;          // [max_ranges][2][rows][D], then [max_ranges][2][rows] (max, sum)
  uint32_t* counters;       // [max_ranges], zero before the first launch ever
  const float* sinks;       // [Hq] or null
  unsigned long long* trace;
  const unsigned char* slabs[8];
  int64_t unit_bytes;
  int64_t layer_offset;     // elements
  int64_t scale_offset;     // bytes of an FP8 block before this layer's scales
  int64_t q_token, q_head, out_token, out_head;  // strides in elements
  int table_stride, max_ranges, kv_heads, window, chunk;
  float scale, softcap;
};

// Bytes from an FP8 block's start to its scales of one head.
__device__ __forceinline__ int64_t scales_at(const DecodeParams& p, int head) { return p.scale_offset + head * 8; }

// Which of a slot's scales are a head's.
__device__ __forceinline__ int scales_half(const DecodeParams& p, int head) { return scales_at(p, head) >> 3 & 1; }
