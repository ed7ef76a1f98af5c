"""Every use of JAX that is private, or differs between JAX versions, in one place.

One function per need; each has a canary in `tests/test_jaxcompat.py`. Nothing else in
the package may import `jax._src` (a test enforces that).
"""

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.dtypes
import jax.ref
import numpy as np

# `jax.extend` would give these too, but importing it loads parts of upstream Pallas.
from jax._src.core import InconclusiveDimensionOperation, is_symbolic_dim
from jax._src.core import Primitive as Primitive
from jax._src.core import jaxprs_in_params as jaxprs_in_params
from jax._src.lib import _jax  # type: ignore[attr-defined]

from pallasite.errors import UnsupportedError

VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])


def opened(jaxpr: Any) -> tuple[Any, list[Any]]:
    """The jaxpr and its constants, of a closed or open jaxpr (merged in 0.11)."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def with_equations(jaxpr: Any, equations: Sequence[Any]) -> Any:
    """The jaxpr, closed or open, with other equations."""
    inner, _ = opened(jaxpr)
    made = inner.replace(eqns=list(equations))
    return made if inner is jaxpr else jaxpr.replace(jaxpr=made)


@contextlib.contextmanager
def kernel_tracing() -> Iterator[None]:
    """Trace without mesh context (types inside a kernel carry no sharding) and with
    JAX's ref alias checks off: kernels may pass one ref twice or carry it in loops."""
    from jax._src import config

    off = getattr(config, "mutable_array_checks", None)
    checks = contextlib.nullcontext() if off is None else off(False)
    empty = jax.sharding.AbstractMesh((), ())
    around = device_mesh()
    token = _mesh_around.set(around)
    try:
        with jax.sharding.use_abstract_mesh(empty), checks:
            yield
    finally:
        _mesh_around.reset(token)


_mesh_around: ContextVar[Any] = ContextVar("pallasite_mesh_around", default=None)


def device_mesh() -> Any:
    """The abstract device mesh that the traced code runs on; inside a kernel, the mesh
    around it. None if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return _mesh_around.get() if mesh.empty else mesh


@contextlib.contextmanager
def own_tracing() -> Iterator[None]:
    """Trace our own code in a kernel's place: dtypes and ranks promote as usual there,
    even if the user's settings forbid implicit promotion."""
    usual = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with kernel_tracing(), usual[0], usual[1]:
        yield


def named_axes(axes: Sequence[tuple[Hashable, int]]) -> Any:
    """Bind axis names while a kernel is traced (`lax.axis_index`)."""
    from jax._src.core import extend_axis_env_nd

    return extend_axis_env_nd(axes) if axes else contextlib.nullcontext()


def trace_context() -> Any:
    """Everything besides the operands that tracing depends on (x64, precision...)."""
    from jax._src import config

    return config.trace_context()


def abstract_ref(shape: Sequence[int], dtype: Any, space: Any = None) -> Any:
    """A fresh ref type to trace a kernel argument with."""
    aval = jax.core.ShapedArray(tuple(shape), dtype)
    return jax.ref.AbstractRef(aval, space)


def is_symbolic(size: Any) -> bool:
    """Whether a size is one that `jax.export` leaves open."""
    return is_symbolic_dim(size)


@contextlib.contextmanager
def open_sizes(facts: Any, at: Any) -> Iterator[None]:
    """Explains where something depends on what an export leaves open.

    Args:
        facts: of the error, such as the kernel's name.
        at: the author's line.
    """
    try:
        yield
    except InconclusiveDimensionOperation as error:
        raise UnsupportedError(
            "the kernel depends on a size that the export leaves open",
            [*facts, ("needed", str(error).strip().split("\n")[0])],
            at,
            "say what is known of the size, for example jax.export.symbolic_shape('n', "
            "constraints=['n >= 128']); or export the function for each shape it is "
            "used with",
        ) from None


def is_ref(x: Any) -> bool:
    """A ref tracer or a view of one."""
    return isinstance(x, jax.ref.Ref) or hasattr(x, "transforms")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RefView:
    """A view of a ref as a pytree; JAX's own is one only in the operands of `jit`."""

    ref: Any
    transforms: tuple[Any, ...]


