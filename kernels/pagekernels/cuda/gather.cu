// Reads a prefix of a sequence into contiguous rows, for prefill. Twin: TwinOps.gather. Host side: move.py.
//
// A warp takes the K or the V rows of up to 16 tokens of one block and head: one contiguous run of the block, and the
// warps of a CTA take runs that follow each other. Defines: FORMAT (native), OUTPUT (element format of k and v: FORMAT
// or float32), K_DIM, V_DIM, and ALIGNED (1: rows of k and v start at multiples of their groups' bytes).
#include "common.cuh"

using Output = Element<OUTPUT>::type;

constexpr int kWarps = 8, kThreads = kWarps * 32, kRunTokens = 16;
// CTAs of a multiprocessor: as many as registers allow for.
constexpr int kResident = OUTPUT == kFormatF32 || K_DIM > 128 || V_DIM > 128 ? 3 : 5;

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

template <int dim>
constexpr bool kWhole = ALIGNED && dim * sizeof(Output) % 16 == 0;  // whether rows are whole 16-byte chunks on either side

// Left to itself the compiler takes such a store apart, into four.
__device__ __forceinline__ void store_chunk(void* to, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// A whole run of kTokens rows from `rows` on, a row of the block whose number is a multiple of 8, in the output's format,
// to `to`. Its loads go ahead of its stores, so that enough bytes are on their way, and where each lane keeps to one
// column nothing is checked: with few registers more warps are resident.
template <int dim, int kTokens>
__device__ __forceinline__ void gather_whole(const uint8_t* rows, Output* to, int64_t stride) {
  constexpr int kRowBytes = dim * sizeof(Output), per_row = kRowBytes / 16, kChunks = kTokens * per_row;
  constexpr int kTurns = (kChunks + 31) / 32, kAhead = kTurns < 8 ? kTurns : 8;
  constexpr bool kEven = 32 % per_row == 0 && kTurns % kAhead == 0 && kChunks % 32 == 0;
  constexpr int kRows = 32 / per_row;  // that a warp takes at once
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kAhead) {
    uint4 held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = (turn + i) * 32 + lane, row = kEven ? (turn + i) * kRows + lane / per_row : at / per_row;
      const uint8_t* from = rows + row * kRowBytes + swizzled(row, at % per_row * 16, kRowBytes);
      if (kEven || at < kChunks) held[i] = *reinterpret_cast<const uint4*>(from);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = (turn + i) * 32 + lane, row = kEven ? (turn + i) * kRows + lane / per_row : at / per_row;
      Output* target = to + row * stride + at % per_row * (16 / sizeof(Output));
      if (kEven || at < kChunks) store_chunk(target, held[i]);
    }
  }
}

// Tokens [begin, end) of the block, whose first token goes to `to`; `raw`: they are of the output's format.
template <int dim, bool raw>
__device__ __forceinline__ void gather_run(int format, const uint8_t* rows, float scale, int begin, int end, Output* to,
                                           int64_t stride) {
  constexpr int N = group_size(dim), per_row = dim / N, kAhead = 2;
  const int count = (end - begin) * per_row;
#pragma unroll 1
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
  if constexpr (kWhole<dim>) {
    const int count = end - begin;
    if (format == OUTPUT && begin % 8 == 0 && (count == 8 || count == kRunTokens)) {
      rows += begin * dim * static_cast<int>(sizeof(Output));
      if (count == 8) gather_whole<dim, 8>(rows, to, stride);
      else gather_whole<dim, kRunTokens>(rows, to, stride);
      return;
    }
  }
  if (format == OUTPUT) gather_run<dim, true>(format, rows, scale, begin, end, to, stride);
  else gather_run<dim, false>(format, rows, scale, begin, end, to, stride);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) gather(const __grid_constant__ GatherParams p) {
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
