"""A lower bound on a chip's time for some work: its peak rates, and the limiting unit.

Rates are peaks, and main memory traffic counts only what cannot have stayed in a cache
since the last call: no run is faster than `Roofline.seconds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from pallasite.passes.analysis.work import Work
from pallasite.target import Chip, Gpu, Host, Tpu, measured

GPU_CLOCK = 2e9  # cycles per second: more than any GPU in the table sustains
GPU_LANES = 128  # per SM
GPU_SPECIAL = 16
SPECIAL_FLOPS = 4  # least FLOPs of an exponential on a CPU
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
class Peaks:
    """A chip's peak rates, per second.

    Attributes:
        products: matmul operations, by operand type.
        vector: operations on 32-bit floats.
        special: exponentials and the like.
        bytes: to and from main memory.
        cached: bytes that may already be on chip when a kernel starts.
        one_unit: whether matmuls, vectors and exponentials share one unit.
        f32: what multiplies f32, by precision; none: the chip's own f32.
    """

    products: Mapping[str, float]
    vector: float
    special: float
    bytes: float
    cached: int = 0
    one_unit: bool = False
    f32: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @staticmethod
    def of(chip: Chip | Host) -> "Peaks":
        if isinstance(chip, Host):
            return _of_host(chip)
        bandwidth = chip.main.bytes_per_second or inf
        if isinstance(chip, Tpu):
            lanes = chip.lanes * chip.sublanes * chip.clock
            vector = chip.vector_units * lanes
            return Peaks(chip.rates, vector, lanes, bandwidth, f32=TPU_F32)
        assert isinstance(chip, Gpu), chip
        cycles = chip.cores * GPU_CLOCK
        rates = (2 * GPU_LANES * cycles, GPU_SPECIAL * cycles)
        return Peaks(chip.rates, *rates, bandwidth, chip.cache.bytes, f32=GPU_F32)

    def runs_as(self, kind: str) -> tuple[str, int]:
        """The unit or type that multiplies a kind of `Work.products`, and how often."""
        dtype, _, precision = kind.partition(":")
        if dtype == "f32" and self.f32:
            return self.f32.get(precision) or self.f32[""]
        if dtype in self.products:
            return dtype, 1
        return next((name for name in ("bf16", "f32") if name in self.products), ""), 1

    def name_of(self, kind: str) -> str:
        """A kind of products, and what multiplies it, if that is another type."""
        dtype = kind.partition(":")[0]
        name, times = self.runs_as(kind)
        if name == VECTOR:
            return f"{dtype} on the vector units"
        if name == "f32" and self.f32:
            name = "tf32"
        many = f"{times} times " if times > 1 else ""
        return dtype if name in (dtype, "") else f"{dtype} as {many}{name}"

    def product_rate(self, kind: str) -> float:
        """The rate of a kind of products, by what multiplies them on this chip; a type
        without its own rate uses that of bf16 or f32."""
        name, times = self.runs_as(kind)
        if name == VECTOR:
            return self.vector
        return self.products.get(name, max(self.products.values())) / times


def _of_host(chip: Host) -> Peaks:
    f32 = measured.flops_per_second() * chip.threads
    factors = {"f32": 1.0, "f64": 0.5}
    for name, (factor, features) in CPU_PRODUCTS.items():
        wide = 4.0 if name in ("i8", "u8") else 1.0
        factors[name] = factor if any(map(chip.has, features)) else wide
    if chip.has("amx-tile"):
        factors |= CPU_TILES
    return Peaks(
        {name: factor * f32 for name, factor in factors.items()},
        f32,
        f32 / SPECIAL_FLOPS,
        measured.bytes_per_second(),
        measured.cache_bytes(),
        one_unit=True,
    )


@dataclass(frozen=True)
class Roofline:
    """The least time each unit of a chip is busy, in seconds."""

    units: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return max(self.units.values())

    @property
    def limit(self) -> str:
        """The unit that is busy the longest."""
        return max(self.units, key=lambda name: self.units[name])


def roofline(work: Work, peaks: Peaks, repeated_bytes: int = 0) -> Roofline:
    """The bound of some work.

    Args:
        work: counted with `least=True`, so that all of it must be done.
        peaks: the chip's.
        repeated_bytes: bytes of operands that repeat another operand's array.
    """
    # Elements of a block outside its array need not be computed.
    needed = min((row.inside for row in work.traffic), default=1.0)
    rates = {name: peaks.product_rate(name) for name in work.products}
    seconds = {name: n / rates[name] for name, n in work.products.items()}
    on_vectors = {name for name in seconds if peaks.runs_as(name)[0] == VECTOR}
    products = needed * sum(seconds[n] for n in seconds if n not in on_vectors)
    vector = needed * work.arithmetic / peaks.vector
    vector += needed * sum(seconds[name] for name in on_vectors)
    special = needed * work.transcendentals / peaks.special
    least = max(work.distinct_bytes - repeated_bytes - peaks.cached, 0)
    memory = least / peaks.bytes
    if peaks.one_unit:
        return Roofline({"arithmetic": products + vector + special, "memory": memory})
    units = {"matrix": products, "vector": vector, "special": special}
    return Roofline({**units, "memory": memory})
