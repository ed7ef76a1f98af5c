"""emit_pipeline: a pipeline over refs inside a kernel.

It is the same IR construct as `pallas_call`'s grid, bound as a primitive while the
kernel is traced and imported by `PipelinePlan.emit`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from pallasite import jaxcompat
from pallasite.calls import pipeline_cores
from pallasite.calls.buffered_ref import (
    BufferedRef,
    BufferedRefBase,
    BufferType,
    allocations_for,
)
from pallasite.calls.own_copies import Steps, run_step
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.importer import pipeline_op
from pallasite.importer.importer import Importer
from pallasite.ir.nodes import Value
from pallasite.language.memory_spaces import MemoryRef, MemorySpace
from pallasite.language.refs import flatten_views, picked, ref_effects, run_scoped
from pallasite.language.spec_trees import describe, is_shaped, is_spec
from pallasite.language.specs import BlockSpec, Operand, as_grid, no_block_spec
from pallasite.language.trace import (
    Traced,
    check_signature,
    count_of,
    location_of,
    name_of,
    storing,
    trace,
    user_location,
)

pipeline_p = jaxcompat.Primitive("pallasite_pipeline")
pipeline_p.multiple_results = True
pipeline_p.def_effectful_abstract_eval(lambda *a, **_: ([], ref_effects(a)))


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """An inner pipeline as the importer needs it.

    Operands of the primitive, in order: dynamic grid sizes, the start of this core's
    share and the size of the shared axis (if there is one and it is dynamic), the
    flattened views, then what the index maps and the body captured.
    """

    grid: tuple[int | None, ...]
    semantics: tuple[str, ...]
    bindings: tuple[pipeline_op.Binding, ...]
    views_tree: Any
    num_view_leaves: int
    body: Traced
    explicit_indices: bool
    name: str
    shared: tuple[int, int | None] | None = None  # axis, and its size if known

    def emit(self, im: Importer, eqn: Any) -> None:
        from pallasite.importer.views import view

        atoms = list(eqn.invars)
        sizes = [im.value(atoms.pop(0)) if g is None else g for g in self.grid]
        part = self._part(im, atoms)
        leaves, atoms = atoms[: self.num_view_leaves], atoms[self.num_view_leaves :]
        parts = jax.tree.unflatten(self.views_tree, leaves)
        arrays = [view(im, im.value(root), transforms) for root, transforms in parts]
        captures: list[list[Value] | None] = []
        for binding in self.bindings:
            n = len(binding.index_map.captured) if binding.index_map else 0
            captures.append([im.value(a) for a in atoms[:n]])
            atoms = atoms[n:]
        captured = [im.value(a) for a in atoms]

        def import_body(blocks: list[Value]) -> None:
            jaxpr = self.body.jaxpr
            for var, value in zip(jaxpr.constvars, captured, strict=True):
                im.env[var] = value
            ids = list(im.grid.ids) if self.explicit_indices else []
            im.run(pipeline_op.WithoutConsts(jaxpr), [*ids, *blocks])

        pipeline_op.emit_pipeline_op(
            im,
            sizes,
            self.semantics,
            self.bindings,
            arrays,
            (),
            import_body,
            captures,
            part=part,
        )

    def _part(self, im: Importer, atoms: list[Any]) -> pipeline_op.Part | None:
        if self.shared is None:
            return None
        axis, size = self.shared
        first = im.value(atoms.pop(0))
        return pipeline_op.Part(
            axis, first, im.value(atoms.pop(0)) if size is None else size
        )


class PipelineStep(tuple):
    """The indices of one step, as a tuple and as `.index` (upstream has used both).

    `local_index` counts the steps that this core has run before it.
    """

    local_index: Any

    def __new__(cls, index: Sequence[Any], local_index: Any = None) -> "PipelineStep":
        step = super().__new__(cls, index)
        step.local_index = local_index
        return step

    @property
    def index(self) -> Any:  # type: ignore[override]
        return tuple(self)


def emit_pipeline(
    body: Callable[..., None],
    *,
    grid: Any,
    in_specs: Any = (),
    out_specs: Any = (),
    tiling: Any = None,
    core_axis: Any = None,
    core_axis_name: Any = None,
    dimension_semantics: Any = None,
    trace_scopes: bool = True,
    no_pipelining: bool = False,
    output_wait_read_only: bool = False,
    _explicit_indices: bool = False,
    **unknown: Any,
) -> Callable[..., None]:
    """Run `body` over blocks of refs in main memory, from inside a kernel.

    Inside the body, `pl.program_id` counts this pipeline's steps.

    Args:
        body: a function of block refs, inputs then outputs (then scratch).
        grid: iteration space; sizes may be values of the kernel.
        in_specs, out_specs: one BlockSpec per ref (pytrees that match the refs); the
            body gets None for a ref with `pl.no_block_spec`, and where both are None.
        core_axis_name: mesh axes (`core_axis`: axes of the enclosing grid) whose cores
            share the steps along one parallel axis.
        dimension_semantics: one per grid axis.
        tiling, trace_scopes, no_pipelining, output_wait_read_only: accepted for
            compatibility; they never change results.

    Returns:
        A function of refs: `pipeline(*in_refs, *out_refs, scratches=(),
        allocations=None, body_prologue=None)`. `scratches` are further arguments of
        the body (pytrees of refs); the prologue runs before the body at each step.
        `allocations` has a BufferedRef per ref, whose specs replace the pipeline's. A
        BufferedRef with overridden methods fetches and writes back its blocks itself,
        and receives whatever is passed in place of its ref. The compiler allocates
        memory for the other blocks.
    """
    del tiling, trace_scopes, no_pipelining, output_wait_read_only
    if unknown:
        raise UnsupportedError(
            f"emit_pipeline does not support {', '.join(unknown)}",
            [("body", name_of(body))],
            user_location(),
            "grid, in_specs, out_specs, core_axis_name, dimension_semantics; the "
            "pipeline itself is called with refs, scratches and allocations",
        )
    sizes = as_grid(grid)
    core_axes = core_axis_name if core_axis is None else core_axis

    def run(
        *refs: Any,
        scratches: Sequence[Any] | None = (),
        allocations: Any = None,
        body_prologue: Callable[[], None] | None = None,
        **other: Any,
    ) -> None:
        at = user_location()
        if any(value is not None for value in other.values()):
            raise UnsupportedError(
                f"a pipeline does not support {', '.join(other)}",
                [("body", name_of(body))],
                at,
                "pass refs by position, then scratches= and allocations=",
            )
        specs = (_as_tuple(in_specs), _as_tuple(out_specs))
        semantics = pipeline_op.semantics_of(dimension_semantics, len(sizes), at)
        share = None
        if core_axes is not None:
            share = pipeline_cores.share(sizes, semantics, core_axes, at)
        tree, given = _matched(specs, refs, allocations, name_of(body), at)
        pipeline = _Pipeline(
            body,
            body_prologue,
            sizes,
            semantics,
            share,
            tree,
            tuple(given),
            tuple(scratches or ()),
            _explicit_indices,
            at,
        )
        pipeline.bind()

    return run


def emit_pipeline_with_allocations(
    body: Callable[..., None], *, grid: Any, in_specs: Any = (), out_specs: Any = ()
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """A pipeline, and a function of its refs that returns its `allocations=`."""
    pipeline = emit_pipeline(body, grid=grid, in_specs=in_specs, out_specs=out_specs)

    def make_allocations(*refs: Any, **other: Any) -> Any:
        del other
        return allocations_for(refs, _as_tuple(in_specs), _as_tuple(out_specs))

    return pipeline, make_allocations


def emit_pipeline_with_async_prefetch(
    body: Callable[..., None],
    *,
    grid: Any,
    in_specs: Any = (),
    mesh: Any = None,
    **given: Any,
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """A pipeline, and a function of its inputs that returns its `allocations=`.

    Nothing is fetched before the pipeline runs, which fetches all blocks itself.
    """
    del mesh
    pipeline = emit_pipeline(body, grid=grid, in_specs=in_specs, **given)

    def run(*refs: Any, allocations: Any = None, **other: Any) -> None:
        del allocations
        pipeline(*refs, **other)

    return run, lambda *inputs: (None,) * len(inputs)


def _as_tuple(specs: Any) -> tuple[Any, ...]:
    return tuple(specs) if isinstance(specs, (list, tuple)) else (specs,)


# --- the pipeline's refs, each with the description of its blocks ---


@dataclass(frozen=True)
class _Source:
    """A ref of a pipeline. Its blocks are windows of the pipeline or moved by a
    BufferedRef's copies, or the body gets the ref as it is."""

    ref: Any
    binding: pipeline_op.Binding | None = None
    buffered: BufferedRefBase | None = None


