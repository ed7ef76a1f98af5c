"""The facts about an accelerator: memories, rates, the shapes it computes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Memory:
    """One kind of memory. `bytes`: per core if each core has its own."""

    bytes: int
    bytes_per_second: float | None = None  # one core's share; None: not published


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Rates and bandwidths are per core if each core runs its own kernels (TPU), and those
    of the whole chip if a kernel runs on all of its cores (GPU).
    """

    name: str
    device_kinds: tuple[str, ...]  # JAX's names for it
    cores: int
    memories: Mapping[str, Memory]
    rates: Mapping[str, float]  # of matmuls: operations per second, by dtype
    ran: bool = field(default=False, kw_only=True)  # have our kernels run on one?

    @property
    def platform(self) -> str:
        """JAX's name of where it runs ("cuda", not "gpu")."""
        return "tpu"

    @property
    def main(self) -> Memory:
        return self.memories["main"]

    def rate(self, dtype: str) -> float | None:
        """Matmul operations per second for this dtype; None if it has no rate."""
        return self.rates.get(dtype)


@dataclass(frozen=True)
class SparseCore:
    """The SparseCores of a TPU, and one of their vector subcores."""

    cores: int
    subcores: int
    lanes: int
    vmem_bytes: int
    copy_bytes: int = 32  # granularity of copies


@dataclass(frozen=True)
class Tpu(Chip):
    """A TensorCore computes on vectors of `sublanes` x `lanes` 32-bit words."""

    generation: int = 0
    mxus: int = 0
    mxu_size: int = 0  # rows and columns of one matrix unit
    clock: float = 0.0  # cycles per second
    topology: str = ""  # what libtpu compiles for: the smallest slice
    chip_config: str = ""  # libtpu's configuration of the chip, if not the default
    is_lite: bool = False
    chip_cores: int = 1  # TensorCores on a chip; `cores` of them can be one device
    accumulators: int = 0  # of a matrix unit, `sublanes` x `mxu_size` words each
    cmem_bytes: int = 0  # a core's share of memory common to the chip
    # Published matmul rates of types that kernels multiply in another type.
    narrow_rates: Mapping[str, float] = field(default_factory=dict)
    sparse: SparseCore | None = None
    scoped_vmem: int = 16 * MIB  # XLA's default limit for one kernel
    lanes: int = 128
    sublanes: int = 8
    vector_units: int = 4  # vector operations issued per cycle
    # Operations per second that vector code reaches, roughly, and exponentials.
    usual_vector_rate: float = 4e12
    usual_special_rate: float = 1e12
    step_seconds: float = 2.5e-7  # to start a program; libtpu estimates 400 cycles
    product_seconds: float = 4e-8  # to start a matmul
    launch_seconds: float = 2e-6  # until a kernel runs

    @property
    def vmem(self) -> Memory:
        return self.memories["vmem"]

    @property
    def smem(self) -> Memory:
        return self.memories["smem"]

    def sublanes_of(self, bits: int) -> int:
        """How many rows a tile of elements of that width has."""
        # Before 7x, 16-bit arrays keep eight rows per tile, two rows in each word.
        if bits == 16 and self.generation < 7:
            return self.sublanes
        return self.sublanes * max(32 // bits, 1)

    def tile_bytes(self, shape: Sequence[int], bits: int) -> int:
        """Bytes of vector memory, with each side rounded up to whole registers."""
        *outer, rows, lanes = (1, 1, *shape)
        sublanes = self.sublanes_of(max(bits, 8))
        rows = -(-rows // sublanes) * sublanes
        lanes = -(-lanes // self.lanes) * self.lanes
        return prod(outer) * rows * lanes * bits // 8


@dataclass(frozen=True)
class Gpu(Chip):
    """`cores` are SMs, or AMD's compute units. `arch` is the instruction set, as ptxas
    or LLVM names it."""

    arch: str = ""
    wave: int = 32  # threads that one instruction is for: a warp, or AMD's wave
    matrix: tuple[int, int, int] = (16, 8, 16)  # its largest matmul of 16-bit numbers
    stages: int = 4  # of a loop whose loads are iterations ahead; more do not pay
    stages_in_registers: int = 0  # of these: what they load is not in shared memory yet
    registers: int = 65536  # of 32 bits, per SM
    registers_per_thread: int = 255
    threads_per_core: int = 2048
    share_of_results: float = 0.5  # of registers, for those of matmuls
    overhead_registers: int = 32  # of a thread besides its part of the tiles
    lanes: int = 128  # per SM, of 32-bit floats
    special_lanes: int = 16  # per SM, of exponentials
    clock: float = 2e9  # cycles per second: more than any GPU in the table sustains
    cache_speedup: float = 3.0  # roughly, of the cache over main memory
    programs_per_core: int = 4  # so that one loads while another computes
    # How much longer programs take that accumulate in main memory at each step: on an
    # H200, attention's gradient of 128 heads takes 21 ms where 7 were estimated.
    sums_in_memory: float = 3.0
    latency: float = 0.8e-6  # seconds from a load to its data, under load
    launch_seconds: float = 2.5e-6  # of a kernel that follows another

    @property
    def stages_in_shared(self) -> int:
        return self.stages - self.stages_in_registers

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def platform(self) -> str:
        return "rocm" if self.is_amd else "cuda"

    @property
    def shared(self) -> Memory:
        """The shared memory that one thread block may use."""
        return self.memories["shared"]

    @property
    def cache(self) -> Memory:
        return self.memories["l2"]

    @property
    def core_bytes_in_flight(self) -> float:
        """Bytes that an SM must have requested to keep its share of memory busy."""
        return (self.main.bytes_per_second or 0) / self.cores * self.latency


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def physical(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape a tile has in Triton: each dimension rounded up to a power of two."""
    return tuple(map(power_of_two, shape))
