"""How `plgpu` describes where a tile's elements are: among the threads of a warpgroup
and in memory. None of it changes a result; backends choose layouts themselves."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.language.trace import user_location


class SomeLayout:
    """A layout of a tile."""

    def reduce(self, axes: int | Sequence[int]) -> "ReducedLayout":
        """The layout of a tile after a reduction along axes."""
        return ReducedLayout(self, (axes,) if isinstance(axes, int) else tuple(axes))


@dataclass(frozen=True)
class ParameterizedLayout(SomeLayout):
    """A layout with parameters: `Layout.WG_STRIDED(shape, vec_size=2)`."""

    layout_cls: Any
    args: tuple[Any, ...] = ()
    kwargs: Any = field(default_factory=dict[str, Any], hash=False)


@dataclass(frozen=True)
class ReducedLayout(SomeLayout):
    """What is left of a layout after a reduction."""

    layout: SomeLayout
    axes: tuple[int, ...]


class _Named(SomeLayout, enum.Enum):
    def __call__(self, *args: Any, **kwargs: Any) -> ParameterizedLayout:
        return ParameterizedLayout(self, args, kwargs)


class Layout(_Named):
    """Layouts of a tile across threads."""

    WGMMA = "wgmma"
    WGMMA_8BIT = "wgmma_8bit"
    WGMMA_TRANSPOSED = "wgmma_transposed"
    WGMMA_UPCAST_2X = "wgmma_upcast_2x"
    WGMMA_UPCAST_4X = "wgmma_upcast_4x"
    WG_SPLAT = "wg_splat"
    WG_STRIDED = "wg_strided"
    TCGEN05 = "tcgen05"
    TCGEN05_TRANSPOSED = "tcgen05_transposed"
    TCGEN05_M64_COLLECTIVE = "tcgen05_m64_collective"
    TCGEN05_M64_COLLECTIVE_NATIVE = "tcgen05_m64_collective_native"
    TCGEN05_TMEM_NATIVE = "tcgen05_tmem_native"
    SMEM_GMEM_COPY = "smem_gmem_copy"
    TMA_INDICES = "tma_indices"
    TMA_INDICES_4 = "tma_indices_4"
    TILED = "tiled"
    MMA_ACC = "mma_acc"
    MMA_LHS = "mma_lhs"
    MMA_RHS = "mma_rhs"


class TMEMLayout(_Named):
    """Layouts of tensor memory."""

    SCALES_LAYOUT = "scales"
    SPARSE_METADATA_LAYOUT = "sparse_metadata"
    M64_COLLECTIVE_LAYOUT = "m64_collective"
    SCALES_M64_COLLECTIVE_LAYOUT = "scales_m64_collective"


@dataclass(frozen=True)
class Tiling:
    """Nested tiles, the outermost first: for `Layout.TILED`.

    Each tile divides the last dimensions of what the one before it left, and adds its
    own dimensions at the end.
    """

    tiles: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [len(tile) for tile in self.tiles]
        if 0 in ranks or ranks != sorted(ranks, reverse=True):
            self._refuse("a tile has at least one dimension, and no more than the last")
        if any(size < 1 for tile in self.tiles for size in tile):
            self._refuse("a tile's sizes are positive")

    def _refuse(self, what: str) -> None:
        facts = [("tiles", self.tiles)]
        fix = "plgpu.Tiling(((64, 8), (16, 8), (8, 8), (1, 2)))"
        raise SpecError(what, facts, user_location(), fix)

    def tile_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array once it is tiled."""
        found = tuple(shape)
        for tile in self.tiles:
            kept, last = found[: -len(tile)], found[-len(tile) :]
            if len(last) < len(tile) or any(
                n % t for n, t in zip(last, tile, strict=True)
            ):
                self._refuse(f"the tile {tile} does not divide {found}")
            counts = (n // t for n, t in zip(last, tile, strict=True))
            found = (*kept, *counts, *tile)
        return found


@dataclass(frozen=True)
class Replicated:
    """A dimension of a tiled layout along which threads hold the same elements."""

    times: int


class Transform:
    """What changes how a ref is laid out; the base class of `TilingTransform` and
    `SwizzleTransform`."""


@dataclass(frozen=True)
class RefType:
    """A ref's layout: the type of a parameter of `inline_mgpu`."""

    transforms: tuple[Transform, ...] = ()


@dataclass(frozen=True)
class ShapeDtypeStruct:
    """The shape, dtype and layout of a tile in registers."""

    shape: tuple[int, ...]
    dtype: Any
    layout: Any = None


def print_layout(fmt: str, x: Any) -> None:
    """Print, while the kernel is traced, what its author decides of a layout.

    The field of `fmt` is the shape and dtype, and for a ref the memory space and its
    swizzle. Backends choose the rest; `pl.lower(f)(x).stages()` shows what they chose.

    Args:
        fmt: as in `str.format`, with one field: `"x: {}"`.
        x: a value, or a ref.
    """
    shape = ", ".join(map(str, x.shape))
    text = f"{x.dtype}[{shape}]"
    if jaxcompat.is_ref(x):
        space = jaxcompat.memory_space_of(x)
        swizzle = getattr(space, "swizzle", None)
        text += f" in {getattr(space, 'value', space)}"
        text += f", swizzled by {swizzle} bytes" if swizzle else ""
    print(fmt.format(text))
