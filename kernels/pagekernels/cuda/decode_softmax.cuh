// The online softmax of one warp over the tiles of a segment: Milakov and Gimelshein, arXiv 1805.02867. The reference that
// weights are taken from is not the largest score, but within 2^kSlack of it.
#pragma once
#include "decode_tile.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowest = -1e30f;  // a maximum of nothing: finite, so that no infinity meets its like
// log2 of how far weights may rise above 1 before their reference follows: most tiles then need no common maximum.
constexpr float kSlack = 2.0f;
// Where f16 weights, times an FP8 block's V scale, are placed: high, since f16 has no exponent below 2^-24, and 2^kSlack,
// a scale's fraction and the weight itself have to fit above.
constexpr int kPlaced = 12, kPlacedSlack = 8;

// What lane (g, t) holds of query rows 8 n + 2 t + e, at [n][e]. Weights are 2^(s - reference); `sum` is over this lane's
// tokens alone. Sums [0] are over native tiles, and over FP8 tiles too unless those have their own, [kApart]. They are
// 2^places times too large.
struct Softmax {
  Sums sums[1 + kApart];
  int places[1 + kApart];
  float reference[kRowTiles][2], sum[kRowTiles][2];
};

struct Limits {
  int all_see;    // tokens up to and including this are seen by every row of the sequence
  int none_skip;  // tokens from here on are not too old for any row
};

__device__ __forceinline__ void scale_sums(Sums& sums, const float (&factors)[kRowTiles][2]) {
#pragma unroll
  for (int c = 0; c < kValueTiles; ++c)
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][n][i] *= factors[n][i & 1];
}

__device__ __forceinline__ void start_rows(Softmax& state) {
#pragma unroll
  for (int part = 0; part <= kApart; ++part) {
    state.places[part] = kF16 ? kPlaced : 0;
#pragma unroll
    for (int c = 0; c < kValueTiles; ++c)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.sums[part][c][n][i] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) state.reference[n][e] = kLowest, state.sum[n][e] = 0.0f;
}

__device__ __forceinline__ Limits limits_of(const DecodeParams& p, const Segment& segment) {
  int newest = 0;
  if (kFeatures && p.window) newest = segment.kv_len - p.window;
  if (kFeatures && p.chunk) newest = max(newest, (segment.kv_len - 1) / p.chunk * p.chunk);
  return {segment.kv_len - segment.q_len, newest};
}

constexpr int kScores = 2 * kTokenTiles;  // of a lane and n that mean something

// Scores in units of log2, capped; `factor` is softmax_scale (times an FP8 block's K scale).
__device__ __forceinline__ void scale_scores(const DecodeParams& p, Scores& s, float factor) {
  const bool capped = kFeatures && p.softcap > 0.0f;
  const float scaled = capped ? factor * (2.0f * kLog2e) / p.softcap : factor * kLog2e;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[n][i] *= scaled;
      // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x))
      if (capped) s[n][i] = p.softcap * kLog2e * (1.0f - __fdividef(2.0f, 1.0f + exp2_fast(fminf(s[n][i], 64.0f))));
    }
}

// Few tiles of a segment need it: which tokens a row sees is worked out for each, rather than held in registers.
__device__ __forceinline__ void mask_scores(const DecodeParams& p, Scores& s, const Segment& segment, int query_tile,
                                            int first_token, int lane) {
  const int before = segment.kv_len - segment.q_len;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = segment.row + query_tile * kRows + 8 * n + 2 * (lane & 3) + e;
      const int position = before + min(row / kGroup, segment.q_len - 1);
      int first_visible = 0;
      if (kFeatures && p.window) first_visible = max(0, position - p.window + 1);
      if (kFeatures && p.chunk) first_visible = max(first_visible, position / p.chunk * p.chunk);
#pragma unroll
      for (int i = e; i < kScores; i += 2) {
        const int token = first_token + i / 2 * 8 + (lane >> 2);
        if (token > position || (kFeatures && token < first_visible)) s[n][i] = -INFINITY;
      }
    }
}

// Over the lanes that hold other tokens of the same rows.
__device__ __forceinline__ float rows_max(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ void raise_reference(Softmax& state, const float (&top)[kRowTiles][2]) {
  float factors[kRowTiles][2];
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float reference = fmaxf(rows_max(top[n][e]), state.reference[n][e]);
      factors[n][e] = exp2_fast(state.reference[n][e] - reference);
      state.reference[n][e] = reference;
      state.sum[n][e] *= factors[n][e];
    }
#pragma unroll
  for (int part = 0; part <= kApart; ++part) scale_sums(state.sums[part], factors);
}

// Turns scores into weights in place.
__device__ __forceinline__ void weigh(Scores& s, Softmax& state) {
  float top[kRowTiles][2];
  bool higher = false;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[n][e] = fmaxf(s[n][e], s[n][kScores - 2 + e]);
      higher |= top[n][e] > state.reference[n][e] + kSlack;
    }
  if (__any_sync(~0u, higher)) raise_reference(state, top);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[n][i] = exp2_fast(s[n][i] - state.reference[n][i & 1]);
      state.sum[n][i & 1] += s[n][i];
    }
}

// Where a tile's weights times `scale` fit into f16 best, and within reach of that the sums stay as they are.
__device__ __forceinline__ void place_sums(Softmax& state, int part, float scale) {
  const int exponent = static_cast<int>(__float_as_uint(scale) >> 23 & 255) - 127;
  const int best = min(kPlaced - exponent, 100);  // 2^-100: the factor back is an ordinary number
  const int places = state.places[part];
  if (places <= best && places >= best - kPlacedSlack) return;
  float factors[kRowTiles][2];
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) factors[n][0] = factors[n][1] = exp2_fast(best - places);
  scale_sums(state.sums[part], factors);
  state.places[part] = best;
}

// One tile. `half`: which of the slot's scales are the head's.
__device__ __forceinline__ void attend_tile(const DecodeParams& p, Shared& shared, Softmax& state, const Queries& q,
                                            const Limits& limits, const Segment& segment, int slot, int first_token,
                                            int half, int query_tile, int lane) {
  const bool fp8 = kFp8 && shared.formats[slot] == 4;
  const float2 scales = fp8 ? shared.scales[slot][half] : float2{1.0f, 1.0f};
  const int row_bytes = fp8 ? kDim : 2 * kDim;
  unsigned char* const values = shared.ring[slot] + kTile * row_bytes;
  const bool newest = first_token + kTile - 1 > limits.all_see;  // all tiles that reach beyond kv_len are among these
  if (newest && first_token + kTile > segment.kv_len)
    clear_unused(values, segment.kv_len - first_token, row_bytes, lane);
  const uint32_t k = shared_address(shared.ring[slot]), v = shared_address(values);
  Scores s = {};
  if (fp8)
    fp8_scores(s, q, k, lane);
  else
    native_scores(s, q, k, lane);
  scale_scores(p, s, p.scale * scales.x);
  if (newest || (kFeatures && first_token < limits.none_skip))
    mask_scores(p, s, segment, query_tile, first_token, lane);
  weigh(s, state);
  if (fp8) {
    place_sums(state, kApart, scales.y);
    fp8_values(state.sums[kApart], pack_weights<true>(s, scales.y * exp2_fast(state.places[kApart])), v, lane);
  } else {
    if (kF16 && kFp8 && !kApart) place_sums(state, 0, 1.0f);
    const float factor = kF16 || (kFp8 && !kApart) ? exp2_fast(state.places[0]) : 1.0f;
    native_values(state.sums[0], pack_weights<kF16>(s, factor), v, lane);
  }
}