def ref_and_transforms(x: Any) -> tuple[Any, tuple[Any, ...]]:
    """The ref under a view (`ref.at[...]`), and the view's transforms.

    They are pytrees, also where a view is an index of another (`x.at[i.at[0]]`).
    """
    if hasattr(x, "transforms") and hasattr(x, "ref"):
        return x.ref, tuple(map(_with_pytree_indices, x.transforms))
    return x, ()


def transformed_ref(x: Any, transform: Any) -> Any:
    """A view of a ref, or of a view, through one more view transform."""
    from jax._src.state.types import TransformedRef

    ref, seen = ref_and_transforms(x)
    return TransformedRef(ref, (*seen, transform))


def view_transform() -> type:
    from jax._src.state import types

    return types.Transform  # whose subclasses JAX can print


def _with_pytree_indices(transform: Any) -> Any:
    indices = getattr(transform, "indices", ())
    if not any(hasattr(i, "transforms") for i in indices):
        return transform
    made = tuple(
        RefView(*ref_and_transforms(i)) if hasattr(i, "transforms") else i
        for i in indices
    )
    return replace(transform, indices=made, validate=False)


def memory_space_of(x: Any) -> Any:
    """The memory space that a type, a traced value or a ref has; None if it has none.

    From a traced value itself, JAX 0.11.2 raises a ValueError.
    """
    typed = aval_of(x) if isinstance(x, jax.core.Tracer) else x
    return getattr(typed, "memory_space", None)


def is_concrete(x: Any) -> bool:
    """Whether a value is concrete, not traced."""
    from jax._src.core import Tracer

    return not isinstance(x, Tracer)


def aval_of(x: Any) -> Any:
    return jax.typeof(x)


def lower_high_level(closed: Any) -> Any:
    """Replace high-level primitives (0.12 stages some) by their expansions."""
    if getattr(closed, "is_high", False):
        from jax.interpreters import partial_eval

        lower = getattr(partial_eval, "lower_jaxpr2", None)
        if lower is not None:
            return lower(closed)
    return closed


def lower_other_high_level(closed: Any) -> Any:
    """`lower_high_level`, unless the only high-level primitives are those that have an
    expansion and derivatives of their own, which an expansion would lose."""
    return closed if _only_expandable(closed) else lower_high_level(closed)


EXPANDABLE = "call_hi_primitive"


def _only_expandable(closed: Any) -> bool:
    for eqn in opened(closed)[0].eqns:
        inner = list(jaxprs_in_params(eqn.params))
        if not all(map(_only_expandable, inner)):
            return False
        if any(getattr(v.aval, "is_high", False) for v in (*eqn.invars, *eqn.outvars)):
            return False
        is_high = getattr(eqn.primitive, "is_high", None)
        if inner or eqn.primitive.name == EXPANDABLE or is_high is None:
            continue
        if is_high(*(v.aval for v in eqn.invars), **eqn.params):
            return False
    return True


def expansion(eqn: Any) -> Any:
    """What an equation of the primitive `EXPANDABLE` computes, as a jaxpr."""
    run = functools.partial(eqn.primitive.to_lojax, **eqn.params)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return lower_high_level(jax.make_jaxpr(run)(*avals))


def equation_call(eqn: Any) -> Any:
    """The function of an equation (of a primitive with several results), including its
    differentiation rules."""
    params = eqn.primitive.get_bind_params(eqn.params)
    return lambda *operands: eqn.primitive.bind(*operands, **params)


def function_name(jaxpr: Any) -> str:
    """The name of the function that a jaxpr was traced from, as an identifier."""
    info = getattr(opened(jaxpr)[0], "debug_info", None)
    name = str(getattr(info, "func_name", "") or "function").split(" ")[0]
    name = name.rsplit(".", 1)[-1].strip("<>")
    return name if name.isidentifier() else "function"


