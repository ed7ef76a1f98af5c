"""products: a dot has no transposed operands and no transposed result.

In: `q @ k.T`, `jnp.einsum` in any order of letters, `(k @ q.T).T`. Out: one `dot` that
says which dimensions it contracts. A transpose only names elements differently, and a
dot sums the same products in whichever order its operands are given.
"""

from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops, users_of
from pallasite.ir.roles import Dot, DotSide
from pallasite.passes.normal.canonicalize import canonicalize

# Other precisions are algorithms, which may round the operands differently.
SYMMETRIC = (None, "high", "highest")


def products(kernel: Kernel) -> Kernel:
    """Fold transposes into the dots that they come before or after."""
    users = users_of(kernel.body)
    shared = {v for v, ops in users.items() if len(ops) > 1}
    new = map_ops(kernel, lambda op, b: _rewritten(op, b, shared))
    # A dot whose transposed result it made may have transposed operands in turn.
    return kernel if new is kernel else products(canonicalize(new))


def _rewritten(op: Op, b: Rewriter, shared: set[Value]) -> Value | None:
    if op.name == "dot":
        folded = transposed_operand(op, b)
        return sorted_contraction(op, b) if folded is None else folded
    if op.name == "transpose" and op.operands[0] not in shared:
        return transposed_result(op, b)
    return None


def transposed_operand(op: Op, b: Rewriter) -> Value | None:
    """Contract the dimensions of what was transposed, if free ones keep their order."""
    sides = list(Dot.of(op).sides)
    for n, side in enumerate(sides):
        turn = b.producer(side.value, "transpose")
        if turn is None:
            continue
        perm = turn.attrs["perm"]
        free = [perm[d] for d in side.free]
        if free != sorted(free):
            continue
        batch, contract = (
            [perm[d] for d in each] for each in (side.batch, side.contract)
        )
        source = turn.operands[0]
        sides[n] = DotSide(source, tuple(batch), tuple(free), tuple(contract))
        return _dot(op, b, sides[0], sides[1])
    return None


def transposed_result(op: Op, b: Rewriter) -> Value | None:
    """The transpose of a dot is the dot of the operands in the other order."""
    dot = b.producer(op.operands[0], "dot")
    if dot is None or dot.attrs["precision"] not in SYMMETRIC:
        return None
    lhs, rhs = Dot.of(dot).sides
    batch, rows, columns = len(lhs.batch), len(lhs.free), len(rhs.free)
    count = batch + rows + columns
    turned = (*range(batch), *range(batch + rows, count), *range(batch, batch + rows))
    return _dot(dot, b, rhs, lhs) if op.attrs["perm"] == turned else None


def sorted_contraction(op: Op, b: Rewriter) -> Value | None:
    """Contracted dimensions are listed in the order of the left operand."""
    lhs, rhs = Dot.of(op).sides
    pairs = sorted(zip(lhs.contract, rhs.contract, strict=True))
    if [left for left, _ in pairs] == list(lhs.contract):
        return None
    left, right = zip(*pairs, strict=True)
    return _dot(op, b, lhs._replace(contract=left), rhs._replace(contract=right))


def _dot(op: Op, b: Rewriter, lhs: DotSide, rhs: DotSide) -> Value:
    attrs = {
        **op.attrs,
        "contract": (lhs.contract, rhs.contract),
        "batch": (lhs.batch, rhs.batch),
    }
    return b.op("dot", lhs.value, rhs.value, **attrs)
