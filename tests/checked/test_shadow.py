"""Undefined elements: a result marked as defined never depends on one.

Each op runs twice on operands that differ only where they are undefined. Where the
codes say that the result is defined, both runs must give the same.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.interpret.monitor import Monitor
from pallasite.interpret.numbers import Pick
from pallasite.interpret.shadow import CheckedNumbers
from pallasite.interpret.shadow_tiles import Partly, codes_of, partly, value_of
from pallasite.ir import types as T
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.opdef import table
from pallasite.passes.analysis.memory import Roots
from pallasite.primitive import Checked

ROWS = table()
KERNEL = Kernel("k", (), Block(), 0)
NUMBERS = CheckedNumbers(Monitor(KERNEL, Roots(KERNEL), Checked()))
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
few = settings(max_examples=20)


def garbage(rng, shape, dtype: T.DType):
    if dtype.is_bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.is_integer:
        return rng.integers(0, 6, shape).astype(dtype.np)
    return rng.choice([0, 1, 2.5, -3, np.nan, np.inf], shape).astype(dtype.np)


def two_versions(rng, shape, dtype: T.DType, share=0.3):
    """The same array twice, with other values where it is undefined."""
    first, second = garbage(rng, shape, dtype), garbage(rng, shape, dtype)
    codes = np.where(rng.random(shape) < share, 3, 0).astype(np.int32)
    second = np.where(codes, second, first).astype(dtype.np)
    return partly(first, codes), partly(second, codes)


def assert_defined_is_certain(first, second):
    """Same codes; the same values where they are 0."""
    for a, b in zip(first, second, strict=True):
        codes = [codes_of(x) for x in (a, b)]
        zeros = np.zeros(np.shape(value_of(a)), np.int32)
        codes = [zeros if c is None else c for c in codes]
        # Which elements are settled by a deciding operand may differ between the
        # versions, but never on what is claimed to be defined in both.
        defined = (codes[0] == 0) & (codes[1] == 0)
        both = [np.asarray(value_of(x))[defined].astype(np.float64) for x in (a, b)]
        np.testing.assert_array_equal(*both)


def make_op(name, operands, **attrs):
    types = [T.TileType(np.shape(value_of(x)), T.dtype_of(x.dtype)) for x in operands]
    results = ROWS[name].type_rule(tuple(types), attrs)
    values = tuple(Value(t) for t in types)
    return Op(name, values, tuple(Value(t) for t in results), attrs)


def check_tile_op(name, *pairs, **attrs):
    results = []
    with np.errstate(all="ignore"):
        for operands in zip(*pairs, strict=True):
            op = make_op(name, operands, **attrs)
            results.append(NUMBERS.tile_op(op, list(operands)))
    assert_defined_is_certain(*results)
    return results[0]


def same(x):
    return x, x


# --- elementwise ---

ELEMENTWISE = [r for r in ROWS.values() if r.elementwise and r.name != "bitcast"]


@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda r: r.name)
def test_elementwise(row):
    rng = np.random.default_rng(7)
    attrs = {"rounding_method": 1, "y": 3, "exponent_bits": 5, "mantissa_bits": 3}
    attrs = {k: attrs[k] for k in row.attrs if k != "dtype"}
    if row.name == "cast":
        attrs = {"dtype": T.F32}
    for name in ("f32", "i32", "bool"):
        dtype = T.DTYPES[name]
        if dtype not in row.dtypes:
            continue
        for _ in range(5):
            pairs = [two_versions(rng, (4, 5), dtype) for _ in range(row.arity or 2)]
            if row.name == "select_n":
                pairs = [two_versions(rng, (4, 5), T.BOOL), *pairs]
            results = []
            for operands in zip(*pairs, strict=True):
                types = tuple(T.TileType((4, 5), T.dtype_of(x.dtype)) for x in operands)
                (result,) = row.type_rule(types, attrs)
                with np.errstate(all="ignore"):
                    results.append(NUMBERS.elementwise(row, operands, attrs, result))
            assert_defined_is_certain(results[:1], results[1:])


def test_a_false_condition_settles_and():
    x = Partly(np.array([True, True]), np.array([0, 5], np.int32))
    no, yes = np.array([False, False]), np.array([True, True])
    result = T.TileType((2,), T.BOOL)
    assert type(NUMBERS.elementwise(ROWS["and"], [x, no], {}, result)) is np.ndarray
    both = NUMBERS.elementwise(ROWS["and"], [x, yes], {}, result)
    assert both.codes.tolist() == [0, 5]
    either = NUMBERS.elementwise(ROWS["or"], [yes, x], {}, result)
    assert type(either) is np.ndarray


# --- ops on whole tiles ---


@few
@given(seeds, st.sampled_from(["f32", "i32", "bool"]))
def test_movements(rng, name):
    dtype = T.DTYPES[name]
    x = two_versions(rng, (3, 4), dtype)
    check_tile_op("transpose", x, perm=(1, 0))
    check_tile_op("rev", x, axes=(1,))
    check_tile_op("exchange", x, axis=1, distance=2)
    check_tile_op("reshape", x, shape=(2, 6))
    check_tile_op("broadcast_in_dim", x, shape=(3, 2, 4), dims=(0, 2))
    check_tile_op("slice", x, starts=(0, 1), limits=(3, 4), strides=(2, 1))
    check_tile_op("concatenate", x, two_versions(rng, (2, 4), dtype), axis=0)
    value = two_versions(rng, (), dtype)
    config = {"low": (1, -1), "high": (0, 2), "interior": (1, 0)}
    (padded,) = check_tile_op("pad", x, value, **config)
    assert padded.shape == (6, 5)
    starts = [two_versions(rng, (), T.I32) for _ in range(2)]
    check_tile_op("dynamic_slice", x, *starts, sizes=(2, 2))
    check_tile_op("dynamic_update_slice", x, two_versions(rng, (2, 2), dtype), *starts)


@few
@given(seeds, st.sampled_from(["f32", "i32"]))
def test_reductions(rng, name):
    x = two_versions(rng, (4, 6), T.DTYPES[name], share=0.1)
    for kind in ("sum", "prod", "max", "min"):
        check_tile_op("reduce", x, kind=kind, axes=(1,))
        for reverse in (False, True):
            check_tile_op("scan", x, kind=kind, axis=1, reverse=reverse)
    check_tile_op("arg_reduce", x, kind="max", axis=1, dtype=T.I32)
    flags = two_versions(rng, (4, 6), T.BOOL)
    for kind in ("and", "or", "xor"):
        check_tile_op("reduce", flags, kind=kind, axes=(1,))


@few
@given(seeds)
def test_dot_and_sort(rng):
    x = two_versions(rng, (3, 2, 4), T.F32, share=0.05)
    y = two_versions(rng, (3, 4, 2), T.F32, share=0.05)
    attrs = {"contract": ((2,), (1,)), "batch": ((0,), (0,)), "precision": None}
    check_tile_op("dot", x, y, dtype=T.F32, **attrs)
    keys = two_versions(rng, (4, 5), T.I32, share=0.05)
    extra = two_versions(rng, (4, 5), T.F32, share=0.05)
    check_tile_op("sort", keys, extra, axis=1, num_keys=1, stable=True)
    check_tile_op("top_k", keys, axis=1, k=2)


@few
@given(seeds, st.sampled_from(["set", "add"]))
def test_gather_and_scatter(rng, kind):
    x, i = two_versions(rng, (5, 3), T.F32), two_versions(rng, (4, 1), T.I32)
    attrs = {"mode": "fill", "dimension_numbers": ((1,), (0,), (0,), (), ())}
    check_tile_op(
        "gather",
        x,
        i,
        slice_sizes=(1, 3),
        fill_value=1.0,
        type=T.TileType((4, 3), T.F32),
        **attrs,
    )
    updates = two_versions(rng, (4, 3), T.F32)
    type_ = T.TileType((5, 3), T.F32)
    check_tile_op("scatter", x, i, updates, kind=kind, type=type_, **attrs)


@pytest.mark.parametrize(("old", "new"), [("i32", "f32"), ("i32", "u8"), ("u8", "i32")])
def test_bitcast(old, new):
    x = two_versions(np.random.default_rng(0), (5, 4), T.DTYPES[old])
    check_tile_op("bitcast", x, dtype=T.DTYPES[new])


# --- memory ---


@few
@given(seeds, st.booleans())
def test_memory(rng, masked):
    memory = two_versions(rng, (6, 4), T.I32)
    value, other = (two_versions(rng, (3, 4), T.I32) for _ in range(2))
    mask = two_versions(rng, (3, 4), T.BOOL) if masked else (None, None)
    index = rng.integers(0, 6, 3)
    for picks in (
        [Pick(2, 3), Pick(0, 4)],
        [Pick(4, 3, 1, True, None, 0, 6), Pick(0, 4)],
        [Pick(gather=index, low=0, high=6), Pick(0, 4)],
    ):
        taken = [NUMBERS.take(memory[n], picks, mask[n], other[n]) for n in (0, 1)]
        assert_defined_is_certain(taken[:1], taken[1:])
        stored, updated = [], []
        for n in (0, 1):
            stored.append(NUMBERS.put(_copy(memory[n]), picks, value[n], mask[n]))
            updated += NUMBERS.rmw(_copy(memory[n]), picks, "add", value[n], mask[n])
        assert_defined_is_certain(stored[:1], stored[1:])
        assert_defined_is_certain(updated[:2], updated[2:])


def _copy(x):
    return Partly(x.value.copy(), x.codes.copy()) if type(x) is Partly else x.copy()


@pytest.mark.parametrize("memory", [np.bool_(False), Partly(np.int32(1), np.int32(5))])
def test_a_single_element_of_a_view_can_be_stored_into(memory):
    """What a reshaped or bitcast view shows of one element may be a numpy scalar."""
    value = memory.dtype.type(1)
    (stored, updated) = (
        NUMBERS.put(memory, [], value, None),
        NUMBERS.rmw(memory, [], "max", value, None)[0],
    )
    assert value_of(stored) == value and value_of(updated) == value


def test_a_single_element_outside_the_edge_is_dropped():
    memory = Partly(np.arange(8), np.full(8, 5, np.int32))
    picks = [Pick(9, 1, 1, False, None, 0, 8)]
    stored = NUMBERS.put(memory, picks, np.int64(1), None)
    assert value_of(stored).tolist() == list(range(8))
    assert codes_of(stored).tolist() == [5] * 8
