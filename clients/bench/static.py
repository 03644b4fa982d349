"""`make bench-static`: the paged pool beside a contiguous cache of the maximum length for each request.

Both sides have the same bytes for KV, model, dtype, threads, sampler, seeds, order of requests and budget of tokens a
step; they run one after the other. Ours is memd and inferd with clients at gRPC streams; the contiguous side is
contiguous.py, in which nothing is streamed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import daemons
from workloads import TEMPERATURE, Account, Look, Request, Workload, account, distinct

import cpu
from pagepool.inferd.v1.generation_service_pb2 import EngineCounters
from pagepool_client import InferenceClient, PoolClient

WORKLOADS = (
    Workload("short", 64, (16, 64), (16, 64)),
    Workload("mixed", 40, (16, 768), (16, 256)),
    Workload("long", 10, (512, 768), (128, 256)),
)
SMOKE = (Workload("smoke", 16, (4, 60), (4, 24)),)
BOUND = {"mixed": 2.0}
"""Requests at once, paged over contiguous."""
COUNTERS_S = 1.5
"""The engine tells its counters once a second."""


@dataclass(frozen=True, slots=True)
class Run:
    """One workload through one side."""

    account: Account
    seconds: float
    steps: int
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        """Tokens generated a second, from the first request's sending to the last token of all."""
        return sum(map(len, self.tokens)) / self.seconds


class Contiguous:
    """The contiguous side's process, ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        about = self._answer()
        self.vocab_size, self.nbytes = int(about["vocab_size"]), int(about["bytes"])

    def run(self, requests: Sequence[Request]) -> Run:
        """Serve the requests, which are all there at once."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"requests": [asdict(each) for each in requests]}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        looks = [Look(*each) for each in answer["looks"]]
        return Run(account(looks, len(requests)), answer["seconds"], answer["steps"], answer["tokens"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the contiguous side has ended; see above why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def contiguous(folder: Path, options: argparse.Namespace) -> Iterator[Contiguous]:
    """The contiguous side, loaded and warm."""
    command = [sys.executable, str(Path(__file__).parent / "contiguous.py"), str(folder), "--dtype", options.dtype]
    for name in ("threads", "slots", "length", "budget"):
        command += [f"--{name}", str(getattr(options, name))]
    pipe = subprocess.PIPE
    # Threads wait as an engine's do: inferd.config.engine_environment.
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "NUMBA_THREADING_LAYER": "omp"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield Contiguous(process)
        finally:
            process.kill()


class Streams:
    """All requests as concurrent gRPC streams, opened in order; `finished` counts those that are over."""

    def __init__(self, client: InferenceClient, requests: Sequence[Request]) -> None:
        self._client, self._requests = client, requests
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.cached_tokens = 0
        self.finished = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._follow, args=(index,)) for index in range(len(requests))]

    def start(self) -> None:
        """Open all."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all; SystemExit if one fell short, or found what another had computed."""
        for thread in self._threads:
            thread.join()
        short = [i for i, each in enumerate(self._requests) if len(self.tokens[i]) != each.new_tokens]
        if short or self.cached_tokens:
            raise SystemExit(f"{len(short)} streams fell short, {self.cached_tokens} tokens were found in the pool")

    def _follow(self, index: int) -> None:
        request, cached = self._requests[index], 0
        sampling = {"temperature": TEMPERATURE, "seed": request.seed}
        options = {**sampling, "max_tokens": request.new_tokens, "ignore_eos": True}
        try:
            for event in self._client.generate(token_ids=request.prompt, **options):
                if event.DESCRIPTOR.name == "GenerateTokens":
                    self.tokens[index] += event.token_ids
                elif event.DESCRIPTOR.name == "GenerateFinished":
                    cached = event.usage.cached_tokens
        finally:
            with self._lock:
                self.finished += 1
                self.cached_tokens += cached


def look(pool: PoolClient, block_size: int, finished: int) -> Look:
    """The running tables as memd has them."""
    tables = [(each.entries, each.num_tokens) for each in pool.tables(page_size=1000)]
    stored, reserved = distinct(tables, block_size)
    return Look(time.perf_counter(), len(tables), stored, reserved, finished)


def paged_run(client: InferenceClient, pool: PoolClient, requests: Sequence[Request], look_s: float) -> Run:
    """All requests at once through the daemons, and a look at the pool every `look_s` seconds."""
    block_size, before = pool.pool().block_size, counters(client)
    streams = Streams(client, requests)
    looks, begin = [look(pool, block_size, 0)], time.perf_counter()
    streams.start()
    while streams.finished < len(requests):
        time.sleep(look_s)
        looks.append(look(pool, block_size, streams.finished))
    streams.join()
    seconds = time.perf_counter() - begin
    steps = counters(client).steps - before.steps
    return Run(account(looks, len(requests)), seconds, steps, streams.tokens)


