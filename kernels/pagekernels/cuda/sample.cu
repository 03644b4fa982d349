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
    float best = -INFINITY;
    int id = 0, first = blockIdx.x * THREADS + threadIdx.x;
    bool broken = false;
    each_wide(line, vocab, aligned, first, splits * THREADS, [&](const Packed& logits, int at) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            broken |= logits[i] != logits[i];
            if (logits[i] > best) best = logits[i], id = at + i;
        }
    });
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

__device__ __forceinline__ float log2_of(float v) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// Score plus noise, as the CPU adds them.
__device__ __noinline__ Draw exact(float score, uint64_t bits, int id) {
    double uniform = ((double)(bits >> 11) + 0.5) * 0x1p-53;
    return {(double)score - log(-log1p(-uniform)), id};
}

// Bounds of the noise of a token, in single precision from the upper 32 bits, with more slack than that is off. Both
// without LIFT, which all tokens have in common.
#define SLACK 1e-3f
#define LIFT (32 * 0.69314718f + SLACK)

// At least the score plus noise: noise is at most -log(uniform), since -log1p(-x) >= x.
__device__ __forceinline__ float at_least(float score, uint32_t upper) {
    return __fmaf_rn(log2_of(__uint2float_rd(upper)), -0.69314718f, score);
}

// At most the score plus noise.
__device__ __forceinline__ float at_most(float score, uint32_t upper) {
    float above = __uint2float_ru(upper) * 0x1p-32f + 0x1p-32f;  // the uniform number is below this
    float noise = above <= 0.5f ? -logf(above) - above           // -log1p(-x) <= x + x * x there
                                : -logf(-logf(__uint2float_rd(~upper) * 0x1p-32f));
    return score + (noise - SLACK - LIFT);
}

// A row while it is drawn from.
struct Draws {
    const Logit* line;
    int vocab, aligned;
    Scale scale;
    Cut cut;
    uint64_t stream;

    // The score of a token; -inf if it is cut.
    __device__ __forceinline__ float kept(float logit, int id) const {
        float score = scale.score(logit);
        bool stays = (score > cut.score) | ((score == cut.score) & (id >= cut.id));  // without branches
        return stays ? score : -INFINITY;
    }
    __device__ __forceinline__ uint64_t bits(int id) const { return mix(stream + (uint64_t)(id + 1) * GAMMA); }

    // Calls visit(bound, at) with the largest bound among each WIDE tokens of this thread's share.
    template <typename Visit>
    __device__ __forceinline__ void each_bound(Visit visit) const {
        int first = blockIdx.x * THREADS + threadIdx.x;
        each_wide(line, vocab, aligned, first, gridDim.x * THREADS, [&](const Packed& logits, int at) {
            float scores[WIDE], best = -INFINITY;
#pragma unroll
            for (int i = 0; i < WIDE; ++i) best = fmaxf(best, scores[i] = kept(logits[i], at + i));
            if (best == -INFINITY) return;
            uint64_t counter = stream + (uint64_t)(at + 1) * GAMMA;
            best = -INFINITY;
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                best = fmaxf(best, at_least(scores[i], (uint32_t)(mix(counter + i * GAMMA) >> 32)));
            }
            visit(best, at);
        });
    }

    // Calls visit(score, bits, id) for those of the WIDE tokens at `at` whose bound is not below `least`.
    template <typename Visit>
    __device__ __forceinline__ void each_token(int at, float least, Visit visit) const {
        Packed logits = fetch(line, at, vocab, aligned);
#pragma unroll 1
        for (int i = 0; i < WIDE; ++i) {
            float score = kept(logits[i], at + i);
            uint64_t noise = bits(at + i);
            if (score > -INFINITY && at_least(score, (uint32_t)(noise >> 32)) >= least) visit(score, noise, at + i);
        }
    }
};

// Double-precision logarithms are taken only for tokens whose bound reaches what some other token has for certain: two
// or three of a row. Each thread keeps its best bounds, of WIDE tokens each, and looks at the tokens afterwards.
__device__ Draw best_of_part(const Draws& draws) {
    float first = -INFINITY, second = -INFINITY, certain = -INFINITY;
    int at_first = 0;
    draws.each_bound([&](float bound, int at) {
        second = fmaxf(second, fminf(first, bound));
        if (bound > first) first = bound, at_first = at;
    });
    if (first > -INFINITY) {
        draws.each_token(at_first, first, [&](float score, uint64_t bits, int) {
            certain = fmaxf(certain, at_most(score, (uint32_t)(bits >> 32)));
        });
    }
    certain = block_largest(certain);
    Draw best = {-INFINITY, -1};
    auto look = [&](float score, uint64_t bits, int id) { best = larger(best, exact(score, bits, id)); };
    if (first > -INFINITY && first >= certain) draws.each_token(at_first, certain, look);
    if (second > -INFINITY && second >= certain) {
        draws.each_bound([&](float bound, int at) {
            if (bound >= certain) draws.each_token(at, certain, look);
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
    Draw best = best_of_part({logits + row * stride, vocab, aligned, Scale(top, how.temperature), work.cuts[row],
                              stream_of(how)});
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
