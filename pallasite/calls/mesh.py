"""pl.kernel and pl.core_map: code over a mesh of cores, on arrays in main memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.calls import gpu_kernel
from pallasite.calls.pallas_call import pallas_call
from pallasite.errors import SpecError
from pallasite.language.gpu import WarpMesh, run_warps
from pallasite.language.memory_spaces import MemorySpace, warpgroup_axis
from pallasite.language.refs import run_scoped
from pallasite.language.spec_trees import is_shaped
from pallasite.language.specs import BlockSpec
from pallasite.language.tpu_info import get_sparse_core_info
from pallasite.language.trace import name_of, storing, trace, user_location


@dataclass(frozen=True)
class CoreMesh:
    """Cores that run one kernel together: axis names and sizes."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    kind: str = "tensorcore"

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.sizes, strict=True))

    @property
    def axis_name(self) -> str:
        return self.axis_names[0]

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_cores(self) -> int:
        return self.size


class TensorCoreMesh(CoreMesh):
    """The TensorCores of one chip: `TensorCoreMesh(axis_name="core", num_cores=2)`, or,
    as before JAX 0.11, `TensorCoreMesh(cores, axis_names)` with an array of cores."""

    def __init__(
        self,
        devices: Any = None,
        axis_names: Sequence[str] | None = None,
        *,
        axis_name: str | None = None,
        num_cores: int = 1,
    ):
        if axis_names is not None:
            super().__init__(tuple(axis_names), np.shape(devices))
        else:
            super().__init__((str(axis_name or devices),), (num_cores,))


class ScalarSubcoreMesh(CoreMesh):
    """The scalar subcores of SparseCores: one per core, for copies and control."""

    def __init__(self, *, axis_name: str, num_cores: int | None = None):
        cores = _sparse_cores(num_cores)
        super().__init__((axis_name,), (cores,), "sc_scalar_subcore")


class VectorSubcoreMesh(CoreMesh):
    """The vector subcores of SparseCores, which compute on short vectors."""

    def __init__(
        self,
        *,
        core_axis_name: str,
        subcore_axis_name: str,
        num_cores: int | None = None,
        num_subcores: int | None = None,
    ):
        most = get_sparse_core_info().num_subcores
        if num_subcores is not None and num_subcores > most:
            raise SpecError(
                f"a SparseCore has {most} vector subcores, not {num_subcores}",
                at=user_location(),
                fix="pass at most that many as num_subcores, or None for all of them",
            )
        sizes = _sparse_cores(num_cores), num_subcores or most
        names = core_axis_name, subcore_axis_name
        super().__init__(names, sizes, "sc_vector_subcore")

    @property
    def num_cores(self) -> int:
        return self.sizes[0]

    @property
    def num_subcores(self) -> int:
        return self.sizes[1]

    @property
    def core_axis_name(self) -> str:
        return self.axis_names[0]

    @property
    def subcore_axis_name(self) -> str:
        return self.axis_names[1]


def _sparse_cores(asked: int | None) -> int:
    most = get_sparse_core_info().num_cores
    if asked is not None and asked > most:
        raise SpecError(
            f"the chip has {most} SparseCores, not {asked}",
            at=user_location(),
            fix="pass at most that many as num_cores, or None for all of them",
        )
    return asked or most


def create_tensorcore_mesh(
    axis_name: str, devices: Sequence[Any] | None = None, num_cores: int | None = None
) -> CoreMesh:
    """A mesh of one chip's TensorCores; by default one core."""
    del devices
    if not isinstance(axis_name, str):
        raise SpecError(
            f"a mesh axis name must be a string, got {axis_name!r}",
            fix='axis_name="core"',
        )
    return TensorCoreMesh(axis_name=axis_name, num_cores=num_cores or 1)


