"""Rewriting kernels: walk and rebuild, substitute, clone, clean up, apply patterns.

Nodes are immutable, so every function here returns new nodes, or the very same object
where nothing changed (test with `new is old`). A rewrite function gets one op and a
`Rewriter` to build replacements; `passes/normal/canonicalize.py` is a table of such
functions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import TypeVar

from pallasite.errors import InternalError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, table
from pallasite.ir.text import attr_text

Node = TypeVar("Node", Kernel, Block)


class Rewriter(Builder):
    """A Builder that also records which op defined each value seen so far."""

    def __init__(self, producers: dict[Value, Op]):
        super().__init__()
        self.producers = producers

    def producer(self, value: Value, name: str | None = None) -> Op | None:
        """The op that defines `value`, if any (and, if given, only if named `name`)."""
        op = self.producers.get(value)
        return op if op is None or name in (None, op.name) else None


# None keeps the op; otherwise one value per result replaces it.
Rewrite = Callable[[Op, Rewriter], Sequence[Value] | Value | None]
Pattern = tuple[str, Rewrite]  # op name or "*", what to do with such an op


def map_ops(node: Node, rewrite: Rewrite, before: Sequence[Op] = ()) -> Node:
    """Rebuild with each op replaced as `rewrite` says, inner ops before outer ones.

    The operands and regions of the ops `rewrite` gets are already rewritten. The ops it
    emits take the place of the original. `before`: the ops in front of a block, as
    producers of the values it uses.
    """
    mapper = _Mapper(rewrite, before)
    if isinstance(node, Kernel):
        body = mapper.block(node.body)
        return node if body is node.body else node.with_(body=body)
    return mapper.block(node)


class _Mapper:
    def __init__(self, rewrite: Rewrite, before: Sequence[Op]):
        self.rewrite = rewrite
        self.replaced: dict[Value, Value] = {}
        self.builder = Rewriter({v: op for op in before for v in op.results})

    def block(self, block: Block) -> Block:
        ops: list[Op] = []
        for op in block.ops:
            ops += self.op(op)
        yields = _mapped(block.yields, self.replaced)
        return with_ops(block, ops, yields)

    def op(self, op: Op) -> list[Op]:
        op = _with_operands(op, _mapped(op.operands, self.replaced))
        if op.regions:
            op = with_regions(op, [self.block(r) for r in op.regions])
        builder = self.builder
        builder.ops, builder.loc = [], op.loc
        made = self.rewrite(op, builder)
        if made is None:
            made_ops = [op]
        else:
            results = (made,) if isinstance(made, Value) else tuple(made)
            self.replaced.update(zip(op.results, results, strict=True))
            made_ops = builder.ops
        for each in made_ops:
            for value in each.results:
                builder.producers[value] = each
        return made_ops


def apply_patterns(
    kernel: Kernel, patterns: Iterable[Pattern], limit: int = 20
) -> Kernel:
    """Apply patterns until none matches.

    For each op, the patterns for its name are tried in order, then those for "*"; the
    first that returns values wins.

    Raises:
        InternalError: patterns still match after `limit` rounds (they undo each other).
    """
    by_name: dict[str, list[Rewrite]] = {}
    for name, rewrite in patterns:
        by_name.setdefault(name, []).append(rewrite)
    anywhere = by_name.pop("*", [])
    tried = {name: [*fns, *anywhere] for name, fns in by_name.items()}
    matched = ""

    def first_match(op: Op, builder: Rewriter) -> Sequence[Value] | Value | None:
        nonlocal matched
        for rewrite in tried.get(op.name, anywhere):
            made = rewrite(op, builder)
            if made is not None:
                matched = f"{getattr(rewrite, '__name__', rewrite)} on {op.name}"
                return made
            builder.ops.clear()  # ops of a rejected rewrite
        return None

    for _ in range(limit):
        new = map_ops(kernel, first_match)
        if new is kernel:
            return kernel
        kernel = new
    raise InternalError(
        f"patterns still match after {limit} iterations", [("last match", matched)]
    )


def substitute(block: Block, mapping: Mapping[Value, Value]) -> Block:
    """Replace uses of values, also in nested regions; definitions stay."""
    ops = [
        with_regions(
            _with_operands(op, _mapped(op.operands, mapping)),
            [substitute(r, mapping) for r in op.regions],
        )
        for op in block.ops
    ]
    yields = _mapped(block.yields, mapping)
    return with_ops(block, ops, yields)


def clone(block: Block, mapping: Mapping[Value, Value] | None = None) -> Block:
    """A copy with fresh values throughout; `mapping` replaces free values."""
    return _clone(block, dict(mapping or {}))


def _clone(block: Block, fresh: dict[Value, Value]) -> Block:
    params = _fresh(block.params, fresh)
    ops: list[Op] = []
    for op in block.ops:
        operands = _mapped(op.operands, fresh)
        regions = tuple(_clone(r, fresh) for r in op.regions)
        results = _fresh(op.results, fresh)
        ops.append(op.with_(operands=operands, results=results, regions=regions))
    return Block(params, tuple(ops), _mapped(block.yields, fresh))


def _fresh(values: tuple[Value, ...], fresh: dict[Value, Value]) -> tuple[Value, ...]:
    made = tuple(Value(v.type, v.name) for v in values)
    fresh.update(zip(values, made, strict=True))
    return made


def replace_ops(
    block: Block, replacement: Callable[[Op], Iterable[Op] | None]
) -> Block:
    """The block with other ops in place of some, in regions too; None keeps an op."""
    ops: list[Op] = []
    for op in block.ops:
        new = replacement(op)
        if new is None:
            regions = [replace_ops(region, replacement) for region in op.regions]
            new = (with_regions(op, regions),)
        ops += new
    return with_ops(block, ops)


def inline(builder: Builder, block: Block, args: Sequence[Value]) -> tuple[Value, ...]:
    """Emit a copy of the block's ops with `args` as parameters; gives its yields."""
    mapping = dict(zip(block.params, args, strict=True))
    copy = clone(Block((), block.ops, block.yields), mapping)
    builder.ops += copy.ops
    return copy.yields


