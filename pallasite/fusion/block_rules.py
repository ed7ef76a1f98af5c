"""How blocks pass through JAX's primitives: one row per primitive.

A kernel sees a block of a value. If an equation produces that value, its row says which
operand blocks the block is computed from (`pull`), which result block can be computed
from operand blocks (`push`), and computes it (`evaluate`). `propagate.py` applies the
rows to whole functions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite.errors import NotFusible
from pallasite.ir.opdef import BY_JAX, table
from pallasite.language.refs import Slice
from pallasite.language.specs import Blocked, BoundedSlice, Element, Squeezed

Indices = tuple[Any, ...]


def _no_indices(*outer: Any) -> None:
    """The indices of a value without blocks."""


@dataclass
class BlockIndexTransform:
    """Blocks of a value: their shape, and the block of each step.

    Attributes:
        block_shape: as in a `BlockSpec`.
        block_index_transform: from the indices of a step (those of a grid, or of a
            block of another value) to the block index.
        memory_space, pipeline_mode: as in a `BlockSpec`.
    """

    block_shape: Sequence[Any] | None
    block_index_transform: Callable[..., Any] = _no_indices
    memory_space: Any = dataclasses.field(kw_only=True, default=None)
    pipeline_mode: Any = dataclasses.field(kw_only=True, default=None)

    def replace(self, **changes: Any) -> "BlockIndexTransform":
        return dataclasses.replace(self, **changes)

    @property
    def dims(self) -> tuple[Any, ...]:
        assert self.block_shape is not None
        return tuple(self.block_shape)

    def at(self, outer: Sequence[Any]) -> Indices:
        """The block index at a step."""
        found = self.block_index_transform(*outer)
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    def then(
        self, dims: Sequence[Any], indices: Callable[[Indices], Iterable[Any]]
    ) -> "BlockIndexTransform":
        """Blocks of another value, whose indices are computed from this one's."""
        return self.replace(
            block_shape=tuple(dims),
            block_index_transform=lambda *outer: tuple(indices(self.at(outer))),
        )


Blocks = BlockIndexTransform | None  # None: a scalar, or a value used whole


@dataclass
class Equation:
    """One equation with the blocks of its values, as the rules see it.

    Attributes:
        primitive, params, shapes_in, shapes_out: what it computes.
        scalars: from the indices of a step to the equation's operands: those that
            block indices depend on, None for the others.
        ins, outs: the blocks of its operands and results (`evaluate` only).
        outer: returns the indices of the step (`evaluate` only).
    """

    primitive: Any
    params: dict[str, Any]
    shapes_in: tuple[tuple[int, ...], ...]
    shapes_out: tuple[tuple[int, ...], ...]
    scalars: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    ins: tuple[Blocks, ...] = ()
    outs: tuple[Blocks, ...] = ()
    outer: Callable[[], Sequence[Any]] | None = None

    @property
    def out(self) -> BlockIndexTransform:
        """The blocks of the only result."""
        (out,) = self.outs
        assert out is not None
        return out

    @property
    def out_shape(self) -> tuple[int, ...]:
        return seen_shape(self.out.dims)

    def out_indices(self) -> Indices:
        if self.outer is None:
            raise NotFusible(f"{self.primitive.name} depends on the grid step")
        return self.out.at(self.outer())

    def refuse(self, why: str, **facts: Any) -> NotFusible:
        shapes = ", ".join(map(str, self.shapes_in))
        rows = [("operands", shapes or None), *facts.items()]
        return NotFusible(f"blocks do not pass through {self.primitive}: {why}", rows)


# --- dimensions of blocks ---


def is_squeezed(dim: Any) -> bool:
    return dim is None or isinstance(dim, Squeezed)


def is_numbered(dim: Any) -> bool:
    """Whether an index counts blocks, not elements."""
    return isinstance(dim, (int, Blocked))


def size_of(dim: Any) -> int:
    """How many elements a block has along a dimension."""
    if is_squeezed(dim):
        return 1
    return dim if isinstance(dim, int) else dim.block_size


def seen_shape(dims: Sequence[Any]) -> tuple[int, ...]:
    """The shape of a block as a kernel sees it, without squeezed dimensions."""
    return tuple(size_of(d) for d in dims if not is_squeezed(d))


