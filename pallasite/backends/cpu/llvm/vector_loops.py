"""Vectorised loops, along the last dimension with more than one element.

`each` runs a body for every element of a shape: the body gets indices of which one has
lanes (`values.py`), first for full vectors, then for the remainder. `fold` reduces
along such a loop with several independent accumulators.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pallasite.backends.cpu.llvm.values import Lanes, steps, vector
from pallasite.backends.cpu.llvm.writer import Function, Val, integer
from pallasite.target import host

SHORT = 4  # up to this many vectors are unrolled

Body = Callable[[list[Val]], None]


def width() -> int:
    """Lanes of one vector, the same for every type: an f32 vector's."""
    return host().lanes(32)


def vector_dim(shape: Sequence[int]) -> int | None:
    """The dimension whose elements become lanes, if any."""
    longer = [d for d, n in enumerate(shape) if n > 1]
    return longer[-1] if longer else None


def each(f: Function, shape: Sequence[int], body: Body) -> None:
    """Run `body` for all elements, in order, a vector at a time."""
    along = vector_dim(shape)
    if along is None or 0 in shape:
        with f.nest(shape) as indices:
            body(indices)
        return
    with f.nest(shape[:along]) as outer:
        inner = [integer(0)] * (len(shape) - along - 1)
        along_lanes(f, shape[along], lambda lanes: body([*outer, lanes, *inner]))


def along_lanes(f: Function, n: int, body: Callable[[Val], None]) -> None:
    """Run `body` with the lanes of 0 up to n."""
    count = width()
    full, rest = divmod(n, count)
    if full:
        with f.loop(integer(full)) as loop:
            body(Lanes(f.mul(loop.index, integer(count)), count))
    if rest:
        with last_lanes(f, full * count, rest) as lanes:
            body(lanes)


def along_some_lanes(
    f: Function, n: Val, most: int, body: Callable[[Val], None]
) -> None:
    """Run `body` with the lanes of 0 up to `n`, which is at most `most`."""
    if n.constant is not None:
        along_lanes(f, n.constant, body)
        return
    count = min(width(), 1 << (most - 1).bit_length())
    full = f.binary("udiv", n, integer(count))
    with f.loop(full) as loop:
        body(Lanes(f.mul(loop.index, integer(count)), count))
    first = f.mul(full, integer(count))
    rest = f.sub(n, first)
    with f.when(f.compare("icmp sgt", rest, integer(0))):
        f.mask = f.compare("icmp slt", steps("i64", count, 1), rest)
        body(Lanes(first, count))
        f.mask = None


@contextmanager
def last_lanes(f: Function, first: int, n: int) -> Iterator[Lanes | Val]:
    """The n indices from `first`, in a vector that may have more than n lanes."""
    if n == 1:
        yield integer(first)
        return
    count = 1 << (n - 1).bit_length()
    if count > n:
        on = ", ".join(f"i1 {'true' if k < n else 'false'}" for k in range(count))
        f.mask = Val(vector("i1", count), f"<{on}>")
    yield Lanes(integer(first), count)
    f.mask = None


# --- reductions ---


class Fold:
    """Accumulators of a reduction.

    `value` gives the elements at an index with or without lanes; `combine` combines two
    accumulators; `start` is the neutral element.
    """

    def __init__(
        self,
        f: Function,
        value: Callable[[Val], Val],
        combine: Callable[[Val, Val], Val],
        start: Val,
        side_by_side: int,
    ):
        self.f, self.value, self.combine, self.start = f, value, combine, start
        self.side_by_side = side_by_side

    def over(self, n: int) -> Val:
        """The reduction of elements 0 up to n, as a scalar."""
        count = width()
        full, rest = divmod(n, count)
        total = self.horizontal(self.lanes_of(full)) if full else self.start
        if rest:
            with last_lanes(self.f, full * count, rest) as lanes:
                last = self.value(lanes)
                if self.f.mask is not None:
                    last = self.f.select(self.f.mask, last, self.start)
            total = self.combine(total, self.horizontal(last, max(lanes.count, 1)))
        return total

    def lanes_of(self, full: int) -> Val:
        """For `full` whole vectors: lane n reduces the lanes n of all of them."""
        return self._joined(self._vectors(full, width()))

    def _vectors(self, full: int, count: int) -> list[Val]:
        f = self.f
        if full <= SHORT:
            return [self._lanes(integer(k * count), count) for k in range(full)]
        beside = self.side_by_side
        rounds, left = divmod(full, beside)
        start = f.splat(self.start, count)
        with f.loop(integer(rounds), [start] * beside) as loop:
            first = f.mul(loop.index, integer(beside * count))
            loop.carries = [
                self.combine(old, self._lanes(f.add(first, integer(k * count)), count))
                for k, old in enumerate(loop.carries)
            ]
        running = loop.carries
        for k in range(left):
            first = integer((rounds * beside + k) * count)
            running[k] = self.combine(running[k], self._lanes(first, count))
        return running

    def _lanes(self, first: Val, count: int) -> Val:
        return self.f.splat(self.value(Lanes(first, count)), count)

    def _joined(self, running: list[Val]) -> Val:
        while len(running) > 1:
            pairs = zip(running[::2], running[1::2], strict=False)
            joined = [self.combine(a, b) for a, b in pairs]
            running = joined + running[len(joined) * 2 :]
        return running[0]

    def horizontal(self, x: Val, count: int = 0) -> Val:
        """The reduction of one vector's lanes, by halving."""
        if count:
            x = self.f.splat(x, count if count > 1 else 0)
        while x.count > 1:
            half = x.count // 2
            low = self.f.shuffle(x, None, range(half))
            high = self.f.shuffle(x, None, range(half, 2 * half))
            x = self.combine(low, high)
        return self.f.lane(x, 0)


def reduce_each(
    f: Function, vectors: list[Val], combine: Callable[[Val, Val], Val]
) -> Val:
    """The reductions of as many vectors as they have lanes, as the lanes of one.

    Two vectors become one that holds their halves' reductions, and so on.
    """
    size = vectors[0].count
    while len(vectors) > 1:
        size //= 2
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves = [[_halves(f, *pair, size, k) for k in range(2)] for pair in pairs]
        vectors = [combine(*both) for both in halves]
    return vectors[0]


def _halves(f: Function, a: Val, b: Val, size: int, which: int) -> Val:
    """The first or second `size` of every 2 * `size` lanes of two vectors."""
    picks = [n for n in range(2 * a.count) if n // size % 2 == which]
    return f.shuffle(a, b, picks)


def shifted(f: Function, x: Val, distance: int, space: Val, down: bool) -> Val:
    """Lanes shifted by `distance` up or down; `space` is shifted in."""
    count, space = x.count, f.splat(space, x.count)
    first, a, b = (distance, x, space) if down else (count - distance, space, x)
    return f.shuffle(a, b, range(first, first + count))


def exchanged(f: Function, x: Val, distance: int) -> Val:
    """Lane n gets lane n xor distance."""
    return f.shuffle(x, None, [n ^ distance for n in range(x.count)])
