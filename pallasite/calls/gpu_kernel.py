"""`plgpu.kernel`: a kernel of blocks of warpgroups that the author schedules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallasite.calls.pallas_call import pallas_call
from pallasite.errors import SpecError, UnsupportedError
from pallasite.language.memory_spaces import MemorySpace
from pallasite.language.refs import run_scoped
from pallasite.language.spec_trees import is_shaped
from pallasite.language.specs import BlockSpec
from pallasite.language.trace import user_location
from pallasite.primitive import Checked


def kernel(
    body: Callable[..., None] | None = None,
    out_shape: Any = None,
    *,
    out_type: Any = None,
    scratch_shapes: Any = (),
    scratch_types: Any = None,
    compiler_params: Any = None,
    grid: Sequence[int] = (),
    grid_names: Sequence[str] = (),
    cluster: Sequence[int] = (),
    cluster_names: Sequence[str] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    interpret: Any = None,
    name: str | None = None,
    **mesh_options: Any,
) -> Callable[..., Any]:
    """Make a JAX function out of a kernel for blocks of warpgroups.

    The body sees whole arrays in main memory. No backend compiles such kernels yet:
    they run in checked mode, which finds missing waits and fences.

    Args:
        body: takes operand, result and scratch refs; left out as a decorator.
        out_shape: shape and dtype of the results (`out_type` is the newer spelling).
        scratch_shapes: memory that the warpgroups of a block share
            (`scratch_types` is the newer spelling).
        compiler_params: accepted; changes no result.
        grid, grid_names: blocks, and names for `lax.axis_index`.
        cluster, cluster_names: blocks of a cluster; each works for itself.
        num_threads, thread_name: warpgroups of a block.
        interpret: a `pl.Checked` that says what to look for; True is the emulation,
            for kernels of one warpgroup.
        name: of the kernel.
        mesh_options: none is available.

    Returns:
        A function from arrays to arrays.
    """
    at = user_location()
    if mesh_options:
        named = ", ".join(mesh_options)
        raise UnsupportedError(f"plgpu.kernel({named}=...) is not available", at=at)
    for sizes, names, what in (
        (grid, grid_names, "grid"),
        (cluster, cluster_names, "cluster"),
    ):
        if len(sizes) != len(names):
            raise SpecError(
                f"{what} and {what}_names do not have the same length",
                [(what, tuple(sizes)), (f"{what}_names", tuple(names))],
                at,
            )
    if (num_threads is None) != (thread_name is None):
        raise SpecError(
            "num_threads and thread_name go together",
            [("num_threads", num_threads), ("thread_name", thread_name)],
            at,
        )
    del compiler_params
    out = out_shape if out_type is None else out_type
    scratch = scratch_shapes if scratch_types is None else scratch_types

    def decorate(fn: Callable[..., None]) -> Callable[..., Any]:
        def with_scratch(*refs: Any) -> None:
            named = scratch if isinstance(scratch, Mapping) else {}
            memory = () if named else scratch
            run_scoped(lambda *m, **n: fn(*refs, *m, **n), *memory, **named)

        with_scratch.__name__ = name or getattr(fn, "__name__", "kernel")

        def call(*args: Any) -> Any:
            whole = BlockSpec(memory_space=MemorySpace.GMEM)
            axes = (*grid, *cluster)
            return pallas_call(
                with_scratch,
                out,
                grid=axes,
                in_specs=jax.tree.map(lambda _: whole, list(args)),
                out_specs=jax.tree.map(lambda _: whole, out, is_leaf=is_shaped),
                name=name or getattr(fn, "__name__", None),
                axis_names=(*grid_names, *cluster_names),
                compiler_params={"dimension_semantics": ("parallel",) * len(axes)},
                interpret=interpret or Checked(),
                _threads=(thread_name, num_threads or 1),
            )(*args)

        call.__name__ = getattr(fn, "__name__", "kernel")
        call.__wrapped__ = fn  # type: ignore[attr-defined]
        return call

    return decorate if body is None else decorate(body)
