"""What the tuned decode kernel (decode.cu) is compiled for: shapes, shared memory, macros. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagekernels.layout import Format, PagedLayout

MAX_QUERY_TOKENS = 64
"""Query tokens of a sequence that the kernel is made for; more are right but read K and V once per 32 packed rows."""

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MAX_GROUP = 16
TILE = 16
"""Tokens that a warp takes at a time; rows of a tensor core tile."""

MAX_SLOT_BYTES, MAX_MIXED_SLOT_BYTES = 128 * 1024, 192 * 1024
"""Of slots for K and V: at head_dim 128 more gains nothing, as less does up to a third. FP8 tiles fill half a slot."""

_SEGMENTS, _SEGMENT_RECORDS, _PENDING = 2, 4, 2
_SEGMENT_BYTES = 52
_SLOT_BYTES = 4 + 16 + 2 * 8
_EXCHANGE_BYTES = 20480
BULK_COPIES = ("sm_90", "sm_100", "sm_103")
"""Architectures where one thread's cp.async.bulk beats a warp's cp.async; sm_120 has both and prefers the latter."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is cut for a device. None: the best known.

    streams    K and V tiles worked on at a time, each by as many warps as there are query tiles
    slots      K and V tiles in shared memory
    min_items  tiles of K and V that are worth a thread block of its own; at least 4
    ctas       thread blocks
    evict      K and V pass the L2 cache as the first to be evicted, where that was seen to gain (decode_async.cuh)
    mixed      FP8 blocks may be met
    extra      further macros, for measuring
    """

    streams: int | None = None
    slots: int | None = None
    min_items: int = 8
    ctas: int | None = None
    evict: bool = True
    mixed: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What one compiled kernel is for."""

    head_dim: int
    block_size: int
    group: int
    native: Format
    max_query_tokens: int
    mixed: bool
    features: bool
    most_tiles: int = 2

    @property
    def rows(self) -> int:
        """Packed query rows (token, head of the group) of one tensor core tile."""
        return self.group if self.max_query_tokens == 1 else 16

    @property
    def query_tiles(self) -> int:
        """Tensor core tiles that share what is loaded of K and V, each a warp's.

        Four would load K and V less often, but leave a CTA too few warps to have enough in flight (decode_h200.md).
        """
        return min(1 if self.group * self.max_query_tokens <= TILE else 2, self.most_tiles)

    @property
    def super_rows(self) -> int:
        """Packed query rows that K and V are read once for."""
        return self.rows * self.query_tiles

    @property
    def slot_bytes(self) -> int:
        """Shared memory of one tile of K and V."""
        return min(TILE, self.block_size) * self.head_dim * 4

    @property
    def default_streams(self) -> int:
        """8 warps, or, for 255 registers a thread, 8 with the one that loads: registers go by fours of warps."""
        many = self.head_dim > 128 or self.rows > 8
        return max((7 if many else 8) // self.query_tiles, 1)

    def exchange_bytes(self, warps: int) -> int:
        """Shared memory through which warps merge; decode_config.cuh, exchanged_tiles."""
        tiles = self.head_dim // 16
        while tiles % 2 == 0 and warps * self.rows * (tiles * 16 + 4) * 4 > _EXCHANGE_BYTES:
            tiles //= 2
        return warps * self.rows * ((tiles * 16 + 4) * 4 + 8)

    def fixed_bytes(self, warps: int) -> int:
        """Shared memory beside the slots, rounded up generously."""
        queries = _SEGMENTS * self.super_rows * self.head_dim * 2
        segments = _SEGMENTS * 16 + (_SEGMENT_RECORDS + _PENDING) * _SEGMENT_BYTES + (_PENDING + 1) * 4
        return queries + self.exchange_bytes(warps) + segments + 400

    def shared_bytes(self, streams: int, slots: int) -> int:
        """Dynamic shared memory of the kernel; each slot has _SLOT_BYTES beside its tile."""
        raw = slots * (self.slot_bytes + _SLOT_BYTES) + self.fixed_bytes(streams * self.query_tiles)
        return -(-raw // 128) * 128

    def most_slots(self, streams: int, limit: int) -> int:
        """Slots that fit into `limit` bytes of shared memory."""
        return (limit - 128 - self.fixed_bytes(streams * self.query_tiles)) // (self.slot_bytes + _SLOT_BYTES)

    def cut(self, tuning: Tuning, limit: int) -> tuple[int, int]:
        """(streams, slots) for `limit` bytes of shared memory: two rounds of slots or more, and only whole rounds.

        Raises ValueError if not even one stream finds room.
        """
        most = MAX_MIXED_SLOT_BYTES if self.mixed else MAX_SLOT_BYTES
        wanted = tuning.slots or max(most // self.slot_bytes, 12)
        for streams in range(tuning.streams or self.default_streams, 0, -1):
            slots = min(wanted, self.most_slots(streams, limit))
            if slots >= 2 * streams or slots >= streams == tuning.streams:
                return streams, slots // streams * streams
        raise ValueError(f"two tiles of K and V, {2 * self.slot_bytes} bytes, exceed {limit} of shared memory")


def can_take(layout: PagedLayout, layer: int, num_q_heads: int, max_query_tokens: int) -> bool:
    """Whether the tuned kernel serves a layer: else the generic one does (attend.cu)."""
    shape = layout.layers[layer]
    group = num_q_heads // shape.num_kv_heads
    return (
        shape.head_dim_k == shape.head_dim_v
        and shape.head_dim_k in HEAD_DIMS
        and layout.format in (Format.BF16, Format.F16)
        and num_q_heads % shape.num_kv_heads == 0
        and group <= MAX_GROUP
        and max_query_tokens <= MAX_QUERY_TOKENS
    )


def fitted(shape: DecodeShape, shared_limit: int) -> DecodeShape:
    """The shape with as many query tiles as leave room for a ring of K and V."""
    for tiles in (2, 1):
        shape = replace(shape, most_tiles=tiles)
        if shape.most_slots(2, shared_limit) >= 4:
            break
    return shape


def defines(shape: DecodeShape, tuning: Tuning, arch: str, shared_limit: int) -> dict[str, int | str]:
    """The macros of decode.cu (decode_config.cuh) for a device with `shared_limit` bytes for a thread block."""
    shape = fitted(shape, shared_limit)
    streams, slots = shape.cut(tuning, shared_limit)
    return {
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "GROUP": shape.group,
        "ROWS": shape.rows,
        "QUERY_TILES": shape.query_tiles,
        "STREAMS": streams,
        "SLOTS": slots,
        "KV_F16": int(shape.native is Format.F16),
        "FP8": int(shape.mixed),
        "FEATURES": int(shape.features),
        "BULK": int(arch in BULK_COPIES),
        "KV_HINT": int(tuning.evict),
        "SHARED_BYTES": shape.shared_bytes(streams, slots),
        **dict(word.partition("=")[::2] for word in tuning.extra),
    }
