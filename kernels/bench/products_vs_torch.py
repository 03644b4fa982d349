"""What the products of a few rows cost on this CPU, beside torch's.

Run `python kernels/bench/products_vs_torch.py [threads]`. A line has, for so many rows, the milliseconds of all the
projections that a step of SmolLM2-135M multiplies, each read from memory: the least of alternating rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from pagekernels.cpu import configure
from pagekernels.cpu.product import MAX_ROWS, multiply

SHAPES = ((960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49152, 576, 1))
"""Outputs, inputs and number of the merged projections, and of the vocabulary's."""

ROUNDS = 7
NO_FLOATS, NO_HALVES = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By pagekernels.cpu.product, in x's dtype."""
    out = torch.empty(len(x), len(weight))
    if weight.dtype is torch.float32:
        multiply(x.numpy(), weight.numpy(), NO_HALVES, out.numpy())
    else:
        multiply(x.float().numpy(), NO_FLOATS, weight.view(torch.uint16).numpy(), out.numpy())
    return out.to(x.dtype)


def left(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By torch, the weights as the left operand."""
    return (weight @ x.t()).t().contiguous()


def milliseconds(products: dict[str, Product], weights: list[list[torch.Tensor]], rows: int) -> dict[str, float]:
    """What each takes for all of the weights."""
    total = dict.fromkeys(products, 0.0)
    for alike in weights:
        x, best = torch.randn(rows, alike[0].shape[1]).to(alike[0].dtype), dict.fromkeys(products, float("inf"))
        for name in [*products] * ROUNDS:
            began = time.perf_counter()
            for weight in alike:
                products[name](x, weight)
            best[name] = min(best[name], (time.perf_counter() - began) * 1e3)
        total = {name: total[name] + best[name] for name in products}
    return total


def main(threads: int) -> None:
    """Print both dtypes' lines."""
    torch.set_num_threads(threads)
    configure(threads)
    weights = [[torch.randn(out, inputs) for _ in range(count)] for out, inputs, count in SHAPES]
    print(f"{threads} threads, {torch.backends.cpu.get_cpu_capability()}; ms")
    for dtype in (torch.float32, torch.bfloat16):
        weights = [[weight.to(dtype) for weight in alike] for alike in weights]
        for rows in (1, 2, 4, 9, MAX_ROWS, 32):
            products: dict[str, Product] = {"functional.linear": functional.linear, "weights left": left}
            took = milliseconds(products | ({"ours": ours} if rows <= MAX_ROWS else {}), weights, rows)
            line = "   ".join(f"{name} {each:6.1f}" for name, each in took.items())
            print(f"{str(dtype).removeprefix('torch.'):8} {rows:3} rows   {line}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
