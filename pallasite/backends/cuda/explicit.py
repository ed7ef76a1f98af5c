"""Ops of the explicit level: roles, barriers, copies in flight, products in flight.

Shared memory of a ring is a `Ring`: rows of 128 bytes, swizzled as the copy engine
writes and tensor cores read them; a wider tile is several such *panels* one after
another. The copy engine reads arrays by descriptions (`Map`), which the kernel makes
before anything else in a scratch result of the call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pallasite.backends.cuda import hopper
from pallasite.backends.cuda.core import Tile
from pallasite.backends.cuda.layouts import WARPGROUP, accumulator
from pallasite.backends.cuda.memory import Memory, Number, Term, View, plus, text_of
from pallasite.ir.nodes import Access, At, Op, Value
from pallasite.ir.roles import Wgmma
from pallasite.ir.types import DType
from pallasite.passes.analysis.carried import covers_whole

ROW_BYTES = 128
MAP_BYTES = 128
ALONE = "load"  # the role that one thread runs


@dataclass(frozen=True)
class Ring:
    """Swizzled shared memory: a slot of a ring, or the whole."""

    address: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def bytes(self) -> int:
        return swizzled_bytes(self.shape, self.dtype)

    @property
    def panels(self) -> int:
        return -(-self.shape[-1] // self.panel_columns)

    @property
    def panel_columns(self) -> int:
        return ROW_BYTES // self.dtype.bytes

    @property
    def panel_bytes(self) -> int:
        return self.shape[0] * ROW_BYTES


@dataclass(frozen=True)
class Map:
    """What the copy engine must know of an array and of the boxes it copies."""

    pointer: str
    shape: tuple[int, ...]
    dtype: DType
    box: tuple[int, ...]


def swizzled_bytes(shape: Sequence[int], dtype: DType) -> int:
    """Of shared memory, where rows are whole rows of panels."""
    row = -(-shape[-1] * dtype.bytes // ROW_BYTES) * ROW_BYTES
    return prod(shape[:-1]) * row


class Explicit(Memory):
    """Emits roles and what they do to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.rings: dict[Value, Ring] = {}
        self.barriers: dict[Value, str] = {}
        self.users: Mapping[Value, Sequence[Op]] = {}  # of values of the program
        self.inits: list[tuple[int, int, int]] = []  # offset, how many, arrivals
        self.maps: list[Map] = []
        self.instructions: dict[str, str] = {}
        self.warpgroups = 1
        self.alone = False  # in a role of one thread
        self.seen_maps: set[int] = set()  # that the role uses
        self.staging: int | None = None  # shared memory of tiles on their way out

    # --- shared memory ---

    def alloc_ring(self, op: Op) -> None:
        ref = op.result.ref
        ring = Ring(self.out.fresh("ring"), ref.shape, ref.dtype)
        offset = self.reserve(ring.bytes, 1024)
        self.out.line(f"const u32 {ring.address} = shared_address(shared) + {offset};")
        self.rings[op.result] = ring

    def alloc_barriers(self, op: Op) -> None:
        ref = op.result.ref
        assert ref.layout is not None
        offset, name = self.reserve(8 * ref.size, 8), self.out.fresh("barrier")
        self.inits.append((offset, ref.size, ref.layout.numbers[0]))
        self.out.line(f"const u32 {name} = shared_address(shared) + {offset};")
        self.barriers[op.result] = name

    def emit_subview(self, op: Op) -> None:
        access = Access.of(op)
        slot = access.index[0] if access.index else None
        if access.ref in self.barriers:
            text = self.slot_text(slot, access.index_operands)
            base = self.barriers[access.ref]
            self.barriers[op.result] = f"{base} + {text} * 8" if text != "0" else base
        elif access.ref in self.rings:
            ring = self.rings[access.ref]
            text = self.slot_text(slot, access.index_operands)
            part = Ring("", ring.shape[1:], ring.dtype)
            at = f" + {text} * {part.bytes}" if text != "0" else ""
            self.rings[op.result] = Ring(ring.address + at, part.shape, ring.dtype)
        else:
            super().emit_subview(op)

    def slot_text(self, entry, operands: Sequence[Value]) -> str:
        assert isinstance(entry, At)
        return text_of(
            self.integer(operands[0]) if entry.start is None else entry.start
        )

    # --- barriers ---

    def emit_barrier_expect(self, op: Op) -> None:
        at = self.barriers[op.operands[0]]
        # What copies bring beside the tile, to fill panels.
        copies = [u for u in self.users[op.operands[0]] if u.name == "copy_start"]
        refs = [u.operands[1].ref for u in copies]
        more = [swizzled_bytes(r.shape, r.dtype) - r.size * r.dtype.bytes for r in refs]
        self.out.line(f"barrier_expect({at}, {op.attrs['bytes'] + sum(more)});")

    def emit_barrier_arrive(self, op: Op) -> None:
        at = self.barriers[op.operands[0]]
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
            self.out.line(f"meet(1, {self.threads});")
        else:
            super().sync()

    in_role = False

    # --- copies ---

    def emit_copy_start(self, op: Op) -> None:
        source, target, barrier = op.operands
        view, ring = self.views[source], self.rings[target]
        columns = ring.panel_columns
        number = self.map_of(view, ring.shape[0], columns)
        for panel in range(ring.panels):
            starts: list[Number] = list(view.starts)
            starts[-1] = plus(starts[-1], panel * columns)
            at = ring.address + (f" + {panel * ring.panel_bytes}" if panel else "")
            places = ", ".join(text_of(s) for s in reversed(starts))
            where = f"maps + {number * MAP_BYTES}"
            call = f"copy_in_{len(starts)}({at}, {where}, {self.barriers[barrier]}"
            self.out.line(f"{call}, {places});")

    def map_of(self, view: View, rows: int, columns: int) -> int:
        """The number of the description by which boxes of a view are copied."""
        root = view.memory
        assert root is not None
        box = [1] * root.ref.rank
        down, across = view.dims
        box[down.axis], box[across.axis] = rows, columns
        found = Map(view.pointer, root.ref.shape, view.dtype, tuple(box))
        if found not in self.maps:
            self.maps.append(found)
        number = self.maps.index(found)
        self.seen_maps.add(number)
        return number

    # --- stores by the copy engine ---

    def emit_store(self, op: Op) -> None:
        access = Access.of(op)
        if not self.in_role or not self.can_copy_out(access):
            super().emit_store(op)
            return
        view = self.picked(access)
        assert access.value is not None
        tile = self.env[access.value]
        spread, width = tile.spread, view.dtype.bytes
        assert spread is not None
        columns = ROW_BYTES // width
        number = self.map_of(view, 64, columns)
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
        for turn in range(blocks * panels):
            block, panel = divmod(turn, panels)
            at = f"{base} + {turn % 2 * step}"
            self.out.line("if (thread % 128 == 0) copies_reading<1>();")
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
            self.out.line(f"if (thread % 128 == 0) {call};")

    def stage_panel(
        self, tile: Tile, at: str, row: str, block: int, panel: int, columns: int
    ) -> None:
        """64 rows of a panel of 128 bytes into shared memory, swizzled."""
        assert tile.spread is not None
        first = (block * tile.spread.shape[1] + panel * columns) // 2
        count = columns // 2  # registers of a thread
        # Register i: rows i / 2 % 2 * 8 further down, columns 8 * (i / 4) further on.
        q = f"({row} + i % 2 * 8)"
        if tile.is_packed:
            chunk, rest = "i / 2", "thread % 4 * 4"
            value = f"{tile.name}[{first // 2} + i]"
        else:
            chunk, rest = "(i / 2 * 2 + thread % 4 / 2)", "thread % 2 * 8"
            value = f"{tile.name}[{first} + 2 * i], {tile.name}[{first} + 2 * i + 1]"
        place = f"{at} + {q} * {ROW_BYTES} + (({chunk} ^ {q} % 8) * 16) + {rest}"
        self.out.line(f"EACH({count // 2}) put_shared({place}, {value});")

    def can_copy_out(self, access: Access) -> bool:
        """Whether a store is of a whole block in the layout of sums."""
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
        rows, columns = tile.spread.shape
        if rows % (64 * self.warpgroups):
            return False
        is_sums = tile.spread == accumulator(rows, columns, self.warpgroups)
        plain = tile.is_packed or tile.dtype.name == "f32"
        row_bytes = root.ref.shape[-1] * tile.dtype.bytes
        across = view.dims[1]
        aligned = row_bytes % 16 == 0 and columns * tile.dtype.bytes % ROW_BYTES == 0
        last = across.axis == root.ref.rank - 1 and across.step == 1
        ranked = 2 <= root.ref.rank <= 5 and view.dims[0].step == 1
        bounded = all(e.stop == root_size(view, k) for k, e in view.edges)
        return all((is_sums, plain, aligned, last, ranked, bounded))

    # --- roles ---

    def emit_roles(self, op: Op) -> None:
        """Each role is a branch; before it, barriers and descriptions are made."""
        names = op.attrs["cuda.names"]
        counts, registers = op.attrs["cuda.warpgroups"], op.attrs["cuda.registers"]
        before = len(self.out.lines)
        first, usual, outer = 0, self.threads, self.bases
        for number, (name, region) in enumerate(zip(names, op.regions, strict=True)):
            end = first + counts[number] * WARPGROUP
            head = f"if (threadIdx.x < {end})" if number < len(names) - 1 else ""
            with self.out.block(f"else {head}".rstrip() if number else head):
                self.out.line(f"const u32 thread = threadIdx.x - {first};")
                if registers is not None:
                    word = "fewer" if number == 0 else "more"
                    self.out.line(f"{word}_registers<{registers[number]}>();")
                self.bases, self.seen_maps = {}, set()
                start = len(self.out.lines)
                self.threads = counts[number] * WARPGROUP
                self.in_role, self.alone = True, name == ALONE
                if self.alone:
                    with self.out.block("if (thread == 0)"):
                        self.block(region)
                else:
                    self.warpgroups = counts[number]
                    self.out.line(
                        "const u32 group = __shfl_sync(~0u, thread / 128, 0);"
                    )
                    self.block(region)
                    if self.staging is not None:
                        self.out.line("if (thread % 128 == 0) copies_left<0>();")
                indent = "  " * self.out.depth
                seen = [
                    f"{indent}map_seen(maps + {number * MAP_BYTES});"
                    for number in sorted(self.seen_maps)
                ]
                self.out.lines[start:start] = [*self.base_lines(indent), *seen]
            first = end
        self.in_role, self.alone = False, False
        self.threads, self.bases = usual, outer
        rest, self.out.lines = self.out.lines[before:], self.out.lines[:before]
        self.make_barriers()
        self.make_maps()
        self.out.line("__syncthreads();")
        self.out.lines += rest

    def base_lines(self, indent: str) -> list[str]:
        return [
            f"{indent}const int {name} = (int)({text});"
            for text, name in self.bases.items()
        ]

    def make_barriers(self) -> None:
        with self.out.block("if (threadIdx.x == 0)"):
            for offset, count, arrivals in self.inits:
                for n in range(count):
                    at = f"shared_address(shared) + {offset + 8 * n}"
                    self.out.line(f"barrier_init({at}, {arrivals});")
            self.out.line("barriers_made();")

    def make_maps(self) -> None:
        """By the first warp, the one that copies."""
        offset = self.reserve(MAP_BYTES)
        total = MAP_BYTES * len(self.maps)
        self.out.line(f"char* maps = scratch + (i64)blockIdx.x * {total};")
        with self.out.block("if (threadIdx.x < 32)"):
            self.out.line(f"const u32 at = shared_address(shared) + {offset};")
            for number, each in enumerate(self.maps):
                self.out.line(f"((u32*)(shared + {offset}))[threadIdx.x] = 0;")
                self.out.line("__syncwarp();")
                with self.out.block("if (threadIdx.x == 0)"):
                    self.fill_map(each)
                self.out.line("__syncwarp();")
                self.out.line(f"map_publish(at, maps + {number * MAP_BYTES});")

    def fill_map(self, each: Map) -> None:
        rank, width = len(each.shape), each.dtype.bytes
        code = hopper.ELEMENT_CODES[each.dtype.name]
        self.out.line(f"map_array<{rank}, {code}>(at, {each.pointer});")
        pairs = zip(reversed(each.shape), reversed(each.box), strict=True)
        for n, (size, box) in enumerate(pairs):
            self.out.line(f"map_dim<{n}>(at, {size}, {box});")
        for n in range(rank - 1):
            stride = prod(each.shape[rank - 1 - n :]) * width
            self.out.line(f"map_stride<{n}>(at, {stride});")

    # --- products ---

    def emit_wgmma(self, op: Op) -> None:
        parts = Wgmma.of(op)
        sums, lhs, rhs = parts.sums, parts.lhs, parts.rhs
        spread = self.spread(op.result, op)
        assert spread is not None
        result = self.declare(op.result.tile.dtype, spread, op, "d")
        start = self.get(sums, spread, op)
        self.copy(result, start)
        anew = start.spread is None  # a tile of one number, which is 0
        left, right = parts.contract
        ring = self.rings[rhs]
        step = 32 // ring.dtype.bytes  # elements along k of one instruction
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
        tile = self.left_tile(lhs, op) if in_registers else None
        b = self.descriptor(ring, "0", right)
        self.out.line("products_start();")
        for k in range(steps):
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
        self.env[op.result] = result

    def descriptor(self, ring: Ring, offset: str, contract: int) -> str:
        """A variable with the description of an operand in shared memory."""
        name = self.out.fresh("o")
        apart = ring.panel_bytes if contract == 0 else 16
        at = ring.address if offset == "0" else f"{ring.address} + {offset}"
        self.out.line(f"const u64 {name} = operand({at}, {apart});")
        return name

    def step_offset(self, ring: Ring, contract: int, k: int, step: int) -> int:
        """Bytes from an operand's start to its part of step k."""
        if contract == 0:  # rows along k
            return k * step * ROW_BYTES
        in_panel = ring.panel_columns // step
        return k // in_panel * ring.panel_bytes + k % in_panel * 32

    def left_operand(
        self, ring: Ring, contract: int, block: int, blocks: int, k: int, step: int
    ) -> str:
        """The rows of this warpgroup: its own descriptor, made once per product."""
        unit = 64 * ROW_BYTES if contract == 1 else ring.panel_bytes
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
        return self.get(value, accumulator(rows, columns, self.warpgroups), op)

    def fragment(self, tile: Tile, block: int, k: int) -> str:
        """Four registers of pairs: the accumulator's layout is the operand's."""
        assert tile.spread is not None and tile.is_packed
        words = tile.registers // tile.spread.digits[0].count // 2
        return ", ".join(f"{tile.name}[{block * words + 4 * k + n}]" for n in range(4))

    def emit_wgmma_wait(self, op: Op) -> None:
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
    "store": Explicit.emit_store,
    "subview": Explicit.emit_subview,
    "roles": Explicit.emit_roles,
    "barrier_expect": Explicit.emit_barrier_expect,
    "barrier_arrive": Explicit.emit_barrier_arrive,
    "barrier_wait": Explicit.emit_barrier_wait,
    "named_barrier": Explicit.emit_named_barrier,
    "copy_start": Explicit.emit_copy_start,
    "wgmma": Explicit.emit_wgmma,
    "wgmma_wait": Explicit.emit_wgmma_wait,
}
