"""Attach streams that end in the middle of something: taken over, cancelled, or with a pool that contradicts itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from memd.core.errors import InvariantError
from memd.core.pool import Pool
from memd.core.values import LeaseState, Step, StepOutcome
from memd.messages import geometry_message
from memd.sessions import Session, Sessions
from memd.worker_service import WorkerService, WorkerTerms
from pagepool.errors import PagepoolError, Reason
from pagepool.handlers import Service, Stream, generic_handler
from pagepool.memd.v1 import worker_service_pb2 as pb
from tests.cpu.memory_pool import make_pool


class Locks:
    """All are held by workers that live."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def hold(self, name: str) -> None:
        assert name == "lock"

    def is_free(self, name: str) -> bool:
        return name != "lock"

    def fence(self, name: str, lease_id: int) -> bool:
        return (name, lease_id > 0) == ("lock", True)

    def drop(self, name: str) -> None:
        self.dropped.append(name)


class Call:
    """What grpc shows of a call: messages that come, messages that left, and how it ended."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[bytes] = asyncio.Queue()
        self.leaving: asyncio.Queue[pb.AttachResponse] = asyncio.Queue()
        self.left: list[str] = []
        self.gone = False
        self.status = ""

    def send(self, **message: Any) -> None:
        self.coming.put_nowait(pb.AttachRequest(**message).SerializeToString())

    async def read(self) -> bytes:
        return await self.coming.get()

    async def write(self, data: bytes) -> None:
        message = pb.AttachResponse.FromString(data)
        self.left.append(str(message.WhichOneof("message")))
        self.leaving.put_nowait(message)

    def done(self) -> bool:
        return self.gone

    async def abort_with_status(self, status: Any) -> None:
        self.status = status.details
        raise grpc.aio.AbortError


class Rig:
    """A WorkerService with its sessions, and what it told of failures."""

    def __init__(self) -> None:
        self.pool: Pool = make_pool(8)
        self.failures: list[Exception] = []
        self.now = 0.0
        self.locks = Locks()
        self.sessions = Sessions(self.pool, self.locks, lambda: self.now, self.failures.append)
        self.service = WorkerService(
            self.pool, self.sessions, self.locks, WorkerTerms(10.0, [pb.Slab()]), lambda: self.now
        )

    def hello(self, call: Call, **reclaim: int) -> asyncio.Task[None]:
        assert self.pool.geometry is not None
        geometry = geometry_message(self.pool.geometry)
        call.send(hello=pb.Hello(worker_name="w", lock_file="lock", geometry=geometry, **reclaim))
        return asyncio.create_task(self.service.attach(Stream(call, pb.AttachRequest)))

    def session(self) -> Session:
        (session,) = self.sessions._by_lease.values()
        return session


async def answer(call: Call, kind: str) -> pb.AttachResponse:
    """The next message of a call; it must be of this kind."""
    message = await asyncio.wait_for(call.leaving.get(), 5)
    assert message.WhichOneof("message") == kind
    return message


async def ended(task: asyncio.Task[None]) -> BaseException | None:
    (outcome,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)
    return outcome


def test_a_stream_that_another_one_has_replaced_applies_nothing_any_more() -> None:
    """Hello on the new stream and a step on the old one are read in one go; the worker repeats the step."""

    async def play() -> None:
        rig, old, new = Rig(), Call(), Call()
        former = rig.hello(old)
        lease = (await answer(old, "welcome")).welcome.lease_id
        old.send(step=pb.Step(step_id=1))
        await answer(old, "step_result")
        again = rig.hello(new, reclaim_epoch=rig.pool.epoch, reclaim_lease_id=lease)
        old.send(step=pb.Step(step_id=2))
        old.send(detach=pb.Detach())
        assert (await answer(new, "welcome")).welcome.reclaimed
        error = await ended(former)
        assert isinstance(error, PagepoolError)
        assert error.reason is Reason.LEASE_LOST
        new.send(step=pb.Step(step_id=2))
        assert (await answer(new, "step_result")).step_result.step_id == 2
        assert rig.pool.lease(lease).state is LeaseState.LIVE
        assert old.left == ["welcome", "step_result"]
        again.cancel()

    asyncio.run(play())


def test_a_violation_costs_the_lease_before_another_stream_can_take_it_up() -> None:
    async def play() -> None:
        rig, old, new = Rig(), Call(), Call()
        former = rig.hello(old)
        lease = (await answer(old, "welcome")).welcome.lease_id
        old.send(step=pb.Step(step_id=7))
        again = rig.hello(new, reclaim_epoch=rig.pool.epoch, reclaim_lease_id=lease)
        error = await ended(former)
        assert isinstance(error, PagepoolError)
        assert error.reason is Reason.PROTOCOL_VIOLATION
        assert rig.pool.lease(lease).state is LeaseState.LOST
        again.cancel()

    asyncio.run(play())


def test_a_worker_that_keeps_the_file_of_its_lost_lease_is_told_why_it_may_not() -> None:
    """And memd goes on to watch the file, whose lock says when the old blocks come back."""

    async def play() -> None:
        rig, old, new = Rig(), Call(), Call()
        former = rig.hello(old)
        lease = (await answer(old, "welcome")).welcome.lease_id
        rig.now = 10.0
        rig.sessions.tick()
        assert isinstance(await ended(former), PagepoolError)
        error = await ended(rig.hello(new))
        assert isinstance(error, PagepoolError)
        assert (error.reason, error.metadata["lease_id"]) == (Reason.LEASE_LOST, str(lease))
        assert (new.left, rig.locks.dropped, rig.pool.waiting_for_process()) == ([], [], [(lease, "lock")])

    asyncio.run(play())


def end_the_session(rig: Rig, _task: asyncio.Task[None]) -> None:
    rig.session().end(PagepoolError(Reason.DRAINING, "memd is stopping"))


def cancel_the_call(_rig: Rig, task: asyncio.Task[None]) -> None:
    task.cancel()


def leave_it_alone(_rig: Rig, _task: asyncio.Task[None]) -> None:
    pass


@pytest.mark.parametrize("meanwhile", [end_the_session, cancel_the_call, leave_it_alone])
def test_a_pool_that_contradicts_itself_is_told_of_whatever_else_ends_the_stream(
    meanwhile: Callable[[Rig, asyncio.Task[None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        rig, call = Rig(), Call()
        task = rig.hello(call)
        await answer(call, "welcome")

        def contradict(_pool: Pool, _lease: int, _step: Step, _now: float) -> StepOutcome:
            meanwhile(rig, task)
            raise InvariantError("a block is held and free")

        monkeypatch.setattr(Pool, "step", contradict)
        call.send(step=pb.Step(step_id=1))
        outcome = await ended(task)
        if meanwhile is not cancel_the_call:
            assert isinstance(outcome, InvariantError), "it goes before what else ended the stream"
        assert [str(one) for one in rig.failures] == ["a block is held and free"]

    asyncio.run(play())


@pytest.mark.parametrize("gone", [False, True])
def test_a_daemon_hears_of_a_failure_whether_or_not_its_caller_has_gone(gone: bool) -> None:
    async def play() -> None:
        told: list[Exception] = []
        failing, call = Failing(), Call()
        call.gone = gone
        descriptor = pb.DESCRIPTOR.services_by_name["WorkerService"]
        handler = generic_handler(Service(descriptor, failing, told.append))
        method = handler.service(Details())
        with pytest.raises(asyncio.CancelledError if gone else grpc.aio.AbortError):
            await method.stream_stream(None, call)
        assert told == [failing.error]
        assert call.status == ("" if gone else call.status), "nobody is left to be answered"
        assert bool(call.status) != gone

    asyncio.run(play())


class Failing:
    """A servicer with a bug."""

    def __init__(self) -> None:
        self.error = InvariantError("a bug")

    async def attach(self, _stream: Stream) -> None:
        raise self.error


class Details:
    """The call that a handler is looked up for."""

    method = "/pagepool.memd.v1.WorkerService/Attach"
    invocation_metadata = ()
