"""Semaphores: counters that thread blocks, or the warpgroups of one, wait for.

Those of one thread block are in shared memory, those of all in words of main memory
that the call gets as zeros. One thread of a role signals when all its warps have
finished what comes before, and they start what comes after a wait when one thread has
seen the count: order between threads is transitive, so it holds for all of them. Copies
by the copy engine are in that order only behind a fence.

Thread blocks that wait for each other have to run at the same time: `authored.py` sees
to that.
"""

from pallasite.backends.cuda.clusters import Clusters
from pallasite.backends.cuda.memory import text_of
from pallasite.ir.nodes import Op, Value
from pallasite.ir.types import BOOL, I32, DType


class Semaphores(Clusters):
    """Emits semaphores."""

    def __init__(self) -> None:
        super().__init__()
        self.semaphores = 0  # words of main memory
        self.own_semaphores: list[
            tuple[int, int]
        ] = []  # in shared memory: offset, count
        self.uses_engine = False  # there are copies by the copy engine

    def alloc_semaphores(self, op: Op, is_shared: bool) -> None:
        """`is_shared`: by all thread blocks."""
        ref, name = op.result.ref, self.out.fresh("count")
        if is_shared:
            self.out.line(f"int* {name} = semaphores + {self.semaphores};")
            self.semaphores += ref.size
        else:
            offset = self.reserve(4 * ref.size, 4)
            self.own_semaphores.append((offset, ref.size))
            self.out.line(f"int* {name} = (int*)(shared + {offset});")
        self.views[op.result] = self.array(ref, name, op.result)

    @property
    def makes_barriers(self) -> bool:
        return bool(self.own_semaphores) or super().makes_barriers

    def init_barriers(self, again: bool = False) -> None:
        for offset, count in self.own_semaphores:
            for n in range(count):
                self.out.line(f"*(int*)(shared + {offset + 4 * n}) = 0;")
        super().init_barriers(again)

    def place_of(self, semaphore: Value) -> str:
        view = self.views[semaphore]
        return (
            view.pointer
            if view.offset == 0
            else f"{view.pointer} + ({text_of(view.offset)})"
        )

    def engine_too(self) -> None:
        """What precedes is before what follows, also if the copy engine does one."""
        if self.uses_engine:
            self.out.line("main_before_copies();")

    def emit_signal(self, op: Op) -> None:
        semaphore, amount = op.operands
        self.engine_too()
        self.sync()
        call = f"semaphore_signal({self.place_of(semaphore)}, {self.env[amount].name});"
        self.out.line(self.once + call)

    def emit_semaphore_wait(self, op: Op) -> None:
        semaphore, amount = op.operands
        word = "wait" if op.name == "sem_wait" else "reach"
        call = f"semaphore_{word}({self.place_of(semaphore)}, {self.env[amount].name});"
        self.out.line(self.once + call)
        self.sync()
        self.engine_too()

    def emit_count(self, op: Op) -> None:
        self.ask(op, I32, f"semaphore_count({self.place_of(op.operands[0])})")
        self.engine_too()

    def emit_barrier_test(self, op: Op) -> None:
        barrier, parity = op.operands
        at = self.barriers[barrier]
        self.ask(op, BOOL, f"barrier_test({at}, {self.env[parity].name})")
        if self.has_peers:
            self.out.line("writes_before_arrival();")

    def ask(self, op: Op, dtype: DType, what: str) -> None:
        """One thread looks, so that all get the same answer."""
        word = f"*(int*)(shared + {self.reserve(4, 4)})"
        self.sync()
        self.out.line(f"{self.once}{word} = {what};")
        self.sync()
        self.env[op.result] = self.let(dtype, word, op, "found")


RULES = {
    "sem_signal": Semaphores.emit_signal,
    "sem_wait": Semaphores.emit_semaphore_wait,
    "sem_reach": Semaphores.emit_semaphore_wait,
    "sem_read": Semaphores.emit_count,
    "barrier_test": Semaphores.emit_barrier_test,
}
