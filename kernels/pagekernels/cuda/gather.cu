// Reads a prefix of a sequence into contiguous rows, for prefill. Twin: TwinOps.gather. Host side: move.py.
//
// A warp takes the K or the V rows of up to 16 tokens of one block and head: one contiguous run of the block, and the
// warps of a CTA take runs that follow each other. Defines: FORMAT (native), OUTPUT (element format of k and v: FORMAT
// or float32), K_DIM, V_DIM, and ALIGNED (1: rows of k and v start at multiples of their groups' bytes).
#include "common.cuh"

using Output = Element<OUTPUT>::type;

constexpr int kWarps = 8, kThreads = kWarps * 32, kRunTokens = 16;

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

// Tokens [begin, end) of the block, whose first token goes to `to`; `raw`: they are of the output's format. Loads go
// ahead of stores, so that enough bytes are on their way.
template <int dim, bool raw>
__device__ __forceinline__ void gather_run(int format, const uint8_t* rows, float scale, int begin, int end, Output* to,
                                           int64_t stride) {
  constexpr int N = group_size(dim), per_row = dim / N, kBytes = N * sizeof(Output);
  constexpr int kAhead = !raw ? 2 : kBytes < 16 ? 4 : 128 / kBytes;
  const int count = (end - begin) * per_row;
  for (int base = threadIdx.x % 32; base < count; base += 32 * kAhead) {
    Group<Output, N> held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * 32, row = begin + at / per_row, first = at % per_row * N;
      if (at >= count) continue;
      if (raw) held[i] = load_stored<Output, N>(rows, row, first, dim);
      else held[i] = narrowed<Output, N>(load_wide<N>(format, rows, row, first, dim, scale));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * 32;
      if (at < count) store_output<N>(to + at / per_row * stride + at % per_row * N, held[i]);
    }
  }
}

template <int dim>
__device__ __forceinline__ void gather_rows(int format, const uint8_t* rows, float scale, int begin, int end, Output* to,
                                            int64_t stride) {
  if (format == OUTPUT) gather_run<dim, true>(format, rows, scale, begin, end, to, stride);
  else gather_run<dim, false>(format, rows, scale, begin, end, to, stride);
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) gather(const __grid_constant__ GatherParams p) {
  const int shift = min(p.place.block_shift, 4), tokens = 1 << shift;  // of a run
  const int item = blockIdx.x * kWarps + threadIdx.x / 32;
  const int head = item / 2 % p.place.kv_heads, run = item / 2 / p.place.kv_heads + (p.first >> shift);
  const int begin = max(run << shift, p.first), end = min((run << shift) + tokens, p.first + p.length);
  if (begin >= end) return;
  const uint32_t entry = p.table[begin >> p.place.block_shift];
  const BlockRows rows = block_rows<K_DIM, V_DIM>(p.slabs, p.place, entry, head);
  const int row = begin & ((1 << p.place.block_shift) - 1), last = row + end - begin;
  const int64_t token = begin - p.first;
  if (item % 2 == 0) {
    gather_rows<K_DIM>(rows.format, rows.k, rows.k_scale, row, last, p.k + head * p.k_head + token * p.k_token, p.k_token);
  } else {
    gather_rows<V_DIM>(rows.format, rows.v, rows.v_scale, row, last, p.v + head * p.v_head + token * p.v_token, p.v_token);
  }
}
