"""Kernel IR to LLVM IR text: one function with the kernel's loops, and its handler.

`RULES` maps each op to its emitter; `emitter.py` walks blocks and calls them. The XLA
FFI handler around the function is `call/handler.py`.
"""

from collections.abc import Sequence
from math import prod

from pallasite.backends.cpu.call import handler
from pallasite.backends.cpu.call.parallel_units import Share, Sharing
from pallasite.backends.cpu.dot import dot
from pallasite.backends.cpu.dot.pack_once import PackedOnce
from pallasite.backends.cpu.emitter import Emitter, Rule
from pallasite.backends.cpu.llvm import cut_loops
from pallasite.backends.cpu.llvm.debug_info import Origins
from pallasite.backends.cpu.llvm.writer import Function, Module, Val, integer
from pallasite.backends.cpu.ops import (
    called_functions,
    control,
    debugging,
    elementwise,
    gathers,
    memory,
    pipeline,
    reductions,
    shapes,
    sorting,
    top_k,
)
from pallasite.backends.cpu.ops.known_tiles import KnownTiles
from pallasite.backends.cpu.ops.programs import count_units
from pallasite.backends.cpu.tiles.plan_memory import MemoryPlan
from pallasite.backends.cpu.tiles.tiles import (
    PREFETCH_DISTANCE,
    Buffer,
    Ref,
    Root,
    row_major,
)
from pallasite.errors import ResourceError
from pallasite.ir.nodes import Block, Kernel, Op, walk
from pallasite.ir.roles import Pipeline

MOST_BYTES, MOST_PROGRAMS = 1 << 56, 1 << 62

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **dot.RULES,
    **top_k.RULES,
    **sorting.RULES,
    **gathers.RULES,
    **memory.RULES,
    **control.RULES,
    **debugging.RULES,
    **pipeline.RULES,
}
NATIVE = frozenset(RULES)


def is_native(op: Op) -> bool:
    """Whether there is a rule for an op with these operands."""
    return op.name in NATIVE and (op.name != "top_k" or top_k.has_top_k(op))


def emit_kernel(kernel: Kernel, lines: bool = False) -> str:
    """The LLVM module of a kernel; its entry point is the function `handler`.

    With `lines`, instructions are annotated with their source lines.

    The kernel writes only memory it owns (`own_inputs`), and its index maps yield valid
    block indices (`place_windows`).
    """
    module, sharing = Module(), Sharing.of(kernel)
    module.origins = Origins() if lines else None
    module.called = called_functions.called_kinds(kernel)
    packed = PackedOnce.of(kernel)
    params = _pointer_params(kernel, sharing)
    more = [("ptr align 64", "shared")] if packed.boxes else []
    units = [("i64", "first"), ("i64", "last")] if sharing else []
    arena_param = ("ptr noalias align 64", "arena")
    all_params = [*params, *more, *units, arena_param]
    f = Function(module, "kernel", all_params, "ptr", "internal")
    refs = _operand_refs(kernel, f.params)
    emitter = Emitter(
        f, dict(zip(kernel.params, refs, strict=True)), RULES, MemoryPlan.of(kernel)
    )
    if packed.boxes:
        emitter.packed_once, emitter.shared = packed, f.params[len(params)]
    if sharing:
        emitter.share = Share(sharing, *f.params[len(params) + len(more) : -1])
        if sharing.has_atomics:
            emitter.shared_roots = frozenset(ref.root for ref in refs)
    emitter.known = KnownTiles(walk(kernel.body))
    with emitter.block(kernel.body, ()):
        f.line("ret ptr null")
    cut_loops.cut_at_loops(f)
    _check_size(kernel, emitter.arena.size)
    if sharing and sharing.units is None:
        _emit_units(module, kernel, sharing)
    handler.emit_handler(
        module,
        arguments=len(kernel.inputs),
        results=kernel.num_outputs,
        arena_bytes=emitter.arena.size,
        shared_bytes=packed.bytes,
        zero_bytes=packed.counter_bytes,
        sharing=sharing,
    )
    return module.text


def _check_size(kernel: Kernel, arena_bytes: int) -> None:
    """Reject sizes that no machine has: numbers in the code would wrap around."""
    if arena_bytes > MOST_BYTES:
        raise ResourceError(
            f"kernel '{kernel.name}' needs more memory for temporaries than the "
            "address space has",
            [("bytes", arena_bytes)],
            kernel.loc,
            "use smaller scratch and blocks",
        )
    for op in walk(kernel.body):
        grid = Pipeline.of(op).grid if op.name == "pipeline" else ()
        if prod(n for n in grid if n) > MOST_PROGRAMS:
            raise ResourceError(
                f"kernel '{kernel.name}' has more programs than the CPU backend "
                "supports",
                [("grid", grid)],
                kernel.loc,
                "use larger blocks",
            )


def _pointer_params(kernel: Kernel, sharing: Sharing | None) -> list[tuple[str, str]]:
    """One parameter per operand and result; `noalias` if nothing else writes there."""
    aliased = {place for pair in _aliases(kernel) for place in pair}
    if sharing and sharing.has_atomics:
        aliased = set(range(len(kernel.params)))
    return [
        ("ptr" if place in aliased else "ptr noalias", f"a{place}")
        for place in range(len(kernel.params))
    ]


def _emit_units(module: Module, kernel: Kernel, sharing: Sharing) -> None:
    """Add `@units`: how many there are where the grid's sizes are operands.

    Negative if they must not run concurrently.
    """
    params = [*_pointer_params(kernel, sharing), ("ptr", "arena")]
    f = Function(module, "units", params, "i64", "internal")
    refs = _operand_refs(kernel, f.params)
    emitter = Emitter(
        f, dict(zip(kernel.params, refs, strict=True)), RULES, MemoryPlan.of(kernel)
    )
    before = [op for op in kernel.body.ops[:-1] if op.name != "alloc"]
    sizes = [v for v in sharing.op.operands if not v.is_ref]
    with emitter.block(Block((), tuple(before), tuple(sizes)), ()):
        units, at_once = count_units(emitter, sharing)
        f.line(f"ret {f.select(at_once, units, f.sub(integer(0), units))}")


def _aliases(kernel: Kernel) -> list[tuple[int, int]]:
    """Pairs of parameter positions that alias."""
    return [(i, len(kernel.inputs) + o) for i, o in kernel.aliases]


def _operand_refs(kernel: Kernel, pointers: Sequence[Val]) -> list[Ref]:
    shared = dict(_aliases(kernel))
    roots = [
        Root(
            f"operand {n}",
            mutable=n in shared or n >= len(kernel.inputs),
        )
        for n in range(len(kernel.params))
    ]
    for first, second in shared.items():
        roots[first] = roots[second]
    refs = []
    for param, pointer, root in zip(kernel.params, pointers, roots, strict=False):
        type = param.ref
        ahead = integer(PREFETCH_DISTANCE) if param in kernel.inputs else None
        buffer = Buffer(pointer, row_major(type.shape), root, ahead)
        refs.append(Ref(type.shape, type.dtype, buffer))
    return refs
