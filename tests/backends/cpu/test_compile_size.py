"""How much code a kernel is: often used ops are called, many loops become functions.

Sizes are counted in lines of LLVM text, which is what compile time depends on. Results
must not depend on where code is: kernels run with everything in place and with all of
it in functions of their own.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import target
from pallasite import tpu as pltpu
from pallasite.backends.cpu import llvm_text
from pallasite.backends.cpu.dot import cache_blocks
from pallasite.backends.cpu.llvm import cut_loops, scalars
from pallasite.backends.cpu.ops import called_functions
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Kernel, Loc
from pallasite.ir.types import BOOL, DTYPES, I32, TileType
from tests.backends.cpu.direct import Code, KernelError
from tests.backends.cpu.running import with_refs


def kernel_of(body: Callable[..., None], *arrays: np.ndarray, **how) -> Kernel:
    """A kernel whose result is like the first of its operands."""
    out = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    return pl.lower(pl.pallas_call(body, out_shape=out, **how))(*arrays).kernels[0]


def repeated(step: Callable, uses: int, x: np.ndarray) -> Kernel:
    def body(x_ref, o_ref):
        value = x_ref[...]
        for _ in range(uses):
            value = step(value)
        o_ref[...] = value

    return kernel_of(body, x)


def lines(text: str) -> int:
    return text.count("\n")


def functions(text: str) -> int:
    return len(re.findall(r"^define ", text, re.MULTILINE))


X = np.linspace(-2, 2, 8 * 128, dtype=np.float32).reshape(8, 128)


# --- sizes ---


@pytest.mark.parametrize("step", [lax.sin, lax.lgamma, lax.erf_inv, lax.exp])
def test_a_use_of_an_elementary_function_adds_a_few_lines(step: Callable):
    few, many = (llvm_text(repeated(step, uses, X)) for uses in (100, 300))
    assert lines(many) - lines(few) <= 200 * 4
    assert functions(many) - functions(few) <= 2


def test_a_few_uses_are_written_out():
    text = llvm_text(repeated(lambda x: lax.exp(x) * 0.5, 4, X))
    assert "@exp." not in text


@pytest.mark.parametrize(
    "step",
    [
        lambda x: jnp.sort(x * 0.5, 1),
        lambda x: x - x.sum(1, keepdims=True),
        lambda x: jnp.cumsum(x, 1) * 0.5,
        lambda x: x.reshape(16, 64).reshape(8, 128)[:, ::-1] + x[3, :][None, :],
        lambda x: x - lax.top_k(x, 4)[0][:, :1],
    ],
    ids=["sort", "sum", "cumsum", "reshape", "top_k"],
)
def test_uses_of_one_op_share_their_loops(step: Callable):
    few, many = (llvm_text(repeated(step, uses, X)) for uses in (60, 120))
    assert functions(many) - functions(few) <= 6
    assert lines(many) - lines(few) <= 60 * 30


@pytest.mark.parametrize(
    "step",
    [lambda x: jnp.dot(x, x), lambda x: jnp.dot(x, x.T)],
    ids=["dot", "transposed"],
)
def test_products_of_one_kind_are_a_line_or_two_each(step: Callable):
    x = np.zeros((16, 16), np.float32)
    few, many = (llvm_text(repeated(step, uses, x)) for uses in (60, 120))
    assert functions(many) == functions(few)
    assert lines(many) - lines(few) <= 60 * 4


@pytest.mark.parametrize("host", [target.host(), target.AVX2, target.SSE])
def test_rows_that_divide_evenly_have_one_microkernel(host):
    """Not blocks of 6, 6 and 4 rows: two functions are twice the time of LLVM."""
    x = np.ones((16, 16), np.float32)
    with target.using(host):
        text = llvm_text(repeated(lambda x: jnp.dot(x, x), 8, x))
    assert len(re.findall(r"^define .*@dot_f32", text, re.MULTILINE)) == 1


def test_a_few_products_are_written_out():
    x = np.zeros((16, 16), np.float32)
    text = llvm_text(repeated(lambda x: jnp.dot(x, x), cache_blocks.WRITTEN_OUT, x))
    assert "@product." not in text


# --- results ---


def in_place_and_apart(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> tuple[Code, Code]:
    """The code of a kernel as one function, and with all that can be in others."""
    monkeypatch.setattr(called_functions, "INLINE_LINES", 10**9)
    monkeypatch.setattr(cut_loops, "MANY", 10**9)
    monkeypatch.setattr(cache_blocks, "WRITTEN_OUT", 10**9)
    whole = llvm_text(kernel)
    in_place = Code(kernel)
    monkeypatch.setattr(called_functions, "INLINE_LINES", 0)
    monkeypatch.setattr(cut_loops, "MANY", 0)
    monkeypatch.setattr(cache_blocks, "WRITTEN_OUT", 0)
    assert functions(llvm_text(kernel)) > functions(whole)
    return in_place, Code(kernel)


def check_alike(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, *arrays: np.ndarray
) -> None:
    in_place, apart = in_place_and_apart(monkeypatch, kernel)
    for a, b in zip(in_place(*arrays), apart(*arrays), strict=True):
        wide = np.float64 if a.dtype.kind not in "iub" else a.dtype  # for NaN
        np.testing.assert_array_equal(a.astype(wide), b.astype(wide))


SHAPES = [(3, 37), (16,), (2, 5, 1), (64,), (7,)]
NAMES = ["sin", "exp", "erf", "log", "tanh", "lgamma", "atan2", "pow", "nextafter"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_called_ops_give_what_written_ones_give(monkeypatch, dtype: str, shape):
    size = int(np.prod(shape))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with jax.enable_x64(True):
        x = np.linspace(-3, 3, size).reshape(shape).astype(kind)

        def body(x_ref, o_ref):
            total = value = x_ref[...]
            for name in NAMES:
                function = getattr(lax, name)
                two = name in ("atan2", "pow", "nextafter")
                total += function(value, total) if two else function(value)
            o_ref[...] = total

        check_alike(monkeypatch, kernel_of(body, x), x)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64"])
def test_called_ops_on_integers(monkeypatch, dtype: str):
    with jax.enable_x64(True):
        x = np.arange(-50, 61).astype(dtype)

        def body(x_ref, o_ref):
            x = x_ref[...]
            powers = lax.pow(x.astype(jnp.float32), x % 7)
            o_ref[...] = lax.div(x, x - 3) + lax.rem(x, x + 1) + powers.astype(x.dtype)

        check_alike(monkeypatch, kernel_of(body, x), x)


def test_called_ops_on_numbers(monkeypatch):
    def body(x_ref, o_ref):
        o_ref[...] = jnp.full(X.shape, lax.sin(x_ref[0, 0]) + lax.exp(x_ref[1, 3]))

    check_alike(monkeypatch, kernel_of(body, X), X)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
@pytest.mark.parametrize("size", [16, 37, 70])
def test_called_products_give_what_written_ones_give(monkeypatch, dtype: str, size):
    """Both ways around, added to sums, of rows that are one number apart, of a slice
    whose place is known only when the kernel runs; packed or not."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    with jax.enable_x64(True):
        wide = jnp.int32 if dtype == "int8" else jnp.promote_types(kind, jnp.float32)
        dot = lambda a, b: jnp.dot(a, b, preferred_element_type=wide)

        def body(x_ref, o_ref, sums):
            x, first = x_ref[...], pl.ds(x_ref[0, 0].astype(jnp.int32), 16)
            sums[...] = dot(x, x) + dot(x.T, x)
            sums[...] += dot(x, x.T)
            sums[first] += dot(x_ref[first], x)
            sums[:, :1] += dot(x, x[:, :1])
            o_ref[...] = sums[...].astype(x.dtype)

        x = (np.arange(size * size) % 7).reshape(size, size).astype(kind)
        scratch = [pltpu.VMEM((size, size), wide)]
        check_alike(monkeypatch, kernel_of(body, x, scratch_shapes=scratch), x)


