"""emit_pipeline: a pipeline over refs inside a kernel.

The same IR construct as `pallas_call`'s grid, bound as a primitive while the kernel is
traced, imported by `Plan.emit`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallasite import jaxcompat
from pallasite.calls import pipeline_cores
from pallasite.calls.buffered_ref import BufferedRef, allocations_for
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.importer import pipeline_op
from pallasite.importer.importer import Importer
from pallasite.ir.nodes import Value
from pallasite.language.memory_spaces import MemorySpace
from pallasite.language.refs import _picked, _ref_effects, flatten_views
from pallasite.language.spec_trees import is_spec
from pallasite.language.specs import BlockSpec, Operand, as_grid, no_block_spec
from pallasite.language.trace import (
    Traced,
    check_signature,
    location_of,
    name_of,
    storing,
    trace,
    user_location,
)

pipeline_p = jaxcompat.Primitive("pallasite_pipeline")
pipeline_p.multiple_results = True
pipeline_p.def_effectful_abstract_eval(lambda *a, **_: ([], _ref_effects(a)))


@dataclass(frozen=True, eq=False)
class Plan:
    """An inner pipeline as the importer needs it.

    Operands of the primitive, in order: dynamic grid sizes, where this core's share
    begins and how large the shared axis is (if there is one and it is not known), the
    flattened views, then what the index maps and the body captured.
    """

    grid: tuple[int | None, ...]
    semantics: tuple[str, ...]
    bindings: tuple[pipeline_op.Binding, ...]
    views_tree: Any
    num_view_leaves: int
    body: Traced
    num_scratch: int
    explicit_indices: bool
    name: str
    shared: tuple[int, int | None] | None = None  # axis, and its size if known

    def emit(self, im: Importer, eqn: Any) -> None:
        from pallasite.importer.memory import view

        atoms = list(eqn.invars)
        sizes = [im.value(atoms.pop(0)) if g is None else g for g in self.grid]
        part = self._part(im, atoms)
        leaves, atoms = atoms[: self.num_view_leaves], atoms[self.num_view_leaves :]
        parts = jax.tree.unflatten(self.views_tree, leaves)
        refs = [view(im, im.value(root), transforms) for root, transforms in parts]
        count = len(self.bindings)
        arrays, scratch = refs[:count], refs[count:]
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
            im.run(pipeline_op._without_consts(jaxpr), [*ids, *blocks, *scratch])

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
    """The indices of one step, as a tuple and as `.index` (both were upstream's)."""

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

    Args:
        body: a function of block refs, inputs then outputs (then scratch).
        grid: iteration space; sizes may be values of the kernel.
        in_specs, out_specs: one BlockSpec per ref (pytrees that match the refs); the
            body gets None for a ref with `pl.no_block_spec`.
        core_axis_name: axes of the mesh (`core_axis`: of the grid around) whose cores
            share the steps along one parallel axis.
        dimension_semantics: one per grid axis.
        tiling, trace_scopes, no_pipelining, output_wait_read_only: accepted for
            compatibility; they never change results.

    Returns:
        A function of refs: `pipeline(*in_refs, *out_refs, scratches=(),
        allocations=None)`. Memory for blocks is the compiler's business: of
        `allocations` only the specs count, where the pipeline has none.

    Inside the body, `pl.program_id` counts this pipeline's steps.
    """
    del tiling, trace_scopes, no_pipelining, output_wait_read_only
    if unknown:
        raise UnsupportedError(f"emit_pipeline does not take {', '.join(unknown)}")
    sizes = as_grid(grid)
    core_axes = core_axis_name if core_axis is None else core_axis

    def run(
        *refs: Any, scratches: Sequence[Any] = (), allocations: Any = None, **other: Any
    ) -> None:
        if any(value is not None for value in other.values()):
            raise UnsupportedError(
                f"a pipeline does not take {', '.join(other)}", at=user_location()
            )
        specs = (_as_tuple(in_specs), _as_tuple(out_specs))
        if not any(specs) and allocations is not None:
            specs = _specs_of(allocations)
        semantics = pipeline_op.semantics_of(
            dimension_semantics, len(sizes), user_location()
        )
        share = None
        if core_axes is not None:
            share = pipeline_cores.share(sizes, semantics, core_axes, user_location())
        _bind(body, sizes, specs, refs, scratches, semantics, share, _explicit_indices)

    return run


def emit_pipeline_with_allocations(
    body: Callable[..., None], *, grid: Any, in_specs: Any = (), out_specs: Any = ()
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """A pipeline, and a function of its refs that gives `allocations=` for it."""
    pipeline = emit_pipeline(body, grid=grid, in_specs=in_specs, out_specs=out_specs)

    def make_allocations(*refs: Any, **other: Any) -> Any:
        del other
        return allocations_for(refs, _as_tuple(in_specs), _as_tuple(out_specs))

    return pipeline, make_allocations


def _specs_of(allocations: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    given = jax.tree.leaves(allocations, is_leaf=lambda a: isinstance(a, BufferedRef))
    inputs = tuple(a.spec for a in given if a.buffer_type.is_only_read)
    outputs = tuple(a.spec for a in given if not a.buffer_type.is_only_read)
    return inputs, outputs


def _as_tuple(specs: Any) -> tuple[Any, ...]:
    return tuple(specs) if isinstance(specs, (list, tuple)) else (specs,)


def _bind(
    body: Callable[..., None],
    sizes: tuple[Any, ...],
    specs: tuple[tuple[Any, ...], tuple[Any, ...]],
    refs: Sequence[Any],
    scratches: Sequence[Any],
    semantics: tuple[str, ...],
    share: pipeline_cores.Share | None,
    explicit_indices: bool,
) -> None:
    at = user_location()
    name = name_of(body)
    tree, leaves = _matched(specs, refs, name, at)
    num_inputs = len(jax.tree.leaves(specs[0], is_leaf=is_spec))
    bindings, bound = [], []
    for n, (spec, ref) in enumerate(leaves):
        if spec is no_block_spec:
            continue
        operand = _operand(ref, n, num_inputs, name, at)
        mode = "in" if n < num_inputs else "out"
        bindings.append(pipeline_op.bind(_windowed(spec), operand, mode, sizes, (), at))
        bound.append(ref)
    present = [spec is not no_block_spec for spec, _ in leaves]
    traced = _trace_body(
        body, tree, present, bindings, scratches, sizes, explicit_indices
    )
    steps, shared = sizes, None
    if share is not None:
        whole = sizes[share.axis]
        shared = (share.axis, whole if isinstance(whole, int) else None)
        steps = (*sizes[: share.axis], share.count, *sizes[share.axis + 1 :])
    flat, views_tree = flatten_views(*bound, *scratches)
    captured = [c for b in bindings if b.index_map for c in b.index_map.captured]
    dynamic = [g for g in steps if not isinstance(g, int)]
    if share is not None:
        dynamic += [share.first]
        dynamic += [] if isinstance(sizes[share.axis], int) else [sizes[share.axis]]
    pipeline = Plan(
        tuple(g if isinstance(g, int) else None for g in steps),
        semantics,
        tuple(bindings),
        views_tree,
        len(flat),
        traced,
        len(scratches),
        explicit_indices,
        name,
        shared,
    )
    numbers = [jax.numpy.asarray(g, np.int32) for g in dynamic]
    pipeline_p.bind(*numbers, *flat, *captured, *traced.captured, plan=pipeline)


def _matched(
    specs: tuple[tuple[Any, ...], tuple[Any, ...]], refs: Sequence[Any], name: str, at
) -> tuple[Any, list[tuple[Any, Any]]]:
    """The structure of the body's arguments, and each spec with its ref."""
    flat_specs, tree = jax.tree.flatten((*specs[0], *specs[1]), is_leaf=is_spec)
    try:
        flat_refs = tree.flatten_up_to(tuple(refs))
    except ValueError:
        raise SpecError(
            f"the pipeline has {len(specs[0])} input and {len(specs[1])} output specs "
            f"for {len(refs)} refs",
            [("body", name)],
            at,
        ) from None
    return tree, list(zip(flat_specs, flat_refs, strict=True))


def _operand(ref: Any, n: int, num_inputs: int, name: str, at: Any) -> Operand:
    if not jaxcompat.is_ref(ref):
        raise KernelTypeError(
            f"operand {n} of the pipeline is not a ref", [("body", name)], at
        )
    is_input = n < num_inputs
    path = f"[{n if is_input else n - num_inputs}]"
    _expect_rectangle(ref, n, name, at)
    shape, dtype = _view_type(ref)
    return Operand("in_specs" if is_input else "out_specs", path, shape, dtype)


def _windowed(spec: BlockSpec | None) -> BlockSpec:
    """A block that the author wants left in main memory is a window like any other."""
    spec = spec or BlockSpec()
    space = spec.memory_space
    stays = isinstance(space, MemorySpace) and not space.has_windows
    if spec.block_shape is not None and stays:
        return spec.replace(memory_space=None)
    return spec


def _expect_rectangle(ref: Any, n: int, name: str, at: Any) -> None:
    kinds = {type(t).__name__ for t in jaxcompat.ref_and_transforms(ref)[1]}
    kinds &= {"ReshapeTransform", "TransposeTransform", "BitcastTransform"}
    if kinds:
        raise UnsupportedError(
            f"operand {n} of the pipeline is a reshaped, transposed or bitcast view",
            [("body", name), ("view", ", ".join(sorted(kinds)))],
            at,
            "pass the ref, or a slice of it (.at[...]), and reshape in the body",
        )


def _view_type(ref: Any) -> tuple[tuple[int, ...], Any]:
    root, transforms = jaxcompat.ref_and_transforms(ref)
    return _picked(jaxcompat.aval_of(root), transforms)


def _trace_body(
    body: Callable[..., None],
    tree: Any,
    present: Sequence[bool],
    bindings: Sequence[pipeline_op.Binding],
    scratches: Sequence[Any],
    grid: tuple[Any, ...],
    explicit_indices: bool,
) -> Traced:
    avals: list[Any] = []
    for b in bindings:
        space = MemorySpace.VMEM if b.space == "block" else MemorySpace(b.space)
        avals.append(jaxcompat.abstract_ref(b.ref_shape, b.operand.dtype, space))
    for scratch in scratches:
        shape, dtype = _view_type(scratch)
        avals.append(jaxcompat.abstract_ref(shape, dtype, MemorySpace.VMEM))
    ids = [jax.ShapeDtypeStruct((), np.int32)] * (len(grid) if explicit_indices else 0)

    def arguments(*flat: Any) -> tuple[Any, ...]:
        step = [PipelineStep(flat[: len(ids)])] if explicit_indices else []
        pending = iter(flat[len(ids) :])
        blocks = tree.unflatten([next(pending) if p else None for p in present])
        return (*step, *blocks, *pending)

    counts = [("refs", len(present)), ("scratches", len(scratches))]
    check_signature(body, arguments(*ids, *avals), {}, counts, user_location())

    def call(*flat: Any) -> Any:
        return body(*arguments(*flat))

    flat_tree = jax.tree.structure((tuple(range(len(ids) + len(avals))), {}))
    checked = storing(call, name_of(body), location_of(body))
    return trace(checked, flat_tree, [*ids, *avals], body, grid=grid)
