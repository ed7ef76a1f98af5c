"""Memory that atomics merge numbers into, in whatever order they come.

An atomic addition, maximum, minimum or bitwise operation whose result nobody uses
commutes with others of its kind. Where the code does nothing else to some memory, its
final contents do not depend on their order (but for the rounding of sums), and nobody
can tell when each of them happens.
"""

from collections.abc import Iterable, Mapping

from pallasite.ir.nodes import Op, Value

ATOMIC_MERGES: Mapping[str, str] = {
    "add": "sum",
    "max": "max",
    "min": "min",
    "and": "and",
    "or": "or",
    "xor": "xor",
}


def is_merge(op: Op, users: Mapping[Value, list[Op]]) -> bool:
    """Whether an op is an atomic that commutes with others of its kind."""
    if op.name != "atomic_rmw" or op.attrs["kind"] not in ATOMIC_MERGES:
        return False
    return not users.get(op.result)


def only_merged(ops: Iterable[Op], users: Mapping[Value, list[Op]]) -> bool:
    """Whether the ops that use some memory merge into it, all in one way."""
    ops = list(ops)
    kinds = {op.attrs.get("kind") for op in ops}
    return len(kinds) == 1 and all(is_merge(op, users) for op in ops)
