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
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.frontend import plan
from pallasite.frontend.from_jaxpr import Importer
from pallasite.frontend.refs import _picked, _ref_effects, flatten_views
from pallasite.frontend.spaces import MemorySpace
from pallasite.frontend.spec import BlockSpec, Operand, as_grid
from pallasite.frontend.trace import (
    Traced,
    check_signature,
    location_of,
    name_of,
    storing,
    trace,
    user_location,
)
from pallasite.ir.nodes import Value

pipeline_p = jaxcompat.Primitive("pallasite_pipeline")
pipeline_p.multiple_results = True
pipeline_p.def_effectful_abstract_eval(lambda *a, **_: ([], _ref_effects(a)))


@dataclass(frozen=True, eq=False)
class Plan:
    """An inner pipeline as the importer needs it.

    Operands of the primitive, in order: dynamic grid sizes, the flattened views,
    then what the index maps and the body captured.
    """

    grid: tuple[int | None, ...]
    semantics: tuple[str, ...]
    bindings: tuple[plan.Binding, ...]
    views_tree: Any
    num_view_leaves: int
    body: Traced
    num_scratch: int
    explicit_indices: bool
    name: str

    def emit(self, im: Importer, eqn: Any) -> None:
        from pallasite.frontend.import_memory import view

        atoms = list(eqn.invars)
        sizes = [im.value(atoms.pop(0)) if g is None else g for g in self.grid]
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
            im.run(plan._without_consts(jaxpr), [*ids, *blocks, *scratch])

        plan.emit_pipeline_op(
            im,
            sizes,
            self.semantics,
            self.bindings,
            arrays,
            (),
            import_body,
            captures,
            what="pipeline's grid",
        )


def emit_pipeline(
    body: Callable[..., None],
    *,
    grid: Any,
    in_specs: Any = (),
    out_specs: Any = (),
    tiling: Any = None,
    core_axis: int | str | None = None,
    core_axis_name: str | None = None,
    dimension_semantics: Any = None,
    trace_scopes: bool = True,
    no_pipelining: bool = False,
    _explicit_indices: bool = False,
    **unknown: Any,
) -> Callable[..., None]:
    """Run `body` over blocks of refs in main memory, from inside a kernel.

    Args:
        body: a function of block refs, inputs then outputs (then scratch).
        grid: iteration space; sizes may be values of the kernel.
        in_specs, out_specs: one BlockSpec per ref.
        dimension_semantics: one per grid axis.
        tiling, core_axis, core_axis_name, trace_scopes, no_pipelining: accepted for
            compatibility; they never change results. A `core_axis` is not split over
            cores in this release.

    Returns:
        A function of refs: `pipeline(*in_refs, *out_refs, scratches=())`.

    Inside the body, `pl.program_id` counts this pipeline's steps.
    """
    del tiling, core_axis, core_axis_name, trace_scopes, no_pipelining
    if unknown:
        raise UnsupportedError(f"emit_pipeline does not take {', '.join(unknown)}")
    sizes = as_grid(grid)

    def run(*refs: Any, scratches: Sequence[Any] = (), **other: Any) -> None:
        if any(value is not None for value in other.values()):
            raise UnsupportedError(
                f"a pipeline does not take {', '.join(other)}", at=user_location()
            )
        _bind(body, sizes, in_specs, out_specs, refs, scratches, dimension_semantics,
              _explicit_indices)  # fmt: skip

    return run


def _bind(
    body: Callable[..., None],
    sizes: tuple[Any, ...],
    in_specs: Any,
    out_specs: Any,
    refs: Sequence[Any],
    scratches: Sequence[Any],
    dimension_semantics: Any,
    explicit_indices: bool,
) -> None:
    at = user_location()
    name = name_of(body)
    specs_in, specs_out = _spec_list(in_specs), _spec_list(out_specs)
    if len(refs) != len(specs_in) + len(specs_out):
        raise SpecError(
            f"the pipeline has {len(specs_in)} input and {len(specs_out)} output specs "
            f"for {len(refs)} refs",
            [("body", name)],
            at,
        )
    bindings = []
    for n, (ref, spec) in enumerate(zip(refs, (*specs_in, *specs_out), strict=True)):
        if not jaxcompat.is_ref(ref):
            raise KernelTypeError(
                f"operand {n} of the pipeline is not a ref", [("body", name)], at
            )
        is_input = n < len(specs_in)
        role = "in_specs" if is_input else "out_specs"
        path = f"[{n if is_input else n - len(specs_in)}]"
        _expect_rectangle(ref, n, name, at)
        shape, dtype = _view_type(ref)
        operand = Operand(role, path, shape, dtype)
        mode = "in" if is_input else "out"
        bindings.append(plan.bind(spec, operand, mode, len(sizes), (), at))
    traced = _trace_body(body, bindings, scratches, len(sizes), explicit_indices)
    semantics = plan.semantics_of(dimension_semantics, len(sizes), at)
    grid = tuple(g if isinstance(g, int) else None for g in sizes)
    flat, tree = flatten_views(*refs, *scratches)
    captured = [c for b in bindings if b.index_map for c in b.index_map.captured]
    dynamic = [jax.numpy.asarray(g, np.int32) for g in sizes if not isinstance(g, int)]
    pipeline = Plan(
        grid,
        semantics,
        tuple(bindings),
        tree,
        len(flat),
        traced,
        len(scratches),
        explicit_indices,
        name,
    )
    pipeline_p.bind(*dynamic, *flat, *captured, *traced.captured, plan=pipeline)


def _spec_list(specs: Any) -> list[BlockSpec]:
    is_spec = lambda s: isinstance(s, BlockSpec) or s is None
    return [s or BlockSpec() for s in jax.tree.leaves(specs, is_leaf=is_spec)]


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
    bindings: Sequence[plan.Binding],
    scratches: Sequence[Any],
    rank: int,
    explicit_indices: bool,
) -> Traced:
    avals: list[Any] = []
    if explicit_indices:
        avals += [jax.ShapeDtypeStruct((), np.int32)] * rank
    for b in bindings:
        space = MemorySpace.VMEM if b.space == "block" else MemorySpace(b.space)
        avals.append(jaxcompat.abstract_ref(b.ref_shape, b.operand.dtype, space))
    for scratch in scratches:
        shape, dtype = _view_type(scratch)
        avals.append(jaxcompat.abstract_ref(shape, dtype, MemorySpace.VMEM))

    refs = avals[rank:] if explicit_indices else avals
    given = [tuple(avals[:rank]), *refs] if explicit_indices else refs
    counts = [("refs", len(bindings)), ("scratches", len(scratches))]
    check_signature(body, given, {}, counts, user_location())

    def call(*args: Any) -> Any:
        if explicit_indices:
            return body(tuple(args[:rank]), *args[rank:])
        return body(*args)

    tree = jax.tree.structure((tuple(range(len(avals))), {}))
    checked = storing(call, name_of(body), location_of(body))
    return trace(checked, tree, avals, body)
