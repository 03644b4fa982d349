"""Which device an engine computes on, what it waits for, and when it must be another process."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from typing import Any

import pytest
import torch

from inferd import device, engine_process, supervisor
from inferd.core.messages import EngineState
from inferd.device import EXIT_RESPAWN, RespawnError, choose_device, must_respawn, settle
from inferd.dispatch import Dispatcher
from inferd.supervisor import Supervisor
from pagekernels.cuda.identity import CudaUnavailableError, Driver
from pagepool.errors import Code, PagepoolError, Reason
from pagepool.pool_values import CudaDevice
from pagepool.status import ForeignError
from pagepool_client.cuda_mapping import require_other_pid
from tests.cpu.fake_cuda import FakeGpu, Machine, fake_driver

MACHINE = Machine([FakeGpu(0), FakeGpu(1), FakeGpu(2)])
POOL = CudaDevice("GPU-02020202-0202-0202-0202-020202020202", 1, "Fake GPU")


def choose(flag: str, pool: CudaDevice | None, visible: list[int] | None = None) -> int | None:
    return choose_device(flag, pool, lambda: fake_driver(MACHINE, visible), wsl2=False)


def nowhere() -> Driver:
    raise CudaUnavailableError("CUDA cannot be used (libcuda.so.1: no such file)")


@pytest.mark.parametrize(
    ("flag", "pool", "visible", "index"),
    [
        ("auto", None, None, None),
        ("cpu", None, None, None),
        ("auto", POOL, None, 1),
        ("cuda", POOL, None, 1),
        ("cuda:1", POOL, None, 1),
        ("cuda:0", POOL, [1, 0], 0),
        ("auto", POOL, [2, 1], 1),
    ],
)
def test_the_device_is_memd_s_by_its_number_here(
    flag: str, pool: CudaDevice | None, visible: list[int] | None, index: int | None
) -> None:
    assert choose(flag, pool, visible) == index


@pytest.mark.parametrize(
    ("flag", "pool", "visible", "text"),
    [
        ("cuda", None, None, r"--device is cuda, but memd's pool lies in shared memory; start memd with --device cuda"),
        ("cuda:1", None, None, r"--device is cuda:1, but memd's pool lies in shared memory"),
        ("cpu", POOL, None, r"--device is cpu, but memd's pool lies on Fake GPU \(GPU-0202.*; start inferd with"),
        ("cuda:0", POOL, None, r"--device is cuda:0, but .*, which is cuda:1 here; start inferd with --device cuda:1"),
        (
            "auto",
            POOL,
            [0, 2],
            r"but this process sees cuda:0 Fake GPU \(GPU-0101.*, cuda:1 Fake .*VISIBLE_DEVICES=GPU",
        ),
        ("auto", POOL, [], r"but this process sees no GPU; start inferd where that device is visible"),
    ],
)
def test_another_device_is_refused_with_both_and_the_way_out(
    flag: str, pool: CudaDevice | None, visible: list[int] | None, text: str
) -> None:
    with pytest.raises(PagepoolError, match=text) as caught:
        choose(flag, pool, visible)
    assert (caught.value.reason, caught.value.field) == (Reason.DEVICE_MISMATCH, "--device")


def test_mig_wsl2_and_a_missing_driver_are_named() -> None:
    mig = Machine([FakeGpu(1, mig=True)])
    with pytest.raises(PagepoolError, match="no memory between MIG instances"):
        choose_device("auto", POOL, lambda: fake_driver(mig), wsl2=False)
    with pytest.raises(PagepoolError, match="WSL 2, where CUDA maps no memory"):
        choose_device("auto", POOL, lambda: fake_driver(MACHINE), wsl2=True)
    with pytest.raises(PagepoolError, match=r"lies on Fake GPU .*libcuda\.so\.1.*, or memd with --device cpu"):
        choose_device("auto", POOL, nowhere, wsl2=False)


def test_only_the_same_pid_value_asks_for_another_process() -> None:
    assert must_respawn(1, 1)
    assert not must_respawn(2, 1)


class Memd:
    """What GetPool would say: errors first, then the pool."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.told: list[str] = []
        self.pauses: list[float] = []

    def ask(self, target: str) -> CudaDevice | None:
        assert target == "unix:/memd.sock"
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: CudaDevice | None = answer
        return found

    def settle(self, flag: str) -> int | None:
        return settle(flag, "unix:/memd.sock", self.told.append, self.pauses.append, self.ask)


