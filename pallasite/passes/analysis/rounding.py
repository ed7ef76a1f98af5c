"""Which f32 values may be off by a few ulps.

If every use of a value is eventually rounded to 16 bits or fewer, the GPU's own
approximations of exp and division (errors near 2**-20) do not show, and cost a fraction
of the exact ones. Values are followed through ops that keep a relative error small:
products, quotients, roots, sums, maxima and data movement; not through differences,
comparisons or arguments of functions.
"""

from collections.abc import Iterator

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Cond, Loop

KEEPS_ERRORS_SMALL = {"add", "mul", "div", "neg", "abs", "max", "min"}
KEEPS_ERRORS_SMALL |= {"broadcast_in_dim", "reshape", "transpose", "slice", "rev"}
KEEPS_ERRORS_SMALL |= {"concatenate", "square", "sqrt", "rsqrt"}
REDUCTIONS = ("sum", "max", "min")


def rounded_away(kernel: Kernel) -> frozenset[Value]:
    """The f32 values whose last bits cannot affect any result."""
    seen: set[Value] = set()  # values whose last bits show
    sources: dict[Value, list[Value]] = {}  # where a value's errors come from
    values: list[Value] = []
    for op in walk(kernel.body):
        values += [v for v in op.results if _is_f32(v)]
        for region in op.regions:
            values += [v for v in region.params if _is_f32(v)]
        for value, result in _flows(op):
            if result is None:
                seen.add(value)
            else:
                sources.setdefault(result, []).append(value)
    pending = [*seen, *(v for v in sources if not _is_f32(v) and not _is_narrow(v))]
    while pending:
        for value in sources.get(pending.pop(), ()):
            if value not in seen:
                seen.add(value)
                pending.append(value)
    return frozenset(v for v in values if v not in seen)


def _is_f32(value: Value) -> bool:
    return not value.is_ref and value.tile.dtype.name == "f32"


def _is_narrow(value: Value) -> bool:
    dtype = None if value.is_ref else value.tile.dtype
    return dtype is not None and dtype.is_float and dtype.bits <= 16


def _flows(op: Op) -> Iterator[tuple[Value, Value | None]]:
    """Each value an op uses, with the value its error flows to; None: it shows."""
    if op.name == "for":
        loop = Loop.of(op)
        carried = zip(loop.inits, loop.carried, loop.yields, loop.results, strict=True)
        for first, inside, following, after in carried:
            for value in (first, following):
                yield value, inside
                yield value, after
        return
    if op.name == "cond":
        for branch in Cond.of(op).branches:
            yield from zip(branch.yields, op.results, strict=True)
        return
    for region in op.regions:
        yield from _all_seen(region)
    passes = (
        op.name in KEEPS_ERRORS_SMALL
        or (op.name == "reduce" and op.attrs["kind"] in REDUCTIONS)
        or (op.name == "integer_pow" and abs(op.attrs["y"]) <= 4)
    )
    for number, value in enumerate(op.operands):
        if passes or (op.name == "select_n" and number > 0):
            yield value, op.result
        elif not (op.name == "cast" and _is_narrow(op.result)):
            yield value, None


def _all_seen(region: Block) -> Iterator[tuple[Value, None]]:
    for value in (*region.params, *region.yields):
        yield value, None
