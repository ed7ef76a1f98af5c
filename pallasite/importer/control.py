"""Import rules for calls, branches, loops, program ids, prints and inner pipelines."""

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, UnsupportedError
from pallasite.importer.custom_rules import register
from pallasite.importer.importer import Importer, tile_type
from pallasite.ir import types as T
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.rewrite import substitute, writes
from pallasite.ir.rule_table import ANY, RuleTable
from pallasite.language.refs import positional_fields
from pallasite.passes.analysis.intervals import Fact

RULES = RuleTable()

# --- calls are inlined ---


@RULES.rule(
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "eval_jaxpr",
    "composite",
    "checkpoint",
    "remat",
    params=ANY,
)
def _call(im: Importer, eqn: Any, *args: Value) -> list[Value]:
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return im.run(jaxpr, args)


@RULES.rule("pallasite_call")
def _kernel_call(im: Importer, eqn: Any, *args: Value) -> None:
    raise UnsupportedError(
        "a kernel cannot call another kernel",
        [("kernel", im.kernel_name), ("calls", eqn.params["call"].kernel.name)],
        im.where,
        "call the kernel function on refs directly, or loop over blocks with "
        "pltpu.emit_pipeline",
    )


@RULES.rule("custom_fusion", params=ANY)
def _custom_fusion(im: Importer, eqn: Any, *args: Value) -> list[Value]:
    """A function with rules for blocks, as its author computes it in kernels."""
    count, impl = eqn.params["num_constants"], eqn.params["rules"].pallas_impl

    def run(*operands: Any) -> list[Any]:
        constants, own = operands[:count], operands[count:]
        if impl is None:
            return jax.core.eval_jaxpr(eqn.params["unfused"], constants, *own)
        given, by_name = jax.tree.unflatten(eqn.params["in_tree"], own)
        return jax.tree.leaves(impl(*given, **by_name))

    return im.splice(run, args)


@RULES.rule("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", params=ANY)
def _custom_call(im: Importer, eqn: Any, *args: Value) -> Sequence[Value]:
    """The function's code, with the name of its rule where that can matter."""
    return _with_rule(im, eqn, eqn.params["call_jaxpr"], args)


@RULES.rule(jaxcompat.EXPANDABLE, params="_prim")
def _expandable(im: Importer, eqn: Any, *args: Value) -> Sequence[Value]:
    """`jnp.frexp`: made of other primitives, whose derivatives are not its own."""
    with jaxcompat.own_tracing():
        jaxpr = jaxcompat.expansion(eqn)
    return _with_rule(im, eqn, jaxpr, args)


def _with_rule(
    im: Importer, eqn: Any, jaxpr: Any, args: Sequence[Value]
) -> Sequence[Value]:
    if not _has_derivative(eqn, args):
        return im.run(jaxpr, args)
    params = [Value(a.type) for a in args]
    body = im.region(jaxpr, params, params)
    rule = register(jaxcompat.equation_call(eqn), eqn, jaxpr)
    return im.builder.emit("custom", *args, regions=[body], rule=rule)


def _has_derivative(eqn: Any, args: Sequence[Value]) -> bool:
    """Whether it takes and gives arrays only, with floats among both."""
    atoms = (*eqn.invars, *eqn.outvars)
    if any(jaxcompat.is_key_dtype(v.aval.dtype) for v in atoms):
        return False
    if any(a.is_ref for a in args):
        return False
    results = [tile_type(v.aval) for v in eqn.outvars]
    given = any(a.tile.dtype.is_float for a in args)
    return given and any(r.dtype.is_float for r in results)


# --- branches ---


@RULES.rule("cond", params="branches branches_platforms")
def _cond(im: Importer, eqn: Any, which: Value, *args: Value) -> Sequence[Value]:
    branches = [im.region(b, (), args) for b in eqn.params["branches"]]
    which = im.builder.cast(which, T.I32)
    return im.builder.emit("cond", which, regions=branches)


# --- loops: refs among the carried values never change, so they are not carried ---


class Carry:
    """Loop-carried values with the refs among them taken out."""

    def __init__(self, initial: Sequence[Value]):
        self.initial = list(initial)
        self.carried = [v for v in initial if not v.is_ref]
        self.params = [Value(v.type) for v in self.carried]

    def inside(self) -> list[Value]:
        return self.merge(self.params)

    def merge(self, carried: Sequence[Value]) -> list[Value]:
        pending = iter(carried)
        return [v if v.is_ref else next(pending) for v in self.initial]

    def yielded(self, im: Importer, results: Sequence[Value]) -> list[Value]:
        pairs = list(zip(self.initial, results, strict=True))
        if any(before.is_ref and after is not before for before, after in pairs):
            raise KernelTypeError(
                "a loop must pass on the refs it carries unchanged",
                [("kernel", im.kernel_name)],
                im.where,
                "select the ref with pl.when in the body, or index the leading "
                "dimension of one ref",
            )
        return [after for before, after in pairs if not before.is_ref]


