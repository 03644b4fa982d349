"""The queue: who waits for blocks, in which order, and who asks memd for them now. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Collection

from inferd.core.limits import Limits
from inferd.core.ports import Refusal, TableRequest
from inferd.core.prefix_waits import PrefixWaits
from inferd.core.refusals import why_never
from inferd.core.sequence import Sequence
from pagepool.errors import PagepoolError
from pagepool.limits import MAX_STEP_REQUESTS

PATIENCE = 3
"""Preemptions after which a request asks for all the blocks it will ever need at once."""

CLAIM_EVERY_S = 1.0
"""How often whoever waits for blocks asks again: memd forgets what it claimed after twice that time."""

MAX_ASKED = MAX_STEP_REQUESTS // 2 - 1
"""Tables asked for at once: as many again that waited for a prefix, and what the reserve asks, fit in the same step."""

MAX_ASKED_TOKENS = 1 << 18
"""Tokens of these: memd looks all of them up, some 50 ms, while it serves nobody else. One request may have more."""

HELD_PATIENCE_S = 30.0
"""How long a request that clients' leases and lost workers leave too few blocks holds up those behind it."""


class Admission:
    """Strictly in order: by priority, then first come, first served.

    Several tables may be asked for in one step, MAX_ASKED of MAX_ASKED_TOKENS in all; the next ones when all of them
    are answered, for memd keeps one claim of a worker, and drops it when another step asks for tables. Once one is
    refused, those behind it that are granted are given back, and only the head of the queue asks, each time that blocks
    have come free, and every CLAIM_EVERY_S. When it is granted, as many are asked for as were granted since, one at
    first: in a full pool most of what is asked for is refused, and has to be asked for again.

    Those that wait for a prefix to be computed, at most for `prefix_wait_s`, hold nobody up: for the others they are
    not there. When there is news they are asked for beside the others, as many of as many tokens again in a step, so
    that however many wait for one long prefix, and however often they have to wait anew, nobody waits for their turn.
    """

    def __init__(self, prefix_wait_s: float) -> None:
        self.waits = PrefixWaits(prefix_wait_s)
        self.waiting: list[Sequence] = []
        self._asked: dict[int, Sequence] = {}
        self._refused: Sequence | None = None
        self._most = MAX_ASKED
        self._may_ask, self._asked_at = True, float("-inf")
        self._held_since = self._held_last = float("-inf")

    @property
    def claims(self) -> bool:
        """Whether one was refused: its claim has to be repeated every CLAIM_EVERY_S."""
        return self._refused is not None

    @property
    def asked(self) -> Collection[Sequence]:
        """Those whose requests memd has not answered."""
        return self._asked.values()

    @property
    def num_asked(self) -> int:
        """Sequences that will run if memd grants what it has not answered."""
        return sum(1 + sequence.num_unborn for sequence in self._asked.values())

    def awaits(self, sequence: Sequence) -> bool:
        """Whether it has been asked for and memd has not answered."""
        return sequence.request in self._asked

    def add(self, sequence: Sequence) -> None:
        """It waits, at its place in the order."""
        bisect.insort(self.waiting, sequence, key=_rank)
        if self.waiting[0] is sequence:  # it may need less than the head that was refused
            self._may_ask = True

    def drop(self, sequence: Sequence) -> None:
        """It waits no more."""
        self.waiting.remove(sequence)
        self.waits.forget(sequence.request)
        if sequence is self._refused:
            self._refused = None

    def take_suspended(self) -> list[Sequence]:
        """Those whose tables are suspended wait no more; they are returned."""
        suspended = [sequence for sequence in self.waiting if sequence.suspended_id]
        for sequence in suspended:
            self.drop(sequence)
        return suspended

    def ask(self, room: int, now: float) -> list[Sequence]:
        """Those to ask for now, if so many more sequences may run; their answers are awaited from here on."""
        self.waits.pass_to(now)
        asking: list[Sequence] = []
        if room <= 0 or self._asked or not self.waiting:
            return asking
        alone = self._refused is not None
        may_ask = self._may_ask or now - self._asked_at >= CLAIM_EVERY_S
        first, again = _Allowance(max(self._most, 1)), _Allowance(MAX_ASKED)
        for each in self.waiting:
            if self.waits.rests(each.request):
                continue
            woken = self.waits.is_woken(each.request)
            if alone and not woken and not (may_ask or asking):  # beside others the head asks too, to keep its claim
                break
            num_more = 1 + each.num_unborn
            if num_more > room:
                break
            if not (again if woken else first).take(len(each.tokens)):
                if woken:
                    continue
                break
            room -= num_more
            asking.append(each)
            if alone and not woken:
                break
        self._asked_at = now if asking else self._asked_at
        self._asked.update((sequence.request, sequence) for sequence in asking)
        return asking

    def request(self, sequence: Sequence, block_size: int, num_running: int, limits: Limits) -> TableRequest:
        """What memd is asked for a sequence while so many run: a table for what is known of it and a token more."""
        whole = sequence.blocks_needed(block_size)
        soon = min(-(-(len(sequence.tokens) + 1) // block_size), whole)
        patience = min(sequence.num_preemptions / PATIENCE, 1.0)
        # What is beyond its prompt would be shared by all that fork it, and replaced before it is written.
        num_blocks = whole if patience == 1 and not sequence.forked else soon
        resuming = sequence.suspended_id != 0
        return TableRequest(
            ref=sequence.request,
            token_ids=() if resuming else sequence.known,
            num_blocks=num_blocks,
            salt=b"" if resuming else sequence.submit.salt,
            priority=0 if resuming else sequence.submit.priority,
            no_match=sequence.scores_prompt or not (resuming or limits.chunked_prefix),
            arrival=sequence.arrived_at,
            headroom=num_running + sequence.num_unborn + int(patience * (whole - num_blocks)),
            resume_table_id=sequence.suspended_id,
            partial=True,
            wait_for_prefix=not resuming and self.waits.may_wait(sequence.request),
            num_yields=0 if resuming else sequence.num_preemptions,
            exact=limits.exact if sequence.submit.exact is None else sequence.submit.exact,
        )

    def answered(self, ref: int) -> Sequence:
        """The sequence that this is the answer for."""
        self.waits.answered(ref)
        return self._asked.pop(ref)

    def overtakes(self, sequence: Sequence) -> bool:
        """Whether one before it was refused: what it was granted goes back."""
        return self._refused is not None and sequence.rank > self._refused.rank

    def admit(self, sequence: Sequence) -> None:
        """It has got its blocks."""
        self._refused, self._most = None, min(self._most + 1, MAX_ASKED)
        self.waiting.remove(sequence)
        self.waits.forget(sequence.request)

    def refuse(self, sequence: Sequence) -> None:
        """There are too few blocks for it now."""
        self._most = 0
        if self._refused is None or sequence.rank <= self._refused.rank:
            # A refusal further back says nothing about the head: news that came for it meanwhile stands.
            self._refused, self._may_ask = sequence, False

    def why_never(self, sequence: Sequence, block_size: int, refusal: Refusal) -> PagepoolError | None:
        """The error of one that was refused, if there is no use in its waiting, or there was none for so long."""
        return why_never(sequence, block_size, refusal, held_long=self._held_long(refusal))

    def _held_long(self, refusal: Refusal) -> bool:
        """Whether memd says, and has for HELD_PATIENCE_S, that waiting for other workers does not help."""
        if not refusal.held_blocks:
            return False
        if self._asked_at - self._held_last > 3 * CLAIM_EVERY_S:  # it was not so when the head asked last
            self._held_since = self._asked_at
        self._held_last = self._asked_at
        return self._asked_at - self._held_since >= HELD_PATIENCE_S

    def rest(self, sequence: Sequence) -> None:
        """A prefix that it needs is being computed: it holds nobody up, even if it lacked blocks before."""
        self.waits.refused(sequence.request)
        if sequence is self._refused:
            self._refused = None

    def freed(self) -> None:
        """Blocks have come free."""
        self._may_ask = True

    def news(self) -> None:
        """Memd says that it makes sense to ask again."""
        self._may_ask = True
        self.waits.wake()

    def reset(self) -> None:
        """Memd is another one: nothing is awaited of it, and nothing was refused."""
        self._asked, self._refused, self._may_ask, self._most = {}, None, True, MAX_ASKED
        self.waits.wake()


class _Allowance:
    """How much may still be asked for in one step."""

    def __init__(self, num_requests: int) -> None:
        self._requests, self._tokens, self._is_empty = num_requests, MAX_ASKED_TOKENS, True

    def take(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens has place; the first always has."""
        if self._requests == 0 or (num_tokens > self._tokens and not self._is_empty):
            return False
        self._is_empty = False
        self._requests -= 1
        self._tokens -= num_tokens
        return True


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.rank
