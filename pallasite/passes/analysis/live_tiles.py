"""live_tiles: register pressure of a program's tiles.

Elementwise code and stores run element by element, so only tiles that are live across
other ops occupy registers as a whole. A converted tile is counted in its narrower type,
since the conversion can be rematerialised at its uses.
"""

from collections.abc import Sequence
from math import prod

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import users_of


class LiveTiles:
    """The live ranges of tiles of a promoted kernel."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.ops = list(walk(kernel.body))
        self.producers = {v: op for op in self.ops for v in op.results}
        self.used = users_of(kernel.body)
        self.varying = _varying(self.ops)

    def peak_words(self) -> int:
        """The peak number of 32-bit words that tiles of one program occupy."""
        return self.peak(self.kernel.body, set())

    def feeds_dot(self, op: Op) -> bool:
        """Whether a loaded tile is used only as an operand of matmuls."""
        users = self.used.get(op.result, [])
        moved = ("transpose", "reshape")
        return bool(users) and all(
            user.name == "dot" or (user.name in moved and self.feeds_dot(user))
            for user in users
        )

    def is_added(self, product: Value) -> bool:
        return [user.name for user in self.used.get(product, [])] == ["add"]

    def peak(self, block: Block, after: set[Value]) -> int:
        """Peak live words in a block, including what is live after it."""
        live = after | set(block.yields)
        most = total = sum(map(self.words, live))
        for op in reversed(block.ops):
            if not self.is_elementwise(op):
                most = max(most, total)
            gone = live.intersection(op.results)
            live -= gone
            total -= sum(map(self.words, gone))
            for region in op.regions:
                most = max(most, self.peak(region, live | self.captured(region)))
            uses = set(op.operands).union(*map(self.captured, op.regions))
            new = uses - live
            live |= new
            total += sum(map(self.words, new))
            if op.name == "dot":  # its operands are whole tiles
                most = max(most, total)
        return most

    def is_elementwise(self, op: Op) -> bool:
        spread = ("store", "broadcast_in_dim", "reshape", "constant", "iota")
        return op.name in spread or table()[op.name].elementwise

    def captured(self, region: Block) -> set[Value]:
        """Values from outside that a region uses."""
        inside = set(region.params)
        uses: list[Value] = [*region.yields]
        for op in walk(region):
            inside.update(op.results)
            for inner in op.regions:
                inside.update(inner.params)
                uses += inner.yields
            uses += op.operands
        return set(uses) - inside

    def words(self, value: Value) -> int:
        if value.is_ref or not value.tile.shape:
            return 0
        op = self.producers.get(value)
        if op is not None and op.name in ("constant", "iota"):
            return 0
        if op is not None and op.name == "load" and self.feeds_dot(op):
            return 0  # in shared memory
        if op is not None and op.name == "dot" and self.is_added(value):
            return 0  # in the accumulator's registers
        bits = 8 if value.tile.dtype.is_bool else value.tile.dtype.bits
        if op is not None and op.name == "cast":  # rematerialised at its uses
            bits = min(bits, op.operands[0].tile.dtype.bits)
        shape = self.varying.get(value, value.tile.shape)
        return prod(1 << max(n - 1, 0).bit_length() for n in shape) * bits // 32


def _varying(ops: Sequence[Op]) -> dict[Value, tuple[int, ...]]:
    """The shape of each tile's distinct elements: 1 along an axis where all are equal,
    since equal elements share a register."""
    rows, found = table(), dict[Value, tuple[int, ...]]()

    def shape(value: Value) -> tuple[int, ...]:
        return found.get(value, value.tile.shape)

    for op in ops:
        for result in op.results:
            if result.is_ref:
                continue
            full = result.tile.shape
            if op.name == "constant":
                found[result] = (1,) * len(full)
            elif op.name == "iota":
                along = op.attrs["dim"]
                found[result] = tuple(
                    n if d == along else 1 for d, n in enumerate(full)
                )
            elif op.name == "broadcast_in_dim":
                old = dict(zip(op.attrs["dims"], shape(op.operands[0]), strict=True))
                found[result] = tuple(old.get(d, 1) for d in range(len(full)))
            elif rows[op.name].elementwise:
                shapes = [shape(v) for v in op.operands if v.tile.rank == len(full)]
                # The operand of a bitcast between widths differs in rank.
                found[result] = tuple(map(max, zip(*shapes or [full], strict=True)))
            else:
                found[result] = full
    return found
