"""pallas_call: checks its arguments, builds the kernel, binds the primitive.

The reading order of the package starts here. `build.py` makes the kernel:
`language/specs.py` and `importer/pipeline_op.py` check and describe the windows,
`language/trace.py` makes jaxprs, `importer/importer.py` makes IR. The primitive and
all its rules are in `primitive.py`.
"""

import dataclasses
import difflib
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.autodiff import first_derivative
from pallasite.calls.build import OTHER_DTYPE, Request, Threads, build, dynamic_sizes
from pallasite.errors import KernelTypeError, SpecError, UnsupportedError
from pallasite.ir import types as T
from pallasite.language import ref_transforms, upstream
from pallasite.language.memory_spaces import MemoryRef, SemaphoreType, as_memory_ref
from pallasite.language.spec_trees import describe, is_shaped
from pallasite.language.specs import (
    CostEstimate,
    GridSpec,
    no_block_spec,
    refuse_traced,
)
from pallasite.language.trace import add_notes, name_of, user_location
from pallasite.language.tracebacks import folds
from pallasite.primitive import Call, bind_call, interpret_mode
from pallasite.sharding import rule

if TYPE_CHECKING:
    pass

ref_transforms.register()
first_derivative.register()


_NOT_GIVEN: Any = object()  # None is a valid pytree, without results


def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any = _NOT_GIVEN,
    *,
    grid_spec: GridSpec | None = None,
    grid: Any = (),
    in_specs: Any = no_block_spec,
    out_specs: Any = no_block_spec,
    scratch_shapes: Any = (),
    input_output_aliases: Mapping[int, int] | None = None,
    debug: bool = False,
    interpret: Any = False,
    name: str | None = None,
    compiler_params: Any = None,
    cost_estimate: CostEstimate | None = None,
    backend: str | None = None,
    metadata: Mapping[str, str] | None = None,
    out_type: Any = _NOT_GIVEN,
    scratch_types: Any = None,
    axis_names: tuple[Hashable, ...] = (),
    partition: bool | str | rule.Partition | None = None,
    _threads: Threads | None = None,
) -> Callable[..., Any]:
    """Make a JAX function out of a kernel.

    Args:
        kernel: a function of refs: scalar-prefetch operands, inputs, outputs, scratch.
            It returns nothing; results are what it stores into the output refs.
        out_shape: shape and dtype of the result, or a pytree of them (`out_type` is
            the newer spelling). Like any pytree it may be empty, for a kernel that
            prints or checks: with None the kernel gets None in place of an output ref.
        grid_spec: grid and specs in one object, instead of the next four arguments.
        grid: the iteration space; one program runs per index, as if one after another
            with the last axis fastest.
        in_specs, out_specs: one BlockSpec per operand (pytrees that match them).
        scratch_shapes: additional memory for the kernel, such as `pltpu.VMEM((8, 128),
            jnp.float32)`; it keeps its contents from program to program
            (`scratch_types` is the newer spelling).
        input_output_aliases: from operand numbers to the results sharing their memory.
        debug: print the kernel's IR when it is traced.
        interpret: True runs the emulation on any platform; `pl.Checked()` runs checked
            mode; False uses the platform's native backend.
        name: shown in errors, dumps and profiles.
        compiler_params: `pltpu.CompilerParams(...)`, or a dict.
        cost_estimate: for XLA's scheduler.
        backend: the name of a backend to use instead of the platform's default.
        metadata: strings attached to the call.
        axis_names: names of the grid axes, for `lax.axis_index` and `lax.axis_size` in
            the kernel; `grid=(("i", 4), ("j", 2))` also sets them.
        partition: how devices may share the call under sharded `jit`. By default as
            grid and specs allow; False keeps it whole; a `pl.Partition`, or its rule
            alone (`"m k, k n -> m n"`), states it explicitly.

    Returns:
        A function from arrays to arrays, usable under jit, vmap and shard_map.

    Raises:
        SpecError, KernelTypeError: when called with operands that do not fit.

    Example:
        >>> import jax, jax.numpy as jnp, pallasite as pl
        >>> def double(x_ref, o_ref):
        ...     o_ref[...] = 2 * x_ref[...]
        >>> x = jnp.arange(4.0)
        >>> shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        >>> print(pl.pallas_call(double, out_shape=shape, interpret=True)(x))
        [0. 2. 4. 6.]
    """
    at = user_location()
    if not callable(kernel):
        what = f"the kernel must be a function, got {type(kernel).__name__}"
        raise KernelTypeError(what, at=at, fix="pass a function of refs")
    out_shape = _one_of(out_shape, out_type, "out_shape", "out_type", at)
    if scratch_types is not None:
        scratch_shapes = scratch_types
    if grid_spec is not None and not isinstance(grid_spec, GridSpec):
        fix = "pl.GridSpec(grid=..., in_specs=..., out_specs=...)"
        raise SpecError(
            "grid_spec must be a pl.GridSpec",
            [("got", repr(grid_spec))],
            at,
            upstream.FIX if upstream.is_upstreams(grid_spec) else fix,
        )
    if grid_spec is None:
        grid_spec = GridSpec(grid, in_specs, out_specs, scratch_shapes)
    elif (
        grid not in ((), None)
        or in_specs is not no_block_spec
        or out_specs is not no_block_spec
        or scratch_shapes
    ):
        raise SpecError(
            "grid_spec cannot be combined with grid, in_specs, out_specs or "
            "scratch_shapes",
            at=at,
            fix="put them into the grid_spec",
        )
    if isinstance(out_shape, list):  # several results are returned as a tuple
        out_shape = tuple(out_shape)
    out_leaves, out_tree = jax.tree.flatten(out_shape, is_leaf=is_shaped)
    request = Request(
        kernel,
        grid_spec,
        tuple(_shape_of(leaf, n, out_shape, at) for n, leaf in enumerate(out_leaves)),
        out_tree,
        _aliases(input_output_aliases, at),
        str(name or name_of(kernel)),
        at,
        interpret_mode(interpret, at),
        backend,
        params_of(compiler_params, at),
        _cost(cost_estimate, at),
        debug,
        params_of(metadata, at, "metadata"),
        axis_names or grid_spec.axis_names,
        partition,
        _threads,
    )
    cache: dict[Any, Call] = {}

    def call(*args: Any, **by_name: Any) -> Any:
        if by_name:
            raise _operands_by_name(by_name, request)
        flat, tree = jax.tree.flatten(args)
        flat = [_as_array(x, n, request) for n, x in enumerate(flat)]
        types = tuple((x.shape, x.dtype) for x in flat)
        key = (tree, types, jaxcompat.trace_context())
        built = cache.get(key)
        extra: tuple[Any, ...] = ()
        if built is None:
            with jaxcompat.open_sizes([("kernel", request.name)], request.at):
                built, extra, cacheable = build(request, flat, tree)
            if cacheable and not built.kernel.symbols:
                cache[key] = built
        arrays = [_stored(x) for x in flat]
        try:
            results = bind_call(built, (*dynamic_sizes(request), *arrays, *extra))
        except jax.errors.UnexpectedTracerError as error:
            add_notes(
                error, f"in a call of the kernel {request.name}, at {user_location()}"
            )
            raise
        return jax.tree.unflatten(request.out_tree, results)

    call = folds(call)
    call.__name__ = request.name
    call.__wrapped__ = kernel  # type: ignore[attr-defined]
    return call


