"""Negative elements of index arrays count from the end, as in jnp, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import walk
from pallasite.sites import kernels_in
from tests.backends.tpu import harness as tpu
from tests.backends.triton.harness import simulated

S = jax.ShapeDtypeStruct
X = np.arange(12, dtype=np.float32).reshape(3, 4) + 1
ROWS = np.int32([-1, 0, -3, 2])
COLUMNS = np.int32([[-4, 3], [-1, 1]])
MODES = (True, pl.Checked(), False)


def agree_everywhere(kernel, want, *args, triton=True):
    for mode in MODES:
        call = pl.pallas_call(kernel, S(want.shape, want.dtype), interpret=mode)
        np.testing.assert_array_equal(call(*args), want)
    if triton:
        (imported,) = kernels_in(
            pl.pallas_call(kernel, S(want.shape, want.dtype)), *args
        )
        np.testing.assert_array_equal(simulated(imported, args)[0], want)


READS = {
    "rows": (lambda x, r, c: x[r[...]], lambda x, r, c: x[r]),
    "rows, all columns": (lambda x, r, c: x[r[...], :], lambda x, r, c: x[r]),
    "columns": (lambda x, r, c: x[:, c[...]], lambda x, r, c: x[:, c]),
    "a part of the rows": (lambda x, r, c: x[r[...], 1:3], lambda x, r, c: x[r, 1:3]),
    "both": (lambda x, r, c: x[r[:2], c[...]], lambda x, r, c: x[r[:2], c]),
    "int and array": (lambda x, r, c: x[-1, c[...]], lambda x, r, c: x[-1, c]),
    "scalar and array": (lambda x, r, c: x[r[0], c[...]], lambda x, r, c: x[r[0], c]),
    "view": (lambda x, r, c: x.at[:, 1:4].at[r[...], 0][...], lambda x, r, c: x[r, 1]),
    "pl.load": (lambda x, r, c: pl.load(x, (r[...], pl.ds(1, 2))),
                lambda x, r, c: x[r, 1:3]),
    "pl.load with a mask": (
        lambda x, r, c: pl.load(x, (r[...], 0), mask=r[...] < 0, other=-7.0),
        lambda x, r, c: np.where(r < 0, x[r, 0], np.float32(-7))),
    "int8": (lambda x, r, c: x[r[...].astype(jnp.int8)], lambda x, r, c: x[r]),
    "constant": (lambda x, r, c: x[np.int32([-1, -2])], lambda x, r, c: x[[-1, -2]]),
    "computed": (lambda x, r, c: x[lax.iota(jnp.int32, 3) - 2],
                 lambda x, r, c: x[[-2, -1, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_negative_elements_of_an_index_read_from_the_end(name):
    read, numpy_read = READS[name]

    def kernel(x_ref, r_ref, c_ref, o_ref):
        o_ref[...] = read(x_ref, r_ref, c_ref)

    # A constant array is one more operand, which the simulator is not given.
    want, on_triton = numpy_read(X, ROWS, COLUMNS), name != "constant"
    agree_everywhere(kernel, want, X, ROWS, COLUMNS, triton=on_triton)


def test_an_int8_index_reaches_past_its_own_range():
    long = np.arange(300, dtype=np.float32)
    index = np.int8([-1, -128, 5, 127])

    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[i_ref[...]]

    agree_everywhere(kernel, long[index], long, index)


def test_past_the_end_on_either_side_reads_the_nearest_and_drops_stores():
    index = np.int32([-4, 3, -1])

    def kernel(x_ref, i_ref, o_ref):
        o_ref[:3] = x_ref[i_ref[...]]
        o_ref[3:] = x_ref[...]
        o_ref.at[3:][i_ref[...]] = jnp.float32([10, 20, 30])

    want = np.float32([1, 3, 3, 1, 2, 30])
    args = np.float32([1, 2, 3]), index
    for mode in (True, False):
        call = pl.pallas_call(kernel, S((6,), jnp.float32), interpret=mode)
        np.testing.assert_array_equal(call(*args), want)


WRITES = {
    "store": lambda o, i, v: o.__setitem__(i, v),
    "pl.store": lambda o, i, v: pl.store(o, i, v),
    "pl.store with a mask": lambda o, i, v: pl.store(o, i, v, mask=v > 1),
    "swap": lambda o, i, v: pl.store(o, 4, pl.swap(o, i, v).sum()),
    "atomic_add": lambda o, i, v: pl.atomic_add(o, i, v),
    "atomic_max": lambda o, i, v: pl.atomic_max(o, i, v),
    "addupdate": lambda o, i, v: o.__setitem__(i, o[i] + v),
}


@pytest.mark.parametrize("name", WRITES)
def test_negative_elements_of_an_index_write_from_the_end(name):
    write, index = WRITES[name], np.int32([-1, 2, -8])

    def kernel(i_ref, v_ref, o_ref):
        o_ref[...] = jnp.full(8, 2.0)
        write(o_ref, i_ref[...], v_ref[...])

    values = np.float32([1, 2, 3])
    want = np.full(8, 2, np.float32)
    where = index[values > 1] if "mask" in name else index
    chosen = values[values > 1] if "mask" in name else values
    if name in ("atomic_add", "addupdate"):
        chosen = chosen + 2
    elif name == "atomic_max":
        chosen = np.maximum(chosen, 2)
    want[where] = chosen
    if name == "swap":
        want[4] = 6
    on_triton = name not in ("swap", "atomic_max")  # it has no such atomics of floats
    agree_everywhere(kernel, want, index, values, triton=on_triton)


@pytest.mark.parametrize("mode", [None, "clip", "fill", "wrap"])
def test_in_a_tile_each_mode_is_that_of_jnp(mode):
    index = np.int32([-1, -3, 2, -4, 3])

    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = jnp.take(x_ref[...], i_ref[...], axis=0, mode=mode)

    want = np.asarray(jnp.take(X[:, 0], index, axis=0, mode=mode))
    agree_everywhere(kernel, want, X[:, 0], index, triton=False)


@pytest.mark.parametrize("mode", (True, False))
def test_the_gradient_goes_to_the_element_that_was_read(mode):
    index = np.int32([-1, 0, -1, -3])

    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[i_ref[...]] ** 2

    call = pl.pallas_call(kernel, S((4,), jnp.float32), interpret=mode)
    got = jax.grad(lambda x: call(x, index).sum())(jnp.float32([1, 2, 3]))
    np.testing.assert_allclose(got, [4, 0, 12])


def test_vmap():
    index = np.int32([[-1, 0], [1, -3]])

    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[i_ref[...]]

    for mode in MODES:
        call = pl.pallas_call(kernel, S((2,), jnp.float32), interpret=mode)
        got = jax.vmap(call, (None, 0))(X[:, 0], index)
        np.testing.assert_array_equal(got, X[:, 0][index])


@pytest.mark.parametrize("mode", (True, False))
def test_a_traced_scalar_does_not_count_from_the_end(mode):
    def kernel(x_ref, i_ref, o_ref):
        o_ref[0] = x_ref[i_ref[0]]
        o_ref[1] = x_ref[pl.ds(i_ref[0], 2)][1]
        o_ref[2] = 9.0
        o_ref[i_ref[0]] += 5.0

    call = pl.pallas_call(kernel, S((3,), jnp.float32), interpret=mode)
    np.testing.assert_array_equal(call(X[:, 0], np.int32([-2])), [6, 5, 9])


# --- what is known not to be negative costs nothing ---


NEVER_NEGATIVE = {
    "iota": lambda i, n, u: lax.iota(jnp.int32, 4),
    "block of a program": lambda i, n, u: i * 4 + jnp.arange(4),
    "remainder": lambda i, n, u: (i + jnp.arange(4)) % 3,
    "clipped": lambda i, n, u: jnp.clip(n, 0, 7),
    "unsigned": lambda i, n, u: u,
    "shape changes": lambda i, n, u: jnp.arange(4).reshape(2, 2).T[::-1].ravel(),
    "masked bits": lambda i, n, u: n & 7,
    "argmax": lambda i, n, u: jnp.argmax(n.reshape(4, 1), axis=1),
    "chosen": lambda i, n, u: jnp.where(n > 0, jnp.arange(4), 2),
}


@pytest.mark.parametrize("name", NEVER_NEGATIVE)
def test_indices_known_not_to_be_negative_are_used_as_they_are(name):
    make = NEVER_NEGATIVE[name]

    def kernel(x_ref, n_ref, u_ref, o_ref):
        index = make(pl.program_id(0), n_ref[...], u_ref[...])
        o_ref[...] = x_ref[index]

    assert _added_selects(kernel) == 0


@pytest.mark.parametrize("count", [3, "traced"])
def test_loop_counters_are_known_not_to_be_negative(count):
    def kernel(x_ref, n_ref, u_ref, o_ref):
        def body(i, total):
            return total + x_ref[i * jnp.ones(4, jnp.int32)]

        trips = n_ref[0] if count == "traced" else count
        o_ref[...] = lax.fori_loop(0, trips, body, jnp.zeros(4))

    assert _added_selects(kernel) == 0


def test_indices_from_memory_are_wrapped_once():
    def kernel(x_ref, n_ref, u_ref, o_ref):
        o_ref[...] = x_ref[n_ref[...]]

    assert _added_selects(kernel) == 1


def _added_selects(kernel) -> int:
    """Adjustments of the size of x in the imported kernel."""
    call = pl.pallas_call(kernel, S((4,), jnp.float32), grid=2)
    x, n = jnp.ones(1009), jnp.arange(4, dtype=jnp.int32)
    (imported,) = kernels_in(call, x, n, n.astype(jnp.uint32))
    return sum(op.attrs.get("value") == 1009 for op in walk(imported.body))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.at[:].add(1),
        lambda x: x.at[...].multiply(x),
        lambda x: x.at[:, :].set(2 * x),
        lambda x: x.at[:].max(5),
        lambda x: x.at[...].get(mode="fill", fill_value=7) - x.at[:].get(),
    ],
)
def test_updates_of_a_whole_tile_have_no_indices(change):
    """JAX has an index array of no elements for them, which no chip takes."""

    def kernel(x_ref, o_ref):
        o_ref[...] = change(x_ref[...])

    want = np.asarray(change(jnp.asarray(X)))
    agree_everywhere(kernel, want, X)
    (imported,) = kernels_in(pl.pallas_call(kernel, S(X.shape, X.dtype)), X)
    assert len(imported.inputs) == 1
    np.testing.assert_array_equal(tpu.simulated(imported, [X])[0], want)


# --- slices of stride 0: one place, several times ---

REPEATED = {
    "a row": (lambda x, i: x[pl.ds(2, 5, stride=0)], lambda x: x[[2] * 5]),
    "a row at run time": (lambda x, i: x[pl.ds(i, 5, stride=0)], lambda x: x[[1] * 5]),
    "past the end": (lambda x, i: x[pl.ds(i + 9, 2, 0), 1:3], lambda x: x[[2, 2], 1:3]),
    "a column": (lambda x, i: x[:, pl.ds(3, 7, stride=0)], lambda x: x[:, [3] * 7]),
    "both": (lambda x, i: x[pl.ds(i, 2, 0), pl.ds(0, 3, 0)], lambda x: x[[1, 1], :1]),
    "next to an array": (
        lambda x, i: x[2 - 2 * lax.iota(jnp.int32, 2), pl.ds(i, 3, 0)],
        lambda x: x[[2, 0], 1:2],
    ),
    "once": (lambda x, i: x[pl.ds(i, 1, stride=0)], lambda x: x[1:2]),
    "never": (lambda x, i: x[pl.ds(i, 0, stride=0)], lambda x: x[1:1]),
    "of a view": (lambda x, i: x.at[1:].at[pl.ds(i, 4, 0)][...], lambda x: x[[2] * 4]),
    "pl.load": (lambda x, i: pl.load(x, (pl.ds(i, 6, 0),)), lambda x: x[[1] * 6]),
    "pl.load with a mask": (
        lambda x, i: pl.load(x, (pl.ds(i, 6, 0), 0), mask=jnp.arange(6) < 4, other=-1),
        lambda x: np.where(np.arange(6) < 4, x[1, 0], np.float32(-1)),
    ),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_reads_with_stride_0_repeat_one_place(name, dtype):
    read, expected = REPEATED[name]
    x = X.astype(dtype)

    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = read(x_ref, i_ref[0])

    want = np.asarray(expected(x), dtype)
    full = {"both": (2, 3), "a column": (3, 7), "next to an array": (2, 3)}
    want = np.broadcast_to(want, full.get(name, want.shape))
    place = np.int32([1])
    modes = (True, False) if name == "past the end" else MODES  # checked mode reports
    for mode in modes:
        call = pl.pallas_call(kernel, S(want.shape, dtype), interpret=mode)
        np.testing.assert_array_equal(call(x, place), want)
    if want.size:
        (imported,) = kernels_in(pl.pallas_call(kernel, S(want.shape, dtype)), x, place)
        got = simulated(imported, (x, place))[0]
        np.testing.assert_array_equal(np.asarray(got, dtype), want)


# --- refs, and views of refs, as indices ---

ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


@pytest.mark.parametrize("mode", MODES[:2], ids=["emulated", "checked"])
def test_a_copy_takes_a_view_of_row_numbers(mode):
    """As JAX's page on SparseCores writes it."""
    numbers = np.int32([[0, 0, 0], [2, 0, 1]])

    def kernel(x_ref, i_ref, gathered_ref, scattered_ref, rows_ref):
        pltpu.sync_copy(x_ref.at[i_ref.at[1]], rows_ref)
        gathered_ref[...] = rows_ref[...]
        pltpu.sync_copy(rows_ref, scattered_ref.at[i_ref.at[pl.program_id(0) + 1]])

    gathered, scattered = pl.pallas_call(
        kernel,
        (S(X.shape, X.dtype),) * 2,
        grid=1,
        in_specs=[ANYWHERE, pl.BlockSpec((2, 3), lambda i: (0, 0))],
        out_specs=[pl.BlockSpec((3, 4), lambda i: (0, 0)), ANYWHERE],
        scratch_shapes=[pltpu.VMEM((3, 4), jnp.float32)],
        interpret=mode,
    )(X, numbers)
    np.testing.assert_array_equal(gathered, X[[2, 0, 1]])
    np.testing.assert_array_equal(scattered, X)


def test_a_ref_of_numbers_is_an_index():
    def kernel(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[i_ref]

    agree_everywhere(kernel, X[ROWS], X, ROWS)

    def masked(x_ref, i_ref, o_ref):
        o_ref[...] = pl.load(
            x_ref, (i_ref.at[1],), mask=i_ref[1][:, None] < 0, other=-7.0
        )

    numbers = np.stack([ROWS, ROWS[::-1]])
    want = np.where(ROWS[::-1, None] < 0, X[ROWS[::-1]], np.float32(-7))
    agree_everywhere(masked, want, X, numbers)
