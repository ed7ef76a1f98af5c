"""Shared by all op families: tiles in registers, scalars, shared memory, barriers.

`Core` holds what is known about IR values (`env`, facts, spreads). A tile is an array
in registers with the `Spread` that says which elements they are; a uniform tile or a
scalar is a variable. The op families are the mixins next to this file; `emit.py`
combines them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

from pallasite.backends.cuda.again import Again
from pallasite.backends.cuda.assign import Assignment
from pallasite.backends.cuda.elementwise import narrowed, widened
from pallasite.backends.cuda.layouts import Lane, Spread
from pallasite.backends.cuda.text import Writer, c_type, is_narrow, memory_type, number
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Op, Value
from pallasite.ir.text import print_op
from pallasite.ir.types import DType, TileType
from pallasite.passes.analysis.intervals import Facts

MAX_REGISTERS = 1 << 9  # of one tile, per thread; ptxas has 255 for all of them
SHARED_ALIGNMENT = 128
VECTOR_BYTES = 16  # of a thread's widest access

Element = Callable[[str], str]  # from a register's number to an element's expression


@dataclass(frozen=True)
class Tile:
    """A value of the emitted code; without a spread it is a single number.

    A tile of positions is not held in registers but computed at its uses: then `name`
    is an expression of the register number `@`.
    """

    name: str
    dtype: DType
    spread: Spread | None = None
    is_computed: bool = False
    lanes: tuple[Lane, ...] = ()  # over which its elements are still to be summed
    words: str = (
        ""  # an array of its bytes: 0 and 2 in the first word, 1 and 3, 4 and 6
    )
    pairs: str = ""  # an array of its bytes: 0 and 1 in the first word, 2 and 3

    def held(self, register: str = "i") -> str:
        """One element as it is held."""
        at = register if register.isidentifier() else f"({register})"
        if self.is_computed:
            return self.name.replace("@", at)
        if self.is_packed:
            return f"(u16)({self.name}[{at} / 2] >> {at} % 2 * 16)"
        return self.name if self.spread is None else f"{self.name}[{register}]"

    def element(self, register: str = "i") -> str:
        """One element in the type in which it is computed."""
        return widened(self.held(register), self.dtype)

    @property
    def registers(self) -> int:
        return 1 if self.spread is None else self.spread.registers

    @property
    def is_packed(self) -> bool:
        """Whether it is held as packed pairs of elements."""
        halves = self.dtype.name in ("bf16", "f16") and not self.is_computed
        return halves and self.spread is not None and self.registers % 2 == 0


ELSEWHERE = "use backend='triton', or interpret=True for this kernel"
ONLY_HERE = (  # no other backend accepts what `plgpu.kernel` makes
    "rewrite it without this op; interpret=pl.Checked() runs plgpu kernels on any "
    "machine"
)


class Core:
    """Independent of IR ops."""

    def __init__(self) -> None:
        self.out = Writer()
        self.env: dict[Value, Tile] = {}
        self.facts = Facts()
        self.producers: dict[Value, Op] = {}
        self.assignment = Assignment({}, frozenset())
        self.rounded_away: frozenset[Value] = frozenset()  # see `analysis/rounding.py`
        self.called: frozenset[tuple[str, TileType]] = frozenset()  # not inlined
        self.again = Again()
        self.threads = 0
        self.shared_bytes = 0
        self.bases: dict[str, str] = {}  # expression of the thread number -> variable
        self.loops = 0  # how many loops are open
        self.arch = ""  # the only architecture that the code is for; empty: any
        self.approx_math = False  # the author prefers speed to full accuracy
        self.is_authored = False  # the roles are an author's, not `specialize`'s

    def refuse(self, op: Op, why: str = "", fix: str = "") -> NoReturn:
        """This backend does not have `op` on these operands."""
        values = op.operands or op.results
        shapes = ", ".join(str(v.type) for v in values)
        raise UnsupportedError(
            f"backend 'cuda' cannot run {op.name} on {shapes}",
            [("op", print_op(op, regions=False)), ("why", why or None)],
            op.loc,
            fix or (ONLY_HERE if self.is_authored else ELSEWHERE),
        )

    def type(self, dtype: DType, op: Op) -> str:
        return self.spelled(c_type(dtype), dtype, op)

    def memory_type(self, dtype: DType, op: Op) -> str:
        return self.spelled(memory_type(dtype), dtype, op)

    def spelled(self, spelling: str | None, dtype: DType, op: Op) -> str:
        if spelling is None:
            self.refuse(op, f"CUDA C++ has no element type {dtype}")
        return spelling

    # --- tiles ---

    def spread(self, value: Value, op: Op) -> Spread | None:
        """Where a tile's elements are; None: it is uniform."""
        found = self.assignment.spreads.get(value)
        if found is not None and found.registers > MAX_REGISTERS:
            self.refuse(
                op,
                f"{value.type} takes {found.registers} registers in each of "
                f"{self.threads} threads",
                "use smaller blocks",
            )
        return found

    def declare(self, dtype: DType, spread: Spread | None, op: Op, hint="v") -> Tile:
        """A new variable for a tile."""
        tile = Tile(self.out.fresh(hint), dtype, spread)
        kind = self.type(dtype, op)
        if spread is None:
            self.out.line(f"{kind} {tile.name};")
        else:
            count = spread.registers
            kind, count = ("u32", count // 2) if tile.is_packed else (kind, count)
            self.out.line(f"__align__(16) {kind} {tile.name}[{count}];")
        return tile

    def let(self, dtype: DType, text: str, op: Op, hint: str = "v") -> Tile:
        """A new scalar; `text` is in the type in which `dtype` is computed."""
        tile = Tile(self.out.fresh(hint), dtype)
        kind = self.type(dtype, op)
        self.out.line(f"const {kind} {tile.name} = {narrowed(text, dtype)};")
        return tile

    def fill(self, tile: Tile, text: Element) -> None:
        """Assign every element, given in the type in which it is computed."""
        if tile.is_packed:
            pair = f"pack_{tile.dtype}({text('2 * i')}, {text('2 * i + 1')})"
            self.out.line(f"EACH({tile.registers // 2}) {tile.name}[i] = {pair};")
        else:
            self.put(tile, lambda i: narrowed(text(i), tile.dtype))

    def put(self, tile: Tile, text: Element) -> None:
        """Assign every element, given as it is held."""
        if tile.is_packed:
            pair = f"(u32)({text('2 * i')}) | (u32)({text('2 * i + 1')}) << 16"
            self.out.line(f"EACH({tile.registers // 2}) {tile.name}[i] = {pair};")
        elif tile.spread is None:
            self.out.line(f"{tile.name} = {text('0')};")
        else:
            self.out.line(f"EACH({tile.registers}) {tile.name}[i] = {text('i')};")

    def copy(self, target: Tile, source: Tile) -> None:
        """Copy into a variable of the same spread."""
        if target.is_packed and source.is_packed:
            count = target.registers // 2
            self.out.line(f"EACH({count}) {target.name}[i] = {source.name}[i];")
        else:
            self.put(target, source.held)

    def get(self, value: Value, spread: Spread | None, op: Op) -> Tile:
        """An operand in a given spread, converted if necessary."""
        tile = self.whole(value, op)
        if tile.spread is None or tile.spread == spread:
            return tile
        if spread is None:
            self.refuse(op, f"{value.type} is used as a scalar")
        return self.moved(tile, spread, op)

    def whole(self, value: Value, op: Op) -> Tile:
        """A tile with its partial sums reduced."""
        tile = self.env[value]
        if not tile.lanes:
            return tile
        result = self.declare(tile.dtype, tile.spread, op)
        self.copy(result, tile)
        for lane in tile.lanes:
            step = lane.unit
            while step < lane.unit * lane.count:
                other = f"__shfl_xor_sync(~0u, {result.held()}, {step})"
                self.out.line(f"EACH({result.registers}) {result.held()} += {other};")
                step *= 2
        return result

    def part(
        self, value: Value, lanes: tuple[Lane, ...], spread: Spread | None, op: Op
    ) -> Tile:
        """A tile as partial sums: the whole value in one of its threads."""
        tile = self.env[value]
        if tile.lanes == lanes:
            return tile
        tile = self.get(value, spread, op)
        result = replace(self.declare(tile.dtype, spread, op), lanes=lanes)
        mine = " && ".join(f"thread / {p.unit} % {p.count} == 0" for p in lanes)
        zero = number(0, tile.dtype)
        self.put(result, lambda i: f"{mine} ? {tile.held(i)} : {zero}")
        return result

    def moved(self, tile: Tile, spread: Spread, op: Op) -> Tile:
        """Converted to another spread through shared memory."""
        assert tile.spread is not None
        kind, shape = self.type(tile.dtype, op), spread.shape
        offset = self.reserve(prod(shape) * tile.dtype.bytes)
        place = self.out.fresh("s")
        self.out.line(f"{kind}* {place} = ({kind}*)(shared + {offset});")
        self.sync_before_reuse()
        self.each_inside(
            tile.spread, f"{place}[{self.flat(tile.spread)}] = {tile.held()};"
        )
        self.sync()
        result = self.declare(tile.dtype, spread, op)

        def element(i: str) -> str:
            inside = self.inside(spread, range(len(shape)), i)
            there = f"{place}[{self.flat(spread, i)}]"
            return f"{inside} ? {there} : ({kind})0" if inside else there

        self.put(result, element)
        return result

    def each_inside(self, spread: Spread, statement: str) -> None:
        """A statement for each register that holds no padding."""
        inside = self.inside(spread, range(len(spread.shape)))
        test = f"if ({inside}) " if inside else ""
        self.out.line(f"EACH({spread.registers}) {test}{statement}")

    # --- positions ---

    def base(self, spread: Spread, dim: int) -> str:
        """A variable with the thread's part of a coordinate, or 0."""
        text = spread.lane_text(dim, "thread")
        if text == "0":
            return text
        if text not in self.bases:
            self.bases[text] = f"b{len(self.bases)}"
        return self.bases[text]

    def coordinate(self, spread: Spread, dim: int, register: str = "i") -> str:
        parts = [self.base(spread, dim), spread.digit_text(dim, register)]
        return " + ".join(p for p in parts if p != "0") or "0"

    def flat(self, spread: Spread, register: str = "i") -> str:
        """The row-major index of an element in its tile."""
        terms = []
        for dim in range(len(spread.shape)):
            step = prod(spread.shape[dim + 1 :])
            at = self.coordinate(spread, dim, register)
            if at != "0":
                terms.append(f"({at})" if step == 1 else f"({at}) * {step}")
        return " + ".join(terms) or "0"

    def inside(self, spread: Spread, dims: Sequence[int], register: str = "i") -> str:
        """Whether a register holds no padding along `dims`; empty: none does."""
        return " && ".join(
            f"{self.coordinate(spread, d, register)} < {spread.shape[d]}"
            for d in dims
            if spread.has_padding(d)
        )

    def is_first_copy(self, spread: Spread | None) -> str:
        """Whether a thread is the first of those that hold the same elements."""
        tests, end = [], 1
        lanes = sorted(spread.lanes, key=lambda p: p.unit) if spread else []
        for lane in lanes:
            if lane.unit > end:
                tests.append(f"thread / {end} % {lane.unit // end} == 0")
            end = lane.unit * lane.count
        if end < self.threads:
            tests.append(f"thread / {end} == 0" if end > 1 else "thread == 0")
        return " && ".join(tests)

    # --- shared memory ---

    def reserve(self, size: int, alignment: int = SHARED_ALIGNMENT) -> int:
        """Allocate that many bytes of shared memory; returns the offset."""
        offset = -(-self.shared_bytes // alignment) * alignment
        self.shared_bytes = offset + size
        return offset

    def block(self, block: Block) -> None:
        """Emit the ops of a block."""
        raise NotImplementedError("emit.py knows which rule emits which op")

    def sync(self) -> None:
        """A barrier for all threads of the program."""
        self.out.line("__syncthreads();")

    def sync_before_reuse(self) -> None:
        """Each op has its own shared memory: it is only reused in loops."""
        if self.loops:
            self.sync()

    def number(self, value: float | int | bool, dtype: DType) -> str:
        return number(value, dtype)

    def is_narrow(self, dtype: DType) -> bool:
        return is_narrow(dtype)
