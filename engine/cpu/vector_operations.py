"""Operations of the attention kernel on vectors of 16 float32 values, with an order of sums that is fixed.

They are written in LLVM's language without permission to reorder, because a compiler may otherwise add up differently
for another number of rows: the bits of each row's result do not depend on how many rows are computed at once. Sizes are
constants of the calling function, so that its compiled code can be cached. numba's cache does not notice a change of
this file; touch `attention_kernel.py` with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import factorial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tandem.engine.cpu.compiler import as_floats

LANES = 16
_ROWS_AT_ONCE = 4
"""Rows that share one read of a key or value."""
_MAX_SUMS = 12
"""Sums of rows and values that are added up at once: with what is added, they fit into the 32 registers of AVX-512."""
_FLOAT, _WORD, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOAT_BYTES = 4
_LOWEST = -(2.0**100)
"""Less than any score."""
_SERIES = [float(np.float32(1 / factorial(power))) for power in range(7, -1, -1)]
"""Of `e^x`, from the last term on."""
_PER_LN2 = float(np.float32(1.4426950408889634))
_LN2_REST = float(np.float32(2.12194440e-4))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def transpose_keys(
    context: Any, pool: Any, pool_row: Any, part: Any, columns: Any, block_size: Any, head_dim: Any
) -> Any:
    """Converts 16 keys of a block to float32 and transposes them.

    pool: [rows, block_size, head_dim], of which keys `16 * part` and those after it of a row are read; the last key
    stands for those that the block does not have. columns: [parts, head_dim, 16].
    """
    if not (sizes := _constants(block_size, head_dim)):
        return None
    num_keys, num_dims = sizes
    kind = pool.dtype
    per_word = 32 // kind.bitwidth  # words of 32 bits are transposed, which hold up to four values

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (_data(context, builder, signature, args, number) for number in (0, 3))
        source = _after(builder, source, builder.mul(args[1], _LONG(num_keys * num_dims)), kind)
        target = _after(builder, target, builder.mul(args[2], _LONG(num_dims * LANES)))
        first_key = builder.mul(args[2], _LONG(LANES))
        keys = []
        for lane in range(LANES):
            key = builder.add(first_key, _LONG(lane))
            if num_keys % LANES:
                last = _LONG(num_keys - 1)
                key = builder.select(builder.icmp_unsigned("<", key, last), key, last)
            keys.append(_after(builder, source, builder.mul(key, _LONG(num_dims)), kind))
        for first in range(0, num_dims, LANES * per_word):
            num_values = min(LANES * per_word, num_dims - first)
            square = [_load_words(builder, key, first, num_values, kind) for key in keys]
            for distance in (1, 2, 4, 8):
                _exchange(builder, square, distance)
            for number in range(num_values):
                words = square[number // per_word]
                if per_word > 1:
                    words = builder.lshr(words, _splat(_WORD, kind.bitwidth * (number % per_word)))
                    words = builder.and_(words, _splat(_WORD, 2**kind.bitwidth - 1))
                _store(builder, target, _LONG((first + number) * LANES), as_floats(builder, kind, words))
        return context.get_dummy_value()

    return types.void(pool, pool_row, part, columns, block_size, head_dim), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_keys(
    context: Any, queries: Any, begin_row: Any, end_row: Any, columns: Any, part: Any, weights: Any,
    head_dim: Any, num_weights: Any,
) -> Any:  # fmt: skip
    """Writes the dot products of the queries from `begin_row` to `end_row` with 16 keys.

    queries: [rows, head_dim]. columns: [parts, head_dim, 16], transposed keys. weights: [rows, num_weights], of which
    columns `16 * part` and those after it get the products. Even and odd dimensions are added up apart, each in order.
    """
    if not (sizes := _constants(head_dim, num_weights)):
        return None
    num_dims, weight_stride = sizes

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        queries, columns, weights = (_data(context, builder, signature, args, number) for number in (0, 3, 5))
        columns = _after(builder, columns, builder.mul(args[4], _LONG(num_dims * LANES)))
        weights = _after(builder, weights, builder.mul(args[4], _LONG(LANES)))

        def score(row: Any, num_rows: int) -> None:
            query = _after(builder, queries, builder.mul(row, _LONG(num_dims)))
            weight = _after(builder, weights, builder.mul(row, _LONG(weight_stride)))
            sums = [[_sum(builder, _splat(_FLOAT, 0.0)) for _ in range(2)] for _ in range(num_rows)]

            def add(d: Any, parity: int) -> None:
                of_keys = _load(builder, columns, builder.mul(d, _LONG(LANES)))
                for number, each in enumerate(sums):
                    value = _broadcast(builder, query, builder.add(d, _LONG(number * num_dims)))
                    _add_product(builder, each[parity], value, of_keys)

            with _loop(builder, _LONG(0), _LONG(num_dims - num_dims % 2), 2) as d:
                add(d, 0)
                add(builder.add(d, _LONG(1)), 1)
            if num_dims % 2:
                add(_LONG(num_dims - 1), 0)
            for number, (even, odd) in enumerate(sums):
                whole = builder.fadd(builder.load(even), builder.load(odd))
                _store(builder, weight, _LONG(number * weight_stride), whole)

        _for_rows(builder, args[1], args[2], score)
        return context.get_dummy_value()

    return types.void(queries, begin_row, end_row, columns, part, weights, head_dim, num_weights), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh_scores(
    context: Any, weights: Any, row: Any, first: Any, stop: Any, largest: Any, total: Any, shrunk: Any, num_weights: Any
) -> Any:
    """Turns the scores of a row into weights `exp(score - largest)` and updates the running softmax.

    weights: [rows, num_weights], num_weights a multiple of 16. Scores before `first` and from `stop` on are ignored,
    and their weights are zero. largest, total: [rows], the largest score and the sum of weights until now. shrunk:
    [rows], gets the factor by which earlier weights shrink.
    """
    if not (sizes := _constants(num_weights)):
        return None
    (weight_stride,) = sizes

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, *of_rows = (_data(context, builder, signature, args, number) for number in (0, 4, 5, 6))
        weights = _after(builder, weights, builder.mul(args[1], _LONG(weight_stride)))
        largest, total, shrunk = (_pointer(builder, each, args[1], _FLOAT) for each in of_rows)
        first = builder.trunc(args[2], _WORD)
        number_seen = _spread(builder, builder.sub(builder.trunc(args[3], _WORD), first))
        first = _spread(builder, first)
        places = range(0, weight_stride, LANES)

        before = builder.load(largest)
        scores, seen = [], []
        for place in places:
            distance = builder.sub(_numbers(list(range(place, place + LANES))), first)
            seen.append(builder.icmp_unsigned("<", distance, number_seen))
            score = _load(builder, weights, _LONG(place))
            scores.append(builder.select(seen[-1], score, _splat(_FLOAT, _LOWEST)))
        highest = _greater(builder, before, _folded(builder, scores, _greater))
        added = []
        for place, score, is_seen in zip(places, scores, seen, strict=True):
            weight = _exp(builder, builder.fsub(score, _spread(builder, highest)))
            added.append(builder.select(is_seen, weight, _splat(_FLOAT, 0.0)))
            _store(builder, weights, _LONG(place), added[-1])
        factor = _exp(builder, builder.fsub(before, highest))
        sum_added = _folded(builder, added, lambda builder, one, other: builder.fadd(one, other))
        builder.store(highest, largest)
        builder.store(_multiply_add(builder, builder.load(total), factor, sum_added), total)
        builder.store(factor, shrunk)
        return context.get_dummy_value()

    return types.void(weights, row, first, stop, largest, total, shrunk, num_weights), codegen


@intrinsic  # type: ignore[untyped-decorator]
def exp(context: Any, x: Any) -> Any:
    """Computes `e^x` as `weigh_scores` does."""
    return types.float32(types.float32), lambda context, builder, signature, args: _exp(builder, args[0])


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def mix_values(
    context: Any, weights: Any, begin_row: Any, end_row: Any, values: Any, values_row: Any, begin: Any, end: Any,
    shrunk: Any, mixed: Any, block_size: Any, head_dim: Any, num_weights: Any,
) -> Any:  # fmt: skip
    """Shrinks the rows from `begin_row` to `end_row` and adds the weighted values from `begin` to `end`, in order.

    weights: [rows, num_weights]. values: [rows, block_size, head_dim] of one of the types of the pool, of which
    `values_row` is used. shrunk: [rows], factors. mixed: [rows, head_dim].
    """
    if not (sizes := _constants(block_size, head_dim, num_weights)):
        return None
    num_values, num_dims, weight_stride = sizes
    kind = values.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, values, shrunk, mixed = (_data(context, builder, signature, args, number) for number in (0, 3, 7, 8))
        values = _after(builder, values, builder.mul(args[4], _LONG(num_values * num_dims)), kind)

        def mix(row: Any, num_rows: int) -> None:
            weight = _after(builder, weights, builder.mul(row, _LONG(weight_stride)))
            mix = _after(builder, mixed, builder.mul(row, _LONG(num_dims)))
            width = _MAX_SUMS // num_rows * LANES
            for first in range(0, num_dims, width):
                columns = {d: min(LANES, num_dims - d) for d in range(first, min(first + width, num_dims), LANES)}
                places = {(number, d): _LONG(number * num_dims + d) for number in range(num_rows) for d in columns}
                sums = {}
                for (number, d), place in places.items():
                    factor = _broadcast(builder, shrunk, builder.add(row, _LONG(number)), columns[d])
                    start = builder.fmul(_load(builder, mix, place, columns[d]), factor)
                    sums[number, d] = _sum(builder, start)
                with _loop(builder, args[5], args[6], 1) as t:
                    value = _after(builder, values, builder.mul(t, _LONG(num_dims)), kind)
                    parts = {d: _load_floats(builder, value, d, lanes, kind) for d, lanes in columns.items()}
                    for number in range(num_rows):
                        at = builder.add(t, _LONG(number * weight_stride))
                        for d, lanes in columns.items():
                            _add_product(builder, sums[number, d], _broadcast(builder, weight, at, lanes), parts[d])
                for key, place in places.items():
                    _store(builder, mix, place, builder.load(sums[key]))

        _for_rows(builder, args[1], args[2], mix)
        return context.get_dummy_value()

    argument_types = (weights, begin_row, end_row, values, values_row, begin, end, shrunk, mixed)
    return types.void(*argument_types, block_size, head_dim, num_weights), codegen


def _constants(*arguments: Any) -> list[int] | None:
    """Returns the values of arguments that are constants of the caller, or None if one is not."""
    if all(isinstance(each, types.IntegerLiteral) for each in arguments):
        return [each.literal_value for each in arguments]
    return None


def _for_rows(builder: Any, begin: Any, end: Any, compute: Callable[[Any, int], None]) -> None:
    """Computes several rows at once, and those that are left at once."""
    num_rows = builder.sub(end, begin)
    rest = builder.srem(num_rows, _LONG(_ROWS_AT_ONCE))
    with _loop(builder, begin, builder.sub(end, rest), _ROWS_AT_ONCE) as row:
        compute(row, _ROWS_AT_ONCE)
    for count in range(1, _ROWS_AT_ONCE):
        with builder.if_then(builder.icmp_signed("==", rest, _LONG(count))):
            compute(builder.sub(end, rest), count)


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


def _splat(kind: Any, value: float, lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _data(context: Any, builder: Any, signature: Any, args: Any, number: int) -> Any:
    """Returns the address of an array's first element."""
    array = context.make_array(signature.args[number])(context, builder, args[number])
    return builder.ptrtoint(array.data, _LONG)


