"""The pagepool command over real daemons and the real model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagepool_client import InferenceClient, PoolClient

COMMAND = [sys.executable, "-m", "pagepool_client.cli.main"]


def environment() -> dict[str, str]:
    """No settings of the user's, and no warm-up: these tests do not look at speed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PAGEPOOL_")}
    return {**kept, "PAGEPOOL_INFERD_WARMUP": "false", "PYTHONUNBUFFERED": "1"}


def children(pid: int) -> dict[str, int]:
    """The daemons that a pagepool process has started, by name."""
    pids = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    commands = {number: Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0") for number in pids}
    return {words[3].decode(): number for number, words in commands.items() if len(words) > 3}


def gone(pid: int, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pp-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@dataclass
class Up:
    """A running `pagepool up`."""

    process: subprocess.Popen[str]
    folder: Path
    ready: list[str]

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *words, "--socket-dir", str(self.folder)]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def start_up(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "up", "--socket-dir", str(folder), "--pool-bytes", "64MiB", "--dtype", "float32", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Up]:
    process = start_up(folder)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "Ctrl-C stops both.\n":
            break
    else:
        pytest.fail(f"{lines} {process.communicate()}")
    yield Up(process, folder, lines)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_up_says_what_runs_and_what_to_type_next(up: Up) -> None:
    text = "".join(up.ready)
    assert re.search(r"pagepool is ready after [\d.]+ s: smollm2 \(LlamaForCausalLM, float32\) over \d+ blocks", text)
    for words in ("chat", "generate --chat", "blocks --watch"):
        assert f"pagepool {words} --socket-dir {up.folder}" in text
    assert f"unix:{up.folder}/inferd.sock" in text


def test_generate_streams_a_sensible_answer(up: Up) -> None:
    done = up.run("generate", "What is the capital of France?", "--chat", "--temperature", "0", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "prompt tokens" in done.stderr


def test_generate_prints_events_as_json_and_finds_its_prefix_again(up: Up) -> None:
    words = ["generate", "one two three four five six seven eight nine ten " * 4, "--json", "--max-tokens", "4"]
    first, second = (up.run(*words, "--temperature", "0") for _ in range(2))
    events = [[json.loads(line) for line in done.stdout.splitlines()] for done in (first, second)]
    texts = ["".join(event["tokens"].get("text", "") for event in each if "tokens" in event) for each in events]
    assert texts[0] == texts[1] != ""
    assert events[0][-1]["finished"]["reason"] == "FINISH_REASON_MAX_TOKENS"
    assert events[1][-1]["finished"]["usage"]["cached_tokens"] >= 16


def test_ctrl_c_frees_the_blocks_of_an_abandoned_answer(up: Up) -> None:
    words = ["generate", "Count to ten thousand.", "--chat", "--max-tokens", "1200", "--socket-dir", str(up.folder)]
    with (
        PoolClient(f"unix:{up.folder}/memd.sock") as memd,
        subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.read(1), process.communicate()
        assert memd.pool().usage.held_blocks > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        deadline = time.monotonic() + 10
        while memd.pool().usage.held_blocks:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_chat_sends_the_whole_conversation_and_memd_finds_what_it_has_seen(up: Up) -> None:
    text = "What is the capital of France?\nAnd of Spain?\n"
    done = up.run("chat", "--temperature", "0", "--max-tokens", "24", text=text)
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"(\d+) prompt tokens, (\d+) of them cached; (\d+) generated", done.stderr)
    assert int(second[0]) > int(first[0]) + int(first[2])
    assert int(second[1]) >= int(first[0]) // 16 * 16
    assert len(done.stdout.split()) > 8


def test_a_wrong_value_is_refused_by_name(up: Up) -> None:
    done = up.run("generate", "hi", "--top-p", "1.5")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"^pagepool: .*top_p is 1\.5", done.stderr)


def test_blocks_shows_what_the_answers_left_in_the_pool(up: Up) -> None:
    with InferenceClient(f"unix:{up.folder}/inferd.sock") as inferd:
        inferd.generate("a b c d e f g h i j k l m n o p q r s t u v w x y z", max_tokens=1).text()
    done = up.run("blocks")
    assert done.returncode == 0, done.stderr
    assert "░" in done.stdout
    assert "cached" in done.stdout


def test_pin_keeps_what_prompts_begin_with_and_lets_it_go(up: Up) -> None:
    text = "You are a careful assistant who answers in one short sentence, and never guesses. " * 3
    words = ["generate", f"{text}Hello!", "--max-tokens", "1"]
    missing = up.run("pin", text)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "generate with it once" in missing.stderr
    assert up.run(*words).returncode == 0
    pinned = up.run("pin", "-", "--ttl", "60", text=text)
    assert pinned.returncode == 0, pinned.stderr
    size = re.match(r"(\d+) of (\d+) tokens, in (\d+) blocks, pinned until 20", pinned.stdout)
    assert size, pinned.stdout
    with PoolClient(f"unix:{up.folder}/memd.sock") as memd:
        assert memd.pool().usage.pinned_blocks == int(size[3]) == int(size[2]) // 16 > 2
        kept = up.run("pin", text, "--priority", "7")
        assert "kept with priority 7 until" in kept.stdout
        assert {block.priority for block in memd.blocks()} == {0, 7}
        assert "may be evicted like all others" in up.run("pin", text, "--off").stdout
        assert {block.priority for block in memd.blocks()} == {0}


def test_a_second_up_in_the_same_place_is_refused(up: Up) -> None:
    process = start_up(up.folder)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.search(r"pagepool: memd runs at unix:.* already", err)
    assert up.process.poll() is None


def test_stopping_up_stops_both_daemons_in_order(up: Up) -> None:
    daemons = children(up.process.pid)
    assert set(daemons) == {"memd", "inferd"}
    up.process.send_signal(signal.SIGINT)
    _, err = up.process.communicate(timeout=60)
    assert up.process.returncode == 0, err
    assert "memd and inferd have stopped" in err
    assert all(gone(pid, 0) for pid in daemons.values())
    assert not list(up.folder.glob("*.sock"))


def test_the_death_of_a_daemon_stops_the_other_and_is_named(folder: Path) -> None:
    process = start_up(folder)
    deadline = time.monotonic() + 30
    while set(children(process.pid)) != {"memd", "inferd"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    daemons = children(process.pid)
    os.kill(daemons["memd"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "pagepool: memd has ended with signal 9" in err
    assert str(folder / "memd.log") in err
    assert gone(daemons["inferd"])


def test_a_model_that_is_not_there_is_inferds_own_word(folder: Path) -> None:
    process = start_up(folder, "--model", "/nowhere/at/all")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(r"pagepool: inferd has ended with exit code 2: .*/nowhere/at/all", err)
    assert not list(folder.glob("*.sock"))
