"""What becomes of blocks that nobody refers to when their frame is wanted: they move to the host tier, or end."""

from __future__ import annotations

from typing import Protocol

from memd.core.accounts import Counters
from memd.core.allocator import Allocator
from memd.core.block import Blocks
from memd.core.cached import CachedFrames
from memd.core.prefix import PrefixIndex
from memd.core.units import SplitFrames

MAX_HURRIED_BYTES = 32 << 20
"""Bytes of evicted blocks that are copied at once: what everybody waits for meanwhile. Beyond that they are lost."""


class Places(Protocol):
    """What is needed of memd.core.store.BlockStore."""

    blocks: Blocks
    cached: CachedFrames
    counters: Counters
    host_allocator: Allocator
    hurried: list[tuple[int, int]]
    index: PrefixIndex
    max_hurried: int
    units: SplitFrames

    def grant_host(self, holders: tuple[int, ...], now: float) -> int:
        """A frame of the host tier."""

    def grant_unit(self, holders: tuple[int, ...], now: float, *, host: bool = False) -> int:
        """The place of a new FP8 block."""

    def drop(self, place: int) -> None:
        """End a cached block that is in no queue."""

    def vacate(self, place: int) -> None:
        """A block that nobody refers to and that is in no queue and in no index is gone."""


def evict(store: Places, frame: int, now: float) -> None:
    """Free a frame that has left the cached queue, and with it whatever is in it."""
    split = frame in store.units
    first, *others = list(store.units.blocks_in(frame)) if split else [frame]
    if split:
        store.units.wake(first)  # the frame has left its queue already
    _evict_block(store, first, now)
    for place in others:
        store.cached.remove(place)
        _evict_block(store, place, now)


def take_over(store: Places, source: int, target: int) -> None:
    """The sealed block in `source` is in `target` from now on, but for its holders.

    What stays in `source` is another one, that nobody has asked for.
    """
    blocks = store.blocks
    blocks.copy(source, target, blocks.block_size)
    blocks.note_errors(target, blocks.errors(source))
    if store.index.frames.get(blocks.digests[source]) == source:
        store.index.add(target)
    if (retention := store.cached.kept.pop(source, None)) is not None:
        store.cached.kept[target] = retention
    blocks.swap_ids(source, target)


def _evict_block(store: Places, place: int, now: float) -> None:
    is_unit = store.units.is_unit(place)
    if store.units.is_host(place) or len(store.hurried) >= store.max_hurried or not _fits_below(store, is_unit=is_unit):
        store.drop(place)
        return
    target = store.grant_unit((), now, host=True) if is_unit else store.grant_host((), now)
    take_over(store, place, target)
    store.cached.append(target)
    store.vacate(place)
    store.counters.freed_blocks += 1
    store.counters.demoted_blocks += 1
    store.hurried.append((place, target))


def _fits_below(store: Places, *, is_unit: bool) -> bool:
    """Whether the host tier has a place, or one that can be emptied."""
    frames = store.host_allocator.num_free + store.cached.host.num_evictable
    return frames > 0 or (is_unit and store.units.num_holes_of(host=True) > 0)
