"""Short vectors of float32 as numba values, for the inner loops that LLVM does not find by itself.

A width may be several machine registers wide: LLVM splits it, so one source serves SSE, AVX2 and AVX-512. Indices are
elements from the array's first one (C order), unchecked: who calls has checked.

    load(a, i, W)    a[i : i + W]                 splat(x, W)             x in every lane
    store(a, i, v)   a[i : i + W] = v             muladd(x, y, z)         x * y + z, fused where the machine can
    maximum(x, y)    x where x > y, else y        sums4(a, b, c, d)       (sum of a, of b, of c, of d)
    spread(a, i, W)  a[i] in every lane           greatest(x)             the greatest lane
    + - * /                                       widened(h, i, W)        h[i : i + W], bf16 patterns, as float32
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import models, register_model

from pagekernels.cpu.jit import emitted


class Vector(types.Type):
    """`width` lanes of float32."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(name=f"float32x{width}")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """Kept as an LLVM vector, so locals live in registers."""

    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(ir.FloatType(), fe_type.width))


def _add_operator(function: Callable[..., Any], instruction: str) -> None:
    """Make `x <operator> y` on vectors of one width compile to an LLVM instruction."""

    class Typing(AbstractTemplate):  # type: ignore[misc]
        key = function

        def generic(self, args: Any, _kws: Any) -> Any:
            both = len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]
            return signature(args[0], *args) if both else None

    infer_global(function)(Typing)

    @lower_builtin(function, Vector, Vector)  # type: ignore[untyped-decorator]
    def lower(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _add_operator(_function, _instruction)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> Any:
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(ir.FloatType(), width).as_pointer())


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


@emitted
def load(_typing: Any, array: Any, _index: Any, width: Any) -> Any:
    """array[index : index + width] of a C-contiguous array; `width` is a constant."""
    lanes = width.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, sig.args[0], args[0], args[1], lanes), align=4)

    return Vector(lanes)(array, types.int64, width), codegen


@emitted
def store(_typing: Any, array: Any, _index: Any, vector: Any) -> Any:
    """array[index : index + width of vector] = vector."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, sig.args[0], args[0], args[1], vector.width), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), codegen


@emitted
def widened(_typing: Any, halves: Any, _index: Any, width: Any) -> Any:
    """bf16 patterns halves[index : index + width] of a C-contiguous array as float32; `width` is a constant."""
    lanes = width.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).data
        short, long = (ir.VectorType(ir.IntType(bits), lanes) for bits in (16, 32))
        patterns = builder.load(builder.bitcast(builder.gep(data, [args[1]]), short.as_pointer()), align=2)
        wide = builder.shl(builder.zext(patterns, long), ir.Constant(long, [16] * lanes))
        return builder.bitcast(wide, ir.VectorType(ir.FloatType(), lanes))

    return Vector(lanes)(halves, types.int64, width), codegen


@emitted
def splat(_typing: Any, _value: Any, width: Any) -> Any:
    """A vector of equal lanes; `width` is a constant."""
    lanes = width.literal_value
    vector = ir.VectorType(ir.FloatType(), lanes)

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], vector)

    return Vector(lanes)(types.float32, width), codegen


@emitted
def spread(_typing: Any, array: Any, _index: Any, width: Any) -> Any:
    """splat(array[index], width), without numba's look at the index's sign."""
    lanes = width.literal_value
    vector = ir.VectorType(ir.FloatType(), lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).data
        return _splat(builder, builder.load(builder.gep(data, [args[1]])), vector)

    return Vector(lanes)(array, types.int64, width), codegen


@emitted
def muladd(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """The sum x * y + z, fused where the machine can."""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        vector = args[0].type
        signature = ir.FunctionType(vector, [vector] * 3)
        name = f"llvm.fmuladd.v{vector.count}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)

    return x(x, y, z), codegen


@emitted
def maximum(_typing: Any, x: Any, y: Any) -> Any:
    """Each lane: x where x > y, else y (so y wins over NaN)."""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return x(x, y), codegen


@emitted
def exponent(_typing: Any, shifted: Any) -> Any:
    """2 ** n of lanes that hold floats.ROUND + n, whose low bits are n: moved up, they are a float's exponent."""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        integers = ir.VectorType(ir.IntType(32), shifted.width)
        bias, places = (ir.Constant(integers, [n] * shifted.width) for n in (127, 23))
        bits = builder.bitcast(args[0], integers)
        return builder.bitcast(builder.shl(builder.add(bits, bias), places), args[0].type)

    return shifted(shifted), codegen


@emitted
def zero_below(_typing: Any, x: Any, limit: Any, value: Any) -> Any:
    """0 where x < limit, else value."""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), ir.Constant(args[2].type, None), args[2])

    return x(x, limit, value), codegen


def _shuffled(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _folded(builder: Any, x: Any, width: int, combine: Callable[[Any, Any], Any]) -> Any:
    """The vector's halves combined until `width` lanes are left."""
    while x.type.count > width:
        lanes = list(range(x.type.count))
        low, high = lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :]
        x = combine(_shuffled(builder, x, x, low), _shuffled(builder, x, x, high))
    return x


@emitted
def greatest(_typing: Any, x: Any) -> Any:
    """The greatest lane as a scalar, NaN left out."""

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        top = _folded(builder, args[0], 1, larger)
        return builder.extract_element(top, ir.Constant(ir.IntType(32), 0))

    return types.float32(x), codegen


@emitted
def sums4(_typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four vectors of one width (a power of two, at least 4), each summed up, as one vector of four."""

    def halved(builder: Any, x: Any, y: Any) -> Any:
        """X's neighbours added, then y's, within each four lanes: what a horizontal add does."""
        count = x.type.count
        even = [lane for g in range(0, count, 4) for lane in (g, g + 2, count + g, count + g + 2)]
        odd = [lane + 1 for lane in even]
        return builder.fadd(_shuffled(builder, x, y, even), _shuffled(builder, x, y, odd))

    def codegen(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        a, b, c, d = (_folded(builder, x, 8, builder.fadd) for x in args)
        return _folded(builder, halved(builder, halved(builder, a, b), halved(builder, c, d)), 4, builder.fadd)

    return Vector(4)(a, b, c, d), codegen