def _matched(
    specs: tuple[tuple[Any, ...], tuple[Any, ...]],
    refs: Sequence[Any],
    allocations: Any,
    name: str,
    at: Any,
) -> tuple[Any, list[tuple[Any, Any, str]]]:
    """The structure of the body's arguments, and for each the spec or BufferedRef, the
    ref, and the direction of its blocks."""
    if allocations is None:
        flat, tree = jax.tree.flatten((*specs[0], *specs[1]), is_leaf=is_spec)
        num_inputs = len(jax.tree.leaves(specs[0], is_leaf=is_spec))
        modes = ["in" if n < num_inputs else "out" for n in range(len(flat))]
        counts = f"{len(specs[0])} input and {len(specs[1])} output specs"
    else:
        given = _as_tuple(allocations)
        is_leaf = lambda a: isinstance(a, BufferedRefBase) or a is None
        flat, tree = jax.tree.flatten(given, is_leaf=is_leaf)
        modes = ["out" if b is not None and b.is_output else "in" for b in flat]
        counts = f"{len(given)} allocations"
    try:
        flat_refs = tree.flatten_up_to(tuple(refs))
    except ValueError:
        raise SpecError(
            f"the pipeline has {counts} for {count_of(len(refs), 'ref')}",
            [("body", name)],
            at,
            "one ref per input spec, then one per output spec",
        ) from None
    return tree, list(zip(flat, flat_refs, modes, strict=True))


