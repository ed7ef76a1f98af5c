"""turn_tiles: holds computed tiles so that matrix instructions can take them.

`wgmma` takes a computed operand from registers, as its left operand and with the
contracted dimension along its rows: the layout that a matmul left there. A backward
kernel multiplies the transpose of a computed tile: dv += p^T @ do, dk += ds^T @ q.
There the *transposed* scores are computed in the first place: k @ q^T instead of q @
k^T.

Tiles that elementwise ops, loops and branches connect are held alike: all as written,
or all *turned*. Each matmul determines how its computed operand must be held and, since
that must be the left one, how its result is held. Then the program is rebuilt: operands
of matmuls are swapped, broadcast columns become rows, and transposes between tiles that
are held differently vanish. Where matmuls disagree, tiles stay as written.
"""

from collections.abc import Iterator, Sequence

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.roles import Cond, Dot, Loop, Pipeline
from pallasite.ir.types import TileType
from pallasite.passes.analysis.grid import find_pipeline, with_pipeline

TURN = (1, 0)  # the transpose's permutation


def turn_tiles(kernel: Kernel) -> Kernel:
    """Hold tiles turned where matmuls need them so."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    turned = _Wishes(pipeline.body).turned()
    if not turned:
        return kernel
    body = _Turned(turned, pipeline.body).block(pipeline.body)
    return with_pipeline(kernel, pipeline.with_(body=body).to_op())


def _is_matrix(value: Value) -> bool:
    return isinstance(value.type, TileType) and value.type.rank == 2


def _is_elementwise(op: Op) -> bool:
    return table()[op.name].elementwise and len(op.results) == 1


def _is_plain(dot: Dot) -> bool:
    """Whether a matmul is one of two matrices."""
    return all(
        not side.batch and len(side.contract) == len(side.free) == 1
        for side in dot.sides
    )


class _Factors:
    """The operands of matmuls, looking through transposes."""

    def __init__(self, body: Block):
        self.made = {v: op for op in walk(body) for v in op.results}

    def of(self, dot: Dot) -> list[tuple[Value, int]]:
        """Each operand's tile, and which of its dimensions is contracted."""
        found = []
        for side in dot.sides:
            value, contract = side.value, side.contract[0]
            op = self.made.get(value)
            while op is not None and op.name == "transpose":
                value, contract = op.operands[0], op.attrs["perm"][contract]
                op = self.made.get(value)
            found.append((value, contract))
        return found

    def is_number(self, value: Value) -> bool:
        """Whether a tile is uniform, and so can be turned anywhere."""
        op = self.made.get(value)
        return op is not None and op.name == "constant"

    def is_computed(self, value: Value) -> bool:
        op = self.made.get(value)
        return op is None or op.name != "load"


class _Wishes:
    """Which sets of connected tiles matmuls want turned."""

    def __init__(self, body: Block):
        self.body, self.factors = body, _Factors(body)
        self.parent: dict[Value, Value] = {}
        for op in walk(body):
            for x, y in _connected(op):
                if not self.factors.is_number(x) and not self.factors.is_number(y):
                    self.parent[self.root(x)] = self.root(y)

    def root(self, value: Value) -> Value:
        while value in self.parent and self.parent[value] is not value:
            value = self.parent[value]
        return value

    def turned(self) -> set[Value]:
        """The roots of the sets on which all matmuls agree."""
        wishes: dict[Value, set[bool]] = {}
        for op in walk(self.body):
            if op.name != "dot" or not _is_plain(Dot.of(op)):
                continue
            sides = self.factors.of(Dot.of(op))
            computed = [n for n in (0, 1) if self.factors.is_computed(sides[n][0])]
            if len(computed) == 1:
                ((value, contract),) = (sides[n] for n in computed)
                wishes.setdefault(self.root(value), set()).add(contract == 0)
                wishes.setdefault(self.root(op.result), set()).add(computed == [1])
        roots = {root for root, wish in wishes.items() if wish == {True}}
        roots -= {self.root(v) for op in walk(self.body) for v in _fixed(op)}
        tiles = (v for v in _values(self.body) if _is_matrix(v))
        numbers = self.factors.is_number
        return {v for v in tiles if self.root(v) in roots and not numbers(v)}


def _values(body: Block) -> Iterator[Value]:
    for op in walk(body):
        yield from op.results
        for region in op.regions:
            yield from region.params


def _connected(op: Op) -> Iterator[tuple[Value, Value]]:
    """Pairs of tiles that must be held alike."""
    if op.name == "for":
        loop = Loop.of(op)
        for parts in (loop.inits, loop.yields, loop.results):
            pairs = zip(loop.carried, parts, strict=True)
            yield from ((x, y) for x, y in pairs if _is_matrix(x))
    elif op.name == "cond":
        for branch in Cond.of(op).branches:
            pairs = zip(op.results, branch.yields, strict=True)
            yield from ((x, y) for x, y in pairs if _is_matrix(x))
    elif _is_elementwise(op) and _is_matrix(op.result):
        for x in op.operands:
            if x.type.shape == op.result.type.shape:
                yield x, op.result


def _fixed(op: Op) -> Iterator[Value]:
    """Tiles that an op passes on in a form of its own."""
    if op.regions and op.name not in ("for", "cond", "pipeline"):
        for region in op.regions:
            yield from (*region.params, *region.yields)
        yield from (*op.operands, *op.results)