ABSENT = ForeignError("nothing answers at unix:/memd.sock", Code.UNAVAILABLE)
STOPPED = ForeignError("Deadline Exceeded", Code.UNKNOWN)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with GPUs."""
    monkeypatch.setattr(device, "open_driver", lambda: fake_driver(MACHINE))
    monkeypatch.setattr(device, "on_wsl2", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


def test_where_a_gpu_may_be_meant_memd_is_waited_for_and_its_gpu_taken(here: pytest.MonkeyPatch) -> None:
    for flag in ("auto", "cuda", "cuda:1"):
        memd = Memd(ABSENT, STOPPED, ABSENT, ABSENT, ABSENT, ABSENT, POOL)
        assert memd.settle(flag) == 1
        assert memd.pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
        assert "waiting for memd, whose device decides this worker's: nothing answers" in memd.told[0]


def test_the_cpu_is_settled_without_a_memd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "open_driver", nowhere)
    for flag in ("auto", "cpu"):
        memd = Memd(ABSENT)
        assert memd.settle(flag) is None
        assert memd.pauses == []
        assert Memd(None).settle(flag) is None


def test_a_cpu_worker_of_a_gpu_pool_is_refused_before_it_loads_a_model() -> None:
    with pytest.raises(PagepoolError, match="--device is cpu, but memd's pool lies on"):
        Memd(POOL).settle("cpu")


def test_what_memd_refuses_is_not_asked_again() -> None:
    with pytest.raises(PagepoolError, match="words"):
        Memd(PagepoolError(Reason.INVALID_FIELD, "words")).settle("auto")


def test_memd_s_own_pid_is_found_before_any_gpu_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "choose_device", lambda *_: pytest.fail("CUDA was touched"))
    with pytest.raises(RespawnError):
        Memd(CudaDevice(POOL.uuid, os.getpid())).settle("auto")


def test_a_memd_that_comes_back_with_the_engine_s_pid_ends_the_engine_too() -> None:
    with pytest.raises(RespawnError), device.respawning():
        require_other_pid(CudaDevice(POOL.uuid, os.getpid()))
    with pytest.raises(PagepoolError, match="words"), device.respawning():
        raise PagepoolError(Reason.DEVICE_MISMATCH, "words")


def test_a_torch_without_cuda_is_named(here: pytest.MonkeyPatch) -> None:
    here.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PagepoolError, match=rf"but torch {re.escape(torch.__version__)} cannot use the GPU") as caught:
        Memd(POOL).settle("auto")
    assert caught.value.reason is Reason.DEVICE_MISMATCH


def test_an_engine_that_must_be_another_process_says_so_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from inferd import engine_setup

    def serve(front: socket.socket) -> int:
        front.close()  # as its channel does
        raise RespawnError

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(engine_setup, "serve", serve)
    monkeypatch.setattr(engine_process, "quit_on_sigterm", lambda: None)
    with ours:
        assert engine_process.main(theirs.detach()) == EXIT_RESPAWN


class Life:
    """An engine that ends at once with a code, after it has served or not."""

    def __init__(self, code: int, *, serves: bool = False) -> None:
        self._code = code
        self._messages = [EngineState("serving")] if serves else []
        self.channel: Any = self

    def send(self, _message: Any) -> None: ...

    async def close(self) -> None: ...

    def __aiter__(self) -> Life:
        return self

    async def __anext__(self) -> EngineState:
        if not self._messages:
            raise StopAsyncIteration
        return self._messages.pop()

    async def wait(self) -> int:
        return self._code

    def kill(self) -> None: ...


async def lives(*planned: Life) -> tuple[int, list[float], str]:
    """How many lives a supervisor led of those planned, its pauses, and why it ended."""
    left, pauses = list(planned), []

    async def launch() -> Any:
        if not left:
            raise asyncio.CancelledError
        return left.pop(0)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    try:
        await Supervisor(launch, Dispatcher(lambda: None), sleep).run()
    except (PagepoolError, asyncio.CancelledError) as error:
        return len(planned) - len(left), pauses, str(error)
    raise AssertionError("a supervisor that is not told to stop does not end like this")


async def test_the_front_starts_another_engine_at_once_when_one_has_memd_s_pid() -> None:
    planned = [Life(EXIT_RESPAWN), Life(EXIT_RESPAWN), Life(0, serves=True)]
    planned += [Life(EXIT_RESPAWN, serves=True) for _ in range(5)]
    count, pauses, _ = await lives(*planned)
    assert count == len(planned)
    assert pauses == [0.5]


async def test_the_front_gives_up_when_every_engine_has_memd_s_pid() -> None:
    count, pauses, why = await lives(*[Life(EXIT_RESPAWN)] * (supervisor.MAX_RESPAWNS + 5))
    assert (count, pauses) == (supervisor.MAX_RESPAWNS + 1, [])
    assert "the engine did not get to serve (exit code 75)" in why
