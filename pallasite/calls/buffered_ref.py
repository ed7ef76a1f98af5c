"""BufferedRef: the blocks of one ref of a pipeline, with their memory and copies.

In a kernel that keeps the default copies it only states specs and directions: the
compiler places blocks better than a fixed number of slots would. A subclass may fetch
and write back blocks in its own way; `own_copies.py` runs a pipeline with its methods.
"""

import enum
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.errors import SpecError
from pallasite.language.helpers import cdiv
from pallasite.language.memory_spaces import MemorySpace, SemaphoreType
from pallasite.language.refs import Slice, ds, make_async_copy
from pallasite.language.spec_trees import is_spec
from pallasite.language.specs import (
    Blocked,
    BlockSpec,
    BoundedSlice,
    Element,
    Squeezed,
    no_block_spec,
)
from pallasite.language.trace import user_location


class BufferType(enum.Enum):
    """The direction in which blocks move between main memory and the body."""

    INPUT = "input"
    OUTPUT = "output"
    ACCUMULATOR = "accumulator"
    INPUT_OUTPUT = "input_output"
    MANUAL = "manual"

    @property
    def is_input(self) -> bool:
        return self not in (BufferType.OUTPUT, BufferType.MANUAL)

    @property
    def is_output(self) -> bool:
        return self not in (BufferType.INPUT, BufferType.MANUAL)


class BufferedRefBase:
    """What a pipeline requires of the blocks of one ref."""

    spec: Any  # a BlockSpec
    buffer_type: Any
    current_ref: Any  # the block the body sees

    @property
    def is_buffered(self) -> bool:
        return False

    @property
    def is_input(self) -> bool:
        return self.buffer_type.is_input

    @property
    def is_output(self) -> bool:
        return self.buffer_type.is_output

    @property
    def is_input_output(self) -> bool:
        return self.is_input and self.is_output

    @property
    def is_manual(self) -> bool:
        return self.buffer_type is BufferType.MANUAL

    @property
    def block_shape(self) -> tuple[Any, ...] | None:
        return self.spec.block_shape

    @property
    def compute_index(self) -> Any:
        return self.spec.index_map

    def at_block(self, number: Any) -> "BufferedRefBase":
        """The state while the block with this number is being processed."""
        del number
        return self

    def bind_existing_ref(self, window_ref: Any, indices: Any) -> "BufferedRefBase":
        """The blocks of a step when the ref itself is their memory."""
        del window_ref, indices
        return self

    def unbind_refs(self) -> "BufferedRefBase":
        return self