@RULES.rule("while", params="cond_nconsts cond_jaxpr body_nconsts body_jaxpr")
def _while(im: Importer, eqn: Any, *args: Value) -> list[Value]:
    p = eqn.params
    split = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    cond_consts, body_consts = args[: split[0]], args[split[0] : split[1]]

    def goes_on(carried: Sequence[Value]) -> Value:
        return im.run(p["cond_jaxpr"], [*cond_consts, *carried])[0]

    carry = Carry(args[split[1] :])
    with im.nested() as builder:
        condition = builder.block(carry.params, [_any(im, goes_on(carry.inside()))])
    body_carry = Carry(args[split[1] :])
    with im.nested() as builder:
        before = body_carry.inside()
        _note_counter(im, p["body_jaxpr"], len(body_consts), body_carry, condition)
        going = goes_on(before) if eqn.params["cond_jaxpr"].out_avals[0].shape else None
        results = im.run(p["body_jaxpr"], [*body_consts, *before])
        if going is not None:
            _refuse_writes(im, builder.ops)
            results = _where_going(im, going, results, before)
        body = builder.block(body_carry.params, body_carry.yielded(im, results))
    counted = _as_counted_loop(im, carry.carried, condition, body)
    if counted is not None:
        return carry.merge(counted)
    results = im.builder.emit("while", *carry.carried, regions=(condition, body))
    return carry.merge(results)


# What is known of a loop's counter while its body is imported.


def _note_counter(
    im: Importer, jaxpr: Any, num_consts: int, carry: Carry, condition: Block
) -> None:
    """Of `while i < n` with i = i + 1, the range of i."""
    test = condition.ops[-1] if condition.ops else None
    if test is None or test.name != "lt" or condition.yields != test.results:
        return
    if test.operands[0] in condition.params:
        param = carry.params[condition.params.index(test.operands[0])]
        at = carry.inside().index(param)
        if _step(jaxpr, num_consts, at) == 1:
            low, limit = im.facts.of(carry.initial[at]).low, test.operands[1]
            im.facts.note(param, Fact(low, im.facts.of(limit).high))


def _note_counters(
    im: Importer, jaxpr: Any, num_consts: int, carry: Carry, trips: int
) -> None:
    """The ranges of carried integers that each trip adds a constant to."""
    for at, param in enumerate(carry.inside()):
        step = _step(jaxpr, num_consts, at)
        if step is not None and step >= 0:
            initial = im.facts.of(carry.initial[at])
            high = initial.high + step * (trips - 1)
            if high <= param.tile.dtype.limits[1]:
                im.facts.note(param, Fact(initial.low, high))


def _step(jaxpr: Any, num_consts: int, at: int) -> int | None:
    """The constant that a loop's body adds to a carried integer and nothing else."""
    inner, _ = jaxcompat.opened(jaxpr)
    before, after = inner.invars[num_consts + at], inner.outvars[at]
    for eqn in inner.eqns:
        if any(after is v for v in eqn.outvars) and eqn.primitive.name == "add":
            x, y = eqn.invars
            if x is before and hasattr(y, "val") and np.ndim(y.val) == 0:
                return int(y.val) if x.aval.dtype.kind in "iu" else None
    return None


# vmap gives a loop one condition per mapped element, in front of every carried value:
# the loop runs while any of them holds, and an element that is done stays as it is.


def _any(im: Importer, conditions: Value) -> Value:
    if not conditions.tile.rank:
        return conditions
    axes = tuple(range(conditions.tile.rank))
    return im.builder.op("reduce", conditions, kind="or", axes=axes)


def _where_going(
    im: Importer, going: Value, after: Sequence[Value], before: Sequence[Value]
) -> list[Value]:
    def choose(new: Value, old: Value) -> Value:
        if new.is_ref:
            return new
        dims = tuple(range(going.tile.rank))
        return im.builder.select(
            im.builder.broadcast(going, new.tile.shape, dims), new, old
        )

    return [choose(*pair) for pair in zip(after, before, strict=True)]


def _refuse_writes(im: Importer, ops: Sequence[Op]) -> None:
    """A finished element must not store again, and a store cannot be partly undone."""
    if any(writes(op) for op in ops):
        raise UnsupportedError(
            "under vmap, a while_loop whose condition is batched cannot write to a ref",
            [("kernel", im.kernel_name)],
            im.where,
            "loop over the batch with lax.fori_loop, or carry the values and store "
            "them after the loop",
        )


