"""make bench-static runs, and its two sides are what they say they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "clients" / "bench" / "static.py"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH), *flags], capture_output=True, text=True, check=False)


def test_both_sides_say_the_same_and_the_paged_side_holds_more(tiny_model: Path) -> None:
    done = run("--smoke", "--model", str(tiny_model), "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    size = re.search(r"2 slots of 128 tokens\n    or (\d+) blocks of 16; 128 tokens a step", done.stdout)
    assert size
    assert int(size[1]) <= 2 * 128 // 16, "the pool has no more slots than the contiguous cache"
    assert "the same tokens on both sides: 16 of 16" in done.stdout
    stored = re.search(r"tokens stored / slots reserved +([\d.]+)% +([\d.]+)%", done.stdout)
    most = re.search(r"requests at once, most +(\d+) +(\d+)", done.stdout)
    assert stored
    assert most
    assert 0 < float(stored[1]) < 100
    assert int(most[1]) == 2
    assert int(most[2]) <= 16


def test_settings_that_cannot_be_are_refused_by_flag_value_and_limit() -> None:
    done = run("--length", "512")
    assert done.returncode == 2
    assert "--length 512: mixed has requests of 1024 tokens; give at least that" in done.stderr
    done = run("--budget", "50")
    assert done.returncode == 2
    assert "--budget 50: a step needs a token for each of --slots and --max-num-seqs" in done.stderr
