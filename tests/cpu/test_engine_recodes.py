"""An engine that memd has store blocks in another format: while it decodes, while it rests, when the lease is lost."""

from __future__ import annotations

import pytest

from inferd.core.messages import Sampling
from inferd.core.ports import Remap
from inferd.surroundings import DeviceLostError
from pagekernels.layout import Format, pack_entry, unpack_entry
from pagepool_client.recodes import Recode, Recoded
from tests.cpu.engine_rig import Rig
from tests.cpu.memory_pool import continuation

SIZE = 8
GREEDY = Sampling(temperature=0)
PROMPT = [5, 9, 2, 7] * 5
FREE_UNIT = 4 * 60
"""Of the last blocks of the pool, which no request here gets."""


def compressed(index: int) -> int:
    return pack_entry(Format.FP8_E4M3, 0, FREE_UNIT + index)


def sealed(rig: Rig) -> list[int]:
    (table,) = rig.pool.tables_after(0, 99, 0.0)
    return list(table.blocks.entries)[: table.num_tokens // SIZE]


def errors_of(sources: list[int]) -> tuple[float, ...]:
    return tuple(error for source in sources for error in (source, source + 0.5))


def decoding(depth: int, monkeypatch: pytest.MonkeyPatch, count: int = 10) -> Rig:
    """An engine that has said so many tokens of a request and goes on."""
    monkeypatch.setattr(Rig, "depth", depth)
    rig = Rig()
    rig.submit(1, PROMPT, 60)
    while len(rig.generated(1)) < count:
        rig.turn()
    return rig


def remap(rig: Rig, sequence: int, index: int, entry: int) -> None:
    """memd moves a block of the one table, and takes no part in what the rig checks of blocks that it does not know."""
    (table,) = rig.pool.tables_after(0, 99, 0.0)
    rig.pool._state.leases[rig.session.lease_id].last_remap = sequence
    rig.session.on_answer = lambda: None
    block_id = table.blocks.block_ids[index]
    rig.session.say(Remap(sequence, table.table_id, index, block_id, block_id, entry))


@pytest.mark.parametrize("depth", [1, 2])
def test_recodes_under_load_are_answered_in_order_and_what_they_wrote_is_read_later(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    rig = decoding(depth, monkeypatch)
    blocks = sealed(rig)
    assert len(blocks) >= 3
    first, second = [compressed(0), compressed(1)], [compressed(2)]
    rig.session.recode(Recode(1, blocks[:2], first), Recode(2, blocks[2:3], second))
    said = len(rig.generated(1))
    rig.turn(3)
    assert rig.session.recodings == [Recoded(1, errors_of(blocks[:2])), Recoded(2, errors_of(blocks[2:3]))]
    assert len(rig.generated(1)) > said, "decoding has waited"
    for index, entry in enumerate([*first, *second]):
        remap(rig, index + 1, index, entry)
    rig.turn(4)
    assert {*first, *second} <= set(rig.device.launched[-1].tables[0])
    size = 4 * SIZE
    rig.model._kv.reshape(-1, size)[[unpack_entry(entry)[2] // 4 for entry in blocks[:3]]] = 0  # is given away
    native = [pack_entry(Format.F32, 0, FREE_UNIT + 4), pack_entry(Format.F32, 0, FREE_UNIT + 8)]
    rig.session.recode(Recode(3, first, native))
    rig.turn(3)
    assert rig.session.recodings[2:] == [Recoded(3)]
    rig.settle()
    assert rig.generated(1) == continuation(PROMPT, 60, GREEDY)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recode_runs_behind_the_steps_launched_before_and_is_answered_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    rig = decoding(depth, monkeypatch)
    in_flight = len(rig.device.in_flight)
    assert in_flight == depth - 1
    rig.session.recode(Recode(1, sealed(rig)[:1], [compressed(0)]))
    rig.engine._tell(rig.engine._attachment, 0.0)  # type: ignore[arg-type]
    (recoding,) = rig.device.recoding
    assert len(recoding.behind) == in_flight
    assert rig.session.recodings == [], "it is answered before it is done"
    while not rig.session.recodings:
        assert not recoding.done() or not any(step in rig.device.in_flight for step in recoding.behind)
        rig.turn()
    assert recoding.done()
    rig.settle()
    assert rig.generated(1) == continuation(PROMPT, 60, GREEDY)


def idle(depth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, list[int]]:
    """An engine without work, and blocks that its request has left in the cache."""
    rig = decoding(depth, monkeypatch)
    blocks = sealed(rig)
    rig.settle()
    assert not rig.pool.num_tables
    return rig, blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_engine_does_it_and_answers_at_once(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    rig, blocks = idle(depth, monkeypatch)
    steps = rig.engine._tally.counters.memd_steps
    rig.mailbox.signal.clear()
    rig.session.recode(*(Recode(at, [blocks[at - 1]], [compressed(at)]) for at in (1, 2, 3)))
    assert rig.mailbox.signal.is_set(), "it rests on"
    rig.settle()
    assert rig.session.recodings == [Recoded(at, errors_of([blocks[at - 1]])) for at in (1, 2, 3)]
    assert steps < rig.engine._tally.counters.memd_steps <= steps + 3
    assert rig.engine.turn() != 0, "it does not rest again"
    assert rig.session.recodings[3:] == []


@pytest.mark.parametrize("when", ["launched", "run"])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_fails_is_answered_as_such_in_its_place(
    monkeypatch: pytest.MonkeyPatch, depth: int, when: str
) -> None:
    rig = decoding(depth, monkeypatch)
    blocks = sealed(rig)
    failing = rig.device if when == "launched" else rig.model
    recode, calls = failing.recode, list[int]()

    def fail_second(sources: list[int], targets: list[int]) -> object:
        calls.append(len(sources))
        if len(calls) == 2:
            raise ValueError("targets[0] must be a block of another format")
        return recode(sources, targets)

    monkeypatch.setattr(failing, "recode", fail_second)
    rig.session.recode(*(Recode(at, [blocks[at - 1]], [compressed(at)]) for at in (1, 2, 3)))
    rig.turn(3)
    one, failed, three = rig.session.recodings
    assert (one, three) == (Recoded(1, errors_of(blocks[:1])), Recoded(3, errors_of(blocks[2:3])))
    assert failed == Recoded(2, failed=True)
    rig.settle()
    assert rig.generated(1) == continuation(PROMPT, 60, GREEDY)
    rig.check_nothing_held()


def test_an_idle_engine_answers_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, blocks = idle(2, monkeypatch)
    rig.session.recode(Recode(1, blocks[:1], [1 << 40]), Recode(2, blocks[:1], [compressed(0)]))
    rig.settle()
    assert rig.session.recodings == [Recoded(1, failed=True), Recoded(2, errors_of(blocks[:1]))]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_pending_when_the_lease_is_lost_is_waited_for_and_never_answered(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    rig = decoding(depth, monkeypatch)
    former = rig.session
    former.recode(Recode(1, sealed(rig)[:1], [compressed(0)]))
    rig.engine._tell(rig.engine._attachment, 0.0)  # type: ignore[arg-type]
    assert len(rig.engine._recodings) == 1
    former.recode(Recode(2, sealed(rig)[:1], [compressed(1)]))
    former.lose()
    device = rig.device
    rig.turn()
    assert rig.closed == [former]
    assert (len(device.recoding), len(rig.engine._recodings)) == (0, 0)
    rig.turn(2)
    assert rig.session is not former
    other = [1, *PROMPT]  # what the fake model has written is gone with it
    rig.submit(2, other, 8)
    rig.settle()
    rig.session.recode(Recode(1, [], []))
    rig.settle()
    assert former.recodings == []
    assert [each.sequence for each in rig.session.recodings] == [1]
    assert rig.generated(2) == continuation(other, 8, GREEDY)


def test_a_device_that_is_lost_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, blocks = idle(2, monkeypatch)
    rig.device.fail_recode = DeviceLostError("an illegal memory access was encountered")
    rig.session.recode(Recode(1, blocks[:1], [compressed(0)]))
    with pytest.raises(DeviceLostError):
        rig.turn()
    assert rig.session.recodings == []


def test_a_pool_without_recodes_is_served_as_ever() -> None:
    rig = Rig()
    rig.turn()
    assert rig.engine._attachment is not None
    object.__setattr__(rig.engine._attachment, "recodes", None)
    rig.submit(1, PROMPT, 8)
    rig.settle()
    assert rig.generated(1) == continuation(PROMPT, 8, GREEDY)
