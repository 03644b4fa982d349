"""Puts an engine together: model, session with memd, channel to the front. Wiring only."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from inferd import surroundings
from inferd.channel import EngineChannel
from inferd.core.limits import Limits
from inferd.core.messages import EngineState, ModelCard, Setup, Shutdown
from inferd.device import respawning, settle
from inferd.engine import Engine
from inferd.failures import failed
from inferd.machine import DEFAULT_LIMITS, CpuMachine, GpuMachine, GpuOptions, Machine, gpu_errors
from inferd.model.digest import digest
from inferd.model.load import CPU, ServedModel, load_model
from inferd.model.refusal import refuse
from inferd.model.source import resolve
from inferd.surroundings import DeviceLostError, Mailbox, Surroundings
from inferd.text.export import export_tokenizer
from inferd.warmup import warm_up
from pagekernels.layout import MIN_BLOCK_SIZE
from pagepool import logs
from pagepool.errors import PagepoolError
from pagepool.lifecycle import EXIT_USAGE
from pagepool_client.attach_line import Attachment
from pagepool_client.session import PoolSession
from pagepool_client.wire import geometry_message

if TYPE_CHECKING:
    import torch

STOP_GRACE_S = 10.0
"""How long requests may go on after SIGTERM; the front's own Shutdown says its grace."""

EXIT_DEVICE_LOST = 76
"""Exit code of an engine whose GPU takes no more work from its process: the front starts another one."""

log = structlog.get_logger(__name__)


class StoppedError(Exception):
    """The engine was told to stop before it had begun."""


def serve(front: socket.socket) -> int:
    """Load the model, attach, and run until the front or SIGTERM ends it; the exit code.

    Raises RespawnError if this process has memd's PID, and so cannot map its GPU memory.
    """
    channel, mailbox = EngineChannel(front), Mailbox()
    channel.start(mailbox.post)
    try:
        mailbox.rest(None)
        setup = next(mailbox.take())
        if not isinstance(setup, Setup):  # the front is gone again
            return 0
        logs.configure(setup.log_level, setup.log_format)
        with ExitStack() as undo:
            engine = assemble(setup, channel, mailbox, undo)
            stop_on_sigterm(mailbox)
            run(engine, channel)
    except StoppedError:
        return 0
    except PagepoolError as error:
        # An error of the vocabulary says what is wrong; a traceback would only hide it.
        log.error("the engine cannot start", reason=str(error.reason), why=error.message)  # noqa: TRY400
        channel.send(failed(0, error))
        return EXIT_USAGE
    finally:
        channel.close()
    return 0


def run(engine: Engine, channel: EngineChannel) -> None:
    """Run an engine. Ends the process if its GPU takes no more work."""
    try:
        engine.run()
    except DeviceLostError as error:
        log.error("the GPU takes no more work from this process, which ends", why=str(error))  # noqa: TRY400
        channel.close()
        # Nothing is given back in order: the driver refuses that now too, and PyCUDA would abort over it.
        os._exit(EXIT_DEVICE_LOST)


def assemble(setup: Setup, channel: EngineChannel, mailbox: Mailbox, undo: ExitStack) -> Engine:
    """An engine that is ready to run; `undo`, when it has run, gives its device up. For the engine's thread.

    PagepoolError if it cannot be with this setup. Raises StoppedError if it is told to stop while it waits for memd.
    """

    def tell(what: str) -> None:
        log.info(what)
        channel.send(EngineState("loading", what))

    # Before anything touches a GPU: see inferd.device.
    index = settle(setup.device, setup.memd, tell, partial(rest, mailbox))
    limits = limits_on("cpu" if index is None else "cuda", setup)
    machine = open_machine(index, setup, tell)
    undo.callback(machine.close)
    cache = Path(setup.cache_dir)
    folder = resolve(setup.model, cache, tell)
    tokenizer = export_tokenizer(folder, cache)
    served, identity = load(setup, folder, cache, tell, machine.device)
    channel.send(model_card(served, folder, tokenizer, identity, machine.unsupported_fields))
    worker = Worker(setup, served, identity, limits, mailbox, machine)
    around = Surroundings(worker.attach, channel.send, mailbox, time.monotonic)
    return Engine(around, limits, served.eos_token_ids)


