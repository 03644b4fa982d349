"""What changes from step to step, in device buffers that never move, so that a captured graph may be replayed.

A step is written into pinned host memory and copied on the device's stream. Block tables mostly stay as they are from
one step to the next, so only the rows that changed are written and copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from pagekernels.cuda.arrays import ITEM_BYTES, DeviceArray
from pagekernels.cuda.device import CudaDevice

Array = npt.NDArray[Any]

_Converted = dict[int, tuple[object, npt.NDArray[np.uint32]]]
"""Tables as arrays, by the id of the table, which is kept with it so that the id stays its own."""

_ALIGNMENT = 256
_WORTH_A_PITCH = 1 << 16
"""Bytes of rows from which on only their used columns are copied."""


class DeviceBatch:
    """The buffers of steps of up to S sequences, T tokens and M blocks a sequence. For one thread: the device's.

    cu_q_lens     int32 [S + 1]   start of each sequence's query tokens; of all sequences beyond the step's, their end
    kv_lens       int32 [S]       tokens to attend to; 0 beyond
    slots         int64 [T]       where each token's K and V go; -1 beyond
    block_tables  uint32 [S, M]   packed entries; those beyond a sequence's blocks are left as they were

    `max_queries` promises that no sequence has more query tokens. `extra` names further arrays of one dimension that
    travel in the same copy: {"token_ids": ("int64", 128)}; they are in `arrays` by name, like the four above.
    """

    def __init__(
        self,
        device: CudaDevice,
        sequences: int,
        tokens: int,
        blocks: int,
        max_queries: int | None = None,
        extra: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        self.device, self.sequences, self.tokens, self.blocks = device, sequences, tokens, blocks
        self.max_queries = min(tokens, max_queries or tokens)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "cu_q_lens": ("int32", (sequences + 1,)),
            "kv_lens": ("int32", (sequences,)),
            "slots": ("int64", (tokens,)),
        }
        shapes |= {name: (dtype, (size,)) for name, (dtype, size) in (extra or {}).items()}
        offsets, self._head_bytes = _offsets(shapes)
        self._tables_at = self._head_bytes
        total = self._tables_at + 4 * sequences * blocks
        self._memory: Any = device.api.mem_alloc(total)
        device.api.memset_d8_async(self._memory, 0, total, device.stream)
        base = int(self._memory)
        self.arrays = {
            name: DeviceArray(base + offsets[name], shape, dtype, self._memory)
            for name, (dtype, shape) in shapes.items()
        }
        self.arrays["block_tables"] = DeviceArray(base + self._tables_at, (sequences, blocks), "uint32", self._memory)
        self.cu_q_lens, self.kv_lens = self.arrays["cu_q_lens"], self.arrays["kv_lens"]
        self.slots, self.block_tables = self.arrays["slots"], self.arrays["block_tables"]
        self._staging = [_Staging(device, total, self, offsets) for _ in range(2)]
        self._converted: _Converted = {}
        self._on_device: list[object] = [None] * sequences
        self._turn = 0

    def stage(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]],
        slots: Sequence[int],
        extra: Mapping[str, Sequence[int] | Sequence[float] | Array] | None = None,
    ) -> None:
        """Make these the device's contents for what is launched on its stream from now on; does not wait for the copy.

        A table is known by its object: one that has changed must be another object, or its old entries are used.
        `extra` arrays may be shorter than their room; the rest keeps arbitrary values. Raises ValueError if something
        does not fit.
        """
        self._check(q_lens, kv_lens, tables, slots)
        staging = self._staging[self._turn]
        self._turn = 1 - self._turn
        staging.wait()
        count = len(q_lens)
        cu, kv, places = staging.views["cu_q_lens"], staging.views["kv_lens"], staging.views["slots"]
        cu[1 : count + 1] = list(accumulate(q_lens))
        cu[count + 1 :] = cu[count]
        kv[:count], kv[count:] = kv_lens, 0
        places[: len(slots)], places[len(slots) :] = slots, -1
        for name, values in (extra or {}).items():
            staging.views[name][: len(values)] = values
        driver, stream = self.device.api, self.device.stream
        driver.memcpy_htod_async(int(self._memory), staging.bytes[: self._head_bytes], stream)
        self._copy_tables(staging, tables)
        staging.event.record(stream)

    def _check(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        tables: Sequence[Sequence[int]],
        slots: Sequence[int],
    ) -> None:
        if not len(q_lens) == len(kv_lens) == len(tables) <= self.sequences:
            lengths = f"{len(q_lens)} q_lens, {len(kv_lens)} kv_lens and {len(tables)} tables"
            raise ValueError(f"there are {lengths}, but there must be one of each for up to {self.sequences} sequences")
        if not sum(q_lens) == len(slots) <= self.tokens:
            raise ValueError(
                f"q_lens add up to {sum(q_lens)} and there are {len(slots)} slots, but they must agree and be at most "
                f"{self.tokens}"
            )
        if q_lens and max(q_lens) > self.max_queries:
            raise ValueError(f"a sequence has {max(q_lens)} query tokens, but this batch takes {self.max_queries}")
        if tables and max(map(len, tables)) > self.blocks:
            raise ValueError(f"a table has {max(map(len, tables))} blocks, but this batch takes {self.blocks}")

    def _copy_tables(self, staging: _Staging, tables: Sequence[Sequence[int]]) -> None:
        """Copy the rows from the first to the last that the device does not have yet."""
        changed = [s for s, table in enumerate(tables) if self._on_device[s] is not table]
        if not changed:
            return
        first, last = changed[0], changed[-1] + 1
        for s in range(first, last):
            staging.write(s, tables[s], self._converted)
        if len(self._converted) > 4 * self.sequences:  # tables of sequences long gone
            living = set(map(id, tables))
            self._converted = {key: value for key, value in self._converted.items() if key in living}
        self._on_device[first:last] = tables[first:last]
        columns = max(1, *map(len, tables[first:last]), 0)
        pitch = 4 * self.blocks
        begin = self._tables_at + first * pitch
        if (last - first) * pitch < _WORTH_A_PITCH or 2 * columns > self.blocks:
            run = staging.bytes[begin : begin + (last - first) * pitch]
            self.device.api.memcpy_htod_async(int(self._memory) + begin, run, self.device.stream)
            return
        copy = self.device.api.Memcpy2D()
        copy.set_src_host(staging.bytes[begin:])
        copy.set_dst_device(int(self._memory) + begin)
        copy.src_pitch = copy.dst_pitch = pitch
        copy.width_in_bytes, copy.height = 4 * columns, last - first
        copy(self.device.stream)


class _Staging:
    """Pinned host memory with the device buffers' layout, and whose tables it holds."""

    def __init__(self, device: CudaDevice, total: int, batch: DeviceBatch, offsets: Mapping[str, int]) -> None:
        self.bytes: Array = device.api.pagelocked_empty(total, np.uint8)
        self.bytes[:] = 0
        self.views = {
            name: self.bytes[at : at + batch.arrays[name].nbytes].view(batch.arrays[name].dtype)
            for name, at in offsets.items()
        }
        tables = batch.block_tables
        self.tables = self.bytes[total - tables.nbytes :].view(np.uint32).reshape(tables.shape)
        self.rows: list[object] = [None] * tables.shape[0]
        self.event = device.api.Event(device.api.event_flags.DISABLE_TIMING)
        self.event.record(device.stream)

    def wait(self) -> None:
        """Wait until the copy of this memory's last step is done."""
        self.event.synchronize()

    def write(self, s: int, table: Sequence[int], converted: _Converted) -> None:
        """Row s is this table from now on."""
        if self.rows[s] is table:
            return
        known = converted.get(id(table))
        if known is None or known[0] is not table:
            known = converted[id(table)] = (table, np.frombuffer(array("I", table), np.uint32))
        self.tables[s, : len(table)] = known[1]
        self.rows[s] = table


def _offsets(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, int], int]:
    """Where each array starts, aligned, and the bytes of all."""
    offsets, total = {}, 0
    for name, (dtype, shape) in shapes.items():
        offsets[name] = total
        total += -(-ITEM_BYTES[dtype] * shape[0] // _ALIGNMENT) * _ALIGNMENT
    return offsets, total
