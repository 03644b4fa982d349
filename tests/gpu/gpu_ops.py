"""CudaOps on numpy arrays, as PagedOps has them: what the tests compare with the twin. Needs no torch."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.lib.array_utils import byte_bounds

from pagekernels.cuda import build
from pagekernels.cuda.attend import FEW_ROWS, MANY_ROWS, AttendShape
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.move import move_defines
from pagekernels.cuda.ops import CudaOps


def upload(device, memory, array):
    """Copy on the device's stream: a plain copy may return before the bytes are there, and no other stream waits."""
    device.api.memcpy_htod_async(memory, array, device.stream)
    device.synchronize()


class Strided:
    """A numpy array on the device, with its strides and with whatever lies between its elements."""

    def __init__(self, device, array):
        low, high = byte_bounds(array) if array.size else (0, 0)
        self.device, self.array = device, array
        self.run = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low)) if array.size else None
        self.memory = device.api.mem_alloc(high - low + 16)
        if array.size:
            upload(device, self.memory, self.run)
        self.shape = array.shape

    def data_ptr(self):
        return int(self.memory)

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self):
        return self.array.itemsize

    def fetch(self):
        """Copy what the device has into the array."""
        self.device.synchronize()
        if self.array.size:
            self.device.api.memcpy_dtoh(self.run, self.memory)
        return self.array


class GpuOps:
    """PagedOps by CudaOps: the slab is copied to the device here, and back after every call that writes to it."""

    def __init__(self, device, slab, layout, layers=None, max_queries=None):
        self.device, self.slab, self.max_queries = device, slab, max_queries
        self.memory = device.api.mem_alloc(slab.nbytes)
        upload(device, self.memory, slab)
        self.ops = CudaOps(device, int(self.memory), layout, layers)
        self.layout = layout

    def batch(self, batch, tokens):
        """The host's batch on the device, with room for two more sequences and three more tokens."""
        cu, tables = batch.cu_q_lens.tolist(), batch.block_tables
        queries = [last - first for first, last in pairwise(cu)]
        most = self.max_queries or max([1, *queries])
        made = DeviceBatch(self.device, len(queries) + 2, tokens + 3, tables.shape[1], most)
        slots = [-1] * cu[-1]
        made.stage(queries, batch.kv_lens.tolist(), tables.tolist(), slots)
        return made

    def append(self, layer, k, v, slots):
        batch = DeviceBatch(self.device, 1, len(slots) + 3, 1)
        batch.stage([len(slots)], [0], [[0]], slots.tolist())
        sources = Strided(self.device, k), Strided(self.device, v)
        self.ops.append(layer, *sources, batch)
        self.fetch_slab()

    def attend(self, layer, q, out, batch, params):
        on_device = self.batch(batch, len(q))
        source, target = Strided(self.device, q), Strided(self.device, out)
        self.ops.plan(on_device)
        self.ops.attend(layer, source, target, on_device, params)
        target.fetch()

    def copy_blocks(self, sources, targets):
        self.ops.copy_blocks(sources, targets)
        self.fetch_slab()

    def compress_blocks(self, sources, targets):
        errors = Strided(self.device, np.full((len(sources), 2), np.nan, np.float32))
        self.ops.compress_blocks(sources, targets, errors)
        self.fetch_slab()
        return errors.fetch()

    def decompress_blocks(self, sources, targets):
        self.ops.decompress_blocks(sources, targets)
        self.fetch_slab()

    def gather(self, layer, table, length, k, v, *, first=0):
        batch = DeviceBatch(self.device, 2, 4, len(table))
        batch.stage([0, 0], [0, 0], [[0], table.tolist()], [])
        targets = Strided(self.device, k), Strided(self.device, v)
        self.ops.gather(layer, batch, 1, (first, first + length), *targets)
        for target in targets:
            target.fetch()

    def fetch_slab(self):
        self.device.synchronize()
        self.device.api.memcpy_dtoh(self.slab, self.memory)


def precompile(device, jobs):
    """Compile (source, defines) side by side: one by one it takes minutes."""
    unique = {(source, tuple(sorted(defines.items()))) for source, defines in jobs}
    with ThreadPoolExecutor(16) as pool:
        done = [pool.submit(build.cubin, source, dict(defines), device.arch) for source, defines in unique]
        for job in done:
            job.result()


def jobs_of(case, element=None):
    """What GpuOps and CudaOps compile for a case of kernel_cases.py."""
    element = int(element or case.fmt)
    jobs = [("move.cu", {})]
    for shape in case.layout.layers:
        for name in ("append", "gather"):
            jobs += [(name + ".cu", move_defines(name, case.layout, shape, int(case.fmt), aligned=True))]
    for name in ("append", "gather"):
        for aligned in (False, True):
            macros = move_defines(name, case.layout, case.layout.layers[1], element, aligned=aligned)
            jobs.append((name + ".cu", macros))
    for rows in (FEW_ROWS, MANY_ROWS):
        shape = AttendShape(case.fmt, element, case.dims, rows)
        if rows == FEW_ROWS or max(case.dims) <= 256:
            jobs.append(("attend.cu", shape.defines()))
    return jobs
