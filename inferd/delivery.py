"""What a step that is over says to whom: tokens and logprobs for the front, and which sequences end by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from inferd.channel import Message
from inferd.core.messages import Ending, PromptLogprobs, ScoredTokens, TokenLogprobs, Tokens
from inferd.core.searching import Search
from inferd.core.sequence import Phase, Sequence
from inferd.flight import Landed
from inferd.logprobs import Scores

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ended; the token that ended it unless it was delivered, and its logprob if those are wanted."""

    sequence: Sequence
    ending: Ending
    stop_token_id: int | None = None
    stop_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """messages go to the front first; then `broken` sequences fail, whose logits are not finite, and others end.

    generated counts the tokens in the messages.
    searches are those of which every beam has said how it may go on.
    """

    messages: list[Message]
    ended: list[End]
    broken: list[Sequence]
    generated: int
    searches: list[Search]


def deliver(step: Landed, now: float, eos_token_ids: frozenset[int]) -> Delivery:
    """Have the sequences accept a step's tokens; those of sequences that had ended before are dropped."""
    items: list[tuple[int, list[int]]] = []
    ended: list[End] = []
    broken = [] if step.scores is None else _unscored(step, step.scores)
    guessed = _guessed(step, step.tokens)
    for row, (sequence, token) in enumerate(zip(step.plan.sampled, step.tokens, strict=False)):
        if sequence.phase is Phase.FINISHED or (broken and sequence.owner in broken):
            continue
        if sequence.search is not None:
            _look(step, sequence, row, broken)
            continue
        if sequence.speculation is not None:
            found, ending = sequence.verify([token, *guessed.get(sequence.request, ())], now, eos_token_ids)
        else:
            found, ending = [token], sequence.accept(token, now, eos_token_ids) if token >= 0 else None
        if found[-1] < 0:
            broken.append(sequence)
            found.pop()
        last = None if ending in (None, Ending.MAX_TOKENS) else found.pop()
        if found:
            items.append((sequence.request, found))
        if ending is not None:
            ended.append(_end(step, sequence, ending, last, (row, len(found))))
    messages: list[Message] = []
    if step.scores is not None:
        messages += _prompt_logprobs(step, step.scores, broken)
        messages += _tokens(step, step.scores, items)
    elif items:
        messages.append(Tokens(items))
    return Delivery(messages, ended, broken, sum(len(tokens) for _, tokens in items), _ready(step, broken))


def _end(step: Landed, sequence: Sequence, ending: Ending, last: int | None, place: tuple[int, int]) -> End:
    """The end of a sequence by its token `place`: that of a logit row if 0, else behind so many tokens of its draft."""
    row, behind = place
    if last is None or step.scores is None:
        return End(sequence, ending, last)
    scores = step.scores.sampled
    found = [scores[row], *_guessed(step, scores).get(sequence.request, ())][behind]
    return End(sequence, ending, last, found.logprob if found is not None else None)


def _look(step: Landed, beam: Sequence, row: int, broken: list[Sequence]) -> None:
    """What a beam's row says of how it may go on."""
    found = step.scores.sampled[row] if step.scores is not None else None
    if step.tokens[row] < 0 or found is None:
        broken.append(beam.owner)
    else:
        beam.likeliest = found.top_token_ids, found.top_logprobs


def _ready(step: Landed, broken: list[Sequence]) -> list[Search]:
    searches = (each.search for each in step.plan.sampled)
    ready = (each for each in searches if each is not None and each.is_ready and each.owner not in broken)
    return list(dict.fromkeys(ready))


def _guessed(step: Landed, rows: list[T]) -> dict[int, list[T]]:
    """Of what a step says of its logit rows, that of the rows behind drafts, by request."""
    return {each.sequence.request: rows[each.row : each.row + len(each.token_ids)] for each in step.plan.drafts}


def _prompts(step: Landed, scores: Scores) -> Iterator[tuple[Sequence, int, list[TokenLogprobs | None]]]:
    """The logprobs of each live sequence's prompt tokens, and the position of the first."""
    at = 0
    for sequence, first, count in step.plan.scored:
        found, at = scores.prompt[at : at + count], at + count
        if sequence.phase is not Phase.FINISHED:
            yield sequence, first, found


def _unscored(step: Landed, scores: Scores) -> list[Sequence]:
    return [sequence for sequence, _, found in _prompts(step, scores) if None in found]


def _prompt_logprobs(step: Landed, scores: Scores, broken: list[Sequence]) -> Iterator[PromptLogprobs]:
    for sequence, first, found in _prompts(step, scores):
        if sequence not in broken:
            yield PromptLogprobs(sequence.request, first, [each for each in found if each is not None])


def _tokens(step: Landed, scores: Scores, items: list[tuple[int, list[int]]]) -> Iterator[Message]:
    """The step's tokens, each in the one kind of message or the other."""
    guessed = _guessed(step, scores.sampled)
    found = {
        sequence.request: [each, *(more for more in guessed.get(sequence.request, ()) if more is not None)]
        for sequence, each in zip(step.plan.sampled, scores.sampled, strict=False)
        if each is not None
    }
    if scored := [(request, found[request][: len(tokens)]) for request, tokens in items if request in found]:
        yield ScoredTokens(scored)
    if plain := [item for item in items if item[0] not in found]:
        yield Tokens(plain)
