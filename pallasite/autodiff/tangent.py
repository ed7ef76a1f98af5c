"""The tangent kernel: a kernel's directional derivative, as a kernel.

An IR -> IR transformation. Every active ref (see `activity.py`) gets a second one for
its tangent, and so does every window, allocation and semaphore over it; loads, stores,
copies and carried values are duplicated next to their originals, which stay as they
are. `op_derivative.py` handles pure ops. The result runs like any other kernel.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pallasite.autodiff.activity import Activity, activity
from pallasite.autodiff.drop_unread_outputs import without_unread
from pallasite.autodiff.op_derivative import is_pure, jvp_ops
from pallasite.errors import UnsupportedError
from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, Window
from pallasite.ir.rewrite import clone
from pallasite.ir.roles import Loop, Pipeline, Shown, While
from pallasite.ir.rule_table import RuleTable


@dataclass(frozen=True)
class TangentKernel:
    """A kernel from (inputs, tangents of inputs) to tangents of outputs.

    Outputs that it reads back itself precede those tangents, `skipped` of them.
    """

    kernel: Kernel
    inputs: tuple[int, ...]  # whose tangents it takes; may be more than the active ones
    outputs: tuple[int, ...]  # whose tangents it returns

    @property
    def skipped(self) -> int:
        return self.kernel.num_outputs - len(self.outputs)


class NoTangentKernel(UnsupportedError):
    """A kernel does something whose derivative is not a kernel; says what and where."""


@functools.lru_cache(maxsize=1024)
def tangent_kernel(kernel: Kernel, active: tuple[bool, ...]) -> TangentKernel:
    """The tangent kernel for `active` inputs.

    Raises:
        NoTangentKernel: an op on active values has no derivative in the language.
    """
    found = activity(kernel, active)
    try:
        return _Doubling(found).run()
    except NoTangentKernel:
        raise
    except UnsupportedError as error:
        raise NoTangentKernel(error.what, error.facts, error.at, error.fix) from None


class _Doubling:
    """One transformation: `tangents` maps each active value to its tangent's value.

    An active tile may have no entry: its tangent turned out to be zero.
    """

    def __init__(self, found: Activity):
        self.found, self.kernel = found, found.kernel
        self.tangents: dict[Value, Value] = {}
        self.builder = Builder()

    def run(self) -> TangentKernel:
        kernel, found = self.kernel, self.found
        inputs = [self.twin(kernel.inputs[n]) for n in found.inputs]
        outputs = [self.twin(kernel.outputs[n]) for n in found.outputs]
        params = (*kernel.inputs, *inputs, *kernel.outputs, *outputs)
        body = self.block(kernel.body)
        made = kernel.with_(
            name=f"{kernel.name}_jvp",
            params=params,
            body=body,
            num_outputs=kernel.num_outputs + len(outputs),
            aliases=self.aliases(),
        )
        made = without_unread(made, kernel.outputs)
        return TangentKernel(made, found.inputs, found.outputs)

    def aliases(self) -> tuple[tuple[int, int], ...]:
        """The tangents of an operand and result that alias also alias."""
        kernel, found = self.kernel, self.found
        doubled = [
            (
                len(kernel.inputs) + found.inputs.index(source),
                kernel.num_outputs + found.outputs.index(target),
            )
            for source, target in kernel.aliases
            if source in found.inputs
        ]
        return (*kernel.aliases, *doubled)

    # --- values ---

    def twin(self, value: Value) -> Value:
        """A new value for the tangent of `value`, of the same type."""
        made = Value(value.type, f"{value.name}_t" if value.name else "")
        self.tangents[value] = made
        return made

    def tangent(self, value: Value | None) -> Value | None:
        return None if value is None else self.tangents.get(value)

    def full_tangent(self, value: Value) -> Value:
        """The tangent of a float tile, with explicit zeros."""
        return self.tangents.get(value) or self.builder.like(0, value)

    def active_among(self, values: Sequence[Value]) -> list[Value]:
        return [v for v in values if self.found.is_active(v)]

    # --- blocks and ops ---

    def block(
        self,
        block: Block,
        params: Sequence[Value] | None = None,
        yields: Sequence[Value] = (),
    ) -> Block:
        """The duplicated block; also yields the tangents of `yields`."""
        outer, self.builder = self.builder, Builder()
        for op in block.ops:
            self.builder.loc = op.loc
            self.op(op)
        extra = [self.full_tangent(v) for v in yields]
        params = block.params if params is None else params
        made = self.builder.block(params, (*block.yields, *extra))
        self.builder = outer
        return made

    def keep(self, op: Op) -> None:
        self.builder.ops.append(op)

    def op(self, op: Op) -> None:
        rule = _RULES.get(op.name)
        if rule is not None:
            rule(self, op)
            return
        self.keep(op)
        if not self.active_among((*op.operands, *op.results)):
            return
        if not is_pure(op):
            raise self.refuse(op)
        tangents = [self.tangent(v) for v in op.operands]
        made = jvp_ops(self.builder, op, op.operands, op.results, tangents)
        self.name_all(op.results, made)

    def name_all(
        self, values: Sequence[Value], tangents: Sequence[Value | None]
    ) -> None:
        for value, tangent in zip(values, tangents, strict=True):
            if tangent is not None:
                self.tangents[value] = tangent

    def refuse(self, op: Op, what: str = "") -> NoTangentKernel:
        return NoTangentKernel(
            f"{what or op.name} is not supported by forward-mode differentiation",
            [("kernel", self.kernel.name)],
            op.loc,
        )


_RULES = RuleTable()


# --- memory ---


@_RULES.rule("alloc")
def _alloc(d: _Doubling, op: Op) -> None:
    d.keep(op)
    if d.found.is_active(op.result):
        d.tangents[op.result] = d.builder.op("alloc", type=op.attrs["type"])


@_RULES.rule("subview", "reshape_view", "transpose_view", "block_view")
def _view(d: _Doubling, op: Op) -> None:
    d.keep(op)
    ref = d.tangent(op.operands[0])
    if ref is None:
        return
    attrs = dict(op.attrs)
    if op.name == "block_view":
        attrs["window"] = _tangent_window(attrs["window"])
    d.tangents[op.result] = d.builder.op(op.name, ref, *op.operands[1:], **attrs)


@_RULES.rule("bitcast_view")
def _bitcast_view(d: _Doubling, op: Op) -> None:
    if d.found.is_active(op.result):
        raise d.refuse(op, "a bitcast of a ref that has a derivative")
    d.keep(op)


@_RULES.rule("load")
def _load(d: _Doubling, op: Op) -> None:
    d.keep(op)
    access, result = Access.of(op), op.result
    ref, other = d.tangent(access.ref), d.tangent(access.other)
    if ref is not None:
        if access.other is not None:
            other = d.full_tangent(access.other)
        doubled = replace(access, ref=ref, other=other)
        operands = access_operands(doubled)
        d.tangents[result] = d.builder.op("load", *operands, **op.attrs)
    elif other is not None:
        assert access.mask is not None
        zero = d.builder.like(0, result)
        d.tangents[result] = d.builder.select(access.mask, zero, other)


@_RULES.rule("store")
def _store(d: _Doubling, op: Op) -> None:
    d.keep(op)
    access = Access.of(op)
    ref = d.tangent(access.ref)
    if ref is not None:
        assert access.value is not None
        doubled = replace(access, ref=ref, value=d.full_tangent(access.value))
        d.builder.emit("store", *access_operands(doubled), **op.attrs)


@_RULES.rule("atomic_rmw")
def _atomic(d: _Doubling, op: Op) -> None:
    """Addition and exchange are linear in the value and in the memory."""
    d.keep(op)
    access = Access.of(op)
    ref = d.tangent(access.ref)
    if ref is None:
        return
    if op.attrs["kind"] not in ("add", "xchg"):
        raise d.refuse(op, f"an atomic {op.attrs['kind']}")
    assert access.value is not None
    doubled = replace(access, ref=ref, value=d.full_tangent(access.value))
    old = d.builder.op("atomic_rmw", *access_operands(doubled), **op.attrs)
    d.tangents[op.result] = old


@_RULES.rule("copy_start", "copy_wait")
def _copy(d: _Doubling, op: Op) -> None:
    """A second copy; either all that one semaphore counts is duplicated, or nothing."""
    d.keep(op)
    if not d.active_among(op.operands[:2]):
        return
    if not op.operands[0].ref.dtype.is_float:
        raise d.refuse(op, "a semaphore shared by copies of floats and of integers")
    d.builder.emit(op.name, *(d.tangents[v] for v in op.operands), **op.attrs)


@_RULES.rule("sem_signal", "sem_wait", "sem_read", "delay")
def _signal(d: _Doubling, op: Op) -> None:
    """The program's own counts, which no copy of a tangent waits for."""
    d.keep(op)


