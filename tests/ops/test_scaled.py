"""Operands of block-scaled matmuls: the evaluators, and the ops that it stands for."""

import jax.numpy as jnp
import numpy as np

from pallasite.emulation import tiles as jax_tiles
from pallasite.interpret import numpy_tiles
from pallasite.ir.build import Builder
from pallasite.ir.opdef import table
from pallasite.ir.types import F32, TileType

ROWS, K, EACH = 256, 128, 16


def test_all_meanings_are_the_same():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS, K)).astype(np.float32)
    scales = 2.0 ** rng.integers(-9, 9, (ROWS, K // EACH)).astype(np.float32)
    want = values * np.repeat(scales, EACH, axis=1)

    groups, tall = K // EACH // 4, ROWS // 128
    parts = scales.reshape(tall, 4, 32, groups, 4).transpose(3, 0, 2, 1, 4)
    packed = parts.reshape(groups, tall, 512)

    b = Builder()
    operands = [b.constant(0.0, TileType(x.shape, F32)) for x in (values, packed)]
    b.op("scaled", *operands, dtype=F32)
    op = b.ops[-1]
    by_numpy = numpy_tiles.RULES["scaled"](op, values, packed)
    np.testing.assert_array_equal(by_numpy, want)
    by_jax = jax_tiles.RULES["scaled"](op, jnp.asarray(values), jnp.asarray(packed))
    np.testing.assert_array_equal(by_jax, want)

    inside = Builder()
    lower = table()["scaled"].lower
    assert lower is not None
    (result,) = lower(inside, *operands, dtype=F32)
    known = dict(zip(operands, (values, packed), strict=True))
    for each in inside.ops:
        arrays = [known[v] for v in each.operands]
        if each.name == "mul":
            found = arrays[0] * arrays[1]
        else:
            (found,) = numpy_tiles.run(each, arrays)
        known[each.result] = found
    np.testing.assert_array_equal(known[result], want)