def _as_counted_loop(
    im: Importer, carried: Sequence[Value], condition: Block, body: Block
) -> list[Value] | None:
    """`while i < n` with n fixed and i = i + 1 is a `for` (a fori_loop's shape)."""
    *before, test = condition.ops or (None,)
    if test is None or any(op.name != "constant" for op in before):
        return None
    if test.name != "lt" or condition.yields != test.results:
        return None
    i, n = test.operands
    if i not in condition.params:
        return None
    at, limit = condition.params.index(i), None
    if n in condition.params:
        limit = condition.params.index(n)
        if at == limit or body.yields[limit] is not body.params[limit]:
            return None
    makers = {v: op for op in body.ops for v in op.results}
    step = makers.get(body.yields[at])
    if step is None or step.name != "add" or step.operands[0] is not body.params[at]:
        return None
    one = makers.get(step.operands[1])
    if one is None or one.name != "constant" or one.attrs["value"] != 1:
        return None
    rest = [k for k in range(len(carried)) if k not in (at, limit)]
    block = Block(
        (body.params[at], *(body.params[k] for k in rest)),
        body.ops,
        tuple(body.yields[k] for k in rest),
    )
    numbers = {op.result: op.attrs["value"] for op in before}
    first = carried[at]
    if limit is not None:
        last = carried[limit]
        block = substitute(block, {body.params[limit]: last})
    else:  # a number, or a value from outside the loop
        last = im.builder.like(numbers[n], first) if n in numbers else n
    unit = im.builder.like(1, first)
    results = im.builder.emit(
        "for", first, last, unit, *(carried[k] for k in rest), regions=(block,)
    )
    final = im.builder.max(first, last)  # the counter where the loop stops
    found = dict(zip(rest, results, strict=True))
    return [final if k == at else last if k == limit else found[k]
            for k in range(len(carried))]  # fmt: skip


@RULES.rule(
    "scan",
    params="reverse length jaxpr num_consts num_carry ft_in ft_out linear "
    "_split_transpose",
)
def _scan(im: Importer, eqn: Any, *args: Value) -> list[Value]:
    """A counted loop; scanned inputs are sliced, scanned outputs collected."""
    p, b = eqn.params, im.builder
    num_consts, num_carry = jaxcompat.scan_split(p)
    consts, rest = args[:num_consts], args[num_consts:]
    carry, xs = Carry(rest[:num_carry]), rest[num_carry:]
    length, inner = p["length"], jaxcompat.opened(p["jaxpr"])[0]
    y_types = [tile_type(v.aval, im.where) for v in inner.outvars[num_carry:]]
    stacked = [b.constant(0, t.with_shape((length, *t.shape))) for t in y_types]
    if length == 0:
        return [*carry.initial, *stacked]
    collected = [Value(s.type) for s in stacked]
    counter = Value(T.INDEX, "i")
    im.facts.note(counter, Fact(0, length - 1))
    with im.nested() as builder:
        n = counter
        if p["reverse"]:
            n = builder.sub(builder.index(length - 1), counter)
        sliced = [_take_row(im, x, n) for x in xs]
        _note_counters(im, p["jaxpr"], num_consts, carry, length)
        results = im.run(p["jaxpr"], [*consts, *carry.inside(), *sliced])
        ys = [
            _put_row(im, into, y, n)
            for into, y in zip(collected, results[num_carry:], strict=True)
        ]
        yields = [*carry.yielded(im, results[:num_carry]), *ys]
        body = builder.block((counter, *carry.params, *collected), yields)
    bounds = (b.index(0), b.index(length), b.index(1))
    out = b.emit("for", *bounds, *carry.carried, *stacked, regions=(body,))
    split = len(carry.carried)
    return [*carry.merge(out[:split]), *out[split:]]


def _take_row(im: Importer, x: Value, n: Value) -> Value:
    b, rank = im.builder, x.tile.rank
    starts = [n, *[b.index(0)] * (rank - 1)]
    row = b.op("dynamic_slice", x, *starts, sizes=(1, *x.tile.shape[1:]))
    return b.op("reshape", row, shape=x.tile.shape[1:])


def _put_row(im: Importer, x: Value, row: Value, n: Value) -> Value:
    b, rank = im.builder, x.tile.rank
    starts = [n, *[b.index(0)] * (rank - 1)]
    row = b.op("reshape", row, shape=(1, *x.tile.shape[1:]))
    return b.op("dynamic_update_slice", x, row, *starts)


# --- the grid ---


# Which axes there are is checked where they are asked for (`trace.KnownGrid`).


@RULES.rule("pallasite_program_id")
def _program_id(im: Importer, eqn: Any) -> Value:
    if im.grid.is_index_map:
        raise KernelTypeError(
            "pl.program_id cannot be used in an index map",
            [("kernel", im.kernel_name)],
            im.where,
            "the grid indices are the index map's arguments",
        )
    return im.grid.ids[eqn.params["axis"]]


