"""A stream breaks under an engine, and the worker takes its lease back: what it has not read comes again, in order."""

from __future__ import annotations

import pytest

from inferd.core.messages import Sampling
from inferd.core.ports import Grant, Victim
from tests.cpu.core_worker import Worker, grows, table
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation

PROMPT = [5 * at % 200 for at in range(20)]


def unread_grant() -> tuple[Rig, Worker, int]:
    """An engine that does not read its grant, beside another worker's more urgent table, which has the other blocks."""
    rig = Rig(num_blocks=8)
    urgent = Worker(rig.pool, "urgent")
    elder = table(urgent, 0.0, 4, priority=5)
    rig.turn()
    rig.session.held = True
    rig.submit(1, PROMPT, 12)
    rig.turn()
    return rig, urgent, elder


@pytest.mark.parametrize("depth", [1, 2])
def test_a_table_that_yields_before_its_grant_is_read_gives_its_blocks_up_all_the_same(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rig, "depth", depth)
    rig, urgent, elder = unread_grant()
    assert not grows(urgent, elder, 4)
    rig.session.break_stream()
    rig.session.held = False
    rig.session.reclaim()
    rig.turn(8)
    assert grows(urgent, elder, 4), "the engine has not heard that its table has to yield"
    assert rig.generated(1) == []
    urgent.step(releases=[elder])
    rig.settle()
    assert rig.generated(1) == continuation(PROMPT, 12, Sampling(temperature=0))
    assert rig.finished(1).used.preemptions == 1
    rig.pool.check()


def test_what_is_told_comes_before_the_answers_that_are_repeated_and_after_them() -> None:
    rig, urgent, elder = unread_grant()
    grows(urgent, elder, 4)
    rig.session.break_stream()
    rig.session.reclaim()
    told = [each for each in rig.session.poll() if isinstance(each, Grant | Victim)]
    tables = [each.table_id for each in told]
    assert [type(each) for each in told if each.table_id] == [Victim, Grant, Victim], told
    assert len(set(tables) - {0}) == 1
