"""`make bench-moving`: what it costs a worker that its pool compresses blocks, or moves them between its tiers.

A model of Qwen2.5-7B's shape with random bfloat16 weights, memd with FP8 blocks by command and a host tier, one worker,
and 32 streams that decode. Their gaps are measured alone, while cached blocks are compressed and decompressed without a
pause, as much at a time as a policy would, and while a client's tables make blocks of other prompts go up and down
without a pause. Then how fast blocks move with nobody beside, and what compressing 1,000 scattered blocks frees.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import daemons
from random_model import SHAPES, write_config
from stream_clients import Stream, StreamClients, stream_clients

from gpu import Prompts, hardware, last_words, worker
from pagepool.errors import PagepoolError
from pagepool.memd.v1 import types_pb2
from pagepool_client import PoolClient, PoolLease

STEP_BYTES = 4 << 20
P99_BOUND, LINK_BOUND, FREED_BOUND = 1.10, 0.8, 490


@dataclass(frozen=True, slots=True)
class Bench:
    """Daemons that run, and prompts whose blocks lie in the pool."""

    memd: PoolClient
    target: str
    clients: StreamClients
    prompts: Prompts
    filler: Sequence[Sequence[int]]


def is_native(block: types_pb2.Block) -> bool:
    """Whether it is a full 16-bit block of the device."""
    return block.sealed and block.tier == types_pb2.TIER_DEVICE and block.format != types_pb2.FORMAT_FP8_E4M3


def gaps_ms(streams: Sequence[Stream]) -> list[float]:
    """Milliseconds between the messages of each stream, per token, while all were being continued."""
    begin, end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    found = []
    for stream in streams:
        for (earlier, _), (later, count) in pairwise(zip(stream.times, stream.counts, strict=True)):
            if begin <= earlier and later <= end:
                found += [(later - earlier) * 1e3 / count] * count
    return found


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[98]


@contextmanager
def without_pause(work: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """Do `work` again and again on a thread; what it returned so far, summed."""
    done, over = [0], threading.Event()

    def loop() -> None:
        while not over.is_set():
            done[0] += work()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield lambda: done[0]
    finally:
        over.set()
        thread.join()


def compressing(bench: Bench, lease: PoolLease) -> Callable[[], int]:
    """Store some cached blocks in the other format; how many."""
    count = max(STEP_BYTES // bench.memd.pool().block_bytes, 1)
    ids = [one.block_id for one in bench.memd.blocks(page_size=10_000) if is_native(one) and not one.holders]
    place, whole = [0], ids[: len(ids) // count * count]

    def work() -> int:
        at = place[0] % (2 * len(whole))
        some = whole[at % len(whole) :][:count]
        place[0] += count
        try:
            (lease.compress if at < len(whole) else lease.decompress)(some)
        except PagepoolError:  # evicted meanwhile, or still read
            return 0
        return count

    return work


def moving(bench: Bench, lease: PoolLease) -> Callable[[], int]:
    """Hold the blocks of one prompt for a moment, wherever they lie; how many blocks moved for it."""
    turn = [0]

    def moved() -> int:
        counters = bench.memd.pool().counters
        return int(counters.demoted_blocks + counters.promoted_blocks)

    def work() -> int:
        before, prompt = moved(), bench.filler[turn[0] % len(bench.filler)]
        turn[0] += 1
        try:
            table = lease.create_table(prompt)
            end = time.monotonic() + 0.05
            while time.monotonic() < end and any(
                block.tier == types_pb2.TIER_HOST for block in map(bench.memd.block, table.block_ids[::32])
            ):
                time.sleep(0.001)
            lease.release_table(table.table_id)
        except PagepoolError:
            time.sleep(0.01)
        return moved() - before

    return work


def report_gaps(bench: Bench, options: argparse.Namespace) -> None:
    """The streams' gaps alone, and beside each kind of work."""
    asked = bench.prompts.take(options.batch, options.prompt)

    def measure() -> tuple[float, float]:
        return quantiles(gaps_ms(bench.clients.run(bench.target, asked, options.new)))

    measure()  # their prompts are found from now on
    with bench.memd.lease(holder="bench") as lease:
        works = {"compressing": compressing(bench, lease), "moving": moving(bench, lease)}
        for name, work in works.items():
            before, begin = measure(), time.perf_counter()
            with without_pause(work) as done:
                p50, p99 = measure()
                rate = done() / (time.perf_counter() - begin)
            after = measure()
            alone = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
            ratio = p99 / alone[1]
            miss = "" if ratio <= P99_BOUND else "; MISSED"
            size = rate * bench.memd.pool().block_bytes / 1e9
            print(f"step of {options.batch} streams while {name} {rate:.0f} blocks/s ({size:.2f} GB/s):")
            print(
                f"    p50 {p50:.3f} ms (alone {alone[0]:.3f}), p99 {p99:.3f} ms (alone {before[1]:.3f}, {after[1]:.3f})"
            )
            print(f"    p99 over alone {ratio:.3f}   (bound: {P99_BOUND}{miss})", flush=True)


