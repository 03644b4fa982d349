// The last token that top_k and top_p keep, for rows that ask for it: grid (rows), one CTA a row.
//
// As inferd/sampler.py's _edge: a histogram by distance behind the top says in which bin the sum of weights (1 each for
// top_k, exp(score) for top_p) reaches its target, and only that bin is sorted. A bin of more tokens than LIST is cut
// into 2048 again, and if all its scores are equal, the same is done by their ids.
//
// place: how far a token is behind the top, in bins: -64 * score, exact. deficit: what a token's weight lacks to that of
// its bin's upper edge, at most 1/64 of it; kept as an integer of 2^-20, whose sum over 2^18 tokens fits 32 bits.
#include "sample.cuh"

#define CUT_THREADS 1024
#define BINS_PER_NAT 64.0f
#define BINS 3072
#define FURTHEST (BINS - 1.0f)  // nearly 48 nats: what is further behind can never win
#define SUB_BINS 2048
#define LIST 2048
#define BINS_A_THREAD (BINS / CUT_THREADS)
#define ITEMS_A_THREAD (LIST / CUT_THREADS)
#define DEFICIT_ONE 1048576.0f
#define NOTHING 0xffffffffffffffffull  // sorts behind every token

struct Shared {
    uint32_t count[BINS];
    uint32_t deficit[BINS];
    uint64_t list[LIST];  // place, then ~id: ascending is from the top down, of equals the last id first
    double of_warp[33];
    uint32_t listed, nearest, furthest;
    int found, last_filled;
    double reached;
};

// Bins of `width` places, of those from `origin` on.
struct Level {
    float origin, width;
    bool by_id;  // all places are equal: bins are of ids, the highest first

    __device__ bool whole() const { return width == 1; }
    __device__ Level within(int bin) const { return {edge(bin), width / SUB_BINS, false}; }
    // The place where a bin begins.
    __device__ __forceinline__ float edge(int bin) const { return by_id ? origin : origin + bin * width; }
    // The bin of a token, -1 for none.
    __device__ __forceinline__ int bin(float place, int id, int vocab) const {
        if (by_id) return place == origin ? (vocab - 1 - id) / (vocab / SUB_BINS + 1) : -1;
        float at = (place - origin) / width;
        return at >= 0 && at < SUB_BINS ? (int)at : -1;
    }
};

struct Edge {
    float place;
    int id;
};

// One row, and what is asked of it: tokens up to `limit` places behind.
struct Task {
    const Logit* line;
    int vocab, aligned;
    Scale scale;
    float limit;
};

template <typename Visit>
__device__ __forceinline__ void each_place(const Task& task, Visit visit) {
    each_wide(task.line, task.vocab, task.aligned, threadIdx.x, CUT_THREADS, [&](const Packed& logits, int at) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            float place = fabsf(task.scale.score(logits[i])) * BINS_PER_NAT;
            if (place <= task.limit) visit(place, at + i);
        }
    });
}

// Calls visit(bin, place, id) for each token in a bin of `level`.
template <typename Visit>
__device__ __forceinline__ void each_binned(const Task& task, Level level, Visit visit) {
    if (level.whole()) {
        each_place(task, [&](float place, int id) { visit((int)place, place, id); });
    } else {
        each_place(task, [&](float place, int id) {
            int bin = level.bin(place, id, task.vocab);
            if (bin >= 0) visit(bin, place, id);
        });
    }
}

template <bool WEIGHTED>
__device__ void histogram(const Task& task, Level level, Shared& s) {
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += CUT_THREADS) s.count[bin] = s.deficit[bin] = 0;
    if (threadIdx.x == 0) s.found = BINS, s.last_filled = -1, s.reached = 0;
    __syncthreads();
    each_binned(task, level, [&](int bin, float place, int) {
        atomicAdd(&s.count[bin], 1u);
        if (WEIGHTED && !level.by_id) {
            float x = (place - level.edge(bin)) * (1 / BINS_PER_NAT);
            float lacks = x * (1 - x * (0.5f - x * (1.0f / 6)));  // 1 - exp(-x), x below 1/64
            atomicAdd(&s.deficit[bin], (uint32_t)__float2uint_rn(lacks * DEFICIT_ONE));
        }
    });
    __syncthreads();
}

