"""Recodes and their answers between a session and a scripted memd."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagepool.memd.v1 import worker_service_pb2 as wire
from pagepool.pool_values import Capacity, Step
from pagepool_client.recodes import Recode
from pagepool_client.session import Attachment, PoolSession
from tests.cpu.test_client_session import GEOMETRY, ScriptedMemd, eventually


@pytest.fixture
def memd(tmp_path: Path) -> Iterator[ScriptedMemd]:
    server = ScriptedMemd(tmp_path)
    yield server
    server.die()


@pytest.fixture
def session(memd: ScriptedMemd) -> Iterator[PoolSession]:
    with PoolSession(Attachment(memd.target, "worker", GEOMETRY, takes_recodes=True)) as opened:
        yield opened


def recode(sequence: int) -> wire.AttachResponse:
    return wire.AttachResponse(recode=wire.Recode(sequence=sequence, sources=[1 << 29, 7], targets=[4 << 29, 9]))


def taken(session: PoolSession, count: int) -> list[Recode]:
    found: list[Recode] = []
    assert eventually(lambda: len(found.extend(session.take_recodes()) or found) >= count)
    return found


def test_a_worker_says_whether_it_takes_recodes_and_hears_whether_there_are_fp8_blocks(
    memd: ScriptedMemd, session: PoolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memd.hellos[0].takes_recodes
    assert not session.fp8
    welcome = memd._welcome

    def with_fp8(hello: wire.Hello) -> wire.AttachResponse:
        answer = welcome(hello)
        answer.welcome.fp8 = True
        return answer

    monkeypatch.setattr(memd, "_welcome", with_fp8)
    with PoolSession(Attachment(memd.target, "other", GEOMETRY)) as other:
        assert other.fp8
    assert not memd.hellos[1].takes_recodes


def test_recodes_are_told_in_order_beside_the_events_and_end_a_wait(memd: ScriptedMemd, session: PoolSession) -> None:
    memd.tell(recode(1))
    assert session.wait(5)
    memd.tell(wire.AttachResponse(capacity=wire.Capacity(available_blocks=3)))
    memd.tell(recode(2))
    found = taken(session, 2)
    assert found == [Recode(sequence, (1 << 29, 7), (4 << 29, 9)) for sequence in (1, 2)]
    assert session.take_recodes() == []
    assert session.poll() == [Capacity(3)]


def test_answers_are_a_step_of_their_own_among_the_others(memd: ScriptedMemd, session: PoolSession) -> None:
    session.submit(Step(releases=[1]))
    session.answer_recode(1, [0.25, math.inf])
    session.answer_recode(2)
    session.answer_recode(3, failed=True)
    assert eventually(lambda: session.steps_answered == 4)
    assert memd.steps == [
        wire.Step(step_id=1, release_table_ids=[1]),
        wire.Step(step_id=2, recodings=[wire.Recoded(sequence=1, errors=[0.25, math.inf])]),
        wire.Step(step_id=3, recodings=[wire.Recoded(sequence=2)]),
        wire.Step(step_id=4, recodings=[wire.Recoded(sequence=3, failed=True)]),
    ]


def test_what_is_told_again_on_a_new_stream_is_neither_done_nor_answered_twice(
    memd: ScriptedMemd, session: PoolSession
) -> None:
    memd.answers_steps = False
    memd.tell(recode(1))
    memd.tell(recode(2))
    taken(session, 2)
    session.answer_recode(1)
    assert eventually(lambda: len(memd.steps) == 1)
    memd.answers_steps = True
    memd.tell(grpc.StatusCode.UNAVAILABLE)
    assert eventually(lambda: session.steps_answered == 1)  # the answer was sent again
    for sequence in (1, 2, 3):  # of these memd had no answer before
        memd.tell(recode(sequence))
    assert [each.sequence for each in taken(session, 1)] == [3]
    session.answer_recode(2)
    session.answer_recode(3)
    assert eventually(lambda: session.steps_answered == 3)
    answers = {step.step_id: [each.sequence for each in step.recodings] for step in memd.steps}
    assert answers == {1: [1], 2: [2], 3: [3]}
