"""Ops on refs: load, store, views, copies, semaphores.

Vector memory is accessed a vector at a time, scalar memory a number at a time, main
memory only through copies. Dynamic starts are clamped to the ref unless `facts` proves
them in range; `shifting.py` handles those not aligned to tiles.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd, prod

from pallasite.backends.tpu.shifting import Shifting, Slide
from pallasite.backends.tpu.tiles import COMBINE, resized
from pallasite.backends.tpu.views import (
    LANES,
    SUBLANES,
    Edge,
    Start,
    View,
    required_alignment,
)
from pallasite.backends.tpu.writer import array, held_dtype, memref, tile_text
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Gather, Op, Span, Value, full_index
from pallasite.ir.types import BOOL, I32, DType, TileType

COPY_FIX = "copy it to VMEM first (sync_copy, make_async_copy) or give it a BlockSpec"


MOST_SCALARS = 512  # unrolled for one access of scalar memory


class Memory(Shifting):
    """Emits ops on refs."""

    def __init__(self, with_locations: bool = False):
        super().__init__(with_locations)
        self.views: dict[Value, View] = {}

    def view(self, ref: Value) -> View:
        return self.views[ref]

    # --- which elements ---

    def _picked(self, access: Access) -> View:
        """The view that a load, store or subview accesses."""
        return self._picked_sliding(access)[0]

    def _picked_sliding(self, access: Access) -> tuple[View, list[Slide]]:
        """The view, and how far the wanted elements are past it.

        Elements of a masked access may individually be outside the ref. It is made at
        the nearest place that is entirely inside.
        """
        view = self.view(access.ref)
        spans: list[tuple[Span, Start | None]] = []
        kept: list[bool] = []
        slides: list[Slide] = []
        for dim, (entry, operand) in enumerate(access.split_index()):
            if isinstance(entry, Gather):
                self.refuse(
                    "Mosaic does not support gather or scatter on refs",
                    fix="loop over the indices and copy one row at a time",
                )
            span = Span(entry.start, 1) if isinstance(entry, At) else entry
            start = None
            if operand is not None:
                start = self._dynamic_start(view, dim, span, operand)
                slide = self._slide(access, view, span, operand, dim, sum(kept))
                slides += [] if slide is None else [slide]
            spans.append((span, start))
            kept.append(isinstance(entry, Span))
        return view.narrowed(spans, kept), slides

    def _slide(
        self, access: Access, view: View, span: Span, operand: Value, dim: int, at: int
    ) -> Slide | None:
        limit = view.ref.shape[dim] - span.extent
        fact = self.facts.of(operand).wrapped(I32)
        if access.mask is None or fact.within(0, limit):
            return None
        if span.stride != 1:
            self.refuse(
                f"a masked access along dimension {dim} may start outside the ref, "
                "and is strided",
                fix="clamp the start (jnp.minimum) and shift the mask instead",
            )
        wanted = self.convert(self.name(operand), self.tile_type(operand), I32)
        inside = self._clamped(operand, limit)
        by = self.out.value(f"arith.subi {wanted}, {inside} : i32")
        is_kept = isinstance(access.index[dim], Span)
        return Slide(at if is_kept else None, by, span.size)

    def _dynamic_start(self, view: View, dim: int, span: Span, operand: Value) -> Start:
        """An index operand as a start in the memref, clamped to the view."""
        limit = view.ref.shape[dim] - span.extent
        fact = self.facts.of(operand).wrapped(I32)
        target = view.dims[dim]
        base, stride = view.starts[target], view.strides[target]
        if fact.number is not None or limit == 0:
            first = min(max(fact.number or 0, 0), limit)
            return Start(base.static + first * stride, base.dynamic, base.multiple)
        name, multiple = self._clamped(operand, limit), fact.multiple
        if not fact.within(0, limit):
            multiple = gcd(multiple, limit)
        if stride != 1:
            name = self.out.value(f"arith.muli {name}, {self.out.i32(stride)} : i32")
            multiple *= stride
        if base.dynamic is not None:
            name = self.out.value(f"arith.addi {base.dynamic}, {name} : i32")
            multiple = gcd(multiple, base.multiple)
        return Start(base.static, name, multiple)

    def _clamped(self, operand: Value, limit: int) -> str:
        name = self.convert(self.name(operand), self.tile_type(operand), I32)
        fact = self.facts.of(operand).wrapped(I32)
        if fact.low < 0:
            name = self.out.value(f"arith.maxsi {name}, {self.out.i32(0)} : i32")
        if fact.high > limit:
            name = self.out.value(f"arith.minsi {name}, {self.out.i32(limit)} : i32")
        return name

    def _indices(self, view: View) -> str:
        """The starts as `index` values, known to be aligned along tiles."""
        names = []
        for dim, start in enumerate(view.starts):
            if start.dynamic is None:
                names.append(self.out.index(start.static))
                continue
            tiled = view.space == "vmem"
            first = self.first_of(start, required_alignment(view, dim) if tiled else 1)
            names.append(self.out.value(f"arith.index_cast {first} : i32 to index"))
        return ", ".join(names)

    # --- load ---

    def emit_load(self, op: Op) -> str:
        access = Access.of(op)
        view, slides = self._picked_sliding(access)
        result = self.tile_type(op.result)
        name = self.read(view, result)
        for slide in slides:
            name = self.slid(name, result, slide)
        if access.other is None or access.mask is None:
            return name
        other, mask = self.name(access.other), self.name(access.mask)
        return self._choose(mask, name, other, result, bool(result.shape))

    def read(self, view: View, result: TileType) -> str:
        """The elements of a view, in the ref's shape and type."""
        stored = result.with_dtype(I32 if result.dtype.is_bool else result.dtype)
        if view.space == "smem":
            name = self._read_scalar(view, stored)
        else:
            name = self._read_vector(view, stored)
        return self.convert(name, stored, result.dtype)

    def _read_scalar(self, view: View, stored: TileType) -> str:
        if stored.size != 1:
            return self._read_scalars(view, stored)
        indices = self._indices(view)
        name = self.out.value(f"memref.load {view.memref}[{indices}] : {view.type}")
        name = self.from_element(name, stored.dtype)
        return self.reshaped(name, stored.with_shape(()), stored.shape)

    def _read_scalars(self, view: View, stored: TileType) -> str:
        """A tile of scalar memory: its numbers one by one, each inserted in place."""
        words = stored.with_shape(view.sizes).with_dtype(held_dtype(stored.dtype))
        integers = words.with_dtype(I32)
        places, name = self._places(integers), self.out.number(0, words)
        for place, element in enumerate(self._elements(view)):
            number = self._read_scalar(element, stored.with_shape(()))
            spread = self.repeat(number, words.with_shape(()), words.shape)
            here = self.out.number(place, words.with_dtype(I32))
            mask = self.arith(
                "arith.cmpi eq,", places, here, tile=words.with_dtype(I32)
            )
            name = self.select(mask, spread, name, words, True)
        name = self.convert(name, words, stored.dtype)
        return self._to_ref_shape(name, words.with_dtype(stored.dtype), view)

    def _elements(self, view: View) -> Iterator[View]:
        """Each number of a view of scalar memory, in the memref's order."""
        if prod(view.sizes) > MOST_SCALARS:
            self.refuse(
                "scalar memory (SMEM) is accessed one element at a time, here "
                f"{prod(view.sizes)} of them",
                fix="index it with integers, or place it in VMEM",
            )
        for offsets in product(*map(range, view.sizes)):
            element = view
            for dim, offset in enumerate(offsets):
                element = element.part(dim, offset)
            yield element

    def _places(self, words: TileType) -> str:
        """Each element's row-major position."""
        name, step = self.out.number(0, words), 1
        for dim in reversed(range(words.rank)):
            along = self.counted(words, dim)
            by = self.out.number(step, words)
            along = self.arith("arith.muli", along, by, tile=words)
            name = self.arith("arith.addi", name, along, tile=words)
            step *= words.shape[dim]
        return name

    def _read_vector(self, view: View, stored: TileType) -> str:
        self._check_vector_memory(view)
        tile = stored.with_shape(view.sizes)
        name = self._get(view, tile)
        if view.fill is not None:
            name = self._filled(name, tile, view)
        return self._to_ref_shape(name, tile, view)

    def _get(self, view: View, tile: TileType) -> str:
        """A vector in the memref's order of dimensions."""
        dim = self._stepped(view)
        if dim is not None and not self._is_aligned(view, dim):
            parts = [view.part(dim, step) for step in range(view.sizes[dim])]
            one = resized(tile, dim, 1)
            return self.joined([(self._get(part, one), one) for part in parts], dim)
        part, shifts = self.aligned(view)
        name = self._load(part, tile.dtype)
        if shifts:
            name = self.taken_out(name, tile.with_shape(part.sizes), shifts)
        return name

    def _is_aligned(self, view: View, dim: int) -> bool:
        start = view.starts[dim]
        tile = required_alignment(view, dim)
        return start.dynamic is None or start.is_multiple_of(tile)

    def _load(self, view: View, dtype: DType) -> str:
        """A vector from memory, at aligned addresses, in the memref's order."""
        tile = TileType(view.sizes, dtype)
        if view.has_strides and not self._strides_natively(view):
            return self._load_strided(view, dtype)
        indices = self._indices(view)
        types = f"{view.type}, {tile_text(tile)}"
        if not view.has_strides:
            return self.out.value(f"vector.load {view.memref}[{indices}] : {types}")
        attrs = f"{{strides = {array('i32', view.strides)}}}"
        return self.out.value(
            f"tpu.strided_load {view.memref}[{indices}] {attrs} : {types}"
        )

    def _strides_natively(self, view: View) -> bool:
        """Mosaic has strided rows for 32-bit memrefs that are one tile wide."""
        wide = view.shape[-1] == LANES and view.ref.dtype.bits == 32
        return wide and len(view.shape) > 1 and view.strides[-1] == 1

    def _load_strided(self, view: View, dtype: DType) -> str:
        """Load the whole extent, and select from the value."""
        extents = [
            (n - 1) * s + 1 for n, s in zip(view.sizes, view.strides, strict=True)
        ]
        dense = replace(
            view, sizes=tuple(extents), strides=(1,) * len(view.sizes), fill=None
        )
        name, tile = self._load(dense, dtype), TileType(dense.sizes, dtype)
        for dim, (size, stride) in enumerate(
            zip(view.sizes, view.strides, strict=True)
        ):
            if stride > 1:
                name, tile = self.every(name, tile, dim, size, stride)
        return name

    def _to_ref_shape(self, name: str, tile: TileType, view: View) -> str:
        """From the memref's order of dimensions to the ref's."""
        order = sorted(view.dims)
        name = self.reshaped(name, tile, [tile.shape[d] for d in order])
        perm = [order.index(d) for d in view.dims]
        return self.transposed(
            name, tile.with_shape([tile.shape[d] for d in order]), perm
        )

    def _check_vector_memory(self, view: View) -> None:
        if view.space != "vmem":
            self.refuse(f"{view.ref} is in main memory", fix=COPY_FIX)
        if not view.shape:
            self.refuse(
                "vector memory does not support rank-0 arrays", fix="place it in SMEM"
            )

    def _filled(self, name: str, tile: TileType, view: View) -> str:
        """What was read inside the array, and the fill value past its edge."""
        assert view.fill is not None
        tests = [t for e in view.fill.edges for t in self._inside(e, tile, view)]
        inside = tests[0]
        for test in tests[1:]:
            inside = self.arith("arith.andi", inside, test, tile=tile.with_dtype(BOOL))
        fill = self.out.number(view.fill.value, tile)
        return self.select(inside, name, fill, tile, True)

    def _inside(self, edge: Edge, tile: TileType, view: View) -> list[str]:
        """Masks of the elements inside the array along one dimension."""
        start, stride = view.starts[edge.dim], view.strides[edge.dim]
        words = tile.with_dtype(I32)
        first = self.first_of(edge.first)
        offset = self.first_of(start)
        where = self.out.value(f"arith.addi {first}, {offset} : i32")
        place = self.repeat(where, words.with_shape(()), words.shape)
        if tile.shape[edge.dim] > 1:
            steps = self.counted(words, edge.dim)
            if stride != 1:
                by = self.out.number(stride, words)
                steps = self.arith("arith.muli", steps, by, tile=words)
            place = self.arith("arith.addi", place, steps, tile=words)
        high = self.out.number(edge.high, words)
        masks = [self.arith("arith.cmpi slt,", place, high, tile=words)]
        if edge.low is not None:
            low = self.out.number(edge.low, words)
            masks.append(self.arith("arith.cmpi sge,", place, low, tile=words))
        return masks

    # --- store ---

    def emit_store(self, op: Op) -> None:
        access = Access.of(op)
        assert access.value is not None
        view, slides = self._picked_sliding(access)
        tile = self.tile_type(access.value)
        name = self.name(access.value)
        if access.mask is not None:
            old = self.read(view, tile)
            mask = self.name(access.mask)
            name, mask = self.slid_back(name, mask, tile, slides)
            name = self._choose(mask, name, old, tile, bool(tile.shape))
        self.write(view, name, tile)

    def write(self, view: View, name: str, tile: TileType) -> None:
        """Store a value, given in the ref's shape and type, through a view."""
        stored = tile.with_dtype(I32 if tile.dtype.is_bool else tile.dtype)
        name = self.convert(name, tile, stored.dtype)
        if view.space == "smem":
            self._write_scalar(view, name, stored)
        else:
            self._write_vector(view, name, stored)

    def _write_scalar(self, view: View, name: str, stored: TileType) -> None:
        if stored.size != 1:
            name, tile = self._to_memref_order(name, stored, view)
            offsets = product(*map(range, view.sizes))
            one = tile.with_shape((1,) * tile.rank)
            for element, starts in zip(self._elements(view), offsets, strict=True):
                number = self.sliced(name, tile, starts, one.shape)
                self._write_scalar(element, number, one)
            return
        name = self.to_element(self.reshaped(name, stored, ()), stored.dtype)
        indices = self._indices(view)
        self.out.line(f"memref.store {name}, {view.memref}[{indices}] : {view.type}")

    def _write_vector(self, view: View, name: str, stored: TileType) -> None:
        self._check_vector_memory(view)
        self._put(view, *self._to_memref_order(name, stored, view))

    def _to_memref_order(
        self, name: str, stored: TileType, view: View
    ) -> tuple[str, TileType]:
        """From the ref's order of dimensions to the memref's."""
        order = sorted(view.dims)
        perm = [view.dims.index(d) for d in order]
        name = self.transposed(name, stored, perm)
        lined_up = stored.with_shape([stored.shape[d] for d in perm])
        tile = stored.with_shape(view.sizes)
        return self.reshaped(name, lined_up, tile.shape), tile

    def _put(self, view: View, name: str, tile: TileType) -> None:
        """Store a vector in the memref's order of dimensions."""
        dim = self._stepped(view)
        if dim is not None:
            for step in range(view.sizes[dim]):
                self._put(view.part(dim, step), *self.along(name, tile, dim, step, 1))
            return
        part, shifts = self.aligned(view)
        if shifts:
            whole = tile.with_shape(part.sizes)
            old = self._load(part, tile.dtype)
            name, tile = self.put_in(name, tile, old, whole, shifts), whole
        indices = self._indices(part)
        types = f"{part.type}, {tile_text(tile)}"
        if not part.has_strides:
            self.out.line(f"vector.store {name}, {part.memref}[{indices}] : {types}")
            return
        attrs = f"{{strides = {array('i32', part.strides)}}}"
        self.out.line(
            f"tpu.strided_store {part.memref}[{indices}], {name} {attrs} : {types}"
        )

    def _stepped(self, view: View) -> int | None:
        """A dimension with a stride that Mosaic lacks: accessed step by step."""
        native = self._strides_natively(view)
        for dim, stride in enumerate(view.strides):
            if stride != 1 and not (native and self._is_aligned(view, dim)):
                return dim
        return None

    # --- atomics: programs of one core run sequentially ---

    def emit_atomic_rmw(self, op: Op) -> str:
        access = Access.of(op)
        assert access.value is not None
        view, slides = self._picked_sliding(access)
        tile = self.tile_type(access.value)
        old, value = self.read(view, tile), self.name(access.value)
        mask = None if access.mask is None else self.name(access.mask)
        if mask is not None:
            value, mask = self.slid_back(value, mask, tile, slides)
        kind = op.attrs["kind"]
        new = value if kind == "xchg" else self._combined(kind, old, value, tile)
        if mask is not None:
            new = self._choose(mask, new, old, tile, bool(tile.shape))
        self.write(view, new, tile)
        for slide in slides:
            old = self.slid(old, tile, slide)
        return old

    def _combined(self, kind: str, old: str, value: str, tile: TileType) -> str:
        dtype = self._compute_dtype(COMBINE.get(kind, kind), tile)
        wide = tile.with_dtype(dtype)
        names = [self.convert(n, tile, dtype) for n in (old, value)]
        if kind in ("max", "min") and dtype != tile.dtype:
            new = self._extreme(kind, *names, tile=wide)
        else:
            new = self.arith(self.spelled(kind, dtype), *names, tile=wide)
        return self.convert(new, wide, tile.dtype)

    def emit_atomic_cas(self, op: Op) -> str:
        access = Access.of(op)
        assert access.value is not None and access.compare is not None
        view, tile = self._picked(access), self.tile_type(access.value)
        old = self.read(view, tile)
        dtype = self._compute_dtype("eq", tile)
        wide = tile.with_dtype(dtype)
        names = [self.convert(n, tile, dtype) for n in (old, self.name(access.compare))]
        same = self.arith(self.spelled("eq", dtype), *names, tile=wide)
        new = self._choose(same, self.name(access.value), old, tile, bool(tile.shape))
        self.write(view, new, tile)
        return old

    # --- views ---

    def emit_subview(self, op: Op) -> None:
        self.views[op.result] = self._picked(Access.of(op))

    def emit_transpose_view(self, op: Op) -> None:
        self.views[op.result] = self.view(op.operands[0]).transposed(op.attrs["perm"])

    def emit_reshape_view(self, op: Op) -> None:
        source = self.view(op.operands[0])
        if source.ref.shape == op.result.ref.shape:
            self.views[op.result] = source
            return
        if min(source.ref.rank, op.result.ref.rank) < 2:
            self.refuse(
                "memory with fewer than two dimensions cannot be reshaped in place",
                fix="reshape the loaded value",
            )
        self._recast(op, "tpu.memref_reshape")

    def emit_bitcast_view(self, op: Op) -> None:
        self._recast(op, "tpu.memref_bitcast")

    def _recast(self, op: Op, spelled: str) -> None:
        name, own = self.as_memref(self.view(op.operands[0]))
        ref = op.result.ref
        view = View.whole("", ref, space=self.view(op.operands[0]).space)
        name = self.out.value(f"{spelled} {name} : {own} -> {view.type}")
        self.views[op.result] = View.whole(name, ref, space=view.space)

    def as_memref(self, view: View) -> tuple[str, str]:
        """A view as a memref of its own: name and type."""
        if view.fill is not None:
            self.refuse(
                "a window with fill= is filled as it is loaded, not in memory",
                fix="load it and store the value to scratch",
            )
        if view.has_strides or list(view.dims) != sorted(view.dims):
            self.refuse(
                "a strided or transposed view is not a plain memref",
                fix="load through it instead",
            )
        name, type_text = view.memref, view.type
        if not view.is_whole:
            starts = ", ".join(
                self._slice_start(view, d) for d in range(len(view.shape))
            )
            sliced = memref(view.sizes, view.element, view.space)
            name = self.out.value(
                f"tpu.memref_slice {name}[{starts}] : {type_text} -> {sliced}"
            )
            type_text = sliced
        if len(view.dims) != len(view.shape):
            squeezed = memref(view.ref.shape, view.element, view.space)
            name = self.out.value(
                f"tpu.memref_squeeze {name} : {type_text} -> {squeezed}"
            )
            type_text = squeezed
        return name, type_text

    def _slice_start(self, view: View, dim: int) -> str:
        """Slices of tiled memory start at tiles, except for single rows."""
        start, rank = view.starts[dim], len(view.shape)
        tiled = view.space in ("any", "hbm", "vmem") and rank > 1
        alignment = required_alignment(view, dim) if tiled else 1
        if tiled and dim == rank - 2 and view.sizes[dim] > 1:
            alignment = max(alignment, SUBLANES)
        if start.dynamic is not None and not start.is_multiple_of(alignment):
            what = "lanes" if dim == rank - 1 else "rows"
            self.refuse(
                f"a copy along dimension {dim} ({what}) starts at an index not known "
                f"to be a multiple of {alignment}",
                fix=f"if it always is, use pl.multiple_of(i, {alignment}); if not, "
                f"copy {alignment} at a time, or index a leading dimension",
                ref=f"{view.element}{list(view.shape)} in {view.space}",
                known=f"a multiple of {start.divisor}",
            )
        return self.first_of(start, alignment)

    # --- copies and semaphores ---

    def _copied(self, op: Op) -> list[tuple[str, str]]:
        """Source, target and semaphore of a copy.

        The target is only written, and what it has past its array's edge is dropped.
        """
        source, target, semaphore = (self.view(v) for v in op.operands[:3])
        self._check_copied_lanes(source)
        self._check_copied_lanes(target)
        if op.operands[2].ref.space != "dma_sem":
            self.refuse(
                "a copy signals a semaphore that is not a DMA semaphore",
                fix="use pltpu.SemaphoreType.DMA in scratch_shapes or pl.run_scoped",
                semaphore=str(op.operands[2].type),
            )
        views = (source, replace(target, fill=None), semaphore)
        return [self.as_memref(view) for view in views]

    def _check_copied_lanes(self, view: View) -> None:
        """A copy moves whole tiles: of a row, multiples of 128 lanes or all of it."""
        if len(view.shape) < 2 or view.space not in ("any", "hbm", "vmem"):
            return
        lanes, size = view.shape[-1], view.sizes[-1]
        if size != lanes and size % LANES:
            self.refuse(
                f"a copy of {size} of {lanes} lanes is not made of whole tiles",
                fix=f"copy a multiple of {LANES} lanes, and slice the loaded value",
                ref=f"{view.element}{list(view.shape)} in {view.space}",
            )

    def _is_row_by_row(self, op: Op) -> bool:
        """Emit a copy that starts or ends inside a tile as a copy of each row.

        A single row may be anywhere in its tile. Waits for it are waits for each row.
        """
        source, target = (self.view(v) for v in op.operands[:2])
        if not (self._cuts_tile(source) or self._cuts_tile(target)):
            return False
        shape = op.operands[0].ref.shape
        b, each = Builder(op.loc), Builder(op.loc)
        row = Value(TileType((), I32), "row")
        index = [*full_index(shape)]
        index[-2] = Span(None, 1)
        views = [each.subview(v, tuple(index), [row]) for v in op.operands[:2]]
        each.emit(op.name, *views, *op.operands[2:], **op.attrs)
        bounds = (b.index(0), b.index(shape[-2]), b.index(1))
        b.emit("for", *bounds, regions=(each.block((row,), ()),))
        self.emit_block(b.block((), ()))
        return True

    def _cuts_tile(self, view: View) -> bool:
        """Whether a view of rows, which can be copied singly, may cut a tile."""
        rank = len(view.shape)
        if rank < 2 or view.ref.rank < 2 or view.space not in ("any", "hbm", "vmem"):
            return False
        if view.dims[-2:] != (rank - 2, rank - 1) or view.sizes[-2] == 1:
            return False
        start, size, bits = view.starts[-2], view.sizes[-2], view.ref.dtype.bits
        is_inside = start.dynamic is not None and not start.is_multiple_of(SUBLANES)
        is_inside |= size != view.shape[-2] and size % SUBLANES != 0
        return is_inside and bits == 32 and not view.has_strides

    def emit_copy_start(self, op: Op) -> None:
        if self._is_row_by_row(op):
            return
        source, target, semaphore = self._copied(op)
        priority = op.attrs.get("priority") or 0
        attrs = f" {{priority = {priority} : i32}}" if priority else ""
        self.out.line(
            f"tpu.enqueue_dma source({' : '.join(source)}) target({' : '.join(target)})"
            f" target_semaphore({' : '.join(semaphore)}){attrs}"
        )

    def emit_copy_wait(self, op: Op) -> None:
        if self._is_row_by_row(op):
            return
        source, target, semaphore = self._copied(op)
        self.out.line(
            f"tpu.wait_dma2 semaphore({' : '.join(semaphore)})"
            f" src({' : '.join(source)}) dst({' : '.join(target)})"
        )

    def emit_sem_signal(self, op: Op) -> None:
        self._semaphore(op, "tpu.sem_signal")

    def emit_sem_wait(self, op: Op) -> None:
        self._semaphore(op, "tpu.sem_wait")

    def _semaphore(self, op: Op, spelled: str) -> None:
        name, type_text = self.as_memref(self.view(op.operands[0]))
        amount = self.name(op.operands[1])
        self.out.line(f"{spelled} {name}, {amount} : {type_text}")

    def emit_sem_read(self, op: Op) -> str:
        if op.operands[0].ref.shape:
            self.refuse("semaphores are read one at a time", fix="index it: sem.at[i]")
        name, type_text = self.as_memref(self.view(op.operands[0]))
        return self.out.value(f"tpu.sem_read {name} : {type_text} -> i32")


RULES = {
    "load": Memory.emit_load,
    "store": Memory.emit_store,
    "atomic_rmw": Memory.emit_atomic_rmw,
    "atomic_cas": Memory.emit_atomic_cas,
    "subview": Memory.emit_subview,
    "transpose_view": Memory.emit_transpose_view,
    "reshape_view": Memory.emit_reshape_view,
    "bitcast_view": Memory.emit_bitcast_view,
    "copy_start": Memory.emit_copy_start,
    "copy_wait": Memory.emit_copy_wait,
    "sem_signal": Memory.emit_sem_signal,
    "sem_wait": Memory.emit_sem_wait,
    "sem_read": Memory.emit_sem_read,
}
