"""`pagepool doctor` and `pagepool top` over real daemons: pools that are uncut, empty, full, and served by a worker."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.memd.v1 import types_pb2
from pagepool.memd.v1 import worker_service_pb2 as wpb
from pagepool_client import PoolClient
from tests.e2e.conftest import Memd, RawWorker
from tests.e2e.workers import READY_S, greedy, household, within

COMMAND = [sys.executable, "-m", "pagepool_client.cli.main"]
NUM_BLOCKS = 100


def run(memd: Memd, *words: str, target: str = "") -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words, "--memd", target or memd.target]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PAGEPOOL_", "COLUMNS"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def doctor(memd: Memd, *words: str) -> dict[str, Any]:
    done = run(memd, "doctor", "--json", *words)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def findings(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["code"]: finding for finding in told["findings"]}


@pytest.fixture
def memd(start_memd: Callable[..., Memd]) -> Memd:
    """A memd of 100 blocks, without geometry as yet."""
    return start_memd("--max-num-blocks", str(NUM_BLOCKS), "--heartbeat-timeout", "60s")


def test_a_pool_is_explained_from_uncut_to_full(
    memd: Memd, raw_worker: Callable[..., RawWorker], geometry: types_pb2.Geometry
) -> None:
    told = doctor(memd)
    assert list(findings(told)) == ["no_geometry"]
    assert told["figures"] is None
    uncut = run(memd, "top", "--once")
    assert uncut.returncode == 0, uncut.stderr
    assert "not cut into blocks yet, since no worker has attached" in uncut.stdout

    worker = raw_worker("filler")
    worker.hello(geometry)
    told = doctor(memd)
    assert (told["healthy"], told["findings"]) == (True, [])
    assert told["pool"]["total_blocks"] == told["pool"]["free_blocks"] == NUM_BLOCKS
    assert "healthy: nothing to change" in run(memd, "doctor").stdout
    assert "no block tables: nothing runs" in run(memd, "top", "--once").stdout

    first = worker.create(list(range(600)), 60)
    worker.commit(first.table_id, list(range(600)))
    second = worker.create(list(range(1000, 1300)), 37)
    worker.commit(second.table_id, list(range(1000, 1300)))
    refused = worker.step(creates=[wpb.TableRequest(ref=1, token_ids=[1], num_blocks=4)])
    assert len(refused.refusals) == 1
    expect_full(memd)


def expect_full(memd: Memd) -> None:
    """Both commands about two tables with 600 and 300 tokens in 60 and 37 of 100 blocks of 16, one request refused."""
    told = doctor(memd)
    found = findings(told)
    assert list(found) == ["out_of_blocks", "reserved_ahead"]
    full = found["out_of_blocks"]
    assert full["severity"] == "problem"
    assert full["figures"] == {
        "total_blocks": 100,
        "held_blocks": 97,
        "most_held_blocks": 97,
        "available_blocks": 3,
        "refused_requests": 1,
        "waiting_requests": 0,
        "saved_blocks": 0,
        "mean_table_blocks": 48.5,
        "needed_blocks": 125,
    }
    # The slab of 16 MiB has room for 4,096 blocks of 4 KiB.
    assert [(one["where"], one["name"], one["value"]) for one in full["remedies"]] == [
        ("memd", "--max-num-blocks", "125"),
        ("memd", "--fp8", "pressure"),
    ]
    # 600 tokens fill 38 of 60 blocks, the last by half; 300 fill 19 of 37.
    assert found["reserved_ahead"]["figures"] == {"reserved_blocks": 22 + 18, "held_blocks": 97, "tables": 2}
    assert (told["figures"]["tokens"], told["figures"]["tail_slots"]) == (900, 8 + 4)
    assert [holder["own_blocks"] for holder in told["figures"]["holders"]] == [60, 37]
    text = run(memd, "doctor", target=memd.tcp)
    assert text.returncode == 0, text.stderr
    assert "1. problem  The pool is out of blocks" in text.stdout
    assert "→ memd --max-num-blocks 125" in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 80
    assert "\x1b" not in text.stdout
    picture = run(memd, "top", target=memd.tcp)
    assert (picture.returncode, picture.stderr) == (0, "")
    assert "\x1b" not in picture.stdout
    assert "▒ 2 filling 2.0 %" in picture.stdout
    assert "▫ 40 reserved 40 %" in picture.stdout
    assert re.search(r"^\d+ +filler +0 +600 +0 +60 +60 ", picture.stdout, re.MULTILINE)
    assert "no worker to ask" in picture.stdout, "over TCP there is no place beside memd's"
    beside = run(memd, "top").stdout
    assert f"inferd: nothing answers at unix:{memd.directory}/inferd.sock" in beside


def test_memory_is_watched_over_time_and_pinned_blocks_are_named(
    memd: Memd, raw_worker: Callable[..., RawWorker], geometry: types_pb2.Geometry
) -> None:
    raw_worker().hello(geometry)
    with PoolClient(memd.target) as client, client.lease(holder="pinner") as lease:
        kept = lease.allocate(60)
        command = [*COMMAND, "doctor", "--json", "--over", "3", "--memd", memd.target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stderr is not None
            assert "watching the pool" in watching.stderr.readline()
            time.sleep(0.5)  # the stream begins after the word, with the state of that moment
            peak = lease.allocate(38)
            time.sleep(0.3)  # two intervals of the watch
            lease.free(peak.block_ids)
            out, _ = watching.communicate(timeout=30)
    told = json.loads(out)
    found = findings(told)
    assert list(found) == ["out_of_blocks", "held_by_leases"]
    assert told["healthy"], "nobody waits"
    assert found["out_of_blocks"]["figures"]["most_held_blocks"] == 98
    assert found["out_of_blocks"]["figures"]["held_blocks"] == len(kept.block_ids) == 60
    assert found["held_by_leases"]["remedies"][0]["value"] == f"lease_id {lease.lease_id}"
    assert told["counted"]["allocated_blocks"] == 38, "what was allocated before it watched does not count"
    assert told["counted"]["watched_s"] == 3.0


@pytest.mark.parametrize(
    "words", [["top"], ["top", "--once"], ["doctor"], ["doctor", "--json"], ["doctor", "--over", "1"]]
)
def test_without_a_memd_both_say_where_they_looked(words: list[str], tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/memd.sock"
    done = subprocess.run([*COMMAND, *words, "--memd", target], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"pagepool: nothing answers at {target}")


@pytest.mark.parametrize("value", ["0", "nan", "4000"])
def test_an_interval_outside_its_limits_is_refused_by_name(value: str) -> None:
    done = subprocess.run(
        [*COMMAND, "top", "--interval", value], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--interval is {float(value)}, but must be from 0.1 to 3600 seconds" in done.stderr


@contextmanager
def at_a_terminal(columns: int, lines: int, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command at a pseudo-terminal of this size, and the terminal's other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    with subprocess.Popen([*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            if process.poll() is None:
                process.kill()
            os.close(ours)


def read_until(terminal: int, text: str, timeout_s: float = 30.0) -> str:
    """What the terminal shows up to this text, control sequences left out; fails the test if it does not come."""
    seen, end = "", time.monotonic() + timeout_s
    while text not in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen):
        ready, _, _ = select.select([terminal], [], [], max(end - time.monotonic(), 0))
        assert ready, f"{text!r} did not come: {seen[-2000:]!r}"
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def test_top_survives_its_memd_and_ends_with_q(
    start_memd: Callable[..., Memd], raw_worker_of: Callable[..., RawWorker], geometry: types_pb2.Geometry
) -> None:
    memd = start_memd("--heartbeat-timeout", "60s")
    raw_worker_of(memd).hello(geometry)
    with at_a_terminal(80, 24, "top", "--memd", memd.target, "--interval", "0.1") as (process, terminal):
        assert "\x1b[?1049h" in read_until(terminal, "no block tables: nothing runs"), "a screen of its own"
        memd.kill()
        read_until(terminal, "nothing answers at unix:")
        again = start_memd("--heartbeat-timeout", "60s")
        read_until(terminal, "not cut into blocks yet")
        os.write(terminal, b"q")
        assert "\x1b[?1049l" in drain(terminal), "the screen of before"
        assert process.wait(10) == 0
    assert again.process.poll() is None


def drain(terminal: int) -> str:
    """What the terminal still shows until the process has ended."""
    seen = ""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux's word for the other end being closed
            part = b""
        if not part:
            return seen
        seen += part.decode(errors="replace")


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[tuple[Memd, Any]]:
    """A memd and a worker of a small model that runs one request at a time."""
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--no-warmup", "--max-num-seqs", "1")
    with household("--pool-bytes", "16MiB") as (memd, start):
        yield memd, start("solo", *flags).ready()


def test_a_low_hit_rate_and_its_cure_are_seen_at_a_real_worker(served: tuple[Memd, Any]) -> None:
    memd, worker = served
    prompts = [[1000 + 100 * index + token for token in range(80)] for index in range(14)]
    for prompt in prompts:
        worker.generate(greedy(prompt, 1, ignore_eos=True))
    told = doctor(memd, "--inferd", worker.target)
    cold = findings(told)["pool_is_cold"]
    assert cold["figures"] == {
        "query_tokens": 14 * 80,
        "hit_tokens": 0,
        "allocated_blocks": cold["figures"]["allocated_blocks"],
        "evicted_blocks": 0,
        "sealed_blocks": 14 * 5,
    }
    assert (cold["remedies"][0]["name"], cold["remedies"][0]["value"]) == ("max_tokens", "1")
    for prompt in prompts:
        worker.generate(greedy(prompt, 1, ignore_eos=True))
    told = doctor(memd, "--inferd", worker.target)
    assert (told["healthy"], told["findings"]) == (True, [])
    assert told["counted"]["prefix_hit_tokens"] >= 14 * 64, "all full blocks before the last token"


def test_a_queue_before_a_worker_that_takes_no_more_is_seen_by_both(served: tuple[Memd, Any]) -> None:
    memd, worker = served
    calls = [
        worker.stub().Generate(greedy([7 + index] * 32, 3000, ignore_eos=True), timeout=READY_S) for index in range(3)
    ]
    try:
        within(20, lambda: findings(doctor(memd, "--inferd", worker.target)).get("workers_are_full"))
        picture = run(memd, "top", "--inferd", worker.target)
        assert re.search(r"^queue +1 running, 2 waiting, 0 refused; room for \d+ more", picture.stdout, re.MULTILINE)
        assert re.search(r"^solo +\S+ +float32 +1 +2 ", picture.stdout, re.MULTILINE)
        told = findings(doctor(memd, "--inferd", worker.target))["workers_are_full"]
        assert (told["figures"]["running_requests"], told["figures"]["waiting_requests"]) == (1, 2)
        assert [(one["name"], one["value"]) for one in told["remedies"]] == [
            ("--max-num-seqs", "4"),
            ("--memd", memd.target),
        ]
    finally:
        for call in calls:
            call.cancel()
    within(10, lambda: not memd.usage().held_blocks)
    assert all(call.code() is grpc.StatusCode.CANCELLED for call in calls)


def test_a_worker_that_was_named_and_does_not_answer_is_a_finding(served: tuple[Memd, Any], tmp_path: Path) -> None:
    memd, worker = served
    gone = f"unix:{tmp_path}/gone.sock"
    told = doctor(memd, "--inferd", worker.target, "--inferd", gone)
    assert gone in findings(told)["worker_silent"]["title"]
    assert [entry["running_requests"] is None for entry in told["workers"]] == [False, True]
