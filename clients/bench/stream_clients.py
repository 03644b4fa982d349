"""Many concurrent streams, measured in client processes of their own, so that Python's lock is not what is measured.

As a program it is one such process: reads a job a line from stdin, {"target", "prompts", "new_tokens", "begin"}, runs
its streams at once from the time `begin` on, and answers {"cpu": share of a core, "streams": [...]} a line. Times are
time.perf_counter(), which all processes of a Linux host share.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagepool_client import InferenceClient

HEAD_START_S = 0.1
"""From handing out a job to its begin: all processes have read theirs by then."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One continuation as its client saw it: when it was asked for, and when each message came with how many tokens."""

    begin: float
    times: list[float]
    counts: list[int]
    cached_tokens: int

    @property
    def first_token_s(self) -> float:
        """Seconds from the call to the first token."""
        return self.times[0] - self.begin


def step_ms(streams: Sequence[Stream]) -> float:
    """Milliseconds a token and stream, the median of the streams, while all of them were being continued."""
    begin, end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    steps = []
    for stream in streams:
        inside = [
            (when, count) for when, count in zip(stream.times, stream.counts, strict=True) if begin <= when <= end
        ]
        if len(inside) > 1:
            tokens = sum(count for _, count in inside[1:])
            steps.append((inside[-1][0] - inside[0][0]) / tokens * 1e3)
    return statistics.median(steps)


def longest_gap_ms(streams: Sequence[Stream]) -> float:
    """The longest that any stream waited from one message to the next, in milliseconds."""
    return max((b - a) * 1e3 for stream in streams for a, b in pairwise(stream.times))


class StreamClients:
    """Client processes that are there, waiting for streams to open."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.busiest = 0.0
        """The largest share of a core that a client process has used in a run."""

    def run(self, target: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Stream]:
        """Continue all prompts at once, greedily, by exactly `new_tokens`."""
        used = self._processes[: len(prompts)]
        begin = time.perf_counter() + HEAD_START_S
        for index, process in enumerate(used):
            mine = prompts[index :: len(used)]
            job = {"target": target, "prompts": mine, "new_tokens": new_tokens, "begin": begin}
            _send(process, json.dumps(job))
        answers = [json.loads(_receive(process)) for process in used]
        self.busiest = max(self.busiest, *(answer["cpu"] for answer in answers))
        streams = [Stream(**stream) for answer in answers for stream in answer["streams"]]
        if any(sum(stream.counts) != new_tokens for stream in streams):
            raise SystemExit(f"asked for {new_tokens} tokens each, got {[sum(stream.counts) for stream in streams]}")
        return streams


@contextmanager
def stream_clients(count: int) -> Iterator[StreamClients]:
    """`count` client processes, started."""
    command, pipe = [sys.executable, str(Path(__file__))], subprocess.PIPE
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            _receive(process)
        yield StreamClients(processes)


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _receive(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a client process has ended; see above why")
    return line


def follow(client: InferenceClient, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """Run one stream; a Stream as JSON has it."""
    times, counts, cached = [], [], 0
    begin = time.perf_counter()
    for event in client.generate(token_ids=prompt, temperature=0.0, max_tokens=new_tokens, ignore_eos=True):
        if event.DESCRIPTOR.name == "GenerateTokens" and event.token_ids:
            times.append(time.perf_counter())
            counts.append(len(event.token_ids))
        elif event.DESCRIPTOR.name == "GenerateFinished":
            cached = event.usage.cached_tokens
    return {"begin": begin, "times": times, "counts": counts, "cached_tokens": cached}


def run(client: InferenceClient, job: dict[str, Any]) -> dict[str, Any]:
    """All streams of a job, each on a thread."""
    streams: list[dict[str, Any]] = []

    def stream(prompt: Sequence[int]) -> None:
        time.sleep(max(0.0, job["begin"] - time.perf_counter()))
        streams.append(follow(client, prompt, job["new_tokens"]))

    threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in job["prompts"]]
    cpu, wall = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"cpu": (time.process_time() - cpu) / (time.perf_counter() - wall), "streams": streams}


def main() -> None:
    """Serve jobs until stdin ends."""
    clients: dict[str, InferenceClient] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        target = job["target"]
        if target not in clients:
            clients[target] = InferenceClient(target)
        print(json.dumps(run(clients[target], job)), flush=True)


if __name__ == "__main__":
    main()