def seen_axis(dims: Sequence[Any], axis: int) -> int:
    """The axis of a block that corresponds to a dimension of the array."""
    return axis - sum(map(is_squeezed, dims[:axis]))


def _one(dim: Any) -> Any:
    """A dimension of size 1, where another operand has `dim`."""
    return dim if is_squeezed(dim) else 1


# --- the table ---


@dataclass(frozen=True)
class Rule:
    """The rules of a primitive.

    Attributes:
        pull: from blocks of the results to blocks of the operands.
        evaluate: from operand blocks, as values, to result blocks.
        push: from blocks of the operands to blocks of the results; None: unknown.
        scalar_operands: operands that must be known scalars.
        is_indexed: whether block indices depend on those.
    """

    pull: Callable[[Equation, tuple[Blocks, ...]], Sequence[Blocks]]
    evaluate: Callable[..., Any]
    push: Callable[[Equation, Sequence[Blocks]], Sequence[Blocks]] | None = None
    scalar_operands: Callable[[Equation], Sequence[int]] = lambda eqn: ()
    is_indexed: bool = False


RULES: dict[str, Rule] = {}


def rule_of(eqn: Equation) -> Rule:
    """The row of an equation's primitive.

    Raises:
        NotFusible: there is none.
    """
    name = eqn.primitive.name
    if name in RULES:
        return RULES[name]
    table()  # fills BY_JAX
    if name in BY_JAX:
        return ELEMENTWISE
    raise eqn.refuse("no rule for this primitive")


def _first(outs: Sequence[Blocks]) -> BlockIndexTransform:
    assert outs[0] is not None
    return outs[0]


# --- elementwise ---


