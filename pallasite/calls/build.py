"""Builds a call's Kernel IR: binds operands to specs, traces and imports the kernel.

`Request` is what `pallas_call` was given; `build` makes the kernel from it for operands
of given types.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.ir import types as T
from pallasite.ir.levels import level_of
from pallasite.ir.nodes import Kernel, Loc, Op, Value
from pallasite.ir.roles import Pipeline
from pallasite.language.memory_spaces import (
    MemoryRef,
    MemorySpace,
    as_memory_ref,
    warpgroup_axis,
)
from pallasite.language.spec_trees import describe, input_specs, output_specs
from pallasite.language.specs import CostEstimate, GridSpec, Operand
from pallasite.language.trace import (
    check_signature,
    is_of_library,
    keep_jaxpr,
    location_of,
    parameter_names,
    storing,
    trace,
)
from pallasite.primitive import Call, Checked
from pallasite.sharding import rule

if TYPE_CHECKING:
    from pallasite.importer.importer import Importer
    from pallasite.importer.pipeline_op import Binding

OTHER_DTYPE = "use a real dtype: real and imaginary parts as two arrays"

# Warpgroups (`plgpu.kernel`): the name of their axis, their number, the names of their
# scratch, and the names of the cluster axes.
Threads = tuple[Hashable, int, tuple[str, ...], tuple[Hashable, ...]]


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything `pallas_call` was given; one per wrapper."""

    kernel: Callable[..., Any]
    grid_spec: GridSpec
    out_shapes: tuple[Any, ...]
    out_tree: Any
    aliases: tuple[tuple[int, int], ...]
    name: str
    at: Loc | None
    interpret: Any
    backend: str | None
    compiler_params: Mapping[str, Any]
    cost_estimate: CostEstimate | None
    debug: bool
    metadata: Mapping[str, str] | None
    axis_names: tuple[Hashable, ...] = ()
    partition: Any = None
    threads: Threads | None = None


@dataclasses.dataclass(frozen=True)
class Bound:
    """The operands and results of one call, bound to their specs."""

    prefetch: tuple[Operand, ...]
    inputs: "tuple[Binding, ...]"
    outputs: "tuple[Binding, ...]"
    scratch: tuple[MemoryRef, ...]
    scratch_tree: Any
    semantics: tuple[str, ...]


def build(request: Request, flat: Sequence[Any], tree: Any) -> tuple[Call, Any, bool]:
    """Kernel IR for operands of these types, captured values, and cacheability."""
    # The importer and its dependencies load with the first kernel, not the package.
    from pallasite.calls import checkify
    from pallasite.importer.importer import Captures, Importer
    from pallasite.importer.rules import RULES
    from pallasite.passes.analysis.mistakes import warn_of_mistakes

    checkify.register()
    bound = _bind(request, flat, tree)
    traced = _trace_kernel(request, bound, tree)
    captures = Captures()
    im = Importer(request.name, captures, RULES)
    im.builder.loc = request.at
    kernel = _import(request, bound, traced, im)
    keep_jaxpr(kernel, traced)
    call = Call(
        kernel,
        request.interpret,
        request.backend,
        _freeze(request.compiler_params),
        request.cost_estimate,
        request.debug,
        _freeze(request.metadata or {}),
        rule.check(
            request.partition,
            kernel,
            len(dynamic_sizes(request)),
            len(flat),
            request.at,
        ),
        own=is_of_library(request.kernel),
    )
    if request.debug:
        print(kernel.text)
    if not isinstance(request.interpret, Checked):  # which reports with more detail
        warn_of_mistakes(kernel, im.hidden.values())
    cacheable = not captures.values and all(
        isinstance(g, int) for g in request.grid_spec.grid
    )
    return call, tuple(captures.values), cacheable