@dataclass(frozen=True, eq=False)
class _Pipeline:
    """A pipeline with its refs, before it is bound as a primitive."""

    body: Callable[..., None]
    prologue: Callable[[], None] | None
    grid: tuple[Any, ...]
    semantics: tuple[str, ...]
    share: pipeline_cores.Share | None
    tree: Any
    given: tuple[tuple[Any, Any, str], ...]
    scratches: tuple[Any, ...]
    explicit_indices: bool
    at: Any

    def bind(self) -> None:
        num_inputs = sum(mode == "in" for _, _, mode in self.given)
        sources = [
            self._source(n, num_inputs, *entry) for n, entry in enumerate(self.given)
        ]
        own = [s for s in sources if s.buffered is not None]
        if not own:
            self._bind(sources, None)
            return
        # The pipeline allocates memory that came unallocated with its BufferedRef.
        memory = [None if _is_allocated(s.buffered) else s.buffered for s in own]

        def with_memory(memory: list[Any], numbers_ref: Any) -> None:
            pairs = zip(memory, own, strict=True)
            pending = iter(s.buffered if m is None else m for m, s in pairs)
            placed = [
                replace(s, buffered=next(pending)) if s.buffered is not None else s
                for s in sources
            ]
            self._bind(placed, numbers_ref)

        run_scoped(with_memory, memory, MemorySpace.SMEM((len(own),), np.int32))

    def _source(
        self, n: int, num_inputs: int, spec: Any, ref: Any, mode: str
    ) -> _Source:
        """How the body's argument is obtained from one ref."""
        if spec is no_block_spec or (spec is None and ref is None):
            return _Source(None)
        if isinstance(spec, BufferedRefBase):
            if type(spec) is not BufferedRef or spec.is_manual:
                return _Source(ref, buffered=spec)
            spec = spec.spec
        operand = _operand(ref, n, num_inputs, mode, name_of(self.body), self.at)
        spec = _windowed(spec)
        binding = pipeline_op.bind(spec, operand, mode, self.grid, (), self.at)
        if _is_rectangle(ref):
            return _Source(ref, binding)
        if binding.window is None or spec.block_shape is None:
            return _Source(ref)
        kind = BufferType.INPUT if mode == "in" else BufferType.INPUT_OUTPUT
        return _Source(ref, buffered=BufferedRef.create(spec, ref.dtype, kind, 1))

    def _bind(self, sources: Sequence[_Source], numbers_ref: Any) -> None:
        windows = [s for s in sources if s.binding is not None]
        bindings = tuple(s.binding for s in windows if s.binding is not None)
        traced = self._trace(sources, bindings, numbers_ref)
        steps, shared, share = list(self.grid), None, self.share
        dynamic: list[Any] = []
        if share is not None:
            whole = self.grid[share.axis]
            shared = (share.axis, whole if isinstance(whole, int) else None)
            steps[share.axis] = share.count
            dynamic += [share.first]
            dynamic += [] if isinstance(whole, int) else [whole]
        dynamic = [g for g in steps if not isinstance(g, int)] + dynamic
        flat, views_tree = flatten_views(*(s.ref for s in windows))
        captured = [c for b in bindings if b.index_map for c in b.index_map.captured]
        # A step may copy in what an earlier step copied out.
        ordered = ("arbitrary",) * len(steps)
        pipeline = PipelinePlan(
            tuple(g if isinstance(g, int) else None for g in steps),
            self.semantics if numbers_ref is None else ordered,
            bindings,
            views_tree,
            len(flat),
            traced,
            self.explicit_indices,
            name_of(self.body),
            shared,
        )
        numbers = [jax.numpy.asarray(g, np.int32) for g in dynamic]
        pipeline_p.bind(*numbers, *flat, *captured, *traced.captured, plan=pipeline)

    def _trace(
        self,
        sources: Sequence[_Source],
        bindings: Sequence[pipeline_op.Binding],
        numbers_ref: Any,
    ) -> Traced:
        body = self.body
        avals: list[Any] = []
        for b in bindings:
            space = MemorySpace.VMEM if b.space == "block" else MemorySpace(b.space)
            avals.append(jaxcompat.abstract_ref(b.ref_shape, b.operand.dtype, space))
        num_ids = len(self.grid) if self.explicit_indices else 0
        ids = [jax.ShapeDtypeStruct((), np.int32)] * num_ids

        def arguments(
            flat: Sequence[Any], own: Sequence[Any], number: Any
        ) -> tuple[Any, ...]:
            here = PipelineStep(flat[:num_ids], number)
            step = [here] if self.explicit_indices else []
            windows, moved = iter(flat[num_ids:]), iter(own)
            blocks: list[Any] = []
            for s in sources:
                if s.binding is not None:
                    blocks.append(next(windows))
                else:
                    blocks.append(next(moved) if s.buffered is not None else s.ref)
            return (*step, *self.tree.unflatten(blocks), *self.scratches)

        own = [(s.buffered, s.ref) for s in sources if s.buffered is not None]
        counts = [("refs", len(sources)), ("scratches", len(self.scratches))]
        sample = arguments([*ids, *avals], [b for b, _ in own], None)
        check_signature(body, sample, {}, counts, self.at)

        def call(*flat: Any) -> Any:
            def run(blocks: Sequence[Any]) -> Any:
                if self.prologue is not None:
                    self.prologue()
                number = self._steps().number(flat[:num_ids]) if num_ids else None
                return body(*arguments(flat, blocks, number))

            if numbers_ref is None:
                return run(())
            return run_step(run, own, numbers_ref, self._steps())

        flat_tree = jax.tree.structure((tuple(range(len(ids) + len(avals))), {}))
        checked = storing(call, name_of(body), location_of(body))
        return trace(checked, flat_tree, [*ids, *avals], body, grid=self.grid)

    def _steps(self) -> Steps:
        firsts: list[Any] = [0] * len(self.grid)
        counts = list(self.grid)
        if self.share is not None:
            firsts[self.share.axis] = self.share.first
            counts[self.share.axis] = self.share.count
        return Steps(tuple(firsts), tuple(counts))


