"""Prompt lookup: what came after the same words the last time, as a guess at what comes next. Pure.

Saxena, "Prompt Lookup Decoding" (2023), as in transformers' prompt_lookup_num_tokens, but for two things: of several
earlier occurrences the latest is taken, and a copy may run into what it writes, as in LZ77 (Ziv and Lempel, 1977), so
that a text that repeats three tokens is guessed as far ahead as asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

MIN_NGRAM, MAX_NGRAM = 2, 4
"""Lengths of the suffixes that are looked up. A single token has been followed by too many others."""


class NgramIndex:
    """Where each n-gram of a growing list of tokens occurred last. Not thread-safe.

    `tokens` belongs to the caller, who appends to it and does nothing else. Each token is put into the index once, when
    the next `propose` comes, so that a call costs as much as there are new tokens, however many there are in all.
    Takes some 200 bytes a token for each length.
    """

    def __init__(self, tokens: Sequence[int], min_ngram: int = MIN_NGRAM, max_ngram: int = MAX_NGRAM) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams of {min_ngram} to {max_ngram} tokens, but the shortest has at least 1")
        self._tokens = tokens
        self._lengths = range(min_ngram, max_ngram + 1)
        self._after: dict[tuple[int, ...], int] = {}  # where the latest occurrence of an n-gram goes on
        self._indexed = 0  # all n-grams that end before this position are in

    def propose(self, limit: int) -> list[int]:
        """`limit` tokens that may come next, or none: what follows the longest suffix where it last occurred before."""
        self._catch_up()
        tokens = self._tokens
        for length in reversed(self._lengths):
            if length < len(tokens) and (start := self._after.get(tuple(tokens[-length:]))) is not None:
                draft = list(tokens[start : start + limit])
                period = len(tokens) - start
                while len(draft) < limit:
                    draft.append(draft[len(draft) - period])
                return draft
        return []

    def _catch_up(self) -> None:
        """Index all but the n-grams that end with the last token: nothing follows them yet."""
        last = len(self._tokens) - 1
        if last <= self._indexed:
            return
        for length in self._lengths:
            first = max(self._indexed + 1 - length, 0)
            new = self._tokens[first:last]
            ngrams = zip(*(new[offset:] for offset in range(length)), strict=False)
            self._after.update(zip(ngrams, count(first + length), strict=False))
        self._indexed = last
