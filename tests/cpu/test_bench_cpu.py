"""How make bench-cpu counts memory, finds processes and holds figures against bounds."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

# The benchmarks are programs beside one another; at the end, so that none of them hides a module of that name.
sys.path.append(str(Path(__file__).parents[2] / "clients" / "bench"))

import memory
from cpu_peers import PeerEndedError, last_words, vllm_peer

import cpu

SMAPS = """\
55d0c0a00000-55d0c0a21000 r-xp 00000000 08:01 1835 /usr/bin/python3.11
Rss:                 132 kB
Pss:                  33 kB
Pss_Dirty:            20 kB
SwapPss:               7 kB
VmFlags: rd ex mr
7f0000000000-7f0080000000 rw-s 00000000 00:19 12 /dev/shm/pagepool-0-abc (deleted)
Pss:             1000000 kB
7f00a0000000-7f00a0100000 rw-p 00000000 00:00 0
Pss:                 400 kB
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0 [stack]
Pss:                  16 kB
"""


def test_pss_is_summed_without_the_mappings_left_out() -> None:
    assert memory.proportional_kb(SMAPS, "pagepool-0-") == 33 + 400 + 16
    assert memory.proportional_kb(SMAPS) == 33 + 1_000_000 + 400 + 16
    assert memory.proportional_kb("") == 0


def test_pss_of_several_processes_is_that_of_each_together() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            alone = [memory.proportional_mb([pid]) for pid in (os.getpid(), child.pid)]
            together = memory.proportional_mb([os.getpid(), child.pid])
        finally:
            child.kill()
    assert min(alone) > 0
    assert together == pytest.approx(sum(alone), rel=0.05)


def test_a_tree_is_a_process_and_all_below_it() -> None:
    assert memory.descendants(5, {5: 1, 9: 5, 3: 9, 4: 9, 7: 1, 8: 7}) == [5, 9, 3, 4]
    assert memory.parent_of("42 (a (strange) name) S 17 42 42 0 -1") == 17
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        below = memory.tree(child.pid)
        for pid in reversed(below):
            os.kill(pid, 9)
    assert len(below) == 2
    assert below[0] == child.pid


def test_only_pages_in_memory_count() -> None:
    assert memory.present_pages(array("Q", [0, 1 << 63, (1 << 63) | 5, 1 << 62, 7]).tobytes()) == 2
    page = memory.PAGE_BYTES
    with mmap.mmap(-1, 64 * page) as area:
        held = (ctypes.c_char * len(area)).from_buffer(area)
        address = ctypes.addressof(held)
        before = memory.resident_mb(os.getpid(), [(address, 64 * page)])
        area[3 * page] = 1
        area[9 * page] = 1
        after = memory.resident_mb(os.getpid(), [(address, 8 * page), (address + 8 * page, 56 * page)])
        del held
    assert before == 0
    assert after * 2**20 == 2 * page


def test_the_reason_is_the_first_error_named_or_the_last_line() -> None:
    log = "INFO starting\nValueError: no room for KV\nTraceback\nRuntimeError: Engine core initialization failed.\n"
    assert last_words(log) == "ValueError: no room for KV"
    assert last_words("one\n\nIllegal instruction (core dumped)\n\n") == "Illegal instruction (core dumped)"
    assert last_words(" \n") == "it said nothing"


def test_a_peer_that_cannot_start_is_said_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with vllm_peer(tmp_path, "no-folder", "float32", "") as peer:
        assert peer is None
    assert "not measured: --vllm-python names no Python" in capsys.readouterr().out
    failing = f"{sys.executable} -c 'raise SystemExit(\"ImportError: no AVX2 in this build\")'"
    with vllm_peer(tmp_path, "no-folder", "float32", failing) as peer:
        assert peer is None
    assert "not measured: ImportError: no AVX2 in this build" in capsys.readouterr().out


def test_a_peer_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    program = (
        'import sys; print(\'{\\"vllm\\": \\"0\\", \\"start_s\\": 1}\', flush=True); input(); sys.exit(\'KeyError: 3\')'
    )
    with vllm_peer(tmp_path, "no-folder", "float32", f'{sys.executable} -c "{program}"') as peer:
        assert peer
        with pytest.raises(PeerEndedError, match="KeyError: 3"):
            peer.seconds([[1]], 1)


def test_a_missed_bound_is_said_and_remembered() -> None:
    bounds = cpu.Bounds()
    assert bounds.least("one", 1.0, 1.0) == "(bound: at least 1.0; met)"
    assert bounds.most("memory", 0.5, 0.5) == "(bound: at most 0.5; met)"
    assert bounds.missed == []
    assert bounds.least("one", 0.99, 1.0) == "(bound: at least 1.0; MISSED)"
    assert bounds.most("memory", 0.51, 0.5) == "(bound: at most 0.5; MISSED)"
    assert bounds.missed == ["one", "memory"]