@_RULES.rule("debug_print", "debug_check")
def _once(d: _Doubling, op: Op) -> None:
    """The kernel itself prints and checks; its tangent need not do so again."""


# --- tiles ---


@_RULES.rule("dot")
def _dot(d: _Doubling, op: Op) -> None:
    """The same matmul with one operand's tangent at a time, in the operands' types.

    JAX's derivative of the emulation would multiply both widened to f32: twice the
    memory, and on a GPU without the matrix units.
    """
    d.keep(op)
    lhs, rhs = op.operands
    pairs = [(d.tangent(lhs), rhs), (lhs, d.tangent(rhs))]
    terms = [
        d.builder.op("dot", x, y, **op.attrs)
        for x, y in pairs
        if x is not None and y is not None
    ]
    if terms:
        d.name_all(op.results, [functools.reduce(d.builder.add, terms)])


# --- control ---


@_RULES.rule("for")
def _for(d: _Doubling, op: Op) -> None:
    loop = Loop.of(op)
    active = [n for n, p in enumerate(loop.carried) if d.found.is_active(p)]
    initial = [d.full_tangent(loop.inits[n]) for n in active]
    twins = [d.twin(loop.carried[n]) for n in active]
    params = (*loop.body.params, *twins)
    inner = d.block(loop.body, params, [loop.yields[n] for n in active])
    results = [d.twin(op.results[n]) for n in active]
    new = loop.with_(
        inits=(*loop.inits, *initial), body=inner, results=(*op.results, *results)
    )
    d.keep(new.to_op())


