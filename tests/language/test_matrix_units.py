"""Matrix units that a kernel schedules itself: what they compute, and mistakes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, get
from pallasite.errors import CheckError, KernelTypeError, SpecError, UnsupportedError
from pallasite.runtime.aot import Job, compile_all
from pallasite.sites import calls_in
from pallasite.target import TPUS

RNG = np.random.default_rng(0)
A = RNG.normal(size=(16, 8)).astype(np.float32)
B, C = (RNG.normal(size=(8, 8)).astype(np.float32) for _ in range(2))
OUT = jax.ShapeDtypeStruct((16, 8), jnp.float32)
MODES = {"emulated": True, "cpu": False, "checked": pl.Checked()}


def by_address(a_ref, b_ref, c_ref, o_ref):
    """Two right sides in turn, and the second twice."""
    pltpu.matmul_push_rhs(b_ref[...], 0, 1)
    pltpu.matmul_push_rhs(c_ref[...], 1, mxu_index=1, transpose=True)
    pltpu.matmul_acc_lhs(4, a_ref[...], 1, load_staged_rhs=0)
    pltpu.matmul_acc_lhs(acc_addr=4, lhs=a_ref[...], mxu_index=1, load_staged_rhs=1)
    pltpu.matmul_acc_lhs(4, a_ref[...] + 1, 1)
    o_ref[...] = pltpu.matmul_pop(4, (16, 8), jnp.float32, 1)


def by_ref(a_ref, b_ref, c_ref, o_ref, acc, other):
    def again(i, _):
        pltpu.matmul_push_rhs(jnp.where(i == 0, b_ref[...], c_ref[...].T), 0, 0)
        pltpu.matmul_acc_lhs(acc, a_ref[...], 0)
        return _

    jax.lax.fori_loop(0, 2, again, 0)
    pltpu.matmul_acc_lhs(other, a_ref[...] + 1)
    o_ref[...] = pltpu.matmul_pop(acc) + pltpu.matmul_pop(other)


def scoped(a_ref, b_ref, c_ref, o_ref):
    acc = pltpu.ACC(0)((16, 8), jnp.float32)
    pl.run_scoped(lambda x, y: by_ref(a_ref, b_ref, c_ref, o_ref, x, y), acc, acc)


WANTED = A @ B + A @ C.T + (A + 1) @ C.T
SUMS = [pltpu.ACC(0)((16, 8), jnp.float32)] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kernel", "more"),
    [(by_address, {}), (by_ref, {"scratch_shapes": SUMS}), (scoped, {})],
    ids=["address", "ref", "scoped"],
)
def test_products_are_added_up(kernel, more, mode):
    call = pl.pallas_call(kernel, OUT, interpret=MODES[mode], **more)
    np.testing.assert_allclose(call(A, B, C), WANTED, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["emulated", "cpu"])
def test_derivatives_are_those_of_the_products(mode):
    call = pl.pallas_call(by_address, OUT, interpret=MODES[mode])

    def plain(a, b, c):
        return a @ b + a @ c.T + (a + 1) @ c.T

    def gradients(f):
        return jax.grad(lambda *x: jnp.sin(f(*x)).sum(), (0, 1, 2))(A, B, C)

    for got, wanted in zip(gradients(call), gradients(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    _, tangent = jax.jvp(call, (A, B, C), (A, B, C))
    wanted = jax.jvp(plain, (A, B, C), (A, B, C))[1]
    np.testing.assert_allclose(tangent, wanted, rtol=1e-4, atol=1e-4)


def along_the_grid(a_ref, b_ref, o_ref):
    pltpu.matmul_push_rhs(b_ref[...], 0, 0)
    pltpu.matmul_acc_lhs(0, a_ref[...], 0, 0)

    @pl.when(pl.program_id(1) == 1)
    def _():
        o_ref[...] = pltpu.matmul_pop(0, (8, 8), jnp.float32, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("semantics", [None, ("parallel", "arbitrary")])
def test_sums_stay_from_step_to_step(mode, semantics):
    x, y = np.concatenate([A, A + 1], 1), np.concatenate([B, C])
    call = pl.pallas_call(
        along_the_grid,
        OUT,
        grid=(2, 2),
        in_specs=[
            pl.BlockSpec((8, 8), lambda i, k: (i, k)),
            pl.BlockSpec((8, 8), lambda i, k: (k, 0)),
        ],
        out_specs=pl.BlockSpec((8, 8), lambda i, k: (i, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=MODES[mode],
    )
    np.testing.assert_allclose(call(x, y), x @ y, rtol=1e-5, atol=1e-5)


def test_integers_add_up_in_32_bits():
    def kernel(a_ref, o_ref):
        pltpu.matmul_push_rhs(a_ref[...], 0, 0)
        pltpu.matmul_acc_lhs(0, a_ref[...], 0, 0)
        o_ref[...] = pltpu.matmul_pop(0, (8, 8), jnp.int32, 0)

    x = RNG.integers(-128, 128, size=(8, 8)).astype(np.int8)
    out = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    wide = x.astype(np.int32)
    got = pl.pallas_call(kernel, out, interpret=True)(x)
    np.testing.assert_array_equal(got, wide @ wide)


@pytest.mark.parametrize("mode", [True, False], ids=["emulated", "cpu"])
def test_convolutions_are_added_to_what_is_there(mode):
    image, window = RNG.normal(size=(1, 6, 4)), RNG.normal(size=(3, 4, 2))
    arrays = [jnp.asarray(x, jnp.float32) for x in (image, window)]
    numbers = {"dimension_numbers": ("NWC", "WIO", "NWC")}

    def kernel(x_ref, w_ref, o_ref):
        x, w = x_ref[...], w_ref[...]
        first = pltpu.conv(x, w, padding="SAME", **numbers)
        turned = {"window_reversal": (True,), "padding": [(1, 1)]}
        o_ref[...] = pltpu.conv(x, w, first, **turned, **numbers)

    def plain(x, w):
        both = [jax.lax.conv_general_dilated(x, y, (1,), "SAME", **numbers)
                for y in (w, w[::-1])]  # fmt: skip
        return sum(both)

    out = jax.ShapeDtypeStruct((1, 6, 2), jnp.float32)
    got = pl.pallas_call(kernel, out, interpret=mode)(*arrays)
    np.testing.assert_allclose(got, plain(*arrays), rtol=1e-5, atol=1e-5)


# --- mistakes ---


def push(a, register=0, unit=0):
    pltpu.matmul_push_rhs(a[:8, :8], register, unit)


def add(a, address=0, unit=0, load=0):
    pltpu.matmul_acc_lhs(address, a[:8, :8], unit, load)


def pop(address=0, unit=0, shape=(8, 8), dtype=jnp.float32):
    return pltpu.matmul_pop(address, shape, dtype, unit)


def run(code, mode=True, **call):
    """A kernel of that code; what it returns is added to the result."""

    def kernel(a_ref, o_ref, *scratch):
        code(a_ref[...], *scratch)
        o_ref[...] = a_ref[...]

    return pl.pallas_call(kernel, OUT, interpret=mode, **call)(A)


TRACED = {
    "nothing is pushed to staging register 1 of matrix unit 0": lambda a: (
        push(a), add(a, load=1), pop()),
    "nothing is pushed to staging register 0 of matrix unit 1": lambda a: (
        push(a), add(a, unit=1), pop()),
    "matrix unit 0 has no right operand": lambda a: (push(a), add(a, load=None), pop()),
    "pushed to staging register 1 of matrix unit 0 is never used": lambda a: (
        push(a), push(a, 1), add(a), pop()),
    "address 8 of matrix unit 0 is popped, but nothing is added": lambda a: (
        push(a), add(a), pop(), pop(8)),
    "address 0 of matrix unit 0 is never popped": lambda a: (push(a), add(a)),
    "accumulators of a matrix unit overlap": lambda a: (
        push(a), pltpu.matmul_acc_lhs(0, a, 0, 0), add(a, 1)),
    "accumulator of a matrix unit has another type": lambda a: (
        push(a), add(a), pop(shape=(16, 8))),
    "does not match the right operand": lambda a: (
        push(a), pltpu.matmul_acc_lhs(0, a.astype(jnp.bfloat16), 0, 0)),
    "holds matrices of two dtypes": lambda a: (
        push(a), push(a.astype(jnp.bfloat16))),
    "load_staged_rhs as an int, 0 or more": lambda a: (push(a), add(a, load=True)),
    "takes mxu_index as an int, 0 or more": lambda a: (push(a, unit=-1),),
    "takes a matrix as rhs": lambda a: (pltpu.matmul_push_rhs(a[0], 0, 0),),
    "returns a matrix of float32 or int32": lambda a: (pop(dtype=jnp.bfloat16),),
}  # fmt: skip


@pytest.mark.parametrize("message", TRACED)
def test_a_mistake_is_found_when_the_kernel_is_traced(message):
    with pytest.raises(KernelTypeError, match=message) as raised:
        run(TRACED[message])
    text = str(raised.value)
    assert "fix" in text and "test_matrix_units.py" in text


def test_sums_are_not_read_as_memory():
    with pytest.raises(KernelTypeError, match="cannot be read or written like memory"):
        run(
            lambda a, acc: (
                push(a),
                pltpu.matmul_acc_lhs(acc, a[:8, :8], 0),
                acc[...],
                pltpu.matmul_pop(acc),
            ),
            scratch_shapes=[pltpu.ACC(0)((8, 8), jnp.float32)],
        )
    with pytest.raises(KernelTypeError, match="needs a whole ref in"):
        run(
            lambda a, acc: pltpu.matmul_acc_lhs(acc, a),
            scratch_shapes=[pltpu.VMEM((16, 8), jnp.float32)],
        )
    with pytest.raises(SpecError, match="a matrix of float32 or int32"):
        pltpu.ACC(0)((8, 8), jnp.bfloat16)


def sometimes(code):
    """Code that runs, which tracing does not know."""
    return lambda a: pl.when(a[0, 0] == a[0, 0])(lambda: code(a) and None)


RUN = {
    "staging register 0 of matrix unit 0 is pushed to again": lambda a: (
        push(a), sometimes(push)(a), add(a), pop()),
    "staging register 0 of matrix unit 0 is loaded, but nothing was pushed": lambda a: (
        push(a), add(a), sometimes(add)(a), pop()),
    "is popped, but nothing was added": lambda a: (
        push(a), add(a), pop(), sometimes(lambda a: (pop(), 1))(a)),
    "accumulator at address 0 of matrix unit 0 is still there when the kernel ends":
        lambda a: (push(a), add(a), pop(), push(a), sometimes(add)(a)),
}  # fmt: skip


@pytest.mark.parametrize("message", RUN)
def test_a_mistake_is_found_when_the_kernel_runs(message):
    with pytest.raises(CheckError, match=message) as raised:
        run(RUN[message], pl.Checked())
    assert "test_matrix_units.py" in str(raised.value)


# --- on a TPU ---


def wide(dtype, size=256, unit=0):
    def kernel(a_ref, b_ref, o_ref):
        pltpu.matmul_push_rhs(b_ref[...], 1, unit, transpose=True)
        pltpu.matmul_acc_lhs(2, a_ref[...], unit, load_staged_rhs=1)
        pltpu.matmul_acc_lhs(2, a_ref[...], unit)
        o_ref[...] = pltpu.matmul_pop(2, (32, size), jnp.float32, unit)

    out = jax.ShapeDtypeStruct((32, size), jnp.float32)
    arrays = jnp.zeros((32, size), dtype), jnp.zeros((size, size), dtype)
    return pl.pallas_call(kernel, out), arrays


def compiled(chip, call, arrays):
    (found,) = calls_in(call, *arrays)
    options = replace(found.options, chip=TPUS[chip])
    return Compiled(get("tpu"), found.kernel, options)


def mosaic(chip, call, arrays):
    return compiled(chip, call, arrays)["mosaic"]


@pytest.mark.parametrize("chip", ["v5e", "7x"])
def test_a_tpu_gets_its_own_instructions_or_dots(chip):
    call, arrays = wide(jnp.bfloat16)
    text = mosaic(chip, call, arrays)
    lines = [line.strip() for line in text.splitlines() if "tpu.matmul" in line]
    if chip == "v5e":
        assert all(line.split("=")[1].startswith(" tpu.matmul %") for line in lines)
        return
    names = [line.split("tpu.")[1].split("%")[0].split("{")[0] for line in lines]
    assert names == ["matmul_push_rhs ", "matmul_acc_lhs 2, ", "matmul_acc_lhs 2, ",
                     "matmul_pop 2 "]  # fmt: skip
    attrs = "{mxu_index = 0 : i32, staging_register = 1 : i32, transpose = true}"
    assert attrs in lines[0] and "load_staged_rhs = 1 : i32" in lines[1]
    assert "256x256xbf16, #tpu.memory_space<vmem>>" in text  # the operand
    assert "scratch_operands = 0" in text


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (wide(jnp.bfloat16, 128), "a right operand must be 256 x 256"),
        (wide(jnp.float16), "it supports bf16, f32"),
        (wide(jnp.bfloat16, unit=2), "the chip has 2 matrix units"),
    ],
)
def test_what_no_unit_of_a_tpu_takes_is_refused(made, why):
    call, arrays = made
    with pytest.raises(UnsupportedError, match="matrix unit of 7x does not") as raised:
        mosaic("7x", call, arrays)
    assert why in str(raised.value)


@pytest.mark.tpu
def test_kernels_that_schedule_units_compile():
    dtypes = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
    made = [compiled("7x", *wide(dtype)) for dtype in dtypes]
    jobs = [Job.of(str(n), m.kernel, get("tpu").launch(m)) for n, m in enumerate(made)]
    assert [result.error for result in compile_all(jobs, "7x")] == [""] * len(jobs)
