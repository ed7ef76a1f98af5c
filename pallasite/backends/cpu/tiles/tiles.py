"""Tiles during code generation: a strided buffer, or a formula not yet evaluated.

An elementwise tile with one consumer is never stored; the consumer's loop computes its
elements. Shape ops on a buffer only change pointer and strides. `emit.py` decides when
a formula is forced into a buffer of the arena.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from pallasite.backends.cpu.llvm import scalars
from pallasite.backends.cpu.llvm.writer import NULL, Function, Val, integer
from pallasite.ir.types import DType

Indices = Sequence[Val]

# Distance of prefetches past the vector being read. Rows often end at a page boundary,
# where hardware prefetching stops.
PREFETCH_DISTANCE = 16 << 10  # bytes


@dataclass(frozen=True, eq=False)
class Root:
    """One allocation, for alias analysis.

    `mutable`: some code may write it between a load and the use of what was loaded.
    """

    name: str
    mutable: bool = True


@dataclass(frozen=True, eq=False)
class Buffer:
    """Elements in memory; strides count elements. `root` None: never written again.

    `ahead`: how many bytes past an element to prefetch; None if the elements are
    already in a cache.
    """

    pointer: Val
    strides: tuple[Val, ...]
    root: Root | None = None
    ahead: Val | None = None

    def address(self, f: Function, dtype: DType, indices: Indices) -> Val:
        offset = f.inner(indices, self.strides)
        return f.element(self.pointer, scalars.memory(dtype), offset)

    def read(self, f: Function, dtype: DType, indices: Indices) -> Val:
        """The element, or several if an index has lanes."""
        address = self.address(f, dtype, indices)
        repeats = any(stride.constant == 0 for stride in self.strides)
        if self.ahead is not None and not repeats and f.is_first_read(self.pointer):
            f.prefetch(address, self.ahead)
        return scalars.load(f, dtype, address)


@dataclass(frozen=True, eq=False)
class Formula:
    """Elements computed on demand from the elements of `operands`.

    `pointwise`: element i needs only the operands' elements i. `free`: costs next to
    nothing and reads no memory (constants, iotas), so it is never worth a buffer.
    `regrouped`: the only operand's elements in the same order, in another shape.
    `starts`: where its operands start, if it is their concatenation; such a tile is
    only ever stored, one operand at a time.
    """

    element: Callable[[Indices], Val]
    operands: tuple["Tile", ...] = ()
    pointwise: bool = False
    free: bool = False
    regrouped: bool = False
    starts: tuple[tuple[int, ...], ...] = ()
    depth: int = 1  # number of formulas between an element and memory


@dataclass(eq=False)
class Tile:
    """A tile value of rank one or more. Forcing it replaces `source` by a buffer."""

    shape: tuple[int, ...]
    dtype: DType
    source: Buffer | Formula
    scope: int = -1  # the block it belongs to; only there may it be forced in place
    last: int = -1  # position of its last use in that block
    keep: bool = False  # the first op that evaluates all of it should store it
    origin: int = 0  # the source line of the code that computes it (`Module.origin`)
    _memo: tuple[object, dict[tuple[Val, ...], Val]] = (None, {})  # valid at one moment

    @property
    def buffer(self) -> Buffer | None:
        return self.source if isinstance(self.source, Buffer) else None

    @property
    def depth(self) -> int:
        return self.source.depth if isinstance(self.source, Formula) else 0

    @property
    def parts(self) -> list[tuple[tuple[int, ...], "Tile"]]:
        """The parts of a concatenation, each with its start; empty for other tiles."""
        if not isinstance(self.source, Formula) or not self.source.starts:
            return []
        return list(zip(self.source.starts, self.source.operands, strict=True))

    @property
    def is_free(self) -> bool:
        return isinstance(self.source, Formula) and self.source.free

    @property
    def is_uniform(self) -> bool:
        """Whether it is a splat: its formula needs no index."""
        source = self.source
        return isinstance(source, Formula) and source.free and source.pointwise

    @property
    def before_reshape(self) -> "Tile | None":
        """The tile that this one has all elements of, in order, if it is a formula."""
        if not isinstance(self.source, Formula) or not self.source.regrouped:
            return None
        return self.source.operands[0]

    def at(self, f: Function, indices: Indices) -> Val:
        """The element, or several if an index has lanes.

        Evaluated once as long as nothing is written and the basic block is the same.
        """
        if self._memo[0] != f.moment:
            self._memo = (f.moment, {})
        known, key = self._memo[1], tuple(indices)
        if key not in known:
            value = self._evaluated(f, indices)
            if self._memo[0] != f.moment:  # it had a loop of its own
                return value
            known[key] = value
        return known[key]

    def _evaluated(self, f: Function, indices: Indices) -> Val:
        outer, f.module.origin = f.module.origin, self.origin or f.module.origin
        if isinstance(self.source, Formula):
            value = self.source.element(indices)
        else:
            value = self.source.read(f, self.dtype, indices)
        f.module.origin = outer
        return value

    @property
    def comes_from_memory(self) -> bool:
        return any(tile.buffer is not None for tile in self._sources())

    def reads(self) -> set[Root]:
        """The memory that its elements still depend on."""
        buffers = (tile.buffer for tile in self._sources())
        return {b.root for b in buffers if b is not None and b.root is not None}

    def _sources(self) -> list["Tile"]:
        """This tile and those it is computed from, each once."""
        found: dict[Tile, None] = {self: None}
        pending = [self]
        while pending:
            source = pending.pop().source
            operands = source.operands if isinstance(source, Formula) else ()
            pending += [tile for tile in operands if tile not in found]
            found.update(dict.fromkeys(operands))
        return list(found)

    def pointwise_sources(self) -> list["Tile"]:
        """This tile and those whose elements it reads at the same indices."""
        found: dict[Tile, None] = {self: None}
        pending = [self]
        while pending:
            source = pending.pop().source
            if isinstance(source, Formula) and source.pointwise:
                new = [t for t in source.operands if t not in found]
                pending += new
                found.update(dict.fromkeys(new))
        return [tile for tile in found if tile.shape == self.shape]

    def may_overwrite(self, target: Buffer) -> bool:
        """Whether each element may be stored to `target` as soon as it is computed.

        True if nothing here reads the target's memory, or only the very element that is
        being replaced.
        """
        known: dict[Tile, bool] = {}
        self._reaches(target.root, known)
        return all(
            tile._is_in_place(target) for tile, reached in known.items() if reached
        )

    def _reaches(self, root: Root | None, known: dict["Tile", bool]) -> bool:
        """Whether its elements read that memory. `known`: answers for its operands."""
        if self not in known:
            if isinstance(self.source, Buffer):
                known[self] = root is not None and self.source.root is root
            else:
                found = [tile._reaches(root, known) for tile in self.source.operands]
                known[self] = any(found)
        return known[self]

    def _is_in_place(self, target: Buffer) -> bool:
        if isinstance(self.source, Formula):
            return self.source.pointwise
        here = (self.source.pointer, self.source.strides)
        return here == (target.pointer, target.strides)


@dataclass(frozen=True, eq=False)
class Through:
    """Elements of `root` accessed one by one, where strides cannot express the view."""

    root: Root
    read: Callable[[Indices], Val]
    write: Callable[[Indices, Val], None]


@dataclass(frozen=True, eq=False)
class Ref:
    """A view of memory: what a value of ref type stands for."""

    shape: tuple[int, ...]
    dtype: DType
    source: Buffer | Through

    @property
    def buffer(self) -> Buffer | None:
        """Where its elements are; None if they are only accessed one by one."""
        return self.source if isinstance(self.source, Buffer) else None

    @property
    def root(self) -> Root:
        assert self.source.root is not None
        return self.source.root

    @property
    def tile(self) -> Tile:
        """Its contents, read lazily."""
        if isinstance(self.source, Buffer):
            return Tile(self.shape, self.dtype, self.source)
        memory = Tile((), self.dtype, Buffer(NULL, (), self.root))
        return formula(self.shape, self.dtype, self.source.read, [memory])

    def read(self, f: Function, indices: Indices) -> Val:
        if isinstance(self.source, Through):
            return self.source.read(indices)
        return scalars.load(f, self.dtype, self.source.address(f, self.dtype, indices))

    def write(self, f: Function, indices: Indices, value: Val) -> None:
        """Store an element; the index has no lanes."""
        if isinstance(self.source, Through):
            self.source.write(indices, value)
            return
        address = self.source.address(f, self.dtype, indices)
        scalars.store(f, self.dtype, value, address)

    def read_bits(self, f: Function, indices: Indices) -> Val:
        """An element as an integer: no float register changes a NaN on the way."""
        if self.buffer is None or scalars.is_part_of_byte(self.dtype):
            return scalars.to_bits(f, self.dtype, self.read(f, indices))
        address = self.buffer.address(f, self.dtype, indices)
        raw = f.load(scalars.memory(self.dtype), address)
        return f.convert("bitcast", raw, f"i{8 * self.dtype.bytes}")

    def write_bits(self, f: Function, indices: Indices, bits: Val) -> None:
        if self.buffer is None or scalars.is_part_of_byte(self.dtype):
            self.write(f, indices, scalars.from_bits(f, self.dtype, bits))
            return
        raw = f.convert("bitcast", bits, scalars.memory(self.dtype))
        f.store(raw, self.buffer.address(f, self.dtype, indices))

    def moved(
        self, f: Function, shape: Sequence[int], to_old: Callable[[Indices], Indices]
    ) -> "Ref":
        """A ref whose element i is this one's element `to_old(i)`."""
        through = Through(
            self.root,
            lambda indices: self.read(f, to_old(indices)),
            lambda indices, value: self.write(f, to_old(indices), value),
        )
        return Ref(tuple(shape), self.dtype, through)


