"""Tensor memory: matmuls of Blackwell's tensor cores, and the warps that issue them.

Tensor memory has 128 lanes, one per row, and columns of 32 bits. A warp accesses its 32
lanes, so a loaded tile has one row per thread (`rows_by_thread`). A ref is a base and,
in its view, the first lane and column. One thread issues matmuls; in `warps`, one of
the warp. Barriers that order the tensor core count what the author counts, not warps,
because a commit arrives once.
"""

from itertools import product as each_of
from math import gcd, prod

from pallasite.backends.cuda import blackwell
from pallasite.backends.cuda.core import Tile
from pallasite.backends.cuda.explicit import LINE_ALIGNMENT, MAP_BYTES, WARPS
from pallasite.backends.cuda.layouts import Digit, Lane, Spread
from pallasite.backends.cuda.memory import Term, View, plus, text_of, times
from pallasite.backends.cuda.peer_devices import PeerDevices
from pallasite.backends.cuda.products import BEFORE_PRODUCTS
from pallasite.backends.cuda.shared import Ring
from pallasite.backends.cuda.tensor_sums import scale_columns
from pallasite.ir.nodes import Access, Op, Value, walk
from pallasite.ir.roles import TensorMma
from pallasite.ir.types import RefType
from pallasite.ops.scaled import COLUMNS, PACKED, unpacked_shape

LEAST_COLUMNS = 32  # smallest allocation
WORD = 4  # bytes of a column
STAGED_BYTES = 64  # of a row of outgoing tiles
MOST_WORDS = 64  # per thread and instruction
PAIR = 2  # thread blocks that multiply together


