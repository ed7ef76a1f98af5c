"""Inserts expressions into a kernel: windows of leaves, code at loads and stores.

An operand's loads become loads of the leaves followed by the expression; a result's
stores become the expression of what was stored. If a kernel does more with a block than
load or store it whole, the block becomes memory of the kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pallasite import jaxcompat
from pallasite.errors import NotFusible
from pallasite.fusion.block_rules import is_squeezed, size_of
from pallasite.fusion.complete import is_surely_stored, shows_every_block
from pallasite.fusion.graph import Atom
from pallasite.fusion.regions import Expression, index_jaxpr
from pallasite.importer.importer import Captures, Importer
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.rewrite import inline, map_ops, substitute, users_of
from pallasite.ir.roles import Pipeline, Shown
from pallasite.language.specs import Element
from pallasite.passes.analysis.grid import WindowMoves, analyze
from pallasite.passes.analysis.memory import VIEWS
from pallasite.passes.lower.place_windows import place_windows


def pipeline_of(kernel: Kernel) -> Pipeline:
    """The one pipeline of a kernel that fusion can change.

    Raises:
        NotFusible: the kernel has another form.
    """
    found = [op for op in kernel.body.ops if op.name == "pipeline"]
    others = {op.name for op in kernel.body.ops} - {"pipeline", "alloc", "load"}
    if kernel.level != "tile" or len(found) != 1 or others:
        raise NotFusible("the kernel is not a single grid of whole-block operations")
    pipeline = Pipeline.of(found[0])
    if {"subcore_parallel", "cluster"} & set(pipeline.semantics):
        raise NotFusible("its programs run on subcores or in clusters")
    return pipeline


def shown_of(kernel: Kernel, param: Value, mode: str) -> Shown:
    """The window of an operand or result that nothing else uses.

    Raises:
        NotFusible: it has no such window.
    """
    pipeline = pipeline_of(kernel)
    found = [s for s in pipeline.shown if s.array is param]
    uses = users_of(kernel.body)[param]
    if len(found) != 1 or len(uses) != 1:
        raise NotFusible("the kernel accesses it without a single BlockSpec window")
    (shown,) = found
    window = shown.window
    if window.mode != mode or window.space not in ("block", "vmem"):
        raise NotFusible("its blocks are not in the default memory space")
    if any(d.kind == "bounded" or d.padding != (0, 0) for d in window.dims):
        raise NotFusible("its blocks have different sizes")
    if window.fill is not None and window.may_hang_over(param.ref.shape):
        raise NotFusible("its blocks extend past the edge and have a fill value")
    return shown


def dims_of(window: Window) -> list[Any]:
    """A window's block dimensions as in a BlockSpec."""
    kinds: dict[str, Callable[[int], Any]] = {
        "blocked": int,
        "squeezed": lambda n: None,
        "element": Element,
    }
    return [kinds[d.kind](d.size) for d in window.dims]


def _window(dims: Sequence[Any], mode: str, like: Window) -> Window:
    def dim(d: Any) -> BlockDim:
        if is_squeezed(d):
            return BlockDim(1, "squeezed")
        kind = "element" if isinstance(d, Element) else "blocked"
        return BlockDim(size_of(d), kind)

    return Window(tuple(map(dim, dims)), mode, like.space, None, like.buffers)


