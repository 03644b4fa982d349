"""Real workers, models that load in no time, and whole streams. The fixtures are in conftest.py."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.inferd.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.e2e.conftest import Memd, clean_environ

READY_S = 180.0


@dataclass
class Worker:
    """A running inferd; `addresses` are known once `ready` has returned."""

    process: subprocess.Popen[str]
    directory: Path
    name: str
    addresses: list[str] = field(default_factory=list)
    channels: list[grpc.Channel] = field(default_factory=list)

    @property
    def target(self) -> str:
        return f"unix:{self.directory / self.name}.sock"

    @property
    def tcp(self) -> str:
        return next(address.removeprefix("tcp:") for address in self.addresses if not address.startswith("unix:"))

    @property
    def log(self) -> str:
        return (self.directory / f"{self.name}.log").read_text()

    def ready(self) -> Worker:
        line = self.process.stdout.readline() if self.process.stdout else ""
        assert line.startswith("inferd is ready"), self.log
        self.addresses = line.removeprefix("inferd is ready: ").split()
        return self

    def stub(self) -> GenerationServiceStub:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels.append(grpc.insecure_channel(self.target, options=options))
        return GenerationServiceStub(self.channels[-1])

    def generate(self, request: pb.GenerateRequest) -> Continuation:
        return read(self.stub().Generate(request, timeout=120))

    def engine_pid(self) -> int:
        """The engine process: the front's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = map(int, children)
        return pid

    def kill(self) -> None:
        """SIGKILL, both processes, the engine first, as it holds the blocks.

        Its channels stay open: a call whose own channel is closed under it may be told of that first, as CANCELLED,
        and not of the worker's end.
        """
        os.kill(self.engine_pid(), signal.SIGKILL)
        self.process.kill()
        self._reap(30)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = 30) -> int:
        """The exit code, once it has ended; its channels are closed then."""
        code = self._reap(timeout_s)
        for channel in self.channels:
            channel.close()
        return code

    def _reap(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        if self.process.stdout:
            self.process.stdout.close()
        return code


@dataclass
class Continuation:
    """A whole stream."""

    started: pb.GenerateStarted
    text: str
    token_ids: list[int]
    finished: pb.GenerateFinished


def read(call: Any) -> Continuation:
    """Reads a stream to its end; started comes first and finished last, or the test fails."""
    events = list(call)
    assert [event.WhichOneof("event") for event in (events[0], events[-1])] == ["started", "finished"]
    tokens = [event.tokens for event in events[1:-1]]
    text = "".join(part.text for part in tokens)
    return Continuation(events[0].started, text, [t for part in tokens for t in part.token_ids], events[-1].finished)


def greedy(prompt: str | list[int], max_tokens: int, **fields: Any) -> pb.GenerateRequest:
    """A request for the likeliest continuation of a text or of token ids."""
    if isinstance(prompt, str):
        fields["text"] = pb.TextPrompt(text=prompt)
    else:
        fields["tokens"] = pb.TokenPrompt(token_ids=prompt)
    return pb.GenerateRequest(sampling=pb.SamplingParams(temperature=0), max_tokens=max_tokens, **fields)


def launch(memd_target: str, directory: Path, name: str, *flags: str) -> Worker:
    """Starts an inferd that listens on `directory`/`name`.sock and a free TCP port. Does not wait for it."""
    command = [sys.executable, "-m", "inferd", "--memd", memd_target, "--name", name, "--log-format", "json"]
    listen = ["--listen", f"unix:{directory / name}.sock", "--listen", "tcp:127.0.0.1:0"]
    with (directory / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            [*command, *listen, *flags], stdout=subprocess.PIPE, stderr=log, text=True, env=clean_environ()
        )
    return Worker(process, directory, name)


def launch_memd(directory: Path, slab_dir: Path, *flags: str) -> Memd:
    """Starts a memd for workers, in shared memory unless the flags say otherwise, and waits until it is ready."""
    command = [sys.executable, "-m", "memd", "--listen", f"unix:{directory / 'memd.sock'}", "--slab-dir", str(slab_dir)]
    command += ["--device", "cpu"]
    with (directory / "memd.log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--log-format", "json", *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=clean_environ(),
        )
    memd = Memd(process, directory, slab_dir, [])
    line = process.stdout.readline() if process.stdout else ""
    assert line.startswith("memd is ready"), memd.log
    return memd


@contextlib.contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """A private folder for sockets and one in shared memory."""
    paths = Path(tempfile.mkdtemp(prefix="pp-")), Path(tempfile.mkdtemp(prefix="pp-", dir="/dev/shm"))
    try:
        yield paths
    finally:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def household(*memd_flags: str) -> Iterator[tuple[Memd, Callable[..., Worker]]]:
    """A memd, and a way to start workers on it; all are stopped at the end."""
    workers: list[Worker] = []
    with folders() as (directory, slab_dir):
        memd = launch_memd(directory, slab_dir, *memd_flags)

        def start(name: str, *flags: str) -> Worker:
            workers.append(launch(memd.target, directory, name, *flags))
            return workers[-1]

        try:
            yield memd, start
        finally:
            for worker in workers:
                if worker.process.poll() is None:
                    worker.process.send_signal(signal.SIGTERM)
            for worker in workers:
                worker.wait()
            for channel in memd.channels:
                channel.close()
            if memd.process.poll() is None:
                memd.stop()


@dataclass
class TinyHouse:
    """A memd with two workers of a tiny model, and a way to start more, which get the model by themselves."""

    memd: Memd
    one: Worker
    two: Worker
    start: Callable[..., Worker]


@contextlib.contextmanager
def tiny_household(model: Path) -> Iterator[TinyHouse]:
    """A house of workers in float32, each on one thread."""
    flags = ("--model", str(model), "--dtype", "float32", "--threads", "1", "--no-warmup")
    with household("--pool-bytes", "64MiB") as (memd, launch_more):

        def start(name: str, *more: str) -> Worker:
            return launch_more(name, *flags, *more)

        one, two = start("one"), start("two")
        yield TinyHouse(memd, one.ready(), two.ready(), start)


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A llama with random weights and the default model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from inferd.config import load_config
    from inferd.model.source import resolve

    torch.manual_seed(seed)
    cache = load_config([]).config.cache_dir
    assert cache is not None
    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2", cache, print))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def within(seconds: float, condition: Callable[[], Any]) -> Any:
    """Waits until the condition holds; returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.02)
    return value
