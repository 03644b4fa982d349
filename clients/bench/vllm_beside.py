"""vLLM, in a process of its own, and what our figures are beside its figures."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Vllm:
    """vLLM, starting or started; `seconds` by (case, batch or tokens) once it has measured."""

    def __init__(self, process: subprocess.Popen[str] | None, log: Path) -> None:
        self._process, self._log = process, log
        self.seconds: dict[tuple[str, int], float] = {}

    def measure(self) -> None:
        """Let it measure as soon as it has started, and wait for its end. A failure is said, and no more."""
        if self._process is None:
            return
        assert self._process.stdin
        assert self._process.stdout
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            print(f"vLLM: {line.strip()}", flush=True)
            case = json.loads(line)
            if case["case"] == "start":
                self._process.stdin.write("go\n")
                self._process.stdin.flush()
            elif case["case"] == "decode":
                self.seconds["decode", case["batch"]] = case["ms_per_step"] / 1e3
            else:
                self.seconds[case["case"], case["tokens"]] = case["s"]
        if self._process.wait():
            print(f"vLLM ended with {self._process.returncode}; its last words: {self._log.read_text()[-1500:]}")

    def beside(self, case: str, size: int, seconds: float, bound: float) -> str:
        """Our figure beside vLLM's of the same run."""
        theirs = self.seconds.get((case, size))
        if theirs is None:
            return "(no vLLM in this run)"
        ratio = seconds / theirs
        miss = "" if ratio <= bound else "; MISSED"
        return f"vLLM {theirs * 1e3:8.3f} ms   ratio {ratio:.3f}   (bound: at most {bound}{miss})"


@contextmanager
def vllm(folder: Path, options: argparse.Namespace) -> Iterator[Vllm]:
    """The peer on the config of a folder, being started; none if the options do not name it among the parts."""
    log = folder / "vllm.log"
    if "vllm" not in options.only:
        yield Vllm(None, log)
        return
    words = [str(Path(__file__).parent / "vllm_peer.py"), str(folder), "--batches", ",".join(map(str, options.batches))]
    words += ["--long", str(options.long), "--long-prompts", str(options.long_prompts)]
    words += ["--repeats", str(options.repeats), "--memory", str(options.vllm_memory)]
    command, pipe = [*shlex.split(options.vllm_python), *words], subprocess.PIPE
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        yield Vllm(process, log)
        process.kill()
