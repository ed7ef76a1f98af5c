"""`pl.fuse`: what is around a kernel call is computed in the kernel."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasite as pl
import pallasite.tpu as pltpu
from pallasite.sites import calls_in


def array(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def in_scratch(x_ref, w_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...]


def in_result(x_ref, w_ref, o_ref, _):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


def by_columns(x_ref, w_ref, o_ref, _):
    """Reads parts of its blocks."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    for part in (pl.ds(0, 8), pl.ds(8, 8)):
        o_ref[:, part] += jnp.dot(x_ref[...], w_ref[:, part])


def matmul(x, w, kernel=in_scratch, block=16, **more):
    (m, k), (_, n) = x.shape, w.shape
    grid = (pl.cdiv(m, block), pl.cdiv(n, block), pl.cdiv(k, block))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=grid,
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
        **more,
    )(x, w)


def names_in(fn, *args) -> list[str]:
    """The equations of a function; those of inner functions in their place."""
    found: list[str] = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if inner is None:
                found.append(eqn.primitive.name)
            else:
                visit(getattr(inner, "jaxpr", inner))

    made = jax.make_jaxpr(fn)(*args)
    visit(made.jaxpr if hasattr(made, "jaxpr") else made)
    return found


X, W, B, R = array(32, 48), array(48, 64, seed=1), array(64, seed=2), array(32, 64)
Q = jnp.asarray(np.random.default_rng(3).integers(-99, 99, size=(48, 64)), jnp.int8)
X16 = X.astype(jnp.bfloat16)
STACK = array(2, 48, 64, seed=4)
ONE_CALL = ["pallasite_call"]


def epilogue(x, w, b, r, mm=matmul):
    return jax.nn.gelu(mm(x, w) + b) + r


def dequantised(x, q, scale, mm=matmul):
    weights = q.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    return mm(x, weights)


