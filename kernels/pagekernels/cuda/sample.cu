// One token id a row of logits, the one that inferd/sampler.py takes: the same hash, the same double-precision noise,
// the same cut. Sums of exponentials differ from the CPU's in their last bits, and nothing else does.
//
//   sample_top   grid (splits, rows)     the likeliest token of each row; rows of temperature 0 are done
//   sample_cut   grid (rows)             sample_cut.cu: the last token that top_k and top_p keep
//   sample_draw  grid (splits, rows)     the kept token with the largest score plus Gumbel noise
//   resolve_ids  grid (tokens / THREADS) input ids of -1 - r become the token of row r
//
// Same inputs, same bits: what threads add up concurrently are integers, and maxima do not depend on an order.
// Parts of a row meet in the CTA that arrives last, which leaves the counter at 0 for the next launch.
#include "sample.cuh"

// What a row of logits comes to once its top is known.
__device__ void settle(int row, uint64_t key, const Row& how, Work work, int32_t* tokens) {
    float top = unordered((uint32_t)(key >> 32));
    bool finite = fabsf(top) < INFINITY;  // no NaN either
    bool done = !finite || how.temperature == 0;
    if (done) tokens[row] = finite ? (int32_t)~(uint32_t)key : -1;
    work.top[row] = done ? NAN : top;
    work.cuts[row] = {fmaxf(how.floor, NEVER), 0};
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_top(const Logit* logits, int64_t stride, int vocab, int aligned, const Row* rows, Work work, int32_t* tokens) {
    int row = blockIdx.y, splits = gridDim.x;
    if (rows[row].temperature < 0) {
        if (threadIdx.x == 0) work.top[row] = NAN;
        return;
    }
    const Logit* line = logits + row * stride;
    float best = -INFINITY, v[WIDE];
    int id = 0;
    bool broken = false;
    for (int at = (blockIdx.x * THREADS + threadIdx.x) * WIDE; at < vocab; at += splits * THREADS * WIDE) {
        load(line, at, vocab, aligned, v);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            broken |= v[i] != v[i];
            if (v[i] > best) best = v[i], id = at + i;
        }
    }
    best = broken ? NAN : best + 0.0f;  // -0 and 0 are equal
    uint64_t key = block_largest((uint64_t)ordered(best) << 32 | (uint32_t)~id);
    if (splits > 1) {
        if (threadIdx.x == 0) work.tops[row * MAX_SPLITS + blockIdx.x] = key;
        if (!is_last(work.arrived + row, splits)) return;
        uint64_t part = 0;
        if (threadIdx.x < splits) part = __ldcg((const unsigned long long*)work.tops + row * MAX_SPLITS + threadIdx.x);
        key = block_largest(part);
    }
    if (threadIdx.x == 0) settle(row, key, rows[row], work, tokens);
}

// SplitMix64 as inferd/sampler.py has it.
__device__ __forceinline__ uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

#define GAMMA 0x9E3779B97F4A7C15ull

__device__ __forceinline__ uint64_t stream_of(const Row& how) {
    uint64_t stream = mix(how.seed + GAMMA);
    stream = mix((stream ^ how.sample_index) + GAMMA);
    return mix((stream ^ how.position) + GAMMA);
}

// Score plus noise, as the CPU adds them.
__device__ __noinline__ Draw exact(float score, uint64_t bits, int id) {
    double uniform = ((double)(bits >> 11) + 0.5) * 0x1p-53;
    return {(double)score - log(-log1p(-uniform)), id};
}

#define SLACK 1e-3f  // far more than the single-precision logarithms below are off

// At least the noise of `bits`: -log(uniform), since -log1p(-x) >= x, from the upper 32 bits, rounded down.
__device__ __forceinline__ float most_noise(uint64_t bits) {
    return (32.0f - __log2f(__uint2float_rd((uint32_t)(bits >> 32)))) * 0.69314718f + SLACK;
}