@_RULES.rule("while")
def _while(d: _Doubling, op: Op) -> None:
    loop = While.of(op)
    condition, body = loop.condition, loop.body
    active = [n for n, p in enumerate(body.params) if d.found.is_active(p)]
    initial = [d.full_tangent(loop.inits[n]) for n in active]
    check = d.block(
        condition, (*condition.params, *(d.twin(condition.params[n]) for n in active))
    )
    twins = [d.twin(body.params[n]) for n in active]
    inner = d.block(body, (*body.params, *twins), [body.yields[n] for n in active])
    results = [d.twin(op.results[n]) for n in active]
    d.keep(
        op.with_(
            operands=(*loop.inits, *initial),
            results=(*op.results, *results),
            regions=(check, inner),
        )
    )


@_RULES.rule("cond")
def _cond(d: _Doubling, op: Op) -> None:
    active = [n for n, r in enumerate(op.results) if d.found.is_active(r)]
    regions = [d.block(r, yields=[r.yields[n] for n in active]) for r in op.regions]
    results = [d.twin(op.results[n]) for n in active]
    d.keep(op.with_(results=(*op.results, *results), regions=tuple(regions)))


@_RULES.rule("pipeline")
def _pipeline(d: _Doubling, op: Op) -> None:
    """Each active window is followed by one for its tangent, with the same map."""
    pipeline = Pipeline.of(op)
    shown: list[Shown] = []
    for each in pipeline.shown:
        shown.append(each)
        twin = d.tangent(each.array)
        if twin is not None:
            window, index_map = _tangent_window(each.window), clone(each.index_map)
            shown.append(Shown(twin, window, index_map, d.twin(each.block)))
    params = (*pipeline.ids, *(each.block for each in shown))
    d.keep(pipeline.showing(shown, d.block(pipeline.body, params)).to_op())


def _tangent_window(window: Window) -> Window:
    """The `fill` value past the edge is constant: its tangent is zero."""
    return window if window.fill is None else replace(window, fill=0.0)