def _freeze(mapping: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    def hashable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _freeze(value)
        if isinstance(value, (list, tuple, set)):
            return tuple(hashable(v) for v in value)
        return value

    return tuple(sorted((k, hashable(v)) for k, v in mapping.items()))


def _bind(request: Request, flat: Sequence[Any], tree: Any) -> Bound:
    from pallasite.importer import pipeline_op

    spec, at = request.grid_spec, request.at
    num_prefetch = _num_prefetch_leaves(spec, flat, tree, request)
    names = parameter_names(request.kernel, len(flat) + len(request.out_shapes))
    in_specs = input_specs(spec.in_specs, "in_specs", flat, tree, spec, request)
    prefetch = tuple(
        Operand("operand ", str(n), x.shape, x.dtype, names[n])
        for n, x in enumerate(flat[:num_prefetch])
    )
    prefetch_args = jax.tree.unflatten(tree, flat)[: spec.num_scalar_prefetch]
    inputs = []
    for k, (path, s) in enumerate(in_specs):
        x, n = flat[num_prefetch + k], num_prefetch + k
        operand = Operand("in_specs", path, tuple(x.shape), x.dtype, names[n])
        inputs.append(pipeline_op.bind(s, operand, "in", spec.grid, prefetch_args, at))
    outputs = []
    out_specs = output_specs(spec.out_specs, request)
    for k, (shape, (path, s)) in enumerate(
        zip(request.out_shapes, out_specs, strict=True)
    ):
        if T.dtype_of(shape.dtype) is None:
            raise UnsupportedError(
                f"result {k} has dtype {shape.dtype}, which kernels do not support",
                at=at,
                fix=OTHER_DTYPE,
            )
        if jax.dtypes.canonicalize_dtype(shape.dtype) != shape.dtype:
            raise KernelTypeError(
                f"result {k} has dtype {shape.dtype}, but jax_enable_x64 is off",
                at=at,
                fix="jax.config.update('jax_enable_x64', True), or a 32-bit dtype",
            )
        name = names[len(flat) + k]
        operand = Operand("out_specs", path, tuple(shape.shape), shape.dtype, name)
        if isinstance(shape, MemoryRef) and s.memory_space is None:
            s = s.replace(memory_space=shape.memory_space)
        outputs.append(
            pipeline_op.bind(s, operand, "out", spec.grid, prefetch_args, at)
        )
    _check_aliases(request, flat)
    scratch, scratch_tree = _scratch(spec, request)
    given = request.compiler_params.get("dimension_semantics")
    semantics = pipeline_op.semantics_of(given, len(spec.grid), at)
    if request.threads and request.threads[3]:  # the axes of a cluster are the last
        clusters = len(request.threads[3])
        semantics = (*semantics[:-clusters], *("cluster",) * clusters)
    return Bound(
        prefetch, tuple(inputs), tuple(outputs), scratch, scratch_tree, semantics
    )


def _num_prefetch_leaves(spec: GridSpec, flat: Any, tree: Any, request: Request) -> int:
    count = spec.num_scalar_prefetch
    arguments = jax.tree.unflatten(tree, flat)
    if count > len(arguments):
        raise SpecError(
            f"the call has {len(arguments)} operands, fewer than "
            f"num_scalar_prefetch={count}",
            [("kernel", request.name)],
            request.at,
            fix="pass the scalar-prefetch operands first: index maps read them",
        )
    return len(jax.tree.leaves(arguments[:count]))


def _scratch(spec: GridSpec, request: Request) -> tuple[tuple[MemoryRef, ...], Any]:
    is_leaf = lambda s: as_memory_ref(s) is not None
    shapes = spec.scratch_shapes
    if shapes is None:
        shapes = ()
    if is_leaf(shapes):
        shapes = (shapes,)
    if not isinstance(shapes, Iterable):
        raise SpecError(
            "scratch_shapes must be a list",
            [("kernel", request.name), ("got", repr(shapes))],
            request.at,
            "scratch_shapes=[pltpu.VMEM((128, 128), jnp.float32)]",
        )
    if not isinstance(shapes, Mapping):
        shapes = tuple(shapes)
    # A shape alone is one entry that is wrong, not as many as it has sizes.
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda s: is_leaf(s) or _sizes(s))
    memory = []
    for n, leaf in enumerate(leaves):
        ref = as_memory_ref(leaf)
        if (
            ref is None
            or T.dtype_of(ref.dtype) is None
            or any(n < 0 for n in ref.shape)
        ):
            raise SpecError(
                f"scratch_shapes[{n}] is not a memory shape and dtype",
                [("got", repr(leaf)), ("scratch_shapes", repr(spec.scratch_shapes))],
                request.at,
                f"pltpu.VMEM({leaf if _sizes(leaf) else (128, 128)}, jnp.float32)",
            )
        memory.append(ref)
    return tuple(memory), tree


