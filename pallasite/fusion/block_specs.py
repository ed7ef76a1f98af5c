"""Pulls and pushes BlockSpecs through functions, for `pallasite.fuser`.

For a kernel that takes functions in place of operands (`fusible.py`), finds which
blocks of their values it needs, and the functions from those to its operand's blocks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasite import jaxcompat
from pallasite.errors import NotFusible, SpecError, UnsupportedError
from pallasite.fusion.block_rules import BlockIndexTransform, Blocks
from pallasite.fusion.graph import Const, Graph, Val
from pallasite.fusion.propagate import evaluate as evaluate_node
from pallasite.fusion.propagate import (
    pull_through,
    push_through,
    same_blocks,
    scalar_values,
    scalars_of,
)
from pallasite.language.specs import BlockSpec, no_block_spec
from pallasite.language.trace import user_location

_INDEX = jax.ShapeDtypeStruct((), "int32")


def make_scalar_prefetch_handler(*path: Any) -> Callable[..., Any]:
    """A function that selects one fusion's scalars from all of a kernel's.

    Args:
        path: the indices or keys leading to them, outermost first.

    Returns:
        A function of the scalar-prefetch arguments of an index map or kernel.
    """

    def pick(*prefetch: Any) -> Any:
        return functools.reduce(lambda found, key: found[key], path, prefetch)

    return pick


def block_spec_with_prefetch(
    block_specs: Any, scalar_prefetch_smem_refs: Sequence[Any]
) -> Any:
    """The specs with index maps that receive these refs after the grid indices."""
    refs = scalar_prefetch_smem_refs

    def with_refs(spec: Any) -> Any:
        index_map = getattr(spec, "index_map", None)
        if index_map is None:
            return spec
        return spec.replace(index_map=lambda *ids: index_map(*ids, *refs))

    return jax.tree.map(with_refs, block_specs)


def filter_no_block_specs(values: Any, block_specs: Any) -> tuple[Any, Any]:
    """Values and specs, with None in place of those without blocks."""
    has = lambda spec: spec is not no_block_spec
    kept = jax.tree.map(lambda v, s: v if has(s) else None, values, block_specs)
    return kept, jax.tree.map(lambda s: s if has(s) else None, block_specs)


def evaluate(f: Callable[..., Any], *, allow_transpose: bool = True) -> Any:
    """`f`, computed one primitive at a time, without loops and branches.

    Args:
        f: a function of arrays.
        allow_transpose: False rejects transposes.

    Returns:
        A function of the same positional arguments.

    Raises:
        NotImplementedError: there is a scan, a loop or a branch.
        ValueError: there is a transpose, and it is not allowed.
    """

    def evaluated(*args: Any) -> Any:
        flat, tree = jax.tree.flatten(args)
        run = lambda *leaves: f(*jax.tree.unflatten(tree, leaves))
        graph, out_tree = Graph.of(run, *flat)
        for node in graph.nodes:
            name = node.primitive.name
            if name in ("scan", "while", "cond"):
                raise NotFusible(f"{name} cannot be evaluated on blocks")
            if name == "transpose" and not allow_transpose:
                raise SpecError(
                    "transpose is not allowed here (allow_transpose=False)",
                    [("permutation", node.params["permutation"])],
                    user_location(),
                    fix="transpose outside the fused function",
                )
        results = graph.run([value for _, value in graph.constants], flat)
        return jax.tree.unflatten(out_tree, results)

    return evaluated


# --- the values of a fusion ---


def get_fusion_values(
    fusion: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """What a fusion closes over: arrays, and scalars that block indices depend on.

    Args:
        fusion: a function, such as a `Fusion`.
        args, kwargs: types of its arguments.

    Returns:
        The fusion as a function of its arrays and arguments, the arrays, the scalars.
    """
    flat, tree = jax.tree.flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        own_args, own_kwargs = jax.tree.unflatten(tree, leaves)
        return fusion(*own_args, **own_kwargs)

    graph, out_tree = Graph.of(run, *flat)
    values = [value for _, value in graph.constants]
    if any(map(jaxcompat.is_ref, values)):
        raise UnsupportedError(
            "the fusion uses a ref",
            at=user_location(),
            fix="pass its value in, and store the result of the call to the ref",
        )
    needed = scalar_values(graph)
    is_scalar = [v in needed for v, _ in graph.constants]
    arrays = tuple(v for v, s in zip(values, is_scalar, strict=True) if not s)
    scalars = tuple(v for v, s in zip(values, is_scalar, strict=True) if s)

    def of_values(given: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        pending, prefetched = iter(given), iter(scalars)
        both = [next(prefetched) if s else next(pending) for s in is_scalar]
        results = graph.run(both, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(out_tree, results)

    return of_values, arrays, scalars


def get_stateful_input_fusion_values(
    fusion: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """`get_fusion_values`; rejects a fusion that uses refs."""
    return get_fusion_values(fusion, *args, **kwargs)


def get_stateful_output_fusion_values(
    fusion: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], dict[int, int]]:
    """`get_fusion_values`, and which results are written refs: none."""
    return (*get_fusion_values(fusion, *args, **kwargs), {})


# --- pulling ---


def pull_block_spec(
    f: Callable[..., Any],
    out_block_specs: Any,
    *,
    scalar_prefetch_handler: Callable[..., Any] | None = None,
    grid_len: int | None = None,
    strict_mode: bool = True,
    grid: Sequence[Any] | None = None,
) -> Callable[..., tuple[Callable[..., Any], Any, Any]]:
    """From blocks of a function's results to blocks of its arguments.

    Args:
        f: a function of arrays.
        out_block_specs: the required blocks of its results.
        scalar_prefetch_handler: selects the scalars of `f` from the kernel's.
        grid_len: how many indices a step has; needed if blocks depend on scalars.
        strict_mode: whether all uses of a value must need the same block of it, not
            only blocks of the same shape.
        grid: the older spelling of `grid_len`.

    Returns:
        A function of the types of `f`'s arguments. It returns `kernel_fn(program_ids,
        scalar_prefetch, *blocks)`, which computes a block, and the specs of the
        positional and of the keyword arguments.
    """
    length = len(grid) if grid is not None else grid_len

    def pulled(*args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
        flat, tree = jax.tree.flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            own_args, own_kwargs = jax.tree.unflatten(tree, leaves)
            return f(*own_args, **own_kwargs)

        graph, out_tree = Graph.of(run, *flat)
        specs = jax.tree.leaves(out_block_specs)
        made = _Pulled(graph, specs, scalar_prefetch_handler, length, strict_mode)

        def kernel_fn(ids: Any, prefetch: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = tree.flatten_up_to((args, kwargs))
            return jax.tree.unflatten(out_tree, made.run(ids, prefetch, blocks))

        kernel_fn.scalar_prefetch = made.scalars  # type: ignore[attr-defined]
        found = [made.spec(v) for v in graph.inputs]
        arg_specs, kwarg_specs = jax.tree.unflatten(tree, found)
        return kernel_fn, arg_specs, kwarg_specs

    return pulled


class _Pulled:
    """A function with the blocks of its values.

    For the rules, the indices of a step are those of the blocks of all results, then
    the scalars that the function closes over.
    """

    def __init__(
        self,
        graph: Graph,
        specs: Sequence[Any],
        handler: Callable[..., Any] | None,
        grid_len: int | None,
        strict: bool,
    ):
        self.graph, self.specs = graph, specs
        self.handler, self.grid_len, self.strict = handler, grid_len, strict
        needed = scalar_values(graph)
        self.prefetched = [v for v, _ in graph.constants if v in needed]
        self.scalars = tuple(value for v, value in graph.constants if v in needed)
        self.blocks: dict[Val, Blocks] = {}
        self.rank = 0  # number of indices of the results' blocks
        self._note_results()
        self._pull()

    def _note_results(self) -> None:
        seen: list[tuple[Any, Blocks]] = []
        if len(self.specs) != len(self.graph.outputs):
            raise SpecError(
                f"{len(self.specs)} BlockSpecs for {len(self.graph.outputs)} results",
                at=user_location(),
                fix="one BlockSpec per result",
            )
        for value, spec in zip(self.graph.outputs, self.specs, strict=True):
            if spec is no_block_spec:
                continue
            known = [b for other, b in seen if other == spec]
            blocks = known[0] if known else self._own_indices(spec)
            seen.append((spec, blocks))
            if isinstance(value, Val):
                self._note(value, blocks)

    def _own_indices(self, spec: BlockSpec) -> Blocks:
        if spec.block_shape is None:
            return None
        first, self.rank = self.rank, self.rank + len(spec.block_shape)
        last = self.rank
        return BlockIndexTransform(
            spec.block_shape,
            lambda *outer: outer[first:last],
            memory_space=spec.memory_space,
            pipeline_mode=spec.pipeline_mode,
        )

    def _note(self, value: Val, blocks: Blocks) -> None:
        before = self.blocks.setdefault(value, blocks)
        if blocks is None or before is None:
            self.blocks[value] = blocks or before
            return
        types = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in self.prefetched]
        outer = [*[_INDEX] * self.rank, *types]
        if not same_blocks(before, blocks, outer, self.strict):
            raise SpecError(
                "two uses of a value need different blocks of it",
                [("value", value.aval.str_short())],
                user_location(),
                "compute one of them outside the function",
            )

    def _pull(self) -> None:
        for node in reversed(self.graph.nodes):
            outs = tuple(self.blocks.get(v) for v in node.results)
            if all(out is None for out in outs):
                continue
            ins = pull_through(node, outs, self._scalars if self.scalars else None)
            for value, blocks in zip(node.operands, ins, strict=True):
                if isinstance(value, Val):
                    self._note(value, blocks)

    def _scalars(self, outer: Sequence[Any]) -> dict[Val, Any]:
        given = dict(zip(self.prefetched, outer[self.rank :], strict=True))
        return scalars_of(self.graph, given)

    def _outer(self, ids: Sequence[Any], prefetch: Sequence[Any]) -> tuple[Any, ...]:
        """The indices of a step, as the rules see them."""
        found: list[Any] = []
        seen: list[Any] = []
        for spec in self.specs:
            if spec is no_block_spec or spec.block_shape is None or spec in seen:
                continue
            seen.append(spec)
            index_map = spec.index_map
            if index_map is None:
                found += [0] * len(spec.block_shape)
                continue
            made = index_map(*ids, *prefetch)
            found += made if isinstance(made, (tuple, list)) else [made]
        return (*found, *self._loaded(prefetch))

    def _loaded(self, prefetch: Sequence[Any]) -> list[Any]:
        """The function's own scalars."""
        if not self.scalars:
            return []
        own = prefetch if self.handler is None else self.handler(*prefetch)
        if len(own) != len(self.scalars):
            raise SpecError(
                f"the function needs {len(self.scalars)} scalars, got {len(own)}",
                at=user_location(),
                fix="pass grid_len= to pull_block_spec, and a handler that picks the "
                "scalars",
            )
        return [ref[0] if ref.ndim else ref[...] for ref in own]

    def spec(self, value: Val) -> Any:
        """The BlockSpec of a value."""
        blocks = self.blocks.get(value)
        if blocks is None:
            return no_block_spec
        if blocks.block_shape is None:
            return BlockSpec(memory_space=blocks.memory_space)

        def index_map(*args: Any) -> tuple[Any, ...]:
            length = self.grid_len
            if length is None:
                if self.scalars:
                    raise SpecError(
                        "block indices depend on scalars, but grid_len is not given",
                        at=user_location(),
                        fix="pull_block_spec(..., grid_len=len(grid))",
                    )
                length = len(args)
            return blocks.at(self._outer(args[:length], args[length:]))

        return BlockSpec(
            blocks.block_shape,
            index_map,
            memory_space=blocks.memory_space,
            pipeline_mode=blocks.pipeline_mode,
        )

    def run(self, ids: Any, prefetch: Any, args: Sequence[Any]) -> list[Any]:
        """Blocks of the results from those of the arguments."""
        values: dict[Val, Any] = dict(zip(self.graph.inputs, args, strict=True))
        values.update(self.graph.constants)
        if prefetch and self.scalars:
            own = self._loaded(prefetch)
            values.update(zip(self.prefetched, own, strict=True))
        outer = lambda: self._outer(ids, prefetch or ())
        read = lambda atom: atom.value if isinstance(atom, Const) else values[atom]
        for node in self.graph.nodes:
            operands = [read(v) for v in node.operands]
            made = evaluate_node(node, operands, self.blocks, outer)
            values.update(zip(node.results, made, strict=True))
        return [read(v) for v in self.graph.outputs]


# --- pushing ---


def push_block_spec(
    f: Callable[..., Any],
    *in_spec_args: Any,
    scalar_prefetch_handler: Callable[..., Any] | None = None,
    grid_len: int | None = None,
    strict_mode: bool = True,
    return_out_type: bool = False,
    **in_spec_kwargs: Any,
) -> Callable[..., Any]:
    """From blocks of a function's arguments to blocks of its results.

    Args:
        f: a function of arrays.
        in_spec_args, in_spec_kwargs: the blocks of its arguments.
        scalar_prefetch_handler, grid_len, strict_mode: without effect here.
        return_out_type: whether to return the types of the results, too.

    Returns:
        A function of the types of `f`'s arguments that returns the results' specs.
    """

    def pushed(*args: Any, **kwargs: Any) -> Any:
        flat, tree = jax.tree.flatten((args, kwargs))
        specs, spec_tree = jax.tree.flatten((in_spec_args, in_spec_kwargs))
        if spec_tree != tree:
            raise SpecError(
                "the specs do not match the structure of the arguments",
                [("arguments", tree), ("specs", spec_tree)],
                user_location(),
                fix="one BlockSpec per array, in the tree structure of the arguments",
            )

        def run(*leaves: Any) -> Any:
            own_args, own_kwargs = jax.tree.unflatten(tree, leaves)
            return f(*own_args, **own_kwargs)

        graph, out_tree = Graph.of(run, *flat)
        found = jax.tree.unflatten(out_tree, _push(graph, specs))
        if not return_out_type:
            return found
        types = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in graph.outputs]
        return found, jax.tree.unflatten(out_tree, types)

    return pushed


def _push(graph: Graph, specs: Sequence[Any]) -> list[BlockSpec]:
    blocks: dict[Val, Blocks] = {}
    given: dict[int, BlockSpec] = {}  # specs returned unchanged
    for value, spec in zip(graph.inputs, specs, strict=True):
        if spec is no_block_spec:
            continue
        made = blocks[value] = as_blocks(spec)
        given[id(made)] = spec
    for node in graph.nodes:
        ins = [blocks.get(v) if isinstance(v, Val) else None for v in node.operands]
        if any(b is not None for b in ins):
            outs = push_through(node, ins)
            blocks.update(zip(node.results, outs, strict=True))
    found = []
    for n, value in enumerate(graph.outputs):
        out = blocks.get(value) if isinstance(value, Val) else None
        if out is None:
            raise SpecError(
                f"result {n} does not depend on any argument with a BlockSpec",
                at=user_location(),
                fix="pass a BlockSpec for an argument that it is computed from",
            )
        found.append(given.get(id(out)) or as_spec(out))
    return found


def as_blocks(spec: BlockSpec) -> BlockIndexTransform:
    """A spec as the rules see it, with the grid's steps."""
    shape = spec.block_shape or ()
    return BlockIndexTransform(
        spec.block_shape,
        spec.index_map or (lambda *ids: (0,) * len(shape)),
        memory_space=spec.memory_space,
        pipeline_mode=spec.pipeline_mode,
    )


def as_spec(blocks: BlockIndexTransform) -> BlockSpec:
    """The inverse of `as_blocks`."""
    return BlockSpec(
        blocks.block_shape,
        blocks.block_index_transform,
        memory_space=blocks.memory_space,
        pipeline_mode=blocks.pipeline_mode,
    )


def push_pull_block_spec(
    f: Callable[..., Any],
    *block_specs: Any,
    scalar_prefetch_handler: Callable[..., Any] | None = None,
    grid_len: int | None = None,
    **block_spec_kwargs: Any,
) -> Callable[..., Any]:
    """The blocks of an output fusion's results, and of its other arguments.

    Args:
        f: `f(values, *results)`, from the results of a kernel and other values.
        block_specs, block_spec_kwargs: the blocks of the kernel's results.
        scalar_prefetch_handler, grid_len: as for `pull_block_spec`.

    Returns:
        A function of the types of `f`'s arguments. It returns `kernel_fn` as
        `pull_block_spec` does, the specs of `values` and of the keyword arguments, and
        the types and specs of `f`'s results.
    """

    def both(values: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        out_specs, out_type = push_block_spec(
            f,
            jax.tree.map(lambda _: no_block_spec, values),
            *block_specs,
            return_out_type=True,
            **block_spec_kwargs,
        )(values, *args, **kwargs)
        kernel_fn, (value_specs, *_), kwarg_specs = pull_block_spec(
            f,
            out_specs,
            scalar_prefetch_handler=scalar_prefetch_handler,
            grid_len=grid_len,
            strict_mode=False,
        )(values, *args, **kwargs)
        return kernel_fn, value_specs, kwarg_specs, out_type, out_specs

    return both
