"""A lower bound on a chip's time for some work: its peak rates, and the limiting unit.

Rates are peaks, and main memory traffic counts only what cannot have stayed in a cache
since the last call: no run is faster than `Roofline.seconds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """

    products: Mapping[str, float]
    vector: float
    special: float
    bytes: float
    cached: int = 0
    one_unit: bool = False

    @staticmethod
    def of(chip: Chip | Host) -> "Peaks":
        if isinstance(chip, Host):
            return _of_host(chip)
        bandwidth = chip.main.bytes_per_second or inf
        if isinstance(chip, Tpu):
            lanes = chip.lanes * chip.sublanes * chip.clock
            return Peaks(chip.rates, chip.vector_units * lanes, lanes, bandwidth)
        assert isinstance(chip, Gpu), chip
        cycles = chip.cores * GPU_CLOCK
        rates = (2 * GPU_LANES * cycles, GPU_SPECIAL * cycles)
        return Peaks(chip.rates, *rates, bandwidth, chip.cache.bytes)

    def product_rate(self, dtype: str) -> float:
        """The matmul rate; a type without its own uses that of bf16 or f32."""
        if dtype in self.products:
            return self.products[dtype]
        wide = self.products.get("bf16") or self.products.get("f32")
        return wide or max(self.products.values())


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
    products = needed * sum(n / rates[name] for name, n in work.products.items())
    vector = needed * work.arithmetic / peaks.vector
    special = needed * work.transcendentals / peaks.special
    least = max(work.distinct_bytes - repeated_bytes - peaks.cached, 0)
    memory = least / peaks.bytes
    if peaks.one_unit:
        return Roofline({"arithmetic": products + vector + special, "memory": memory})
    units = {"matrix": products, "vector": vector, "special": special}
    return Roofline({**units, "memory": memory})
