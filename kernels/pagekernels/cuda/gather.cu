// Reads a prefix of a sequence into contiguous rows, for prefill. Twin: TwinOps.gather. Host side: ops.py.
//
// A CTA takes TOKENS tokens of one KV head. Defines: FORMAT (native, read without conversion), OUTPUT (element format of
// k and v: FORMAT or float32), K_DIM, V_DIM, and ALIGNED (1: rows of k and v start at multiples of their groups' bytes).
#include "common.cuh"

using Output = Element<OUTPUT>::type;

constexpr int kThreads = 256, kTokens = 32;

struct GatherParams {
  Output *k, *v;          // element [head][token][d], strides below
  const uint32_t* table;  // of the sequence
  int64_t k_head, k_token, v_head, v_token;
  Slabs slabs;
  LayerPlace place;
  int first, length;      // tokens [first, first + length) of the sequence; token `first` goes to row 0
};

template <int N>
__device__ __forceinline__ void store_output(Output* to, const Group<Output, N>& group) {
  if (ALIGNED) {
    *reinterpret_cast<Group<Output, N>*>(to) = group;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = group.item[i];
  }
}

template <int N>
__device__ __forceinline__ Group<Output, N> load_output(int format, const uint8_t* rows, int row, int first, int dim,
                                                        float scale) {
  if (format == OUTPUT) return load_stored<Output, N>(rows, row, first, dim);
  return narrowed<Output, N>(load_wide<N>(format, rows, row, first, dim, scale));
}

// K or V of this CTA's tokens. Loads go ahead of stores, kAhead at a time, so that enough bytes are on their way.
template <int dim, bool is_k>
__device__ __forceinline__ void gather_rows(const GatherParams& p, int begin, int head, Output* to, int64_t stride) {
  constexpr int N = group_size(dim), per_row = dim / N, kAhead = 4;
  const int tokens = min(kTokens, p.length - begin), shift = p.place.block_shift;
  Group<Output, N> held[kAhead];
  for (int base = threadIdx.x; base < tokens * per_row; base += kThreads * kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * kThreads, token = p.first + begin + at / per_row;
      if (at >= tokens * per_row) break;
      const BlockRows rows = block_rows<K_DIM, V_DIM>(p.slabs, p.place, p.table[token >> shift], head);
      held[i] = load_output<N>(rows.format, is_k ? rows.k : rows.v, token & ((1 << shift) - 1), at % per_row * N, dim,
                               is_k ? rows.k_scale : rows.v_scale);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * kThreads;
      if (at >= tokens * per_row) break;
      store_output<N>(to + at / per_row * stride + at % per_row * N, held[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gather(const GatherParams p) {
  const int begin = blockIdx.x * kTokens, head = blockIdx.y;
  gather_rows<K_DIM, true>(p, begin, head, p.k + head * p.k_head + begin * p.k_token, p.k_token);
  gather_rows<V_DIM, false>(p, begin, head, p.v + head * p.v_head + begin * p.v_token, p.v_token);
}
