"""Runs projections that read the same input (q, k and v; gate and up) as one matrix multiplication.

The model's code stays as it is: only modules are swapped. The first projection of a group multiplies with the weights
of all and leaves the result in a box, from which the others take their slice. The weights are not stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [..., I], weight [O, I], bias [O]) -> [..., O], as torch.nn.functional.linear."""

Group = tuple[nn.Linear, ...]
"""Projections of one module, in the order in which it calls them with one and the same input."""


class _Box:
    """What the first projection of a group computed, until the others have taken it; then it holds no tensor."""

    __slots__ = ("input", "output", "takers")

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self.takers = 0

    def put(self, x: torch.Tensor, output: torch.Tensor, takers: int) -> None:
        """Keep what was computed from x for so many takers."""
        self.input, self.output, self.takers = x, output, takers

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
    """A slice of a merged projection that looks like the nn.Linear it replaces. `weight` [O, I] is that of the group.

    torch.compile traces it as it is: the box is empty before and after each forward.
    """

    def __init__(
        self, box: _Box, multiply: Multiply, weight: torch.Tensor, bias: torch.Tensor | None, rows: tuple[int, int]
    ) -> None:
        super().__init__()
        self._box, self._multiply = box, multiply
        self._start, self._end = rows
        self.in_features, self.out_features = weight.shape[1], self._end - self._start
        self.weight = nn.Parameter(weight[self._start : self._end], requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias[self._start : self._end], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same values as the replaced nn.Linear gives."""
        output = self._box.take(x)
        if output is None:
            return self._multiply(x, self.weight, self.bias)
        return output[..., self._start : self._end]


class _FirstProjection(_Projection):
    """The projection of a group that is called first: it multiplies for all, and leaves the result to `takers` more."""

    def __init__(
        self, box: _Box, multiply: Multiply, weight: torch.Tensor, bias: torch.Tensor | None, size: int, *, takers: int
    ) -> None:
        super().__init__(box, multiply, weight, bias, (0, size))
        self._takers = takers
        # Parameters, since torch.compile takes the shapes of those for constants, and would not those of a tensor.
        self.merged_weight = nn.Parameter(weight, requires_grad=False)
        self.merged_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same values as the replaced nn.Linear gives; the others of the group take theirs afterwards."""
        output = self._multiply(x, self.merged_weight, self.merged_bias)
        self._box.put(x, output, self._takers)
        return output[..., : self._end]


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
def merge(model: nn.Module, groups: list[Group], multiply: Multiply) -> None:
    """Swap the projections of each group. Empties the list, so that old weights are given back group by group."""
    parents = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    while groups:
        _merge(groups.pop(), parents, multiply)


def _merge(group: Group, parents: dict[nn.Module, tuple[nn.Module, str]], multiply: Multiply) -> None:
    weight = torch.cat([linear.weight for linear in group])
    bias = None if group[0].bias is None else torch.cat([linear.bias for linear in group])
    box, start = _Box(), 0
    for linear in group:
        parent, name = parents.pop(linear)
        end = start + linear.out_features
        swapped = (
            _Projection(box, multiply, weight, bias, (start, end))
            if start
            else _FirstProjection(box, multiply, weight, bias, end, takers=len(group) - 1)
        )
        setattr(parent, name, swapped)
        start = end
