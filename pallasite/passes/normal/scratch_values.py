"""scratch_values: what every step overwrites before reading becomes values.

In: a kernel that accumulates in scratch or in a result across steps. Where the grid has
one step along that axis, or merging leaves one, nothing is carried from an earlier
step, and the branches that start and finish sums are already decided
(`known_comparisons`). Out: the same kernel without that scratch, and with one store to
that result, the last; stored values are forwarded to loads. A backend may then
accumulate directly in the final destination, or finish sums strip by strip.

Proof: all accesses are whole loads and stores in the body itself, a store first. So
each load gives what the store before it wrote, in the same step, and of the stores only
the last can be seen after the step: scratch is overwritten by the next one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import substitute, users_of
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.carried import accesses_all
from pallasite.passes.normal.canonicalize import canonicalize


def scratch_values(kernel: Kernel) -> Kernel:
    """Replace scratch, and results before their last store, that are used only in the
    body of one pipeline."""
    users = users_of(kernel.body)
    ops: list[Op] = []
    gone: set[Value] = set()
    changed = False
    for op in kernel.body.ops:
        if op.name == "pipeline":
            body = op.regions[-1]
            found = {v for v in _allocated(kernel.body) if _is_value(body, v, users[v])}
            results = {
                block
                for block in _results(kernel, op)
                if len(users[block]) > 1 and _is_value(body, block, users[block])
            }
            if found or results:
                changed = True
                forwarded = _forwarded(body, found, results)
                op = op.with_(regions=(*op.regions[:-1], forwarded))
                gone |= found
        ops.append(op)
    if not changed:
        return kernel
    kept = tuple(op for op in ops if not gone & set(op.results))
    return kernel.with_(body=replace(kernel.body, ops=kept))


def values_of_steps(kernel: Kernel) -> Kernel:
    """The same as a rule of the normal form: starts of sums are folded."""
    new = scratch_values(kernel)
    return kernel if new is kernel else canonicalize(new)


def _results(kernel: Kernel, op: Op) -> list[Value]:
    """The blocks of results whose memory nothing else shows: no operand that aliases
    them, no other window, no code. Elements past an array's end may not be loaded as
    they were stored, so those of blocks with such elements stay."""
    shown = Pipeline.of(op).shown
    shared = {*kernel.aliased_results.values()}
    shared |= {v for each in walk(op.regions[-1]) for v in each.operands}
    arrays = Counter(each.array for each in shown)
    written = (each for each in shown if each.window.mode == "out")
    return [
        each.block
        for each in written
        if arrays[each.array] == 1
        and each.array not in shared
        and not each.window.may_hang_over(each.array.ref.shape)
    ]


def _allocated(block: Block) -> list[Value]:
    return [op.result for op in block.ops if op.name == "alloc"]


def _is_value(body: Block, ref: Value, users: Sequence[Op]) -> bool:
    """Whether all uses are whole loads and stores in the body itself, a store first."""
    here = [op for op in body.ops if ref in op.operands]
    return (
        bool(here)
        and len(here) == len(users)
        and here[0].name == "store"
        and all(map(accesses_all, here))
    )


def _forwarded(body: Block, scratch: set[Value], results: set[Value]) -> Block:
    """The body with loads of these refs replaced by the value last stored."""
    held: dict[Value, Value] = {}
    loaded: dict[Value, Value] = {}
    ops: list[Op] = []
    last = {op.operands[0]: op for op in body.ops if op.name == "store"}
    for op in body.ops:
        ref = op.operands[0] if op.name in ("load", "store") else None
        if ref is None or not (ref in scratch or ref in results):
            ops.append(op)
        elif op.name == "load":
            loaded[op.result] = held[ref]
        else:
            held[ref] = loaded.get(op.operands[1], op.operands[1])
            if ref in results and op is last[ref]:
                ops.append(op)
    return substitute(replace(body, ops=tuple(ops)), loaded)
