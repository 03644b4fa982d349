"""How everything here is compiled, typed so that mypy can see through the decorators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
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
    drop_stale_kernels(Path(__file__).parent)
    options = {"parallel": parallel, "cache": True, "nogil": True, "error_model": "numpy"}
    return cast("Callable[[F], F]", numba.njit(signature, **options))


def drop_stale_kernels(folder: Path) -> None:
    """Delete kept kernels older than the newest source: numba itself looks only at the entry point's own file."""
    newest = max(source.stat().st_mtime for source in folder.glob("*.py"))
    for index in folder.glob("__pycache__/*.nbi"):
        with suppress(FileNotFoundError):  # another engine that starts now may have been first
            if index.stat().st_mtime < newest:
                index.unlink()


def read_only(dtype: Any, ndim: int) -> Any:
    """The type of an input of any strides."""
    return types.Array(dtype, ndim, "A", readonly=True)


def emitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes its own LLVM code: given its arguments' types, it returns (signature, code generator)."""
    return cast("Callable[..., Any]", intrinsic(prefer_literal=True)(function))


@emitted
def next_ticket(_typing: Any, counters: Any, _index: Any) -> Any:
    """counters[index]++ as one atomic operation; returns what it was. What was written before it is seen after it."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", builder.gep(array.data, [args[1]]), one, "acq_rel")

    return types.int64(counters, types.int64), codegen
