"""The source of a copy in flight is its worker's until the step that copies is over, whoever lets go of it."""

from __future__ import annotations

import pytest

from inferd.core.block_tables import BlockTables
from inferd.core.limits import Limits
from inferd.core.messages import Cancel, Ending, Sampling, Tokens
from inferd.core.ports import BlockCopy, Commit, Grant, Victim
from pagepool.errors import Reason
from pagepool.pool_values import CopyOnWrite, Release, Take, Truncate
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation

PROMPT = [7 * index % 200 for index in range(37)]
"""Four full blocks of 8, and a part of one."""


@pytest.fixture(autouse=True)
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "depth", 2)


def sample(index: int) -> Sampling:
    return Sampling(seed=3, sample_index=index)


def in_flight(spare: int) -> Rig:
    """An engine with the step in flight in which the first of three samples copies the last block of their prompt.

    The others have no part in it: there was no more than so many blocks in reserve.
    """
    rig = Rig(num_blocks=64, limits=Limits(max_batch_tokens=64, max_num_seqs=8))

    def drain(message: object) -> None:
        if isinstance(message, Tokens):
            tables = rig.engine._scheduler._tables
            tables.give_back(tables.spare_blocks - spare)
            rig.session.held = True
            rig.on_send = lambda _: None

    rig.on_send = drain
    rig.submit(1, PROMPT, 12, n=3, sampling=sample(0))
    rig.turn()
    while not (rig.device.in_flight and rig.device.in_flight[-1].step.copies):
        rig.turn()
    assert [len(each.step.q_lens) for each in rig.device.in_flight] == [1]
    return rig


def entries_held(rig: Rig) -> set[int]:
    return {block.entry for block in rig.pool.blocks_between(0, 1 << 20, None, 0.0) if block.ref_count}


@pytest.mark.parametrize("fails", [False, True])
def test_those_that_share_the_source_let_go_of_it_under_a_copy_in_flight(fails: bool) -> None:
    """The rig asserts after each step message that what is in flight reads nothing that was given away."""
    rig = in_flight(spare=1)
    (copy,) = rig.device.in_flight[-1].step.copies
    for request in (2, 3):
        rig.mailbox.post(Cancel(request))
    rig.model.fail_next = RuntimeError("a kernel's secret") if fails else None
    rig.turn()
    assert [rig.finished(request).ending for request in (2, 3)] == [Ending.CANCELLED] * 2
    assert copy.source in entries_held(rig)
    rig.turn(2)
    assert copy.source not in entries_held(rig), "it is kept for no longer than that"
    rig.session.held = False
    rig.session.deliver()
    rig.settle()
    if fails:
        assert rig.failed(1).reason == Reason.ENGINE_FAILED
    else:
        assert rig.generated(1) == continuation(PROMPT, 12, sample(0))
    rig.check_nothing_held()


def test_a_sample_that_yields_under_the_copy_of_another_keeps_its_place_and_its_tokens() -> None:
    rig = in_flight(spare=1)
    told = len(rig.session.steps)
    for table in list(rig.pool.tables_after(0, 99, 0.0))[1:]:
        rig.session.say(Victim(table.table_id))
    rig.turn()
    assert len(rig.session.steps) == told, "nothing is said before the copy is over"
    rig.session.held = False
    rig.session.deliver()
    rig.settle()
    for index in range(3):
        assert rig.generated(1 + index) == continuation(PROMPT, 12, sample(index))
    rig.check_nothing_held()


def test_another_worker_that_needs_the_source_gets_it_when_the_copy_is_over() -> None:
    rig = in_flight(spare=1)
    (copy,) = rig.device.in_flight[-1].step.copies
    other = Rig(pool=rig.pool)
    other.turn()
    other.submit(1, [9] * (8 * (rig.pool.usage().free - 1)), 2)
    other.turn(4)
    for request in (2, 3):
        rig.mailbox.post(Cancel(request))
    rig.turn()
    other.submit(2, [8] * 20, 20)
    for _ in range(60):
        other.turn()
        assert not {copy.source} & {entry for step in other.model.steps for table in step.tables for entry in table}
    rig.session.held = False
    rig.session.deliver()
    rig.settle()
    other.settle()
    assert rig.generated(1) == continuation(PROMPT, 12, sample(0))
    assert other.generated(2) == continuation([8] * 20, 20, Sampling(temperature=0))
    rig.check_nothing_held()


# -- tables alone


def tables_of(*token_ids: int) -> tuple[BlockTables, int, int]:
    """Two tables that share a block of 8 with these tokens, told to memd."""
    tables = BlockTables(8)
    tables.ask(1, 4, 4)
    tables.granted(Grant(1, 10, 0, [1, 2, 3, 4], [4, 8, 12, 16], 4))
    first = tables.created(Grant(2, 9, 0, [5], [20])).table_id
    tables.prepare(first, len(token_ids))
    tables.commit(first, token_ids)
    second = tables.fork(first)
    tables.take_steps()
    return tables, first, second


@pytest.mark.parametrize("how", ["write", "truncate"])
def test_memd_hears_of_a_copy_and_all_after_it_when_the_copy_is_over(how: str) -> None:
    tables, first, second = tables_of(1, 2, 3)
    assert tables.take_ahead(second)
    (copy,) = tables.prepare(first, 1) if how == "write" else tables.truncate(first, 2)
    tables.release(second)
    assert copy.source == 20
    if how == "write":
        tables.commit(first, [4])
    kept = CopyOnWrite(first, 0, (2,)) if how == "write" else Truncate(first, 2, 2)
    assert tables.take_steps() == []
    tables.ask(3, 8, 0)
    assert tables.take_steps() == []
    tables.copied(1)
    steps = tables.take_steps()
    assert [list(step.operations) for step in steps if step.operations] == [[Take(second, [1]), kept, Release(second)]]
    assert [list(step.commits) for step in steps if step.commits] == ([[Commit(first, [4])]] if how == "write" else [])
    assert [len(step.reserves) for step in steps] == ([0, 0, 1] if how == "write" else [0, 1])
    assert tables.take_steps() == []


def test_copies_of_two_steps_are_told_one_after_the_other() -> None:
    tables, first, second = tables_of(1, 2, 3)
    third = tables.fork(second)
    tables.take_steps()
    assert len(tables.prepare(first, 1)) == 1
    assert tables.take_steps() == []
    assert len(tables.prepare(second, 1)) == 1
    tables.copied(1)
    assert [list(step.operations) for step in tables.take_steps()] == [[CopyOnWrite(first, 0, (1,))]]
    assert tables.prepare(third, 1) == [], "the last one has it alone"
    tables.copied(1)
    assert [list(step.operations) for step in tables.take_steps()] == [[CopyOnWrite(second, 0, (2,))]]


def test_a_block_that_memd_holds_and_one_without_tokens_keep_nothing_back() -> None:
    tables, first, _ = tables_of(*range(8))
    assert tables.take_ahead(first)
    tables.fork(first)
    assert tables.prepare(first, 1) == []
    part = tables.created(Grant(4, 30, 5, [7], [28], copy_source=24)).table_id
    assert tables.prepare(part, 1) == [BlockCopy(24, 28)]
    assert tables.take_steps() != []
