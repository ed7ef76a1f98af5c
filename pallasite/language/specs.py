"""Grids and block specs: which block of each array a program sees.

Plain data plus validation. `window_of` turns a checked BlockSpec into the IR's Window;
read `pallas_call.py` next.
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.ir import types as T
from pallasite.ir.nodes import BlockDim, Window
from pallasite.language.memory_spaces import MemorySpace
from pallasite.language.trace import user_location

# One form per number of arguments: from `Callable[..., Any]` a type checker cannot
# infer the parameters of a lambda.
IndexMap = (
    Callable[[], Any]
    | Callable[[Any], Any]
    | Callable[[Any, Any], Any]
    | Callable[[Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any, Any, Any, Any], Any]
    | Callable[[Any, Any, Any, Any, Any, Any, Any, Any], Any]
)


class CompilerParams:
    """What the settings of all backends have in common: `pltpu.CompilerParams` and
    others are such settings."""


@dataclass(frozen=True)
class Squeezed:
    """A block dimension of one element, hidden from the kernel (same as None)."""


@dataclass(frozen=True)
class Blocked:
    """A block dimension counted in blocks (same as a plain int)."""

    block_size: int


@dataclass(frozen=True)
class Element:
    """A block dimension whose index map returns the index of its first element.

    `padding` adds that many elements before and after the array; the index map counts
    from the start of the padding. Without `fill=`, padding reads as unspecified values.
    """

    block_size: int
    padding: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class BoundedSlice:
    """A block dimension whose index map returns `pl.ds(start, size)`, size <= block."""

    block_size: int


class RevisitMode(enum.Enum):
    """When programs may revisit an output block: in Pallasite, always."""

    IMMEDIATE = "immediate"
    ANY = "any"


@dataclass(frozen=True)
class Buffered:
    """How many buffers a window rotates through; the other fields have no effect."""

    buffer_count: int
    use_lookahead: bool = False
    revisit: RevisitMode | None = None
    prefetched_count: int = 0

    def __post_init__(self):
        if not isinstance(self.buffer_count, int) or self.buffer_count < 1:
            raise SpecError(
                "a window needs at least one buffer",
                [("buffer_count", repr(self.buffer_count))],
                user_location(),
                "pl.Buffered(2) is the default; pl.Buffered(1) saves memory",
            )


squeezed = Squeezed()
Dim = int | None | Squeezed | Blocked | Element | BoundedSlice


class _NoBlockSpec:
    def __repr__(self) -> str:
        return "no_block_spec"


no_block_spec = _NoBlockSpec()


@dataclass(frozen=True, init=False)
class BlockSpec:
    """Which block of an array each program sees.

    Args:
        block_shape: one entry per array dimension: an int, None (one element, hidden
            from the kernel), or Squeezed, Blocked, Element, BoundedSlice. If None, the
            block is the entire array.
        index_map: from grid indices (and scalar-prefetch refs) to block indices.
            If None, always the first block.
        memory_space: where the block lives. With `ANY` or `HBM` there is no block: the
            kernel sees the whole array in main memory.
        pipeline_mode: `Buffered(n)`.
        fill: the value a block reads past the array's edge. Without it such reads are
            unspecified.
    """

    block_shape: tuple[Dim, ...] | None = None
    index_map: Callable[..., Any] | None = None
    memory_space: MemorySpace | None = None
    pipeline_mode: Buffered | None = None
    fill: float | int | bool | None = None

    def __init__(
        self,
        block_shape: Sequence[Dim] | None = None,
        index_map: IndexMap | None = None,
        *,
        memory_space: Any = None,
        pipeline_mode: Any = None,
        fill: Any = None,
    ):
        if callable(block_shape) and not callable(index_map):  # JAX before 0.4.31
            block_shape, index_map = index_map, block_shape
        if isinstance(block_shape, int):
            block_shape = (block_shape,)
        shape = None if block_shape is None else tuple(block_shape)
        object.__setattr__(self, "block_shape", shape)
        object.__setattr__(self, "index_map", index_map)
        object.__setattr__(self, "memory_space", memory_space)
        object.__setattr__(self, "pipeline_mode", pipeline_mode)
        object.__setattr__(self, "fill", fill)

    def replace(self, **changes: Any) -> "BlockSpec":
        kept = {
            name: getattr(self, name)
            for name in (
                "block_shape",
                "index_map",
                "memory_space",
                "pipeline_mode",
                "fill",
            )
        }
        kept.update(changes)
        block_shape, index_map = kept.pop("block_shape"), kept.pop("index_map")
        return BlockSpec(block_shape, index_map, **kept)


@dataclass(init=False)
class GridSpec:
    """A grid and the specs of its operands, outputs and scratch."""

    grid: tuple[Any, ...]
    in_specs: Any
    out_specs: Any
    scratch_shapes: Any = ()
    num_scalar_prefetch: int = 0
    axis_names: tuple[str | None, ...] = ()

    def __init__(
        self,
        grid: Any = (),
        in_specs: Any = no_block_spec,
        out_specs: Any = no_block_spec,
        scratch_shapes: Any = (),
        *,
        scratch_types: Any = None,
    ):
        self.grid = as_grid(grid)
        self.axis_names = axis_names(grid)
        scratch = scratch_shapes if scratch_types is None else scratch_types
        # Lists become tuples, which readers of a grid spec rely on.
        self.in_specs, self.out_specs, self.scratch_shapes = (
            tuple(s) if isinstance(s, list) else s
            for s in (in_specs, out_specs, scratch)
        )
        self.num_scalar_prefetch = 0


class PrefetchScalarGridSpec(GridSpec):
    """A grid whose first operands are scalars readable by index maps."""

    def __init__(
        self,
        num_scalar_prefetch: int,
        grid: Any = (),
        in_specs: Any = no_block_spec,
        out_specs: Any = no_block_spec,
        scratch_shapes: Any = (),
        *,
        scratch_types: Any = None,
    ):
        super().__init__(
            grid, in_specs, out_specs, scratch_shapes, scratch_types=scratch_types
        )
        if not isinstance(num_scalar_prefetch, int) or num_scalar_prefetch < 0:
            raise SpecError(
                "num_scalar_prefetch must be an int, 0 or more",
                [("got", repr(num_scalar_prefetch))],
                user_location(),
                "pass the number of leading operands that index maps read, such as 1",
            )
        self.num_scalar_prefetch = num_scalar_prefetch


def as_grid(grid: Any) -> tuple[Any, ...]:
    """The grid as a tuple of sizes, without the names of axes like `("i", 4)`."""
    if grid is None:
        return ()
    one = hasattr(grid, "dtype") or hasattr(grid, "__jax_array__")  # a symbolic size
    if isinstance(grid, (int, np.integer)) or one:
        grid = (grid,)
    try:
        entries = None if isinstance(grid, str) else tuple(grid)
    except TypeError:
        entries = None
    if entries is None:
        raise SpecError(
            "grid must be an int or a tuple of ints",
            [("grid", repr(grid))],
            user_location(),
            "grid=(4,) or grid=(M // block_m, N // block_n)",
        )
    return tuple(_grid_entry(n, entry, entries) for n, entry in enumerate(entries))


def axis_names(grid: Any) -> tuple[str | None, ...]:
    """The names of a grid's axes, None where unnamed: `(("i", 4), 2)`."""
    if not isinstance(grid, (tuple, list)):
        return ()
    return tuple(entry[0] if _is_named(entry) else None for entry in grid)


