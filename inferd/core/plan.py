"""One step of the engine, packed for the model. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from inferd.core.ports import BlockCopy, StepInput, Target
from inferd.core.sequence import Sequence
from pagekernels.layout import slot_mapping, slot_of


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: how many tokens of each sequence it computes, and whose next token it samples, in logit_rows' order.

    prefill_tokens are those that belong to prompts, or were generated before a preemption. scored says whose prompt
    tokens the input's targets are, in their order: sequence, position of the first, count.
    """

    input: StepInput
    chunks: list[tuple[Sequence, int]]
    sampled: list[Sequence]
    prefill_tokens: int
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """What goes into a plan: decodes first, and the copies that have to be made before it writes."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    num_decodes: int = 0
    copies: list[BlockCopy] = field(default_factory=list)

    def pack(self, number: int, block_size: int, now: float) -> Plan:
        """The plan with this number, launched now; its block tables have room for all that it writes."""
        scoring = any(sequence.scores_prompt for sequence, _ in self.chunks[self.num_decodes :])
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        sampled: list[Sequence] = []
        for sequence, count in self.chunks:
            first = sequence.num_launched
            if count == 1:  # of many decodes this is most of the work, so no lists of one
                tokens.append(sequence.next_id)
                positions.append(first)
                slots.append(slot_of(sequence.entries, first, block_size))
            else:
                tokens += sequence.tokens[first : first + count]
                positions += range(first, first + count)
                slots += slot_mapping(sequence.entries, first, first + count, block_size)
            if sequence.launch(count, len(rows), number, now):
                rows.append(len(tokens) - 1)
                sampled.append(sequence)
        step = StepInput(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            q_lens=[count for _, count in self.chunks],
            kv_lens=[sequence.num_launched for sequence, _ in self.chunks],
            tables=[sequence.entries for sequence, _ in self.chunks],
            logit_rows=rows,
            copies=self.copies,
        )
        plan = Plan(step, self.chunks, sampled, len(tokens) - self.num_decodes)
        return _scored(plan, self.num_decodes) if scoring else plan


def chunk_size(sequence: Sequence, budget: int, scored_rows: int) -> int:
    """How many tokens of its prompt a sequence computes next, within what is left of the step's limits."""
    count = min(sequence.num_prefill - sequence.num_launched, budget)
    return min(count, scored_rows) if sequence.scores_prompt else count


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
