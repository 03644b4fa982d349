"""No livelock: whatever comes when on which worker, the most urgent request never has to yield, and all finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memd.core.operations import ReserveRequest, Suspend, Take
from memd.core.pool import Pool
from memd.core.values import Commit, Grant, TableRequest
from memd.core.victims import Victims
from memd.core.waiting import Asker, Waiting
from tests.cpu.core_worker import B, Worker, make_pool

TURN_S = 0.05


@dataclass
class Job:
    """A request for so many tokens, `known` of which were sampled, or are of the prompt."""

    number: int
    priority: int
    arrival: float
    length: int
    known: int
    table_id: int = 0
    is_running: bool = False
    must_yield: bool = False
    written: int = 0
    num_blocks: int = 0
    num_yields: int = 0

    @property
    def urgency(self) -> tuple[int, float]:
        return -self.priority, self.arrival

    def tokens(self, first: int, end: int) -> list[int]:
        return [self.number * 1000 + position for position in range(first, end)]


@dataclass
class Host:
    """One worker, which does as memd's protocol asks: each turn is one step of all its tables."""

    worker: Worker
    jobs: list[Job]
    reserve: list[int] = field(default_factory=list)

    def turn(self, now: float) -> list[Job]:
        """The jobs that are done."""
        words: dict[str, list[Any]] = {"commits": [], "releases": [], "operations": [], "frees": []}
        for job in [job for job in self.jobs if job.is_running]:
            self.advance(job, words)
        running = [job for job in self.jobs if job.is_running]
        starved = [job for job in running if job.num_blocks * B == job.written and not job.must_yield]
        reserves, creates = [], []
        if starved:
            first = min(starved, key=lambda job: job.urgency)
            reserves = [ReserveRequest(len(starved), 0, 1 << 40, first.table_id)]
        if not running:
            words["frees"], self.reserve = self.reserve, []
        if waiting := [job for job in self.jobs if not job.is_running and job.written < job.length]:
            creates = [self.request(min(waiting, key=lambda job: job.urgency), len(running))]
        outcome = self.worker.step(now, **words, creates=creates, reserves=reserves)
        for grant in outcome.grants:
            self.granted(grant)
        done = [job for job in self.jobs if job.written == job.length]
        self.jobs = [job for job in self.jobs if job not in done]
        return done

    def advance(self, job: Job, words: dict[str, list[Any]]) -> None:
        """It writes what it has room for, takes a block if there is one, or ends, or yields."""
        if job.num_blocks * B == job.written and self.reserve and not job.must_yield:
            words["operations"].append(Take(job.table_id, [self.reserve.pop()]))
            job.num_blocks += 1
            return
        end = min(job.num_blocks * B, job.length)
        if end > job.written:
            words["commits"].append(Commit(job.table_id, job.tokens(job.written, end)))
            job.written, job.known = end, max(job.known, min(end + 1, job.length))
        if job.written == job.length:
            words["releases"].append(job.table_id)
        elif job.must_yield:
            words["operations"].append(Suspend(job.table_id, job.tokens(job.written, job.known)))
            job.must_yield, job.num_blocks, job.num_yields = False, 0, job.num_yields + 1
        else:
            return
        job.is_running = False

    def request(self, job: Job, headroom: int) -> TableRequest:
        num_blocks = -(-min(job.known + 1, job.length) // B)
        if job.table_id:
            return TableRequest((), num_blocks, ref=job.number, headroom=headroom, resume_table_id=job.table_id)
        tokens = job.tokens(0, job.known)
        return TableRequest(
            tokens, num_blocks, priority=job.priority, arrival=job.arrival, ref=job.number, headroom=headroom
        )

    def granted(self, grant: Grant) -> None:
        ids = list(grant.blocks.block_ids)
        if grant.ref == 1 << 40:
            self.reserve += ids
            return
        (job,) = [job for job in self.jobs if job.number == grant.ref]
        job.is_running, job.table_id = True, grant.table_id
        job.num_blocks, job.written = len(ids), grant.cached_tokens


def tell(pool: Pool, hosts: Sequence[Host]) -> None:
    """Passes on who has to yield: never the most urgent of all that have come."""
    jobs = [job for host in hosts for job in host.jobs]
    for lease_id, table_id in pool.victims.take_news():
        (job,) = [job for job in jobs if job.table_id == table_id]
        assert [host.worker.lease for host in hosts if job in host.jobs] == [lease_id]
        assert job.urgency != min(job.urgency for job in jobs), f"the most urgent one is named: {job}"
        job.must_yield = True


def play(total: int, jobs: Sequence[Job], owners: Sequence[int], turns: Sequence[int]) -> list[Job]:
    """The jobs in the order in which they finished; all do."""
    finished: list[Job] = []
    pool, now = make_pool(total), 10.0
    hosts = [Host(Worker(pool, name), []) for name in ("one", "two", "three")]
    for job, owner in zip(jobs, owners, strict=True):
        hosts[owner].jobs.append(job)
    order = [*turns, *(turn % 3 for turn in range(600))]
    for turn in order:
        now += TURN_S
        finished += hosts[turn].turn(now)
        pool.tick(now)
        tell(pool, hosts)
        pool.waiting.take_news()
        if not any(host.jobs for host in hosts):
            break
    assert [host.jobs for host in hosts] == [[], [], []], "some never finish"
    pool.check()
    assert (pool.usage().held, pool.num_tables) == (sum(len(host.reserve) for host in hosts), 0)
    return finished


def made(priorities: Sequence[int], lengths: Sequence[int]) -> list[Job]:
    return [
        Job(number + 1, priority, 1.0 + number, length, max(length // 2, 1))
        for number, (priority, length) in enumerate(zip(priorities, lengths, strict=True))
    ]


@settings(max_examples=40, deadline=None)
@given(
    total=st.integers(6, 12),
    priorities=st.lists(st.sampled_from([0, 0, 0, 1, -1]), min_size=2, max_size=6),
    data=st.data(),
)
def test_the_most_urgent_never_yields_and_all_finish(total: int, priorities: list[int], data: st.DataObject) -> None:
    count = len(priorities)
    lengths = data.draw(st.lists(st.integers(1, total * B), min_size=count, max_size=count))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    turns = data.draw(st.lists(st.integers(0, 2), max_size=60))
    assert len(play(total, made(priorities, lengths), owners, turns)) == count


def test_under_constant_pressure_each_yields_a_few_times_only() -> None:
    """Twelve requests of half the pool each, on three workers."""
    jobs = made([0] * 12, [6 * B] * 12)
    finished = play(12, jobs, [number % 3 for number in range(12)], [])
    assert 1 <= max(job.num_yields for job in finished) <= 5


def place_of_a_large_one_among_small_ones() -> int:
    """After how many of 20 small requests on other workers a large one finishes, which came after the first two."""
    lengths = [5 * B, 5 * B, 11 * B, *[2 * B] * 20]
    finished = play(12, made([0] * 23, lengths), [1, 2, 0, *[1, 2] * 10], [])
    return [job.number for job in finished if job.number >= 3].index(3)


def test_a_large_request_is_not_passed_by_small_ones_for_ever() -> None:
    assert place_of_a_large_one_among_small_ones() <= 10


def test_claims_are_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "claimed_before", lambda self, asker: 0)
    assert place_of_a_large_one_among_small_ones() == 20, "all others go before it"


def test_the_order_of_urgency_is_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = Victims._candidates
    monkeypatch.setattr(Victims, "_candidates", lambda self, most: candidates(self, most)[::-1])

    def for_growth(self: Victims, asker: Asker, missing: int, now: float) -> None:
        self._name(self._choose(self._candidates(inf), missing, now)[0], now)

    monkeypatch.setattr(Victims, "for_growth", for_growth)
    with pytest.raises(AssertionError, match="most urgent"):
        play(12, made([0] * 12, [6 * B] * 12), [number % 3 for number in range(12)], [])