def users_of(block: Block) -> dict[Value, list[Op]]:
    """The ops that use each value, one entry per use, including uses in regions."""
    users: dict[Value, list[Op]] = defaultdict(list)
    for op in walk(block):
        for value in (*op.operands, *(v for r in op.regions for v in r.yields)):
            users[value].append(op)
    return users


def uses(op: Op, value: Value) -> bool:
    """Whether the op, or one nested in it, has the value as an operand or yields it."""
    return value in op.operands or any(
        value in region.yields or any(uses(inner, value) for inner in region.ops)
        for region in op.regions
    )


def producers_of(block: Block) -> dict[Value, Op]:
    """The op that defines each value, including those in regions."""
    return {v: op for op in walk(block) for v in op.results}


# --- what an op may do to memory ---


def writes(op: Op) -> bool:
    """Whether the op, or one nested in it, writes memory or has external effects."""
    if op.regions:
        return any(writes(inner) for region in op.regions for inner in region.ops)
    return op.name != "alloc" and table()[op.name].effect is Effect.WRITE


def is_pure(op: Op) -> bool:
    """Whether the op only computes: it has no regions and accesses no memory."""
    return not op.regions and table()[op.name].effect is Effect.PURE


def is_elementwise(op: Op) -> bool:
    """Whether each element of the result depends on those at its own place only.

    A bitcast to another width adds or drops a dimension, so it is not.
    """
    if not table()[op.name].elementwise or len(op.results) != 1:
        return False
    shape, shapes = op.result.type.shape, {v.type.shape for v in op.operands}
    return shape in shapes and shapes <= {(), shape}


def is_removable(op: Op) -> bool:
    """Whether the op can be removed if its results are unused."""
    # A `while` may not terminate; `pipeline` and the rest have no results to be unused.
    may_stop = all(inner.name != "while" for r in op.regions for inner in walk(r))
    return op.name not in ("while", "pipeline") and may_stop and not writes(op)


def dead_code(kernel: Kernel) -> Kernel:
    """Dead-code elimination: removes effect-free ops whose results are unused, and
    such results of branches."""
    body = _live_block(kernel.body, set())
    return kernel if body is kernel.body else kernel.with_(body=body)


