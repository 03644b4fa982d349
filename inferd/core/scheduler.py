"""Which sequences compute which tokens in the next step, and what memd is told and asked.

Pure: events of the pool and requests of the front go in, a `Step` for memd and a `Plan` for the model come out.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferd.core.admission import Admission
from inferd.core.block_tables import BlockTables
from inferd.core.groups import Groups
from inferd.core.limits import Limits
from inferd.core.plan import Draft, Plan
from inferd.core.ports import Grant, PoolInfo, Refusal, Remap, Step
from inferd.core.refusals import check_width, queue_full, too_large, why_cornered
from inferd.core.reserve import Reserve
from inferd.core.sequence import Phase, Sequence
from pagepool.errors import PagepoolError


class Scheduler:
    """Iteration-level continuous batching over tables that grow with their sequences.

    A table is granted for what is known of its sequence and a token more; after that it grows from the reserve, which
    is asked for ahead. When the pool is full, whoever memd names yields: its blocks are given up as soon as no step of
    it is in flight, it waits again at its place in the queue, and resumes with all the tokens it had. After each time
    it asks for more of what it will need at once, and after PATIENCE times for all of it, so that it is not preempted
    for ever. Every step decodes first and fills up with chunks of prefill, the most urgent first.

    Steps may be planned before the tokens of the one before are known: what a sequence decodes then is a reference to
    them (see StepInput). For that each plan takes in every sequence that decodes, but for those whose history decides
    what comes next or that had no block: they are left out until their last token is known. Every plan is launched, and
    collected in that order; what a sequence that has ended still has in flight is then dropped. Not thread-safe.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._block_size = self._total_blocks = 0
        self._queue = Admission(limits.prefix_wait_s)
        self.prefix_waits = self._queue.waits
        self._tables = BlockTables(1)  # of no pool yet: attach makes those of the pool
        self._reserve = Reserve(self._tables, 1)
        self._groups = Groups(self._tables)
        self._yielding: list[Sequence] = []
        self._num_plans = self._draft_tokens = 0
        self.admitting = False
        self.num_preemptions = self.num_starved_steps = self.cached_tokens = 0
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> list[Sequence]:
        """Those that wait for blocks, in order."""
        return self._queue.waiting

    @property
    def claims(self) -> bool:
        """Whether blocks are claimed of memd, which has to be repeated every CLAIM_EVERY_S."""
        return self._reserve.claims or self._queue.claims

    @property
    def asks_at(self) -> float | None:
        """When a sequence has waited long enough for a prefix, and is to be asked for without; None if none waits."""
        return self._queue.waits.next_end if self.admitting else None

    def attach(self, info: PoolInfo) -> None:
        """Work with this pool, of which nothing is held yet."""
        self._block_size, self._total_blocks = info.block_size, info.num_blocks
        self._tables = BlockTables(info.block_size)
        self._reserve, self._groups = Reserve(self._tables, info.block_size), Groups(self._tables)
        self._queue.reset()
        self.admitting = True

    def lose(self) -> list[Sequence]:
        """All tables are gone: the sequences that had begun, to be ended by the caller. The others wait again."""
        lost = [sequence for sequence in self.running if sequence.started_at is not None]
        for sequence in [each for each in self.running if each.started_at is None]:
            sequence.send_back()
            self._queue.add(sequence)
        over = [each for one in lost + self._queue.take_suspended() for each in (one, *one.branches)]
        for sequence in over:
            sequence.finish()
        self.running, self._yielding, self._tables = [], [], BlockTables(1)
        self._reserve, self._groups = Reserve(self._tables, 1), Groups(self._tables)
        self._queue.reset()
        self.admitting = False
        return [sequence for sequence in over if sequence.owner is sequence]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence and its branches.

        PagepoolError QUEUE_FULL, REQUEST_TOO_LARGE if the pool can never hold it, or INVALID_FIELD if no step can.
        """
        check_width(sequence, self._limits)
        for _, error in self._unfit([sequence]):
            raise error
        if len(self.waiting) >= self._limits.max_queue + self._limits.max_num_seqs - len(self.running):
            raise queue_full(len(self.waiting), self._limits)
        self._queue.add(sequence)

    def unfit(self) -> list[tuple[Sequence, PagepoolError]]:
        """Those that came before the pool was there, and that it can never hold; the caller ends them."""
        return self._unfit(self.waiting)

    def finish(self, sequence: Sequence) -> None:
        """A sequence is over, wherever it stands: its table goes back once no step is in flight that writes to it.

        So are the beams of its search. Its branches are not: the caller ends them, before it or by themselves.
        """
        if sequence.stem is not None:
            sequence.stem.branches.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self._queue.drop(sequence)
            if sequence.suspended_id and not self._queue.awaits(sequence):  # else the answer decides how
                self._tables.drop_suspended(sequence.suspended_id)
        else:
            self._groups.leave(sequence)
            for each in sequence.members:
                self.running.remove(each)
                if not each.in_flight:
                    self._release(each)
                if each is not sequence:
                    each.finish()
        sequence.finish()

    def granted(self, grant: Grant) -> None:
        """Memd has granted something."""
        if self._tables.has_asked(grant.ref):
            self._tables.granted(grant)
            self._reserve.granted()
            return
        sequence = self._queue.answered(grant.ref)
        table = self._tables.created(grant)
        if sequence.phase is Phase.FINISHED:
            self._tables.release(table.table_id)
        elif self._queue.overtakes(sequence):
            if sequence.suspended_id:
                self._tables.suspend(table.table_id, sequence.tokens[table.num_tokens :])
            else:
                self._tables.release(table.table_id)
            self._queue.freed()
        else:
            self._queue.admit(sequence)
            self.running.append(sequence)
            self._groups.join(sequence)
            sequence.admit(table)

    def refused(self, refusal: Refusal) -> tuple[Sequence, PagepoolError] | None:
        """Memd has refused something; a sequence that waiting does not help, which the caller ends with this error."""
        if self._tables.has_asked(refusal.ref):
            self._reserve.refused(refusal)
            cornered = ((one, why_cornered(one, self._block_size, refusal)) for one in self.running)
            return next(((one.owner, error) for one, error in cornered if error is not None), None)
        sequence = self._queue.answered(refusal.ref)
        if sequence.phase is Phase.FINISHED:
            if sequence.suspended_id:
                self._tables.drop_suspended(sequence.suspended_id)
            return None
        if (error := self._queue.why_never(sequence, self._block_size, refusal)) is not None:
            return sequence, error
        if refusal.pending:
            self._queue.rest(sequence)
            return None
        self._queue.refuse(sequence)
        for other in [each for each in self.running if not each.has_begun and each.rank > sequence.rank]:
            self._take_back(other)
            self._queue.freed()
        return None

    def freed(self) -> None:
        """News from memd: blocks have come free, or a prefix that is waited for is there or will not be."""
        self._queue.news()
        self._reserve.freed()

    def remap(self, news: Remap) -> None:
        """News from memd: a block is in another place, for steps to come."""
        self._tables.remap(news)

    def victim(self, table_id: int) -> None:
        """News from memd: this table's blocks are for somebody more urgent."""
        for sequence in [each for each in self.running if each.table_id == table_id and not each.yielding]:
            for each in sequence.members:
                each.yielding = True
            self._yielding.append(sequence.owner)

    def take_steps(self, now: float) -> list[Step]:
        """Everything that memd has to be told and asked since the last call, to be sent in this order."""
        self._yielding = [each for each in self._yielding if each.phase is not Phase.FINISHED]
        for sequence in [each for each in self._yielding if not any(beam.in_flight for beam in each.members)]:
            sequence.num_preemptions += 1
            self.num_preemptions += 1
            self._take_back(sequence)
        self._groups.place(self.running)
        num_running = len(self.running) + self._groups.ahead(()).sequences
        room = self._limits.max_num_seqs - num_running - self._queue.num_asked
        for sequence in self._queue.ask(room, now) if self.admitting else ():
            self._tables.create(self._queue.request(sequence, self._block_size, num_running, self._limits))
        self._reserve.keep(self.running, now, self._draft_tokens, self._groups.ahead(self._queue.asked))
        return self._tables.take_steps()

    def plan(self, now: float) -> Plan | None:
        """The next step, to be launched, or None if there is nothing to compute."""
        draft, ready, starved = Draft(), [], False
        for sequence in self.running:
            if not sequence.num_pending:
                continue
            if sequence.num_launched < sequence.num_prefill:
                ready.append(sequence)
            elif sequence.num_launched < len(sequence.tokens) or sequence.sampled_in == self._num_plans:
                table = sequence.table
                if table is not None and table.num_prepared + 1 < table.num_writable:  # mostly, so without a call
                    table.num_prepared += 1
                    draft.chunks.append((sequence, 1))
                else:
                    starved |= not draft.take_in(self._tables, sequence, 1)
        draft.num_decodes = len(draft.chunks)
        self.num_starved_steps += starved
        draft.fill(self._tables, self._limits, ready)
        if not draft.chunks:
            return None
        draft.speculate(self._tables, self._limits, len(self.running))
        self._draft_tokens = draft.draft_tokens
        self.cached_tokens += draft.cached_tokens
        self._num_plans += 1
        plan = draft.pack(self._num_plans, self._block_size, now)
        self._grow(draft.filled)
        return plan

    def collected(self, plan: Plan, *, written: bool = True) -> None:
        """A step is over. Unless it failed, the KV of its tokens has been written, and memd shall know."""
        self._tables.copied(len(plan.input.copies))
        for sequence, count in plan.chunks:
            sequence.in_flight -= 1
            if sequence.phase is not Phase.FINISHED:
                if written and sequence.speculation is None:
                    self._tables.commit(sequence.table_id, sequence.advance(count))
                elif written:
                    self._commit_draft(sequence, count)
                if sequence.branches and sequence.num_computed == sequence.num_prompt:
                    self.running += self._groups.branch_off(sequence, self._queue)
            elif not sequence.in_flight:
                self._release(sequence)

    def _commit_draft(self, sequence: Sequence, count: int) -> None:
        """Commit what is right of a draft too; what was wrong is written anew."""
        self._tables.commit(sequence.table_id, sequence.advance(count + len(sequence.draft)))
        sequence.draft = ()
        if not sequence.in_flight:
            self._tables.retract(sequence.table_id, sequence.num_launched)

    def _unfit(self, sequences: list[Sequence]) -> list[tuple[Sequence, PagepoolError]]:
        size, total = self._block_size, self._total_blocks
        return [(one, too_large(one, size, total)) for one in sequences if size and one.blocks_needed(size) > total]

    def _release(self, sequence: Sequence) -> None:
        self._tables.release(sequence.table_id)
        self._queue.freed()

    def _take_back(self, sequence: Sequence) -> None:
        """It waits again: with its tokens in memd, unless it wants its whole prompt computed or has never begun."""
        for each in sequence.members:
            self.running.remove(each)
        if sequence.yielding:
            self._yielding.remove(sequence)
        self._groups.leave(sequence)
        table_id = sequence.table_id
        if sequence.search is not None:
            sequence.search.save(self._tables)
            sequence.send_back()
        elif sequence.started_at is None or sequence.scores_prompt:
            self._tables.release(table_id)
            sequence.send_back()
        else:
            self._tables.suspend(table_id, sequence.suspend())
        self._queue.add(sequence)

    def _grow(self, sequences: Iterable[Sequence]) -> None:
        """Give tables that are full by this step their next block: memd then hears of it before it is written."""
        for sequence in sequences:
            if self._tables.room(sequence.table_id) == 0 and sequence.num_launched < sequence.max_length - 1:
                self._tables.take_ahead(sequence.table_id)
