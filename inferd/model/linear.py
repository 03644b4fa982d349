"""How projections are multiplied on a CPU: nn.Linear's products, by the routine that is fastest for the shape.

Few rows, as a decode step has, are multiplied by pagekernels.cpu.product, which reads the weights once. For more rows
MKL's float32 product likes the weights as its left operand, and pieces of them for many. On cores with AVX2 only,
PyTorch's bf16 product of several rows is scalar; widening the weights to float32, piece by piece, more than halves it.
"""

from __future__ import annotations

import importlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional

_LEFT_ROWS = 128
"""Rows up to which float32 weights go on the left: 5 to 40 % faster on two cores with AVX2, slower from 256 on."""

_WIDEN_ROWS = 4
"""From so many rows on, 16-bit weights are widened by pieces."""

_PIECE = 1024
"""Weight rows multiplied at a time: what was widened stays in the cache until then."""

_NO_FLOATS, _NO_HALVES = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)


class Multiply:
    """x [..., I] times weight [O, I], plus bias [O]. Holds scratch memory: one thread at a time.

    `widen` says that this CPU has no 16-bit arithmetic, so that weights in 16 bits are widened.
    """

    def __init__(self, *, widen: bool) -> None:
        self._widen = widen
        self._scratch = torch.empty(0)
        # Not at the top: a GPU's worker, which imports this module too, compiles no CPU kernels.
        self._few = importlib.import_module("pagekernels.cpu.product")

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product in x's dtype, [..., O]."""
        rows = x.numel() // x.shape[-1]
        if weight.dtype is torch.float32:
            if self._takes(x, rows, weight):
                return self._by_lines(x, weight.detach().numpy(), _NO_HALVES, bias)
            if 1 < rows <= _LEFT_ROWS:
                out = (weight @ x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
                return out if bias is None else out.add_(bias)
            if rows > _LEFT_ROWS and weight.shape[0] > _PIECE:
                return self._by_pieces(x, weight, bias)
        elif self._widen and rows > 1:  # PyTorch's bf16 product of one row is fast
            if weight.dtype is torch.bfloat16 and self._takes(x, rows, weight):
                return self._by_lines(x, _NO_FLOATS, weight.detach().view(torch.uint16).numpy(), bias)
            if rows >= _WIDEN_ROWS:
                return self._by_pieces(x, weight, bias)
        return functional.linear(x, weight, bias)

    def _takes(self, x: torch.Tensor, rows: int, weight: torch.Tensor) -> bool:
        """Whether the kernel for few rows takes them, which reads as told; what does not fit is PyTorch's to refuse."""
        fits = x.shape[-1] == weight.shape[1] and x.dtype is weight.dtype and weight.is_contiguous()
        return fits and bool(self._few.takes(rows, x.shape[-1]))

    def _by_lines(
        self, x: torch.Tensor, floats: np.ndarray, halves: np.ndarray, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product for few rows, in float32 arithmetic; in 16 bits it is rounded once, at the end."""
        wide = x.detach().reshape(-1, x.shape[-1]).float().contiguous()
        out = torch.empty(len(wide), len(floats) or len(halves))
        self._few.multiply(wide.numpy(), floats, halves, out.numpy())
        if bias is not None:
            out += bias.float()
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def _by_pieces(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product in float32 arithmetic; in 16 bits it is rounded once, at the end."""
        wide = x.float()
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        for first in range(0, weight.shape[0], _PIECE):
            last = first + _PIECE
            piece_bias = None if bias is None else bias[first:last].float()
            out[..., first:last] = functional.linear(wide, self._float32(weight[first:last]), piece_bias)
        return out

    def _float32(self, piece: torch.Tensor) -> torch.Tensor:
        """The piece itself, or its values in scratch memory."""
        if piece.dtype is torch.float32:
            return piece
        if self._scratch.numel() < piece.numel():
            self._scratch = torch.empty(piece.numel())
        return self._scratch[: piece.numel()].view(piece.shape).copy_(piece)


class Linear(nn.Module):
    """An nn.Linear that is multiplied by a Multiply; it shares the parameters."""

    def __init__(self, linear: nn.Linear, multiply: Multiply) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._multiply = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nn.Linear."""
        return self._multiply(x, self.weight, self.bias)


def swap(model: nn.Module, multiply: Multiply) -> None:
    """Swap every plain nn.Linear of the model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Linear(child, multiply))
