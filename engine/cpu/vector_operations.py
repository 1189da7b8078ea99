"""Operations of the attention kernel on vectors of 16 float32 values, with an order of sums that is fixed.

They are written in LLVM's language without permission to reorder, because a compiler may otherwise add up differently
for another number of rows: the bits of each row's result do not depend on how many rows are computed at once. Sizes are
constants of the calling function, so that its compiled code can be cached. numba's cache does not notice a change of
this file; touch `attention_kernel.py` with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_FLOAT, _WORD, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FLOAT_BYTES = 4
_ALL_FIRST = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_keys(
    context: Any, queries: Any, row: Any, keys: Any, group: Any, weights: Any,
    num_rows: Any, head_dim: Any, width: Any, num_weights: Any,
) -> Any:  # fmt: skip
    """Writes the dot products of queries `row` to `row + num_rows` with 16 keys.

    queries: [rows, width]. keys: [groups, head_dim, 16], transposed. weights: [rows, num_weights], of which columns
    `16 * group` and those after it get the products. Even and odd dimensions are added up apart, each in order.
    """
    if not (sizes := _constants(num_rows, head_dim, width, num_weights)):
        return None
    rows, dimensions, query_stride, weight_stride = sizes

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query, key, weight = (_data(context, builder, signature, args, number) for number in (0, 2, 4))
        key = _after(builder, key, builder.mul(args[3], _LONG(dimensions * LANES)))
        query = _after(builder, query, builder.mul(args[1], _LONG(query_stride)))
        place = builder.add(builder.mul(args[1], _LONG(weight_stride)), builder.mul(args[3], _LONG(LANES)))
        weight = _after(builder, weight, place)
        sums = [[_zero(builder) for _ in range(2)] for _ in range(rows)]

        def add(d: Any, parity: int) -> None:
            of_keys = _load(builder, key, builder.mul(d, _LONG(LANES)))
            for number, each in enumerate(sums):
                value = _broadcast(builder, query, builder.add(d, _LONG(number * query_stride)))
                _add_product(builder, each[parity], value, of_keys)

        with _loop(builder, 0, dimensions - dimensions % 2, 2) as d:
            add(d, 0)
            add(builder.add(d, _LONG(1)), 1)
        if dimensions % 2:
            add(_LONG(dimensions - 1), 0)
        for number, (even, odd) in enumerate(sums):
            whole = builder.fadd(builder.load(even), builder.load(odd))
            _store(builder, weight, _LONG(number * weight_stride), whole)
        return context.get_dummy_value()

    return types.void(queries, row, keys, group, weights, num_rows, head_dim, width, num_weights), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def mix_values(
    context: Any, weights: Any, row: Any, group: Any, values: Any, mixed: Any,
    num_rows: Any, width: Any, num_weights: Any,
) -> Any:  # fmt: skip
    """Adds 16 weighted values, in order, to each of the rows `row` to `row + num_rows`.

    weights: [rows, num_weights], of which columns `16 * group` and those after it are used. values: [16 * groups,
    width]. mixed: [rows, width]. width: a multiple of 16.
    """
    if not (sizes := _constants(num_rows, width, num_weights)):
        return None
    rows, columns, weight_stride = sizes

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, value, mix = (_data(context, builder, signature, args, number) for number in (0, 3, 4))
        place = builder.add(builder.mul(args[1], _LONG(weight_stride)), builder.mul(args[2], _LONG(LANES)))
        weight = _after(builder, weight, place)
        value = _after(builder, value, builder.mul(args[2], _LONG(LANES * columns)))
        mix = _after(builder, mix, builder.mul(args[1], _LONG(columns)))
        for first in range(0, columns, 2 * LANES):
            firsts = range(first, min(first + 2 * LANES, columns), LANES)
            sums = {(number, column): _zero(builder) for number in range(rows) for column in firsts}
            for (number, column), each in sums.items():
                builder.store(_load(builder, mix, _LONG(number * columns + column)), each)
            with _loop(builder, 0, LANES, 1) as t:
                of_key = _after(builder, value, builder.mul(t, _LONG(columns)))
                parts = {column: _load(builder, of_key, _LONG(column)) for column in firsts}
                for number in range(rows):
                    share = _broadcast(builder, weight, builder.add(t, _LONG(number * weight_stride)))
                    for column in firsts:
                        _add_product(builder, sums[number, column], share, parts[column])
            for (number, column), each in sums.items():
                _store(builder, mix, _LONG(number * columns + column), builder.load(each))
        return context.get_dummy_value()

    return types.void(weights, row, group, values, mixed, num_rows, width, num_weights), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def transpose_rows(context: Any, rows: Any, group: Any, columns: Any, width: Any, num_columns: Any) -> Any:
    """Transposes 16 rows.

    rows: [16 * groups, width], width a multiple of 16. columns: [groups, num_columns, 16], num_columns at most width.
    """
    if not (sizes := _constants(width, num_columns)):
        return None
    stride, number_of_columns = sizes

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (_data(context, builder, signature, args, number) for number in (0, 2))
        source = _after(builder, source, builder.mul(args[1], _LONG(LANES * stride)))
        target = _after(builder, target, builder.mul(args[1], _LONG(LANES * number_of_columns)))
        for first in range(0, number_of_columns, LANES):
            square = [_load(builder, source, _LONG(row * stride + first)) for row in range(LANES)]
            for distance in (1, 2, 4, 8):
                _exchange(builder, square, distance)
            for number in range(min(LANES, number_of_columns - first)):
                _store(builder, target, _LONG((first + number) * LANES), square[number])
        return context.get_dummy_value()

    return types.void(rows, group, columns, width, num_columns), codegen


def _constants(*arguments: Any) -> list[int] | None:
    """Returns the values of arguments that are constants of the caller, or None if one is not."""
    if all(isinstance(each, types.IntegerLiteral) for each in arguments):
        return [each.literal_value for each in arguments]
    return None


def _exchange(builder: Any, square: list[Any], distance: int) -> None:
    """Exchanges the off-diagonal quarters of each square of 2 * distance rows and columns."""
    lanes = range(LANES)
    low = [lane if not lane & distance else LANES + lane - distance for lane in lanes]
    high = [lane + distance if not lane & distance else LANES + lane for lane in lanes]
    for row in lanes:
        if not row & distance:
            one, other = square[row], square[row + distance]
            square[row] = builder.shuffle_vector(one, other, _numbers(low))
            square[row + distance] = builder.shuffle_vector(one, other, _numbers(high))


def _numbers(values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_WORD, len(values)), values)


def _data(context: Any, builder: Any, signature: Any, args: Any, number: int) -> Any:
    """Returns the address of an array's first element."""
    array = context.make_array(signature.args[number])(context, builder, args[number])
    return builder.ptrtoint(array.data, _LONG)


