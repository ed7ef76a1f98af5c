"""Sums and products with comparisons of indices, at the places they name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.verify import verify
from pallasite.passes.normal.normalize import normalize
from pallasite.passes.optimise.one_hots import one_hot_reads, one_hots
from pallasite.sites import kernels_in
from tests.fuzz.agreement import run_numpy

F32, I32 = jnp.float32, jnp.int32
IDS, PLACES, WIDTH, FIRST = 24, 40, 5, 3


def hot(ids, dtype=F32):
    at = FIRST + lax.broadcasted_iota(ids.dtype, (IDS, PLACES), 1)
    return (ids[:, None] == at).astype(dtype)


def dot(a, b, left: int, right: int, dtype=F32):
    dims = (((left,), (right,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def weights(x):
    return jnp.broadcast_to(x[:IDS, :1], (IDS, PLACES))


# What is computed of the ids and of a matrix, (IDS, WIDTH) or (PLACES, WIDTH).
SUMS = {
    "dot": lambda ids, x: dot(hot(ids), x[:IDS], 0, 0),
    "dot, turned": lambda ids, x: dot(x[:IDS].T, hot(ids), 1, 0),
    "transposed": lambda ids, x: hot(ids).T @ x[:IDS],
    "one_hot": lambda ids, x: jax.nn.one_hot(ids, PLACES).T @ x[:IDS],
    "select": lambda ids, x: dot(
        jnp.where(hot(ids, bool), jnp.float32(1), jnp.float32(0)), x[:IDS], 0, 0
    ),
    "count": lambda ids, x: hot(ids, I32).sum(axis=0),
    "weights": lambda ids, x: (hot(ids) * weights(x)).sum(axis=0),
    "weights, selected": lambda ids, x: jnp.where(hot(ids, bool), weights(x), 0.0).sum(
        axis=0
    ),
    "rows of ids": lambda ids, x: (
        ((FIRST + jnp.arange(PLACES))[:, None] == ids[None, :]).astype(F32) @ x[:IDS]
    ),
}
READS = {
    "lookup": lambda ids, x: hot(ids) @ x,
    "lookup, turned": lambda ids, x: dot(x, hot(ids), 0, 1),
}
OTHERS = {
    "another comparison": lambda ids, x: dot(
        (ids[:, None] <= jnp.arange(PLACES)).astype(F32), x[:IDS], 0, 0
    ),
    "two": lambda ids, x: dot(2 * hot(ids), x[:IDS], 0, 0),
    "few places": lambda ids, x: hot(ids)[:, :8].T @ x[:IDS],
    "ids by place": lambda ids, x: dot(
        (ids[:, None] + jnp.arange(PLACES) == jnp.arange(PLACES) * 2).astype(F32),
        x[:IDS],
        0,
        0,
    ),
    "sums along places": lambda ids, x: (hot(ids) * weights(x)).sum(axis=1),
}


def kernel(form, ids, x) -> Kernel:
    def body(ids_ref, x_ref, o_ref):
        o_ref[...] = form(ids_ref[...], x_ref[...])

    out = jax.eval_shape(form, ids, x)
    out = jax.ShapeDtypeStruct(out.shape, out.dtype)
    (made,) = kernels_in(pl.pallas_call(body, out, interpret=True), ids, x)
    return normalize(made)


def arrays(ids_dtype=np.int32, dtype=np.float32):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, PLACES + 9, IDS)
    ids[:4] = ids[4:8]
    ids[9] = np.iinfo(ids_dtype).max
    ids[10] = np.iinfo(ids_dtype).min
    return ids.astype(ids_dtype), rng.normal(size=(PLACES, WIDTH)).astype(dtype)


def agree(before: Kernel, after: Kernel, operands) -> None:
    with np.errstate(invalid="ignore"):
        (want,), (got,) = (run_numpy(k, list(operands)) for k in (before, after))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*SUMS, *READS])
def test_rows_are_moved_to_their_places(name: str):
    operands = arrays()
    before = kernel((SUMS | READS)[name], *operands)
    after = one_hots(before)
    verify(after)
    ops = [op.name for op in walk(after.body)]
    assert ("atomic_rmw" in ops) == (name in SUMS)
    assert "gather %" in after.text
    # Only floats that are multiplied and added have both ways.
    assert ("cond" in ops) == (
        name in SUMS and name not in ("count", "weights, selected")
    )
    agree(before, after, operands)


@pytest.mark.parametrize("name", ["dot", "weights", "weights, selected", "lookup"])
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_what_is_not_finite_reaches_every_place(name: str, number: float):
    ids, x = arrays()
    x[2, 0] = number
    before = kernel((SUMS | READS)[name], ids, x)
    agree(before, one_hots(before), (ids, x))


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("numbers", [[np.inf], [np.nan], [np.inf, -np.inf]])
@pytest.mark.parametrize("places", [[2, 2], [2, 3], [39, 0]])
def test_columns_that_are_not_finite_are_read_as_if_multiplied(name, numbers, places):
    """Those that are named once, several times, and never, with others or alone."""
    ids, x = arrays()
    ids[[0, 5]], ids[ids == FIRST + 39] = FIRST + 2, FIRST + 38
    for place, number in zip(places, numbers, strict=False):
        x[place, 1] = number
    x[7, 3] = -np.inf
    before = kernel(READS[name], ids, x)
    agree(before, one_hots(before), (ids, x))


def test_gpus_only_read_and_only_what_is_in_memory():
    operands = arrays()
    for form in SUMS.values():
        before = kernel(form, *operands)
        assert one_hot_reads(before) is before
    computed = kernel(lambda ids, x: hot(ids) @ jnp.sin(x), *operands)
    assert one_hot_reads(computed) is computed
    before = kernel(READS["lookup"], *operands)
    after = one_hot_reads(before)
    verify(after)
    assert "load %x_ref_1[gather" in after.text and "alloc" not in after.text
    agree(before, after, operands)


def test_a_table_that_changes_is_copied():
    def body(ids_ref, x_ref, o_ref, table_ref):
        table_ref[...] = x_ref[...]
        table = table_ref[...]
        table_ref[...] = jnp.zeros_like(table)
        o_ref[...] = hot(ids_ref[...]) @ table

    ids, x = arrays()
    call = pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((IDS, WIDTH), F32),
        scratch_shapes=[pltpu.VMEM((PLACES, WIDTH), F32)],
        interpret=True,
    )
    (before,) = kernels_in(call, ids, x)
    after = one_hots(before)
    assert "gather" in after.text and one_hot_reads(before) is before
    agree(before, after, (ids, x))


@pytest.mark.parametrize("ids_dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_types_of_ids(ids_dtype):
    with jax.enable_x64(np.dtype(ids_dtype).itemsize == 8):
        operands = arrays(ids_dtype)
        before = kernel(SUMS["count"], *operands)
        after = one_hots(before)
        assert "atomic_rmw" in after.text
        agree(before, after, operands)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_narrow_rows_are_added_in_the_type_of_the_result(dtype):
    wide = I32 if dtype == jnp.int8 else F32
    form = lambda ids, x: dot(hot(ids, dtype), x[:IDS], 0, 0, wide)
    operands = arrays(dtype=dtype)
    before = kernel(form, *operands)
    after = one_hots(before)
    assert "atomic_rmw" in after.text
    agree(before, after, operands)


def test_sums_of_a_narrow_type_stay():
    """A dot rounds once; rows added in memory would be rounded each time."""
    form = lambda ids, x: dot(hot(ids, x.dtype), x[:IDS], 0, 0, jnp.bfloat16)
    before = kernel(form, *arrays(dtype=jnp.bfloat16))
    assert one_hots(before) is before


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str):
    before = kernel(OTHERS[name], *arrays())
    assert one_hots(before) is before


@pytest.mark.parametrize("name", ["dot", "count", "weights", "lookup, turned"])
@pytest.mark.parametrize("number", [1.0, np.inf])
def test_on_a_cpu(name: str, number: float):
    ids, x = arrays()
    x[2, 0] = number
    form = (SUMS | READS)[name]

    def body(ids_ref, x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += form(ids_ref[...], x_ref[...])

    want = np.asarray(form(jnp.asarray(ids), jnp.asarray(x)))
    out = jax.ShapeDtypeStruct(want.shape, want.dtype)
    got = pl.pallas_call(body, out, grid=(2,))(ids, x)
    np.testing.assert_allclose(got, 2 * want, rtol=1e-5, atol=1e-6)
