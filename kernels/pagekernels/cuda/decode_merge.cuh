// Joining partial results: of a CTA's warps in shared memory, of ranges by the last to be done, always in one order.
#pragma once
#include "decode_softmax.cuh"

// Where a range's partial of a pair lies: of one that begins in an earlier range at 0, else at 1.
__device__ __forceinline__ int64_t partial_row(int range, bool continued) {
  return (int64_t(range) * 2 + (continued ? 0 : 1)) * kSuperRows;
}

__device__ __forceinline__ float2* partial_sums(const DecodeParams& p) {
  return reinterpret_cast<float2*>(p.partials + int64_t(p.max_ranges) * 2 * kSuperRows * kDim);
}

// Reference and sum of a row over the streams of its query tile.
__device__ __forceinline__ float2 merged_sum(const Shared& shared, int query_tile, int row) {
  float reference = kLowest, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kStreams; ++i)
    reference = fmaxf(reference, shared.max_sum[i * kQueryTiles + query_tile][row].x);
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float2 part = shared.max_sum[i * kQueryTiles + query_tile][row];
    sum += part.y * exp2_fast(part.x - reference);
  }
  return {reference, sum};
}

// What a finished row's weights are divided by, and its log-sum-exp: the sink, if any, only joins the denominator.
__device__ __forceinline__ float finish(const DecodeParams& p, float2 total, int head, int64_t token) {
  float factor = 1.0f;
  if (kFeatures && p.sinks) {
    const float sink = __ldg(p.sinks + head) * kLog2e, reference = fmaxf(total.x, sink);
    factor = exp2_fast(total.x - reference);
    total = {reference, total.y * factor + exp2_fast(sink - reference)};
  }
  if (p.lse && total.y > 0.0f) p.lse[token * (p.kv_heads * kGroup) + head] = (total.x + log2f(total.y)) / kLog2e;
  return total.y > 0.0f ? factor / total.y : 0.0f;
}

struct RowPlace {
  int head;
  int64_t token;
};

__device__ __forceinline__ RowPlace place_of(const Segment& segment, int row) {
  const int packed = segment.row + row;
  return {segment.head * kGroup + packed % kGroup, segment.q_start + packed / kGroup};
}

template <int kCount>
__device__ __forceinline__ void store_out(const DecodeParams& p, RowPlace place, int column, const float (&x)[kCount]) {
  uint32_t pairs[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) pairs[i] = pack_pair<kF16>(x[2 * i], x[2 * i + 1]);
  store_kept(p.out + place.token * p.out_token + place.head * p.out_head + column, pairs);
}

// Sum what the streams left of columns [column, column + kExchangedTiles * 16) and write it out, or to the partials.
__device__ __forceinline__ void sum_streams(const DecodeParams& p, const Shared& shared, const Segment& record,
                                            int column, int thread) {
  const Segment segment = record;  // by now there are registers for it
  constexpr int kPairs = kExchangedTiles * 8;
  const bool whole = segment.sharers == 1;
  for (int i = thread; i < segment.rows * kPairs; i += kThreads) {
    const int row = i / kPairs, pair = i % kPairs, query_tile = row / kRows;
    float x[2] = {0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kStreams; ++w) {
      const int from = ((w * kQueryTiles + query_tile) * kRows + row % kRows) * kExchangeStride + pair * 2;
      const float2 part = *reinterpret_cast<const float2*>(&shared.exchange[from]);
      x[0] += part.x, x[1] += part.y;
    }
    const int at = column + pair * 2;
    if (whole) {
      const RowPlace place = place_of(segment, row);
      const float factor = finish(p, merged_sum(shared, query_tile, row % kRows), place.head, place.token);
      x[0] *= factor, x[1] *= factor;
      store_out(p, place, at, x);
    } else {
      const int range = segment.range;
      const int64_t to = partial_row(range, range != segment.first_range) + row;
      *reinterpret_cast<float2*>(p.partials + to * kDim + at) = {x[0], x[1]};
      if (at == 0) partial_sums(p)[to] = merged_sum(shared, query_tile, row % kRows);
    }
  }
}

// A lane's sums of one run of columns, times its rows' factors, into the warp's part of the exchange; `begun`: to what
// is there already.
__device__ __forceinline__ void leave_sums(Shared& shared, const Sums& sums, const float (&factors)[kRowTiles][2],
                                           int first, bool in_fp8_order, bool begun, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int c = 0; c < kExchangedTiles; ++c)
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * n + 2 * t + (i & 1), d = 16 * c + (in_fp8_order ? 2 * g + i / 2 : i / 2 * 8 + g);
        if (row >= kRows) continue;
        float& to = shared.exchange[(warp * kRows + row) * kExchangeStride + d];
        const float x = sums[first + c][n][i] * factors[n][i & 1];
        to = begun ? to + x : x;
      }
}

