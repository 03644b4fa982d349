// The planner: once a step, on the device, it cuts the step's work into contiguous ranges (plan.cuh).
//
// plan(PlanParams): grid (kinds), block (1024). One CTA makes the work list of one layer kind. Nothing is read back to the
// host: a captured graph plans anew from whatever the fixed buffers hold at each replay. At most 1024 sequences. Tiles
// count alike: an FP8 tile has half the bytes, but weights from 1 to 1.33 for native tiles beside it took as long or longer.
#include "plan.cuh"

constexpr int kThreads = 1024;
constexpr int kMaxKinds = 8;

struct PlanParams {
  const int32_t* cu_q_lens;      // [S + 1]
  const int32_t* kv_lens;        // [S], 0: padding
  const uint32_t* tables;        // [S, table_stride]
  unsigned char* workspace;
  int64_t kind_bytes;            // of a kind's part of the workspace
  int sequences, table_stride;
  int block_size;
  Kind kinds[kMaxKinds];
};

// A place in the order of all tiles: the tiles before it, and where it is.
struct Place {
  long long tiles;
  int index, pair, tile;
};

struct Sums {
  long long count, pairs, tiles;
};

struct Shared {
  Sequence list[kMaxSequences];
  long long tiles_before[kMaxSequences + 1];  // of all pairs of the sequences before
  Place places[kMaxRanges + 1];
  Sums scan[kThreads / 32], all;
  int count, uneven, ranges;
};

__device__ Sums operator+(const Sums& a, const Sums& b) {
  return {a.count + b.count, a.pairs + b.pairs, a.tiles + b.tiles};
}

__device__ Sums sum_up_to_lane(Sums x) {
  for (int d = 1; d < 32; d *= 2) {
    const Sums other = {__shfl_up_sync(~0u, x.count, d), __shfl_up_sync(~0u, x.pairs, d),
                        __shfl_up_sync(~0u, x.tiles, d)};
    if ((threadIdx.x & 31) >= d) x = x + other;
  }
  return x;
}

// Sums over the CTA's threads before this one, in their order; shared.all gets those of all.
__device__ Sums sum_before(Shared& shared, const Sums& own) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Sums in_warp = sum_up_to_lane(own);
  if (lane == 31) shared.scan[warp] = in_warp;
  __syncthreads();
  if (warp == 0) {
    const Sums upto = sum_up_to_lane(shared.scan[lane]);
    shared.scan[lane] = upto;
    if (lane == 31) shared.all = upto;
  }
  __syncthreads();
  const Sums before = warp ? shared.scan[warp - 1] : Sums{};
  return {before.count + in_warp.count - own.count, before.pairs + in_warp.pairs - own.pairs,
          before.tiles + in_warp.tiles - own.tiles};
}

__device__ Sequence read_sequence(const PlanParams& p, const Kind& kind, int row) {
  Sequence s = {};
  if (row >= p.sequences) return s;
  const int tile = min(p.block_size, 16), start = p.cu_q_lens[row];
  s.row = row, s.q_start = start, s.q_len = p.cu_q_lens[row + 1] - start, s.kv_len = p.kv_lens[row];
  if (s.q_len <= 0 || s.kv_len <= 0) return {};
  const int position = s.kv_len - s.q_len;
  int first = kind.window ? max(0, position - kind.window + 1) : 0;
  if (kind.chunk) first = max(first, position / kind.chunk * kind.chunk);
  s.first_tile = max(0, first) / tile;
  s.last_tile = (s.kv_len + tile - 1) / tile;
  s.pairs = kind.kv_heads * ((s.q_len * kind.group + kind.rows - 1) / kind.rows);
  return s;
}

__device__ int length_of(const Sequence& s) { return s.last_tile - s.first_tile; }

// The list of sequences with work, and the tiles before each.
__device__ void list_sequences(const PlanParams& p, const Kind& kind, Shared& shared) {
  const Sequence own = read_sequence(p, kind, threadIdx.x);
  const Sums before = sum_before(shared, {own.pairs > 0, own.pairs, own.pairs * (long long)length_of(own)});
  if (own.pairs > 0) shared.list[before.count] = own, shared.tiles_before[before.count] = before.tiles;
  const int count = static_cast<int>(shared.all.count);
  if (threadIdx.x == 0) shared.count = count, shared.tiles_before[count] = shared.all.tiles;
  __syncthreads();
  const bool other = __syncthreads_or(own.pairs > 0 && length_of(own) != length_of(shared.list[0]));
  if (threadIdx.x == 0) shared.uneven = other;
}

