// What the planner writes and the decode kernel reads. Host side: decode.py.
#pragma once
#include <cstdint>

// A tile is what a warp takes at a time: 16 tokens of one block (all 8 of a block of 8). A pair is one KV head of one
// sequence and one run of packed query rows. All tiles of a step lie in one order, (sequence, pair, tile), cut into
// contiguous ranges of equal length: CTA c takes range c.

constexpr int kPlanEntries = 32;  // table entries copied into a range's record: its first loads wait for nothing else
constexpr int kMaxSequences = 1024;
constexpr int kMaxRanges = 1023;  // boundaries are computed one by a thread of the planner's CTA

// A sequence with something to do; those without are not in the list.
struct Sequence {
  int row;         // its row of the block tables
  int q_start;     // its first query token in the packed batch
  int q_len;
  int kv_len;
  int first_tile;  // tiles [first_tile, last_tile) are visible to some of its query tokens
  int last_tile;
  int pairs;       // KV heads times runs of query rows
  int reserved;
};

// Ranges [first, first + count) hold tiles of a pair.
struct Sharers {
  int first;
  int count;
};

struct Range {
  int items;          // tiles to take; 0: nothing to do
  int index;          // of the first sequence in the list
  int pair;           // first pair of that sequence
  int tile;           // first tile of that pair
  Sharers first_pair, last_pair;
  Sequence sequence;  // a copy of the first sequence
  int all_items;      // tiles of all ranges
  int reserved[15];
  uint32_t entries[kPlanEntries];  // of the first sequence's table, from the first tile's block on
};
static_assert(sizeof(Sequence) == 32 && sizeof(Range) == 256, "decode.py sizes the workspace by these");

// A kind of layer: one work list serves all layers that agree in all of this.
struct Kind {
  int window, chunk;  // tokens, 0: none
  int kv_heads, group;
  int rows;           // packed query rows of a run
  int ctas;           // at most so many, the decode kernel's grid
  int min_items;      // tiles that are worth a CTA
  int reserved;
};

// A kind's part of the workspace: records of ranges, then of sequences, two more of these for the look ahead.
__host__ __device__ inline const Sequence* plan_sequences(const Range* plan, int max_ranges) {
  return reinterpret_cast<const Sequence*>(plan + max_ranges);
}
