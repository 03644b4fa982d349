"""One step of the engine, packed for the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from inferd.core.block_tables import BlockTables, ReserveShortError
from inferd.core.groups import follow
from inferd.core.limits import SCORED_ROWS, Limits
from inferd.core.ports import BlockCopy, StepInput, Target
from inferd.core.sequence import Sequence
from pagekernels.layout import slot_mapping, slot_of


@dataclass(frozen=True, slots=True)
class Guess:
    """The draft of a sequence that decodes in a step, computed behind its last token.

    What comes after each token of the draft is sampled from the logit rows from `row` on.
    """

    sequence: Sequence
    token_ids: Seq[int]
    row: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: how many tokens of each sequence it computes, and whose next token it samples, in logit_rows' order.

    Neither counts drafts, whose logit rows come behind those of `sampled`, in the order of drafts.
    prefill_tokens are those that belong to prompts, or were generated before a preemption. scored says whose prompt
    tokens the input's targets are, in their order: sequence, position of the first, count.
    """

    input: StepInput
    chunks: list[tuple[Sequence, int]]
    sampled: list[Sequence]
    prefill_tokens: int
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)
    drafts: list[Guess] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """What goes into a plan: decodes first, and the copies that have to be made before it writes.

    draft_tokens is how many those that decode would guess if nothing limited them; drafted are those that do, filled
    those whose tables may be full by this step. cached_tokens were found in the pool by those that begin with it.
    """

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    num_decodes: int = 0
    copies: list[BlockCopy] = field(default_factory=list)
    drafted: list[Sequence] = field(default_factory=list)
    draft_tokens: int = 0
    filled: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0

    def take_in(self, tables: BlockTables, sequence: Sequence, count: int) -> bool:
        """Put tokens of a sequence into the step; False if it has no block to write them to."""
        try:
            self.copies += tables.prepare(sequence.table_id, count)
        except ReserveShortError:
            return False
        self.chunks.append((sequence, count))
        self.filled.append(sequence)
        return True

    def fill(self, tables: BlockTables, limits: Limits, ready: list[Sequence]) -> None:
        """Fill up with chunks of what those that are `ready` have to compute, the most urgent first."""
        budget, scored_rows = limits.max_batch_tokens - self.num_decodes, SCORED_ROWS
        for sequence in sorted(ready, key=_rank) if len(ready) > 1 else ready:
            if budget <= 0:
                break
            count = chunk_size(sequence, budget, scored_rows)
            if sequence.search is not None:  # a beam that resumes gets its blocks from the reserve, one at a time
                count = min(count, tables.room(sequence.table_id) or tables.block_size)
            if count > 0 and self.take_in(tables, sequence, count):
                budget -= count
                scored_rows -= count if sequence.scores_prompt else 0
                self.cached_tokens += sequence.cached_tokens if sequence.started_at is None else 0

    def speculate(self, tables: BlockTables, limits: Limits, num_running: int) -> None:
        """Have those that decode guess, with what is left of the step's tokens and its max_num_seqs logit rows.

        And of the reserve: the blocks beyond one for each of the `num_running` sequences.
        """
        tokens = limits.max_batch_tokens - sum(count for _, count in self.chunks)
        unborn = sum(len(sequence.branches) for sequence, _ in self.chunks[self.num_decodes :])
        room = min(tokens, limits.max_num_seqs - len(self.chunks) - unborn)
        if room <= 0:
            return
        for sequence, _ in self.chunks[: self.num_decodes]:
            if sequence.speculation is None or room <= 0:
                continue
            assert sequence.table is not None
            self.draft_tokens += sequence.speculation.size
            table_id = sequence.table.table_id
            blocks = max(tables.spare_blocks - num_running, 0)
            places = tables.room(table_id) + blocks * tables.block_size
            draft = sequence.speculation.draft(min(room, places, sequence.max_length - sequence.length - 1))
            if draft:
                self.copies += tables.prepare(table_id, len(draft))
                sequence.draft = draft
                self.filled.append(sequence)
                self.drafted.append(sequence)
                room -= len(draft)

    def pack(self, number: int, block_size: int, now: float) -> Plan:
        """The plan with this number, launched now; its block tables have room for all that it writes."""
        scoring = any(sequence.scores_prompt for sequence, _ in self.chunks[self.num_decodes :])
        tokens, positions, slots, rows = list[int](), list[int](), list[int](), list[int]()
        tables: list[Seq[int]] = []
        sampled: list[Sequence] = []
        for sequence, count in self.chunks:
            first, entries = sequence.num_launched, sequence.entries
            tables.append(entries)
            if count == 1:  # of many decodes this is most of the work, so no lists of one
                tokens.append(sequence.next_id)
                positions.append(first)
                slots.append(slot_of(entries, first, block_size))
            else:
                tokens += sequence.tokens[first : first + count]
                positions += range(first, first + count)
                slots += slot_mapping(entries, first, first + count, block_size)
            if sequence.launch(count, len(rows), number, now):
                rows.append(len(tokens) - 1)
                sampled += follow(sequence, rows) if sequence.branches else (sequence,)
            if sequence.draft:
                end = first + 1 + len(sequence.draft)
                tokens += sequence.draft
                positions += range(first + 1, end)
                slots += slot_mapping(entries, first + 1, end, block_size)
        drafts = _guesses(self.drafted, rows)
        step = StepInput(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            q_lens=[count + len(sequence.draft) for sequence, count in self.chunks],
            kv_lens=[sequence.num_launched + len(sequence.draft) for sequence, _ in self.chunks],
            tables=tables,
            logit_rows=rows,
            copies=self.copies,
        )
        of_decodes = self.num_decodes + sum(len(each.token_ids) for each in drafts)
        plan = Plan(step, self.chunks, sampled, len(tokens) - of_decodes, drafts=drafts)
        return _scored(plan, self.num_decodes, of_decodes) if scoring else plan


def chunk_size(sequence: Sequence, budget: int, scored_rows: int) -> int:
    """How many tokens of its prompt a sequence computes next, within what is left of the step's limits."""
    count = min(sequence.num_prefill - sequence.num_launched, budget)
    return min(count, scored_rows) if sequence.scores_prompt else count


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.rank


def _guesses(drafted: list[Sequence], rows: list[int]) -> list[Guess]:
    """The drafts of a step whose logit rows are `rows`, to which theirs are added."""
    found: list[Guess] = []
    for sequence in drafted:
        first = rows[sequence.row] + 1
        found.append(Guess(sequence, sequence.draft, len(rows)))
        rows += range(first, first + len(sequence.draft))
    return found


def _scored(plan: Plan, num_decodes: int, row: int) -> Plan:
    """The plan with the prompt tokens that its chunks of prefill score; `row` is that of their first token."""
    targets: list[Target] = []
    scored: list[tuple[Sequence, int, int]] = []
    for sequence, count in plan.chunks[num_decodes:]:
        if sequence.scores_prompt:
            first = sequence.num_scored
            targets += sequence.targets(count, row)
            scored.append((sequence, first, sequence.num_scored - first))
        row += count
    return replace(plan, input=replace(plan.input, targets=targets), scored=scored)