def counters(client: InferenceClient) -> EngineCounters:
    """The engine's counters, up to date."""
    time.sleep(COUNTERS_S)
    return client.model().counters


def report(workload: Workload, requests: Sequence[Request], pairs: Sequence[tuple[Run, Run]]) -> None:
    """Both sides of one workload, medians of the rounds; `requests` are those of the first."""
    prompts, new = (statistics.mean(c) for c in ([len(r.prompt) for r in requests], [r.new_tokens for r in requests]))
    print(
        f"\n{workload.name}: {len(requests)} requests; prompts of {workload.prompt[0]} to {workload.prompt[1]} tokens, "
        f"mean {prompts:.0f}; {workload.new[0]} to {workload.new[1]} new ones, mean {new:.0f}"
    )

    def line(label: str, unit: str, values: Sequence[tuple[float, float]], note: str = "") -> float:
        theirs, ours = (statistics.median(column) for column in zip(*values, strict=True))
        ratio = statistics.median(b / a for a, b in values)
        print(f"    {label:34} {theirs:10{unit}} {ours:10{unit}} {ratio:8.2f}   {note}", flush=True)
        return ratio

    at_once = [(a.account.at_once, b.account.at_once) for a, b in pairs]
    bound = BOUND.get(workload.name)
    ratio = statistics.median(b / a for a, b in at_once)
    line("requests at once, while some wait", ".1f", at_once, cpu.verdict(ratio, bound) if bound else "")
    line("requests at once, most", ".0f", [(a.account.most, b.account.most) for a, b in pairs])
    line("tokens stored / slots reserved", ".1%", [(a.account.utilisation, b.account.utilisation) for a, b in pairs])
    line("tokens/s", ".1f", [(a.rate, b.rate) for a, b in pairs])
    line("steps", ".0f", [(a.steps, b.steps) for a, b in pairs])
    same = [x == y for a, b in pairs for x, y in zip(a.tokens, b.tokens, strict=True)]
    print(f"    requests with the same tokens on both sides: {sum(same)} of {len(same)}", flush=True)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Both sides, workload by workload."""
    flags = ["--model", str(folder), "--dtype", options.dtype, "--threads", str(options.threads)]
    flags += ["--max-num-seqs", str(options.max_num_seqs), "--max-batch-tokens", str(options.budget)]
    flags += ["--no-warmup"] if options.smoke else []
    with contiguous(folder, options) as theirs, daemons.folder() as place:
        size = ("--pool-bytes", str(theirs.nbytes), "--block-size", str(options.block_size))
        with daemons.memd(place, *size) as (pool, _), daemons.inferd(place, *flags) as (client, _):
            blocks = pool.pool().usage.total_blocks
            print(f"KV of either side: {theirs.nbytes / 1e6:.0f} MB, {options.slots} slots of {options.length} tokens")
            print(f"    or {blocks} blocks of {options.block_size}; {options.budget} tokens a step")
            print(f"{'':38} {'contiguous':>10} {'paged':>10} {'ratio':>8}")
            for workload in options.workloads:
                made = [workload.requests(number, theirs.vocab_size) for number in range(options.rounds)]
                pairs = [(theirs.run(each), paged_run(client, pool, each, options.look_s)) for each in made]
                report(workload, made[0], pairs)


def parse() -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [each.name for each in WORKLOADS]
    parser.add_argument("--only", choices=names, help="one workload")
    parser.add_argument("--model", default="smollm2", help="as inferd takes it; layers with plain attention only")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4, help="requests that the contiguous cache has room for")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the longest request that is taken")
    parser.add_argument("--budget", type=int, default=512, help="tokens a step")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests that the paged side runs at most")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--look-s", type=float, default=0.2, help="seconds between two looks at the pool")
    parser.add_argument("--smoke", action="store_true", help="a few tiny requests only: does it run?")
    options = parser.parse_args()
    options.workloads = SMOKE if options.smoke else [each for each in WORKLOADS if options.only in (None, each.name)]
    if options.smoke:
        options.slots, options.length, options.budget, options.look_s = 2, 128, 128, 0.02
    if longest := [each for each in options.workloads if each.longest > options.length]:
        least = max(each.longest for each in longest)
        parser.error(f"--length {options.length}: {longest[0].name} has requests of {least} tokens; give at least that")
    if options.budget < max(options.slots, options.max_num_seqs):
        parser.error(f"--budget {options.budget}: a step needs a token for each of --slots and --max-num-seqs")
    return options


def main() -> None:
    """Print all figures."""
    options = parse()
    from inferd.model.source import resolve

    print(f"{cpu.hardware()}; {options.model} {options.dtype}, {options.threads} threads each side", flush=True)
    measure(resolve(options.model), options)


if __name__ == "__main__":
    main()
