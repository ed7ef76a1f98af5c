"""The numpy number system agrees with the JAX one, op by op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallasite.emulation.emulate import JaxNumbers, _poison_of
from pallasite.importer.tiles import _GATHER_FIELDS, _SCATTER_FIELDS
from pallasite.interpret.numbers import Pick
from pallasite.interpret.numpy_memory import region_of
from pallasite.interpret.numpy_numbers import NumpyNumbers, poison
from pallasite.ir import types as T
from pallasite.ir.nodes import Op, Value
from pallasite.ir.opdef import table
from tests.xla import put

ROWS = table()
NUMPY, JAX = NumpyNumbers(), JaxNumbers()
FLOATS = ("f32", "bf16", "f16", "f8e4m3fn", "f8e5m2")
INTS = ("i8", "u8", "i16", "i32", "u32", "i4", "u4")
DTYPES = (*FLOATS, *INTS, "bool")


def draw_array(rng, shape, dtype: T.DType, special=True) -> np.ndarray:
    """Small numbers with repeats; some NaN, infinities and signed zeros."""
    if dtype.is_bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.is_integer:
        low = 0 if dtype.kind == "uint" else -6
        return rng.integers(low, 7, shape).astype(dtype.np)
    x = rng.integers(-12, 13, shape) / 4
    if special:
        odd = rng.random(shape)
        x = np.where(odd < 0.06, np.nan, x)
        x = np.where((odd > 0.06) & (odd < 0.1), -0.0, x)
        if dtype.name in ("f32", "bf16", "f16"):
            x = np.where(odd > 0.96, np.inf, x)
    return np.asarray(x, np.float32).astype(dtype.np)


def make_op(name: str, operands, **attrs) -> Op:
    values = [Value(T.TileType(x.shape, T.dtype_of(x.dtype))) for x in operands]
    types = ROWS[name].type_rule(tuple(v.type for v in values), attrs)
    return Op(name, tuple(values), tuple(Value(t) for t in types), attrs)


def assert_same(got, want, tolerance=0.0):
    want = np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if want.dtype.kind in "iub" or "int" in want.dtype.name:
        np.testing.assert_array_equal(got.astype(np.int64), want.astype(np.int64))
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    if not tolerance:
        signs = (np.signbit(v) & ~np.isnan(v) for v in (got, want))
        np.testing.assert_array_equal(*signs)


def compare(name: str, *operands, tolerance=0.0, **attrs):
    op = make_op(name, operands, **attrs)
    with np.errstate(all="ignore"):
        got = NUMPY.tile_op(op, operands)
    want = JAX.tile_op(op, [put(x) for x in operands])
    for result, g, w in zip(op.results, got, want, strict=True):
        assert g.shape == result.tile.shape
        assert g.dtype == result.tile.dtype.np
        assert_same(g, w, tolerance)


EPSILON = {"f32": 1e-5, "bf16": 0.03, "f16": 4e-3, "f8e4m3fn": 0.3, "f8e5m2": 0.5}

cases = settings(max_examples=8)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
# Few shapes: JAX compiles each op once for every one it meets.
shapes = st.sampled_from([(5,), (3, 4), (1, 3), (2, 3, 4)])
dtypes = st.sampled_from(DTYPES).map(T.DTYPES.get)

# --- shape ---


@cases
@given(seeds, shapes, dtypes, st.data())
def test_movements_agree(rng, shape, dtype, data):
    x, rank = draw_array(rng, shape, dtype), len(shape)
    perm = data.draw(st.permutations(range(rank)))
    compare("transpose", x, perm=tuple(perm))
    axes = data.draw(st.sets(st.integers(0, rank - 1)))
    compare("rev", x, axes=tuple(sorted(axes)))
    compare("reshape", x, shape=(x.size,))
    compare("broadcast_in_dim", x, shape=(3, *shape), dims=tuple(range(1, rank + 1)))
    starts = [data.draw(st.integers(0, n)) for n in shape]
    limits = [data.draw(st.integers(s, n)) for s, n in zip(starts, shape, strict=True)]
    strides = [data.draw(st.integers(1, 3)) for _ in shape]
    parts = {"starts": starts, "limits": limits, "strides": strides}
    compare("slice", x, **{k: tuple(v) for k, v in parts.items()})
    compare("concatenate", x, x, axis=data.draw(st.integers(0, rank - 1)))
    sizes = tuple(data.draw(st.integers(1, n)) for n in shape)
    where = [np.int32(data.draw(st.integers(-3, 7))) for _ in shape]
    compare("dynamic_slice", x, *where, sizes=sizes)
    compare("dynamic_update_slice", x, draw_array(rng, sizes, dtype), *where)


@cases
@given(seeds, shapes, dtypes, st.data())
def test_pad_agrees(rng, shape, dtype, data):
    config = []
    for n in shape:
        interior = data.draw(st.integers(0, 2))
        spread = n + (n - 1) * interior
        low = data.draw(st.integers(-spread, 3))
        config.append((low, data.draw(st.integers(-spread - low, 3)), interior))
    low, high, interior = zip(*config, strict=True)
    x, value = draw_array(rng, shape, dtype), draw_array(rng, (), dtype)
    compare("pad", x, np.asarray(value), low=low, high=high, interior=interior)


@pytest.mark.parametrize("dtype", DTYPES)
def test_iota_and_constant_agree(dtype):
    type_ = T.TileType((2, 5), T.DTYPES[dtype])
    compare("constant", value=1, type=type_)
    if dtype != "bool":
        compare("iota", type=type_, dim=1)


BITCASTS = [("f32", "i32"), ("f32", "u8"), ("u8", "f32"), ("i16", "bf16"), ("u8", "u4")]
BITCASTS += [("bf16", "u8"), ("u32", "u16"), ("i4", "u4"), ("u4", "u8")]
BITCASTS += [("i8", "f8e5m2")]


@pytest.mark.parametrize(("old", "new"), BITCASTS)
def test_bitcast_agrees(old, new):
    before, after = T.DTYPES[old], T.DTYPES[new]
    last = after.bits // before.bits if after.bits > before.bits else 4
    x = draw_array(np.random.default_rng(1), (3, last), before, special=False)
    op = make_op("bitcast", [x], dtype=after)
    (got,) = NUMPY.tile_op(op, [x])
    want = np.asarray(lax.bitcast_convert_type(put(x), after.np))
    raw = [np.ascontiguousarray(v).view(np.uint8) for v in (got, want)]
    if after.bits < 8:
        raw = [r & 15 for r in raw]
    assert got.shape == want.shape
    np.testing.assert_array_equal(*raw)


# --- reductions ---


@cases
@given(seeds, shapes, st.sampled_from([*FLOATS, "i32", "u8", "i8"]), st.data())
def test_reductions_agree(rng, shape, name, data):
    x = draw_array(rng, shape, T.DTYPES[name])
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    for kind in ("max", "min"):  # of 0 and -0 either may be the larger
        compare("reduce", x, kind=kind, axes=axes, tolerance=1e-12)
    small = draw_array(rng, shape, T.DTYPES[name], special=False)
    for kind in ("sum", "prod"):
        with np.errstate(all="ignore"):
            compare("reduce", small, kind=kind, axes=axes, tolerance=_loose(name))
    for kind in ("max", "min"):
        compare("arg_reduce", x, kind=kind, axis=axes[0], dtype=T.I32)


def _loose(name: str) -> float:
    return 4 * EPSILON.get(name, 0)


@cases
@given(seeds, shapes, st.sampled_from(["bool", "i32", "u8"]))
def test_bit_reductions_agree(rng, shape, name):
    x = draw_array(rng, shape, T.DTYPES[name])
    for kind in ("and", "or", "xor"):
        compare("reduce", x, kind=kind, axes=(0,))


def test_reductions_of_nothing_agree():
    for kind, name in [("max", "f32"), ("min", "i32"), ("sum", "f32"), ("max", "bool")]:
        compare("reduce", np.zeros((0, 3), T.DTYPES[name].np), kind=kind, axes=(0,))


@cases
@given(seeds, shapes, st.sampled_from(["f32", "bf16", "i32"]), st.booleans())
def test_scans_agree(rng, shape, name, reverse):
    x = draw_array(rng, shape, T.DTYPES[name], special=False)
    for kind in ("sum", "prod", "max", "min"):
        options = {"axis": len(shape) - 1, "reverse": reverse}
        compare("scan", x, kind=kind, tolerance=_loose(name), **options)
    if name == "f32":
        x = np.where(x > 2, -np.inf, x)
        compare("scan", x, kind="logsumexp", axis=0, reverse=reverse, tolerance=1e-5)


# --- dot and sort ---

PRODUCTS = [("f32", "f32"), ("bf16", "f32"), ("f16", "f32"), ("bf16", "bf16")]
PRODUCTS += [("i8", "i32"), ("i32", "i32"), ("f8e4m3fn", "f32"), ("u8", "i32")]


@pytest.mark.parametrize(("operand", "result"), PRODUCTS)
@pytest.mark.parametrize(
    ("lhs", "rhs", "contract", "batch"),
    [
        ((3, 5), (5, 4), ((1,), (0,)), ((), ())),
        ((3, 5), (4, 5), ((1,), (1,)), ((), ())),
        ((2, 3, 5), (2, 5, 4), ((2,), (1,)), ((0,), (0,))),
        ((5, 3, 2), (4, 2, 5), ((0,), (2,)), ((2,), (1,))),
        ((3, 4, 5), (5, 4, 2), ((2, 1), (0, 1)), ((), ())),
        ((3,), (4,), ((), ()), ((), ())),
    ],
)
def test_dot_agrees(operand, result, lhs, rhs, contract, batch):
    rng = np.random.default_rng(5)
    x, y = (draw_array(rng, s, T.DTYPES[operand], special=False) for s in (lhs, rhs))
    attrs = {"contract": contract, "batch": batch, "precision": "highest"}
    dtype = T.DTYPES[result]
    compare("dot", x, y, dtype=dtype, tolerance=EPSILON.get(result, 0), **attrs)


@cases
@given(seeds, shapes, st.sampled_from(DTYPES), st.integers(1, 2), st.data())
def test_sort_agrees(rng, shape, name, num_keys, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    keys = [draw_array(rng, shape, T.DTYPES[name]) for _ in range(num_keys)]
    order = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    attrs = {"axis": axis, "num_keys": num_keys, "stable": True}
    compare("sort", *keys, order, **attrs)


@cases
@given(seeds, shapes, st.sampled_from(DTYPES), st.data())
def test_top_k_agrees(rng, shape, name, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = draw_array(rng, shape, T.DTYPES[name])
    compare("top_k", x, axis=axis, k=data.draw(st.integers(1, shape[axis])))


def test_top_k_is_in_total_order():
    x = np.array([0, -0.0, np.nan, -np.inf, np.inf, -np.nan, -0.0, np.inf], np.float32)
    compare("top_k", x, axis=0, k=8)


# --- gather and scatter, through the indexing JAX makes of them ---


GATHERS = [
    lambda x, i: x[i],
    lambda x, i: x[:, i],
    lambda x, i: x[i, :, i],
    lambda x, i: x[i, 1:3],
    lambda x, i: x.at[i].get(mode="fill", fill_value=7),
    lambda x, i: x.at[i, i].get(mode="clip"),
    lambda x, i: jax.vmap(lambda row, n: row[n])(x, i[: x.shape[0]]),
    lambda x, i: jnp.take_along_axis(x, i[:4, None, None] % 3, axis=1),
    lambda x, i: jax.vmap(lambda n: lax.dynamic_slice(x, (n, n, n), (2, 2, 2)))(i),
]


@pytest.mark.parametrize("case", range(len(GATHERS)))
@pytest.mark.parametrize("name", ["f32", "bf16", "i32", "bool"])
def test_gather_agrees(case, name):
    rng = np.random.default_rng(case)
    x = draw_array(rng, (4, 3, 5), T.DTYPES[name], special=False)
    i = rng.integers(-2, 7, 6).astype(np.int32)
    _compare_each(GATHERS[case], x, i)


SCATTERS = [
    lambda x, i: x.at[i].set(1, mode="clip"),
    lambda x, i: x.at[i].add(jnp.ones((6, 3, 5), x.dtype)),
    lambda x, i: x.at[:, i].max(2),
    lambda x, i: x.at[i, :, i].min(0),
    lambda x, i: x.at[i, 1:3].mul(2),
    lambda x, i: x.at[i, i].add(3, mode="drop"),
    lambda x, i: jax.vmap(lambda row, n: row.at[n].add(1))(x, i[: x.shape[0]]),
]


@pytest.mark.parametrize("case", range(len(SCATTERS)))
@pytest.mark.parametrize("name", ["f32", "bf16", "i32"])
def test_scatter_agrees(case, name):
    rng = np.random.default_rng(case)
    x = draw_array(rng, (4, 3, 5), T.DTYPES[name], special=False)
    i = rng.integers(-2, 7, 6).astype(np.int32)
    _compare_each(SCATTERS[case], x, i)


def _compare_each(fn, x, i):
    """Run the function in JAX; at each gather or scatter compare ours with JAX's."""
    closed = jax.make_jaxpr(fn)(x, i)
    seen = []

    @jax.jit
    def operands(*args):
        found = list(_seen(closed.jaxpr, closed.consts, args))
        seen.extend(eqn for eqn, _ in found)
        return [values for _, values in found]

    for values, eqn in zip(operands(x, i), seen, strict=True):
        _compare_equation(eqn, values)
    assert seen