def without_closure(fn: Any, *args: Any) -> tuple[Any, list[Any]]:
    """`fn` as a function of its arguments and of all traced values it closes over,
    and those values: `made(*args, *values) == fn(*args)`. It returns a list."""
    jaxpr, values = opened(jax.make_jaxpr(fn)(*args))

    def made(*both: Any) -> list[Any]:
        count = len(both) - len(values)
        return jax.core.eval_jaxpr(jaxpr, both[count:], *both[:count])

    return made, values


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """How many leading operands of a scan are constants, how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(t) for t in params["ft_in"].unpack())
    return consts, carry


@functools.cache
def polynomial_lowest_first(primitive: Any) -> bool:
    """Whether the primitive `polynomial` takes its lowest coefficient first.

    Found by evaluating it, because the equation does not say, and the order has changed
    between releases.
    """
    with jax.ensure_compile_time_eval():
        x, *coefficients = (jax.numpy.float32(v) for v in (2, 1, 10))
        value = float(primitive.bind(x, *coefficients))
    if value not in (21, 12):
        raise UnsupportedError(
            f"this version of JAX ({jax.__version__}) gives the primitive polynomial a "
            f"meaning that this version of Pallasite does not know (1, 10 at 2: "
            f"{value})",
            fix="use another version of either",
        )
    return value == 21


def ref_effect(position: int, writes: bool = False) -> Any:
    from jax._src.state import types

    return (types.WriteEffect if writes else types.ReadEffect)(position)


def staged_equations() -> list[Any]:
    """The equations staged so far by the trace that is running."""
    from jax._src import core

    frame = getattr(core.trace_ctx.trace, "frame", None)
    return [] if frame is None else list(frame.get_eqns())


def user_frame(source_info: Any) -> tuple[str, int, str] | None:
    """File, line and function of the user's code an equation comes from."""
    from jax._src import source_info_util

    try:
        frame = source_info_util.user_frame(source_info.traceback)
    except (AttributeError, TypeError):
        frame = source_info_util.user_frame(source_info)
    if frame is None:
        return None
    # Its own name, as in tracebacks, without those of the functions around it; `_`, as
    # the body of a `pl.when` is called, says nothing.
    names = [n for n in frame.function_name.split(".<locals>.") if n != "_"]
    return frame.file_name, frame.start_line, (names or ["_"])[-1]


def exclude_from_tracebacks(path: str) -> None:
    """Do not count files under `path` as the user's code."""
    from jax._src import source_info_util, traceback_util

    source_info_util.register_exclusion(path)
    traceback_util.register_exclusion(path)


def keep_out_of_callback_log(kind: type[BaseException]) -> None:
    """Stop JAX from logging exceptions of `kind` from host callbacks: it also raises
    them, so their text would be printed twice."""
    import logging

    class Unlogged(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raised = record.exc_info and record.exc_info[0]
            return not (raised and issubclass(raised, kind))

    logging.getLogger("jax._src.callback").addFilter(Unlogged())


def drop_failed_tokens(
    kind: type[BaseException], finish: Callable[[Callable[[], None]], None]
) -> None:
    """Do not raise exceptions of `kind` from host callbacks once more at exit.

    JAX waits then for what the programs of several devices have left to do, and prints
    the traceback of each failure, whether the program that ends has seen it or not.

    Args:
        finish: is called at exit with a function that waits.
    """
    from jax._src import dispatch

    def wait() -> None:
        tokens = dispatch.runtime_tokens
        for name in ("current_tokens", "output_runtime_tokens"):
            known: dict[Any, Any] = getattr(tokens, name)
            for key, token in list(known.items()):
                try:
                    token.block_until_ready()
                except jax.errors.JaxRuntimeError as error:
                    if kind.__name__ in str(error):
                        del known[key]

    atexit.register(finish, wait)  # before JAX's own, which was registered earlier


def is_key_dtype(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def key_data_shape(dtype: Any) -> tuple[int, ...]:
    """The trailing uint32 shape of one random key (depends on the implementation)."""
    return tuple(dtype._impl.key_shape)


def key_implementation(dtype: Any) -> Any:
    return dtype._impl


def out_aval_like(
    avals: Sequence[Any],
    shape: Sequence[int],
    dtype: Any,
    spec: Sequence[Any] | None = None,
) -> Any:
    """An output type that varies over the same manual mesh axes as the inputs, and
    is sharded by `spec` over the explicit axes."""
    base = jax.core.ShapedArray(tuple(shape), np.dtype(dtype))
    varying = [a for a in avals if hasattr(a, "update")]
    if not varying:
        return base
    from jax.sharding import PartitionSpec

    # A result varies over an axis if any operand does: join through the standard rule.
    source = max(varying, key=lambda a: len(manual_axes(a)))
    sharded = PartitionSpec(*([None] * len(shape) if spec is None else spec))
    result = source.update(
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        weak_type=False,
        sharding=source.sharding.update(spec=sharded),
    )
    union = frozenset().union(*(manual_axes(a) for a in varying))
    if union != manual_axes(source):
        result = _with_manual_axes(result, union)
    return result


def weakly_typed(x: Any) -> Any:
    """The array with a weak type, as results of Python scalars have."""
    from jax._src.lax.lax import _convert_element_type

    return _convert_element_type(x, x.dtype, weak_type=True)


def explicit_spec(aval: Any) -> tuple[tuple[str, ...], ...]:
    """The explicit mesh axes that each dimension of a type is sharded over."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None) or ()
    entries = [*spec, *[None] * (len(aval.shape) - len(spec))]
    return tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries
    )


def lying_as(x: Any, aval: Any) -> Any:
    """A value resharded over explicit mesh axes as a type says."""
    if explicit_spec(aval_of(x)) == explicit_spec(aval):
        return x
    return jax.reshard(x, aval.sharding)


def mesh_sizes(aval: Any) -> dict[str, int]:
    """Names and sizes of the axes of a type's mesh."""
    return dict(aval.sharding.mesh.shape)


def manual_axes(aval: Any) -> frozenset[str]:
    """Mesh axes of an enclosing shard_map over which a value may differ."""
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()) or ())