def _pull_elementwise(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    out = _first(outs)
    return [_pull_operand(out, shape, eqn.shapes_out[0]) for shape in eqn.shapes_in]


def _pull_operand(
    out: BlockIndexTransform, shape: tuple[int, ...], result: tuple[int, ...]
) -> Blocks:
    """The blocks of one operand; scalars and dimensions of size 1 broadcast."""
    if not shape:
        return None
    repeated = [n == 1 and r != 1 for n, r in zip(shape, result, strict=True)]
    if not any(repeated):
        return out
    dims = [_one(d) if r else d for d, r in zip(out.dims, repeated, strict=True)]
    return out.then(
        dims,
        lambda idx: (0 if r else i for i, r in zip(idx, repeated, strict=True)),
    )


def _push_elementwise(eqn: Equation, ins: Sequence[Blocks]) -> list[Blocks]:
    shape = eqn.shapes_out[0]
    whole = [b for b, s in zip(ins, eqn.shapes_in, strict=True) if b and s == shape]
    if not whole:
        raise eqn.refuse("no operand with blocks has the shape of the result")
    for other in whole[1:]:
        if other.dims != whole[0].dims:
            raise eqn.refuse("operands have different blocks", blocks=other.dims)
    return [whole[0]]


def _evaluate_same(eqn: Equation, *blocks: Any) -> Any:
    return eqn.primitive.bind(*blocks, **eqn.params)


ELEMENTWISE = Rule(_pull_elementwise, _evaluate_same, _push_elementwise)


def _evaluate_cast(eqn: Equation, x: Any) -> Any:
    return lax.convert_element_type(x, eqn.params["new_dtype"])


RULES["convert_element_type"] = dataclasses.replace(
    ELEMENTWISE, evaluate=_evaluate_cast
)
RULES["copy"] = RULES["copy_p"] = ELEMENTWISE


def _evaluate_block(eqn: Equation, x: Any, *_: Any) -> Any:
    return x


# Marks how a value varies over a `shard_map`'s devices; blocks do not need it.
RULES["pvary"] = RULES["pcast"] = dataclasses.replace(
    ELEMENTWISE, evaluate=_evaluate_block
)


def _pull_bits(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    if eqn.shapes_in[0] != eqn.shapes_out[0]:
        raise eqn.refuse("both element types must have the same size")
    return [_first(outs)]


RULES["bitcast_convert_type"] = dataclasses.replace(ELEMENTWISE, pull=_pull_bits)


def _pull_select(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    which, *cases = eqn.shapes_in
    return [None if not which else _first(outs), *[_first(outs)] * len(cases)]


RULES["select_n"] = dataclasses.replace(ELEMENTWISE, pull=_pull_select)


# --- dimensions added, dropped and moved ---


def _pull_broadcast(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    out, (shape,) = _first(outs), eqn.shapes_in[:1]
    if not shape:
        return [None]
    places = eqn.params["broadcast_dimensions"]
    result = eqn.shapes_out[0]
    repeated = [n == 1 and result[p] != 1 for n, p in zip(shape, places, strict=True)]
    dims = [
        _one(out.dims[p]) if r else out.dims[p]
        for p, r in zip(places, repeated, strict=True)
    ]
    pairs = list(zip(places, repeated, strict=True))
    return [out.then(dims, lambda idx: (0 if r else idx[p] for p, r in pairs))]


def _push_broadcast(eqn: Equation, ins: Sequence[Blocks]) -> list[Blocks]:
    x, shape = _first(ins), eqn.shapes_out[0]
    places = tuple(eqn.params["broadcast_dimensions"])
    dims: list[Any] = list(shape)  # dimensions not in the operand are whole
    for place, dim, n in zip(places, x.dims, eqn.shapes_in[0], strict=True):
        if n == shape[place]:
            dims[place] = dim
        elif is_squeezed(dim):
            raise eqn.refuse("a squeezed dimension is repeated", dimension=place)

    def indices(idx: Indices) -> list[Any]:
        found: list[Any] = [0] * len(shape)
        for place, i, n in zip(places, idx, eqn.shapes_in[0], strict=True):
            found[place] = i if n == shape[place] else 0
        return found

    return [x.then(dims, indices)]


def _evaluate_broadcast(eqn: Equation, x: Any, *_: Any) -> Any:
    dims, shape = eqn.out.dims, eqn.out_shape
    places = [p for p in eqn.params["broadcast_dimensions"] if not is_squeezed(dims[p])]
    return lax.broadcast_in_dim(x, shape, [seen_axis(dims, p) for p in places])


RULES["broadcast_in_dim"] = Rule(
    _pull_broadcast,
    _evaluate_broadcast,
    _push_broadcast,
    lambda eqn: () if eqn.shapes_in[0] else (0,),
)


def _pull_transpose(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    permutation = tuple(eqn.params["permutation"])
    return [
        _permuted(_first(outs), [permutation.index(d) for d in range(len(permutation))])
    ]


def _push_transpose(eqn: Equation, ins: Sequence[Blocks]) -> list[Blocks]:
    return [_permuted(_first(ins), eqn.params["permutation"])]


def _permuted(blocks: BlockIndexTransform, order: Sequence[int]) -> BlockIndexTransform:
    dims = blocks.dims
    return blocks.then([dims[d] for d in order], lambda idx: (idx[d] for d in order))


def _evaluate_transpose(eqn: Equation, x: Any) -> Any:
    (source,) = eqn.ins
    assert source is not None
    order = [d for d in eqn.params["permutation"] if not is_squeezed(source.dims[d])]
    return lax.transpose(x, [seen_axis(source.dims, d) for d in order])


RULES["transpose"] = Rule(_pull_transpose, _evaluate_transpose, _push_transpose)


def _pull_squeeze(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    out, dropped = _first(outs), set(eqn.params["dimensions"])
    rank = len(eqn.shapes_in[0])
    kept = iter(out.dims)
    dims = [None if d in dropped else next(kept) for d in range(rank)]

    def indices(idx: Indices) -> list[Any]:
        own = iter(idx)
        return [0 if d in dropped else next(own) for d in range(rank)]

    return [out.then(dims, indices)]


def _push_squeeze(eqn: Equation, ins: Sequence[Blocks]) -> list[Blocks]:
    x, dropped = _first(ins), set(eqn.params["dimensions"])
    if any(size_of(x.dims[d]) != 1 for d in dropped):
        raise eqn.refuse("a block is larger than the array", block=x.dims)
    kept = [d for d in range(len(x.dims)) if d not in dropped]
    return [x.then([x.dims[d] for d in kept], lambda idx: (idx[d] for d in kept))]


def _evaluate_reshape(eqn: Equation, x: Any, *_: Any) -> Any:
    return lax.reshape(x, eqn.out_shape)


RULES["squeeze"] = Rule(_pull_squeeze, _evaluate_reshape, _push_squeeze)


# --- reshape: runs of dimensions merged into one in the other shape ---


def _runs(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dimensions of two shapes of equal size, in runs with equal products."""
    runs, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        left, right = [], []
        size_a = size_b = 1
        if i < len(a):
            left, size_a, i = [i], a[i], i + 1
        if j < len(b):
            right, size_b, j = [j], b[j], j + 1
        while size_a != size_b:
            if (size_a < size_b and i < len(a)) or j >= len(b):
                left, size_a, i = [*left, i], size_a * a[i], i + 1
            else:
                right, size_b, j = [*right, j], size_b * b[j], j + 1
        runs.append((left, right))
    return runs


def _reshaped(
    eqn: Equation, blocks: BlockIndexTransform, old: Sequence[int], new: Sequence[int]
) -> BlockIndexTransform:
    """Blocks of an array of shape `old` as blocks of the same array in shape `new`."""
    if 0 in (*old, *new):
        raise eqn.refuse("the array is empty")
    dims: list[Any] = [1] * len(new)
    steps: list[Callable[[Indices], Sequence[Any]]] = []
    places: list[list[int]] = []
    for here, there in _runs(old, new):
        sizes = [old[d] for d in here]
        joined = _joined(eqn, [blocks.dims[d] for d in here], sizes)
        parts, step = _split(eqn, joined[0], [new[d] for d in there], math.prod(sizes))
        for d, part in zip(there, parts, strict=True):
            dims[d] = part
        join = joined[1]
        steps.append(
            lambda idx, here=here, join=join, step=step: step(
                join([idx[d] for d in here])
            )
        )
        places.append(there)

    def indices(idx: Indices) -> list[Any]:
        found: list[Any] = [0] * len(new)
        for there, step in zip(places, steps, strict=True):
            for d, i in zip(there, step(idx), strict=True):
                found[d] = i
        return found

    return blocks.then(dims, indices)


def _joined(eqn: Equation, dims: Sequence[Any], sizes: Sequence[int]):
    """A block over several dimensions as one over the merged one, with its index."""
    if any(n == 1 and size_of(d) != 1 for d, n in zip(dims, sizes, strict=True)):
        raise eqn.refuse("a block is larger than the array", block=tuple(dims))
    wide = [d for d in range(len(dims)) if sizes[d] != 1]
    if not wide:
        kept = [d for d in dims if not is_squeezed(d)]
        return (1 if kept or not dims else None), lambda idx: 0
    if len(wide) == 1:
        return dims[wide[0]], lambda idx: idx[wide[0]]
    if not all(is_numbered(dims[d]) or is_squeezed(dims[d]) for d in wide):
        raise eqn.refuse("blocks with element offsets (pl.Element)", block=tuple(dims))
    # Leading dimensions of one element, then a partial one, then whole ones.
    part = next((n for n, d in enumerate(wide) if size_of(dims[d]) != 1), len(wide) - 1)
    inner = [sizes[d] for d in wide[part + 1 :]]
    if [size_of(dims[d]) for d in wide[part + 1 :]] != inner:
        raise eqn.refuse("a block is not contiguous in the other shape", block=dims)
    size = size_of(dims[wide[part]])
    if part and sizes[wide[part]] % size:
        raise eqn.refuse(
            "a block extends past the edge of an inner dimension",
            block=tuple(dims),
            dimension=sizes[wide[part]],
        )

    def number(idx: Sequence[Any]) -> Any:
        total: Any = 0
        for d in wide[:part]:
            total = (total + idx[d]) * _count_after(d)
        return total + idx[wide[part]]

    def _count_after(d: int) -> int:
        following = wide[wide.index(d) + 1]
        n = sizes[following]
        return n if following != wide[part] else n // size

    return size * math.prod(inner), number


def _split(eqn: Equation, dim: Any, sizes: Sequence[int], total: int):
    """A block of one dimension as one over the split ones, with its indices."""
    wide = [d for d in range(len(sizes)) if sizes[d] != 1]
    ones = [1] * len(sizes)
    if not wide:
        return ones, lambda number: [0] * len(sizes)
    if len(wide) == 1:
        (only,) = wide
        return [dim if d == only else 1 for d in range(len(sizes))], lambda number: [
            number if d == only else 0 for d in range(len(sizes))
        ]
    size = size_of(dim)
    if not (is_numbered(dim) or is_squeezed(dim)):
        raise eqn.refuse("blocks with element offsets (pl.Element)", block=dim)
    dims, left, counts = list(ones), size, [1] * len(sizes)
    for d in reversed(wide):
        n = sizes[d]
        take = n if left % n == 0 else left
        if n % take and d != wide[0]:
            raise eqn.refuse(
                "a block is not a rectangle in the other shape", block=size, dimension=n
            )
        dims[d], counts[d], left = take, max(n // take, 1), max(left // take, 1)

    def indices(number: Any) -> list[Any]:
        found: list[Any] = [0] * len(sizes)
        for d in reversed(wide[1:]):
            if counts[d] != 1:
                found[d], number = number % counts[d], number // counts[d]
        found[wide[0]] = number
        return found

    return dims, indices


def _pull_reshape(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    if eqn.params.get("dimensions") is not None:
        raise eqn.refuse("it also transposes")
    old, new = eqn.shapes_out[0], eqn.shapes_in[0]
    return [_reshaped(eqn, _first(outs), old, new)]


def _push_reshape(eqn: Equation, ins: Sequence[Blocks]) -> list[Blocks]:
    if eqn.params.get("dimensions") is not None:
        raise eqn.refuse("it also transposes")
    return [_reshaped(eqn, _first(ins), eqn.shapes_in[0], eqn.shapes_out[0])]


RULES["reshape"] = Rule(_pull_reshape, _evaluate_reshape, _push_reshape)


# --- parts of arrays ---


def _moved(dim: Any, start: int) -> tuple[Any, Callable[[Any], Any]]:
    """A dimension of a block of `x[start:]` as one of `x`, and its index there."""
    if start == 0:
        return dim, lambda i: i
    if isinstance(dim, BoundedSlice):
        return dim, lambda i: Slice(i.start + start, i.size)
    if not is_numbered(dim):
        return dim, lambda i: i + start
    size = size_of(dim)
    if start % size == 0:
        return dim, lambda i: i + start // size
    return Element(size), lambda i: i * size + start


def _pull_slice(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    out, strides = _first(outs), eqn.params["strides"]
    if strides is not None and any(s != 1 for s in strides):
        raise eqn.refuse("it is strided", strides=strides)
    starts = eqn.params["start_indices"]
    moved = [_moved(d, s) for d, s in zip(out.dims, starts, strict=True)]
    dims = [d for d, _ in moved]
    return [
        out.then(dims, lambda idx: (f(i) for i, (_, f) in zip(idx, moved, strict=True)))
    ]


RULES["slice"] = Rule(_pull_slice, _evaluate_block)


def _pull_dynamic_slice(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    out, (shape, *starts) = _first(outs), eqn.shapes_in
    sizes, scalars = eqn.params["slice_sizes"], eqn.scalars
    if scalars is None:
        raise eqn.refuse("its start indices are not available to index maps")
    dims = [
        d if n == size or size_of(d) == 1 else Element(size_of(d))
        for d, n, size in zip(out.dims, shape, sizes, strict=True)
    ]

    def indices(*outer: Any) -> tuple[Any, ...]:
        known, found = scalars(outer)[1:], []
        rows = zip(out.at(outer), dims, out.dims, shape, sizes, known, strict=True)
        for i, dim, before, n, size, start in rows:
            if n == size:
                found.append(i)
                continue
            start = jnp.clip(start, 0, n - size)
            counted = isinstance(dim, Element) and is_numbered(before)
            found.append(start + (i * size_of(dim) if counted else i))
        return tuple(found)

    pulled = out.replace(block_shape=tuple(dims), block_index_transform=indices)
    return [pulled, *[None] * len(starts)]


RULES["dynamic_slice"] = Rule(
    _pull_dynamic_slice,
    _evaluate_block,
    scalar_operands=lambda eqn: range(1, len(eqn.shapes_in)),
    is_indexed=True,
)


def _spans(eqn: Equation) -> tuple[int, list[int], list[int]]:
    """The dimension of a concatenation, the starts of its parts, and their sizes."""
    d = eqn.params["dimension"]
    sizes = [shape[d] for shape in eqn.shapes_in]
    return d, [sum(sizes[:n]) for n in range(len(sizes))], sizes


def _pull_concatenate(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    out = _first(outs)
    d, starts, sizes = _spans(eqn)
    dim, block = out.dims[d], size_of(out.dims[d])
    with_dim = lambda new: [*out.dims[:d], new, *out.dims[d + 1 :]]
    if block == sum(sizes):
        return [out.then(with_dim(n), lambda idx: idx) for n in sizes]
    if not (is_numbered(dim) or is_squeezed(dim)):
        raise eqn.refuse("blocks with element offsets (pl.Element)", block=dim)
    if any(n % block for n in sizes):
        raise eqn.refuse("a block would span two operands", block=block, sizes=sizes)

    def part(start: int, size: int) -> BlockIndexTransform:
        first, last = start // block, size // block - 1

        def indices(idx: Indices) -> Indices:
            number = idx[d] - first
            if isinstance(number, int):
                number = min(max(number, 0), last)
            else:
                number = jnp.clip(number, 0, last)
            return (*idx[:d], number, *idx[d + 1 :])

        return out.then(out.dims, indices)

    return [part(start, size) for start, size in zip(starts, sizes, strict=True)]


def _evaluate_concatenate(eqn: Equation, *parts: Any) -> Any:
    d, starts, sizes = _spans(eqn)
    dims = eqn.out.dims
    if size_of(dims[d]) == sum(sizes):
        return lax.concatenate(parts, seen_axis(dims, d))
    number, result = eqn.out_indices()[d], parts[0]
    for start, part in zip(starts[1:], parts[1:], strict=True):
        result = jnp.where(number >= start // size_of(dims[d]), part, result)
    return result


RULES["concatenate"] = Rule(_pull_concatenate, _evaluate_concatenate)


def _pull_iota(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    return [None] * len(eqn.shapes_in)


def _evaluate_iota(eqn: Equation, *_: Any) -> Any:
    dims, d, dtype = eqn.out.dims, eqn.params["dimension"], eqn.params["dtype"]
    index = eqn.out_indices()[d]
    first = index * size_of(dims[d]) if is_numbered(dims[d]) else index
    first = jnp.asarray(first).astype(dtype)
    if is_squeezed(dims[d]):
        return jnp.broadcast_to(first, eqn.out_shape)
    return lax.broadcasted_iota(dtype, eqn.out_shape, seen_axis(dims, d)) + first


RULES["iota"] = Rule(_pull_iota, _evaluate_iota)


# --- reductions ---


def _pull_reduce(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    out, (shape,), axes = _first(outs), eqn.shapes_in, set(eqn.params["axes"])
    kept = iter(out.dims)
    dims = [n if d in axes else next(kept) for d, n in enumerate(shape)]

    def indices(idx: Indices) -> list[Any]:
        own = iter(idx)
        return [0 if d in axes else next(own) for d in range(len(shape))]

    return [out.then(dims, indices)]


def _push_reduce(eqn: Equation, ins: Sequence[Blocks]) -> list[Blocks]:
    x, (shape,), axes = _first(ins), eqn.shapes_in, set(eqn.params["axes"])
    for d in axes:
        if size_of(x.dims[d]) != shape[d]:
            raise eqn.refuse(
                "a block holds only a part of the reduced dimensions",
                block=x.dims,
                dimension=d,
            )
    kept = [d for d in range(len(shape)) if d not in axes]
    return [x.then([x.dims[d] for d in kept], lambda idx: (idx[d] for d in kept))]


def _evaluate_reduce(eqn: Equation, x: Any) -> Any:
    (source,) = eqn.ins
    assert source is not None
    axes = [d for d in eqn.params["axes"] if not is_squeezed(source.dims[d])]
    params = {**eqn.params, "axes": tuple(seen_axis(source.dims, d) for d in axes)}
    if params.get("out_sharding") is not None:
        params["out_sharding"] = None
    return eqn.primitive.bind(x, **params) if axes else x


for _name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
    RULES[_name] = Rule(_pull_reduce, _evaluate_reduce, _push_reduce)
for _name in ("reduce_and", "reduce_or"):
    RULES[_name] = Rule(_pull_reduce, _evaluate_reduce, _push_reduce)
