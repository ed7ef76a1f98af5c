"""From specs and operand types to windows, index maps and the pipeline op.

`pallas_call` and `emit_pipeline` both go through here: a grid, one Binding per ref the
body sees, and a body. The result is one `pipeline` op in the importer's current block.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, SpecError
from pallasite.importer.importer import GridScope, Importer
from pallasite.ir import types as T
from pallasite.ir.nodes import Block, BlockDim, Value, Window
from pallasite.language.memory_spaces import MemorySpace
from pallasite.language.refs import Slice
from pallasite.language.specs import BlockSpec, Operand, window_of
from pallasite.language.trace import (
    Traced,
    count_of,
    location_of,
    mismatch,
    name_of,
    trace,
)
from pallasite.passes.analysis.intervals import Fact

SEMANTICS = ("parallel", "arbitrary", "sequential", "core_parallel", "subcore_parallel")


@dataclass(frozen=True)
class Binding:
    """One array of a pipeline: its spec, what the errors call it, its window."""

    operand: Operand
    spec: BlockSpec
    window: Window | None  # None: the body sees the whole array
    index_map: Traced | None

    @property
    def ref_shape(self) -> tuple[int, ...]:
        """The shape of the ref that the body sees, in the operand's own elements."""
        if self.window is None:
            return self.operand.shape
        shape = self.window.block_shape
        return shape[: len(shape) - len(self.operand.words)]

    @property
    def space(self) -> str:
        if self.window is not None:
            return self.window.space
        return self.spec.memory_space.value if self.spec.memory_space else "any"


def bind(
    spec: BlockSpec,
    operand: Operand,
    mode: str,
    grid: Sequence[Any],
    prefetch: Sequence[Any],
    at: Any,
) -> Binding:
    """Check a spec against its operand and trace its index map."""
    window = window_of(spec, operand, mode, at)
    index_map = None
    if window is not None:
        index_map = _trace_index_map(spec, operand, window, grid, prefetch, at)
        words = tuple(BlockDim(n) for n in operand.words)
        window = replace(window, dims=(*window.dims, *words))
    return Binding(operand, spec, window, index_map)


def _trace_index_map(
    spec: BlockSpec,
    operand: Operand,
    window: Window,
    grid: Sequence[Any],
    prefetch: Sequence[Any],
    at: Any,
) -> Traced | None:
    fn, grid_rank = spec.index_map, len(grid)
    if fn is None:
        if any(d.kind == "bounded" for d in window.dims):
            raise SpecError(
                "a BoundedSlice needs an index map",
                [("operand", operand)],
                at,
                fix="pl.BlockSpec((pl.BoundedSlice(n), ...), index_map)",
            )
        return None

    floats = [
        f"operand {n} is {a.dtype}"
        for n, a in enumerate(jax.tree.leaves(prefetch))
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]

    def indices(*args: Any) -> list[Any]:
        entries = fn(*args)
        return _flat_indices(entries, window, operand, fn, at, floats)

    ids = [jax.ShapeDtypeStruct((), np.int32)] * grid_rank
    arrays, tree = jax.tree.flatten(((*ids, *prefetch), {}))
    smem = [
        jaxcompat.abstract_ref(a.shape, a.dtype, MemorySpace.SMEM)
        for a in arrays[grid_rank:]
    ]
    if not callable(fn):
        raise SpecError(
            f"the index map must be a function, got {fn!r}",
            [("operand", operand)],
            at,
            "lambda i, j: (i, j), from grid indices to block indices",
        )
    _check_index_map_arity(fn, grid_rank + len(prefetch), grid_rank, operand, at)
    role = ("index map", f"of {operand.shown}")
    traced = trace(indices, tree, [*ids, *smem], fn, grid=grid, role=role)
    if any(type(e).__name__ == "WriteEffect" for e in traced.jaxpr.effects):
        raise SpecError(
            "an index map cannot write",
            [("operand", operand)],
            location_of(fn) or at,
            fix="write in the kernel; an index map only computes block indices",
        )
    return traced


def _check_index_map_arity(fn, count: int, grid_rank: int, operand: Operand, at: Any):
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise KernelTypeError(
            "the index map's parameters do not match the grid",
            [
                ("operand", operand),
                ("index map", f"{name_of(fn, 'lambda')}{signature}"),
                ("grid", count_of(grid_rank, "axis", "axes")),
                ("scalar prefetch", count_of(count - grid_rank, "ref")),
                ("problem", mismatch(signature, count, "argument", error)),
            ],
            location_of(fn) or at,
            "one parameter per grid axis, then one per scalar-prefetch operand"
            if grid_rank
            else "pass grid= in the call: it has one size per parameter",
        ) from None


