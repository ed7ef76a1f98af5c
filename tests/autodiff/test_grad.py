"""Derivatives of kernel calls under every transformation, against plain `jnp`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import pallasite as pl
import pallasite.tpu as pltpu
from pallasite.autodiff.rules import tangent_p
from pallasite.autodiff.tangent import tangent_kernel
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import walk
from pallasite.ir.parse import parse_kernel
from pallasite.ir.verify import verify
from pallasite.primitive import call_p
from pallasite.sites import kernels_in

ROWS, ROW = (
    pl.BlockSpec((4, 8), lambda i: (i, 0)),
    pl.BlockSpec((1, 8), lambda i: (0, 0)),
)


def gate_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = jnp.tanh(x_ref[...] * w_ref[...]) * x_ref[...]


def gate(x, w, **options):
    return pl.pallas_call(
        gate_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=x.shape[0] // 4,
        in_specs=[ROWS, ROW],
        out_specs=ROWS,
        **options,
    )(x, w)


def gate_reference(x, w):
    return jnp.tanh(x * w) * x


RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(1, 8)), jnp.float32)
MANY = jnp.stack([X, X + 1, X * 2])


def loss(f):
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)))


def agree(got, want, tolerance=2e-4):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Each takes a function of (x, w) and gives something to compare.
TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(loss(f), (0, 1))(X, W),
    "grad of one operand": lambda f: jax.grad(loss(f), 1)(X, W),
    "value and grad": lambda f: jax.value_and_grad(loss(f))(X, W),
    "jvp": lambda f: jax.jvp(f, (X, W), (X, W)),
    "jvp of one operand": lambda f: jax.jvp(lambda w: f(X, w), (W,), (W,)),
    "linearize": lambda f: jax.linearize(f, X, W)[1](X, W),
    "jacfwd": lambda f: jax.jacfwd(f, 1)(X, W),
    "jacrev": lambda f: jax.jacrev(f, (0, 1))(X, W),
    "grad of grad": lambda f: jax.grad(
        lambda w: jnp.sum(jax.grad(loss(f), 1)(X, w) ** 2)
    )(W),
    "hessian": lambda f: jax.hessian(loss(f), 1)(X, W),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(loss(f), 1), 1)(X, W),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(loss(f), 1), 1)(X, W),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(MANY, W),
    "grad of vmap": lambda f: jax.grad(loss(jax.vmap(f, (0, None))), (0, 1))(MANY, W),
    "vmap of jvp": lambda f: jax.vmap(lambda t: jax.jvp(f, (X, W), (t, W)))(MANY),
    "grad of scan": lambda f: jax.grad(
        lambda x, w: jnp.sum(
            jax.lax.scan(lambda c, _: (f(c, w), jnp.sum(c)), x, None, length=3)[0]
        ),
        (0, 1),
    )(X, W),
    "grad of remat": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1))(X, W),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformation(name):
    transformed = TRANSFORMATIONS[name]
    got = jax.jit(lambda: transformed(gate))()
    agree(got, jax.jit(lambda: transformed(gate_reference))())


@pytest.mark.parametrize("mode", [True, pl.Checked()], ids=["emulated", "checked"])
def test_eager_in_other_modes(mode):
    run = functools.partial(gate, interpret=mode)
    for name in ("grad", "jvp"):
        agree(TRANSFORMATIONS[name](run), TRANSFORMATIONS[name](gate_reference))


def test_the_tangent_is_a_kernel_through_the_same_backend():
    def push(x, w):
        return jax.jvp(gate, (x, w), (x, w))

    found = {eqn.primitive for eqn in jax.make_jaxpr(push)(X, W).eqns}
    assert {call_p, tangent_p} <= found
    (kernel,) = kernels_in(gate, X, W)
    made = tangent_kernel(kernel, (True, False))
    assert made.kernel.name == "gate_kernel_jvp"
    assert (made.inputs, made.outputs) == ((0,), (0,))
    text = jax.jit(push).lower(X, W).as_text()
    assert text.count("custom_call @pallasite") >= 2, text


def test_what_does_not_move_has_no_tangent():
    def kernel(x_ref, n_ref, y_ref, m_ref):
        y_ref[...] = x_ref[...] * 2
        m_ref[...] = n_ref[...] + (x_ref[...] > 0).astype(jnp.int32)

    def run(x, n):
        return pl.pallas_call(kernel, out_shape=[x, n])(x, n)

    n = jnp.arange(64, dtype=jnp.int32).reshape(8, 8)
    _, (dy, dm) = jax.jvp(lambda x: run(x, n), (X,), (X,))
    agree(dy, 2 * X)
    assert dm.dtype == jax.dtypes.float0
    got = jax.grad(lambda x, n: jnp.sum(run(x, n)[0]), (0, 1), allow_int=True)(X, n)
    agree(got[0], jnp.full_like(X, 2.0))
    assert got[1].dtype == jax.dtypes.float0


def test_a_kernel_of_comparisons_has_no_derivative_to_compute():
    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...] > 0).astype(jnp.float32)

    def signs(x):
        return pl.pallas_call(kernel, out_shape=x)(x)

    closed = jax.make_jaxpr(lambda x: jax.jvp(signs, (x,), (x,)))(X)
    assert tangent_p not in {eqn.primitive for eqn in closed.eqns}
    agree(jax.grad(lambda x: jnp.sum(signs(x)))(X), jnp.zeros_like(X))


def test_stop_gradient_holds_in_a_kernel():
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x + jax.lax.stop_gradient(jnp.round(x) - x)

    def straight_through(x):
        return pl.pallas_call(kernel, out_shape=x)(x)

    agree(jax.jvp(straight_through, (X,), (X,)), (jnp.round(X), X))
    agree(jax.grad(lambda x: jnp.sum(straight_through(x)))(X), jnp.ones_like(X))


def test_known_tangents_are_left_out_of_a_transpose():
    def push(t):
        return jax.jvp(gate, (X, W), (t, jnp.zeros_like(W)))[1]

    (got,) = jax.linear_transpose(push, X)(X)
    agree(got, jax.vjp(lambda x: gate_reference(x, W), X)[1](X)[0])


def test_empty_arrays():
    def double(x):
        return pl.pallas_call(lambda x_ref, o_ref: None, out_shape=x)(x)

    empty = jnp.zeros((0, 8))
    assert jax.grad(lambda x: jnp.sum(double(x)))(empty).shape == (0, 8)


# --- functions with rules of their own ---


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


@own_jvp.defjvp
def _(primals, tangents):
    return own_jvp(*primals), 7 * tangents[0] * own_jvp(primals[0])


@jax.custom_vjp
def own_vjp(x, n):
    return n * jnp.sin(x)


own_vjp.defvjp(
    lambda x, n: (own_vjp(x, n), (x, n)), lambda kept, d: (5 * d * kept[0], None)
)

OWN_RULES = {
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,  # its body has no derivative at zero
    "custom_jvp": own_jvp,
    "in a loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, y: jax.nn.softplus(y) + jax.nn.relu(y) - jnp.log(2.0), x
    ),
    "custom_vjp": lambda x: own_vjp(x, 2),
}


def stored(by_rows, function):
    """A store by an array of indices that could be equal has no backward kernel."""

    def kernel(x_ref, o_ref):
        count = x_ref.shape[0]
        each = jnp.arange(count) * (count + 1) % count  # in fact 0, 1, 2, ...
        o_ref[each if by_rows else slice(None)] = function(x_ref[...])

    return lambda x: pl.pallas_call(kernel, out_shape=x)(x)


@pytest.mark.parametrize("tier", ["kernel", "functional"])
@pytest.mark.parametrize("name", OWN_RULES)
def test_rules_inside_a_kernel_hold(name, tier):
    function = OWN_RULES[name]
    run = stored(tier == "functional", function)
    x = X.at[0].set(0)
    report = pl.explain_grad(run)(x)
    generated = {"kernel", "xla"}  # by backends, or by XLA on whole arrays
    wanted = generated if tier == "kernel" else {tier}
    assert {o.tier for o in report.operands} <= wanted

    def derivatives(f):
        def slope(x):
            return jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)

        found = [jax.vjp(slope, x)[1](x)]
        if name != "custom_vjp":
            found.append(jax.jvp(f, (x,), (x,)))
        return slope(x), found

    got, want = (jax.jit(functools.partial(derivatives, f))() for f in (run, function))
    agree(got, want)


def test_tracing_a_rule_again_gives_the_same_kernel():
    run = stored(False, lambda x: own_jvp(x) + own_vjp(x, 3))
    first, second = kernels_in(run, X)[0], kernels_in(run, X)[0]
    assert first == second and first.text.count("= custom ") == 2
    verify(first)
    assert parse_kernel(first.text).text == first.text


# --- numerically, in double precision ---


def scaled_sum_kernel(scale_ref, x_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    column = pl.program_id(1) * 4 + jax.lax.broadcasted_iota(jnp.int32, (4, 4), 1)
    x = jnp.where(column < 6, x_ref[...], 0)
    acc_ref[...] += jnp.sum(jnp.exp(x) * scale_ref[0], axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == 1)
    def _():
        o_ref[...] = jnp.sqrt(acc_ref[...])


def scaled_sum(scale, x, **options):
    """Edge blocks, scratch carried along the grid, a scalar operand."""
    return pl.pallas_call(
        scaled_sum_kernel,
        out_shape=jax.ShapeDtypeStruct((6, 1), x.dtype),
        grid=(2, 2),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((4, 4), lambda i, j: (i, j)),
        ],
        out_specs=pl.BlockSpec((4, 1), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((4, 1), x.dtype)],
        **options,
    )(scale, x)


def newton_kernel(x_ref, o_ref):
    """A loop whose length depends on the data."""
    x = x_ref[...]

    def improve(y):
        return 0.5 * (y + x / y)

    o_ref[...] = jax.lax.while_loop(
        lambda y: jnp.max(jnp.abs(y * y - x)) > 1e-13, improve, x
    )


def newton(x):
    return pl.pallas_call(newton_kernel, out_shape=x)(x)


def test_numerical_derivatives_in_double_precision():
    with jax.enable_x64(True):
        x = jnp.asarray(RNG.normal(size=(6, 6)), jnp.float64)
        scale = jnp.asarray([1.3], jnp.float64)
        w = jnp.asarray(RNG.normal(size=(1, 8)), jnp.float64)
        wide = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float64)
        check_grads(jax.jit(gate), (wide, w), order=2, atol=1e-6, rtol=1e-6)
        check_grads(jax.jit(scaled_sum), (scale, x), order=1, atol=1e-6, rtol=1e-6)
        check_grads(jax.jit(newton), (jnp.abs(x) + 1,), order=1, atol=1e-5, rtol=1e-5)


# --- linear kernels ---


def product_kernel(a_ref, x_ref, o_ref):
    o_ref[...] = jnp.dot(a_ref[...], x_ref[...], preferred_element_type=jnp.float32)


def product(a, x):
    out = jax.ShapeDtypeStruct((a.shape[0], 1), jnp.float32)
    return pl.pallas_call(product_kernel, out_shape=out)(a, x[:, None])[:, 0]


def test_linear_transpose_serves_iterative_solvers():
    a = X @ X.T + 8 * jnp.eye(8)
    transposed = jax.linear_transpose(lambda x: product(X, x), X[0])
    agree(transposed(X[1])[0], X.T @ X[1])
    solution, _ = jax.scipy.sparse.linalg.cg(lambda x: product(a, x), X[0], tol=1e-6)
    agree(a @ solution, X[0])

    def energy(solve):
        return jax.grad(lambda b: jnp.sum(solve(b) ** 2))(X[0])

    got = energy(lambda b: jax.scipy.sparse.linalg.cg(lambda x: product(a, x), b)[0])
    agree(got, energy(lambda b: jnp.linalg.solve(a, b)))


# --- meshes ---


def sharded(f, mesh):
    specs = (P("d"), P())
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("d"))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.tile(X, (4, 1))

    def outside(f):
        return jax.jit(jax.grad(loss(sharded(f, mesh)), (0, 1)))(x, W)

    def inside(f):
        specs = (P("d"), P())
        each = jax.shard_map(
            jax.grad(loss(f), (0, 1)), mesh=mesh, in_specs=specs, out_specs=specs
        )
        return jax.jit(each)(x, W)

    def forward(f):
        return jax.jit(lambda x, w: jax.jvp(sharded(f, mesh), (x, w), (x, w)))(x, W)

    for transformed in (outside, inside, forward):
        agree(transformed(gate), transformed(gate_reference))


def test_linear_transpose_sums_over_the_devices_that_share_an_operand():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    rows = jnp.arange(256.0).reshape(32, 8)

    def pull_back(f):
        each = lambda a, d, x: jax.linear_transpose(lambda x: f(a, x), x)(d)[0]
        specs = (P("d"), P("d"), P())
        mapped = jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.jit(mapped)(rows, rows[:, 0], rows[0])

    agree(pull_back(product), pull_back(jnp.dot))


def test_second_derivatives_in_a_checked_shard_map():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.tile(X, (4, 1))

    def second(f):
        slope = jax.grad(loss(sharded(f, mesh)))
        return jax.jit(lambda x: jax.jvp(slope, (x, W), (x, W))[1])(x)

    agree(second(gate), second(gate_reference))

    def without_backward_kernel(x, w):
        return stored(True, jnp.sin)(gate(x, w))

    with pytest.raises(UnsupportedError, match="check_vma=False"):
        second(without_backward_kernel)


# --- derivatives of the author's own ---


@jax.custom_vjp
def own(x, w):
    return gate(x, w)


def own_forward(x, w):
    return gate(x, w), (x, w)


def own_backward_kernel(x_ref, w_ref, d_ref, dx_ref):
    x, w, d = x_ref[...], w_ref[...], d_ref[...]
    t = jnp.tanh(x * w)
    dx_ref[...] = d * (t + x * (1 - t * t) * w)


def own_backward(kept, d):
    """A kernel for x; the automatic rule for w."""
    x, w = kept
    dx = pl.pallas_call(
        own_backward_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=x.shape[0] // 4,
        in_specs=[ROWS, ROW, ROWS],
        out_specs=ROWS,
    )(x, w, d)
    (dw,) = jax.vjp(lambda w: gate(x, w), w)[1](d)
    return dx, dw


own.defvjp(own_forward, own_backward)


def test_custom_vjp_mixes_with_the_automatic_rule():
    def twice(first, second):
        return lambda x, w: second(first(x, w), w)

    for name in ("grad", "vmap of grad", "grad of scan", "grad of grad"):
        transformed = TRANSFORMATIONS[name]
        got = jax.jit(lambda t=transformed: t(twice(own, gate)))()
        plain = twice(gate_reference, gate_reference)
        agree(got, jax.jit(lambda t=transformed, f=plain: t(f))(), 1e-3)


def test_linear_solves_have_derivatives():
    a = jnp.array([[4.0, 1.0, 0.5], [0.3, 3.0, 0.2], [1.0, 0.1, 5.0]])
    b = jnp.array([1.0, 2.0, -1.0])

    def solve_kernel(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.linalg.solve(a_ref[...], b_ref[...])

    solve = lambda a, b: pl.pallas_call(solve_kernel, out_shape=b)(a, b)
    loss = lambda solve: lambda a, b: jnp.sum(jnp.sin(solve(a, b)))
    got = jax.grad(loss(solve), (0, 1))(a, b)
    want = jax.grad(loss(jnp.linalg.solve), (0, 1))(a, b)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), got, want)
    moves = (a + 1, b - 1)
    np.testing.assert_allclose(
        jax.jvp(solve, (a, b), moves)[1],
        jax.jvp(jnp.linalg.solve, (a, b), moves)[1],
        atol=1e-6,
    )


def without_transpose(a, b):
    """A solve that says nothing of the transposed equation."""
    inverse = jax.lax.stop_gradient(jnp.linalg.inv(a))
    return jax.lax.custom_linear_solve(lambda x: a @ x, b, lambda _, b: inverse @ b)


def with_report(a, b):
    """A solve whose solver reports the residual beside the solution."""
    inverse = jax.lax.stop_gradient(jnp.linalg.inv(a))

    def run(matvec, b):
        x = inverse @ b
        return x, jnp.abs(matvec(x) - b).max()

    back = lambda vecmat, c: (inverse.T @ c, jnp.float32(0))
    return jax.lax.custom_linear_solve(lambda x: a @ x, b, run, back, False, True)[0]


SOLVES = {
    "solve": jnp.linalg.solve,
    "inv": lambda a, b: jnp.linalg.inv(a) @ b,
    "several": lambda a, b: jnp.linalg.solve(jnp.stack([a, a.T]), b).sum(0),
    "definite": lambda a, b: jax.scipy.linalg.solve(a @ a.T, b, assume_a="pos"),
    "no transpose": without_transpose,
    "report": with_report,
}
TWICE = {
    "grad of grad": lambda f: (
        lambda a: jax.grad(lambda a: jnp.sum(jax.grad(f)(a) ** 2))(a)
    ),
    "jvp of grad": lambda f: lambda a: jax.jvp(jax.grad(f), (a,), (a.T,))[1],
    "grad of jvp": lambda f: jax.grad(lambda a: jax.jvp(f, (a,), (a.T,))[1]),
    "jvp of jvp": lambda f: (
        lambda a: jax.jvp(lambda a: jax.jvp(f, (a,), (a.T,))[1], (a,), (a,))[1]
    ),
}


@pytest.mark.parametrize("twice", TWICE)
@pytest.mark.parametrize("solve", SOLVES)
def test_second_derivatives_of_linear_solves(solve, twice):
    """The solver knows the matrix by its factors, which have no derivative: that of a
    derivative in reverse must be of the transposed equation."""

    def kernel(a_ref, b_ref, o_ref):
        o_ref[...] = SOLVES[solve](a_ref[...], b_ref[...])

    a, b = X[:3, :3] + 4 * jnp.eye(3), X[:3, 4:6]
    run = pl.pallas_call(kernel, out_shape=b, interpret=True)
    plain = SOLVES["solve"] if solve == "no transpose" else SOLVES[solve]
    size = lambda solve: lambda a: jnp.sum(solve(a, b) ** 2)
    got, want = (jax.jit(TWICE[twice](size(f)))(a) for f in (run, plain))
    agree(got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tangents_of_matmuls_are_multiplied_in_the_operands_types(dtype):
    """Widened, they would not run on a GPU's matrix units, and take twice the room."""

    def multiply(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    x, y = jnp.ones((8, 16), dtype), jnp.full((16, 4), 2, dtype)
    out = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    product = pl.pallas_call(multiply, out_shape=out)
    push = lambda x, y: jax.jvp(product, (x, y), (3 * x, y))
    made = tangent_kernel(kernels_in(product, x, y)[0], (True, True)).kernel
    dots = [op for op in walk(made.body) if op.name == "dot"]
    assert {v.tile.dtype.numpy_name for op in dots for v in op.operands} == {dtype}
    np.testing.assert_allclose(push(x, y)[1], jnp.full((8, 4), 16 * (3 * 2 + 2)))


@pytest.mark.parametrize("first", ["load", "store"])
def test_operands_that_are_stored_to(first):
    """What is stored reaches the programs that see the block later, and no result."""

    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[...]
        y = y_ref[...] if first == "load" else 0.0
        y_ref[1] = jnp.sin(x[0])
        o_ref[...] = x * (y_ref[...] if first == "store" else y)

    def call(x, y):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=2,
            in_specs=[ROWS, pl.BlockSpec((4, 8), lambda i: (0, 0))],
            out_specs=ROWS,
        )(x, y)

    def reference(x, y):
        out = []
        for block in jnp.split(x, 2):
            after = y.at[1].set(jnp.sin(block[0]))
            out.append(block * (y if first == "load" else after))
            y = after
        return jnp.concatenate(out)

    gradients = (jax.grad(loss(f), (0, 1))(X, X[4:] * 2) for f in (call, reference))
    agree(*gradients)


