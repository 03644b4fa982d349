"""Streams that their clients give up, at any point and in every way: all of their blocks come back, at once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import pytest

from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.inferd.v1.generation_service_pb2_grpc import GenerationServiceStub
from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from tests.e2e.conftest import Memd
from tests.e2e.workers import TinyHouse, Worker, greedy, within

AT_ONCE = 96
"""Streams at a time: half as many again as a worker runs, so that a third of them wait in the queue."""
RETURN_S = 1.0


def held(memd: Memd) -> tuple[int, int, int]:
    """Blocks in use, blocks that are neither free nor cached, and tables."""
    usage = memd.usage()
    tables = memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables
    return usage.held_blocks, usage.total_blocks - usage.free_blocks - usage.cached_blocks, len(tables)


class Crowd:
    """Clients that each begin a stream and give it up; `seen` counts how, and how far it had come."""

    def __init__(self, target: str, seed: int) -> None:
        self.target = target
        self.chance = random.Random(seed)
        self.seen: Counter[str] = Counter()

    async def give_up(self, count: int) -> None:
        """So many streams, several on a channel."""
        left, room = count, asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while left:
                size = min(left, self.chance.randint(1, 6))
                left -= size
                for _ in range(size):
                    await room.acquire()
                group.create_task(self._channel(size, room))

    async def _channel(self, size: int, room: asyncio.Semaphore) -> None:
        try:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(self.target, options=options) as channel:
                stub = GenerationServiceStub(channel)
                streams = [asyncio.create_task(self._stream(stub)) for _ in range(size)]
                if self.chance.random() < 0.3:  # closes the channel under them
                    await asyncio.sleep(self._delay_s())
                    await channel.close()
                    self.seen["channel closed"] += 1
                await asyncio.gather(*streams)
        finally:
            for _ in range(size):
                room.release()

    async def _stream(self, stub: Any) -> None:
        chance = self.chance
        # Prompts that begin alike, so that what is given up is shared, and some of several steps of prefill.
        prompt = [7] * chance.choice([0, 40, 400]) + chance.choices(range(40_000), k=chance.choice([3, 100, 1400]))
        by_deadline = chance.random() < 0.3
        call = stub.Generate(
            greedy(prompt, 2000, ignore_eos=True, priority=chance.choice([0, 0, 5])),
            timeout=self._delay_s() if by_deadline else 60,
        )
        events, come, stop_after = [], 0, chance.choice([0, 0, 1, 2, 2, 3, 50])  # the start, then tokens
        try:
            if not by_deadline and not stop_after:
                await asyncio.sleep(self._delay_s())
                call.cancel()
            async for event in call:
                events.append(event.WhichOneof("event"))
                come += len(event.tokens.token_ids) if event.HasField("tokens") else 1
                if not by_deadline and come >= stop_after:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            self.seen[error.code().name] += 1
        except (asyncio.CancelledError, grpc.aio.UsageError):
            self.seen["CANCELLED"] += 1
        self.seen[events[-1] if events else "nothing"] += 1

    def _delay_s(self) -> float:
        return self.chance.choice([0.0, 0.01, 0.1, 0.5, 1.5]) * self.chance.random()


async def check_all_comes_back(memd: Memd, worker: Worker, count: int, seed: int) -> None:
    start = (0, 0, 0)
    within(5, lambda: held(memd) == start)
    probe = greedy([5, 6, 7], 12, ignore_eos=True, cache_salt=b"probe")
    expected = worker.generate(probe).token_ids
    crowd = Crowd(worker.target, seed)
    await crowd.give_up(count)
    within(RETURN_S, lambda: held(memd) == start)
    assert crowd.seen["CANCELLED"] > 0.4 * count, crowd.seen
    assert crowd.seen["DEADLINE_EXCEEDED"] > 0.05 * count, crowd.seen
    for how in ("channel closed", "nothing", "started", "tokens"):
        assert crowd.seen[how] > 0.02 * count, crowd.seen
    assert set(crowd.seen) <= {*("CANCELLED", "DEADLINE_EXCEEDED", "channel closed", "nothing", "started", "tokens")}
    assert worker.generate(probe).token_ids == expected
    model = within(5, lambda: at_rest(worker))
    assert model.pool_epoch == memd.pool().GetPool(memd_pb.GetPoolRequest()).pool.epoch, "it never lost its lease"


def at_rest(worker: Worker) -> pb.GetModelResponse | None:
    model = worker.stub().GetModel(pb.GetModelRequest())
    return model if (model.waiting_requests, model.running_requests) == (0, 0) else None


async def test_streams_given_up_at_random_points_leave_no_block_behind(tiny_house: TinyHouse) -> None:
    await check_all_comes_back(tiny_house.memd, tiny_house.one, 240, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
async def test_2000_streams_given_up_at_random_points_leave_no_block_behind(tiny_house: TinyHouse, seed: int) -> None:
    await check_all_comes_back(tiny_house.memd, tiny_house.one, 2000, seed)