// At most the noise of `bits`.
__device__ __forceinline__ float least_noise(uint64_t bits) {
    uint32_t upper = (uint32_t)(bits >> 32);
    float above = __uint2float_ru(upper) * 0x1p-32f + 0x1p-32f;  // the uniform number is below this
    if (above <= 0.5f) return -logf(above) - above - SLACK;      // -log1p(-x) <= x + x * x there
    return -logf(-logf(__uint2float_rd(~upper) * 0x1p-32f)) - SLACK;
}

// Calls visit(score, bits, id) for each kept token of this thread's share of a row.
template <typename Visit>
__device__ __forceinline__ void each_kept(const Logit* line, int vocab, int aligned, Scale scale, Cut cut,
                                          uint64_t stream, Visit visit) {
    float v[WIDE];
    for (int at = (blockIdx.x * THREADS + threadIdx.x) * WIDE; at < vocab; at += gridDim.x * THREADS * WIDE) {
        load(line, at, vocab, aligned, v);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            float score = scale.score(v[i]);
            if (score < cut.score || (score == cut.score && at + i < cut.id)) continue;
            visit(score, mix(stream + (uint64_t)(at + i + 1) * GAMMA), at + i);
        }
    }
}

// The best two bounds of a thread, and the token of the first. Double-precision logarithms are taken only for tokens
// whose bound reaches what some other token has for certain: two or three of a row.
struct Bounds {
    float first = -INFINITY, second = -INFINITY, score = 0;
    uint64_t bits = 0;
    int id = -1;

    __device__ __forceinline__ void add(float bound, float score, uint64_t bits, int id) {
        if (bound > first) {
            second = first;
            first = bound, this->score = score, this->bits = bits, this->id = id;
        } else {
            second = fmaxf(second, bound);
        }
    }
};

__device__ Draw best_of_part(const Logit* line, int vocab, int aligned, Scale scale, Cut cut, uint64_t stream) {
    Bounds bounds;
    each_kept(line, vocab, aligned, scale, cut, stream, [&](float score, uint64_t bits, int id) {
        bounds.add(score + most_noise(bits), score, bits, id);
    });
    float certain = block_largest(bounds.id < 0 ? -INFINITY : bounds.score + least_noise(bounds.bits));
    Draw best = {-INFINITY, -1};
    if (bounds.id >= 0 && bounds.first >= certain) best = exact(bounds.score, bounds.bits, bounds.id);
    if (bounds.id >= 0 && bounds.second >= certain) {
        each_kept(line, vocab, aligned, scale, cut, stream, [&](float score, uint64_t bits, int id) {
            if (score + most_noise(bits) >= certain) best = larger(best, exact(score, bits, id));
        });
    }
    return block_largest(best);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_draw(const Logit* logits, int64_t stride, int vocab, int aligned, const Row* rows, Work work, int32_t* tokens) {
    int row = blockIdx.y, splits = gridDim.x;
    float top = work.top[row];
    if (top != top) return;
    Row how = rows[row];
    Draw best = best_of_part(logits + row * stride, vocab, aligned, Scale(top, how.temperature), work.cuts[row],
                             stream_of(how));
    if (splits > 1) {
        Draw* parts = work.draws + row * MAX_SPLITS;
        if (threadIdx.x == 0) parts[blockIdx.x] = best;
        if (!is_last(work.arrived + row, splits)) return;
        best = {-INFINITY, -1};
        if (threadIdx.x < splits) {
            const Draw* part = parts + threadIdx.x;
            best = {__ldcg(&part->total), __ldcg((const long long*)&part->id)};
        }
        best = block_largest(best);
    }
    if (threadIdx.x == 0) tokens[row] = (int32_t)best.id;
}

// A row without a token, -1, gives id 0: its sequence ends as soon as the host learns of it.
extern "C" __global__ void __launch_bounds__(THREADS)
resolve_ids_32(int32_t* ids, int num_ids, const int32_t* tokens) {
    int at = blockIdx.x * THREADS + threadIdx.x;
    if (at < num_ids && ids[at] < 0) ids[at] = max(tokens[-1 - ids[at]], 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
resolve_ids_64(int64_t* ids, int num_ids, const int32_t* tokens) {
    int at = blockIdx.x * THREADS + threadIdx.x;
    if (at < num_ids && ids[at] < 0) ids[at] = max(tokens[-1 - ids[at]], 0);
}
