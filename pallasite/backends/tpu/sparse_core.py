"""Ops as the subcores of SparseCores have them.

A vector subcore computes on short vectors and addresses its vector memory by indices; a
scalar subcore has only scalars. Both copy to and from main memory, including rows that
an index vector selects. Scalars, loops and branches are emitted as on TensorCores.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from pallasite.backends.tpu import control
from pallasite.backends.tpu.control import Control
from pallasite.backends.tpu.views import View
from pallasite.backends.tpu.writer import array, tile_text
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Access, Gather, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.types import BOOL, I32, DType, TileType
from pallasite.target import TPUS, Tpu

SCALAR, VECTOR = "sc_scalar_subcore", "sc_vector_subcore"
STRIDES = "{strides = array<i32>}"

# Ops on whole tiles that are the same on short vectors.
TILE_OPS = {"broadcast_in_dim", "cast", "constant", "iota", "reshape", "select_n"}
CONTROL = {"alloc", "cond", "for", "while", "pipeline", "assume_multiple"}


def is_native(op: Op) -> bool:
    """Whether a subcore has an op."""
    row = table()[op.name]
    plain = row.elementwise and op.name in control.RULES
    return plain or op.name in TILE_OPS | CONTROL | RULES.keys() | MEMORY


def check_chip(kernel: Kernel, chip: Tpu | None) -> Kernel:
    """Reject chips without SparseCores."""
    if chip is not None and chip.sparse is None:
        others = ", ".join(name for name, row in TPUS.items() if row.sparse)
        raise UnsupportedError(
            f"backend 'tpu': {chip.name} has no SparseCores",
            [("kernel", kernel.name), ("chips with them", others)],
            kernel.loc,
            "use a mesh of TensorCores, or interpret=True",
        )
    return kernel


def check_vectors(kernel: Kernel, chip: Tpu | None) -> Kernel:
    """Reject vectors of lengths that a subcore does not have."""
    if chip is None or chip.sparse is None:
        return kernel
    for op in walk(kernel.body):
        for value in op.results:
            if value.is_ref or not value.tile.rank:
                continue
            packed = max(1, 32 // max(value.tile.dtype.bits, 8))
            lengths = {chip.sparse.lanes}
            if not value.tile.dtype.is_bool:
                lengths = {chip.sparse.lanes * packed}
            if value.tile.rank != 1 or value.tile.size not in lengths:
                raise UnsupportedError(
                    f"backend 'tpu': a vector subcore of {chip.name} supports only "
                    f"vectors of {lengths.pop()} {value.tile.dtype}",
                    [("op", op.name), ("vector", value.tile)],
                    op.loc or kernel.loc,
                    "process it in parts: ref[pl.ds(i, n)] in plsc.parallel_loop",
                )
    return kernel


class SparseOps(Control):
    """Emits ops for a subcore."""

    def is_used(self, value: Value) -> bool:
        """Whether anything uses a result."""
        raise NotImplementedError("emit.py knows the whole kernel")

    def _written(self, op: Op) -> str | tuple[str, ...] | None:
        rule = RULES.get(op.name)
        return super()._written(op) if rule is None else rule(self, op)

    # --- vectors ---

    def counted(self, tile: TileType, dim: int) -> str:
        dims = array("i32", [dim])
        return self.out.value(f"tpu.iota {{dimensions = {dims}}} : {tile_text(tile)}")

    def _read_vector(self, view: View, stored: TileType) -> str:
        indices, types = self._at(view), f"{view.type}, {tile_text(stored)}"
        text = f"tpu.vector_load {view.memref}[{indices}] {STRIDES} : {types},"
        return self.out.value(text)

    def _write_vector(self, view: View, name: str, stored: TileType) -> None:
        indices, types = self._at(view), f"{view.type}, {tile_text(stored)}"
        self.out.line(
            f"tpu.vector_store {view.memref}[{indices}], {name} {STRIDES} : {types},"
        )

    def _at(self, view: View) -> str:
        self._check_vector_memory(view)
        if view.has_strides or prod(view.sizes[:-1]) > 1:
            self.refuse(
                "vector loads and stores must be contiguous",
                fix="plsc.load_gather or plsc.store_scatter",
            )
        names = []
        for start in view.starts:
            if start.dynamic is None:
                names.append(self.out.index(start.static))
            else:
                first = self.first_of(start)
                names.append(self.out.value(f"arith.index_cast {first} : i32 to index"))
        return ", ".join(names)

    # --- subcores of one core ---

    def emit_barrier(self, op: Op) -> None:
        self.out.line(f'"tpu.barrier"({self.out.index(0)}) : (index) -> ()')

    def emit_fetch_and_add(self, op: Op) -> str:
        view, places = self.view(op.operands[0]), []
        for start in view.starts:
            known = start.dynamic is None
            places.append(self.out.i32(start.static) if known else self.first_of(start))
        numbers = [*places, *(self.name(v) for v in op.operands[1:])]
        types = ", ".join([view.type, *["i32"] * len(numbers)])
        operands = ", ".join([view.memref, *numbers])
        text = f'"tpu.fetch_and_add_sync"({operands}) : ({types}) -> i32'
        return self.out.value(text)

    # --- by indices ---

    def emit_load(self, op: Op) -> str:
        access = Access.of(op)
        if Gather() not in access.index:
            return super().emit_load(op)
        places = self._places_of(access, reads=True)
        result = self.tile_type(op.result)
        mask = None if access.mask is None else self.name(access.mask)
        base, types = self._indexed(access, places, result)
        masked, last = self._masked(mask, result)
        name = self.out.value(
            f"tpu.vector_load_idx {base}{masked} : {types}, {tile_text(result)},{last}"
        )
        if mask is None or access.other is None:
            return name
        return self.select(mask, name, self.name(access.other), result, True)

    def emit_store(self, op: Op) -> None:
        if Gather() not in op.attrs["index"]:
            super().emit_store(op)
            return
        self._scatter(Access.of(op), "")

    def emit_atomic_rmw(self, op: Op) -> str | None:
        if Gather() not in op.attrs["index"]:
            return super().emit_atomic_rmw(op)
        if op.attrs["kind"] != "add" or self.is_used(op.result):
            self.refuse(
                "indexed atomics of a subcore support only add, without returning the "
                "old value",
                fix="use load_gather and store_scatter, if no index occurs twice",
            )
        self._scatter(Access.of(op), " {add = true}")
        return None

    def _scatter(self, access: Access, attrs: str) -> None:
        assert access.value is not None
        tile = self.tile_type(access.value)
        places = self._places_of(access, reads=False)
        mask = self._inside_all(access, places, tile)
        base, types = self._indexed(access, places, tile)
        masked, last = self._masked(mask, tile)
        self.out.line(
            f"tpu.vector_store_idx {base}, {self.name(access.value)}{masked}{attrs}"
            f" : {types}, {tile_text(tile)},{last}"
        )

    def _places_of(self, access: Access, reads: bool) -> list[tuple[str, TileType]]:
        """The index along each dimension; for reads, clamped."""
        if any(entry != Gather() for entry in access.index):
            self.refuse(
                "an indexed access needs one index array per dimension",
                fix="pass all of them to plsc.load_gather or plsc.store_scatter",
            )
        found = []
        sizes = access.ref.ref.shape
        for operand, size in zip(access.index_operands, sizes, strict=True):
            words = self.tile_type(operand).with_dtype(I32)
            name = self.convert(self.name(operand), operand.tile, I32)
            if reads and access.mask is None and not self._inside_of(operand, size):
                least, most = (self.out.number(n, words) for n in (0, size - 1))
                name = self.arith("arith.maxsi", name, least, tile=words)
                name = self.arith("arith.minsi", name, most, tile=words)
            found.append((name, words))
        return found

    def _inside_of(self, operand: Value, size: int) -> bool:
        return self.facts.of(operand).wrapped(I32).within(0, size - 1)

    def _inside_all(
        self, access: Access, places: Sequence[tuple[str, TileType]], tile: TileType
    ) -> str | None:
        """Which elements are written: those selected whose position is in range."""
        masks = [] if access.mask is None else [self.name(access.mask)]
        sizes = access.ref.ref.shape
        rows = zip(access.index_operands, places, sizes, strict=True)
        for operand, (name, words), size in rows:
            if not self._inside_of(operand, size):
                count = self.out.number(size, words)
                masks.append(self.arith("arith.cmpi ult,", name, count, tile=words))
        found = masks[0] if masks else None
        for mask in masks[1:]:
            assert found is not None
            flags = tile.with_dtype(BOOL)
            found = self.arith("arith.andi", found, mask, tile=flags)
        return found

    def _indexed(
        self, access: Access, places: Sequence[tuple[str, TileType]], tile: TileType
    ) -> tuple[str, str]:
        """`%ref[%i, %j]`, and the types of both."""
        view = self.view(access.ref)
        self._check_vector_memory(view)
        name, type_text = self.as_memref(view)
        listed = ", ".join(place for place, _ in places)
        types = ", ".join(tile_text(words) for _, words in places)
        return f"{name}[{listed}]", f"{type_text}[{types}]"

    def _masked(self, mask: str | None, tile: TileType) -> tuple[str, str]:
        if mask is None:
            return "", ""
        return f" masked {mask}", f" {tile_text(tile.with_dtype(BOOL))}"

    # --- copies of indexed rows ---

    def emit_indexed_copy_start(self, op: Op) -> None:
        if op.attrs["add"] and self.view(op.operands[1]).space == "hbm":
            self.refuse(
                "an indexed copy cannot add to rows in main memory",
                fix="add to rows on chip (plsc.addupdate_scatter), and copy the sums",
            )
        source, target, semaphore = self._copied(op)
        offsets = self._offsets(op.operands[3])
        attrs = " {add = true}" if op.attrs["add"] else ""
        self.out.line(
            f"tpu.enqueue_indirect_dma source({' : '.join(source)})"
            f" target({' : '.join(target)}) offsets({' : '.join(offsets)})"
            f" semaphore({' : '.join(semaphore)}){attrs}"
        )

    def emit_indexed_copy_wait(self, op: Op) -> None:
        source, target, semaphore = self._copied(op)
        self.out.line(
            f"tpu.wait_indirect_dma semaphore({' : '.join(semaphore)})"
            f" src({' : '.join(source)}) dst({' : '.join(target)})"
        )

    def _offsets(self, rows: Value) -> tuple[str, str]:
        if rows.is_ref:
            return self.as_memref(self.view(rows))
        tile = self.tile_type(rows)
        name = self.convert(self.name(rows), tile, I32)
        return name, tile_text(tile.with_dtype(I32))

    # --- along a vector ---

    def emit_scan(self, op: Op) -> str:
        kinds = {"sum": "sum", "max": "max", "min": "min"}
        kind, x = kinds.get(op.attrs["kind"]), op.operands[0]
        if kind is None or op.attrs.get("reverse") or x.tile.rank != 1:
            self.refuse(
                "a subcore supports only forward sum, max and min scans of one vector"
            )
        return self._scanned(self.name(x), self.tile_type(x), kind)

    def emit_reduce(self, op: Op) -> str:
        kinds = {"sum": "sum", "max": "max", "min": "min"}
        kind, x = kinds.get(op.attrs["kind"]), op.operands[0]
        if kind is None or x.tile.rank != 1:
            self.refuse(
                "a subcore supports only sum, max and min of one vector to a scalar"
            )
        tile = self.tile_type(x)
        name = self._scanned(self.name(x), tile, kind)
        last = f"{name}[{tile.size - 1}]"
        element = tile_text(tile.with_shape(()))
        return self.out.value(
            f"vector.extract {last} : {element} from {tile_text(tile)}"
        )

    def _scanned(self, name: str, tile: TileType, kind: str) -> str:
        """Integers are compared as unsigned: flip the sign bit, and back."""
        signed = tile.dtype.is_signed_int and kind != "sum"
        if signed:
            name = self._flipped(name, tile)
        every = self.out.number(True, tile.with_dtype(BOOL))
        flags, vector = tile_text(tile.with_dtype(BOOL)), tile_text(tile)
        kind = reduction_kind(kind, tile.dtype)
        name = self.out.value(
            f'"tpu.scan"({name}, {every}) {{dimension = {tile.rank - 1} : i64, '
            f"kind = #tpu.reduction_kind<{kind}>}} : ({vector}, {flags}) -> {vector}"
        )
        return self._flipped(name, tile) if signed else name

    def _flipped(self, name: str, tile: TileType) -> str:
        sign = self.out.number(-(2**31), tile)
        return self.arith("arith.xori", name, sign, tile=tile)


def reduction_kind(kind: str, dtype: DType) -> str:
    """The dialect's name for it; later versions distinguish floats from integers."""
    from pallasite.backends.tpu.compile import knows_attribute

    if kind == "sum" or not knows_attribute("#tpu.reduction_kind<maxf>"):
        return kind
    return kind + ("f" if dtype.is_float else "ui")


MEMORY = {"subview", "reshape_view", "sem_signal", "sem_wait", "sem_read"}
MEMORY |= {"copy_start", "copy_wait"}
RULES: dict[str, Callable[[Any, Op], Any]] = {
    "barrier": SparseOps.emit_barrier,
    "fetch_and_add": SparseOps.emit_fetch_and_add,
    "load": SparseOps.emit_load,
    "store": SparseOps.emit_store,
    "atomic_rmw": SparseOps.emit_atomic_rmw,
    "indexed_copy_start": SparseOps.emit_indexed_copy_start,
    "indexed_copy_wait": SparseOps.emit_indexed_copy_wait,
    "scan": SparseOps.emit_scan,
    "reduce": SparseOps.emit_reduce,
}