def _flat_indices(
    result: Any,
    window: Window,
    operand: Operand,
    fn: Callable[..., Any],
    at: Any,
    floats: Sequence[str],
) -> list[Any]:
    """The index map's result as int32 scalars, one per dimension (two if bounded).

    `floats`: the scalar-prefetch operands that cannot be indices, for errors.
    """
    entries = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    where = location_of(fn) or at
    if len(entries) != len(window.dims):
        shown = ", ".join(map(_returned, entries)) or "()"
        raise SpecError(
            "the index map does not return one index per array dimension",
            [
                ("operand", operand),
                ("returned", f"{count_of(len(entries), 'index', 'indices')}: {shown}"),
                ("needed", len(window.dims)),
            ],
            where,
            f"return one per dimension, such as {_example(len(window.dims))}",
        )
    flat: list[Any] = []
    for d, (entry, dim) in enumerate(zip(entries, window.dims, strict=True)):
        if isinstance(entry, Slice) != (dim.kind == "bounded"):
            raise SpecError(
                "the index map must return pl.ds(start, size) for BoundedSlice "
                "dimensions, and only for those",
                [("operand", operand), ("dimension", d), ("returned", repr(entry))],
                where,
                fix="return pl.ds(start, size) for BoundedSlice dimensions, block "
                "indices for others",
            )
        parts = (entry.start, entry.size) if isinstance(entry, Slice) else (entry,)
        flat.extend(_index_scalar(p, d, operand, where, floats) for p in parts)
    return flat


def _example(rank: int) -> str:
    return (
        f"({', '.join('i' if d == 0 else '0' for d in range(rank))}{',' * (rank == 1)})"
    )


def _returned(value: Any) -> str:
    """What an index map returned, as errors show it: arrays by their type."""
    if not hasattr(value, "dtype"):
        return repr(value)
    return f"{np.dtype(value.dtype).name}{list(np.shape(value))}"


def _is_integer(value: Any) -> bool:
    if value is None or not isinstance(value, (int, np.generic, np.ndarray, jax.Array)):
        return False
    return np.shape(value) == () and jnp.issubdtype(jnp.result_type(value), jnp.integer)


def _index_scalar(
    value: Any, d: int, operand: Operand, where: Any, floats: Sequence[str]
) -> Any:
    if not _is_integer(value):
        is_float = isinstance(value, float) or (
            hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
        )
        fix = "return an integer, the block index"
        if is_float:
            fix = "block indices count blocks: use // instead of /"
        if is_float and floats:
            fix += f"; scalar-prefetch {', '.join(floats)}: pass integers"
        raise SpecError(
            "the index map must return integers",
            [("operand", operand), ("dimension", d), ("returned", _returned(value))],
            where,
            fix,
        )
    return jnp.asarray(value, jnp.int32)


@dataclass(frozen=True)
class Part:
    """Steps of a larger grid: where along `axis` they begin, how many there are."""

    axis: int
    first: Value
    whole: int | Value

    def seen(self, im: Importer, scope: GridScope) -> GridScope:
        """The scope as the author sees it, ids counted in the larger grid."""
        ids, sizes = list(scope.ids), list(scope.sizes)
        ids[self.axis] = im.builder.add(ids[self.axis], self.first)
        sizes[self.axis] = self.whole
        return replace(scope, ids=tuple(ids), sizes=tuple(sizes))


def emit_pipeline_op(
    im: Importer,
    grid: Sequence[int | Value],
    semantics: Sequence[str],
    bindings: Sequence[Binding],
    arrays: Sequence[Value],
    prefetch: Sequence[Value],
    import_body: Callable[[list[Value]], None],
    map_captures: Sequence[Sequence[Value] | None],
    axis_names: Sequence[Hashable] = (),
    part: Part | None = None,
) -> None:
    """Append a `pipeline` op over `arrays` (one per binding).

    `import_body` is called with one ref per binding, in a region of its own. `part`:
    the steps are a part of those of a larger grid, which is the one the author sees.
    """
    ids = tuple(Value(T.INDEX, f"i{n}") for n in range(len(grid)))
    block_refs: list[Value] = []
    body_refs: list[Value] = []
    with im.nested() as builder:
        for binding, array in zip(bindings, arrays, strict=True):
            if binding.window is None:
                body_refs.append(array)
                continue
            ref = Value(_block_type(binding), binding.operand.name)
            block_refs.append(ref)
            body_refs.append(ref)
        for index, size in zip(ids, grid, strict=True):
            known = size if isinstance(size, int) else im.facts.of(size).high
            im.facts.note(index, Fact(0, max(known - 1, 0)))
        seen = GridScope(ids, tuple(grid))
        im.scopes.append(seen if part is None else part.seen(im, seen))
        named = zip(axis_names, ids, strict=False)
        im.mesh_axes |= {name: i for name, i in named if name is not None}
        import_body(body_refs)
        im.scopes.pop()
        # Arrays captured by the body are windows too: the whole array at every step.
        captured = _take_captured(im) if len(im.scopes) == 0 else []
        body = builder.block((*ids, *block_refs, *(ref for ref, _ in captured)))
    windowed = [
        (b, a, c)
        for b, a, c in zip(bindings, arrays, map_captures, strict=True)
        if b.window is not None
    ]
    maps = [_index_map_region(im, b, grid, prefetch, c, part) for b, _, c in windowed]
    windows = [b.window for b, _, _ in windowed]
    for ref, _ in captured:
        windows.append(_whole_window(ref.ref))
        maps.append(_zero_map(im, len(grid), ref.ref.rank))
    sizes = [g for g in grid if isinstance(g, Value)]
    im.builder.emit(
        "pipeline",
        *sizes,
        *(a for _, a, _ in windowed),
        *(array for _, array in captured),
        regions=(*maps, body),
        grid=tuple(None if isinstance(g, Value) else int(g) for g in grid),
        windows=tuple(windows),
        semantics=tuple(semantics),
    )