def _operands_by_name(by_name: Mapping[str, Any], request: Request) -> KernelTypeError:
    shown = ", ".join(f"{name}={_kind(value)}" for name, value in by_name.items())
    return KernelTypeError(
        "operands cannot be passed by keyword: the kernel's refs are in the order of "
        "the call",
        [("kernel", request.name), ("given", shown)],
        user_location(),
        f"pass by position: call({', '.join(by_name)})",
    )


def _kind(x: Any) -> str:
    return describe(x) if is_shaped(x) else type(x).__name__


def _one_of(a: Any, b: Any, name_a: str, name_b: str, at: Any) -> Any:
    if (a is _NOT_GIVEN) == (b is _NOT_GIVEN):
        what = "one of" if a is _NOT_GIVEN else "only one of"
        raise SpecError(
            f"pallas_call needs {what} {name_a} and {name_b}",
            at=at,
            fix=f"{name_a}=jax.ShapeDtypeStruct(shape, dtype)",
        )
    return b if a is _NOT_GIVEN else a


def _aliases(given: Any, at: Any) -> tuple[tuple[int, int], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else None
    if given is not None and (
        pairs is None or not all(isinstance(n, int) for pair in pairs for n in pair)
    ):
        raise SpecError(
            "input_output_aliases must map operand numbers to result numbers",
            [("input_output_aliases", repr(given))],
            at,
            "{0: 0}: result 0 reuses the memory of operand 0",
        )
    return pairs or ()


def _cost(given: Any, at: Any) -> Any:
    if given is not None and not hasattr(given, "bytes_accessed"):
        raise SpecError(
            f"cost_estimate must be a pl.CostEstimate, got {given!r}",
            at=at,
            fix="pl.estimate_cost(f, *args), or pl.CostEstimate(flops=..., ...)",
        )
    return given


def _shape_of(leaf: Any, n: int, out_shape: Any, at: Any) -> Any:
    if not is_shaped(leaf):
        whole = None if leaf is out_shape else repr(out_shape)
        raise SpecError(
            "out_shape entries must have a shape and a dtype",
            [("entry", n), ("got", repr(leaf)), ("out_shape", whole)],
            at,
            "jax.ShapeDtypeStruct(shape, dtype)",
        )
    refuse_traced(leaf.shape, f"out_shape {n}", [("shape", tuple(leaf.shape))], at)
    if any(d < 0 for d in leaf.shape):
        raise SpecError(
            "out_shape has a negative size",
            [("entry", n), ("shape", tuple(leaf.shape))],
            at,
            fix="use sizes of 0 or more",
        )
    if isinstance(leaf, (MemoryRef, SemaphoreType)):
        return as_memory_ref(leaf)
    return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)


