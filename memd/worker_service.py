"""WorkerService: the Attach stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from memd import messages
from memd.core.errors import InvariantError
from memd.core.pool import Pool
from memd.core.values import Attached, Step
from memd.service import read_only_error
from memd.sessions import Locks, Session, Sessions, draining_error
from pagepool.durations import to_duration
from pagepool.errors import PagepoolError, Reason
from pagepool.handlers import Stream
from pagepool.memd.v1 import worker_service_pb2 as pb

BEATS_PER_TIMEOUT = 5
"""Heartbeats that a worker is asked to send within the time that it has for one."""

_BREAKS_LEASE = frozenset({Reason.PROTOCOL_VIOLATION, Reason.INVALID_FIELD})

_log = structlog.get_logger("memd.worker")


@dataclass(frozen=True, slots=True)
class WorkerTerms:
    """What every worker gets: how long it may be silent, and the slabs to map."""

    heartbeat_timeout_s: float
    slabs: Sequence[pb.Slab]


@dataclass(frozen=True, slots=True)
class WorkerService:
    """Gives workers their leases. A read-only one refuses every worker."""

    pool: Pool
    sessions: Sessions
    locks: Locks
    terms: WorkerTerms
    clock: Callable[[], float]
    read_only: bool = False

    async def attach(self, stream: Stream) -> None:
        """One worker, from Hello to Detach or the end of its stream."""
        if self.read_only:
            raise read_only_error("Attach")
        session, welcome = await self._hello(stream)
        log = _log.bind(lease_id=session.lease_id, worker=session.name)
        log.info("worker attached", reclaimed=welcome.welcome.reclaimed)
        try:
            session.tell(welcome)
            self.sessions.publish()
            await session.run(self._serve(session, stream))
        except PagepoolError as error:
            log.warning("worker's stream ends", reason=str(error.reason), message=error.message)
            raise
        finally:
            self.sessions.close(session)
            log.info("worker's stream ended")

    async def _hello(self, stream: Stream) -> tuple[Session, pb.AttachResponse]:
        request = await stream.read()
        if request is None or request.WhichOneof("message") != "hello":
            raise _violation("the first message of a stream must be Hello")
        if self.sessions.draining:
            raise draining_error()
        hello: pb.Hello = request.hello
        geometry = messages.geometry_from(hello.geometry)
        self.locks.hold(hello.lock_file)
        try:
            self.pool.declare(geometry)
            attached = self._attached(hello)
        except PagepoolError:
            self.sessions.drop_lock(hello.lock_file)
            raise
        session = Session(stream, attached.lease)
        self.sessions.open(session)
        return session, self._welcome(attached.lease.lease_id, reclaimed=attached.reclaimed)

    def _attached(self, hello: pb.Hello) -> Attached:
        reclaim = (hello.reclaim_epoch, hello.reclaim_lease_id) if hello.reclaim_lease_id else None
        timeout_s, now = self.terms.heartbeat_timeout_s, self.clock()
        attached = self.pool.attach(hello.worker_name, hello.lock_file, timeout_s, now, reclaim)
        if hello.takes_remaps:
            self.pool.remaps.listen(attached.lease.lease_id, now)
        self.pool.compression.listen(attached.lease.lease_id, now, takes_recodes=hello.takes_recodes)
        return attached

    def _welcome(self, lease_id: int, *, reclaimed: bool) -> pb.AttachResponse:
        timeout_s = self.terms.heartbeat_timeout_s
        welcome = pb.Welcome(
            epoch=self.pool.epoch,
            lease_id=lease_id,
            reclaimed=reclaimed,
            heartbeat_interval=to_duration(timeout_s / BEATS_PER_TIMEOUT),
            heartbeat_timeout=to_duration(timeout_s),
            block_size=self.pool.block_size,
            unit_bytes=self.pool.unit_bytes,
            num_blocks=self.pool.tiering.most_blocks,
            slabs=self.terms.slabs,
            fp8=self.pool.memory.tiers.fp8 is not None,
        )
        return pb.AttachResponse(welcome=welcome)

    async def _serve(self, session: Session, stream: Stream) -> None:
        """Serves the stream. What a failure means is told here: who awaits this may be cancelled before it looks."""
        try:
            await self._serve_messages(session, stream)
        except InvariantError as error:
            self.sessions.on_failure(error)
            raise
        except PagepoolError as error:
            if error.reason in _BREAKS_LEASE:
                self.pool.fail_lease(session.lease_id, self.clock())
            raise

    async def _serve_messages(self, session: Session, stream: Stream) -> None:
        """The token path: one message in, one out, and the next is read while the answer leaves."""
        lease_id = session.lease_id
        while (request := await stream.read()) is not None:
            if not self.sessions.speaks(session):
                return  # what another stream has taken up, this one must not move on
            match request.WhichOneof("message"):
                case "step":
                    outcome = self.pool.step(lease_id, _step(request.step), self.clock())
                    session.answer(messages.step_result(outcome))
                    self.sessions.publish()
                case "heartbeat":
                    self.pool.heartbeat(lease_id, self.clock())
                    ack = pb.HeartbeatAck(sequence=request.heartbeat.sequence)
                    session.tell(pb.AttachResponse(heartbeat_ack=ack))
                case "detach":
                    self.pool.detach(lease_id, self.clock())
                    self.sessions.publish()
                    session.tell(pb.AttachResponse(detach_ack=pb.DetachAck()))
                    await session.flush()
                    return
                case _:
                    raise _violation("after Hello only Heartbeat, Step and Detach may come, one in each message")
            await session.room()


def _step(message: pb.Step) -> Step:
    try:
        return messages.step_from(message)
    except ValueError as error:
        raise _violation(str(error)) from error


def _violation(what: str) -> PagepoolError:
    message = f"{what}; the stream ends, and its lease with it: mend the worker"
    return PagepoolError(Reason.PROTOCOL_VIOLATION, message, what=what)
