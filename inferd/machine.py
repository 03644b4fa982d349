"""What an engine computes with, the CPU or one GPU, and how a model is bound there to the memory of a pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from inferd.core.limits import Limits
from inferd.model.load import CPU, ServedModel
from inferd.model.runner import ModelRunner
from inferd.surroundings import Model
from pagekernels import open_ops
from pagekernels.cpu import configure
from pagekernels.cpu import warm_up as compile_kernels
from pagekernels.cuda.build import BuildError
from pagekernels.cuda.device import open_device
from pagepool.errors import PagepoolError, Reason, invalid_field
from pagepool_client.cuda_mapping import CudaMapping
from pagepool_client.session import PoolSession

if TYPE_CHECKING:
    from inferd.model.cuda_graphs import CompiledForward

Tell = Callable[[str], None]

DEFAULT_LIMITS = {"cpu": (512, 64), "cuda": (8192, 256)}
"""--max-batch-tokens and --max-num-seqs by kind of device: a GPU takes 64 sequences hardly longer than one."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A model over one pool's memory. `close` gives up all that knows that memory, when no step is in flight."""

    model: Model
    close: Callable[[], None]


class Machine(Protocol):
    """A device that this process has made ready; all calls on the engine's thread."""

    @property
    def device(self) -> torch.device:
        """Where the model must lie."""

    @property
    def unsupported_fields(self) -> tuple[str, ...]:
        """Those of LOGITS_FIELDS that its models cannot do; all of them unless their pending steps are Scoring."""

    def bind(self, served: ServedModel, session: PoolSession, limits: Limits) -> Bound:
        """The model over the session's memory, ready for its first step. PagepoolError if that cannot be."""

    def close(self) -> None:
        """Give the device up, after everything that was bound."""


class CpuMachine:
    """The CPU with so many threads; its kernels are compiled when this returns."""

    device = CPU
    unsupported_fields: tuple[str, ...] = ()

    def __init__(self, threads: int, tell: Tell) -> None:
        torch.set_num_threads(threads)
        configure(threads)
        tell("loading the kernels (the first time they are compiled, which takes a minute)")
        compile_kernels()

    def bind(self, served: ServedModel, session: PoolSession, limits: Limits) -> Bound:
        """See Machine."""
        del limits  # nothing is sized by them
        assert isinstance(session.memory, memoryview)
        ops = open_ops(session.memory, served.layout(session.info.block_size))
        return Bound(ModelRunner(served, ops), lambda: None)

    def close(self) -> None:
        """See Machine."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """compile: by torch.compile; graphs: capture small steps; cache_dir: where compiled kernels are kept."""

    compile: bool
    graphs: bool
    cache_dir: Path


class GpuMachine:
    """CUDA device `index`, current on this thread until `close`: also PyCUDA's, for the mapping of memd's memory."""

    unsupported_fields = CpuMachine.unsupported_fields  # what the engine cannot do, no device can

    def __init__(self, index: int, options: GpuOptions, tell: Tell) -> None:
        self.device = torch.device("cuda", index)
        self._options, self._tell = options, tell
        self._forward: CompiledForward | None = None  # of the one model, compiled once for all pools
        # torch first: PyCUDA then joins the context that torch uses.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(index)
        self._cuda = open_device(index, options.cache_dir / "kernels")

    def bind(self, served: ServedModel, session: PoolSession, limits: Limits) -> Bound:
        """See Machine. Compiles and captures all that serving needs: nothing of that happens in a request."""
        from inferd.model.cuda_runner import CudaRunner, DevicePool, RunnerLimits, compiled

        assert isinstance(session.memory, CudaMapping)
        pool = DevicePool(session.memory.addresses, served.layout(session.info.block_size), session.fp8)
        room = RunnerLimits(
            max_batch_tokens=limits.max_batch_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_context=served.max_context,
            num_blocks=session.info.num_blocks,
            graphs=self._options.graphs,
        )
        self._forward = self._forward or compiled(served, compile_=self._options.compile)
        with gpu_errors(limits):
            runner = CudaRunner(served, self._forward, self._cuda, pool, room)
            try:
                runner.capture(self._tell)
            except BaseException:
                runner.close()
                raise
        return Bound(runner, runner.close)

    def close(self) -> None:
        """See Machine."""
        self._forward = None
        gc.unfreeze()  # what was made by PyCUDA, maybe before the freeze after the warm-up, goes before its context
        gc.collect()
        self._cuda.close()


@contextmanager
def gpu_errors(limits: Limits) -> Iterator[None]:
    """What an operator can mend, as a PagepoolError: a missing compiler, or too little memory beside the pool."""
    try:
        yield
    except BuildError as error:
        raise PagepoolError(Reason.ENGINE_FAILED, f"the GPU's kernels cannot be built: {error}", cause=error) from error
    except Exception as error:
        # PyCUDA's error and torch's have no common class, and PyCUDA cannot be imported to name its own.
        if not isinstance(error, torch.OutOfMemoryError) and type(error).__name__ != "MemoryError":
            raise
        limit = f"so few that a step of them, of up to {limits.max_num_seqs} sequences, fits beside the model"
        remedy = "lower it or --max-num-seqs, or start memd with a larger --reserve-bytes"
        raise invalid_field("--max-batch-tokens", limits.max_batch_tokens, limit, remedy) from error