# Fields of `tpu`, `triton` and `mosaic_gpu` CompilerParams, in any version of JAX, and
# `batch_invariant`, which is ours.
PARAMETERS = frozenset(
    {
        "allow_collective_id_without_custom_barrier",
        "allow_input_fusion",
        "approx_math",
        "batch_invariant",
        "collective_id",
        "dimension_semantics",
        "disable_bounds_checks",
        "disable_semaphore_checks",
        "flags",
        "fuse_transposed_lhs_in_matmul",
        "has_side_effects",
        "internal_scratch_in_bytes",
        "is_multi_process",
        "kernel_type",
        "lowering_semantics",
        "max_concurrent_steps",
        "needs_layout_passes",
        "num_stages",
        "num_warps",
        "opt_level",
        "profile_bounds_check",
        "profile_dir",
        "profile_space",
        "profile_trace_scope",
        "reduction_scratch_bytes",
        "serialization_format",
        "serialized_metadata",
        "shape_invariant_numerics",
        "skip_device_barrier",
        "unsafe_no_auto_barriers",
        "use_tc_tiling_on_sc",
        "vmem_limit_bytes",
    }
)


def params_of(given: Any, at: Any, what: str = "compiler_params") -> dict[str, Any]:
    """Compiler parameters as one flat dict, whatever their form."""
    if given is None:
        return {}
    if dataclasses.is_dataclass(given):
        fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
        if what == "compiler_params":
            _expect_compiler_params(given, at)
        return {k: v for k, v in fields.items() if v is not None}
    if isinstance(given, Mapping):
        flat: dict[str, Any] = {}
        for key, value in given.items():
            nested = isinstance(value, Mapping) or dataclasses.is_dataclass(value)
            if nested and key not in PARAMETERS:
                flat.update(params_of(value, at, what))  # by backend
                continue
            if what == "compiler_params" and key not in PARAMETERS:
                raise _unknown_parameter(key, at)
            flat[key] = value
        return flat
    kind = "a CompilerParams" if what == "compiler_params" else "a dict"
    raise SpecError(f"{what} must be {kind}, got {given!r}", at=at)


def _expect_compiler_params(given: Any, at: Any) -> None:
    """Refuses objects that configure something else, by name: a later JAX may have
    parameters with fields that are not known yet."""
    kind = type(given).__name__
    is_mode = "Interpret" in kind
    if is_mode or not kind.endswith("Params"):
        raise SpecError(
            f"compiler_params must be a CompilerParams, got {kind}(...)",
            at=at,
            fix="pass it as interpret=" if is_mode else "CompilerParams(...)",
        )


def _unknown_parameter(key: Any, at: Any) -> SpecError:
    """The error for a parameter without effect, such as a misspelt one."""
    near = difflib.get_close_matches(str(key), PARAMETERS, 1)
    fix = f"{near[0]!r}" if near else f"one of {', '.join(sorted(PARAMETERS))}"
    return SpecError(f"compiler_params has an unknown key {key!r}", at=at, fix=fix)


def _staged(x: Any) -> Any:
    """`jnp.asarray(x)` with an explicit dtype: numpy arrays are then only transferred,
    whereas without it each new shape compiles a program."""
    is_array = isinstance(x, np.ndarray)
    return jnp.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype) if is_array else None)


def _as_array(x: Any, n: int, request: Request) -> Any:
    if jaxcompat.is_ref(x):
        raise KernelTypeError(
            f"operand {n} is a ref",
            [("kernel", request.name), ("ref", jaxcompat.aval_of(x))],
            user_location(),
            "pass its value, ref[...]",
        )
    if type(x).__module__.partition(".")[0] == "torch":
        raise KernelTypeError(
            f"operand {n} is a torch tensor",
            [("kernel", request.name)],
            request.at,
            "pallasite.torch.wrap(f) takes tensors; jax.dlpack.from_dlpack(x) makes an "
            "array of one",
        )
    try:
        array = x if isinstance(x, jax.Array) else _staged(x)
    except TypeError:
        dtype = f" of dtype {x.dtype}" if isinstance(x, np.ndarray) else ""
        raise KernelTypeError(
            f"operand {n} is not an array of numbers: {type(x).__name__}{dtype}",
            [("kernel", request.name)],
            request.at,
            "pass arrays of numbers; bind other arguments with "
            "functools.partial(kernel, ...)",
        ) from None
    is_key = jaxcompat.is_key_dtype(array.dtype)
    if T.dtype_of(array.dtype) is None and not is_key:
        raise UnsupportedError(
            f"operand {n} has dtype {array.dtype}, which kernels do not support",
            [("kernel", request.name)],
            request.at,
            OTHER_DTYPE,
        )
    return array


def _stored(x: Any) -> Any:
    """An operand as stored in memory: random keys become words."""
    return jax.random.key_data(x) if jaxcompat.is_key_dtype(x.dtype) else x
