"""`make bench-gpu`: two workers on one pool of a GPU, beside vLLM on the same GPU.

A model of Qwen2.5-7B's shape with random bfloat16 weights; memd, both workers and the clients are processes of their
own, over Unix sockets. vLLM, if there is one, measures first, on the same config. Every figure is printed beside its
bound, and a miss is said.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import daemons
from gpu_sharing import report_memory, report_sharing, used_mb
from random_model import SHAPES, write_config
from stream_clients import StreamClients, longest_gap_ms, step_ms, stream_clients
from vllm_beside import Vllm, vllm

from pagepool.inferd.v1.generation_service_pb2 import EngineCounters
from pagepool_client import InferenceClient

PARTS = ("vllm", "decode", "prefill", "sharing")
PROMPT, NEW = 512, 128
COUNTERS_S = 1.2
"""The engine tells its counters once a second."""
CLIENT_PROCESSES = 8
BOUNDS = {"decode": 1.03, "prefill": 1.15, "prefix_hit": 1.2, "start_s": 25.0}


@dataclass(frozen=True, slots=True)
class Worker:
    """An inferd that serves, and how long it took from its start to its first token."""

    client: InferenceClient
    start_s: float


class Prompts:
    """Prompts of random tokens, none like another."""

    def __init__(self, vocab: int) -> None:
        self._source, self._vocab = random.Random(0), vocab

    def take(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens."""
        return [[self._source.randrange(self._vocab - 1) for _ in range(length)] for _ in range(count)]


@contextmanager
def worker(place: Path, name: str, prompt: Sequence[int], flags: Sequence[str]) -> Iterator[Worker]:
    """A worker, its caches those of the place: cold for the first one, warm for the next."""
    caches = {
        "XDG_CACHE_HOME": f"{place}/cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{place}/cache/inductor",
        "TRITON_CACHE_DIR": f"{place}/cache/triton",
    }
    begin = time.perf_counter()
    with daemons.inferd(place, *flags, name=name, environment=caches) as (client, _):
        client.generate(token_ids=prompt, temperature=0.0, max_tokens=1).text()
        yield Worker(client, time.perf_counter() - begin)


def report_decode(
    clients: StreamClients, client: InferenceClient, prompts: Prompts, options: argparse.Namespace, peer: Vllm
) -> None:
    """Decode steps of each batch: at the clients, and in the engine while the prompts are found in the pool."""
    asked = {batch: prompts.take(batch, PROMPT) for batch in options.batches}
    runs = {batch: [clients.run(client.target, asked[batch], NEW)] for batch in options.batches}
    time.sleep(COUNTERS_S)
    before = client.model().counters
    for batch in options.batches:
        runs[batch] += [clients.run(client.target, asked[batch], NEW) for _ in range(options.repeats - 1)]
        time.sleep(COUNTERS_S)
        after = client.model().counters
        ours = statistics.median(map(step_ms, runs[batch]))
        beside = peer.beside("decode", batch, ours / 1e3, BOUNDS["decode"])
        print(f"decode step, batch {batch:4}, at the clients   {ours:8.3f} ms   {beside}")
        gap = max(map(longest_gap_ms, runs[batch][1:]))
        print(f"    {inside(before, after)}; longest gap of a stream {gap:.1f} ms", flush=True)
        before = after


def inside(before: EngineCounters, after: EngineCounters) -> str:
    """What the engine says of the steps between two looks."""
    steps = after.steps - before.steps

    def each(name: str) -> float:
        return float(getattr(after, name).ToNanoseconds() - getattr(before, name).ToNanoseconds()) / steps / 1e6

    calls = after.memd_unary_calls - before.memd_unary_calls
    return (
        f"in the engine {each('step_time'):.3f} ms a step, forward {each('forward_time'):.3f}, over {steps} steps with "
        f"{calls} unary calls to memd"
    )


