"""Matmuls whose grids are written differently run as the same programs (`host.py`)."""

import json
import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, get
from pallasite.ir.nodes import Kernel
from pallasite.target import GPUS
from tests.backends.cuda import host

M, N, K = 256, 384, 192
BM, BN, BK = 64, 128, 64
ROWS, COLUMNS, STEPS = M // BM, N // BN, K // BK
f32, bf16 = jnp.float32, jnp.bfloat16
OUT = jax.ShapeDtypeStruct((M, N), f32)
ANY = pl.BlockSpec(memory_space=pl.ANY)
SPELLINGS = {}


def spelling(function):
    SPELLINGS[function.__name__] = function
    return function


def accumulate(x_ref, y_ref, o_ref, acc_ref, k):
    @pl.when(k == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32)

    @pl.when(k == STEPS - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def specs(*axes: int):
    """The blocks of a matmul, by the grid axes of rows, columns and k."""
    i, j, k = axes
    return {
        "in_specs": [
            pl.BlockSpec((BM, BK), lambda *at: (at[i], at[k])),
            pl.BlockSpec((BK, BN), lambda *at: (at[k], at[j])),
        ],
        "out_specs": pl.BlockSpec((BM, BN), lambda *at: (at[i], at[j])),
    }


def block_of(x_ref, y_ref, i, j):
    """One block of the result, from parts of whole operands."""

    def step(k, acc):
        x = x_ref[pl.ds(i * BM, BM), pl.ds(k * BK, BK)]
        y = y_ref[pl.ds(k * BK, BK), pl.ds(j * BN, BN)]
        return acc + jnp.dot(x, y, preferred_element_type=f32)

    return jax.lax.fori_loop(0, STEPS, step, jnp.zeros((BM, BN), f32))


def grouped(number, group=3):
    """Groups of three rows of blocks; the last one is smaller."""
    first = number // (group * COLUMNS) * group
    size = jnp.minimum(ROWS - first, group)
    inside = number % (group * COLUMNS)
    return first + inside % size, inside // size


@spelling
def grid(x, y):
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        accumulate(x_ref, y_ref, o_ref, acc_ref, pl.program_id(2))

    scratch = [pltpu.VMEM((BM, BN), f32)]
    steps = (ROWS, COLUMNS, STEPS)
    return pl.pallas_call(
        kernel, OUT, grid=steps, scratch_shapes=scratch, **specs(0, 1, 2)
    )(x, y)


@spelling
def in_place(x, y):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32)

    steps = (ROWS, COLUMNS, STEPS)
    return pl.pallas_call(kernel, OUT, grid=steps, **specs(0, 1, 2))(x, y)


@spelling
def whole_refs_in_groups(x, y):
    def kernel(x_ref, y_ref, o_ref):
        i, j = grouped(pl.program_id(0))
        o_ref[pl.ds(i * BM, BM), pl.ds(j * BN, BN)] = block_of(x_ref, y_ref, i, j)

    return pl.pallas_call(
        kernel, OUT, grid=(ROWS * COLUMNS,), in_specs=[ANY, ANY], out_specs=ANY
    )(x, y)


@spelling
def persistent(x, y):
    def kernel(x_ref, y_ref, o_ref):
        @pl.loop(pl.program_id(0), ROWS * COLUMNS, step=5)
        def _(number):
            i, j = grouped(number)
            o_ref[pl.ds(i * BM, BM), pl.ds(j * BN, BN)] = block_of(x_ref, y_ref, i, j)

    return pl.pallas_call(kernel, OUT, grid=(5,))(x, y)


@spelling
def one_pipeline(x, y):
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        def step(x_ref, y_ref, o_ref):
            accumulate(x_ref, y_ref, o_ref, acc_ref, pl.program_id(2))

        blocks = specs(0, 1, 2)
        blocks["out_specs"] = [blocks["out_specs"]]
        pltpu.emit_pipeline(step, grid=(ROWS, COLUMNS, STEPS), **blocks)(
            x_ref, y_ref, o_ref
        )

    return pl.pallas_call(
        kernel,
        OUT,
        in_specs=[ANY, ANY],
        out_specs=ANY,
        scratch_shapes=[pltpu.VMEM((BM, BN), f32)],
    )(x, y)


@spelling
def pipeline_over_k(x, y):
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        acc_ref[...] = jnp.zeros_like(acc_ref)

        def step(x_ref, y_ref):
            acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32)

        parts = [
            pl.BlockSpec((BM, BK), lambda k: (i, k)),
            pl.BlockSpec((BK, BN), lambda k: (k, j)),
        ]
        pltpu.emit_pipeline(step, grid=(STEPS,), in_specs=parts, out_specs=[])(
            x_ref, y_ref
        )
        o_ref[...] = acc_ref[...]

    return pl.pallas_call(
        kernel,
        OUT,
        grid=(ROWS, COLUMNS),
        in_specs=[ANY, ANY],
        out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
        scratch_shapes=[pltpu.VMEM((BM, BN), f32)],
    )(x, y)


def operands():
    rng = np.random.default_rng(0)
    return tuple(
        jnp.asarray(rng.standard_normal(shape), bf16) for shape in ((M, K), (K, N))
    )


def kernel_of(name: str) -> Kernel:
    (kernel,) = pl.lower(SPELLINGS[name])(*operands()).kernels
    return kernel


@cache
def launched(name: str) -> tuple:
    """What a spelling launches: programs, threads, memory, buffers, roles."""
    call = pl.lower(SPELLINGS[name])(*operands()).calls[0]
    options = replace(call.options, chip=GPUS["h200"])
    made = Compiled(get("cuda"), call.kernel, options)
    head = json.loads(made["cuda"].splitlines()[0].removeprefix("// launch "))
    buffers = re.findall(r"%ring\w*: ref<(\S+) ", made["scheduled"])
    roles = re.findall(r"roles \{([^}]*)\}", made["scheduled"])
    return head["programs"], head["threads"], head["shared_bytes"], buffers, roles


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_same_launch(name):
    assert launched(name) == launched("grid")
    assert launched(name)[0] > 1


@pytest.mark.skipif(host.compiler() is None, reason="g++ is missing")
@pytest.mark.parametrize("name", ["whole_refs_in_groups", "persistent", "in_place"])
def test_results(name, tmp_path):
    x, y = operands()
    (got,) = host.run(kernel_of(name), [np.asarray(x), np.asarray(y)], tmp_path)
    want = np.asarray(x, np.float32) @ np.asarray(y, np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1e-2, atol=1e-2)
