"""A lower bound on a chip's time for some work: its peak rates, and the limiting unit.

Rates are peaks, and main memory traffic counts only what cannot have stayed in a cache
since the last call: no run is faster than `Roofline.seconds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pallasite.passes.analysis.work import Work
from pallasite.target import Machine


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


def roofline(work: Work, machine: Machine, repeated_bytes: int = 0) -> Roofline:
    """The bound of some work.

    Args:
        work: counted with `least=True`, so that all of it must be done.
        machine: the chip at its peak.
        repeated_bytes: bytes of operands that repeat another operand's array.
    """
    # Elements of a block outside its array need not be computed.
    needed = min((row.inside for row in work.traffic), default=1.0)
    on_vectors = {k: n for k, n in work.products.items() if machine.on_vectors(k)}
    others = {k: n for k, n in work.products.items() if k not in on_vectors}
    products = needed * machine.multiplying_all(others)
    vector = needed * machine.computing(work.arithmetic)
    vector += needed * machine.multiplying_all(on_vectors)
    special = needed * machine.computing(0, work.transcendentals)
    least = max(work.distinct_bytes - repeated_bytes - machine.cached, 0)
    memory = machine.copying(least)
    if machine.one_unit:
        return Roofline({"arithmetic": products + vector + special, "memory": memory})
    units = {"matrix": products, "vector": vector, "special": special}
    return Roofline({**units, "memory": memory})
