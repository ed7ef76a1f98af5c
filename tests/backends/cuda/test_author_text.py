"""The author's CUDA C++ in kernels: run on the CPU, compiled, and rejected."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base
from pallasite.errors import CompileError
from pallasite.target import GPUS
from tests.backends.cuda import host
from tests.backends.cuda.test_plgpu import needs_compiler, needs_nvrtc

F32, BF16, I8, I32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32
S = jax.ShapeDtypeStruct
DOCS = Path(__file__).parents[3] / "docs" / "gpu.md"


def lowered(call, *args):
    (found,) = pl.lower(call)(*args).kernels
    return found


def compiled(kernel, chip="h100"):
    return base.Compiled(host.BACKEND, kernel, base.Options(chip=GPUS[chip]))


def operand(*shape, dtype=F32, seed=0):
    x = np.random.default_rng(seed).integers(-9, 9, shape)
    return np.asarray(jnp.asarray(x, dtype))


def several(x, n):
    """Tiles and scalars of several types, in and out, in a loop."""

    def kernel(x_ref, n_ref, o_ref, m_ref):
        def step(k, total):
            types = dict(y=S(x.shape, F32), z=S(x.shape, I8))
            y, z = plgpu.inline_cuda(
                "const int twice = 2 * x;\ny = twice + k;\nz = n > 0 ? -x : x;  // x",
                dict(x=x_ref[...], n=n_ref[0], k=k),
                types,
                reference=lambda x, n, k: (
                    (2 * x.astype(I32) + k).astype(F32),
                    jnp.where(n > 0, -x, x),
                ),
            )
            return total + y * z.astype(F32)

        o_ref[...] = lax.fori_loop(0, 3, step, jnp.zeros(x.shape, F32))
        (m,) = plgpu.inline_cuda(
            "m = n + 1;", dict(n=n_ref[0]), dict(m=S((), I32)),
            reference=lambda n: n + 1,
        )  # fmt: skip
        m_ref[0] = m

    return plgpu.kernel(kernel, [S(x.shape, F32), S((1,), I32)])(x, n)


def bits(x):
    """Floats of 16 bits are their bits, and constants are operands as others are."""

    def kernel(x_ref, o_ref):
        (y,) = plgpu.inline_cuda(
            "y = x ^ sign;",
            dict(x=x_ref[...], sign=jnp.full(x.shape, 0x8000, jnp.uint16)),
            dict(y=S(x.shape, BF16)),
            reference=lambda x, sign: -x,
        )
        o_ref[...] = y

    return plgpu.kernel(kernel, x)(x)


def beside_products(x, y):
    """The sums of a product, in its layout, and an effect without results."""

    def kernel(x_ref, y_ref, o_ref):
        sums = plgpu.mma(jnp.zeros((64, 32), F32), x_ref[...], y_ref[...])
        plgpu.inline_cuda("__syncwarp();", reference=lambda: ())
        (clipped,) = plgpu.inline_cuda(
            "kept = sum > most ? most : sum;",
            dict(sum=sums, most=jnp.float32(20)),
            dict(kept=S(sums.shape, F32)),
            reference=lambda sum, most: jnp.minimum(sum, most),
        )
        o_ref[...] = clipped - jnp.max(clipped, axis=1, keepdims=True)

    return plgpu.kernel(kernel, S((64, 32), F32))(x, y)


CASES = {
    "several": (several, (operand(64, 24, dtype=I8), np.array([3], np.int32))),
    "bits": (bits, (operand(48, 40, dtype=BF16),)),
    "beside products": (beside_products, (
        operand(64, 32, dtype=BF16), operand(32, 32, dtype=BF16, seed=1))),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_text_does_what_its_reference_does(name, tmp_path):
    function, args = CASES[name]
    want = jax.tree.leaves(function(*args))
    for x, y in zip(host.run(lowered(function, *args), args, tmp_path), want,
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(x, y)


def test_a_reference_is_no_part_of_the_code():
    """Even one of ops that the backend does not have."""

    def kernel(x_ref, o_ref):
        (o_ref[...],) = plgpu.inline_cuda(
            "y = x;", dict(x=x_ref[...]), dict(y=S(x.shape, F32)),
            reference=lambda x: jnp.sort(x, axis=0),
        )  # fmt: skip

    x = operand(8, 8)
    text = compiled(lowered(plgpu.kernel(kernel, x), x))["cuda"]
    assert "author_text_" in text and "y = x;" in text


@needs_nvrtc
@pytest.mark.parametrize("chip", ["a100", "h100"])
@pytest.mark.parametrize("name", CASES)
def test_it_compiles(name, chip):
    function, args = CASES[name]
    made = compiled(lowered(function, *args), chip)
    assert ".entry" in made["ptx"]
    if "Used" in made["ptxas"]:
        assert "error" not in made["ptxas"]


def wrong(text):
    def kernel(x_ref, o_ref):
        (o_ref[...],) = plgpu.inline_cuda(
            text, dict(x=x_ref[...]), dict(y=S((8, 8), F32))
        )

    return plgpu.kernel(kernel, S((8, 8), F32))


@needs_nvrtc
@pytest.mark.parametrize(
    "text, line, says",
    [
        ("y = x\n  * 2;\ny = z;", "y = z;", 'identifier "z" is undefined'),
        ("float z = x;\ny = z +;", "y = z +;", "expected an expression"),
        ("x = 3; y = x;", "x = 3; y = x;", "must be a modifiable lvalue"),
    ],
)
def test_a_text_that_does_not_compile_is_named(text, line, says):
    x = operand(8, 8)
    with pytest.raises(CompileError, match="rejected the text of plgpu") as raised:
        compiled(lowered(wrong(text), x))["ptx"]
    shown = str(raised.value)
    number = text.split("\n").index(line) + 1
    assert re.search(rf"line {number} +{re.escape(line)}", shown) and says in shown
    assert re.search(r"at +\S*test_author_text.py:\d+", shown)


@needs_nvrtc
@pytest.mark.parametrize("chip", ["a100", "h100"])
def test_the_example_of_the_docs_compiles(chip):
    page = DOCS.read_text()
    part = page[page.index("## CUDA C++ in a kernel") :]
    found = re.search(r"```python\n(.*?)```", part, re.S)
    assert found is not None
    names: dict = {}
    exec(found[1], names)  # as the tests of the pages do
    kernel = lowered(names["rounded"], names["x"])
    made = compiled(kernel, chip)
    assert "cvt.rni.f32.f32" in made["ptx"]
