"""pl.kernel: a kernel over a mesh of cores, its operands whole in main memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pallasite.errors import SpecError
from pallasite.frontend.call import pallas_call
from pallasite.frontend.spaces import MemorySpace
from pallasite.frontend.spec import BlockSpec
from pallasite.frontend.trace import user_location


@dataclass(frozen=True)
class CoreMesh:
    """Cores that run one kernel together: axis names and sizes."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    kind: str = "tensorcore"

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.sizes, strict=True))


def create_tensorcore_mesh(
    axis_name: str, devices: Sequence[Any] | None = None, num_cores: int | None = None
) -> CoreMesh:
    """A mesh of the TensorCores of one chip; one core unless `num_cores` says more."""
    del devices
    if not isinstance(axis_name, str):
        raise SpecError(f"a mesh axis name is a string, got {axis_name!r}")
    return CoreMesh((axis_name,), (num_cores or 1,))


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
) -> Callable[..., Any]:
    """Make a JAX function out of a kernel that runs once per core of a mesh.

    The body sees whole arrays in main memory; cut them with `pltpu.emit_pipeline` or
    copy parts with `pltpu.sync_copy`. `lax.axis_index(name)` is the core's number.

    Args:
        body: the kernel; left out when used as a decorator.
        out_shape: shape and dtype of the results (`out_type` is the newer spelling).
        mesh: from `pltpu.create_tensorcore_mesh`.
        scratch_shapes: memory per core (`scratch_types` is the newer spelling).
        compiler_params, interpret, cost_estimate, debug, name, metadata, backend: as
            for `pallas_call`.

    Returns:
        A function from arrays to arrays.
    """
    at = user_location()
    shape = mesh.shape if mesh is not None and hasattr(mesh, "shape") else None
    if not isinstance(shape, Mapping):
        raise SpecError(
            "pl.kernel needs a mesh of cores",
            [("mesh", repr(mesh))],
            at,
            'mesh=pltpu.create_tensorcore_mesh("core")',
        )

    def decorate(fn: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            whole = BlockSpec(memory_space=MemorySpace.ANY)
            # Cores of a mesh run at once: the author says so by naming a mesh.
            call_ = pallas_call(
                fn,
                out_shape,
                out_type=out_type,
                grid=tuple(shape.values()),
                in_specs=[whole] * len(args),
                out_specs=_like(out_shape if out_type is None else out_type, whole),
                scratch_shapes=scratch_shapes,
                scratch_types=scratch_types,
                compiler_params=_with_core_axes(compiler_params, len(shape)),
                interpret=interpret,
                cost_estimate=cost_estimate,
                debug=debug,
                name=name,
                metadata=metadata,
                backend=backend,
                axis_names=tuple(shape),
            )
            return call_(*args)

        call.__name__ = getattr(fn, "__name__", "kernel")
        call.__wrapped__ = fn  # type: ignore[attr-defined]
        return call

    return decorate if body is None else decorate(body)


def _like(tree: Any, spec: BlockSpec) -> Any:
    import jax

    is_shape = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
    return jax.tree.map(lambda _: spec, tree, is_leaf=is_shape)


def _with_core_axes(params: Any, rank: int) -> dict[str, Any]:
    from pallasite.frontend.call import params_of

    given = params_of(params, user_location())
    return {**given, "dimension_semantics": ("core_parallel",) * rank}