class _Turned:
    """A program being rebuilt."""

    def __init__(self, turned: set[Value], body: Block):
        self.turned, self.factors = turned, _Factors(body)
        self.new: dict[Value, Value] = {}  # turned tiles: as they are now held

    def block(self, block: Block, results: Sequence[Value] = ()) -> Block:
        """The block; its yields are held as `results` are."""
        params = tuple(self.param(v) for v in block.params)
        b = Builder()
        for op in block.ops:
            b.loc = op.loc
            self.op(op, b)
        yields = self.held_as(block.yields, results or block.yields, b)
        return Block(params, tuple(b.ops), yields)

    def held_as(
        self, values: Sequence[Value], others: Sequence[Value], b: Builder
    ) -> tuple[Value, ...]:
        """Values, each held like one that it is connected with."""
        return tuple(
            self.as_turned(v, b) if other in self.turned else self.as_written(v, b)
            for v, other in zip(values, others, strict=True)
        )

    def param(self, value: Value) -> Value:
        if value in self.turned:
            self.new[value] = Value(_turned(value.tile), value.name)
        return self.new.get(value, value)

    def as_written(self, value: Value, b: Builder) -> Value:
        found = self.new.get(value, value)
        return b.op("transpose", found, perm=TURN) if value in self.turned else found

    def as_turned(self, value: Value, b: Builder) -> Value:
        found = self.new.get(value, value)
        if value in self.turned:
            return found
        if self.factors.is_number(value):
            attrs = self.factors.made[value].attrs
            return b.op("constant", **{**attrs, "type": _turned(value.tile)})
        return b.op("transpose", found, perm=TURN)

    def op(self, op: Op, b: Builder) -> None:
        if op.name in ("for", "cond"):
            self.control(op, b)
        elif op.name == "dot" and _is_plain(Dot.of(op)):
            self.product(op, b)
        elif op.name == "transpose" and self.is_held_otherwise(op):
            source = op.operands[0]
            self.new[op.result] = self.new.get(source, source)
        elif op.name == "reduce" and op.operands[0] in self.turned:
            axes = tuple(1 - axis for axis in op.attrs["axes"])
            operand = self.new[op.operands[0]]
            b.ops.append(
                op.with_(operands=(operand,), attrs={**op.attrs, "axes": axes})
            )
        elif len(op.results) == 1 and op.result in self.turned:
            self.new[op.result] = self.made_turned(op, b)
        else:
            operands = tuple(self.as_written(v, b) for v in op.operands)
            regions = tuple(map(self.block, op.regions))
            b.ops.append(op.with_(operands=operands, regions=regions))

    def is_held_otherwise(self, op: Op) -> bool:
        """Whether a transpose is what turning does to one of its tiles."""
        is_turned = [v in self.turned for v in (op.operands[0], op.result)]
        return op.attrs["perm"] == TURN and any(is_turned) and not all(is_turned)

    def control(self, op: Op, b: Builder) -> None:
        operands = op.operands
        if op.name == "for":
            loop = Loop.of(op)
            bounds = self.held_as(loop.bounds, loop.bounds, b)
            operands = (*bounds, *self.held_as(loop.inits, loop.carried, b))
        regions = tuple(self.block(region, op.results) for region in op.regions)
        results = tuple(map(self.param, op.results))
        b.ops.append(op.with_(operands=operands, regions=regions, results=results))

    def product(self, op: Op, b: Builder) -> None:
        sides = [
            (self.new.get(v, v), 1 - contract if v in self.turned else contract)
            for v, contract in self.factors.of(Dot.of(op))
        ]
        if op.result in self.turned:
            sides.reverse()
            self.param(op.result)
        result = self.new.get(op.result, op.result)
        contract = tuple((each,) for _, each in sides)
        b.ops.append(
            op.with_(
                operands=tuple(v for v, _ in sides),
                results=(result,),
                attrs={**op.attrs, "contract": contract},
            )
        )

    def made_turned(self, op: Op, b: Builder) -> Value:
        type = _turned(op.result.tile)
        if op.name == "iota":
            return b.op("iota", type=type, dim=1 - op.attrs["dim"])
        if op.name == "broadcast_in_dim":
            return self.broadcast(op, type.shape, b)
        if _is_elementwise(op):
            operands = [
                self.as_turned(v, b) if _is_matrix(v) else self.new.get(v, v)
                for v in op.operands
            ]
            return b.op(op.name, *operands, **op.attrs)
        operands = tuple(self.as_written(v, b) for v in op.operands)
        (made,) = b.emit(op.name, *operands, regions=op.regions, **op.attrs)
        return b.op("transpose", made, perm=TURN)

    def broadcast(self, op: Op, shape: Sequence[int], b: Builder) -> Value:
        """A column becomes a row, ignoring dimensions of size one."""
        x = self.as_written(op.operands[0], b)
        dims = op.attrs["dims"]
        if x.tile.rank == 2:
            kept = [n for n, size in enumerate(x.tile.shape) if size != 1]
            x = b.op("reshape", x, shape=tuple(x.tile.shape[n] for n in kept))
            dims = [dims[n] for n in kept]
        return b.op(
            "broadcast_in_dim", x, shape=tuple(shape), dims=tuple(1 - d for d in dims)
        )


def _turned(tile: TileType) -> TileType:
    return tile.with_shape(tile.shape[::-1])
