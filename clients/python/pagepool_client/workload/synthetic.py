"""Workloads made up from a few figures: conversations like those of ShareGPT, which share system prompts. Pure."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagepool_client.workload.format import Piece, WorkloadRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a workload is like. The defaults are those of ShareGPT.

    Its prompts have 161.31 tokens on average and its answers 337.99 (Kwon et al., Efficient Memory Management for Large
    Language Model Serving with PagedAttention, 2023, figure 11). Both have a long tail, as log-normal lengths do.
    """

    requests: int = 200
    """How many come."""
    rate: float = 1.0
    """Requests a second, once conversations are under way; conversations begin as a Poisson process."""
    prompt_mean: float = 161.31
    """Tokens that a user writes in a turn."""
    output_mean: float = 337.99
    """Tokens of an answer."""
    spread: float = 1.0
    """Standard deviation of the logarithm of both."""
    turns: float = 3.0
    """Turns of a conversation on average, at least 1; their number is geometrically distributed."""
    pause_s: float = 10.0
    """Seconds between two turns, on average; exponentially distributed."""
    systems: int = 4
    """System prompts there are, each conversation having one; 0 for none."""
    system_tokens: int = 128
    """Tokens of a system prompt."""
    max_tokens: int = 2048
    """Longest prompt and answer together: a longer turn is cut, and its conversation ends."""


@dataclass(frozen=True, order=True, slots=True)
class _Turn:
    """A turn that is due: of which conversation, what was said before it, and how many turns are left with it."""

    at_s: float
    number: int
    system: tuple[Piece, ...]
    said: int
    left: int


def generate(shape: Shape, seed: int) -> Iterator[WorkloadRequest]:
    """The requests of a workload by the time they come: the same for the same shape and seed.

    The prompt of a later turn begins with everything that was said before.
    """
    chance = random.Random(seed)  # noqa: S311
    due: list[_Turn] = []
    begun, start_s = 0, chance.expovariate(shape.rate / shape.turns)
    for _ in range(shape.requests):
        while not due or start_s <= due[0].at_s:
            heapq.heappush(due, _first_turn(shape, chance, start_s, begun))
            begun, start_s = begun + 1, start_s + chance.expovariate(shape.rate / shape.turns)
        turn = heapq.heappop(due)
        before = turn.said + sum(piece.tokens for piece in turn.system)
        user = min(_length(chance, shape.prompt_mean, shape.spread), shape.max_tokens - before - 1)
        answer = min(_length(chance, shape.output_mean, shape.spread), shape.max_tokens - before - user)
        yield WorkloadRequest(turn.at_s, (*turn.system, Piece(f"chat-{turn.number}", turn.said + user)), answer)
        if turn.left > 1 and before + user + answer + 2 <= shape.max_tokens:
            later_s = turn.at_s + chance.expovariate(1 / shape.pause_s)
            heapq.heappush(due, replace(turn, at_s=later_s, said=turn.said + user + answer, left=turn.left - 1))


def _first_turn(shape: Shape, chance: random.Random, at_s: float, number: int) -> _Turn:
    system = (Piece(f"system-{chance.randrange(shape.systems)}", shape.system_tokens),) if shape.systems else ()
    # The inverse of the geometric distribution's cumulative probability, at a random place.
    more = math.log(1 - chance.random()) / math.log(1 - 1 / shape.turns) if shape.turns > 1 else 0.0
    return _Turn(at_s, number, system, 0, 1 + int(more))


def _length(chance: random.Random, mean: float, spread: float) -> int:
    """A log-normal length of at least one token, with this mean before it is rounded."""
    return max(1, round(chance.lognormvariate(math.log(mean) - spread**2 / 2, spread)))
