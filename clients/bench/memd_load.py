"""memd alone: unary calls, the Attach stream, and resident memory, measured from another process."""

from __future__ import annotations

import statistics
import time

import daemons
from memory import POOL_FILES, proportional_mb

from pagekernels.layout import Format, LayerShape, PagedLayout
from pagepool.pool_values import Commit, Grant, Step, TableRequest
from pagepool_client import Attachment, PoolClient, PoolSession
from pagepool_client.wire import geometry_message

NUM_BLOCKS = 100_000
BATCH = 1_000
TABLES = 16
ROUNDS = 200
STEPS = 10_000
WINDOW = 256  # steps in flight
LOOK_S = 0.005  # how often the client looks for answers: rarely, so that its looking costs nothing
TINY = PagedLayout(16, (LayerShape(1, 1, 1),), Format.F32)


def unary(client: PoolClient) -> tuple[float, float]:
    """Median ms of AllocateBlocks and of FreeBlocks, 1,000 blocks each."""
    times = []
    with client.lease(holder="bench") as lease:
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            blocks = lease.allocate(BATCH).block_ids
            middle = time.perf_counter()
            lease.free(blocks)
            times.append((middle - begin, time.perf_counter() - middle))
    allocate, free = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return allocate, free


def steps_per_second(session: PoolSession) -> float:
    """Answered steps a second: 16 tables, one committed token each a step, pipelined."""
    num_blocks = -(-STEPS // TINY.block_size)
    session.submit(Step(creates=[TableRequest(ref, (), num_blocks) for ref in range(TABLES)]))
    tables: list[int] = []
    while len(tables) < TABLES:
        session.wait(1.0)
        tables += [event.table_id for event in session.poll() if isinstance(event, Grant)]
    first, begin = session.steps_sent, time.perf_counter()
    for number in range(STEPS):
        while session.steps_sent - session.steps_answered >= WINDOW:
            time.sleep(LOOK_S)
        session.submit(Step(commits=[Commit(table, (number,)) for table in tables]))
    while session.steps_answered < first + STEPS:
        time.sleep(LOOK_S)
    seconds = time.perf_counter() - begin
    session.submit(Step(releases=tables))
    return STEPS / seconds


def fill(session: PoolSession) -> None:
    """Hold all blocks, half of them sealed in tables."""
    half = NUM_BLOCKS // 2
    tokens = half * TINY.block_size
    session.submit(Step(creates=[TableRequest(0, (), half, no_match=True)]))
    session.submit(Step(creates=[TableRequest(1, (), NUM_BLOCKS - half, no_match=True)]))
    tables: list[int] = []
    while len(tables) < 2:
        session.wait(1.0)
        tables += [event.table_id for event in session.poll() if isinstance(event, Grant)]
    for start in range(0, tokens, 32_768):
        session.submit(Step(commits=[Commit(tables[0], range(start, min(start + 32_768, tokens)))]))
    while session.steps_answered < session.steps_sent:
        time.sleep(0.01)


def report() -> None:
    """Print memd's figures beside their bounds."""
    geometry = geometry_message(TINY, bytes(32), "tiny")
    pool_bytes = str(NUM_BLOCKS * TINY.block_bytes)
    with (
        daemons.folder() as place,
        daemons.memd(place, "--pool-bytes", pool_bytes) as (client, child),
        PoolSession(Attachment(client.target, "bench", geometry)) as session,
    ):
        allocate, free = unary(client)
        print(f"AllocateBlocks, 1,000 blocks   p50 {allocate:6.2f} ms     (bound: under 5)")
        print(f"FreeBlocks, 1,000 blocks       p50 {free:6.2f} ms     (bound: under 5)")
        print(f"Attach steps, 16 commits each  {steps_per_second(session):9,.0f} /s     (bound: at least 2,000)")
        fill(session)
        held = client.pool().usage.held_blocks
        resident = proportional_mb([child.pid], POOL_FILES)
        print(f"memory beside the pool, {held:,} blocks held {resident:6.1f} MB     (bound: under 120)")