def _block_type(binding: Binding) -> T.RefType:
    operand = binding.operand
    shape = (*binding.ref_shape, *operand.words)
    return T.RefType(shape, operand.stored, binding.space)


def _take_captured(im: Importer) -> list[tuple[Value, Value]]:
    """Captured arrays as (block ref, kernel parameter) pairs."""
    pairs = []
    for n, ref in enumerate(im.captures.refs):
        if ref.ref.space == "block":
            array = Value(T.RefType(ref.ref.shape, ref.ref.dtype, "any"), f"capture{n}")
            pairs.append((ref, array))
    return pairs


def _whole_window(ref: T.RefType) -> Window:
    return Window(tuple(BlockDim(n) for n in ref.shape), "in")


def _zero_map(im: Importer, grid_rank: int, rank: int) -> Block:
    params = tuple(Value(T.INDEX, f"i{n}") for n in range(grid_rank))
    with im.nested() as builder:
        return builder.block(params, [builder.index(0) for _ in range(rank)])


def _index_map_region(
    im: Importer,
    binding: Binding,
    grid: Sequence[int | Value],
    prefetch: Sequence[Value],
    captures: Sequence[Value] | None,
    part: Part | None,
) -> Block:
    assert binding.window is not None
    traced = binding.index_map
    if traced is None:
        return _zero_map(im, len(grid), len(binding.window.dims))
    params = tuple(Value(T.INDEX, f"i{n}") for n in range(len(grid)))
    scope = GridScope(params, tuple(grid), is_index_map=True)
    scopes = im.scopes
    try:
        with im.nested() as builder:
            scope = scope if part is None else part.seen(im, scope)
            im.scopes = [scope]
            values = captures
            if values is None:
                values = [_captured_scalar(im, c, binding) for c in traced.captured]
            for var, value in zip(traced.jaxpr.constvars, values, strict=True):
                im.env[var] = value
            results = im.run(WithoutConsts(traced.jaxpr), [*scope.ids, *prefetch])
            whole_words = [builder.index(0) for _ in binding.operand.words]
            return builder.block(params, [*results, *whole_words])
    finally:
        im.scopes = scopes


def _captured_scalar(im: Importer, value: Any, binding: Binding) -> Value:
    if isinstance(value, Value):
        return value
    if np.shape(value) != ():
        raise SpecError(
            "an index map cannot capture an array",
            [("operand", binding.operand), ("captured", np.shape(value))],
            location_of(binding.spec.index_map),
            "pass it as a scalar-prefetch operand (PrefetchScalarGridSpec)",
        )
    return im.captured(value)


class WithoutConsts:
    """A jaxpr whose constants are already in the environment."""

    def __init__(self, jaxpr: Any):
        self.invars, self.outvars, self.eqns = jaxpr.invars, jaxpr.outvars, jaxpr.eqns
        self.constvars: list[Any] = []


def semantics_of(given: Any, grid_rank: int, at: Any) -> tuple[str, ...]:
    """`dimension_semantics` as names; enums and old names are accepted."""
    if given is None:
        return ("arbitrary",) * grid_rank
    if isinstance(given, str):
        raise SpecError(
            "dimension_semantics must be a tuple, one entry per grid axis",
            [("dimension_semantics", repr(given)), ("grid axes", grid_rank)],
            at,
            f"dimension_semantics={(given,) * grid_rank}",
        )
    names = tuple(
        str(getattr(s, "value", getattr(s, "name", s))).lower() for s in given
    )
    if len(names) != grid_rank:
        raise SpecError(
            "dimension_semantics does not have one entry per grid axis",
            [("dimension_semantics", names), ("grid axes", grid_rank)],
            at,
            "one of 'parallel' and 'arbitrary' per axis of the grid",
        )
    for name in names:
        if name not in SEMANTICS:
            raise SpecError(
                f"unknown dimension semantics {name!r}",
                [("known", ", ".join(SEMANTICS))],
                at,
                "'arbitrary' is always valid",
            )
    return names
