"""The language feature by feature: kernels against numpy, emulated and checked."""

import functools
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite import triton
from pallasite.calls.pallas_call import PARAMETERS, params_of
from pallasite.errors import KernelTypeError, SpecError
from pallasite.sites import kernels_in

S = jax.ShapeDtypeStruct
f32, i32 = jnp.float32, jnp.int32
X = np.arange(24, dtype=np.float32).reshape(4, 6)
OUT = S((4, 6), f32)
WHOLE = pl.BlockSpec(memory_space=pl.ANY)
ROWS = pl.BlockSpec((2, 6), lambda i: (i, 0))


MODES = (True, pl.Checked())


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def agrees(kernel, want, *args, out=OUT, modes=MODES, **kw):
    """The call gives `want` in emulation and in checked mode."""
    for mode in modes:
        got = pl.pallas_call(kernel, out_shape=out, interpret=mode, **kw)(*args)
        jax.tree.map(np.testing.assert_array_equal, got, want)


# --- what pallas_call takes ---


def test_settings_of_a_call_in_every_form():
    params = [
        {"mosaic": {"dimension_semantics": ("parallel",)}},
        {"dimension_semantics": ["arbitrary"]},
        pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL,), flags={"a": 1}),
    ]
    cost = pl.CostEstimate(flops=1, transcendentals=0, bytes_accessed=2)
    for given in params:
        agrees(
            copy,
            X,
            X,
            grid=2,
            in_specs=[ROWS],
            out_specs=ROWS,
            compiler_params=given,
            cost_estimate=cost,
            metadata={"who": "me"},
        )


def test_every_compiler_parameter_may_come_in_a_dict():
    for cls in (pltpu.CompilerParams, triton.CompilerParams, plgpu.CompilerParams):
        assert {field.name for field in fields(cls)} <= PARAMETERS
    given = {"mosaic": {"flags": {"a": 1}}, "triton": {"num_warps": 4}}
    assert params_of(given, None) == {"flags": {"a": 1}, "num_warps": 4}
    with pytest.raises(SpecError, match="dimension_semantics"):
        params_of({"mosaic": {"dimension_semantic": ("parallel",)}}, None)
    # JAX's own may have fields of later releases.
    assert params_of(LaterParams(), None) == {"new": 1}


@dataclass
class LaterParams:
    new: int = 1


def test_a_call_on_numpy_arrays_compiles_one_program(caplog):
    """None for each operand that moves them to the device."""
    x, shape = np.ones((5, 13), np.float32), S((5, 13), f32)
    call = pl.pallas_call(lambda x, y, o: copy(x, o), out_shape=shape)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        call(x, np.ones((3, 13), np.float32))
    assert sum(r.message.startswith("Compiling") for r in caplog.records) == 1


def test_operand_that_is_none_has_no_ref_and_takes_no_spec():
    def kernel(x_ref, nothing, o_ref):
        assert nothing is None
        o_ref[...] = x_ref[...]

    agrees(kernel, X, X, None, grid=2, in_specs=[ROWS, None], out_specs=ROWS)
    agrees(kernel, X, X, None)


def test_index_maps_see_scalar_prefetch_operands_as_they_were_passed():
    def kernel(s, x_ref, o_ref):
        o_ref[...] = x_ref[...] + s["add"][0]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=4,
        in_specs=[pl.BlockSpec((1, 6), lambda i, s: (s["row"][i], 0))],
        out_specs=pl.BlockSpec((1, 6), lambda i, s: (i, 0)),
    )
    rows = jnp.array([3, 1, 0, 2])
    scalars = {"row": rows, "add": jnp.array([5.0])}
    agrees(kernel, X[[3, 1, 0, 2]] + 5, scalars, X, grid_spec=grid_spec)


def test_fill_may_be_a_jax_scalar():
    spec = pl.BlockSpec((4,), lambda i: (i,), fill=jnp.int32(-7))
    agrees(
        copy,
        np.array([1] * 5 + [-7] * 3, np.int32),
        jnp.ones(5, i32),
        out=S((8,), i32),
        grid=2,
        in_specs=[spec],
        out_specs=pl.BlockSpec((4,), lambda i: (i,)),
    )


def test_a_cached_kernel_is_traced_anew_in_another_context():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

    call = pl.pallas_call(kernel, out_shape=S((4, 4), f32), interpret=True)
    call(X)
    with jax.default_matmul_precision("highest"):
        (inside,) = kernels_in(call, X)
    assert "highest" in inside.text


