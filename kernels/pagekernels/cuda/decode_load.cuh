// The loading warp: walks the CTA's range of tiles and keeps the ring of shared memory full.
#pragma once
#include "decode_async.cuh"

// Where the loading warp stands. All lanes hold the same, but for what is marked as a lane's.
struct Walk {
  const Sequence* list;
  Sequence sequence;   // now being read
  int ahead;           // a lane's: word `lane` of the next sequence of the list
  int index, pair;     // of the sequence in the list, of the pair in the sequence
  int tile, left;      // next tile of the pair, tiles left of the range before the current segment
  uint32_t entries;    // a lane's: table entry of block first_block + lane
  uint32_t following;  // a lane's: the same for the batch after this one
  int first_block;
};

// What a range's record says beside where it begins.
struct RangeInfo {
  int range, items;
  Sharers first_pair, last_pair;
  int all_items;
};

// A range's record on its way.
struct Record {
  int words;         // a lane's: word `lane` of it
  uint32_t entries;  // a lane's
};

struct Ring {
  int slot;
  uint32_t parity;  // flips when the ring has been round
};

__device__ __forceinline__ void advance(Ring& ring, int steps) {
  ring.slot += steps;
  if (ring.slot >= kSlots) {
    ring.slot -= kSlots;
    ring.parity ^= 1;
  }
}

// Unused lanes get 0: entries beyond a sequence's end may be absurd and are never looked at.
__device__ __forceinline__ uint32_t load_entries(const DecodeParams& p, int row, int block, int last_tile, int lane) {
  const bool used = (block + lane) * kTilesPerBlock < last_tile;
  return used ? __ldg(p.tables + int64_t(row) * p.table_stride + block + lane) : 0;
}

__device__ __forceinline__ int load_ahead(const Walk& walk, int lane) {
  return lane < 8 ? __ldg(reinterpret_cast<const int*>(walk.list + walk.index + 1) + lane) : 0;
}

__device__ __forceinline__ Sequence unpack_sequence(int words) {
  Sequence s;
  s.row = __shfl_sync(~0u, words, 0), s.q_start = __shfl_sync(~0u, words, 1), s.q_len = __shfl_sync(~0u, words, 2);
  s.kv_len = __shfl_sync(~0u, words, 3), s.first_tile = __shfl_sync(~0u, words, 4);
  s.last_tile = __shfl_sync(~0u, words, 5), s.pairs = __shfl_sync(~0u, words, 6), s.reserved = 0;
  return s;
}

// The entries of the batch after this one: of the same segment, or of the next segment's beginning.
__device__ __forceinline__ uint32_t load_following(const DecodeParams& p, const Walk& walk, int end, int lane) {
  const int block = walk.first_block + 32;
  if (block * kTilesPerBlock < end) return load_entries(p, walk.sequence.row, block, walk.sequence.last_tile, lane);
  if (end - walk.tile >= walk.left) return 0;
  const bool same = walk.pair + 1 < walk.sequence.pairs;
  const int row = same ? walk.sequence.row : __shfl_sync(~0u, walk.ahead, 0);
  const int first = same ? walk.sequence.first_tile : __shfl_sync(~0u, walk.ahead, 4);
  const int last = same ? walk.sequence.last_tile : __shfl_sync(~0u, walk.ahead, 5);
  return load_entries(p, row, first / kTilesPerBlock, last, lane);
}

