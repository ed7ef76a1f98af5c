"""Code of several iterations, stacked along a new first dimension."""

import pytest

from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Op, Value
from pallasite.passes.normal.stacked_code import Stacked

SIZE = 4


def stacked(make) -> tuple[Stacked, bool, Op]:
    """Ops that `make` emits from an index, for SIZE iterations; whether all stack."""
    index = Value(T.TileType((), T.I32), "i")
    b, once = Builder(None), Builder(None)
    make(once, index)
    env = {index: b.op("iota", type=T.TileType((SIZE,), index.tile.dtype), dim=0)}
    stack = Stacked(b, index, SIZE, env)
    return stack, all([stack.emit(op) for op in once.ops]), once.ops[-1]


def test_each_iteration_has_a_row():
    stack, done, last = stacked(lambda b, i: b.add(i, b.constant(3, i.tile)))
    assert done and stack.env[last.result].tile.shape == (SIZE,)


@pytest.mark.parametrize("dtype", [T.F32, T.U32])
def test_bitcasts_of_a_width_are_elementwise(dtype: T.DType):
    cast = lambda b, i: b.op("bitcast", i, dtype=dtype)
    stack, done, last = stacked(cast)
    assert done and stack.env[last.result].tile.shape == (SIZE,)


@pytest.mark.parametrize("dtype", [T.I8, T.BF16])
def test_bitcasts_to_several_numbers_are_not_stacked(dtype: T.DType):
    cast = lambda b, i: b.op("bitcast", i, dtype=dtype)
    _, done, _ = stacked(cast)
    assert not done
