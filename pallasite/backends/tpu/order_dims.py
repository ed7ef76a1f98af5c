"""Moves dimensions of which a program sees one element before those it sees more of.

A TPU copies tiles of the last two dimensions. Where a block has one element along one
of these, such as the heads in (batch, length, heads, width), each tile would hold one
row of it. XLA moves such dimensions before the others ahead of the call (a `Form`; the
note `tpu.orders` on the pipeline keeps it), so that blocks consist of whole tiles. The
body sees what it saw before. Kernel in, Kernel out.
"""

from collections.abc import Iterator
from dataclasses import replace

from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.ir.nodes import Block, Kernel, Value, walk
from pallasite.ir.rewrite import substitute
from pallasite.ir.roles import Pipeline, Shown

ORDERS = "tpu.orders"  # ("in" or "out", number, order of its dimensions) of arrays
TILED = 2  # trailing dimensions that tiles have

Order = tuple[int, ...]


def order_dims(kernel: Kernel) -> Kernel:
    """The kernel with arrays in other orders, and a note on them."""
    op = main_pipeline(kernel)
    if op is None:
        return kernel
    pipeline = Pipeline.of(op)
    orders = dict(_orders(kernel, pipeline))
    if not orders:
        return kernel
    new = {v: Value(_ordered_type(v, order), v.name) for v, order in orders.items()}
    shown = [
        _ordered(s, new[s.array], orders[s.array]) if s.array in orders else s
        for s in pipeline.shown
    ]
    notes = tuple((*_place(kernel, v), order) for v, order in orders.items())
    made = pipeline.showing(shown).to_op()
    made = made.with_(attrs={**made.attrs, ORDERS: notes})
    body = Block(kernel.body.params, (*kernel.body.ops[:-1], made), kernel.body.yields)
    params = tuple(new.get(v, v) for v in kernel.params)
    return kernel.with_(params=params, body=substitute(body, new))


def _orders(kernel: Kernel, pipeline: Pipeline) -> Iterator[tuple[Value, Order]]:
    aliased = {
        v for i, o in kernel.aliases for v in (kernel.inputs[i], kernel.outputs[o])
    }
    used = [v for op in walk(kernel.body) for v in op.operands]
    for shown in pipeline.shown:
        array = shown.array
        if array not in kernel.params or array in aliased or used.count(array) > 1:
            continue
        order = _order(shown)
        if order is not None:
            yield array, order


def _order(shown: Shown) -> Order | None:
    """Dimensions with one element seen, then the others; None: unchanged."""
    dims, shape = shown.window.dims, shown.array.ref.shape
    if shown.window.space not in ("block", "vmem"):
        return None
    if any(dim.kind not in ("blocked", "squeezed") for dim in dims):
        return None
    seen = [d for d, dim in enumerate(dims) if dim.kind != "squeezed"]
    single = [d for d, dim in enumerate(dims) if dim.kind == "squeezed"]
    misfits = [d for d in single if d >= len(dims) - TILED and shape[d] > 1]
    return (*single, *seen) if misfits and len(seen) >= TILED else None


def _ordered_type(array: Value, order: Order):
    return array.ref.with_shape(tuple(array.ref.shape[d] for d in order))


def _ordered(shown: Shown, array: Value, order: Order) -> Shown:
    window, index_map = shown.window, shown.index_map
    return shown._replace(
        array=array,
        window=replace(window, dims=tuple(window.dims[d] for d in order)),
        index_map=replace(index_map, yields=tuple(index_map.yields[d] for d in order)),
    )


def _place(kernel: Kernel, array: Value) -> tuple[str, int]:
    if array in kernel.outputs:
        return "out", kernel.outputs.index(array)
    return "in", kernel.inputs.index(array)


def array_at(kernel: Kernel, side: str, number: int) -> Value:
    """The parameter that a note names."""
    return (kernel.inputs if side == "in" else kernel.outputs)[number]