_STATIC = {"static": True}  # part of the pytree's structure


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BufferedRef(BufferedRefBase):
    """The blocks of one ref of a pipeline.

    As a pytree it holds the memory: allocate it with `run_scoped`, or as scratch. So do
    its subclasses, whether or not they are registered as pytrees.

    Attributes:
        window_ref: slots for blocks, along a new first dimension (one-dimensional
            blocks are concatenated instead); None: the ref itself.
        copy_in_slot, wait_in_slot, copy_out_slot, wait_out_slot: how many copies in
            have started and completed, and how many copies out. A block's slot is that
            count modulo the number of slots.
        sem_recvs, sem_sends: one DMA semaphore per slot and direction.
        prefetched_count, await_prefetch, output_wait_read_only: as given; the default
            copies fetch every block, and wait until each is written.
    """

    _spec: BlockSpec = field(metadata=_STATIC)
    _buffer_type: BufferType = field(metadata=_STATIC)
    _in_buffer_count: int = field(metadata=_STATIC)
    _out_buffer_count: int = field(metadata=_STATIC)
    _grid_rank: int | None = field(metadata=_STATIC)
    window_ref: Any
    copy_in_slot: Any
    wait_in_slot: Any
    copy_out_slot: Any
    wait_out_slot: Any
    next_fetch: Any
    sem_recvs: Any
    sem_sends: Any
    tiling: Any = field(metadata=_STATIC)
    is_trivial_windowing: bool = field(default=False, metadata=_STATIC)
    has_allocated_buffer: bool = field(default=False, metadata=_STATIC)
    prefetched_count: int = field(default=0, metadata=_STATIC)
    await_prefetch: bool = field(default=False, metadata=_STATIC)
    output_wait_read_only: bool = field(default=False, metadata=_STATIC)

    # --- creation ---

    def __post_init__(self) -> None:
        # At the first object, since a class that registers itself does so after
        # `__init_subclass__`, and may do so only once.
        if jax.tree_util.all_leaves([self]):
            jax.tree_util.register_dataclass(type(self))

    @classmethod
    def create(
        cls,
        spec: BlockSpec,
        dtype_or_type: Any,
        buffer_type: BufferType,
        buffer_count: int | tuple[int, int] = 2,
        grid_rank: int | None = None,
        use_lookahead: bool = False,
        source_memory_space: Any = MemorySpace.ANY,
        tiling: Any = None,
        is_trivial_windowing: bool = False,
        prefetched_count: int = 0,
        **ignored: Any,
    ) -> Any:
        """Blocks of `spec`, and the memory to allocate for them.

        Args:
            spec: block shape and index map.
            dtype_or_type: the element type, or a ref or array type that has it.
            buffer_type: the direction in which blocks move.
            buffer_count: how many slots; a pair gives the number per direction.
            source_memory_space: where the ref is; blocks in the same space need no
                memory of their own.
            is_trivial_windowing: the block is all of `dtype_or_type`.
            grid_rank, use_lookahead, tiling, prefetched_count, ignored: results do not
                depend on them.
        """
        del ignored
        counts = (
            buffer_count if isinstance(buffer_count, tuple) else (buffer_count,) * 2
        )
        space = spec.memory_space or MemorySpace.VMEM
        slots = max(counts)
        shape = _slots_shape(spec, slots)
        if is_trivial_windowing:
            shape = tuple(dtype_or_type.shape)
        stays = space is source_memory_space or not space.has_windows
        if shape is None or stays or buffer_type is BufferType.MANUAL:
            counts, window, semaphores = (0, 0), None, None
        else:
            window = space(shape, getattr(dtype_or_type, "dtype", dtype_or_type))
            semaphores = SemaphoreType.DMA((slots,))
        return cls(
            _spec=spec,
            _buffer_type=buffer_type,
            _in_buffer_count=counts[0],
            _out_buffer_count=counts[1],
            _grid_rank=grid_rank if use_lookahead else None,
            window_ref=window,
            copy_in_slot=None,
            wait_in_slot=None,
            copy_out_slot=None,
            wait_out_slot=None,
            next_fetch=None,
            sem_recvs=semaphores if buffer_type.is_input else None,
            sem_sends=semaphores if buffer_type.is_output else None,
            tiling=tiling,
            is_trivial_windowing=is_trivial_windowing,
            has_allocated_buffer=window is not None,
            prefetched_count=prefetched_count,
        )

    @classmethod
    def input(cls, spec: BlockSpec, dtype_or_type: Any, buffer_count: Any = 2, **kw):
        """Blocks that the body reads."""
        return cls.create(spec, dtype_or_type, BufferType.INPUT, buffer_count, **kw)

    @classmethod
    def output(cls, spec: BlockSpec, dtype_or_type: Any, buffer_count: Any = 2, **kw):
        """Blocks that the body writes."""
        return cls.create(spec, dtype_or_type, BufferType.OUTPUT, buffer_count, **kw)

    @classmethod
    def accumulator(
        cls, spec: BlockSpec, dtype_or_type: Any, buffer_count: Any = 2, **kw
    ):
        """Blocks that the body adds to."""
        kind = BufferType.ACCUMULATOR
        return cls.create(spec, dtype_or_type, kind, buffer_count, **kw)

    @classmethod
    def input_output(
        cls, spec: BlockSpec, dtype_or_type: Any, buffer_count: Any = 2, **kw
    ):
        """Blocks that the body reads and writes."""
        kind = BufferType.INPUT_OUTPUT
        return cls.create(spec, dtype_or_type, kind, buffer_count, **kw)

    def with_spec(self, spec: BlockSpec) -> "BufferedRef":
        return replace(self, _spec=spec)

    def with_window_ref(self, window_ref: Any) -> "BufferedRef":
        """Accepts prefetched blocks; the pipeline fetches the same ones itself."""
        del window_ref
        return self

    def with_next_fetch(self, next_fetch: Any = None) -> "BufferedRef":
        return replace(self, next_fetch=next_fetch)

    # --- properties ---

    @property
    def spec(self) -> BlockSpec:
        return self._spec

    @property
    def buffer_type(self) -> BufferType:
        return self._buffer_type

    @property
    def dtype(self) -> Any:
        return self.window_ref.dtype

    @property
    def is_buffered(self) -> bool:
        return self.buffer_count > 0

    @property
    def use_lookahead(self) -> bool:
        return self._grid_rank is not None

    @property
    def in_buffer_count(self) -> int:
        return self._in_buffer_count

    @property
    def out_buffer_count(self) -> int:
        return self._out_buffer_count

    @property
    def buffer_count(self) -> int:
        """The number of slots; 0 if the ref itself is the memory."""
        return max(self._in_buffer_count, self._out_buffer_count)

    # --- slots ---

    def with_slot_index(self, **slots: Any) -> "BufferedRef":
        """A copy with other counts (`copy_in_slot=`, ...); None keeps a count."""
        given = {name: count for name, count in slots.items() if count is not None}
        return replace(self, **given)

    def initialize_slots(self) -> "BufferedRef":
        return self.at_block(jnp.uint32(0))

    def at_block(self, number: Any) -> "BufferedRef":
        came = number if self.is_input else None
        gone = number if self.is_output else None
        return replace(
            self,
            copy_in_slot=came,
            wait_in_slot=came,
            copy_out_slot=gone,
            wait_out_slot=gone,
        )

    def _slot(self, count: Any) -> Any:
        return jax.lax.rem(count, jnp.uint32(self.buffer_count))

    cumulative_copy_in = property(lambda self: self.copy_in_slot)
    cumulative_wait_in = property(lambda self: self.wait_in_slot)
    cumulative_copy_out = property(lambda self: self.copy_out_slot)
    cumulative_wait_out = property(lambda self: self.wait_out_slot)
    current_copy_in_slot = property(lambda self: self._slot(self.copy_in_slot))
    current_wait_in_slot = property(lambda self: self._slot(self.wait_in_slot))
    current_copy_out_slot = property(lambda self: self._slot(self.copy_out_slot))
    current_wait_out_slot = property(lambda self: self._slot(self.wait_out_slot))

    def _advanced(self, name: str, predicate: Any) -> "BufferedRef":
        count = getattr(self, name)
        if count is None or not self.is_buffered:
            return self
        following = jnp.where(predicate, count + 1, count)
        return replace(self, **{name: following})

    def advance_copy_in_slot(self, predicate: Any = True) -> "BufferedRef":
        return self._advanced("copy_in_slot", predicate)

    def advance_wait_in_slot(self, predicate: Any = True) -> "BufferedRef":
        return self._advanced("wait_in_slot", predicate)

    def advance_copy_out_slot(self, predicate: Any = True) -> "BufferedRef":
        return self._advanced("copy_out_slot", predicate)

    def advance_wait_out_slot(self, predicate: Any = True) -> "BufferedRef":
        return self._advanced("wait_out_slot", predicate)

    # --- the memory of a block ---

    @property
    def current_ref(self) -> Any:
        if not self.is_buffered or self.is_trivial_windowing:
            return self.window_ref
        is_output = self.is_output
        slot = self.current_copy_out_slot if is_output else self.current_wait_in_slot
        return self._window_ref_at(slot)

    def _window_ref_at(self, slot: Any, window_slice: Any = None) -> Any:
        if self.is_trivial_windowing:
            return self.window_ref
        shape = self.window_ref.shape
        if len(shape) > 1:
            return self.window_ref.at[(slot, *(window_slice or ()))]
        size = shape[0] // self.buffer_count
        part: Any = window_slice[0] if window_slice else ds(0, size)
        first = slot.astype(np.int32) * size + part.start
        return self.window_ref.at[ds(first, part.size)]

    def bind_existing_ref(self, window_ref: Any, indices: Any) -> "BufferedRef":
        if self.is_buffered or self.window_ref is not None:
            return self
        if self.block_shape is not None and not self.is_trivial_windowing:
            window_ref = window_ref.at[self.compute_slice(indices)]
        return replace(self, window_ref=window_ref)

    def unbind_refs(self) -> "BufferedRef":
        if self.is_buffered:
            return self
        return replace(self, window_ref=None)

    # --- which part of the ref a block is ---

    def compute_slice(self, grid_indices: Sequence[Any]) -> tuple[Any, ...]:
        """The block of a step as an index, not truncated where it ends past the ref."""
        return self._slices(grid_indices, None)

    def get_dma_slice(self, src_ty: Any, grid_indices: Sequence[Any]) -> tuple:
        """The block of a step as an index, truncated where a ref of this type ends."""
        return self._slices(grid_indices, tuple(src_ty.shape))

    def _slices(
        self, grid_indices: Sequence[Any], shape: tuple[int, ...] | None
    ) -> tuple[Any, ...]:
        block = self.block_shape
        if block is None or self.is_trivial_windowing:
            return tuple(ds(0, n) for n in shape or ())
        index = self.compute_index
        indices = (0,) * len(block) if index is None else index(*grid_indices)
        indices = indices if isinstance(indices, (tuple, list)) else (indices,)
        sizes = shape or (None,) * len(block)
        return tuple(map(_block_slice, block, indices, sizes))

    def _to_window_slice(self, dma_slice: Sequence[Any]) -> tuple[Any, ...]:
        """The same slice relative to the start of the block."""
        return tuple(ds(0, s.size) for s in dma_slice if isinstance(s, Slice))

    # --- the copies, which a subclass may override ---

    def copy_in(self, src_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Start fetching the block of a step."""
        if self.is_buffered:
            slot = self.current_copy_in_slot
            block, window = self._ends(src_ref, grid_indices, slot)
            if self.spec.fill is not None:
                whole = self._window_ref_at(slot)
                whole[...] = jnp.full(whole.shape, self.spec.fill, whole.dtype)
            make_async_copy(block, window, self.sem_recvs.at[slot]).start()

    def wait_in(self, src_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Wait until the block of a step has arrived."""
        if self.is_buffered:
            slot = self.current_wait_in_slot
            block, window = self._ends(src_ref, grid_indices, slot)
            make_async_copy(block, window, self.sem_recvs.at[slot]).wait()

    def copy_out(self, dst_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Start writing back the block of a step."""
        if self.is_buffered:
            slot = self.current_copy_out_slot
            block, window = self._ends(dst_ref, grid_indices, slot)
            make_async_copy(window, block, self.sem_sends.at[slot]).start()

    def wait_out(self, dst_ref: Any, grid_indices: Sequence[Any]) -> None:
        """Wait until the block of a step is written back."""
        if self.is_buffered:
            slot = self.current_wait_out_slot
            block, window = self._ends(dst_ref, grid_indices, slot)
            make_async_copy(window, block, self.sem_sends.at[slot]).wait()

    def _ends(self, ref: Any, grid_indices: Sequence[Any], slot: Any) -> tuple:
        part = self.get_dma_slice(ref, grid_indices)
        return ref.at[part], self._window_ref_at(slot, self._to_window_slice(part))


def _slots_shape(spec: BlockSpec, slots: int) -> tuple[int, ...] | None:
    """The shape of the slots for blocks as the body sees them; None without blocks."""
    if spec.block_shape is None:
        return None
    sizes = [getattr(d, "block_size", d) for d in spec.block_shape]
    shape = tuple(int(n) for n in sizes if isinstance(n, (int, np.integer)))
    return (slots * shape[0],) if len(shape) == 1 else (slots, *shape)


def _block_slice(dim: Any, index: Any, size: int | None) -> Any:
    """One dimension of a block as an index; truncated at `size`, if given."""
    if dim is None or isinstance(dim, Squeezed):
        return index
    if isinstance(dim, BoundedSlice):
        start, count = index.start, index.size
    elif isinstance(dim, Element):
        if dim.padding != (0, 0):
            raise SpecError(
                "a buffered block does not support padding",
                [("block", dim)],
                user_location(),
                fix="pad the array before the call (jnp.pad), or mask in the kernel",
            )
        start, count = index, dim.block_size
    else:
        count = dim.block_size if isinstance(dim, Blocked) else dim
        if size is not None:  # indices out of range mean the nearest block
            index = _within(index, cdiv(size, count) - 1)
            if size % count == 0:
                return ds(index * count, count)
        start = index * count
    return ds(start, count if size is None else _least(count, size - start))


def _within(index: Any, last: int) -> Any:
    if isinstance(index, (int, np.integer)):
        return min(max(int(index), 0), last)
    return jnp.clip(index, 0, last)


def _least(a: Any, b: Any) -> Any:
    known = all(isinstance(n, (int, np.integer)) for n in (a, b))
    return min(a, b) if known else jnp.minimum(a, b)


def differ(a: Any, b: Any) -> Any:
    """Whether two results of an index map name different blocks."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return functools.reduce(operator.or_, (x != y for x, y in pairs), False)


def allocations_for(
    refs: tuple[Any, ...], in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
) -> Any:
    """One BufferedRef per spec, in the structure of the specs; None for no spec."""
    flat, tree = jax.tree.flatten((*in_specs, *out_specs), is_leaf=is_spec)
    num_inputs = len(jax.tree.leaves(in_specs, is_leaf=is_spec))
    made: list[Any] = []
    flat_refs: list[Any] = tree.flatten_up_to(refs)
    for n, (spec, ref) in enumerate(zip(flat, flat_refs, strict=True)):
        make = BufferedRef.input if n < num_inputs else BufferedRef.output
        if spec is no_block_spec or ref is None:
            made.append(None)
        else:
            made.append(make(spec or BlockSpec(), ref.dtype))
    return tree.unflatten(made)