// The query rows of a segment, each contiguous, into shared memory without gaps.
__device__ __forceinline__ void load_queries(const DecodeParams& p, Shared& shared, const Segment& segment, int at,
                                             int lane) {
  uint64_t* barrier = &shared.segment_full[at];
#if BULK
  if (lane == 0) expect_bytes(barrier, segment.rows * kDim * 2);
  __syncwarp();
  for (int r = lane; r < segment.rows; r += 32) {
#else
  for (int r = 0; r < segment.rows; ++r) {
#endif
    const int row = segment.row + r;
    const uint16_t* from = p.q + (segment.q_start + row / kGroup) * p.q_token +
                           (segment.head * kGroup + row % kGroup) * p.q_head;
#if BULK
    copy_run(&shared.q[at][r * kDim], from, kDim * 2, barrier, streamed_policy());
#else
    copy_run(&shared.q[at][r * kDim], from, kDim * 2, lane);
#endif
  }
#if !BULK
  arrive_when_copied(barrier);
  if (lane == 0) barrier_arrive(barrier);
#endif
}

__device__ __forceinline__ Segment describe(const Walk& walk, const RangeInfo& info, int end, int item) {
  const Sequence& s = walk.sequence;
  const int runs = (s.q_len * kGroup + kSuperRows - 1) / kSuperRows;
  Segment segment;
  segment.first_item = item, segment.last_item = item + end - walk.tile;
  segment.first_tile = walk.tile;
  segment.head = walk.pair / runs, segment.row = walk.pair % runs * kSuperRows;
  segment.rows = min(kSuperRows, s.q_len * kGroup - segment.row);
  segment.q_start = s.q_start, segment.q_len = s.q_len, segment.kv_len = s.kv_len;
  const bool whole = walk.tile == s.first_tile && end == s.last_tile;
  const bool begins = walk.left == info.items;
  const Sharers sharers = begins ? info.first_pair : info.last_pair;
  segment.range = info.range, segment.stop = 0;
  segment.first_range = whole ? info.range : sharers.first, segment.sharers = whole ? 1 : sharers.count;
  return segment;
}

// Start the copy of one tile into a slot that is free: a lane's, or, without bulk copies, the warp's. With an FP8 tile
// come the 16 bytes that hold its scales: to load and to keep them here would have each tile wait for memory.
__device__ __forceinline__ void load_tile(const DecodeParams& p, Shared& shared, int slot, uint32_t entry, int sub,
                                          int head, uint64_t policy, int lane) {
  const uint32_t format = entry >> 29;
  const bool fp8 = kFp8 && format == 4;
  const int size = fp8 ? 1 : 2;
  const unsigned char* block = p.slabs[(entry >> 26) & 7] + int64_t(entry & 0x3ffffff) * p.unit_bytes;
  const unsigned char* k = block + (p.layer_offset + int64_t(head) * (2 * kBlock * kDim) + sub * (kTile * kDim)) * size;
  const unsigned char* scales = block + (scales_at(p, head) & ~int64_t(15));
  const uint32_t bytes = kTile * kDim * size;
  unsigned char* ring = shared.ring[slot];
  if (kFp8 && (kLoads > 1 || lane == 0)) shared.formats[slot] = format;
#if BULK
  if (kLoads > 1 || lane == 0) {
    expect_bytes(&shared.full[slot], 2 * bytes + (fp8 ? 16 : 0));
    if (kTilesPerBlock == 1) {
      copy_run(ring, k, 2 * bytes, &shared.full[slot], policy);
    } else {
      copy_run(ring, k, bytes, &shared.full[slot], policy);
      copy_run(ring + bytes, k + kBlock * kDim * size, bytes, &shared.full[slot], policy);
    }
    if (fp8) copy_run(shared.scales[slot], scales, 16, &shared.full[slot], 0);
  }
#else
  copy_run(ring, k, bytes, lane);
  copy_run(ring + bytes, k + kBlock * kDim * size, bytes, lane);
  if (fp8) copy_run(shared.scales[slot], scales, 16, lane);
  arrive_when_copied(&shared.full[slot]);
  if (lane == 0) barrier_arrive(&shared.full[slot]);
#endif
}

__device__ __forceinline__ Record fetch_record(const DecodeParams& p, int range, int lane) {
  return {__ldg(reinterpret_cast<const int*>(p.plan + range) + lane), __ldg(p.plan[range].entries + lane)};
}

// Load the tiles up to `end` of the current pair. Each of the first kLoads lanes waits for a slot of its own and starts
// that tile's copies, since a warp that takes tile after tile is hardly faster than memory at refilling the ring.
__device__ __forceinline__ void load_segment(const DecodeParams& p, Shared& shared, Walk& walk, Ring& ring, int end,
                                             int head, uint64_t policy, int lane) {
  const int ahead = kLoads > 1 ? lane : 0;
  int tile = walk.tile;
  while (tile < end) {
    const int batch_end = min(end, (walk.first_block + 32) * kTilesPerBlock);
    for (bool first = true; tile < batch_end; first = false) {
      const int count = min(batch_end - tile, kLoads), own = tile + ahead, from = own / kTilesPerBlock - walk.first_block;
      const uint32_t entry = __shfl_sync(~0u, walk.entries, from);
      Ring slot = ring;
      advance(slot, ahead);
      bool waits = ahead < count;
      while (__any_sync(~0u, waits)) {
        if (!waits || !barrier_tested(&shared.empty[slot.slot], slot.parity ^ 1)) continue;
        load_tile(p, shared, slot.slot, entry, own % kTilesPerBlock, head, policy, lane);
        waits = false;
      }
      advance(ring, count);
      tile += count;
      if (first) walk.following = load_following(p, walk, end, lane);  // the first loads are on their way by now
    }
    walk.entries = walk.following;
    walk.first_block += 32;
  }
}

__device__ __forceinline__ void next_pair(Walk& walk, int lane) {
  if (++walk.pair == walk.sequence.pairs) {
    walk.sequence = unpack_sequence(walk.ahead);
    walk.index += 1, walk.pair = 0;
    walk.ahead = load_ahead(walk, lane);
  }
  walk.tile = walk.sequence.first_tile;
  walk.first_block = walk.tile / kTilesPerBlock;
}

// Stand at the beginning of the range whose record has arrived.
__device__ __forceinline__ RangeInfo begin_range(const DecodeParams& p, Walk& walk, const Record& record, int lane) {
  const auto word = [&](int at) { return __shfl_sync(~0u, record.words, at); };
  walk.list = plan_sequences(p.plan, p.max_ranges);
  walk.left = word(0), walk.index = word(1), walk.pair = word(2), walk.tile = word(3);
  walk.sequence = unpack_sequence(__shfl_down_sync(~0u, record.words, 8));
  walk.entries = record.entries;
  walk.first_block = walk.tile / kTilesPerBlock;
  if (walk.left) walk.ahead = load_ahead(walk, lane);
  return {static_cast<int>(blockIdx.x), walk.left, {word(4), word(5)}, {word(6), word(7)}, word(16)};
}

__device__ __forceinline__ void publish(const DecodeParams& p, Shared& shared, const Segment& segment, int number,
                                        int lane) {
  const int at = number % kSegments;
  barrier_wait(&shared.segment_empty[at], (number / kSegments & 1) ^ 1);
  if (lane == 0) shared.segments[number % kSegmentRecords] = segment;
  __syncwarp();
  load_queries(p, shared, segment, at, lane);
}

// The CTA's range, whose record was asked for.
__device__ void load_all(const DecodeParams& p, Shared& shared, const Record& record, int lane) {
  Walk walk;
  Ring ring = {0, 0};
  int number = 0, item = 0;
  const RangeInfo info = begin_range(p, walk, record, lane);
  const uint64_t policy = info.all_items <= kStreamedTiles ? streamed_policy() : 0;
  while (walk.left > 0) {
    const int end = min(walk.sequence.last_tile, walk.tile + walk.left);
    const Segment segment = describe(walk, info, end, item);
    publish(p, shared, segment, number++, lane);
    load_segment(p, shared, walk, ring, end, segment.head, policy, lane);
    walk.left -= end - walk.tile, item += end - walk.tile;
    next_pair(walk, lane);
  }
  Segment stop = {};
  stop.stop = 1;
  publish(p, shared, stop, number, lane);
}
