"""repack: puts operands of matmuls into a form that TMA and `wgmma` accept.

In: a kernel after `promote`. Out: the same kernel on other arrays: an operand of 8-bit
or f32 elements that is not stored along k has its last two dimensions transposed; one
whose rows are not multiples of 16 bytes has its rows padded. Before blocks are chosen,
`factors_before` does the same for operands that are multiplied by a constant and are
then right operands of matmuls, which must be as they are in memory: XLA multiplies. It
does for left operands, too, where programs need their registers. The note `REPACKED` on
the grid says how each array is made from its operand; XLA does that before the call, in
one pass over the operand (`runtime/forms.py`). This happens only where the matmuls take
longer than such passes, and where only matmuls read the operand.

Rows that are not multiples of a cache line can be copied, but each row of a box then
straddles two lines: a matmul of such operands, with blocks of 128 x 128, takes 1.5
times as long. Their rows are padded too, where the matmuls take much longer than that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pallasite.backends.cuda.instruction_sets import turned_types
from pallasite.backends.cuda.products import ROW_MULTIPLE
from pallasite.ir.nodes import Access, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.rewrite import (
    Rewriter,
    dead_code,
    map_ops,
    substitute,
    users_of,
)
from pallasite.ir.roles import Dot, Pipeline, number_of
from pallasite.ir.types import RefType
from pallasite.ops.scaled import COLUMNS, PACKED, ROWS
from pallasite.passes.analysis.cost import cost
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.memory import Roots, constant_inputs
from pallasite.runtime.forms import Form
from pallasite.target import Gpu, Machine

REPACKED = "cuda.repacked"
LINE = 128  # bytes of the cache
WORTH_LINES = 4.0
CROWDED = 3  # matmuls whose sums leave no registers for computed operands
T = TypeVar("T")


class Packing(NamedTuple):
    """How an array is made from an operand."""

    operand: int  # its position
    turned: bool  # its last two dimensions are transposed
    added: int  # columns of zeros appended after that
    factor: float = 1.0  # by which its elements are multiplied

    def is_needed(self, kernel: Kernel) -> bool:
        """Whether matmuls cannot take the operand as it is."""
        ref = kernel.inputs[self.operand].ref
        return self.turned or bool(ref.shape[-1] * ref.dtype.bytes % ROW_MULTIPLE)

    def type(self, ref: RefType) -> RefType:
        *outer, rows, columns = ref.shape
        if self.turned:
            rows, columns = columns, rows
        return ref.with_shape((*outer, rows, columns + self.added))


def forms_of(
    kernel: Kernel, notes: Sequence[tuple[Any, ...]]
) -> tuple[tuple[int, Form | None], ...] | None:
    """The operands of the call by the notes of `repack` and `scaled_operands`.

    None: all as they are.
    """
    forms: dict[int, Form] = {}
    for operand, turned, added, factor, *tall in notes:
        ref = kernel.inputs[operand].ref
        name = ref.dtype.numpy_name
        if tall:
            forms[operand] = packed_scales(ref, *tall)
            continue
        padding = ((0, 0),) * (len(ref.shape) - 1) + ((0, added),)
        *outer, rows, columns = range(len(ref.shape))
        order = (*outer, columns, rows) if turned else ()
        forms[operand] = Form(
            ref.shape, name, name, padding=padding, order=order, factor=factor
        )
    if not forms:
        return None
    return tuple((n, forms.get(n)) for n in range(len(kernel.inputs)))


def packed_scales(ref: RefType, tall: int) -> Form:
    """Scales as `ops/scaled.py` packs them: blocks of `tall` times 128 rows."""
    (rows, columns), name = ref.shape, ref.dtype.numpy_name
    down, across = -rows % (ROWS * tall), -columns % COLUMNS
    blocks, groups = (rows + down) // (ROWS * tall), (columns + across) // COLUMNS
    return Form(
        ref.shape, name, name, padding=((0, down), (0, across)), fill=1,
        digits=(blocks, tall, 4, ROWS // 4, groups, COLUMNS),
        digit_order=(0, 4, 1, 3, 2, 5), joined=(blocks, groups, tall, PACKED),
    )  # fmt: skip


def repack(kernel: Kernel, chip: Gpu, always: bool = False) -> Kernel:
    """Replace operands that matmuls cannot take by other arrays, where it pays off.

    `always`: wherever it is needed, so that one backend has any number of rows.
    """
    factors = _factors_of(kernel)
    packings = [p for p in _packings(kernel, chip) if p.operand not in factors]
    needed = [p for p in packings if p.is_needed(kernel)]
    if packings and not always and _pays(kernel, packings, chip, WORTH_LINES):
        chosen = packings
    elif needed and (always or _pays(kernel, needed, chip)):
        chosen = needed
    else:
        return kernel
    return _repacked(kernel, chosen)


def _repacked(kernel: Kernel, packings: Sequence[Packing]) -> Kernel:
    new: dict[Value, Value] = {}
    for packing in packings:
        param = kernel.inputs[packing.operand]
        new[param] = Value(packing.type(param.ref), param.name)
    turned = {new[kernel.inputs[p.operand]] for p in packings if p.turned}
    exchange = _Exchange(turned, tuple(map(tuple, packings)))
    return map_ops(
        kernel.with_(
            params=tuple(new.get(v, v) for v in kernel.params),
            body=substitute(kernel.body, new),
        ),
        exchange.rewrite,
    )


def _pays(
    kernel: Kernel, packings: Sequence[Packing], chip: Gpu, times: float = 1.0
) -> bool:
    """Whether the matmuls take at least `times` as long as making the arrays."""
    params = [kernel.inputs[p.operand].ref for p in packings]
    moved = 2 * sum(ref.size * ref.dtype.bytes for ref in params)
    machine, types = Machine.peak(chip), [ref.dtype.name for ref in params]
    multiplying = machine.multiplying(cost(kernel).flops, types)
    return times * machine.copying(moved) < multiplying


# --- which operands ---


def _packings(kernel: Kernel, chip: Gpu) -> list[Packing]:
    """For all operands that need it and that only matmuls read."""
    made = {v: op for op in walk(kernel.body) for v in op.results}
    roots, users = Roots(kernel), users_of(kernel.body)
    constant = constant_inputs(kernel)
    contracted: dict[Value, set[int]] = {}  # operand -> contracted dims of its loads
    for op in walk(kernel.body):
        for side in Dot.of(op).sides if op.name == "dot" else ():
            value, dims = side.value, list(side.contract)
            while (source := made.get(value)) and source.name == "transpose":
                dims = [source.attrs["perm"][d] for d in dims]
                value = source.operands[0]
            if source and source.name == "load" and value.tile.rank == 2:
                contracted.setdefault(roots.of(source.operands[0]), set()).update(dims)
    found = []
    for operand, param in enumerate(kernel.inputs):
        dims = contracted.get(param)
        if not dims or param not in constant or not _is_multiplied(param, users):
            continue
        width = param.ref.dtype.bytes
        turned = dims == {0} and param.ref.dtype.name not in turned_types(chip)
        columns = param.ref.shape[-2 if turned else -1]
        added = -columns % max(1, LINE // width)
        # Columns that are appended are zero, as what is past the edge must be then.
        by_blocks = all(
            user.name == "block_view" and not user.attrs["window"].fill
            for user in users[param]
        )
        if turned or (added and by_blocks):
            found.append(Packing(operand, turned, added if by_blocks else 0))
    return found


def _is_multiplied(value: Value, users: dict[Value, list[Op]]) -> bool:
    """Whether boxes of an array, or loads from them, are used only by matmuls."""
    return bool(users[value]) and all(
        op.name == "dot"
        or (_keeps_matrix(op) and all(_is_multiplied(v, users) for v in op.results))
        for op in users[value]
    )


def _keeps_matrix(op: Op) -> bool:
    """Whether the last two dimensions of a ref are those of the result."""
    if op.name == "transpose":
        return True
    if op.name == "block_view":
        dims = op.attrs["window"].dims
        plain = all(d.kind != "bounded" for d in dims)
        return plain and all(d.kind != "squeezed" for d in dims[-2:])
    if op.name not in ("load", "subview"):
        return False
    access = Access.of(op)
    if access.mask is not None or any(isinstance(e, Gather) for e in access.index):
        return False
    return len(access.index) > 1 and all(isinstance(e, Span) for e in access.index[-2:])


# --- operands that are multiplied by a constant ---


def factors_before(kernel: Kernel, chip: Gpu, always: bool = False) -> Kernel:
    """Load products of an operand and a constant, where a matmul needs them so.

    `always`: as for `repack`.
    """
    grids = [op for op in kernel.body.ops if op.name == "pipeline"]
    if len(grids) != 1 or not any(op.name == "dot" for op in walk(kernel.body)):
        return kernel
    pipeline, users = Pipeline.of(grids[0]), users_of(kernel.body)
    made = {v: op for op in walk(kernel.body) for v in op.results}
    constant, found = constant_inputs(kernel), list[Packing]()
    is_full = sum(op.name == "dot" for op in walk(kernel.body)) >= CROWDED
    products = dict[Value, Value]()
    for operand, param in enumerate(kernel.inputs):
        shown = [s for s in pipeline.shown if s.array is param]
        blocks = [s.block for s in shown]
        loads = [op for block in blocks for op in users[block]]
        if param not in constant or {*users[param]} != {pipeline.op} or not loads:
            continue
        scaled = [op for load in loads for v in load.results for op in users[v]]
        numbers = {_times(op, made) for op in scaled}
        plain = all(op.name == "load" and not op.attrs["mask"] for op in loads)
        # XLA does not multiply what is read past the edge.
        plain &= not any(s.window.fill for s in shown)
        (number,) = numbers if plain and len(numbers) == 1 else (None,)
        if number is None:
            continue
        sides = {side for op in scaled for side in _sides(op.result, users)}
        if not sides or not (1 in sides or is_full):
            continue
        found.append(Packing(operand, False, 0, number))
        products |= {op.result: v for load in loads for v in load.results
                     for op in users[v]}  # fmt: skip
    if not found or not (always or _pays(kernel, found, chip)):
        return kernel
    noted = pipeline.op.with_(
        attrs={**pipeline.op.attrs, REPACKED: tuple(map(tuple, found))}
    )
    ops = tuple(noted if op is pipeline.op else op for op in kernel.body.ops)
    body = substitute(replace(kernel.body, ops=ops), products)
    return dead_code(kernel.with_(body=body))


def _times(op: Op, made: Mapping[Value, Op]) -> float | None:
    """The number that an op multiplies by, in the type of what it multiplies."""
    if op.name != "mul" or not op.result.tile.dtype.is_float:
        return None
    numbers = [number_of(made, v) for v in op.operands]
    return next((float(n) for n in numbers if n is not None), None)


def _sides(value: Value, users: Mapping[Value, Sequence[Op]]) -> set[int]:
    """Which operands of matmuls a value is."""
    found = set[int]()
    for op in users.get(value, ()):
        if op.name == "transpose":
            found |= _sides(op.result, users)
        elif op.name == "dot":
            found |= {n for n in (0, 1) if op.operands[n] is value}
    return found


def _factors_of(kernel: Kernel) -> dict[int, Packing]:
    """What `factors_before` noted."""
    notes = Pipeline.of(find_pipeline(kernel)).op.attrs.get(REPACKED, ())
    return {note[0]: Packing(*note) for note in notes}


# --- transposing the last two dimensions of arrays ---


class _Exchange:
    """Rewrites the users of arrays whose last two dimensions are transposed."""

    def __init__(self, turned: set[Value], notes: tuple[tuple, ...]):
        self.turned, self.notes = turned, notes

    def rewrite(self, op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name == "pipeline":
            notes = (*op.attrs.get(REPACKED, ()), *self.notes)
            b.ops.append(op.with_(attrs={**op.attrs, REPACKED: notes}))
            return op.results
        if not op.operands or op.operands[0] not in self.turned:
            return None
        if op.name == "block_view":
            ref, *indices = op.operands
            window = op.attrs["window"]
            dims = tuple(_exchanged(window.dims))
            view = b.op(
                "block_view",
                ref,
                *_exchanged(indices),
                **{**op.attrs, "window": replace(window, dims=dims)},
            )
            self.turned.add(view)
            return (view,)
        access = Access.of(op)
        entries = _exchanged(access.split_index())
        index = tuple(entry for entry, _ in entries)
        operands = [operand for _, operand in entries if operand is not None]
        if op.name == "subview":
            view = b.subview(access.ref, index, operands)
            self.turned.add(view)
            return (view,)
        loaded = b.load(access.ref, index, operands)
        rank = loaded.tile.rank
        perm = (*range(rank - 2), rank - 1, rank - 2)
        return (b.op("transpose", loaded, perm=perm),)


def _exchanged(values: Sequence[T]) -> list[T]:
    *outer, rows, columns = values
    return [*outer, columns, rows]