def vary_alike(values: Sequence[Any]) -> list[Any]:
    """Values marked as varying over the manual mesh axes that any of them varies over.

    The transpose of the mark is the sum over the axis, which a value shared by several
    devices needs for its cotangent.
    """
    axes = [manual_axes(aval_of(x)) for x in values]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(values, axes, strict=True)
    ]


def summed_as(cotangent: Any, aval: Any) -> Any:
    """A cotangent summed over the manual mesh axes its operand does not vary over."""
    shared = manual_axes(aval_of(cotangent)) - manual_axes(aval)
    return jax.lax.psum(cotangent, tuple(sorted(shared))) if shared else cotangent


def _with_manual_axes(aval: Any, axes: frozenset[str]) -> Any:
    kind = aval.manual_axis_type
    update = getattr(kind, "update", None)
    if update is not None:
        return aval.update(manual_axis_type=update(varying=axes))
    import dataclasses

    return aval.update(manual_axis_type=dataclasses.replace(kind, varying=axes))


def plain_avals(avals: Sequence[Any]) -> list[Any]:
    """The same types without mesh information."""
    return [jax.core.ShapedArray(a.shape, a.dtype) for a in avals]


def debug_effect() -> Any:
    """The effect of a print: kept in order, allowed in loops and branches."""
    from jax._src import debugging

    return debugging.debug_effect


def mosaic_bindings() -> Any:
    """jaxlib's MLIR bindings with the TPU dialect; None where it ships none.

    Attributes: Attribute, Module, MLIRError, PassManager, and `context()`, which makes
    a context.
    """
    try:
        from jaxlib.mlir import ir, passmanager
        from jaxlib.mosaic.python import tpu
    except ImportError:
        return None
    from types import SimpleNamespace

    from jax.interpreters import mlir

    def context() -> Any:
        made = mlir.make_ir_context()
        tpu.register_dialect(made)
        return made

    return SimpleNamespace(
        Attribute=ir.Attribute,
        Module=ir.Module,
        MLIRError=ir.MLIRError,
        PassManager=passmanager.PassManager,
        context=context,
    )


def is_export(ctx: Any) -> bool:
    """Is a lowering rule called for `jax.export`?"""
    parameters = getattr(ctx.module_context, "lowering_parameters", None)
    return bool(getattr(parameters, "for_export", False))


def export_refuses(target: str) -> bool:
    """Whether the `jax.export` that is lowering will refuse a custom call, for which
    JAX promises no compatibility, because its check is not disabled.

    Its error prints the whole call, so ours comes first.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "do_export" and code.co_filename.endswith("_export.py"):
            checks = frame.f_locals.get("disabled_checks", ())
            return all(check.is_custom_call() != target for check in checks)
        frame = frame.f_back
    return False


def flag(name: str) -> Any:
    """The value of one of JAX's configuration options."""
    return getattr(jax.config, name)


