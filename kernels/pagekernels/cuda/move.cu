// Copies whole blocks. Twin: TwinOps.copy_blocks. Host side: move.py.
#include "common.cuh"

// Pairs of one launch: by value, since the parameters of a launch may have 4 KB.
constexpr int kPairs = 256;

struct CopyParams {
  Slabs slabs;
  int64_t unit_bytes;
  int pairs, pieces;  // pieces of a block: of the largest, if formats differ
  uint32_t sources[kPairs], targets[kPairs];
};

constexpr int kThreads = 256, kVectors = 4;
constexpr int64_t kPiece = kThreads * kVectors * sizeof(uint4);

__device__ __forceinline__ void copy_piece(const uint8_t* from, uint8_t* to, int64_t first, int64_t bytes) {
  uint4 held[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = first + i * kThreads * sizeof(uint4);
    if (at < bytes) held[i] = __ldcs(reinterpret_cast<const uint4*>(from + at));
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = first + i * kThreads * sizeof(uint4);
    if (at < bytes) __stcs(reinterpret_cast<uint4*>(to + at), held[i]);
  }
}

// The grid takes all pieces of all pairs in turns: whole waves, whatever the number of blocks.
extern "C" __global__ void __launch_bounds__(kThreads) copy_blocks(const __grid_constant__ CopyParams p) {
  for (int i = blockIdx.x; i < p.pairs * p.pieces; i += gridDim.x) {
    const int pair = i / p.pieces;
    const uint32_t source = p.sources[pair], target = p.targets[pair];
    const int64_t first = (i % p.pieces) * kPiece + threadIdx.x * sizeof(uint4);
    copy_piece(block_address(p.slabs, source, p.unit_bytes), block_address(p.slabs, target, p.unit_bytes), first,
               item_bytes(entry_format(source)) * p.unit_bytes);
  }
}