def _seen(jaxpr, consts, args):
    """Each gather and scatter with its operands."""
    env = {}
    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
        name = eqn.primitive.name
        if name in ("pjit", "jit", "custom_jvp_call"):
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            yield from _seen(inner.jaxpr, inner.consts, values)
        if name == "gather" or name.startswith("scatter"):
            yield eqn, values
        out = eqn.primitive.bind(*values, **eqn.params)
        out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))


def _compare_equation(eqn, values) -> None:
    p, name = eqn.params, eqn.primitive.name
    values = [np.asarray(v) for v in values]
    fields = _GATHER_FIELDS if name == "gather" else _SCATTER_FIELDS
    numbers = tuple(tuple(getattr(p["dimension_numbers"], f)) for f in fields)
    mode = str(p["mode"]).lower()
    mode = next(m for m in ("clip", "fill", "promise") if m in mode)
    out = eqn.outvars[0].aval
    attrs = {
        "dimension_numbers": numbers,
        "mode": mode,
        "type": T.TileType(out.shape, T.dtype_of(out.dtype)),
    }
    if name == "gather":
        fill = p.get("fill_value")
        fill = 7 if fill is None else fill
        compare(
            "gather",
            *values,
            slice_sizes=tuple(p["slice_sizes"]),
            fill_value=fill,
            **attrs,
        )
    else:
        kind = name.replace("_", "-").removeprefix("scatter").strip("-") or "set"
        compare("scatter", *values, kind=kind, **attrs)


