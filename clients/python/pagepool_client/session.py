"""A worker's session with memd: the KvPool of `inferd.core.ports`, over the Attach stream.

Four threads have a part. The engine's thread submits steps and polls events; it never waits for memd but in `wait`.
The stream's reader turns answers into events. The keeper sends heartbeats, so that a long forward or compilation does
not cost the lease, and takes the lease up again if the stream breaks while memd lives. grpc's own thread sends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from pagepool.pool_values import PoolEvent, PoolInfo, Step
from pagepool_client.attach_line import AttachLine, Attachment
from pagepool_client.channels import socket_path
from pagepool_client.cuda_mapping import CudaMapping
from pagepool_client.mapping import LeaseLock, SlabMapping
from pagepool_client.recodes import Recode, Recoded

LEASE_FOLDER = "leases"

__all__ = ["Attachment", "PoolSession"]


class PoolSession:
    """An attached worker. A lost session is closed, and another one made.

    `memory` is the slab: writable bytes, which after `close` read zeros and reach nothing (see SlabMapping), or, if the
    pool lies on a GPU, a CudaMapping, for which the GPU's context must be current on the thread that makes the session
    and closes it.
    After the event `Lost`, which is the last one, steps are dropped. `signal` is set whenever there is something to
    poll: a caller that waits for more than the pool passes its own event, and sets it too.

    The constructor attaches, maps the slab and begins to keep the lease. It raises PagepoolError: INVALID_FIELD if
    `memd` is no Unix socket, GEOMETRY_MISMATCH, DEVICE_MISMATCH, DRAINING, or UNAVAILABLE (POOL_LOST among them) while
    memd is not there; the last two may be tried again.
    """

    def __init__(self, attachment: Attachment, signal: threading.Event | None = None) -> None:
        folder = socket_path(attachment.memd).parent / LEASE_FOLDER
        self._signal = signal or threading.Event()
        self._events: deque[PoolEvent] = deque()
        self._recodes: deque[Recode] = deque()
        self._lock = LeaseLock(folder, attachment.worker_name)
        try:
            self._line = AttachLine(attachment, self._lock.name, self._post, self._post_recode)
            self._mapping = self._mapped()
        except BaseException:
            self._lock.release()
            raise

    def _mapped(self) -> SlabMapping | CudaMapping:
        info = self._line.info
        try:
            if info.cuda_device is not None:
                return CudaMapping(info.cuda_handle, info.slab_bytes, info.cuda_device, info.host_slab)
            (path,) = info.slab_paths
            return SlabMapping(path, info.slab_bytes)
        except BaseException:
            self._line.close()
            raise

    def _post(self, event: PoolEvent) -> None:
        self._events.append(event)
        self._signal.set()

    def _post_recode(self, recode: Recode) -> None:
        self._recodes.append(recode)
        self._signal.set()

    @property
    def info(self) -> PoolInfo:
        """The pool this session is attached to."""
        return self._line.info

    @property
    def fp8(self) -> bool:
        """Whether tables may have FP8 blocks, from the beginning or by a Remap."""
        return self._line.fp8

    @property
    def memory(self) -> memoryview | CudaMapping:
        """The slab."""
        return self._mapping if isinstance(self._mapping, CudaMapping) else self._mapping.view

    @property
    def steps_sent(self) -> int:
        """Step messages sent."""
        return self._line.steps_sent

    @property
    def steps_answered(self) -> int:
        """Of those, how many memd has answered."""
        return self._line.steps_answered

    @property
    def unary_calls(self) -> int:
        """Unary calls that this session has made; the token path makes none."""
        return self._line.unary_calls

    @property
    def fenced(self) -> bool:
        """Whether memd has ended the lease, so that blocks that were read here may hold something else by now.

        To be looked at after each step, before anything that was computed leaves this process: drop it, and wait for
        Lost. It costs one look into memory, and works while memd cannot be heard.
        """
        return self._lock.fenced

    def submit(self, step: Step) -> None:
        """Send one step message; answers come as events. An empty step is not sent."""
        if step:
            self._line.submit(step)

    def poll(self) -> list[PoolEvent]:
        """Events since the last call, in order; never waits."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def take_recodes(self) -> list[Recode]:
        """What memd wants to be recoded, in order, each once; never waits. Empty unless the worker takes Recodes.

        To be launched behind all that was launched before, and answered in this order, unless the lease is lost.
        """
        recodes = []
        while self._recodes:
            recodes.append(self._recodes.popleft())
        return recodes

    def answer_recode(self, sequence: int, errors: Sequence[float] = (), *, failed: bool = False) -> None:
        """Say, in a step of its own, what has become of the oldest Recode that is not answered; see Recoded."""
        self._line.submit(Step(), Recoded(sequence, errors, failed))

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is an event, or `wake` is called, or the signal set; False on time-out."""
        if self._events:
            return True
        signalled = self._signal.wait(timeout_s)
        # Cleared before the caller polls: what comes in from here on sets it again.
        self._signal.clear()
        return signalled

    def wake(self) -> None:
        """End a `wait`. From any thread."""
        self._signal.set()

    def close(self) -> None:
        """Give up the mapping, end the lease in order unless it is lost, and drop the lock. Idempotent."""
        self._mapping.close()
        self._line.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
