"""How an engine is put together, where that is more than wiring."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from inferd import engine_setup, machine
from inferd.channel import EngineChannel, encode
from inferd.core.limits import Limits
from inferd.core.messages import Cancel, EngineState, Setup, Shutdown
from inferd.model import load
from inferd.model.cuda_tokens import Launched
from inferd.model.digest import digest
from inferd.model.load import prepare
from inferd.model.runner import Computed
from inferd.surroundings import DeviceLostError, Mailbox, Scoring
from pagekernels.cuda.build import BuildError
from pagepool.errors import PagepoolError, Reason
from tests.cpu.model_configs import random_model


@pytest.mark.parametrize("changes", [False, True])
def test_weights_that_change_while_they_are_read_are_not_served_under_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old weights")

    def load_model(*_: Any, **__: Any) -> str:
        if changes:
            (folder / "model.safetensors").write_bytes(b"new weights")
        return "a model"

    monkeypatch.setattr(engine_setup, "load_model", load_model)
    setup = Setup(str(folder), "unix:/nowhere")
    if changes:
        with pytest.raises(PagepoolError, match="changed while they were read; start again"):
            engine_setup.load(setup, folder, cache, print)
    else:
        expected: Any = ("a model", digest(folder, cache))
        assert engine_setup.load(setup, folder, cache, print) == expected


@pytest.mark.parametrize(
    ("kind", "given", "limits"),
    [
        ("cpu", (0, 0), (512, 64)),
        ("cuda", (0, 0), (8192, 256)),
        ("cuda", (300, 0), (300, 256)),
        ("cpu", (0, 7), (512, 7)),
    ],
)
def test_what_a_step_may_hold_depends_on_the_device(kind: str, given: tuple[int, int], limits: tuple[int, int]) -> None:
    found = engine_setup.limits_on(kind, Setup("m", "unix:/m", max_batch_tokens=given[0], max_num_seqs=given[1]))
    assert (found.max_batch_tokens, found.max_num_seqs) == limits


def test_a_step_too_small_for_the_default_number_of_sequences_is_refused_with_the_flags() -> None:
    with pytest.raises(PagepoolError, match=r"--max-batch-tokens is 200, but .* --max-num-seqs \(256\)"):
        engine_setup.limits_on("cuda", Setup("m", "unix:/m", max_batch_tokens=200))


Settle = Callable[[str, str, Callable[[str], None], Callable[[float], None]], int | None]


def served_until_the_end(monkeypatch: pytest.MonkeyPatch, settle: Settle, *messages: Any) -> tuple[int, list[Any]]:
    """The exit code of an engine process with this way to settle its device, and which machine it opened."""
    opened: list[Any] = []

    def open_machine(index: int | None, *_: Any) -> None:
        opened.append(index)
        raise PagepoolError(Reason.ENGINE_FAILED, "far enough")

    monkeypatch.setattr(engine_setup, "settle", settle)
    monkeypatch.setattr(engine_setup, "open_machine", open_machine)
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(b"".join(map(encode, [Setup("/no/model", "unix:/memd.sock", device="cuda"), *messages])))
        return engine_setup.serve(theirs), opened


def test_the_device_is_settled_with_memd_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def settle(flag: str, memd: str, tell: Callable[[str], None], _rest: Callable[[float], None]) -> int:
        asked.append((flag, memd))
        tell("waiting")
        return 3

    assert served_until_the_end(monkeypatch, settle) == (2, [3])
    assert asked == [("cuda", "unix:/memd.sock")]


def test_an_engine_that_waits_for_memd_hears_that_it_shall_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(_flag: str, _memd: str, _tell: Callable[[str], None], rest: Callable[[float], None]) -> int:
        for _ in range(1000):
            rest(1.0)
        raise AssertionError("nobody ended the wait")

    assert served_until_the_end(monkeypatch, settle, Cancel(7), Shutdown(0.0)) == (0, [])


def test_waiting_takes_nothing_out_of_the_mailbox() -> None:
    mailbox = Mailbox()
    mailbox.post(Cancel(7))
    engine_setup.rest(mailbox, 0.01)
    mailbox.post(None)
    with pytest.raises(engine_setup.StoppedError):
        engine_setup.rest(mailbox, 60)
    assert list(mailbox.take()) == [Cancel(7), None]


def test_a_lost_gpu_ends_the_process_at_once_after_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    class Lost:
        def run(self) -> None:
            raise DeviceLostError("an illegal memory access was encountered")

    def leave(code: int) -> None:
        assert code == engine_setup.EXIT_DEVICE_LOST
        raise Ended

    monkeypatch.setattr("os._exit", leave)
    ours, theirs = socket.socketpair()
    channel = EngineChannel(theirs)
    channel.start(lambda _message: None)
    channel.send(EngineState("serving"))
    with pytest.raises(Ended):
        engine_setup.run(cast("Any", Lost()), channel)
    with ours, ours.makefile("rb") as stream:
        assert stream.read() == encode(EngineState("serving"))


class MemoryError(Exception):  # noqa: A001 (as PyCUDA names its own)
    """cuMemAlloc failed: out of memory"""


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("cuMemAlloc failed")])
def test_too_little_memory_beside_the_pool_names_what_to_lower(error: Exception) -> None:
    words = r"--max-batch-tokens is 8192, but .*256 seq.*--reserve-bytes"
    with pytest.raises(PagepoolError, match=words) as caught, machine.gpu_errors(Limits(8192, 256)):
        raise error
    assert caught.value.field == "--max-batch-tokens"


def test_a_missing_compiler_is_named_and_other_errors_stay_what_they_are() -> None:
    with pytest.raises(PagepoolError, match="cannot be built: install nvcc"), machine.gpu_errors(Limits()):
        raise BuildError("install nvcc")
    with pytest.raises(ZeroDivisionError), machine.gpu_errors(Limits()):
        raise ZeroDivisionError


def test_the_dtype_auto_is_the_checkpoint_s_on_a_gpu_whatever_this_cpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "has_16_bit_arithmetic", lambda: False)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert load.choose_dtype("auto", dtype, "cuda") is dtype
        assert load.choose_dtype("auto", dtype, "cpu") is torch.float32
    assert load.choose_dtype("auto", torch.float64, "cuda") is torch.float32
    assert load.choose_dtype("auto", None, "cuda") is torch.float32


@pytest.mark.parametrize(
    ("kind", "pending", "fields"),
    [(machine.CpuMachine, Computed, ()), (machine.GpuMachine, Launched, ())],
)
def test_the_front_is_told_which_fields_a_machine_cannot_do(
    kind: type[Any], pending: type[Any], fields: tuple[str, ...]
) -> None:
    served = prepare("llama", random_model("llama"))
    card = engine_setup.model_card(served, Path("f"), Path("t"), bytes(32), kind.unsupported_fields)
    assert (card.unsupported_fields, card.digest, card.vocab_size) == ([*fields], bytes(32), served.vocab_size)
    says_logprobs = {"logprobs", "prompt_logprobs"}.isdisjoint(card.unsupported_fields)
    assert issubclass(pending, Scoring) is says_logprobs


def resident_mb() -> float:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_what_a_thread_has_freed_goes_back_to_the_system() -> None:
    kept: list[bytearray] = []

    def work() -> None:
        # Too small to be mapped one by one; those that stay keep the arena from shrinking by itself.
        pieces = [bytearray(100_000) for _ in range(2000)]
        kept.extend(pieces[::20])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = resident_mb()
    engine_setup.give_memory_back()
    assert resident_mb() < before - 100
    assert len(kept) == 100
