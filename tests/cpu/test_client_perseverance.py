"""How often a worker takes its lease up again: as long as something comes of it, and not for ever."""

from __future__ import annotations

import os
import pty
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import worker_service_pb2 as wire
from pagepool.pool_values import Commit, Lost, Step
from pagepool_client.cli.keys import _pressed
from pagepool_client.lease_keeper import MAX_REPEATS
from pagepool_client.session import Attachment, PoolSession
from tests.cpu.test_client_session import GEOMETRY, ScriptedMemd, events, eventually


class FailingMemd(ScriptedMemd):
    """A memd that answers steps from `poison` on with `failure`, and everything else well."""

    poison = 2
    failure: Any = grpc.StatusCode.INTERNAL

    def _answers(self, message: wire.AttachRequest) -> Iterator[Any]:
        if message.WhichOneof("message") == "step" and message.step.step_id >= self.poison:
            self.steps.append(message.step)
            yield self.failure
        else:
            yield from super()._answers(message)


@pytest.fixture
def memd(tmp_path: Path) -> Iterator[FailingMemd]:
    server = FailingMemd(tmp_path)
    yield server
    server.die()


@pytest.fixture
def session(memd: FailingMemd) -> Iterator[PoolSession]:
    with PoolSession(Attachment(memd.target, "worker", GEOMETRY)) as opened:
        yield opened


@pytest.mark.parametrize(
    "failure",
    [grpc.StatusCode.INTERNAL, PagepoolError(Reason.INTERNAL_ERROR, "a bug"), grpc.StatusCode.UNKNOWN],
    ids=["code", "reason", "unknown"],
)
def test_a_step_that_memd_fails_on_each_time_costs_the_lease_and_no_endless_loop(
    memd: FailingMemd, session: PoolSession, failure: Any
) -> None:
    memd.failure = failure
    session.submit(Step(commits=[Commit(1, [7])]))
    assert eventually(lambda: session.steps_answered == 1)
    session.submit(Step(commits=[Commit(1, [8])]))
    (lost,) = events(session)
    assert isinstance(lost, Lost)
    assert f"broke again each of the {MAX_REPEATS} times" in lost.message
    assert "the lease is given up" in lost.message
    assert len(memd.hellos) == 1 + MAX_REPEATS
    assert [step.step_id for step in memd.steps] == [1, *[2] * (1 + MAX_REPEATS)]


def test_breaks_with_answers_between_cost_nothing_however_many_they_are(
    memd: FailingMemd, session: PoolSession
) -> None:
    memd.poison = 1 << 60
    for number in range(1, 2 * MAX_REPEATS + 3):
        session.submit(Step(commits=[Commit(1, [number])]))
        assert eventually(lambda number=number: session.steps_answered == number)  # type: ignore[misc]
        hellos = len(memd.hellos)
        memd.tell(grpc.StatusCode.INTERNAL)
        assert eventually(lambda hellos=hellos: len(memd.hellos) > hellos)  # type: ignore[misc]
    assert events(session, within_s=0.2) == []


def test_an_idle_worker_whose_heartbeats_are_answered_keeps_its_lease(memd: FailingMemd, session: PoolSession) -> None:
    for _ in range(2 * MAX_REPEATS):
        beats, hellos = memd.heartbeats, len(memd.hellos)
        memd.tell(grpc.StatusCode.INTERNAL)
        assert eventually(lambda hellos=hellos: len(memd.hellos) > hellos)  # type: ignore[misc]
        assert eventually(lambda beats=beats: memd.heartbeats >= beats + 2)  # type: ignore[misc]
    assert events(session, within_s=0.2) == []


def test_only_its_own_keys_end_the_wait_of_a_display() -> None:
    keyboard, terminal = pty.openpty()
    tty.setcbreak(terminal)
    try:
        threading.Timer(0.05, os.write, (keyboard, b"xyz \n")).start()
        begun = time.monotonic()
        assert not _pressed(terminal, 0.3)
        assert time.monotonic() - begun >= 0.3, "another key waits as long as none"
        os.write(keyboard, b"xQ")
        begun = time.monotonic()
        assert _pressed(terminal, 30.0)
        assert time.monotonic() - begun < 10
        assert not _pressed(terminal, 0.0)
    finally:
        os.close(keyboard)
        os.close(terminal)