def _is_allocated(buffered: Any) -> bool:
    """Whether the blocks' memory is allocated, rather than only described."""
    leaves = jax.tree.leaves(buffered, is_leaf=jaxcompat.is_ref)
    return not any(isinstance(leaf, MemoryRef) for leaf in leaves)


def _operand(
    ref: Any, n: int, num_inputs: int, mode: str, name: str, at: Any
) -> Operand:
    if not jaxcompat.is_ref(ref):
        raise KernelTypeError(
            f"operand {n} of the pipeline is not a ref",
            [
                ("body", name),
                ("got", describe(ref) if is_shaped(ref) else type(ref).__name__),
            ],
            at,
            "pass the ref, preferably with memory_space=pl.ANY, not its value",
        )
    is_input = mode == "in"
    path = f"[{n if is_input else n - num_inputs}]"
    shape, dtype = _view_type(ref)
    return Operand("in_specs" if is_input else "out_specs", path, shape, dtype)


def _windowed(spec: BlockSpec | None) -> BlockSpec:
    """A block that the author keeps in main memory, as an ordinary window."""
    spec = spec or BlockSpec()
    space = spec.memory_space
    stays = isinstance(space, MemorySpace) and not space.has_windows
    if spec.block_shape is not None and stays:
        return spec.replace(memory_space=None)
    return spec


def _is_rectangle(ref: Any) -> bool:
    """Whether blocks of a ref are rectangles of the underlying memory."""
    kinds = {type(t).__name__ for t in jaxcompat.ref_and_transforms(ref)[1]}
    reordered = {"ReshapeTransform", "TransposeTransform", "BitcastTransform"}
    return not kinds & reordered


def _view_type(ref: Any) -> tuple[tuple[int, ...], Any]:
    root, transforms = jaxcompat.ref_and_transforms(ref)
    return picked(jaxcompat.aval_of(root), transforms)