def _sizes(x: Any) -> bool:
    return isinstance(x, tuple) and bool(x) and all(isinstance(n, int) for n in x)


def _check_aliases(request: Request, flat: Sequence[Any]) -> None:
    seen: set[int] = set()
    for source, target in request.aliases:
        facts = [
            ("kernel", request.name),
            ("input_output_aliases", dict(request.aliases)),
        ]
        if not 0 <= source < len(flat) or not 0 <= target < len(request.out_shapes):
            raise SpecError(
                f"alias {source}: {target} is out of range",
                [
                    *facts,
                    ("operands", len(flat)),
                    ("results", len(request.out_shapes)),
                ],
                request.at,
                "operands and results are numbered from 0: {operand: result}",
            )
        x, y = flat[source], request.out_shapes[target]
        if (tuple(x.shape), x.dtype) != (tuple(y.shape), y.dtype):
            raise SpecError(
                "an aliased operand and result must have the same shape and dtype",
                [*facts, ("operand", describe(x)), ("result", describe(y))],
                request.at,
                "give out_shape the operand's shape and dtype, or do not alias them",
            )
        if target in seen:
            raise SpecError(
                f"result {target} is aliased twice",
                facts,
                request.at,
                "name one operand for each result",
            )
        seen.add(target)


def _trace_kernel(request: Request, bound: Bound, tree: Any):
    """Trace the kernel over refs: prefetch, inputs, outputs, scratch."""
    ref = jaxcompat.abstract_ref
    first = [ref(o.shape, o.dtype, MemorySpace.SMEM) for o in bound.prefetch]
    first += [
        ref(b.ref_shape, b.operand.dtype, MemorySpace(b.space)) for b in bound.inputs
    ]
    results = [
        ref(b.ref_shape, b.operand.dtype, MemorySpace(b.space)) for b in bound.outputs
    ]
    scratch = [m.get_ref_aval() for m in bound.scratch]
    in_args = jax.tree.unflatten(tree, first)
    out_args = jax.tree.unflatten(request.out_tree, results)
    out_args = tuple(out_args) if isinstance(out_args, (tuple, list)) else (out_args,)
    extra = jax.tree.unflatten(bound.scratch_tree, scratch)
    kwargs = extra if isinstance(extra, Mapping) else {}
    args = (*in_args, *out_args, *(() if kwargs else extra))
    packed = len(results) - 1 if len(out_args) == 1 else 0
    facts = [
        ("operands", len(first)),
        (
            "results",
            f"{len(results)}, in one parameter" if packed > 0 else len(results),
        ),
        ("scratch", len(scratch)),
    ]
    check_signature(request.kernel, args, kwargs, facts, request.at)
    avals, full_tree = jax.tree.flatten((args, dict(kwargs)))
    at = location_of(request.kernel) or request.at
    body = storing(request.kernel, request.name, at)
    grid = request.grid_spec.grid
    named = zip(request.axis_names, grid, strict=False)
    axes = tuple(
        (name, n) for name, n in named if name is not None and isinstance(n, int)
    )
    thread_axis, count, *_ = request.threads or (None, 1)
    if thread_axis is not None:
        axes = (*axes, (thread_axis, count))
    uncut = [b for b in (*bound.inputs, *bound.outputs) if b.spec.block_shape is None]
    whole = [b.operand for b in uncut] if grid else []
    axis = warpgroup_axis.set(thread_axis if count > 1 else None)
    try:
        return trace(body, full_tree, avals, request.kernel, axes, grid, whole)
    finally:
        warpgroup_axis.reset(axis)


