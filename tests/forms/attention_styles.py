"""Attention, spelled by choices: each field of a `Style` is how some people write it.

`attention(what, style)` composes them to one function; `random_style` draws them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.forms.form import F32, I32, Shape, Size

LOG2_E = math.log2(math.e)
FINITE = -1e30
LANES = 128


@dataclass(frozen=True)
class What:
    """What is computed: shapes and masks. Lengths and heads are those of a size."""

    causal: bool = False
    window: int = 0  # keys seen, of which the last is the query's own
    group: int = 1  # query heads per head of keys
    softcap: float = 0.0
    segments: bool = False
    bias: bool = False
    sinks: bool = False
    alibi: bool = False
    depth: int = 128
    value_depth: int = 0
    edge: bool = False  # a length that no block divides

    @property
    def is_plain(self) -> bool:
        """No row has a block of keys that is masked in all."""
        return not (self.window or self.segments)


@dataclass(frozen=True)
class Style:
    """How it is written."""

    loop: str = "grid"  # fori, while, scan, unrolled, two loops, pipeline
    stats: str = "column"  # (n, 1); vector: (n,); lanes: (n, 128); tiled: and repeated
    stats_at: str = "scratch"  # outputs; "all outputs": the accumulator as well
    heads: str = "squeezed"  # leading, values, flat, whole, vmap
    mask: str = "finite"  # infinite, additive, zeroed, multiplied
    low: str = "finite"  # infinite, lowest: where maxima start
    places: str = "iota"  # arange: of rows and columns
    exp: str = "exp"  # exp2
    divide: str = "end"  # reciprocal
    scale: str = "scores"  # queries
    product: str = "dot_general"  # dot, einsum, matmul
    order: str = "grid"  # queries first, flat
    clamp: bool = False  # index maps stop where the guard does
    block_q: int = 128
    block_k: int = 128
    fill: bool = False  # edge blocks by fill=, else by selects


AXES: dict[str, tuple[Any, ...]] = {
    "loop": ("grid", "fori", "while", "scan", "unrolled", "two loops", "pipeline"),
    "stats": ("column", "vector", "lanes", "tiled"),
    "stats_at": ("scratch", "outputs", "all outputs"),
    "heads": ("squeezed", "leading", "values", "flat", "whole", "vmap"),
    "mask": ("finite", "infinite", "additive", "zeroed", "multiplied"),
    "low": ("finite", "infinite", "lowest"),
    "places": ("iota", "arange"),
    "exp": ("exp", "exp2"),
    "divide": ("end", "reciprocal"),
    "scale": ("scores", "queries"),
    "product": ("dot_general", "dot", "einsum", "matmul"),
    "order": ("grid", "queries first", "flat"),
    "clamp": (False, True),
    "block_q": (128, 64, 256),
    "block_k": (128, 64, 256),
}


def fits(what: What, style: Style) -> bool:
    """Whether the choices can be written together."""
    in_grid = style.loop == "grid"
    narrow = (what.depth, what.value_depth or what.depth)
    return (
        (in_grid or style.stats_at == "scratch")
        and (in_grid or not style.clamp)
        and (style.loop not in ("scan", "unrolled") or not (what.causal or what.window))
        and (style.loop != "two loops" or (what.causal and not what.window))
        and (style.mask != "infinite" or what.is_plain)
        and (not what.edge or (in_grid and style.heads != "whole"))
        and (style.heads != "vmap" or style.loop != "pipeline")
        and (
            style.heads != "vmap" or not (what.segments or what.bias or what.group > 1)
        )
        and (style.heads != "vmap" or not (what.sinks or what.alibi))
        and (style.stats != "tiled" or (style.block_k >= LANES and min(narrow) >= 64))
        and (style.stats != "tiled" or narrow[1] in (64, 128))
    )


# --- operands ---


@dataclass(frozen=True)
class Dims:
    batch: int
    heads: int
    kv_heads: int
    length: int
    depth: int
    value_depth: int

    @staticmethod
    def of(q: Any, k: Any, v: Any) -> "Dims":
        batch, heads, length, depth = q.shape
        return Dims(batch, heads, k.shape[1], length, depth, v.shape[3])


def extras(what: What) -> tuple[str, ...]:
    """The operands after q, k and v."""
    names = ("q_segments", "k_segments") * what.segments + ("bias",) * what.bias
    return names + ("sinks",) * what.sinks + ("slopes",) * what.alibi


# --- one step ---


class Step:
    """A block of keys absorbed into the running softmax, as values."""

    def __init__(self, what: What, style: Style, size: Size, dims: Dims) -> None:
        self.what, self.style, self.dims = what, style, dims
        self.bq, self.bk = size.block(style.block_q), size.block(style.block_k)
        self.base2 = style.exp == "exp2"
        self.power = jnp.exp2 if self.base2 else jnp.exp
        self.factor = LOG2_E if self.base2 else 1.0

    def queries(self, q: Any) -> Any:
        if self.style.scale == "queries":
            return (q * jnp.asarray(self._scale(), q.dtype)).astype(q.dtype)
        return q

    def _scale(self) -> float:
        late = self.what.softcap or self.what.bias or self.what.alibi
        return self.dims.depth**-0.5 * (1.0 if late else self.factor)

    def start(self, sink: Any = None) -> tuple[Any, Any, Any]:
        """Maximum, sum and accumulator before the first step."""
        n = {"column": (self.bq, 1), "vector": (self.bq,)}
        shape = n.get(self.style.stats, (self.bq, LANES))
        low = {"infinite": -jnp.inf, "lowest": -0.7 * float(jnp.finfo(F32).max)}
        first = low.get(self.style.low, FINITE)
        if self.style.mask == "infinite":
            first = -jnp.inf
        m = jnp.full(shape, first if sink is None else sink * self.factor, F32)
        l = jnp.full(shape, 0.0 if sink is None else 1.0, F32)
        return m, l, jnp.zeros((self.bq, self.dims.value_depth), F32)

    def scores(self, q: Any, k: Any) -> Any:
        product = self.style.product
        if product == "dot":
            s = jnp.dot(q, k.T, preferred_element_type=F32)
        elif product == "einsum":
            s = jnp.einsum("qd,kd->qk", q, k, preferred_element_type=F32)
        elif product == "matmul":
            s = jnp.matmul(q, k.swapaxes(0, 1), preferred_element_type=F32)
        else:
            dims = (((1,), (1,)), ((), ()))
            s = lax.dot_general(q, k, dims, preferred_element_type=F32)
        return s if self.style.scale == "queries" else s * self._scale()

    def change(self, s: Any, i: Any, j: Any, more: dict[str, Any]) -> Any:
        """Soft cap, bias and slopes."""
        what = self.what
        if what.softcap:
            s = what.softcap * jnp.tanh(s / what.softcap)
        if what.bias:
            s = s + more["bias"].astype(F32)
        if what.alibi:
            rows, columns = self._places(s.shape, i, j)
            s = s - more["slopes"] * (rows - columns).astype(F32)
        late = what.softcap or what.bias or what.alibi
        return s * self.factor if late and self.base2 else s

    def _places(self, shape: tuple[int, ...], i: Any, j: Any) -> tuple[Any, Any]:
        if self.style.places == "arange":
            down, across = (jnp.arange(n, dtype=I32) for n in shape)
            return i * self.bq + down[:, None], j * self.bk + across[None, :]
        rows = i * self.bq + lax.broadcasted_iota(I32, shape, 0)
        return rows, j * self.bk + lax.broadcasted_iota(I32, shape, 1)

    def seen(self, shape: tuple[int, ...], i: Any, j: Any, more: dict, past) -> Any:
        """Which keys a query sees; None for all. `past`: the keys are before it."""
        what, parts = self.what, []
        rows, columns = self._places(shape, i, j)
        if what.causal and not past:
            parts.append(rows >= columns)
        if what.window:
            parts.append(rows - columns < what.window)
        if what.segments:
            parts.append(more["q_segments"] == more["k_segments"])
        if what.edge:
            parts.append(columns < self.dims.length)
        seen = None
        for part in parts:
            seen = part if seen is None else jnp.logical_and(seen, part)
        return seen

    def __call__(
        self, q, k, v, state, i: Any, j: Any, more: dict, past: bool = False
    ) -> tuple[Any, Any, Any]:
        m, l, acc = state
        s = self.change(self.scores(q, k), i, j, more)
        seen = self.seen(s.shape, i, j, more, past)
        if seen is not None:
            s = self._masked(s, seen)
        flat = self.style.stats == "vector"
        top = s.max(axis=-1) if flat else s.max(axis=-1, keepdims=True)
        new = jnp.maximum(m, top)  # lanes: every lane holds the same
        alpha = self.power(m - new)
        p = self.power(s - self._wide(new, s.shape[1]))
        if seen is not None and self.style.mask == "zeroed":
            p = jnp.where(seen, p, 0.0)
        if seen is not None and self.style.mask == "multiplied":
            p = p * seen.astype(F32)
        l = alpha * l + (p.sum(axis=-1) if flat else p.sum(axis=-1, keepdims=True))
        if self.what.edge and not self.style.fill:
            inside = j * self.bk + lax.broadcasted_iota(I32, v.shape, 0)
            v = jnp.where(inside < self.dims.length, v, jnp.zeros_like(v))
        product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=F32)
        return new, l, acc * self._wide(alpha, acc.shape[1]) + product

    def _masked(self, s: Any, seen: Any) -> Any:
        if self.style.mask == "infinite":
            return jnp.where(seen, s, -jnp.inf)
        if self.style.mask == "additive":
            return s + jnp.where(seen, 0.0, FINITE)
        return jnp.where(seen, s, FINITE)

    def _wide(self, stat: Any, width: int) -> Any:
        """A statistic beside `width` columns."""
        kind = self.style.stats
        if kind == "vector":
            return stat[:, None]
        if kind == "lanes":
            return stat[:, :1]
        if kind == "tiled":
            copies, rest = divmod(width, LANES)
            return stat[:, :rest] if rest else pltpu.repeat(stat, copies, 1)
        return stat

    def finish(self, state: Any, dtype: Any) -> Any:
        _, l, acc = state
        l = self._wide(l, acc.shape[1])
        if self.style.divide == "reciprocal":
            return (acc * (1.0 / l)).astype(dtype)
        return (acc / l).astype(dtype)


# --- the blocks ---


class Layout:
    """Which blocks a program sees, and how the kernel reads them."""

    def __init__(self, step: Step) -> None:
        self.step, self.style, self.dims = step, step.style, step.dims
        self.rows = pl.cdiv(self.dims.length, step.bq)
        self.columns = pl.cdiv(self.dims.length, step.bk)
        self.inner = self.style.loop != "grid"
        self.flat = self.style.heads == "flat"

    @property
    def grid(self) -> tuple[int, ...]:
        d, keys = self.dims, () if self.inner else (self.columns,)
        if self.style.order == "flat":
            return (d.batch * d.heads * self.rows, *keys)
        outer = (d.batch * d.heads,) if self.flat else (d.batch, d.heads)
        if self.style.order == "queries first":
            return (self.rows, *outer, *keys)
        return (*outer, self.rows, *keys)

    def ids(self, *ids: Any) -> tuple[Any, Any, Any, Any]:
        """Batch, head, block of queries, block of keys."""
        j = None if self.inner else ids[-1]
        ids = ids if self.inner else ids[:-1]
        if self.style.order == "flat":
            head, i = ids[0] // self.rows, ids[0] % self.rows
            return (*self._pair(head), i, j)
        if self.style.order == "queries first":
            i, *head = ids
        else:
            *head, i = ids
        return (*(self._pair(head[0]) if self.flat else head), i, j)

    def _pair(self, head: Any) -> tuple[Any, Any]:
        return head // self.dims.heads, head % self.dims.heads

    def steps(self, i: Any) -> tuple[Any, Any]:
        """The first block of keys that queries see, and the one after the last."""
        what, step = self.step.what, self.step
        first, end = 0, self.columns
        if what.causal:
            end = jnp.minimum(self.columns, pl.cdiv((i + 1) * step.bq, step.bk))
        if what.window:
            first = jnp.maximum(0, i * step.bq - what.window + 1) // step.bk
        return first, end

    def spec(self, name: str) -> Any:
        """The BlockSpec of an operand or of the result."""
        step, style, d = self.step, self.style, self.dims
        keys = name in ("k", "v", "k_segments")
        if name in ("q", "k", "v", "o") and style.heads == "whole":
            return pl.BlockSpec(memory_space=pl.ANY)
        if name in ("k", "v") and style.loop == "pipeline":
            return pl.BlockSpec(memory_space=pl.ANY)
        length = step.bq if not keys else d.length if self.inner else step.bk
        if name in ("q_segments", "k_segments", "bias", "sinks", "slopes"):
            return self._extra(name, length)
        width = d.value_depth if name in ("v", "o") else d.depth
        width = {"m": _stat_width(style), "l": _stat_width(style)}.get(name, width)
        group = d.heads // d.kv_heads if keys else 1

        def place(*ids):
            b, h, i, j = self.ids(*ids)
            along = i if not keys else 0 if self.inner else self._column(i, j)
            if self.flat:
                kv = d.kv_heads if keys else d.heads
                return b * kv + h // group if group > 1 else b * kv + h, along, 0
            return b, h // group if group > 1 else h, along, 0

        lead = {"squeezed": (None, None), "flat": (1,)}.get(style.heads, (1, 1))
        edge = {"fill": 0} if self.step.what.edge and style.fill and keys else {}
        return pl.BlockSpec((*lead, length, width), place, **edge)

    def _column(self, i: Any, j: Any) -> Any:
        if not self.style.clamp:
            return j
        first, end = self.steps(i)
        return jnp.minimum(jnp.maximum(j, first), end - 1)

    def _extra(self, name: str, length: int) -> Any:
        def along(*ids):
            b, h, i, j = self.ids(*ids)
            j = 0 if self.inner else j
            return {
                "q_segments": (b, i, 0),
                "k_segments": (b, 0, j),
                "bias": (h, i, j),
                "sinks": (h, 0, 0),
                "slopes": (h, 0, 0),
            }[name]

        columns = self.dims.length if self.inner else self.step.bk
        shape = {
            "q_segments": (length, 1),
            "k_segments": (1, length),
            "bias": (length, columns),
        }.get(name, (1, 1))
        return pl.BlockSpec((None, *shape), along)

    def read(self, ref: Any, ids: Any, start: Any, size: int, group: int = 1) -> Any:
        """Rows of a ref; `start` counts in the array, None: all of the block."""
        b, h, *_ = ids
        heads = self.style.heads
        if heads == "whole" or (self.style.loop == "pipeline" and start is not None):
            return ref[b, h // group, pl.ds(start, size), :]
        if start is None:
            if heads == "values":
                return ref[...].reshape(ref.shape[-2:])
            return {"leading": lambda: ref[0, 0], "flat": lambda: ref[0]}.get(
                heads, lambda: ref[...]
            )()
        rows = pl.ds(start, size)
        if heads == "values":
            return ref[:, :, rows, :].reshape(size, ref.shape[-1])
        if heads == "leading":
            return ref[0, 0, rows, :]
        return ref[0, rows, :] if heads == "flat" else ref[rows, :]

    def write(self, ref: Any, ids: Any, value: Any) -> None:
        b, h, i, _ = ids
        heads = self.style.heads
        if heads == "whole":
            ref[b, h, pl.ds(i * self.step.bq, self.step.bq), :] = value
        elif heads == "leading":
            ref[0, 0] = value
        elif heads == "values":
            ref[...] = value.reshape(ref.shape)
        elif heads == "flat":
            ref[0] = value
        else:
            ref[...] = value

    def extra(self, refs: dict[str, Any], j: Any) -> dict[str, Any]:
        """The other operands at a block of keys."""
        found = {}
        for name, ref in refs.items():
            value = ref
            if self.inner and name in ("k_segments", "bias"):
                value = ref[:, pl.ds(j * self.step.bk, self.step.bk)]
            else:
                value = ref[...]
            found[name] = value
        return found


def _stat_width(style: Style) -> int:
    return LANES if style.stats in ("lanes", "tiled") else 1


# --- the kernels ---


def attention(what: What, style: Style) -> Callable[[Size], Callable]:
    """The function of q, k, v and more, for a size."""
    assert fits(what, style), (what, style)

    def make(size: Size) -> Callable:
        def function(q, k, v, *more):
            if style.heads == "vmap":
                return jax.vmap(jax.vmap(lambda *x: _one_head(what, style, size, *x)))(
                    q, k, v
                )
            return _call(what, style, size, q, k, v, *more)

        return function

    return make


def _one_head(what: What, style: Style, size: Size, q, k, v):
    lead = lambda x: x[None, None]
    plain = replace(style, heads="squeezed")
    return _call(what, plain, size, lead(q), lead(k), lead(v))[0, 0]


def _call(what: What, style: Style, size: Size, q, k, v, *more):
    dims = Dims.of(q, k, v)
    step = Step(what, style, size, dims)
    layout = Layout(step)
    names = ("q", "k", "v", *extras(what))
    kernel = _grid_kernel if style.loop == "grid" else _loop_kernel
    body, scratch, stats = kernel(step, layout, names)
    shape = (dims.batch, dims.heads, dims.length)
    out = [Shape((*shape, dims.value_depth), F32 if "o" in stats else q.dtype)]
    out += [Shape((*shape, _stat_width(style)), F32) for n in stats if n != "o"]
    flatten = lambda x: x.reshape(-1, *x.shape[2:])
    if layout.flat:
        q, k, v = map(flatten, (q, k, v))
        out = [Shape((s.shape[0] * s.shape[1], *s.shape[2:]), s.dtype) for s in out]
    made = pl.pallas_call(
        body,
        out_shape=out,
        grid=layout.grid,
        in_specs=[layout.spec(name) for name in names],
        out_specs=[
            layout.spec(name) for name in ("o", *(n for n in stats if n != "o"))
        ],
        scratch_shapes=scratch,
    )(q, k, v, *more)
    return made[0].reshape(*shape, dims.value_depth).astype(q.dtype)


def _memory(step: Step) -> list[Any]:
    start = jax.eval_shape(step.start)
    return [pltpu.VMEM(x.shape, x.dtype) for x in start]


def _here(layout: Layout) -> tuple[Any, Any, Any, Any]:
    return layout.ids(*(pl.program_id(axis) for axis in range(len(layout.grid))))


def _grid_kernel(step: Step, layout: Layout, names: Sequence[str]):
    """Keys along the last grid axis; the state in scratch or in outputs."""
    style, group = step.style, layout.dims.heads // layout.dims.kv_heads
    stats = {"outputs": ("m", "l"), "all outputs": ("m", "l", "o")}
    outside = stats.get(style.stats_at, ())

    def body(*refs):
        inputs, rest = dict(zip(names, refs, strict=False)), refs[len(names) :]
        more = {name: inputs[name] for name in names[3:]}
        ids = _here(layout)
        _, _, i, j = ids
        o_ref, state = _State.of(outside, layout, ids, rest, step)

        @pl.when(j == 0)
        def _():
            sink = more["sinks"][...] if "sinks" in more else None
            state.store(step.start(_scalar(sink)))

        def absorb():
            start = lambda n, size: n * size if style.heads == "whole" else None
            q = layout.read(inputs["q"], ids, start(i, step.bq), step.bq)
            k = layout.read(inputs["k"], ids, start(j, step.bk), step.bk, group)
            v = layout.read(inputs["v"], ids, start(j, step.bk), step.bk, group)
            now = state.load()
            extra = layout.extra(more, j)
            state.store(step(step.queries(q), k, v, now, i, j, extra))

        first, end = layout.steps(i)
        if step.what.window:
            pl.when(jnp.logical_and(j >= first, j < end))(absorb)
        elif step.what.causal:
            pl.when(j * step.bk < (i + 1) * step.bq)(absorb)
        else:
            absorb()

        @pl.when(j == pl.num_programs(len(layout.grid) - 1) - 1)
        def _():
            dtype = F32 if "o" in outside else o_ref.dtype
            layout.write(o_ref, ids, step.finish(state.load(), dtype))

    memory = _memory(step)
    return body, memory[2 if outside else 0 :] if "o" not in outside else [], outside


def _scalar(x: Any) -> Any:
    return None if x is None else x.reshape(())


class _State:
    """Maximum, sum and accumulator, each in a ref."""

    def __init__(self, layout, ids, refs, in_outputs, step) -> None:
        self.layout, self.ids, self.refs = layout, ids, refs
        self.in_outputs, self.step = in_outputs, step

    @staticmethod
    def of(outside, layout, ids, rest, step) -> tuple[Any, "_State"]:
        o_ref, *rest = rest
        if outside == ("m", "l", "o"):
            return o_ref, _State(layout, ids, (*rest, o_ref), (True,) * 3, step)
        places = (bool(outside),) * 2 + (False,)
        return o_ref, _State(layout, ids, tuple(rest), places, step)

    def load(self) -> tuple[Any, ...]:
        values = []
        for ref, outside, shape in zip(
            self.refs, self.in_outputs, jax.eval_shape(self.step.start), strict=True
        ):
            whole = self.layout.style.heads == "whole" and ref.shape[-2:] != shape.shape
            place = self.ids[2] * self.step.bq if whole else None
            read = lambda: self.layout.read(ref, self.ids, place, self.step.bq)
            value = read() if outside else ref[...]
            values.append(value.reshape(shape.shape))
        return tuple(values)

    def store(self, state) -> None:
        for ref, outside, value in zip(self.refs, self.in_outputs, state, strict=True):
            if outside:
                rows = value.reshape(value.shape[0], -1)
                self.layout.write(ref, self.ids, rows)
            else:
                ref[...] = value


def _loop_kernel(step: Step, layout: Layout, names: Sequence[str]):
    """Keys in a loop inside a program."""
    style, group = step.style, layout.dims.heads // layout.dims.kv_heads
    pipelined = style.loop == "pipeline"

    def body(*refs):
        inputs, (o_ref, *rest) = (
            dict(zip(names, refs, strict=False)),
            refs[len(names) :],
        )
        more = {name: inputs[name] for name in names[3:]}
        ids = _here(layout)
        i = ids[2]
        whole = style.heads == "whole"
        q = layout.read(inputs["q"], ids, i * step.bq if whole else None, step.bq)
        q = step.queries(q)
        sink = more["sinks"][...] if "sinks" in more else None
        start, (first, end) = step.start(_scalar(sink)), layout.steps(i)

        def absorb(j, state, past=False):
            k = layout.read(inputs["k"], ids, j * step.bk, step.bk, group)
            v = layout.read(inputs["v"], ids, j * step.bk, step.bk, group)
            return step(q, k, v, state, i, j, layout.extra(more, j), past)

        if pipelined:
            state = _pipelined(step, layout, ids, inputs, more, q, start, rest)
        else:
            state = _looped(style.loop, step, absorb, start, first, end, i)
        layout.write(o_ref, ids, step.finish(state, o_ref.dtype))

    return body, _memory(step) if pipelined else [], ()


def _looped(kind: str, step: Step, absorb, start, first, end, i):
    if kind == "while":
        going = lambda carry: carry[0] < end
        advance = lambda carry: (carry[0] + 1, absorb(*carry))
        return lax.while_loop(going, advance, (jnp.int32(first), start))[1]
    if kind == "scan":
        over = lambda state, j: (absorb(j, state), None)
        return lax.scan(over, start, jnp.arange(end, dtype=I32))[0]
    if kind == "unrolled":
        return lax.fori_loop(0, end, absorb, start, unroll=2 if end % 2 == 0 else 1)
    if kind == "two loops":
        whole = (i * step.bq) // step.bk
        past = lambda j, state: absorb(j, state, True)
        return lax.fori_loop(whole, end, absorb, lax.fori_loop(0, whole, past, start))
    return lax.fori_loop(first, end, absorb, start)


def _pipelined(step: Step, layout: Layout, ids, inputs, more, q, start, refs):
    """`emit_pipeline` over blocks of keys; the state in scratch."""
    d, (b, h, i, _) = layout.dims, ids
    group = d.heads // d.kv_heads
    first, end = layout.steps(i)
    for ref, value in zip(refs, start, strict=True):
        ref[...] = value

    def inner(k_ref, v_ref):
        j = first + pl.program_id(0)
        state = tuple(ref[...] for ref in refs)
        extra = layout.extra(more, j)
        new = step(q, k_ref[...], v_ref[...], state, i, j, extra)
        for ref, value in zip(refs, new, strict=True):
            ref[...] = value

    head = (b * d.kv_heads + h // group,) if layout.flat else (b, h // group)
    none = (None,) * len(head)
    spec = lambda width: pl.BlockSpec(
        (*none, step.bk, width), lambda j: (*head, first + j, 0)
    )
    pltpu.emit_pipeline(
        inner, grid=(end - first,), in_specs=[spec(d.depth), spec(d.value_depth)]
    )(inputs["k"], inputs["v"])
    return tuple(ref[...] for ref in refs)
