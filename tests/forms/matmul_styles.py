"""Matrix products, spelled by choices; see `attention_styles.py`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Shape, Size


@dataclass(frozen=True)
class What:
    """What is computed."""

    x_turned: bool = False  # x is stored as (k, m)
    w_turned: bool = False  # w is stored as (n, k)
    batch: bool = False
    edge: bool = False  # sizes that no block divides
    wide: bool = False  # the result is f32


@dataclass(frozen=True)
class Style:
    """How it is written."""

    loop: str = "grid"  # fori, while, scan, none, pipeline, pipeline 3
    acc: str = "scratch"  # output; loops inside a program carry a value
    start: str = "when"  # store, select
    refs: str = "blocks"  # whole
    order: str = "grid"  # columns first, k first, 1-D, grouped
    product: str = "dot_general"  # dot, matmul, einsum
    lead: str = "squeezed"  # leading, rank 3, vmap
    edge: str = "fill"  # mask
    block_m: int = 128
    block_n: int = 128
    block_k: int = 128


AXES: dict[str, tuple[Any, ...]] = {
    "loop": ("grid", "fori", "while", "scan", "none", "pipeline", "pipeline 3"),
    "acc": ("scratch", "output"),
    "start": ("when", "store", "select"),
    "refs": ("blocks", "whole"),
    "order": ("grid", "columns first", "k first", "1-D", "grouped"),
    "product": ("dot_general", "dot", "matmul", "einsum"),
    "lead": ("squeezed", "leading", "rank 3", "vmap"),
    "edge": ("fill", "mask"),
    "block_m": (128, 64, 256),
    "block_n": (128, 64, 256),
    "block_k": (128, 64, 32),
}


def fits(what: What, style: Style) -> bool:
    """Whether the choices can be written together."""
    in_grid = style.loop == "grid"
    inner = style.loop in ("fori", "while", "scan")
    pipelined = style.loop.startswith("pipeline")
    return (
        (in_grid or style.acc == "scratch")
        and (style.acc != "output" or what.wide)
        and (in_grid or style.start == "when")
        and (style.refs == "blocks" or inner)
        and (style.order != "k first" or (in_grid and style.acc == "output"))
        and (style.loop != "pipeline 3" or style.order == "grid")
        and (not pipelined or not (what.batch or what.edge))
        and (not what.edge or in_grid)
        and (not what.batch or style.refs == "blocks")
        and (not what.batch or style.order in ("grid", "columns first"))
        and (style.lead != "rank 3" or (what.batch and style.loop in ("grid", "none")))
        and (style.lead == "squeezed" or what.batch)
    )


def reference(what: What, x, w):
    x = x.swapaxes(-1, -2) if what.x_turned else x
    w = w.swapaxes(-1, -2) if what.w_turned else w
    return jnp.matmul(x, w, preferred_element_type=F32).astype(
        F32 if what.wide else x.dtype
    )


class Product:
    """Shapes, index maps and accesses of one call."""

    def __init__(self, what: What, style: Style, size: Size, x: Any, w: Any) -> None:
        self.what, self.style = what, style
        self.bm, self.bn, self.bk = (
            size.block(n) for n in (style.block_m, style.block_n, style.block_k)
        )
        self.m, self.k = x.shape[-2:][::-1] if what.x_turned else x.shape[-2:]
        self.n = w.shape[-2] if what.w_turned else w.shape[-1]
        if style.loop == "none":
            self.bk = self.k
        self.batch = x.shape[0] if what.batch else 0
        self.dtype = F32 if what.wide else x.dtype
        self.rows, self.columns, self.steps = (
            pl.cdiv(a, b)
            for a, b in ((self.m, self.bm), (self.n, self.bn), (self.k, self.bk))
        )

    @property
    def in_grid(self) -> bool:
        return self.style.loop == "grid"

    @property
    def grid(self) -> tuple[int, ...]:
        steps = (self.steps,) if self.in_grid else ()
        order = self.style.order
        if order in ("1-D", "grouped"):
            return (self.rows * self.columns, *steps)
        if order == "k first":
            return (self.steps, self.rows, self.columns)
        pair = (self.rows, self.columns)
        pair = pair[::-1] if order == "columns first" else pair
        return (*((self.batch,) if self.batch else ()), *pair, *steps)

    def ids(self, *ids: Any) -> tuple[Any, Any, Any, Any]:
        """Batch, row of blocks, column of blocks, step along k."""
        order, b = self.style.order, 0
        if order == "k first":
            return 0, ids[1], ids[2], ids[0]
        if self.batch:
            b, *ids = ids
        k = ids[-1] if self.in_grid else None
        if order == "1-D":
            return b, ids[0] // self.columns, ids[0] % self.columns, k
        if order == "grouped":
            return (b, *self._grouped(ids[0]), k)
        i, j = ids[0], ids[1]
        return (b, j, i, k) if order == "columns first" else (b, i, j, k)

    def _grouped(self, number: Any) -> tuple[Any, Any]:
        """Groups of 8 rows, columns slower within them, so that caches are reused."""
        group = 8
        per_group = group * self.columns
        first = number // per_group * group
        height = jnp.minimum(self.rows - first, group)
        return first + number % per_group % height, number % per_group // height

    def here(self) -> tuple[Any, Any, Any, Any]:
        return self.ids(*(pl.program_id(a) for a in range(len(self.grid))))

    def spec(self, name: str) -> Any:
        if self.style.refs == "whole" or self.style.loop == "pipeline 3":
            return pl.BlockSpec(memory_space=pl.ANY)
        if self.style.loop == "pipeline" and name != "o":
            return pl.BlockSpec(memory_space=pl.ANY)
        depth = self.bk if self.in_grid else self.k
        block = {"x": (self.bm, depth), "w": (depth, self.bn), "o": (self.bm, self.bn)}
        turned = {"x": self.what.x_turned, "w": self.what.w_turned}.get(name, False)

        def place(*ids):
            b, i, j, k = self.ids(*ids)
            k = 0 if k is None else k
            at = {"x": (i, k), "w": (k, j), "o": (i, j)}[name]
            return (*((b,) if self.batch else ()), *(at[::-1] if turned else at))

        shape = block[name][::-1] if turned else block[name]
        lead = {"squeezed": (None,), "vmap": (None,)}.get(self.style.lead, (1,))
        fill = self.what.edge and self.style.edge == "fill" and name != "o"
        edge = {"fill": 0} if fill else {}
        return pl.BlockSpec((*(lead if self.batch else ()), *shape), place, **edge)

    def read(self, name: str, ref: Any, ids: Any, k: Any) -> Any:
        """A block of x or w; `k` is the step of a loop inside."""
        _, i, j, _ = ids
        whole = self.style.refs == "whole"
        lead = (0,) if self.batch and self.style.lead == "leading" else ()
        if not whole and (k is None):
            return ref[lead] if lead else ref[...]
        own = (
            pl.ds(i * self.bm, self.bm) if name == "x" else pl.ds(j * self.bn, self.bn)
        )
        own = own if whole else slice(None)
        along = pl.ds(k * self.bk, self.bk)
        turned = self.what.x_turned if name == "x" else self.what.w_turned
        first = (name == "x") != turned
        return ref[(*lead, own, along) if first else (*lead, along, own)]

    def multiply(self, x: Any, w: Any) -> Any:
        what, kind = self.what, self.style.product
        lead = self.style.lead == "rank 3" and bool(self.batch)
        at = (int(lead) + (not what.x_turned), int(lead) + what.w_turned)
        if kind == "dot_general" or (lead and kind == "dot"):
            batch = ((0,), (0,)) if lead else ((), ())
            dims = (((at[0],), (at[1],)), batch)
            return lax.dot_general(x, w, dims, preferred_element_type=F32)
        if kind == "einsum":
            names = ("km" if what.x_turned else "mk", "nk" if what.w_turned else "kn")
            b = "b" * lead
            text = f"{b}{names[0]},{b}{names[1]}->{b}mn"
            return jnp.einsum(text, x, w, preferred_element_type=F32)
        x = x.swapaxes(-1, -2) if what.x_turned else x
        w = w.swapaxes(-1, -2) if what.w_turned else w
        product = jnp.dot if kind == "dot" else jnp.matmul
        return product(x, w, preferred_element_type=F32)

    def inside(self, x: Any, w: Any, k: Any) -> tuple[Any, Any]:
        """Both blocks with zeros past the end along k."""
        if not self.what.edge or self.style.edge == "fill" or self.k % self.bk == 0:
            return x, w
        axes = x.ndim - 2 + (not self.what.x_turned), w.ndim - 2 + self.what.w_turned
        masked = []
        for block, axis in zip((x, w), axes, strict=True):
            at = k * self.bk + lax.broadcasted_iota(I32, block.shape, axis)
            masked.append(jnp.where(at < self.k, block, jnp.zeros_like(block)))
        return masked[0], masked[1]


def matmul(what: What, style: Style) -> Callable[[Size], Callable]:
    """The function of x and w, for a size."""
    assert fits(what, style), (what, style)

    def make(size: Size) -> Callable:
        if style.lead == "vmap":
            single, plain = replace(what, batch=False), replace(style, lead="squeezed")
            return lambda x, w: jax.vmap(matmul(single, plain)(size))(x, w)

        def function(x, w):
            product = Product(what, style, size, x, w)
            return _call(product)(x, w)

        return function

    return make


def _call(p: Product) -> Callable:
    lead = (p.batch,) if p.batch else ()
    shape = Shape((*lead, p.m, p.n), p.dtype)
    if p.style.loop == "pipeline 3":
        return _nested(p, shape)
    body = _grid_body if p.in_grid else _loop_body
    tile = ((1,) if p.style.lead == "rank 3" and lead else ()) + (p.bm, p.bn)
    scratch = p.style.acc == "scratch" and (p.in_grid or p.style.loop == "pipeline")
    return pl.pallas_call(
        body(p),
        out_shape=shape,
        grid=p.grid,
        in_specs=[p.spec("x"), p.spec("w")],
        out_specs=p.spec("o"),
        scratch_shapes=[pltpu.VMEM(tile, F32)] if scratch else [],
    )


def _write(p: Product, o_ref: Any, ids: Any, value: Any) -> None:
    value = value.astype(o_ref.dtype)
    if p.style.refs == "whole":
        _, i, j, _ = ids
        o_ref[pl.ds(i * p.bm, p.bm), pl.ds(j * p.bn, p.bn)] = value
    elif p.batch and p.style.lead == "leading":
        o_ref[0] = value
    else:
        o_ref[...] = value


def _grid_body(p: Product) -> Callable:
    def body(x_ref, w_ref, o_ref, *scratch):
        ids = p.here()
        k = ids[3]
        lead = p.batch and p.style.lead == "leading" and not scratch
        acc_ref = scratch[0] if scratch else o_ref.at[0] if lead else o_ref
        if p.style.start == "when":

            @pl.when(k == 0)
            def _():
                acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

        x, w = p.inside(p.read("x", x_ref, ids, None), p.read("w", w_ref, ids, None), k)
        part = p.multiply(x, w)
        if p.style.start == "when":
            acc_ref[...] += part
        elif p.style.start == "select":
            acc_ref[...] = jnp.where(k == 0, 0.0, acc_ref[...]) + part
        else:
            first = lambda: acc_ref.__setitem__(..., part)
            later = lambda: acc_ref.__setitem__(..., acc_ref[...] + part)
            lax.cond(k == 0, first, later)
        if scratch:

            @pl.when(k == p.steps - 1)
            def _():
                _write(p, o_ref, ids, acc_ref[...])

    return body


def _loop_body(p: Product) -> Callable:
    kind = p.style.loop

    def body(x_ref, w_ref, o_ref, *scratch):
        ids = p.here()
        if kind == "pipeline":
            _write(p, o_ref, ids, _over_k(p, x_ref, w_ref, ids, scratch[0]))
            return
        if kind == "none":
            blocks = p.read("x", x_ref, ids, None), p.read("w", w_ref, ids, None)
            _write(p, o_ref, ids, p.multiply(*blocks))
            return

        def step(k, acc):
            x, w = p.read("x", x_ref, ids, k), p.read("w", w_ref, ids, k)
            return acc + p.multiply(x, w)

        acc = jnp.zeros((p.bm, p.bn), F32)
        if kind == "while":
            going = lambda carry: carry[0] < p.steps
            advance = lambda carry: (carry[0] + 1, step(*carry))
            acc = lax.while_loop(going, advance, (jnp.int32(0), acc))[1]
        elif kind == "scan":
            over = lambda acc, k: (step(k, acc), None)
            acc = lax.scan(over, acc, jnp.arange(p.steps, dtype=I32))[0]
        else:
            acc = lax.fori_loop(0, p.steps, step, acc)
        _write(p, o_ref, ids, acc)

    return body


def _turned(p: Product, name: str, shape: tuple, at: Callable) -> Any:
    turned = p.what.x_turned if name == "x" else p.what.w_turned
    if turned:
        return pl.BlockSpec(shape[::-1], lambda *ids: at(*ids)[::-1])
    return pl.BlockSpec(shape, at)


def _over_k(p: Product, x_ref, w_ref, ids, acc_ref) -> Any:
    """`emit_pipeline` along k within one program."""
    _, i, j, _ = ids
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def inner(x_ref, w_ref):
        acc_ref[...] += p.multiply(x_ref[...], w_ref[...])

    specs = [
        _turned(p, "x", (p.bm, p.bk), lambda k: (i, k)),
        _turned(p, "w", (p.bk, p.bn), lambda k: (k, j)),
    ]
    pltpu.emit_pipeline(inner, grid=(p.steps,), in_specs=specs)(x_ref, w_ref)
    return acc_ref[...]


def _nested(p: Product, shape: Any) -> Callable:
    """A kernel without a grid, whose body is one pipeline of three axes."""

    def body(x_ref, w_ref, o_ref, acc_ref):
        def inner(x_ref, w_ref, o_ref):
            @pl.when(pl.program_id(2) == 0)
            def _():
                acc_ref[...] = jnp.zeros_like(acc_ref)

            acc_ref[...] += p.multiply(x_ref[...], w_ref[...])

            @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
            def _():
                o_ref[...] = acc_ref[...].astype(o_ref.dtype)

        pltpu.emit_pipeline(
            inner,
            grid=(p.rows, p.columns, p.steps),
            in_specs=[
                _turned(p, "x", (p.bm, p.bk), lambda i, j, k: (i, k)),
                _turned(p, "w", (p.bk, p.bn), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((p.bm, p.bn), lambda i, j, k: (i, j))],
        )(x_ref, w_ref, o_ref)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        out_shape=shape,
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.VMEM((p.bm, p.bn), F32)],
    )