def _live_block(block: Block, live: set[Value]) -> Block:
    """`live`: values used later; the block's own uses are added to it."""
    live.update(block.yields)
    kept: list[Op] = []
    for op in reversed(block.ops):
        if live.isdisjoint(op.results) and is_removable(op):
            continue
        if op.name == "cond":
            op = _live_results(op, live)
        if op.regions:
            op = with_regions(op, [_live_block(r, live) for r in op.regions])
        live.update(op.operands)
        kept.append(op)
    kept.reverse()
    return with_ops(block, kept)


def _live_results(op: Op, live: set[Value]) -> Op:
    """A branch without results that nothing uses."""
    kept = [n for n, value in enumerate(op.results) if value in live]
    if len(kept) == len(op.results):
        return op
    regions = tuple(
        Block(r.params, r.ops, tuple(r.yields[n] for n in kept)) for r in op.regions
    )
    return op.with_(results=tuple(op.results[n] for n in kept), regions=regions)


def common_subexpressions(kernel: Kernel) -> Kernel:
    """CSE: of pure ops, and of loads with no write in between."""
    body = _Shared().block(kernel.body)
    return kernel if body is kernel.body else kernel.with_(body=body)


_Key = tuple[object, ...]


class _Shared:
    """Available expressions by scope: inner regions see those of outer ones.

    The regions of a pipeline are an exception, because backends turn them into
    functions: CSE must not make them use further values of the enclosing code.
    """

    def __init__(self) -> None:
        self.available: dict[_Key, Op] = {}
        self.replaced: dict[Value, Value] = {}
        self.writes_seen = 0  # part of a load's key: a write invalidates earlier loads

    def block(self, block: Block) -> Block:
        outer, self.available = self.available, dict(self.available)
        ops = [op for op in map(self.op, block.ops) if op is not None]
        yields = _mapped(block.yields, self.replaced)
        self.available = outer
        return with_ops(block, ops, yields)

    def op(self, op: Op) -> Op | None:
        op = _with_operands(op, _mapped(op.operands, self.replaced))
        if op.regions:
            return self.with_regions(op)
        effect = table()[op.name].effect
        if effect is Effect.WRITE:
            self.writes_seen += op.name != "alloc"
            return op
        if effect is Effect.READ and op.name != "load":
            return op  # a semaphore may change without a write here
        # By text: 0.0 and -0.0, 1 and True compare equal in Python but differ here.
        attrs = tuple((k, attr_text(op.attrs[k])) for k in sorted(op.attrs))
        epoch = self.writes_seen if effect is Effect.READ else 0
        key = (op.name, op.operands, attrs, epoch)
        same = self.available.setdefault(key, op)
        if same is op:
            return op
        self.replaced.update(zip(op.results, same.results, strict=True))
        return None

    def with_regions(self, op: Op) -> Op:
        # Counted before and after: the regions of a loop run again after its writes.
        changes = writes(op)
        self.writes_seen += changes
        regions: list[Block] = []
        outer = self.available
        for region in op.regions:
            self.available = {} if op.name == "pipeline" else outer
            regions.append(self.block(region))
            self.writes_seen += changes
        self.available = outer
        return with_regions(op, regions)


# --- rebuilding only what changed ---


def with_ops(
    block: Block, ops: Sequence[Op], yields: tuple[Value, ...] | None = None
) -> Block:
    """The block with these ops, maybe yields; the very same if they are its own."""
    yields = block.yields if yields is None else yields
    is_same = len(ops) == len(block.ops) and all(map(is_, ops, block.ops))
    if is_same and yields is block.yields:
        return block
    return Block(block.params, tuple(ops), yields)


def _mapped(
    values: tuple[Value, ...], mapping: Mapping[Value, Value]
) -> tuple[Value, ...]:
    if not mapping or mapping.keys().isdisjoint(values):
        return values
    return tuple(mapping.get(v, v) for v in values)


def _with_operands(op: Op, operands: tuple[Value, ...]) -> Op:
    return op if operands is op.operands else op.with_(operands=operands)


def used_values(block: Block) -> list[Value]:
    """Every value that a block and its regions use, in order, with repetitions."""
    found = [v for op in walk(block) for v in op.operands]
    found += [v for op in walk(block) for region in op.regions for v in region.yields]
    return [*found, *block.yields]


def with_regions(op: Op, regions: Sequence[Block]) -> Op:
    """The op with these regions; the very same one if they are its own."""
    if not regions or all(a is b for a, b in zip(regions, op.regions, strict=True)):
        return op
    return op.with_(regions=tuple(regions))