def rows_by_thread(rows: int, columns: int, groups: int = 1) -> Spread:
    """One row per thread; warpgroups have some of the rows, or else of the columns."""
    lanes = [Lane(1, blackwell.LANES, 0, 1)]
    blocks = -(-rows // blackwell.LANES)
    if blocks == 1 and groups > 1:
        columns_each = columns // groups
        lanes.append(Lane(blackwell.LANES, groups, 1, columns_each))
        return Spread((rows, columns), tuple(lanes), (Digit(columns_each, 1, 1),))
    each = blocks // groups
    if groups > 1:
        lanes.append(Lane(blackwell.LANES, groups, 0, blackwell.LANES * each))
    digits = [Digit(each, 0, blackwell.LANES)] * (each > 1) + [Digit(columns, 1, 1)]
    return Spread((rows, columns), tuple(lanes), tuple(digits))


def tile_blocks(spread: Spread) -> int:
    """Blocks of rows of which a thread has one each."""
    return prod(digit.count for digit in spread.digits if digit.dim == 0)


def row_columns(spread: Spread) -> int:
    """Columns that a thread has of a row."""
    return spread.registers // tile_blocks(spread)


def slot_columns(ref: RefType) -> int:
    """Columns of a slot, whose rows beyond those of an instruction are beside it."""
    _, rows, columns = ref.shape
    return rows // blackwell.LANES * columns * ref.dtype.bytes // WORD


def orders_tensor_core(barrier: Value) -> bool:
    layout = barrier.ref.layout
    return layout is not None and len(layout.numbers) > 1


class TensorMemory(PeerDevices):
    """Emits code for tensor cores and single warps."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = 0  # of tensor memory that are allocated
        self.group = 1  # thread blocks that multiply together
        self.warp: int | None = None  # whose code is being emitted
        self.locals: dict[Value, str] = {}  # variables of each thread

    def note_tensors(self, op: Op) -> None:
        """Whether pairs of thread blocks multiply together is fixed for a kernel."""
        pairs = {bool(o.attrs["axes"]) for o in walk(op.regions[-1])
                 if o.name in ("tensor_mma", "tensor_commit")}  # fmt: skip
        if len(pairs) > 1:
            self.refuse(
                op, "matmuls of one block and of two (collective) in one kernel"
            )
        self.group = PAIR if True in pairs else 1

    def tensor_spread(self, rows: int, columns: int) -> Spread:
        return rows_by_thread(rows, columns, self.warpgroups)

    # --- memory ---

    def alloc_tensor(self, op: Op) -> None:
        ref = op.result.ref
        if not self.is_authored:  # slots of tiles, see `tensor_sums.py`
            first = f"(tensors + {self.columns})"
            self.views[op.result] = self.array(ref, first, op.result)
            if ref.shape[-1] == PACKED:
                self.columns += scale_columns(ref)
            else:
                self.columns += ref.shape[0] * slot_columns(ref)
            return
        if ref.rank != 2 or ref.shape[0] != blackwell.LANES or ref.dtype.bytes != 4:
            lanes = blackwell.LANES
            self.refuse(
                op,
                f"tensor memory must be allocated as {lanes} rows of 32-bit elements",
            )
        first = f"(tensors + {self.columns})"
        self.views[op.result] = self.array(ref, first, op.result)
        self.columns += ref.shape[1]
        if self.columns > blackwell.COLUMNS:
            most = blackwell.COLUMNS
            self.refuse(
                op, f"{self.columns} columns of tensor memory, the limit is {most}"
            )

    @property
    def held_columns(self) -> int:
        """Columns are allocated in powers of two."""
        return max(LEAST_COLUMNS, 1 << (self.columns - 1).bit_length())

    def make_barriers(self) -> None:
        super().make_barriers()
        if not self.columns:
            return
        self.tensor_slot = self.reserve(4, 4)
        how = f"{self.group}, {self.held_columns}"
        at = f"shared_address(shared) + {self.tensor_slot}"
        self.out.line(f"if (threadIdx.x / 32 == 0) tensor_alloc<{how}>({at});")
        self.out.line("tensor_before();")

    def start_together(self) -> None:
        super().start_together()
        if self.columns:
            slot = f"*(volatile u32*)(shared + {self.tensor_slot})"
            self.out.line("tensor_after();")
            self.out.line(f"const u32 tensors = {slot};")

    def emit_roles(self, op: Op) -> None:
        super().emit_roles(op)
        if not self.columns:
            return
        if not self.is_authored:  # some threads of a warp had a role
            self.out.line("__syncwarp();")
        self.out.line("tensor_before();")
        self.out.line("blocks_meet();" if self.group == PAIR else "__syncthreads();")
        self.out.line("tensor_after();")
        how = f"{self.group}, {self.held_columns}"
        self.out.line(f"if (this_thread() / 32 == 0) tensor_free<{how}>(tensors);")

    def lane_and_column(self, op: Op, view: View) -> str:
        """The address of a part of tensor memory."""
        *slots, row, column = view.starts
        for slot in slots:
            assert view.memory is not None
            step = slot_columns(view.memory.ref)
            column = plus(column, times(slot, step))
        if row != 0 or any(dim.step != 1 for dim in view.dims):
            self.refuse(op, "a slice of tensor memory must have all of its rows")
        return f"{view.pointer} + {text_of(column)}"

    def emit_load(self, op: Op) -> None:
        ref = op.operands[0]
        if ref in self.locals:
            self.env[op.result] = self.let(ref.ref.dtype, self.locals[ref], op)
        elif ref.ref.space == "tmem":
            self.move_tensor(op, self.spread(op.result, op))
        else:
            super().emit_load(op)

    def emit_store(self, op: Op) -> None:
        ref = op.operands[0]
        if ref in self.locals:
            self.out.line(f"{self.locals[ref]} = {self.env[op.operands[1]].name};")
        elif ref.ref.space == "tmem":
            self.move_tensor(op, None)
        else:
            super().emit_store(op)

    def move_tensor(self, op: Op, loaded: Spread | None) -> None:
        """A load into a spread, or a store."""
        if self.is_authored:
            self.meet_before(op)
        access = Access.of(op)
        view = self.picked(access)
        if access.mask is not None or len(view.dims) != 2:
            self.refuse(
                op,
                "tensor memory must be loaded and stored as a whole matrix, without a "
                "mask",
            )
        rows, columns = (dim.size for dim in view.dims)
        by_thread = self.tensor_spread(rows, columns)
        if self.is_authored and self.threads != blackwell.LANES:
            self.refuse(op, f"one warpgroup must access all {blackwell.LANES} rows")
        if loaded is not None:
            tile = self.declare(op.result.tile.dtype, by_thread, op, "x")
            self.env[op.result] = tile
        else:
            assert access.value is not None
            tile = self.get(access.value, by_thread, op)
            if tile.spread is None or tile.is_computed:
                kept = self.declare(tile.dtype, by_thread, op)
                self.copy(kept, tile)
                tile = kept
        at = f"{self.lane_and_column(op, view)} + (thread / 32 % 4 * 32 << 16)"
        own = by_thread.registers * tile.dtype.bytes // WORD // tile_blocks(by_thread)
        words = gcd(own, MOST_WORDS)
        make = blackwell.store if loaded is None else blackwell.load
        name = (blackwell.store_name if loaded is None else blackwell.load_name)(words)
        self.instructions[name] = make(words)
        if self.warpgroups > 1:
            at += f" + group * {own * tile_blocks(by_thread)}"
        for first in range(0, own * tile_blocks(by_thread), words):
            there, here = f"{at} + {first}", f"(u32*)({tile.name} + {first})"
            args = f"{there}, {here}" if loaded is None else f"{here}, {there}"
            self.out.line(f"{name}({args});")

    def emit_tensor_wait(self, op: Op) -> None:
        word = "loaded" if op.attrs["what"] == "loads" else "stored"
        self.out.line(f"tensor_{word}();")
        self.out.line("tensor_before();")

    # --- matmuls ---

    def emit_tensor_mma(self, op: Op) -> None:
        mma = TensorMma.of(op)
        if (mma.scales and self.is_authored) or mma.places is not None:
            self.refuse(
                op,
                "scales of blocks along k, or a sparse left operand",
                "interpret=pl.Checked(); or scale the operands before",
            )
        sums, lhs, rhs = mma.sums, mma.lhs, mma.rhs
        left, right = mma.contract
        dtype = rhs.ref.dtype.name
        self.check_tensor_product(op)
        if self.warp is None and not self.alone:
            self.meet_before(op)
            # A warp that is still in an earlier wait would miss its phase if commits
            # after this matmul ended the barrier's next one, too.
            self.sync()
            self.out.line("tensor_after();")
        right_ring = self.rings[rhs]
        rows, columns = sums.ref.shape
        blocks, group = -(-rows // blackwell.LANES), self.group
        kind = blackwell.SCALED if mma.scales else blackwell.KINDS[dtype][0]
        in_tensor_memory = lhs.ref.space == "tmem"
        name = blackwell.product_name(kind, group, in_tensor_memory)
        self.instructions[name] = blackwell.product(kind, group, in_tensor_memory)
        step = 32 // right_ring.dtype.bytes
        steps = right_ring.shape[right] // step
        to = self.lane_and_column(op, self.views[sums])
        with self.out.block(self.once.rstrip() or "if (true)"):
            b = self.tensor_descriptor(right_ring, right)
            if in_tensor_memory:
                a = self.lane_and_column(op, self.views[lhs])
            else:
                a = self.tensor_descriptor(self.rings[lhs], left)
            more = self.env[mma.adds].name
            for k, block in each_of(range(steps), range(blocks)):
                if in_tensor_memory:  # 32 bytes are 8 columns
                    from_ = block * steps * 8 + k * 8
                else:
                    from_ = self.step_offset(self.rings[lhs], left, k, step) >> 4
                    from_ += block * self.block_bytes(self.rings[lhs], left) >> 4
                with_ = self.step_offset(right_ring, right, k, step) >> 4
                flag = more if k == 0 else "1"
                there = f"{to} + {block * columns}" if block else to
                how, by = self.told(mma, k, steps), self.scales(mma, k, steps, block)
                call = f"{name}<{from_}, {with_}>"
                self.out.line(f"{call}({there}, {a}, {b}, {how}u, {flag}{by});")

    def told(self, mma: TensorMma, step: int, steps: int) -> int:
        """What an instruction is told about its operands."""
        columns, dtype = mma.sums.ref.shape[1], mma.rhs.ref.dtype.name
        rows, (left, right) = blackwell.LANES * self.group, mma.contract
        if mma.scales:
            number = step * unpacked_shape(mma.scales[0].ref.shape)[1] // steps
            return blackwell.scaled_instruction(rows, columns, dtype, number % COLUMNS)
        return blackwell.instruction(rows, columns, dtype, left == 0, right == 0)

    def scales(self, mma: TensorMma, step: int, steps: int, block: int) -> str:
        """Where those of a block of rows and of all columns are, if there are any."""
        places = ""
        for ref, part in zip(mma.scales, (block, 0), strict=False):
            groups, tall, _ = ref.ref.shape
            first = (step * groups // steps * tall + part) * COLUMNS
            places += f", {self.views[ref].pointer} + {first}"
        return places

    def emit_tensor_copy(self, op: Op) -> None:
        """Packed scales: 128 rows of them are a copy."""
        source, target = op.operands
        if self.is_authored:
            self.refuse(op, "copies into tensor memory", "interpret=pl.Checked()")
        from_ = self.plain_address(op, source, alignment=LINE_ALIGNMENT)
        to = self.views[target].pointer
        for n in range(target.ref.size // PACKED):
            place = f"{to} + {n * COLUMNS}, tensor_rows({from_} + {n * PACKED})"
            self.out.line(f"{self.once}tensor_copy({place});")

    def block_bytes(self, ring: Ring, contract: int) -> int:
        """From the rows of one instruction to those of the next."""
        if contract == 0:
            return blackwell.LANES // ring.panel_columns * ring.panel_bytes
        return blackwell.LANES * ring.swizzle

    def tensor_descriptor(self, ring: Ring, contract: int) -> str:
        name = self.out.fresh("o")
        apart = ring.panel_bytes if contract == 0 else 16
        call = f"tensor_operand<{ring.swizzle}>({ring.address}, {apart})"
        self.out.line(f"const u64 {name} = {call};")
        return name

    def check_tensor_product(self, op: Op) -> None:
        mma = TensorMma.of(op)
        sums, lhs, rhs = mma.sums, mma.lhs, mma.rhs
        dtype, columns = rhs.ref.dtype.name, sums.ref.shape[1]
        known = dtype in blackwell.KINDS and lhs.ref.dtype == rhs.ref.dtype
        if not known or sums.ref.dtype.name != blackwell.SUMS.get(dtype, "f32"):
            self.refuse(op, "the matrix instruction does not support these dtypes")
        if self.is_authored and sums.ref.shape[0] != blackwell.LANES:
            self.refuse(op, f"{sums.ref.shape[0]} rows, not {blackwell.LANES}")
        if columns % (16 * self.group) or columns > 256:
            self.refuse(op, f"{columns} columns, not a multiple of 16 up to 256")
        is_wide = lhs.ref.dtype.bytes == WORD
        if self.is_authored and lhs.ref.space == "tmem" and not is_wide:
            self.refuse(op, f"a left operand of {lhs.ref.dtype} in tensor memory")
        for side, along in zip((lhs, rhs), mma.contract, strict=True):
            if side.ref.space == "tmem":
                continue
            ring = self.rings.get(side)
            if ring is None or not (ring.has_whole_rows and ring.has_whole_panels):
                self.refuse(
                    op, f"{side.type} is not swizzled, or not made of whole panels"
                )
            if along == 0 and side.ref.dtype.bytes == WORD:
                self.refuse(op, f"{side.ref.dtype} operands must be contiguous along k")
            if ring.shape[along] * ring.dtype.bytes % 32:
                self.refuse(
                    op, f"k={ring.shape[along]} elements are not a multiple of 32 bytes"
                )

    def emit_tensor_commit(self, op: Op) -> None:
        at, axes = self.barriers[op.operands[0]], op.attrs["axes"]
        if axes:
            pattern = sum(1 << n for n in self.peers(axes))
            blocks = f"{pattern} << ({self.first_peer(axes)})"
            self.out.line(f"{self.once}tensor_commit_to({at}, {blocks});")
        else:
            self.out.line(f"{self.once}tensor_commit<{self.group}>({at});")

    # --- outgoing tiles ---

    def is_staged(self, tile: Tile, spread: Spread) -> bool:
        if not self.columns:
            return super().is_staged(tile, spread)
        rows, columns = spread.shape
        if rows % blackwell.LANES or spread != self.tensor_spread(rows, columns):
            return False
        return row_columns(spread) * tile.dtype.bytes % STAGED_BYTES == 0

    def copy_tile_out(self, tile: Tile, view: View) -> None:
        """A thread has a row: it stores vectors of 16 bytes of it, swizzled."""
        if not self.columns:
            super().copy_tile_out(tile, view)
            return
        assert tile.spread is not None
        width, step = tile.dtype.bytes, blackwell.LANES * STAGED_BYTES
        columns, own = STAGED_BYTES // width, row_columns(tile.spread)
        number = self.map_of(view, (blackwell.LANES, columns), STAGED_BYTES)
        if self.staging is None:
            self.staging = self.reserve(2 * step * self.warpgroups, 1024)
        base, row = self.out.fresh("stage"), f"thread % {blackwell.LANES}"
        staged = f"shared_address(shared) + {self.staging} + group * {2 * step}"
        self.out.line(f"const u32 {base} = {staged};")
        blocks, panels = tile_blocks(tile.spread), own // columns
        by_rows = tile.spread.lanes[-1].dim == 0
        down, across = (d.axis for d in view.dims)
        for turn in range(blocks * panels):
            block, panel = divmod(turn, panels)
            slot = (turn + blocks * panels) % 2  # see `Explicit.copy_tile_out`
            at = f"{base} + {slot * step}"
            reading = 0 if turn == 0 and slot == 1 else 1
            self.out.line(f"if (thread % 128 == 0) copies_reading<{reading}>();")
            self.out.line("meet(2 + group, 128);")
            first = (block * own + panel * columns) * width // WORD
            place = f"{at} + {row} * {STAGED_BYTES} + ((i ^ {row} / 2 % 4) * 16)"
            words = f"(u32*)({tile.name} + {first} + i * 4)"
            self.out.line(f"EACH({STAGED_BYTES // 16}) put_vector({place}, {words});")
            self.out.line("stores_before_copies();")
            self.out.line("meet(2 + group, 128);")
            starts = list(view.starts)
            own_rows = f"(int)group * {blackwell.LANES * blocks}"
            if by_rows and self.warpgroups > 1:
                starts[down] = plus(starts[down], Term(own_rows))
            elif self.warpgroups > 1:
                starts[across] = plus(starts[across], Term(f"(int)group * {own}"))
            starts[down] = plus(starts[down], blackwell.LANES * block)
            starts[across] = plus(starts[across], panel * columns)
            places = ", ".join(text_of(s) for s in reversed(starts))
            call = (
                f"copy_out_{len(starts)}(maps + {number * MAP_BYTES}, {at}, {places})"
            )
            self.out.line(f"if (thread % 128 == 0) {{ {call}; copies_together(); }}")

    # --- barriers ---

    def arrivals_of(self, ref: RefType) -> int:
        assert ref.layout is not None
        return ref.layout.numbers[0] * (1 if len(ref.layout.numbers) > 1 else WARPS)

    def emit_barrier_expect(self, op: Op) -> None:
        barrier, bytes_ = op.operands[0], op.attrs["bytes"]
        at = self.barriers[barrier]
        if orders_tensor_core(barrier) and self.is_authored:
            self.out.line("tensor_before();")
            self.sync()
            word = (
                f"barrier_expect({at}, {bytes_})" if bytes_ else f"barrier_arrive({at})"
            )
            self.out.line(f"{self.once}{word};")
        elif self.warp is not None:  # for all four warps
            self.out.line("__syncwarp();")
            word = f"barrier_expect_for({at}, {bytes_}, {WARPS});"
            if not bytes_:
                word = f"barrier_arrive_for({at}, {WARPS});"
            self.out.line(f"{self.once}{word}")
        else:
            super().emit_barrier_expect(op)

    def emit_barrier_wait(self, op: Op) -> None:
        super().emit_barrier_wait(op)
        # A thread that is alone and waits for tensor memory multiplies.
        if orders_tensor_core(op.operands[0]) or op.attrs.get(BEFORE_PRODUCTS):
            self.out.line("tensor_after();")

    def emit_barrier_arrive(self, op: Op) -> None:
        if orders_tensor_core(op.operands[0]) and not self.is_authored:
            self.out.line("tensor_before();")
            self.out.line("__syncwarp();")
        super().emit_barrier_arrive(op)

    def emit_cluster_arrive(self, op: Op) -> None:
        if not orders_tensor_core(op.operands[0]):
            super().emit_cluster_arrive(op)
            return
        axes, at = op.attrs["axes"], self.barriers[op.operands[0]]
        further = self.peers(axes)
        if op.attrs["to"] == "first":
            further = further[:1]
        self.out.line("tensor_before();")
        self.sync()
        for lane, step in enumerate(further):
            block = f"{self.first_peer(axes)} + {step}"
            own = "thread % 32" if self.warp is not None else "thread"
            self.out.line(f"if ({own} == {lane}) arrive_at({at}, {block});")

    def emit_cluster_copy(self, op: Op) -> None:
        if op.attrs["to"] != "first" or self.arch != "sm_100a":
            super().emit_cluster_copy(op)
            return
        source, target, barrier = op.operands
        self.meet_before(op)
        there = f"block_address({self.barriers[barrier]}, "
        there += f"{self.first_peer(op.attrs['axes'])})"
        for at, map_, places in self.boxes(op, self.views[source], target):
            where = f"{map_}, {there}"
            call = f"copy_for_first_{len(places)}({at}, {where}, {', '.join(places)});"
            self.out.line(self.once + call)

    # --- single warps ---

    def emit_warps(self, op: Op) -> None:
        for number, region in enumerate(op.regions):
            if not region.ops:
                continue
            with self.out.block(f"if (warp % 4 == {number})"):
                self.warp = number
                self.block(region)
                self.warp = None

    @property
    def once(self) -> str:
        return super().once if self.warp is None else "if (thread % 32 == 0) "

    def sync(self) -> None:
        if self.warp is None:
            super().sync()
        else:
            self.out.line("__syncwarp();")

    def meet_before(self, op: Op) -> None:
        if self.warp is None:
            super().meet_before(op)

    def alloc_local(self, op: Op) -> None:
        """A number that is private to each thread."""
        name = self.out.fresh("own")
        self.out.line(f"{self.type(op.result.ref.dtype, op)} {name};")
        self.locals[op.result] = name


RULES = {
    "load": TensorMemory.emit_load,
    "store": TensorMemory.emit_store,
    "roles": TensorMemory.emit_roles,
    "warps": TensorMemory.emit_warps,
    "barrier_expect": TensorMemory.emit_barrier_expect,
    "barrier_arrive": TensorMemory.emit_barrier_arrive,
    "barrier_wait": TensorMemory.emit_barrier_wait,
    "cluster_arrive": TensorMemory.emit_cluster_arrive,
    "cluster_copy": TensorMemory.emit_cluster_copy,
    "tensor_mma": TensorMemory.emit_tensor_mma,
    "tensor_copy": TensorMemory.emit_tensor_copy,
    "tensor_commit": TensorMemory.emit_tensor_commit,
    "tensor_wait": TensorMemory.emit_tensor_wait,
}