def test_disable_jit():
    call = pl.pallas_call(copy, out_shape=OUT, interpret=True)
    with jax.disable_jit():
        np.testing.assert_array_equal(call(X), X)


@pytest.mark.parametrize("kind", ["partial", "object", "method", "jit", "checkpoint"])
def test_kinds_of_kernel_functions(kind):
    class Kernel:
        def __call__(self, x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        def method(self, x_ref, o_ref):
            self(x_ref, o_ref)

    kernel = Kernel()
    forms = {
        "partial": functools.partial(lambda c, x, o: copy(x, o) or kernel(x, o), 1),
        "object": kernel,
        "method": kernel.method,
        "jit": jax.jit(kernel.method),
        "checkpoint": jax.checkpoint(kernel.method),
    }
    agrees(forms[kind], X * 2, X)


# --- a mesh of cores ---


@pytest.mark.parametrize("mode", MODES, ids=["emulated", "checked"])
def test_axes_of_a_mesh_have_index_and_size(mode):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=2)

    def body(x_ref, o_ref):
        core = lax.axis_index("core")
        rows = pl.BlockSpec((1, 6), lambda j: (core * 2 + j, 0))
        assert lax.axis_size("core") == 2

        def add_core(a_ref, b_ref):
            b_ref[...] = a_ref[...] + core

        pltpu.emit_pipeline(add_core, grid=2, in_specs=[rows], out_specs=[rows])(
            x_ref, o_ref
        )

    want = X + np.repeat([0, 1], 2)[:, None]
    run = pl.kernel(body, OUT, mesh=mesh, interpret=mode)
    np.testing.assert_array_equal(run(X), want)
    batch = np.stack([X, X + 1])
    np.testing.assert_array_equal(jax.vmap(run)(batch), np.stack([want, want + 1]))


def test_kernel_as_a_decorator_with_trees():
    mesh = pltpu.create_tensorcore_mesh("core")

    @pl.kernel(out_shape={"a": OUT, "b": [OUT]}, mesh=mesh, interpret=True)
    def both(x, out):
        pltpu.sync_copy(x["in"], out["a"])
        pltpu.sync_copy(x["in"], out["b"][0])

    got = both({"in": X})
    np.testing.assert_array_equal(got["a"], X)
    np.testing.assert_array_equal(got["b"][0], X)


# --- loops and branches ---

BOUNDS = [(0, 8, 1), (8, 0, -1), (1, 8, 3), (8, 1, -3), (6, 2, 1), (7, -1, -2)]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("traced", ["none", "all", "lower", "upper", "step"])
def test_loop_visits_what_range_visits(bounds, traced):
    def kernel(b_ref, o_ref):
        o_ref[...] = jnp.zeros(10, i32)
        names = ("lower", "upper", "step")
        lower, upper, step = (
            b_ref[n] if traced in ("all", name) else bounds[n]
            for n, name in enumerate(names)
        )

        @pl.loop(lower, upper, step=step)
        def _(i):
            o_ref[i] += 1
            o_ref[9] += 1

    want = np.zeros(10, np.int32)
    for i in range(*bounds):
        want[i] += 1
        want[9] += 1
    agrees(kernel, want, jnp.array(bounds), out=S((10,), i32), modes=(True,))


LOW, HIGH = -(2**31), 2**31 - 1


@pytest.mark.parametrize("traced_step", [False, True])
@pytest.mark.parametrize(
    "lower, upper, step, dtype",
    [
        (LOW, HIGH, 2**30, "int32"),
        (HIGH, LOW, -(2**30), "int32"),
        (-3, HIGH, 2**30, "int32"),
        (HIGH, LOW, 1, "int32"),  # none, although the difference wraps to 1
        (HIGH - 2, HIGH, 1, "int32"),
        (HIGH, LOW, 7, "int32"),
        (LOW, HIGH, -1, "int32"),
        (0, 2**32 - 1, 2**31, "uint32"),
        (2**32 - 3, 2**32 - 1, 1, "uint32"),
        (-128, 127, 100, "int8"),
    ],
)
def test_loop_bounds_further_apart_than_their_type_counts(
    lower, upper, step, dtype, traced_step
):
    wanted = list(range(lower, upper, step))
    sizes = np.array([[lower], [upper]], dtype)

    def kernel(bounds, step_ref, o_ref, count):
        o_ref[...] = jnp.zeros_like(o_ref)
        count[0] = 0

        @pl.loop(bounds[0, 0], bounds[1, 0], step=step_ref[0] if traced_step else step)
        def _(i):
            o_ref[count[0]] = i
            count[0] += 1

        o_ref[7] = count[0].astype(dtype)

    got = pl.pallas_call(
        kernel,
        out_shape=S((8,), dtype),
        scratch_shapes=[pltpu.SMEM((1,), i32)],
        interpret=traced_step,
    )(sizes, np.array([step], dtype))
    assert got[7] == len(wanted)
    assert got[: len(wanted)].tolist() == wanted


