"""The scheduling of a contiguous cache: one slot of the maximum length for each request. Pure.

Everything but the memory is as inferd does it: continuous batching, admission in the order of arrival at every step,
a step that decodes first and fills up with chunks of prompts, oldest first, to the same budget of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workloads import Look, Request


@dataclass(eq=False, slots=True)
class Held:
    """A request in its slot: its tokens, of which `computed` have their KV there."""

    request: Request
    slot: int
    tokens: list[int]
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens to be computed."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its prompt has been computed."""
        return self.computed >= len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]


class Slots:
    """Requests on their way through `num_slots` slots of `length` tokens, `budget` tokens a step. Not thread-safe.

    ValueError if a request is longer than a slot, or if the budget is less than one token for each slot.
    """

    def __init__(self, requests: Iterable[Request], num_slots: int, length: int, budget: int) -> None:
        self._waiting = deque(requests)
        self._free = list(reversed(range(num_slots)))
        self._length, self._budget = length, budget
        self._held: list[Held] = []
        self.finished: list[Held] = []
        if budget < num_slots:
            raise ValueError(f"{budget} tokens a step are fewer than {num_slots} slots, one token each")
        longest = max((len(each.prompt) + each.new_tokens for each in self._waiting), default=0)
        if longest > length:
            raise ValueError(f"a request of {longest} tokens does not fit into a slot of {length}")

    def plan(self) -> list[tuple[Held, int]]:
        """Admit what there is room for; who computes how many tokens in the next step, none if all is over."""
        while self._free and self._waiting:
            request = self._waiting.popleft()
            self._held.append(Held(request, self._free.pop(), list(request.prompt)))
        chunks = [(held, 1) for held in self._held if held.decodes]
        left = self._budget - len(chunks)
        for held in self._held:
            count = 0 if held.decodes else min(held.pending, left)
            if count:
                chunks.append((held, count))
                left -= count
        return chunks

    def collect(self, chunks: Sequence[tuple[Held, int]], sampled: Iterable[int]) -> None:
        """A step is over: `sampled` has a token for each chunk that computed all that was pending, in their order."""
        tokens = iter(sampled)
        for held, count in chunks:
            held.computed += count
            if held.pending:
                continue
            held.tokens.append(next(tokens))
            if len(held.generated) == held.request.new_tokens:
                self._held.remove(held)
                self._free.append(held.slot)
                self.finished.append(held)

    def look(self, now: float) -> Look:
        """The cache as it is."""
        stored = sum(held.computed for held in self._held)
        return Look(now, len(self._held), stored, len(self._held) * self._length, len(self.finished))
