"""What append, block copy, compression, gather, staging and the generic attention cost on this GPU.

Run `python kernels/bench/cuda_moves.py`. Device times are of kernels in a CUDA graph, so that no launch from Python is
in them. Bandwidth counts bytes read and written, and stands beside that of the driver's own copies of as many
contiguous bytes, which follow the same pattern: of block copies, each call has a source and a target of its own; of
gathers, each call has a source of its own and all write one target, as a prefill does layer by layer. A graph reads
more than the L2 cache holds, so sources come from memory, while the one target may stay in L2.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.device import CudaDevice, open_device
from pagekernels.cuda.ops import CudaOps
from pagekernels.layout import LAYOUT_SWIZZLED, MAX_UNITS, Format, LayerShape, PagedLayout, pack_entry
from pagekernels.ops import AttentionParams

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 28, 4, 128, 16, 2048
MOST_CALLS = 100
LAYOUT = PagedLayout(BLOCK, (LayerShape(HEADS, DIM, DIM),) * LAYERS, Format.BF16, LAYOUT_SWIZZLED)


class Bench:
    """A pool of random bytes and the operations on it, timed on the device's stream."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.device: CudaDevice = open_device(0)
        self.stream = torch.cuda.ExternalStream(self.device.stream_handle)
        words = LAYOUT.block_bytes * BLOCKS // 2
        self.slab = torch.randn(words // 64, device="cuda").to(torch.bfloat16).repeat(64)
        torch.cuda.synchronize()
        self.ops = CudaOps(self.device, self.slab.data_ptr(), LAYOUT)

    def microseconds(self, call: Callable[[int], None], inside: int = 20, rounds: int = 15) -> float:
        """Median time of one of `inside` calls in a graph; a call is told its number."""
        with torch.cuda.stream(self.stream):
            for i in range(inside):
                call(i)
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for i in range(inside):
                    call(i)
            times = []
            for _ in range(rounds):
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                graph.replay()
                last.record()
                last.synchronize()
                times.append(first.elapsed_time(last) * 1000 / inside)
        return statistics.median(times)

    def places(self, size: int) -> Sequence[torch.Tensor]:
        """The slab in pieces of `size` bytes."""
        return self.slab[: self.slab.nbytes // size * size // 2].view(-1, size // 2)


def entries(blocks: np.ndarray) -> np.ndarray:
    """Entries of whole blocks by number."""
    return np.array([pack_entry(Format.BF16, 0, int(b) * 2) for b in blocks], np.uint32)


def fp8_entries(blocks: np.ndarray) -> np.ndarray:
    """Entries of FP8 blocks in the first units of these."""
    return np.array([pack_entry(Format.FP8_E4M3, 0, entry & MAX_UNITS - 1) for entry in blocks.tolist()], np.uint32)


def append_and_stage(bench: Bench) -> None:
    """KV append on the device and from Python, and the host's work to stage a step of 40 blocks a sequence."""
    for count in (1, 128, 2048):
        batch = DeviceBatch(bench.device, min(count, 128), count, 64)
        tables = [entries(np.arange(s, s + 40)).tolist() for s in range(min(count, 128))]
        per = count // len(tables)
        slots = [s * 2 * BLOCK + p % BLOCK for s in range(len(tables)) for p in range(per)]
        staged = []
        for turn in range(20):
            if turn == 10:
                tables = [list(table) for table in tables]
            begin = time.perf_counter()
            batch.stage([per] * len(tables), [640] * len(tables), tables, slots)
            staged.append((time.perf_counter() - begin) * 1e6)
        bench.device.synchronize()
        k, v = (torch.randn(count, HEADS, DIM, device="cuda").to(torch.bfloat16) for _ in range(2))
        torch.cuda.synchronize()
        took = bench.microseconds(lambda i: bench.ops.append(i % LAYERS, k, v, batch))  # noqa: B023  # called here
        begin = time.perf_counter()
        for _ in range(100):
            bench.ops.append(0, k, v, batch)
        python = (time.perf_counter() - begin) * 1e4
        bench.device.synchronize()
        print(
            f"append {count:5} tokens     {took:8.2f} us   from Python {python:5.1f} us   "
            f"staging {min(staged):6.1f} us, all tables new {staged[10]:6.1f} us"
        )


def copies(bench: Bench) -> None:
    """Whole blocks between shuffled places, no two calls of a graph at one place."""
    order = np.random.default_rng(0).permutation(BLOCKS)
    for count in (1, 8, 64, 256, 512):
        calls = max(2, min(MOST_CALLS, BLOCKS // (2 * count)))
        parts = [entries(order[i * count : (i + 1) * count]) for i in range(2 * calls)]
        took = bench.microseconds(lambda i, parts=parts: bench.ops.copy_blocks(parts[2 * i], parts[2 * i + 1]), calls)
        places = bench.places(count * LAYOUT.block_bytes)
        driver = bench.microseconds(lambda i, places=places: places[2 * i + 1].copy_(places[2 * i]), calls)
        report(f"copy of {count} blocks", took, driver, count * LAYOUT.block_bytes)


def compressions(bench: Bench) -> None:
    """Shuffled blocks to FP8 blocks in shuffled units and back, beside copies that read and write as much in all."""
    order = np.random.default_rng(0).permutation(BLOCKS)
    for count in (1, 8, 64, 256, 512):
        calls = max(2, min(MOST_CALLS, BLOCKS // (2 * count)))
        errors = torch.empty(count, 2, device="cuda")
        native = [entries(order[i * count : (i + 1) * count]) for i in range(2 * calls)]
        small = [fp8_entries(part) for part in native]
        size = 3 * count * LAYOUT.unit_bytes // 2
        places = bench.places(size)
        driver = bench.microseconds(lambda i, places=places: places[2 * i + 1].copy_(places[2 * i]), calls)
        took = bench.microseconds(
            lambda i, of=native, to=small, put=errors: bench.ops.compress_blocks(of[2 * i], to[2 * i + 1], put), calls
        )
        report(f"compression of {count} blocks", took, driver, size)
        took = bench.microseconds(
            lambda i, of=small, to=native: bench.ops.decompress_blocks(of[2 * i], to[2 * i + 1]), calls
        )
        report(f"decompression of {count} blocks", took, driver, size)


def gathers(bench: Bench) -> None:
    """One layer's prefix from shuffled blocks; each call of a graph reads another layer or other blocks."""
    order = np.random.default_rng(0).permutation(BLOCKS)
    batch = DeviceBatch(bench.device, 1, 1, BLOCKS)
    batch.stage([0], [0], [entries(order).tolist()], [])
    for length in (1024, 8192, 32000):
        size = 2 * length * HEADS * DIM * 2
        parts, calls = BLOCKS * BLOCK // length, min(MOST_CALLS, BLOCKS * BLOCK // length * LAYERS)
        places, target = bench.places(size), torch.empty(size // 2, device="cuda", dtype=torch.bfloat16)
        driver = bench.microseconds(lambda i, places=places, target=target: target.copy_(places[i]), calls)
        k, v = target.view(2, HEADS, length, DIM)
        tokens = [x.view(length, HEADS, DIM).transpose(0, 1) for x in (k, v)]
        for name, targets in (("head", (k, v)), ("token", tokens)):
            took = bench.microseconds(
                lambda i, length=length, parts=parts, targets=targets: bench.ops.gather(
                    i % LAYERS, batch, 0, (i // LAYERS % parts * length, (i // LAYERS % parts + 1) * length), *targets
                ),
                calls,
            )
            report(f"gather of {length}, {name}-major", took, driver, size)


def report(what: str, took: float, driver: float, size: int) -> None:
    """A line with the time, the bandwidth, and its share of the driver's for copies of as many bytes."""
    print(
        f"{what:28} {took:8.1f} us  {2 * size / took / 1e6:5.2f} TB/s   "
        f"driver's copy of as many bytes {driver:8.1f} us, so {driver / took:4.0%} of it"
    )


def generic_attention(bench: Bench) -> None:
    """The kernel behind the tuned one; FLOPs are those of the causal half."""
    params = AttentionParams(DIM**-0.5)
    for sequences, context, queries in ((1, 4096, 1), (32, 1024, 1), (8, 4000, 1), (1, 4096, 512), (1, 4096, 2048)):
        blocks = -(-context // BLOCK)
        batch = DeviceBatch(bench.device, sequences, sequences * queries, blocks, queries)
        tables = [entries(np.arange(s * blocks, (s + 1) * blocks) % BLOCKS).tolist() for s in range(sequences)]
        batch.stage([queries] * sequences, [context] * sequences, tables, [-1] * sequences * queries)
        q, out = (torch.randn(sequences * queries, 28, DIM, device="cuda").to(torch.bfloat16) for _ in range(2))
        torch.cuda.synchronize()
        took = bench.microseconds(
            lambda i, q=q, out=out, batch=batch: bench.ops.attend(i % LAYERS, q, out, batch, params), 10, 5
        )
        flops = 4 * sequences * 28 * DIM * queries * (context - queries / 2)
        read = 4 * sequences * context * HEADS * DIM
        print(
            f"generic attend {sequences:3} x {context} x {queries:4}  {took:8.1f} us   {read / took / 1e6:5.2f} TB/s   "
            f"{flops / took / 1e6:6.2f} TFLOP/s"
        )


if __name__ == "__main__":
    bench = Bench()
    print(torch.cuda.get_device_name(), "bf16, block 16,", f"{HEADS} KV heads of {DIM},", f"{LAYERS} layers")
    for part in (append_and_stage, copies, compressions, gathers, generic_attention):
        try:
            part(bench)
        except Exception as error:  # noqa: BLE001  # the other parts still say something
            print(f"{part.__name__} failed: {type(error).__name__}: {error}", file=sys.stderr)
    bench.device.synchronize()
    torch.cuda.synchronize()
    bench.ops.close()
    bench.device.close()
