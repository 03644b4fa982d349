// Paged decode attention: out = softmax(cap(scale Q K^T)) V over block tables, 1 to 64 query tokens a sequence.
//
// One CTA a multiprocessor takes a range of tiles as plan.cu cut them (plan.cuh). Its loading warp keeps a ring in shared
// memory full (decode_load.cuh), each other warp takes every kStreams-th tile of the range (decode_tile.cuh,
// decode_softmax.cuh). Where a range leaves a pair (sequence, KV head, run of query rows), warps merge in shared
// memory; ranges that share a pair leave partial results, and the last to be done joins them in their order
// (decode_merge.cuh): same inputs, same bits. The counters wrap to zero, so a graph may replay it.
//
// decode(DecodeParams): grid (ctas), block ((STREAMS * QUERY_TILES + 1) * 32), SHARED_BYTES dynamic shared memory.
// Macros: decode_config.cuh. Twin: pagekernels/twin.py, attention.
#include "decode_load.cuh"
#include "decode_merge.cuh"

// This warp's tiles of a segment. `ring` stands at its next slot, `item` is the CTA's tile that lies there.
__device__ __forceinline__ void attend_segment(const DecodeParams& p, Shared& shared, Softmax& state, Ring& ring,
                                               int& item, const Segment& segment, int at, int thread) {
  const int query_tile = (thread >> 5) % kQueryTiles, lane = thread & 31;
  start_rows(state);
  const Limits limits = limits_of(p, segment);
  const Queries q = load_query_fragments(shared, at, query_tile, segment.rows, lane);
  const bool idle = kQueryTiles > 1 && query_tile * kRows >= segment.rows;
  const int half = scales_half(p, segment.head);
  // Counted in tokens of the sequence, and the item worked out again behind: one register less in the loop.
  const int end = (segment.first_tile + segment.last_item - segment.first_item) * kTile;
  int token = (segment.first_tile + item - segment.first_item) * kTile;
  for (; token < end; token += kStreams * kTile) {
    barrier_wait(&shared.full[ring.slot], ring.parity);
#ifndef NO_MATH
    if (!idle)
      attend_tile(p, shared, state, q, limits, segment, ring.slot, token, half, query_tile, lane);
#endif
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[ring.slot]);
    advance(ring, kStreams);
  }
  item = token / kTile - segment.first_tile + segment.first_item;
}

__device__ void compute_all(const DecodeParams& p, Shared& shared) {
  int item = (threadIdx.x >> 5) / kQueryTiles;
  Ring ring = {item, 0};
  for (int number = 0;; ++number) {
    const int at = number % kSegments;
    barrier_wait(&shared.segment_full[at], number / kSegments & 1);
    const Segment& segment = shared.segments[number % kSegmentRecords];
    if (segment.stop) break;
#ifdef TRACE
    if (number == 0 && threadIdx.x < 32) barrier_wait(&shared.full[0], 0);
    if (number == 0 && threadIdx.x == 0) p.trace[blockIdx.x * 4 + 1] = now();
#endif
    Softmax state;
    attend_segment(p, shared, state, ring, item, segment, at, thread_again());
#ifdef TRACE
    if (threadIdx.x == 0) p.trace[blockIdx.x * 4 + 2] = now();
#endif
    __syncwarp();
    if (thread_again() % 32 == 0) barrier_arrive(&shared.segment_empty[at]);
    merge_warps(p, shared, state, segment, thread_again());
    if (segment.sharers > 1 && thread_again() == 0) shared.pending[shared.pending_pairs++] = segment;
    sync_computing();
  }
  if (shared.pending_pairs) join_pending(p, shared, shared.pending_pairs, thread_again());
}

extern "C" __global__ void __launch_bounds__(kThreads + 32, 1) decode(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#ifdef TRACE
  if (threadIdx.x == 0) p.trace[blockIdx.x * 4] = now();
#endif
  if (warp == kWarps) {
    const Record own = fetch_record(p, blockIdx.x, lane);
    if (lane == 0) barriers_init(shared);
    __syncwarp();
    arrive_start();
    load_all(p, shared, own, lane);
  } else {
    sync_start();
    compute_all(p, shared);
  }
#ifdef TRACE
  if (threadIdx.x == 0) p.trace[blockIdx.x * 4 + 3] = now();  // of a CTA without work it is about the first stamp
#endif
}
