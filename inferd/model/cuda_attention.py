"""The attention function of models on a GPU: one custom operator, opaque to torch.compile and captured into graphs.

What an attention call of a step does stands in a context variable while the model runs, for the operator takes tensors
only: not even the layer's number, with which every layer would be compiled on its own. A model calls its layers in one
order, so the calls of a step are counted instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from inferd.model.attention import AttentionLayer
from pagekernels.cuda.batch import DeviceBatch
from pagekernels.cuda.ops import CudaOps

CUDA_ATTENTION_NAME = "pagepool_cuda"
"""The name to give to `set_attn_implementation`. No mask function has it, so masks arrive as None."""

FLASH_DTYPES = (torch.bfloat16, torch.float16)
MAX_FLASH_HEAD_DIM = 256


class StepAttention(Protocol):
    """The attention of one step, layer by layer."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """The model's attention call number `layer`, in the order of ModelGeometry.layers.

        Writes k [T, H, D] and v [T, H, Dv] into the pool and attends with q [T, Hq, D] into out [T, Hq, Dv].
        """


@dataclass(slots=True)
class _Running:
    """A forward under way, and how many of its attention calls have been."""

    attention: StepAttention
    calls: int = 0


_running: ContextVar[_Running] = ContextVar("pagepool_cuda_running")


@contextmanager
def stepping(attention: StepAttention) -> Iterator[None]:
    """Send the attention calls of the one forward that runs inside to `attention`."""
    token = _running.set(_Running(attention))
    try:
        yield
    finally:
        _running.reset(token)


# What it writes is the pool, which is no tensor of the graph: the layers' order follows from their outputs.
@torch.library.custom_op("pagepool::attend", mutates_args=())
def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    running = _running.get()
    running.attention.attend(running.calls, q, k, v, out[0])
    running.calls += 1
    return out


@_attend.register_fake
def _attend_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


def _attention_function(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    dtype = value.dtype
    out: torch.Tensor = torch.ops.pagepool.attend(query.to(dtype), key.to(dtype), value)
    return out, None


AttentionInterface.register(CUDA_ATTENTION_NAME, _attention_function)


@dataclass(frozen=True, slots=True)
class ShortSteps:
    """Attention of steps in which no sequence has more query tokens than the decode kernels take."""

    ops: CudaOps
    layers: Sequence[AttentionLayer]
    batch: DeviceBatch

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See StepAttention."""
        use = self.layers[layer]
        if use.appends:
            self.ops.append(use.store, k, v, self.batch)
        self.ops.attend(use.store, q, out, self.batch, use.params)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A long chunk of prefill: rows [first, last) of a step, of its sequence `index`, which then has kv_len tokens."""

    index: int
    first: int
    last: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class LongSteps:
    """Attention of a step with long chunks of prefill, which come last; the short sequences before them are `short`.

    A chunk attends by PyTorch's flash attention: to itself if it is the first, else to what it sees of the prefix too,
    gathered from the pool into contiguous memory. (cuDNN makes a plan for each new length.) What that cannot do
    (Llama 4's chunks, soft-caps, float32 as exactly as the decode kernels) takes the paged kernel for the whole step.
    `sinks` are float32 [Hq] on the device, or None, of each layer.
    """

    ops: CudaOps
    layers: Sequence[AttentionLayer]
    sinks: Sequence[torch.Tensor | None]
    batch: DeviceBatch
    short: DeviceBatch | None
    chunks: Sequence[Chunk]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See StepAttention."""
        use = self.layers[layer]
        if use.appends:
            self.ops.append(use.store, k, v, self.batch)
        if not dense(use, q, v):
            self.ops.attend(use.store, q, out, self.batch, use.params)
            return
        if self.short is not None:
            rows = self.chunks[0].first
            self.ops.attend(use.store, q[:rows], out[:rows], self.short, use.params)
        for chunk in self.chunks:
            part = slice(chunk.first, chunk.last)
            keys, values = self._keys(use, chunk, k[part], v[part])
            out[part].copy_(flash(use, q[part], keys, values, self.sinks[layer]))

    def _keys(
        self, use: AttentionLayer, chunk: Chunk, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all that the chunk sees."""
        rows = chunk.last - chunk.first
        if chunk.kv_len == rows and use.appends:
            return k, v
        first = max(0, chunk.kv_len - rows - use.params.window + 1) if use.params.window else 0
        keys, values = (x.new_empty((chunk.kv_len - first, *x.shape[1:])) for x in (k, v))
        places = keys.transpose(0, 1), values.transpose(0, 1)
        self.ops.gather(use.store, self.batch, chunk.index, (first, chunk.kv_len), *places)
        return keys, values


def flash(
    use: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention [T, Hq, D] of queries q [T, Hq, D] that are the last of the keys k and values v [S, H, D]."""
    window = use.params.window - 1 if use.params.window else -1
    # Here the causal mask is aligned with the last key, as a chunk after a prefix needs it.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        *(q[None], k[None], v[None], None, None, q.shape[0], k.shape[0]),
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=use.params.scale,
        window_size_left=window,
        window_size_right=0,
    )
    result: torch.Tensor = out[0]
    if sinks is None:
        return result
    # A sink adds e^sink to the sum e^lse that a row was divided by.
    return result * torch.sigmoid(lse[0] - sinks[:, None]).T[:, :, None]


def dense(use: AttentionLayer, q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether PyTorch's flash attention computes this layer."""
    dims = q.shape[2] == v.shape[2] and q.shape[2] <= MAX_FLASH_HEAD_DIM and q.shape[2] % 8 == 0
    return not use.params.chunk and not use.params.softcap and dims and q.dtype in FLASH_DTYPES
