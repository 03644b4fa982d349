"""Short vectors of float32 as numba values, for the inner loops that LLVM does not find by itself.

A width may be several machine registers wide: LLVM splits it, so one source serves SSE, AVX2 and AVX-512. Indices are
elements from the array's first one (C order), unchecked: who calls has checked.

    load(a, i, W)    a[i : i + W]                 splat(x, W)             x in every lane
    store(a, i, v)   a[i : i + W] = v             muladd(x, y, z)         x * y + z, fused where the machine can
    maximum(x, y)    x where x > y, else y        sums4(a, b, c, d)       (sum of a, of b, of c, of d), lanes in any order
    spread(a, i, W)  a[i] in every lane           + - * /
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model


class Vector(types.Type):
    """`width` lanes of float32."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(name=f"float32x{width}")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """Kept as an LLVM vector, so locals live in registers."""

    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(ir.FloatType(), fe_type.width))


def _add_operator(function: Callable[..., Any], instruction: str) -> None:
    """Make `x <operator> y` on vectors of one width compile to an LLVM instruction."""

    class Typing(AbstractTemplate):
        key = function

        def generic(self, args: Any, _kws: Any) -> Any:
            both = len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]
            return signature(args[0], *args) if both else None

    infer_global(function)(Typing)

    @lower_builtin(function, Vector, Vector)
    def lower(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _function, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")):
    _add_operator(_function, _instruction)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> Any:
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(ir.FloatType(), width).as_pointer())


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


@intrinsic(prefer_literal=True)
def load(_typing: Any, array: Any, index: Any, width: Any) -> Any:
    """array[index : index + width] of a C-contiguous array; `width` is a constant."""
    lanes = width.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, sig.args[0], args[0], args[1], lanes), align=4)

    return Vector(lanes)(array, types.int64, width), codegen


@intrinsic
def store(_typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """array[index : index + width of vector] = vector"""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, sig.args[0], args[0], args[1], vector.width), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), codegen


@intrinsic(prefer_literal=True)
def splat(_typing: Any, value: Any, width: Any) -> Any:
    """A vector of equal lanes; `width` is a constant."""
    lanes = width.literal_value
    vector = ir.VectorType(ir.FloatType(), lanes)

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], vector)

    return Vector(lanes)(types.float32, width), codegen


@intrinsic(prefer_literal=True)
def spread(_typing: Any, array: Any, index: Any, width: Any) -> Any:
    """splat(array[index], width), without numba's look at the index's sign."""
    lanes = width.literal_value
    vector = ir.VectorType(ir.FloatType(), lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).data
        return _splat(builder, builder.load(builder.gep(data, [args[1]])), vector)

    return Vector(lanes)(array, types.int64, width), codegen


@intrinsic
def muladd(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z"""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        vector = args[0].type
        signature = ir.FunctionType(vector, [vector] * 3)
        name = f"llvm.fmuladd.v{vector.count}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)

    return x(x, y, z), codegen


@intrinsic
def maximum(_typing: Any, x: Any, y: Any) -> Any:
    """x where x > y, else y (so y wins over NaN)"""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return x(x, y), codegen


@intrinsic
def sums4(_typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four vectors of one width (a power of two, at least 4), each summed up, as one vector of four."""

    def shuffled(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        return builder.shuffle_vector(x, y, mask)

    def halved(builder: Any, x: Any, y: Any) -> Any:
        """x's neighbours added, then y's, within each four lanes: what a horizontal add does."""
        groups = range(0, x.type.count, 4)
        count = x.type.count
        even = [lane for g in groups for lane in (g, g + 2, count + g, count + g + 2)]
        odd = [lane + 1 for lane in even]
        return builder.fadd(shuffled(builder, x, y, even), shuffled(builder, x, y, odd))

    def folded(builder: Any, x: Any, width: int) -> Any:
        while x.type.count > width:
            lanes = list(range(x.type.count))
            half = len(lanes) // 2
            x = builder.fadd(shuffled(builder, x, x, lanes[:half]), shuffled(builder, x, x, lanes[half:]))
        return x

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        a, b, c, d = (folded(builder, x, 8) for x in args)
        return folded(builder, halved(builder, halved(builder, a, b), halved(builder, c, d)), 4)

    return Vector(4)(a, b, c, d), codegen
