"""Ops of the explicit level: roles, barriers, copies in flight, products in flight.

Shared memory of a ring is a `Ring`: rows of 128 bytes, swizzled as the copy engine
writes and tensor cores read them; a wider tile is several such *panels* one after
another. The copy engine reads arrays by descriptions (`Map`), which the kernel makes
before anything else in a scratch result of the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pallasite.backends.cuda import hopper
from pallasite.backends.cuda.core import Tile
from pallasite.backends.cuda.layouts import WARPGROUP
from pallasite.backends.cuda.memory import Memory, Number, View, plus, text_of
from pallasite.ir.nodes import Access, At, Op, Value
from pallasite.ir.types import DType

ROW_BYTES = 128
MAP_BYTES = 128
LEADER = "load"  # the role that one thread runs


@dataclass(frozen=True)
class Ring:
    """Swizzled shared memory: a slot of a ring, or the whole."""

    address: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.bytes

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


class Explicit(Memory):
    """Emits roles and what they do to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.rings: dict[Value, Ring] = {}
        self.barriers: dict[Value, str] = {}
        self.inits: list[tuple[int, int, int]] = []  # offset, how many, arrivals
        self.maps: list[Map] = []
        self.instructions: dict[str, str] = {}
        self.warpgroups = 1
        self.alone = False  # in a role of one thread

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
        self.out.line(f"barrier_expect({at}, {op.attrs['bytes']});")

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
        number = self.map_of(view, ring)
        columns = ring.panel_columns
        for panel in range(ring.shape[1] // columns):
            starts: list[Number] = list(view.starts)
            starts[-1] = plus(starts[-1], panel * columns)
            at = ring.address + (f" + {panel * ring.panel_bytes}" if panel else "")
            places = ", ".join(text_of(s) for s in reversed(starts))
            where = f"maps + {number * MAP_BYTES}"
            call = f"copy_in_{len(starts)}({at}, {where}, {self.barriers[barrier]}"
            self.out.line(f"{call}, {places});")

    def map_of(self, view: View, ring: Ring) -> int:
        """The number of the description that copies between a view and a ring use."""
        root = view.memory
        assert root is not None
        box = [1] * root.ref.rank
        rows, inner = view.dims
        box[rows.axis], box[inner.axis] = rows.size, ring.panel_columns
        found = Map(view.pointer, root.ref.shape, view.dtype, tuple(box))
        if found not in self.maps:
            self.maps.append(found)
        return self.maps.index(found)

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
                self.bases, start = {}, len(self.out.lines)
                self.threads = counts[number] * WARPGROUP
                self.in_role, self.alone = True, name == LEADER
                if self.alone:
                    with self.out.block("if (thread == 0)"):
                        self.block(region)
                else:
                    self.warpgroups = counts[number]
                    self.out.line(
                        "const u32 group = __shfl_sync(~0u, thread / 128, 0);"
                    )
                    self.block(region)
                bases = self.base_lines("  " * self.out.depth)
                self.out.lines[start:start] = bases
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
        sums, lhs, rhs = op.operands
        spread = self.spread(op.result, op)
        assert spread is not None
        result = self.declare(op.result.tile.dtype, spread, op, "d")
        start = self.get(sums, spread, op)
        self.copy(result, start)
        anew = start.spread is None  # a tile of one number, which is 0
        (left,), (right,) = op.attrs["contract"]
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
        from pallasite.backends.cuda.layouts import accumulator

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


RULES = {
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
