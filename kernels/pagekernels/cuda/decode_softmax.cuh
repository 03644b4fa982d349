// The online softmax of one warp over the tiles of a segment: Milakov and Gimelshein, arXiv 1805.02867.
#pragma once
#include "decode_tile.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowest = -1e30f;  // a maximum of nothing: finite, so that no infinity meets its like
// f16 weights are placed below 2^12, or small ones would lose bits (research: f16 has no exponent below 2^-24).
constexpr int kShift = 12;

// Rows g and g + 8 of a warp. Weights are 2^(s - reference); `sum` is this lane's columns' share.
struct Softmax {
  float out[kColumnTiles][4];
  float reference[2], sum[2];
  int first_visible[2], position[2];
  bool fp8_order;
};

struct Limits {
  int all_see;    // tokens up to and including this are seen by every row of the sequence
  int none_skip;  // tokens from here on are not too old for any row
};

__device__ __forceinline__ Limits start_rows(const DecodeParams& p, Softmax& state, const Segment& segment,
                                             int query_tile, int lane) {
#pragma unroll
  for (int c = 0; c < kColumnTiles; ++c) state.out[c][0] = state.out[c][1] = state.out[c][2] = state.out[c][3] = 0.0f;
  const int before = segment.kv_len - segment.q_len;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = segment.row + query_tile * kRows + (lane >> 2) + 8 * i;
    state.reference[i] = kLowest, state.sum[i] = 0.0f;
    state.position[i] = before + min(row / kGroup, segment.q_len - 1);
    state.first_visible[i] = 0;
    if (kFeatures && p.window) state.first_visible[i] = max(0, state.position[i] - p.window + 1);
    if (kFeatures && p.chunk)
      state.first_visible[i] = max(state.first_visible[i], state.position[i] / p.chunk * p.chunk);
  }
  state.fp8_order = false;
  int newest = 0;
  if (kFeatures && p.window) newest = segment.kv_len - p.window;
  if (kFeatures && p.chunk) newest = max(newest, (segment.kv_len - 1) / p.chunk * p.chunk);
  return {before, newest};
}

// Scores in units of log2, capped; `factor` is softmax_scale (times an FP8 block's K scale).
__device__ __forceinline__ void scale_scores(const DecodeParams& p, Scores& s, float factor) {
  const bool capped = kFeatures && p.softcap > 0.0f;
  const float scaled = capped ? factor * (2.0f * kLog2e) / p.softcap : factor * kLog2e;
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] *= scaled;
      // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x))
      if (capped) s[n][i] = p.softcap * kLog2e * (1.0f - __fdividef(2.0f, 1.0f + exp2_fast(fminf(s[n][i], 64.0f))));
    }
}

__device__ __forceinline__ void mask_scores(Scores& s, const Softmax& state, int first_token, int lane) {
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token + n * 8 + 2 * (lane & 3) + (i & 1);
      const bool seen = token <= state.position[i >> 1] && (!kFeatures || token >= state.first_visible[i >> 1]);
      if (!seen) s[n][i] = -INFINITY;
    }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Turns scores into weights in place and brings the state to their reference. `shift`: log2 of the largest weight.
__device__ __forceinline__ void weigh(Scores& s, Softmax& state, float shift) {
  float rescale[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < (kUpper ? 2 : 1); ++i) {
    float top = s[0][2 * i];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
    const float reference = fmaxf(quad_max(top), kFp8 || kF16 ? state.reference[i] + shift : state.reference[i]) - shift;
    rescale[i] = exp2_fast(state.reference[i] - reference);
    state.reference[i] = reference;
    state.sum[i] *= rescale[i];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) {
        s[n][j] = exp2_fast(s[n][j] - reference);
        state.sum[i] += s[n][j];
      }
  }
  if (!__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
  for (int c = 0; c < kColumnTiles; ++c) {
    state.out[c][0] *= rescale[0], state.out[c][1] *= rescale[0];
    if (kUpper) state.out[c][2] *= rescale[1], state.out[c][3] *= rescale[1];
  }
}

// Weights as the A fragment of P V, times `factor`.
template <bool kHalf>
__device__ __forceinline__ void pack_weights(uint32_t (&a)[4], const Scores& s, float factor) {
  a[0] = pack_pair<kHalf>(s[0][0] * factor, s[0][1] * factor);
  a[1] = kUpper ? pack_pair<kHalf>(s[0][2] * factor, s[0][3] * factor) : 0;
  a[2] = kTile == 16 ? pack_pair<kHalf>(s[kScoreTiles - 1][0] * factor, s[kScoreTiles - 1][1] * factor) : 0;
  a[3] = kTile == 16 && kUpper ? pack_pair<kHalf>(s[kScoreTiles - 1][2] * factor, s[kScoreTiles - 1][3] * factor) : 0;
}

// One tile. `used`: its tokens before kv_len.
__device__ __forceinline__ void attend_tile(const DecodeParams& p, Shared& shared, Softmax& state, const Queries& q,
                                            const Limits& limits, int slot, int first_token, int used, int lane) {
  const bool fp8 = kFp8 && shared.info[slot].format == 4;
  const int row_bytes = fp8 ? kDim : 2 * kDim;
  unsigned char* const values = shared.ring[slot] + kTile * row_bytes;
  if (used < kTile) clear_unused(values, used, row_bytes, lane);
  const uint32_t k = shared_address(shared.ring[slot]), v = shared_address(values);
  Scores s = {};
  if (fp8)
    fp8_scores(s, q, k, lane);
  else
    native_scores(s, q, k, lane);
  scale_scores(p, s, fp8 ? p.scale * shared.info[slot].k_scale : p.scale);
  if (first_token + kTile - 1 > limits.all_see || (kFeatures && first_token < limits.none_skip))
    mask_scores(s, state, first_token, lane);
  // An FP8 block's V scale goes into its weights, which f16 holds best near 2^12 whatever the scale is.
  const float v_scale = fp8 ? shared.info[slot].v_scale : 1.0f;
  const float shift = kF16 || fp8 ? kShift - (fp8 ? ilogbf(fmaxf(v_scale, 1e-20f)) : 0) : 0.0f;
  weigh(s, state, shift);
  if (kFp8Order && fp8 != state.fp8_order) {
    reorder(state.out, fp8);
    state.fp8_order = fp8;
  }
  uint32_t weights[4];
  if (fp8) {
    pack_weights<true>(weights, s, v_scale);
    fp8_values(state.out, weights, v, lane);
  } else {
    pack_weights<kF16>(weights, s, 1.0f);
    native_values(state.out, weights, v, lane);
  }
}
