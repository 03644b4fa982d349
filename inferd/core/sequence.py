"""One request on its way through the engine: a state machine without clock, pool or model."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from inferd.core.beam import Likeliest
from inferd.core.block_table import BlockTable
from inferd.core.history import Extras
from inferd.core.messages import Ending, Submit, Used
from inferd.core.phases import NEXT, Phase
from inferd.core.ports import Target
from inferd.core.speculation import MakeProposer, Speculation
from pagepool.errors import PagepoolError, Reason, invalid_field

if TYPE_CHECKING:
    from inferd.core.searching import Search

__all__ = ["Phase", "Sequence"]


class Sequence:
    """Tokens, block table and times of one request. Not thread-safe; the engine's thread owns it.

    The token positions lie in four regions:

        [0, num_computed)               KV is in the pool; of these [0, cached_tokens) were found there
        [num_computed, num_launched)    in steps that were launched and not collected, `in_flight` in number
        [num_launched, length)          for the steps to come: the rest of [0, num_prefill), or the last token
        [length, max_length)            of later steps

    Of those below `length`, [len(tokens), length) are being sampled and not known yet; the last of them is sampled from
    logit row `row` of the `sampled_in`th plan. What was known when the table was granted, [0, num_prefill), is computed
    in chunks: the prompt, and after a preemption what was generated before it.

    What comes next of a sequence that `waits` is decided on the host, by its history or by a search. `branches` are
    samples of the same prompt, which begin when the prompt is computed and whose `stem` it is until then. The beams of
    a `search` are sequences too; the front knows one of them, their `owner`.

    A sequence that is `yielding` takes part in no more steps until its blocks are gone; then it waits, with its tokens
    and the id of its suspended table, until it gets blocks again.

    A sequence that speculates guesses the tokens from `length` on: its `draft` is computed behind its last token, in
    the one step that it then has in flight, and what was sampled says how much of it is right.

    Times are seconds of the engine's clock; None until it has happened. PagepoolError if there is nothing to do.
    """

    def __init__(self, submit: Submit, arrived_at: float) -> None:
        if not submit.prompt:
            raise PagepoolError(Reason.PROMPT_EMPTY, "the prompt has no tokens; send some text", field="prompt")
        if submit.max_tokens < 1:
            raise invalid_field("max_tokens", submit.max_tokens, "at least 1", "leave it out for the default")
        self.submit = submit
        self.request = submit.request
        self.phase = Phase.WAITING
        self.tokens: MutableSequence[int] = array("I", submit.prompt)
        self.length = self.num_prompt = self.num_prefill = len(self.tokens)
        self.max_length = self.num_prompt + submit.max_tokens
        self.num_computed = self.num_launched = self.in_flight = 0
        self.row = self.sampled_in = 0
        self.speculation: Speculation | None = None
        self.draft: Seq[int] = ()
        self.extras = Extras.of(submit)
        self.waits = self.extras is not None and self.extras.history is not None
        self.branches: list[Sequence] = []
        self.stem: Sequence | None = None
        self.search: Search | None = None
        self.likeliest: Likeliest | None = None  # of a beam, until the search has heard of all of them
        self.forked = False  # whether others may share the block that it writes next
        self.num_scored = 1  # prompt tokens whose logprobs need no more steps; nothing comes before the first
        self.cached_tokens = 0
        self.table: BlockTable | None = None
        self.suspended_id = 0  # of the table that it resumes, 0 for a new one
        self.yielding = False
        self.num_preemptions = self.num_recomputed = 0
        self.most_computed = 0  # the KV of so many tokens was there before a preemption
        self.stop_token_ids = frozenset(submit.stop_token_ids)
        self.arrived_at = arrived_at
        times: tuple[float | None, float | None, float | None] = (None, None, None)
        self.started_at, self.first_token_at, self.last_token_at = times

    @property
    def rank(self) -> tuple[int, float, int]:
        """Its place in the queue, smallest first: by priority, then first come, first served."""
        return -self.submit.priority, self.arrived_at, self.submit.request

    @property
    def known(self) -> Seq[int]:
        """Its tokens, as they came while they are the prompt's alone: packed for memd, those cost nothing."""
        return self.tokens if self.num_generated else self.submit.prompt

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens for the steps to come; none once the last token is being sampled, for nothing follows from its KV.

        And none, for a sequence that waits or guesses, while its last token is not known.
        """
        if self.length >= self.max_length or self.yielding:
            return 0
        if self.waits or (self.speculation is not None and not self.speculation.resting):
            return len(self.tokens) - self.num_launched if self.length == len(self.tokens) else 0
        return self.length - self.num_launched

    def speculate(self, make: MakeProposer, default_tokens: int) -> None:
        """Guess as many tokens a step as the request says, or the default; none if penalties depend on each of them."""
        asked = self.submit.speculate_tokens
        limit = default_tokens if asked is None else asked
        if limit > 0 and self.search is None and (self.extras is None or self.extras.history is None):
            self.speculation = Speculation(make(self.tokens), limit)

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of its prompt are wanted that no step has been launched for."""
        asked = self.extras is not None and self.extras.prompt_logprobs is not None
        return asked and self.num_scored < self.num_prompt

    @property
    def owner(self) -> Sequence:
        """The sequence that the front knows: of a beam the one whose search it is."""
        return self if self.search is None else self.search.owner

    @property
    def members(self) -> Seq[Sequence]:
        """Itself, or all beams of its search: they yield together."""
        return (self,) if self.search is None else self.search.members

    @property
    def num_unborn(self) -> int:
        """Sequences that it will be more than there are: branches, or beams."""
        return len(self.branches) if self.search is None else self.search.num_unborn

    def blocks_needed(self, block_size: int) -> int:
        """Blocks that hold the whole request. The last token is never computed, so it needs no place.

        Beams share the prompt's full blocks. Branches count for themselves, since they can run one after the other.
        """
        whole = -(-(self.max_length - 1) // block_size)
        shared = self.num_prompt // block_size if self.search is not None else whole
        return shared + (0 if self.search is None else self.search.rules.width * (whole - shared))

    @property
    def table_id(self) -> int:
        """Of its table, once it has blocks."""
        assert self.table is not None
        return self.table.table_id

    @property
    def entries(self) -> Seq[int]:
        """The packed entries of its blocks, once it has some; another object whenever they change."""
        assert self.table is not None
        return self.table.entries

    @property
    def has_begun(self) -> bool:
        """Whether anything was launched with the blocks that it has."""
        return self.table is not None and (self.in_flight > 0 or self.num_computed > self.table.cached_tokens)

    def admit(self, table: BlockTable) -> None:
        """It has blocks: of a new table, or of its own one again."""
        self.enter(Phase.PREFILL)
        self.table, self.suspended_id = table, 0
        if self.started_at is None:
            self.cached_tokens = table.cached_tokens
        self.num_prefill = len(self.tokens)
        self.num_computed = self.num_launched = table.cached_tokens

    def send_back(self) -> None:
        """Wait again, for a new table; this one is released."""
        assert not self.in_flight
        self.enter(Phase.WAITING)
        self.table, self.yielding = None, False
        if self.started_at is not None:
            self.most_computed = max(self.most_computed, self.num_computed)
        self.num_computed = self.num_launched = 0

    def suspend(self) -> Seq[int]:
        """Wait again, without blocks; the tokens of the table that are known and not committed."""
        assert self.table is not None
        assert not self.in_flight
        assert self.length == len(self.tokens), "a token is being sampled"
        self.enter(Phase.WAITING)
        self.suspended_id, self.table, self.yielding = self.table.table_id, None, False
        self.most_computed = max(self.most_computed, self.num_computed)
        return self.tokens[self.num_computed :]

    @property
    def next_id(self) -> int:
        """The next token as a step's input: its id, or the reference of StepInput if it is not known yet."""
        return self.tokens[self.num_launched] if self.num_launched < len(self.tokens) else -1 - self.row

    def launch(self, count: int, row: int, plan: int, now: float) -> bool:
        """`count` more tokens go into the step of a plan; whether it samples the next token, as its logit row `row`."""
        assert 0 < count <= self.length - self.num_launched
        if self.started_at is None:
            self.started_at = now
        self.in_flight += 1
        if self.num_launched < self.most_computed:
            self.owner.num_recomputed += min(count, self.most_computed - self.num_launched)
        self.num_launched += count
        if self.num_launched < self.length:
            return False
        self.length += 1
        self.row, self.sampled_in = row, plan
        return True

    def targets(self, count: int, row: int) -> list[Target]:
        """The prompt tokens that the last `count` tokens launched, in a step's rows from `row` on, give logprobs of."""
        assert self.extras is not None
        first = self.num_launched - count
        begin, self.num_scored = self.num_scored, max(self.num_scored, min(self.num_launched + 1, self.num_prompt))
        top = self.extras.prompt_logprobs or 0
        return [Target(row + at - 1 - first, self.tokens[at], top) for at in range(begin, self.num_scored)]

    def advance(self, count: int) -> Seq[int]:
        """The KV of `count` more tokens has been written; these tokens, for the commit."""
        first = self.num_computed
        self.num_computed += count
        assert self.num_computed <= min(self.num_launched, len(self.tokens))
        return self.tokens[first : self.num_computed]

    def note_token(self, now: float) -> None:
        """A token was sampled, or chosen."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def accept(self, token: int, now: float, eos_token_ids: frozenset[int]) -> Ending | None:
        """A token was sampled. Says how the sequence ends by it, or None; a token that ends it is not taken in."""
        assert len(self.tokens) < self.length
        if self.phase is Phase.PREFILL:
            self.enter(Phase.DECODE)
        self.note_token(now)
        if token in self.stop_token_ids:
            return Ending.STOP_TOKEN
        if token in eos_token_ids and not self.submit.ignore_eos:
            return Ending.END_OF_SEQUENCE
        self.tokens.append(token)
        if self.extras is not None and self.extras.history is not None:
            self.extras.history.add(token)
        return Ending.MAX_TOKENS if len(self.tokens) == self.max_length else None

    def verify(self, sampled: Seq[int], now: float, eos_token_ids: frozenset[int]) -> tuple[list[int], Ending | None]:
        """Tokens were sampled after its last known one and after each of its draft: accept those that are right.

        Right is the first, and each that follows a token of the draft that was sampled in just that place. Returns
        them, the one that ends it or that is -1 the last, and how it ends by them or None. What was right of the draft
        stays as `draft`, for the commit.
        """
        found: list[int] = []
        ending = None
        for place, token in enumerate(sampled):
            found.append(token)
            ending = self.accept(token, now, eos_token_ids) if token >= 0 else None
            if ending is not None or place == len(self.draft) or token != self.draft[place]:
                break
            self.num_launched += 1
            self.length += 1
        right = len(found) - 1
        assert self.speculation is not None
        self.speculation.verified(len(self.draft), right)
        self.draft = self.draft[:right]
        return found, ending

    def finish(self) -> None:
        """It is over, however it ended."""
        self.enter(Phase.FINISHED)

    def used(self, now: float) -> Used:
        """What it used; a phase that has not ended lasts until now."""
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return Used(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.num_generated if self.search is None else self.search.rules.generated,
            queue_s=started - self.arrived_at,
            prefill_s=first - started,
            decode_s=last - first,
            preemptions=self.num_preemptions,
            draft_tokens=self.speculation.num_drafted if self.speculation else 0,
            accepted_tokens=self.speculation.num_accepted if self.speculation else 0,
            lossy_tokens=self.table.num_lossy if self.table else 0,
        )

    def enter(self, phase: Phase) -> None:
        """Go on to a phase that may follow."""
        if phase not in NEXT[self.phase]:
            raise RuntimeError(f"request {self.request} cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase
