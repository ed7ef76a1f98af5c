"""One operand where a call is given the same array several times.

Windows on the blocks beside a program's own (`stencil(x, x, x)`) are operands of a
call, each with a cotangent that is as large as the array, and JAX adds these up. As
windows on one operand they have one cotangent, which one kernel can compute.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pallasite.ir.nodes import Kernel
from pallasite.ir.rewrite import substitute
from pallasite.passes.analysis.memory import Roots
from pallasite.primitive import Call
from pallasite.sharding.rule import Partition


def once(
    call: Call, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Call, Sequence[Any], Sequence[Any]]:
    """The call with each array, and its tangent, as one operand."""
    kernel, kept = with_operands(call)
    if kernel is call.kernel:
        return call, primals, tangents
    flowing = tuple(kept.index(n) for n in call.flowing if n in kept)
    call = replace(call, kernel=kernel, equal=(), flowing=flowing)
    return call, [primals[n] for n in kept], [tangents[n] for n in kept]


def with_operands(call: Call) -> tuple[Kernel, tuple[int, ...]]:
    """The kernel without operands that are others, and the numbers of those it keeps.

    A rule for partitioning names the dimensions of each operand, and keeps them apart.
    """
    if not call.equal or isinstance(call.partition, Partition):
        return call.kernel, tuple(range(len(call.kernel.inputs)))
    return _with_operands(call.kernel, call.equal)


@functools.lru_cache(maxsize=1024)
def _with_operands(
    kernel: Kernel, first: tuple[int, ...]
) -> tuple[Kernel, tuple[int, ...]]:
    """See `with_operands`; a kernel that changes operands stays as it is."""
    inputs = kernel.inputs
    everything = tuple(range(len(inputs)))
    if kernel.aliases or kernel.symbols:
        return kernel, everything
    if set(inputs) & Roots(kernel.body).all_written(kernel.body):
        return kernel, everything
    moved = {
        ref: inputs[m]
        for ref, m in zip(inputs, first, strict=True)
        if ref is not inputs[m] and ref.type == inputs[m].type
    }
    if not moved:
        return kernel, everything
    kept = tuple(n for n, ref in enumerate(inputs) if ref not in moved)
    params = (*(inputs[n] for n in kept), *kernel.outputs)
    body = substitute(kernel.body, moved)
    return kernel.with_(params=params, body=body), kept
