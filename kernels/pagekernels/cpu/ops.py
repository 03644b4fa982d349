"""PagedOps by numba."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from pagekernels import checks
from pagekernels.cpu import compress, move
from pagekernels.cpu.attend import attend
from pagekernels.cpu.blocks import Floats, Halves
from pagekernels.cpu.geometry import layer_geometry
from pagekernels.cpu.plan import BAD_ENTRY, BAD_LENGTH, OK
from pagekernels.layout import LAYOUT_LINEAR, PagedLayout
from pagekernels.ops import Array, AttentionBatch, AttentionParams

NO_FLOATS, NO_HALVES = np.empty((0, 0, 0), np.float32), np.empty((0, 0, 0), np.uint16)
NO_SINKS = np.empty(0, np.float32)


class CpuOps:
    """PagedOps on a slab in this process's memory: a writable buffer of bytes, which must outlive this object.

    Use it from one thread at a time. Blocks of every format are read where they lie.
    """

    def __init__(self, slab: memoryview | npt.NDArray[np.uint8], layout: PagedLayout) -> None:
        if layout.version != LAYOUT_LINEAR:
            raise ValueError(
                f"layout.version is {layout.version}, but the CPU kernels read version {LAYOUT_LINEAR} only: "
                "attach to a memd on the host's memory, or run on CUDA"
            )
        self.layout = layout
        num_units = len(np.frombuffer(slab, np.uint8)) // layout.unit_bytes
        self._bytes = np.frombuffer(slab, np.uint8)[: num_units * layout.unit_bytes]
        if not self._bytes.flags.writeable:
            raise ValueError("slab is read-only, but append and copy_blocks write to it: map it writable")
        self._words, self._halves = self._bytes.view(np.float32), self._bytes.view(np.uint16)
        self._layers = np.stack([layer_geometry(layout, layer, num_units) for layer in range(len(layout.layers))])
        self._geometry = list(self._layers)
        self._threads = numba.get_num_threads()

    def append(self, layer: int, k: Array, v: Array, slots: npt.NDArray[np.int64]) -> None:
        """See PagedOps. Raises ValueError, and writes nothing, if a slot lies outside the slab."""
        checks.check_append(self.layout, layer, k, v, slots)
        bad = move.append(self._words, self._halves, *pair(k), *pair(v), slots, self._geometry[layer])
        if bad >= 0:
            raise ValueError(f"slots[{bad}] is {slots[bad]}, but {self._slab_limit()}")

    def attend(self, layer: int, q: Array, out: Array, batch: AttentionBatch, params: AttentionParams) -> None:
        """See PagedOps. Raises ValueError, and writes nothing, if the batch contradicts itself or leaves the slab."""
        checks.check_attend(self.layout, layer, q, out, batch, params)
        code, s, column = attend(
            self._words,
            self._halves,
            *pair(q),
            *pair(out),
            batch.cu_q_lens,
            batch.kv_lens,
            batch.block_tables,
            NO_SINKS if params.sinks is None else params.sinks,
            self._geometry[layer],
            params.scale,
            params.window,
            params.chunk,
            params.softcap,
            self._threads,
        )
        if code != OK:
            raise ValueError(self._complaint(batch, code, s, column))

    def copy_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        """See PagedOps. Raises ValueError, and copies nothing, if formats differ or an entry leaves the slab."""
        checks.check_copy(sources, targets)
        bad = move.copy_blocks(self._bytes, sources, targets, self.layout.unit_bytes)
        if bad >= 0:
            pair_of = f"sources[{bad}] is {sources[bad]:#010x} and targets[{bad}] {targets[bad]:#010x}"
            raise ValueError(f"{pair_of}, but both must be blocks of one format, and {self._slab_limit()}")

    def compress_blocks(
        self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.float32]:
        """See PagedOps."""
        checks.check_compress(self.layout, checks.Room(self._num_units), sources, targets)
        errors = np.empty((len(sources), 2), np.float32)
        compress.compress_blocks(self._words, self._halves, sources, targets, self._layers, errors)
        return errors

    def decompress_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        """See PagedOps."""
        checks.check_decompress(self.layout, checks.Room(self._num_units), sources, targets)
        compress.decompress_blocks(self._words, self._halves, sources, targets, self._layers)

    def gather(self, layer: int, table: npt.NDArray[np.uint32], length: int, k: Array, v: Array) -> None:
        """See PagedOps. Raises ValueError if an entry leaves the slab."""
        checks.check_gather(self.layout, layer, table, length, k, v)
        geometry = self._geometry[layer]
        bad = move.gather(self._words, self._halves, table, length, *pair(k), *pair(v), geometry)
        if bad >= 0:
            raise ValueError(f"table[{bad}] is {table[bad]:#010x}, but {self._slab_limit()}")

    @property
    def _num_units(self) -> int:
        return len(self._bytes) // self.layout.unit_bytes

    def _slab_limit(self) -> str:
        return f"the slab has {self._num_units} units and no other slab is mapped"

    def _complaint(self, batch: AttentionBatch, code: int, s: int, column: int) -> str:
        kv_len = batch.kv_lens[s]
        if code == BAD_ENTRY:
            return f"block_tables[{s}, {column}] is {batch.block_tables[s, column]:#010x}, but {self._slab_limit()}"
        if code == BAD_LENGTH:
            room = batch.block_tables.shape[1] * self.layout.block_size
            queries = batch.cu_q_lens[s + 1] - batch.cu_q_lens[s]
            return f"kv_lens[{s}] is {kv_len}, but must be from its {queries} query tokens to its table's {room}"
        return f"cu_q_lens[{s + 1}] is {batch.cu_q_lens[s + 1]}, but cu_q_lens must rise from 0 to T, the tokens of q"


def pair(array: Array) -> tuple[Floats, Halves]:
    """The array as rows.py wants it: (float32, 16-bit), the other one empty."""
    return (array, NO_HALVES) if array.dtype == np.float32 else (NO_FLOATS, array)  # type: ignore[return-value]
