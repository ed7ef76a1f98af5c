"""Index arrays that count up: slices that mean the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Access, Gather, Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.consecutive_indices import (
    consecutive_indices,
    single_slices,
)
from pallasite.passes.normal.edge_fills import edge_fills
from pallasite.passes.normal.normalize import normalize
from pallasite.sites import kernels_in
from tests.fuzz.agreement import run_numpy

ROWS, COLUMNS = 10, 12
GRID = 3


def along(shape, dim):
    return jnp.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in (0, 1)])


def places(kind: str):
    """Index arrays and their mask, if any; some elements are outside the array."""
    step = pl.program_id(0)
    rows, columns = along((4, 5), 0), along((4, 5), 1)
    if kind == "block":
        return (step * 3 + rows, 4 + columns), None
    if kind == "past the end":
        return (step * 4 + rows, columns + 9), (columns + 9 < 13) & (rows < 3)
    if kind == "turned":
        return (columns + step, rows), columns > 0
    if kind == "wider":
        columns = along((4, 29), 1)
        place = pl.ds(4 * step - 2, 4), pl.ds(step - 1, 29)
        return place, jnp.broadcast_to(columns % 3 > 0, (4, 29))
    if kind == "one row":
        columns = jnp.arange(20)
        return (step + 8, pl.ds(3, 20)), columns != 3
    if kind == "diagonal":
        return (jnp.arange(4), jnp.arange(4)), None
    if kind == "every second":
        return (rows, 2 * columns), None
    assert kind == "repeated"
    return (rows // 2, columns), None


SLICES = ("block", "past the end", "turned", "wider", "one row")
SHAPES = {"wider": (4, 29), "one row": (20,), "diagonal": (4,)}
ARRAYS = ("diagonal", "every second", "repeated")


def loads(kind: str):
    def kernel(x_ref, o_ref):
        place, mask = places(kind)
        other = None if mask is None else -1.0
        found = pl.load(x_ref, place, mask=mask, other=other)
        o_ref[...] = found.reshape(o_ref.shape)

    size = np.prod(SHAPES.get(kind, (4, 5)))
    out = jax.ShapeDtypeStruct((GRID, size), jnp.float32)
    spec = pl.BlockSpec((1, size), lambda i: (i, 0))
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    whole = pl.BlockSpec(x.shape, lambda i: (0, 0))
    call = pl.pallas_call(kernel, out, grid=GRID, in_specs=[whole], out_specs=spec)
    return imported(call, x)


def stores(kind: str):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = x_ref[...]

        place, mask = places(kind)
        shape = SHAPES.get(kind, (4, 5))
        value = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
        pl.store(o_ref, place, value + 100, mask=mask)

    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    whole = pl.BlockSpec(x.shape, lambda i: (0, 0))
    call = pl.pallas_call(kernel, x, grid=GRID, in_specs=[whole], out_specs=whole)
    return imported(call, x)


def imported(call, *operands) -> Kernel:
    (kernel,) = kernels_in(call, *operands)
    return canonicalize(kernel)


def gathers(kernel: Kernel) -> int:
    accesses = [Access.of(op) for op in walk(kernel.body) if "index" in op.attrs]
    return sum(isinstance(e, Gather) for access in accesses for e in access.index)


@pytest.mark.parametrize("make", [loads, stores])
@pytest.mark.parametrize("kind", SLICES)
def test_slices_mean_the_same(kind: str, make):
    kernel = make(kind)
    new = consecutive_indices(kernel)
    verify(new)
    assert gathers(kernel) and not gathers(new)
    arrays = [np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)]
    for wanted, got in zip(
        run_numpy(kernel, arrays), run_numpy(new, arrays), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", ARRAYS)
def test_other_arrays_stay(kind: str):
    kernel = loads(kind)
    assert consecutive_indices(kernel) is kernel


@pytest.mark.parametrize("make", [loads, stores])
@pytest.mark.parametrize("kind", ["turned", "wider", "diagonal", "every second"])
def test_other_arrays_are_no_single_slice(kind: str, make):
    """Transposed, or in parts: index arrays, as far as the normal form goes."""
    kernel = make(kind)
    assert gathers(single_slices(kernel)) == gathers(kernel) > 0


@pytest.mark.parametrize("n", [512, 500])
def test_masked_vectors_are_blocks(n: int):
    """As in Triton's first tutorial: the mask is what the edge of a block says."""

    def kernel(x_ref, o_ref):
        at = pl.program_id(0) * 64 + jnp.arange(64)
        x = pl.load(x_ref, (at,), mask=at < n, other=0.0)
        pl.store(o_ref, (at,), jnp.exp(x), mask=at < n)

    x = np.random.default_rng(0).random(n, np.float32)
    out = jax.ShapeDtypeStruct((n,), np.float32)
    call = pl.pallas_call(kernel, out, grid=(pl.cdiv(n, 64),), interpret=True)
    (before,) = kernels_in(call, x)
    after = edge_fills(normalize(before))
    verify(after)
    assert "out[64]" in after.text and not gathers(after)
    assert "mask %" not in after.text
    np.testing.assert_allclose(run_numpy(after, [x])[0], np.exp(x), rtol=1e-6)


