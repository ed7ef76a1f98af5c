"""Functions of elements, spelled by choices; see `attention_styles.py`.

The grids and accesses are those of activations in public kernels: blocks of rows, tiles
in two or three dimensions, an array flattened to blocks of one dimension, pointers with
masks, whole refs with `pl.ds`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from tests.forms.form import F32, I32, Operand, Problem, Shape, Size

ROOT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715


@dataclass(frozen=True)
class Style:
    """How it is written."""

    view: str = "rows"  # tiles, three, flat, pointers, whole
    loop: str = "none"  # fori, scan, unrolled: over parts of a block
    power: str = "product"  # square, power, integer_pow
    gate: str = "library"  # written, reciprocal
    select: str = "where"  # product: with a mask, maximum
    cast: str = "tile"  # load: each where it is used
    rows: int = 64
    columns: int = 512


AXES: dict[str, tuple[Any, ...]] = {
    "view": ("rows", "tiles", "three", "flat", "pointers", "whole"),
    "loop": ("none", "fori", "scan", "unrolled"),
    "power": ("product", "square", "power", "integer_pow"),
    "gate": ("library", "written", "reciprocal"),
    "select": ("where", "product", "maximum"),
    "cast": ("tile", "load"),
    "rows": (64, 8, 128),
    "columns": (512, 1024, 256),
}
MAPS = ("swiglu", "gelu", "relu squared")


def fits(kind: str, style: Style) -> bool:
    usual = Style()
    return (
        (style.loop == "none" or style.view in ("rows", "tiles"))
        and (kind != "swiglu" or style.power == usual.power)
        and (kind == "swiglu" or style.gate == usual.gate)
        and (kind == "relu squared" or style.select == usual.select)
    )


def operands(kind: str, size: Size) -> list[Operand]:
    shape = size(8192, 1024, 32), size(4096, 2048, 256)
    return [Operand(shape, size.dtype)] * (2 if kind == "swiglu" else 1)


def reference(kind: str, x: Any, up: Any = None) -> Any:
    a = x.astype(F32)
    if kind == "swiglu":
        return (jax.nn.silu(a) * up.astype(F32)).astype(x.dtype)
    if kind == "gelu":
        return jax.nn.gelu(a, approximate=True).astype(x.dtype)
    return jnp.square(jax.nn.relu(a)).astype(x.dtype)


def problem(kind: str) -> Problem:
    return Problem(
        kind, lambda size: operands(kind, size), lambda *x: reference(kind, *x)
    )


class Work:
    """What is made of an element, on tiles of any shape."""

    def __init__(self, kind: str, style: Style) -> None:
        self.kind, self.style = kind, style

    def __call__(self, x: Any, *more: Any) -> Any:
        dtype = x.dtype
        if self.style.cast == "tile":
            x, more = x.astype(F32), tuple(v.astype(F32) for v in more)
        wide = lambda v: v.astype(F32)
        if self.kind == "swiglu":
            made = self._gate(wide(x)) * wide(more[0])
        elif self.kind == "gelu":
            inner = ROOT_2_OVER_PI * (wide(x) + CUBIC * self._power(wide(x), 3))
            made = 0.5 * wide(x) * (1.0 + jnp.tanh(inner))
        else:
            made = self._power(self._positive(wide(x)), 2)
        return made.astype(dtype)

    def _gate(self, x: Any) -> Any:
        kind = self.style.gate
        if kind == "written":
            return x / (1.0 + jnp.exp(-x))
        if kind == "reciprocal":
            return x * (1.0 / (1.0 + jnp.exp(-x)))
        return x * jax.nn.sigmoid(x)

    def _power(self, x: Any, n: int) -> Any:
        kind = self.style.power
        if kind == "power":
            return x**n
        if kind == "integer_pow":
            return lax.integer_pow(x, n)
        square = jnp.square(x) if kind == "square" else x * x
        return square if n == 2 else square * x

    def _positive(self, x: Any) -> Any:
        kind = self.style.select
        if kind == "product":
            return x * (x > 0).astype(x.dtype)
        if kind == "maximum":
            return jnp.maximum(x, 0.0)
        return jnp.where(x > 0, x, 0.0)


def maps(kind: str, style: Style) -> Callable[[Size], Callable]:
    assert fits(kind, style), (kind, style)

    def make(size: Size) -> Callable:
        rows, columns = size.block(style.rows), size.block(style.columns)

        def function(*arrays):
            work = Work(kind, style)
            if style.view in ("flat", "pointers"):
                flat = [x.reshape(-1) for x in arrays]
                made = _flat(work, rows * columns, flat)
            elif style.view == "three":
                made = _three(work, rows, columns, arrays)
            elif style.view == "whole":
                made = _whole(work, rows, columns, arrays)
            else:
                made = _blocks(work, rows, columns, arrays)
            return made.reshape(arrays[0].shape)

        return function

    return make


def _in_parts(work: Work, refs: Any, o_ref: Any, columns: int) -> None:
    """All of a block, at once or part by part along its rows."""
    kind, width = work.style.loop, o_ref.shape[1]
    if kind == "none":
        o_ref[...] = work(*(ref[...] for ref in refs))
        return

    def part(j, _=None):
        at = (slice(None), pl.ds(j * columns, columns))
        o_ref[at] = work(*(ref[at] for ref in refs))

    if kind == "scan":
        over = lambda _, j: (part(j), None)
        lax.scan(over, None, jnp.arange(width // columns, dtype=I32))
    elif kind == "fori":
        lax.fori_loop(0, width // columns, part, None)
    else:
        for j in range(width // columns):
            part(j)


def _blocks(work: Work, rows: int, columns: int, arrays: Any) -> Any:
    x = arrays[0]
    n, width = x.shape
    tiles = work.style.view == "tiles"
    inner = min(columns, width)
    across = min(4 * inner, width) if work.style.loop != "none" else inner

    def kernel(*refs):
        *refs, o_ref = refs
        _in_parts(work, refs, o_ref, inner)

    spec = (
        pl.BlockSpec((rows, across), lambda i, j: (i, j))
        if tiles
        else pl.BlockSpec((rows, width), lambda i: (i, 0))
    )
    return pl.pallas_call(
        kernel,
        out_shape=Shape(x.shape, x.dtype),
        grid=(n // rows, width // across) if tiles else (n // rows,),
        in_specs=[spec] * len(arrays),
        out_specs=spec,
    )(*arrays)


def _three(work: Work, rows: int, columns: int, arrays: Any) -> Any:
    """Groups of 8 rows as a dimension of their own, squeezed away."""
    n, width = arrays[0].shape
    folded = [x.reshape(n // rows, rows, width) for x in arrays]

    def kernel(*refs):
        *refs, o_ref = refs
        o_ref[...] = work(*(ref[...] for ref in refs))

    spec = pl.BlockSpec((None, rows, columns), lambda b, j: (b, 0, j))
    return pl.pallas_call(
        kernel,
        out_shape=Shape(folded[0].shape, folded[0].dtype),
        grid=(n // rows, width // columns),
        in_specs=[spec] * len(folded),
        out_specs=spec,
    )(*folded)


def _flat(work: Work, block: int, arrays: Any) -> Any:
    """One dimension: blocks, or pointers with a mask as in Triton."""
    (n,) = arrays[0].shape
    pointers = work.style.view == "pointers"

    def kernel(*refs):
        *refs, o_ref = refs
        if not pointers:
            o_ref[...] = work(*(ref[...] for ref in refs))
            return
        at = pl.program_id(0) * block + jnp.arange(block, dtype=I32)
        mask = at < n
        found = [pl.load(ref, (at,), mask=mask, other=0.0) for ref in refs]
        pl.store(o_ref, (at,), work(*found), mask=mask)

    spec = pl.BlockSpec(memory_space=pl.ANY)
    if not pointers:
        spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        out_shape=Shape((n,), arrays[0].dtype),
        grid=(n // block,),
        in_specs=[spec] * len(arrays),
        out_specs=spec,
    )(*arrays)


def _whole(work: Work, rows: int, columns: int, arrays: Any) -> Any:
    x = arrays[0]
    n, width = x.shape

    def kernel(*refs):
        *refs, o_ref = refs
        i, j = pl.program_id(0), pl.program_id(1)
        at = pl.ds(i * rows, rows), pl.ds(j * columns, columns)
        o_ref[at] = work(*(ref[at] for ref in refs))

    spec = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=Shape(x.shape, x.dtype),
        grid=(n // rows, width // columns),
        in_specs=[spec] * len(arrays),
        out_specs=spec,
    )(*arrays)
