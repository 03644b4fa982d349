"""What one step of a CUDA model needs on the device, and how a StepInput is put there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inferd.core.messages import Sampling
from inferd.core.ports import StepInput
from inferd.model.cuda_attention import Chunk
from inferd.sampler import Row
from pagekernels.cuda import sampling
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.device import CudaDevice

Array = npt.NDArray[Any]

_RECORD_WORDS = sampling.ROW_BYTES // 4


@lru_cache(maxsize=4096)
def _head(how: Sampling) -> bytes:
    return sampling.pack_head(how)


def records(rows: Sequence[Row], room: int) -> Array:
    """The sampler's records of the rows, and padding up to `room`, as int32 words."""
    parts = [_head(row.sampling) + sampling.pack_position(row.position) for row in rows]
    parts.extend([sampling.PADDING] * (room - len(rows)))
    return np.frombuffer(b"".join(parts), np.int32)


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of a step's buffers: sequences, tokens, logit rows, blocks a sequence, and query tokens a sequence."""

    sequences: int
    tokens: int
    rows: int
    blocks: int
    max_queries: int


class StepBuffers:
    """A DeviceBatch with a model's further inputs: ids and positions [T], rows [R + G], and the sampler's records [R].

    Views of fixed device memory, so a captured step reads what was staged last. The last G rows are those of targets.
    """

    def __init__(self, device: CudaDevice, room: Room, num_targets: int = 0) -> None:
        self.room, self._num_rows = room, room.rows + num_targets
        extra = {
            "token_ids": ("int64", room.tokens),
            "positions": ("int64", room.tokens),
            "logit_rows": ("int64", self._num_rows),
            "records": ("int32", room.rows * _RECORD_WORDS),
        }
        self.batch = DeviceBatch(device, room.sequences, room.tokens, room.blocks, room.max_queries, extra)
        # All as tensors of inference: torch.compile takes others for another kind of input, to be compiled anew.
        with torch.inference_mode():
            self.ids, self.positions, self.logit_rows = (
                torch.as_tensor(self.batch.arrays[name], device=torch.device("cuda", device.index))
                for name in ("token_ids", "positions", "logit_rows")
            )
        self.records = self.batch.arrays["records"].data_ptr()

    def stage(self, step: StepInput, rows: Sequence[Row]) -> None:
        """Put a step there, for what is launched from now on."""
        # Rows beyond the step's are row 0, whose token their padding records do not write anywhere.
        logit_rows = np.zeros(self._num_rows, np.int64)
        logit_rows[: len(step.logit_rows)] = step.logit_rows
        if step.targets:
            first = self.room.rows
            logit_rows[first : first + len(step.targets)] = [target.row for target in step.targets]
        extra: dict[str, Sequence[int] | Array] = {
            "token_ids": step.token_ids,
            "positions": step.positions,
            "logit_rows": logit_rows,
            "records": records(rows, self.room.rows),
        }
        self.batch.stage(step.q_lens, step.kv_lens, step.tables, step.slots, extra)


def short_first(step: StepInput, most: int) -> StepInput:
    """The same step with its sequences of at most `most` query tokens first; rows keep their order. Without copies."""
    order = sorted(range(len(step.q_lens)), key=lambda s: step.q_lens[s] > most)
    if order == list(range(len(order))):
        return step
    starts = np.concatenate([[0], np.cumsum(step.q_lens)])
    tokens = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
    moved = np.empty_like(tokens)
    moved[tokens] = np.arange(len(tokens))
    return StepInput(
        token_ids=np.asarray(step.token_ids)[tokens].tolist(),
        positions=np.asarray(step.positions)[tokens].tolist(),
        slots=np.asarray(step.slots)[tokens].tolist(),
        q_lens=[step.q_lens[s] for s in order],
        kv_lens=[step.kv_lens[s] for s in order],
        tables=[step.tables[s] for s in order],
        logit_rows=moved[np.asarray(step.logit_rows, np.int64)].tolist(),
        targets=[replace(target, row=int(moved[target.row])) for target in step.targets],
    )


def chunks_of(step: StepInput, most: int) -> list[Chunk]:
    """The long chunks of a step whose short sequences come first."""
    found, first = [], 0
    for index, (count, kv_len) in enumerate(zip(step.q_lens, step.kv_lens, strict=True)):
        if count > most:
            found.append(Chunk(index, first, first + count, kv_len))
        first += count
    return found


def shorts_of(step: StepInput, count: int) -> StepInput:
    """The first `count` sequences of a step, without logit rows."""
    tokens = sum(step.q_lens[:count])
    return StepInput(
        token_ids=step.token_ids[:tokens],
        positions=step.positions[:tokens],
        slots=step.slots[:tokens],
        q_lens=step.q_lens[:count],
        kv_lens=step.kv_lens[:count],
        tables=step.tables[:count],
        logit_rows=[],
    )