def report_link(bench: Bench, link: float) -> None:
    """How fast blocks move between the tiers with nobody beside."""
    with bench.memd.lease(holder="bench") as lease:
        begin = time.perf_counter()
        with without_pause(moving(bench, lease)) as done:
            time.sleep(4.0)
            blocks = done()
        rate = blocks * bench.memd.pool().block_bytes / (time.perf_counter() - begin) / 1e9
    share = rate / link if link else float("nan")
    miss = "" if share >= LINK_BOUND else "; MISSED"
    print(f"moved between the tiers: {rate:.1f} GB/s of a pinned copy's {link:.1f}   (bound: {LINK_BOUND:.0%}{miss})")


def report_freed(bench: Bench) -> None:
    """What compressing 1,000 scattered blocks frees."""
    found = [one.block_id for one in bench.memd.blocks(page_size=10_000) if is_native(one) and not one.holders]
    some = found[:: max(len(found) // 1000, 1)][:1000]
    most = min(max((32 << 20) // bench.memd.pool().block_bytes, 1), 16)
    before, begin = bench.memd.pool().usage, time.perf_counter()
    with bench.memd.lease(holder="bench") as lease:
        for at in range(0, len(some), most):
            lease.compress(some[at : at + most])
    seconds, after = time.perf_counter() - begin, bench.memd.pool().usage
    freed = after.free_blocks + after.kept_blocks - before.free_blocks - before.kept_blocks
    miss = "" if freed * 1000 >= FREED_BOUND * len(some) else "; MISSED"
    print(
        f"compressing {len(some)} scattered blocks frees {freed} places in {seconds * 1e3:.0f} ms   "
        f"(bound: {FREED_BOUND} of 1,000{miss})",
        flush=True,
    )


def pinned_copy_gbs() -> float:
    """GB/s of a copy of 1 GB between pinned memory and the GPU; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    there, here = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8)
    pinned, rates = here.pin_memory(), []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        rates.append((1 << 30) / (time.perf_counter() - begin) / 1e9)
    return statistics.median(rates)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pagepool-bench-model"), help="for 15 GB of weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each stream's prompt")
    parser.add_argument("--new", type=int, default=500, help="tokens that each stream is continued by")
    parser.add_argument("--filler", type=int, default=24, help="prompts that lie in the pool beside")
    parser.add_argument("--filler-tokens", type=int, default=2048)
    parser.add_argument("--max-num-blocks", type=int, default=4500)
    parser.add_argument("--host-tier", default="8GiB")
    return parser.parse_args()


def main() -> None:
    """Print all figures."""
    options = parse()
    folder = options.folder / options.shape
    print(hardware(), flush=True)
    write_config(folder, options.shape)
    maker = [sys.executable, str(Path(__file__).parent / "random_model.py"), str(folder), "--shape", options.shape]
    subprocess.run(maker, check=True)
    prompts = Prompts(SHAPES[options.shape]["vocab_size"])
    link = pinned_copy_gbs()
    with ExitStack() as stack:
        place = stack.enter_context(daemons.folder())
        stack.push(last_words(place))
        clients = stack.enter_context(stream_clients(8))
        pool = ("--device", options.device, "--pool-bytes", "8GiB", "--max-num-blocks", str(options.max_num_blocks))
        pool += ("--fp8", "manual", "--host-tier", options.host_tier)
        memd, _ = stack.enter_context(daemons.memd(place, *pool))
        flags = ["--model", str(folder), "--max-num-seqs", str(options.batch), "--max-batch-tokens", "8192"]
        one = stack.enter_context(worker(place, "worker", prompts.take(1, 16)[0], flags))
        filler = prompts.take(options.filler, options.filler_tokens)
        for prompt in filler:
            one.client.generate(token_ids=prompt, temperature=0.0, max_tokens=1).text()
        bench = Bench(memd, one.client.target, clients, prompts, filler)
        now = memd.pool()
        print(f"{now.usage.total_blocks} blocks of {now.block_bytes} bytes, {now.usage.host_blocks} below", flush=True)
        report_gaps(bench, options)
        report_link(bench, link)
        report_freed(bench)


if __name__ == "__main__":
    main()
