"""The emulation means the same under every setting of JAX that changes `jax.numpy`.

Each elementwise row, and a kernel of each kind of op, is staged under strict dtype
promotion, with rank promotion refused, with 64 bits and with NaN checks on.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.emulation.emulate import emulate
from pallasite.ir.opdef import OpDef
from pallasite.ir.types import DTYPES, DType
from tests.fuzz.choices import Seeded
from tests.fuzz.generate import FAMILIES, random_kernel
from tests.ops.sampling import (
    FLOAT_NAMES,
    INT_NAMES,
    attr_choices,
    lowered_kernel,
    result_dtype,
    rows_with,
    samples,
)

S = jax.ShapeDtypeStruct
SETTINGS = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "64 bits": lambda: jax.enable_x64(True),
    "NaN checks": lambda: jax.debug_nans(True),
}
TYPED = ("select_n", "cast", "bitcast")
ROWS = [row for row in rows_with("meaning") if row.name not in TYPED]


@contextlib.contextmanager
def strictest():
    """Every setting that refuses code at once."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def types_of(row: OpDef) -> list[DType]:
    names = [*FLOAT_NAMES, *INT_NAMES, "bool"]
    if row.name == "pow":  # JAX has no integer base
        names = FLOAT_NAMES
    return [DTYPES[n] for n in names if DTYPES[n] in row.dtypes]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_under_strict_promotion(row: OpDef):
    for dtype in types_of(row):
        for attrs in attr_choices(row.name, dtype):
            operands = samples(row, dtype, 32)
            kernel = lowered_kernel(
                lambda b, *tiles, **kw: b.op(row.name, *tiles, **kw), operands, attrs
            )
            with jax.enable_x64(True), strictest():
                (got,) = jax.eval_shape(emulate(kernel), *operands)
            assert got.dtype == result_dtype(row, dtype, len(operands), attrs).np


NARROW = ("f8e4m3fn", "f8e5m2", "bf16", "f16", "f32", "i8", "u8", "i32")


def test_dots_of_all_pairs_under_strict_promotion():
    x = {name: np.ones((8, 16)).astype(DTYPES[name].np) for name in NARROW}
    for a in NARROW:
        for b in NARROW:
            if DTYPES[a].is_float != DTYPES[b].is_float:
                continue
            out = DTYPES["f32" if DTYPES[a].is_float else "i32"]
            dims = dict(contract=((1,), (1,)), batch=((), ()), precision=None)
            kernel = lowered_kernel(
                lambda b, lhs, rhs, **kw: b.op("dot", lhs, rhs, **kw),
                [x[a], x[b]],
                {**dims, "dtype": out},
            )
            with strictest():
                (got,) = emulate(kernel)(x[a], x[b])
            np.testing.assert_array_equal(got, np.full((8, 8), 16))
            assert got.dtype == out.np