def _is_named(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _grid_entry(axis: int, given: Any, grid: tuple[Any, ...]) -> Any:
    entry: Any = given[1] if _is_named(given) else given
    if isinstance(entry, (bool, float, np.floating)) or entry is None:
        raise SpecError(
            "a grid size must be an integer",
            [("grid", grid), ("axis", axis), ("size", repr(entry))],
            user_location(),
            "use integer division: M // block_m, or pl.cdiv(M, block_m)",
        )
    if isinstance(entry, (int, np.integer)):
        if entry < 0:
            raise SpecError(
                "a grid size cannot be negative",
                [("grid", grid), ("axis", axis)],
                user_location(),
                fix="use sizes of 0 or more: pl.cdiv(n, block)",
            )
        if entry >= 2**31:
            raise SpecError(
                "a grid size is larger than the largest program id",
                [("grid", grid), ("axis", axis), ("largest", 2**31 - 1)],
                user_location(),
                "use larger blocks, or several axes",
            )
        return int(entry)
    is_scalar = hasattr(entry, "dtype") and getattr(entry, "shape", None) == ()
    if not (is_scalar and jnp.issubdtype(entry.dtype, jnp.integer)):
        if jaxcompat.is_symbolic(entry):
            return entry
        raise SpecError(
            "a grid size must be an integer or an integer scalar",
            [("grid", grid), ("axis", axis), ("size", repr(entry))],
            user_location(),
            "grid=(4,) or grid=(M // block_m, N // block_n)",
        )
    return entry


@dataclass(frozen=True)
class Operand:
    """One array of a call, as errors name it: its role, position and type."""

    role: str  # "in_specs", "out_specs"
    path: str
    shape: tuple[int, ...]
    dtype: Any
    name: str = ""

    @property
    def words(self) -> tuple[int, ...]:
        """The dimensions of an element in memory: a random key is several words."""
        is_key = jaxcompat.is_key_dtype(self.dtype)
        return jaxcompat.key_data_shape(self.dtype) if is_key else ()

    @property
    def stored(self) -> T.DType:
        """The element type in memory."""
        dtype = T.U32 if self.words else T.dtype_of(self.dtype)
        assert dtype is not None
        return dtype

    @property
    def shown(self) -> str:
        """Its position among the specs, and parameter name: `in_specs[0] ('x_ref')`."""
        return f"{self.role}{self.path}" + (f" ('{self.name}')" if self.name else "")

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        dtype = getattr(self.dtype, "name", self.dtype)
        return f"{self.shown}, {dtype}[{dims}]"


def window_of(
    spec: BlockSpec, operand: Operand, mode: str, at: Any = None
) -> Window | None:
    """The IR window of a spec, or None when the kernel sees the array unwindowed."""
    space = _space(spec, operand, at)
    if spec.block_shape is None and space is not None and not space.has_windows:
        return None
    if space is not None and not space.has_windows:
        if spec.block_shape == operand.shape:
            return None
        raise SpecError(
            f"a block in memory space {space.name} is not supported",
            [("operand", operand), ("block", spec.block_shape)],
            at,
            "remove block_shape to get the whole array, or remove the memory space",
        )
    dims = _block_dims(spec, operand, at)
    buffers = None
    if spec.pipeline_mode is not None:
        buffers = getattr(spec.pipeline_mode, "buffer_count", None)
    return Window(
        dims,
        mode,
        space.value if space is not None else "block",
        _fill(spec, operand, at),
        buffers,
    )


def _space(spec: BlockSpec, operand: Operand, at: Any) -> MemorySpace | None:
    space = spec.memory_space
    if space is None or isinstance(space, MemorySpace):
        return space
    name = getattr(space, "name", str(space)).upper()
    if name in MemorySpace.__members__:
        return MemorySpace[name]
    raise SpecError(
        f"unknown memory space {space!r}",
        [("operand", operand), ("known", ", ".join(MemorySpace.__members__))],
        at,
        fix="pl.ANY, pltpu.VMEM, pltpu.SMEM, ...",
    )


def _fill(spec: BlockSpec, operand: Operand, at: Any) -> Any:
    if spec.fill is None:
        return None
    if _is_number(spec.fill):
        given = np.asarray(spec.fill).item()
        with np.errstate(invalid="ignore"):  # an integer cannot hold NaN or infinity
            value = np.asarray(given).astype(operand.dtype)
        is_float = jnp.issubdtype(operand.dtype, jnp.floating)
        if is_float or np.asarray(value, dtype=object) == given:
            return value.item() if value.dtype.kind in "biuf" else float(value)
    raise SpecError(
        "fill must be a number of the operand's type",
        [("operand", operand), ("fill", repr(spec.fill))],
        at,
        fix="fill=0, or another number",
    )


def _is_number(x: Any) -> bool:
    """A Python, numpy or concrete JAX scalar."""
    if not jaxcompat.is_concrete(x) or np.ndim(x):
        return False
    return isinstance(x, (bool, int, float, np.generic, np.ndarray, jax.Array))


def _block_dims(spec: BlockSpec, operand: Operand, at: Any) -> tuple[BlockDim, ...]:
    if spec.block_shape is None:
        return tuple(BlockDim(n) for n in operand.shape)
    if len(spec.block_shape) != len(operand.shape):
        count, rank = len(spec.block_shape), len(operand.shape)
        padded = (*spec.block_shape, *operand.shape[count:])[:rank]
        if count < rank and spec.block_shape[-1:] == operand.shape[-1:]:
            padded = (None,) * (rank - count) + spec.block_shape  # of the last ones
        shown = "(" + ", ".join(map(str, padded)) + ("," if rank == 1 else "") + ")"
        raise SpecError(
            "block shape does not have one entry per array dimension",
            [
                ("operand", operand),
                (
                    "block",
                    f"{spec.block_shape}: {count} "
                    f"{'entry' if count == 1 else 'entries'}, the array has {rank} "
                    f"dimension{'' if rank == 1 else 's'}",
                ),
            ],
            at,
            f"BlockSpec({shown}, ...); use None to squeeze a dimension",
        )
    return tuple(
        _block_dim(entry, n, d, spec, operand, at)
        for d, (entry, n) in enumerate(
            zip(spec.block_shape, operand.shape, strict=True)
        )
    )


def _block_dim(
    entry: Any, n: int, d: int, spec: BlockSpec, operand: Operand, at: Any
) -> BlockDim:
    kind, padding = "blocked", (0, 0)
    if entry is None or isinstance(entry, Squeezed):
        return BlockDim(1, "squeezed")
    if isinstance(entry, Blocked):
        size: Any = entry.block_size
    elif isinstance(entry, Element):
        size, kind, padding = entry.block_size, "element", entry.padding
    elif isinstance(entry, BoundedSlice):
        size, kind = entry.block_size, "bounded"
    else:
        size = entry
    facts = [("operand", operand), ("block", spec.block_shape), ("dimension", d)]
    refuse_traced((size,), "a block", facts, at)
    if jaxcompat.is_symbolic(size):
        return BlockDim(_whole_dimension(size, n, kind, facts, at))
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise SpecError(
            f"a block size must be an integer, got {size!r}",
            facts,
            at,
            "use integer division, or pl.cdiv"
            if isinstance(size, (bool, float, np.generic))
            else "use an int",
        )
    if size <= 0 and n != 0:
        raise SpecError(
            f"a block size must be positive, got {size}",
            facts,
            at,
            f"{n} for the whole dimension, None for one element (squeezed)",
        )
    if not _is_two_counts(padding):
        raise SpecError(
            f"padding must be two ints, 0 or more, got {padding}",
            facts,
            at,
            fix="padding=(before, after)",
        )
    before, after = padding
    return BlockDim(int(size), kind, (int(before), int(after)))


def _whole_dimension(size: Any, n: Any, kind: str, facts: Any, at: Any) -> Any:
    """A symbolic block size; the block has all elements of its dimension."""
    if size == n and kind == "blocked":
        return size
    raise SpecError(
        f"a block size is {size}, a symbol that is not the size of the dimension",
        facts,
        at,
        "use an int, or the size of the whole dimension: x.shape[axis]",
    )


def refuse_traced(shape: Sequence[Any], what: str, facts: Any, at: Any) -> None:
    """Reject traced sizes: those of memory must be known before the kernel runs."""
    if any(isinstance(size, jax.core.Tracer) for size in shape):
        raise SpecError(
            f"{what} has a size that is a traced value, not a static int",
            facts,
            at,
            "jax.jit(f, static_argnums=...) or static_argnames= for the argument it "
            "comes from, or use x.shape",
        )


def _is_two_counts(padding: Any) -> bool:
    if not isinstance(padding, (tuple, list)) or len(padding) != 2:
        return False
    return all(isinstance(p, (int, np.integer)) and p >= 0 for p in padding)


def blocks_along(n: int, dim: BlockDim) -> int:
    """How many block indices a dimension of `n` elements has."""
    if dim.kind == "blocked":
        return max(1, math.ceil(n / dim.size)) if dim.size else 1
    return max(1, n + sum(dim.padding)) if dim.kind != "squeezed" else max(1, n)


@dataclass(frozen=True)
class CostEstimate:
    """The estimated cost of a call, for XLA's scheduler."""

    flops: int
    transcendentals: int
    bytes_accessed: int
    remote_bytes_transferred: int = 0

    def to_json(self) -> bytes:
        import json

        keys = (
            "flops",
            "transcendentals",
            "bytes_accessed",
            "remote_bytes_transferred",
        )
        return json.dumps({k: getattr(self, k) for k in keys}).encode()
