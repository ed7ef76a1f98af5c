"""Analysis of a kernel's matmuls before specialisation.

`Plan(program)` finds each `dot`, the addition it can be fused with, and the loads from
main memory that only feed matmuls: these become TMA copies into ring buffers in shared
memory. So does what threads would otherwise wait for: *lines* beside the operands, the
per-row or per-column values of an iteration, and *boxes* from which left operands are
computed (weights that a kernel converts to float); threads load both from shared
memory. What the chip's instructions cannot multiply is rejected here, with the reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from pallasite.backends.cuda.instruction_sets import SETS, instruction_set
from pallasite.backends.cuda.layouts import WARP, WARPGROUP
from pallasite.backends.cuda.program_ops import homes, is_box, is_of_rows, is_slow
from pallasite.backends.cuda.rings import K_BYTES, SWIZZLE, Group, Ring
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Access, Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import users_of
from pallasite.ir.roles import Dot, Loop
from pallasite.ir.text import print_op
from pallasite.ir.types import F32, I32, DType, TileType
from pallasite.passes.analysis.carried import covers_whole
from pallasite.passes.analysis.memory import constant_inputs, root_among
from pallasite.passes.schedule.gpu_blocks import SHORT_TILE, whole
from pallasite.target import Gpu

BOX = 256  # maximum rows of one copy
ROW_MULTIPLE = 16  # bytes that must divide the row pitch of arrays it copies
MOST_LINE_BYTES = 4096
MOST_COLUMNS = 256
MOST_SUMS = 200  # registers per thread for one matmul
MOST_STAGES, ENOUGH_STAGES = 6, 3
SPARE_BYTES = 2048  # of shared memory: barriers and tensor maps
RESERVED_BYTES = 1024  # of shared memory, reserved per thread block
# By the number of programs that share an SM: registers of a thread for tiles. Stages.
SHARED_REGISTERS, SHARED_STAGES = {3: 96, 2: 176}, 2
PREPARING_REGISTERS = {2: 56}  # the same, for two warpgroups that compute left operands
PRODUCT_REGISTERS = 26  # per thread, for one instruction besides the accumulator
# Three programs leave a thread few registers: all tiles of an iteration must fit.
STEP_REGISTERS = {3: 110}
STAGING_BYTES = 2 * 64 * SWIZZLE  # of a warpgroup, for outgoing tiles
TF32 = ("tf32", "tf32_tf32_f32")  # precisions that round f32 to 19 bits
ROUNDED = "cuda.rounded"  # note on copies of f32: to the bits that are multiplied
AFTER_LOADS = "cuda.after_loads"  # note on arrivals: threads have loaded released data
BEFORE_PRODUCTS = "cuda.before_products"  # note on waits of the thread that multiplies
PAIRED = (-1,)  # the axis of the grid along which pairs of thread blocks multiply
# Notes on matmuls: warpgroups issue them in turn; the next one's turn starts when the
# matmul that ends the turn is issued.
IN_TURN, ENDS_TURN = "cuda.in_turn", "cuda.ends_turn"
BEHIND = "cuda.behind"  # note on matmuls: warpgroups start a loop of them staggered
# Warpgroups take turns where the first matmul of an iteration has at least this many
# columns times depth (64 rows of it take 256 clocks); from this depth on, a turn is
# that matmul alone. On an H200 the queries' gradient of attention gains 4% with heads
# of 128; with heads of 64, where a turn is two matmuls, 5 to 6% (with one, it loses 5
# to 14%).
TURN_PRODUCTS, TURN_DEPTH = 64 * 128, 128


@dataclass(frozen=True, eq=False)
class Side:
    """An operand of a matmul: a staged load, or a computed tile."""

    value: Value  # the load's result, or the tile
    load: Op | None
    contract: int  # which of its two dimensions is contracted
    scales: Op | None = None  # the load of scales that multiply it

    @property
    def loads(self) -> tuple[Op, ...]:
        return tuple(op for op in (self.load, self.scales) if op is not None)


@dataclass(frozen=True, eq=False)
class Product:
    """A dot, and the addition that its result is the other operand of."""

    dot: Op
    add: Op | None
    addend: Value | None
    lhs: Side
    rhs: Side

    @property
    def result(self) -> Value:
        return self.dot.result if self.add is None else self.add.result

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.lhs, self.rhs

    @property
    def is_scaled(self) -> bool:
        return self.rhs.scales is not None

    @property
    def depends_on(self) -> tuple[Value, ...]:
        added = () if self.addend is None else (self.addend,)
        return (self.lhs.value, self.rhs.value, *added)

    @property
    def sums(self) -> DType:
        return I32 if self.lhs.value.tile.dtype.is_integer else F32


class Plan:
    """The matmuls and staged loads of a program."""

    def __init__(self, kernel: Kernel, program: Block, chip: Gpu):
        self.kernel, self.program, self.chip = kernel, program, chip
        self.made = {v: op for op in walk(program) for v in op.results}
        self.users = users_of(program)
        self.home = dict(homes(program))
        self.constant = constant_inputs(kernel)
        dots = [op for op in walk(program) if op.name == "dot"]
        found = instruction_set(chip)
        if found is None:
            needed = ", ".join(SETS)
            self.refuse(dots[0], f"matmuls need {needed}, the chip is {chip.arch}")
        self.set = found
        self.products = [self.product(op) for op in dots]
        self.by_op: dict[int, Product] = {}  # keyed by the op it replaces
        for each in self.products:
            self.by_op[id(self.place_of(each))] = each
        self.rings: list[Ring] = []
        self.prepared = set[int]()  # ops that compute left operands from boxes
        self.groups = [
            Group(loads, block, self.ring(loads))
            for loads, block in self.with_loaded(self.together())
        ]
        self.group_of = {id(op): g for g in self.groups for op in g.loads}
        self.per_core = 1  # concurrent programs per SM
        self.repeats = False  # an SM runs several programs in turn
        self.is_paired = False  # programs multiply with another thread block
        self.choose_stages()

    def place_of(self, product: Product) -> Op:
        """The op at which a matmul can start: its addition, if that waits for more."""
        if product.add is None or product.addend is None:
            return product.dot
        ops = self.home[id(product.dot)].ops
        later = ops[ops.index(product.dot) :]
        is_late = any(product.addend in op.results for op in later)
        return product.add if is_late else product.dot

    @cached_property
    def rows(self) -> int:
        found = {p.result.tile.shape[0] for p in self.products}
        if len(found) > 1:
            self.refuse(
                self.products[0].dot,
                f"matmuls with different numbers of rows, {sorted(found)}, in one "
                "kernel",
            )
        return found.pop()

    @cached_property
    def warpgroups(self) -> int:
        """How many warpgroups multiply, each with its share of the rows."""
        rows, dot = self.rows, self.products[0].dot
        if 2 * rows <= whole(rows, SHORT_TILE):
            self.refuse(dot, f"{rows} rows, at most half of the {SHORT_TILE} of wgmma")
        widths = [p.result.tile.shape[1] for p in self.products]
        widths += [p.lhs.value.tile.shape[1] for p in self.products if not p.lhs.load]
        words, apart = self.bytes_of_a_step // 4, not self.reduces_rows
        groups = self.set.warpgroups(rows, widths, words, apart)
        for each in self.products:
            columns = each.result.tile.shape[1]
            if self.held(each.result.tile) // (groups * WARPGROUP) > MOST_SUMS:
                self.refuse(
                    each.dot,
                    f"{rows} x {columns} accumulators do not fit in the registers of "
                    f"{groups} warpgroups",
                    "use smaller blocks",
                )
        return groups

    @cached_property
    def fused(self) -> set[int]:
        """Ops that are computed by the matmul that another op stands for."""
        ops = [op for p in self.products for op in (p.dot, p.add)]
        return {id(op) for op in ops if op is not None and id(op) not in self.by_op}

    @cached_property
    def register_operands(self) -> dict[Value, set[Value]]:
        """Computed left operands, and the values that loops and branches pass to them.

        Each with everything that may share its registers.
        """
        carried = dict[Value, tuple[Loop, int]]()
        for op in walk(self.program):
            if op.name == "for":
                loop = Loop.of(op)
                carried |= {v: (loop, n) for n, v in enumerate(loop.carried)}
        found = dict[Value, set[Value]]()
        for product in self.products:
            if product.lhs.load is not None:
                continue
            pending, same = [product.lhs.value], set[Value]()
            while pending:
                value = pending.pop()
                if value in same:
                    continue
                same |= {value, *found.get(value, ())}
                op = self.made.get(value)
                if value in carried:
                    loop, n = carried[value]
                    pending += [loop.inits[n], loop.yields[n]]
                elif op is not None and op.name == "for":
                    pending.append(Loop.of(op).carried[op.results.index(value)])
                elif op is not None and op.name == "cond":
                    pending += [r.yields[op.results.index(value)] for r in op.regions]
            found |= dict.fromkeys(same, same)
        return found

    @property
    def threads(self) -> int:
        """The number of multiplying threads."""
        return WARPGROUP * self.warpgroups

    def can_start_apart(self, loop: Loop) -> bool:
        """Whether warpgroups may start an accumulation loop staggered by an iteration.

        They then also end it staggered, so the epilogue of one overlaps with matmuls of
        the next, which has the tensor cores to itself. The slots of the rings limit how
        far the first can get ahead; there must be more iterations than that, or it
        would signal its next loop before the signal for the last one was received.
        Accumulators that are only stored gain nothing.
        """
        inside = {id(op) for op in walk(loop.body)}
        outside = [op for op in walk(self.program) if id(op) not in inside]
        if not any(is_slow(op) for op in outside):
            return False
        made = [self.made.get(v) for v in loop.bounds]
        if self.warpgroups < 2 or self.per_core > 1 or not self.repeats:
            return False
        if any(op is None or op.name != "constant" for op in made):
            return False
        first, limit, step = (op.attrs["value"] for op in made if op is not None)
        rings = [g.ring.stages for g in self.groups if g.block is loop.body]
        return len(range(first, limit, step)) >= max(rings) + 2

    def refuse(self, op: Op, why: str, fix: str = "") -> NoReturn:
        shapes = ", ".join(str(v.type) for v in op.operands)
        raise UnsupportedError(
            f"backend 'cuda' cannot run {op.name} on {shapes}",
            [("op", print_op(op, regions=False)), ("why", why)],
            op.loc,
            fix or "use backend='triton', or interpret=True for this kernel",
        )

    # --- matmuls ---

    def product(self, op: Op) -> Product:
        dot = Dot.of(op)
        for side in dot.sides:
            if side.batch or len(side.contract) != 1 or len(side.free) != 1:
                self.refuse(op, "only matmuls of two matrices are supported")
        lhs, rhs = (self.side(s.value, s.contract[0]) for s in dot.sides)
        self.check_types(op, lhs, rhs)
        add, addend = self.addition(op)
        product = Product(op, add, addend, lhs, rhs)
        self.check_shape(product)
        return product

    def side(self, value: Value, contract: int) -> Side:
        """Look through transposes to the load of an operand."""
        op, scales = self.made.get(value), None
        while op is not None and op.name in ("transpose", "scaled"):
            if op.name == "scaled":
                scales = self.made[op.operands[1]]
            else:
                contract = op.attrs["perm"][contract]
            value = op.operands[0]
            op = self.made.get(value)
        if op is not None and op.name == "reshape":
            op = self.loaded_rows(op)
        return Side(value, None if self.not_streamed(op) else op, contract, scales)

    def loaded_rows(self, op: Op) -> Op | None:
        """The load whose first dimensions a reshape merges into the rows of a matrix,
        if that is its only use."""
        load = self.made.get(op.operands[0])
        if load is None or load.name != "load" or len(self.users[load.result]) > 1:
            return None
        return load if is_of_rows(op) else None

    def check_types(self, op: Op, lhs: Side, rhs: Side) -> None:
        if (lhs.scales is None) != (rhs.scales is None):
            self.refuse(op, "only one operand is scaled")
        types = {s.value.tile.dtype.name for s in (lhs, rhs)}
        if len(types) > 1 or not types <= set(self.set.multiplied):
            self.refuse(op, f"a matmul of {' and '.join(sorted(types))}")
        (name,) = types
        precision = (op.attrs["precision"] or "").lower()
        if name == "f32" and precision not in TF32:
            self.refuse(op, "f32 matmuls need precision='tf32' (19 bits)")
        # Matmuls of 8-bit floats accumulate in fewer bits than f32 has.
        if name.startswith("f8") and precision == "highest":
            self.refuse(
                op,
                f"matmuls of {name} accumulate in fewer bits than precision='highest' "
                "asks for",
            )
        if rhs.load is None:
            why = self.not_streamed(self.made.get(rhs.value))
            self.refuse(op, f"TMA cannot load the right operand: {why}")
        if lhs.load is None and lhs.contract != 1:
            self.refuse(op, "a computed left operand is transposed")
        if name not in self.set.turned:
            for side, word in ((lhs, "left"), (rhs, "right")):
                if side.load is not None and side.contract != 1:
                    self.refuse(
                        op, f"the {word} operand, {name}, is not contiguous along k"
                    )
        if lhs.load is None and name not in self.set.computed:
            self.refuse(op, f"a computed left operand of {name}")

    def check_shape(self, product: Product) -> None:
        op, columns = product.dot, product.result.tile.shape[1]
        depth = product.rhs.value.tile.shape[product.rhs.contract]
        step = K_BYTES // product.rhs.value.tile.dtype.bytes
        least = self.set.least_columns if columns <= 32 else self.set.columns
        if columns > MOST_COLUMNS or columns % least:
            self.refuse(
                op, f"{columns} columns, not a multiple of 16 up to {MOST_COLUMNS}"
            )
        # Rows of zeros can follow those of loaded tiles.
        is_rows = all(s.load is not None and s.contract == 0 for s in product.sides)
        if depth % step and not is_rows:
            self.refuse(op, f"k={depth}, not a multiple of {step}")
        for side in product.sides:
            if side.load is not None:
                self.check_copy(op, side)

    def check_copy(self, op: Op, side: Side) -> None:
        rows, columns = side.value.tile.shape
        width = side.value.tile.dtype.bytes
        if columns * width % K_BYTES:
            self.refuse(
                op, f"rows of {columns * width} bytes, not a multiple of {K_BYTES}"
            )
        is_left = side.value is Dot.of(op).lhs.value and side.contract == 1
        if rows > BOX or (rows % 8 and not is_left and side.contract == 1):
            self.refuse(
                op, f"{rows} rows of an operand, not a multiple of 8 up to {BOX}"
            )

    def addition(self, op: Op) -> tuple[Op | None, Value | None]:
        """The addition that a matmul can accumulate into, if that is its only use."""
        users = self.users[op.result]
        sums = I32 if op.operands[0].tile.dtype.is_integer else F32
        if len(users) != 1 or users[0].name != "add" or op.attrs["dtype"] != sums:
            return None, None
        (add,) = users
        if self.home.get(id(add)) is not self.home[id(op)]:
            return None, None
        x, y = add.operands
        addend = y if x is op.result else x
        if addend is op.result or self.is_late(op, addend):
            return None, None
        other, ops = self.made.get(addend), self.home[id(op)].ops
        if other is not None and other.name == "dot" and other in ops[ops.index(op) :]:
            return None, None  # of two matmuls, the second is added to the first
        return add, addend

    def is_late(self, op: Op, addend: Value) -> bool:
        """Whether a matmul of loaded tiles would have to wait for its addend."""
        sides = (self.side(s.value, s.contract[0]) for s in Dot.of(op).sides)
        if any(side.load is None for side in sides):
            return False
        source = self.made.get(addend)
        if source is None or source.name == "constant" or self.is_sum(addend):
            return False
        return self.home[id(source)] is self.home[id(op)]

    def is_sum(self, value: Value | None) -> bool:
        """Whether only a matmul adds to a sum of matmuls of loaded tiles.

        It need not wait for them: all of them add to the same registers, in order.
        """
        op = None if value is None else self.made.get(value)
        if value is None or op is None or len(self.users[value]) > 1:
            return False
        if op.name == "add":
            dots = [self.made.get(v) for v in op.operands]
            op = next((o for o in dots if o is not None and o.name == "dot"), None)
        if op is None or op.name != "dot":
            return False
        sides = (self.side(s.value, s.contract[0]) for s in Dot.of(op).sides)
        return all(side.load is not None for side in sides)

    # --- loads ---

    def not_streamed(self, op: Op | None) -> str:
        """Why the copy engine cannot load a tile; empty if it can.

        It loads boxes of arrays that nothing writes.
        """
        if op is None or op.name != "load":
            return "it is computed"
        access = Access.of(op)
        users = self.users[op.result]
        is_rows = len(users) == 1 and is_of_rows(users[0])
        if access.mask is not None or not (op.result.tile.rank == 2 or is_rows):
            return "it is not a plain load of a matrix"
        ref, index = access.ref, access.index
        source = self.made.get(ref)
        while source is not None and source.name == "subview" and is_box(index):
            below = Access.of(source)
            ref, index = below.ref, below.index
            source = self.made.get(ref)
        if not is_box(index):
            return "it is not a rectangular slice of an array"
        if source is not None and source.name == "block_view":
            dims, fill = source.attrs["window"].dims, source.attrs["window"].fill
            if any(d.kind == "bounded" for d in dims) or dims[-1].kind == "squeezed":
                return "its window is not a rectangular slice of an array"
            if fill:  # the copy engine fills with zeros
                return f"its fill value is {fill}, but TMA fills with zeros"
            ref = source.operands[0]
        if ref not in self.constant:
            return "its array is not a read-only operand"
        row = ref.ref.shape[-1] * ref.ref.dtype.bytes
        if row % ROW_MULTIPLE:
            return (
                f"the array has rows of {row} bytes, not a multiple of {ROW_MULTIPLE}"
            )
        return "" if 2 <= ref.ref.rank <= 5 else f"the array has rank {ref.ref.rank}"

    def together(self) -> list[tuple[list[Op], Block]]:
        """Loads of one block that the same matmuls use and wait for together."""
        uses: dict[int, list[int]] = {}
        loads: dict[int, Op] = {}
        for number, product in enumerate(self.products):
            for side in product.sides:
                for load in side.loads:
                    uses.setdefault(id(load), []).append(number)
                    loads[id(load)] = load
        found: dict[tuple[int, ...], list[Op]] = {}
        for key, load in loads.items():
            place = (id(self.home[key]), *uses[key])
            found.setdefault(place, []).append(load)
        return [(self.in_order(v), self.home[id(v[0])]) for v in found.values()]

    def in_order(self, loads: list[Op]) -> list[Op]:
        places = {id(op): n for n, op in enumerate(self.home[id(loads[0])].ops)}
        return sorted(loads, key=lambda op: places[id(op)])

    def with_loaded(
        self, groups: Sequence[tuple[list[Op], Block]]
    ) -> Iterator[tuple[list[Op], Block]]:
        """Copy the lines and boxes that each iteration loads together with its first
        operands; boxes that are transposed also where nothing is repeated."""
        taken = {id(op) for loads, _ in groups for op in loads}
        for loads, block in groups:
            copied, repeats = self.boxes(block), block is not self.program
            if repeats:
                copied |= {id(op) for op in block.ops if self.is_line(op)}
            found = [op for op in block.ops if id(op) in copied - taken]
            taken |= {id(op) for op in found}
            yield self.in_order([*loads, *found]), block

    def boxes(self, block: Block) -> set[int]:
        """The loads of a block from which alone it computes left operands of matmuls.

        Loads used next to other matmuls have the duration of those to arrive. Outside
        loops threads load tiles themselves, unless these are transposed: then they
        would load element by element.
        """
        here = {v: op for op in block.ops for v in op.results}
        found = set[int]()
        for product in self.products:
            reached = dict[int, Op]()
            pending = [here[v] for v in (product.lhs.value,) if v in here]
            while pending:
                op = pending.pop()
                if id(op) not in reached:
                    reached[id(op)] = op
                    pending += [here[v] for v in op.operands if v in here]
            ops = reached.values()
            is_transposed = any(op.name == "transpose" for op in ops)
            if block is self.program and not is_transposed:
                continue
            if not any(op.name == "dot" or op.regions for op in ops):
                boxes = {id(op) for op in ops if self.is_box(op)}
                self.prepared |= reached.keys() if boxes else set()
                found |= boxes
        return found

    def is_box(self, op: Op) -> bool:
        """Whether the copy engine can load a tile into panels."""
        if self.not_streamed(op) or op.result.tile.rank != 2:
            return False
        rows, columns = op.result.tile.shape
        dtype = op.result.tile.dtype
        fits = rows <= BOX and rows % 8 == 0 and columns * dtype.bytes % SWIZZLE == 0
        return fits and dtype.name in self.set.multiplied

    def is_line(self, op: Op) -> bool:
        """Whether an op loads whole blocks of contiguous numbers."""
        if op.name != "load" or Access.of(op).mask is not None:
            return False
        access, view = Access.of(op), self.made.get(op.operands[0])
        if view is None or view.name != "block_view":
            return False
        if not covers_whole(access.ref.ref.shape, access.index):
            return False
        array, window = view.operands[0], view.attrs["window"]
        if array not in self.constant:
            return False
        width, size = array.ref.dtype.bytes, op.result.tile.size
        if size * width % ROW_MULTIPLE or size * width > MOST_LINE_BYTES:
            return False
        apart = width  # bytes between neighbours along a dimension
        inner = True  # all dimensions after it are whole
        dims = list(zip(array.ref.shape, window.dims, strict=True))
        for extent, dim in reversed(dims):
            if dim.kind not in ("blocked", "squeezed") or extent % dim.size:
                return False
            if dim.size > 1 and not inner:
                return False
            if dim.size < extent and dim.size * apart % ROW_MULTIPLE:
                return False
            inner = inner and dim.size == extent
            apart *= extent
        return True

    def ring(self, loads: Sequence[Op]) -> Ring:
        """The ring for such loads; a new one if there is none.

        A slot that stays in use while other code of the block runs would block the
        slots after it, so such loads have a ring of their own.
        """
        arrays = self.sums_of(loads) or tuple(
            root_among(self.made, op.operands[0]) for op in loads
        )
        tiles = tuple(op.result.tile for op in loads)
        sides = {id(s.load) for p in self.products for s in p.sides}
        scales = {id(s.scales) for p in self.products for s in p.sides}
        others = frozenset(n for n, op in enumerate(loads) if id(op) not in sides)
        loaded = frozenset(n for n in others if id(loads[n]) not in scales)
        lines = frozenset(n for n in others if self.is_line(loads[n]))
        left = {id(p.lhs.load) for p in self.products if p.lhs.contract == 1}
        lefts = frozenset(n for n, op in enumerate(loads) if id(op) in left)
        deep = {id(s.load) for p in self.products for s in p.sides if s.contract == 0}
        deeps = frozenset(n for n, op in enumerate(loads) if id(op) in deep)
        turned = {id(p.lhs.load) for p in self.products if p.lhs.contract == 0}
        if not self.set.has_tensor_memory:  # it has whole panels anyway
            turned = set[int]()
        wides = frozenset(n for n, op in enumerate(loads) if id(op) in turned)
        is_shared = all(
            self.home[id(product.dot)] is self.home[id(side.load)]
            for product in self.products
            for side in product.sides
            if side.load is not None and side.load in loads
        )
        for ring in self.rings if is_shared else ():
            same = ring.arrays, ring.tiles, ring.loaded, ring.lefts, ring.deeps
            alike = same == (arrays, tiles, loaded, lefts, deeps)
            if ring.is_shared and alike and ring.wides == wides:
                return ring
        made = Ring(arrays, tiles, is_shared, lines, loaded, lefts, deeps, wides)
        made.unit = self.set.rows
        self.rings.append(made)
        return made

    def sums_of(self, loads: Sequence[Op]) -> tuple[Value, ...]:
        """The sum to which matmuls of loads add one after another; empty if none.

        Such loads share a ring whatever their arrays.
        """
        taken = {id(op) for op in loads}
        for product in self.products:
            if taken & {id(side.load) for side in product.sides}:
                last = product
                while (after := self.after(last)) is not None:
                    last = after
                is_term = last is not product or self.is_sum(product.addend)
                return (last.result,) if is_term else ()
        return ()

    def choose_stages(self) -> None:
        """As many stages as fit shared memory where loads repeat; else one or two.

        A single multiplying warpgroup leaves the tensor cores idle while it does the
        rest, so several such programs share an SM if they fit; so do several with two,
        if these compute left operands and have small accumulators.
        """
        whole = self.chip.shared.bytes
        shared = SHARED_REGISTERS if self.warpgroups == 1 else {}
        if self.set.has_tensor_memory:  # one program has all of it
            shared = {}
        elif self.warpgroups == 2 and self.prepared:
            shared = PREPARING_REGISTERS
        for count, most in shared.items():
            part = (whole + RESERVED_BYTES) // count - RESERVED_BYTES
            step = STEP_REGISTERS.get(count, self.registers_of_a_step)
            fits = self.registers <= most and self.registers_of_a_step <= step
            fits = fits and self.starts_with_enough(count)
            if fits and self.try_stages(part, SHARED_STAGES):
                self.per_core = count
                return
        if not self.try_stages(whole, least=1):
            needed = sum(r.bytes * self.at_once(r) for r in self.rings)
            self.refuse(
                self.products[0].dot,
                f"its operands need {needed} bytes of shared memory, the limit is "
                f"{whole}",
                "use smaller blocks",
            )

    def starts_with_enough(self, programs: int) -> bool:
        """Whether each thread of the programs has enough registers left for one matmul.

        ptxas requires them from the start, whatever a role is given later.
        """
        threads = programs * WARPGROUP * (self.warpgroups + 1)  # one of them copies
        registers = self.chip.registers // threads // 8 * 8
        sums = max(self.held(p.result.tile) for p in self.products) // self.threads
        return sums + PRODUCT_REGISTERS <= registers

    def held(self, tile: TileType) -> int:
        """Elements of a tile in registers, including those past its rows."""
        return self.set.held_rows(tile.shape[0]) * tile.shape[1]

    @property
    def registers(self) -> int:
        """Per thread, for accumulators and computed left operands of one iteration."""
        sums = {self.group_of[id(p.rhs.load)].ring: p.result for p in self.products}
        made = {p.lhs.value.tile for p in self.products if p.lhs.load is None}
        words = 4 * sum(self.held(v.tile) for v in sums.values())
        words += sum(self.held(tile) * tile.dtype.bytes for tile in made)
        return words // 4 // (128 * self.warpgroups)

    @property
    def registers_of_a_step(self) -> int:
        """Per thread, for accumulators and computed left operands of a block."""
        return self.bytes_of_a_step // 4 // self.threads

    @property
    def bytes_of_a_step(self) -> int:
        """Of accumulators and computed left operands of a block."""
        bytes_ = dict[Block, int]()
        for product in self.products:
            block = self.home[id(product.dot)]
            # One that the next adds to is in the same registers.
            tiles = [] if self.after(product) else [(product.result.tile, 4)]
            if product.lhs.load is None:
                tiles.append(
                    (product.lhs.value.tile, product.lhs.value.tile.dtype.bytes)
                )
            held = sum(self.held(t) * n for t, n in tiles)
            bytes_[block] = bytes_.get(block, 0) + held
        return max(bytes_.values())

    def try_stages(self, available: int, least: int) -> bool:
        """Assign stages to rings; whether `least` of them fit where loads repeat.

        After the second stage, prefetching the next program's operands is worth more
        than a third stage.
        """
        once = [r for r in self.rings if not self.is_filled_again(r)]
        again = [r for r in self.rings if r not in once]
        for ring in self.rings:
            ring.stages = self.at_once(ring)
        left = available - SPARE_BYTES - STAGING_BYTES * self.warpgroups
        left -= self.summed_bytes + self.repeated_bytes
        left -= sum(r.bytes * r.stages for r in self.rings)
        for target in range(2, MOST_STAGES + 1):
            if target == 3 and sum(r.bytes * r.stages for r in once) <= left:
                left -= sum(r.bytes * r.stages for r in once)
                for ring in once:
                    ring.stages *= 2
            short = [r for r in again if r.stages < target]
            if target > ENOUGH_STAGES and sum(r.bytes for r in short) > left:
                break
            for ring in short:
                if ring.bytes <= left:
                    ring.stages, left = ring.stages + 1, left - ring.bytes
        return left >= 0 and all(r.stages >= least for r in again)

    @property
    def summed_bytes(self) -> int:
        """Shared memory for reductions across warps and warpgroups."""
        rounds = 1 + (self.warpgroups > 1)
        reductions = [op for op in walk(self.program) if op.name == "reduce"]
        over_rows = sum(
            rounds * 4 * (self.threads // WARP) * op.result.tile.size
            for op in reductions
            if self.is_over(op, 0)
        )
        # Where warpgroups share rows, each thread has one number of its row.
        if self.warpgroups == 1 or self.set.held_rows(self.rows) > self.set.rows:
            return over_rows
        over_columns = sum(self.is_over(op, 1) for op in reductions)
        return over_rows + 4 * self.threads * over_columns

    @property
    def repeated_bytes(self) -> int:
        """Shared memory for columns that are stored in all lanes: to move one to the
        threads that store it, and a tensor map (of 128 bytes) for each."""
        stores = [op for op in walk(self.program) if op.name == "store"]
        made = [self.made.get(op.operands[1]) for op in stores]
        wide = [op for op in made if op is not None and op.name == "broadcast_in_dim"]
        count = sum(op.operands[0].tile.shape == (self.rows, 1) for op in wide)
        return 4 * self.rows * bool(count) + 128 * count

    @property
    def reduces_rows(self) -> bool:
        """Whether rows of a tile shaped like a matmul's are reduced."""
        ops = (op for op in walk(self.program) if op.name == "reduce")
        return any(self.is_over(op, 1) for op in ops)

    def is_over(self, op: Op, axis: int) -> bool:
        """Whether a reduction is along an axis of a tile shaped like a matmul's."""
        shape = op.operands[0].tile.shape
        return axis in op.attrs["axes"] and any(
            shape == product.result.tile.shape for product in self.products
        )

    def is_filled_again(self, ring: Ring) -> bool:
        """Whether a program may fill the slots of a ring several times."""
        groups = [g for g in self.groups if g.ring is ring]
        inside = any(g.block is not self.program for g in groups)
        return inside or len(groups) > self.at_once(ring)

    def at_once(self, ring: Ring) -> int:
        """How many slots of a ring may be in use at the same time."""
        groups = [g for g in self.groups if g.ring is ring]
        return max(self.at_once_in(g.block, groups) for g in groups)

    def at_once_in(self, block: Block, groups: Sequence[Group]) -> int:
        """The same for one block; a nested loop with slots first releases earlier
        ones."""
        inside = [g for g in groups if g.block is not block]
        loops = [
            n
            for n, op in enumerate(block.ops)
            if op.regions and any(self.uses(op, group) for group in inside)
        ]
        spans = list[tuple[int, int]]()
        for group in groups:
            if group.block is block:
                used = [n for n, op in enumerate(block.ops) if self.uses(op, group)]
                end = next((n for n in loops if n > used[-1]), len(block.ops))
                spans.append((used[0], min(end, self.next_sum(block, group) + 1)))
        return max(sum(a <= at < b for a, b in spans) for at, _ in spans)

    def next_sum(self, block: Block, group: Group) -> int:
        """The place of the matmul that adds to the sums that read a group's tiles."""
        loads = {id(load) for load in group.loads}
        last, places = 0, {id(op): n for n, op in enumerate(block.ops)}
        for product in self.products:
            if any(id(side.load) in loads for side in product.sides):
                after = self.after(product)
                place = None if after is None else places.get(id(self.place_of(after)))
                last = len(block.ops) if place is None else max(last, place)
        return last

    def after(self, product: Product) -> Product | None:
        """The matmul that adds to the result of another without waiting for it."""
        if not self.is_sum(product.result):
            return None
        found = (p for p in self.products if p.addend is product.result)
        return next((p for p in found if p.lhs.load is not None), None)

    def uses(self, op: Op, group: Group) -> bool:
        """Whether an op, or one nested in it, loads or multiplies a group's tiles."""
        loads = {id(load) for load in group.loads}
        for inner in (op, *(o for r in op.regions for o in walk(r))):
            product = self.by_op.get(id(inner))
            sides = product.sides if product is not None else ()
            if id(inner) in loads or any(id(s.load) in loads for s in sides):
                return True
        return False


def note_product(ops: list[Op], note: str, number: int = 0) -> None:
    """Attach a note to a matmul: the first, or the one of that number or the last."""
    places = [n for n, op in enumerate(ops) if op.name == "wgmma"]
    place = places[min(number, len(places) - 1)]
    ops[place] = ops[place].with_(attrs={**ops[place].attrs, note: True})
