"""Compiling a model's forward once for all sizes, and capturing steps of fixed sizes into CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel

from inferd.model.cuda_attention import StepAttention, stepping
from inferd.model.probe import forward
from pagekernels.cuda.arrays import DeviceArray

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
    """A model's forward, its regions compiled when they first run, for any number of tokens.

    A region (`regions`) is compiled once for all layers that look alike, which takes a tenth of the time that the whole
    model takes. What torch.compile cannot take runs eagerly, and the log says so. For one thread.
    """

    def __init__(self, model: PreTrainedModel, *, compile_: bool, backend: str = "inductor") -> None:
        self._model = model
        self._compiled = regions(model) if compile_ else []
        for region in self._compiled:
            region.forward = torch.compile(region.forward, dynamic=True, fullgraph=True, backend=backend)

    @property
    def eager(self) -> bool:
        """Whether nothing is compiled."""
        return not self._compiled

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Logits [R, V] of the rows [R] of tokens [1, T] at positions [1, T]; T and R are at least 2."""
        if self.eager:
            return self._run(ids, positions, rows, attention)
        try:
            # Without duck shapes a dimension of the model that is as long as the step is not taken for the step's.
            with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # noqa: SLF001
                return self._run(ids, positions, rows, attention)
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:  # noqa: SLF001
            if _is_of_the_device(error):
                raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            log.warning("torch.compile does not take this model, so it runs eagerly", why=reason)
            for region in self._compiled:
                del region.forward  # the class's own is seen again
            self._compiled = []
            return self._run(ids, positions, rows, attention)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        with stepping(attention):
            return forward(self._model, ids, positions, rows)


def regions(model: PreTrainedModel) -> list[nn.Module]:
    """The modules to compile: a model's blocks, and the norms and rotary embeddings that stand beside them.

    Blocks are what transformers keeps on one device. A model without any is one region. Embeddings and the head, which
    are one kernel each, are none.
    """
    blocks = set(model._no_split_modules or ())  # noqa: SLF001 (transformers has no other name for it)
    found: list[nn.Module] = []
    for stack in model.modules():
        layers = [layer for child in stack.children() if isinstance(child, nn.ModuleList) for layer in child]
        if any(type(layer).__name__ in blocks for layer in layers):
            beside = (c for c in stack.children() if not isinstance(c, (nn.ModuleList, nn.Embedding, nn.Linear)))
            found += [*layers, *beside]
    return found or [model]


def _is_of_the_device(error: Exception) -> bool:
    """Whether it is no matter of compilation: no memory, or a device that failed."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, torch.AcceleratorError))


@dataclass(slots=True)
class Graphs:
    """Captured steps that share one memory pool, since only one of them runs at a time."""

    stream: torch.cuda.Stream
    _captured: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    _pool: Any = field(default_factory=torch.cuda.graph_pool_handle)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Run once, so that everything is loaded and compiled, then capture; the stream must be torch's current one.

        The tensor is an unowned_view of what `run` returned in the capture: behind a replay it holds what that made,
        until the next replay of any graph of these. Raises RuntimeError if the step cannot be captured, for instance
        since it waits for the GPU half-way.
        """
        began = time.perf_counter()
        run()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (grpc's, the lease keeper's) may touch CUDA meanwhile: their calls are none of the capture's.
        # torch.cuda.graph would collect garbage each time, which takes longer than the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            made = run()
        except BaseException:
            with suppress(RuntimeError):  # the reason is what `run` raised
                graph.capture_end()
            raise
        graph.capture_end()
        self._captured.append(graph)
        found = unowned_view(made)
        log.debug("captured a step", seconds=round(time.perf_counter() - began, 2))
        return graph, found

    def drop(self) -> None:
        """Give them all up; addresses of a pool that is gone are baked into them."""
        for graph in self._captured:
            graph.reset()
        self._captured.clear()


def unowned_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a matrix on a GPU, with its strides, without keeping it: later captures may use it for theirs.

    A graph's results stay where they are while the graph lives; kept, those of all sizes would take a gigabyte.
    """
    rows, columns = tensor.shape
    span = (rows - 1) * tensor.stride(0) + columns
    memory = DeviceArray(tensor.data_ptr(), (span * tensor.element_size(),), "uint8")
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, (tensor.stride(0), 1))