def everything(x_ref, h_ref, i_ref, o_ref, n_ref, total, sem):
    """Most kinds of ops, on blocks that hang over the edge."""
    i = pl.program_id(0)

    @pl.when(i == 0)
    def _():
        total[...] = jnp.zeros(total.shape, total.dtype)

    pltpu.make_async_copy(i_ref, n_ref, sem).start()
    pltpu.make_async_copy(i_ref, n_ref, sem).wait()
    rows = lax.broadcasted_iota(jnp.int32, (4, 8), 0) + i * jnp.int32(4)
    x = jnp.where(rows < jnp.int32(10), x_ref[...], jnp.zeros((4, 8), jnp.float32))
    product = lax.dot_general(
        h_ref[...], h_ref[...], (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    total[...] += x
    picked = x_ref[jnp.minimum(i_ref[...], jnp.int32(1))]
    masked = pl.load(
        x_ref, (pl.ds(0, 4), pl.ds(0, 8)), mask=rows < jnp.int32(10), other=1.0
    )
    added = lax.fori_loop(
        0, i + jnp.int32(1), lambda n, c: c + total[...], jnp.zeros((4, 8), jnp.float32)
    )
    ordered = lax.cumsum(lax.sort(x, dimension=1), axis=1)
    part = lax.dynamic_slice(ordered, (i, i), (1, 8))
    o_ref[...] = (
        x
        + masked
        + added
        + ordered
        + lax.broadcast_in_dim(part[0] + product[0], (4, 8), (1,))
    )
    o_ref[i_ref[...]] = jnp.where(rows[:2] < jnp.int32(10), picked, x[:2])
    pl.atomic_add(n_ref, i_ref[...], i_ref[...])
    pl.atomic_or(n_ref, i_ref[...], i_ref[...])


def run_everything(mode=True):
    call = pl.pallas_call(
        everything,
        (S((10, 8), jnp.float32), S((2,), jnp.int32)),
        grid=3,
        in_specs=[
            pl.BlockSpec((4, 8), lambda i: (i, 0)),
            pl.BlockSpec((8, 16), lambda i: (0, 0)),
            pl.BlockSpec((2,), lambda i: (0,)),
        ],
        out_specs=[
            pl.BlockSpec((4, 8), lambda i: (i, 0)),
            pl.BlockSpec((2,), lambda i: (0,)),
        ],
        scratch_shapes=[pltpu.VMEM((4, 8), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=mode,
    )
    x = np.arange(80, dtype=np.float32).reshape(10, 8)
    h = np.full((8, 16), 0.5, jnp.float16)
    return call(x, h, np.int32([1, 0])), call, (x, h, np.int32([1, 0]))


@pytest.mark.parametrize("mode", [True, pl.Checked(), False], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_kernel_of_many_ops_under_each_setting(name, mode):
    want, *_ = run_everything()
    with SETTINGS[name]():
        got, *_ = run_everything(mode)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_a_nan_is_reported_once_where_nan_checks_are_on(mode, jit):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.log(x_ref[...] - 1.5)

    call = pl.pallas_call(kernel, S((4,), jnp.float32), interpret=mode)
    run = jax.jit(lambda x: call(x) * 2) if jit else call
    with jax.debug_nans(True):
        np.testing.assert_allclose(call(np.full(4, 2.5, np.float32)), 0)
        with pytest.raises(
            FloatingPointError, match=r"NaN in output 0 .* of the kernel"
        ):
            run(np.ones(4, np.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_kernels_under_settings_that_refuse_code(family):
    for seed in range(8):
        kernel = random_kernel(Seeded(seed), family).kernel
        operands = [S(p.ref.shape, p.ref.dtype.np) for p in kernel.inputs]
        with strictest():
            jax.eval_shape(emulate(kernel), *operands)


def test_functions_made_of_others_under_settings_that_refuse_code():
    """What an equation is replaced by when it is imported is code of ours, too."""

    def kernel(h_ref, o_ref, c_ref):
        h = h_ref[...]
        o_ref[...] = pl.dot(h, h.T)
        image = h[None, None]
        c_ref[...] = lax.conv(image, image[:, :, :3, :3], (1, 1), "SAME")[0, 0]

    h = np.ones((8, 16), np.float16)
    out = S((8, 8), jnp.float32), S((8, 16), jnp.float16)
    with strictest():
        product, image = pl.pallas_call(kernel, out, interpret=True)(h)
    np.testing.assert_array_equal(product, np.full((8, 8), 16))
    assert image[4, 4] == 9


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_and_batches_under_each_setting(name):
    def slope():
        _, call, (x, h, i) = run_everything()
        return jax.grad(lambda v: call(v, h, i)[0].sum())(x)

    def batched():
        _, call, (x, h, i) = run_everything()
        return jax.vmap(lambda v: call(v, h, i)[0])(np.stack([x, x * np.float32(2)]))

    want = slope(), batched()
    with SETTINGS[name]():
        got = slope(), batched()
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