class _Fuser:
    """What both directions of fusion share, for one window of a kernel."""

    def __init__(self, kernel: Kernel, shown: Shown, expression: Expression):
        from pallasite.importer.rules import RULES

        self.kernel, self.shown, self.expression = kernel, shown, expression
        self.pipeline = pipeline_of(kernel)
        self.im = Importer(kernel.name, Captures(), RULES)
        self.traced = expression.traced()
        self.params: dict[Atom, Value] = {}  # of leaves
        self.blocks: dict[Atom, Value] = {}  # what the body loads leaves from
        self.windows: list[Shown] = []
        # Index maps may read scalars, so those come first.
        leaves = list(enumerate(expression.leaves))
        for n, leaf in sorted(leaves, key=lambda each: bool(each[1].shape)):
            self._add_leaf(leaf, n)

    def _add_leaf(self, leaf: Atom, n: int) -> None:
        type_, blocks = self.expression.block_type(leaf), self.expression.blocks[leaf]
        dtype = T.dtype_of(leaf.aval.dtype)
        assert dtype is not None
        name = f"{self.shown.block.name or 'block'}_{n}"
        if blocks is None:
            value = Value(T.RefType((), dtype, "smem"), name)
            self.params[leaf] = self.blocks[leaf] = value
            return
        window = _window(blocks.dims, "in", self.shown.window)
        array = Value(T.RefType(leaf.shape, dtype, "any"), name)
        block = Value(T.RefType(type_.shape, dtype, window.space), name)
        self.windows.append(Shown(array, window, self.index_map(leaf), block))
        self.params[leaf], self.blocks[leaf] = array, block

    def index_map(self, value: Atom) -> Block:
        """The index map of a value, derived from the window's."""
        blocks = self.expression.blocks[value]
        assert blocks is not None
        old = self.shown.index_map
        params = tuple(Value(p.type, p.name) for p in old.params)
        with self.im.nested() as builder:
            indices = inline(builder, old, params)
            scalars = [self._number(builder, s) for s in self.expression.scalars]
            jaxpr = index_jaxpr(blocks, len(indices), len(scalars))
            found = self.im.run(jaxpr, [*indices, *scalars])
            return builder.block(params, found)

    def _number(self, builder: Builder, scalar: Atom) -> Value:
        return builder.cast(builder.load(self.params[scalar]), T.I32)

    def emit(self, builder: Builder, given: Sequence[Value] = ()) -> list[Value]:
        """Emit the expression at a point in the body."""
        jaxpr, _ = jaxcompat.opened(self.traced)
        rank = self.expression.rank
        indices = jaxpr.invars[:rank]
        used = {v for eqn in jaxpr.eqns for v in eqn.invars if not hasattr(v, "val")}
        used.update(v for v in jaxpr.outvars if not hasattr(v, "val"))
        if used & set(indices):
            args = list(inline(builder, self.shown.index_map, self.pipeline.ids))
        else:
            args = [builder.index(0)] * rank if rank else []
        args += [builder.load(self.blocks[leaf]) for leaf in self.expression.leaves]
        self.im.builder, before = builder, self.im.builder
        made = self.im.run(self.traced, [*args, *given])
        self.im.builder = before
        if self.im.captures.values:
            raise NotFusible("it uses a table of constants")
        return made

    def rebuilt(
        self,
        shown: Sequence[Shown],
        body: Block,
        params: Sequence[Value],
        num_outputs: int,
        aliases: Sequence[tuple[int, int]],
        allocated: Sequence[Op] = (),
    ) -> Kernel:
        blocks = tuple(s.block for s in shown)
        body = replace(body, params=(*self.pipeline.ids, *blocks))
        made = self.pipeline.showing(shown, body).to_op()
        ops: list[Op] = []
        for op in self.kernel.body.ops:
            ops += [*allocated, made] if op is self.pipeline.op else [op]
        return self.kernel.with_(
            params=tuple(params),
            body=Block((), tuple(ops)),
            num_outputs=num_outputs,
            aliases=tuple(aliases),
        )


def _uses(body: Block, block: Value) -> list[Op]:
    return [op for op in walk(body) if block in op.operands]


# --- operands ---


def with_producers(kernel: Kernel, number: int, expression: Expression) -> Kernel:
    """The kernel with an operand replaced by the leaves of an expression.

    Raises:
        NotFusible: the kernel does more than read the operand's blocks.
    """
    param = kernel.inputs[number]
    if param in kernel.aliased_results:
        raise NotFusible("it aliases a result")
    kernel = place_windows(kernel)  # clamps indices to this operand's range
    shown = shown_of(kernel, param, "in")
    fuser = _Fuser(kernel, shown, expression)
    body = _body_with_producers(fuser, shown.block)
    windows: list[Shown] = []
    for each in fuser.pipeline.shown:
        windows += fuser.windows if each.array is param else [each]
    added = [fuser.params[leaf] for leaf in expression.leaves]
    inputs = kernel.inputs
    params = [*inputs[:number], *added, *inputs[number + 1 :], *kernel.outputs]
    more = len(added) - 1
    aliases = [(i + more if i > number else i, o) for i, o in kernel.aliases]
    return fuser.rebuilt(windows, body, params, kernel.num_outputs, aliases)


def _body_with_producers(fuser: _Fuser, block: Value) -> Block:
    body = fuser.pipeline.body
    uses = _uses(body, block)
    if any(op.name not in ("load", *VIEWS) for op in uses):
        raise NotFusible("the kernel does more than read its blocks")
    if all(op.name == "load" and Access.of(op).is_whole for op in uses):

        def rewrite(op: Op, builder: Builder) -> Sequence[Value] | None:
            is_load = op.name == "load" and op.operands[0] is block
            return fuser.emit(builder) if is_load else None

        return map_ops(body, rewrite)
    builder = Builder(fuser.kernel.loc)
    memory = T.RefType(block.ref.shape, block.ref.dtype, "vmem")
    (copy,) = builder.emit("alloc", names=[block.name], type=memory)
    (made,) = fuser.emit(builder)
    builder.store(copy, made)
    inner = substitute(body, {block: copy})
    return replace(inner, ops=(*builder.ops, *inner.ops))


# --- results ---


