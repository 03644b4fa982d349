"""A worker's line to memd: one Attach stream after another, with the lease and the order of steps kept across them."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagepool.durations import to_seconds
from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1.types_pb2 import Geometry
from pagepool.memd.v1.worker_service_pb2 import AttachRequest, AttachResponse, Detach, Heartbeat, Hello, StepResult
from pagepool.pool_values import Capacity, Draining, Lost, PoolEvent, Step, Victim
from pagepool_client.attach_stream import AttachStream
from pagepool_client.channels import socket_path
from pagepool_client.lease_keeper import LeaseKeeper, may_pass
from pagepool_client.recodes import Recode, Recoded, add_recoded, recode_of
from pagepool_client.wire import events_of, pool_info, remap_event, step_message

DETACH_TIMEOUT_S = 2.0
RECLAIM_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """How a worker attaches. `memd` is the target of its Unix socket; `timeout_s` bounds the wait for its Welcome.

    Who `takes_remaps` gets such events, and acknowledges them in its steps; else no block of its tables moves. Who
    `takes_recodes` does what PoolSession.take_recodes has, and answers it.
    """

    memd: str
    worker_name: str
    geometry: Geometry
    timeout_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    takes_remaps: bool = False
    takes_recodes: bool = False


class AttachLine:
    """The line of one lease. `post` is called with each event, in order, from threads of the line; Lost is the last.

    So is `post_recode`, with each Recode once: one that memd tells again on a new stream was answered by a step that is
    sent again there, or will be. Done again, it could write to blocks that the first answer has given away.

    Steps that were not answered when a stream broke are sent again once the lease is reclaimed, with the ids they
    had: memd answers those it has applied already as it did the first time.
    """

    def __init__(
        self,
        attachment: Attachment,
        lock_file: str,
        post: Callable[[PoolEvent], None],
        post_recode: Callable[[Recode], None] = lambda _recode: None,
    ) -> None:
        self._attachment, self._lock_file, self._post, self._post_recode = attachment, lock_file, post, post_recode
        self._last_recode = 0
        # Guards the order of steps on the wire, also while they are sent again.
        self._sending = threading.Lock()
        self._unanswered: deque[tuple[int, AttachRequest]] = deque()
        self._over = False
        self._unary_calls = 0
        self.steps_sent = self.steps_answered = 0
        self._keeper = LeaseKeeper(self, attachment.clock)
        self._stream = self._open(Hello(), attachment.timeout_s)
        welcome = self._stream.welcome
        self.info, self.fp8 = pool_info(welcome), welcome.fp8
        self._keeper.start(to_seconds(welcome.heartbeat_interval), to_seconds(welcome.heartbeat_timeout))

    @property
    def unary_calls(self) -> int:
        """Unary calls made on the line's channels."""
        return self._unary_calls + self._stream.unary_calls.count

    def submit(self, step: Step, recoded: Recoded | None = None) -> None:
        """Send a step, and in it what has become of a Recode; dropped once the lease is lost.

        Raises ValueError if a number does not fit the message.
        """
        with self._sending:
            if self._over:
                return
            message = step_message(self.steps_sent + 1, step)
            if recoded is not None:
                add_recoded(message.step, recoded)
            self.steps_sent += 1
            self._unanswered.append((self.steps_sent, message))
            self._stream.send(message)

    def close(self) -> None:
        """End the lease in order unless it is lost. The caller has closed its mapping. Idempotent."""
        self._keeper.stop()
        with self._sending:
            detach, self._over = not self._over, True
        if detach:
            self._stream.send(AttachRequest(detach=Detach()))
            self._stream.finish(DETACH_TIMEOUT_S)
        self._stream.close()

    def beat(self, sequence: int) -> None:
        """Send a heartbeat; the keeper's."""
        self._stream.send(AttachRequest(heartbeat=Heartbeat(sequence=sequence)))

    def reopen(self, timeout_s: float) -> bool:
        """Take the lease up again on a new stream; the keeper's."""
        if not _listening(socket_path(self._attachment.memd)):
            raise PagepoolError(Reason.POOL_LOST, f"memd at {self._attachment.memd} is gone")
        hello = Hello(reclaim_epoch=self.info.epoch, reclaim_lease_id=self.info.lease_id)
        try:
            stream = self._open(hello, min(timeout_s, RECLAIM_TIMEOUT_S))
        except PagepoolError as error:
            if may_pass(error):
                return False
            raise
        if not stream.welcome.reclaimed:
            stream.send(AttachRequest(detach=Detach()))
            stream.finish(DETACH_TIMEOUT_S)
            stream.close()
            raise PagepoolError(Reason.LEASE_LOST, "the stream broke, and memd did not give the lease back")
        with self._sending:
            self._retire(stream)
            for _, message in list(self._unanswered):
                stream.send(message)
        return True

    def lost(self, message: str) -> None:
        """The lease is gone; the keeper's."""
        with self._sending:
            self._over = True
        self._stream.close()
        self._post(Lost(message))

    def _open(self, hello: Hello, timeout_s: float) -> AttachStream:
        hello.worker_name = self._attachment.worker_name
        hello.lock_file = self._lock_file
        hello.geometry.CopyFrom(self._attachment.geometry)
        hello.takes_remaps = self._attachment.takes_remaps
        hello.takes_recodes = self._attachment.takes_recodes
        return AttachStream(self._attachment.memd, hello, self._deliver, self._keeper.broken, timeout_s)

    def _retire(self, successor: AttachStream) -> None:
        self._unary_calls += self._stream.unary_calls.count
        self._stream.close()
        self._stream = successor

    def _deliver(self, message: AttachResponse) -> None:
        match message.WhichOneof("message"):
            case "step_result":
                self._answered(message.step_result)
            case "heartbeat_ack":
                self._keeper.answered(message.heartbeat_ack.sequence)
                if not self._unanswered:  # else a step may be what breaks the stream
                    self._keeper.progressed()
            case "capacity":
                self._post(Capacity(message.capacity.available_blocks))
            case "victim":
                self._post(Victim(message.victim.table_id))
            case "remap":
                self._post(remap_event(message.remap))
            case "recode":
                self._told(recode_of(message.recode))
            case "drain":
                self._post(Draining(to_seconds(message.drain.grace)))

    def _told(self, recode: Recode) -> None:
        if recode.sequence > self._last_recode:
            self._last_recode = recode.sequence
            self._post_recode(recode)

    def _answered(self, result: StepResult) -> None:
        if not self._unanswered or self._unanswered[0][0] > result.step_id:
            return  # answered before the stream broke, and again after
        # An answer stands for those before it that had nothing to say.
        while self._unanswered and self._unanswered[0][0] <= result.step_id:
            self._unanswered.popleft()
            self.steps_answered += 1
        self._keeper.progressed()
        for event in events_of(result):
            self._post(event)


def _listening(path: Path) -> bool:
    """Whether a server lives behind the socket: the kernel refuses as soon as its process is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(RECLAIM_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog or a time-out: a living server, if a slow one
            return True
    return True
