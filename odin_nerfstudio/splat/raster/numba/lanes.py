"""Sixteen float32 lanes as a numba type: one row of a tile is one value.

LLVM lowers a ``<16 × float>`` to whatever the processor has (one AVX-512 register, two AVX, four SSE or NEON), so the
kernels say what happens to sixteen pixels at once and depend neither on the auto-vectoriser nor on fast-math flags.
Every operation is the same in every lane: no result depends on where in a row a pixel lies.

In kernels: ``+ - * /``, comparisons (giving a mask), ``&`` of masks, and the functions below. The other operand of an
operator may be a float32 scalar, never a Python float.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

WIDTH = 16

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_INTS = ir.VectorType(_INT, WIDTH)
_BITS = ir.VectorType(ir.IntType(1), WIDTH)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


class _Mask(types.Type):
    def __init__(self) -> None:
        super().__init__(name="mask16")


lanes = _Lanes()
mask = _Mask()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type) -> None:
        super().__init__(manager, fe_type, _FLOATS)


@register_model(_Mask)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type) -> None:
        super().__init__(manager, fe_type, _BITS)


def _spread(builder, value):
    """The same scalar in all lanes; lanes stay as they are."""
    if value.type == _FLOATS:
        return value
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * WIDTH))


def _constant(value: float):
    return ir.Constant(_FLOATS, [value] * WIDTH)


def _define_operator(op, result, emit) -> None:
    """Makes ``op`` accept lanes and float32 scalars in either place."""

    @type_callable(op)
    def _type(context):
        def typer(left, right):
            if lanes in (left, right) and {left, right} <= {lanes, types.float32}:
                return result
            return None

        return typer

    def lower(context, builder, sig, args):
        return emit(builder, _spread(builder, args[0]), _spread(builder, args[1]))

    for left, right in ((lanes, lanes), (lanes, types.float32), (types.float32, lanes)):
        lower_builtin(op, left, right)(lower)


_define_operator(operator.add, lanes, lambda b, x, y: b.fadd(x, y))
_define_operator(operator.sub, lanes, lambda b, x, y: b.fsub(x, y))
_define_operator(operator.mul, lanes, lambda b, x, y: b.fmul(x, y))
_define_operator(operator.truediv, lanes, lambda b, x, y: b.fdiv(x, y))
# Ordered comparisons: a NaN fails every test, so it never contributes to an image.
_define_operator(operator.lt, mask, lambda b, x, y: b.fcmp_ordered("<", x, y))
_define_operator(operator.le, mask, lambda b, x, y: b.fcmp_ordered("<=", x, y))
_define_operator(operator.gt, mask, lambda b, x, y: b.fcmp_ordered(">", x, y))
_define_operator(operator.ge, mask, lambda b, x, y: b.fcmp_ordered(">=", x, y))


@type_callable(operator.and_)
def _type_and(context):
    return lambda left, right: mask if left == mask and right == mask else None


@lower_builtin(operator.and_, mask, mask)
def _lower_and(context, builder, sig, args):
    return builder.and_(*args)


def _multiply_add(builder, x, y, z):
    """x·y + z, fused where the processor fuses."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fmuladd.v{WIDTH}f32"
    )
    return builder.call(function, [x, y, z])