def test_cdiv_rounds_up_for_either_sign():
    def kernel(a_ref, o_ref):
        o_ref[0] = pl.cdiv(a_ref[0], 4)
        o_ref[1] = pl.cdiv(7, a_ref[1])
        o_ref[2] = pl.cdiv(a_ref[2], 4)
        o_ref[3] = pl.cdiv(a_ref[0].astype(jnp.uint32), 4).astype(i32)

    agrees(
        kernel,
        np.array([3, 3, -1, 3], np.int32),
        jnp.array([9, 3, -5]),
        out=S((4,), i32),
    )


def test_when_of_a_python_bool_is_an_if():
    """What its function returns is lost; that of a traced condition is refused, as
    upstream's is."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.when(x_ref.shape == (4, 6))
        def _():
            o_ref[0] = x_ref[3]
            return 3

    want = X.copy()
    want[0] = X[3]
    agrees(kernel, want, X)


def test_scan_of_no_steps():
    def kernel(x_ref, o_ref):
        last, all_ = lax.scan(lambda c, _: (c * 2, c), x_ref[...], None, length=0)
        assert all_.shape == (0, 4, 6)
        o_ref[...] = last + all_.sum(0)

    agrees(kernel, X, X)


def test_refs_carried_by_a_loop():
    def kernel(x_ref, o_ref):
        def body(i, carry):
            x, o, view, s = carry
            o[i] = x[i] + s + view[0]
            return x, o, view, s + 1

        lax.fori_loop(0, 4, body, (x_ref, o_ref, x_ref.at[1:3], 0.0))

    agrees(kernel, X + np.arange(4, dtype=np.float32)[:, None] + X[1], X)


def test_a_loop_cannot_rotate_refs():
    def kernel(x_ref, o_ref):
        def body(i, refs):
            refs[1][i] = refs[0][i]
            return refs[::-1]

        lax.fori_loop(0, 4, body, (x_ref, o_ref))

    with pytest.raises(KernelTypeError, match="pass on the refs"):
        pl.pallas_call(kernel, out_shape=OUT, interpret=True)(X)


# --- JAX's transformations inside a kernel ---


def test_vmap_of_masked_loads_inside_a_kernel():
    def kernel(x_ref, o_ref):
        def row(i):
            columns = jnp.arange(6)
            return pl.load(x_ref, (i, slice(None)), mask=columns < i, other=0.0)

        o_ref[...] = jax.vmap(row)(jnp.array([3, 2, 1, 0]))

    want = [np.where(np.arange(6) < i, X[i], 0) for i in (3, 2, 1, 0)]
    agrees(kernel, np.stack(want), X)


def test_vmap_of_atomics_promises_and_checks_inside_a_kernel():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 0

        def add(i):
            pl.debug_check(i >= 0, "negative")
            return pl.atomic_add(o_ref, (pl.multiple_of(i, 1), slice(None)), 1.0)

        jax.vmap(add)(jnp.array([0, 0, 3]))

    want = np.zeros_like(X)
    want[0], want[3] = 2, 1
    agrees(kernel, want, X)


def collatz_steps(n):
    def body(state):
        n, steps = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    return lax.while_loop(lambda state: state[0] > 1, body, (n, jnp.int32(0)))[1]


def test_vmap_of_a_while_loop_that_ends_at_another_time_for_each_element():
    def kernel(x_ref, o_ref):
        o_ref[...] = jax.vmap(jax.vmap(collatz_steps))(x_ref[...])

    starts = np.array([[1, 2, 3], [7, 6, 27]], np.int32)
    want = np.array([[0, 1, 7], [16, 8, 111]], np.int32)
    agrees(kernel, want, starts, out=S((2, 3), i32), modes=(*MODES, False))


def test_vmap_of_a_while_loop_that_writes_is_refused():
    def kernel(x_ref, o_ref):
        def count(n):
            def body(i):
                pl.atomic_add(o_ref, (0, 0), 1.0)
                return i + 1

            return lax.while_loop(lambda i: i < n, body, 0)

        jax.vmap(count)(jnp.array([1, 2]))

    with pytest.raises(NotImplementedError, match="cannot write to a ref"):
        pl.pallas_call(kernel, out_shape=OUT, interpret=True)(X)


def test_grad_inside_a_kernel():
    def kernel(x_ref, o_ref):
        def loss(v):
            half = pl.load(x_ref, ..., mask=x_ref[...] > 3, other=v)
            return (x_ref[...] * v**2 + half).sum()

        o_ref[...] = jax.grad(loss)(x_ref[...])

    agrees(kernel, 2 * X * X + (X <= 3), X)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.randint(key, (4, 6), 0, 99).astype(f32),
        lambda key: jax.random.permutation(key, jnp.asarray(X)),
        lambda key: jax.random.uniform(jax.random.split(key, 3)[1], (4, 6)),
        lambda key: jax.vmap(lambda k: jax.random.uniform(k, (6,)))(
            jax.random.split(key, 6)[1:5]
        ),
        lambda key: lax.scan(
            lambda k, _: (jax.random.split(k)[0], jax.random.uniform(k, (6,))),
            key,
            None,
            length=4,
        )[1],
    ],
    ids=["randint", "permutation", "split", "vmap", "scan"],
)
def test_random_keys_are_moved_about_inside_a_kernel(draw):
    def kernel(seed_ref, o_ref):
        o_ref[...] = draw(jax.random.key(seed_ref[0]))

    agrees(kernel, draw(jax.random.key(7)), jnp.array([7]))


# --- refs ---


def test_atomics_through_views_count_repeated_indices():
    index = jnp.array([0, 5, 0, 3])

    def reshaped(i_ref, o_ref):
        o_ref[...] = jnp.zeros((2, 3))
        pl.atomic_add(o_ref.reshape(6), (i_ref[...],), jnp.ones(4))

    def transposed(i_ref, o_ref):
        o_ref[...] = jnp.zeros((2, 3))
        pl.atomic_add(o_ref.T, (i_ref[...] % 3, i_ref[...] % 2), jnp.ones(4))

    want = np.array([[2, 0, 0], [1, 0, 1]], np.float32)
    agrees(reshaped, want, index, out=S((2, 3), f32))
    want = np.zeros((2, 3), np.float32)
    np.add.at(want.T, (np.array(index) % 3, np.array(index) % 2), 1)
    agrees(transposed, want, index, out=S((2, 3), f32))


VIEWS = {
    "slice of a slice": (lambda r: r.at[1:].at[0:2, 2:5], lambda a: a[1:][0:2, 2:5]),
    "row": (lambda r: r.at[2].at[1:3], lambda a: a[2][1:3]),
    "stride": (lambda r: r.at[::2], lambda a: a[::2]),
    "reshape": (lambda r: r.reshape(8, 3), lambda a: a.reshape(8, 3)),
    "slice of a reshape": (lambda r: r.reshape(24).at[3:9], lambda a: a.ravel()[3:9]),
    "transpose": (lambda r: r.T, lambda a: a.T),
    "slice of a transpose": (lambda r: r.T.at[1:3], lambda a: a.T[1:3]),
    "transpose of a slice": (lambda r: r.at[1:3].T, lambda a: a[1:3].T),
    "bitcast": (lambda r: r.bitcast(i32), lambda a: a.view(np.int32)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_and_written_through(name):
    view, numpy_view = VIEWS[name]
    want = numpy_view(X)

    def read(x_ref, o_ref):
        assert (view(x_ref).shape, view(x_ref).ndim) == (want.shape, want.ndim)
        o_ref[...] = view(x_ref)[...]

    agrees(read, want, X, out=S(want.shape, want.dtype))

    def write(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        v = view(o_ref)
        v[...] = jnp.full(v.shape, 7, v.dtype)
        v[0] = jnp.full(v.shape[1:], 3, v.dtype)
        v[-1] += jnp.full(v.shape[1:], 2, v.dtype)

    changed = X.copy()
    v = numpy_view(changed)
    v[...], v[0] = 7, 3
    v[-1] += 2
    agrees(write, changed, X)


INDICES = {
    "negative": np.s_[-1, -2],
    "slice": np.s_[-2:, 1:99],
    "strides": np.s_[1::2, ::3],
    "ellipsis": np.s_[..., 2],
    "array": np.s_[np.array([2, 0])],
    "array and slice": np.s_[np.array([2, 0]), 1:3],
    "slice and array": np.s_[1:3, np.array([2, 0, 5])],
    "arrays broadcast": np.s_[np.array([[2], [0]]), np.array([1, 5])],
    "int and array": np.s_[2, np.array([1, 3])],
    "array of two dimensions": np.s_[:, np.array([[2, 0], [1, 3]])],
    "empty": np.s_[1:1],
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_mean_what_they_mean_in_numpy(name):
    index = INDICES[name]
    want = X[index]

    def read(x_ref, o_ref):
        o_ref[...] = x_ref[index]

    agrees(read, want, X, out=S(want.shape, f32))

    def write(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[index] = jnp.full(want.shape, -5.0)

    changed = X.copy()
    changed[index] = -5
    agrees(write, changed, X)


# --- named axes ---


def test_axes_named_in_the_grid():
    def kernel(x_ref, o_ref):
        assert lax.axis_size("rows") == 4 and lax.axis_size("columns") == 2
        at = 10 * lax.axis_index("rows") + lax.axis_index("columns")
        o_ref[...] = x_ref[...] + at.astype(f32)

    spec = pl.BlockSpec((1, None, 3), lambda i, _, j: (i, 0, j))
    grid = (("rows", 4), 1, ("columns", 2))
    marks = 10 * np.arange(4)[:, None] + np.repeat(np.arange(2), 3)
    x = X[:, None]
    want = x + marks[:, None].astype(np.float32)
    agrees(kernel, want, x, out=want, grid=grid, in_specs=[spec], out_specs=spec)


# --- prints ---


def test_formats_of_prints(capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("nothing")
        pl.debug_print("plain", x_ref[0, 1])
        pl.debug_print("{1} before {0:.2f} {{}}", x_ref[0, 1], x_ref[0, 2] + 0.2)
        jax.debug.print("named {x} and {}", x_ref[0, 3], x=x_ref[0, 4])
        o_ref[...] = x_ref[...]

    agrees(kernel, X, X)
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    want = ["nothing", "plain 1.0", "2.2 before 1.00 {}", "named 4.0 and 3.0"]
    assert lines == want * 2


def test_a_printed_ref_shows_what_it_holds(capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("whole {}, part {}", x_ref, x_ref.at[1:])
        jax.debug.print("{}", x_ref)
        o_ref[...] = x_ref[...]

    x = np.float32([4.2, 2.4])
    agrees(kernel, x, x, out=x, modes=(*MODES, False))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    want = ["whole [4.2 2.4], part [2.4]", "[4.2 2.4]"] * 3
    assert sorted(lines) == sorted(want)


# --- 64 bits ---


def test_x64_inside_and_outside():
    def kernel(x_ref, n_ref, o_ref, m_ref):
        assert pl.program_id(0).dtype == i32
        m_ref[...] = n_ref[...] * 2**33
        row = jnp.argmax(x_ref[...], axis=0)
        assert row.dtype == jnp.int64
        o_ref[...] = x_ref[...] * 1e-12 + 1

        @pl.loop(0, 2)
        def _(i):
            o_ref[i] = o_ref[i] + x_ref[pl.ds(row[0], 1)][0]

    with jax.enable_x64(True):
        x, n = jnp.asarray(X, jnp.float64), jnp.arange(24).reshape(4, 6)
        wide = X.astype(np.float64)
        want = wide * 1e-12 + 1 + wide[[1, 1, 3, 3]]
        agrees(
            kernel,
            (want, np.asarray(n) * 2**33),
            x,
            n,
            out=(S((4, 6), jnp.float64), S((4, 6), jnp.int64)),
            grid=2,
            in_specs=[ROWS, ROWS],
            out_specs=(ROWS, ROWS),
        )


@pytest.mark.parametrize("start", [0, None])
def test_a_masked_slice_may_be_larger_than_the_ref(start):
    """Blocks rounded up to powers of two, as kernels for GPUs have them."""

    def kernel(x_ref, o_ref):
        first = pl.program_id(0) if start is None else start
        rows, columns = jnp.arange(8)[:, None] < 4, jnp.arange(8)[None, :] < 6
        place = (pl.ds(first, 8), pl.ds(0, 8))
        x = pl.load(x_ref, place, mask=rows & columns, other=-1.0)
        pl.store(o_ref, place, x + x.min(), mask=rows & columns)

    agrees(kernel, X - 1, X, grid=1, modes=(*MODES, False))


@pytest.mark.parametrize("start", [-3, 4, 2**31 - 2, -(2**31)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "int8"])
def test_a_masked_slice_larger_than_the_ref_clamps_each_element(start, dtype):
    """Far outside, too: no position wraps around."""
    start *= 4 if dtype == "int64" else 1
    start = int(np.clip(start, np.iinfo(dtype).min, np.iinfo(dtype).max))

    def kernel(x_ref, i_ref, o_ref):
        mask = jnp.ones(8, bool)
        o_ref[...] = pl.load(x_ref, pl.ds(i_ref[0], 8), mask=mask, other=-1.0)

    x = np.arange(10, 16, dtype=np.float32)
    wanted = x[np.clip(start + np.arange(8), 0, 5)]
    with jax.enable_x64(True):
        first = jnp.array([start], dtype)
        agrees(kernel, wanted, x, first, out=S((8,), f32), modes=(True, False))


def test_integers_other_than_0_are_on_in_a_mask():
    def kernel(x_ref, o_ref):
        keep = jnp.arange(24).reshape(4, 6) % 3 - 1
        o_ref[...] = pl.load(x_ref, ..., mask=keep, other=-1.0)

    wanted = np.where(np.arange(24).reshape(4, 6) % 3 == 1, -1.0, X)
    agrees(kernel, wanted.astype(np.float32), X, modes=(*MODES, False))


def test_cost_of_a_function_with_arguments_that_are_no_arrays():
    def plain(x, y, *, transpose, scale):
        return (x.T if transpose else x) @ y * scale

    x, y = S((16, 8), f32), S((16, 4), f32)
    cost = pl.estimate_cost(plain, x, y, transpose=True, scale=2.0)
    assert cost.flops == 2 * 8 * 16 * 4 + 8 * 4
    assert cost.bytes_accessed == 4 * (16 * 8 + 16 * 4 + 8 * 4)


def test_costs_are_counted_exactly():
    """Products of any size, loops, branches, and kernels inside the function."""
    m, k, n = 400_000, 800_000, 900_000
    product = pl.estimate_cost(jnp.matmul, S((m, k), f32), S((k, n), f32))
    assert product.flops == 2 * m * k * n

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + 1

    def function(x):
        estimate = pl.CostEstimate(flops=500, transcendentals=7, bytes_accessed=1)
        x = pl.pallas_call(kernel, out_shape=x)(x)
        x = pl.pallas_call(kernel, out_shape=x, cost_estimate=estimate)(x)
        step = lambda x, _: (lax.cond(x[0] > 0, jnp.tanh, lambda x: x**8, x), None)
        return lax.scan(step, x, length=3)[0]

    cost = pl.estimate_cost(function, S((16,), f32))
    assert cost.transcendentals == 16 + 7 + 3 * 16
    assert cost.flops == 16 + 500 + 3 * (1 + 4 * 16)

    plain = lambda x: pl.pallas_call(kernel, out_shape=x)(x)
    pushed = lambda x, t: jax.jvp(plain, (x,), (t,))
    cost = pl.estimate_cost(pushed, S((16,), f32), S((16,), f32))
    assert cost.transcendentals == 16 + 16  # of the kernel, and of that of tangents


def test_dots_by_algorithms_that_this_platform_lacks():
    preset = lax.DotAlgorithmPreset.TF32_TF32_F32_X3

    def kernel(x_ref, o_ref):
        o_ref[...] = pl.dot(x_ref[...], x_ref[...], trans_b=True, precision=preset)

    agrees(kernel, X @ X.T, X, out=S((4, 4), f32), modes=(*MODES, False))


def test_the_emulation_multiplies_narrow_floats_anywhere():
    """XLA's CPU runtime refuses this product unless its operands are widened."""

    def kernel(x_ref, y_ref, o_ref):
        step = pl.program_id(0)
        x, y = x_ref[...].T, jnp.maximum(y_ref[...], 0)
        inside = step * 4 + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < 12
        pl.when(step == 0)(lambda: o_ref.__setitem__(..., jnp.zeros_like(o_ref)))
        x = jnp.where(inside, x, 0)
        o_ref[...] += jnp.dot(x, y, preferred_element_type=jnp.float32)

    x, y = jnp.ones((12, 8), jnp.bfloat16), jnp.ones((12, 16), jnp.bfloat16)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 16), jnp.float32),
        grid=(3,),
        in_specs=[pl.BlockSpec((4, n), lambda k: (k, 0)) for n in (8, 16)],
        out_specs=pl.BlockSpec((8, 16), lambda k: (0, 0)),
        interpret=True,
    )
    np.testing.assert_array_equal(call(x, y), np.full((8, 16), 12.0))
