"""Ops on whole tiles: constants, shape changes, reductions, dot.

Mosaic's vectors have at least one dimension, so scalars enter by `vector.broadcast` and
leave by `vector.extract`. Masks change shape as 32-bit integers.
"""

from collections.abc import Sequence
from math import gcd

from pallasite.backends.tpu.elementwise import Elementwise
from pallasite.backends.tpu.views import LANES
from pallasite.backends.tpu.writer import array, tile_text
from pallasite.ir.nodes import Op
from pallasite.ir.roles import Dot, DotSide
from pallasite.ir.types import BOOL, F32, I32, DType, TileType
from pallasite.ops.neutral import neutral

# Reductions the chip has across lanes and sublanes, by kind of element.
REDUCTIONS = {
    ("sum", "float"): "add",
    ("sum", "int"): "add",
    ("sum", "uint"): "add",
    ("max", "float"): "maximumf",
    ("max", "int"): "maxsi",
    ("min", "float"): "minimumf",
    ("min", "int"): "minsi",
}
COMBINE = {
    "sum": "add",
    "prod": "mul",
}  # the elementwise op of a reduction, if not its name


NOTHING = "%nothing"  # an empty tile: only `concatenate` takes it, and ignores it


class Tiles(Elementwise):
    """Emits ops on whole tiles."""

    def emit_constant(self, op: Op) -> str:
        self.constants[op.result] = op.attrs["value"]
        self.repeated.add(op.result)
        return self.out.number(op.attrs["value"], self.tile_type(op.result))

    def emit_iota(self, op: Op) -> str:
        tile = self.tile_type(op.result)
        self.repeated.add(op.result)
        words = tile.with_dtype(I32)
        return self.convert(self.counted(words, op.attrs["dim"]), words, tile.dtype)

    def counted(self, tile: TileType, dim: int) -> str:
        """Each element's position along `dim`, in a tile of i32."""
        if tile.rank == 1:  # Mosaic's iota needs rank two or more
            row = tile.with_shape((1, *tile.shape))
            return self.reshaped(self.counted(row, 1), row, tile.shape)
        dims = array("i32", [dim])
        return self.out.value(f"tpu.iota {{dimensions = {dims}}} : {tile_text(tile)}")

    # --- shape ---

    def reshaped(self, name: str, tile: TileType, shape: Sequence[int]) -> str:
        """The elements in another shape, in row-major order."""
        shape = tuple(shape)
        if tile.shape == shape:
            return name
        if tile.dtype.is_bool and tile.shape and shape:
            words = tile.with_dtype(I32)
            name = self.reshaped(self.convert(name, tile, I32), words, shape)
            return self.convert(name, words.with_shape(shape), BOOL)
        if not shape:
            return self._extract(name, tile)
        if not tile.shape:
            return self.repeat(name, tile, shape)
        if not _is_cast(tile.shape, shape):
            return self._reshaped_by_parts(name, tile, shape)
        if self.turns_columns and tile.rank > 1 and _is_to_rows(tile, shape):
            perm = (*range(tile.rank - 2), tile.rank - 1, tile.rank - 2)
            turned = tile.with_shape([tile.shape[d] for d in perm])
            return self.reshaped(self.transposed(name, tile, perm), turned, shape)
        types = f"{tile_text(tile)} to {tile_text(tile.with_shape(shape))}"
        return self.out.value(f"vector.shape_cast {name} : {types}")

    def _reshaped_by_parts(
        self, name: str, tile: TileType, shape: tuple[int, ...]
    ) -> str:
        """Split rows into common parts of both shapes' rows, then concatenate."""
        before, after = tile.shape[-1], shape[-1]
        part = gcd(before, after)
        rows = tile.with_shape((tile.size // before, 1, before))
        name = self.reshaped(name, tile, rows.shape)
        parts = [self.along(name, rows, 2, at, part) for at in range(0, before, part)]
        cut = rows.with_shape((rows.shape[0], before // part, part))
        count = after // part
        groups = tile.with_shape((tile.size // after, count, part))
        name = self.reshaped(self.joined(parts, 1), cut, groups.shape)
        parts = [self.along(name, groups, 1, at, 1) for at in range(count)]
        whole = tile.with_shape((tile.size // after, 1, after))
        return self.reshaped(self.joined(parts, 2), whole, shape)

    def _extract(self, name: str, tile: TileType) -> str:
        """The only element of a vector, as a scalar (Mosaic extracts 32-bit ones)."""
        word, words = self.in_words(name, tile)
        at = ", ".join("0" * tile.rank)
        element = tile_text(words.with_shape(()))
        text = f"vector.extract {word}[{at}] : {element} from {tile_text(words)}"
        name = self.out.value(text)  # as scalars are held, except for bools
        if not tile.dtype.is_bool:
            return name
        return self.convert(name, words.with_shape(()), tile.dtype)

    def emit_reshape(self, op: Op) -> str:
        x = op.operands[0]
        return self.reshaped(self.name(x), self.tile_type(x), op.attrs["shape"])

    def emit_broadcast_in_dim(self, op: Op) -> str:
        x = op.operands[0]
        self.repeated.add(op.result)
        return self.broadcast(
            self.name(x), self.tile_type(x), op.attrs["shape"], op.attrs["dims"]
        )

    def broadcast(
        self, name: str, tile: TileType, shape: Sequence[int], dims: Sequence[int]
    ) -> str:
        """Dimension d of the operand becomes `dims[d]`; the others repeat it."""
        shape = tuple(shape)
        if not tile.shape:
            return self.repeat(name, tile, shape) if shape else name
        if tile.dtype.is_bool:
            words = tile.with_dtype(I32)
            name = self.broadcast(self.convert(name, tile, I32), words, shape, dims)
            return self.convert(name, words.with_shape(shape), BOOL)
        lined_up = [1] * len(shape)
        for n, d in zip(tile.shape, dims, strict=True):
            lined_up[d] = n
        name = self.reshaped(name, tile, lined_up)
        if tuple(lined_up) == shape:
            return name
        return self.repeat(name, tile.with_shape(lined_up), shape)

    def emit_transpose(self, op: Op) -> str:
        x = op.operands[0]
        return self.transposed(self.name(x), self.tile_type(x), op.attrs["perm"])

    def transposed(self, name: str, tile: TileType, perm: Sequence[int]) -> str:
        if list(perm) == sorted(perm):
            return name
        result = tile.with_shape([tile.shape[d] for d in perm])
        if tile.dtype.is_bool:
            words = tile.with_dtype(I32)
            name = self.transposed(self.convert(name, tile, I32), words, perm)
            return self.convert(name, result.with_dtype(I32), BOOL)
        types = f"{tile_text(tile)} -> {tile_text(result)}"
        return self.out.value(f"tpu.transpose {name}, {list(perm)} : {types}")

    def emit_slice(self, op: Op) -> str:
        x = op.operands[0]
        starts, strides = op.attrs["starts"], op.attrs["strides"]
        sizes = op.result.tile.shape
        if 0 in sizes:
            return NOTHING
        extents = [(n - 1) * s + 1 for n, s in zip(sizes, strides, strict=True)]
        name, tile = self.name(x), self.tile_type(x)
        name = self.sliced(name, tile, starts, extents)
        tile = tile.with_shape(extents)
        for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            if stride > 1:
                name, tile = self.every(name, tile, dim, size, stride)
        return name

    def sliced(
        self, name: str, tile: TileType, starts: Sequence[int], sizes: Sequence[int]
    ) -> str:
        if tuple(sizes) == tile.shape:
            return name
        if tile.dtype.is_bool:
            words = tile.with_dtype(I32)
            name = self.sliced(self.convert(name, tile, I32), words, starts, sizes)
            return self.convert(name, words.with_shape(sizes), BOOL)
        # The generic form: the pretty one differs between MLIR versions.
        attrs = f"offsets = {[*map(int, starts)]}, sizes = {[*map(int, sizes)]}"
        attrs += f", strides = {[1] * tile.rank}"
        types = f"({tile_text(tile)}) -> {tile_text(tile.with_shape(sizes))}"
        text = f'"vector.extract_strided_slice"({name}) <{{{attrs}}}> : {types}'
        return self.out.value(text)

    def every(
        self, name: str, tile: TileType, dim: int, size: int, stride: int
    ) -> tuple[str, TileType]:
        """Every `stride`-th element along a dimension: the first of each group."""
        missing = size * stride - tile.shape[dim]
        if missing:
            filler = resized(tile, dim, missing)
            blank = self.out.number(0, filler)
            name = self.joined([(name, tile), (blank, filler)], dim)
        lead, rest = tile.shape[:dim], tile.shape[dim + 1 :]
        whole = resized(tile, dim, size * stride)
        groups = tile.with_shape((*lead, size, stride, *rest))
        name = self.reshaped(name, whole, groups.shape)
        name, first = self.along(name, groups, dim + 1, 0, 1)
        result = tile.with_shape((*lead, size, *rest))
        return self.reshaped(name, first, result.shape), result

    def emit_concatenate(self, op: Op) -> str:
        parts = [(self.name(v), self.tile_type(v)) for v in op.operands]
        return self.joined(parts, op.attrs["axis"])

    def joined(self, parts: Sequence[tuple[str, TileType]], axis: int) -> str:
        """Tiles concatenated along `axis`."""
        parts = [(name, tile) for name, tile in parts if tile.shape[axis]]
        first = parts[0][1]
        shape = list(first.shape)
        shape[axis] = sum(t.shape[axis] for _, t in parts)
        result = first.with_shape(shape)
        if len(parts) == 1:
            return parts[0][0]
        if first.dtype.is_bool:
            words = [(self.convert(n, t, I32), t.with_dtype(I32)) for n, t in parts]
            return self.convert(self.joined(words, axis), result.with_dtype(I32), BOOL)
        names = ", ".join(n for n, _ in parts)
        types = ", ".join(tile_text(t) for _, t in parts)
        text = f"tpu.concatenate {names} in {axis} : {types} -> {tile_text(result)}"
        return self.out.value(text)

    def emit_pad(self, op: Op) -> str:
        if any(op.attrs["interior"]):
            self.refuse(
                "interior padding is not supported", fix="interleave by reshaping"
            )
        x, value = op.operands
        name, tile = self.name(x), self.tile_type(x)
        padding = self.name(value)
        for axis, (low, high) in enumerate(
            zip(op.attrs["low"], op.attrs["high"], strict=True)
        ):
            name, tile = self._padded(name, tile, padding, axis, low, high)
        return name

    def _padded(
        self, name: str, tile: TileType, padding: str, axis: int, low: int, high: int
    ) -> tuple[str, TileType]:
        kept = tile.shape[axis] + min(low, 0) + min(high, 0)
        if kept <= 0:  # only padding is left
            rest = resized(tile, axis, tile.shape[axis] + low + high)
            return self.repeat(padding, tile.with_shape(()), rest.shape), rest
        parts = [self.along(name, tile, axis, max(-low, 0), kept)]
        for count, place in ((low, 0), (high, len(parts) + 1)):
            if count > 0:
                extra = resized(tile, axis, count)
                filled = self.repeat(padding, tile.with_shape(()), extra.shape)
                parts.insert(place, (filled, extra))
        total = sum(t.shape[axis] for _, t in parts)
        return self.joined(parts, axis), resized(tile, axis, total)

    # --- reductions ---

    def emit_reduce(self, op: Op) -> str:
        x = op.operands[0]
        tile, axes = self.tile_type(x), op.attrs["axes"]
        kind: str = op.attrs["kind"]
        name, words = self.in_words(self.name(x), tile)
        if tile.dtype.is_bool:  # any and all are the maximum and minimum bit
            kind = {"or": "max", "and": "min"}.get(kind) or kind
        name = self.reduced(name, words, kind, axes)
        shape = [n for d, n in enumerate(tile.shape) if d not in axes]
        result = words.with_shape(shape)
        if tile.dtype.is_bool and kind == "xor":
            one = self.out.number(1, result)
            name = self.arith("arith.andi", name, one, tile=result)
        return self.convert(name, result, tile.dtype)

    def reduced(self, name: str, tile: TileType, kind: str, axes: Sequence[int]) -> str:
        """Reduce 32-bit elements along `axes`."""
        if not axes:
            return name
        if tile.dtype.name == "u32" and kind in ("max", "min"):
            return self._reduced_unsigned(name, tile, kind, axes)
        native = REDUCTIONS.get((kind, tile.dtype.kind))
        if native is None:
            return self._reduced_by_halves(name, tile, kind, axes)
        result = tile.with_shape([n for d, n in enumerate(tile.shape) if d not in axes])
        start = self.out.number(neutral(kind, tile.dtype), result)
        types = f"{tile_text(tile)} to {tile_text(result)}"
        text = (
            f"vector.multi_reduction <{native}>, {name}, {start} {list(axes)} : {types}"
        )
        return self.out.value(text)

    def _reduced_unsigned(
        self, name: str, tile: TileType, kind: str, axes: Sequence[int]
    ) -> str:
        """Flipping the top bit turns unsigned order into signed order."""
        signed = tile.with_dtype(I32)
        top = self.out.number(-(2**31), signed)
        name = self.arith("arith.xori", name, top, tile=signed)
        name = self.reduced(name, signed, kind, axes)
        shape = [n for d, n in enumerate(tile.shape) if d not in axes]
        result = signed.with_shape(shape)
        top = self.out.number(-(2**31), result)
        return self.arith("arith.xori", name, top, tile=result)

    def _reduced_by_halves(
        self, name: str, tile: TileType, kind: str, axes: Sequence[int]
    ) -> str:
        """One axis after another: combine the two halves until one slice is left."""
        spelled = self.spelled(COMBINE.get(kind, kind), tile.dtype)
        for axis in axes:
            while tile.shape[axis] > 1:
                count = tile.shape[axis]
                half = count // 2
                name, tile = self._folded(name, tile, axis, half, count, spelled)
        shape = [n for d, n in enumerate(tile.shape) if d not in axes]
        return self.reshaped(name, tile, shape)

    def _folded(
        self, name: str, tile: TileType, axis: int, half: int, count: int, spelled: str
    ) -> tuple[str, TileType]:
        low, low_tile = self.along(name, tile, axis, 0, half)
        high, _ = self.along(name, tile, axis, half, half)
        both = self.arith(spelled, low, high, tile=low_tile)
        if count % 2 == 0:
            return both, low_tile
        last, last_tile = self.along(name, tile, axis, count - 1, 1)
        parts = [(both, low_tile), (last, last_tile)]
        return self.joined(parts, axis), resized(tile, axis, half + 1)

    def along(
        self, name: str, tile: TileType, axis: int, start: int, size: int
    ) -> tuple[str, TileType]:
        """`size` elements from `start` along one axis."""
        part, starts = resized(tile, axis, size), [0] * tile.rank
        starts[axis] = start
        return self.sliced(name, tile, starts, part.shape), part

    def emit_arg_reduce(self, op: Op) -> str:
        """The first position of the extremum, or of the first NaN if there is one."""
        x, axis = op.operands[0], op.attrs["axis"]
        name, tile = self.in_words(self.name(x), self.tile_type(x))
        kind = op.attrs["kind"].removeprefix("arg")
        equal = self.spelled("eq", tile.dtype)
        extreme = self.reduced(name, tile, kind, [axis])
        kept = [d for d in range(tile.rank) if d != axis]
        rest = tile.with_shape([tile.shape[d] for d in kept])
        extreme = self.broadcast(extreme, rest, tile.shape, kept)
        position = self._first_where(
            self.arith(equal, name, extreme, tile=tile), tile, axis
        )
        result = rest.with_dtype(I32)
        if tile.dtype.is_float:
            same = self.arith("arith.cmpf oeq,", name, name, tile=tile)
            odd = self.flipped(same, tile.with_dtype(BOOL))
            first_odd = self._first_where(odd, tile, axis)
            none = self.out.number(tile.shape[axis], result)
            found = self.arith("arith.cmpi slt,", first_odd, none, tile=result)
            position = self.select(found, first_odd, position, result, True)
        return self.convert(position, result, op.attrs["dtype"])

    def _first_where(self, mask: str, tile: TileType, axis: int) -> str:
        """Along `axis`, the first position with a True; its length if none."""
        words = tile.with_dtype(I32)
        places = self.counted(words, axis)
        none = self.out.number(tile.shape[axis], words)
        return self.reduced(
            self.select(mask, places, none, words, True), words, "min", [axis]
        )

    def emit_scan(self, op: Op) -> str:
        """Combine with elements 1, 2, 4, ... positions before (Hillis-Steele)."""
        x, axis = op.operands[0], op.attrs["axis"]
        kind: str = op.attrs["kind"]
        if kind == "logsumexp":
            self.refuse(
                "cumlogsumexp is not supported",
                fix="use a running max and a running sum",
            )
        name, tile = self.in_words(self.name(x), self.tile_type(x))
        spelled = self.spelled(COMBINE.get(kind, kind), tile.dtype)
        back, step = op.attrs["reverse"], 1
        while step < tile.shape[axis]:
            moved = self._shifted(name, tile, axis, step, kind, back)
            name = self.arith(spelled, name, moved, tile=tile)
            step *= 2
        return self.convert(name, tile, x.tile.dtype)

    def _shifted(
        self, name: str, tile: TileType, axis: int, step: int, kind: str, back: bool
    ) -> str:
        """Shifted by `step` along an axis; the neutral element is shifted in."""
        count = tile.shape[axis]
        rest = self.along(name, tile, axis, step if back else 0, count - step)
        gap = resized(tile, axis, step)
        blank = (self.out.number(neutral(kind, tile.dtype), gap), gap)
        return self.joined([rest, blank] if back else [blank, rest], axis)

    # --- dot ---

    def emit_dot(self, op: Op) -> str:
        """A matmul on the matrix unit, which accumulates in 32 bits."""
        dot = Dot.of(op)
        self._check_dot(dot)
        dtype = self._factor_dtype(op)
        lhs, left, lc = self._factor(dot.lhs, dtype)
        rhs, right, rc = self._factor(dot.rhs, dtype)
        batch = len(dot.lhs.batch)
        lf, rf = (2 * batch + 1 - c for c in (lc, rc))  # the other of the last two dims
        shape = (*left.shape[:batch], left.shape[lf], right.shape[rf])
        result = TileType(shape, F32 if dtype.is_float else I32)
        order = [0, 0] * batch + [0, lf, 1, rf]
        lead = list(range(batch))
        numbers = ", ".join(map(str, ([lc], [rc], [lf], [rf], order, lead, lead)))
        attrs = [f"dimension_numbers = #tpu.dot_dimension_numbers<{numbers}>"]
        attrs += self._precision(op, dtype)
        attrs += ["transpose_lhs_hint = false"]
        types = ", ".join(map(tile_text, (left, right, result)))
        name = self.out.value(
            f"tpu.matmul {lhs}, {rhs}, {self.out.number(0, result)}"
            f" {{{', '.join(attrs)}}} : {types} -> {tile_text(result)}"
        )
        shape = op.result.tile.shape
        name = self.reshaped(name, result, shape)
        return self.convert(name, result.with_shape(shape), op.attrs["dtype"])

    def _check_dot(self, dot: Dot) -> None:
        self.tile_type(dot.op.result)
        if len(dot.lhs.contract) != 1 or len(dot.lhs.batch) > 1:
            self.refuse(
                "the matrix unit supports one contracting dimension and one batch "
                "dimension",
                fix="reshape the operands, or loop over the batch",
            )
        for side in dot.sides:
            if len(side.free) > 1:
                self.refuse(
                    f"{side.value.tile} has {len(side.free)} dimensions that are not "
                    "contracted",
                    fix="reshape them into one",
                )

    def _factor_dtype(self, op: Op) -> DType:
        """The type both operands are multiplied in."""
        left, right = (self.tile_type(v).dtype for v in op.operands)
        if left.is_float and right.is_float:
            return left if left == right else F32
        if left != right or not left.is_signed_int or left.bits > 8:
            self.refuse(
                f"the matrix unit does not multiply {left} by {right}",
                fix="cast both to float32, bfloat16 or int8",
            )
        return left

    def _factor(self, side: DotSide, dtype: DType) -> tuple[str, TileType, int]:
        """An operand as batch dimension and matrix, and its contracted dimension.

        A vector becomes a matrix of one row: (k) is (1, k).
        """
        value, batch = side.value, side.batch
        name, tile = self.convert(self.name(value), value.tile, dtype), value.tile
        tile, (dim,) = tile.with_dtype(dtype), side.contract
        perm = [*batch, *(d for d in range(tile.rank) if d not in batch)]
        name = self.transposed(name, tile, perm)
        tile, dim = tile.with_shape([tile.shape[d] for d in perm]), perm.index(dim)
        if tile.rank == 1 + len(batch):
            shape = (*tile.shape[:-1], 1, tile.shape[-1])
            return self.reshaped(name, tile, shape), tile.with_shape(shape), dim + 1
        return name, tile, dim

    def _precision(self, op: Op, dtype: DType) -> list[str]:
        """`highest` multiplies float32 exactly; the default rounds to bfloat16 first,
        as XLA does on a TPU."""
        asked = str(op.attrs.get("precision") or "").lower()
        exact = "high" in asked or asked in ("f32_f32_f32", "float32")
        if dtype != F32 or not exact:
            return []
        return ["precision = #tpu.contract_precision<fp32>"]


RULES = {
    "constant": Tiles.emit_constant,
    "iota": Tiles.emit_iota,
    "reshape": Tiles.emit_reshape,
    "broadcast_in_dim": Tiles.emit_broadcast_in_dim,
    "transpose": Tiles.emit_transpose,
    "slice": Tiles.emit_slice,
    "concatenate": Tiles.emit_concatenate,
    "pad": Tiles.emit_pad,
    "reduce": Tiles.emit_reduce,
    "arg_reduce": Tiles.emit_arg_reduce,
    "scan": Tiles.emit_scan,
    "dot": Tiles.emit_dot,
}


def _is_to_rows(tile: TileType, shape: Sequence[int]) -> bool:
    """Whether a reshape only turns columns of one lane each into rows."""
    *_, n, lanes = tile.shape
    return tile.dtype.bits == 32 and lanes == 1 and shape[-1] == n > 1


def _is_cast(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether libtpu performs a reshape itself.

    Rows are regrouped freely; lanes are merged or split evenly, if they fit one vreg or
    fill whole ones.
    """
    fewer, more = sorted((before[-1], after[-1]))
    plain = all(n <= LANES or n % LANES == 0 for n in (fewer, more))
    return fewer == more or fewer == 1 or (plain and more % fewer == 0)


def resized(tile: TileType, axis: int, size: int) -> TileType:
    return tile.with_shape([size if d == axis else n for d, n in enumerate(tile.shape)])