def kept_arguments(ctx: Any, values: Sequence[Any]) -> frozenset[int]:
    """Which of a lowering rule's values are arguments that the program must not change.

    The caller has not donated them. Programs that are exported, or that a partitioner
    asks for, become part of others, whose values may then be overwritten.
    """
    from jax.interpreters import mlir

    context = ctx.module_context.axis_context
    whole = isinstance(context, mlir.ShardingContext) and context.num_devices == 1
    found = set[int]()
    for number, value in enumerate(values if whole and not is_export(ctx) else ()):
        block = value.owner
        function = block.owner.operation if isinstance(block, mlir.ir.Block) else None
        if function is None or function.name != "func.func":
            continue
        attributes = function.attributes
        if mlir.ir.StringAttr(attributes["sym_name"]).value != "main":
            continue
        every = mlir.ir.ArrayAttr(attributes["arg_attrs"])
        given = mlir.ir.DictAttr(every[list(block.arguments).index(value)])
        if "jax.buffer_donor" not in given and "tf.aliasing_output" not in given:
            found.add(number)
    return frozenset(found)


def stream_for_imports(device: Any) -> int | None:
    """The GPU stream on which memory that is passed to JAX must be ready."""
    if device.platform == "cpu":
        return None
    return device.get_stream_for_external_ready_events()


def array_of_dlpack(capsule: Any, device: Any, stream: int | None) -> jax.Array:
    """An array in the memory that a DLPack capsule describes, ready on `stream`.

    The core of `jax.dlpack.from_dlpack`, which takes ten times as long.
    """
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, stream, False)


def dlpack_of_array(array: jax.Array, stream: int | None) -> Any:
    """A DLPack capsule of an array on one device; `stream` waits until it is ready.

    The core of `jax.Array.__dlpack__`.
    """
    return _jax.buffer_to_dlpack_managed_tensor(array, stream=stream)


# --- automatic partitioning ---


def auto_devices(ctx: Any) -> int:
    """Over how many devices XLA partitions what a lowering rule emits (1: it does not).

    Code inside a shard_map over the whole mesh is written for one device already.
    """
    from jax.interpreters import mlir

    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices
    if isinstance(context, mlir.SPMDAxisContext):
        manual = set(context.manual_axes) == set(context.mesh.axis_names)
        return 1 if manual else context.mesh.size
    return 1


def lowering_device(ctx: Any) -> Any:
    """A device that a lowering rule's code is for, if JAX has decided on one.

    The devices of a topology, or of another process, have no client here that runs
    code, but they have a kind.
    """
    context, client = ctx.module_context.axis_context, ctx.module_context.backend
    devices = list(getattr(context, "device_assignment", None) or ())
    mesh = getattr(context, "mesh", None)
    if not devices and isinstance(mesh, jax.sharding.Mesh):
        devices = list(mesh.devices.flat)
    if not devices and client is not None:
        devices = client.devices()
    return devices[0] if devices else None


def manual_mesh_axes(ctx: Any) -> list[tuple[str, int]]:
    """Names and sizes of the mesh axes over which code is lowered for one device."""
    from jax.interpreters import mlir

    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.SPMDAxisContext):
        return []
    sizes = dict(context.mesh.shape)
    return [(name, sizes[name]) for name in sizes if name in context.manual_axes]


