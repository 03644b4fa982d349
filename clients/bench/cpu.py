"""`make bench-cpu`: pagepool beside transformers and vLLM's CPU build on this CPU, and memd alone.

All sides run the same folder of weights, dtype, number of threads, prompts and numbers of new tokens, in rounds in
which each takes its turn alone, each as a process of its own. Ours is measured at gRPC clients: two daemons, a socket
and streaming included. The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import daemons
import memd_load
import memory
from cpu_peers import Peer, PeerEndedError, transformers_peer, vllm_peer
from text import prompt_ids

from pagepool_client import InferenceClient

ROUNDS = 3
ONE = {"prompt": 57, "new": 128}
MANY = {"requests": 16, "shared": 512, "own": 24, "new": 64}
BOUNDS = {"one": 1.0, "many": 2.5, "memory": 0.5, "outside": 0.08}
REACH = 1.0
"""Of vLLM's CPU build: what is to be reached, and no bound."""
POOL_BYTES = 2 << 30
"""Of the pool, and of vLLM's KV cache."""
REST_S = 5.0
"""Between the turns of two sides."""


def our_seconds(client: InferenceClient, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """What concurrent streams take, all sent at once, measured at the clients."""
    counts = [0] * len(prompts)

    def stream(index: int) -> None:
        options = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True}
        generation = client.generate(token_ids=prompts[index], **options)
        generation.text()
        assert generation.finished
        counts[index] = generation.finished.usage.generated_tokens

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(len(prompts))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if counts != [new_tokens] * len(prompts):
        raise SystemExit(f"asked for {new_tokens} tokens each, got {counts}")
    return seconds


@dataclass(frozen=True)
class Inside:
    """What an engine did between two looks."""

    forward: float
    """Share of its steps' time in the model's forward."""
    unary_calls: int
    steps: int


def inside(client: InferenceClient, work: Callable[[], object]) -> Inside:
    """Run `work`, and say what the engine did meanwhile."""
    before = client.model().counters
    work()
    time.sleep(1.5)  # the engine tells its counters once a second
    after = client.model().counters

    def spent(name: str) -> float:
        return float(getattr(after, name).ToNanoseconds() - getattr(before, name).ToNanoseconds())

    calls, steps = (getattr(after, name) - getattr(before, name) for name in ("memd_unary_calls", "steps"))
    return Inside(spent("forward_time") / spent("step_time"), calls, steps)


def verdict(ratio: float, bound: float) -> str:
    """A lower bound and whether it holds."""
    return f"(bound: at least {bound}; {'met' if ratio >= bound else 'MISSED'})"


@dataclass
class Bounds:
    """What was held against a bound; `missed` names those that do not hold."""

    missed: list[str] = field(default_factory=list)

    def least(self, what: str, value: float, bound: float) -> str:
        """verdict, remembered."""
        self.missed += [] if value >= bound else [what]
        return verdict(value, bound)

    def most(self, what: str, value: float, bound: float) -> str:
        """The same of an upper bound."""
        self.missed += [] if value <= bound else [what]
        return f"(bound: at most {bound}; {'met' if value <= bound else 'MISSED'})"


class Prompts:
    """Prompts of one kind; every round gets new ones, so that nothing of an earlier round is ever found."""

    def __init__(self, client: InferenceClient) -> None:
        self._ids = prompt_ids(client, 100_000)
        self._at = 0

    def _next(self, length: int) -> list[int]:
        # A step that is no divisor of the text's length, so that the pieces differ.
        self._at += 61
        return self._ids[self._at : self._at + length]

    def one(self) -> list[list[int]]:
        """One prompt."""
        return [self._next(ONE["prompt"])]

    def many(self) -> list[list[int]]:
        """Prompts with a common beginning, which nobody has computed yet, and ends of their own."""
        shared = self._next(MANY["shared"])
        return [shared + self._next(MANY["own"]) for _ in range(MANY["requests"])]


Call = Callable[[Sequence[Sequence[int]], int], float]
"""Prompts and new tokens of each: seconds."""


def rested(call: Call) -> Call:
    """The call, after a rest: threads of the side before it may wait awake for more, on the cores of this one."""

    def after_rest(prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        time.sleep(REST_S)
        return call(prompts, new_tokens)

    return after_rest


@dataclass(frozen=True)
class Sides:
    """Everyone who is measured, ready."""

    dtype: str
    ours: InferenceClient
    transformers: Peer
    vllm: Peer | None

    def calls(self, kind: str) -> dict[str, Call]:
        """By name, what makes a measured call; ours is the last."""
        found: dict[str, Call] = {"generate": self.transformers.seconds}
        if kind == "many":
            found["generate_batch"] = lambda prompts, new: self.transformers.seconds(prompts, new, "generate_batch")
        return {**found, **self.serving()}

    def serving(self) -> dict[str, Call]:
        """The sides that share prefixes: vLLM if it is there, and ours."""
        found: dict[str, Call] = {"vLLM": self.vllm.seconds} if self.vllm else {}
        return {**found, "pagepool": lambda prompts, new: our_seconds(self.ours, prompts, new)}


def report_ratios(sides: Sides, kind: str, tokens: int, seconds: Mapping[str, Sequence[float]], bounds: Bounds) -> None:
    """Tokens a second of each side, and ours over the others; medians of the rounds."""
    label = "1 stream" if kind == "one" else f"{MANY['requests']} streams, {MANY['shared']} shared"
    ours = seconds["pagepool"]
    for name, theirs in seconds.items():
        if name == "pagepool":
            continue
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        if name == "vLLM":
            said = f"(to reach: {REACH}; {'reached' if ratio >= REACH else 'not reached'})"
        else:
            said = bounds.least(f"{sides.dtype}, {label}, against {name}", ratio, BOUNDS[kind])
        a, b = tokens / statistics.median(theirs), tokens / statistics.median(ours)
        print(f"{sides.dtype:9} {label:24} {name:15} {a:8.1f} {b:9.1f} {ratio:8.2f}   {said}", flush=True)


def report_parts(
    sides: Sides, new: int, first: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]], forward: float
) -> None:
    """Of the calls with many prompts: what goes into the prompts and what into a decode step."""
    for name, firsts in first.items():
        prompts, whole = statistics.median(firsts), statistics.median(seconds[name])
        step = (whole - prompts) / (new - 1)
        more = f", {forward:.1%} of it in the model's forward" if name == "pagepool" else ""
        print(f"{sides.dtype:9}     {name:9} prompts {prompts:7.2f} s, then {step * 1e3:7.1f} ms a decode step{more}")