def _after(builder: Any, address: Any, num_values: Any) -> Any:
    return builder.add(address, builder.mul(num_values, _LONG(_FLOAT_BYTES)))


def _pointer(builder: Any, address: Any, place: Any, kind: Any) -> Any:
    return builder.inttoptr(_after(builder, address, place), kind.as_pointer())


def _load(builder: Any, address: Any, place: Any) -> Any:
    return builder.load(_pointer(builder, address, place, _VECTOR), align=_FLOAT_BYTES)


def _store(builder: Any, address: Any, place: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, place, _VECTOR), align=_FLOAT_BYTES)


def _broadcast(builder: Any, address: Any, place: Any) -> Any:
    value = builder.load(_pointer(builder, address, place, _FLOAT))
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _WORD(0)), undefined, _ALL_FIRST)


def _zero(builder: Any) -> Any:
    """Returns a place for a sum, which the compiler keeps in a register."""
    place = cgutils.alloca_once(builder, _VECTOR)
    builder.store(ir.Constant(_VECTOR, [0.0] * LANES), place)
    return place


def _add_product(builder: Any, place: Any, one: Any, other: Any) -> None:
    """Adds a product to a sum and rounds once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(multiply_add, [one, other, builder.load(place)]), place)


@contextmanager
def _loop(builder: Any, start: int, end: int, step: int) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, _LONG(start), _LONG(end), _LONG(step), _LONG) as (number, _):
        yield number
