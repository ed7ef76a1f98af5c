"""Derivatives' kernels that only map blocks are XLA's operations on whole arrays."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.sites import calls_in

F32, BF16 = jnp.float32, jnp.bfloat16
SHAPES = [((30, 200), (8, 64)), ((32, 128), (32, 64)), ((5, 3), (8, 128))]


def gate(x, y, block=(8, 64), **options):
    """silu(x) * y, whose second operand is given with its dimensions swapped."""

    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[...].astype(F32)
        o_ref[...] = (x * jax.nn.sigmoid(x) * y_ref[...].T).astype(o_ref.dtype)

    rows, columns = block
    grid = tuple(pl.cdiv(n, b) for n, b in zip(x.shape, block, strict=True))
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    turned = pl.BlockSpec((columns, rows), lambda i, j: (j, i))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        kernel, out, grid=grid, in_specs=[spec, turned], out_specs=spec, **options
    )(x, y)


def operands(shape, dtype=F32, lead=()):
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(*lead, *s)) for s in (shape, shape[::-1])]
    return [jnp.asarray(x, dtype) for x in made]


def gradient(**options):
    def loss(x, y):
        # What makes the cotangent is an operation of its own.
        return jnp.sin(gate(x, y, **options).astype(F32)).sum()

    return jax.grad(loss, (0, 1))


def close(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, tolerance
        )


def calls_of(function, *args):
    return re.findall(
        r"custom_call @(\S+?)\(", jax.jit(function).lower(*args).as_text()
    )


@pytest.mark.parametrize(("shape", "block"), SHAPES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_are_those_of_the_emulation(shape, block, dtype):
    args = operands(shape, dtype)
    ours = jax.jit(gradient(block=block))
    tolerance = 1e-5 if dtype == F32 else 2e-2
    close(ours(*args), gradient(block=block, interpret=True)(*args), tolerance)


def test_only_the_authors_kernel_is_called():
    args = operands((32, 128))
    forward = calls_of(gate, *args)
    assert len(forward) == 1
    assert calls_of(lambda x, y: jax.vjp(gate, x, y)[1](x), *args) == []
    # One who names a backend means it, also for derivatives.
    named = lambda x, y: gate(x, y, backend="cpu")
    assert len(calls_of(lambda x, y: jax.vjp(named, x, y)[1](x), *args)) == 1
    with config.override(backend="cpu"):
        assert len(calls_of(lambda x, y: jax.vjp(gate, x, y)[1](x), *args)) == 1


def test_tangents_are_too():
    args = operands((30, 200))
    push = lambda x, y: jax.jvp(gate, (x, y), (y.T, x.T))[1]
    assert calls_of(push, *args) == []
    x, y = args
    emulated = lambda x, y: gate(x, y, interpret=True)
    close(jax.jit(push)(x, y), jax.jvp(emulated, (x, y), (y.T, x.T))[1])


def test_mapped_and_differentiated_again():
    args = operands((30, 200), lead=(3,))
    close(
        jax.vmap(gradient())(*args),
        jax.vmap(gradient(interpret=True))(*args),
    )
    pull = lambda x, y: jax.vjp(gate, x, y)[1](x)
    assert calls_of(jax.vmap(pull), *args) == []
    x, y = operands((5, 3))
    again = lambda **options: jax.grad(
        lambda x: sum((g**2).sum() for g in gradient(**options)(x, y))
    )
    close(jax.jit(again())(x), again(interpret=True)(x), 1e-4)


def test_sharded():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    x, y = operands((32, 128))
    want = gradient(interpret=True)(x, y)
    specs = P("d"), P(None, "d")
    mapped = jax.shard_map(gradient(), mesh=mesh, in_specs=specs, out_specs=specs)
    close(jax.jit(mapped)(x, y), want)
    placed = [
        jax.device_put(a, jax.sharding.NamedSharding(mesh, s))
        for a, s in zip((x, y), specs, strict=True)
    ]
    close(jax.jit(gradient())(*placed), want)


def test_reports_say_so():
    x, y = operands((512, 512))
    report = pl.explain_grad(gate)(x, y)
    assert str(report).splitlines()[1:] == [
        "kernel  x_ref    xla   kernel_d_x_d_y over i0 x i1",
        "kernel  y_ref    xla   kernel_d_x_d_y over i0 x i1",
    ]
    named = pl.explain_grad(lambda x, y: gate(x, y, backend="cpu"))(x, y)
    assert {row.tier for row in named.operands} == {"kernel"}
    back = lambda x, y: jax.vjp(gate, x, y)[1](x)
    (*_, made) = pl.explain(back, measure=False)(x, y).kernels
    assert made.backend == "xla" and made.ok
    assert "a derivative's kernel that only maps blocks" in str(made)


def test_rows_that_are_reduced_stay_a_kernel():
    def softmax(x_ref, o_ref):
        e = jnp.exp(x_ref[...] - x_ref[...].max(axis=1, keepdims=True))
        o_ref[...] = e / e.sum(axis=1, keepdims=True)

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct((64, 128), F32)
    call = pl.pallas_call(softmax, out, grid=(8,), in_specs=[spec], out_specs=spec)
    (row,) = pl.explain_grad(call)(jnp.ones((64, 128))).operands
    assert row.tier == "kernel"


def test_sums_for_a_gpus_xla_are_in_one_part():
    """XLA would add up the parts of a kernel in small rows."""
    spec = pl.BlockSpec((64, 128), lambda i: (i, 0))
    rates = pl.BlockSpec((2,), lambda i: (0,))

    def update(x, h, **options):
        def kernel(x_ref, h_ref, o_ref):
            o_ref[...] = jnp.sin(x_ref[...]) * h_ref[0] + x_ref[...] * h_ref[1]

        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, F32),
            grid=(x.shape[0] // 64,),
            in_specs=[spec, rates],
            out_specs=spec,
            **options,
        )(x, h)

    def asked(**options):
        loss = lambda x, h: jnp.sin(update(x, h, **options)).sum()
        return jax.grad(loss, (0, 1))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 128)), F32)
    h = jnp.float32([0.5, 2])
    with config.override(target="h200"):
        sums = [
            calls_in(f, x, h)[-1].kernel.outputs[-1].ref.shape
            for f in (asked(), asked(backend="cuda"), asked(interpret=True))
        ]
        made = jax.jit(asked())(x, h)
        assert {o.tier for o in pl.explain_grad(update)(x, h).operands} == {"xla"}
    assert sums[0] == (2,)
    assert sums[1] == sums[2] and len(sums[1]) == 2
    plain = lambda x, h: jnp.sin(jnp.sin(x) * h[0] + x * h[1]).sum()
    close(made, jax.grad(plain, (0, 1))(x, h), 1e-4)
