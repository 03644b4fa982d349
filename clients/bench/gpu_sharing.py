"""What two workers on one pool hold in common: blocks, by memd's counters, and GPU memory, by NVML."""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

from pagepool_client import InferenceClient, PoolClient

NEW = 256
WAIT_S = 60.0


def used_mb() -> float:
    """MB in use on the first GPU as NVML says, by whatever process; NaN where there is none."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return math.nan


def _holders(memd: PoolClient, tokens: int, count: int) -> list[list[int]]:
    """The packed entries of `count` tables that hold at least `tokens` tokens, waited for."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        tables = [list(table.entries) for table in memd.tables() if table.num_tokens >= tokens]
        if len(tables) >= count:
            return tables
        time.sleep(0.002)
    raise SystemExit(f"no {count} tables with {tokens} tokens within {WAIT_S:.0f} s")


def report_sharing(memd: PoolClient, clients: Sequence[InferenceClient], prompt: Sequence[int]) -> None:
    """Both workers continue one prompt at once; print which blocks their tables name, and what was allocated for it.

    An entry of a table is the physical place of a block. Blocks of equal entries are one piece of memory, so nothing
    was copied from one worker to the other.
    """
    options = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}
    streams = [
        threading.Thread(target=lambda client=client: client.generate(token_ids=prompt, **options).text())
        for client in clients
    ]
    allocated = [memd.pool().counters.allocated_blocks]
    tables: list[list[int]] = []
    for number, stream in enumerate(streams, 1):
        stream.start()
        tables = _holders(memd, len(prompt), number)
        allocated.append(memd.pool().counters.allocated_blocks)
    for stream in streams:
        stream.join()
    size = memd.pool().block_size
    shared = sum(a == b for a, b in zip(*tables, strict=False))  # one may have grown further by now
    first, second = (b - a for a, b in pairwise(allocated))
    full, own = (len(prompt) - 1) // size, -(-(NEW + len(prompt)) // size) - (len(prompt) - 1) // size
    miss = "" if shared >= full and second <= own else "; MISSED"
    print(f"blocks of {len(prompt)} + {NEW} tokens: the first worker took {first}, the second {second} more")
    print(
        f"    physical blocks in both tables: {shared}   (bound: at least {full}, and at most {own} taken{miss})",
        flush=True,
    )


def report_memory(memd: PoolClient, before: float, one: float, two: float) -> None:
    """MB in use before anything of ours, with memd and one worker after its work, and with two after theirs."""
    pool = memd.pool().slab_bytes / 2**20
    # Another process that counted the pool again would add as much as the first one and memd together.
    counted = math.isnan(two) or two - one < one - before - pool / 2
    miss = "" if counted else "; MISSED"
    print(f"GPU memory in use (NVML): {before:.0f} MB before, {one:.0f} with memd and one worker, {two:.0f} with two,")
    print(f"    the pool being {pool:.0f} of it   (bound: the pool counted once{miss})", flush=True)