@pytest.mark.parametrize("bounded", [0, 1])
def test_slices_of_bounded_length(bounded):
    """What a program sees of such a block follows from two numbers, not one."""
    starts, lengths, most = [0, 3, 4, 9], [3, 1, 0, 2], (4, 4)
    shape = [pl.BoundedSlice(4) if d == bounded else 4 for d in range(2)]

    def kernel(start_ref, length_ref, x_ref, o_ref):
        o_ref[...] = jnp.sin(x_ref[...]).sum(1 - bounded, keepdims=True) * x_ref[...]

    def part(i, starts_ref, lengths_ref):
        place = pl.ds(starts_ref[i], lengths_ref[i])
        return (place, i % 2) if bounded == 0 else (i % 2, place)

    def sums(x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=4,
            in_specs=[pl.BlockSpec(tuple(shape), part, fill=0.0)],
            out_specs=pl.BlockSpec((None, 4, 4), lambda i, *_: (i, 0, 0)),
        )
        out = jax.ShapeDtypeStruct((4, *most), x.dtype)
        return pl.pallas_call(kernel, out, grid_spec=spec)(
            jnp.array(starts), jnp.array(lengths), x
        )

    def reference(x):
        x = x if bounded == 0 else x.T
        found = []
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows = x[start : start + length, 4 * (i % 2) : 4 * (i % 2) + 4]
            block = jnp.pad(rows, ((0, 4 - len(rows)), (0, 4 - rows.shape[1])))
            block = jnp.sin(block).sum(1, keepdims=True) * block
            found.append(block if bounded == 0 else block.T)
        return jnp.stack(found)

    x = jnp.asarray(RNG.normal(size=(11, 7) if bounded == 0 else (7, 11)), jnp.float32)
    agree(sums(x), reference(x))
    got, want = (
        jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(x) for f in (sums, reference)
    )
    agree(got, want)
