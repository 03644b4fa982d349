"""memd alone: unary calls, the Attach stream, and resident memory, measured from another process."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from pagekernels.layout import LayerShape
from pagepool.pool_values import Commit, Step, TableRequest
from pagepool_client import PoolClient

NUM_BLOCKS = 100_000
BATCH = 1_000
TINY = LayerShape(num_kv_heads=1, head_dim_k=1, head_dim_v=1)


def resident_mb(pid: int, mapped: str) -> float:
    """PSS of a process in MB, the mappings of files whose path contains `mapped` left out."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            counts = len(head) < 6 or mapped not in head[5]
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


def p50_ms(samples: list[float]) -> float:
    """Median of seconds, in ms."""
    return statistics.median(samples) * 1e3
