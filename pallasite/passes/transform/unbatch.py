"""unbatch: a kernel without one of its grid axes, the reverse of `batch.py`.

In: a kernel with a parallel axis each of whose steps sees one element of a dimension of
all that it writes, and of some operands, and does not use its own number.
Out: the kernel of one step, and along which dimension of each operand and result the
elements are. Mapped over these dimensions (`jax.vmap`), it is the kernel.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from pallasite.ir.nodes import Block, Kernel, Value, walk
from pallasite.ir.roles import Pipeline, Shown
from pallasite.passes.analysis.grid import analyze, find_pipeline, with_pipeline
from pallasite.passes.analysis.memory import Roots

_T = TypeVar("_T")


@dataclass(frozen=True)
class Unbatched:
    """One step of a kernel; what it is mapped over, by operand and result."""

    kernel: Kernel
    size: int
    inputs: tuple[int | None, ...]  # a dimension; None: all steps see the same
    outputs: tuple[int, ...]


def unbatch(kernel: Kernel, axis: int) -> Unbatched | None:
    """The kernel without an axis; None if its steps are not alike, or not apart."""
    old = Pipeline.of(find_pipeline(kernel))
    size = old.grid[axis]
    if size is None or any(old.ids[axis] in values for values in _uses([old.body])):
        return None
    along: dict[Value, int | None] = {}
    for shown in old.shown:
        dims = _moves(shown, axis, size)
        if len(dims) > 1 or None in dims:
            return None
        (d,) = dims or [None]
        if along.setdefault(shown.array, d) != d:
            return None
    if not analyze(kernel).axes[axis].parallel:
        return None
    # What one step writes to an operand, the next one sees.
    written = Roots(old.body).all_written(old.body)
    if any(s.block in written and along[s.array] is None for s in old.shown):
        return None
    inputs = tuple(along.get(p) for p in kernel.inputs)
    found = [along.get(p) for p in kernel.outputs]
    outputs = tuple(d for d in found if d is not None)
    moved = {v for v, d in along.items() if d is not None}
    whole = any(moved.intersection(v) for v in _uses([old.body, *old.maps]))
    if whole or len(outputs) < kernel.num_outputs:
        return None
    if any(inputs[i] != outputs[o] for i, o in kernel.aliases):
        return None
    return Unbatched(_one_step(kernel, old, axis, along), size, inputs, outputs)


def _uses(blocks: Iterable[Block]) -> Iterator[tuple[Value, ...]]:
    return (op.operands for block in blocks for op in walk(block))


def _moves(shown: Shown, axis: int, size: int) -> list[int | None]:
    """The dimensions that the axis indexes; None for one that it does otherwise."""
    index, dims = shown.index_map.params[axis], shown.window.dims
    if any(index in values for values in _uses([shown.index_map])):
        return [None]
    found = [n for n, v in enumerate(shown.index_map.yields) if v is index]
    if found and len(shown.index_map.yields) > len(dims):
        return [None]  # with lengths of blocks among them
    shape = shown.array.ref.shape
    return [
        d if (dims[d].kind, shape[d]) == ("squeezed", size) else None for d in found
    ]


def _one_step(
    kernel: Kernel, old: Pipeline, axis: int, along: dict[Value, int | None]
) -> Kernel:
    new = {
        p: Value(p.ref.with_shape(_without(p.ref.shape, d)), p.name)
        for p in kernel.params
        if (d := along.get(p)) is not None
    }
    windows, maps = [], []
    for array, window, index_map, _ in old.shown:
        d = along[array]
        windows.append(replace(window, dims=_without(window.dims, d)))
        params, yields = index_map.params, index_map.yields
        maps.append(Block(_without(params, axis), index_map.ops, _without(yields, d)))
    made = old.with_(
        grid=_without(old.grid, axis),
        semantics=_without(old.semantics, axis),
        arrays=tuple(new.get(a, a) for a in old.arrays),
        windows=tuple(windows),
        maps=tuple(maps),
        body=replace(old.body, params=_without(old.body.params, axis)),
    )
    kernel = with_pipeline(kernel, made.to_op())
    return kernel.with_(params=tuple(new.get(p, p) for p in kernel.params))


def _without(values: tuple[_T, ...], at: int | None) -> tuple[_T, ...]:
    return tuple(v for n, v in enumerate(values) if n != at)
