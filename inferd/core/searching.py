"""A beam search on its way through the engine: its rules, and the sequences that are its beams. Pure."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass

from inferd.core.beam import BeamSearch
from inferd.core.block_table import BlockTable
from inferd.core.block_tables import BlockTables
from inferd.core.sequence import Phase, Sequence

STEPS_AHEAD = 3
"""Steps whose forks are served from the reserve: memd answers within one step of a model, mostly."""


@dataclass(frozen=True, slots=True)
class _Next:
    """A beam of the next step: whose table it forks, its tokens, and of how many the KV was there before it yielded."""

    parent: int
    tokens: MutableSequence[int]
    most_computed: int = 0


class Search:
    """The beams of one request, which is `owner`: it computes the prompt, and is one of the beams from then on.

    Each step every beam gives its likeliest next tokens; when all have, `advance` says which beams run on, and `place`
    gives each a block table: its parent's own, or a fork of it, while those of beams that were dropped are released.

    A search yields as a whole. Its beams' tokens are kept, their tables released: when it gets blocks again, it
    computes the prompt once more (what memd still has of it is found there), forks, and each beam computes its own
    tokens.
    """

    def __init__(self, rules: BeamSearch, owner: Sequence) -> None:
        self.rules = rules
        self.owner = owner
        self._beams: list[Sequence] = []  # none until the prompt is computed
        self._saved: list[_Next] = []  # the beams that yielded, which fork the prompt's table
        self._next: list[_Next] = []  # the beams of the next step

    @property
    def members(self) -> list[Sequence]:
        """The sequences that take part."""
        return self._beams or [self.owner]

    @property
    def in_flight(self) -> bool:
        """Whether a step has any of them."""
        return any(each.in_flight for each in self.members)

    @property
    def is_ready(self) -> bool:
        """Whether every beam has said how it may go on."""
        return all(each.likeliest is not None for each in self.members)

    @property
    def awaits_tables(self) -> bool:
        """Whether beams have been chosen that have no tables yet."""
        return bool(self._next)

    @property
    def num_unborn(self) -> int:
        """Beams beyond those that there are."""
        return self.rules.width - len(self.members)

    @property
    def ids_ahead(self) -> int:
        """Table ids that its next steps may need."""
        return STEPS_AHEAD * (self.rules.width - 1)

    def advance(self, now: float) -> bool:
        """Every beam is ready: choose those that run on. Whether the search is over instead."""
        members = self.members
        self.owner.note_token(now)
        if self._saved:  # the prompt is computed again, and what follows it is known
            self._next, self._saved = self._saved, []
        else:
            candidates = [each.likeliest for each in members if each.likeliest is not None]
            choices = self.rules.advance(candidates)
            self._next = [_Next(each.parent, _longer(members[each.parent], each.token)) for each in choices]
        for each in members:
            each.likeliest = None
        return not self._next

    def place(self, tables: BlockTables) -> tuple[list[Sequence], list[Sequence]] | None:
        """Give the beams that were chosen their tables; those that begin and those that are no more.

        None, and nothing is changed, if there are too few table ids in reserve.
        """
        members = self.members
        parents = {each.parent for each in self._next}
        if len(self._next) - len(parents) > tables.spare_ids:
            return None
        placed: list[tuple[_Next, BlockTable]] = []
        own = set(parents)
        for each in self._next:
            table = _table(members[each.parent])
            placed.append((each, table if each.parent in own else tables[tables.fork(table.table_id)]))
            own.discard(each.parent)
        for index, member in enumerate(members):
            if index not in parents:
                tables.release(_table(member).table_id)
        # Which of them holds what does not matter, and so the owner is always one.
        begun = [self._another() for _ in range(len(placed) - len(members))]
        self._beams = [*members[: len(placed)], *begun]
        for beam, (chosen, table) in zip(self._beams, placed, strict=True):
            _hold(beam, chosen, table)
        self._next = []
        return begun, members[len(placed) :]

    def save(self, tables: BlockTables) -> None:
        """Give all tables up; what the beams hold, or were to hold next, is kept."""
        members, owner = self.members, self.owner
        if self._next:
            known = [max(each.most_computed, members[each.parent].num_computed) for each in self._next]
            self._saved = [_Next(0, each.tokens, most) for each, most in zip(self._next, known, strict=True)]
        elif self._beams:
            self._saved = [_Next(0, each.tokens, max(each.most_computed, each.num_computed)) for each in self._beams]
        for each in members:
            tables.release(_table(each).table_id)
            each.likeliest = None
        self._beams, self._next = [], []
        owner.tokens = owner.tokens[: owner.num_prompt]
        owner.length = owner.num_prompt
        owner.num_computed = min(owner.num_computed, owner.num_prompt)  # what it computes again as the owner
        owner.most_computed = min(owner.most_computed, owner.num_prompt)

    def _another(self) -> Sequence:
        beam = Sequence(self.owner.submit, self.owner.arrived_at)
        beam.started_at, beam.search, beam.waits = self.owner.started_at, self, True
        return beam


def _hold(beam: Sequence, chosen: _Next, table: BlockTable) -> None:
    """A beam's tokens, with all but the last of them computed in the table, or at least the prompt."""
    if beam.phase is Phase.WAITING:
        beam.enter(Phase.PREFILL)
    tokens = chosen.tokens
    beam.tokens, beam.table, beam.forked = tokens, table, True
    beam.most_computed = chosen.most_computed
    beam.length = len(tokens)
    beam.num_computed = beam.num_launched = table.num_tokens
    beam.num_prefill = beam.num_prompt if table.num_tokens == len(tokens) - 1 else len(tokens)


def _longer(beam: Sequence, token: int) -> MutableSequence[int]:
    tokens = beam.tokens[:]
    tokens.append(token)
    return tokens


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None
    return sequence.table
