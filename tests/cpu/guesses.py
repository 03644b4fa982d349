"""Proposers that know what comes, and guess right, wrong or mostly right, as a test wants it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from inferd.core.messages import Sampling, Used
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import VOCAB, continuation

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(seed=11, temperature=1.3)
SAMPLINGS = [GREEDY, SAMPLED, Sampling(seed=2**63, top_k=20), Sampling(seed=5, sample_index=3, top_p=0.8, min_p=0.01)]

Alter = Callable[[int, int], int]
"""What is guessed at a position where this token is right."""


def right(_position: int, token: int) -> int:
    return token


def wrong(_position: int, token: int) -> int:
    return (token + 1) % VOCAB


def mostly_right(position: int, token: int) -> int:
    return wrong(position, token) if random.Random(position * VOCAB + token).random() < 0.25 else token


class Guesser:
    """Makes proposers that know what each request will generate, and guess what `alter` makes of it."""

    def __init__(self, alter: Alter) -> None:
        self._alter = alter
        self._known: dict[tuple[int, ...], list[int]] = {}

    def learn(self, tokens: list[int], generated: list[int]) -> list[int]:
        """A request with this prompt will generate these tokens, the ones after its end too."""
        self._known[tuple(tokens)] = generated
        return generated

    def __call__(self, tokens: list[int]) -> Knowing:
        return Knowing(tokens, self._known[tuple(tokens)], self._alter)


class Knowing:
    def __init__(self, tokens: list[int], generated: list[int], alter: Alter) -> None:
        self._tokens, self._alter = tokens, alter
        self._first, self._generated = len(tokens), generated

    def propose(self, limit: int) -> list[int]:
        done = len(self._tokens) - self._first
        return [self._alter(at, token) for at, token in enumerate(self._generated[done : done + limit], done)]


def learned(guesser: Guesser, count: int, cases: Iterable[tuple[list[int], Sampling]]) -> list[list[int]]:
    return [guesser.learn(tokens, continuation(tokens, count, sampling)) for tokens, sampling in cases]


def used(rig: Rig, request: int) -> Used:
    return rig.finished(request).used
