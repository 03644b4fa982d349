"""PoolSession against a scripted memd on a real socket: what a worker sees when memd answers, refuses, breaks, dies."""

from __future__ import annotations

import fcntl
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from inferd.core.ports import KvPool
from pagekernels.layout import Format, LayerShape, PagedLayout
from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1 import worker_service_pb2 as wire
from pagepool.memd.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from pagepool.pool_values import Capacity, Commit, Draining, Grant, Lost, Refusal, Step, TableRequest, Victim
from pagepool.status import to_status
from pagepool.token_ids import unpack
from pagepool_client.session import Attachment, PoolSession
from pagepool_client.wire import geometry_message

SLAB_BYTES = 8192
GEOMETRY = geometry_message(PagedLayout(16, (LayerShape(1, 8, 8),), Format.F32), b"d" * 32, "tiny")


class ScriptedMemd(WorkerServiceServicer):
    """A memd that keeps one lease and does what a test tells it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, f"unix:{folder / 'memd.sock'}"
        (folder / "leases").mkdir()
        self.slab = folder / "slab"
        self.slab.write_bytes(b"\0" * SLAB_BYTES)
        self.epoch, self.lease_id = 77, 5
        self.interval_s, self.timeout_s = 0.05, 2.0
        self.hellos: list[wire.Hello] = []
        self.heartbeats = 0
        self.steps: list[wire.Step] = []
        self.detached = threading.Event()
        self.answers_heartbeats = self.answers_steps = self.reclaims = True
        self.refuse_hello: PagepoolError | None = None
        self.answer: Callable[[wire.Step], wire.StepResult] = lambda step: wire.StepResult(step_id=step.step_id)
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._start()

    def _start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        add_WorkerServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(self.target)
        self._server.start()

    def Attach(  # noqa: N802 gRPC's name
        self, requests: Iterator[wire.AttachRequest], context: Any
    ) -> Iterator[wire.AttachResponse]:
        orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders = orders
        threading.Thread(target=self._listen, args=(requests, orders), daemon=True).start()
        while (order := orders.get()) is not None:
            if isinstance(order, PagepoolError):
                status = to_status(order)
                context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
                context.abort(grpc.StatusCode[order.code.name], status.message)
            if isinstance(order, grpc.StatusCode):
                context.abort(order, "scripted")
            yield order

    def _listen(self, requests: Iterator[wire.AttachRequest], orders: queue.SimpleQueue[Any]) -> None:
        try:
            for message in requests:
                for answer in self._answers(message):
                    orders.put(answer)
        except grpc.RpcError:
            pass
        orders.put(None)

    def _answers(self, message: wire.AttachRequest) -> Iterator[Any]:
        kind = message.WhichOneof("message")
        if kind == "hello":
            yield self.refuse_hello or self._welcome(message.hello)
        elif kind == "heartbeat":
            self.heartbeats += 1
            if self.answers_heartbeats:
                yield wire.AttachResponse(heartbeat_ack=wire.HeartbeatAck(sequence=message.heartbeat.sequence))
        elif kind == "step":
            self.steps.append(message.step)
            if self.answers_steps:
                yield wire.AttachResponse(step_result=self.answer(message.step))
        elif kind == "detach":
            self.detached.set()
            yield wire.AttachResponse(detach_ack=wire.DetachAck())
            yield None

    def _welcome(self, hello: wire.Hello) -> wire.AttachResponse:
        self.hellos.append(hello)
        asked = (hello.reclaim_epoch, hello.reclaim_lease_id)
        welcome = wire.Welcome(
            epoch=self.epoch,
            lease_id=self.lease_id,
            reclaimed=self.reclaims and asked == (self.epoch, self.lease_id),
            block_size=16,
            unit_bytes=128,
            num_blocks=16,
            slabs=[wire.Slab(size_bytes=SLAB_BYTES, shared_memory=wire.SharedMemoryHandle(path=str(self.slab)))],
        )
        welcome.heartbeat_interval.FromNanoseconds(int(self.interval_s * 1e9))
        welcome.heartbeat_timeout.FromNanoseconds(int(self.timeout_s * 1e9))
        return wire.AttachResponse(welcome=welcome)

    def tell(self, order: Any) -> None:
        """Send a message on the stream, or end it with an error."""
        self._orders.put(order)

    def die(self) -> None:
        self._orders.put(None)
        self._server.stop(None).wait()

    def is_locked(self, path: Path) -> bool:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


@pytest.fixture
def memd(tmp_path: Path) -> Iterator[ScriptedMemd]:
    server = ScriptedMemd(tmp_path)
    yield server
    server.die()


@pytest.fixture
def session(memd: ScriptedMemd) -> Iterator[PoolSession]:
    with PoolSession(Attachment(memd.target, "worker", GEOMETRY)) as opened:
        yield opened


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def events(session: PoolSession, count: int = 1, within_s: float = 5.0) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + within_s
    while len(found) < count and time.monotonic() < deadline:
        session.wait(0.1)
        found += session.poll()
    return found


def test_a_session_is_the_pool_that_the_engine_asks_for() -> None:
    asked = {name: member for name, member in vars(KvPool).items() if not name.startswith("_")}
    assert set(asked) == {"fenced", "info", "poll", "submit", "wait"}
    for name, member in asked.items():
        offered = vars(PoolSession)[name]
        assert type(offered) is type(member)
        if callable(member):
            assert str(inspect.signature(offered)) == str(inspect.signature(member))


def test_attaching_declares_the_geometry_and_holds_the_lock_file(memd: ScriptedMemd, session: PoolSession) -> None:
    (hello,) = memd.hellos
    assert hello.geometry == GEOMETRY
    assert hello.worker_name == "worker"
    assert memd.is_locked(memd.folder / "leases" / hello.lock_file)
    assert (session.info.epoch, session.info.lease_id, session.info.num_blocks) == (77, 5, 16)


def test_the_slab_is_mapped_writable_and_locked_shared(memd: ScriptedMemd, session: PoolSession) -> None:
    session.memory[100:103] = b"kv!"
    assert memd.slab.read_bytes()[100:103] == b"kv!"
    assert memd.is_locked(memd.slab)


def test_a_slab_smaller_than_memd_said_is_refused(memd: ScriptedMemd) -> None:
    memd.slab.write_bytes(b"\0" * 100)
    with pytest.raises(PagepoolError, match="has 100 bytes, but memd said 8192") as caught:
        PoolSession(Attachment(memd.target, "worker", GEOMETRY))
    assert caught.value.reason is Reason.POOL_LOST
    assert list((memd.folder / "leases").iterdir()) == []
    assert memd.detached.wait(5)


def test_steps_are_numbered_and_answers_become_events_in_order(memd: ScriptedMemd, session: PoolSession) -> None:
    memd.answer = lambda step: wire.StepResult(
        step_id=step.step_id,
        grants=[
            wire.Grant(ref=9, table_id=4, cached_tokens=16, block_ids=[1, 2], entries=[7, 8]),
            wire.Grant(ref=8, table_id=5, cached_tokens=20, block_ids=[1, 3], entries=[7, 9], copy_source=8),
        ],
        refusals=[
            wire.Refusal(ref=10, reason=wire.REFUSAL_REASON_POOL_EXHAUSTED, available_blocks=1, total_blocks=16),
            wire.Refusal(ref=11, reason=wire.REFUSAL_REASON_REQUEST_TOO_LARGE, available_blocks=1, total_blocks=16),
            wire.Refusal(ref=12, reason=wire.REFUSAL_REASON_PREFIX_PENDING, available_blocks=1, total_blocks=16),
        ],
    )
    flags = {"no_match": True, "partial": True, "wait_for_prefix": True}
    request = TableRequest(ref=9, token_ids=[1, 2, 3], num_blocks=2, salt=b"s", priority=-1, num_yields=3, **flags)
    session.submit(Step())
    session.submit(Step(commits=[Commit(3, [5, 6])], releases=[2], creates=[request]))
    assert events(session, 5) == [
        Grant(9, 4, 16, [1, 2], [7, 8]),
        Grant(8, 5, 20, [1, 3], [7, 9], copy_source=8),
        Refusal(10, False, 1, 16),
        Refusal(11, True, 1, 16),
        Refusal(12, False, 1, 16, pending=True),
    ]
    (sent,) = memd.steps
    assert (sent.step_id, list(sent.release_table_ids)) == (1, [2])
    assert sent.commits == [wire.Commit(table_id=3, token_ids=[5, 6])]
    (create,) = sent.creates
    assert (create.ref, list(unpack(create.packed_token_ids)), create.num_blocks) == (9, [1, 2, 3], 2)
    assert (create.salt, create.priority, create.num_yields) == (b"s", -1, 3)
    assert (create.no_match, create.partial, create.wait_for_prefix) == (True, True, True)
    assert (session.steps_sent, session.steps_answered, session.unary_calls) == (1, 1, 0)


def test_news_of_memd_becomes_events(memd: ScriptedMemd, session: PoolSession) -> None:
    drain = wire.Drain()
    drain.grace.FromMilliseconds(2500)
    memd.tell(wire.AttachResponse(capacity=wire.Capacity(available_blocks=12)))
    memd.tell(wire.AttachResponse(victim=wire.Victim(table_id=9)))
    memd.tell(wire.AttachResponse(drain=drain))
    assert events(session, 3) == [Capacity(12), Victim(9), Draining(2.5)]


def test_waiting_ends_with_wake_and_with_the_callers_own_signal(memd: ScriptedMemd) -> None:
    signal = threading.Event()
    with PoolSession(Attachment(memd.target, "worker", GEOMETRY), signal) as session:
        assert session.wait(0.01) is False
        threading.Timer(0.02, session.wake).start()
        assert session.wait(5) is True
        signal.set()
        assert session.wait(5) is True
        assert session.poll() == []


def test_submitting_to_a_memd_that_does_not_answer_never_blocks(memd: ScriptedMemd, session: PoolSession) -> None:
    memd.answers_steps = False
    begun = time.monotonic()
    for _ in range(500):
        session.submit(Step(releases=[1]))
    assert time.monotonic() - begun < 1.0
    assert eventually(lambda: len(memd.steps) == 500)
    assert session.poll() == []


def test_heartbeats_keep_the_lease_while_the_engine_is_busy(memd: ScriptedMemd) -> None:
    memd.timeout_s = 0.5
    with PoolSession(Attachment(memd.target, "worker", GEOMETRY)) as session:
        time.sleep(0.8)  # an engine in a long forward: longer than the lease lasts without heartbeats
        assert memd.heartbeats >= 5
        assert session.poll() == []


def test_a_memd_that_stops_answering_heartbeats_loses_the_lease_in_time(memd: ScriptedMemd) -> None:
    memd.timeout_s = 0.3
    with PoolSession(Attachment(memd.target, "worker", GEOMETRY)) as session:
        memd.answers_heartbeats = False
        begun = time.monotonic()
        (lost,) = events(session)
        assert isinstance(lost, Lost)
        assert "no heartbeat was answered for 0.3 s" in lost.message
        assert time.monotonic() - begun < 2.0


def test_a_worker_that_was_stopped_past_its_lease_knows_it_at_once(memd: ScriptedMemd) -> None:
    offset = [0.0]
    clock = lambda: time.monotonic() + offset[0]  # noqa: E731
    with PoolSession(Attachment(memd.target, "worker", GEOMETRY, clock=clock)) as session:
        offset[0] = 60.0
        (lost,) = events(session)
        assert isinstance(lost, Lost)


def test_a_broken_stream_is_reclaimed_and_unanswered_steps_are_sent_again(
    memd: ScriptedMemd, session: PoolSession
) -> None:
    memd.answers_steps = False
    session.submit(Step(releases=[1]))
    session.submit(Step(releases=[2]))
    assert eventually(lambda: len(memd.steps) == 2)
    memd.answers_steps = True
    memd.tell(grpc.StatusCode.UNAVAILABLE)
    assert eventually(lambda: session.steps_answered == 2)
    session.submit(Step(releases=[3]))
    assert eventually(lambda: session.steps_answered == 3)
    assert [step.step_id for step in memd.steps] == [1, 2, 1, 2, 3]
    assert memd.hellos[1].reclaim_epoch == 77
    assert memd.hellos[1].reclaim_lease_id == 5
    assert memd.hellos[1].lock_file == memd.hellos[0].lock_file
    assert session.poll() == []


@pytest.mark.parametrize("change", [{"reclaims": False}, {"epoch": 78}])
def test_a_lease_that_is_not_given_back_is_lost_and_the_new_one_returned(
    memd: ScriptedMemd, session: PoolSession, change: dict[str, Any]
) -> None:
    vars(memd).update(change)
    memd.tell(grpc.StatusCode.UNAVAILABLE)
    (lost,) = events(session)
    assert isinstance(lost, Lost)
    assert "did not give the lease back" in lost.message
    assert memd.detached.wait(5)


@pytest.mark.parametrize("reason", [Reason.LEASE_LOST, Reason.PROTOCOL_VIOLATION, Reason.DRAINING])
def test_an_end_that_memd_gives_a_reason_for_is_final(memd: ScriptedMemd, session: PoolSession, reason: Reason) -> None:
    memd.tell(PagepoolError(reason, "scripted end"))
    assert events(session) == [Lost("scripted end")]
    session.submit(Step(releases=[1]))
    session.close()
    assert len(memd.hellos) == 1
    assert session.steps_sent == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_keeper_that_fails_takes_the_lease_with_it(
    memd: ScriptedMemd, session: PoolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path) -> bool:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("pagepool_client.attach_line._listening", fail)
    memd.tell(grpc.StatusCode.UNAVAILABLE)
    (lost,) = events(session)
    assert isinstance(lost, Lost)
    assert "can't start new thread" in lost.message


def test_the_death_of_memd_is_known_within_two_seconds(memd: ScriptedMemd, session: PoolSession) -> None:
    memd.timeout_s = 60.0
    begun = time.monotonic()
    memd.die()
    (lost,) = events(session)
    assert isinstance(lost, Lost)
    assert "is gone" in lost.message
    assert time.monotonic() - begun < 2.0


def test_closing_detaches_and_drops_lock_and_mapping_though_views_live(memd: ScriptedMemd) -> None:
    session = PoolSession(Attachment(memd.target, "worker", GEOMETRY))
    view = session.memory[:64]
    view[0] = 1
    session.close()
    session.close()
    assert memd.detached.is_set()
    assert list((memd.folder / "leases").iterdir()) == []
    assert not memd.is_locked(memd.slab)
    view[1] = 2
    assert memd.slab.read_bytes()[:2] == b"\x01\0"
    assert view[0] == 0


def test_a_refused_worker_leaves_nothing_behind(memd: ScriptedMemd) -> None:
    memd.refuse_hello = PagepoolError(Reason.GEOMETRY_MISMATCH, "the pool belongs to another model")
    with pytest.raises(PagepoolError, match="another model") as caught:
        PoolSession(Attachment(memd.target, "worker", GEOMETRY))
    assert caught.value.reason is Reason.GEOMETRY_MISMATCH
    assert list((memd.folder / "leases").iterdir()) == []
    assert not memd.is_locked(memd.slab)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("pagepool-")] == []


def test_no_thread_of_a_closed_session_stays(memd: ScriptedMemd) -> None:
    session = PoolSession(Attachment(memd.target, "worker", GEOMETRY))
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("pagepool-")}
    assert names == {"pagepool-attach-reader", "pagepool-lease-keeper"}
    assert all(thread.daemon for thread in threading.enumerate() if thread.name in names)
    session.close()
    assert not [thread for thread in threading.enumerate() if thread.name in names]


def test_a_memd_that_is_not_there_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    with pytest.raises(PagepoolError, match=r"nothing answers at unix:.*memd\.sock .*pagepool up"):
        PoolSession(Attachment(f"unix:{tmp_path / 'memd.sock'}", "worker", GEOMETRY))
    with pytest.raises(PagepoolError, match=r"lease file .* is memd running there"):
        PoolSession(Attachment(f"unix:{tmp_path / 'nowhere' / 'memd.sock'}", "worker", GEOMETRY))


def test_a_worker_cannot_attach_over_tcp() -> None:
    with pytest.raises(PagepoolError, match=r"memd is 127.0.0.1:7070, but must be unix:PATH"):
        PoolSession(Attachment("127.0.0.1:7070", "worker", GEOMETRY))
