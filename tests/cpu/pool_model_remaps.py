"""The model's answer to blocks that move: who may still read what, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memd.core.lease import Remap
from memd.core.values import LeaseState
from tests.cpu.pool_model_values import ACK_TIMEOUT, ModelLease

if TYPE_CHECKING:
    from tests.cpu.pool_model import Model


class Remaps:
    """Equal blocks are merged, and the workers concerned are told."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def listen(self, lease_id: int, now: float) -> None:
        lease = self.model.leases[lease_id]
        lease.listens = True
        lease.news = [*lease.unread]
        self.wait(lease, now)

    def merge(self, sealed: list[int], now: float) -> None:
        for one in sealed:
            block = self.model.blocks.get(one)
            if block is None or block.prefix is None:
                continue
            first = self.model.index.get(block.prefix, one)
            tables = [holder for holder in block.holders if holder[1]]
            leases = [self.model.leases[lease] for lease, _ in tables]
            same = first != one and self.model.blocks[first].identity == block.identity
            if not same or not all(lease.listens or not lease.worker for lease in leases):
                continue
            for holder in tables:
                self.move(holder, one, first, now)
            self.model.counts["merged"] += 1

    def move(self, holder: tuple[int, int], old: int, new: int, now: float) -> None:
        table, lease = self.model.tables[holder[1]], self.model.leases[holder[0]]
        index = table.blocks.index(old)
        self.model.hold(new, holder)
        table.blocks[index] = new
        if lease.worker:
            lease.last_remap += 1
            remap = Remap(lease.last_remap, holder[1], index, old, new, self.model.entry(new))
            lease.unread.append(remap)
            lease.news.append(remap)
            self.model.blocks[old].holders.append((holder[0], 0))
            self.model.counts["remaps"] += 1
            if len(lease.unread) == 1:
                self.wait(lease, now)
        self.model.release(old, holder)

    def acknowledge(self, lease_id: int, sequence: int, now: float) -> None:
        lease = self.model.leases[lease_id]
        done = [remap for remap in lease.unread if remap.sequence <= sequence]
        self.forget(lease_id, done)
        if done:
            self.wait(lease, now)

    def fence(self, lease_id: int) -> None:
        lease = self.model.leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.LOST:
            lease.fenced = True
            self.forget(lease_id, [*lease.unread])

    def forget(self, lease_id: int, remaps: list[Remap]) -> None:
        lease = self.model.leases[lease_id]
        lease.unread = [remap for remap in lease.unread if remap not in remaps]
        for remap in remaps:
            self.model.release(remap.old_block_id, (lease_id, 0))

    def is_retired(self, one: int) -> bool:
        readers = sum(remap.old_block_id == one for lease in self.model.leases.values() for remap in lease.unread)
        return readers == len(self.model.blocks[one].holders)

    @staticmethod
    def wait(lease: ModelLease, now: float) -> None:
        lease.ack_deadline = now + ACK_TIMEOUT if lease.unread else float("inf")

    @staticmethod
    def as_of_now(lease: ModelLease, answers: list[Any]) -> list[Any]:
        """Answers that are repeated name the blocks that the tables have now."""
        made = []
        for kind, *rest in answers:
            if kind == "grant":
                ids, entries = list(rest[3]), list(rest[4])
                for remap in lease.unread:
                    for at in (at for at, one in enumerate(ids) if one == remap.old_block_id):
                        ids[at], entries[at] = remap.block_id, remap.entry
                rest[3:5] = [ids, entries]
            made.append((kind, *rest))
        return made
