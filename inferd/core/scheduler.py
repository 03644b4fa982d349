"""Which sequences compute which tokens in the next step, and what memd is told and asked.

Pure: events of the pool and requests of the front go in, a `Step` for memd and a `Plan` for the model come out.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from itertools import islice

from inferd.core.ports import Commit, Grant, PoolInfo, Refusal, Step, StepInput, TableRequest, Target
from inferd.core.sequence import Phase, Sequence
from pagekernels.layout import slot_mapping, slot_of
from pagepool.errors import PagepoolError, Reason, invalid_field

SCORED_ROWS = 128
"""Rows of a step whose logits are kept for prompt logprobs: 128 MB of them for a vocabulary of 256 Ki tokens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch_tokens per step, of at most max_num_seqs sequences; max_queue requests may wait beyond those that run.

    PagepoolError (INVALID_FIELD, naming the flag) where no step could be built.
    """

    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    max_queue: int = 1024

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise invalid_field("--max-num-seqs", self.max_num_seqs, "at least 1", "64 is the default")
        if self.max_batch_tokens < self.max_num_seqs:
            limit = f"at least --max-num-seqs ({self.max_num_seqs}), one token for each sequence that decodes"
            raise invalid_field("--max-batch-tokens", self.max_batch_tokens, limit, "raise it, or lower --max-num-seqs")
        if self.max_queue < 0:
            raise invalid_field("--max-queue", self.max_queue, "0 or more", "0 refuses whatever cannot run at once")


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: how many tokens of each sequence it computes, and whose next token it samples, in logit_rows' order.

    prefill_tokens are those that belong to prompts. scored says whose prompt tokens the input's targets are, in their
    order: sequence, position of the first, count.
    """

    input: StepInput
    chunks: list[tuple[Sequence, int]]
    sampled: list[Sequence]
    prefill_tokens: int
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)


