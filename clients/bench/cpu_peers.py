"""The peers of `make bench-cpu`, each a process of its own that is asked by lines of JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory

HERE = Path(__file__).parent
_ERROR = re.compile(r"\b\w*(?:Error|Exception): .*")


class PeerEndedError(Exception):
    """The peer's process has ended; the message is its last words."""


def last_words(log: str) -> str:
    """Why a process ended, from what it wrote: the first error named, which others follow from, or the last line."""
    if named := _ERROR.search(log):
        return named[0]
    lines = log.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


@dataclass(frozen=True)
class Peer:
    """A peer that has started."""

    process: subprocess.Popen[str]
    log: Path

    def ask(self, **job: object) -> dict[str, Any]:
        """The answer to one job. Raises PeerEndedError if the process ends instead."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerEndedError(last_words(self.log.read_text())) from None
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Its next line of JSON; other lines are passed over."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise PeerEndedError(last_words(self.log.read_text()))

    def seconds(self, prompts: Sequence[Sequence[int]], new_tokens: int, how: str = "") -> float:
        """What one call takes. SystemExit if it generated another number of tokens than asked for."""
        answer = self.ask(prompts=prompts, new_tokens=new_tokens, how=how)
        if answer["tokens"] != new_tokens * len(prompts):
            raise SystemExit(f"asked a peer for {new_tokens} tokens for each of {len(prompts)}, got {answer['tokens']}")
        return float(answer["seconds"])

    def memory_mb(self) -> tuple[float, float]:
        """PSS of all its processes without what of its KV cache is in memory, and that."""
        kv = sum(memory.resident_mb(pid, ranges) for pid, ranges in self.ask(memory=True)["kv"])
        return memory.proportional_mb(memory.tree(self.process.pid)) - kv, kv


@contextmanager
def _started(command: Sequence[str], log: Path) -> Iterator[Peer]:
    pipe = subprocess.PIPE
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        try:
            yield Peer(process, log)
        finally:
            assert process.stdin
            process.stdin.close()  # on which it ends, and ends the processes that it has started
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                for pid in reversed(memory.tree(process.pid)):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def transformers_peer(place: Path, folder: str, dtype: str, threads: int) -> Iterator[Peer]:
    """transformers, loaded."""
    command = [sys.executable, str(HERE / "hf_peer.py"), folder, "--dtype", dtype, "--threads", str(threads)]
    with _started(command, place / "transformers.log") as peer:
        peer.hear()
        yield peer


@contextmanager
def vllm_peer(place: Path, folder: str, dtype: str, python: str, *flags: str) -> Iterator[Peer | None]:
    """The CPU build of vLLM, loaded and compiled; none, with the reason printed, if it cannot be had."""
    if not python:
        print(f"{dtype:9} vLLM's CPU build: not measured: --vllm-python names no Python that can import it", flush=True)
        yield None
        return
    command = [*shlex.split(python), str(HERE / "vllm_cpu_peer.py"), folder, "--dtype", dtype, *flags]
    with _started(command, place / "vllm.log") as peer:
        try:
            about = peer.hear()
        except PeerEndedError as ended:
            print(f"{dtype:9} vLLM's CPU build: not measured: {ended}", flush=True)
            yield None
            return
        print(f"{dtype:9} vLLM {about['vllm']} has started in {about['start_s']:.0f} s", flush=True)
        yield peer
