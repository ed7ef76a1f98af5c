"""Removes dead loop-carried values and dead scratch.

After canonicalize, a `for` may carry a value that only its own next iteration uses;
scratch may be written but never read. `drop_unused` removes them and canonicalizes
again, to a fixed point.
"""

from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import (
    Rewriter,
    map_ops,
    replace_ops,
    substitute,
    used_values,
    writes,
)
from pallasite.ir.roles import Loop
from pallasite.passes.normal.canonicalize import canonicalize


def drop_unused(kernel: Kernel) -> Kernel:
    """Canonical form with dead carries and dead scratch removed."""
    while True:
        kernel = canonicalize(kernel)
        new = _drop_scratch(_drop_carries(kernel))
        if new is kernel:
            return kernel
        kernel = new


def _drop_carries(kernel: Kernel) -> Kernel:
    used = set(used_values(kernel.body))

    def rewrite(op: Op, builder: Rewriter) -> list[Value] | None:
        if op.name != "for" or not op.results:
            return None
        loop = Loop.of(op)
        params, inits = loop.carried, loop.inits
        live = _live_carries(loop, used)
        kept = sorted(live)
        if len(kept) == len(params):
            return None
        mapping = {params[n]: inits[n] for n in range(len(params)) if n not in live}
        block = Block(
            (loop.index, *(params[n] for n in kept)),
            loop.body.ops,
            tuple(loop.yields[n] for n in kept),
        )
        made = builder.emit(
            "for",
            *loop.bounds,
            *(inits[n] for n in kept),
            regions=(substitute(block, mapping),),
        )
        results = dict(zip(kept, made, strict=True))
        return [results.get(n, inits[n]) for n in range(len(params))]

    return map_ops(kernel, rewrite)


def _live_carries(loop: Loop, used: set[Value]) -> set[int]:
    """Carried values whose result is used, or that an effect depends on."""
    live = {n for n, result in enumerate(loop.results) if result in used}
    while True:
        needed = {loop.yields[n] for n in live}
        for inner in reversed(loop.body.ops):
            if writes(inner) or inner.name == "while" or needed & set(inner.results):
                needed.update(inner.operands)
                for region in inner.regions:
                    needed.update(used_values(region))
        found = live | {n for n, p in enumerate(loop.carried) if p in needed}
        if found == live:
            return live
        live = found


def _drop_scratch(kernel: Kernel) -> Kernel:
    """Remove stores to scratch that nothing reads."""
    allocated = {op.result for op in walk(kernel.body) if op.name == "alloc"}
    for op in walk(kernel.body):
        if op.name != "store":
            allocated.difference_update(op.operands)
        else:
            allocated.difference_update(op.operands[1:])

    def rewrite(op: Op, builder: Rewriter) -> list[Value] | None:
        is_idle = op.name == "store" and op.operands[0] in allocated
        return [] if is_idle else None

    kernel = map_ops(kernel, rewrite) if allocated else kernel
    return _without_allocs(kernel, allocated)


def _without_allocs(kernel: Kernel, unused: set[Value]) -> Kernel:
    if not unused:
        return kernel
    is_unused = lambda op: op.name == "alloc" and op.result in unused
    body = replace_ops(kernel.body, lambda op: () if is_unused(op) else None)
    return kernel.with_(body=body)
