"""Running sums and maxima that are written out become scans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import walk
from pallasite.ir.verify import verify
from pallasite.passes.optimise.known_scans import known_scans
from pallasite.passes.run import run
from pallasite.sites import kernels_in


def kernel_of(body, shape, dtype="float32"):
    def kernel(x_ref, o_ref):
        o_ref[...] = body(x_ref[...])

    struct = jax.ShapeDtypeStruct(shape, dtype)
    (made,) = kernels_in(pl.pallas_call(kernel, out_shape=struct), struct)
    return run(made)


def names(kernel):
    return [op.name for op in walk(kernel.body)]


@pytest.mark.parametrize(
    ("combine", "kind", "shape", "axis", "dtype"),
    [
        (jnp.maximum, "max", (8, 128), 1, "float32"),
        (jnp.minimum, "min", (37, 4), 0, "bfloat16"),
        (jnp.add, "sum", (3, 100), 1, "float32"),
        (jnp.multiply, "prod", (2, 3, 5), 2, "float32"),
        (jnp.add, "sum", (16, 8), 0, "int32"),
    ],
)
def test_an_associative_scan_is_a_scan(combine, kind, shape, axis, dtype):
    body = lambda x: lax.associative_scan(combine, x, axis=axis)
    before = kernel_of(body, shape, dtype)
    after = known_scans(before)
    verify(after)
    (scan,) = (op for op in walk(after.body) if op.name == "scan")
    assert (scan.attrs["kind"], scan.attrs["axis"]) == (kind, axis)
    assert not {"slice", "pad", "concatenate"} & set(names(after))
    x = np.asarray(jax.random.normal(jax.random.key(0), shape) * 2).astype(dtype)
    one, two = (Walker(k, NumpyNumbers()).run([x])[0] for k in (before, after))
    np.testing.assert_allclose(*(np.float32(a) for a in (one, two)), rtol=1e-5)


def test_two_scans_of_one_kernel():
    def body(x):
        tops = lax.associative_scan(jnp.maximum, x, axis=1)
        return lax.associative_scan(jnp.add, tops - x, axis=1)

    after = known_scans(kernel_of(body, (4, 32)))
    verify(after)
    assert names(after).count("scan") == 2 and "slice" not in names(after)


def pairs(x):
    join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return lax.associative_scan(join, (x, x), axis=1)[1]


def shifted(x):
    """Each element and its neighbour, not all before it."""
    return jnp.concatenate([x[:, :1], jnp.maximum(x[:, 1:], x[:, :-1])], axis=1)


def with_gap(x):
    """Elements of which some are counted twice are no sums of ranges."""
    return jnp.concatenate([x[:, :2], x[:, 2:] + x[:, 1:-1] + x[:, 1:-1]], axis=1)


@pytest.mark.parametrize("body", [pairs, shifted, with_gap])
def test_other_code_stays(body):
    before = kernel_of(body, (4, 16))
    assert known_scans(before) is before


# --- shifted copies that are added: by one, two, four ---

FILLS = {"concatenated": 0, "padded": 1, "masked": 2}


def moved(x, by, fill, how):
    if how == "padded":
        return jnp.pad(x[:-by], ((by, 0), (0, 0)), constant_values=fill)
    if how == "masked":
        at = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(at >= by, jnp.roll(x, by, 0), fill)
    pad = jnp.full((by, *x.shape[1:]), fill, x.dtype)
    return jnp.concatenate([pad, x[:-by]])


def doubled(x, join, fill, how="concatenated"):
    by = 1
    while by < x.shape[0]:
        x, by = join(x, moved(x, by, fill, how)), 2 * by
    return x


@pytest.mark.parametrize("how", FILLS)
@pytest.mark.parametrize(
    ("join", "fill", "kind"),
    [(jnp.add, 0, "sum"), (jnp.maximum, -np.inf, "max"), (jnp.multiply, 1, "prod")],
)
def test_shifted_copies_are_a_scan(join, fill, kind, how):
    before = kernel_of(lambda x: doubled(x, join, fill, how), (19, 8))
    after = known_scans(before)
    verify(after)
    (scan,) = (op for op in walk(after.body) if op.name == "scan")
    assert (scan.attrs["kind"], scan.attrs["axis"]) == (kind, 0)
    assert not {"slice", "pad", "concatenate", "select_n"} & set(names(after))
    x = np.asarray(jax.random.normal(jax.random.key(0), (19, 8)))
    one, two = (Walker(k, NumpyNumbers()).run([x])[0] for k in (before, after))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill", [1, np.nan])
def test_other_fills_stay(fill):
    before = kernel_of(lambda x: doubled(x, jnp.add, fill), (16, 8))
    assert known_scans(before) is before


def test_a_scan_from_the_other_end():
    body = lambda x: lax.associative_scan(jnp.add, x, axis=0, reverse=True)
    after = known_scans(kernel_of(body, (16, 8)))
    (scan,) = (op for op in walk(after.body) if op.name == "scan")
    assert scan.attrs["reverse"] or "rev" in names(after)
