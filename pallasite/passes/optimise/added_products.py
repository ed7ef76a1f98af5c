"""added_products: matmuls of one sum are added to it one after another.

In: `acc += x @ w + y @ v`, where both matmuls are computed before either is added. Out:
`acc = (acc + x @ w) + y @ v`: a matrix unit adds each to the accumulator that it has,
and no second one is in registers. A negative operand makes its matmul one that is
subtracted, because a right operand must be as it is in memory. For GPUs, where elements
of a sum may be taken in another order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, users_of, with_regions

SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}


class _Term(NamedTuple):
    value: Value
    sign: int


def added_products(kernel: Kernel) -> Kernel:
    """Sums that end with their matmuls."""
    kernel = map_ops(kernel, _negated)
    body = _Sums(kernel).block(kernel.body)
    return kernel if body is kernel.body else dead_code(kernel.with_(body=body))


def _negated(op: Op, b: Rewriter) -> Value | None:
    """The negative of a matmul, in place of one of a negative operand."""
    if op.name != "dot" or not op.attrs["dtype"].is_float:
        return None
    for n, value in enumerate(op.operands):
        made = b.producer(value, "cast")
        source = b.producer(value if made is None else made.operands[0], "neg")
        if source is not None and source.result.tile.dtype.is_float:
            sides = list(op.operands)
            sides[n] = b.cast(source.operands[0], value.tile.dtype)
            return b.neg(b.op("dot", *sides, **op.attrs))
    return None


class _Sums:
    def __init__(self, kernel: Kernel):
        self.users = users_of(kernel.body)

    def block(self, block: Block) -> Block:
        here = {v: op for op in block.ops for v in op.results}
        ops: list[Op] = []
        for op in block.ops:
            terms = self.terms(op, here)
            if terms is None:
                ops.append(with_regions(op, [self.block(r) for r in op.regions]))
            else:
                ops += _added(op, terms)
        if all(a is b for a, b in zip(ops, block.ops, strict=False)):
            return block
        return Block(block.params, tuple(ops), block.yields)

    def terms(self, op: Op, here: dict[Value, Op]) -> Sequence[_Term] | None:
        """What a sum of several matmuls consists of, they last; None if they already
        are added in turn, or the op is no such sum."""
        if op.name not in SIGNS or not op.result.type.shape:
            return None
        users = self.users[op.result]
        if len(users) == 1 and users[0].name in SIGNS and users[0].result in here:
            return None  # a part of one
        found = list(self.leaves(_Term(op.result, 1), here))
        is_dot = lambda t: t.value in here and here[t.value].name == "dot"
        apart = [t for t in found if is_dot(t) and len(self.users[t.value]) == 1]
        others = [t for t in found if t not in apart]
        for group in (others, apart):
            group.sort(key=lambda t: -t.sign)  # what is subtracted comes last
        ordered = [*others, *apart]
        if len(apart) < 2 and all(t.sign > 0 for t in apart):
            return None
        if ordered[0].sign < 0 or _is_in_turn(op, ordered, here):
            return None
        return ordered

    def leaves(self, term: _Term, here: dict[Value, Op]) -> Iterator[_Term]:
        op = here.get(term.value)
        if op is None or op.name not in SIGNS:
            yield term
            return
        for operand, sign in zip(op.operands, SIGNS[op.name], strict=True):
            inner = _Term(operand, sign * term.sign)
            if len(self.users[operand]) == 1:
                yield from self.leaves(inner, here)
            else:
                yield inner


def _is_in_turn(op: Op, terms: Sequence[_Term], here: dict[Value, Op]) -> bool:
    """Whether each addition adds one term to the ones before it."""
    for term in reversed(terms[2:]):
        if op.operands[-1] is not term.value:
            return False
        op = here.get(op.operands[0], op)
    pair = [term.value for term in terms[:2]]  # in canonical form, a constant is last
    return [*op.operands] == pair or (op.name == "add" and [*op.operands] == pair[::-1])


def _added(op: Op, terms: Sequence[_Term]) -> list[Op]:
    b = Builder(op.loc)
    total = terms[0].value
    for value, sign in terms[1:]:
        total = b.op("add" if sign > 0 else "sub", total, value)
    b.ops[-1] = b.ops[-1].with_(results=op.results)
    return b.ops
