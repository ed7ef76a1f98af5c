"""What is known of an accelerator: memories, rates, the shapes it computes on."""

from collections.abc import Mapping
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Memory:
    """One kind of memory. `bytes`: of one core where each core has its own."""

    bytes: int
    bytes_per_second: float | None = None  # one core's share; None: not published


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Rates and bandwidths are those of one core where cores run kernels apart (TPU), and
    of the whole chip where a kernel runs on all of them (GPU).
    """

    name: str
    device_kinds: tuple[str, ...]  # what JAX calls it
    cores: int
    memories: Mapping[str, Memory]
    rates: Mapping[str, float]  # of matrix products: operations per second, by dtype

    @property
    def main(self) -> Memory:
        return self.memories["main"]

    def rate(self, dtype: str) -> float | None:
        """Operations per second of products of this type; None: it has none."""
        return self.rates.get(dtype)


@dataclass(frozen=True)
class SparseCore:
    """The SparseCores of a TPU, and one of their vector subcores."""

    cores: int
    subcores: int
    lanes: int
    vmem_bytes: int
    copy_bytes: int = 32  # the least that a copy moves


@dataclass(frozen=True)
class Tpu(Chip):
    """One TensorCore computes on vectors of `sublanes` x `lanes` words of 32 bits."""

    generation: int = 0
    mxus: int = 0
    mxu_size: int = 0  # rows and columns of one matrix unit
    clock: float = 0.0  # cycles per second
    topology: str = ""  # what libtpu compiles for: the smallest slice
    chip_config: str = ""  # how libtpu is to see a chip, if not as it does by default
    is_lite: bool = False
    sparse: SparseCore | None = None
    scoped_vmem: int = 16 * MIB  # what XLA lets one kernel have, unless told otherwise
    lanes: int = 128
    sublanes: int = 8
    vector_units: int = 4  # operations on a vector that start in one cycle

    @property
    def vmem(self) -> Memory:
        return self.memories["vmem"]

    @property
    def smem(self) -> Memory:
        return self.memories["smem"]

    def sublanes_of(self, bits: int) -> int:
        """How many rows of elements of that width one tile of an array has."""
        # Before 7x arrays of 16 bits keep eight rows, two of them in each word.
        if bits == 16 and self.generation < 7:
            return self.sublanes
        return self.sublanes * max(32 // bits, 1)


@dataclass(frozen=True)
class Gpu(Chip):
    """`cores` are multiprocessors. `arch`: the instruction set, as ptxas names it."""

    arch: str = ""
    registers: int = 65536  # of 32 bits, per multiprocessor
    registers_per_thread: int = 255
    threads_per_core: int = 2048

    @property
    def shared(self) -> Memory:
        """What one block of threads may have of a multiprocessor's shared memory."""
        return self.memories["shared"]

    @property
    def cache(self) -> Memory:
        return self.memories["l2"]
