"""`python kernels/bench/decode_cuda.py [--streams 8 --slots 24 --min-items 8 ...]`: decode attention of one layer.

Microseconds of the whole call with a cold L2 cache (a 256 MiB buffer is zeroed before each), median; batch x context
with block 16, head_dim 128, shuffled tables, beside a kernel that only reads as many bytes. The planner, once a step
and not once a layer, is timed apart. With --peers FILE, lines of JSON as the peers' own scripts print them, ratios to
the better of them. `--trace` prints where the time of a cell goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from pagekernels.cuda.decode import DecodeLayer, TunedDecode, Tuning
from pagekernels.cuda.device import CudaDevice, open_device
from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout
from pagekernels.ops import AttentionParams

CELLS = ((1, 1024), (1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 16384))
CELLS += ((32, 1024), (32, 4096), (64, 2048), (128, 1024), (256, 512))
SHAPES = ((32, 8), (28, 4))
DIM, BLOCK = 128, 16


@triton.jit
def read_kernel(x, out, size: tl.constexpr):
    """Read `size` 8-byte words and keep nothing."""
    words = tl.load(x + tl.program_id(0).to(tl.int64) * size + tl.arange(0, size))
    total = tl.sum(words, 0)
    if total == 1234567:
        tl.store(out, total)


class Timer:
    """Median time of calls on the device's stream, each after the L2 cache was filled with something else."""

    def __init__(self, device: CudaDevice, repeats: int) -> None:
        self.stream = torch.cuda.ExternalStream(device.stream_handle)
        self.repeats = repeats
        self.filler = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def __call__(self, *calls) -> list[float]:
        """Microseconds of each call; they take turns."""
        times: list[list[float]] = [[] for _ in calls]
        with torch.cuda.stream(self.stream):
            marks = []
            for turn, (number, call) in itertools.product(range(self.repeats + 3), enumerate(calls)):
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.filler.zero_()
                before.record()
                call()
                after.record()
                marks.append((turn, number, before, after))
        torch.cuda.synchronize()
        for turn, number, before, after in marks:
            if turn >= 3:
                times[number].append(before.elapsed_time(after) * 1e3)
        return [median(of) for of in times]


class Cell:
    """One batch, context and shape: a pool of random bits, and calls on it."""

    def __init__(self, device: CudaDevice, heads: tuple[int, int], batch: int, context: int) -> None:
        self.device, self.heads = device, heads
        self.layout = PagedLayout(BLOCK, (LayerShape(heads[1], DIM, DIM),), Format.BF16, LAYOUT_SWIZZLED)
        blocks = batch * context // BLOCK
        self.bytes = batch * context * 2 * heads[1] * DIM * 2
        torch.manual_seed(0)
        self.slab = torch.empty(blocks * self.layout.block_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
        units = torch.randperm(blocks, device="cuda") * 2
        tables = (units | int(Format.BF16) << 29).to(torch.uint32).view(batch, -1)
        self.step = SimpleNamespace(
            cu_q_lens=torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
            kv_lens=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
            block_tables=tables,
        )
        self.q = torch.randn(batch, heads[0], DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)

    def kernel(self, tuning: Tuning) -> TunedDecode:
        """Ours, planned."""
        layer = DecodeLayer(self.heads[0], AttentionParams(DIM**-0.5))
        decode = TunedDecode(self.device, self.layout, [self.slab.data_ptr()], {0: layer}, 1, tuning)
        torch.cuda.synchronize()
        decode.plan(self.step)
        self.device.synchronize()
        return decode

    def call(self, decode: TunedDecode, trace: int = 0):
        """One layer's attention."""
        return lambda: decode.attend(0, self.q, self.out, self.step, trace=trace)

    def read(self, words: int = 8192):
        """Reading as many bytes of the same memory."""
        view = self.slab.view(torch.int64)
        return lambda: read_kernel[(self.bytes // 8 // words,)](view, self.out, words)


def trace(cell: Cell, tuning: Tuning, timer: Timer) -> str:
    """When CTAs begin, have their first and last tile and are done: us after the first begins; least, median, most."""
    stamps = torch.zeros(1024, 4, dtype=torch.int64, device="cuda")
    decode = cell.kernel(Tuning(**{**{f: getattr(tuning, f) for f in tuning.__slots__}, "extra": ("TRACE",)}))
    timer(cell.call(decode, stamps.data_ptr()))
    used = stamps[stamps[:, 3] > 0].double() / 1e3
    used -= used[:, 0].min()
    low, mid, high = used.min(0).values, used.median(0).values, used.max(0).values
    names = ("begin", "first tile", "last tile", "end")
    return f"{len(used)} CTAs  " + "  ".join(
        f"{n} {a:.1f}/{b:.1f}/{c:.1f}" for n, a, b, c in zip(names, low, mid, high, strict=True)
    )


def peers(path: Path | None) -> dict[tuple[int, int, int, int], float]:
    """The better peer's microseconds by (q heads, KV heads, batch, context)."""
    best: dict[tuple[int, int, int, int], float] = {}
    for line in path.read_text().splitlines() if path else ():
        if line.startswith("{") and (row := json.loads(line)).get("dt") == "bf16" and "us" in row:
            key = (row["hq"], row["hkv"], row["B"], row["ctx"])
            best[key] = min(best.get(key, 1e9), row["us"])
    return best


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("streams", "slots", "ctas"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--min-items", type=int, default=Tuning().min_items)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--trace", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    args = arguments()
    device = open_device(0)
    timer = Timer(device, args.repeats)
    tuning = Tuning(streams=args.streams, slots=args.slots, min_items=args.min_items, ctas=args.ctas)
    better = peers(args.peers)
    print(f"{torch.cuda.get_device_name()}, us: ours, planner, plain read, ours of plain read; better peer, ours of it")
    for heads, (batch, context) in itertools.product(SHAPES, CELLS):
        cell = Cell(device, heads, batch, context)
        decode = cell.kernel(tuning)
        ours, planner, read = timer(cell.call(decode), lambda d=decode, c=cell: d.plan(c.step), cell.read())
        peer = better.get((*heads, batch, context))
        beside = f"{peer:8.1f} {ours / peer:6.3f}" if peer else ""
        name = f"{heads[0]}q/{heads[1]}kv {batch:4} x {context:6}"
        print(f"{name} {ours:8.2f} {planner:6.1f} {read:8.2f} {read / ours:6.3f} {beside}")
        if args.trace:
            print("   ", trace(cell, tuning, timer))
        decode.close()
    device.close()


if __name__ == "__main__":
    main()
