"""Blocks that are merged under a running engine, and the fence of an engine that was given up."""

from __future__ import annotations

import pytest

from inferd.core.messages import Sampling
from inferd.core.ports import Remap, Step
from pagepool.errors import Reason
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import MemoryPool, continuation

SIZE = 8
GREEDY = Sampling(temperature=0)
PROMPT = [5, 9, 2, 7] * 5
FULL = 24


class Watch:
    """What memd and the engine say to each other about blocks that move."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.heard, self.acknowledged = rig, list[Remap](), list[int]()
        self.most_quarantined = 0
        check, poll = rig.session.on_step, rig.session.poll

        def on_step(step: Step) -> None:
            check(step)
            if step.acknowledged:
                self.acknowledge(step.acknowledged)

        def poll_and_note() -> list[object]:
            events = poll()
            self.heard += [event for event in events if isinstance(event, Remap)]
            return events  # type: ignore[return-value]

        rig.session.on_step = on_step
        rig.session.poll = poll_and_note  # type: ignore[method-assign,assignment]

    def acknowledge(self, sequence: int) -> None:
        """No step in flight reads what is said to be read no more."""
        self.acknowledged.append(sequence)
        pool = self.rig.pool
        self.most_quarantined = max(self.most_quarantined, pool.usage().quarantined)
        done = [one.old_block_id for one in self.heard if one.sequence <= sequence]
        there = [block.entry for block in pool.blocks_between(0, 1 << 20, None, 0.0) if block.block_id in done]
        flying = {entry for each in self.rig.device.in_flight for table in each.step.tables for entry in table}
        assert not flying & set(there)


def blocks_of(rig: Rig) -> list[list[int]]:
    return [list(table.blocks.block_ids) for table in rig.pool.tables_after(0, 99, 0.0)]


@pytest.mark.parametrize("depth", [1, 2])
def test_two_requests_that_compute_the_same_end_up_with_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr(Rig, "depth", depth)
    rig = Rig()
    rig.turn()
    watch = Watch(rig)
    for request in (1, 2):
        rig.submit(request, PROMPT, 100)
    while len(rig.generated(1)) < FULL or len(rig.generated(2)) < FULL:
        rig.turn()
        rig.pool.check()
    rig.turn(2)
    first, second = blocks_of(rig)
    sealed = min(table.num_tokens for table in rig.pool.tables_after(0, 99, 0.0)) // SIZE
    assert sealed >= (len(PROMPT) + FULL) // SIZE - 1
    assert first[:sealed] == second[:sealed]
    distinct = len(set(first) | set(second))
    assert distinct <= sealed + 2 * 2
    reserve = len(rig.pool._state.leases[rig.session.lease_id].references)
    assert (rig.pool.usage().held, rig.pool.usage().quarantined) == (distinct + reserve, 0)
    assert len(watch.heard) == rig.pool.counters.merged_blocks > 0
    assert watch.most_quarantined > 0
    rig.settle()
    assert rig.generated(1) == rig.generated(2) == continuation(PROMPT, 100, GREEDY)
    assert watch.acknowledged == sorted(set(watch.acknowledged))
    rig.check_nothing_held()


def test_an_idle_engine_acknowledges_at_once() -> None:
    rig = Rig()
    rig.turn()
    sent: list[int] = []
    rig.session.on_step = lambda step: sent.append(step.acknowledged)
    lease = rig.pool._state.leases[rig.session.lease_id]
    lease.last_remap = 4
    rig.session.say(Remap(4, 99, 0, 1000, 1001, 8))
    rig.turn()
    rig.settle()
    assert sent == [4]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_fenced_engine_has_computed_is_dropped(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr(Rig, "depth", depth)
    rig = Rig()
    rig.submit(1, PROMPT, 100)
    while len(rig.generated(1)) < 3:
        rig.turn()
    rig.submit(2, PROMPT, 4)
    fenced: MemoryPool = rig.session
    fenced.fenced = True
    seen = rig.generated(1)
    fenced.submit = lambda step: None  # type: ignore[method-assign]  # memd hears nothing of a lost lease
    rig.turn()
    assert rig.generated(1) == seen
    assert (rig.failed(1).reason, "ended the lease" in rig.failed(1).message) == (Reason.POOL_LOST, True)
    assert rig.closed == [fenced]
    rig.turn()
    other = [1, *PROMPT]  # what the fake model has written is gone with it
    rig.submit(3, other, 4)
    rig.settle()
    assert rig.session is not fenced
    assert rig.generated(3) == continuation(other, 4, GREEDY)
