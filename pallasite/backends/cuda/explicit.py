"""Ops of the explicit level: barriers, copies in flight, matmuls in flight.

The copy engine (TMA) reads arrays through tensor maps (`Map`), which the kernel builds
first, in a scratch result of the call. Roles come from `specialize` or from an author.
An author's are warpgroups, each of which arrives at a barrier, copies and waits as one:
a barrier counts four arrivals, one per warp, where the author counts one, and a single
thread starts copies after all warps have finished with what they overwrite.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as each_of
from itertools import takewhile
from math import prod

from pallasite.backends.cuda import hopper
from pallasite.backends.cuda.core import Tile
from pallasite.backends.cuda.layouts import WARPGROUP, Spread, accumulator
from pallasite.backends.cuda.meetings import NOTHING, synchronised
from pallasite.backends.cuda.memory import (
    Number,
    Term,
    View,
    multiple_of,
    plus,
    text_of,
    times,
)
from pallasite.backends.cuda.products import AFTER_LOADS, ENDS_TURN, IN_TURN, ROUNDED
from pallasite.backends.cuda.shared import (
    ROW_BYTES,
    ROWS,
    Ring,
    Shared,
    swizzled_bytes,
)
from pallasite.ir.nodes import Access, Gather, Op, Value
from pallasite.ir.roles import Wgmma, number_of
from pallasite.ir.types import DType, RefType
from pallasite.passes.analysis.carried import covers_whole

MAP_BYTES = 128
WARPS = 4  # of a warpgroup
MAX_BOX = 256  # elements of a copy along a dimension
LINE_ALIGNMENT = 16  # bytes, of copies that need no tensor map
MAX_RANK = 5  # of an array that the copy engine supports
# Warpgroups that store their accumulators as they have them, without `stmatrix`: on an
# H200, that is 1 to 4 percent faster for attention with two, and 5 percent slower with
# three, which have fewer registers.
MOST_STORING = 2
TURNS = 8  # the first warpgroup's named barrier, where they take turns
STARTS = 12  # the same, where they start loops one after another


@dataclass(frozen=True)
class Map:
    """The tensor map of an array, and of the boxes that are copied."""

    pointer: str
    shape: tuple[int, ...]
    dtype: DType
    box: tuple[int, ...]
    swizzle: int = ROW_BYTES
    is_rounded: bool = False  # f32 to the 19 bits that are multiplied


class Explicit(Shared):
    """Emits the interactions of roles."""

    def __init__(self) -> None:
        super().__init__()
        self.barriers: dict[Value, str] = {}
        self.inits: list[tuple[int, int, int]] = []  # offset, count, arrivals
        self.maps: list[Map] = []
        self.instructions: dict[str, str] = {}
        self.warpgroups = 1
        self.alone = False  # in a role of one thread
        self.elects = False  # in a role that copies between its matmuls
        self.only_multiplied: set[Value] = set()  # integers cast to float for matmuls
        self.late: dict[Value, Tile] = {}  # words of pairs, as expressions of `@`
        self.seen_maps: set[int] = set()  # used by the role
        self.staging: int | None = None  # shared memory that stages outgoing tiles

    def sums_spread(self, rows: int, columns: int) -> Spread:
        """The layout of accumulators and of left operands in registers."""
        return accumulator(rows, columns, self.warpgroups, self.rows_beside)

    # --- shared memory ---

    def alloc_barriers(self, op: Op) -> None:
        ref = op.result.ref
        assert ref.layout is not None
        offset, name = self.reserve(8 * ref.size, 8), self.out.fresh("barrier")
        arrivals = self.arrivals_of(ref) if self.is_authored else ref.layout.numbers[0]
        self.inits.append((offset, ref.size, arrivals))
        self.out.line(f"const u32 {name} = shared_address(shared) + {offset};")
        self.barriers[op.result] = name
        self.views[op.result] = self.array(ref, name, op.result)

    def arrivals_of(self, ref: RefType) -> int:
        """The arrival count of an author's barrier, in warps."""
        assert ref.layout is not None
        return ref.layout.numbers[0] * WARPS

    def emit_subview(self, op: Op) -> None:
        ref = op.operands[0]
        super().emit_subview(op)
        if self.is_authored and ref.ref.space == "gmem":
            self.views[op.result] = self.with_true_starts(op)
        elif ref in self.barriers:
            view = self.views[op.result]
            offset = "" if view.offset == 0 else f" + ({text_of(view.offset)}) * 8"
            self.barriers[op.result] = view.pointer + offset
        elif ref in self.rings:
            part = self.part_of_ring(op, self.rings[ref])
            if part is not None:
                self.rings[op.result] = part

    def with_true_starts(self, op: Op) -> View:
        """A view whose `starts` are the author's, even past the end.

        Only copies use them: the copy engine never accesses anything outside an array.
        """
        access = Access.of(op)
        whole = self.views[access.ref]
        starts = list(whole.starts)
        for dim, (entry, operand) in zip(whole.dims, access.split_index(), strict=True):
            assert not isinstance(entry, Gather)
            first = self.start(entry, operand, dim.size, clamp=False)
            starts[dim.axis] = plus(starts[dim.axis], times(first, dim.step))
        return replace(self.views[op.result], starts=tuple(starts))

    # --- barriers ---

    def emit_barrier_expect(self, op: Op) -> None:
        at, bytes_ = self.barriers[op.operands[0]], op.attrs["bytes"]
        if not self.is_authored:
            # Bytes that copies bring beyond the tile, to fill panels.
            users = self.users[op.operands[0]]
            after = users[users.index(op) + 1 :]
            copies = takewhile(lambda u: u.name != op.name, after)
            copied = (u for u in copies if u.name == "copy_start")
            for target in (u.operands[1].ref for u in copied):
                if target.layout is not None:
                    bytes_ += swizzled_bytes(target.shape, target.dtype)
                    bytes_ -= target.size * target.dtype.bytes
            self.out.line(f"barrier_expect({at}, {bytes_});")
        elif bytes_:
            self.out.line(f"{self.once}barrier_expect_for({at}, {bytes_}, {WARPS});")
        else:
            self.out.line("__syncwarp();")
            self.out.line(f"if (thread % 32 == 0) barrier_arrive({at});")

    def emit_barrier_arrive(self, op: Op) -> None:
        at = self.barriers[op.operands[0]]
        if op.attrs.get(AFTER_LOADS):
            self.out.line("__syncwarp();")
        first = "" if self.alone else "if (thread % 32 == 0) "
        self.out.line(f"{first}barrier_arrive({at});")

    def emit_barrier_wait(self, op: Op) -> None:
        barrier, parity = op.operands
        self.out.line(
            f"barrier_wait({self.barriers[barrier]}, {self.env[parity].name});"
        )

    def emit_named_barrier(self, op: Op) -> None:
        word = "pass_by" if op.attrs["arrive_only"] else "meet"
        self.out.line(f"{word}({op.attrs['id']}, {op.attrs['threads']});")

    def sync(self) -> None:
        if self.warpgroups and self.in_role:
            self.out.line(f"meet({self.meeting}, {self.threads});")
            self.accessed = synchronised(self.accessed)
        else:
            super().sync()

    instructions_wait = True  # not on later chips, where barriers signal matmuls

    meeting = 1  # the named barrier at which the threads of the role meet

    # --- copies ---

    def emit_copy_start(self, op: Op) -> None:
        source, target, *rest = op.operands
        spaces = [ref.ref.space == "smem" for ref in (source, target)]
        self.meet_before(op)
        if self.alone and target not in self.rings:
            view = self.views[source]
            to = self.plain_address(op, target, alignment=LINE_ALIGNMENT)
            bytes_ = target.ref.size * target.ref.dtype.bytes
            where = f"{view.pointer} + ({text_of(view.offset)}), {bytes_}"
            self.out.line(f"copy_line({to}, {where}, {self.barriers[rest[0]]});")
        elif spaces == [False, True] and len(rest) == 1 and rest[0] in self.barriers:
            for at, map_, places in self.boxes(op, self.views[source], target):
                where = f"{map_}, {self.barriers[rest[0]]}"
                call = f"copy_in_{len(places)}({at}, {where}, {', '.join(places)});"
                self.out.line(self.once + call)
        elif spaces == [True, False] and not rest:
            for at, map_, places in self.boxes(op, self.views[target], source):
                where = f"{map_}, {at}"
                call = f"copy_out_{len(places)}({where}, {', '.join(places)});"
                self.out.line(self.once + call)
        else:
            self.refuse(op, "copies must be between main and shared memory")

    @property
    def once(self) -> str:
        """Prefix of code for one thread of a role: always the same one.

        ptxas knows that `elected` holds for only one thread if a branch tests it. What
        that thread passes to the copy engine then needs no loop over the threads, which
        would delay matmuls of the same role. A role that only copies has the time, and
        without the election attention with 64 columns took 8 percent less.
        """
        if self.alone:
            return ""
        return "if (warp == 0 && elected()) " if self.elects else "if (thread == 0) "

    def boxes(
        self, op: Op, view: View, shared: Value
    ) -> Iterator[tuple[str, str, list[str]]]:
        """The boxes of a copy: an address, the array's tensor map, coordinates."""
        self.check_array(op, view)
        ring, sizes = self.rings.get(shared), [dim.size for dim in view.dims]
        if ring is not None:
            aligned = ring.has_whole_rows or ring.swizzle == ROW_BYTES
            whole = ring.has_whole_panels and (
                not self.is_authored or sizes[-1] % ring.panel_columns == 0
            )
            if not aligned or not whole:
                self.refuse(
                    op,
                    "a copy of swizzled memory must cover whole panels of at least "
                    f"{ROWS} whole rows",
                )
            rows = [min(n, MAX_BOX) for n in sizes[-2:-1]]
            box = [*(1 for _ in sizes[:-2]), *rows, ring.panel_columns]
            base, swizzle = ring.address, ring.swizzle
            sizes[-1] = ring.held_columns
        else:
            box = [min(n, MAX_BOX) for n in sizes]
            if box[1:] != sizes[1:]:
                self.refuse(
                    op, f"rows of more than {MAX_BOX} elements need swizzled memory"
                )
            base, swizzle = self.plain_address(op, shared), 0
        if any(n % size for n, size in zip(sizes, box, strict=True)):
            self.refuse(op, f"more than {MAX_BOX} rows must be a multiple of {MAX_BOX}")
        map_ = self.map_place(view, box, swizzle, bool(op.attrs.get(ROUNDED)))
        axes = [range(0, n, size) for n, size in zip(sizes, box, strict=True)]
        for firsts in each_of(*reversed(axes)):  # panels one after another
            starts: list[Number] = list(view.starts)
            offset = 0
            for dim, first in zip(reversed(view.dims), firsts, strict=True):
                starts[dim.axis] = plus(starts[dim.axis], first)
            if ring is not None:
                column, *rest = firsts
                steps = (ring.swizzle, *reversed(ring.steps))
                offset = column // ring.panel_columns * ring.panel_bytes
                offset += sum(n * step for n, step in zip(rest, steps, strict=False))
            elif firsts:
                offset = firsts[-1] * prod(sizes[1:]) * view.dtype.bytes
            at = f"{base} + {offset}" if offset else base
            yield at, map_, [text_of(s) for s in reversed(starts)]

    def check_array(self, op: Op, view: View) -> None:
        """The copy engine's requirements on an array."""
        root = view.memory
        assert root is not None
        shape, width = root.ref.shape, view.dtype.bytes
        axes = [dim.axis for dim in view.dims]
        if (
            view.dtype.name not in hopper.ELEMENT_CODES
            or not 1 <= len(shape) <= MAX_RANK
        ):
            self.refuse(op, f"TMA does not support arrays of {root.type}")
        if axes != sorted(axes) or any(dim.step != 1 for dim in view.dims):
            self.refuse(
                op, "TMA does not support transposed, strided or reshaped copies"
            )
        if axes[-1:] != [len(shape) - 1]:
            self.refuse(op, "TMA copies must include the last dimension")
        if len(shape) > 1 and shape[-1] * width % 16:
            self.refuse(
                op, f"TMA needs rows of a multiple of 16 bytes, got {shape[-1] * width}"
            )
        if view.dims[-1].size * width % 16:
            self.refuse(op, "TMA copies must be multiples of 16 bytes")

    def plain_address(self, op: Op, shared: Value, alignment: int = ROW_BYTES) -> str:
        """The start address of memory that is not swizzled."""
        view, step = self.views[shared], 1
        if view.memory in self.rings:
            self.refuse(op, f"{shared.type} is not made of rows of swizzled memory")
        for dim in reversed(view.dims):
            if dim.stride != step:
                self.refuse(op, f"{shared.type} is not contiguous")
            step *= dim.size
        if multiple_of(view.offset) * view.dtype.bytes % alignment:
            self.refuse(op, f"shared memory is not aligned to {alignment} bytes")
        offset = "" if view.offset == 0 else f" + ({text_of(view.offset)})"
        return f"shared_address({view.pointer}{offset})"

    def map_place(self, view: View, box: list[int], swizzle: int, rounded: bool) -> str:
        return f"maps + {self.map_of(view, box, swizzle, rounded) * MAP_BYTES}"

    def map_of(
        self,
        view: View,
        sizes: Sequence[int],
        swizzle: int = ROW_BYTES,
        is_rounded: bool = False,
    ) -> int:
        """The number of the tensor map through which boxes of a view are copied."""
        root = view.memory
        assert root is not None
        box = [1] * root.ref.rank
        for dim, size in zip(view.dims, sizes, strict=True):
            box[dim.axis] = size
        found = Map(
            view.pointer, root.ref.shape, view.dtype, tuple(box), swizzle, is_rounded
        )
        if found not in self.maps:
            self.maps.append(found)
        number = self.maps.index(found)
        self.seen_maps.add(number)
        return number

    def emit_fence_async(self, op: Op) -> None:
        self.out.line("stores_before_copies();")
        self.sync()
        self.accessed = NOTHING

    def emit_bulk_commit(self, op: Op) -> None:
        self.out.line(f"{self.once}copies_together();")

    def emit_bulk_wait(self, op: Op) -> None:
        word = "copies_reading" if op.attrs["read"] else "copies_left"
        self.out.line(f"{self.once}{word}<{op.attrs['pending']}>();")
        self.sync()

    def emit_set_registers(self, op: Op) -> None:
        word = "more" if op.attrs["more"] else "fewer"
        self.out.line(f"{word}_registers<{op.attrs['count']}>();")

    # --- stores by the copy engine ---

    def emit_store(self, op: Op) -> None:
        access = Access.of(op)
        if self.is_authored or not self.in_role or not self.can_copy_out(access):
            self.meet_before(op)
            part = self.part_for_matrices(op, access)
            if part is None:
                super().emit_store(op)
            else:
                assert access.value is not None
                self.put_matrices(self.env[access.value], part)
            return
        view = self.picked(access)
        assert access.value is not None
        self.copy_tile_out(self.env[access.value], view)

    def copy_tile_out(self, tile: Tile, view: View) -> None:
        """Stage a tile in shared memory, a panel at a time, from where it is copied."""
        spread, width = tile.spread, view.dtype.bytes
        assert spread is not None
        columns = ROW_BYTES // width
        number = self.map_of(view, (64, columns))
        if self.staging is None:
            self.staging = self.reserve(2 * 64 * ROW_BYTES * self.warpgroups, 1024)
        base, step = self.out.fresh("stage"), 64 * ROW_BYTES
        self.out.line(
            f"const u32 {base} = shared_address(shared) + {self.staging}"
            f" + group * {2 * step};"
        )
        row = self.out.fresh("row")
        self.out.line(f"const u32 {row} = thread / 32 % 4 * 16 + thread / 4 % 8;")
        blocks, panels = spread.digits[0].count, spread.shape[1] // columns
        turns = blocks * panels
        for turn in range(turns):
            block, panel = divmod(turn, panels)
            # Two slots alternate, and every store ends with the second, so the copy
            # started last reads that one. An odd number of turns starts with it too.
            slot = (turn + turns) % 2
            at = f"{base} + {slot * step}"
            reading = 0 if turn == 0 and slot == 1 else 1
            self.out.line(f"if (thread % 128 == 0) copies_reading<{reading}>();")
            self.out.line("meet(2 + group, 128);")
            self.stage_panel(tile, at, row, block, panel, columns)
            self.out.line("stores_before_copies();")
            self.out.line("meet(2 + group, 128);")
            starts: list[Number] = list(view.starts)
            down, across = (d.axis for d in view.dims)
            own = f"(int)group * {64 * blocks}"
            starts[down] = plus(plus(starts[down], Term(own)), 64 * block)
            starts[across] = plus(starts[across], panel * columns)
            places = ", ".join(text_of(s) for s in reversed(starts))
            call = (
                f"copy_out_{len(starts)}(maps + {number * MAP_BYTES}, {at}, {places})"
            )
            self.out.line(f"if (thread % 128 == 0) {{ {call}; copies_together(); }}")

    def stage_panel(
        self, tile: Tile, at: str, row: str, block: int, panel: int, columns: int
    ) -> None:
        """64 rows of a panel of 128 bytes into shared memory, swizzled."""
        assert tile.spread is not None
        first = (block * tile.spread.shape[1] + panel * columns) // 2
        count = columns // 2  # registers per thread
        if tile.is_packed and self.warpgroups > MOST_STORING:
            ring = Ring(at, (64, columns), tile.dtype, 64)
            self.put_blocks(f"{tile.name} + {first // 2}", 1, ring, "")
            return
        # Register i: rows offset by i / 2 % 2 * 8, columns by 8 * (i / 4).
        q = f"({row} + i % 2 * 8)"
        if tile.is_packed:
            chunk, rest = "i / 2", "thread % 4 * 4"
            value = f"{tile.name}[{first // 2} + i]"
        else:
            chunk, rest = "(i / 2 * 2 + thread % 4 / 2)", "thread % 2 * 8"
            value = f"{tile.name}[{first} + 2 * i], {tile.name}[{first} + 2 * i + 1]"
        place = f"{at} + {q} * {ROW_BYTES} + (({chunk} ^ {q} % 8) * 16) + {rest}"
        self.out.line(f"EACH({count // 2}) put_shared({place}, {value});")

    def part_for_matrices(self, op: Op, access: Access) -> Ring | None:
        """The swizzled memory that a 16-bit accumulator tile is stored to, if it is."""
        ring, value = self.rings.get(access.ref), access.value
        if not self.in_role or self.alone or ring is None or value is None:
            return None
        tile = self.env[value]
        if tile.spread is None or len(tile.spread.shape) != 2:
            return None
        rows, columns = tile.spread.shape
        if tile.lanes or tile.is_computed or not tile.is_packed or access.mask:
            return None
        if rows % (64 * self.warpgroups) or columns % ring.panel_columns:
            return None
        if tile.spread != accumulator(rows, columns, self.warpgroups):
            return None
        part = self.part_of_ring(op, ring)
        if part is None or part.shape != (rows, columns):
            return None
        return part if part.has_whole_rows and part.has_whole_panels else None

    def put_matrices(self, tile: Tile, ring: Ring) -> None:
        """Store a whole accumulator tile to swizzled memory."""
        assert tile.spread is not None
        blocks, first = tile.spread.digits[0].count, ""
        if self.warpgroups > 1:
            first = f"group * {64 * blocks} + "
        self.put_blocks(tile.name, blocks, ring, first)

    def put_blocks(self, words: str, blocks: int, ring: Ring, first: str) -> None:
        """Store blocks of 64 accumulator rows, 16 rows and columns of a warp at a time.

        The threads of a warp exchange fragments (`stmatrix`): each gives the address of
        16 bytes of a row, and together they write what belongs there. A store then
        covers 512 bytes instead of 128.
        """
        row = self.out.fresh("row")
        self.out.line(f"const u32 {row} = {first}thread / 32 % 4 * 16 + thread % 16;")
        across, in_panel = ring.shape[1] // 16, ring.swizzle // 32
        phase = f"({row} * {ring.swizzle} >> 7 & {ring.swizzle // 16 - 1})"
        chunk = f"(i % {in_panel} * 2 + thread / 16 % 2 ^ {phase})"
        panel = f"i % {across} / {in_panel} * {ring.panel_bytes}"
        down = f"(i / {across} * 64 + {row}) * {ring.swizzle}"
        place = f"{ring.address} + {panel} + {down} + {chunk} * 16"
        count = blocks * across
        self.out.line(f"EACH({count}) put_matrices({place}, {words} + i * 4);")

    def can_copy_out(self, access: Access) -> bool:
        """Whether a store is of a whole block in the accumulators' layout."""
        assert access.value is not None
        if not covers_whole(access.ref.ref.shape, access.index):
            return False
        tile, view = self.env[access.value], self.picked(access)
        root = view.memory
        if (
            tile.spread is None
            or tile.lanes
            or tile.is_computed
            or access.mask is not None
        ):
            return False
        if len(view.dims) != 2 or root is None or root in self.fenced:
            return False
        plain = tile.is_packed or tile.dtype.name == "f32"
        row_bytes = root.ref.shape[-1] * tile.dtype.bytes
        across = view.dims[1]
        aligned = row_bytes % 16 == 0
        last = across.axis == root.ref.rank - 1 and across.step == 1
        ranked = 2 <= root.ref.rank <= 5 and view.dims[0].step == 1
        bounded = all(e.stop == root_size(view, k) for k, e in view.edges)
        is_sums = self.is_staged(tile, tile.spread)
        return all((is_sums, plain, aligned, last, ranked, bounded))

    def is_staged(self, tile: Tile, spread: Spread) -> bool:
        """Whether a tile is held as `emit_store` stages tiles."""
        rows, columns = spread.shape
        if rows % (64 * self.warpgroups) or columns * tile.dtype.bytes % ROW_BYTES:
            return False
        return spread == accumulator(rows, columns, self.warpgroups)

    # --- matmuls ---

    def emit_wgmma(self, op: Op) -> None:
        parts = Wgmma.of(op)
        sums, lhs, rhs = parts.sums, parts.lhs, parts.rhs
        spread = self.spread(op.result, op)
        assert spread is not None
        start = self.get(sums, spread, op)
        made = self.producers.get(sums)
        result = start
        # What another matmul in flight adds to must stay in the same registers.
        if made is None or made.name != "wgmma" or len(self.users[sums]) > 1:
            result = self.declare(op.result.tile.dtype, spread, op, "d")
            self.copy(result, start)
        anew = start.spread is None and number_of(self.producers, sums) == 0
        left, right = parts.contract
        self.meet_before(op)
        self.check_product(op, parts)
        ring = self.rings[rhs]
        step = 32 // ring.dtype.bytes  # elements of k per instruction
        steps = ring.shape[right] // step
        turned = "b" if right == 0 else ""
        columns = op.result.tile.shape[1]
        in_registers = lhs not in self.rings
        if not in_registers and left == 0:
            turned = "a" + turned
        dtype = ring.dtype.name
        name = hopper.product_name(columns, dtype, in_registers, turned)
        self.instructions[name] = hopper.product(columns, dtype, in_registers, turned)
        blocks = spread.digits[0].count  # of 64 rows
        late = self.late.get(lhs)
        tile = self.left_tile(lhs, op) if in_registers and late is None else late
        b = self.descriptor(ring, "0", right)
        in_turn = op.attrs.get(IN_TURN, False)
        if in_turn:
            self.out.line(f"meet({TURNS} + group, {2 * WARPGROUP});")
        self.out.line("products_start();")
        for k in range(steps):
            if late is not None and k:
                self.out.line("products_start();")
            right_text = f"{b} + {self.step_offset(ring, right, k, step) >> 4}"
            for block in range(blocks):
                to = f"{result.name} + {block * columns // 2}"
                more = "0" if anew and k == 0 else "1"
                if tile is not None:
                    a = self.fragment(tile, block, k)
                else:
                    a = self.left_operand(self.rings[lhs], left, block, blocks, k, step)
                self.out.line(f"{name}({to}, {a}, {right_text}, {more});")
        self.out.line("products_together();")
        if op.attrs.get(ENDS_TURN, False):
            after = f"(group + 1) % {self.warpgroups}"
            self.out.line(f"pass_by({TURNS} + {after}, {2 * WARPGROUP});")
        self.env[op.result] = result

    def starts_behind(self) -> None:
        """Before a loop: wait until the previous warpgroup is in its second round."""
        self.out.line(f"if (group > 0) meet({STARTS} + group, {2 * WARPGROUP});")

    def lets_start(self, is_second: str) -> None:
        """At the end of an iteration of such a loop."""
        has_next = f"group < {self.warpgroups - 1}"
        pass_by = f"pass_by({STARTS} + group + 1, {2 * WARPGROUP})"
        self.out.line(f"if ({has_next} && {is_second}) {pass_by};")

    def check_product(self, op: Op, parts: Wgmma) -> None:
        """The limits of the matrix instruction."""
        left, right = parts.contract
        columns = op.result.tile.shape[1]
        dtype = parts.rhs.type.dtype
        if parts.lhs.type.dtype != dtype or not hopper.has_product(
            dtype.name, op.result.tile.dtype.name
        ):
            self.refuse(op, "the matrix instruction does not support these dtypes")
        if columns % 8 or columns > 256:
            self.refuse(op, f"{columns} columns, not a multiple of 8 up to 256")
        for side, contract, along_k in ((parts.lhs, left, 1), (parts.rhs, right, 1)):
            if not side.is_ref:
                continue
            ring = self.rings.get(side)
            if ring is None or not (ring.has_whole_rows and ring.has_whole_panels):
                self.refuse(
                    op, f"{side.type} is not swizzled, or not made of whole panels"
                )
            if contract != along_k and dtype.bytes != 2:
                self.refuse(op, f"{dtype} operands must be contiguous along k")
            if ring.shape[contract] * dtype.bytes % 32:
                self.refuse(
                    op,
                    f"k={ring.shape[contract]} elements are not a multiple of 32 bytes",
                )
        if not parts.lhs.is_ref and dtype.bytes != 2:
            self.refuse(op, f"a left operand of {dtype} in registers")

    def descriptor(self, ring: Ring, offset: str, contract: int) -> str:
        """A variable with the descriptor of an operand in shared memory."""
        name = self.out.fresh("o")
        apart = ring.panel_bytes if contract == 0 else 16
        at = ring.address if offset == "0" else f"{ring.address} + {offset}"
        kind = "" if ring.swizzle == ROW_BYTES else f"<{ring.swizzle}>"
        self.out.line(f"const u64 {name} = operand{kind}({at}, {apart});")
        return name

    def step_offset(self, ring: Ring, contract: int, k: int, step: int) -> int:
        """Bytes from an operand's start to its part for k step k."""
        if contract == 0:  # rows along k
            return k * step * ring.swizzle
        in_panel = ring.panel_columns // step
        return k // in_panel * ring.panel_bytes + k % in_panel * 32

    def left_operand(
        self, ring: Ring, contract: int, block: int, blocks: int, k: int, step: int
    ) -> str:
        """The rows of this warpgroup: its own descriptor, built once per matmul."""
        unit = 64 * ring.swizzle
        if contract == 0:
            unit = 64 // ring.panel_columns * ring.panel_bytes
        key = (ring.address, contract, blocks)
        if self.left_made != key or k == block == 0:
            offset = f"group * {blocks * unit}" if self.warpgroups > 1 else "0"
            self.left_name = self.descriptor(ring, offset, contract)
            self.left_made = key
        offset = block * unit + self.step_offset(ring, contract, k, step)
        return f"{self.left_name} + {offset >> 4}"

    left_made: tuple | None = None
    left_name = ""

    def left_tile(self, value: Value, op: Op) -> Tile:
        rows, columns = value.tile.shape
        return self.get(value, self.sums_spread(rows, columns), op)

    def fragment(self, tile: Tile, block: int, k: int) -> str:
        """Four registers of pairs: accumulator and operand fragments coincide."""
        assert tile.spread is not None
        words = tile.registers // tile.spread.digits[0].count // 2
        numbers = [block * words + 4 * k + n for n in range(4)]
        if tile.is_computed:
            return ", ".join(tile.name.replace("@", str(n)) for n in numbers)
        return ", ".join(f"{tile.name}[{n}]" for n in numbers)

    def emit_cast(self, op: Op) -> None:
        """Numbers used only by matmuls are converted between them, part by part.

        Converting a part then overlaps with the matmuls of the parts before it.
        """
        spread = self.spread(op.result, op)
        tile = Tile("", op.result.tile.dtype, spread)
        source = self.env[op.operands[0]]
        if op.result in self.only_multiplied and source.spread == spread:
            text = self.in_pairs(op, tile, [source], "@")
            if text is not None:
                self.late[op.result] = replace(tile, name=text, is_computed=True)
                return
        self.emit_elementwise(op)

    def emit_wgmma_wait(self, op: Op) -> None:
        if self.instructions_wait:
            self.out.line(f"products_left<{op.attrs['pending']}>();")
        for old, new in zip(op.operands, op.results, strict=True):
            tile = self.env[old]
            self.out.line(f"settled({tile.name});")
            self.env[new] = tile


def root_size(view: View, key: int) -> int | None:
    """The size of the array along the dimension of an edge, if the view has it."""
    assert view.memory is not None
    shape = view.memory.ref.shape
    return next((shape[d.axis] for d in view.dims if d.edge == key), None)


RULES = {
    "cast": Explicit.emit_cast,
    "load": Explicit.emit_load,
    "store": Explicit.emit_store,
    "subview": Explicit.emit_subview,
    "barrier_expect": Explicit.emit_barrier_expect,
    "barrier_arrive": Explicit.emit_barrier_arrive,
    "barrier_wait": Explicit.emit_barrier_wait,
    "named_barrier": Explicit.emit_named_barrier,
    "copy_start": Explicit.emit_copy_start,
    "wgmma": Explicit.emit_wgmma,
    "wgmma_wait": Explicit.emit_wgmma_wait,
    "fence_async": Explicit.emit_fence_async,
    "bulk_commit": Explicit.emit_bulk_commit,
    "bulk_wait": Explicit.emit_bulk_wait,
    "set_registers": Explicit.emit_set_registers,
}
