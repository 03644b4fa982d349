"""Logit bias and penalties: what is done to one row of logits before a token is chosen from it, greedily or not.

In this order, which is that of transformers' generate where it has the processor, and of vLLM:

1. logit_bias: added to the logits (transformers' SequenceBiasLogitsProcessor for sequences of one token; OpenAI API).
2. repetition_penalty r: the logit x of each token of the prompt or generated becomes x / r if x >= 0, x * r below
   (transformers' RepetitionPenaltyLogitsProcessor; Keskar et al., "CTRL", arXiv:1909.05858, with a sign).
3. frequency_penalty f, presence_penalty p: the logit of a token that was generated c > 0 times falls by f * c + p.
   Tokens of the prompt do not count (OpenAI API as vLLM implements it; transformers has neither).

Temperature, top_k, top_p and min_p come after all of these (see inferd.sampler).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inferd.core.history import Extras, History
from inferd.core.messages import Adjustments

Floats = npt.NDArray[np.float32]


def adjusted(logits: Floats, extras: Extras) -> Floats:
    """A row of logits [vocab] as the adjustments of a request leave it; the row itself if there are none.

    -inf stays -inf. Ids that the model embeds but has no logits for are passed over, as in transformers.
    """
    how = extras.adjustments
    if how is None:
        return logits
    scores = logits.copy()
    if extras.biases:
        tokens = np.frombuffer(extras.bias_token_ids, np.int32)
        there = tokens < len(scores)
        scores[tokens[there]] += np.frombuffer(extras.biases, np.float32)[there]
    if extras.history is not None:
        _penalise(scores, how, extras.history)
    return scores


def _penalise(scores: Floats, how: Adjustments, history: History) -> None:
    tokens, counts = np.frombuffer(history.token_ids, np.int32), np.frombuffer(history.counts, np.int32)
    there = tokens < len(scores)
    tokens, counts = tokens[there], counts[there]
    found = scores[tokens]
    if how.repetition_penalty != 1:
        penalty = np.float32(how.repetition_penalty)
        found = np.where(found < 0, found * penalty, found / penalty)
    found -= np.float32(how.frequency_penalty) * counts.astype(np.float32)
    found -= np.float32(how.presence_penalty) * (counts > 0)
    scores[tokens] = found