def test_pieces_hand_on_what_loops_carry(monkeypatch):
    def body(x_ref, o_ref):
        x = x_ref[...]
        e = jnp.exp(x - x.max(-1, keepdims=True))
        state = (jnp.zeros_like(x), jnp.float32(0), jnp.int32(3))

        def step(i, state):
            total, number, count = state
            total += e * number
            return total, number + x_ref[i, 5], count + i

        total, number, count = lax.fori_loop(0, x.shape[0], step, state)
        o_ref[...] = total + number * count / e.sum(-1, keepdims=True)

    x = np.sin(np.arange(5 * 211, dtype=np.float32)).reshape(5, 211)
    check_alike(monkeypatch, kernel_of(body, x), x)


def test_pieces_of_a_kernel_with_a_grid_masks_and_branches(monkeypatch):
    def body(x_ref, y_ref, o_ref):
        i = pl.program_id(0)

        @pl.when(i % 2 == 0)
        def _():
            o_ref[...] = jnp.dot(x_ref[...], y_ref[...])

        @pl.when(i % 2 == 1)
        def _():
            found = lax.while_loop(
                lambda s: s[1] < i,
                lambda s: (jnp.sort(s[0] * 0.7, 1), s[1] + 1),
                (x_ref[...], 0),
            )[0]
            o_ref[...] = jnp.cumsum(found, 1)

    x = np.cos(np.arange(70 * 37, dtype=np.float32)).reshape(70, 37)
    y = np.sin(np.arange(37 * 37, dtype=np.float32)).reshape(37, 37)
    rows = pl.BlockSpec((16, 37), lambda i: (i, 0))
    specs = [rows, pl.BlockSpec((37, 37), lambda i: (0, 0))]
    how = {"grid": (5,), "in_specs": specs, "out_specs": rows}
    check_alike(monkeypatch, kernel_of(body, x, y, **how), x, y)


def test_a_check_inside_a_loop_still_ends_the_kernel(monkeypatch):
    def body(x_ref, o_ref):
        def step(i, carry):
            pl.debug_check(i < 2, "too far")
            o_ref[i, :] = lax.sin(x_ref[i, :])
            return carry

        o_ref[...] = x_ref[...]
        lax.fori_loop(0, 4, step, 0)

    for code in in_place_and_apart(monkeypatch, kernel_of(body, X)):
        with pytest.raises(KernelError, match="too far"):
            code(X)


def test_an_op_that_is_used_often_and_missing_is_refused_with_its_line(monkeypatch):
    monkeypatch.delitem(scalars.SPELLINGS, "f4e2m1fn")  # none is missing

    def emit(b, out):
        b.loc = Loc("kernel.py", 3, "body")
        for _ in range(20):
            tiny = b.constant(1, TileType((4,), DTYPES["f4e2m1fn"]))
            b.store(out, b.cast(b.cast(tiny, I32), BOOL))

    with pytest.raises(UnsupportedError, match="f4e2m1fn") as error:
        llvm_text(with_refs(emit, [], [TileType((4,), BOOL)]))
    assert "kernel.py:3 in body" in str(error.value)
