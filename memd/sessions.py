"""The living Attach streams: news to their workers, and the passing of time for their leases."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog

from memd.core.errors import lease_lost
from memd.core.lease import Remap
from memd.core.pool import Pool
from memd.core.recodes import Recode, RecodeNews
from memd.core.values import LeaseState, LeaseView
from pagepool.durations import to_duration
from pagepool.errors import PagepoolError, Reason
from pagepool.handlers import Stream
from pagepool.memd.v1.worker_service_pb2 import AttachResponse, Capacity, Drain, Victim
from pagepool.memd.v1.worker_service_pb2 import Recode as RecodeMessage
from pagepool.memd.v1.worker_service_pb2 import Remap as RemapMessage

MAX_UNSENT = 64
ANSWER_DELAY_S = 0.002

_log = structlog.get_logger("memd.sessions")


class Locks(Protocol):
    """What tells whether a worker's process is gone; memd.device.locks.LeaseLocks."""

    def hold(self, name: str) -> None:
        """Begin to watch a worker's lease file; INVALID_FIELD unless it is locked."""

    def is_free(self, name: str) -> bool:
        """Whether its process is gone."""

    def fence(self, name: str, lease_id: int) -> bool:
        """Let nothing out of the worker of a lost lease any more; False if its file has no fence."""

    def drop(self, name: str) -> None:
        """End the watch."""


class Session:
    """One Attach stream. Answers and news leave through one outbox, in order, while the next request is being read."""

    def __init__(self, stream: Stream, lease: LeaseView) -> None:
        self._stream = stream
        self.lease_id = lease.lease_id
        self.lock_file = lease.lock_file
        self.name = lease.holder
        self._outbox: deque[AttachResponse] = deque()
        self._delayed: AttachResponse | None = None
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, response: AttachResponse) -> None:
        """Sends a message soon."""
        self._tell_delayed()
        self._outbox.append(response)
        self._filled.set()

    def answer(self, response: AttachResponse) -> None:
        """Sends a StepResult: soon if it grants or refuses, else within ANSWER_DELAY_S, for nobody waits for it.

        One result stands for those before it, so that a worker that commits quickly costs few answers.
        """
        result = response.step_result
        if result.grants or result.refusals:
            self._delayed = None
            self.tell(response)
            return
        if self._delayed is None:
            asyncio.get_running_loop().call_later(ANSWER_DELAY_S, self._tell_delayed)
        self._delayed = response

    def _tell_delayed(self) -> None:
        if self._delayed is not None:
            self._outbox.append(self._delayed)
            self._delayed = None
            self._filled.set()

    async def room(self) -> None:
        """Waits while MAX_UNSENT messages are unsent: who does not read is not read from."""
        if len(self._outbox) >= MAX_UNSENT:
            await self.flush()

    async def flush(self) -> None:
        """Waits until everything told is sent."""
        if self._outbox:
            self._emptied.clear()
            await self._emptied.wait()

    def end(self, error: PagepoolError) -> None:
        """Ends the stream with an error."""
        if not self._over.done():
            self._over.set_exception(error)

    async def run(self, serving: Coroutine[Any, Any, None]) -> None:
        """Until `serving` is done, or `end` is called, which raises here unless `serving` has failed by then."""
        tasks = [asyncio.create_task(serving), asyncio.create_task(self._send())]
        try:
            ends = [*tasks, self._over]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for finished in ends:
                if finished.done():
                    finished.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._over.cancel():
                self._over.exception()  # seen, though another failure may be the one that is raised

    async def _send(self) -> None:
        while True:
            while self._outbox:
                await self._stream.write(self._outbox[0])
                self._outbox.popleft()
            self._emptied.set()
            self._filled.clear()
            await self._filled.wait()


