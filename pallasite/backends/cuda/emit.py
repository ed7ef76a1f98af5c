"""Tile IR to CUDA C++: the kernel function, its grid, and control flow.

In: a kernel after `passes/lower/promote.py` (programs, loops, values; refs only for
actual memory). Out: one `extern "C" __global__` function as text, with what a launch
needs to know in its first line (`Launched`). The op families are in the base classes;
`RULES` maps each op to its emitter.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import gcd, prod
from typing import Any

from pallasite.backends.cuda import (
    ampere,
    author_text,
    clusters,
    explicit,
    functions,
    memory,
    peer_devices,
    role_code,
    semaphores,
    shared,
    tensor_memory,
    tiles,
)
from pallasite.backends.cuda.again import computed_again
from pallasite.backends.cuda.assign import assign
from pallasite.backends.cuda.authored import BLOCKS, WARPGROUP_OPS, is_for_all
from pallasite.backends.cuda.core import VECTOR_BYTES, Tile
from pallasite.backends.cuda.elementwise import CALLED
from pallasite.backends.cuda.explicit import MAP_BYTES
from pallasite.backends.cuda.instruction_sets import BLACKWELL, HOPPER
from pallasite.backends.cuda.layouts import WARPGROUP, Spread, striped
from pallasite.backends.cuda.meetings import COPIES, NOTHING, Meetings, is_engines
from pallasite.backends.cuda.products import BEHIND
from pallasite.backends.cuda.repack import REPACKED
from pallasite.backends.cuda.role_code import Rounds
from pallasite.backends.cuda.shared import can_swizzle, copied_otherwise, widest_swizzle
from pallasite.backends.cuda.tensor_memory import TensorMemory
from pallasite.backends.cuda.text import memory_type
from pallasite.backends.libdevice import is_called
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.opdef import table
from pallasite.ir.rewrite import users_of
from pallasite.ir.roles import Cond, Loop, Pipeline, While
from pallasite.ir.types import TileType
from pallasite.ops.gpu import SEMAPHORES
from pallasite.passes.analysis.fences import fenced
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.analysis.live_tiles import LiveTiles
from pallasite.passes.analysis.memory import Roots, accesses_of
from pallasite.passes.analysis.rounding import rounded_away

MAX_PROGRAMS = (1 << 31) - 1
MAX_THREADS = 1024
# A thread's share of the largest tile, if there are enough threads. Threads that reduce
# rows together wait for each other: then a warp takes a row alone if it can, and 256
# threads take up to twice as much before their number grows.
ELEMENTS, REDUCED_ELEMENTS, MOST_ELEMENTS = 16, 32, 64
WARP_THREADS, USUAL_THREADS = 32, 256
PRODUCTS = ("wgmma", "tensor_mma")  # these read swizzled memory
TILE_WORDS = 96  # registers per thread for tiles


@dataclass(frozen=True)
class Launched:
    """What a launch of an emitted kernel needs to know."""

    name: str
    programs: int
    threads: int
    shared_bytes: int
    scratch: tuple[int, ...] = ()  # bytes of main memory, one extra result each
    arch: str = ""  # the only architecture it is for; empty: any
    repacked: tuple[tuple[Any, ...], ...] = ()  # see `repack.py`
    semaphores: int = (
        0  # words, zeros at first: after the operands, and the last result
    )
    devices: int = 1  # whose programs these are; several take a table of addresses

    def line(self) -> str:
        return f"// launch {json.dumps(asdict(self))}\n"

    @staticmethod
    def of(text: str) -> "Launched":
        """What the first line of an emitted text says."""
        first = text.partition("\n")[0].removeprefix("// launch ")
        fields = json.loads(first)
        fields["scratch"] = tuple(fields["scratch"])
        fields["repacked"] = tuple(map(tuple, fields["repacked"]))
        return Launched(**fields)


def function_name(kernel: Kernel) -> str:
    """The kernel's own name, made distinct from C++ words (`max`, `double`)."""
    return "pl_" + re.sub(r"\W", "_", kernel.name, flags=re.ASCII)


def emit(
    kernel: Kernel, shared_bytes: int, approx_math: bool = False, lines: bool = False
) -> str:
    """The CUDA C++ of a promoted kernel.

    Args:
        kernel: after all passes.
        shared_bytes: what a program may have.
        approx_math: the author prefers less exact instructions.
        lines: annotate code with its source lines.
    """
    emitter = Emitter(kernel, shared_bytes)
    emitter.approx_math, emitter.with_lines = approx_math, lines
    return emitter.text()


class Emitter(TensorMemory):
    """Walks a kernel and emits its function."""

    def __init__(self, kernel: Kernel, shared_bytes: int):
        super().__init__()
        self.kernel, self.most_shared = kernel, shared_bytes
        self.with_lines = False
        self.program = Pipeline.of(find_pipeline(kernel))
        accesses = accesses_of(kernel)
        self.fenced = fenced(kernel, accesses)
        self.written = _written(accesses)
        self.exchanges = _exchanges(accesses)
        peers = (op for op in walk(self.program.body) if op.name == "peer_block")
        self.has_peers = any(op.operands[0].ref.space == "smem" for op in peers)
        self.rounded_away = rounded_away(kernel)
        self.threads, self.vector_elements = _threads(kernel, accesses)
        roles = [op for op in walk(self.program.body) if op.name == "roles"]
        roots = Roots(kernel)
        self.note_devices(kernel, roots)
        self.meetings = Meetings(roots)
        self.is_authored = bool(roles) and "cuda.registers" not in roles[0].attrs
        self.uses = uses_of(self.program.body, roots)
        self.uses_engine = any(is_engines(op) for op in walk(self.program.body))
        self.only_multiplied = _only_multiplied(self.program.body)
        self.rows_beside = _multiplies_turned_bytes(self.program.body)
        self.split_by_copies: set[Value] = set()
        if self.is_authored:  # `meetings` synchronises shared memory
            self.split_by_copies = copied_otherwise(self.program.body, roots)
            self.fenced = {m for m in self.fenced if m.ref.space != "smem"}
        if not roles:
            self.again = computed_again(self.program.body)
        else:
            *_, computing = roles[0].attrs["cuda.warpgroups"]
            self.warpgroups, self.threads = computing, computing * WARPGROUP
        self.assignment = assign(
            self.program.body, self.threads, self.vector_elements, self.anchors()
        )
        if roles:
            self.threads = sum(roles[0].attrs["cuda.warpgroups"]) * WARPGROUP
        if not roles:  # with calls, ptxas ignores how roles share registers
            self.called = _called(self.program.body, self.threads)
        self.arch = _arch(self.program.body) if roles else ""
        self.instructions_wait = self.arch != BLACKWELL.code
        self.users = users_of(self.program.body)
        self.per_core = roles[0].attrs.get("cuda.per_core", 1) if roles else 1

    def anchors(self) -> dict[Value, Spread]:
        """Tiles whose layout an instruction fixes."""
        found = {}
        for op in walk(self.program.body):
            if op.name == "load" and op.operands[0].ref.space == "tmem":
                found[op.result] = self.tensor_spread(*op.result.tile.shape)
            if op.name == "store" and op.operands[0].ref.space == "tmem":
                found.setdefault(
                    op.operands[1], self.tensor_spread(*op.operands[1].tile.shape)
                )
            if op.name == "dot_add":
                found |= self.fragments(op)
            if op.name == "wgmma":
                for value in (op.result, op.operands[1]):
                    if not value.is_ref:
                        rows, columns = value.tile.shape
                        whole = self.is_authored and rows % (64 * self.warpgroups)
                        if whole or columns % 8:
                            self.refuse(
                                op,
                                f"an accumulator of {rows} x {columns}; rows must be "
                                f"a multiple of {64 * self.warpgroups}, columns of 8",
                            )
                        found[value] = self.sums_spread(rows, columns)
        return found

    def text(self) -> str:
        kernel = self.kernel
        same = kernel.aliased_results
        params = []
        for number, param in enumerate(kernel.params):
            root = same.get(param, param)
            params.append(self.parameter(param, f"a{number}", root))
            self.views[param] = self.array(param.ref, f"a{number}", root)
        self.block(kernel.body)
        if self.shared_bytes > self.most_shared:
            raise UnsupportedError(
                f"backend 'cuda' needs {self.shared_bytes} bytes of shared memory per "
                f"program, the limit is {self.most_shared}",
                [("kernel", kernel.name)],
                kernel.loc,
                "use smaller blocks" + ", or backend='triton'" * (not self.is_authored),
            )
        first = self.table_lines(params) if self.has_devices else []
        programs = self.programs * self.devices
        scratch = programs * MAP_BYTES * len(self.maps)
        if self.has_devices:
            params = ["const u64* peers"]
        if scratch:
            params.append("char* scratch")
        if (
            self.semaphores and not self.has_devices
        ):  # an operand whose memory is that of a result
            params.insert(len(kernel.inputs), "int* semaphores")
            params.append("int* same_semaphores")
        launched = Launched(
            function_name(kernel),
            programs,
            self.threads,
            self.shared_bytes,
            (scratch,) if scratch else (),
            self.arch,
            self.program.op.attrs.get(REPACKED, ()),
            self.semaphores,
            self.devices,
        )
        bounds = str(self.threads)
        if self.arch:  # ptxas may use all registers that these programs leave
            bounds += f", {self.per_core}"
        shared = "  extern __shared__ __align__(1024) char shared[];"
        cluster = f"__cluster_dims__({self.blocks}, 1, 1) " if self.blocks > 1 else ""
        head = [
            f'extern "C" __global__ void {cluster}__launch_bounds__({bounds})',
            f"{launched.name}({', '.join(params)}) {{",
            *([shared] if self.shared_bytes else []),
            "  const u32 thread = threadIdx.x;",
            *(f"  {line}" for line in first),
            *(
                f"  const int {name} = (int)({text});"
                for text, name in self.bases.items()
            ),
        ]
        body = "\n".join([*head, *self.out.lines, "}", ""])
        return launched.line() + functions.used(body, self.instructions) + "\n" + body

    def parameter(self, param: Value, name: str, root: Value) -> str:
        kind = memory_type(param.ref.dtype)
        if kind is None or param.ref.is_semaphore:
            raise UnsupportedError(
                f"backend 'cuda' does not support operands of type {param.type}",
                [("kernel", self.kernel.name), ("ref", param.name)],
                self.kernel.loc,
                "use another dtype, or interpret=True",
            )
        if root in self.written:
            return f"{kind}* {name}"
        return f"const {kind}* __restrict__ {name}"

    def default_spread(self, value: Value) -> Spread:
        return striped(value.tile.shape, self.threads, self.vector_elements)

    # --- walking ---

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        rule = RULES.get(op.name)
        if rule is None:
            self.refuse(op)
        values = (*op.operands, *op.results)
        if any(not v.is_ref and not v.tile.size for v in values):
            self.refuse(op, "empty tiles are not supported")
        outer = self.out.origin
        if self.with_lines:
            self.out.origin = op.loc.comment if op.loc else ""
        rule(self, op)
        self.out.origin = outer
        self.facts.note_op(op)
        for value in op.results:
            self.producers[value] = op

    # --- the grid ---

    def emit_pipeline(self, op: Op) -> None:
        """One program per thread block; all axes share the first launch dimension."""
        pipeline = Pipeline.of(op)
        grid = [n for n in pipeline.sizes if isinstance(n, int)]
        if pipeline.windows or len(grid) < len(pipeline.sizes):
            self.refuse(op, "a pipeline that is not a grid of programs")
        self.programs = prod(grid)
        if self.programs > MAX_PROGRAMS:
            self.refuse(op, f"{self.programs} programs; CUDA's limit is {MAX_PROGRAMS}")
        if not self.programs:
            self.programs = 1
            return
        blocks = op.attrs.get(BLOCKS)
        if blocks is None:
            self.blocks_of_device = self.programs
            self.number_program(pipeline, self.program_number)
        else:
            self.rounds = Rounds(pipeline, self.programs, blocks)
            self.programs = blocks
        self.note_cluster(pipeline)
        self.note_tensors(op)
        self.block(pipeline.body)

    def emit_alloc(self, op: Op) -> None:
        """Scratch that stays in memory is shared memory."""
        ref = op.result.ref
        if ref.space == "mbarrier":
            self.alloc_barriers(op)
        elif ref.space == "tmem":
            self.alloc_tensor(op)
        elif ref.space == SEMAPHORES and self.is_authored:
            self.alloc_semaphores(op, is_shared=op in self.kernel.body.ops)
        elif self.is_authored and ref.space == "regs" and not ref.shape:
            self.alloc_local(op)
        elif ref.layout is not None and ref.layout.kind == "swizzle":
            self.alloc_ring(op, ref.layout.numbers[0])
        elif not self.uses.get(op.result, frozenset()).isdisjoint(PRODUCTS):
            self.alloc_ring(op, widest_swizzle(ref))
        elif self.is_better_swizzled(op.result):
            self.alloc_ring(op)
        elif ref.is_semaphore or (self.is_authored and ref.space == "regs"):
            self.refuse(op)
        else:
            kind, name = self.memory_type(ref.dtype, op), self.out.fresh("m")
            offset = self.reserve(ref.size * ref.dtype.bytes)
            self.out.line(f"{kind}* {name} = ({kind}*)(shared + {offset});")
            self.views[op.result] = self.array(ref, name, op.result)

    def is_better_swizzled(self, memory: Value) -> bool:
        """Whether rows that threads access and copies move would conflict in banks."""
        uses = self.uses.get(memory, frozenset())
        copied = not uses.isdisjoint(COPIES)
        both = copied and not uses.isdisjoint(("load", "store"))
        whole = memory not in self.split_by_copies
        return self.is_authored and both and whole and can_swizzle(memory.ref)

    # --- control flow ---

    def variable(self, value: Value, op: Op) -> Tile:
        """A variable that code assigns to."""
        if not isinstance(value.type, TileType):
            self.refuse(op, "a loop or branch carries a ref")
        spread = self.spread(value, op)
        if value.type.shape and spread is None:
            self.refuse(op, f"{value.type} has no layout")
        lanes = self.assignment.partial.get(value, ())
        return replace(self.declare(value.tile.dtype, spread, op), lanes=lanes)

    def hand_over(self, targets: list[Tile], values: tuple[Value, ...], op: Op) -> None:
        """Assign several variables in parallel: none changes before it is read."""
        sources = []
        for target, value in zip(targets, values, strict=True):
            if target.lanes:
                source = self.part(value, target.lanes, target.spread, op)
            else:
                source = self.get(value, target.spread, op)
            if source in targets and source != target:
                kept = self.declare(source.dtype, source.spread, op)
                self.copy(kept, source)
                source = kept
            sources.append(source)
        for target, source in zip(targets, sources, strict=True):
            if source != target:
                self.copy(target, source)

    def emit_for(self, op: Op) -> None:
        loop = Loop.of(op)
        first, limit, step = (self.env[v].name for v in loop.bounds)
        if self.facts.of(loop.step).low < 1:
            self.refuse(op, "the step of a loop must be known to be positive")
        if self.facts.may_overshoot(loop):
            self.refuse(op, "the loop counter may overflow its type in the last step")
        if loop.index.tile.dtype.is_signed_int:
            self.facts.note_counter(loop)
        carried = [self.variable(v, op) for v in loop.carried]
        self.hand_over(carried, loop.inits, op)
        self.env.update(zip(loop.carried, carried, strict=True))
        counter = Tile(self.out.fresh("n"), loop.index.tile.dtype)
        self.env[loop.index] = counter
        kind, n = self.type(counter.dtype, op), counter.name
        is_behind = any(each.attrs.get(BEHIND) for each in loop.body.ops)
        if is_behind:
            self.starts_behind()
        if self.alone and self.columns:  # threads that need few registers
            self.out.line('_Pragma("unroll 1")')
        with self.out.block(
            f"for ({kind} {n} = {first}; {n} < {limit}; {n} += {step})"
        ):
            self.loops += 1
            self.enter_loop(loop.body)
            self.block(loop.body)
            self.loops -= 1
            self.hand_over(carried, loop.yields, op)
            if is_behind:
                self.lets_start(f"{n} == {first} + {step}")
        self.env.update(zip(op.results, carried, strict=True))

    def emit_while(self, op: Op) -> None:
        loop = While.of(op)
        carried = [self.variable(v, op) for v in loop.condition.params]
        self.hand_over(carried, loop.inits, op)
        self.env.update(zip(loop.condition.params, carried, strict=True))
        self.env.update(zip(loop.body.params, carried, strict=True))
        with self.out.block("while (true)"):
            self.loops += 1
            self.enter_loop(loop.condition, loop.body)
            self.block(loop.condition)
            self.out.line(f"if (!{self.env[loop.condition.yields[0]].name}) break;")
            self.block(loop.body)
            self.loops -= 1
            self.hand_over(carried, loop.body.yields, op)
        self.env.update(zip(op.results, carried, strict=True))

    def emit_cond(self, op: Op) -> None:
        cond = Cond.of(op)
        which = self.env[cond.which].name
        results = [self.variable(v, op) for v in op.results]
        last = len(cond.branches) - 1
        before, after = self.accessed, []
        for number, branch in enumerate(cond.branches):
            self.accessed = before
            head = f"if ({which} <= {number})" if number < last else ""
            head = f"else {head}".rstrip() if number else head
            with self.out.block(head):
                self.block(branch)
                self.hand_over(results, branch.yields, op)
            after.append(self.accessed)
        self.accessed = NOTHING.union(*after)
        self.env.update(zip(op.results, results, strict=True))

    # --- the rest ---

    def emit_assume_multiple(self, op: Op) -> None:
        self.env[op.result] = self.env[op.operands[0]]

    def emit_nothing(self, op: Op) -> None:
        """Delays have no effect of their own; the emulation runs checks."""


