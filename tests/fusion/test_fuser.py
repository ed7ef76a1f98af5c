"""`pallasite.fuser`: blocks through functions, and kernels that take functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
import pallasite.tpu as pltpu
from pallasite import fuser


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = array(64, 48)
ROW, COLUMN = array(48, seed=1), array(64, 1, seed=2)
STACK = array(3, 4, 64, 48, seed=3)
OTHER = array(64, 48, seed=6)
ONE, TWO = jnp.int32(1), jnp.int32(2)

# a function of nothing, and the block of its result
PULLED = {
    "constant": (lambda: X, (16, 16)),
    "elementwise": (lambda: jnp.tanh(X) * 2 + ROW, (16, 16)),
    "row and column": (lambda: X * COLUMN + ROW, (16, 24)),
    "cast": (lambda: X.astype(jnp.bfloat16), (32, 16)),
    "transpose": (lambda: X.T, (16, 32)),
    "transpose of leading": (lambda: STACK.transpose(1, 0, 2, 3), (None, 1, 16, 16)),
    "slice": (lambda: X[16:48, 16:], (16, 16)),
    "unaligned slice": (lambda: X[5:37, 3:], (16, 15)),
    "row of a stack": (lambda: STACK[1, 2], (16, 16)),
    "dynamic row": (lambda: STACK[ONE, TWO], (16, 16)),
    "dynamic slice": (
        lambda: jax.lax.dynamic_slice(X, (TWO, ONE), (32, 32)),
        (16, 16),
    ),
    "iota": (lambda: jax.lax.broadcasted_iota(jnp.int32, (64, 48), 1), (16, 16)),
    "a number": (lambda: jnp.full((64, 48), 1.5), (16, 16)),
    "a scalar": (lambda: jnp.full((64, 48), ONE), (16, 16)),
    "concatenate": (lambda: jnp.concatenate([X, OTHER]), (16, 16)),
    "concatenate whole": (lambda: jnp.concatenate([X, OTHER], 1), (16, 96)),
    "merge": (lambda: STACK.reshape(12, 64, 48), (1, 16, 16)),
    "merge whole": (lambda: STACK[0].reshape(256, 48), (128, 16)),
    "merge parts": (lambda: STACK[0].reshape(256, 48), (16, 16)),
    "split": (lambda: X.reshape(64, 3, 16), (16, 1, 16)),
    "split rows": (lambda: X.reshape(4, 16, 48), (None, 8, 16)),
    "squeeze": (lambda: COLUMN[:, 0], (16,)),
    "expand": (lambda: ROW[None, :, None], (None, 16, 1)),
    "sum": (lambda: STACK.sum((1, 3)), (1, 16)),
    "max": (lambda: (X * 2).max(0), (16,)),
    "select": (lambda: jnp.where(X > 0, X, ROW), (16, 16)),
    "function with a derivative": (lambda: jax.nn.relu(X), (16, 16)),
    "inner jit": (lambda: jax.jit(jnp.sin)(X), (16, 16)),
}


def block_of(x: np.ndarray, shape, index) -> np.ndarray:
    parts = []
    for size, i in zip(shape, index, strict=True):
        parts.append(i if size is None else slice(i * size, (i + 1) * size))
    return x[tuple(parts)]


def shown(x, spec, index) -> jax.Array:
    """The block of a value that a spec shows at an index."""
    parts = []
    for size, i in zip(spec.block_shape, index, strict=True):
        i = int(i)
        if isinstance(size, pl.Element):
            parts.append(slice(i, i + size.block_size))
        else:
            parts.append(i if size is None else slice(i * size, (i + 1) * size))
    return x[tuple(parts)]


@pytest.mark.parametrize("name", PULLED)
def test_blocks_of_a_result_follow_from_blocks_of_values(name):
    f, shape = PULLED[name]
    expected = np.asarray(f())
    of_values, values, scalars = fuser.get_fusion_values(f)
    spec = pl.BlockSpec(shape, lambda *ids: ids[: len(shape)])
    kernel_fn, (specs,), _ = fuser.pull_block_spec(
        of_values,
        spec,
        scalar_prefetch_handler=fuser.make_scalar_prefetch_handler(0),
        grid_len=len(shape),
    )(values)
    prefetch = (tuple(s[None] for s in scalars),) if scalars else ((),)
    counts = [-(-n // (s or 1)) for n, s in zip(expected.shape, shape, strict=True)]
    for step in ([0] * len(shape), [n - 1 for n in counts], [n // 2 for n in counts]):
        blocks = [
            v if s is pl.no_block_spec else shown(v, s, s.index_map(*step, *prefetch))
            for v, s in zip(values, specs, strict=True)
        ]
        made = kernel_fn(tuple(step), prefetch, tuple(blocks))
        np.testing.assert_allclose(made, block_of(expected, shape, step), 1e-5, 1e-5)


PUSHED = {
    "elementwise": (lambda x: jnp.exp(x) + 1, (16, 16), (16, 16), (1, 2)),
    "bias": (lambda x: jax.nn.gelu(x + ROW), (16, 16), (16, 16), (1, 2)),
    "transpose": (lambda x: x.T, (16, 24), (24, 16), (2, 1)),
    "split": (lambda x: x.reshape(4, 16, 48), (32, 16), (2, 16, 16), (1, 0, 2)),
    "expand": (lambda x: x[None], (16, 16), (1, 16, 16), (0, 1, 2)),
    "row sums": (lambda x: x.sum(1), (16, 48), (16,), (1,)),
}


@pytest.mark.parametrize("name", PUSHED)
def test_blocks_of_an_argument_give_blocks_of_the_result(name):
    f, block, expected, index = PUSHED[name]
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    out, type_ = fuser.push_block_spec(f, spec, return_out_type=True)(X)
    assert tuple(out.block_shape) == expected
    assert tuple(out.index_map(1, 2)) == index
    assert type_.shape == f(X).shape


def test_what_does_not_pass_is_refused():
    def pull(f, block):
        spec = pl.BlockSpec(block, lambda i, j: (i, j))
        return fuser.pull_block_spec(f, spec)(X)

    with pytest.raises(NotImplementedError, match="not contiguous"):
        pull(lambda x: x.reshape(48, 64), (16, 16))
    with pytest.raises(NotImplementedError, match=r"blocks do not pass through sort"):
        pull(lambda x: jnp.sort(x, 0), (16, 16))
    with pytest.raises(ValueError, match="different blocks"):
        pull(lambda x: x[:48] + x[:48].T, (16, 16))
    with pytest.raises(NotImplementedError, match="a part of the reduced dimensions"):
        spec = pl.BlockSpec((16, 16), lambda i, j: (i, j))
        fuser.push_block_spec(lambda x: x.sum(1), spec)(X)
    with pytest.raises(ValueError, match="transpose is not allowed"):
        fuser.evaluate(lambda x: x.T, allow_transpose=False)(X)


# --- a kernel that takes functions ---


def matmul_kernel(*refs, fns):
    (x_sp, y_sp, z_sp), (x_refs, y_refs, z_refs), o_ref, acc_ref = (
        refs[:3],
        refs[3:6],
        refs[6],
        refs[7],
    )
    x_fn, y_fn, z_fn = fns
    ids = tuple(pl.program_id(n) for n in range(3))
    prefetch = x_sp, y_sp, z_sp
    get = lambda tree: jax.tree.map(lambda ref: ref[...], tree)

    @pl.when(ids[2] == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    x, y = x_fn(ids, prefetch, get(x_refs)), y_fn(ids, prefetch, get(y_refs))
    acc_ref[...] += jnp.dot(x, y, preferred_element_type=jnp.float32)

    @pl.when(ids[2] == pl.num_programs(2) - 1)
    def _():
        made = z_fn(ids, prefetch, get(z_refs), acc_ref[...])
        jax.tree.map(lambda ref, x: ref.set(x), o_ref, made)


def matmul_of_fusions(x, y, z, *, block=16, fused=None):
    (m, k), (_, n) = x.shape, y.shape
    if fused is not None:
        fused.append(z is not None)
    z = z or (lambda acc: acc)
    z_type = jax.ShapeDtypeStruct((m, n), jnp.float32)
    (x_fn, xs, x_sp), (y_fn, ys, y_sp) = map(fuser.get_fusion_values, (x, y))
    z_fn, zs, z_sp, _ = fuser.get_stateful_output_fusion_values(z, z_type)
    specs = {
        "x": pl.BlockSpec((block, block), lambda i, j, k, *_: (i, k)),
        "y": pl.BlockSpec((block, block), lambda i, j, k, *_: (k, j)),
        "z": pl.BlockSpec((block, block), lambda i, j, k, *_: (i, j)),
    }
    pick = fuser.make_scalar_prefetch_handler
    pull = functools.partial(fuser.pull_block_spec, grid_len=3)
    x_fn, (x_specs,), _ = pull(x_fn, specs["x"], scalar_prefetch_handler=pick(0))(xs)
    y_fn, (y_specs,), _ = pull(y_fn, specs["y"], scalar_prefetch_handler=pick(1))(ys)
    z_fn, z_specs, _, out_type, out_spec = fuser.push_pull_block_spec(
        z_fn, specs["z"], scalar_prefetch_handler=pick(2), grid_len=3
    )(zs, z_type)
    prefetch = jax.tree.map(lambda s: s[None], (x_sp, y_sp, z_sp))
    (out,) = pl.pallas_call(
        functools.partial(matmul_kernel, fns=(x_fn, y_fn, z_fn)),
        out_shape=[out_type],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(m // block, n // block, k // block),
            in_specs=[x_specs, y_specs, z_specs],
            out_specs=[out_spec],
            scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
        ),
    )(*prefetch, xs, ys, zs)
    return out


def test_functions_around_a_fusible_run_in_its_kernel():
    w, b, layer = array(3, 48, 32, seed=4), array(32, seed=5), jnp.int32(2)
    seen: list[bool] = []
    matmul = fuser.fusible(functools.partial(matmul_of_fusions, fused=seen))

    def f(x, w, b, layer):
        y = matmul(x * 0.5, w[layer])
        return jax.nn.relu(y + b) + 1

    expected = f(X, w, b, layer)
    np.testing.assert_allclose(expected, jax.nn.relu(X * 0.5 @ w[2] + b) + 1, 1e-5)
    seen.clear()
    fused = fuser.fuse(f)
    np.testing.assert_allclose(fused(X, w, b, layer), expected, 1e-5, 1e-5)
    assert seen[-1] is True
    made = jax.make_jaxpr(fused)(X, w, b, layer)
    names = {eqn.primitive.name for eqn in made.eqns}
    assert "pallasite_call" in names and not names & {"dot_general", "mul", "max"}
    assert fuser.fuse(lambda x, w: matmul(x, w))(X, w[0]).shape == (64, 32)
    assert seen[-1] is False


@pytest.mark.parametrize(
    "static", [dict(static_argnums=2), dict(static_argnames=("how",))]
)
def test_static_arguments_are_what_they_are(static):
    matmul = fuser.fusible(functools.partial(matmul_of_fusions, fused=[]))
    w = array(48, 32, seed=4)

    @functools.partial(fuser.fuse, **static)
    def f(x, w, how):
        assert how == "relu"
        return jax.nn.relu(matmul(x, w))

    for got in (f(X, w, "relu"), f(X, w=w, how="relu")):
        np.testing.assert_allclose(got, jax.nn.relu(X @ w), 1e-5, 1e-5)


def test_a_custom_fusion_passes_blocks_by_its_own_rules():
    @fuser.custom_fusion
    def double(x):
        return 2 * x

    @double.def_pull_block_spec
    def _(blocks):
        return [blocks[0]]

    @double.def_push_block_spec
    def _(specs):
        return specs

    @double.def_eval_rule
    def _(ctx, x):
        assert ctx.out_block_specs[0].block_shape == (16, 16)
        return [x + x]

    matmul = fuser.fusible(matmul_of_fusions)
    f = lambda x, y: double(matmul(double(x), y))
    np.testing.assert_allclose(fuser.fuse(f)(X, X.T), 4 * X @ X.T, 1e-5, 1e-4)
    np.testing.assert_allclose(jax.jit(f)(X, X.T), 4 * X @ X.T, 1e-5, 1e-4)
    gradient = jax.grad(lambda x: f(x, X.T).sum())(X)
    np.testing.assert_allclose(
        gradient, jax.grad(lambda x: (4 * x @ X.T).sum())(X), 1e-4
    )

    @double.def_pallas_impl
    def _(x):
        return jnp.add(x, x)

    def kernel(x_ref, o_ref):
        o_ref[...] = double(x_ref[...])

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype))
    np.testing.assert_array_equal(call(X), 2 * X)
    assert "mul" not in pl.lower(call)(X).kernels[0].text
