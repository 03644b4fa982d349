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

def exact(function: F) -> F:
    """A function called by kernels only, whose floating point is done as written: equal inputs give equal bits."""
    options = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast("F", numba.njit(**options)(function))


def kernel(signature: Any, *, parallel: bool = False) -> Callable[[F], F]:
    """An entry point with one signature, compiled when its module is imported and kept on disk."""
    prepare()
    options = {"parallel": parallel, "cache": True, "nogil": True, "error_model": "numpy"}
    return cast("Callable[[F], F]", numba.njit(signature, **options))


def read_only(dtype: Any, ndim: int) -> Any:
    """The type of an input of any strides."""
    return types.Array(dtype, ndim, "A", readonly=True)


@intrinsic  # type: ignore[untyped-decorator]
def next_ticket(_typing: Any, counters: Any, index: Any) -> Any:
    """counters[index]++ as one atomic operation; what it was before. All that was written before it is seen after it."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
        one = llvmlite.ir.Constant(llvmlite.ir.IntType(64), 1)
        return builder.atomic_rmw("add", builder.gep(array.data, [args[1]]), one, "acq_rel")

    return types.int64(counters, types.int64), codegen