template <bool WEIGHTED>
__device__ __forceinline__ double content(Level level, int bin, const Shared& s) {
    uint32_t count = s.count[bin];
    if (!WEIGHTED || count == 0) return count;
    double lacks = s.deficit[bin] * (1.0 / DEFICIT_ONE);
    return exp(-(double)level.edge(bin) * (1 / BINS_PER_NAT)) * (count - lacks);
}

// The sum of the threads' values before this one; `all` becomes that of all. Added up in a fixed order.
__device__ double sum_before(double value, double& all, Shared& s) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double sum = value;
    for (int step = 1; step < 32; step *= 2) {
        double other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) s.of_warp[warp] = sum;
    __syncthreads();
    double before = 0;
    for (int i = 0; i < warp; ++i) before += s.of_warp[i];
    all = before;
    for (int i = warp; i < CUT_THREADS / 32; ++i) all += s.of_warp[i];
    return before + (sum - value);
}

// What this thread's bins hold, what is before them, and what all hold.
struct Contents {
    double each[BINS_A_THREAD], before, all;
};

template <bool WEIGHTED>
__device__ Contents contents(Level level, Shared& s) {
    Contents got;
    double sum = 0;
    for (int i = 0; i < BINS_A_THREAD; ++i) {
        sum += got.each[i] = content<WEIGHTED>(level, threadIdx.x * BINS_A_THREAD + i, s);
    }
    got.before = sum_before(sum, got.all, s);
    return got;
}

// The first filled bin at which the sum of contents is at least `target`, from `reached` on, which becomes the sum before
// it; the last filled one if rounding let it run past that.
__device__ int find(const Contents& contents, double target, double& reached, Shared& s) {
    int first = threadIdx.x * BINS_A_THREAD, bin = BINS, filled = -1;
    double before = reached + contents.before, sum = before;
    for (int i = 0; i < BINS_A_THREAD; ++i) {
        sum += contents.each[i];
        if (!s.count[first + i]) continue;
        filled = first + i;
        if (sum >= target && bin == BINS) bin = filled;
    }
    if (bin < BINS) atomicMin(&s.found, bin);
    if (filled >= 0) atomicMax(&s.last_filled, filled);
    __syncthreads();
    int found = s.found < BINS ? s.found : s.last_filled;
    if (found >= first && found < first + BINS_A_THREAD) {
        for (int i = 0; first + i < found; ++i) before += contents.each[i];
        s.reached = before;
    }
    __syncthreads();
    reached = s.reached;
    return found;
}

// The tokens of bins `from` to `to` into the list, as many as fit; s.listed counts all of them.
__device__ void gather(const Task& task, Level level, int from, int to, Shared& s) {
    uint32_t nearest = 0xffffffffu, furthest = 0;
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0, s.nearest = nearest, s.furthest = furthest;
    __syncthreads();
    each_binned(task, level, [&](int bin, float place, int id) {
        if (bin < from || bin > to) return;
        uint32_t bits = __float_as_uint(place), at = atomicAdd(&s.listed, 1u);
        if (at < LIST) s.list[at] = (uint64_t)bits << 32 | (uint32_t)~id;
        nearest = min(nearest, bits), furthest = max(furthest, bits);
    });
    if (nearest <= furthest) atomicMin(&s.nearest, nearest), atomicMax(&s.furthest, furthest);
    __syncthreads();
}

