"""What memd is to be told next, in an order that memd's own order within a step does not upset, and when. Pure.

Within a step memd applies commits first, then operations, then requests. So a commit may stand in one step with
operations that came before it only where it says the same when it is applied before them.

What a step may cost memd, which serves nobody else meanwhile, is limited: the rest is said in further steps.

A block that a step copies from is this worker's, for memd, until that step has been collected: else it could be given
to another worker, which may write it before the copy has read it. Where such a source comes from, and who holds it:

* copy-on-write: a table writes to a block that others of the worker have too. They may let go of it while the copy is
  queued, and with CopyOnWrite so does the table. So that word, and all that is said after it, is kept back until the
  copy is over; till then memd has the source in the table. Within the worker, whoever writes it next does so behind the
  copy, on the same stream.
* truncation inside a block that is sealed, or that others have too: the same, with Truncate.
* a part of a block that matched (Grant.copy_source): memd holds the source for the lease until the table is committed
  to, suspended or released, and none of that is said while a step of the table is in flight. Nothing is kept back.
* a block without tokens is replaced, and nothing is read.

A Remap takes nothing of this away: what the worker's tables had is quarantined until the worker acknowledges it, when
all steps are over that were launched before it heard (inferd.core.acknowledgements), and what is held directly stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from inferd.core.ports import Commit, Step, TableRequest
from pagepool.limits import (
    MAX_COMMIT_BLOCKS,
    MAX_STEP_REFERENCES,
    MAX_STEP_REQUESTS,
    OPERATION_REFERENCES,
    num_blocks_written,
)
from pagepool.pool_values import CopyOnWrite, ReserveRequest, TableOperation, Take, Truncate


@dataclass(slots=True)
class _Words:
    """What one step message will say, once so many `copies` are over.

    `room`: how many tokens a table with operations here could have before them. `cost` is what memd counts, in
    references.
    """

    commits: list[Commit] = field(default_factory=list)
    operations: list[TableOperation] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    creates: list[TableRequest] = field(default_factory=list)
    reserves: list[ReserveRequest] = field(default_factory=list)
    room: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    cost: int = 0
    copies: int = 0

    def step(self) -> Step:
        return Step(
            commits=self.commits,
            operations=self.operations,
            frees=self.frees,
            creates=self.creates,
            reserves=self.reserves,
        )


class StepWords:
    """Collects words for memd. Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._words = [_Words()]
        self._copies = self._copied = 0  # of all that were ever made

    def copy(self) -> None:
        """A block is copied that nothing gives up. Copies are over in the order in which they are named here."""
        self._copies += 1

    def copied(self, count: int) -> None:
        """The next so many copies are over."""
        self._copied += count

    def commit(self, table_id: int, token_ids: Sequence[int], num_tokens: int) -> None:
        """The KV of these tokens has been written; the table has `num_tokens` in all then."""
        count = len(token_ids)
        written = 1 if count == 1 else num_blocks_written(num_tokens, count, self._size)
        if written > MAX_COMMIT_BLOCKS:  # more than one step may say
            first = num_tokens - count
            ahead = (first // self._size + MAX_COMMIT_BLOCKS) * self._size - first
            self.commit(table_id, token_ids[:ahead], first + ahead)
            self.commit(table_id, token_ids[ahead:], num_tokens)
            return
        words, cost = self._words[-1], OPERATION_REFERENCES * written
        full = words.cost + cost > MAX_STEP_REFERENCES
        if full or words.closed or (words.room and num_tokens > words.room.get(table_id, num_tokens)):
            words = _Words()
            self._words.append(words)
        words.cost += cost
        words.commits.append(Commit(table_id, token_ids))

    def operate(
        self, operation: TableOperation, num_blocks: int = 0, *, unshares: bool = False, copies: bool = False
    ) -> None:
        """An operation after which all tables have to be committed to later, if it `unshares` blocks of others.

        It adds `num_blocks` to a table or drops them from one, those not counted that it takes from the reserve. If it
        gives up a block that it `copies`, it is kept back, with all that follows, until the copy is over.
        """
        words = self._for(num_blocks + OPERATION_REFERENCES * (1 + _num_named(operation)))
        words.operations.append(operation)
        words.closed |= unshares
        if copies:
            self.copy()
            words.copies = self._copies

    def limit(self, table_id: int, num_tokens: int) -> None:
        """Commits that take a table beyond so many tokens have to come after the operation before this call."""
        room = self._words[-1].room
        room[table_id] = min(room.get(table_id, num_tokens), num_tokens)

    def free(self, block_id: int) -> None:
        """A block of the reserve goes back."""
        self._for(OPERATION_REFERENCES).frees.append(block_id)

    def create(self, request: TableRequest) -> None:
        """A table is asked for."""
        self._asking().creates.append(request)

    def reserve(self, request: ReserveRequest) -> None:
        """More for the reserve is asked for."""
        self._asking().reserves.append(request)

    def _asking(self) -> _Words:
        """The step that has room for a request."""
        words = self._words[-1]
        if len(words.creates) + len(words.reserves) >= MAX_STEP_REQUESTS:
            words = _Words()
            self._words.append(words)
        return words

    def _for(self, cost: int) -> _Words:
        """The step that has room for something that costs so much."""
        words = self._words[-1]
        if words.cost and words.cost + cost > MAX_STEP_REFERENCES:
            words = _Words()
            self._words.append(words)
        words.cost += cost
        return words

    def take(self) -> list[Step]:
        """All that need not be kept back, as steps to be sent in this order; mostly one, none if there is nothing."""
        ready = list(takewhile(lambda each: each.copies <= self._copied, self._words))
        self._words = [*self._words[len(ready) :], _Words()]
        return [step for step in (each.step() for each in ready) if step]


def _num_named(operation: TableOperation) -> int:
    """Blocks of the reserve that an operation takes."""
    match operation:
        case CopyOnWrite(block_ids=ids) | Take(block_ids=ids):
            return len(ids)
        case Truncate(block_id=block_id):
            return int(block_id > 0)
    return 0
