"""How everything here is compiled, typed so that mypy can see through the decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.ir
import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

from pagekernels.cpu.threads import prepare

F = TypeVar("F", bound=Callable[..., Any])

INF = float("inf")

SEQUENTIAL = {"contract"}
"""Fused multiply-adds, but sums stay in the written order: equal inputs give equal bits however the work is split."""

ANY_ORDER = {"contract", "reassoc", "nsz"}
"""Sums may be reordered, so dot products vectorise; NaN and infinity keep their meaning."""


def device(order: set[str]) -> Callable[[F], F]:
    """A function called by kernels only; compiled with its caller. Rounds as SEQUENTIAL or ANY_ORDER says."""
    return cast("Callable[[F], F]", numba.njit(fastmath=order, error_model="numpy", nogil=True))


def exact(function: F) -> F:
    """A function called by kernels only, whose floating point is done exactly as written."""
    return cast("F", numba.njit(error_model="numpy", nogil=True)(function))


def kernel(signature: Any) -> Callable[[F], F]:
    """A parallel entry point with one signature, compiled when its module is imported and kept on disk."""
    prepare()
    options = {"parallel": True, "cache": True, "nogil": True, "error_model": "numpy"}
    return cast("Callable[[F], F]", numba.njit(signature, **options))


def read_only(dtype: Any, ndim: int) -> Any:
    """The type of an input of any strides."""
    return types.Array(dtype, ndim, "A", readonly=True)


@intrinsic  # type: ignore[untyped-decorator]
def next_ticket(_context: Any, counter: Any) -> Any:
    """counter[0]++ by one atomic operation: how threads take work, so that a slow one does not hold up the rest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, llvmlite.ir.Constant(llvmlite.ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen
