"""Matmuls: any contraction as `tt.dot`s, or as multiply and sum.

The operands are brought to (batch, rows, depth) and (batch, depth, columns). Each
matmul of a batch is a `tt.dot` of its own: on an H200, Triton's pipelined code for
`tt.dot` of rank 3 reads past its operands. Padding along the depth is zeroed on both
sides. Tensor cores need at least 16 along each
dimension (bytes: 32 in depth): fewer rows or columns are repeated, a smaller depth is
filled with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pallasite.backends.triton.core import FLOAT_BITS
from pallasite.backends.triton.elementwise import cast_value
from pallasite.backends.triton.text import FLOATS_OF_8_BITS, Val
from pallasite.backends.triton.tiles import Tiles
from pallasite.ir.nodes import Op
from pallasite.ir.roles import Dot, DotSide
from pallasite.ir.types import DTYPES, F32, DType

SMALLEST = 16
BYTES = ("i8", *FLOATS_OF_8_BITS)  # tensor cores need a depth of 32 for these
# Below this many multiplications, operands are multiplied and summed elementwise.
FEW_PRODUCTS = 1 << 14
MOST_MULTIPLIED = 1 << 18  # elementwise, where there is no matrix instruction


@dataclass(frozen=True)
class Algorithm:
    """How a matmul is computed.

    Args:
        mode: what Triton does with f32 operands.
        operands: the type they are first rounded to; None: they stay as they are.
        pieces: numbers of that type into which an operand is split.
        products: how many of the pieces' products are added up, the largest ones.
    """

    mode: str = "ieee"
    operands: str | None = None
    pieces: int = 1
    products: int = 1


# By the names of `precision`, as JAX and Triton spell them.
ALGORITHMS = {
    "default": Algorithm(),
    "high": Algorithm("tf32x3"),
    "highest": Algorithm(),
    "ieee": Algorithm(),
    "tf32": Algorithm("tf32"),
    "tf32x3": Algorithm("tf32x3"),
    "f64_f64_f64": Algorithm(operands="f64"),
    "f32_f32_f32": Algorithm(operands="f32"),
    "tf32_tf32_f32": Algorithm("tf32", "f32"),
    "tf32_tf32_f32_x3": Algorithm("tf32x3", "f32"),
    "f16_f16_f16": Algorithm(operands="f16"),
    "f16_f16_f32": Algorithm(operands="f16"),
    "bf16_bf16_bf16": Algorithm(operands="bf16"),
    "bf16_bf16_f32": Algorithm(operands="bf16"),
    "bf16_bf16_f32_x3": Algorithm(operands="bf16", pieces=2, products=3),
    "bf16_bf16_f32_x6": Algorithm(operands="bf16", pieces=3, products=6),
    "bf16_bf16_f32_x9": Algorithm(operands="bf16", pieces=3, products=9),
    **{
        f"any_f8_any_f8_{name}": Algorithm()
        for name in ("f32", "f32_fast_accum", "any", "any_fast_accum")
    },
}


class Dots(Tiles):
    """Emits `dot`."""

    def emit_dot(self, op: Op) -> None:
        dot = Dot.of(op)
        left, right = dot.sides
        self.layout(op.result.tile, op)
        lhs, lhs_free = self.grouped(left, depth_last=True)
        rhs, rhs_free = self.grouped(right, depth_last=False)
        batch, depth = left.sizes(left.batch), dot.depth
        rows, columns = prod(lhs_free), prod(rhs_free)
        algorithm = self.algorithm(op)
        kind = self.common_type(op)
        if algorithm.pieces > 1:
            kind = F32
        elif algorithm.operands is not None:
            kind = DTYPES[algorithm.operands]
        lhs = cast_value(self, op, lhs, left.value.tile.dtype, kind)
        rhs = cast_value(self, op, rhs, right.value.tile.dtype, kind)
        group = [prod(batch)] if batch else []
        last = len(group)
        lhs = self.without_padding(lhs, (*group, rows, depth), [last + 1], 0)
        rhs = self.without_padding(rhs, (*group, depth, columns), [last], 0)
        accumulator = _accumulator(kind, op.attrs["dtype"])
        if self.is_elementwise(lhs, rhs, kind, accumulator):
            result = self.multiply_and_sum(op, lhs, rhs, kind, accumulator)
        elif batch:
            pairs = zip(self.taken_apart(lhs), self.taken_apart(rhs), strict=True)
            each = [
                self.in_pieces(op, x, y, accumulator, algorithm)
                for x, y in list(pairs)[: prod(batch)]
            ]
            result = self.put_together([*each, *each[:1] * (lhs.shape[0] - len(each))])
        else:
            result = self.in_pieces(op, lhs, rhs, accumulator, algorithm)
        result = cast_value(self, op, result, accumulator, op.attrs["dtype"])
        full = (*batch, *lhs_free, *rhs_free)
        self.env[op.result] = self.regroup(result, (*group, rows, columns), full)

    def algorithm(self, op: Op) -> Algorithm:
        asked = (op.attrs["precision"] or "default").lower()
        if asked not in ALGORITHMS:
            self.refuse(
                op, f"precision {asked!r}", f"use one of {', '.join(ALGORITHMS)}"
            )
        return ALGORITHMS[asked]

    def in_pieces(
        self, op: Op, lhs: Val, rhs: Val, accumulator: DType, algorithm: Algorithm
    ) -> Val:
        """The matmul, or the sum of the matmuls of the operands' pieces."""
        if algorithm.pieces == 1:
            return self.matrix_product(op, lhs, rhs, accumulator, algorithm.mode)
        sides = [self.pieces(x, algorithm.pieces) for x in (lhs, rhs)]
        numbers = range(algorithm.pieces)
        pairs = sorted(((i, j) for i in numbers for j in numbers), key=sum)
        parts = [
            self.matrix_product(op, sides[0][i], sides[1][j], accumulator, "")
            for i, j in reversed(pairs[: algorithm.products])  # the largest one last
        ]
        small = parts[0]
        for part in parts[1:-1]:
            small = self.apply("arith.addf", small, part)
        # Infinity times a small piece is infinity too, of either sign.
        main = parts[-1]
        whole = self.apply("arith.addf", small, main)
        return self.select(self.is_finite(main), whole, main)

    def is_finite(self, x: Val) -> Val:
        size = self.apply("math.absf", x)
        return self.compare("olt", size, self.like(float("inf"), size))

    def pieces(self, x: Val, count: int) -> list[Val]:
        """An f32 tile as bf16 tiles that sum to it, the largest first."""
        found = [self.to_float(x, "bf16")]
        for _ in range(count - 1):
            taken = self.to_float(found[-1], "f32")
            # The remainder of infinity is zero, not NaN.
            rest = self.apply("arith.subf", x, taken)
            x = self.select(self.is_finite(taken), rest, self.like(0.0, rest))
            found.append(self.to_float(x, "bf16"))
        return found

    def grouped(self, side: DotSide, depth_last: bool) -> tuple[Val, list[int]]:
        """An operand as ([batch], rows, depth) or ([batch], depth, columns)."""
        value, batch, free, depth = side
        tail = (free, depth) if depth_last else (depth, free)
        order = [*batch, *tail[0], *tail[1]]
        x = self.env[value]
        if x.shape:
            x = self.transpose(x, order)
        group = [prod(side.sizes(batch))] if batch else []
        sizes = [prod(side.sizes(dims)) for dims in tail]
        x = self.regroup(x, side.sizes(order), (*group, *sizes))
        return x, side.sizes(free)

    def common_type(self, op: Op) -> DType:
        x, y = (v.tile.dtype for v in op.operands)
        small = all(d.is_integer and (d.bits == 4 or d.name == "i8") for d in (x, y))
        if small and op.attrs["dtype"].name == "i32":
            return DTYPES["i8"]  # represents all 4-bit numbers
        if x == y:
            return DTYPES["i32"] if x.is_bool else x
        if x.is_float and y.is_float:
            return max(x, y, key=lambda d: d.bits) if x.bits != y.bits else F32
        if x.is_float or y.is_float:
            return x if x.is_float else y
        return op.attrs["dtype"]

    def is_elementwise(
        self, lhs: Val, rhs: Val, kind: DType, accumulator: DType
    ) -> bool:
        if not kind.is_float and (kind.name != "i8" or accumulator.name != "i32"):
            return True
        *batch, rows, depth = lhs.shape
        products = prod(batch) * rows * depth * rhs.shape[-1]
        small = min(rows, depth, rhs.shape[-1]) < SMALLEST
        return small and products <= FEW_PRODUCTS

    def multiply_and_sum(
        self, op: Op, lhs: Val, rhs: Val, kind: DType, accumulator: DType
    ) -> Val:
        lhs = cast_value(self, op, lhs, kind, accumulator)
        rhs = cast_value(self, op, rhs, kind, accumulator)
        axis = len(lhs.shape) - 1
        shape = (*lhs.shape, rhs.shape[-1])
        if prod(shape) > MOST_MULTIPLIED:
            self.refuse(
                op,
                f"{kind} has no matrix instruction: the matmul would take "
                f"{prod(shape)} multiplications",
                "use f32, bf16, f16 or i8 operands, or smaller blocks",
            )
        left = self.spread(self.expand(lhs, axis + 1), shape)
        right = self.spread(self.expand(rhs, axis - 1), shape)
        name, add = ("arith.mulf", "arith.addf")
        if not accumulator.is_float:
            name, add = ("arith.muli", "arith.addi")
        product = self.apply(name, left, right)
        (result,) = self.fold(
            "tt.reduce", [product], axis, lambda a, b: [self.apply(add, a[0], b[0])]
        )
        return result

    def matrix_product(
        self, op: Op, lhs: Val, rhs: Val, accumulator: DType, mode: str
    ) -> Val:
        first = len(lhs.shape) - 2  # rows of lhs, depth of rhs
        rows, columns = lhs.shape[first], rhs.shape[-1]
        lhs = self.filled(self.repeated(lhs, first), first + 1)
        rhs = self.filled(self.repeated(rhs, first + 1), first)
        shape = (*lhs.shape[:-1], rhs.shape[-1])
        elem = self.elem(accumulator, op)
        zero = self.const(0, elem, shape)
        mode = f", inputPrecision = {mode}" if lhs.elem == "f32" else ""
        types = f"{lhs.type} * {rhs.type} -> {zero.type}"
        result = self.let(f"tt.dot {lhs}, {rhs}, {zero}{mode} : {types}", shape, elem)
        result = self.once(result, first, rows)
        return self.once(result, first + 1, columns)

    # --- batches ---

    def taken_apart(self, x: Val) -> list[Val]:
        """The matrices of a batch; Triton splits tiles of pairs only."""
        count, *matrix = x.shape
        if count == 1:
            return [self.reshape(x, matrix)]
        tiles = [self.transpose(x, (1, 2, 0))]
        while tiles[0].shape[2:] and (half := tiles[0].shape[2] // 2):
            shape = (*matrix, half, 2) if half > 1 else (*matrix, 2)
            pairs = [self.halves(self.reshape(tile, shape)) for tile in tiles]
            # Of tile n of m, the last bit of a number becomes the bit of value m.
            tiles = [pair[bit] for bit in range(2) for pair in pairs]
        return tiles

    def put_together(self, tiles: Sequence[Val]) -> Val:
        """The inverse of `taken_apart`."""
        if len(tiles) == 1:
            return self.expand(tiles[0], 0)
        rest, matrix = list(tiles), tiles[0].shape
        while len(rest) > 1:
            pairs = zip(rest, rest[len(rest) // 2 :], strict=False)
            joined = [self.joined(x, y) for x, y in pairs]
            shape = (*matrix, prod(joined[0].shape[len(matrix) :]))
            rest = [self.reshape(tile, shape) for tile in joined]
        return self.transpose(rest[0], (2, 0, 1))

    # --- operands smaller than a tensor core's minimum ---

    def repeated(self, x: Val, axis: int) -> Val:
        """Each row or column repeated up to the minimum size."""
        times = SMALLEST // x.shape[axis]
        if times <= 1:
            return x
        shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
        wide = self.spread(self.expand(x, axis + 1), shape)
        return self.reshape(wide, _merged(shape, axis))

    def filled(self, x: Val, axis: int) -> Val:
        """Zeros between the elements along the depth, the same in both operands."""
        smallest = 2 * SMALLEST if x.elem in BYTES else SMALLEST
        times = smallest // x.shape[axis]
        if times <= 1:
            return x
        shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
        wide = self.spread(self.expand(x, axis + 1), shape)
        kept = self.spread(self.below(1, shape, axis + 1), shape)
        wide = self.select(kept, wide, self.like(0, wide))
        return self.reshape(wide, _merged(shape, axis))

    def once(self, x: Val, axis: int, n: int) -> Val:
        """One of each group of equal rows or columns made by `repeated`."""
        times = x.shape[axis] // n
        if times == 1:
            return x
        shape = (*x.shape[:axis], n, times, *x.shape[axis + 1 :])
        split = self.reshape(x, shape)
        # Equal elements: any of them will do, and the maximum is one.
        name = "arith.maximumf" if x.elem in FLOAT_BITS else "arith.maxsi"
        (result,) = self.fold(
            "tt.reduce", [split], axis + 1, lambda a, b: [self.apply(name, a[0], b[0])]
        )
        return result


RULES = {
    "dot": Dots.emit_dot,
}


def _merged(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _accumulator(kind: DType, result: DType) -> DType:
    if kind.name == "f64":
        return kind
    if kind.is_float:
        return F32
    if kind.name == "i8" and result.name == "i32":
        return result
    return result if not result.is_float else DTYPES["i32"]
