"""Forms built from numbers: the kernel, its reference and operands in one function.

`@sized(family)(name, title, tiny, cpu, model)` decorates `build(dtype=, **numbers)`,
which returns them; the numbers are those of a size.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tests.forms.form import F32, I32, SIZES, Family, Operand, Problem, Size

# function, reference, operands
Built = tuple[Callable[..., Any], Callable[..., Any], Sequence[Operand]]
Build = Callable[..., Built]


def sized(family: Family) -> Callable[..., Callable[[Build], Build]]:
    """A decorator that adds forms to a family; see above."""

    def form(name: str, title: str, tiny: dict, cpu: dict, model: dict, **more: Any):
        sizes = {"tiny": tiny, "cpu": cpu, "part": cpu, "model": model}

        def built(build: Build, size: Size) -> Built:
            return build(**sizes[size.name], dtype=size.dtype)

        def decorated(build: Build) -> Build:
            problem = Problem(
                f"{family.name.removeprefix('held-out ')} {name}",
                lambda size: built(build, size)[2],
                lambda *arrays: _reference(build, built, arrays)(*arrays),
            )
            make = lambda size: built(build, size)[0]
            family.add(f"{name}: {title}", problem, make, **more)
            return build

        return decorated

    return form


def _reference(build: Build, built: Callable, arrays: Sequence[Any]) -> Callable:
    """Of the size whose operands these are."""
    given = [(x.shape, x.dtype) for x in arrays]
    for size in SIZES.values():
        _, reference, operands = built(build, size)
        if [(one.struct.shape, one.struct.dtype) for one in operands] == given:
            return reference
    raise AssertionError(f"no size has operands {given}")


def normal(*shape: int, dtype: Any = F32, scale: float = 1.0) -> Operand:
    return Operand(shape, dtype, spread=scale)


def uniform(*shape: int, dtype: Any = F32, lo: float = 0.0, hi: float = 1.0) -> Operand:
    return Operand(shape, dtype, make=lambda r: r.uniform(lo, hi, shape))


def integers(*shape: int, hi: int, lo: int = 0, dtype: Any = I32) -> Operand:
    return Operand(shape, dtype, make=lambda r: r.integers(lo, hi, shape))


def made(shape: tuple[int, ...], dtype: Any, make: Callable) -> Operand:
    return Operand(shape, dtype, make=make)
