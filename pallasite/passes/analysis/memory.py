"""Which memory each ref aliases, and which refs ops read and write (static facts)."""

from collections.abc import Iterable, Mapping, Sequence

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import Effect, Use, names, table
from pallasite.ir.roles import Pipeline
from pallasite.ops.gpu import NOT_OUTSIDE

MAIN_MEMORY = frozenset({"any", "hbm", "host", "gmem"})
VIEWS = names(lambda row: Use.VIEW in row.uses)
# Ops that may run although their branch is not taken: cheap, and with derivatives that
# are finite wherever their operands are.
_FOLDABLE = {"constant", "iota", "broadcast_in_dim", "reshape", "cast", "load", "store"}
_FOLDABLE |= {"add", "sub", "mul", "neg", "max", "min", "select_n", "subview"}
_FOLDABLE |= {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}
_FOLD_LIMIT = 16
_FOLD_ELEMENTS = 1 << 20


def written_refs(op: Op) -> tuple[Value, ...]:
    """The refs that an op itself writes through.

    A pipeline writes back every block of an output.
    """
    if op.name == "pipeline":
        return _windowed(op, "out")
    return _used(op, Use.WRITE, Use.UPDATE)


def read_refs(op: Op) -> tuple[Value, ...]:
    """The refs that an op itself reads through."""
    if op.name == "pipeline":
        return _windowed(op, "in")
    return _used(op, Use.READ, Use.UPDATE)


def _used(op: Op, *wanted: Use) -> tuple[Value, ...]:
    """The ref operands that an op uses in one of these ways, by its row."""
    uses = table()[op.name].uses
    if not uses:
        return ()
    last = len(uses) - 1
    pairs = enumerate(op.operands)
    return tuple(v for n, v in pairs if v.is_ref and uses[min(n, last)] in wanted)


def is_access(op: Op) -> bool:
    """Whether an op reads or writes elements of a ref that an index selects."""
    return table()[op.name].indexed and op.name not in VIEWS


def _windowed(op: Op, mode: str) -> tuple[Value, ...]:
    shown = Pipeline.of(op).shown
    return tuple(each.array for each in shown if each.window.mode == mode)