def rest(mailbox: Mailbox, seconds: float) -> None:
    """Wait so long, or until the front says something; StoppedError if that is the end."""
    mailbox.rest(seconds)
    if mailbox.ended:
        raise StoppedError


def limits_on(kind: str, setup: Setup) -> Limits:
    """What a step may hold on a kind of device. PagepoolError if no step could be built."""
    tokens, sequences = DEFAULT_LIMITS[kind]
    most = setup.max_batch_tokens or tokens, setup.max_num_seqs or sequences, setup.max_queue
    return Limits(*most, setup.speculate_tokens, setup.chunked_prefix, setup.prefix_wait_s, setup.exact)


def open_machine(index: int | None, setup: Setup, tell: Callable[[str], None]) -> Machine:
    """The settled device, ready for a model."""
    if index is None:
        return CpuMachine(setup.threads or len(os.sched_getaffinity(0)), tell)
    return GpuMachine(index, GpuOptions(setup.compile, setup.graphs, Path(setup.cache_dir)), tell)


def load(
    setup: Setup, folder: Path, cache: Path, tell: Callable[[str], None], device: torch.device = CPU
) -> tuple[ServedModel, bytes]:
    """The model and whose it is. Files that change while they are read would give one model's KV another's name."""
    identity = digest(folder, cache)
    served = load_model(folder, name=setup.model, dtype=setup.dtype, device=device, tell=tell)
    if digest(folder, cache) != identity:
        raise refuse(
            setup.model, f"files in {folder} changed while they were read", "start again when they are complete"
        )
    return served, identity


def model_card(
    served: ServedModel, folder: Path, tokenizer: Path, identity: bytes, unsupported_fields: Iterable[str]
) -> ModelCard:
    """What the front is told of the model, and of what its machine cannot do."""
    return ModelCard(
        folder=str(folder),
        tokenizer=str(tokenizer),
        architecture=served.architecture,
        max_context_tokens=served.max_context,
        vocab_size=served.vocab_size,
        dtype=served.dtype,
        eos_token_ids=list(served.eos_token_ids),
        digest=identity,
        unsupported_fields=list(unsupported_fields),
    )


@dataclass(frozen=True, slots=True)
class Worker:
    """A loaded model that can be bound to one pool after another."""

    setup: Setup
    served: ServedModel
    identity: bytes
    limits: Limits
    mailbox: Mailbox
    machine: Machine

    def attach(self) -> surroundings.Attachment:
        """Attach to memd and bind the model to its memory; see Surroundings.attach.

        RespawnError if memd has come back with this process's PID.
        """
        # The geometry says nothing of the block size: that is memd's.
        geometry = geometry_message(self.served.layout(MIN_BLOCK_SIZE), self.identity, self.setup.model)
        with respawning():
            attachment = Attachment(self.setup.memd, self.setup.name, geometry, takes_remaps=True, takes_recodes=True)
            session = PoolSession(attachment, self.mailbox.signal)
        try:
            bound = self.machine.bind(self.served, session, self.limits)
        except BaseException:
            session.close()
            raise

        def close() -> None:
            bound.close()  # first, since what was captured knows the memory's address
            session.close()

        def warm() -> None:
            if self.setup.warmup:
                with gpu_errors(self.limits) if self.machine.device.type == "cuda" else nullcontext():
                    warm_up(session, bound.model, self.limits, self.served.max_context, fp8=session.fp8)
            # What has been made until now stays: a collection that looked at all of it would hold up every stream.
            gc.collect()
            gc.freeze()
            give_memory_back()

        return surroundings.Attachment(session, bound.model, close, warm, lambda: session.unary_calls, session)


def give_memory_back() -> None:
    """Give the system what is free of malloc's memory.

    Loading and warming up leave holes whose pages would stay: 60 MB, of SmolLM2-135M in float32. Only glibc is asked.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def stop_on_sigterm(mailbox: Mailbox) -> None:
    """From now on SIGTERM is a Shutdown. By way of a pipe: a handler on the engine's thread could meet its own lock."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)

    def listen() -> None:
        os.read(reader, 1)
        mailbox.post(Shutdown(STOP_GRACE_S))

    threading.Thread(target=listen, name="sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: None)
    signal.set_wakeup_fd(writer)
