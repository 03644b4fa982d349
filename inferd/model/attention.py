"""The attention function that transformers' models call, and the paged attention behind it.

transformers calls a registered function once per layer. Which step it belongs to travels in a context variable, since
some models do not pass on extra keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

from pagekernels.ops import Array, AttentionBatch, AttentionParams, PagedOps

ATTENTION_NAME = "pagepool"
"""The name to give to `set_attn_implementation`. No mask function has it, so masks arrive as None."""

Attend = Callable[..., torch.Tensor]
"""(module, query [1, Hq, T, D], key [1, H, T, D], value [1, H, T, Dv], mask, **kwargs) -> [1, T, Hq, Dv]."""

_current: ContextVar[Attend] = ContextVar("pagepool_attend")


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    return _current.get()(module, query, key, value, attention_mask, **kwargs), None


AttentionInterface.register(ATTENTION_NAME, _attention_function)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Send the attention calls of models that run inside to `attend`."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one attention layer of a model uses the pool.

    store        index into the layout's layers: where its K and V are
    appends      False if an earlier layer of the same step wrote them (layers that share KV)
    params       what its attention needs beside q, k and v
    num_q_heads  query heads
    """

    store: int
    appends: bool
    params: AttentionParams
    num_q_heads: int


def to_array(tensor: torch.Tensor) -> Array:
    """The same memory as a numpy array; bf16 and f16 as uint16 bit patterns. The tensor must be contiguous."""
    if tensor.dtype is not torch.float32:
        tensor = tensor.view(torch.uint16)
    return cast("Array", tensor.numpy())


class PagedAttention:
    """Appends each layer's K and V to the pool and attends over the block tables of the current step.

    `layers` maps a module's `layer_idx` to its use of the pool, which lies in this process's memory; a model on a GPU
    is copied there and back. Not thread-safe: one step at a time.
    """

    def __init__(self, ops: PagedOps, layers: Mapping[int, AttentionLayer]) -> None:
        self._ops = ops
        self._layers = layers
        self._batch: AttentionBatch | None = None
        self._slots: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def begin(self, batch: AttentionBatch, slots: npt.NDArray[np.int64]) -> None:
        """Set what all layers of the coming forward share."""
        self._batch, self._slots = batch, slots

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer; the keyword arguments were read once, when the model was probed."""
        layer = self._layers[cast("int", module.layer_idx)]
        if layer.appends:
            k, v = _token_major(key, value.dtype), _token_major(value, value.dtype)
            self._ops.append(layer.store, to_array(k), to_array(v), self._slots)
        q = _token_major(query, value.dtype)
        out = torch.empty((q.shape[0], q.shape[1], value.shape[3]), dtype=q.dtype)
        assert self._batch is not None
        self._ops.attend(layer.store, to_array(q), to_array(out), self._batch, layer.params)
        return out.to(query.device).unsqueeze(0)


def _token_major(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, H, T, D] -> [T, H, D] in `dtype`, on the host; free where the model computed it that way, as most do."""
    return tensor[0].transpose(0, 1).to("cpu", dtype).contiguous()
