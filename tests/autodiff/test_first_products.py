"""Products that blocks of columns share are kernels of their own in gradients."""

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite.autodiff import backward
from pallasite.ir.nodes import walk
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine

F32 = jnp.float32
BLOCK, THIN = 32, 16
GPU = Machine.usual(GPUS["h200"])


def low_rank(x, w, a, b):
    """`x @ w + (x @ a) @ b`, both inner sums along the grid."""

    def kernel(x_ref, w_ref, a_ref, b_ref, o_ref, acc_ref, low_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)
            low_ref[...] = jnp.zeros_like(low_ref)

        acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)
        low_ref[...] += jnp.dot(x_ref[...], a_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            low = low_ref[...].astype(b_ref.dtype)
            y = acc_ref[...] + jnp.dot(low, b_ref[...], preferred_element_type=F32)
            o_ref[...] = y.astype(o_ref.dtype)

    (m, k), n = x.shape, w.shape[1]
    square = lambda f: pl.BlockSpec((BLOCK, BLOCK), f)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(pl.cdiv(m, BLOCK), n // BLOCK, k // BLOCK),
        in_specs=[
            square(lambda i, j, k: (i, k)),
            square(lambda i, j, k: (k, j)),
            pl.BlockSpec((BLOCK, THIN), lambda i, j, k: (k, 0)),
            pl.BlockSpec((THIN, BLOCK), lambda i, j, k: (0, j)),
        ],
        out_specs=square(lambda i, j, k: (i, j)),
        scratch_shapes=[
            pltpu.VMEM((BLOCK, BLOCK), F32),
            pltpu.VMEM((BLOCK, THIN), F32),
        ],
    )(x, w, a, b)


def plain(x, w, a, b):
    return x @ w + (x @ a) @ b


def operands(m: int, k: int, n: int):
    shapes = (m, k), (k, n), (k, THIN), (THIN, n)
    keys = jax.random.split(jax.random.key(0), 4)
    return [0.3 * jax.random.normal(q, s) for q, s in zip(keys, shapes, strict=True)]


def composed(function, wanted, *arrays):
    (call,) = calls_in(function, *arrays)
    made = backward._plan(call.kernel, wanted, (True,), GPU)
    return call, backward._composed(made, call.kernel, wanted, (True,))


def test_each_product_is_computed_once(monkeypatch):
    rows = 50
    arrays = operands(rows, 64, 96)
    wanted = (True,) * 4
    call, made = composed(low_rank, wanted, *arrays)
    dots = [sum(o.name == "dot" for o in walk(s.kernel.body)) for s in made.steps]
    assert sum(dots) == 7  # the shared one, and two for each of three products
    monkeypatch.setattr(backward, "plan", lambda *_: made)
    monkeypatch.setattr(backward, "keeping_plan", lambda *_: None)
    g = jax.random.normal(jax.random.key(5), (rows, 96))
    got = backward.cotangents(call, arrays, [g], wanted)
    want = jax.vjp(plain, *arrays)[1](g)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_only_wanted_cotangents_have_kernels():
    arrays = operands(64, 64, 96)
    _, made = composed(low_rank, (False, True, False, True), *arrays)
    assert set(made.targets) == {1, 3}
    assert len(made.steps) == 3


def test_products_of_all_programs_stay_in_one_kernel():
    """Scores are the first operand of the second product, and each is its own."""

    def kernel(q_ref, k_ref, v_ref, o_ref):
        s = jnp.dot(q_ref[...], k_ref[...].T)
        o_ref[...] = jnp.dot(s, v_ref[...])

    def call(q, k, v):
        rows = pl.BlockSpec((BLOCK, 64), lambda i: (i, 0))
        whole = pl.BlockSpec((64, 64), lambda i: (0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(q.shape, F32),
            grid=(q.shape[0] // BLOCK,),
            in_specs=[rows, whole, whole],
            out_specs=rows,
        )(q, k, v)

    arrays = [jnp.ones((n, 64)) for n in (128, 64, 64)]
    assert composed(call, (True,) * 3, *arrays)[1] is None


def test_it_is_chosen_where_it_is_faster():
    shapes = (4096, 4096), (4096, 4096), (4096, THIN), (THIN, 4096)
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    with config.override(target="gpu:h200"):
        report = pl.explain_grad(low_rank)(*structs)
    assert len(report.kernels) == 6
    assert "instead of" in str(report)
