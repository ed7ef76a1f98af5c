"""The text of a normal form without the author's names: equal for equal spellings."""

from pallasite.ir.nodes import Block, Kernel, Op, Value
from pallasite.passes.normal.normalize import normalize


def normal_text(kernel: Kernel) -> str:
    """The text of the normal form without the author's names of values."""
    kernel = normalize(kernel)
    params = tuple(Value(p.type) for p in kernel.params)
    renamed = dict(zip(kernel.params, params, strict=True))
    body = nameless(kernel.body, renamed)
    return kernel.with_(name="kernel", params=params, body=body).text


def nameless(block: Block, renamed: dict[Value, Value]) -> Block:
    """The block with fresh values without names; `renamed` are those it uses."""
    params = [renamed.setdefault(p, Value(p.type)) for p in block.params]
    ops: list[Op] = []
    for op in block.ops:
        operands = tuple(renamed.get(v, v) for v in op.operands)
        regions = tuple(nameless(region, renamed) for region in op.regions)
        results = tuple(renamed.setdefault(v, Value(v.type)) for v in op.results)
        ops.append(op.with_(operands=operands, results=results, regions=regions))
    yields = tuple(renamed.get(v, v) for v in block.yields)
    return Block(tuple(params), tuple(ops), yields)