ROWS_OF = {
    "rows": lambda rows, n: (rows[:, None], jnp.arange(n)[None, :]),
    "part": lambda rows, n: (rows[:, None], 2 + jnp.arange(n - 3)[None, :]),
    "one row": lambda rows, n: (jnp.full((n,), rows[0] & 7), jnp.arange(n)),
}


@pytest.mark.parametrize("kind", [*ROWS_OF, "turned", "past the end", "mixed"])
@pytest.mark.parametrize("access", ["load", "store", "atomic"])
def test_rows_are_gathered_slices(kind: str, access: str):
    """Where the last index array counts up inside the ref, rows are gathered."""

    def place(rows):
        if kind == "turned":
            return rows[None, :], jnp.arange(COLUMNS)[:, None]
        if kind == "past the end":
            return rows[:, None], 1 + jnp.arange(COLUMNS)[None, :]
        if kind == "mixed":
            return rows[:, None] + (jnp.arange(6)[None, :] > 2), jnp.arange(6)[None, :]
        return ROWS_OF[kind](rows, COLUMNS)

    def kernel(rows_ref, x_ref, o_ref):
        at = jnp.broadcast_arrays(*place(rows_ref[...]))
        shape = at[0].shape
        new = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
        o_ref[...] = x_ref[...]
        if access == "load":
            found = pl.load(x_ref, tuple(at))
            o_ref[...] += found.sum()
        elif access == "store":
            pl.store(o_ref, tuple(at), new)
        else:
            pl.atomic_add(o_ref, tuple(at), new)

    rows = np.array([3, 0, -1 if access == "load" else 4, 9], np.int32)
    x = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))
    kernel_ = imported(call, rows, x)
    new = single_slices(kernel_)
    verify(new)
    changed = gathers(kernel_) - gathers(new)
    assert changed == {"one row": 2}.get(kind, int(kind in ROWS_OF))
    for wanted, got in zip(
        run_numpy(kernel_, [rows, x]), run_numpy(new, [rows, x]), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_an_index_beside_an_array_is_clamped():
    """Only elements of index arrays are dropped outside; a mask would drop both."""
    kernel = parse_kernel("""
kernel @k(%i: ref<i32 any>, %o: ref<f32[2,4] any>) outputs 1 {
  %zeros: f32[2,4] = constant {value=0.0}
  store %o[:, :] = %zeros
  %row: i32 = load %i[]
  %n: i32[2] = iota {dim=0}
  %one: i32[2] = constant {value=1}
  %columns: i32[2] = add %n, %one
  %v: f32[2] = constant {value=0.5}
  store %o[%row, gather %columns] = %v
}
""")
    for function in (consecutive_indices, single_slices):
        new = function(kernel)
        assert "gather" not in new.text
        for row in (-1, 1, 5):
            got = run_numpy(new, [np.int32(row)])
            np.testing.assert_array_equal(got, run_numpy(kernel, [np.int32(row)]))


@pytest.mark.parametrize("shape", [(24, 32), (20, 29)])
def test_places_that_wrap_around_are_slices_where_none_does(shape):
    """A program's block is numbered in groups, and its places are remainders."""
    (m, n), (rows, columns), group = shape, (8, 8), 2
    down, across = pl.cdiv(m, rows), pl.cdiv(n, columns)

    def kernel(x_ref, y_ref, o_ref):
        number = pl.program_id(0)
        first = number // (group * across) * group
        size = jnp.minimum(down - first, group)
        i = first + number % (group * across) % size
        j = number % (group * across) // size
        row, column = i * rows + jnp.arange(rows), j * columns + jnp.arange(columns)
        x = x_ref[(row % m)[:, None], jnp.arange(16)[None]]
        y = pl.load(y_ref, (jnp.arange(16)[:, None], (column % n)[None]))
        keep = (row[:, None] < m) & (column[None] < n)
        pl.store(o_ref, (row[:, None], column[None]), jnp.dot(x, y), mask=keep)

    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    call = pl.pallas_call(kernel, out_shape=out, grid=(down * across,))
    x, y = (np.random.default_rng(0).normal(size=s) for s in ((m, 16), (16, n)))
    x, y = np.float32(x), np.float32(y)
    (old,) = kernels_in(call, x, y)
    new = normalize(old)
    verify(new)
    stores = [op for op in walk(new.body) if op.name == "store"]
    assert not any(isinstance(e, Gather) for op in stores for e in Access.of(op).index)
    assert ("gather" in new.text) == (shape == (20, 29))
    assert f"grid=({down}, {across})" in new.text
    for got, want in zip(run_numpy(new, [x, y]), run_numpy(old, [x, y]), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(run_numpy(new, [x, y])[0], x @ y, 1e-5, 1e-5)


def test_one_array_that_repeats_its_counts_stays():
    """Its rows are the same; the value that is stored has them all."""
    kernel = parse_kernel(
        """
        kernel @repeated(%x: ref<f32[7,4,2] any>, %o: ref<f32[4,2] any>) outputs 1 {
          %0: i32[7,4] = iota {dim=1}
          %1: f32[7,4,2] = load %x[:, :, :]
          store %o[gather %0, :] = %1
        }
        """
    )
    assert single_slices(kernel) is kernel
    verify(normalize(kernel))
    x = np.arange(56, dtype=np.float32).reshape(7, 4, 2)
    (found,) = run_numpy(normalize(kernel), [x])
    np.testing.assert_array_equal(found, x[-1])
