"""Runs projections that read the same input (q, k and v; gate and up) as one matrix multiplication.

The model's code stays as it is: only modules are swapped. The first projection of a group multiplies with the weights
of all and leaves the result in a box, from which the others take their slice. The weights are not stored twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from inferd.model.linear import Multiply

Group = tuple[nn.Linear, ...]
"""Projections of one module, in the order in which it calls them with one and the same input."""


class _Box:
    """The weights of a group, and what its first projection computed until the others have taken it."""

    __slots__ = ("bias", "input", "multiply", "output", "takers", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, multiply: Multiply) -> None:
        self.weight, self.bias, self.multiply = weight, bias, multiply
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self.takers = 0

    def compute(self, x: torch.Tensor, takers: int) -> torch.Tensor:
        """Multiply with all weights, and keep the result for so many takers."""
        self.input, self.output, self.takers = x, self.multiply(x, self.weight, self.bias), takers
        return self.output

    def take(self, x: torch.Tensor) -> torch.Tensor | None:
        """What was computed from this very input, or None."""
        if x is not self.input:
            return None
        output = self.output
        self.takers -= 1
        if self.takers == 0:
            self.input = self.output = None
        return output


class _Projection(nn.Module):
    """A slice of a merged projection that looks like the nn.Linear it replaces."""

    def __init__(self, box: _Box, start: int, size: int) -> None:
        super().__init__()
        self.in_features, self.out_features = box.weight.shape[1], size
        self.weight = nn.Parameter(box.weight.narrow(0, start, size), requires_grad=False)
        bias = None if box.bias is None else box.bias.narrow(0, start, size)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._box, self._start, self._end = box, start, start + size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same values as the replaced nn.Linear gives."""
        output = self._box.take(x)
        if output is None:
            return self._box.multiply(x, self.weight, self.bias)
        return output[..., self._start : self._end]


class _FirstProjection(_Projection):
    """The projection of a group that is called first."""

    def __init__(self, box: _Box, size: int, takers: int) -> None:
        super().__init__(box, 0, size)
        self._takers = takers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same values as the replaced nn.Linear gives; the others of the group take theirs afterwards."""
        return self._box.compute(x, self._takers)[..., : self._end]


@contextmanager
def watching(model: nn.Module) -> Iterator[list[Group]]:
    """Collect, while the model runs once, the groups of sibling projections that read one and the same input."""
    groups: list[Group] = []
    calls: dict[nn.Module, list[tuple[nn.Linear, torch.Tensor]]] = {}
    hooks = [
        child.register_forward_pre_hook(
            lambda linear, inputs, parent=parent: calls.setdefault(parent, []).append((linear, inputs[0]))
        )
        for parent in model.modules()
        for child in parent.children()
        if type(child) is nn.Linear
    ]
    try:
        yield groups
    finally:
        for hook in hooks:
            hook.remove()
    for siblings in calls.values():
        groups.extend(_groups(siblings))


def _groups(calls: Sequence[tuple[nn.Linear, torch.Tensor]]) -> Iterator[Group]:
    """Those of one module's projections that can be merged: one input, one dtype, biases in all or in none."""
    if len({linear for linear, _ in calls}) != len(calls):
        return
    by_input: dict[tuple[int, bool, torch.dtype], list[nn.Linear]] = {}
    for linear, x in calls:
        by_input.setdefault((id(x), linear.bias is None, linear.weight.dtype), []).append(linear)
    yield from (tuple(linears) for linears in by_input.values() if len(linears) > 1)


@torch.no_grad()
def merge(model: nn.Module, groups: Sequence[Group], multiply: Multiply) -> None:
    """Swap the projections of each group; the old weights are given back group by group."""
    parents = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    for group in groups:
        bias = None if group[0].bias is None else torch.cat([linear.bias for linear in group])
        box = _Box(torch.cat([linear.weight for linear in group]), bias, multiply)
        start = 0
        for linear in group:
            parent, name = parents[linear]
            size, takers = linear.out_features, len(group) - 1
            swapped = _Projection(box, start, size) if start else _FirstProjection(box, size, takers)
            setattr(parent, name, swapped)
            start += size
