"""How the elements of a tile are distributed over the threads of a thread block.

A `Spread` says for each dimension which digits of the thread number and of the register
number make up the coordinate: a sum of digit times stride. The layouts of the explicit
level are such spreads: `@striped` (`striped`: vectors of consecutive elements, for row
kernels), `@acc` (`accumulator`: of a warpgroup's matrix instruction), `@row` and `@col`
(`Spread.without` a dimension: what a reduction leaves).

Threads are divided by powers of two, so some registers hold elements past the end of a
tile: *padding*, whose contents are undefined. Elementwise ops ignore it; loads, stores
and reductions skip it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pallasite.target.chip import power_of_two

WARP, WARPGROUP = 32, 128


@dataclass(frozen=True)
class Lane:
    """A digit of the thread number: `thread / unit % count`."""

    unit: int
    count: int
    dim: int
    stride: int


@dataclass(frozen=True)
class Digit:
    """A digit of the register number; the last one varies fastest."""

    count: int
    dim: int
    stride: int


@dataclass(frozen=True)
class Spread:
    """Where each element of a tile is."""

    shape: tuple[int, ...]
    lanes: tuple[Lane, ...]
    digits: tuple[Digit, ...]

    @property
    def registers(self) -> int:
        return prod(d.count for d in self.digits)

    def covered(self, dim: int) -> int:
        """Elements along a dimension that have a place, including padding."""
        parts = [*self.lanes, *self.digits]
        return 1 + sum((p.count - 1) * p.stride for p in parts if p.dim == dim)

    def has_padding(self, dim: int) -> bool:
        return self.covered(dim) > self.shape[dim]

    def lane_text(self, dim: int, thread: str) -> str:
        """The thread's part of a coordinate, as C++."""
        terms = []
        for lane in self.lanes:
            if lane.dim == dim and lane.count > 1:
                digit = thread if lane.unit == 1 else f"{thread} / {lane.unit}"
                terms.append(f"{digit} % {lane.count} * {lane.stride}")
        return " + ".join(terms) or "0"

    def lane_multiple(self, dim: int) -> int:
        """A power of two (or 0) that divides the thread's part of a coordinate."""
        parts = [p.stride for p in self.lanes if p.dim == dim and p.count > 1]
        return min((s & -s for s in parts), default=0)

    def digit_text(self, dim: int, register: str = "i") -> str:
        """The register's part of a coordinate."""
        return self._sum([d.stride * (d.dim == dim) for d in self.digits], register)

    def _sum(self, weights: Sequence[int], register: str) -> str:
        register = register if register.isidentifier() else f"({register})"
        terms, unit = [], self.registers
        for n, (digit, weight) in enumerate(zip(self.digits, weights, strict=True)):
            unit //= digit.count
            if not weight or digit.count == 1:
                continue
            text = register if unit == 1 else f"{register} / {unit}"
            is_first = all(d.count == 1 for d in self.digits[:n])
            text = text if is_first else f"{text} % {digit.count}"
            terms.append(text if weight == 1 else f"{text} * {weight}")
        return " + ".join(terms) or "0"

    def register_without(self, dims: Sequence[int], register: str = "i") -> str:
        """The number of a register in `without(dims)`, as C++."""
        kept = [d.dim not in dims for d in self.digits]
        weights, unit = [0] * len(kept), 1
        for n in reversed(range(len(kept))):
            if kept[n]:
                weights[n], unit = unit, unit * self.digits[n].count
        return self._sum(weights, register)

    def corners(self) -> list[int]:
        """The registers at the corners of a thread's part of a tile."""
        found = [0]
        for dim in range(len(self.shape)):
            unit, last = 1, 0
            for digit in reversed(self.digits):
                last += unit * (digit.count - 1) if digit.dim == dim else 0
                unit *= digit.count
            found += [number + last for number in found]
        return sorted(set(found))

    # --- spreads of related tiles ---

    def without(self, dims: Sequence[int]) -> "Spread":
        """What a reduction along `dims` leaves, equal in threads that differ there."""
        kept = [d for d in range(len(self.shape)) if d not in dims]
        return self._renumbered([kept.index(d) if d in kept else None
                                 for d in range(len(self.shape))],
                                [self.shape[d] for d in kept])  # fmt: skip

    def permuted(self, perm: Sequence[int]) -> "Spread":
        """The spread of the transpose, whose dimension n is `perm[n]` of this one."""
        shape = [self.shape[d] for d in perm]
        return self._renumbered([perm.index(d) for d in range(len(perm))], shape)

    def with_units(self, shape: Sequence[int], dims: Sequence[int]) -> "Spread":
        """For a shape with dimension n of this one at `dims[n]` and ones elsewhere."""
        return self._renumbered(list(dims), shape)

    def sliced(
        self, starts: Sequence[int], limits: Sequence[int]
    ) -> tuple["Spread", int] | None:
        """The spread of a slice, and the register at which it starts here.

        None: the slice does not consist of whole registers of all threads.
        """
        digits, first = list(self.digits), 0
        for dim, (start, limit) in enumerate(zip(starts, limits, strict=True)):
            if (start, limit) == (0, self.shape[dim]):
                continue
            own = [n for n, digit in enumerate(digits) if digit.dim == dim]
            if not own:
                return None
            outer = max(own, key=lambda n: digits[n].stride)
            step = digits[outer].stride
            others = [*self.lanes, *digits[:outer], *digits[outer + 1 :]]
            inner = 1 + sum((p.count - 1) * p.stride for p in others if p.dim == dim)
            if inner != step or start % step or limit % step:
                return None
            digits[outer] = Digit((limit - start) // step, dim, step)
            first += start // step * prod(d.count for d in self.digits[outer + 1 :])
        shape = tuple(b - a for a, b in zip(starts, limits, strict=True))
        return Spread(shape, self.lanes, tuple(digits)), first

    def register_in(self, whole: "Spread", register: str = "i") -> str:
        """The number in the whole tile of a slice's register, given its first."""
        units = [
            prod(d.count for d in whole.digits[n + 1 :])
            for n in range(len(whole.digits))
        ]
        return self._sum(units, register)

    def _renumbered(self, new: Sequence[int | None], shape: Sequence[int]) -> "Spread":
        lanes = [(p, new[p.dim]) for p in self.lanes]
        digits = [(p, new[p.dim]) for p in self.digits]
        return Spread(
            tuple(shape),
            tuple(
                Lane(p.unit, p.count, d, p.stride) for p, d in lanes if d is not None
            ),
            tuple(Digit(p.count, d, p.stride) for p, d in digits if d is not None),
        )

    def __str__(self) -> str:
        lanes = " ".join(f"{p.unit}:{p.count}->{p.dim}*{p.stride}" for p in self.lanes)
        digits = " ".join(f"{p.count}->{p.dim}*{p.stride}" for p in self.digits)
        return f"threads [{lanes}] registers [{digits}]"


def striped(shape: Sequence[int], threads: int, vector: int) -> Spread:
    """Vectors of consecutive elements along the last dimension, rows over warps.

    The lanes of a warp are neighbours along the last dimension; warps are assigned to
    rows first, so that a row is reduced within as few warps as possible.
    """
    *rows, columns = shape
    vector = min(vector, power_of_two(columns))
    across = min(power_of_two(columns) // vector, threads)
    down = threads // max(across, 1)
    while across > WARP and down < prod(map(power_of_two, rows)):
        across, down = across // 2, down * 2
    last = len(shape) - 1
    lanes = [Lane(1, across, last, vector)]
    digits = [
        Digit(-(-columns // (across * vector)), last, across * vector),
        Digit(vector, last, 1),
    ]
    unit = across
    for dim in reversed(range(last)):
        size = power_of_two(shape[dim])
        count = min(size, down)
        lanes.append(Lane(unit, count, dim, 1))
        digits.insert(0, Digit(-(-shape[dim] // count), dim, count))
        unit, down = unit * count, down // count
    return Spread(tuple(shape), tuple(p for p in lanes if p.count > 1), tuple(digits))


def accumulator(rows: int, columns: int, groups: int, beside: bool = False) -> Spread:
    """`@acc`: the accumulator of whole warpgroups, each with its share of the rows.

    Of 16 rows a thread has two. In the instruction, the second is 8 rows after the
    first, but where left operands come from registers, the mapping from rows of the
    tile to rows of the instruction is free: with `beside` it is the next one.
    """
    blocks = -(-rows // (64 * groups))
    first, second = (2, 1) if beside else (1, 8)
    lanes = [Lane(1, 4, 1, 2), Lane(4, 8, 0, first), Lane(32, 4, 0, 16)]
    if groups > 1:
        lanes.append(Lane(WARPGROUP, groups, 0, 64 * blocks))
    digits = (
        Digit(blocks, 0, 64),
        Digit(columns // 8, 1, 8),
        Digit(2, 0, second),
        Digit(2, 1, 1),
    )
    return Spread((rows, columns), tuple(lanes), digits)


def left_fragments(rows: int, depth: int, each: int, groups: int) -> Spread:
    """Left operands of products in registers, with `each` elements in a word.

    With two it is the accumulator's layout.
    """
    blocks = -(-rows // (64 * groups))
    lanes = [Lane(1, 4, 1, each), Lane(4, 8, 0, 1), Lane(32, 4, 0, 16)]
    if groups > 1:
        lanes.append(Lane(WARPGROUP, groups, 0, 64 * blocks))
    words = Digit(depth // (4 * each), 1, 4 * each)
    digits = (Digit(blocks, 0, 64), words, Digit(2, 0, 8), Digit(each, 1, 1))
    return Spread((rows, depth), tuple(lanes), digits)


def right_fragments(depth: int, columns: int, each: int) -> Spread:
    """Right operands of products in registers, which every warp has."""
    words = Digit(depth // (4 * each), 0, 4 * each)
    digits = (Digit(columns // 8, 1, 8), words, Digit(each, 0, 1))
    lanes = (Lane(1, 4, 0, each), Lane(4, 8, 1, 1))
    return Spread((depth, columns), lanes, digits)
