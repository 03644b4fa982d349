"""Puts an engine together: model, session with memd, channel to the front. Wiring only."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from inferd import surroundings
from inferd.channel import EngineChannel
from inferd.core.messages import EngineState, ModelCard, Setup, Shutdown
from inferd.core.scheduler import Limits
from inferd.engine import Engine
from inferd.failures import failed
from inferd.model.digest import digest
from inferd.model.load import ServedModel, load_model
from inferd.model.refusal import refuse
from inferd.model.runner import ModelRunner
from inferd.model.source import resolve
from inferd.surroundings import Mailbox, Surroundings
from inferd.text.export import export_tokenizer
from inferd.warmup import warm_up
from pagekernels import open_ops
from pagekernels.cpu import configure
from pagekernels.cpu import warm_up as compile_kernels
from pagekernels.layout import MIN_BLOCK_SIZE
from pagepool import logs
from pagepool.errors import PagepoolError
from pagepool.lifecycle import EXIT_USAGE
from pagepool_client.attach_line import Attachment
from pagepool_client.session import PoolSession
from pagepool_client.wire import geometry_message

STOP_GRACE_S = 10.0
"""How long requests may go on after SIGTERM; the front's own Shutdown says its grace."""

log = structlog.get_logger(__name__)


def serve(front: socket.socket) -> int:
    """Load the model, attach, and run until the front or SIGTERM ends it; the exit code."""
    channel, mailbox = EngineChannel(front), Mailbox()
    channel.start(mailbox.post)
    try:
        mailbox.rest(None)
        setup = next(mailbox.take())
        if not isinstance(setup, Setup):  # the front is gone again
            return 0
        logs.configure(setup.log_level, setup.log_format)
        engine = assemble(setup, channel, mailbox)
        stop_on_sigterm(mailbox)
        engine.run()
    except PagepoolError as error:
        # An error of the vocabulary says what is wrong; a traceback would only hide it.
        log.error("the engine cannot start", reason=str(error.reason), why=error.message)  # noqa: TRY400
        channel.send(failed(0, error))
        return EXIT_USAGE
    finally:
        channel.close()
    return 0


def assemble(setup: Setup, channel: EngineChannel, mailbox: Mailbox) -> Engine:
    """An engine that is ready to run. PagepoolError if it cannot be with this setup."""

    def tell(what: str) -> None:
        log.info(what)
        channel.send(EngineState("loading", what))

    limits = Limits(setup.max_batch_tokens, setup.max_num_seqs, setup.max_queue)
    threads = setup.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    configure(threads)
    tell("loading the kernels (the first time they are compiled, which takes a minute)")
    compile_kernels()
    cache = Path(setup.cache_dir)
    folder = resolve(setup.model, cache, tell)
    tokenizer = export_tokenizer(folder, cache)
    served, identity = load(setup, folder, cache, tell)
    channel.send(model_card(served, folder, tokenizer, identity))
    worker = Worker(setup, served, identity, limits, mailbox)
    around = Surroundings(worker.attach, channel.send, mailbox, time.monotonic)
    return Engine(around, limits, served.eos_token_ids)


def load(setup: Setup, folder: Path, cache: Path, tell: Callable[[str], None]) -> tuple[ServedModel, bytes]:
    """The model and whose it is. Files that change while they are read would give one model's KV another's name."""
    identity = digest(folder, cache)
    served = load_model(folder, name=setup.model, dtype=setup.dtype, tell=tell)
    if digest(folder, cache) != identity:
        raise refuse(
            setup.model, f"files in {folder} changed while they were read", "start again when they are complete"
        )
    return served, identity


def model_card(served: ServedModel, folder: Path, tokenizer: Path, identity: bytes) -> ModelCard:
    """What the front is told of the model."""
    return ModelCard(
        folder=str(folder),
        tokenizer=str(tokenizer),
        architecture=served.architecture,
        max_context_tokens=served.max_context,
        vocab_size=served.vocab_size,
        dtype=served.dtype,
        eos_token_ids=list(served.eos_token_ids),
        digest=identity,
    )


@dataclass(frozen=True, slots=True)
class Worker:
    """A loaded model that can be bound to one pool after another."""

    setup: Setup
    served: ServedModel
    identity: bytes
    limits: Limits
    mailbox: Mailbox

    def attach(self) -> surroundings.Attachment:
        """Attach to memd and bind the model to the slab; see Surroundings.attach."""
        # The geometry says nothing of the block size: that is memd's.
        geometry = geometry_message(self.served.layout(MIN_BLOCK_SIZE), self.identity, self.setup.model)
        session = PoolSession(Attachment(self.setup.memd, self.setup.name, geometry), self.mailbox.signal)
        try:
            ops = open_ops(session.memory, self.served.layout(session.info.block_size))
            runner = ModelRunner(self.served, ops)
        except BaseException:
            session.close()
            raise
        return surroundings.Attachment(
            pool=session,
            model=runner,
            close=session.close,
            warm_up=partial(warm_up, session, runner, self.limits, self.served.max_context)
            if self.setup.warmup
            else lambda: None,
            unary_calls=lambda: session.unary_calls,
        )


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
