"""Key outliers, planted: what FP8 does to attention over them, and that the guard's error sees them.

An outlier is a channel of K that is large in every token, as in some heads of Qwen2. Here a constant is added to a few
channels of all keys, after RoPE: it adds the same to all scores of a query, so that exact attention stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from fp8_context import Blocks, MakeOps

from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import Format, LayerShape, PagedLayout
from pagekernels.ops import Array, AttentionBatch, AttentionParams, PagedOps
from pagekernels.twin import attention, decode

SHARES = (1.0, -0.75, 0.5, -0.25)
"""Of the size, what each of the first channels gets."""

TOKENS, QUERIES, DIM, BLOCK_SIZE = 4096, 32, 128, 16


def outliers(size: float, dim: int) -> npt.NDArray[np.float32]:
    """float32 [dim]: what is added to every key."""
    channels = np.zeros(dim, np.float32)
    channels[: len(SHARES)] = np.float32(size) * np.array(SHARES, np.float32)
    return channels


@dataclass(frozen=True, slots=True)
class Damage:
    """What a size of outliers does, over Gaussian keys and values.

    plain      ||K - K^|| / ||K|| of all keys as FP8
    guard      the guard's errors of K, float32 [blocks]
    native     relative L2 error of attention over 16-bit blocks, from float64 over the values as they were drawn
    unguarded  the same with every block FP8
    guarded    the same with those FP8 that the guard lets pass
    kept       blocks that it keeps 16-bit
    """

    plain: float
    guard: npt.NDArray[np.float32]
    native: float
    unguarded: float
    guarded: float
    kept: int


class Drawn:
    """Keys and values [TOKENS, 1, DIM] and queries [1, QUERIES, DIM], normal, with outliers of `size` in the keys."""

    def __init__(self, size: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        shapes = ((1, QUERIES), (TOKENS, 1), (TOKENS, 1))
        self._q, self._k, self._v = (rng.normal(size=(*shape, DIM)).astype(np.float32) for shape in shapes)
        self._k += outliers(size, DIM)
        self._params = AttentionParams(DIM**-0.5)
        k, v = self._k[:, 0].astype(np.float64), self._v[:, 0].astype(np.float64)
        self._exact = np.stack([attention(q, k, v, self._params, None) for q in self._q[0].astype(np.float64)])

    def damage(self, guard: float) -> Damage:
        """What FP8 does with them, with and without the guard."""
        unguarded, guarded = self._blocks(), self._blocks()
        native, before = self._error(unguarded), self._keys(unguarded)
        every = range(len(unguarded.table))
        errors = unguarded.errors(every)[:, 0]
        unguarded.compress(every, math.inf)
        guarded.compress(every, guard)
        plain = float(np.linalg.norm(self._keys(unguarded) - before) / np.linalg.norm(before))
        return Damage(plain, errors, native, self._error(unguarded), self._error(guarded), len(guarded.kept))

    def _blocks(self) -> Blocks:
        layout = PagedLayout(BLOCK_SIZE, (LayerShape(1, DIM, DIM),), Format.BF16)
        blocks = Blocks(layout, TOKENS // BLOCK_SIZE)
        blocks.ops.append(0, self._k, self._v, np.array(blocks.slots(0, TOKENS), np.int64))
        return blocks

    def _keys(self, blocks: Blocks) -> npt.NDArray[np.float32]:
        k, v = (np.empty((1, TOKENS, DIM), np.float32) for _ in range(2))
        blocks.ops.gather(0, np.array(blocks.table, np.uint32), TOKENS, k, v)
        return k

    def _error(self, blocks: Blocks) -> float:
        out = np.empty_like(self._q)
        tables = np.array([blocks.table], np.uint32)
        batch = AttentionBatch(np.array([0, 1], np.int32), np.array([TOKENS], np.int32), tables)
        blocks.ops.attend(0, self._q, out, batch, self._params)
        return float(np.linalg.norm(out[0] - self._exact) / np.linalg.norm(self._exact))


class PlantedOps(CpuOps):
    """The CPU kernels, but for outliers of `size` in the keys that some layers append."""

    def __init__(self, slab: npt.NDArray[np.uint8], layout: PagedLayout, layers: Collection[int], size: float) -> None:
        super().__init__(slab, layout)
        self._planted, self._size = layers, size

    def append(self, layer: int, k: Array, v: Array, slots: npt.NDArray[np.int64]) -> None:
        """See PagedOps."""
        if layer in self._planted:
            native = self.layout.format
            k, v = decode(native, k) + outliers(self._size, k.shape[2]), decode(native, v)
        super().append(layer, k, v, slots)


def planting(layers: Collection[int], size: float) -> MakeOps:
    """Makes PlantedOps for a Context."""

    def make(slab: npt.NDArray[np.uint8], layout: PagedLayout) -> PagedOps:
        return PlantedOps(slab, layout, layers, size)

    return make