def _import(request: Request, bound: Bound, traced: Any, im: "Importer") -> Kernel:
    """The kernel's IR: scratch allocations and one pipeline."""
    from pallasite.importer import gpu, matrix_units, pipeline_op
    from pallasite.passes.analysis.unstarted_waits import refuse_endless_waits
    from pallasite.passes.lower.promote import promote_accumulators

    grid = request.grid_spec.grid
    size_refs = [
        Value(T.RefType((), T.I32, "smem"), f"size{n}")
        for n, g in enumerate(grid)
        if not isinstance(g, int)
    ]
    prefetch = [_param(o, "smem") for o in bound.prefetch]
    inputs = [_param(b.operand, _array_space(b)) for b in bound.inputs]
    outputs = [_param(b.operand, _array_space(b)) for b in bound.outputs]
    pending = iter(size_refs)
    sizes = [g if isinstance(g, int) else im.builder.load(next(pending)) for g in grid]
    first = len(prefetch) + len(inputs) + len(outputs)
    names = parameter_names(request.kernel, first + len(bound.scratch))[first:]
    scratch = [
        im.builder.emit("alloc", names=[name], type=_scratch_type(m))[0]
        for m, name in zip(bound.scratch, names, strict=True)
    ]

    im.has_subcores = "subcore_parallel" in bound.semantics

    def import_body(refs: list[Value]) -> None:
        captured = [im.captured(c) for c in traced.captured]
        for var, value in zip(traced.jaxpr.constvars, captured, strict=True):
            im.env[var] = value
        args = [*prefetch, *refs, *scratch]
        run = lambda: im.run(pipeline_op.WithoutConsts(traced.jaxpr), args)
        if request.threads is None:
            run()
        else:
            gpu.import_threads(im, *request.threads, run)
        matrix_units.finish(im, bound.semantics)

    bindings = [*bound.inputs, *bound.outputs]
    pipeline_op.emit_pipeline_op(
        im,
        sizes,
        bound.semantics,
        bindings,
        [*inputs, *outputs],
        prefetch,
        import_body,
        [None] * len(bindings),
        request.axis_names,
    )
    captured = _captured_params(im)
    for ref in im.hidden.values():
        im.builder.ops.insert(0, Op("alloc", (), (ref,), {"type": ref.ref}))
    params = (*size_refs, *prefetch, *inputs, *captured, *outputs)
    shift = len(size_refs)
    aliases = tuple((i + shift, o) for i, o in request.aliases)
    body = im.builder.block()
    kernel = Kernel(
        request.name,
        params,
        body,
        len(outputs),
        aliases,
        level_of(body),
        request.at,
    )
    refuse_endless_waits(kernel)
    return kernel if request.threads is None else promote_accumulators(kernel)


def _captured_params(im: "Importer") -> list[Value]:
    """Kernel parameters of captured values: scalars directly, arrays via windows."""
    shown = Pipeline.of(im.builder.ops[-1]).arrays
    arrays = [r for r in im.captures.refs if r.ref.space == "block"]
    windowed = shown[len(shown) - len(arrays) :]
    assert len(windowed) == len(arrays)
    pending = iter(windowed)
    return [r if r.ref.space == "smem" else next(pending) for r in im.captures.refs]


def _param(operand: Operand, space: str) -> Value:
    shape = (*operand.shape, *operand.words)
    return Value(T.RefType(shape, operand.stored, space), operand.name)


def _array_space(binding: "Binding") -> str:
    return binding.space if binding.window is None else "any"


def _scratch_type(memory: MemoryRef) -> T.RefType:
    dtype = T.dtype_of(memory.dtype)
    assert dtype is not None
    return T.RefType(memory.shape, dtype, memory.memory_space.value)


def dynamic_sizes(request: Request) -> list[Any]:
    """The grid sizes that are known only at run time."""
    return [
        jnp.asarray(g, jnp.int32)
        for g in request.grid_spec.grid
        if not isinstance(g, int)
    ]
