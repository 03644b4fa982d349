"""`pagepool tune` over real daemons: a small grid from start to recommendation, and replays that fail or are cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagepool.errors import PagepoolError, Reason
from pagepool_client.tuning.figures import figures
from pagepool_client.tuning.replay import Order, replay
from pagepool_client.workload.format import Piece, WorkloadRequest, line
from tests.e2e.conftest import clean_environ
from tests.e2e.workers import TinyHouse

COMMAND = [sys.executable, "-m", "pagepool_client.cli.main", "tune"]


@pytest.mark.full
def test_tune_measures_each_setting_and_recommends_one(tiny_model: Path, tmp_path: Path) -> None:
    workload, plot = tmp_path / "w.jsonl", tmp_path / "plot.svg"
    prompts = [(Piece("system", 20), Piece(f"chat-{number}", 12)) for number in range(6)]
    made = [WorkloadRequest(number / 2, prompt, 5) for number, prompt in enumerate(prompts)]
    workload.write_text("".join(f"{line(one)}\n" for one in made))
    words = ["--workload", str(workload), "--model", str(tiny_model), "--dtype", "float32", "--pool-bytes", "2MiB"]
    words += ["--block-sizes", "16,32", "--pool-shares", "1", "--batch-tokens", "128", "--within", "0.1"]
    done = subprocess.run(
        [*COMMAND, *words, "--requests", "4", "--json", "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        env={**clean_environ(), "PAGEPOOL_INFERD_WARMUP": "false"},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["requests"] == 4
    sizes = {one["block_size"]: one for one in told["settings"]}
    assert set(sizes) == {16, 32}
    assert told["recommended"]["block_size"] in sizes
    assert 3 <= told["runs"] <= told["exhaustive_runs"] == 4
    for one in told["settings"]:
        for run in one["runs"]:
            assert run["finished"] == 4
            assert run["throughput"] * run["seconds"] == pytest.approx(4 * 5), "every token of the sample, and no other"
            assert 0 < run["ttft_p50"] <= run["ttft_p99"] <= run["seconds"]
            assert run["cached_tokens"] <= 3 * 20, "the system prompt of this run, and nothing of the run before"
    assert plot.read_text().startswith("<svg ")
    assert "recommended" not in done.stderr
    folder = Path(done.stderr.split("logs: ")[1].split()[0])
    assert not folder.exists(), "nothing is left behind"


def test_a_replay_ends_with_the_first_error_and_a_cut_one_with_what_has_come(tiny_house: TinyHouse) -> None:
    worker = tiny_house.one
    good, endless = Order(0.0, list(range(100, 140)), 6), Order(0.0, [100, 101], 4000)
    heard = replay(worker.target, [good, good], b"one").heard
    assert [sum(number for _, number in one.messages) for one in heard] == [6, 6]
    assert all(one.finished for one in heard)
    with pytest.raises(PagepoolError) as caught:
        replay(worker.target, [good, Order(0.0, [100], 1 << 30)], b"two")
    assert caught.value.reason in {Reason.PROMPT_TOO_LONG, Reason.REQUEST_TOO_LARGE}
    with pytest.raises(PagepoolError, match=r"no token came for 0.001 s, though 1 request waits"):
        replay(worker.target, [endless], b"two", patience_s=0.001)
    cut = replay(worker.target, [good, endless, Order(60.0, [100], 1)], b"three", 2.0)
    assert cut.ended_s is not None
    assert len(cut.heard) == 2, "what was not due yet does not count"
    assert not cut.heard[1].finished
    assert figures(cut.heard, cut.ended_s).seconds == pytest.approx(2.0)
