"""Beam search over the likeliest next tokens of each beam, as transformers' generate does it. Pure.

The rules are those of `generate(num_beams=..., length_penalty=..., early_stopping=...)` in transformers 5, restated:

* A beam's score is the sum of its tokens' logprobs. Of all continuations of the beams the `width` best that do not end
  run on.
* A continuation ends by an end token, or because it has max_tokens tokens. It counts only if it is among the `width`
  best continuations of its step, and then with its score over (tokens, the end token included) ** length_penalty; the
  `width` best of all steps are kept.
* Once so many are kept the search may be over; see EarlyStopping. With one beam it is greedy search, over at once.

transformers looks at (1 + end tokens) * width continuations of all beams together. The `width` + end tokens likeliest
tokens of each beam are enough for the same: what ends counts only among the `width` best, and among so many of a beam
there are `width` that do not end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inferd.core.beam_values import Beam, EarlyStopping
from inferd.core.messages import Ending

Likeliest = tuple[Sequence[int], Sequence[float]]
"""Token ids and their logprobs, likeliest first."""

_History = tuple[int, "_History"] | None
"""A beam's last token and what was before: beams share their past, so that a step costs no copies of it."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that a beam search found; the token that ended it is not among the tokens, but in the score.

    The score is the sum of all their logprobs over their number ** length_penalty.
    """

    tokens: list[int]
    score: float
    ending: Ending
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """What a beam search found, best first; Finished follows, whose ending is the best one's."""

    request: int
    items: list[Hypothesis]


@dataclass(frozen=True, slots=True)
class Choice:
    """A beam of the next step: which beam of this step it continues, and by which token."""

    parent: int
    token: int


class BeamSearch:
    """One search. It begins with one beam that has no token yet.

    endings says how each end token ends a continuation; the end token is not among the continuation's tokens.
    """

    def __init__(self, how: Beam, max_tokens: int, endings: Mapping[int, Ending]) -> None:
        self._how = how
        self._max_tokens = max_tokens
        self._endings = endings
        self._length = 0
        self._running: list[tuple[float, _History]] = [(0.0, None)]
        self._finished: list[tuple[float, _History]] = []  # best first
        self.generated = 0
        """Tokens that beams were continued or ended by."""

    @property
    def width(self) -> int:
        """Most beams that run."""
        return self._how.width

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest next tokens `advance` has to be given of each beam, if there are as many."""
        return self._how.width + len(self._endings)

    def advance(self, candidates: Sequence[Likeliest]) -> list[Choice]:
        """One more token, with the candidates of each running beam in order. The beams that run on, best first.

        None run on when the search is over.
        """
        ordered = sorted(self._continuations(candidates), key=_score, reverse=True)
        self._length += 1
        width, last = self._how.width, self._length == self._max_tokens
        choices: list[Choice] = []
        running: list[tuple[float, _History]] = []
        for place, (score, parent, token) in enumerate(ordered):
            history = token, self._running[parent][1]
            if last or token in self._endings:
                if place < width:
                    self._finished.append((self._penalised(score, self._length), history))
                    self.generated += 1
            elif len(running) < width:
                running.append((score, history))
                choices.append(Choice(parent, token))
        self._finished.sort(key=_score, reverse=True)
        del self._finished[width:]
        self.generated += len(choices)
        if not running or self._is_over(running[0][0]):
            return []
        self._running = running
        return choices

    def best(self) -> list[Hypothesis]:
        """The num_return_sequences best continuations, best first, of a search that is over."""
        return [self._hypothesis(*each) for each in self._finished[: self._how.num_return_sequences]]

    def _continuations(self, candidates: Sequence[Likeliest]) -> Iterable[tuple[float, int, int]]:
        for parent, (token_ids, logprobs) in enumerate(candidates):
            score = self._running[parent][0]
            for token, logprob in zip(token_ids, logprobs, strict=True):
                yield score + logprob, parent, token

    def _is_over(self, best_running: float) -> bool:
        """Whether what runs cannot, or by transformers' rule will not, replace any of those kept."""
        how = self._how
        if len(self._finished) < how.width:
            return False
        # One beam is greedy search, which ends where it ends.
        if how.early_stopping is EarlyStopping.FULL or how.width == 1:
            return True
        longest = how.early_stopping is EarlyStopping.NEVER and how.length_penalty > 0
        length = self._max_tokens if longest else self._length
        return self._penalised(best_running, length) <= self._finished[-1][0]

    def _penalised(self, score: float, length: int) -> float:
        return score / math.pow(length, self._how.length_penalty)

    def _hypothesis(self, score: float, history: _History) -> Hypothesis:
        tokens: list[int] = []
        while history is not None:
            token, history = history
            tokens.append(token)
        end = tokens[0]
        ending = self._endings.get(end, Ending.MAX_TOKENS)
        if ending is Ending.MAX_TOKENS:
            return Hypothesis(tokens[::-1], score, ending)
        return Hypothesis(tokens[:0:-1], score, ending, end)


def _score(each: tuple[float, *tuple[object, ...]]) -> float:
    return each[0]