def with_consumers(
    kernel: Kernel, number: int, expression: Expression, keeps: bool
) -> Kernel:
    """The kernel with a result replaced by an expression of it.

    Args:
        kernel: the kernel.
        number: the result's number.
        expression: the expression of that result.
        keeps: whether the result itself is also needed.

    Raises:
        NotFusible: it is not known when a block of the result is complete.
    """
    param = kernel.outputs[number]
    if param in kernel.aliased_results.values():
        raise NotFusible("it aliases an operand")
    kernel = place_windows(kernel)  # clamps indices to this result's range
    shown = shown_of(kernel, param, "out")
    fuser = _Fuser(kernel, shown, expression)
    if not shows_every_block(fuser.pipeline, shown):
        raise NotFusible("the grid may not visit all of its blocks")
    outputs = [_output(fuser, n) for n in range(len(expression.results))]
    body, allocated = _body_with_consumers(fuser, shown.block, outputs, keeps)
    windows: list[Shown] = []
    for each in fuser.pipeline.shown:
        is_it = each.array is param
        windows += [*fuser.windows, *outputs] if is_it else []
        windows += [each] if keeps or not is_it else []
    added = [fuser.params[leaf] for leaf in expression.leaves]
    made = [s.array for s in outputs] + ([param] if keeps else [])
    results = [*kernel.outputs[:number], *made, *kernel.outputs[number + 1 :]]
    more = len(made) - 1
    aliases = [(i, o + more if o > number else o) for i, o in kernel.aliases]
    params = [*kernel.inputs, *added, *results]
    return fuser.rebuilt(windows, body, params, len(results), aliases, allocated)


def _output(fuser: _Fuser, n: int) -> Shown:
    value = fuser.expression.results[n]
    blocks = fuser.expression.blocks[value]
    assert blocks is not None
    dtype = T.dtype_of(value.aval.dtype)
    assert dtype is not None
    name = fuser.shown.block.name or "out"
    name = f"{name}_out{n}" if n else f"{name}_out"
    window = _window(blocks.dims, "out", fuser.shown.window)
    array = Value(T.RefType(value.shape, dtype, "any"), name)
    shape = fuser.expression.block_type(value).shape
    block = Value(T.RefType(shape, dtype, window.space), name)
    return Shown(array, window, fuser.index_map(value), block)


def _body_with_consumers(
    fuser: _Fuser, block: Value, outputs: Sequence[Shown], keeps: bool
) -> tuple[Block, list[Op]]:
    """The body, and the memory it needs."""
    body = fuser.pipeline.body
    uses = _uses(body, block)
    if any(op.name not in ("load", "store", *VIEWS) for op in uses):
        raise NotFusible("the kernel does more than read and write its blocks")

    def finish(builder: Builder, value: Value) -> None:
        for shown, made in zip(outputs, fuser.emit(builder, [value]), strict=True):
            builder.store(shown.block, made)

    is_stored_whole = all(op.name == "store" and Access.of(op).is_whole for op in uses)
    staying = {*range(len(fuser.pipeline.grid))} - _moves(fuser).axes
    if is_stored_whole and is_surely_stored(fuser.pipeline, block, staying):
        # Only a block's last store counts, for the expression as for the block.

        def rewrite(op: Op, builder: Builder) -> Sequence[Value] | None:
            if op.name != "store" or op.operands[0] is not block:
                return None
            value = Access.of(op).value
            assert value is not None
            if keeps:
                builder.store(block, value)
            finish(builder, value)
            return ()

        return map_ops(body, rewrite), []
    waiting = _axes_to_wait_for(fuser)
    allocated: list[Op] = []
    if not keeps:
        builder = Builder(fuser.kernel.loc)
        memory = T.RefType(block.ref.shape, block.ref.dtype, "vmem")
        (copy,) = builder.emit("alloc", names=[block.name], type=memory)
        allocated, body = builder.ops, substitute(body, {block: copy})
        block = copy
    builder = Builder(fuser.kernel.loc)
    inner = Builder(fuser.kernel.loc)
    finish(inner, inner.load(block))
    if waiting:
        which = builder.cast(_is_last(fuser.pipeline, waiting, builder), T.I32)
        builder.emit("cond", which, regions=(Block(), inner.block()))
    else:
        builder.ops += inner.ops
    return replace(body, ops=(*body.ops, *builder.ops)), allocated


def _moves(fuser: _Fuser) -> WindowMoves:
    number = [s.array for s in fuser.pipeline.shown].index(fuser.shown.array)
    return analyze(fuser.kernel).windows[number]


def _axes_to_wait_for(fuser: _Fuser) -> list[int]:
    """The axes at whose last step a block of the result is complete.

    Raises:
        NotFusible: programs revisit a block after seeing others.
    """
    moves = _moves(fuser)
    several = [a for a, n in enumerate(fuser.pipeline.grid) if n != 1]
    waiting = [a for a in several if a not in moves.apart]
    others = [a for a in several if a in moves.apart]
    if set(waiting) & moves.axes or any(a < max(others, default=-1) for a in waiting):
        raise NotFusible("programs revisit a block, so it is complete too late")
    return waiting


def _is_last(pipeline: Pipeline, axes: Sequence[int], builder: Builder) -> Value:
    last: Value | None = None
    for axis in axes:
        size = pipeline.sizes[axis]
        if isinstance(size, int):
            limit = builder.index(size - 1)
        else:
            limit = builder.sub(size, builder.index(1))
        here = builder.eq(pipeline.ids[axis], limit)
        last = here if last is None else builder.and_(last, here)
    assert last is not None
    return last