def is_from_memory(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a number depends on memory."""
    op = made.get(value)
    if op is None or op.regions:
        return False
    return op.name == "load" or any(is_from_memory(v, made) for v in op.operands)


def root_among(producers: Mapping[Value, Op], ref: Value) -> Value:
    """The root of a ref, given the ops that made the refs.

    For code that is being rewritten; for finished code, `Roots` knows more.
    """
    while (op := producers.get(ref)) is not None and op.name in VIEWS:
        ref = op.operands[0]
    return ref


class Roots:
    """Root of every ref of a kernel: an operand, a result or an allocation.

    For a single block: also the refs that it captures, and its parameters. `parent`
    maps a view, or a pipeline's block, to the ref it is part of. Without `windows`, a
    block is a root too.
    """

    def __init__(self, code: Kernel | Block, windows: bool = True):
        self.parent: dict[Value, Value] = {}
        if isinstance(code, Kernel):
            same = ((code.outputs[o], code.inputs[i]) for i, o in code.aliases)
            self.parent.update(same)
            code = code.body
        self._written: dict[int, tuple[Value, ...]] = {}
        self._folds: dict[int, bool] = {}
        for op in walk(code):
            if op.name in VIEWS:
                self.parent[op.result] = op.operands[0]
            elif op.name == "pipeline" and windows:
                pipeline = Pipeline.of(op)
                self.parent.update(zip(pipeline.blocks, pipeline.arrays, strict=True))

    def of(self, ref: Value) -> Value:
        while ref in self.parent:
            ref = self.parent[ref]
        return ref

    def touched(self, op: Op) -> tuple[set[Value], set[Value]] | None:
        """The memory that an op loads and stores; None: it does more than that."""
        loaded, stored = set[Value](), set[Value]()
        for inner in walk(Block((), (op,))):
            effect = table()[inner.name].effect
            is_known = effect is Effect.PURE or inner.regions or inner.name == "alloc"
            if inner.name == "load":
                loaded.add(self.of(inner.operands[0]))
            elif inner.name == "store":
                stored.add(self.of(inner.operands[0]))
            elif inner.name == "pipeline" or not is_known:
                return None
        return loaded, stored

    def reached(self, refs: Iterable[Value]) -> set[Value]:
        """Refs with everything they are part of, up to their roots."""
        found: set[Value] = set()
        for ref in refs:
            step: Value | None = ref
            while step is not None and step not in found:
                found.add(step)
                step = self.parent.get(step)
        return found

    def all_written(self, region: Block) -> set[Value]:
        """Every ref that code of a region may write: parts, wholes and roots."""
        return self.reached(r for op in walk(region) for r in written_refs(op))

    def written(self, *regions: Block) -> tuple[Value, ...]:
        """Roots, allocated outside the regions, that code in them may write."""
        found: dict[Value, None] = {}
        for region in regions:
            for root in self._written_in(region):
                found[root] = None
        return tuple(found)

    def _written_in(self, region: Block) -> tuple[Value, ...]:
        known = self._written.get(id(region))
        if known is None:
            ops = list(walk(region))
            local = {op.result for op in ops if op.name == "alloc"}
            roots = {self.of(r): None for op in ops for r in written_refs(op)}
            known = tuple(r for r in roots if r not in local)
            self._written[id(region)] = known
        return known

    def outermost_refs(self, regions: Iterable[Block]) -> dict[Value, set[Value]]:
        """Per root: the refs that the regions capture."""
        regions = tuple(regions)
        inside: set[Value] = set()
        for region in regions:
            for op in walk(region):
                inside.update(op.results)
                for inner in op.regions:
                    inside.update(inner.params)
        used: dict[Value, set[Value]] = {}
        for region in regions:
            for op in walk(region):
                for ref in (v for v in op.operands if v.is_ref):
                    while ref in inside and ref in self.parent:
                        ref = self.parent[ref]
                    if ref not in inside:
                        used.setdefault(self.of(ref), set()).add(ref)
        return used

    def folds_into_selects(self, op: Op) -> bool:
        """Whether a cond is short, pure stores, and cheaper to run than a branch."""
        known = self._folds.get(id(op))
        if known is None:
            known = self._folds[id(op)] = not op.results and all(
                _is_short(region) for region in op.regions
            )
        return known


def _is_short(region: Block) -> bool:
    rows = table()
    if len(region.ops) > _FOLD_LIMIT:
        return False
    for op in region.ops:
        if op.name not in _FOLDABLE or op.attrs.get("mask"):
            return False
        sizes = [r.tile.size for r in op.results if not r.is_ref]
        sizes = [n for n in sizes if isinstance(n, int)]  # symbols: as if small
        if op.name in rows and max(sizes, default=0) > _FOLD_ELEMENTS:
            return False
    return True


def constant_inputs(kernel: Kernel) -> frozenset[Value]:
    """Read-only operands: no op and no result writes to them."""
    written = Roots(kernel).written(kernel.body)
    return frozenset(kernel.inputs).difference(kernel.aliased_results, written)


def accesses_of(kernel: Kernel) -> dict[Value, list[Op]]:
    """The ops that use each memory; an operand that aliases a result is that result."""
    same = kernel.aliased_results
    roots = Roots(kernel)
    accesses: dict[Value, list[Op]] = {}
    for op in walk(kernel.body):
        for ref in (v for v in op.operands if v.is_ref and op.name not in VIEWS):
            root = roots.of(ref)
            accesses.setdefault(same.get(root, root), []).append(op)
    return accesses


# --- what a GPU's copy engine accesses ---


def over_edges(block: Block) -> frozenset[Value]:
    """Views of main memory that only the copy engine uses: they may pass the edge."""
    views = {op.result: op for op in walk(block) if op.name == "subview"}
    found: set[Value] = set()
    for op in walk(block):
        for value in _engine_ends(op):
            while value in views and value.ref.space == "gmem":
                found.add(value)
                value = views[value].operands[0]
    return frozenset(found)


def _engine_ends(op: Op) -> Sequence[Value]:
    if op.name not in ("copy_start", "cluster_copy") or op.attrs.get(NOT_OUTSIDE):
        return ()
    # A barrier counts the copy, or it is a store in a group.
    of_gpus = len(op.operands) == 2 or op.operands[2].ref.space == "mbarrier"
    return op.operands[:2] if of_gpus else ()