FUSED = {
    "bias, gelu, residual": (epilogue, (X, W, B, R)),
    "summed in the result": (
        functools.partial(epilogue, mm=functools.partial(matmul, kernel=in_result)),
        (X, W, B, R),
    ),
    "dequantising": (dequantised, (X16, Q, B)),
    "in parts of blocks": (
        lambda x, w, b: matmul(x * 2, w * b, kernel=by_columns) * b,
        (X, W, B),
    ),
    "transposes": (lambda x, w: matmul(x, w.T).T, (X, W.T)),
    "a layer of a stack": (lambda x, w: matmul(x, w[1]) * 0.5, (X, STACK)),
    "heads": (
        lambda x, w: matmul(x.reshape(32, 48), w).reshape(32, 4, 16),
        (X.reshape(2, 16, 48), W),
    ),
    "columns": (lambda x, w: matmul(x[:, 16:], w[16:] + 1), (X, W)),
    "a mask": (
        lambda x, w: jnp.where(
            jnp.arange(32)[:, None] >= jnp.arange(64), matmul(x, w), -1
        ),
        (X, W),
    ),
    "a scalar": (lambda x, w, s: matmul(x, w) * (s + 1), (X, W, jnp.float32(3))),
    "a cast result": (lambda x, w: matmul(x, w).astype(jnp.bfloat16), (X, W)),
    "blocks over the edge": (
        lambda x, w, b: jax.nn.relu(matmul(x[:, :24], w[:24], block=24) + b),
        (X, W, B),
    ),
    "parts joined": (
        lambda x, a, b: matmul(x, jnp.concatenate([a, b])),
        (X, W[:16], W[16:]),
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_one_kernel_computes_it(name):
    f, args = FUSED[name]
    fused = pl.fuse(f)
    assert names_in(fused, *args) == ONE_CALL
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    expected = np.asarray(f(*args), np.float32)
    close(np.asarray(jax.jit(fused)(*args), np.float32), expected)


def test_a_layer_that_a_number_names_is_read_in_place():
    f = lambda x, w, n: matmul(x, w[n] * 2)
    fused, args = pl.fuse(f), (X, STACK, jnp.int32(1))
    assert not {"dynamic_slice", "mul"} & set(names_in(fused, *args))
    np.testing.assert_allclose(jax.jit(fused)(*args), f(*args), 1e-4, 1e-4)
    # A TPU's index maps read scalars only where they are prefetched.
    (report,) = pl.explain(fused, "tpu:v5e", measure=False)(*args).kernels
    assert report.backend == "tpu"


def test_the_compiled_program_is_one_call():
    lowered = jax.jit(pl.fuse(epilogue)).lower(X, W, B, R)
    lines = lowered.compile().as_text().split("ENTRY")[1].splitlines()
    ops = [line for line in lines if " = " in line and "parameter(" not in line]
    assert len(ops) == 1 and "custom-call(" in ops[0]


def test_two_results_and_what_is_used_besides_are_kept():
    def f(x, w, b):
        y = matmul(x, w)
        h = y + b
        return y, jnp.tanh(h), jnp.sort(h)

    fused = pl.fuse(f)
    assert names_in(fused, X, W, B) == ["pallasite_call", "sort"]
    for got, expected in zip(fused(X, W, B), f(X, W, B), strict=True):
        np.testing.assert_allclose(got, expected, 1e-5, 1e-5)


def test_row_sums_of_whole_rows_are_fused_and_of_parts_are_not():
    f = lambda x, w: matmul(x, w).max(1)
    narrow = W[:, :16]
    assert names_in(pl.fuse(f), X, narrow) == ONE_CALL
    np.testing.assert_allclose(pl.fuse(f)(X, narrow), f(X, narrow), 1e-5, 1e-5)
    (call,) = calls_in(pl.fuse(f), X, W)
    assert call.fused == (
        "not result o_ref: blocks do not pass through reduce_max: a block holds only "
        "a part of the reduced dimensions",
    )


def test_what_would_move_more_stays_outside():
    """A row of W for each of its 64 columns: the sums are read again and again."""
    f = lambda x, w: matmul(x, w.sum(0))
    g = pl.fuse(f)
    big = array(8, 48, 64)
    assert names_in(g, X, big) == ["reduce_sum", "pallasite_call"]
    (call,) = calls_in(g, X, big)
    assert "not operand w_ref: it would move" in call.fused[0]


def filled(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def test_what_cannot_be_proven_stays_outside():
    def edge(x):
        spec = pl.BlockSpec((24, 48), lambda i: (i, 0), fill=0.0)
        shape = jax.ShapeDtypeStruct((48, 48), x.dtype)
        out = pl.BlockSpec((24, 48), lambda i: (i, 0))
        call = pl.pallas_call(filled, shape, grid=(2,), in_specs=[spec], out_specs=out)
        return call(jnp.exp(x))

    (call,) = calls_in(pl.fuse(edge), X)
    assert call.fused == (
        "not operand x_ref: its blocks extend past the edge and have a fill value",
    )

    def again(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    def returns(x):
        spec = lambda f: pl.BlockSpec((16, 48), f)
        return jnp.exp(
            pl.pallas_call(
                again,
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                grid=(2, 2),
                in_specs=[spec(lambda j, i: (i, 0))],
                out_specs=spec(lambda j, i: (i, 0)),
            )(x)
        )

    (call,) = calls_in(pl.fuse(returns), X)
    assert "programs revisit a block" in call.fused[0]

    def aliased(x):
        return pl.pallas_call(
            filled, jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0}
        )(x * 2)

    (call,) = calls_in(pl.fuse(aliased), X)
    assert call.fused == ("not operand x_ref: it aliases a result",)


def test_derivatives_are_those_of_the_function():
    def loss(f, x, w, b, r):
        return (f(x, w, b, r) ** 2).sum()

    numbers = (0, 1, 2, 3)
    grad = lambda f: jax.jit(jax.grad(functools.partial(loss, f), numbers))
    expected = grad(epilogue)(X, W, B, R)
    for a, b in zip(grad(pl.fuse(epilogue))(X, W, B, R), expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-4)
    # Integers have no derivative.
    grad = lambda f: jax.jit(jax.grad(lambda x: f(x, Q, B).sum()))
    got, expected = grad(pl.fuse(dequantised))(X16), grad(dequantised)(X16)
    np.testing.assert_allclose(got, expected, 1e-2)
    # An outer value that the function closes over is differentiated, too.
    outer = lambda f: jax.grad(lambda b: f(lambda x: matmul(x, W) * b)(X).sum())(B)
    np.testing.assert_allclose(outer(pl.fuse), outer(lambda f: f), 1e-5, 1e-5)


def test_mapped_and_partitioned_calls_stay_fused():
    xs = array(3, 32, 48, seed=5)
    mapped = lambda f: jax.vmap(f, (0, None, None, None))
    expected = mapped(epilogue)(xs, W, B, R)
    np.testing.assert_allclose(
        jax.jit(mapped(pl.fuse(epilogue)))(xs, W, B, R), expected, 1e-4, 1e-4
    )
    assert names_in(mapped(pl.fuse(epilogue)), xs, W, B, R) == ONE_CALL

    devices = np.asarray(jax.devices())
    if len(devices) < 8:
        pytest.skip("8 devices")
    mesh = Mesh(devices[:8].reshape(2, 4), ("i", "j"))
    specs = (P("i"), P(), P(), P("i"))
    own = jax.shard_map(pl.fuse(epilogue), mesh=mesh, in_specs=specs, out_specs=P("i"))
    assert names_in(own, X, W, B, R) == ONE_CALL
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    x, w = array(64, 48, seed=6), W
    r = array(64, 64, seed=7)
    args = (place(x, "i"), place(w, None, "j"), place(B, "j"), place(r, "i", "j"))
    compiled = jax.jit(pl.fuse(epilogue)).lower(*args).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "fusion(" not in text
    np.testing.assert_allclose(compiled(*args), epilogue(x, w, B, r), 1e-4, 1e-4)


def test_arguments_that_are_not_arrays_stay_what_they_are():
    f = lambda x, w, block, scale=1.0: matmul(x, w, block=block) * scale
    np.testing.assert_allclose(
        pl.fuse(f)(X, W, 16, scale=2.0), f(X, W, 16, 2.0), 1e-5, 1e-5
    )
    nothing = jnp.zeros((0, 48))
    assert pl.fuse(lambda x: jnp.exp(matmul(x, W)))(nothing).shape == (0, 64)


def test_numbers_that_are_returned_are_arrays():
    _, doubled = pl.fuse(lambda x, s: (x, s * 2))(array(16), 3.0)
    assert isinstance(doubled, jax.Array)
    assert doubled == 6


def test_an_operand_that_a_kernel_has_twice():
    def f(x):
        y = x * 2
        return matmul(y, y) + y

    square = array(32, 32)
    np.testing.assert_allclose(pl.fuse(f)(square), f(square), 1e-5, 1e-5)
    (call,) = calls_in(pl.fuse(f), square)
    assert call.fused[-1] == "not operand x_ref: the kernel has it as two operands"


def copied(x, rows: int, index_map, out_map=lambda i: (i, 0), kernel=None, grid=None):
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    return pl.pallas_call(
        kernel or copy,
        out_shape=jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
        grid=grid or rows // 4,
        in_specs=[pl.BlockSpec((4, x.shape[1]), index_map)],
        out_specs=pl.BlockSpec((4, x.shape[1]), out_map),
    )(x)


def rows(n: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.float32, (n, 16), 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: copied(x[:8] * 2, 24, lambda i: (i, 0)),
        lambda x: copied(rows(8) * 2, 24, lambda i: (2 * i - 3, 0)),
        lambda x: copied(jnp.tril(x[:8]), 12, lambda i: (i - 1, 0)),
        lambda x: copied(x, 8, lambda i: (i, 0), lambda i: (i, 0), grid=6) + rows(8),
        lambda x: copied(x, 8, lambda i: (i, 0), lambda i: (i, 0), grid=6) + x[:8],
    ],
)
def test_blocks_out_of_range_are_those_of_the_operand(function):
    x = array(24, 16)
    assert jnp.array_equal(jax.jit(pl.fuse(function))(x), function(x))


def test_blocks_larger_than_the_array():
    def f(x):
        y = copied(x.reshape(1, 16), 1, lambda i: (i, 0), grid=1)
        return y.reshape(16), jnp.squeeze(y, 0) + 1

    x = array(1, 1, 16)
    for a, b in zip(jax.jit(pl.fuse(f))(x), f(x), strict=True):
        assert jnp.array_equal(a, b)


def store_first_blocks(x_ref, o_ref):
    @pl.when(pl.program_id(0) < 2)
    def _():
        o_ref[...] = x_ref[...]


@pytest.mark.parametrize(
    "options", [{"kernel": store_first_blocks}, {"grid": 2}], ids=["guarded", "short"]
)
def test_what_follows_blocks_that_are_not_stored_is_computed(options):
    def function(x):
        found = copied(x, 12, lambda i: (i, 0), **options)
        return jnp.where(rows(12) < 8, found, 7.0)

    x = array(12, 16)
    assert jnp.array_equal(jax.jit(pl.fuse(function))(x), function(x))


def test_results_of_weak_types_stay_weak():
    def sign(x):
        return jnp.where(matmul(x, x) > 0, 1.0, -1.0)

    x = array(16, 16)
    found = pl.fuse(sign)(x)
    assert found.weak_type
    assert (found * x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_function_is_traced_once_for_each_kind_of_arguments():
    traced = []

    @pl.fuse
    def f(x, w, scale, act=jnp.tanh, layer=None):
        traced.append(scale)
        return act(matmul(x, w) * scale) + (layer.shift if layer else 0)

    def check(scale, **more):
        expected = jnp.tanh(matmul(X, W) * scale)
        np.testing.assert_allclose(f(X, W, scale, **more), expected, 1e-5, 1e-5)

    for _ in range(2):
        check(2.0)
        check(0.0)
        check(-0.0)  # another number, though it is equal
        check(True)
    assert len(traced) == 4
    f(X.astype(jnp.bfloat16), W, 2.0)
    assert len(traced) == 5
    with jax.default_matmul_precision("highest"):
        check(2.0)
    assert len(traced) == 6
    # An object can change and be the same: it is looked at each time.
    layer = types.SimpleNamespace(shift=1.0)
    a = f(X, W, 2.0, layer=layer)
    layer.shift = 2.0
    np.testing.assert_allclose(f(X, W, 2.0, layer=layer), a + 1, 1e-5)
    # What a function closes over may be of a trace that has ended.
    g = pl.fuse(lambda x: matmul(x, W) * scales[0])
    for n in (1.0, 2.0):
        scales = []
        run = jax.jit(lambda x, s: (scales.append(s), g(x))[1])
        np.testing.assert_allclose(run(X, n), matmul(X, W) * n, 1e-5, 1e-5)


def test_explain_says_that_side_effects_keep_a_function_as_it_is():
    @jax.jit
    def inner(x):
        return matmul(x * 2, W)

    def f(x):
        jax.debug.print("{}", x[0, 0])
        return inner(x) + 1

    (report,) = pl.explain(pl.fuse(f), measure=False)(X).kernels
    assert report.fused == ("nothing: the function has side effects (DebugEffect)",)
    np.testing.assert_allclose(pl.fuse(f)(X), f(X), 1e-5)


def test_explain_says_what_was_fused():
    text = str(pl.explain(pl.fuse(dequantised), measure=False)(X16, Q, B))
    assert (
        "fused     operand w_ref: convert_element_type, broadcast_in_dim, mul" in text
    )


@pytest.mark.parametrize("rows", [8, 12, 16])
def test_parts_of_one_array_twice(rows: int):
    """Two uses in one operation need two blocks: that is not fused."""

    def function(y):
        x = jnp.concatenate([y, y])[:rows]
        block = pl.BlockSpec((2, 4), lambda i: (i, 0))
        return pl.pallas_call(
            lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] + 1),
            out_shape=x,
            grid=rows // 2,
            in_specs=[block],
            out_specs=block,
        )(x)

    y = array(8, 4)
    np.testing.assert_array_equal(pl.fuse(function)(y), function(y))