def first_tokens_s(clients: StreamClients, client: InferenceClient, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Seconds to the first token of each prompt, one after the other."""
    return [clients.run(client.target, [prompt], 1)[0].first_token_s for prompt in prompts]


def report_first(label: str, seconds: Sequence[float], beside: Callable[[float], str]) -> None:
    """The median of first tokens beside vLLM's, and their spread."""
    median = statistics.median(seconds)
    spread = f"{len(seconds)} prompts, {min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}"
    print(f"{label}  {median * 1e3:8.2f} ms   {beside(median)}; {spread}", flush=True)


def report_prefill(
    clients: StreamClients, pair: Sequence[Worker], prompts: Prompts, options: argparse.Namespace, peer: Vllm
) -> None:
    """Time to the first token of a long prompt, of the same through the other worker, and through the same again."""
    first, other = (worker.client for worker in pair)
    for client in (first, other):  # long prompts of its own, so that neither meets the length for the first time
        first_tokens_s(clients, client, prompts.take(1, options.long))
    asked = prompts.take(options.long_prompts, options.long)

    def beside(case: str) -> Callable[[float], str]:
        return lambda median: peer.beside(case, options.long, median, BOUNDS[case])

    computed = first_tokens_s(clients, first, asked)
    report_first(f"first token of {options.long} tokens, computed      ", computed, beside("prefill"))
    for label, client in (("through ANOTHER worker", other), ("through the same again", first)):
        found = first_tokens_s(clients, client, asked)
        report_first(f"    the same prompt {label}", found, beside("prefix_hit"))


def last_words(place: Path) -> Callable[[object, BaseException | None, object], None]:
    """A context's exit: where it ends by an exception, what the daemons of the place logged last."""

    def tell(_kind: object, error: BaseException | None, _trace: object) -> None:
        for log in sorted(place.glob("*.log")) if error else ():
            print(f"---- the end of {log.name}\n{log.read_text()[-3000:]}", flush=True)

    return tell


def report_start(label: str, seconds: float) -> None:
    """From a worker's start to its first token."""
    miss = "; MISSED" if seconds > BOUNDS["start_s"] and label == "warm" else ""
    bound = f"   (bound: under {BOUNDS['start_s']:.0f}{miss})" if label == "warm" else ""
    print(f"worker, start to first token, {label} caches    {seconds:8.1f} s{bound}", flush=True)


def measure_ours(folder: Path, options: argparse.Namespace, peer: Vllm) -> None:
    """memd, one worker, a second one; each part with as many of them as it needs."""
    prompts = Prompts(SHAPES[options.shape]["vocab_size"])
    flags = ["--model", str(folder), "--max-num-seqs", str(max(options.batches))]
    flags += ["--max-batch-tokens", str(options.max_batch_tokens), *shlex.split(options.inferd_flags)]
    with ExitStack() as stack:
        place = stack.enter_context(daemons.folder())
        stack.push(last_words(place))
        clients = stack.enter_context(stream_clients(CLIENT_PROCESSES))
        pool = ("--device", options.device, "--pool-bytes", options.pool_bytes)
        memd, _ = stack.enter_context(daemons.memd(place, *pool))
        pair = [stack.enter_context(worker(place, "first", prompts.take(1, 16)[0], flags))]
        report_start("cold", pair[0].start_s)
        if options.together:
            peer.measure()
        if "decode" in options.only:
            report_decode(clients, pair[0].client, prompts, options, peer)
        alone = used_mb()
        if {"prefill", "sharing"} & set(options.only):
            pair.append(stack.enter_context(worker(place, "second", prompts.take(1, 16)[0], flags)))
            report_start("warm", pair[1].start_s)
        if "prefill" in options.only:
            report_prefill(clients, pair, prompts, options, peer)
        if "sharing" in options.only:
            report_sharing(memd, [one.client for one in pair], prompts.take(1, options.long)[0])
            report_memory(memd, options.used_before, alone, used_mb())
        print(f"busiest client process: {clients.busiest:.0%} of a core, of {CLIENT_PROCESSES} processes", flush=True)


def hardware() -> str:
    """The GPU and what runs it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        name = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        name = "no GPU"
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{name}; {len(os.sched_getaffinity(0))} cores; {versions}"


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = {"type": lambda text: [int(word) for word in text.split(",")]}
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pagepool-bench-model"), help="for 15 GB of weights")
    parser.add_argument("--batches", default=[1, 8, 32, 128], **numbers)  # type: ignore[arg-type]
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool-bytes", default="16GiB")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--inferd-flags", default="", help="further flags of both workers, as one word")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each decode case on either side")
    parser.add_argument("--long-prompts", type=int, default=5, help="prompts of --long tokens on either side")
    parser.add_argument("--vllm-python", default=sys.executable, help="command of a Python that can import vllm")
    parser.add_argument("--vllm-memory", type=float, default=0.85, help="share of the GPU's memory for vLLM")
    parser.add_argument(
        "--together",
        action="store_true",
        help="start vLLM and the first worker at the same time, which saves a minute and makes both starts slower; "
        "needs a --vllm-memory that leaves room. They still measure one after the other",
    )
    return parser.parse_args()


def main() -> None:
    """Print all figures, or those of some parts."""
    options = parse()
    folder = options.folder / options.shape
    print(hardware(), flush=True)
    options.used_before = used_mb()
    write_config(folder, options.shape)
    maker = [sys.executable, str(Path(__file__).parent / "random_model.py"), str(folder), "--shape", options.shape]
    begin = time.perf_counter()
    with vllm(folder, options) as peer:
        subprocess.run(maker, check=True)  # while vLLM starts, which needs the config only
        print(f"{folder} is there after {time.perf_counter() - begin:.1f} s", flush=True)
        if not options.together:
            peer.measure()
        if set(options.only) - {"vllm"}:
            measure_ours(folder, options, peer)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
