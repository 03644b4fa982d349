// Where a block's bytes lie and what they mean: table entries, swizzled rows, element formats. See layout.py.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstdint>

// pagekernels.layout.Format
constexpr int kFormatF32 = 1, kFormatF16 = 2, kFormatBF16 = 3, kFormatFp8 = 4;

constexpr int kMaxSlabs = 8;

// By value into a kernel: the slabs that entries may name; unmapped ones are null.
struct Slabs {
  uint8_t* base[kMaxSlabs];
};

__host__ __device__ constexpr int item_bytes(int format) {
  return format == kFormatF32 ? 4 : format == kFormatFp8 ? 1 : 2;
}

__device__ __forceinline__ int entry_format(uint32_t entry) { return entry >> 29; }
__device__ __forceinline__ int entry_slab(uint32_t entry) { return (entry >> 26) & (kMaxSlabs - 1); }
__device__ __forceinline__ uint32_t entry_unit(uint32_t entry) { return entry & ((1u << 26) - 1); }

__device__ __forceinline__ uint8_t* block_address(const Slabs& slabs, uint32_t entry, int64_t unit_bytes) {
  return slabs.base[entry_slab(entry)] + entry_unit(entry) * unit_bytes;
}

// Bytes from a row's start to byte `byte` of it as it is stored: rows of whole groups of 8 chunks are swizzled.
__device__ __forceinline__ int swizzled(int row, int byte, int row_bytes) {
  if (row_bytes % 128 != 0) return byte;
  const int flip = (row & 1) << 2 | ((row >> 1) & 3);
  return byte ^ flip << 4;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_storage_t x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}

// Rounded to nearest, ties to even; too large becomes infinity.
__device__ __forceinline__ void from_float(float x, float& to) { to = x; }
__device__ __forceinline__ void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

template <int format>
struct Element;
template <>
struct Element<kFormatF32> {
  using type = float;
};
template <>
struct Element<kFormatF16> {
  using type = __half;
};
template <>
struct Element<kFormatBF16> {
  using type = __nv_bfloat16;
};
template <>
struct Element<kFormatFp8> {
  using type = __nv_fp8_storage_t;
};

// N elements that are loaded and stored at once, by vectors of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Group {
  T item[N];
};

// Part of a group that lies in one chunk: all of it, but for float32 at most 4 elements.
template <typename T, int N>
constexpr int kRun = sizeof(T) * N < 16 ? N : 16 / sizeof(T);

// N elements from element `first` of a stored row on; N divides `first` and the row's length.
template <typename T, int N>
__device__ __forceinline__ Group<T, N> load_stored(const uint8_t* rows, int row, int first, int dim) {
  Group<T, N> group;
  constexpr int run = kRun<T, N>;
  const int row_bytes = dim * sizeof(T);
#pragma unroll
  for (int i = 0; i < N; i += run) {
    const uint8_t* at = rows + row * row_bytes + swizzled(row, (first + i) * sizeof(T), row_bytes);
    *reinterpret_cast<Group<T, run>*>(&group.item[i]) = *reinterpret_cast<const Group<T, run>*>(at);
  }
  return group;
}

template <typename T, int N>
__device__ __forceinline__ void store_stored(uint8_t* rows, int row, int first, int dim, const Group<T, N>& group) {
  constexpr int run = kRun<T, N>;
  const int row_bytes = dim * sizeof(T);
#pragma unroll
  for (int i = 0; i < N; i += run) {
    uint8_t* at = rows + row * row_bytes + swizzled(row, (first + i) * sizeof(T), row_bytes);
    *reinterpret_cast<Group<T, run>*>(at) = *reinterpret_cast<const Group<T, run>*>(&group.item[i]);
  }
}

template <typename T, int N>
__device__ __forceinline__ Group<float, N> widened(const Group<T, N>& group, float scale) {
  Group<float, N> wide;
#pragma unroll
  for (int i = 0; i < N; ++i) wide.item[i] = to_float(group.item[i]) * scale;
  return wide;
}

// The same as float32, whatever the block's format; `scale` is 1 but for FP8.
template <int N>
__device__ __forceinline__ Group<float, N> load_wide(int format, const uint8_t* rows, int row, int first, int dim,
                                                     float scale) {
  switch (format) {
    case kFormatF32: return load_stored<float, N>(rows, row, first, dim);
    case kFormatF16: return widened(load_stored<__half, N>(rows, row, first, dim), 1.0f);
    case kFormatBF16: return widened(load_stored<__nv_bfloat16, N>(rows, row, first, dim), 1.0f);
    default: return widened(load_stored<__nv_fp8_storage_t, N>(rows, row, first, dim), scale);
  }
}

template <typename T, int N>
__device__ __forceinline__ Group<T, N> narrowed(const Group<float, N>& wide) {
  Group<T, N> group;
#pragma unroll
  for (int i = 0; i < N; ++i) from_float(wide.item[i], group.item[i]);
  return group;
}

// The largest power of two that divides both, at most 8: elements that a thread moves at once.
__host__ __device__ constexpr int group_size(int dim) {
  return dim % 8 == 0 ? 8 : dim % 4 == 0 ? 4 : dim % 2 == 0 ? 2 : 1;
}

// One layer's rows within a block. By value into a kernel; packed by ops.py.
struct LayerPlace {
  int64_t unit_bytes;
  int64_t elements;  // of the block before the layer
  int64_t scales;    // bytes of an FP8 block before the layer's scales
  int kv_heads, block_shift;  // block_size == 1 << block_shift
};

// K rows [B, K_DIM] and V rows [B, V_DIM] of one KV head in one block, and what FP8 values are multiplied with.
struct BlockRows {
  int format;
  const uint8_t *k, *v;
  float k_scale, v_scale;
};

template <int k_dim, int v_dim>
__device__ __forceinline__ BlockRows block_rows(const Slabs& slabs, const LayerPlace& place, uint32_t entry, int head) {
  BlockRows rows;
  rows.format = entry_format(entry);
  const uint8_t* block = block_address(slabs, entry, place.unit_bytes);
  const int item = item_bytes(rows.format);
  const int64_t first = place.elements + (int64_t(head) * (k_dim + v_dim) << place.block_shift);
  rows.k = block + first * item;
  rows.v = rows.k + (int64_t(k_dim) << place.block_shift) * item;
  rows.k_scale = rows.v_scale = 1.0f;
  if (rows.format == kFormatFp8) {
    const float2 scales = *reinterpret_cast<const float2*>(block + place.scales + head * 8);
    rows.k_scale = scales.x;
    rows.v_scale = scales.y;
  }
  return rows;
}