def kernel(
    body: Callable[..., None] | None = None,
    out_shape: Any = None,
    *,
    mesh: Any = None,
    scratch_shapes: Any = (),
    out_type: Any = None,
    scratch_types: Any = None,
    compiler_params: Any = None,
    interpret: Any = False,
    cost_estimate: Any = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    backend: str | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Make a JAX function out of a kernel that runs once per core of a mesh.

    The body sees whole arrays in main memory; process them in blocks with
    `pltpu.emit_pipeline` or copy parts with `pltpu.sync_copy`. `lax.axis_index(name)`
    is the core's number. Refs (`jax.new_ref`) among the operands are read and written
    in place, and a kernel without results may close over them.

    Args:
        body: the kernel; omitted when used as a decorator.
        out_shape: shape and dtype of the results (`out_type` is the newer spelling).
        mesh: from `pltpu.create_tensorcore_mesh`, or a `plgpu.Mesh`.
        scratch_shapes: memory per core (`scratch_types` is the newer spelling).
        compiler_params, interpret, cost_estimate, debug, name, metadata, backend,
            input_output_aliases: as for `pallas_call`.

    Returns:
        A function from arrays to arrays.
    """
    at = user_location()
    shape = _axes(mesh, "kernel", at)
    out = out_shape if out_type is None else out_type
    scratch = scratch_shapes if scratch_types is None else scratch_types
    options = dict(
        compiler_params=compiler_params,
        interpret=interpret,
        cost_estimate=cost_estimate,
        debug=debug,
        metadata=metadata,
        backend=backend,
    )

    def decorate(fn: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            operands = jax.tree.leaves(args, is_leaf=jaxcompat.is_ref)
            if out is None or any(map(jaxcompat.is_ref, operands)):
                own = {**options, "name": name or name_of(fn)}
                return _on_refs(fn, args, out, mesh, scratch, own)
            if isinstance(mesh, gpu_kernel.Mesh):
                taken = ("compiler_params", "interpret", "cost_estimate", "debug")
                return gpu_kernel.kernel(
                    fn,
                    out,
                    scratch_shapes=scratch,
                    name=name,
                    input_output_aliases=input_output_aliases,
                    **mesh.options,
                    **{option: options[option] for option in taken},
                )(*args)
            whole = BlockSpec(memory_space=MemorySpace.ANY)
            # Cores of a mesh run concurrently: naming a mesh declares that.
            call_ = pallas_call(
                fn,
                out,
                grid=tuple(shape.values()),
                in_specs=[whole] * len(args),
                out_specs=_like(out, whole),
                scratch_shapes=scratch,
                name=name,
                axis_names=tuple(shape),
                input_output_aliases=input_output_aliases or {},
                **{
                    **options,
                    "compiler_params": _with_core_axes(compiler_params, mesh),
                },
            )
            return call_(*args)

        call.__name__ = getattr(fn, "__name__", "kernel")
        call.__wrapped__ = fn  # type: ignore[attr-defined]
        return call

    return decorate if body is None else decorate(body)


def _on_refs(
    fn: Callable[..., None], args: Any, out: Any, mesh: Any, scratch: Any, options: Any
) -> Any:
    """Call a kernel that has refs among its operands or closes over refs."""
    is_ref = jaxcompat.is_ref
    as_ref = lambda x: x if is_ref(x) else jax.new_ref(jnp.asarray(x))
    operands = jax.tree.map(as_ref, args, is_leaf=is_ref)
    results = jax.tree.map(
        lambda t: jax.new_ref(jnp.zeros(t.shape, t.dtype)), out, is_leaf=is_shaped
    )
    if isinstance(results, list):
        results = tuple(results)
    one = results is not None and not isinstance(results, tuple)
    outputs = (results,) if one else results or ()

    def body(*memory: Any, **named: Any) -> None:
        fn(*operands, *outputs, *memory, **named)

    core_map(mesh, scratch_shapes=scratch, **options)(body)
    return jax.tree.map(lambda ref: ref[...], results, is_leaf=is_ref)


def core_map(
    mesh: Any, *, scratch_shapes: Any = (), **call: Any
) -> Callable[[Callable[..., None]], None]:
    """Immediately run a function without arguments on every core of a mesh.

    It reads and writes the refs it closes over (`jax.new_ref`, or those of
    `pl.run_state`), whole in main memory. `pl.kernel` is the form with arguments.

    Args:
        mesh: from `pltpu.create_tensorcore_mesh`, or a `plgpu.Mesh`.
        scratch_shapes: memory per core, passed to the function as arguments.
        call: `compiler_params`, `interpret`, `cost_estimate`, `debug`, `name` and
            `metadata`, as for `pl.kernel`.
    """
    at = user_location()
    if isinstance(mesh, WarpMesh):
        return lambda fn: run_warps(mesh, fn)
    shape = _axes(mesh, "core_map", at)

    def run(fn: Callable[..., None]) -> None:
        named = scratch_shapes if isinstance(scratch_shapes, Mapping) else {}
        memory = () if named else scratch_shapes
        threads, together = getattr(mesh, "thread_name", None), None
        if threads is not None and shape[threads] > 1:
            together = threads  # what is allocated here, they share
        scoped = dict(named, collective_axes=together)
        body = storing(lambda: run_scoped(fn, *memory, **scoped), name_of(fn), at)
        axes, no_arguments = tuple(shape.items()), jax.tree.structure(((), {}))
        grid = tuple(n for name, n in axes if threads is None or name != threads)
        token = warpgroup_axis.set(together)
        try:
            traced = trace(body, no_arguments, (), fn, axes, grid)
        finally:
            warpgroup_axis.reset(token)
        refs = [c for c in traced.captured if jaxcompat.is_ref(c)]

        def with_own_refs(*mine: Any) -> None:
            """The function's code, with the call's refs replacing those closed over."""
            outputs = iter(mine[len(refs) :])
            consts = [
                next(outputs) if jaxcompat.is_ref(c) else c for c in traced.captured
            ]
            jax.core.eval_jaxpr(traced.jaxpr, consts)

        values = [ref[...] for ref in refs]
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        aliases = {n: n for n in range(len(refs))}
        results = kernel(
            with_own_refs,
            types,
            mesh=mesh,
            input_output_aliases=aliases,
            **{"name": name_of(fn), **call},
        )(*values)
        for ref, result in zip(refs, results, strict=True):
            ref[...] = result

    return run


def _axes(mesh: Any, name: str, at: Any) -> Mapping[str, int]:
    shape = mesh.shape if mesh is not None and hasattr(mesh, "shape") else None
    if not isinstance(shape, Mapping):
        raise SpecError(
            f"pl.{name} needs a mesh of cores",
            [("mesh", repr(mesh))],
            at,
            'mesh=pltpu.create_tensorcore_mesh("core")',
        )
    return shape


def _like(tree: Any, spec: BlockSpec) -> Any:
    return jax.tree.map(lambda _: spec, tree, is_leaf=is_shaped)


def _with_core_axes(params: Any, mesh: Any) -> dict[str, Any]:
    from pallasite.calls.pallas_call import params_of

    given = params_of(params, user_location())
    semantics = ("core_parallel",) * len(mesh.shape)
    kind = getattr(mesh, "kind", "tensorcore")
    if kind == "sc_vector_subcore":
        semantics = ("core_parallel", "subcore_parallel")
    if kind != "tensorcore":
        given["kernel_type"] = kind
    elif all(size == 1 for size in mesh.shape.values()):
        # One core runs an ordinary grid, of which a pipeline inside can be a part.
        semantics = ("parallel",) * len(mesh.shape)
    return {**given, "dimension_semantics": semantics}
