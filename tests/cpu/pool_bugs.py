"""Bugs, each to be planted into one method of the pool, that random command sequences must find."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import pytest

from memd.core.block import Blocks
from memd.core.draft import Draft
from memd.core.evicting import evict
from memd.core.eviction import Retention
from memd.core.kept import KeptBlock, PinTree
from memd.core.lease import Lease
from memd.core.operations import Fork, Truncate
from memd.core.prefix import PrefixIndex
from memd.core.state import Plan, PoolState, pack_tokens
from memd.core.stepping import Stepper
from memd.core.store import BlockStore
from memd.core.table import Table
from memd.core.values import Commit, TableRequest
from memd.core.workers import WorkerLeases
from tests.cpu.pool_model_values import SIZE


def frees_a_block_twice(patch: pytest.MonkeyPatch) -> None:
    """Counts without asking who holds, and a release that drops the table's first block once more."""

    def drop_references(self: Blocks, frames: Iterable[int], holder: int, now: float) -> list[int]:
        dropped = []
        for frame in frames:
            self.holders[frame] = self.holders[frame][1:]
            if not self.holders[frame]:
                dropped.append(frame)
        return dropped

    def release(self: Draft, table_id: int) -> None:
        frames = self.table(table_id).frames
        original(self, table_id)
        if frames and self._references.num_holders(frames[0]):
            self._references.drop(frames[:1], table_id)

    original = Draft._release
    patch.setattr(Blocks, "drop_references", drop_references)
    patch.setattr(Draft, "_release", release)


def frees_a_unit_twice(patch: pytest.MonkeyPatch) -> None:
    """The free queue gets a frame that is in it already."""

    def vacate(self: BlockStore, frame: int) -> None:
        self.blocks.vacate(frame)
        self.allocator.give_back(frame)
        self.allocator.give_back(frame)

    patch.setattr(BlockStore, "vacate", vacate)


