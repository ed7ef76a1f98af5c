"""loop_state: scratch that every iteration of a loop reads and overwrites is carried.

In: a loop whose iterations load all of some scratch, and store all of it, as a running
softmax with its state in scratch does. Out: the loop carries the values; they are
loaded before it and stored after it. `widen_steps.py` then knows what its iterations
hand on to each other.

Proof: within the loop, nothing accesses this scratch in another way, or through a view,
and the loop has an iteration at least; so each load gives what was stored last, or what
was there before the loop, and after it the scratch holds what was stored last.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import Rewriter, map_ops, substitute
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.carried import accesses_all
from pallasite.passes.analysis.memory import Roots


def loop_state(kernel: Kernel) -> Kernel:
    """The kernel with loops that carry what they kept in scratch."""
    scratch = {op.result for op in walk(kernel.body) if op.name == "alloc"}
    roots = Roots(kernel)

    def carrying(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "for":
            return None
        loop = Loop.of(op)
        refs = _state(loop, scratch, roots) if loop.rounds(b.producers) else []
        return _carried(loop, refs, b) if refs else None

    return map_ops(kernel, carrying)


def _state(loop: Loop, scratch: set[Value], roots: Roots) -> list[Value]:
    """The scratch of which each iteration loads and stores all."""
    stores = [op for op in loop.body.ops if op.name == "store"]
    refs = [r for r in dict.fromkeys(op.operands[0] for op in stores) if r in scratch]
    found = []
    for ref in refs:
        uses = [
            op
            for op in walk(loop.body)
            if any(v.is_ref and roots.of(v) is ref for v in op.operands)
        ]
        own = (op.operands[0] is ref and op in loop.body.ops for op in uses)
        read = any(op.name == "load" for op in uses)
        if read and all(own) and all(map(accesses_all, uses)):
            found.append(ref)
    return found


def _carried(loop: Loop, refs: Sequence[Value], b: Builder) -> Sequence[Value]:
    inits = [b.load(ref) for ref in refs]
    params = [Value(v.type, ref.name) for v, ref in zip(inits, refs, strict=True)]
    held = dict(zip(refs, params, strict=True))
    loaded: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in loop.body.ops:
        ref = op.operands[0] if op.name in ("load", "store") else None
        if ref not in held:
            ops.append(op)
        elif op.name == "store":
            held[ref] = loaded.get(op.operands[1], op.operands[1])
        else:
            loaded[op.result] = held[ref]
    yields = (*loop.yields, *(held[ref] for ref in refs))
    body = Block((*loop.body.params, *params), tuple(ops), yields)
    body = substitute(body, loaded)
    new = replace(
        loop,
        inits=(*loop.inits, *inits),
        body=body,
        results=(*loop.results, *(Value(v.type) for v in inits)),
    )
    b.ops.append(new.to_op())
    after = new.results[len(loop.results) :]
    for ref, value in zip(refs, after, strict=True):
        b.store(ref, value)
    return new.results[: len(loop.results)]