def row_major(shape: Sequence[int]) -> tuple[Val, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(integer(step))
        step *= n
    return tuple(reversed(strides))


def formula(
    shape: Sequence[int],
    dtype: DType,
    element: Callable[[Indices], Val],
    operands: Sequence[Tile] = (),
    pointwise: bool = False,
    free: bool = False,
) -> Tile:
    depth = 1 + max((tile.depth for tile in operands), default=0)
    source = Formula(element, tuple(operands), pointwise, free, depth=depth)
    return Tile(tuple(shape), dtype, source)


def splat(shape: Sequence[int], dtype: DType, value: Val) -> Tile:
    return formula(shape, dtype, lambda _: value, pointwise=True, free=True)


def joined(
    shape: Sequence[int],
    dtype: DType,
    parts: Sequence[tuple[Sequence[int], Tile]],
) -> Tile:
    """A concatenation of tiles, each with its start; empty ones are dropped."""
    parts = [(start, part) for start, part in parts if 0 not in part.shape]
    if not parts:
        return splat(shape, dtype, scalars.zero(dtype))
    whole = formula(shape, dtype, _no_element, [part for _, part in parts])
    assert isinstance(whole.source, Formula)
    starts = tuple(tuple(start) for start, _ in parts)
    whole.source = replace(whole.source, starts=starts)
    return whole


def _no_element(indices: Indices) -> Val:
    raise AssertionError("a joined tile must be stored before its elements are used")


# --- the same elements in another order ---


def remap(
    f: Function, tile: Tile, shape: Sequence[int], to_old: Callable[[Indices], Indices]
) -> Tile:
    """A tile whose element i is the element `to_old(i)` of `tile`."""
    element = lambda indices: tile.at(f, to_old(indices))
    return formula(shape, tile.dtype, element, [tile], free=tile.is_free)


def transpose(f: Function, tile: Tile, perm: Sequence[int]) -> Tile:
    shape = [tile.shape[d] for d in perm]
    buffer = tile.buffer
    if buffer is not None:
        return _view(tile, shape, buffer.pointer, [buffer.strides[d] for d in perm])
    places = [perm.index(d) for d in range(len(perm))]
    return remap(f, tile, shape, lambda indices: [indices[p] for p in places])


def moves_lanes(shape: Sequence[int], perm: Sequence[int]) -> bool:
    """Whether a transpose changes which dimension is contiguous."""
    before, after = ([d for d in dims if shape[d] > 1] for dims in (sorted(perm), perm))
    return before[-1:] != after[-1:]


def lanes_last(shape: Sequence[int], along: int | None) -> list[int] | None:
    """The dimensions with `along` moved last; None if that changes nothing."""
    if along is None or all(n == 1 for n in shape[along + 1 :]):
        return None
    return [*(d for d in range(len(shape)) if d != along), along]


def broadcast(
    f: Function, tile: Tile, shape: Sequence[int], dims: Sequence[int]
) -> Tile:
    kept = [n == shape[d] for n, d in zip(tile.shape, dims, strict=True)]
    buffer, zero = tile.buffer, integer(0)
    if buffer is not None:
        strides = [zero] * len(shape)
        for d, keep, stride in zip(dims, kept, buffer.strides, strict=True):
            strides[d] = stride if keep else zero
        return _view(tile, shape, buffer.pointer, strides)
    pick = lambda indices: [
        indices[d] if keep else zero for d, keep in zip(dims, kept, strict=True)
    ]
    return remap(f, tile, shape, pick)


def cut(
    f: Function,
    tile: Tile,
    shape: Sequence[int],
    starts: Sequence[Val],
    steps: Sequence[int],
) -> Tile:
    """Elements `steps` apart, starting at `starts`; negative steps go backwards."""
    if tile.parts:
        assert all(step == 1 for step in steps), "lifetimes.py has such a tile stored"
        return _cut_parts(f, tile, shape, [int(start.text) for start in starts])
    buffer = tile.buffer
    strides = [integer(s) for s in steps]
    if buffer is not None:
        offset = f.inner(starts, buffer.strides)
        pointer = f.element(buffer.pointer, scalars.memory(tile.dtype), offset)
        old = zip(strides, buffer.strides, strict=True)
        return _view(tile, shape, pointer, [f.mul(s, b) for s, b in old])
    move = lambda indices: [
        f.add(start, f.mul(i, s))
        for i, start, s in zip(indices, starts, strides, strict=True)
    ]
    return remap(f, tile, shape, move)


def _cut_parts(
    f: Function, tile: Tile, shape: Sequence[int], first: Sequence[int]
) -> Tile:
    """The intersection of a box (steps of one) with each part."""
    found = []
    for starts, part in tile.parts:
        spans = list(zip(starts, part.shape, first, shape, strict=True))
        low = [max(start, at) for start, _, at, _ in spans]
        high = [min(start + n, at + size) for start, n, at, size in spans]
        sizes = [max(0, b - a) for a, b in zip(low, high, strict=True)]
        inside = [integer(a - start) for a, start in zip(low, starts, strict=True)]
        piece = cut(f, part, sizes, inside, [1] * len(sizes))
        found.append(([a - at for a, at in zip(low, first, strict=True)], piece))
    return joined(shape, tile.dtype, found)


def reshape(f: Function, tile: Tile, shape: Sequence[int]) -> Tile:
    buffer = tile.buffer
    if buffer is not None:
        strides = reshape_strides(f, tile.shape, buffer.strides, shape)
        if strides is not None:
            return _view(tile, shape, buffer.pointer, strides)
    if [n for n in shape if n != 1] == [n for n in tile.shape if n != 1]:
        places = [d for d, n in enumerate(shape) if n != 1]
        return remap(
            f, tile, shape, lambda indices: _insert_units(tile.shape, places, indices)
        )
    whole = remap(f, tile, shape, lambda i: unravel(f, tile.shape, shape, i))
    assert isinstance(whole.source, Formula)
    whole.source = replace(whole.source, regrouped=True)
    return whole


def ungrouped(f: Function, tile: Tile, target: Buffer) -> tuple[Tile, Buffer] | None:
    """An equivalent store (tile and target) that needs no division of indices."""
    inner = tile.before_reshape
    if inner is None:
        return None
    strides = reshape_strides(f, tile.shape, target.strides, inner.shape)
    if strides is None:
        return None
    return inner, Buffer(target.pointer, tuple(strides), target.root)


def reshape_strides(
    f: Function, old: Sequence[int], strides: Sequence[Val], new: Sequence[int]
) -> list[Val] | None:
    """Strides that show the same memory with shape `new`; None if there are none."""
    if 0 in old:
        return list(row_major(new))
    source = [(n, s) for n, s in zip(old, strides, strict=True) if n != 1]
    result: list[Val] = []
    place, size, stride = len(source), 1, integer(1)  # the rest of one old run
    for n in reversed(new):
        if n == 1:
            result.append(stride)
            continue
        while size % n or size == 1:
            if place == 0:
                return None
            place -= 1
            length, step = source[place]
            if size == 1:
                size, stride = length, step
            elif step == f.mul(integer(size), stride):
                size *= length
            else:
                return None
        result.append(stride)
        size, stride = size // n, f.mul(stride, integer(n))
    return result[::-1]


def _view(
    tile: Tile, shape: Sequence[int], pointer: Val, strides: Sequence[Val]
) -> Tile:
    assert tile.buffer is not None
    source = replace(tile.buffer, pointer=pointer, strides=tuple(strides))
    return Tile(tuple(shape), tile.dtype, source)


def _insert_units(old: Sequence[int], places: Sequence[int], indices: Indices):
    pending = iter(places)
    return [integer(0) if n == 1 else indices[next(pending)] for n in old]


def unravel(f: Function, old: Sequence[int], new: Sequence[int], indices: Indices):
    """The index in a tile of shape `old` of an element of shape `new`.

    Dimensions are divided in groups of equal sizes; those that are the same in both
    shapes keep their index, lanes too.
    """
    result = list[Val]()
    for here, there in _groups(old, new):
        linear = f.inner(indices[there], row_major(new[there]))
        sizes = old[here]
        for d, (n, step) in enumerate(zip(sizes, row_major(sizes), strict=True)):
            part = linear if step.constant == 1 else f.binary("udiv", linear, step)
            is_first = all(m == 1 for m in sizes[:d])
            number = part if is_first else f.binary("urem", part, integer(n))
            result.append(integer(0) if n == 1 else number)
    return result


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The smallest runs of dimensions of both shapes that have as many elements."""
    ends, others = ({prod(s[:d]): d for d in range(len(s) + 1)} for s in (old, new))
    here = there = 0
    for size, end in ends.items():
        if size in others:
            yield slice(here, end), slice(there, others[size])
            here, there = end, others[size]