RULES: dict[str, Callable[[Any, Op], None]] = {
    **tiles.RULES,
    **memory.RULES,
    **shared.RULES,
    **explicit.RULES,
    **ampere.RULES,
    **author_text.RULES,
    **role_code.RULES,
    **clusters.RULES,
    **semaphores.RULES,
    **peer_devices.RULES,
    **tensor_memory.RULES,
    "pipeline": Emitter.emit_pipeline,
    "alloc": Emitter.emit_alloc,
    "for": Emitter.emit_for,
    "while": Emitter.emit_while,
    "cond": Emitter.emit_cond,
    "assume_multiple": Emitter.emit_assume_multiple,
    "delay": Emitter.emit_nothing,
    "debug_check": Emitter.emit_nothing,
}


# --- decisions for a whole kernel ---


def _threads(kernel: Kernel, accesses: Mapping[Value, list[Op]]) -> tuple[int, int]:
    """Threads of a program, and consecutive elements that one of them holds."""
    sizes, ops = [1], list(walk(kernel.body))
    for op in ops:
        sizes += [v.tile.size for v in op.results if isinstance(v.type, TileType)]
    moved = [
        (array.ref, op.result if op.name == "load" else op.operands[1])
        for array, ops in accesses.items()
        for op in ops
        if op.name in ("load", "store")
    ]
    tiles = [(ref, v.tile) for ref, v in moved if v.tile.shape]
    vector = VECTOR_BYTES // min([4, *(ref.dtype.bytes for ref, _ in tiles)])
    # For unaligned rows, adjacent threads hold adjacent elements.
    largest = max((tile.size for _, tile in tiles), default=0)
    for ref, tile in tiles:
        if tile.size == largest:
            vector = gcd(
                vector, tile.shape[-1], *(ref.shape[-1:] if ref.rank > 1 else ())
            )
    reduces = any(op.name == "reduce" for op in ops)
    words = LiveTiles(kernel).peak_words() if reduces else 0
    threads = WARP_THREADS
    while threads < MAX_THREADS:
        most = ELEMENTS
        if reduces:
            few = WARP_THREADS < threads < USUAL_THREADS
            most = REDUCED_ELEMENTS if few else MOST_ELEMENTS
        if max(sizes) <= threads * max(most, vector) and words <= threads * TILE_WORDS:
            break
        threads *= 2
    return threads, vector


# --- rules of memory ---


def _written(accesses: Mapping[Value, list[Op]]) -> set[Value]:
    return {m for m, ops in accesses.items() if any(op.name != "load" for op in ops)}


def _called(body: Block, threads: int) -> frozenset[tuple[str, TileType]]:
    """Functions, and the tiles they are used on too often to inline them."""
    uses = Counter(
        (op.name, op.operands[0].tile)
        for op in walk(body)
        if op.name in CALLED and op.operands[0].tile.dtype.is_float
    )
    return frozenset(
        (name, tile)
        for (name, tile), n in uses.items()
        if is_called(name, tile, tile.size // threads, n)
    )


def _exchanges(accesses: Mapping[Value, list[Op]]) -> bool:
    """Whether some main memory is both written and read."""
    return any(
        memory.ref.space != "smem" and {"load"} < {op.name for op in ops}
        for memory, ops in accesses.items()
    )


def _only_multiplied(body: Block) -> set[Value]:
    """Integers cast to float that only a matmul of the same block uses."""
    blocks = [body, *(region for op in walk(body) for region in op.regions)]
    uses = Counter(v for op in walk(body) for v in op.operands)
    uses.update(v for block in blocks for v in block.yields)
    found: set[Value] = set()
    for block in blocks:
        casts = [op for op in block.ops if op.name == "cast"]
        made = {op.result for op in casts if op.operands[0].tile.dtype.is_integer}
        for op in block.ops:
            if op.name == "wgmma":
                found |= {v for v in op.operands if v in made and uses[v] == 1}
    return found


def _multiplies_turned_bytes(body: Block) -> bool:
    """Whether all left operands of matmuls are made of bytes stored along the rows.

    A thread then loads two bytes of two rows at once, if the rows are adjacent.
    """
    made = {v: op for op in walk(body) for v in op.results}
    products = [op for op in walk(body) if op.name == "wgmma"]
    return bool(products) and all(
        _is_turned_bytes(p.operands[1], made) for p in products
    )


def _is_turned_bytes(value: Value, made: Mapping[Value, Op]) -> bool:
    op = made.get(value)
    while op is not None and table()[op.name].elementwise:
        op = made.get(op.operands[0])
    if op is None or op.name != "transpose":
        return False
    source = made.get(op.operands[0])
    is_load = source is not None and source.name == "load"
    return is_load and op.result.tile.dtype.bits == 8


def _arch(body: Block) -> str:
    """The generation of chips that an author's code is for; empty: any since Ampere."""
    ops = list(walk(body))
    if not any(op.name in WARPGROUP_OPS and not is_for_all(op) for op in ops):
        return ""
    is_new = any(op.name == BLACKWELL.op for op in ops)
    return (BLACKWELL if is_new else HOPPER).code


def uses_of(body: Block, roots: Roots) -> dict[Value, frozenset[str]]:
    """The names of the ops that use each memory."""
    found: dict[Value, frozenset[str]] = {}
    for op in walk(body):
        for ref in (v for v in op.operands if v.is_ref):
            root = roots.of(ref)
            found[root] = found.get(root, frozenset()) | {op.name}
    return found
