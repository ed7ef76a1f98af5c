"""Matrix units that the author schedules become `matrix_unit` ops.

The state of a unit is hidden scratch: staging registers, the right operand in use, and
accumulators by their addresses (or the author's own refs in `pltpu.ACC`). Accumulators
are zero when the kernel begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pallasite.errors import Facts, KernelTypeError
from pallasite.importer.importer import Importer
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Loc, Op, Value, walk
from pallasite.ir.rule_table import RuleTable

RULES = RuleTable()

LANES, SUBLANES = 128, 8  # addresses count registers of this size
_PRODUCT = {"contract": ((1,), (0,)), "batch": ((), ()), "precision": None}
_EMPTY = {"load": None, "transpose": False, "type": None}


@dataclass(frozen=True)
class Sums:
    """The position of an accumulator in a unit."""

    unit: int
    address: int
    end: int  # the first address after them
    loc: Loc | None


def _emit(
    im: Importer,
    operands: Sequence[Value],
    code: Callable[..., Sequence[Value]],
    **attrs: Any,
) -> tuple[Value, ...]:
    """Emit an instruction; `code`, given its operands, defines its effect."""
    params = [Value(v.type) for v in operands]
    with im.nested() as b:
        region = b.block(params, code(b, *params))
    attrs = {**_EMPTY, **attrs}
    return im.builder.emit("matrix_unit", *operands, regions=[region], **attrs)


def _held(im: Importer, name: str, tile: T.TileType, what: str) -> Value:
    """Scratch that represents a register: of one type in the whole kernel."""
    ref = im.hidden_scratch(name, T.RefType(tile.shape, tile.dtype, "vmem"))
    if ref.ref.tile != tile:
        raise _refused(
            im,
            f"{what} holds matrices of two dtypes or shapes",
            [("first", ref.ref.tile), ("then", tile)],
            "use another staging register or unit for the second one",
        )
    return ref


def _refused(im: Importer, what: str, facts: Facts, fix: str, at: Any = None):
    facts = [("kernel", im.kernel_name), *facts]
    return KernelTypeError(what, facts, at or im.where, fix)


def _staging(unit: int, register: int) -> tuple[str, str]:
    """The name of the scratch for a staging register, and of the register."""
    name = f"mxu{unit}_staging{register}"
    return name, f"staging register {register} of matrix unit {unit}"


@RULES.rule("pallasite_matmul_push_rhs")
def _push(im: Importer, eqn: Any, rhs: Value) -> None:
    p = eqn.params
    rows, columns = rhs.tile.shape
    held = rhs.tile.with_shape((columns, rows) if p["transpose"] else (rows, columns))
    name, what = _staging(p["unit"], p["register"])
    staged = _held(im, name, held, what)

    def code(b: Builder, rhs: Value) -> Sequence[Value]:
        b.store(staged, b.transpose(rhs, perm=(1, 0)) if p["transpose"] else rhs)
        return ()

    where = {"unit": p["unit"], "place": p["register"], "transpose": p["transpose"]}
    _emit(im, [rhs], code, instruction="push", **where)


@RULES.rule("pallasite_matmul_acc_lhs")
def _multiply(im: Importer, eqn: Any, lhs: Value, *ref: Value) -> None:
    p = eqn.params
    unit, load = p["unit"], p["load"]
    name = f"mxu{unit}_rhs"
    staged = im.hidden.get(_staging(unit, load)[0]) if load is not None else None
    rhs = im.hidden.get(name)
    if load is not None and staged is None:
        pushed = [n for n in im.hidden if "_staging" in n]
        raise _refused(
            im,
            f"nothing is pushed to {_staging(unit, load)[1]} before it is loaded",
            [("pushed so far", ", ".join(pushed) or "nothing")],
            f"pltpu.matmul_push_rhs(rhs, {load}, mxu_index={unit}) first",
        )
    if staged is not None:
        rhs = _held(im, name, staged.ref.tile, f"matrix unit {unit}")
    if rhs is None:
        raise _refused(
            im,
            f"matrix unit {unit} has no right operand loaded",
            [("lhs", lhs.tile)],
            "pass load_staged_rhs=, the staging register that holds one",
        )
    dtype = T.F32 if lhs.tile.dtype.is_float else T.I32
    if lhs.tile.shape[1] != rhs.ref.shape[0] or lhs.tile.dtype != rhs.ref.dtype:
        raise _refused(
            im,
            "the left operand does not match the right operand of its matrix unit",
            [("lhs", lhs.tile), ("rhs", rhs.ref.tile), ("unit", unit)],
            "lhs needs as many columns as rhs has rows, and the same dtype",
        )
    shape = (lhs.tile.shape[0], rhs.ref.shape[1])
    sums = _sums(im, unit, p["address"], ref, T.TileType(shape, dtype))

    def code(b: Builder, lhs: Value) -> Sequence[Value]:
        if staged is not None:
            b.store(rhs, b.load(staged))
        product = b.op("dot", lhs, b.load(rhs), dtype=dtype, **_PRODUCT)
        b.store(sums, b.add(b.load(sums), product))
        return ()

    where = {"unit": unit, "place": im.sums[sums].address, "load": load}
    _emit(im, [lhs], code, instruction="multiply", **where)


@RULES.rule("pallasite_matmul_pop")
def _pop(im: Importer, eqn: Any, *ref: Value) -> tuple[Value, ...]:
    p = eqn.params
    dtype = T.dtype_of(p["dtype"])
    assert dtype is not None
    tile = T.TileType(p["shape"], dtype)
    sums = _sums(im, p["unit"], p["address"], ref, tile)

    def code(b: Builder) -> Sequence[Value]:
        popped = b.load(sums)
        b.store(sums, b.constant(0, tile))
        return (popped,)

    where = {"unit": p["unit"], "place": im.sums[sums].address, "type": tile}
    return _emit(im, [], code, instruction="pop", **where)


# --- accumulators ---


def _sums(
    im: Importer,
    unit: int,
    address: int | None,
    ref: Sequence[Value],
    tile: T.TileType,
) -> Value:
    """The scratch for the accumulator at an address, or the author's ref, which is
    assigned an address at its first use."""
    if address is None:
        (sums,) = ref
    else:
        name = f"mxu{unit}_sums{address}"
        sums = im.hidden_scratch(name, T.RefType(tile.shape, tile.dtype, "vmem"))
    if sums.ref.tile != tile:
        raise _refused(
            im,
            "an accumulator of a matrix unit has another type than what is added or "
            "popped",
            [("accumulator", sums.ref.tile), ("here", tile), ("unit", unit)],
            "use float32 or int32[rows of lhs, columns of rhs] everywhere",
        )
    if sums in im.sums:
        return sums
    own = [s for s in im.sums.values() if s.unit == unit]
    after: int = max((s.end for s in own), default=0)
    first = after if address is None else address
    end = first + _registers(tile)
    for other in own:
        if first < other.end and other.address < end:
            raise _refused(
                im,
                "accumulators of a matrix unit overlap",
                [
                    ("here", f"addresses {first} to {end - 1} of unit {unit}"),
                    ("others", f"addresses {other.address} to {other.end - 1}"),
                    ("others' line", other.loc),
                ],
                f"{tile} takes {end - first} addresses, one for each "
                f"{SUBLANES} x {LANES} elements",
            )
    im.sums[sums] = Sums(unit, first, end, im.where)
    return sums


def _registers(tile: T.TileType) -> int:
    rows, columns = tile.shape
    return -(-rows // SUBLANES) * -(-columns // LANES)


def clear(im: Importer, refs: Sequence[Value], semantics: Sequence[str] = ()) -> None:
    """Set accumulators to zero, in the first program along the axes that carry them."""
    along = [i for i, kind in zip(im.grid.ids, semantics, strict=False)
             if "parallel" not in kind]  # fmt: skip

    def zeros(b: Builder) -> Sequence[Value]:
        for ref in refs:
            b.store(ref, b.constant(0, ref.ref.tile))
        return ()

    def code(b: Builder) -> Sequence[Value]:
        if not along:
            return zeros(b)
        first = b.eq(along[0], b.index(0))
        for index in along[1:]:
            first = b.op("and", first, b.eq(index, b.index(0)))
        inner = Builder(b.loc)
        zeros(inner)
        regions = (Builder().block(), inner.block())
        b.emit("cond", b.cast(first, T.I32), regions=regions)
        return ()

    _emit(im, [], code, instruction="clear", unit=0, place=0)


def finish(im: Importer, semantics: Sequence[str]) -> None:
    """At the end of a kernel's code: check what is left in the units, and zero the
    accumulators at the start."""
    ops = list(walk(im.builder.block()))
    units = [op for op in ops if op.name == "matrix_unit"]
    if not units:
        return
    _check_pairs(im, units)
    _check_uses(im, ops, units)
    made_here = {op.result for op in ops if op.name == "alloc"}
    carried = [ref for ref in im.sums if ref not in made_here]
    if carried:
        clear(im, carried, semantics)
        im.builder.ops.insert(0, im.builder.ops.pop())


def _check_pairs(im: Importer, units: Sequence[Op]) -> None:
    """Check that whatever is pushed to a unit is also used somewhere in the kernel."""

    def places(instruction: str, key: str = "place") -> dict[tuple[int, int], Op]:
        chosen = [op for op in units if op.attrs["instruction"] == instruction]
        return {(op.attrs["unit"], op.attrs[key]): op for op in reversed(chosen)}

    loaded, pushed = places("multiply", "load"), places("push")
    summed, popped = places("multiply"), places("pop")
    for place, op in pushed.items():
        if place not in loaded:
            what = f"the operand pushed to {_staging(*place)[1]} is never used"
            fix = f"matmul_acc_lhs(..., load_staged_rhs={place[1]}) on unit {place[0]}"
            raise _refused(im, what, [("rhs", op.operands[0].tile)], fix, op.loc)
    where = "the accumulator at address {1} of matrix unit {0}"
    for place in summed.keys() ^ popped.keys():
        op = (summed | popped)[place]
        if place in popped:
            what = f"{where.format(*place)} is popped, but nothing is added to it"
            others = [where.format(*other) for other in summed]
            facts: Facts = [("added to", ", ".join(others) or "none")]
            fix = "pop the address and unit that matmul_acc_lhs adds to"
        else:
            what = f"{where.format(*place)} is never popped"
            facts, fix = [], "pltpu.matmul_pop it before the kernel ends"
        raise _refused(im, what, facts, fix, op.loc)


def _check_uses(im: Importer, ops: Sequence[Op], units: Sequence[Op]) -> None:
    inside = {id(inner) for op in units for inner in walk(op.regions[0])}
    for op in ops:
        used = [v for v in op.operands if v in im.sums]
        if used and id(op) not in inside:
            facts = [("ref", used[0].type), ("op", op.name)]
            what = (
                "an accumulator of a matrix unit cannot be read or written like memory"
            )
            fix = "read it with pltpu.matmul_pop(acc)"
            raise _refused(im, what, facts, fix, op.loc)