class Scheduler:
    """Iteration-level continuous batching over tables that hold a whole request each.

    Admission is strictly in order (priority, then first come, first served). Several tables may be asked for in one
    step; if one is refused, those behind it that were granted are given back, and from then on only the head of the
    queue asks, each time that blocks have come free. Every step decodes first and fills up with chunks of prefill.

    Steps may be planned before the tokens of the one before are known: what a sequence decodes then is a reference to
    them (see StepInput). For that each plan takes in every sequence that decodes, but for those whose history decides
    what comes next: they are left out until their last token is known, and so take part in every other step. Every
    plan is launched, and collected in that order; what a sequence that has ended still has in flight is then dropped.
    Not thread-safe.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._block_size = self._total_blocks = 0
        self._commits: list[Commit] = []
        self._releases: list[int] = []
        self._asked: dict[int, Sequence] = {}
        self._refused: Sequence | None = None
        self._may_ask = True
        self.admitting = False
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def attach(self, info: PoolInfo) -> None:
        """Work with this pool, of which nothing is held yet."""
        self._block_size, self._total_blocks = info.block_size, info.num_blocks
        self.admitting = self._may_ask = True

    def lose(self) -> list[Sequence]:
        """All tables are gone: the sequences that had begun, to be ended by the caller. The others wait again."""
        lost = [sequence for sequence in self.running if sequence.started_at is not None]
        for sequence in self._unstarted():
            self._send_back(sequence)
        for sequence in lost:
            sequence.finish()
        self.running, self._commits, self._releases, self._asked = [], [], [], {}
        self._refused, self.admitting = None, False
        return lost

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. PagepoolError QUEUE_FULL, or REQUEST_TOO_LARGE if the pool can never hold it."""
        blocks = sequence.blocks_needed(self._block_size) if self._block_size else 0
        if blocks > self._total_blocks:
            raise self.too_large(sequence, self._total_blocks)
        limit = self._limits.max_queue + self._limits.max_num_seqs - len(self.running)
        if len(self.waiting) >= limit:
            message = f"{len(self.waiting)} requests wait, and --max-queue is {self._limits.max_queue}; retry later"
            raise PagepoolError(
                Reason.QUEUE_FULL, message, retry_after_s=1.0, waiting=len(self.waiting), limit=self._limits.max_queue
            )
        bisect.insort(self.waiting, sequence, key=_rank)
        if self.waiting[0] is sequence:  # it may need less than the head that was refused
            self._may_ask = True

    def too_large(self, sequence: Sequence, total_blocks: int) -> PagepoolError:
        """The error of a request that the whole pool cannot hold."""
        size, blocks = self._block_size, sequence.blocks_needed(self._block_size)
        prompt, most = len(sequence.submit.prompt), sequence.submit.max_tokens
        message = (
            f"{prompt} prompt tokens and max_tokens {most} need {blocks} blocks of {size} tokens, but the whole pool "
            f"has {total_blocks}; shorten the prompt, lower max_tokens, or give memd a larger --pool-bytes"
        )
        values = {"prompt_tokens": prompt, "max_tokens": most, "num_blocks": blocks, "block_size": size}
        return PagepoolError(Reason.REQUEST_TOO_LARGE, message, field="max_tokens", total_blocks=total_blocks, **values)

    def finish(self, sequence: Sequence) -> None:
        """A sequence is over, wherever it stands: its table goes back once no step is in flight that writes to it."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            if sequence is self._refused:
                self._refused = None
        else:
            self.running.remove(sequence)
            if not sequence.in_flight:
                self._releases.append(sequence.table_id)
        sequence.finish()

    def granted(self, grant: Grant) -> None:
        """A table was created by memd."""
        sequence = self._asked.pop(grant.ref)
        overtaking = self._refused is not None and sequence.rank > self._refused.rank
        if sequence.phase is Phase.FINISHED or overtaking:
            self._releases.append(grant.table_id)
            return
        self._refused = None
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.admit(grant)

    def refused(self, refusal: Refusal) -> Sequence | None:
        """A table was refused; the sequence if it can never be granted, which the caller ends."""
        sequence = self._asked.pop(refusal.ref)
        if sequence.phase is Phase.FINISHED:
            return None
        if refusal.never:
            return sequence
        if self._refused is None or sequence.rank <= self._refused.rank:
            # A refusal further back says nothing about the head: news that came for it meanwhile stands.
            self._refused, self._may_ask = sequence, False
        for other in self._unstarted():
            if other.rank > sequence.rank:
                self._send_back(other)
        return None

    def freed(self) -> None:
        """News from memd: blocks have come free."""
        self._may_ask = True

    def take_step(self) -> Step:
        """Everything that memd has to be told and asked since the last call."""
        self._may_ask |= bool(self._releases)
        creates = [self._request(sequence) for sequence in self._asking()]
        step = Step(self._commits, self._releases, creates)
        self._commits, self._releases = [], []
        return step

    def plan(self, now: float) -> Plan | None:
        """The next step, to be launched, or None if there is nothing to compute."""
        ready = [sequence for sequence in self.running if sequence.num_pending]
        chunks = [(sequence, 1) for sequence in ready if sequence.num_launched >= sequence.num_prompt]
        num_decodes, budget, scored_rows = len(chunks), self._limits.max_batch_tokens - len(chunks), SCORED_ROWS
        for sequence in ready if num_decodes < len(ready) else ():
            # Not positive where it decodes, or where nothing is left of the budget.
            count = min(sequence.num_prompt - sequence.num_launched, budget)
            if count > 0 and sequence.scores_prompt:
                count = min(count, scored_rows)
                scored_rows -= count
            if count > 0:
                chunks.append((sequence, count))
                budget -= count
        if not chunks:
            return None
        scoring = any(sequence.scores_prompt for sequence, _ in chunks[num_decodes:])
        plan = self._pack(chunks, num_decodes, now)
        return _scored(plan, num_decodes) if scoring else plan

    def collected(self, plan: Plan, *, written: bool = True) -> None:
        """A step is over. Unless it failed, the KV of its tokens has been written, and memd shall know."""
        for sequence, count in plan.chunks:
            sequence.in_flight -= 1
            if sequence.phase is not Phase.FINISHED:
                if written:
                    self._commits.append(Commit(sequence.table_id, sequence.advance(count)))
            elif not sequence.in_flight:
                self._releases.append(sequence.table_id)

    def _unstarted(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.started_at is None]

    def _send_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._releases.append(sequence.send_back())
        bisect.insort(self.waiting, sequence, key=_rank)

    def _asking(self) -> list[Sequence]:
        room = self._limits.max_num_seqs - len(self.running) - len(self._asked)
        if not self.admitting or room <= 0:
            return []
        if self._refused is not None:
            return self.waiting[:1] if self._may_ask and not self._asked else []
        return list(islice((waiting for waiting in self.waiting if waiting.request not in self._asked), room))

    def _request(self, sequence: Sequence) -> TableRequest:
        self._asked[sequence.request] = sequence
        return TableRequest(
            ref=sequence.request,
            token_ids=sequence.tokens,
            num_blocks=sequence.blocks_needed(self._block_size),
            salt=sequence.submit.salt,
            priority=sequence.submit.priority,
            no_match=sequence.scores_prompt,
        )

    def _pack(self, chunks: list[tuple[Sequence, int]], num_decodes: int, now: float) -> Plan:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        sampled: list[Sequence] = []
        size = self._block_size
        for sequence, count in chunks:
            first = sequence.num_launched
            if count == 1:  # of many decodes this is most of the work, so no lists of one
                tokens.append(sequence.next_id)
                positions.append(first)
                slots.append(slot_of(sequence.entries, first, size))
            else:
                tokens += sequence.tokens[first : first + count]
                positions += range(first, first + count)
                slots += slot_mapping(sequence.entries, first, first + count, size)
            if sequence.launch(count, len(rows), now):
                rows.append(len(tokens) - 1)
                sampled.append(sequence)
        step = StepInput(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            q_lens=[count for _, count in chunks],
            kv_lens=[sequence.num_launched for sequence, _ in chunks],
            tables=[sequence.entries for sequence, _ in chunks],
            logit_rows=rows,
        )
        return Plan(step, chunks, sampled, len(tokens) - num_decodes)


def _scored(plan: Plan, num_decodes: int) -> Plan:
    """The plan with the prompt tokens that its chunks of prefill score."""
    targets: list[Target] = []
    scored: list[tuple[Sequence, int, int]] = []
    row = num_decodes
    for sequence, count in plan.chunks[num_decodes:]:
        if sequence.scores_prompt:
            first = sequence.num_scored
            targets += sequence.targets(count, row)
            scored.append((sequence, first, sequence.num_scored - first))
        row += count
    return replace(plan, input=replace(plan.input, targets=targets), scored=scored)


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.rank
