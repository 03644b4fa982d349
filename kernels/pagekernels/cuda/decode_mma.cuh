// Tensor core instructions and the fragments they take. Lane l is (g = l / 4, t = l % 4) everywhere.
#pragma once
#include <cuda_fp16.h>

#include "decode_async.cuh"

// D[16 x 8] += A[16 x 16] B[16 x 8], 16-bit inputs.
template <bool kHalf>
__device__ __forceinline__ void mma16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if (kHalf)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same over 8 of k: a tile of a block of 8.
template <bool kHalf>
__device__ __forceinline__ void mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if (kHalf)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}

// Over the tokens of one tile, 16 or 8.
template <bool kHalf>
__device__ __forceinline__ void mma_tokens(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if (kTile == 16)
    mma16<kHalf>(d, a, b0, b1);
  else
    mma8<kHalf>(d, a[0], a[1], b0);
}

// Two floats as the 16-bit pair that holds `low` in its low half.
template <bool kHalf>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t pair;
  if (kHalf)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two bf16 as two f16, exact but for what f16 has no exponent for.
__device__ __forceinline__ uint32_t half_pair(uint32_t native) {
  return kF16 ? native : pack_pair<true>(__uint_as_float(native << 16), __uint_as_float(native & 0xffff0000u));
}

// Two E4M3 bytes (the low 16 bits) as two f16, exact.
__device__ __forceinline__ uint32_t half_pair_of_fp8(uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("{ .reg .b16 b; mov.b32 {b, _}, %1; cvt.rn.f16x2.e4m3x2 %0, b; }" : "=r"(pair) : "r"(bytes));
  return pair;
#else
  // Sign to bit 15, the rest to bits 13..7: the value times 2^-8, subnormals included. E4M3 has one NaN, 0x7f.
  const uint32_t spread = __byte_perm(bytes, 0, 0x1404);  // byte 0 to bits 15..8, byte 1 to bits 31..24
  const uint32_t scaled = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  const __half2 factor = __floats2half2_rn(256.0f, 256.0f);
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&scaled), factor);
  return *reinterpret_cast<const uint32_t*>(&value);
#endif
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What the chunks of token row `row` are XORed with (layout.py, swizzle).
template <int kRowBytes>
__device__ __forceinline__ int swizzle(int row) {
  return kRowBytes % 128 == 0 ? (row & 1) << 2 | (row >> 1 & 3) : 0;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// An 8 x 8 matrix of 16-bit elements, of which lane l has row l / 4, columns 2 (l % 4) and the next one, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t other;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

// Four, two or one transposed 8 x 8 matrices of 16-bit elements; lanes give the rows' addresses in turn.
__device__ __forceinline__ void load_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}

__device__ __forceinline__ void load_transposed(uint32_t (&m)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(m[0]), "=r"(m[1]) : "r"(address));
}

__device__ __forceinline__ void load_transposed(uint32_t (&m)[1], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(m[0]) : "r"(address));
}
