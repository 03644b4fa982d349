"""Compiling a model's forward once for all sizes, and capturing steps of fixed sizes into CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from transformers import PreTrainedModel

from inferd.model.probe import forward

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(input_ids [1, T], position_ids [1, T], rows [R]) -> logits [R, V] of these rows; T and R are at least 2."""

MIN_ROWS = 2
"""Sizes of 1 would be compiled on their own, so no step has fewer tokens or logit rows."""

DECODE_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
MIXED_SIZES = (16, 32, 64, 128, 256, 512)

log = structlog.get_logger(__name__)


def ladder(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The sizes up to the first that holds `most`, or `most` itself if none does."""
    most = max(most, MIN_ROWS)
    below = [size for size in sizes if size < most]
    above = [size for size in sizes if size >= most]
    return (*below, above[0] if above else most)


class CompiledForward:
    """A model's forward, compiled at its first call for any number of tokens and rows.

    What torch.compile cannot take runs eagerly, and the log says so. For one thread.
    """

    def __init__(self, model: PreTrainedModel, *, compile_: bool) -> None:
        self._eager: Forward = lambda ids, positions, rows: forward(model, ids, positions, rows)
        self._compiled: Forward | None = None
        if compile_:
            self._compiled = torch.compile(self._eager, dynamic=True, fullgraph=True)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits of the rows."""
        if self._compiled is None:
            return self._eager(ids, positions, rows)
        for tensor, dim in ((ids, 1), (positions, 1), (rows, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)  # noqa: SLF001 (documented under this name)
        try:
            # Without duck shapes as many rows as tokens are not taken for the same number.
            with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # noqa: SLF001
                return self._compiled(ids, positions, rows)
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:  # noqa: SLF001
            if _is_of_the_device(error):
                raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            log.warning("torch.compile does not take this model, so it runs eagerly", why=reason)
            self._compiled = None
            return self._eager(ids, positions, rows)


def _is_of_the_device(error: Exception) -> bool:
    """Whether it is no matter of compilation: no memory, or a device that failed."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, torch.AcceleratorError))


@dataclass(slots=True)
class Graphs:
    """Captured steps that share one memory pool, since only one of them runs at a time."""

    stream: torch.cuda.Stream
    _captured: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    _pool: Any = field(default_factory=torch.cuda.graph_pool_handle)

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Run once, so that everything is loaded and compiled, then capture; the stream must be torch's current one.

        Raises RuntimeError if the step cannot be captured, for instance since it waits for the GPU half-way.
        """
        began = time.perf_counter()
        run()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (grpc's, the lease keeper's) may touch CUDA meanwhile: their calls are none of the capture's.
        # torch.cuda.graph would collect garbage each time, which takes longer than the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # the reason is what `run` raised
                graph.capture_end()
            raise
        graph.capture_end()
        self._captured.append(graph)
        log.debug("captured a step", seconds=round(time.perf_counter() - began, 2))
        return graph

    def drop(self) -> None:
        """Give them all up; addresses of a pool that is gone are baked into them."""
        for graph in self._captured:
            graph.reset()
        self._captured.clear()
