"""Runs a model over packed, padding-free sequences whose keys and values lie in the pool."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from inferd.core.ports import StepInput
from inferd.model.attention import PagedAttention, attending
from inferd.model.load import ServedModel
from inferd.model.probe import forward
from pagekernels.ops import AttentionBatch, PagedOps


class ModelRunner:
    """A served model bound to the operations on one pool. One thread at a time."""

    def __init__(self, served: ServedModel, ops: PagedOps) -> None:
        self.served = served
        self._attention = PagedAttention(ops, served.geometry.layers)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        """Write the K and V of the step's tokens into their slots; float32 [len(logit_rows), vocab_size] logits."""
        self._attention.begin(attention_batch(step), np.array(step.slots, np.int64))
        input_ids = torch.tensor([step.token_ids])
        position_ids = torch.tensor([step.positions])
        rows = torch.tensor(step.logit_rows, dtype=torch.long)  # may be empty
        with attending(self._attention):
            logits = forward(self.served.model, input_ids, position_ids, rows)
        return logits.float()


def attention_batch(step: StepInput) -> AttentionBatch:
    """The arrays that all layers of a step share; tables are padded with zeros to the longest."""
    width = max(map(len, step.tables))
    tables = np.zeros((len(step.tables), width), np.uint32)
    for row, table in zip(tables, step.tables, strict=True):
        row[: len(table)] = table
    cu_q_lens = np.array([0, *accumulate(step.q_lens)], np.int32)
    return AttentionBatch(cu_q_lens, np.array(step.kv_lens, np.int32), tables)
