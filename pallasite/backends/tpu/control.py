"""Blocks and control flow: scoped memory, loops, branches, and the dispatch by name.

Masks cross region boundaries as 32-bit integers: Mosaic carries no masks through
loops.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pallasite.backends.tpu import elementwise, matrix_units, memory, remote, tiles
from pallasite.backends.tpu.elementwise import SPELLINGS
from pallasite.backends.tpu.remote import Remote
from pallasite.backends.tpu.views import View
from pallasite.backends.tpu.writer import tile_text
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.roles import Cond, Loop, While
from pallasite.ir.types import I32, TileType

# An empty slice is not emitted, and these skip it.
TAKE_NOTHING = ("slice", "concatenate", "pad")


class Control(Remote):
    """Emits blocks."""

    def emit_block(self, block: Block) -> tuple[str, ...]:
        return self._emit_ops(block.ops, block.yields)

    def _emit_ops(self, ops: Sequence[Op], yields: Sequence[Value]) -> tuple[str, ...]:
        for position, op in enumerate(ops):
            if op.name == "alloc":
                return self._emit_scope(ops[position:], yields)
            self.emit(op)
        return tuple(self.name(v) for v in yields)

    def emit(self, op: Op) -> None:
        """Emit one op and record the names of its results."""
        outer, self.op = self.op, op
        with self.out.at(op.loc):
            names = self._written(op)
        self.op = outer
        if isinstance(names, str):
            names = (names,)
        for value, name in zip(op.results, names or (), strict=False):
            self.names[value] = name
        self.facts.note_op(op)

    def _written(self, op: Op) -> str | tuple[str, ...] | None:
        rule = RULES.get(op.name)
        if rule is None:
            self.refuse(
                f"Mosaic has no {op.name}", fix="use another backend, or interpret=True"
            )
        if op.name not in TAKE_NOTHING and any(
            map(_is_empty, (*op.operands, *op.results))
        ):
            self.refuse(
                "Mosaic does not support empty vectors",
                fix="use another backend, or interpret=True",
            )
        return rule(self, op)

    # --- scoped memory ---

    def _emit_scope(
        self, ops: Sequence[Op], yields: Sequence[Value]
    ) -> tuple[str, ...]:
        """Memory whose lifetime is the block: a region around the rest of it."""
        types = self._carried_types(yields)
        results = self.out.values(len(types), '"tpu.region"() ({')
        count = next((i for i, o in enumerate(ops) if o.name != "alloc"), len(ops))
        for op in ops[:count]:
            self._emit_alloca(op)
        inner = self._emit_ops(ops[count:], yields)
        names = self._carry_all(inner, yields)
        text = ", ".join(types)
        self.out.line(f'"tpu.yield"({", ".join(names)}) : ({text}) -> ()')
        self.out.close(f"}}) : () -> ({text})")
        return self._uncarry_all(results, yields)

    def _emit_alloca(self, op: Op) -> None:
        ref = op.result.ref
        shape = ref.shape if ref.shape or ref.is_semaphore else (1,)
        dims = range(ref.rank)
        view = View.whole("", ref, shape, dims)
        spelled = "tpu.sem_alloc" if ref.is_semaphore else "memref.alloca()"
        name = self.out.value(f"{spelled} : {view.type}")
        self.views[op.result] = View.whole(name, ref, shape, dims)

    # --- values that cross a region boundary ---

    def _carried(self, value: Value) -> TileType:
        tile = self.tile_type(value)
        return tile.with_dtype(I32) if tile.dtype.is_bool else tile

    def _carried_types(self, values: Sequence[Value]) -> list[str]:
        return [tile_text(self._carried(v)) for v in values]

    def _carry_all(self, names: Sequence[str], values: Sequence[Value]) -> list[str]:
        return [
            self.convert(n, v.tile, self._carried(v).dtype)
            for n, v in zip(names, values, strict=True)
        ]

    def _uncarry_all(
        self, names: Sequence[str], values: Sequence[Value]
    ) -> tuple[str, ...]:
        return tuple(
            self.convert(n, self._carried(v), v.tile.dtype)
            for n, v in zip(names, values, strict=True)
        )

    def _enter(self, params: Sequence[Value], names: Sequence[str]) -> None:
        """Bind a region's parameters to their carried forms."""
        values = self._uncarry_all(names, params)
        self.names.update(zip(params, values, strict=True))

    def _yield(self, names: Sequence[str], values: Sequence[Value]) -> None:
        if values:
            carried = ", ".join(self._carry_all(names, values))
            types = ", ".join(self._carried_types(values))
            self.out.line(f"scf.yield {carried} : {types}")

    # --- loops ---

    def _starts(self, inits: Sequence[Value]) -> list[str]:
        """The initial values of a loop.

        libtpu stores a tile that does not vary along a dimension only once along it,
        and assumes that a carried value has the layout of its initial value. If an iota
        makes the loop yield tiles that vary along one dimension only, or if a mask of
        one carried value selects another, it then fails to reconcile the two. So an
        initial value is made to look as if it varied.
        """
        names = self._carry_all([self.name(v) for v in inits], inits)
        if not self.varies_starts:
            return names
        pairs = zip(names, inits, strict=True)
        return [self._as_if_varying(n, self._carried(v)) if v in self.repeated else n
                for n, v in pairs]  # fmt: skip

    def _as_if_varying(self, name: str, tile: TileType) -> str:
        if not tile.shape or tile.dtype.bits != 32:
            return name
        words = tile.with_dtype(I32)
        place = self.counted(words, tile.rank - 1)
        if tile.rank > 1:
            rows = self.counted(words, tile.rank - 2)
            place = self.arith("arith.addi", place, rows, tile=words)
        zeros = self.arith("arith.minsi", place, self.out.number(0, words), tile=words)
        types = f"{tile_text(tile)} -> {tile_text(words)}"
        if tile.dtype.is_float:
            name = self.out.value(f"tpu.bitcast {name} : {types}")
        name = self.arith("arith.ori", name, zeros, tile=words)
        if tile.dtype.is_float:
            back = f"{tile_text(words)} -> {tile_text(tile)}"
            name = self.out.value(f"tpu.bitcast {name} : {back}")
        return name

    def emit_for(self, op: Op) -> tuple[str, ...]:
        loop = Loop.of(op)
        if self.facts.of(loop.step).low < 1:
            self.refuse("the step may be zero or negative", fix="count upwards")
        self.facts.note_counter(loop)
        bounds = [self.name(v) for v in loop.bounds]
        types = self._carried_types(loop.carried)
        starts = self._starts(loop.inits)
        counter, *inner = (self.out.fresh() for _ in loop.body.params)
        text = f"scf.for {counter} = {bounds[0]} to {bounds[1]} step {bounds[2]}"
        if types:
            pairs = ", ".join(f"{i} = {s}" for i, s in zip(inner, starts, strict=True))
            text += f" iter_args({pairs}) -> ({', '.join(types)})"
        element = tile_text(self.tile_type(loop.first))
        results = self.out.values(len(types), f"{text} : {element} {{")
        self.names[loop.index] = counter
        self._enter(loop.carried, inner)
        self._yield(self.emit_block(loop.body), loop.yields)
        self.out.close()
        return self._uncarry_all(results, op.results)

    def emit_while(self, op: Op) -> tuple[str, ...]:
        loop = While.of(op)
        types = self._carried_types(loop.inits)
        listed = ", ".join(types)
        starts = self._starts(loop.inits)
        inner = [self.out.fresh() for _ in loop.inits]
        pairs = ", ".join(f"{i} = {s}" for i, s in zip(inner, starts, strict=True))
        text = f"scf.while ({pairs}) : ({listed}) -> ({listed}) {{"
        results = self.out.values(len(types), text)
        self._enter(loop.condition.params, inner)
        (go_on,) = self.emit_block(loop.condition)
        self.out.line(f"scf.condition({go_on}) {', '.join(inner)} : {listed}")
        self.out.next_region("} do {")
        inner = [self.out.fresh() for _ in loop.inits]
        arguments = ", ".join(f"{i}: {t}" for i, t in zip(inner, types, strict=True))
        self.out.next_region(f"^bb0({arguments}):")
        self._enter(loop.body.params, inner)
        self._yield(self.emit_block(loop.body), loop.body.yields)
        self.out.close()
        return self._uncarry_all(results, op.results)

    # --- branches ---

    def emit_cond(self, op: Op) -> tuple[str, ...]:
        """The branch index is clamped: the last `if` takes all remaining values."""
        return self._emit_branches(op, 0)

    def _emit_branches(self, op: Op, first: int) -> tuple[str, ...]:
        """Branches from `first` on; the index is known not to be smaller."""
        cond = Cond.of(op)
        if first == len(cond.branches) - 1:
            return self.emit_block(cond.branches[first])
        number = self.name(cond.which)
        later = self.out.value(f"arith.cmpi sgt, {number}, {self.out.i32(first)} : i32")
        types = self._carried_types(op.results)
        arrow = f" -> ({', '.join(types)})" if types else ""
        results = self.out.values(len(types), f"scf.if {later}{arrow} {{")
        self._yield(self._emit_branches(op, first + 1), op.results)
        branch = cond.branches[first]
        if branch.ops or branch.yields:
            self.out.next_region("} else {")
            self._yield(self.emit_block(branch), op.results)
        self.out.close()
        return self._uncarry_all(results, op.results)

    # --- the rest ---

    def emit_assume_multiple(self, op: Op) -> str:
        """A promise: `facts` records it, and memory ops pass it on."""
        return self.name(op.operands[0])

    def emit_delay(self, op: Op) -> None:
        self.out.line(f"tpu.delay {self.name(op.operands[0])}")


def _is_empty(value: Value) -> bool:
    return isinstance(value.type, TileType) and not value.type.size


RULES: dict[str, Callable[[Any, Op], str | tuple[str, ...] | None]] = {
    **dict.fromkeys(SPELLINGS, Control.emit_elementwise),
    **elementwise.RULES,
    **tiles.RULES,
    **matrix_units.RULES,
    **memory.RULES,
    **remote.RULES,
    "for": Control.emit_for,
    "while": Control.emit_while,
    "cond": Control.emit_cond,
    "assume_multiple": Control.emit_assume_multiple,
    "delay": Control.emit_delay,
}
