"""Rules about tables that gave up their blocks to more urgent ones. Pure."""

from __future__ import annotations

import math

from pagepool_client.diagnosis.compressing import compress_under_pressure
from pagepool_client.diagnosis.findings import Case, Finding, Remedy
from pagepool_client.diagnosis.memory import GROWTH, HEADROOM
from pagepool_client.diagnosis.sizing import more_below, more_blocks
from pagepool_client.diagnosis.words import count, span


def suspended_tables(case: Case) -> Finding | None:
    """Tables that wait without blocks, in the middle of their requests."""
    size, usage = case.seen.pool.block_size, case.seen.pool.usage
    tables = [table for table in case.seen.tables if table.suspended]
    if not tables:
        return None
    running = len(case.seen.tables) - len(tables)
    tokens = sum(table.num_tokens for table in tables)
    blocks = sum(-(-table.num_tokens // size) for table in tables)
    longest = max(table.idle_time.ToNanoseconds() / 1e9 for table in tables)
    needed = max(
        math.ceil(GROWTH * case.total),
        math.ceil((usage.held_blocks + usage.quarantined_blocks + usage.kept_blocks + blocks) / HEADROOM),
    )
    detail = (
        f"{count(len(tables), 'table')} with {count(tokens, 'token')} ({count(blocks, 'block')}) "
        f"{'waits' if len(tables) == 1 else 'wait'} without blocks, one for {span(longest)}, while "
        f"{count(running, 'table')} {'has' if running == 1 else 'have'} some: the pool was full, and the least urgent "
        "had to yield. What is evicted before they go on is computed again."
    )
    figures = {
        "suspended_tables": len(tables),
        "running_tables": running,
        "suspended_tokens": tokens,
        "needed_blocks": needed,
        "longest_wait_seconds": longest,
    }
    fewer = "so that fewer run at once, and none of them has to yield"
    at_once = Remedy("inferd", "--max-num-seqs", f"{max(running, 1)}", fewer)
    remedies = [*more_blocks(case.seen.pool, needed), at_once, *compress_under_pressure(case), *more_below(case)]
    title = "Requests had to give up their blocks"
    return Finding("suspended_tables", case.severity, title, detail, figures, remedies)