# --- elementwise: every row, exactly typed ---


UNIFORM = [
    r
    for r in ROWS.values()
    if r.elementwise and r.arity and r.name not in ("bitcast", "cast", "clamp")
]


@pytest.mark.parametrize("row", UNIFORM, ids=lambda row: row.name)
def test_elementwise_has_the_result_type(row):
    attrs = {"rounding_method": 1, "y": 3, "exponent_bits": 5, "mantissa_bits": 3}
    attrs = {k: attrs[k] for k in row.attrs}
    for dtype in row.dtypes:
        if dtype.bits < 8 or dtype.name in ("f8e8m0fnu", "f4e2m1fn"):
            continue
        low, high = row.domain or (0, 1)
        x = np.linspace(max(low, 1 if dtype.kind == "uint" else low), high, 5)
        operands = [np.clip(x, -100, 100).astype(dtype.np)] * row.arity
        for form in (operands, [x[2] for x in operands]):
            types = tuple(T.TileType(v.shape, dtype) for v in form)
            (result,) = row.type_rule(types, attrs)
            with np.errstate(all="ignore"):
                got = NUMPY.elementwise(row, form, attrs, result)
            assert got.dtype == result.dtype.np
            assert got.shape == result.shape


# --- memory ---


@st.composite
def accesses(draw):
    """An array shape and picks into it, some of them bounded or gathered."""
    shape = draw(st.sampled_from([(6,), (4, 5), (3, 2, 4)]))
    gathers = draw(st.booleans())
    picks = []
    for n in shape:
        kind = draw(st.sampled_from(["run", "point", "bounded"] + ["gather"] * gathers))
        if kind == "gather":
            index = np.array(
                draw(st.lists(st.integers(-2, n + 1), min_size=4, max_size=4)), np.int32
            )
            picks.append(Pick(gather=index, low=0, high=n))
        elif kind == "point":
            picks.append(Pick(draw(st.integers(0, n - 1)), 1, 1, False))
        elif kind == "run":
            stride = draw(st.integers(1, 2))
            size = draw(st.integers(1, (n - 1) // stride + 1))
            reach = (size - 1) * stride + 1
            picks.append(Pick(draw(st.integers(0, n - reach)), size, stride))
        else:
            low, high = draw(st.integers(0, 1)), draw(st.integers(n - 1, n))
            size, start = draw(st.integers(1, 4)), draw(st.integers(-2, n - 1))
            picks.append(Pick(start, size, 1, True, None, low, high))
    return shape, picks


def _inside(picks, shape) -> np.ndarray:
    """Which picked elements exist."""
    region = region_of(picks, shape)
    outside = region.outside()
    return np.ones(region.shape, bool) if outside is None else ~outside


@settings(max_examples=20)
@given(accesses(), st.integers(0, 9), st.booleans())
def test_take_and_put_agree(access, seed, masked):
    shape, picks = access
    rng = np.random.default_rng(seed)
    array = rng.normal(size=shape).astype(np.float32)
    inside = _inside(picks, shape)
    mask = rng.random(inside.shape) < 0.6 if masked else None
    other = np.zeros(inside.shape, np.float32) if masked else None
    got = np.asarray(NUMPY.take(array, picks, mask, other))
    want = np.asarray(JAX.take(put(array), picks, mask, other))
    keep = inside if mask is None else inside | ~mask
    np.testing.assert_array_equal(got[keep], want[keep])
    # Equal values: which of several writes to one place comes last does not matter.
    value = np.full(inside.shape, 7, np.float32)
    want = np.asarray(JAX.put(put(array), picks, put(value), mask))
    np.testing.assert_array_equal(NUMPY.put(array.copy(), picks, value, mask), want)
    for kind in ("add", "max"):
        both = []
        for numbers, start in ((NUMPY, array.copy()), (JAX, put(array))):
            both.append(np.asarray(numbers.rmw(start, picks, kind, value, mask)[0]))
        np.testing.assert_allclose(*both, rtol=1e-6)


@pytest.mark.parametrize("kind", ["and", "or", "xor", "xchg"])
def test_atomics_with_equal_indices_agree(kind):
    array = np.arange(6, dtype=np.int32)
    picks = [Pick(gather=np.array([1, 4, 1, 9, 5], np.int32), low=0, high=6)]
    value = np.array([5, 6, 5, 1, 2], np.int32)
    got = NUMPY.rmw(array.copy(), picks, kind, value, None)
    want = JAX.rmw(put(array), picks, kind, put(value), None)
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize(
    ("old", "new"), [("f32", "bf16"), ("i8", "i32"), ("f32", "i32")]
)
def test_bitcast_views_agree(old, new):
    before = T.TileType((8, 4), T.DTYPES[old])
    ref = T.RefType(before.shape, before.dtype)
    (after,) = ROWS["bitcast_view"].type_rule((ref,), {"dtype": T.DTYPES[new]})
    x = draw_array(np.random.default_rng(0), (8, 4), before.dtype, special=False)
    arg = (before, after.tile)
    got = NUMPY.reinterpret(x, "bitcast", arg)
    want = np.asarray(JAX.reinterpret(put(x), "bitcast", arg))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    np.testing.assert_array_equal(NUMPY.restore(x, "bitcast", arg, got), x)


def test_poison_is_the_emulations():
    for name in ("f32", "bf16", "f8e4m3fn", "f8e5m2", "i32", "i8", "u8", "bool"):
        dtype = T.DTYPES[name].np
        found = (poison(dtype), _poison_of(dtype))
        ours, theirs = (np.array(v).astype(dtype) for v in found)
        both_nan = np.isnan(ours) & np.isnan(theirs)
        assert both_nan or ours == theirs, name