class Sessions:
    """All sessions by lease. Everything here runs on the event loop, between two commands of the pool.

    `on_failure` is told at once of an error that memd cannot go on with; `on_news` is called when workers are told
    something, for whoever else has something to do then.
    """

    def __init__(
        self, pool: Pool, locks: Locks, clock: Callable[[], float], on_failure: Callable[[Exception], None]
    ) -> None:
        self._pool = pool
        self._locks = locks
        self._clock = clock
        self.on_failure = on_failure
        self._by_lease: dict[int, Session] = {}
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._unfinished: dict[Recode, asyncio.Future[None]] = {}
        self.draining = False
        self.on_news: Callable[[], None] = lambda: None

    def open(self, session: Session) -> None:
        """A stream speaks for its lease from now on; one that did so before is ended."""
        if (former := self._by_lease.get(session.lease_id)) is not None:
            message = f"lease {session.lease_id} was taken up by another stream of the same worker; use that one"
            former.end(PagepoolError(Reason.LEASE_LOST, message, lease_id=session.lease_id))
        self._by_lease[session.lease_id] = session
        self._nobody.clear()

    def speaks(self, session: Session) -> bool:
        """Whether a stream still speaks for its lease, and no other does."""
        return self._by_lease.get(session.lease_id) is session

    def close(self, session: Session) -> None:
        """A stream has ended. Unless its lease has ended too, it can be reclaimed until its deadline."""
        if not self.speaks(session):
            return
        del self._by_lease[session.lease_id]
        self._pool.stream_broken(session.lease_id)
        self.drop_lock(session.lock_file)
        if not self._by_lease:
            self._nobody.set()

    def publish(self) -> None:
        """Tells workers where their blocks are now, which tables have to yield, and that there are blocks again."""
        for lease_id in self._pool.remaps.leases_with_news():
            news = self._pool.remaps.take_news(lease_id)
            if (session := self._by_lease.get(lease_id)) is not None:
                for one in news:
                    session.tell(remap_message(one))
        self._publish_recodes()
        self.on_news()
        for lease_id, table_id in self._pool.victims.take_news():
            if (session := self._by_lease.get(lease_id)) is not None:
                session.tell(AttachResponse(victim=Victim(table_id=table_id)))
        for lease_id, available in self._pool.waiting.take_news():
            if (session := self._by_lease.get(lease_id)) is not None:
                session.tell(AttachResponse(capacity=Capacity(available_blocks=available)))

    def _publish_recodes(self) -> None:
        compression = self._pool.compression
        for lease_id in compression.leases_with_news():
            news = compression.take_news(lease_id)  # who has no stream is told again on the next
            if (session := self._by_lease.get(lease_id)) is not None:
                for one in news:
                    session.tell(recode_message(one))
        for recode in compression.take_finished():
            if (future := self._unfinished.pop(recode, None)) is not None:
                future.set_result(None)

    async def finished(self, recodes: Sequence[Recode]) -> None:
        """Waits until all of these are over."""
        loop = asyncio.get_running_loop()
        futures = [self._unfinished.setdefault(one, loop.create_future()) for one in recodes if not one.is_over]
        if futures:
            await asyncio.wait(futures)

    def tick(self) -> None:
        """Ends what is late and returns what belonged to processes that are gone."""
        now = self._clock()
        for lease in self._pool.tick(now):
            _log.warning(
                "lease lost",
                lease_id=lease.lease_id,
                holder=lease.holder,
                worker=lease.is_worker,
                why=lease.lost_because,
            )
            if lease.state is LeaseState.LOST and (session := self._by_lease.get(lease.lease_id)) is not None:
                session.end(_lost(lease))
        for lease_id, lock_file in self._pool.remaps.unfenced():
            if self._locks.fence(lock_file, lease_id):
                self._pool.remaps.fenced(lease_id, now)
        for lease_id, lock_file in self._pool.waiting_for_process():
            if self._locks.is_free(lock_file):
                _log.info("worker's process is gone, its blocks return", lease_id=lease_id, lock_file=lock_file)
                self._pool.process_gone(lease_id, now)
                self.drop_lock(lock_file)
        self.publish()

    async def keep_time(self, interval_s: float) -> None:
        """Ticks until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(interval_s)

    async def drain(self, grace_s: float) -> None:
        """Asks every worker to detach; ends the streams of those that have not within the grace."""
        self.draining = True
        for session in self._by_lease.values():
            session.tell(AttachResponse(drain=Drain(grace=to_duration(grace_s))))
        if await _within(grace_s, self._nobody.wait()):
            return
        for session in self._by_lease.values():
            _log.warning("worker has not detached in time", lease_id=session.lease_id, holder=session.name)
            session.end(draining_error())
        await _within(1.0, self._nobody.wait())

    def drop_lock(self, lock_file: str) -> None:
        """Ends the watch over a lease file that no lease needs any more."""
        used = {session.lock_file for session in self._by_lease.values()}
        used.update(name for _, name in self._pool.waiting_for_process())
        if lock_file not in used:
            self._locks.drop(lock_file)


def draining_error() -> PagepoolError:
    """The answer while memd is on its way out."""
    return PagepoolError(Reason.DRAINING, "memd is stopping; connect again later", retry_after_s=1.0)


def _lost(lease: LeaseView) -> PagepoolError:
    why = lease.lost_because
    message = lease_lost(lease.lease_id, why).message
    return PagepoolError(Reason.LEASE_LOST, message, lease_id=lease.lease_id, why=why, heartbeat_timeout_s=lease.ttl_s)


def remap_message(news: Remap) -> AttachResponse:
    """Tells a worker where a block is now."""
    return AttachResponse(
        remap=RemapMessage(
            sequence=news.sequence,
            table_id=news.table_id,
            index=news.index,
            block_id=news.block_id,
            entry=news.entry,
            old_block_id=news.old_block_id,
        )
    )


def recode_message(news: RecodeNews) -> AttachResponse:
    """Tells a worker what to store in another format."""
    return AttachResponse(recode=RecodeMessage(sequence=news.sequence, sources=news.sources, targets=news.targets))


async def _within(seconds: float, waiting: Awaitable[Any]) -> bool:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return False
    return True
