"""Tile ops on shapes that Triton pads, against the evaluator that defines them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.ir.opdef import table
from pallasite.ir.types import BF16, BOOL, F32, I32, U8, TileType, scalar
from pallasite.passes.run import run
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated, whole_kernel
from tests.ops.sampling import evaluate

ONE_OPERAND = {
    "slice rows": ("slice", (7, 5), dict(starts=(2, 0), limits=(6, 5), strides=(1, 1))),
    "slice with strides": (
        "slice",
        (9, 12),
        dict(starts=(1, 2), limits=(9, 11), strides=(3, 2)),
    ),
    "empty slice": ("slice", (6,), dict(starts=(2,), limits=(2,), strides=(1,))),
    "exchange": ("exchange", (3, 16), dict(axis=1, distance=4)),
    "rev": ("rev", (5, 6), dict(axes=(0, 1))),
    "transpose": ("transpose", (3, 5, 7), dict(perm=(2, 0, 1))),
    "broadcast": ("broadcast_in_dim", (3, 1), dict(shape=(3, 2, 5), dims=(0, 2))),
    "cumsum": ("scan", (5, 7), dict(kind="sum", axis=1, reverse=False)),
    "cummax from the end": ("scan", (5, 7), dict(kind="max", axis=0, reverse=True)),
    "cumprod": ("scan", (3, 9), dict(kind="prod", axis=1, reverse=True)),
    "argmax": ("arg_reduce", (5, 7), dict(kind="max", axis=1, dtype=I32)),
    "argmin": ("arg_reduce", (5, 7), dict(kind="min", axis=0, dtype=I32)),
    "sort": ("sort", (3, 6), dict(axis=1, num_keys=1, stable=True)),
    "top_k": ("top_k", (3, 6), dict(axis=1, k=3)),
}


def agree(kernel, operands, rtol=1e-6):
    for got, want in zip(
        simulated(kernel, operands), evaluate(kernel, operands), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=rtol)


@pytest.mark.parametrize("name", ONE_OPERAND)
@pytest.mark.parametrize("dtype", [F32, I32, U8], ids=str)
def test_one_operand(name: str, dtype):
    op, shape, attrs = ONE_OPERAND[name]
    tile = TileType(shape, dtype)
    result = table()[op].type_rule((tile,), attrs)[-1]
    kernel = whole_kernel(lambda b, x: b.emit(op, x, **attrs)[-1], [tile], result)
    x = np.random.default_rng(0).integers(1, 4, shape).astype(dtype.np)
    agree(kernel, [x])


def test_argmax_takes_the_first_nan():
    tile = TileType((2, 5), F32)
    kernel = whole_kernel(
        lambda b, x: b.op("arg_reduce", x, kind="max", axis=1, dtype=I32),
        [tile],
        TileType((2,), I32),
    )
    x = np.array([[1, np.nan, 5, np.nan, 2], [-np.inf] * 5], np.float32)
    np.testing.assert_array_equal(simulated(kernel, [x])[0], [1, 0])


@pytest.mark.parametrize("sizes", [(3, 4), (4, 4), (1, 5, 2), (3, 0, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_concatenate(sizes, axis: int):
    shapes = [(n, 5) if axis == 0 else (5, n) for n in sizes]
    total = (sum(sizes), 5) if axis == 0 else (5, sum(sizes))
    kernel = whole_kernel(
        lambda b, *xs: b.op("concatenate", *xs, axis=axis),
        [TileType(s, I32) for s in shapes],
        TileType(total, I32),
    )
    xs = [np.arange(np.prod(s), dtype=np.int32).reshape(s) + 100 for s in shapes]
    agree(kernel, xs)


SPLITS = [((6, 3), (3, 2, 3)), ((12,), (3, 4)), ((3, 4, 2), (12, 2)), ((6, 2), (3, 4))]
MIXED = [((6,), (2, 3)), ((2, 3), (6,)), ((3, 5), (15,)), ((4, 3, 2), (12, 2))]


@pytest.mark.parametrize(("old", "new"), SPLITS + MIXED)
def test_reshapes_that_keep_padding_are_free(old, new):
    """Padding stays past all elements where only first dimensions are padded."""
    # Scans: a load or a store would have the other shape itself.
    summed = lambda b, x: b.op("scan", x, kind="sum", axis=0, reverse=False)
    kernel = whole_kernel(
        lambda b, x: summed(b, b.reshape(summed(b, x), shape=new)),
        [TileType(old, I32)],
        TileType(new, I32),
    )  # fmt: skip
    agree(kernel, [np.arange(np.prod(old), dtype=np.int32).reshape(old)])
    assert ("tt.gather" in compiled(kernel)[0]) == ((old, new) in MIXED)


PADS = [((1, 2), (3, 0), (0, 0)), ((0, 0), (0, 0), (1, 2)), ((-1, 2), (2, -2), (2, 0))]


@pytest.mark.parametrize(("low", "high", "interior"), PADS)
def test_pad(low, high, interior):
    tile, attrs = TileType((5, 6), I32), dict(low=low, high=high, interior=interior)
    (result,) = table()["pad"].type_rule((tile, scalar(I32)), attrs)
    kernel = whole_kernel(
        lambda b, x, v: b.op("pad", x, v, **attrs), [tile, scalar(I32)], result
    )
    agree(kernel, [np.arange(30, dtype=np.int32).reshape(5, 6), np.array(-7, np.int32)])


PAIRS = {
    "even": ("slice", (500, 8), dict(starts=(0, 0), limits=(500, 8), strides=(1, 2))),
    "odd": ("slice", (512, 8), dict(starts=(0, 1), limits=(512, 8), strides=(1, 2))),
    "odd of a row": ("slice", (4096,), dict(starts=(1,), limits=(4096,), strides=(2,))),
    "first": ("slice", (300, 4, 2), dict(starts=(0,) * 3, limits=(300, 4, 1))),
    "second": ("slice", (4096, 2), dict(starts=(0, 1), limits=(4096, 2))),
    "between": ("pad", (500, 8), dict(low=(0, 0), high=(0, 1), interior=(0, 1))),
    "after": ("pad", (4096,), dict(low=(1,), high=(0,), interior=(1,))),
    "stacked": ("concatenate", (500, 8, 1), dict(axis=2)),
}


def run_pairs(name: str, shape: tuple[int, ...], dtype) -> str:
    """Text of such an op, which the simulator runs as numpy does."""
    op, full, attrs = PAIRS[name]
    attrs = {"strides": (1,) * len(full)} | attrs if op == "slice" else dict(attrs)
    if op == "slice":
        ends = zip(attrs["limits"], full, shape, strict=True)
        attrs["limits"] = tuple(end if end < n else m for end, n, m in ends)
    more = {"pad": [scalar(dtype)], "concatenate": [TileType(shape, dtype)]}
    types = [TileType(shape, dtype), *more.get(op, [])]
    (result,) = table()[op].type_rule(tuple(types), attrs)
    kernel = whole_kernel(lambda b, *xs: b.op(op, *xs, **attrs), types, result)
    numbers = [np.arange(np.prod(t.shape)).reshape(t.shape) - 7 for t in types]
    agree(kernel, [(x % 100).astype(dtype.np) for x in numbers])
    return compiled(kernel)[0]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [F32, I32, BF16], ids=str)
def test_pairs_stay_in_their_threads(name: str, dtype):
    assert "tt.gather" not in run_pairs(name, PAIRS[name][1], dtype)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_few_elements_are_not_taken_apart(name: str):
    """Their halves would be in several threads, and so would all that joins them."""
    text = run_pairs(name, (3, *PAIRS[name][1][1:]), F32)
    assert "tt.split" not in text and "tt.join" not in text


@pytest.mark.parametrize("start", [-3, 0, 2, 9])
def test_dynamic_slices_clamp(start: int):
    tile, part = TileType((7, 6), I32), TileType((3, 6), I32)
    index = scalar(I32)
    x = np.arange(42, dtype=np.int32).reshape(7, 6)
    at = [np.array(start, np.int32), np.array(1, np.int32)]
    reading = whole_kernel(
        lambda b, x, i, j: b.op("dynamic_slice", x, i, j, sizes=(3, 6)),
        [tile, index, index],
        part,
    )
    agree(reading, [x, *at])
    writing = whole_kernel(
        lambda b, x, u, i, j: b.op("dynamic_update_slice", x, u, i, j),
        [tile, part, index, index],
        tile,
    )
    agree(writing, [x, -np.ones((3, 6), np.int32), *at])


@pytest.mark.parametrize("kind", ["and", "or"])
def test_reduce_bools(kind: str):
    tile = TileType((3, 5), BOOL)
    kernel = whole_kernel(
        lambda b, x: b.op("reduce", x, kind=kind, axes=(1,)),
        [tile],
        TileType((3,), BOOL),
    )
    x = np.array([[1] * 5, [0] * 5, [0, 1, 0, 1, 1]], bool)
    agree(kernel, [x])


@pytest.mark.parametrize("dim", [0, 1])
def test_iota(dim: int):
    for dtype in (I32, F32, U8):
        tile = TileType((5, 9), dtype)
        agree(
            whole_kernel(lambda b, t=tile: b.op("iota", type=t, dim=dim), [], tile), []
        )


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("steps, loops", [(2, 0), (16, 1)])
def test_transposes_stay_below_what_is_shared(steps: int, loops: int, branch: bool):
    """XLA would write a value once per use, and not finish."""

    def kernel(x_ref, o_ref):
        y = x_ref[...]
        for _ in range(steps):
            y = jnp.sin(y) * y + y
        if branch:
            y = lax.cond(y[0, 0] > 0, lambda: y, lambda: -y)
        o_ref[...] = y.T

    x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
    out = jax.ShapeDtypeStruct((8, 16), x.dtype)
    (made,) = map(run, kernels_in(pl.pallas_call(kernel, out), x))
    text, _ = compiled(made)
    assert text.count("scf.for") == loops
    agree(made, [x], rtol=1e-4)


@pytest.mark.parametrize("columns, hint", [(64, 0), (128, 1)])
def test_moves_along_long_rows_go_through_shared_memory(columns: int, hint: int):
    """By shuffles, rows of 4096 compiled for minutes."""
    tile, part = TileType((3, columns), F32), TileType((3, columns - 1), F32)
    attrs = dict(starts=(0, 1), limits=(3, columns), strides=(1, 1))

    def sliced(b, x):
        total = b.op("scan", x, kind="sum", axis=1, reverse=False)  # no load's part
        return b.op("slice", total, **attrs)

    kernel = whole_kernel(sliced, [tile], part)
    text, _ = compiled(kernel)
    assert text.count("efficient_layout") == hint
    agree(kernel, [np.arange(3 * columns, dtype=np.float32).reshape(3, columns)])
