"""Logit bias and penalties on many rows of logits at once, in torch, wherever the rows lie.

What it does to a row is what inferd.adjust does, bit for bit: the same operations in float32, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inferd.core.history import Extras
from inferd.model.upload import upload


def adjust_(scores: torch.Tensor, extras: Sequence[Extras]) -> None:
    """Adjust contiguous float32 scores [R, vocab] in place, each row as its Extras say; waits for nothing.

    The histories are read before it returns. Ids from `vocab` on, which the model embeds but has no logits for, are
    passed over.
    """
    vocab = scores.shape[1]
    there = upload(scores.device, **_biases(extras, vocab), **_histories(extras, vocab), **_penalties(extras))
    flat = scores.view(-1)
    places, values = there["bias_places"], there["biases"]
    if len(values):
        flat.scatter_(0, places, flat.gather(0, places) + values)
    places, owners, counts = there["places"], there["owners"], there["counts"]
    if len(counts):
        found = flat.gather(0, places)
        # A tensor divides as IEEE has it, a number would be multiplied by its reciprocal.
        repetition = there["repetition"].index_select(0, owners)
        found = torch.where(found < 0, found * repetition, found / repetition)
        found -= there["frequency"].index_select(0, owners) * counts.float()
        found -= there["presence"].index_select(0, owners) * (counts > 0)
        flat.scatter_(0, places, found)


def _biases(extras: Sequence[Extras], vocab: int) -> dict[str, npt.NDArray[Any]]:
    """Where in the rows, one behind the other, a bias is added, and which."""
    places, biases = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for row, each in enumerate(extras):
        if each.biases:
            tokens = np.frombuffer(each.bias_token_ids, np.int32)
            there = tokens < vocab
            places.append(tokens[there] + np.int64(row * vocab))
            biases.append(np.frombuffer(each.biases, np.float32)[there])
    return {"bias_places": np.concatenate(places), "biases": np.concatenate(biases)}


def _histories(extras: Sequence[Extras], vocab: int) -> dict[str, npt.NDArray[Any]]:
    """Where in the rows, one behind the other, the tokens of histories are, in which row, and how often generated."""
    places, counts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int32)], []
    for row, each in enumerate(extras):
        if each.history is None:
            sizes.append(0)
            continue
        tokens = np.frombuffer(each.history.token_ids, np.int32)
        there = tokens < vocab
        places.append(tokens[there] + np.int64(row * vocab))
        # Copied before the next token is added: an array cannot grow while its buffer is read.
        counts.append(np.frombuffer(each.history.counts, np.int32)[there])
        sizes.append(len(counts[-1]))
    owners = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return {"places": np.concatenate(places), "counts": np.concatenate(counts), "owners": owners}


def _penalties(extras: Sequence[Extras]) -> dict[str, npt.NDArray[Any]]:
    """Of each row; those of a row without adjustments are never looked at."""
    hows = [each.adjustments for each in extras]
    return {
        "repetition": np.array([how.repetition_penalty if how else 1 for how in hows], np.float32),
        "frequency": np.array([how.frequency_penalty if how else 0 for how in hows], np.float32),
        "presence": np.array([how.presence_penalty if how else 0 for how in hows], np.float32),
    }