@RULES.rule("pallasite_num_programs")
def _num_programs(im: Importer, eqn: Any) -> Value:
    size = im.grid.sizes[eqn.params["axis"]]
    return size if isinstance(size, Value) else im.builder.index(size)


@RULES.rule("dim_as_value", params="dim")
def _symbolic_size(im: Importer, eqn: Any) -> Value:
    """A size that `jax.export` leaves open is a value from outside the kernel."""
    size = eqn.params["dim"]
    if size not in im.open_sizes:
        im.open_sizes[size] = jnp.asarray(size, jnp.int32)
    dtype = tile_type(eqn.outvars[0].aval, im.where).dtype
    return im.builder.cast(im.captured(im.open_sizes[size]), dtype)


@RULES.rule("axis_index", params="axis_name")
def _axis_index(im: Importer, eqn: Any) -> Value:
    """An axis of the kernel's own mesh is a program id; one of an enclosing
    shard_map is a value from outside the kernel."""
    name = eqn.params["axis_name"]
    if name in im.mesh_axes:
        return im.mesh_axes[name]
    return im.captured(jax.lax.axis_index(name), **_place_in_mesh(name))


def _place_in_mesh(name: Hashable) -> dict[str, tuple[int, int, int]]:
    """A note for backends whose devices know their numbers: which part of it this is.

    How many devices there are, how many of them with the same place along the axis
    follow each other, and the places. Copies to devices need meshes that are manual.
    """
    mesh = jaxcompat.device_mesh()
    if mesh is None or set(mesh.manual_axes) != set(mesh.axis_names):
        return {}
    if name not in mesh.axis_names:
        return {}
    sizes = [mesh.shape[axis] for axis in mesh.axis_names]
    inner = prod(sizes[mesh.axis_names.index(name) + 1 :])
    return {"devices.mesh_axis": (prod(sizes), inner, mesh.shape[name])}


# --- promises and prints ---


@RULES.rule("pallasite_multiple_of")
def _multiple_of(im: Importer, eqn: Any, x: Value) -> Value:
    return im.builder.op("assume_multiple", x, multiple=eqn.params["multiple"])


@RULES.rule("pallasite_debug_print")
def _debug_print(im: Importer, eqn: Any, *values: Value) -> None:
    im.builder.emit("debug_print", *_read(im, values), format=eqn.params["format"])


@RULES.rule("debug_print", params=ANY)
def _jax_debug_print(im: Importer, eqn: Any, *values: Value) -> None:
    """Fields given by name become positional ones."""
    p = eqn.params
    if not isinstance(p.get("fmt"), str) or p.get("static_args"):
        raise im.unsupported(eqn, "only values in the kernel can be printed")
    args, kwargs = jax.tree.unflatten(p["in_tree"], _read(im, values))
    fmt, fields = positional_fields(p["fmt"])
    ordered = [args[f] if isinstance(f, int) else kwargs[f] for f in fields]
    im.builder.emit("debug_print", *ordered, format=fmt)


def _read(im: Importer, values: Sequence[Value]) -> list[Value]:
    """What is to be printed of a ref is what it holds."""
    return [im.builder.load(v) if v.is_ref else v for v in values]


@RULES.rule("debug_callback", "io_callback", "pure_callback", params=ANY)
def _callback(im: Importer, eqn: Any, *values: Value) -> None:
    raise im.unsupported(eqn, "a kernel cannot call Python; use pl.debug_print")


@RULES.rule("check", params="err_tree debug")
def _checkify_check(im: Importer, eqn: Any, *values: Value) -> None:
    """`checkify.check` inside a kernel: of each kind of error in it, one check."""
    for failed, message, fields in jaxcompat.errors_in_check(eqn.params, values):
        fmt, names = positional_fields(message)
        args, kwargs = fields
        shown = [args[n] if isinstance(n, int) else kwargs[n] for n in names]
        ok = im.builder.not_(failed)
        if not all(isinstance(value, Value) for value in shown):
            shown = []  # a whole tree of values in one field
        im.builder.emit("debug_check", ok, *shown, message=fmt if shown else message)


@RULES.rule("pallasite_debug_check")
def _debug_check(im: Importer, eqn: Any, ok: Value) -> None:
    if ok.tile.rank:
        axes = tuple(range(ok.tile.rank))
        ok = im.builder.op("reduce", ok, kind="and", axes=axes)
    im.builder.emit("debug_check", ok, message=str(eqn.params["message"]))


@RULES.rule("pallasite_delay")
def _delay(im: Importer, eqn: Any, nanos: Value) -> None:
    im.builder.emit("delay", nanos)


# --- an inner pipeline (emit_pipeline) ---


@RULES.rule("pallasite_pipeline")
def _pipeline(im: Importer, eqn: Any, *args: Value) -> None:
    plan = eqn.params["plan"]
    plan.emit(im, eqn)
