"""`python kernels/bench/decode_cuda.py [--beside fa3|flashinfer] [--json FILE]`: decode attention of one layer.

Microseconds of the whole call with a cold L2 cache (a 512 MiB buffer is zeroed before each), medians of calls that
take turns: ours, a peer's, and a kernel that only reads as many bytes; block 16, head_dim 128, shuffled tables, of
bf16 blocks or, as --kv says, FP8 blocks or both; a peer has all bf16, or all FP8 beside --kv fp8.
Planners, once a step and not once a layer, are timed apart. A peer must be importable (PYTHONPATH), one at a time;
`--report FILE FILE` prints the table of both runs. `--trace` tells where the time of a cell goes.
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
from decode_peers import PEERS, Peer

from pagekernels.cuda.decode import DecodeLayer, TunedDecode, Tuning
from pagekernels.cuda.device import CudaDevice, open_device
from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout
from pagekernels.ops import AttentionParams

CELLS = ((1, 1024), (1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 16384))
CELLS += ((32, 1024), (32, 4096), (64, 2048), (128, 1024), (256, 512))
SHAPES = ((32, 8), (28, 4))
DIM, BLOCK = 128, 16

FP8 = {
    "bf16": lambda block, _: block < 0,
    "fp8": lambda block, _: block >= 0,
    "interleaved": lambda block, _: block % 2 == 1,
    "oldest": lambda block, count: block < count // 2,
}
"""Which blocks of a table are FP8 blocks, by the word of --kv: none, all, every other one, or the first half."""


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
        self.filler = torch.empty(512 << 20, dtype=torch.int8, device="cuda")

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

    def __init__(self, device: CudaDevice, heads: tuple[int, int], batch: int, context: int, kv: str) -> None:
        self.device, self.heads = device, heads
        self.layout = PagedLayout(BLOCK, (LayerShape(heads[1], DIM, DIM),), Format.BF16, LAYOUT_SWIZZLED)
        small = FP8[kv](torch.arange(context // BLOCK, device="cuda"), context // BLOCK).expand(batch, -1).flatten()
        self.bytes = (len(small) * 2 - int(small.sum())) * BLOCK * 2 * heads[1] * DIM
        torch.manual_seed(0)
        self.slab = torch.empty(
            len(small) * self.layout.block_bytes // 2, dtype=torch.bfloat16, device="cuda"
        ).normal_()
        tables = self.entries(small).to(torch.uint32).view(batch, -1)
        self.step = SimpleNamespace(
            cu_q_lens=torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
            kv_lens=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
            block_tables=tables,
        )
        self.q = torch.randn(batch, heads[0], DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)

    def entries(self, small: torch.Tensor) -> torch.Tensor:
        """Shuffled places for all blocks; those that are `small` become FP8 blocks, two in the place of one."""
        frames = torch.randperm(len(small), device="cuda") * 2
        num_small = int(small.sum())
        pairs = frames[: -(-num_small // 2)]
        units = torch.stack([pairs, pairs + 1], 1).flatten()
        units = units[torch.randperm(len(units), device="cuda")][:num_small]
        fp8 = self.slab.view(torch.uint8).view(-1, self.layout.unit_bytes)
        block = torch.zeros(self.layout.unit_bytes, dtype=torch.uint8, device="cuda")
        elements = self.layout.block_elements
        block[:elements] = torch.randn(elements, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
        block[elements:].view(torch.float32)[: self.layout.num_scales] = 1.0
        fp8[units] = block
        entries = torch.empty(len(small), dtype=torch.int64, device="cuda")
        entries[small] = units | int(Format.FP8_E4M3) << 29
        entries[~small] = frames[len(frames) - len(small) + num_small :] | int(Format.BF16) << 29
        return entries

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
    decode = cell.kernel(
        Tuning(**{**{f: getattr(tuning, f) for f in tuning.__slots__}, "extra": ("TRACE", *tuning.extra)})
    )
    timer(cell.call(decode, stamps.data_ptr()))
    used = stamps[stamps[:, 1] > 0].double() / 1e3
    used -= used[:, 0].min()
    low, mid, high = used.min(0).values, used.median(0).values, used.max(0).values
    names = ("begin", "first tile", "last tile", "end")
    return f"{len(used)} CTAs  " + "  ".join(
        f"{n} {a:.1f}/{b:.1f}/{c:.1f}" for n, a, b, c in zip(names, low, mid, high, strict=True)
    )


def measure(device: CudaDevice, args: argparse.Namespace) -> None:
    """A line per cell, and the same as JSON into args.json."""
    timer = Timer(device, args.repeats)
    sizes = {name: getattr(args, name) for name in ("streams", "slots", "min_items", "ctas")}
    tuning = Tuning(**sizes, mixed=args.kv != "bf16")
    device_name, beside = torch.cuda.get_device_name(), args.beside or "no peer"
    print(f"{device_name}, {args.kv} blocks; us: ours, {beside}, plain read, our planner, its planner")
    rows = []
    for heads, (batch, context) in itertools.product(SHAPES, CELLS):
        cell = Cell(device, heads, batch, context, args.kv)
        decode = cell.kernel(tuning)
        with torch.cuda.stream(timer.stream):
            known = PEERS[args.beside] if args.beside else lambda *_, **__: Peer(lambda: None, lambda: None)
            peer = known(heads, batch, context, fp8=args.kv == "fp8")
        calls = (cell.call(decode), peer.attend, cell.read(), lambda d=decode, c=cell: d.plan(c.step))
        times = [*timer(*calls), *(Timer(device, 5)(peer.plan) if args.beside else [0.0])]
        rows.append({"heads": heads, "batch": batch, "context": context, "peer": args.beside, "us": times})
        print(f"{heads[0]}q/{heads[1]}kv {batch:4} x {context:6} ", *(f"{us:8.2f}" for us in times), flush=True)
        if args.trace:
            print("   ", trace(cell, tuning, timer))
        decode.close()
        del cell, peer, calls
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def report(paths: list[Path]) -> None:
    """Markdown: every cell against the better peer, each ratio taken within one run."""
    cells: dict[tuple[int, ...], dict[str, list[float]]] = {}
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            cells.setdefault((*row["heads"], row["batch"], row["context"]), {})[row["peer"]] = row["us"]
    print("| q/kv heads | batch x context | ours, us | FA3 | FlashInfer | ratio to the better | plain read | of it |")
    print("|---|---|---|---|---|---|---|---|")
    for (hq, hkv, batch, context), by_peer in cells.items():
        ratio = max(us[0] / us[1] for us in by_peer.values())
        ours, read = (median(us[i] for us in by_peer.values()) for i in (0, 2))
        peers = " | ".join(f"{by_peer[name][1]:.1f}" if name in by_peer else "" for name in ("fa3", "flashinfer"))
        beside = f"{peers} | {ratio:.3f} | {read:.1f} | {read / ours:.3f}"
        print(f"| {hq}/{hkv} | {batch} x {context} | {ours:.1f} | {beside} |")
    for name, number in (("our planner", 3), ("a peer's planner", 4)):
        values = [us[number] for by_peer in cells.values() for us in by_peer.values()]
        print(f"{name}: {min(values):.0f} to {max(values):.0f} us, once a step")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("streams", "slots", "ctas"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--min-items", type=int, default=Tuning().min_items)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--kv", choices=sorted(FP8), default="bf16", help="the format of the blocks")
    parser.add_argument("--beside", choices=sorted(PEERS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, nargs="+")
    parser.add_argument("--trace", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, or print a table of what was measured."""
    args = arguments()
    if args.report:
        report(args.report)
        return
    torch.zeros(1, device="cuda")  # torch first: both use the primary context
    device = open_device(0)
    try:
        measure(device, args)
    finally:
        device.close()


if __name__ == "__main__":
    main()