// All computing warps: this segment's result of the CTA.
__device__ __forceinline__ void merge_warps(const DecodeParams& p, Shared& shared, Softmax& state,
                                            const Segment& segment, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const int query_tile = warp % kQueryTiles, g = lane >> 2, t = lane & 3;
  float factors[1 + kApart][kRowTiles][2];
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * n + 2 * t + e;
      const float sum = rows_sum(state.sum[n][e]);
      if (g == 0 && row < kRows) shared.max_sum[warp][row] = {state.reference[n][e], sum};
    }
  sync_computing();
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = min(8 * n + 2 * t + e, kRows - 1);
      const float factor = exp2_fast(state.reference[n][e] - merged_sum(shared, query_tile, row).x);
#pragma unroll
      for (int part = 0; part <= kApart; ++part) factors[part][n][e] = factor * exp2_fast(-state.places[part]);
    }
#pragma unroll
  for (int first = 0; first < kValueTiles; first += kExchangedTiles) {
    if (first) sync_computing();
    leave_sums(shared, state.sums[0], factors[0], first, false, false, warp, lane);
    if (kApart) {
      __syncwarp();
      leave_sums(shared, state.sums[kApart], factors[kApart], first, true, true, warp, lane);
    }
    sync_computing();
    sum_streams(p, shared, segment, first * 16, thread);
  }
}

constexpr int kJoined = kSuperRows * kDim / 4 * 4 >= kThreads * 3 ? 4 : 2;  // columns a thread takes
constexpr int kAtOnce = 16;                                                 // partials whose loads overlap

struct Joined {
  float x[kJoined];
  float2 total;
};

// kAtOnce partials of one row and column, from range `at` on, joined to `sum`.
__device__ __forceinline__ void join_some(const DecodeParams& p, Joined& sum, const Segment& segment, int at, int row,
                                          int column) {
  float2 totals[kAtOnce];
  float parts[kAtOnce][kJoined];
  const int end = segment.first_range + segment.sharers;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int range = min(at + i, end - 1);
    const int64_t from = partial_row(range, range != segment.first_range) + row;
    totals[i] = __ldcg(partial_sums(p) + from);
    const float* x = p.partials + from * kDim + column;
#pragma unroll
    for (int j = 0; j < kJoined; j += 2) {
      const float2 pair = __ldcg(reinterpret_cast<const float2*>(x + j));
      parts[i][j] = pair.x, parts[i][j + 1] = pair.y;
    }
  }
  float reference = sum.total.x;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) reference = fmaxf(reference, totals[i].x);
  const float old = exp2_fast(sum.total.x - reference);
  sum.total = {reference, sum.total.y * old};
#pragma unroll
  for (int j = 0; j < kJoined; ++j) sum.x[j] *= old;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const float weight = at + i < end ? exp2_fast(totals[i].x - reference) : 0.0f;
    sum.total.y += totals[i].y * weight;
#pragma unroll
    for (int j = 0; j < kJoined; ++j) sum.x[j] += parts[i][j] * weight;
  }
}

__device__ __forceinline__ void join_ranges(const DecodeParams& p, const Segment& segment, int thread) {
  for (int i = thread; i < segment.rows * (kDim / kJoined); i += kThreads) {
    const int row = i / (kDim / kJoined), column = i % (kDim / kJoined) * kJoined;
    Joined sum = {{}, {kLowest, 0.0f}};
    const int end = segment.first_range + segment.sharers;
    for (int at = segment.first_range; at < end; at += kAtOnce) join_some(p, sum, segment, at, row, column);
    const RowPlace place = place_of(segment, row);
    const float factor = finish(p, sum.total, place.head, place.token);
#pragma unroll
    for (int j = 0; j < kJoined; ++j) sum.x[j] *= factor;
    store_out(p, place, column, sum.x);
  }
}

// At the CTA's end, once for all pairs that it shares, since a fence takes long while memory is busy: who comes last to a
// pair joins it. What the others wrote is then visible to all threads.
__device__ __forceinline__ void join_pending(const DecodeParams& p, Shared& shared, int pending, int thread) {
  if (thread < pending) {
    const Segment& segment = shared.pending[thread];
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(shared.arrived[thread])
                 : "l"(p.counters + segment.first_range), "r"(segment.sharers - 1) : "memory");
  }
  sync_computing();
  for (int i = 0; i < pending; ++i) {
    const Segment segment = shared.pending[i];
    if (shared.arrived[i] == segment.sharers - 1) join_ranges(p, segment, thread);
  }
}