def _address(context, builder, array_type, array, index):
    """Pointer to sixteen consecutive floats of a one-dimensional array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _FLOATS.as_pointer())


@intrinsic
def load(typingctx, array, index):
    """Elements ``index … index + 15`` of a contiguous one-dimensional float32 array, without a check of bounds."""

    def codegen(context, builder, sig, args):
        return builder.load(_address(context, builder, sig.args[0], *args), align=4)

    return lanes(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Writes to where :func:`load` reads."""

    def codegen(context, builder, sig, args):
        array_value, start, value = args
        builder.store(value, _address(context, builder, sig.args[0], array_value, start), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def fill(typingctx, value):
    """The float32 ``value`` in all lanes."""
    return lanes(types.float32), lambda context, builder, sig, args: _spread(builder, args[0])


@intrinsic
def ramp(typingctx):
    """0, 1, …, 15."""
    return lanes(), lambda context, builder, sig, args: ir.Constant(_FLOATS, [float(i) for i in range(WIDTH)])


@intrinsic
def multiply_add(typingctx, x, y, z):
    """x·y + z, rounded once where the processor can; each operand lanes or a float32."""

    def codegen(context, builder, sig, args):
        return _multiply_add(builder, *(_spread(builder, a) for a in args))

    return lanes(*(t if t == lanes else types.float32 for t in (x, y, z))), codegen


@intrinsic
def select(typingctx, condition, where_true, where_false):
    """Lane by lane choice; the alternatives are lanes or float32."""

    def codegen(context, builder, sig, args):
        return builder.select(args[0], _spread(builder, args[1]), _spread(builder, args[2]))

    types_ = (t if t == lanes else types.float32 for t in (where_true, where_false))
    return lanes(mask, *types_), codegen


@intrinsic
def magnitude(typingctx, x):
    """|x|."""

    def codegen(context, builder, sig, args):
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS]), f"llvm.fabs.v{WIDTH}f32"
        )
        return builder.call(function, args)

    return lanes(lanes), codegen


@intrinsic
def count(typingctx, condition):
    """How many lanes of a mask are set."""

    def codegen(context, builder, sig, args):
        word = ir.IntType(WIDTH)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [word]), f"llvm.ctpop.i{WIDTH}")
        return builder.zext(builder.call(function, [builder.bitcast(args[0], word)]), ir.IntType(64))

    return types.int64(mask), codegen


@intrinsic
def total(typingctx, x):
    """Sum of the lanes, always in the same order: halves added to halves."""

    def codegen(context, builder, sig, args):
        value, width = args[0], WIDTH
        while width > 1:
            width //= 2
            empty = ir.Constant(value.type, ir.Undefined)
            pick = [
                ir.Constant(ir.VectorType(_INT, width), [offset + i for i in range(width)]) for offset in (0, width)
            ]
            value = builder.fadd(*(builder.shuffle_vector(value, empty, p) for p in pick))
        return builder.extract_element(value, ir.Constant(_INT, 0))

    return types.float32(lanes), codegen


# exp(r) on |r| ≤ ½ ln 2 (Cephes expf): 1 + r + r²·(the polynomial), highest power first.
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# ln 2 in two parts; the first has so few bits that a small integer times it is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOG2_E = 1.44269504088896341
# Adding it leaves the nearest integer in the low bits of the mantissa.
_ROUNDER = 12582912.0
_SMALLEST = -87.0


@intrinsic
def exponential(typingctx, x):
    """exp(x) for x ≤ 0 to 2e-7 relative; anything below −87, and NaN, counts as −87."""

    def codegen(context, builder, sig, args):
        def power_step(accumulated, coefficient):
            return _multiply_add(builder, accumulated, r, _constant(coefficient))

        floor = _constant(_SMALLEST)
        x = builder.select(builder.fcmp_ordered(">", args[0], floor), args[0], floor)
        shifted = _multiply_add(builder, x, _constant(_LOG2_E), _constant(_ROUNDER))
        n = builder.fsub(shifted, _constant(_ROUNDER))
        r = _multiply_add(builder, n, _constant(-_LN2_HIGH), x)
        r = _multiply_add(builder, n, _constant(-_LN2_LOW), r)
        p = _constant(_EXP_POLYNOMIAL[0])
        for coefficient in _EXP_POLYNOMIAL[1:]:
            p = power_step(p, coefficient)
        p = _multiply_add(builder, builder.fmul(p, r), r, builder.fadd(r, _constant(1.0)))
        exponent = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * WIDTH))
        return builder.bitcast(builder.add(builder.bitcast(p, _INTS), exponent), _FLOATS)

    return lanes(lanes), codegen
