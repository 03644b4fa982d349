"""One request on its way through the engine: a state machine without clock, pool or model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from enum import Enum, auto

from inferd.core.history import Extras
from inferd.core.messages import Ending, Submit, Used
from inferd.core.ports import Grant, Target
from pagepool.errors import PagepoolError, Reason, invalid_field


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.WAITING, Phase.DECODE, Phase.FINISHED}),
    Phase.DECODE: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Sequence:
    """Tokens, block table and times of one request. Not thread-safe; the engine's thread owns it.

    The token positions lie in four regions:

        [0, num_computed)               KV is in the pool; of these [0, cached_tokens) were found there
        [num_computed, num_launched)    in steps that were launched and not collected, `in_flight` in number
        [num_launched, length)          for the steps to come: the rest of the prompt, or the last token
        [length, max_length)            of later steps

    Of those below `length`, [len(tokens), length) are being sampled and not known yet; the last of them is sampled from
    logit row `row` of the latest step. Times are seconds of the engine's clock; None until it has happened.
    PagepoolError if there is nothing to do.
    """

    def __init__(self, submit: Submit, arrived_at: float) -> None:
        if not submit.prompt:
            raise PagepoolError(Reason.PROMPT_EMPTY, "the prompt has no tokens; send some text", field="prompt")
        if submit.max_tokens < 1:
            raise invalid_field("max_tokens", submit.max_tokens, "at least 1", "leave it out for the default")
        self.submit = submit
        self.request = submit.request
        self.phase = Phase.WAITING
        self.tokens = list(submit.prompt)
        self.length = self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + submit.max_tokens
        self.num_computed = self.num_launched = self.in_flight = 0
        self.row = 0
        self.extras = Extras.of(submit)
        self.num_scored = 1  # prompt tokens whose logprobs need no more steps; nothing comes before the first
        self.cached_tokens = 0
        self.table_id = 0
        self.entries: Seq[int] = ()
        self.stop_token_ids = frozenset(submit.stop_token_ids)
        self.arrived_at = arrived_at
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def rank(self) -> tuple[int, float, int]:
        """Its place in the queue, smallest first: by priority, then first come, first served."""
        return -self.submit.priority, self.arrived_at, self.submit.request

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens for the steps to come; none once the last token is being sampled, for nothing follows from its KV.

        And none, for a sequence whose history decides what comes next, while its last token is not known.
        """
        if self.length >= self.max_length:
            return 0
        if self.extras is not None and self.extras.history is not None:
            return len(self.tokens) - self.num_launched if self.length == len(self.tokens) else 0
        return self.length - self.num_launched

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of its prompt are wanted that no step has been launched for."""
        asked = self.extras is not None and self.extras.prompt_logprobs is not None
        return asked and self.num_scored < self.num_prompt

    def blocks_needed(self, block_size: int) -> int:
        """Blocks that hold the whole request. The last token is never computed, so it needs no place."""
        return -(-(self.max_length - 1) // block_size)

    def admit(self, grant: Grant) -> None:
        """Its table has been created."""
        self._enter(Phase.PREFILL)
        # As an array, so that a model may copy it without a look at each entry.
        self.table_id, self.entries = grant.table_id, array("I", grant.entries)
        self.cached_tokens = self.num_computed = self.num_launched = grant.cached_tokens

    def send_back(self) -> int:
        """Wait again; the id of the table to release. Only before its first step."""
        assert self.started_at is None
        self._enter(Phase.WAITING)
        table_id, self.table_id, self.entries = self.table_id, 0, ()
        self.cached_tokens = self.num_computed = self.num_launched = 0
        return table_id

    @property
    def next_id(self) -> int:
        """The next token as a step's input: its id, or the reference of StepInput if it is not known yet."""
        return self.tokens[self.num_launched] if self.num_launched < len(self.tokens) else -1 - self.row

    def launch(self, count: int, row: int, now: float) -> bool:
        """`count` more tokens go into a step; whether the step samples the next token, as its logit row `row`."""
        assert 0 < count <= self.num_pending
        if self.started_at is None:
            self.started_at = now
        self.in_flight += 1
        self.num_launched += count
        if self.num_launched < self.length:
            return False
        self.length += 1
        self.row = row
        return True

    def targets(self, count: int, row: int) -> list[Target]:
        """The prompt tokens that the last `count` tokens launched, in a step's rows from `row` on, give logprobs of."""
        assert self.extras is not None
        first = self.num_launched - count
        begin, self.num_scored = self.num_scored, max(self.num_scored, min(self.num_launched + 1, self.num_prompt))
        top = self.extras.prompt_logprobs or 0
        return [Target(row + at - 1 - first, self.tokens[at], top) for at in range(begin, self.num_scored)]

    def advance(self, count: int) -> list[int]:
        """The KV of `count` more tokens has been written; these tokens, for the commit."""
        first = self.num_computed
        self.num_computed += count
        assert self.num_computed <= min(self.num_launched, len(self.tokens))
        return self.tokens[first : self.num_computed]

    def accept(self, token: int, now: float, eos_token_ids: frozenset[int]) -> Ending | None:
        """A token was sampled. Says how the sequence ends by it, or None; a token that ends it is not taken in."""
        assert len(self.tokens) < self.length
        if self.phase is Phase.PREFILL:
            self._enter(Phase.DECODE)
            self.first_token_at = now
        self.last_token_at = now
        if token in self.stop_token_ids:
            return Ending.STOP_TOKEN
        if token in eos_token_ids and not self.submit.ignore_eos:
            return Ending.END_OF_SEQUENCE
        self.tokens.append(token)
        if self.extras is not None and self.extras.history is not None:
            self.extras.history.add(token)
        return Ending.MAX_TOKENS if len(self.tokens) == self.max_length else None

    def finish(self) -> None:
        """It is over, however it ended."""
        self._enter(Phase.FINISHED)

    def used(self, now: float) -> Used:
        """What it used; a phase that has not ended lasts until now."""
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return Used(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.num_generated,
            queue_s=started - self.arrived_at,
            prefill_s=first - started,
            decode_s=last - first,
        )

    def _enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"request {self.request} cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase
