"""`plgpu.kernel`: thread blocks of warpgroups, scheduled by the author."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallasite import config
from pallasite.calls.pallas_call import pallas_call
from pallasite.errors import SpecError, UnsupportedError
from pallasite.language.memory_spaces import MemorySpace, as_memory_ref
from pallasite.language.refs import run_scoped
from pallasite.language.spec_trees import is_shaped
from pallasite.language.specs import BlockSpec
from pallasite.language.trace import (
    check_signature,
    name_of,
    parameter_names,
    user_location,
)
from pallasite.placement import own_platform
from pallasite.primitive import CheckedElsewhere

MOST_WARPGROUPS = 8  # 1024 threads, the limit of a thread block


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The thread blocks of a kernel and their warpgroups, for `pl.kernel(mesh=...)` and
    `pl.core_map`; the fields are arguments of `plgpu.kernel`."""

    grid: Sequence[int] = ()
    grid_names: Sequence[Hashable] = ()
    cluster: Sequence[int] = ()
    cluster_names: Sequence[Hashable] = ()
    num_threads: int | None = None
    thread_name: Hashable = None
    kernel_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("grid", "grid_names", "cluster", "cluster_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_axes(self, user_location())

    @property
    def blocks(self) -> dict[Hashable, int]:
        """The axes along which there are several thread blocks."""
        names = (*self.grid_names, *self.cluster_names)
        return dict(zip(names, (*self.grid, *self.cluster), strict=True))

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of `kernel`."""
        return dict(
            grid=self.grid,
            grid_names=self.grid_names,
            cluster=self.cluster,
            cluster_names=self.cluster_names,
            num_threads=self.num_threads,
            thread_name=self.thread_name,
            kernel_name=self.kernel_name,
        )

    @property
    def shape(self) -> dict[Hashable, int]:
        if self.num_threads is None:
            return self.blocks
        return {**self.blocks, self.thread_name: self.num_threads}


def _check_axes(mesh: Mesh, at: Any) -> None:
    """Reject axes without names, names without axes, and too many warpgroups."""
    grid, grid_names = mesh.grid, mesh.grid_names
    cluster, cluster_names = mesh.cluster, mesh.cluster_names
    num_threads, thread_name = mesh.num_threads, mesh.thread_name
    for sizes, names, what in (
        (grid, grid_names, "grid"),
        (cluster, cluster_names, "cluster"),
    ):
        if len(sizes) != len(names):
            raise SpecError(
                f"{what} and {what}_names do not have the same length",
                [(what, tuple(sizes)), (f"{what}_names", tuple(names))],
                at,
                fix="one name per axis",
            )
    axis_names = [*grid_names, *cluster_names]
    axis_names += [] if thread_name is None else [thread_name]
    repeated = [name for name in axis_names if axis_names.count(name) > 1]
    if repeated:
        raise SpecError(
            f"two axes of a kernel have the name {repeated[0]!r}",
            [
                ("grid_names", tuple(grid_names)),
                ("cluster_names", tuple(cluster_names)),
                ("thread_name", thread_name),
            ],
            at,
            fix="give each axis a different name",
        )
    if num_threads is not None and not 1 <= num_threads <= MOST_WARPGROUPS:
        raise SpecError(
            f"a block has 1 to {MOST_WARPGROUPS} warpgroups, got {num_threads}",
            [("num_threads", f"{num_threads}, of 128 threads each")],
            at,
            fix="num_threads counts warpgroups; for more parallelism, use more blocks "
            "(grid)",
        )
    if (num_threads is None) != (thread_name is None):
        raise SpecError(
            "num_threads and thread_name must be given together",
            [("num_threads", num_threads), ("thread_name", thread_name)],
            at,
            fix="pass both, or neither",
        )


def kernel(
    body: Callable[..., None] | None = None,
    out_shape: Any = None,
    *,
    out_type: Any = None,
    scratch_shapes: Any = (),
    scratch_types: Any = None,
    compiler_params: Any = None,
    grid: Sequence[int] = (),
    grid_names: Sequence[Hashable] = (),
    cluster: Sequence[int] = (),
    cluster_names: Sequence[Hashable] = (),
    num_threads: int | None = None,
    thread_name: Hashable = None,
    interpret: Any = None,
    name: str | None = None,
    kernel_name: str | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    cost_estimate: Any = None,
    debug: bool = False,
    **mesh_options: Any,
) -> Callable[..., Any]:
    """Make a JAX function out of a kernel for thread blocks of warpgroups.

    The body sees whole arrays in main memory. On a GPU the backend `cuda` compiles it;
    elsewhere it runs in checked mode, which finds missing waits and fences.

    Args:
        body: takes operand, output and scratch refs; omitted when used as a decorator.
        out_shape: shape and dtype of the results (`out_type` is the newer spelling).
        scratch_shapes: memory shared by the warpgroups of a thread block
            (`scratch_types` is the newer spelling).
        compiler_params: only `approx_math` is used, which allows inexact division.
        grid, grid_names: the thread blocks, and axis names for `lax.axis_index`; any
            hashable is a name, here and below.
        cluster, cluster_names: thread blocks that run concurrently and share copies
            and barriers.
        num_threads, thread_name: the warpgroups of a thread block.
        interpret: a `pl.Checked` with the checks to make; True runs the emulation, for
            kernels of one warpgroup.
        name: the kernel's name (`kernel_name` is the spelling of `Mesh`).
        input_output_aliases, cost_estimate, debug: as for `pallas_call`.
        mesh_options: none is supported.

    Returns:
        A function from arrays to arrays.
    """
    at = user_location()
    if mesh_options:
        named = ", ".join(mesh_options)
        raise UnsupportedError(
            f"plgpu.kernel({named}=...) is not supported",
            at=at,
            fix="remove it",
        )
    Mesh(
        grid=grid,
        grid_names=grid_names,
        cluster=cluster,
        cluster_names=cluster_names,
        num_threads=num_threads,
        thread_name=thread_name,
    )
    out = out_shape if out_type is None else out_type
    scratch = scratch_shapes if scratch_types is None else scratch_types

    def decorate(fn: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            whole = BlockSpec(memory_space=MemorySpace.GMEM)
            axes = (*grid, *cluster)
            results = len(out) if isinstance(out, (tuple, list)) else 1
            body, names = _with_scratch(
                fn, len(args), results, scratch, thread_name, at
            )
            return pallas_call(
                body,
                out,
                grid=axes,
                in_specs=jax.tree.map(lambda _: whole, list(args)),
                out_specs=jax.tree.map(lambda _: whole, out, is_leaf=is_shaped),
                name=name or kernel_name or name_of(fn),
                input_output_aliases=input_output_aliases or {},
                cost_estimate=cost_estimate,
                debug=debug,
                axis_names=(*grid_names, *cluster_names),
                compiler_params={
                    "dimension_semantics": ("parallel",) * len(axes),
                    "approx_math": bool(getattr(compiler_params, "approx_math", False)),
                },
                interpret=_mode(interpret),
                _threads=(thread_name, num_threads or 1, names, tuple(cluster_names)),
            )(*args)

        call.__name__ = getattr(fn, "__name__", "kernel")
        call.__wrapped__ = fn  # type: ignore[attr-defined]
        return call

    return decorate if body is None else decorate(body)


def _mode(interpret: Any) -> Any:
    """The mode to run in: native on NVIDIA GPUs, checked mode elsewhere."""
    if interpret or own_platform() == "cuda":
        return interpret
    if not isinstance(config.get("interpret"), str | None):
        return None  # what `force_gpu_interpret_mode` asks for
    return CheckedElsewhere()


def _with_scratch(
    fn: Callable[..., None],
    operands: int,
    results: int,
    scratch: Any,
    thread_name: Hashable,
    at: Any,
) -> tuple[Callable[..., None], tuple[str, ...]]:
    """The body with its scratch allocated inside, per thread block; and its names.

    Barriers must start afresh in each thread block; a call's scratch would not.
    """
    named = dict(scratch) if isinstance(scratch, Mapping) else {}
    memory = () if named else tuple(scratch)
    refs = operands + results
    facts = [
        ("operands", operands),
        ("results", results),
        ("scratch", len(memory) + len(named)),
    ]
    check_signature(fn, (None,) * (refs + len(memory)), named, facts, at)

    def body(*given: Any) -> None:
        run = lambda *m, **n: fn(*given, *m, **n)
        run_scoped(run, *memory, collective_axes=thread_name, **named)

    known = parameter_names(fn, refs + len(memory))
    each = [*zip(known[refs:], memory, strict=True), *sorted(named.items())]
    leaves = [
        name
        for name, types in each
        for _ in jax.tree.leaves(types, is_leaf=lambda x: as_memory_ref(x) is not None)
    ]
    body.__wrapped__ = fn  # type: ignore[attr-defined]
    body.__name__ = name_of(fn)  # the kernel's name in errors
    positional = [
        inspect.Parameter(name or f"ref{n}", inspect.Parameter.POSITIONAL_ONLY)
        for n, name in enumerate(known[:refs])
    ]
    if len({p.name for p in positional}) == refs:
        body.__signature__ = inspect.Signature(positional)  # type: ignore[attr-defined]
    return body, tuple(leaves)
