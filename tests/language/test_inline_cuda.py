"""`plgpu.inline_cuda`: in the emulation and checked mode, and what it rejects."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import (
    KernelTypeError,
    SpecError,
    UnsupportedError,
)

F32, I32 = jnp.float32, jnp.int32
S = jax.ShapeDtypeStruct
X = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def call(text, operands, results, interpret: Any = None, **more):
    """A kernel of one warpgroup with that text, whose operands are x and a scalar n."""

    def kernel(x_ref, o_ref):
        values = dict(x=x_ref[...], n=jnp.int32(3))
        given = {name: values[name] for name in operands}
        made = plgpu.inline_cuda(text, given, results, **more)
        o_ref[...] = made[0] if made and made[0].shape else x_ref[...]

    options = {} if interpret is None else dict(interpret=interpret)
    return plgpu.kernel(kernel, S(X.shape, F32), **options)


TWICE: dict[str, Any] = dict(reference=lambda x, n: x * n + 1)
SAME = dict(y=S(X.shape, F32))


@pytest.mark.parametrize("mode", [None, True, pl.Checked()])
def test_the_reference_runs_where_the_text_does_not(mode):
    got = call("y = x * n + 1.0f;", "xn", SAME, mode, **TWICE)(X)
    np.testing.assert_array_equal(got, 3 * X + 1)


def test_several_results_in_their_order():
    def kernel(x_ref, o_ref):
        types = dict(low=S(X.shape, F32), high=S(X.shape, I32))
        found = plgpu.inline_cuda(
            "low = x / 2; high = (int)x;",
            dict(x=x_ref[...]),
            types,
            reference=lambda x: (x / 2, x.astype(I32)),
        )
        o_ref[...] = found[0] + found[1]

    got = plgpu.kernel(kernel, S(X.shape, F32))(X)
    np.testing.assert_array_equal(got, 1.5 * X)


def test_without_a_reference_it_says_that_it_runs_on_gpus():
    with pytest.raises(UnsupportedError, match="without reference= runs on GPUs") as e:
        call("y = x + n;", "xn", SAME)(X)
    assert "pass reference=" in str(e.value) and "y = x + n;" in str(e.value)
    assert "test_inline_cuda.py" in str(e.value)


@pytest.mark.parametrize(
    "text, operands, results, error, says",
    [
        ("y = n;", "xn", SAME, SpecError, "does not name its operand 'x'"),
        ("f(x, n);", "xn", SAME, SpecError, "does not name its result 'y'"),
        ("x = n;", "xn", dict(x=SAME["y"]), SpecError, "both an operand and a result"),
        ("float = x;", "x", dict(float=SAME["y"]), SpecError, "cannot be a name"),
        ("not = x;", "x", {"not": SAME["y"]}, SpecError, "cannot be a name"),
        ("nullptr = x;", "x", dict(nullptr=SAME["y"]), SpecError, "cannot be a name"),
        ("y = x;", "x", dict(y=S((32, 64), F32)), KernelTypeError, "have one shape"),
        ("y = x;", "x", dict(y=S((), F32)), KernelTypeError, "have one shape"),
    ],
)
def test_names_and_shapes_are_checked(text, operands, results, error, says):
    with pytest.raises(error, match=says) as raised:
        call(text, operands, results)(X)
    assert "test_inline_cuda.py" in str(raised.value)


@pytest.mark.parametrize(
    "reference, says",
    [
        (lambda x: x.astype(I32), "returns other types than results"),
        (lambda x: (x, x), "returns other types than results"),
        (lambda x: x + jnp.arange(32.0), "arrays it is not given"),
        (lambda y: y, "got an unexpected keyword argument 'x'"),
    ],
)
def test_references_are_checked(reference, says):
    captured = jnp.arange(32.0)
    if "not given" in says:
        reference = lambda x: x + captured
    with pytest.raises((KernelTypeError, TypeError), match=says):
        call("y = x;", "x", SAME, reference=reference)(X)


def test_it_is_for_kernels_of_warpgroups():
    def kernel(x_ref, o_ref):
        (o_ref[...],) = plgpu.inline_cuda("y = x;", dict(x=x_ref[...]), SAME)

    with pytest.raises(KernelTypeError, match="inline_cuda"):
        pl.pallas_call(kernel, out_shape=S(X.shape, F32))(X)


def test_inline_mgpu_says_that_it_is_here():
    with pytest.raises(UnsupportedError, match=r"or plgpu\.inline_cuda"):
        plgpu.inline_mgpu.anything
