// Copies whole blocks. Twin: TwinOps.copy_blocks. Host side: move.py.
#include "common.cuh"

// Pairs of one launch: by value, since the parameters of a launch may have 4 KB.
constexpr int kPairs = 256;

struct CopyParams {
  Slabs slabs;
  int64_t unit_bytes;
  uint32_t sources[kPairs], targets[kPairs];
};

// blockIdx.y is the pair, blockIdx.x a piece of it. A grid of as many CTAs as are resident, taking pieces in turns, is
// no faster for many blocks and slower for few (kernels/bench/cuda_moves.md).
constexpr int kThreads = 256, kVectors = 4;
constexpr int64_t kPiece = kThreads * kVectors * sizeof(uint4);

extern "C" __global__ void __launch_bounds__(kThreads) copy_blocks(const __grid_constant__ CopyParams p) {
  const uint32_t source = p.sources[blockIdx.y], target = p.targets[blockIdx.y];
  const int64_t bytes = item_bytes(entry_format(source)) * p.unit_bytes;
  const int64_t first = blockIdx.x * kPiece + threadIdx.x * sizeof(uint4);
  const uint8_t* from = block_address(p.slabs, source, p.unit_bytes);
  uint8_t* to = block_address(p.slabs, target, p.unit_bytes);
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