@contextlib.contextmanager
def collectives_over(axes: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Trace collectives over mesh axes in a lowering rule, on values whose types do not
    say that they vary."""
    from jax._src import config

    with named_axes(axes), config._check_vma(False):
        yield


def register_partitioner(name: str, partition: Any, infer: Any) -> None:
    """Have XLA call back when it partitions the custom call `name`.

    Args:
        name: the custom call's target.
        partition: (shapes, shardings, result shape, result sharding, backend config)
            to (module for one device, shardings, result sharding).
        infer: the same without a result sharding, to a result sharding; only used
            where Shardy is switched off.
    """
    import functools

    from jax._src import xla_bridge
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name,
        lambda sharding, shape, config: sharding,
        partition,
        infer,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def sharding_rule_attribute(text: str) -> Any:
    """Shardy's `op_sharding_rule`, an attribute of a custom call."""
    from jax.interpreters import mlir

    return mlir.ir.Attribute.parse(f"#sdy.op_sharding_rule<{text}>")


def tile_assignment(sharding: Any) -> np.ndarray | None:
    """Devices of an XLA sharding: one dimension per array dimension, then optionally
    one for replicas; None if every device has the whole array."""
    if sharding.is_replicated() or not sharding.is_tiled():
        return None
    devices = np.asarray(sharding.tile_assignment_devices())
    return devices.reshape(sharding.tile_assignment_dimensions())


def tiled_sharding(devices: np.ndarray, rank: int) -> Any:
    """The XLA sharding with this tile assignment, for arrays of a rank."""
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    if all(n == 1 for n in devices.shape[:rank]):
        return xla_client.HloSharding.replicate()
    proto = xla_client.OpSharding()
    proto.type = xla_client.OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = list(devices.shape)
    proto.tile_assignment_devices = devices.ravel().tolist()
    proto.replicate_on_last_tile_dim = devices.ndim > rank
    return xla_client.HloSharding.from_proto(proto)


def tuple_sharding(shape: Any, shardings: Sequence[Any]) -> Any:
    """Shardings of several results as one."""
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    if not shape.is_tuple():
        return shardings[0]
    return xla_client.HloSharding.tuple_sharding(shape, list(shardings))


def module_of_one_device(
    function: Any,
    avals: Sequence[Any],
    axis: tuple[str, int],
    platforms: Sequence[str],
    x64: bool,
) -> bytes:
    """The module that each of several devices runs.

    Args:
        function: from one device's arrays to a list of them; it may use collectives
            over the axis.
        avals: types of the arrays.
        axis: a name for all devices together, and their number.
        platforms: to lower for.
        x64: whether 64-bit types are on (another thread may call than the one that
            lowered the call).
    """
    from jax._src import config
    from jax._src.interpreters import mlir as private_mlir
    from jax.interpreters import mlir

    name, size = axis
    mesh: Any = jax.sharding.AbstractMesh((size,), (name,))
    context = mlir.SPMDAxisContext(mesh, frozenset([name]))
    with kernel_tracing(), config.enable_x64(x64), named_axes([axis]):
        jaxpr = lower_high_level(jax.make_jaxpr(function, axis_env=[axis])(*avals))
        module = private_mlir.build_mlir_module_helper(
            jaxpr,
            name="one_device",
            platforms=platforms,
            backend=None,
            axis_context=context,
        )
    return mlir.module_to_bytecode(module)


def errors_in_check(
    params: dict[str, Any], values: Sequence[Any]
) -> Iterator[tuple[Any, str, tuple[Sequence[Any], dict[str, Any]]]]:
    """What the primitive of `checkify.check` checks: for each error whether it
    happened, its message's format, and the format's arguments."""
    error = jax.tree.unflatten(params["err_tree"], values)
    for effect, happened in error._pred.items():
        messages = list(error._metadata.values())
        if len(messages) != 1 or effect.error_type.__name__ != "FailedCheckError":
            yield happened, effect.error_type.__name__, ((), {})
            continue
        found = jax.tree.unflatten(messages[0], error._payload[effect])
        yield happened, found.fmt_string, (found.args, found.kwargs)


def register_checkify(primitive: Any, rule: Any) -> None:
    """Give a primitive its rule: `rule(add, error, enabled, *operands, **params)`.

    `add(error, happened, found)` returns the error value with one more error in it.
    """
    from jax._src import checkify

    def run(*args: Any, **params: Any) -> Any:
        context = args[:1] if hasattr(checkify, "CheckifyContext") else ()
        error, enabled, *operands = args[len(context) :]
        add = functools.partial(checkify.assert_func, *context)
        return rule(add, error, enabled, *operands, **params)

    checkify.error_checks[primitive] = run


def current_traceback() -> Any:
    """The source of the equation being traced, in checkify's form."""
    from jax._src import source_info_util

    return source_info_util.current().traceback


def error_effect(kind: type, leaves: Sequence[Any]) -> Any:
    """The effect by which checkify distinguishes errors of a class with such values."""
    from jax._src import checkify

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    return checkify.ErrorEffect(kind, tuple(shapes))
