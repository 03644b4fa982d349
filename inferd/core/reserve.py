"""How many blocks a worker has in reserve: enough that no decode step waits for memd, and few beyond that. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from inferd.core.admission import CLAIM_EVERY_S
from inferd.core.block_tables import BlockTables
from inferd.core.groups import NOTHING, Ahead
from inferd.core.ports import Refusal
from inferd.core.sequence import Sequence

STEPS_AHEAD = 6
"""Steps within which memd answers, even under load: a round trip is 1 to 3 ms, a decode step 4 ms and more."""

DRAFT_STEPS_AHEAD = 2
"""The same for tokens that are guessed, which need not be: nothing waits for their blocks."""

LOOK_EVERY = 3
"""Steps from one look at what all sequences need to the next, fewer than STEPS_AHEAD: it costs time in each."""

SURPLUS = 8
"""Blocks beyond those needed that are kept, so that sequences that come and go do not move blocks to and fro."""

FIRST_REF = 1 << 63
"""Requests for the reserve are numbered from here on, those for tables below, as the front numbers them."""


class Reserve:
    """Asks for blocks before they are needed, and gives back what is not needed any more.

    A refused request is repeated with what memd said there is. If that is nothing, the blocks are claimed in the name
    of the most urgent table that needs one: memd then has less urgent ones yield, on whatever worker they are.
    """

    def __init__(self, tables: BlockTables, block_size: int) -> None:
        self._tables, self._size = tables, block_size
        self._last_ref = FIRST_REF
        self._available: int | None = None  # as of the last refusal, None after a grant
        self._claimed_at: float | None = None
        self._total = 0  # blocks of the pool, as of the last refusal
        self._seen, self._looks = 0, 0  # how many ran at the last look, and the steps since

    @property
    def claims(self) -> bool:
        """Whether a claim is open, which has to be repeated every CLAIM_EVERY_S."""
        return self._claimed_at is not None

    def keep(self, running: Seq[Sequence], now: float, draft_tokens: int = 0, ahead: Ahead = NOTHING) -> None:
        """Ask for what `running` needs within the next steps, or give back what it does not need.

        And for what it would guess, `draft_tokens` a step, and what is `ahead`, where there is enough: those blocks are
        never claimed.
        """
        spare, more = self._tables.spare_blocks, ahead.blocks
        more += -(-draft_tokens * DRAFT_STEPS_AHEAD // self._size) if running else 0
        if spare > len(running) + more + SURPLUS:
            # Forked ones may need two soon: a copy of the block they share, and the one after it.
            most = max(len(running), self._need(running, 2 * STEPS_AHEAD)[0]) + more
            self._tables.give_back(max(spare - most - SURPLUS // 2, 0))
        elif not running and not more and spare:
            self._tables.give_back(spare)
        if not running:
            self._available = self._claimed_at = None
        if self._tables.awaits_reserve:
            return
        num_tables = 2 * ahead.table_ids if self._tables.spare_ids < ahead.table_ids else 0
        if spare < len(running) + more:  # else within so few steps none needs two, if it computes one token in each
            self._keep_blocks(running, now, more, num_tables)
        elif num_tables:
            self._ask(spare, num_tables)

    def _keep_blocks(self, running: Seq[Sequence], now: float, more: int, num_tables: int) -> None:
        """Ask for what is missing of what is needed soon, and of so many blocks more; and for table ids, if any."""
        self._looks += 1
        spare = self._tables.spare_blocks
        looked = self._looks < LOOK_EVERY and self._seen == len(running)
        if spare and self._available is None and looked and not num_tables:
            return
        self._seen, self._looks = len(running), 0
        low, needy = self._need(running, STEPS_AHEAD)
        if spare >= low and (self._available is not None or not more):
            self._claimed_at = None
            if num_tables:
                self._ask(spare, num_tables)
        elif self._available is None:
            self._ask(max(self._need(running, 2 * STEPS_AHEAD)[0], len(running)) + more, num_tables)
        elif self._available > 0:
            # Blocks that came free for an open claim are held back for its table, so they are asked for in its name.
            for_table_id = needy if self._claimed_at is not None and needy is not None else 0
            self._ask(min(low, spare + self._available), num_tables, for_table_id)
        elif self._claimed_at is None or now - self._claimed_at >= CLAIM_EVERY_S:
            self._claimed_at = now
            assert needy is not None
            self._ask(min(low, self._total), num_tables, needy)  # more would be refused without a claim

    def granted(self) -> None:
        """Memd has added to the reserve."""
        self._available = self._claimed_at = None

    def refused(self, refusal: Refusal) -> None:
        """Memd has not."""
        self._tables.refused(refusal.ref)
        self._total = refusal.total_blocks
        # What there is may be claimed by others: what was tried once in vain is claimed.
        tried = self._available is not None and self._available > 0
        self._available = 0 if tried else refusal.available_blocks

    def freed(self) -> None:
        """News that there are blocks again: a claim is repeated now."""
        if self._claimed_at is not None:
            self._claimed_at = float("-inf")

    def _ask(self, num_blocks: int, num_tables: int, for_table_id: int = 0) -> None:
        self._last_ref += 1
        self._tables.ask(self._last_ref, num_blocks, num_tables, for_table_id)

    def _need(self, running: Seq[Sequence], steps: int) -> tuple[int, int | None]:
        """Blocks that the sequences need for so many steps, and the most urgent table among those that need some."""
        need, first = 0, None
        for sequence in running:
            table = sequence.table
            if table is None or sequence.yielding:
                continue
            positions = min(steps, sequence.max_length - 1 - sequence.num_launched)
            missing = positions - (len(table.block_ids) * self._size - table.num_prepared)
            replaced = sequence.forked and positions > 0 and self._tables.shares_next(table)
            if missing > 0 or replaced:
                need += max(-(-missing // self._size), 0) + replaced
                if first is None or sequence.rank < first.rank:
                    first = sequence
        return need, first.table.table_id if first is not None and first.table is not None else None
