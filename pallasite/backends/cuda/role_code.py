"""The code of roles: a branch for each, after the setup that precedes all of them.

The setup makes barriers and the tensor maps of arrays. `explicit.py` emits the ops of
roles.

Where a thread block runs several programs (`Rounds`), each role loops over them, so
that it gets its registers once and tensor maps stay. Between two programs all roles
synchronise twice. At the first synchronisation shared memory is free: the consumers of
copies into it have waited for them, the issuers of copies out of it too (`authored.py`
ensures that), and accesses by threads precede it. So one thread may invalidate all
mbarriers and initialise them again; after the second, all of them are in their first
phase, as the code of a program expects. Stores to shared memory are followed by a
fence, since the next program may copy into what this one has stored to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from pallasite.backends.cuda import hopper
from pallasite.backends.cuda.author_text import AuthorText
from pallasite.backends.cuda.explicit import MAP_BYTES, TURNS, WARPS, Map
from pallasite.backends.cuda.layouts import WARP, WARPGROUP
from pallasite.backends.cuda.meetings import NOTHING
from pallasite.backends.cuda.products import IN_TURN
from pallasite.ir.nodes import Block, Op, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.intervals import Fact

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # as TMA encodes them
ALONE = ("load", "multiply")  # the roles that single threads run
EVERYBODY = 0  # the named barrier at which all roles synchronise


@dataclass(frozen=True)
class Rounds:
    """The programs of a pipeline, distributed over fewer thread blocks."""

    pipeline: Pipeline
    programs: int
    blocks: int


class RoleCode(AuthorText):
    """Emits roles, and the setup before them."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: Rounds | None = None  # None: a thread block runs one program
        self.warpgroups_of: Sequence[int] = ()  # of each role
        self.has_roles = False  # whether their code has been emitted
        self.starts_together = False  # with the other thread blocks of a cluster

    def emit_roles(self, op: Op) -> None:
        """Each role is a branch; before it, barriers and tensor maps are made."""
        names = op.attrs["cuda.names"]
        counts, registers = op.attrs["cuda.warpgroups"], op.attrs.get("cuda.registers")
        before = len(self.out.lines)
        self.warpgroups_of = counts
        parts = _by_warpgroups(zip(names, op.regions, strict=True), counts)
        first, usual, outer = 0, self.threads, self.bases
        if self.is_authored:  # lets the compiler see that a warp has one role
            self.out.line("const u32 role = __shfl_sync(~0u, threadIdx.x / 128, 0);")
        for number, (count, members) in enumerate(parts):
            end = first + count * WARPGROUP
            who, unit = ("role", WARPGROUP) if self.is_authored else ("threadIdx.x", 1)
            head = f"if ({who} < {end // unit})" if number < len(parts) - 1 else ""
            with self.out.block(f"else {head}".rstrip() if number else head):
                self.out.line(f"const u32 thread = threadIdx.x - {first};")
                if registers is not None:
                    word = "fewer" if number == 0 else "more"
                    self.out.line(f"{word}_registers<{registers[number]}>();")
                self.meeting = 1 + number if self.is_authored else 1
                for place, (name, region) in enumerate(members):
                    self.emit_role(name, region, count, number == 0, place)
            first = end
        self.in_role, self.alone = False, False
        self.threads, self.bases = usual, outer
        rest, self.out.lines = self.out.lines[before:], self.out.lines[:before]
        self.make_barriers()
        self.make_maps()
        self.start_together()
        self.out.lines += rest
        self.has_roles = True

    def emit_role(
        self, name: str, region: Block, warpgroups: int, is_first: bool, place: int
    ) -> None:
        """The code of one role, after the thread numbers and tensor maps it uses.

        `place`: the warp whose thread it is, of those that are alone in their roles.
        """
        self.bases, self.seen_maps = {}, set()
        start = len(self.out.lines)
        self.threads = warpgroups * WARPGROUP
        self.in_role, self.alone = True, name in ALONE
        self.accessed = NOTHING
        self.elects = _copies_between_products(region)
        if self.is_authored:
            self.out.line("const u32 warp = __shfl_sync(~0u, thread / 32, 0);")
        if self.alone:
            # ptxas knows that this is a single thread; see `once`.
            other = f"if (thread / {WARP} == {place} && elected())"
            with self.out.block(other if place else "if (thread == 0)"):
                self.block(region)
        else:
            self.warpgroups = warpgroups
            self.out.line("const u32 group = __shfl_sync(~0u, thread / 128, 0);")
            if any(op.attrs.get(IN_TURN) for op in walk(region)):
                # The first turn is the first warpgroup's.
                last = f"group == {warpgroups - 1}"
                self.out.line(f"if ({last}) pass_by({TURNS}, {2 * WARPGROUP});")
            if self.rounds is None:
                self.block(region)
            else:
                self.emit_rounds(self.rounds, region, is_first)
            if self.staging is not None:
                self.out.line("if (thread % 128 == 0) copies_left<0>();")
        indent = "  " * self.out.depth
        seen = [
            f"{indent}map_seen(maps + {number * MAP_BYTES});"
            for number in sorted(self.seen_maps)
        ]
        self.out.lines[start:start] = [*self.base_lines(indent), *seen]

    def emit_rounds(self, rounds: Rounds, region: Block, is_first: bool) -> None:
        """A role in all programs of this thread block, one after another."""
        parts: dict[bool, list[Op]] = {True: [], False: []}
        for op in region.ops:
            parts[op.name == "set_registers"].append(op)
        once, program = (Block((), tuple(parts[is_once])) for is_once in (True, False))
        self.block(once)
        step = rounds.blocks
        with self.out.block(f"for (int number = blockIdx.x;; number += {step})"):
            self.number_program(rounds.pipeline, "number")
            self.block(program)
            self.out.line(f"if (number >= {rounds.programs - step}) break;")
            if self.arch and _stores_to_shared(region):
                self.out.line("stores_before_copies();")
            meet = f"meet({EVERYBODY}, {self.warps * WARP});"
            self.out.line(meet)
            if is_first and self.makes_barriers:
                with self.out.block("if (thread == 0)"):
                    self.init_barriers(again=True)
            self.out.line(meet)

    def number_program(self, pipeline: Pipeline, number: str) -> None:
        """The grid position of the program with a given number."""
        grid = [n for n in pipeline.sizes if isinstance(n, int)]
        for axis in range(len(grid)):
            size, inner = grid[axis], prod(grid[axis + 1 :])
            value = pipeline.ids[axis]
            self.facts.note(value, Fact(0, size - 1))
            text = number if inner == 1 else f"{number} / {inner}"
            if prod(grid[:axis]) > 1:
                text = f"{text} % {size}"
            self.env[value] = self.let(value.tile.dtype, text, pipeline.op, "program")

    def start_together(self) -> None:
        """No role starts before barriers and tensor maps are made."""
        self.out.line("blocks_meet();" if self.starts_together else "__syncthreads();")

    def base_lines(self, indent: str) -> list[str]:
        return [
            f"{indent}const int {name} = (int)({text});"
            for text, name in self.bases.items()
        ]

    @property
    def warps(self) -> int:
        return sum(self.warpgroups_of) * WARPS

    @property
    def makes_barriers(self) -> bool:
        return bool(self.inits)

    def make_barriers(self) -> None:
        """Done by a warp that has no tensor map to build, if there is one."""
        if not self.makes_barriers:
            return
        maker = 32 * min(len(self.maps), self.warps - 1)
        with self.out.block(f"if (threadIdx.x == {maker})"):
            self.init_barriers()

    def init_barriers(self, again: bool = False) -> None:
        """The code of the one thread; `again`: where they were in use."""
        for offset, count, arrivals in self.inits:
            for n in range(count):
                at = f"shared_address(shared) + {offset + 8 * n}"
                if again:
                    self.out.line(f"barrier_end({at});")
                self.out.line(f"barrier_init({at}, {arrivals});")
        if self.inits:
            self.out.line("barriers_made();")

    def make_maps(self) -> None:
        """Each by a different warp, as far as there are enough."""
        if not self.maps:
            return
        total = MAP_BYTES * len(self.maps)
        self.out.line(f"char* maps = scratch + (i64)blockIdx.x * {total};")
        for number, each in enumerate(self.maps):
            offset = self.reserve(MAP_BYTES)
            maker = f"threadIdx.x / 32 == {number % self.warps}"
            with self.out.block(f"if ({maker})"):
                self.out.line(f"const u32 at = shared_address(shared) + {offset};")
                self.out.line(f"((u32*)(shared + {offset}))[threadIdx.x % 32] = 0;")
                self.out.line("__syncwarp();")
                with self.out.block("if (threadIdx.x % 32 == 0)"):
                    self.fill_map(each)
                self.out.line("__syncwarp();")
                self.out.line(f"map_publish(at, maps + {number * MAP_BYTES});")

    def fill_map(self, each: Map) -> None:
        rank, width = len(each.shape), each.dtype.bytes
        code = hopper.ELEMENT_CODES["tf32" if each.is_rounded else each.dtype.name]
        mode = SWIZZLES[each.swizzle]
        self.out.line(f"map_array<{rank}, {code}, {mode}>(at, {each.pointer});")
        pairs = zip(reversed(each.shape), reversed(each.box), strict=True)
        for n, (size, box) in enumerate(pairs):
            self.out.line(f"map_dim<{n}>(at, {size}, {box});")
        for n in range(rank - 1):
            stride = prod(each.shape[rank - 1 - n :]) * width
            self.out.line(f"map_stride<{n}>(at, {stride});")


def _by_warpgroups(
    roles: Iterable[tuple[str, Block]], counts: Sequence[int]
) -> list[tuple[int, list[tuple[str, Block]]]]:
    """Roles that share warpgroups: those without their own are the one's before."""
    parts = list[tuple[int, list[tuple[str, Block]]]]()
    for role, count in zip(roles, counts, strict=True):
        if count:
            parts.append((count, []))
        parts[-1][1].append(role)
    return parts


def _copies_between_products(role: Block) -> bool:
    """Whether a loop both multiplies and starts copies to shared memory."""
    for loop in (op for op in walk(role) if op.name in ("for", "while")):
        inner = [op for region in loop.regions for op in walk(region)]
        copies = [op.operands[1] for op in inner if op.name == "copy_start"]
        multiplies = any(op.name in ("wgmma", "tensor_mma") for op in inner)
        if multiplies and any(ref.ref.space == "smem" for ref in copies):
            return True
    return False


def _stores_to_shared(role: Block) -> bool:
    stores = (op for op in walk(role) if op.name == "store")
    return any(op.operands[0].ref.space == "smem" for op in stores)


RULES = {"roles": RoleCode.emit_roles}
