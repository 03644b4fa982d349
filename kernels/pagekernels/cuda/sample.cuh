// What the sampling kernels share: how a row is described, logits in, scores, and the largest value of a block.
//
// LOGITS: 0 float32, 1 float16, 2 bfloat16. Rows start `stride` elements apart; `aligned` says that each starts at 16
// bytes. vocab is at most 2^18.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#ifndef LOGITS
#define LOGITS 2
#endif
#if LOGITS == 0
typedef float Logit;
#elif LOGITS == 1
typedef __half Logit;
#else
typedef uint16_t Logit;  // bfloat16's bits
#endif

#define THREADS 256       // of sample_top and sample_draw
#define MAX_SPLITS 64
#define WIDE 8            // logits that a thread loads at once
#define NEVER (-42.0f)    // noise is from -3.62 to 37.5: a token further behind the top can never win
#define MIN_TEMPERATURE 1e-30f

// How a row is sampled: 48 bytes, packed by sampling.py.
struct Row {
    float temperature;  // 0 takes the likeliest token; below 0 the row is padding: nothing is written
    float floor;        // the least score that min_p keeps, -inf for all
    int32_t top_k;      // 0 for all
    int32_t unused;
    double top_p;       // 1 for all
    uint64_t seed, sample_index, position;
};

// Tokens stay whose score is above `score`, and of its equals those of id `id` and higher.
struct Cut {
    float score;
    int32_t id;
};

struct Draw {
    double total;
    int64_t id;
};

// Scratch, one entry a row or a (row, split). `arrived` is zero before and after each kernel.
struct Work {
    uint64_t* tops;
    Draw* draws;
    Cut* cuts;
    float* top;  // NaN where the token is known already, or the row is padding
    uint32_t* arrived;
};

// Neighbouring logits of a row as they lie in memory.
struct Packed {
    uint4 raw[WIDE * sizeof(Logit) / 16];

    __device__ __forceinline__ float operator[](int i) const {
#if LOGITS == 0
        return ((const float*)raw)[i];
#elif LOGITS == 1
        return __half2float(((const __half*)raw)[i]);
#else
        uint32_t pair = ((const uint32_t*)raw)[i / 2];
        return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
#endif
    }
};

__device__ __noinline__ Packed fetch_some(const Logit* row, int at, int vocab) {
    Packed got;
#if LOGITS == 0
    const uint32_t nothing = 0xff800000u;
#elif LOGITS == 1
    const uint16_t nothing = 0xfc00u;
#else
    const uint16_t nothing = 0xff80u;
#endif
    for (int i = 0; i < WIDE; ++i) {
        auto bits = at + i < vocab ? *((decltype(&nothing))row + at + i) : nothing;
        memcpy((char*)got.raw + i * sizeof bits, &bits, sizeof bits);
    }
    return got;
}

// Logits `at` to at + 7 of a row; -inf behind its end.
__device__ __forceinline__ Packed fetch(const Logit* row, int at, int vocab, int aligned) {
    if (!aligned || at + WIDE > vocab) return fetch_some(row, at, vocab);
    Packed got;
#pragma unroll
    for (int i = 0; i < (int)(sizeof got / 16); ++i) got.raw[i] = __ldg((const uint4*)(row + at) + i);
    return got;
}

// Calls visit(logits, at) for this thread's share of a row; the next logits are under way meanwhile.
template <typename Visit>
__device__ __forceinline__ void each_wide(const Logit* row, int vocab, int aligned, int first, int step, Visit visit) {
    int at = first * WIDE;
    if (at >= vocab) return;
    Packed next = fetch(row, at, vocab, aligned);
    while (at < vocab) {
        Packed now = next;
        int following = at + step * WIDE;
        if (following < vocab) next = fetch(row, following, vocab, aligned);
        visit(now, at);
        at = following;
    }
}

// An order-preserving map of floats to integers; NaN, of positive sign, comes last.
__device__ __forceinline__ uint32_t ordered(float v) {
    uint32_t bits = __float_as_uint(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// Scores: log-weights with the top at 0, rounded as (logit - top) / temperature is.
struct Scale {
    float top, temperature, inverse;

    __device__ Scale(float top, float temperature) : top(top), temperature(fmaxf(temperature, MIN_TEMPERATURE)) {
        inverse = __frcp_rn(this->temperature);
    }

    // One correction of a quotient by the rounded reciprocal gives the rounded quotient (Markstein 1990).
    __device__ __forceinline__ float score(float logit) const {
        float behind = __fsub_rn(logit, top);
        float quotient = fmaxf(__fmul_rn(behind, inverse), -1e30f);  // else -inf would become NaN
        return __fmaf_rn(__fmaf_rn(-quotient, temperature, behind), inverse, quotient);
    }
};

// Whether this CTA is the last of a row's; what the others wrote before can then be read with __ldcg.
__device__ __forceinline__ bool is_last(uint32_t* arrived, int parts) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(arrived, parts - 1) == parts - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

template <typename T>
__device__ __forceinline__ T larger(T a, T b) {
    return a < b ? b : a;
}

// Of equal totals the lower id, as the CPU finds it first. id -1, nothing, comes with -inf.
__device__ __forceinline__ Draw larger(Draw a, Draw b) {
    return b.total > a.total || (b.total == a.total && b.id < a.id) ? b : a;
}

__device__ __forceinline__ float from_lane(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
__device__ __forceinline__ uint64_t from_lane(uint64_t v, int mask) {
    return __shfl_xor_sync(~0u, (unsigned long long)v, mask);
}
__device__ __forceinline__ Draw from_lane(Draw v, int mask) {
    return {__shfl_xor_sync(~0u, v.total, mask), (int64_t)__shfl_xor_sync(~0u, (long long)v.id, mask)};
}

// The largest value of a block of up to 32 warps, in every thread.
template <typename T>
__device__ __forceinline__ T block_largest(T value) {
    __shared__ T of_warp[32];
    for (int mask = 16; mask; mask >>= 1) value = larger(value, from_lane(value, mask));
    __syncthreads();  // of a former call
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    value = of_warp[lane < warps ? lane : 0];
    for (int mask = 16; mask; mask >>= 1) value = larger(value, from_lane(value, mask));
    return value;
}
