"""How much shared memory Triton takes for a program, by number of stages.

A kernel that XLA hands to Triton fails to compile if it takes more than the chip has,
when it is too late to choose anything else; so the model counts everything that was
observed to take some, with Triton 3.9's own compiler:

- The right operand of a matmul, and a left operand that no matmul computed, from where
  it is loaded or computed to the last matmul that takes it.
- In a loop, every load from which operands of a matmul are computed, directly or not:
  Triton prefetches it into a buffer per stage, or one fewer if it goes through
  registers before it is multiplied (a mask, a conversion, a bias).
- While they run: transposes that feed no matmul and, of tiles that matmuls compute,
  reductions of columns, stores, and loads combined with them, since an accumulator
  fragment does not consist of rows of memory.
- While they run: moves of elements of a vector, which several warps hold, and reshapes
  that move padding. Of tiles with more dimensions, a warp takes whole lines and moves
  elements among its threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from pallasite.backends.triton.flat_indices import MOST_GATHERED, held_bytes
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Dot, DotSide
from pallasite.passes.analysis.live_tiles import LiveTiles
from pallasite.target.chip import Gpu, physical

WARP_ROWS = 16  # of a matmul that one warp computes
MOVES = frozenset({"slice", "dynamic_slice", "dynamic_update_slice", "concatenate"})
MOVES |= {"pad", "rev", "exchange", "gather"}


class Peak(NamedTuple):
    """What a program needs while an op runs, and the operands in shared memory then."""

    bytes: int = 0
    op: Op | None = None
    operands: frozenset[Value] = frozenset()


class SharedMemory(LiveTiles):
    """What one program takes, given its number of warps.

    For AMD's chips, results of matmuls are stored from the registers they are computed
    in, and are not multiplied from there.
    """

    def __init__(self, kernel: Kernel, warps: int, chip: Gpu | None = None):
        super().__init__(kernel)
        self.warps, self.is_amd = warps, chip is not None and chip.is_amd
        self.in_registers = chip.stages_in_registers if chip is not None else 0
        self.from_products = values_from_products(self.ops)
        self.operands = dict[Op, set[Value]]()  # of each matmul, in shared memory
        self.held = dict[Value, int]()  # and their bytes, as they are multiplied
        for dot in (Dot.of(op) for op in self.ops if op.name == "dot"):
            found = {
                self.source(side.value): operand_bytes(dot, side)
                for side in dot.sides
                if side is dot.rhs or not self.stays_in_registers(side)
            }
            self.operands[dot.op] = set(found)
            for value, size in found.items():
                self.held[value] = max(size, self.held.get(value, 0))

    def bytes(self, stages: int) -> int:
        """The peak."""
        return self.peak(stages).bytes

    def peak(self, stages: int) -> "Peak":
        needs = self.needs(self.kernel.body, set(), stages, in_loop=False)
        return max(needs, key=lambda peak: peak.bytes, default=Peak())

    def needs(
        self, block: Block, after: set[Value], stages: int, in_loop: bool
    ) -> Iterator["Peak"]:
        """What each op of a block needs, given the operands that are live after it."""
        ahead = self.loaded_ahead(block) if in_loop and stages > 1 else frozenset()
        # A loop's buffers exist in all of its iterations.
        buffers = sum(self.buffer_bytes(load, stages) for load in ahead)
        own = {op.result for op in ahead}
        live = after - own
        for op in reversed(block.ops):
            live |= self.multiplied(op) - own
            scratch = 0 if op in ahead else self.scratch_bytes(op)
            held = sum(self.held[v] for v in live)
            yield Peak(buffers + held + scratch, op, frozenset(live))
            for region in op.regions:
                is_loop = op.name in ("for", "while")
                for inner in self.needs(region, live, stages, is_loop):
                    yield inner._replace(bytes=buffers + inner.bytes)
            live = live.difference(op.results)

    def has_loads_ahead(self) -> bool:
        """Whether more stages change anything."""
        loops = [op for op in self.ops if op.name in ("for", "while")]
        return any(self.loaded_ahead(loop.regions[-1]) for loop in loops)

    def multiplied(self, op: Op) -> set[Value]:
        """Operands in shared memory that are multiplied in an op."""
        if op.name == "dot":
            return self.operands[op]
        inner = {o for region in op.regions for o in walk(region)}
        made = {v for o in inner for v in o.results}
        taken = (self.operands[o] for o in inner if o.name == "dot")
        return set[Value]().union(*taken) - made

    def loaded_ahead(self, block: Block) -> frozenset[Op]:
        """The loads of an iteration that feed the operands of its matmuls."""
        here = {v: op for op in block.ops for v in op.results}
        reached = set[Op]()
        waiting = [op for op in block.ops if op.name == "dot"]
        while waiting:
            op = waiting.pop()
            if op not in reached:
                reached.add(op)
                inner = set[Value]().union(*map(self.captured, op.regions))
                used = inner.union(op.operands)
                waiting += [here[v] for v in used if v in here]
        return frozenset(op for op in reached if op.name == "load")

    def buffer_bytes(self, load: Op, stages: int) -> int:
        """Bytes a load has in flight; if it is multiplied, including that."""
        waiting = (stages - 1 - self.in_registers) * tile_bytes(load.result)
        return waiting + self.held.get(load.result, 0)

    def scratch_bytes(self, op: Op) -> int:
        """What an op takes while it runs."""
        if op.name == "transpose" and not self.feeds_dot(op):
            return self.turned_bytes(op)
        if op.name == "reduce" and op.operands[0] in self.from_products:
            # The warps of a matmul have different rows.
            across = op.operands[0].tile.rank - 1 not in op.attrs["axes"]
            elements = sum(prod(physical(v.tile.shape)) for v in op.results)
            return self.warps * 4 * elements if across else 0
        if op.name == "load" and op.result not in self.held:
            return tile_bytes(op.result) if self.meets_product(op) else 0
        if self.warps > 1 and not op.regions:
            picked = picked_bytes(op)
            if picked:
                return picked
        if op.name == "atomic_rmw" or (op.name == "store" and not self.is_amd):
            tiles = [v for v in op.operands if v in self.from_products]
            return max((tile_bytes(v) for v in tiles if v.tile.rank > 1), default=0)
        return 0

    def turned_bytes(self, op: Op) -> int:
        """What a transposed matrix takes: it goes through shared memory whole.

        With more dimensions Triton may exchange a part at a time.
        """
        shape = op.result.tile.shape
        return 0 if len(shape) != 2 or 1 in shape else tile_bytes(op.result)

    def source(self, value: Value) -> Value:
        """What an operand is a view of."""
        op = self.producers.get(value)
        while op is not None and op.name in ("transpose", "reshape"):
            value = op.operands[0]
            op = self.producers.get(value)
        return value

    def stays_in_registers(self, side: DotSide) -> bool:
        """Whether a left operand is multiplied by the warps that have its rows."""
        tile = side.value.tile
        if self.is_amd:
            return False
        is_transposed = side.contract != (tile.rank - 1,)
        rows = prod(side.sizes(side.free))
        if is_transposed or tile.dtype.bits > 16 or rows < WARP_ROWS * self.warps:
            return False
        return side.value in self.from_products

    def meets_product(self, load: Op) -> bool:
        """Whether a loaded tile is combined with one computed from matmuls."""
        reached, waiting = {load.result}, [load.result]
        while waiting:
            for user in self.used.get(waiting.pop(), []):
                others = set(user.operands) - reached
                if user.regions or not others.isdisjoint(self.from_products):
                    return bool(self.from_products)
                waiting += [v for v in user.results if v not in reached]
                reached.update(user.results)
        return False


def values_from_products(ops: Iterable[Op]) -> set[Value]:
    """Tiles that are computed from matmuls, in program order."""
    found = set[Value]()
    for op in ops:
        made = list(op.results)
        if op.regions:
            made += [v for region in op.regions for v in region.params]
            inner = [o for region in op.regions for o in walk(region)]
            is_one = any(o.name == "dot" for o in inner)
        else:
            is_one = op.name == "dot" or not found.isdisjoint(op.operands)
        if is_one and op.name != "load":
            found.update(v for v in made if not v.is_ref and v.tile.rank)
    return found


def picked_bytes(op: Op) -> int:
    """Bytes of the vector that an op picks elements from, if it does."""
    if op.name == "reshape":
        old, new = op.operands[0].tile.shape, op.result.tile.shape
        moves = 0 not in new and not keeps_padding(old, new)
        return tile_bytes(op.operands[0]) if moves else 0
    if op.name == "gather" and held_bytes(op) > MOST_GATHERED:
        return 0  # the emitter refuses it, and says what else to do
    vectors = [v for v in op.operands if not v.is_ref and v.tile.rank == 1]
    return max(map(tile_bytes, vectors), default=0) if op.name in MOVES else 0


def keeps_padding(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a reshape leaves padding where it is.

    Dimensions become others in groups. Positions in a group stay the same if only the
    first of either side is padded: the padding is then past all of them.
    """
    a = [n for n in old if n != 1]
    b = [n for n in new if n != 1]
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        while prod(left) != prod(right):
            if prod(left) < prod(right):
                left.append(a.pop(0))
            else:
                right.append(b.pop(0))
        if any(n & (n - 1) for n in (*left[1:], *right[1:])):
            return False
    return True


def operand_bytes(dot: Dot, side: DotSide) -> int:
    """Bytes of one operand of a matmul, in the wider type of both."""
    bits = max(s.value.tile.dtype.bits for s in dot.sides)
    return prod(physical(side.value.tile.shape)) * bits // 8


def tile_bytes(value: Value) -> int:
    return prod(physical(value.tile.shape)) * max(value.tile.dtype.bits, 8) // 8
