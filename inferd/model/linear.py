"""How projections are multiplied on a CPU: nn.Linear's products, by the routine that is fastest for the shape.

Measured on AVX2 cores: PyTorch's bf16 product for several rows is scalar, and widening the weights piece by piece to
float32 is three to six times as fast; MKL's float32 product for two to eight rows is up to twice as fast with the
weights as the left operand.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_LEFT_ROWS = range(2, 9)
"""Rows for which float32 weights go on the left."""

_WIDEN_ROWS = 4
"""From so many rows on, 16-bit weights are widened."""

_PIECE = 1024
"""Weight rows widened at a time: they stay in the cache until they are multiplied."""


class Multiply:
    """x [..., I] times weight [O, I], plus bias [O]. Holds scratch memory: one thread at a time.

    `widen` says that this CPU has no 16-bit arithmetic, so that weights in 16 bits are widened piece by piece.
    """

    def __init__(self, *, widen: bool) -> None:
        self._widen = widen
        self._scratch = torch.empty(0)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product in x's dtype, [..., O]."""
        rows = x.numel() // x.shape[-1]
        if weight.dtype is torch.float32:
            if rows in _LEFT_ROWS and bias is None:
                return (weight @ x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
        elif self._widen and rows >= _WIDEN_ROWS:
            return self._widened(x, weight, bias)
        return functional.linear(x, weight, bias)

    def _widened(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product in float32 arithmetic, rounded once at the end."""
        piece = min(_PIECE, weight.shape[0]) * weight.shape[1]
        if self._scratch.numel() < piece:
            self._scratch = torch.empty(piece)
        wide = x.float()
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        for first in range(0, weight.shape[0], _PIECE):
            part = weight[first : first + _PIECE]
            weights = self._scratch[: part.numel()].view(part.shape).copy_(part)
            piece_bias = None if bias is None else bias[first : first + _PIECE].float()
            out[..., first : first + _PIECE] = functional.linear(wide, weights, piece_bias)
        return out


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
