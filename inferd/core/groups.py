"""Requests for several continuations: the sequences that one becomes, and how samples share a prompt. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from inferd.core.admission import Admission
from inferd.core.beam import BeamSearch
from inferd.core.block_tables import BlockTables, ReserveShortError
from inferd.core.messages import Ending, Sampling, Submit
from inferd.core.searching import Search
from inferd.core.sequence import Phase, Sequence


def sequences_of(submit: Submit, now: float, eos_token_ids: Iterable[int]) -> list[Sequence]:
    """The sequences of a request, by the numbers under which the front knows them.

    The first computes the prompt. The others are its branches: they begin when it has, on forks of its table. Of a beam
    search there is only the first. PagepoolError if there is nothing to do.
    """
    if submit.beam is not None:
        return [_searching(submit, now, eos_token_ids)]
    first = Sequence(submit, now)
    for index in range(1, submit.n):
        how = replace(submit.sampling, sample_index=(submit.sampling.sample_index + index) % 2**32)
        branch = Sequence(replace(submit, request=submit.request + index, sampling=how, prompt_logprobs=None, n=1), now)
        branch.stem = first
        first.branches.append(branch)
    first.waits |= bool(first.branches)
    first.forked = bool(first.branches)
    return [first, *first.branches]


def _searching(submit: Submit, now: float, eos_token_ids: Iterable[int]) -> Sequence:
    assert submit.beam is not None
    endings = {} if submit.ignore_eos else dict.fromkeys(eos_token_ids, Ending.END_OF_SEQUENCE)
    endings |= dict.fromkeys(submit.stop_token_ids, Ending.STOP_TOKEN)
    rules = BeamSearch(submit.beam, submit.max_tokens, endings)
    owner = Sequence(replace(submit, sampling=Sampling(temperature=0), logprobs=rules.num_candidates), now)
    owner.search = Search(rules, owner)
    owner.waits = owner.forked = True
    return owner


def follow(stem: Sequence, rows: list[int]) -> tuple[Sequence, ...]:
    """The stem's next token is sampled from the last of a step's logit rows, and its branches' first from more of it.

    Returns those that are sampled so, the stem first.
    """
    for branch in stem.branches:
        branch.num_launched, branch.length = stem.num_launched, stem.length
        branch.row, branch.sampled_in = len(rows), stem.sampled_in
        branch.started_at, branch.cached_tokens = stem.started_at, stem.cached_tokens
        rows.append(rows[-1])
    return stem, *stem.branches


@dataclass(frozen=True, slots=True)
class Ahead:
    """What requests for several continuations will take from the reserve beside what each sequence does.

    `sequences` are those that they will be more than there are.
    """

    table_ids: int = 0
    blocks: int = 0
    sequences: int = 0


NOTHING = Ahead()


class Groups:
    """Requests for several continuations that run: stems until they have forked, owners of searches until they end."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._members: list[Sequence] = []

    def join(self, sequence: Sequence) -> None:
        """A sequence runs, or runs again."""
        if sequence.branches or sequence.search is not None:
            self._members.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It runs no more, or is alone from here on."""
        if sequence in self._members:
            self._members.remove(sequence)

    def ahead(self, asked: Iterable[Sequence]) -> Ahead:
        """A copy of the last block for each fork, and the block after it.

        Also for those whose tables have been `asked` for: what they take is to be there when they run.
        """
        members = self._members + [one for one in asked if one.branches or one.search is not None]
        if not members:
            return NOTHING
        ids = blocks = sequences = 0
        for sequence in members:
            unborn, search = sequence.num_unborn, sequence.search
            sequences += unborn
            ids += unborn if search is None else search.ids_ahead
            blocks += 2 * (unborn + 1 if search is None else search.rules.width)
        return Ahead(ids, blocks, sequences)

    def branch_off(self, stem: Sequence, queue: Admission) -> list[Sequence]:
        """The prompt of `stem` is computed and its tokens are committed: its branches begin; those that run.

        Where there is no table id in reserve, a branch waits for a table of its own, which matches what of the prompt
        is sealed.
        """
        assert stem.table is not None
        begun: list[Sequence] = []
        for branch in stem.branches:
            branch.stem = None
            try:
                table = self._tables[self._tables.fork(stem.table.table_id)]
            except ReserveShortError:
                queue.add(branch)
                continue
            branch.enter(Phase.PREFILL)
            branch.table, branch.forked = table, True
            branch.num_computed = branch.num_launched = table.num_tokens
            if branch.num_generated:
                branch.enter(Phase.DECODE)
            begun.append(branch)
        stem.branches = []
        stem.waits = stem.extras is not None and stem.extras.history is not None
        self.leave(stem)
        return begun

    def place(self, running: list[Sequence]) -> None:
        """Give beams that were chosen their tables, where there are table ids for all of a search."""
        for sequence in self._members:
            search = sequence.search
            if search is None or not search.awaits_tables:
                continue
            if (placed := search.place(self._tables)) is not None:
                begun, dropped = placed
                running += begun
                for beam in dropped:
                    running.remove(beam)
