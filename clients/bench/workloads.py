"""Workloads of given lengths, and what the accounts of a run say of a cache. Standard library only, no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TEMPERATURE = 0.8
"""What either side samples with."""
FIRST_ORDINARY_TOKEN = 1000
"""Prompts are made of ids from here on: control tokens and single bytes lie below in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how many tokens follow it, whatever they are, and the seed that they are sampled with."""

    prompt: list[int]
    new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests, with the shortest and the longest prompt and continuation.

    Lengths are log-uniform: many are short and some long, as in the traces of chat services.
    """

    name: str
    num_requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]

    def requests(self, seed: int, vocab_size: int) -> list[Request]:
        """The requests, in the order in which they arrive: a function of the arguments alone.

        Prompts are random ids, so that no two have a block in common: sharing is another benchmark's subject.
        """
        chooser = random.Random(f"{self.name} {seed}")
        first = min(FIRST_ORDINARY_TOKEN, vocab_size - 1)
        made = []
        for index in range(self.num_requests):
            prompt, new = _log_uniform(chooser, *self.prompt), _log_uniform(chooser, *self.new)
            made.append(Request([chooser.randrange(first, vocab_size) for _ in range(prompt)], new, index))
        return made

    @property
    def longest(self) -> int:
        """Tokens of the longest request that there may be."""
        return self.prompt[1] + self.new[1]


def _log_uniform(chooser: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(chooser.uniform(math.log(low), math.log(high + 1)))))


@dataclass(frozen=True, slots=True)
class Look:
    """A cache at one moment, in seconds, until the next look.

    held      requests that have room in it
    stored    tokens whose KV lies in it, those of shared slots once
    reserved  slots that nobody else can use because these requests hold them
    finished  requests that are over
    """

    at: float
    held: int
    stored: int
    reserved: int
    finished: int


@dataclass(frozen=True, slots=True)
class Account:
    """What a run's looks say, averages being over time.

    at_once      requests held, on average while others waited for room
    most         requests held at most
    utilisation  tokens stored over slots reserved, on average while anything was held
    """

    at_once: float
    most: int
    utilisation: float


def account(looks: Sequence[Look], num_requests: int) -> Account:
    """The account of a run of so many requests, all sent at its begin; the last look is its end and counts no time.

    Where none ever waited, at_once is the most that were held. ValueError if nothing was ever held.
    """
    waiting_s = waited = holding_s = used = 0.0
    for look, after in pairwise(looks):
        lasted = after.at - look.at
        if not look.held:
            continue
        holding_s += lasted
        used += lasted * look.stored / look.reserved
        if look.held + look.finished < num_requests:
            waiting_s += lasted
            waited += lasted * look.held
    if not holding_s:
        raise ValueError("no look saw a request that was held")
    most = max(look.held for look in looks)
    return Account(waited / waiting_s if waiting_s else float(most), most, used / holding_s)


def distinct(tables: Sequence[tuple[Sequence[int], int]], block_size: int) -> tuple[int, int]:
    """Tokens stored and slots reserved of block tables, each given as its entries and its number of tokens.

    A block of several tables counts once, with the most tokens that any of them has in it.
    """
    tokens: dict[int, int] = {}
    for entries, length in tables:
        for index, entry in enumerate(entries):
            inside = min(block_size, max(0, length - index * block_size))
            tokens[entry] = max(tokens.get(entry, 0), inside)
    return sum(tokens.values()), len(tokens) * block_size
