"""machine: how long a chip takes for counted work.

The only place where work becomes time: who estimates, counts (operations of matmuls by
type, other operations, exponentials, bytes, steps, matmuls, launches) and asks here.
What is then added up, and what overlaps, depends on how the work is scheduled, which
the one who asks knows. There are two machines for a chip: `Machine.peak`, for bounds:
no run is faster; and `Machine.usual`, for choices: what kernels reach.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from pallasite.target.chip import Chip, Gpu, Tpu
from pallasite.target.cpu import Host

USED = 0.5  # share of a GPU's peak rate that computing reaches, where it is the limit
WIDE_PASSES = 4  # of a TPU's matrix unit for types that it does not multiply directly
ROUND_BYTES = 1 << 15  # that a program of a GPU loads at a time
LONGER = 0.5  # how much longer than others a program may run whose work data decides
SPECIAL_FLOPS = 4  # least FLOPs of an exponential on a CPU
USUAL_SPECIAL_FLOPS = 8  # of one on any chip, roughly
FLOPS_PER_BYTE = 16  # roughly, of any chip: in the time to move a byte
# Matmul rates of narrower types on a CPU, relative to f32, given a CPU feature.
CPU_PRODUCTS = {
    "f16": (2.0, ("fullfp16", "avx512fp16")),
    "bf16": (4.0, ("bf16", "avx512bf16")),
    "i8": (8.0, ("dotprod", "i8mm", "avx512vnni", "avxvnni")),
    "u8": (8.0, ("dotprod", "i8mm", "avx512vnni", "avxvnni")),
}
# What multiplies f32 on a GPU, by the precision asked for: the type of the chip's table
# whose rate holds (there "f32" is TF32) and how many products of it are taken.
VECTOR = "vector"
GPU_F32 = {
    "": (VECTOR, 1),
    "highest": (VECTOR, 1),
    "ieee": (VECTOR, 1),
    "f32_f32_f32": (VECTOR, 1),
    "tf32": ("f32", 1),
    "tf32_tf32_f32": ("f32", 1),
    "high": ("f32", 3),
    "tf32x3": ("f32", 3),
    "tf32_tf32_f32_x3": ("f32", 3),
    "f64_f64_f64": ("f64", 1),
    "f16_f16_f16": ("f16", 1),
    "f16_f16_f32": ("f16", 1),
    "bf16_bf16_bf16": ("bf16", 1),
    "bf16_bf16_f32": ("bf16", 1),
    "bf16_bf16_f32_x3": ("bf16", 3),
    "bf16_bf16_f32_x6": ("bf16", 6),
    "bf16_bf16_f32_x9": ("bf16", 9),
}
# A TPU rounds f32 to bf16, or multiplies it in six products of bf16.
TPU_F32 = {"": ("bf16", 1), "high": ("bf16", 6), "highest": ("bf16", 6)}
TPU_F32 |= {"f32_f32_f32": ("bf16", 6), "float32": ("bf16", 6)}
CPU_TILES = {"bf16": 16.0, "f16": 16.0, "i8": 32.0, "u8": 32.0}  # AMX


@dataclass(frozen=True)
class Machine:
    """A chip's rates, per second, and its overheads, in seconds.

    Attributes:
        name: the chip's.
        cores: how many run programs concurrently; one of a TPU, whose programs run one
            after another. Rates are those of all of them together.
        products: operations of matmuls, by operand type.
        wide: the same for types without their own rate.
        f32: what multiplies f32, by precision; none: the chip's own f32.
        vector: operations on 32-bit floats.
        special: exponentials and the like.
        bytes: to and from main memory.
        cached_bytes: to and from the cache before it; infinite if there is none.
        cached: bytes that may already be on chip when a kernel starts.
        one_unit: whether matmuls, vectors and exponentials share one unit, which also
            waits for memory.
        step: to start a program.
        product: to start a matmul whose rows are too few to hide that.
        launch: to start a kernel that follows another.
        latency: from a load to its data, which a program awaits at each load.
        at_once: how many programs are on the chip, so that some load while others
            compute.
        part: the least work that is worth a core of its own.
        on_chip: bytes for the blocks of a program; None: unlimited.
        must_fit: whether blocks must be on chip; otherwise large ones stay in main
            memory.
        base_two: whether its exponentials have base two.
        sums_in_memory: slowdown of programs that accumulate in main memory.
        gpu: the chip, if it is a GPU: tiles should fit into its registers.
        tpu: the chip, if it is a TPU: steps should be large.
        enough_programs: with this many in parallel, no sum is split into parts.
        endless: whether choices must be those of any number of rows.
    """

    name: str
    cores: int
    products: Mapping[str, float] = field(hash=False)
    wide: float
    vector: float
    special: float
    bytes: float
    cached_bytes: float = inf
    cached: int = 0
    one_unit: bool = False
    step: float = 0.0
    product: float = 0.0
    launch: float = 0.0
    latency: float = 0.0
    at_once: int = 1
    part: float = 0.0
    on_chip: int | None = None
    must_fit: bool = False
    base_two: bool = False
    sums_in_memory: float = 1.0
    gpu: Gpu | None = field(default=None, hash=False)
    tpu: Tpu | None = field(default=None, hash=False)
    enough_programs: int = 16
    endless: bool = False
    f32: Mapping[str, tuple[str, int]] = field(default_factory=dict, hash=False)

    @staticmethod
    def peak(chip: Chip | Host) -> "Machine":
        """Rates that no run exceeds. Those of a CPU are measured."""
        if isinstance(chip, Host):
            return _peak_host(chip)
        if isinstance(chip, Tpu):
            return replace(_peak_tpu(chip), f32=TPU_F32)
        return replace(_gpu(chip), f32=GPU_F32)

    @staticmethod
    def usual(chip: Chip | Host) -> "Machine":
        """Rates that kernels reach. Those of a CPU are rough, and always the same."""
        if isinstance(chip, Host):
            return _usual_host(chip)
        return _usual_tpu(chip) if isinstance(chip, Tpu) else _gpu(chip, USED)

    # --- rates ---

    def product_rate(self, *types: str) -> float:
        """Of matmuls of such operands on the matrix units; types without rates do not
        count, if any has one."""
        known = (self.products[name] for name in types if name in self.products)
        return min(known, default=self.wide)

    def kind_rate(self, kind: str) -> float:
        """Of a kind of products (`Work.products`), by what multiplies them."""
        name, times = self.runs_as(kind)
        return self.vector if name == VECTOR else self.product_rate(name) / times

    def runs_as(self, kind: str) -> tuple[str, int]:
        """The unit or type that multiplies a kind of operands, and how often; no name
        if it has no rate."""
        dtype, _, precision = kind.partition(":")
        if dtype == "f32" and self.f32:
            return self.f32.get(precision) or self.f32[""]
        return (dtype if dtype in self.products else ""), 1

    def on_vectors(self, kind: str) -> bool:
        return self.runs_as(kind)[0] == VECTOR

    def name_of(self, kind: str) -> str:
        """A kind of operands, and what multiplies it, if that is another type."""
        dtype = kind.partition(":")[0]
        name, times = self.runs_as(kind)
        if name == VECTOR:
            return f"{dtype} on the vector units"
        if name == "f32" and self.f32:
            name = "tf32"
        many = f"{times} times " if times > 1 else ""
        return dtype if name in (dtype, "") else f"{dtype} as {many}{name}"

    @property
    def fastest(self) -> tuple[str]:
        """The type whose matmuls are fastest."""
        return (max(self.products, key=lambda name: self.products[name]),)

    # --- seconds ---

    def multiplying(self, operations: float, types: Iterable[str] = ("bf16",)) -> float:
        """Seconds of the matrix units."""
        return operations / self.product_rate(*types)

    def multiplying_all(self, operations: Mapping[str, float]) -> float:
        """The same for operations by kind, also of the vector units."""
        return sum(n / self.kind_rate(kind) for kind, n in operations.items())

    def computing(self, operations: float, special: float = 0) -> float:
        """Seconds of the vector units, one after the other with those of `special`."""
        return operations / self.vector + special / self.special

    def copying(self, count: float) -> float:
        """Seconds to read or write bytes of main memory."""
        return count / self.bytes

    def reading_cache(self, count: float) -> float:
        return count / self.cached_bytes

    def starting(self, steps: float = 0, products: float = 0) -> float:
        """Seconds to start programs, and matmuls in them."""
        return self.step * steps + self.product * products

    def kernel(
        self,
        flops: float,
        special: float,
        moved: float,
        steps: int,
        programs: int,
        uneven: bool = False,
    ) -> float:
        """Seconds of a kernel, from totals of its work, without its launch.

        Enough to tell microseconds from milliseconds, and to compare two ways to do the
        same.

        Args:
            flops, special: operations, of which matmuls are the most, and exponentials.
            moved: bytes of main memory.
            steps: of all programs together.
            programs: how many divide the work equally. The last ones may leave cores
                idle; so does a single one.
            uneven: whether some have more work than others, as data says: at the end
                only those run.
        """
        programs = max(programs, self.at_once, self.cores) if self.endless else programs
        turns = -(-programs // self.cores)
        busy = self.multiplying(flops) + special / self.special
        idle = turns * self.cores / max(programs, 1)
        if self.one_unit:
            return idle * (busy + self.copying(moved) + self.starting(steps))
        waits = max(steps, moved / ROUND_BYTES) / min(max(programs, 1), self.at_once)
        least = max(self.copying(moved), waits * self.latency)
        tail = LONGER * min(1.0, self.at_once / max(programs, 1)) if uneven else 0.0
        return (1 + tail) * max(least, idle * busy) + self.starting(steps)


def operations_of(flops: int, special: int) -> int:
    """Work in operations, for choices made before the chip is known."""
    return flops + USUAL_SPECIAL_FLOPS * special


def operations_in(moved: int) -> int:
    """Operations that take as long as moving some bytes, on an unknown chip."""
    return FLOPS_PER_BYTE * moved


def _peak_tpu(chip: Tpu) -> Machine:
    lanes = chip.lanes * chip.sublanes * chip.clock
    return Machine(
        chip.name,
        1,
        chip.rates,
        chip.rates["bf16"],
        chip.vector_units * lanes,
        lanes,
        chip.main.bytes_per_second or inf,
        step=chip.step_seconds,
        product=chip.product_seconds,
        launch=chip.launch_seconds,
        on_chip=chip.scoped_vmem,
        tpu=chip,
        must_fit=True,
    )


def _usual_tpu(chip: Tpu) -> Machine:
    """By libtpu's estimates, matmuls and copies of whole blocks run at their peak."""
    return replace(
        _peak_tpu(chip),
        wide=chip.rates["bf16"] / WIDE_PASSES,
        vector=chip.usual_vector_rate,
        special=chip.usual_special_rate,
    )