def leaks_a_share(patch: pytest.MonkeyPatch) -> None:
    """A released table keeps its references to the blocks that it had matched."""

    def release(self: Draft, table_id: int) -> None:
        draft = self._changing(table_id)
        del draft.frames[: draft.cached_tokens // SIZE]
        original(self, table_id)

    original = Draft._release
    patch.setattr(Draft, "_release", release)


def forgets_a_share(patch: pytest.MonkeyPatch) -> None:
    """A second holder is not counted, so the block goes when the first one releases it."""

    def hold(self: BlockStore, frames: Sequence[int], holders: tuple[int, ...], now: float) -> None:
        original(self, [frame for frame in frames if not self.blocks.holders[frame]], holders, now)

    original = BlockStore.hold
    patch.setattr(BlockStore, "hold", hold)


def evicts_the_newest(patch: pytest.MonkeyPatch) -> None:
    """The cached queue is taken from its wrong end."""

    def grant(self: BlockStore, count: int, holders: tuple[int, ...], now: float) -> list[int]:
        for _ in range(count - self.allocator.num_free):
            newest = list(self.cached)[-1]
            self.cached.remove(newest)
            evict(self, newest, now)
        return original(self, count, holders, now)

    original = BlockStore.grant
    patch.setattr(BlockStore, "grant", grant)


def evicts_what_it_matched(patch: pytest.MonkeyPatch) -> None:
    """Matched blocks that are cached count as room for the fresh ones."""

    def plan(self: PoolState, request: TableRequest, packed: bytes, withheld: int) -> Plan:
        made = original(self, request, packed, withheld)
        made.spare = self.cut_store().available
        return made

    original = PoolState.plan
    patch.setattr(PoolState, "plan", plan)


def releases_heads_first(patch: pytest.MonkeyPatch) -> None:
    """Prefixes are eaten from their beginning."""

    def release(self: Draft, table_id: int) -> None:
        self._changing(table_id).frames.reverse()
        original(self, table_id)

    original = Draft._release
    patch.setattr(Draft, "_release", release)


def matches_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """A prompt of whole blocks is found whole, and nothing is left to compute."""

    def match(self: PrefixIndex, packed: bytes, salt: bytes) -> list[int]:
        return original(self, packed + bytes(4), salt)

    original = PrefixIndex.match
    patch.setattr(PrefixIndex, "match", match)


def gives_away_what_a_lost_worker_can_write(patch: pytest.MonkeyPatch) -> None:
    """A late lease is ended without waiting for its process."""

    def lose(self: WorkerLeases, lease: Lease, why: str, now: float) -> None:
        original(self, lease, why, now)
        for table in list(lease.tables.values()):
            self._state.release_table(table, 0.0)

    original = WorkerLeases.lose
    patch.setattr(WorkerLeases, "lose", lose)


def forks_without_counting(patch: pytest.MonkeyPatch) -> None:
    """A fork has the blocks, but no reference to the last of them."""

    def fork(self: Draft, operation: Fork) -> None:
        original(self, operation)
        if self._references._holds:
            frames, holder = self._references._holds[-1]
            self._references._holds[-1] = frames[:-1], holder

    original = Draft._fork
    patch.setattr(Draft, "_fork", fork)


def truncates_in_place(patch: pytest.MonkeyPatch) -> None:
    """Whoever shares the block, or finds it in the index, loses its end."""
    patch.setattr(Draft, "must_copy", lambda self, table_id, num_tokens: False)


def drops_what_was_never_written(patch: pytest.MonkeyPatch) -> None:
    """Truncation takes the blocks granted ahead with it."""

    def truncate(self: Draft, cut: Truncate) -> None:
        draft = self.table(cut.table_id)
        original(self, cut)
        for frame in reversed(draft.frames[-(-cut.num_tokens // SIZE) :]):
            self._references.drop([frame], cut.table_id)
            draft.frames.remove(frame)

    original = Draft._truncate
    patch.setattr(Draft, "_truncate", truncate)


def uses_a_reserved_block_twice(patch: pytest.MonkeyPatch) -> None:
    """A block that was taken stays in the reserve."""

    def apply(self: Draft, now: float) -> None:
        self._used_frames.clear()
        original(self, now)

    original = Draft.apply
    patch.setattr(Draft, "apply", apply)


def lets_a_shared_block_be_written(patch: pytest.MonkeyPatch) -> None:
    """Commits are believed whoever else has the block."""

    def plan_commit(self: Stepper, lease: Lease, commit: Commit, written: dict[int, int]) -> tuple[Table, bytes]:
        table = self._own(lease, commit.table_id)
        written[table.table_id] = written.get(table.table_id, table.num_tokens) + len(commit.token_ids)
        return table, pack_tokens(commit.token_ids)

    patch.setattr(Stepper, "_plan_commit", plan_commit)


def gives_a_lost_reserve_away(patch: pytest.MonkeyPatch) -> None:
    """The reserve of a lost worker is free before its process is gone."""

    def lose(self: WorkerLeases, lease: Lease, why: str, now: float) -> None:
        original(self, lease, why, now)
        for frame in list(lease.references):
            self._state.cut_store().release(frame, lease.lease_id, 0.0)
            del lease.references[frame]

    original = WorkerLeases.lose
    patch.setattr(WorkerLeases, "lose", lose)


def believes_the_last_pin_alone(patch: pytest.MonkeyPatch) -> None:
    """A pin that comes later replaces those before it on the blocks that both cover."""

    def strongest(self: KeptBlock) -> Retention | None:
        said = [*self.pins.values(), *(one.retention for one in self.after.values())]
        return said[-1] if said else None

    patch.setattr(KeptBlock, "strongest", strongest)


def unpins_what_others_keep(patch: pytest.MonkeyPatch) -> None:
    """The end of a pin is the end of all that covers its blocks."""

    def drop(self: PinTree, key: bytes) -> None:
        if (last := self._last.get(key)) is not None:
            for other in [one for one, block in self._last.items() if block is last or block is last.before]:
                original(self, other)

    original = PinTree.drop
    patch.setattr(PinTree, "drop", drop)


def ends_a_pin_with_its_last_block(patch: pytest.MonkeyPatch) -> None:
    """What is left of a prefix whose end was evicted is not kept any more."""

    def forget_evicted(self: PinTree, there: Container[int]) -> None:
        for key in [one for one, last in self._last.items() if last.block_id not in there]:
            self.drop(key)
        self.settle()
        original(self, there)

    original = PinTree.forget_evicted
    patch.setattr(PinTree, "forget_evicted", forget_evicted)


def keeps_heads_less_than_tails(patch: pytest.MonkeyPatch) -> None:
    """A block is kept by the pins that end with it, whatever is kept after it."""

    def strongest(self: KeptBlock) -> Retention | None:
        mine = [*self.pins.values()] or [one.retention for one in self.after.values() if one.retention is not None]
        return max(mine, key=lambda one: (one.pinned, one.priority), default=None)

    patch.setattr(KeptBlock, "strongest", strongest)
