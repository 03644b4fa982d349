"""Compiling before anyone waits."""

from __future__ import annotations

import importlib

import numpy as np

from pagekernels.layout import Format, LayerShape, PagedLayout, pack_entry
from pagekernels.ops import AttentionBatch, AttentionParams


def warm_up() -> None:
    """Compile all kernels, or load them where they are kept beside the sources, and start the threads.

    Takes the better part of a minute the first time, a second or two after that. There is one machine code for all
    layouts, formats and parameters, so nothing compiles later. Call after `configure`.
    """
    layout = PagedLayout(8, (LayerShape(1, 16, 16),), Format.F32)
    ops = importlib.import_module("pagekernels.cpu.ops").CpuOps(np.zeros(2 * layout.block_bytes, np.uint8), layout)
    rows = np.ones((8, 1, 16), np.float32)
    table = np.array([pack_entry(Format.F32, 0, 0)], np.uint32)
    ops.append(0, rows, rows, np.arange(8))
    ops.copy_blocks(table, table + np.uint32(4))
    compressed = np.array([pack_entry(Format.FP8_E4M3, 0, 4)], np.uint32)
    ops.compress_blocks(table, compressed)
    ops.decompress_blocks(compressed, table)
    ops.gather(0, table, 8, rows.transpose(1, 0, 2), rows.transpose(1, 0, 2))
    batch = AttentionBatch(np.array([0, 8], np.int32), np.array([8], np.int32), table[None])
    ops.attend(0, rows, np.empty_like(rows), batch, AttentionParams(0.25))
    importlib.import_module("pagekernels.cpu.product").multiply(
        *(np.ones((n, 16), np.float32) for n in (1, 2)), np.empty((0, 16), np.uint16), np.ones((1, 2), np.float32)
    )
