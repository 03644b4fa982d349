"""What a request asks of its logits beside a token, and the history of tokens that some of it depends on. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from inferd.core.messages import Adjustments, Submit


class History:
    """Which tokens a sequence holds, and how often each was generated: all that penalties depend on.

    token_ids (each once) and counts (0: in the prompt only) are int32 and belong together. They may be read as buffers,
    but not be kept so: they grow with the next token.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self.token_ids = array("i", dict.fromkeys(prompt))
        self.counts = array("i", [0] * len(self.token_ids))
        self._places = {token: place for place, token in enumerate(self.token_ids)}

    def add(self, token: int) -> None:
        """A token was generated."""
        place = self._places.setdefault(token, len(self.counts))
        if place == len(self.counts):
            self.token_ids.append(token)
            self.counts.append(0)
        self.counts[place] += 1


@dataclass(frozen=True, slots=True)
class Extras:
    """A request's wishes; a request that has none has no Extras, and costs nothing for them.

    bias_token_ids (int32) and biases (float32) are those of the adjustments. history is there if these penalise: the
    next token then depends on the last one, which must be known on the host before the step is launched.
    """

    adjustments: Adjustments | None
    bias_token_ids: array[int]
    biases: array[float]
    history: History | None
    logprobs: int | None
    prompt_logprobs: int | None

    @classmethod
    def of(cls, submit: Submit) -> Extras | None:
        """The wishes of a new request, or None."""
        how = submit.adjustments
        if how is None and submit.logprobs is None and submit.prompt_logprobs is None:
            return None
        return cls(
            adjustments=how,
            bias_token_ids=array("i", how.bias_token_ids if how else ()),
            biases=array("f", how.biases if how else ()),
            history=History(submit.prompt) if how is not None and how.penalises else None,
            logprobs=submit.logprobs,
            prompt_logprobs=submit.prompt_logprobs,
        )
