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
                                               int& item, const Segment& segment, int at, int query_tile, int lane) {
  const Limits limits = start_rows(p, state, segment, query_tile, lane);
  const Queries q = load_query_fragments(shared, at, query_tile, segment.rows, lane);
  const bool idle = query_tile * kRows >= segment.rows;
  for (; item < segment.last_item; item += kStreams) {
    barrier_wait(&shared.full[ring.slot], ring.parity);
    const int first_token = (segment.first_tile + item - segment.first_item) * kTile;
#ifndef NO_MATH
    if (!idle)
      attend_tile(p, shared, state, q, limits, ring.slot, first_token, segment.kv_len - first_token, segment.head, lane);
#endif
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[ring.slot]);
    advance(ring, kStreams);
  }
}

__device__ void compute_all(const DecodeParams& p, Shared& shared, int warp, int lane) {
  const int query_tile = warp % kQueryTiles;
  int item = warp / kQueryTiles, pending = 0;
  Ring ring = {item, 0};
  for (int number = 0;; ++number) {
    const int at = number % kSegments;
    barrier_wait(&shared.segment_full[at], number / kSegments & 1);
    const Segment segment = shared.segments[at];
    if (segment.stop) break;
#ifdef TRACE
    if (number == 0 && warp == 0) barrier_wait(&shared.full[0], 0);
    if (number == 0 && threadIdx.x == 0) p.trace[blockIdx.x * 4 + 1] = now();
#endif
    Softmax state;
    attend_segment(p, shared, state, ring, item, segment, at, query_tile, lane);
#ifdef TRACE
    if (warp == 0 && lane == 0) p.trace[blockIdx.x * 4 + 2] = now();
#endif
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.segment_empty[at]);
    merge_warps(p, shared, state, segment, warp, lane);
    if (segment.sharers > 1) {
      if (warp == 0 && lane == 0) shared.pending[pending] = segment;
      ++pending;
    }
    sync_computing();
  }
  if (pending) join_pending(p, shared, pending, warp * 32 + lane);
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
    compute_all(p, shared, warp, lane);
  }
#ifdef TRACE
  if (threadIdx.x == 0) p.trace[blockIdx.x * 4 + 3] = now();  // of a CTA without work it is about the first stamp
#endif
}
