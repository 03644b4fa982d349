// Writes the K and V of a step's tokens into their slots. Twin: TwinOps.append. Host side: move.py.
//
// A CTA takes one token, a thread one group of elements at a time. Defines: FORMAT (native), INPUT (element format of k
// and v: FORMAT or float32), K_DIM, V_DIM, and ALIGNED (1: rows of k and v start at multiples of their groups' bytes).
#include "common.cuh"

using Stored = Element<FORMAT>::type;
using Input = Element<INPUT>::type;

struct AppendParams {
  const Input *k, *v;    // [T, H, K_DIM] and [T, H, V_DIM]; strides in elements
  const int64_t* slots;  // [T]; negative: padding
  uint8_t* slab;
  int64_t k_token, k_head, v_token, v_head;
  LayerPlace place;
};

template <int N>
__device__ __forceinline__ Group<Stored, N> load_input(const Input* from) {
  Group<Input, N> group;
  if (ALIGNED) {
    group = *reinterpret_cast<const Group<Input, N>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) group.item[i] = from[i];
  }
  if constexpr (FORMAT == INPUT) {
    return group;
  } else {
    Group<float, N> wide;
#pragma unroll
    for (int i = 0; i < N; ++i) wide.item[i] = group.item[i];
    return narrowed<Stored, N>(wide);
  }
}

// All heads of a token, K or V.
template <int dim>
__device__ __forceinline__ void append_rows(const Input* from, int64_t head_stride, uint8_t* rows, int row, int heads,
                                            int64_t head_bytes) {
  constexpr int N = group_size(dim), per_row = dim / N;
  for (int i = threadIdx.x; i < heads * per_row; i += blockDim.x) {
    const int head = i / per_row, first = i % per_row * N;
    store_stored<Stored, N>(rows + head * head_bytes, row, first, dim, load_input<N>(from + head * head_stride + first));
  }
}

extern "C" __global__ void __launch_bounds__(256) append(const AppendParams p) {
  const int64_t slot = p.slots[blockIdx.x];
  if (slot < 0) return;
  const int shift = p.place.block_shift;
  const int row = slot & ((1 << shift) - 1);
  uint8_t* k = p.slab + (slot >> shift) * p.place.unit_bytes + p.place.elements * sizeof(Stored);
  const int64_t head_bytes = int64_t(K_DIM + V_DIM) * sizeof(Stored) << shift;
  uint8_t* v = k + (int64_t(K_DIM) * sizeof(Stored) << shift);
  append_rows<K_DIM>(p.k + blockIdx.x * p.k_token, p.k_head, k, row, p.place.kv_heads, head_bytes);
  append_rows<V_DIM>(p.v + blockIdx.x * p.v_token, p.v_head, v, row, p.place.kv_heads, head_bytes);
}