def compare(sides: Sides, rounds: int, bounds: Bounds) -> None:
    """Let the sides take turns, print their medians and ratios, and what ours are made of."""
    prompts = Prompts(sides.ours)
    seconds: dict[str, list[float]] = {}
    for kind, new, count in (("one", ONE["new"], 1), ("many", MANY["new"], MANY["requests"])):
        make, calls = getattr(prompts, kind), sides.calls(kind)
        for call in calls.values():
            call(make(), 2)  # nobody meets a shape for the first time while measured
        batches = [make() for _ in range(rounds)]
        took = [{name: rested(call)(batch, new) for name, call in calls.items()} for batch in batches]
        seconds = {name: [each[name] for each in took] for name in calls}
        report_ratios(sides, kind, count * new, seconds, bounds)
    serving = sides.serving()
    first = {name: [rested(call)(prompts.many(), 1) for _ in range(rounds)] for name, call in serving.items()}
    seen = inside(sides.ours, lambda: our_seconds(sides.ours, prompts.many(), MANY["new"]))
    report_parts(sides, MANY["new"], first, seconds, seen.forward)
    said = bounds.most(f"{sides.dtype}, outside the forward", 1 - seen.forward, BOUNDS["outside"])
    print(
        f"{sides.dtype:9} of a step outside the model's forward, all streams at once: {1 - seen.forward:.1%}   {said}"
    )
    said = bounds.most(f"{sides.dtype}, unary calls to memd", seen.unary_calls, 0)
    print(f"{sides.dtype:9} unary calls to memd in {seen.steps} steps: {seen.unary_calls}   {said}", flush=True)


def report_memory(dtype: str, ours: float, theirs: tuple[float, float] | None, bounds: Bounds) -> None:
    """PSS in MB of both daemons beside the pool, and of vLLM's processes beside the KV cache."""
    print(f"{dtype:9} PSS of memd and inferd beside the pool: {ours:,.0f} MB", flush=True)
    if theirs is None:
        print(f"{dtype:9} PSS of vLLM's CPU build: not measured: it is not in this run")
        return
    said = bounds.most(f"{dtype}, memory", ours / theirs[0], BOUNDS["memory"])
    print(
        f"{dtype:9} PSS of vLLM's CPU build: {theirs[0]:,.0f} MB, beside {theirs[1]:,.0f} MB of its KV cache in memory"
    )
    print(f"{dtype:9} memory, pagepool's over vLLM's: {ours / theirs[0]:.2f}   {said}", flush=True)


def against_peers(dtype: str, options: argparse.Namespace, bounds: Bounds) -> None:
    """One dtype, all sides. The peers have ended when our memory is measured: what they map too would count less."""
    from inferd.model.source import resolve

    folder, threads = str(resolve("smollm2")), options.threads
    flags = ("--model", folder, "--dtype", dtype, "--threads", str(threads))
    size = ("--threads", str(threads), "--kv-bytes", str(POOL_BYTES))
    with (
        daemons.folder() as place,
        daemons.memd(place, "--pool-bytes", str(POOL_BYTES)) as (_, memd),
        daemons.inferd(place, *flags) as (client, inferd),
    ):
        with (
            transformers_peer(place, folder, dtype, threads) as peer,
            vllm_peer(place, folder, dtype, options.vllm_python, *size) as vllm,
        ):
            compare(Sides(dtype, client, peer, vllm), options.rounds, bounds)
            theirs = vllm.memory_mb() if vllm else None
        pids = [*memory.tree(memd.pid), *memory.tree(inferd.pid)]
        report_memory(dtype, memory.proportional_mb(pids, memory.POOL_FILES), theirs, bounds)


def hardware() -> str:
    """The processor as the kernel names it, and what of it matters here."""
    text = Path("/proc/cpuinfo").read_text()
    name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in text]
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {' '.join(wanted)}, Python {platform.python_version()}"


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("memd", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--vllm-python", default="", help="command of a Python that can import vLLM's CPU build")
    return parser.parse_args()


def main() -> None:
    """Print all figures, or those of one part."""
    options, bounds = parse(), Bounds()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # daemons and peers are ended on the way out
    print(f"{hardware()}; {options.threads} threads each side, {options.rounds} rounds\n")
    if options.only != "memd":
        print(f"tokens/s {'':25} {'peer':15} {'':8} {'pagepool':>9} {'ratio':>8}", flush=True)
    for dtype in ("float32", "bfloat16"):
        if options.only in (None, dtype):
            try:
                against_peers(dtype, options, bounds)
            except PeerEndedError as ended:
                raise SystemExit(f"a peer has ended: {ended}") from None
    if options.only in (None, "memd"):
        print("\nmemd alone")
        memd_load.report()
    if bounds.missed:
        print(f"\nmissed: {'; '.join(bounds.missed)}")
    sys.exit(1 if bounds.missed else 0)


if __name__ == "__main__":
    main()