def _gpu(chip: Chip, used: float = 1.0) -> Machine:
    assert isinstance(chip, Gpu), chip
    cycles = used * chip.cores * chip.clock
    moved = chip.main.bytes_per_second or inf
    rates = {name: used * rate for name, rate in chip.rates.items()}
    return Machine(
        chip.name,
        chip.cores,
        rates,
        rates.get("bf16") or max(rates.values()),
        2 * chip.lanes * cycles,  # a fused multiply-add counts as two
        chip.special_lanes * cycles,
        moved,
        cached_bytes=chip.cache_speedup * moved,
        cached=chip.cache.bytes,
        launch=chip.launch_seconds,
        latency=chip.latency,
        at_once=chip.programs_per_core * chip.cores,
        part=8 * chip.launch_seconds,
        on_chip=chip.shared.bytes,
        base_two=True,
        sums_in_memory=chip.sums_in_memory,
        gpu=chip,
        enough_programs=chip.cores,
    )


def _usual_host(chip: Host) -> Machine:
    rate = chip.threads * 1e9
    return Machine(
        "cpu",
        chip.threads,
        {},
        rate / chip.ns_per_flop,
        rate / chip.ns_per_flop,
        rate / chip.ns_per_transcendental,
        rate / chip.ns_per_byte,
        one_unit=True,
        step=chip.ns_per_step / rate,
        launch=1e-9 * chip.ns_per_wake,
        part=1e-9 * chip.least_part_ns,
    )


def _peak_host(chip: Host) -> Machine:
    from pallasite.target import measured

    f32 = measured.flops_per_second() * chip.threads
    factors = {"f32": 1.0, "f64": 0.5}
    for name, (factor, features) in CPU_PRODUCTS.items():
        wide = 4.0 if name in ("i8", "u8") else 1.0
        factors[name] = factor if any(map(chip.has, features)) else wide
    if chip.has("amx-tile"):
        factors |= CPU_TILES
    products = {name: factor * f32 for name, factor in factors.items()}
    return Machine(
        "cpu",
        chip.threads,
        products,
        products["bf16"],
        f32,
        f32 / SPECIAL_FLOPS,
        measured.bytes_per_second(),
        cached=measured.cache_bytes(),
        one_unit=True,
    )