// Bitonic; the list holds s.listed keys, at most LIST.
__device__ void sort(Shared& s) {
    int size = 2;
    while (size < (int)s.listed) size *= 2;
    for (int i = s.listed + threadIdx.x; i < size; i += CUT_THREADS) s.list[i] = NOTHING;
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step; step /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < size / 2; pair += CUT_THREADS) {
                int low = pair / step * 2 * step + pair % step, high = low + step;
                uint64_t a = s.list[low], b = s.list[high];
                if ((a > b) == ((low & run) == 0)) s.list[low] = b, s.list[high] = a;
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ Edge item(int at, const Shared& s) {
    return {__uint_as_float((uint32_t)(s.list[at] >> 32)), (int)~(uint32_t)s.list[at]};
}

// The item of the sorted list, up to `limit` places behind, at which the sum of weights from `reached` on is `share` of
// what it is at the last, or, where share is 0, `target`.
__device__ Edge weigh(float limit, double share, double target, double reached, Shared& s) {
    double weights[ITEMS_A_THREAD], all, sum = 0;
    int first = threadIdx.x * ITEMS_A_THREAD, last = -1;
    for (int i = 0; i < ITEMS_A_THREAD; ++i) {
        bool counts = first + i < (int)s.listed && item(first + i, s).place <= limit;
        if (counts) last = first + i;
        sum += weights[i] = counts ? expf(-item(first + i, s).place * (1 / BINS_PER_NAT)) : 0;
    }
    double before = reached + sum_before(sum, all, s);
    if (share > 0) target = share * (reached + all);
    if (threadIdx.x == 0) s.found = LIST, s.last_filled = 0;
    __syncthreads();
    for (int i = 0; first + i <= last; ++i) {
        before += weights[i];
        if (before >= target) atomicMin(&s.found, first + i);
    }
    if (last >= 0) atomicMax(&s.last_filled, last);
    __syncthreads();
    return item(min(s.found, s.last_filled), s);
}

#define ORDER_SLACK (1 - 1e-9)  // sums in another order differ in their last bits

// The place of the k-th token; infinity if it can never win. `listed`: the list then holds it, all before it and its
// equals, in order.
__device__ Edge nth(const Task& task, int k, bool& listed, Shared& s) {
    Level level = {0, 1, false};
    for (double reached = 0;;) {
        histogram<false>(task, level, s);
        Contents counts = contents<false>(level, s);
        if (level.whole() && counts.all < k) return {INFINITY, 0};
        int bin = find(counts, k, reached, s);
        listed = level.whole() && reached + s.count[bin] <= LIST;
        if (listed) reached = 0;
        gather(task, level, listed ? 0 : bin, bin, s);
        if (s.listed <= LIST) {
            sort(s);
            return {item(k - 1 - (int)reached, s).place, 0};
        }
        if (s.nearest == s.furthest) return {__uint_as_float(s.nearest), 0};
        level = level.within(bin);
    }
}

// The token at which the sum of weights is `share` of all those up to task.limit.
__device__ Edge nucleus(const Task& task, double share, Shared& s) {
    Level level = {0, 1, false};
    double target = 0;
    for (double reached = 0;;) {
        histogram<true>(task, level, s);
        Contents weights = contents<true>(level, s);
        if (level.whole()) target = share * weights.all;
        int bin = find(weights, target, reached, s);
        gather(task, level, bin, bin, s);
        if (s.listed <= LIST) {
            sort(s);
            return weigh(INFINITY, 0, target, reached, s);
        }
        bool equal = s.nearest == s.furthest;
        level = equal ? Level{__uint_as_float(s.nearest), 0, true} : level.within(bin);
    }
}

extern "C" __global__ void __launch_bounds__(CUT_THREADS)
sample_cut(const Logit* logits, int64_t stride, int vocab, int aligned, const Row* rows, Work work) {
    __shared__ Shared s;
    int row = blockIdx.x;
    float top = work.top[row];
    const Row& how = rows[row];
    bool by_k = how.top_k > 0 && how.top_k < vocab, by_p = how.top_p < 1, listed = false;
    if (top != top || !(by_k || by_p)) return;
    Task task = {logits + row * stride, vocab, aligned, Scale(top, how.temperature), FURTHEST};
    Edge edge = {INFINITY, 0};
    if (by_k) edge = nth(task, how.top_k, listed, s);
    if (by_p) {
        double share = how.top_p * ORDER_SLACK;
        task.limit = fminf(edge.place, FURTHEST);
        edge = listed ? weigh(task.limit, share, 0, 0, s) : nucleus(task, share, s);
    }
    if (threadIdx.x) return;
    float score = edge.place * (-1 / BINS_PER_NAT);
    if (score >= work.cuts[row].score) work.cuts[row] = {score, edge.id};
}
