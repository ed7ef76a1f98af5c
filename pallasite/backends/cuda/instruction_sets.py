"""What the matrix instructions of a generation of chips take, and where sums are.

A row per generation; plans, roles and the emitter ask the row. Where accumulators are
in registers, the warpgroups that hold them multiply (`computing.py`). Where they are in
tensor memory, one thread does (`issuing.py`), and the others take what it has finished
(`finishing.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pallasite.passes.schedule import gpu_blocks
from pallasite.passes.schedule.gpu_blocks import SHORT_TILE, WARPGROUP, whole
from pallasite.target import Gpu

Registers = tuple[int, int] | None


@dataclass(frozen=True)
class InstructionSet:
    """The matmuls of some chips.

    Args:
        arch: of these chips, as NVIDIA names it.
        code: what compilers are told, so that they use what only these chips have.
        op: the op that multiplies, of the explicit level.
        rows: of one instruction.
        columns: what must divide those of a matmul.
        least_columns: the same for up to 32.
        multiplied: types of operands; sums are i32 for integers, otherwise f32.
        turned: types of operands that need not be contiguous along k.
        computed: types of left operands that need not be loaded.
        tensor_columns: of tensor memory, of 32 bits; 0: sums are in registers.
        registers: of a thread in each role, by the number of computing warpgroups per
            program and of programs per SM; None: all threads keep what they start with.
        full_registers: the same where tiles take nearly all.
        scaled: types of operands that may have scales: those of the scales, and how
            many elements along k each is for.
    """

    arch: str
    code: str
    op: str
    rows: int
    columns: int
    least_columns: int
    multiplied: tuple[str, ...]
    turned: tuple[str, ...]
    computed: tuple[str, ...]
    tensor_columns: int = 0
    registers: Mapping[tuple[int, int], Registers] = field(default_factory=dict)
    full_registers: Mapping[tuple[int, int], Registers] = field(default_factory=dict)
    scaled: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def has_tensor_memory(self) -> bool:
        return self.tensor_columns > 0

    def held_rows(self, rows: int) -> int:
        """Rows of a matmul with those that fill the last instruction."""
        return whole(rows, self.rows)

    def warpgroups(
        self, rows: int, widths: Sequence[int], words: int, shares_rows: bool
    ) -> int:
        """How many warpgroups have a part of each tile.

        Args:
            rows: of all tiles.
            widths: their columns.
            words: that the threads of one warpgroup would have in registers.
            shares_rows: whether two may have parts of a row, which they cannot reduce
                without each other.
        """
        if not self.has_tensor_memory:
            return gpu_blocks.warpgroups(rows)
        blocks = self.held_rows(rows) // self.rows
        if blocks > 1:  # each has some of the rows, else some of the columns
            return next((n for n in (2, 3) if blocks % n == 0), 1)
        shared = all(width % (2 * self.columns) == 0 for width in widths)
        many = max(widths) > WIDE or (shares_rows and words > MANY * WARPGROUP)
        return 2 if shared and many else 1


WIDE = 128  # columns of a row that threads share, so that registers suffice
MANY = 128  # registers of a thread for tiles, from which two warpgroups share them
_FLOATS = ("bf16", "f16", "f8e4m3fn", "f8e5m2")
_HALVES = ("bf16", "f16")
# The thread that copies has just enough. Without the few more of `full_registers`,
# ptxas serialises all matmuls of a kernel.
HOPPER = InstructionSet(
    "sm_90", "sm_90a", "wgmma", SHORT_TILE, 16, 8, (*_FLOATS, "i8", "f32"), _HALVES,
    _HALVES,
    registers={(1, 1): None, (1, 2): (40, 216), (1, 3): (24, 136), (2, 1): (40, 232),
               (3, 1): (32, 160), (2, 2): (24, 104)},
    full_registers={(2, 1): (24, 240)},
)  # fmt: skip
BLACKWELL = InstructionSet(
    "sm_100", "sm_100a", "tensor_mma", 128, 16, 16, (*_FLOATS, "i8", "f32"),
    (*_FLOATS, "i8"), _HALVES,
    tensor_columns=512,
    registers={(1, 1): None, (2, 1): (40, 232), (3, 1): (32, 160)},
    scaled={"f8e4m3fn": ("f8e8m0fnu", 32), "f8e5m2": ("f8e8m0fnu", 32)},
)  # fmt: skip
# ptxas has no matmul of integers for these chips.
BLACKWELL_ULTRA = InstructionSet(
    "sm_103", "sm_103a", "tensor_mma", 128, 16, 16, (*_FLOATS, "f32"), _FLOATS, _HALVES,
    tensor_columns=512, registers=BLACKWELL.registers, scaled=BLACKWELL.scaled,
)  # fmt: skip
SETS = {row.arch: row for row in (HOPPER, BLACKWELL, BLACKWELL_ULTRA)}


def turned_types(chip: Gpu) -> tuple[str, ...]:
    """Types of operands that matmuls take as they are stored, along k or not."""
    found = instruction_set(chip)
    return _HALVES if found is None else found.turned


def instruction_set(chip: Gpu) -> InstructionSet | None:
    """That of a chip; None: the backend has no matmuls for it."""
    return SETS.get(chip.arch)
