"""Speculative decoding of one sequence: how many tokens to guess, which, and what became of the guesses. Pure.

A draft is a guess at the tokens to come. The step that computes a sequence's last token computes the draft behind it
too, and samples the next token after each of them; a token of the draft is accepted if it is exactly the one that was
sampled in its place. Since what is sampled at a position is a function of the tokens before it and of (seed, sample
index, position) alone, what comes out is what decoding one token a step gives, greedy or not.

How long a draft is follows from what became of the last ones (additive and multiplicative, as a congestion window):

* all of it accepted: twice as long the next time, up to the limit;
* a part accepted: one token longer than that part;
* nothing accepted: half as long; and where that is no token at all, the sequence rests: it guesses nothing for some
  tokens, then tries a single one. Each rest is twice as long as the one before, until a guess is right.

So text that does not repeat itself pays for ever fewer guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

MAX_SPECULATE_TOKENS = 32
"""Longest draft that may be asked for."""

FIRST_DRAFT = 2
FIRST_REST, LAST_REST = 2, 64
"""Tokens."""


class Proposer(Protocol):
    """Guesses at the tokens to come of the sequence that it was made for. `inferd.core.ngram` has one."""

    def propose(self, limit: int) -> list[int]:
        """At most `limit` token ids, none if there is nothing to guess from."""


MakeProposer = Callable[[Sequence[int]], Proposer]
"""Makes the proposer of a sequence, given its tokens, which grow as they are generated."""


class Speculation:
    """The drafts of one sequence, each at most `limit` tokens (at least 1) long. Not thread-safe.

    num_drafted and num_accepted count tokens of drafts that were verified.
    """

    def __init__(self, proposer: Proposer, limit: int) -> None:
        self._proposer, self._limit = proposer, limit
        self._size = min(FIRST_DRAFT, limit)
        self._rest, self._next_rest = 0, FIRST_REST
        self.num_drafted = self.num_accepted = 0

    @property
    def size(self) -> int:
        """Tokens that it would guess now if there is room, and something to guess from."""
        return 0 if self._rest else self._size

    @property
    def resting(self) -> bool:
        """Whether it guesses nothing for now, so that its last token need not be known for the next step."""
        return self._rest > 0

    def draft(self, room: int) -> list[int]:
        """The tokens to guess in the next step, at most `room`; none while it rests."""
        size = min(self._size, room)
        return self._proposer.propose(size)[:size] if size > 0 and not self._rest else []

    def verified(self, drafted: int, accepted: int) -> None:
        """A step of this sequence is over: so many tokens were guessed in it, and so many of those were right."""
        assert 0 <= accepted <= drafted
        if not drafted:
            self._rest = max(self._rest - 1, 0)
            return
        self.num_drafted += drafted
        self.num_accepted += accepted
        if accepted:
            grown = 2 * drafted if accepted == drafted else accepted + 1
            # A draft that was short for want of room says nothing against longer ones.
            self._size = min(max(grown, self._size) if accepted == drafted else grown, self._limit)
            self._next_rest = FIRST_REST
        elif drafted > 1:
            self._size = drafted // 2
        else:
            self._size = 1
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LAST_REST)