def _after(builder: Any, address: Any, num_values: Any, kind: Any = types.float32) -> Any:
    return builder.add(address, builder.mul(num_values, _LONG(kind.bitwidth // 8)))


def _pointer(builder: Any, address: Any, place: Any, kind: Any) -> Any:
    return builder.inttoptr(_after(builder, address, place), kind.as_pointer())


def _load(builder: Any, address: Any, place: Any, lanes: int = LANES, element: Any = _FLOAT, bits: int = 32) -> Any:
    """Loads a vector of integers or floats. place: its distance from the address, in elements."""
    place = builder.add(address, builder.mul(place, _LONG(bits // 8)))
    pointer = builder.inttoptr(place, ir.VectorType(element, lanes).as_pointer())
    return builder.load(pointer, align=bits // 8)


def _load_floats(builder: Any, address: Any, place: int, lanes: int, kind: Any) -> Any:
    """Loads values of a type of the pool as float32."""
    bits = _load(builder, address, _LONG(place), lanes, ir.IntType(kind.bitwidth), kind.bitwidth)
    if kind.bitwidth < 32:
        bits = builder.zext(bits, ir.VectorType(_WORD, lanes))
    return as_floats(builder, kind, bits)


def _load_words(builder: Any, address: Any, place: int, num_values: int, kind: Any) -> Any:
    """Loads values of a type of the pool into 16 words, the rest of which is zero."""
    element = ir.IntType(kind.bitwidth)
    values = _load(builder, address, _LONG(place), num_values, element, kind.bitwidth)
    whole = LANES * 32 // kind.bitwidth
    if num_values < whole:
        zeros = _splat(element, 0, num_values)
        values = builder.shuffle_vector(values, zeros, _numbers([min(each, num_values) for each in range(whole)]))
    return builder.bitcast(values, ir.VectorType(_WORD, LANES))


def _store(builder: Any, address: Any, place: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, place, value.type), align=_FLOAT_BYTES)


def _broadcast(builder: Any, address: Any, place: Any, lanes: int = LANES) -> Any:
    return _spread(builder, builder.load(_pointer(builder, address, place, _FLOAT)), lanes)


def _spread(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """Returns a vector whose elements are all the value."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, _WORD(0))
    return builder.shuffle_vector(first, undefined, _splat(_WORD, 0, lanes))


def _folded(builder: Any, vectors: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combines all elements of vectors into one number, in a fixed order."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = combine(builder, result, vector)
    while result.type.count > 1:
        half = result.type.count // 2
        parts = [_numbers(list(range(start, start + half))) for start in (0, half)]
        result = combine(builder, *(builder.shuffle_vector(result, result, part) for part in parts))
        if half == 1:
            return builder.extract_element(result, _WORD(0))
    return result


def _greater(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _exp(builder: Any, x: Any) -> Any:
    """Computes `e^x = 2^n e^r` with `n = round(x / ln 2)` and a Taylor series for r; accurate to 2 ulp.

    x: a float32 or a vector of them. The C library's exp computes one at a time.
    """
    is_vector = isinstance(x.type, ir.VectorType)

    def constant(value: float, kind: Any = _FLOAT) -> Any:
        return _splat(kind, value, x.type.count) if is_vector else ir.Constant(kind, value)

    x = builder.select(builder.fcmp_ordered("<", x, constant(-87.0)), constant(-87.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, constant(88.0)), constant(88.0), x)
    whole = _multiply_add(builder, x, constant(_PER_LN2), constant(0.5))
    name = f"llvm.floor.{_type_name(x.type)}"
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), name)
    whole = builder.call(floor, [whole])
    rest = _multiply_add(builder, whole, constant(-0.693359375), x)  # ln 2 in two parts
    rest = _multiply_add(builder, whole, constant(_LN2_REST), rest)
    series = constant(_SERIES[0])
    for inverse in _SERIES[1:]:
        series = _multiply_add(builder, series, rest, constant(inverse))
    words = ir.VectorType(_WORD, x.type.count) if is_vector else _WORD
    exponent = builder.add(builder.fptosi(whole, words), constant(127, _WORD))
    return builder.fmul(series, builder.bitcast(builder.shl(exponent, constant(23, _WORD)), x.type))


def _multiply_add(builder: Any, one: Any, other: Any, added: Any) -> Any:
    """Computes `one * other + added` and rounds once."""
    name = f"llvm.fma.{_type_name(one.type)}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(one.type, [one.type] * 3), name)
    return builder.call(function, [one, other, added])


def _type_name(kind: Any) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


def _sum(builder: Any, start: Any) -> Any:
    """Returns a place for a sum, which the compiler keeps in registers."""
    place = cgutils.alloca_once(builder, start.type)
    builder.store(start, place)
    return place


def _add_product(builder: Any, place: Any, one: Any, other: Any) -> None:
    builder.store(_multiply_add(builder, one, other, builder.load(place)), place)


@contextmanager
def _loop(builder: Any, start: Any, end: Any, step: int) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, start, end, _LONG(step), _LONG) as (number, _):
        yield number
