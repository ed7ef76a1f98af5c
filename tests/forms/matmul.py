"""Matrix products: their problems, and forms of them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import BF16, F32, I32, Family, Operand, Problem, Shape, Size
from tests.forms.matmul_styles import Style, What, matmul, reference

family = Family("matmul")


# --- problems ---


def operands(what: What, size: Size) -> list[Operand]:
    m, n, k = sizes(what, size)
    x = (k, m) if what.x_turned else (m, k)
    w = (n, k) if what.w_turned else (k, n)
    batch = (size(32, 4, 3),) if what.batch else ()
    return [
        Operand((*batch, *x), size.dtype, spread=0.5),
        Operand((*batch, *w), size.dtype, spread=k**-0.5),
    ]


def sizes(what: What, size: Size) -> tuple[int, int, int]:
    if what.edge:
        return size(4095, 1023, 60), size(4097, 1025, 70), size(1000, 500, 50)
    if what.batch:
        return size(1024, 256, 32), size(1024, 256, 32), size(1024, 256, 32)
    return (size(4096, 1024, 64),) * 3


@functools.cache
def problem(what: What) -> Problem:
    words = ["x.T"] * what.x_turned + ["w.T"] * what.w_turned
    words += ["batched"] * what.batch + ["edges"] * what.edge + ["f32 out"] * what.wide
    return Problem(
        " ".join(["matmul", *words]),
        functools.partial(operands, what),
        functools.partial(reference, what),
    )


PLAIN = What()
WIDE = What(wide=True)
W_TURNED, X_TURNED = What(w_turned=True), What(x_turned=True)
BATCH = What(batch=True)
EDGE = What(edge=True)


def _add(name: str, what: What = PLAIN, **choices: Any) -> None:
    family.add(name, problem(what), matmul(what, Style(**choices)))


_add("grid over k, scratch")
_add("grid over k, 64 x 64 x 64 blocks", block_m=64, block_n=64, block_k=64)
_add("grid over k, 256 x 256 x 64 blocks", block_m=256, block_n=256, block_k=64)
_add("grid over k, 128 x 256 x 32 blocks", block_n=256, block_k=32)
_add("output accumulated in place, f32", WIDE, loop="grid", acc="output")
_add("output accumulated in place, first product stored", WIDE, acc="output",
     start="store")  # fmt: skip
_add("scratch, started by a select", start="select")
_add("grid over k, columns before rows", order="columns first")
_add("k first in the grid, output revisited", WIDE, acc="output", order="k first")
_add("whole k in a block, 128 x 128", loop="none")
_add("fori over k, pl.ds of blocks", loop="fori")
_add("fori over k, whole refs", loop="fori", refs="whole")
_add("while over k", loop="while")
_add("scan over k", loop="scan")
_add("1-D order by divmod, whole refs and pl.ds", loop="fori", refs="whole",
     order="1-D")  # fmt: skip
_add("1-D order grouped as Triton's tutorial, whole refs", loop="fori", refs="whole",
     order="grouped")  # fmt: skip
_add("1-D order grouped, blocks by index maps", order="grouped")
_add("1-D order by divmod, blocks by index maps", order="1-D")
_add("x @ w.T, 256 x 128", W_TURNED, block_m=256)
_add("x @ w.T by jnp.dot", W_TURNED, product="dot")
_add("x @ w.T by einsum, fori", W_TURNED, product="einsum", loop="fori")
_add("x.T @ w", X_TURNED)
_add("x.T @ w by swapaxes", X_TURNED, product="matmul")
_add("batched, blocks of rank 3", BATCH, lead="rank 3", block_k=64)
_add("batched, squeezed", BATCH, lead="squeezed")
_add("batched, leading unit indexed", BATCH, lead="leading", loop="fori")
_add("batched, vmap", BATCH, lead="vmap")
_add("batched, einsum of rank 3", BATCH, lead="rank 3", product="einsum", loop="none")
_add("edge blocks, filled", EDGE, block_k=64)
_add("edge blocks, masked along k", EDGE, edge="mask")
_add("emit_pipeline of three axes in a kernel without a grid", loop="pipeline 3")
_add("emit_pipeline over k inside a grid", loop="pipeline")


# --- forms by hand ---


def _call(kernel, out, grid, in_specs, out_specs, scratch=(), **more) -> Callable:
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=list(scratch),
        **more,
    )


def _blocks(bm: int, bn: int, bk: int) -> tuple[Any, Any, Any]:
    return (
        pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
        pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
    )


def _bias_operands(size: Size) -> list[Operand]:
    n = size(4096, 1024, 64)
    return [*operands(PLAIN, size), Operand((1, n), F32), Operand((n, n), size.dtype)]


def _bias_gelu(x, w, b, r):
    y = jnp.dot(x, w, preferred_element_type=F32) + b
    return (jax.nn.gelu(y) + r.astype(F32)).astype(x.dtype)


@family.form(
    Problem("matmul bias gelu", _bias_operands, _bias_gelu), "bias, gelu, residual"
)
def bias_gelu(size: Size):
    bm = bn = size.block(128)
    bk = size.block(64)

    def kernel(x_ref, w_ref, b_ref, r_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            y = jax.nn.gelu(acc_ref[...] + b_ref[...])
            o_ref[...] = (y + r_ref[...].astype(F32)).astype(o_ref.dtype)

    def call(x, w, b, r):
        m, k = x.shape
        n = w.shape[1]
        xs, ws, out = _blocks(bm, bn, bk)
        row = pl.BlockSpec((1, bn), lambda i, j, k: (0, j))
        shape = Shape((m, n), x.dtype)
        grid = (m // bm, n // bn, k // bk)
        scratch = [pltpu.VMEM((bm, bn), F32)]
        return _call(kernel, shape, grid, [xs, ws, row, out], out, scratch)(x, w, b, r)

    return call


def _glu_operands(size: Size) -> list[Operand]:
    n = size(4096, 1024, 64)
    w = Operand((n, n), size.dtype, spread=n**-0.5)
    return [Operand((n, n), size.dtype), w, w]


def _glu(x, w, g):
    dot = functools.partial(jnp.dot, preferred_element_type=F32)
    return (jax.nn.silu(dot(x, g)) * dot(x, w)).astype(x.dtype)


@family.form(Problem("matmul swiglu", _glu_operands, _glu), "swiglu, two accumulators")
def swiglu(size: Size):
    bm, bn, bk = size.block(128), size.block(128), size.block(64)

    def kernel(x_ref, w_ref, g_ref, o_ref, a_ref, b_ref):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            a_ref[...] = jnp.zeros_like(a_ref)
            b_ref[...] = jnp.zeros_like(b_ref)

        x = x_ref[...]
        a_ref[...] += jnp.dot(x, w_ref[...], preferred_element_type=F32)
        b_ref[...] += jnp.dot(x, g_ref[...], preferred_element_type=F32)

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            gate = b_ref[...]
            o_ref[...] = (gate * jax.nn.sigmoid(gate) * a_ref[...]).astype(o_ref.dtype)

    def call(x, w, g):
        n = x.shape[0]
        xs, ws, out = _blocks(bm, bn, bk)
        grid = (n // bm, n // bn, n // bk)
        scratch = [pltpu.VMEM((bm, bn), F32)] * 2
        shape = Shape((n, n), x.dtype)
        return _call(kernel, shape, grid, [xs, ws, ws], out, scratch)(x, w, g)

    return call


def _mlp_operands(size: Size) -> list[Operand]:
    rows, width, inner = size(8192, 1024, 64), size(1024, 256, 32), size(2048, 512, 48)
    return [
        Operand((rows, width), size.dtype),
        Operand((width, inner), size.dtype, spread=width**-0.5),
        Operand((inner, width), size.dtype, spread=inner**-0.5),
    ]


def _mlp(x, w, u):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=F32)).astype(x.dtype)
    return jnp.dot(h, u, preferred_element_type=F32).astype(x.dtype)


MLP = Problem("mlp", _mlp_operands, _mlp)


@family.form(MLP, "MLP: two products in one kernel, inner width along the grid")
def mlp(size: Size):
    bm, bi = size.block(128), size.block(128)

    def kernel(x_ref, w_ref, u_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        h = jnp.maximum(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32), 0)
        h = h.astype(x_ref.dtype)
        acc_ref[...] += jnp.dot(h, u_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def call(x, w, u):
        rows, width = x.shape
        inner = w.shape[1]
        row = pl.BlockSpec((bm, width), lambda i, j: (i, 0))
        specs = [
            row,
            pl.BlockSpec((width, bi), lambda i, j: (0, j)),
            pl.BlockSpec((bi, width), lambda i, j: (j, 0)),
        ]
        grid = (rows // bm, inner // bi)
        scratch = [pltpu.VMEM((bm, width), F32)]
        return _call(kernel, Shape(x.shape, x.dtype), grid, specs, row, scratch)(
            x, w, u
        )

    return call


@family.form(MLP, "MLP: both weights whole in a block")
def mlp_whole(size: Size):
    bm = size.block(64)

    def kernel(x_ref, w_ref, u_ref, o_ref):
        h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32))
        y = jnp.dot(h.astype(x_ref.dtype), u_ref[...], preferred_element_type=F32)
        o_ref[...] = y.astype(o_ref.dtype)

    def call(x, w, u):
        row = pl.BlockSpec((bm, x.shape[1]), lambda i: (i, 0))
        whole = [pl.BlockSpec(a.shape, lambda i: (0, 0)) for a in (w, u)]
        grid = (x.shape[0] // bm,)
        return _call(kernel, Shape(x.shape, x.dtype), grid, [row, *whole], row)(x, w, u)

    return call


def _lora_operands(size: Size) -> list[Operand]:
    n, rank = size(4096, 1024, 64), size(64, 32, 8)
    x, w = operands(PLAIN, size)
    a = Operand((n, rank), size.dtype, spread=n**-0.5)
    return [x, w, a, Operand((rank, n), size.dtype)]


def _lora(x, w, a, b):
    dot = functools.partial(jnp.dot, preferred_element_type=F32)
    low = dot(x, a).astype(x.dtype)
    return (dot(x, w) + dot(low, b)).astype(x.dtype)


@family.form(Problem("matmul lora", _lora_operands, _lora), "LoRA: a second, thin path")
def lora(size: Size):
    bm, bn, bk = size.block(128), size.block(128), size.block(64)

    def kernel(x_ref, w_ref, a_ref, b_ref, o_ref, acc_ref, low_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)
            low_ref[...] = jnp.zeros_like(low_ref)

        x = x_ref[...]
        acc_ref[...] += jnp.dot(x, w_ref[...], preferred_element_type=F32)
        low_ref[...] += jnp.dot(x, a_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            low = low_ref[...].astype(x.dtype)
            y = acc_ref[...] + jnp.dot(low, b_ref[...], preferred_element_type=F32)
            o_ref[...] = y.astype(o_ref.dtype)

    def call(x, w, a, b):
        n, rank = a.shape
        xs, ws, out = _blocks(bm, bn, bk)
        thin = pl.BlockSpec((bk, rank), lambda i, j, k: (k, 0))
        flat = pl.BlockSpec((rank, bn), lambda i, j, k: (0, j))
        scratch = [pltpu.VMEM((bm, bn), F32), pltpu.VMEM((bm, rank), F32)]
        grid = (n // bm, n // bn, n // bk)
        specs = [xs, ws, thin, flat]
        return _call(kernel, Shape((n, n), x.dtype), grid, specs, out, scratch)(
            x, w, a, b
        )

    return call


def _int8_operands(size: Size) -> list[Operand]:
    n = size(4096, 1024, 64)
    array = Operand((n, n), jnp.int8, high=127)
    return [array, array, Operand((n, 1), F32), Operand((1, n), F32)]


def _int8(x, w, sx, sw):
    y = lax.dot(x, w, preferred_element_type=I32).astype(F32)
    return (y * sx * sw).astype(BF16)


@family.form(
    Problem("matmul int8", _int8_operands, _int8),
    "int8 with row and column scales",
    grad=False,
)
def int8(size: Size):
    bm, bn, bk = size.block(128), size.block(128), size.block(128)

    def kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += lax.dot(x_ref[...], w_ref[...], preferred_element_type=I32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            y = acc_ref[...].astype(F32) * sx_ref[...] * sw_ref[...]
            o_ref[...] = y.astype(o_ref.dtype)

    def call(x, w, sx, sw):
        n = x.shape[0]
        xs, ws, out = _blocks(bm, bn, bk)
        column = pl.BlockSpec((bm, 1), lambda i, j, k: (i, 0))
        row = pl.BlockSpec((1, bn), lambda i, j, k: (0, j))
        grid = (n // bm, n // bn, n // bk)
        scratch = [pltpu.VMEM((bm, bn), I32)]
        specs = [xs, ws, column, row]
        return _call(kernel, Shape((n, n), BF16), grid, specs, out, scratch)(
            x, w, sx, sw
        )

    return call


def _weight_only_operands(size: Size) -> list[Operand]:
    m, n = size(512, 128, 32), size(4096, 1024, 64)
    x = Operand((m, n), size.dtype, spread=n**-0.5)
    return [x, Operand((n, n), jnp.int8, high=127), Operand((1, n), F32)]


def _weight_only(x, w, s):
    y = jnp.dot(x, w.astype(x.dtype), preferred_element_type=F32)
    return (y * s).astype(x.dtype)


@family.form(
    Problem("matmul int8 weights", _weight_only_operands, _weight_only),
    "int8 weights widened in the kernel",
    grad=False,
)
def weight_only(size: Size):
    bm, bn, bk = size.block(128), size.block(128), size.block(128)

    def kernel(x_ref, w_ref, s_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        w = w_ref[...].astype(x_ref.dtype)
        acc_ref[...] += jnp.dot(x_ref[...], w, preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = (acc_ref[...] * s_ref[...]).astype(o_ref.dtype)

    def call(x, w, s):
        (m, k), n = x.shape, w.shape[1]
        xs, ws, out = _blocks(bm, bn, bk)
        row = pl.BlockSpec((1, bn), lambda i, j, k: (0, j))
        grid = (m // bm, n // bn, k // bk)
        scratch = [pltpu.VMEM((bm, bn), F32)]
        return _call(kernel, Shape((m, n), x.dtype), grid, [xs, ws, row], out, scratch)(
            x, w, s
        )

    return call


def _gram_operands(size: Size) -> list[Operand]:
    return [Operand((size(4096, 1024, 64), size(2048, 512, 48)), size.dtype)]


def _gram(x):
    return jnp.dot(x, x.T, preferred_element_type=F32).astype(x.dtype)


@family.form(Problem("matmul x x.T", _gram_operands, _gram), "x @ x.T, one array twice")
def gram(size: Size):
    bm = size.block(128)

    def kernel(x_ref, y_ref, o_ref):
        dims = (((1,), (1,)), ((), ()))
        y = lax.dot_general(x_ref[...], y_ref[...], dims, preferred_element_type=F32)
        o_ref[...] = y.astype(o_ref.dtype)

    def call(x):
        n, k = x.shape
        row = lambda axis: pl.BlockSpec((bm, k), lambda i, j: ((i, j)[axis], 0))
        out = pl.BlockSpec((bm, bm), lambda i, j: (i, j))
        grid = (n // bm, n // bm)
        return _call(kernel, Shape((n, n), x.dtype), grid, [row(0), row(1)], out)(x, x)

    return call


def _vector_operands(size: Size) -> list[Operand]:
    m, k = size(16384, 2048, 64), size(8192, 2048, 64)
    return [Operand((m, k), size.dtype), Operand((1, k), size.dtype, spread=k**-0.5)]


def _vector(a, x):
    return (a.astype(F32) * x.astype(F32)).sum(axis=1, keepdims=True)


VECTOR = Problem("matrix times vector", _vector_operands, _vector)


@family.form(VECTOR, "matrix times vector by multiply and sum")
def multiply_and_sum(size: Size):
    rows = size.block(64)

    def kernel(a_ref, x_ref, o_ref):
        product = a_ref[...].astype(F32) * x_ref[...].astype(F32)
        o_ref[...] = product.sum(axis=1, keepdims=True)

    def call(a, x):
        spec = pl.BlockSpec((rows, a.shape[1]), lambda i: (i, 0))
        whole = pl.BlockSpec((1, a.shape[1]), lambda i: (0, 0))
        out = pl.BlockSpec((rows, 1), lambda i: (i, 0))
        grid = (a.shape[0] // rows,)
        return _call(kernel, Shape((a.shape[0], 1), F32), grid, [spec, whole], out)(
            a, x
        )

    return call


@family.form(VECTOR, "matrix times vector, k along the grid")
def vector_grid(size: Size):
    rows, depth = size.block(256), size.block(512)

    def kernel(a_ref, x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        product = a_ref[...].astype(F32) * x_ref[...].astype(F32)
        o_ref[...] += product.sum(axis=1, keepdims=True)

    def call(a, x):
        spec = pl.BlockSpec((rows, depth), lambda i, k: (i, k))
        part = pl.BlockSpec((1, depth), lambda i, k: (0, k))
        out = pl.BlockSpec((rows, 1), lambda i, k: (i, 0))
        grid = (a.shape[0] // rows, a.shape[1] // depth)
        return _call(kernel, Shape((a.shape[0], 1), F32), grid, [spec, part], out)(a, x)

    return call
