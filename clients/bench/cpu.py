"""`make bench-cpu`: pagepool beside transformers' own generate on this CPU, and memd alone.

Both sides run the same folder of weights, dtype and number of threads, in rounds that alternate, each as a process of
its own. Ours is measured at gRPC clients: two daemons, a socket and streaming included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import daemons
import memd_load
from text import prompt_ids

from pagepool_client import InferenceClient

ROUNDS = 3
ONE = {"prompt": 57, "new": 128}
MANY = {"requests": 16, "shared": 512, "own": 24, "new": 64}
BOUNDS = {"one": 0.85, "many": 1.7}


@dataclass(frozen=True)
class Peer:
    """transformers in a process of its own."""

    process: subprocess.Popen[str]

    def rate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Tokens a second of one call of generate."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return float(answer["tokens"] / answer["seconds"])


@contextmanager
def transformers_peer(folder: str, dtype: str, threads: int) -> Iterator[Peer]:
    """The peer, loaded."""
    command = [sys.executable, str(Path(__file__).parent / "hf_peer.py"), folder, "--dtype", dtype]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--threads", str(threads)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        yield Peer(process)
        process.kill()


def our_rate(client: InferenceClient, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Tokens a second of concurrent streams, measured at the clients."""
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
    return sum(counts) / seconds


@dataclass(frozen=True)
class Outside:
    """What an engine did between two looks."""

    share: float
    unary_calls: int
    steps: int


def outside_forward(client: InferenceClient, work: object) -> Outside:
    """Run `work`, and say which share of the engine's step time was not the model's forward."""
    before = client.model().counters
    assert callable(work)
    work()
    time.sleep(1.5)  # the engine tells its counters once a second
    after = client.model().counters

    def spent(name: str) -> float:
        return float(getattr(after, name).ToNanoseconds() - getattr(before, name).ToNanoseconds())

    share = 1 - spent("forward_time") / spent("step_time")
    return Outside(share, after.memd_unary_calls - before.memd_unary_calls, after.steps - before.steps)


def verdict(ratio: float, bound: float) -> str:
    """A bound and whether it holds; a miss is said."""
    return f"(bound: at least {bound}{'' if ratio >= bound else '; MISSED'})"


class Prompts:
    """Prompts of one kind; every round gets new ones, so that nothing but the shared prefix is ever found."""

    def __init__(self, client: InferenceClient) -> None:
        self._ids = prompt_ids(client, 100_000)
        self.shared = self._ids[: MANY["shared"]]
        self._at = MANY["shared"]

    def _next(self, length: int) -> list[int]:
        # A step that is no divisor of the text's length, so that the pieces differ.
        self._at += 61
        return self._ids[self._at : self._at + length]

    def one(self) -> list[list[int]]:
        """One prompt."""
        return [self._next(ONE["prompt"])]

    def many(self) -> list[list[int]]:
        """Prompts with a common beginning and ends of their own."""
        return [self.shared + self._next(MANY["own"]) for _ in range(MANY["requests"])]


def compare(peer: Peer, client: InferenceClient, dtype: str, rounds: int) -> None:
    """Alternate the two sides and print their medians and ratios."""
    prompts = Prompts(client)
    our_rate(client, [prompts.many()[0]], 1)  # the one earlier request that warms the prefix
    for _ in range(2):
        peer.rate(prompts.one(), 8)
        our_rate(client, prompts.one(), 8)
    for kind, label, new in (("one", "1 stream", ONE["new"]), ("many", "16 streams, 512 shared", MANY["new"])):
        make = getattr(prompts, kind)
        pairs = [(peer.rate(batch, new), our_rate(client, batch, new)) for batch in (make() for _ in range(rounds))]
        theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{dtype:9} {label:24} {theirs:8.1f} {ours:9.1f} {ratio:8.2f}   {verdict(ratio, BOUNDS[kind])}")
    seen = outside_forward(client, lambda: our_rate(client, prompts.many(), MANY["new"]))
    miss = "" if seen.share < 0.08 else "; MISSED"
    print(f"{dtype:9} of a step outside the model's forward, batch 16: {seen.share:.1%}   (bound: under 8 %{miss})")
    print(f"{dtype:9} unary calls to memd in {seen.steps} steps: {seen.unary_calls}   (bound: 0)")


def against_transformers(dtype: str, threads: int, rounds: int) -> None:
    """One dtype, both sides."""
    from inferd.model.source import resolve

    folder = str(resolve("smollm2"))
    flags = ("--model", folder, "--dtype", dtype, "--threads", str(threads))
    with (
        daemons.folder() as place,
        daemons.memd(place, "--pool-bytes", "2GiB"),
        daemons.inferd(place, *flags) as (client, _),
        transformers_peer(folder, dtype, threads) as peer,
    ):
        compare(peer, client, dtype, rounds)


def hardware() -> str:
    """The processor as the kernel names it, and what of it matters here."""
    text = Path("/proc/cpuinfo").read_text()
    name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in text]
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {' '.join(wanted)}, Python {platform.python_version()}"


def main() -> None:
    """Print all figures, or those of one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("memd", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(f"{hardware()}; {options.threads} threads each side, {options.rounds} rounds\n")
    if options.only != "memd":
        print(f"tokens/s {'':25} transformers  pagepool    ratio")
    for dtype in ("float32", "bfloat16"):
        if options.only in (None, dtype):
            against_transformers(dtype, options.threads, options.rounds)
    if options.only in (None, "memd"):
        print("\nmemd alone")
        memd_load.report()


if __name__ == "__main__":
    main()