// How many CTAs work: each has enough to do, and where all pairs are equal the cuts fall on their borders if fewer CTAs
// can be had for that: what no two CTAs share needs no joining.
__device__ int choose_ctas(const Kind& kind, const Shared& shared) {
  const long long tiles = shared.all.tiles;
  const unsigned pairs = static_cast<unsigned>(shared.all.pairs);
  long long enough = max(tiles ? 1LL : 0LL, tiles / kind.min_items);
  if (enough > 16LL * pairs) enough = max(16LL * pairs, tiles * 2 / (kind.min_items * 3));  // joining many takes longer
  const int wanted = static_cast<int>(min((long long)kind.ctas, enough));
  if (shared.uneven || wanted == 0) return wanted;
  for (unsigned ctas = wanted; ctas * 16 > wanted * 15u; --ctas)
    if (ctas % pairs == 0 || pairs % ctas == 0) return ctas;
  return wanted;
}

// The last sequence that begins at or before tile `tile` of the whole order.
__device__ int find_sequence(const Shared& shared, long long tile) {
  int low = 0, high = shared.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (shared.tiles_before[middle] <= tile) low = middle; else high = middle - 1;
  }
  return low;
}

// Where each range begins.
__device__ void cut(Shared& shared) {
  const int ranges = shared.ranges, count = shared.count;
  for (int c = threadIdx.x; c <= ranges; c += kThreads) {
    const long long tiles = c < ranges ? shared.all.tiles * c / ranges : shared.all.tiles;
    Place place = {tiles, count, 0, 0};
    if (c < ranges) {
      place.index = find_sequence(shared, tiles);
      const Sequence& s = shared.list[place.index];
      const long long within = tiles - shared.tiles_before[place.index];
      place.pair = static_cast<int>(within / length_of(s));
      place.tile = s.first_tile + static_cast<int>(within % length_of(s));
    }
    shared.places[c] = place;
  }
  __syncthreads();
}

// The last range that begins at or before tile `tile` of the whole order.
__device__ int find_range(const Shared& shared, long long tile) {
  int low = 0, high = shared.ranges - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (shared.places[middle].tiles <= tile) low = middle; else high = middle - 1;
  }
  return low;
}

__device__ Sharers find_sharers(const Shared& shared, int index, int pair) {
  const int length = length_of(shared.list[index]);
  const long long first = shared.tiles_before[index] + (long long)pair * length;
  const int range = find_range(shared, first);
  return {range, find_range(shared, first + length - 1) - range + 1};
}

// The pair that the tile `tile` of the whole order belongs to.
__device__ Place find_pair(const Shared& shared, long long tile) {
  const int index = find_sequence(shared, tile), length = length_of(shared.list[index]);
  return {tile, index, static_cast<int>((tile - shared.tiles_before[index]) / length), 0};
}

__device__ void write_records(const PlanParams& p, const Kind& kind, const Shared& shared, Range* plans) {
  for (int c = threadIdx.x; c < kind.ctas; c += kThreads) {
    plans[c].items = 0;
    plans[c].all_items = static_cast<int>(min(shared.all.tiles, 0x7fffffffLL));
    if (c >= shared.ranges) continue;
    const Place& place = shared.places[c];
    const Place last = find_pair(shared, shared.places[c + 1].tiles - 1);
    plans[c].items = static_cast<int>(shared.places[c + 1].tiles - place.tiles);
    plans[c].index = place.index, plans[c].pair = place.pair, plans[c].tile = place.tile;
    plans[c].first_pair = find_sharers(shared, place.index, place.pair);
    plans[c].last_pair = find_sharers(shared, last.index, last.pair);
    plans[c].sequence = shared.list[place.index];
  }
  Sequence* list = const_cast<Sequence*>(plan_sequences(plans, kind.ctas));
  for (int i = threadIdx.x; i < shared.count; i += kThreads) list[i] = shared.list[i];
  const int tiles_per_block = max(1, p.block_size / 16);
  for (int i = threadIdx.x; i < shared.ranges * kPlanEntries; i += kThreads) {
    const Place& place = shared.places[i / kPlanEntries];
    const Sequence& s = shared.list[place.index];
    const int block = place.tile / tiles_per_block + i % kPlanEntries;
    const bool used = block * tiles_per_block < s.last_tile;
    plans[i / kPlanEntries].entries[i % kPlanEntries] = used ? p.tables[int64_t(s.row) * p.table_stride + block] : 0;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) plan(const __grid_constant__ PlanParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Kind kind = p.kinds[blockIdx.x];
  list_sequences(p, kind, shared);
  if (threadIdx.x == 0) shared.ranges = choose_ctas(kind, shared);
  __syncthreads();
  cut(shared);
  write_records(p, kind, shared, reinterpret_cast<Range*>(p.workspace + blockIdx.x * p.kind_bytes));
}
