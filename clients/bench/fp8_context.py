"""Sequences whose KV lies in a slab of their own, part of it in FP8 blocks: what `make bench-fp8` measures on.

The model is inferd's, by its CPU runner; blocks are compressed and read by the CPU kernels. There is no memd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inferd.core.ports import StepInput
from inferd.model.load import ServedModel
from inferd.model.row_logprobs import packed_logprobs
from inferd.model.runner import ModelRunner
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import Format, PagedLayout, pack_entry, slot_mapping
from pagekernels.ops import PagedOps

Errors = npt.NDArray[np.float32]
MakeOps = Callable[[npt.NDArray[np.uint8], PagedLayout], PagedOps]


@dataclass(frozen=True, slots=True)
class Policy:
    """Which blocks of a table are stored as FP8 once they are sealed.

    every        every nth block, counted from the table's begin: 1 all, 2 those with odd indices, 0 none
    keep_first   blocks at the begin that stay in the native format
    keep_recent  sealed blocks at the end that do, as long as they are the last
    guard        a block whose error, of K or of V, is over it stays in the native format
    """

    every: int
    keep_first: int = 1
    keep_recent: int = 0
    guard: float = math.inf

    def chosen(self, sealed: int) -> list[int]:
        """The indices of the blocks to store as FP8, of a table with so many sealed blocks."""
        candidates = range(self.keep_first, sealed - self.keep_recent)
        return [i for i in candidates if self.every and (i + 1) % self.every == 0]


class Blocks:
    """A block table of `count` blocks over a slab that has room for each in the native format and in FP8.

    Native blocks lie first. FP8 blocks lie behind them, one a unit, so that two of them share what one 16-bit block
    takes. Native bytes that FP8 replaces become NaN: nothing reads them unnoticed.

    ops     the operations on the slab
    table   packed entries [count], all native at first
    kept    indices of blocks that the guard left in the native format
    """

    def __init__(self, layout: PagedLayout, count: int, make_ops: MakeOps = CpuOps) -> None:
        self._layout, self._count = layout, count
        self._units = layout.units_per_block
        self._slab = np.full((count * (self._units + 1), layout.unit_bytes), 0xFF, np.uint8)
        self.ops = make_ops(self._slab.reshape(-1), layout)
        self.table = [pack_entry(layout.format, 0, self._units * index) for index in range(count)]
        self.kept: list[int] = []
        self._tried: set[int] = set()

    @property
    def num_fp8(self) -> int:
        """Blocks of the table that are FP8."""
        return sum(entry >> 29 == Format.FP8_E4M3 for entry in self.table)

    def slots(self, first: int, last: int) -> list[int]:
        """Where the K and V of token positions first..last-1 are written."""
        return slot_mapping(self.table, first, last, self._layout.block_size)

    def errors(self, indices: Sequence[int]) -> Errors:
        """The guard's errors [N, 2], of K and of V, of native blocks; the table stays as it is."""
        sources = np.array([self.table[i] for i in indices], np.uint32)
        targets = np.array([self._fp8(i) for i in indices], np.uint32)
        return self.ops.compress_blocks(sources, targets)

    def compress(self, indices: Sequence[int], guard: float) -> None:
        """Store those of the blocks as FP8 that were not tried before; the guard's bound decides whether they stay."""
        new = [i for i in indices if i not in self._tried]
        self._tried.update(new)
        for index, error in zip(new, self.errors(new).max(axis=1), strict=True):
            if error <= guard:
                self.table[index] = self._fp8(index)
                self._slab[index * self._units : (index + 1) * self._units] = 0xFF
            else:
                self.kept.append(index)

    def _fp8(self, index: int) -> int:
        return pack_entry(Format.FP8_E4M3, 0, self._count * self._units + index)


class Context:
    """A sequence of at most `length` tokens of a served model, its blocks stored as `policy` says."""

    def __init__(
        self, served: ServedModel, policy: Policy, length: int, block_size: int = 16, make_ops: MakeOps = CpuOps
    ) -> None:
        self._policy, self._block_size = policy, block_size
        self.blocks = Blocks(served.layout(block_size), -(-length // block_size), make_ops)
        self._runner = ModelRunner(served, self.blocks.ops)
        self.num_tokens = 0

    @property
    def num_sealed(self) -> int:
        """Full blocks."""
        return self.num_tokens // self._block_size

    def extend(self, token_ids: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Compute so many tokens more, and then compress what is sealed; float32 logits [rows, vocab]."""
        first, last = self.num_tokens, self.num_tokens + len(token_ids)
        logits = self._runner.forward(
            StepInput(
                token_ids=token_ids,
                positions=range(first, last),
                slots=self.blocks.slots(first, last),
                q_lens=[last - first],
                kv_lens=[last],
                tables=[self.blocks.table],
                logit_rows=rows,
            )
        )
        self.num_tokens = last
        self.blocks.compress(self._policy.chosen(self.num_sealed), self._policy.guard)
        return logits


@dataclass(frozen=True, slots=True)
class Scored:
    """What a run says of T tokens: log-probabilities float64 [T - 1] of tokens 1..T-1, and arg-maxes int64 [T - 1]."""

    logprobs: npt.NDArray[np.float64]
    top: npt.NDArray[np.int64]


def score(context: Context, token_ids: Sequence[int], chunk: int) -> Scored:
    """Run a text through a new context, `chunk` tokens a step; the logits of one step only are held at a time.

    Of equal logits the lower id is the arg-max.
    """
    found = []
    for first in range(0, len(token_ids), chunk):
        part = token_ids[first : first + chunk]
        following = token_ids[first + 1 : first + 1 + len(part)]
        logits = context.extend(part, range(len(following)))
        found.append(packed_logprobs(logits, torch.tensor(following, dtype=torch.int64), 1).numpy())
    rows = np.concatenate(found)
    return Scored(rows[:, 1], rows[:, 2].astype(np.int64))


def greedy(context: Context, token_ids: Sequence[int], new_tokens: int, chunk: int) -> list[int]:
    """The `new_tokens` most likely tokens after a prompt, one after the other."""
    for first in range(0, len(token_ids), chunk):
        part = token_ids[first : first + chunk]
        logits = context.extend(part, [len(part) - 1])
    said: list[int] = []
    while True:
        said.append(int(logits[-1].argmax()))
        if len(said) == new_tokens:
            return said
        logits = context.extend(said[-1:], [0])
