"""A pool much smaller than what its requests need at once: they yield, wait, resume, and lose nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import pytest

from inferd.core.limits import Limits
from inferd.core.messages import Sampling
from memd.core.pool import Pool
from memd.core.values import BlockState
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation, make_pool

GREEDY = Sampling(temperature=0)
BLOCK = 16


@dataclass(frozen=True)
class Request:
    """One of a load: its prompt, and how many tokens it generates."""

    number: int
    prompt: list[int]
    most: int
    priority: int = 0

    @property
    def blocks(self) -> int:
        return -(-(len(self.prompt) + self.most - 1) // BLOCK)


def load(count: int, shortest: int, longest: int, seed: int = 1, priorities: Sequence[int] = (0,)) -> list[Request]:
    """Requests of mixed lengths in all; prompts share nothing."""
    draw = random.Random(seed)
    requests = []
    for number in range(1, count + 1):
        length = draw.randint(shortest, longest)
        prompt = draw.randint(length // 4, length // 2)
        tokens = [number % 211, *(draw.randrange(210) for _ in range(prompt - 1))]
        requests.append(Request(number, tokens, length - prompt, priorities[number % len(priorities)]))
    return requests


def utilisation(pool: Pool) -> float | None:
    """Tokens stored over the slots of the distinct blocks that tables hold; None while none holds any."""
    blocks = pool.blocks_between(0, 1 << 20, BlockState.HELD, 0.0)
    held = [view for view in blocks if any(holder.table_id for holder in view.holders)]
    return sum(view.num_tokens for view in held) / (len(held) * BLOCK) if held else None


def serve(pool: Pool, rigs: Sequence[Rig], requests: Sequence[Request]) -> list[float]:
    """Send request n to rig n, run all to the end; how well the blocks were used, step by step."""
    for request in requests:
        rig = rigs[request.number % len(rigs)]
        rig.submit(request.number, request.prompt, request.most, priority=request.priority)
    used: list[float] = []
    for turn in range(40_000):
        resting = [rig.engine.turn() for rig in rigs]
        if turn % 8 == 0 and (now := utilisation(pool)) is not None:
            used.append(now)
        ended = (
            sum(rig.end(request.number) is not None for request in requests for rig in rigs) if turn % 64 == 0 else 0
        )
        if ended == len(requests):
            return used
        if all(rest for rest in resting) and not any(rig.mailbox.signal.is_set() for rig in rigs):
            for rig in rigs:
                rig.now += 1.0
            pool.tick(rigs[0].now)
    raise AssertionError(
        f"not over; held: {pool.usage()}, waiting: {[len(rig.engine._scheduler.waiting) for rig in rigs]}"
    )


def check(rigs: Sequence[Rig], requests: Sequence[Request]) -> dict[int, int]:
    """All have ended as they would have alone; how often each was preempted."""
    preemptions = {}
    for request in requests:
        rig = rigs[request.number % len(rigs)]
        assert rig.generated(request.number) == continuation(request.prompt, request.most, GREEDY), request.number
        preemptions[request.number] = rig.finished(request.number).used.preemptions
    for rig in rigs:
        rig.settle()  # memd hears of the last release in the turn after it
        rig.pool.check()
    usage = rigs[0].pool.usage()
    assert (usage.quarantined, rigs[0].pool.num_tables) == (0, 0)
    return preemptions


def small_pool(requests: Sequence[Request], part: int = 8) -> Pool:
    """One that holds a part of what the requests need together, and each of them alone."""
    working_set = sum(request.blocks for request in requests)
    return make_pool(max(working_set // part, *(request.blocks for request in requests)), BLOCK)


def run(requests: Sequence[Request], workers: int, part: int = 8) -> tuple[list[Rig], list[float], dict[int, int]]:
    pool = small_pool(requests, part)
    rigs = [Rig(pool=pool, limits=Limits(max_batch_tokens=256, max_num_seqs=64)) for _ in range(workers)]
    for rig in rigs:
        rig.turn()
    used = serve(pool, rigs, requests)
    return rigs, used, check(rigs, requests)


def report(name: str, rigs: Sequence[Rig], used: Sequence[float], preemptions: dict[int, int]) -> None:
    counters = [rig.engine._tally.counters for rig in rigs]
    print(
        f"{name}: {sum(preemptions.values())} preemptions, at most {max(preemptions.values())} of one request; "
        f"{sum(each.recomputed_tokens for each in counters)} tokens recomputed; "
        f"{sum(each.starved_steps for each in counters)} starved of {sum(each.steps for each in counters)} steps; "
        f"utilisation {mean(used):.3f}"
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pool_of_an_eighth_of_the_working_set_serves_all(workers: int) -> None:
    requests = load(24, 32, 200, priorities=(0,) if workers == 1 else (0, 3, -1))
    rigs, used, preemptions = run(requests, workers, part=5)
    report(f"24 requests, {workers} workers", rigs, used, preemptions)
    assert sum(preemptions.values()) > 0, "the pool was never short"
    assert max(preemptions.values()) <= 5


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_64_requests_of_mixed_lengths_in_an_eighth_of_their_working_set(workers: int, seed: int) -> None:
    requests = load(64, 128, 1024, seed, (0,) if workers == 1 else (0, 3, -1, 3, 1))
    rigs, used, preemptions = run(requests, workers)
    report(f"64 requests, {workers} workers, seed {seed}", rigs, used, preemptions)
    assert max(preemptions.values()) <= 5
    assert mean(used) > 0.95
