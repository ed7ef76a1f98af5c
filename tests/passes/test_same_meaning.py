"""Canonical kernels compute what the kernels they came from compute, bit for bit.

Random kernels are made to be simplified: identities, views of views, loads and stores
of overlapping views, branches and loops that are known or not.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, Index, Kernel, Span, Value, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import BF16, BOOL, F32, I32, INDEX, TileType, scalar
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from tests.ir import kernels

SHAPE = (4, 6)
TILE = TileType(SHAPE, F32)
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5]
SLOTS = 12  # number of last tiles that are outputs too


def outputs(kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    copies = [array.copy() for array in arrays]
    with np.errstate(all="ignore"):
        return [np.asarray(out) for out in Walker(kernel, NumpyNumbers()).run(copies)]


def assert_same(kernel: Kernel, arrays: list[np.ndarray]) -> Kernel:
    new = canonicalize(kernel)
    verify(new)
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        # Signs of zeros count, the payload of a NaN does not.
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a)[a == 0], np.signbit(b)[b == 0])
    return new


@pytest.mark.parametrize("make", kernels.ALL, ids=lambda f: f.__name__)
def test_whole_kernels(make):
    kernel = make()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(p.ref.shape).astype("f4") for p in kernel.inputs]
    assert_same(kernel, arrays)


class Maker:
    """Draws a kernel that reads `x` and the starts `n`, and reads and writes `o`."""

    def __init__(self, data: st.DataObject):
        self.data = data
        self.loaded: list[tuple] = []  # so that some loads are made again

    def pick(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def kernel(self) -> Kernel:
        x, n, o, made = (
            kernels.main_ref("x", *SHAPE),
            kernels.main_ref("n", 3, dtype=I32),
            kernels.main_ref("o", *SHAPE),
            kernels.main_ref("made", SLOTS, *SHAPE),
        )
        b = Builder()
        b.store(o, b.load(x))
        b.store(made, b.constant(0.0, made.ref.tile))
        starts = [b.load(n, (At(d),)) for d in range(3)]
        tiles = self.code(b, [x, o, o], [b.load(x)], starts, depth=0)
        for slot, tile in enumerate(tiles[-SLOTS:]):
            b.store(made, tile, (At(slot), Span(0, SHAPE[0]), Span(0, SHAPE[1])))
        return Kernel("random", (x, n, o, made), b.block(), 2)

    def code(self, b, refs, tiles, starts, depth) -> list[Value]:
        """Emit a few ops; the lists grow by what they make. Gives the tiles."""
        refs, tiles, starts = list(refs), list(tiles), list(starts)
        starts.append(self.start(b, starts))
        for _ in range(self.data.draw(st.integers(3, 8))):
            kind = self.pick("math", "view", "load", "load", "store", "nest")
            if kind == "math":
                tiles.append(self.math(b, tiles))
            elif kind == "view":
                refs.append(self.view(b, self.pick(*refs), starts))
            elif kind == "load":
                tiles.append(self.load(b, self.pick(*refs), starts))
            elif kind == "store":
                self.store(b, self.pick(*[r for r in refs if r.name != "x"]), starts)
            elif depth < 1:
                tiles.append(self.nest(b, refs, tiles, starts, depth))
        return tiles

    def math(self, b: Builder, tiles: list[Value]) -> Value:
        x, y = self.pick(*tiles), self.pick(*tiles)
        number = b.constant(self.pick(*NUMBERS), TILE)
        made = {
            "binary": lambda: b.op(self.pick("add", "sub", "mul", "max"), x, y),
            "left": lambda: b.op(self.pick("add", "mul"), number, x),
            "right": lambda: b.op(self.pick("add", "sub", "div"), x, number),
            "neg": lambda: b.neg(x),
            "select": lambda: b.select(self.predicate(b, x, y), x, y),
            "cast": lambda: b.cast(b.cast(b.cast(x, BF16), F32), F32),
            "integer": lambda: b.cast(b.cast(b.cast(x, I32), BOOL), F32),
            "reshape": lambda: b.reshape(b.reshape(x, shape=(24,)), shape=SHAPE),
            "transpose": lambda: b.transpose(b.transpose(x, perm=(1, 0)), perm=(1, 0)),
            "slice": lambda: b.dynamic_update_slice(
                x,
                b.dynamic_slice(y, b.index(self.number()), b.index(1), sizes=(2, 2)),
                b.index(self.number()),
                b.index(0),
            ),
        }
        return made[self.pick(*made)]()

    def predicate(self, b: Builder, x: Value, y: Value) -> Value:
        if self.pick(True, False):
            return b.constant(self.pick(True, False), scalar(BOOL))
        less = b.lt(x, y)
        return b.not_(b.not_(less)) if self.pick(True, False) else less

    def number(self) -> int:
        return self.data.draw(st.integers(-2, 7))

    def start(self, b: Builder, starts: list[Value]) -> Value:
        if self.pick(True, False):
            return b.index(self.number())
        return b.add(self.pick(*starts), b.index(self.pick(0, 1)))

    def index(self, shape, starts) -> tuple[Index, list[Value]]:
        """A random index; starts may be outside and are then clamped."""
        index, operands = [], []
        for n in shape:
            kind = self.pick("all", "at", "span", "dynamic at", "dynamic span")
            size = self.data.draw(st.integers(1, n))
            stride = self.pick(1, 1, 2)
            if (size - 1) * stride + 1 > n:
                stride = 1
            last = n - ((size - 1) * stride + 1)
            if kind == "all":
                index.append(Span(0, n))
            elif kind == "at":
                index.append(At(self.data.draw(st.integers(0, n - 1))))
            elif kind == "span":
                first = self.data.draw(st.integers(0, last))
                index.append(Span(first, size, stride))
            else:
                operands.append(self.pick(*starts))
                is_at = kind == "dynamic at"
                index.append(At() if is_at else Span(None, size, stride))
        return tuple(index), operands

    def view(self, b: Builder, ref: Value, starts) -> Value:
        index, operands = self.index(ref.ref.shape, starts)
        view = b.subview(ref, index, operands)
        b.ops[-1] = b.ops[-1].with_(results=(Value(view.type, ref.name),))
        return b.ops[-1].result

    def load(self, b: Builder, ref: Value, starts) -> Value:
        index, operands = self.index(ref.ref.shape, starts)
        again = [
            access
            for access in self.loaded
            if access[0] is ref and all(v in starts for v in access[2])
        ]
        if again and self.pick(True, True, False):
            ref, index, operands = self.pick(*again)
        self.loaded.append((ref, index, operands))
        value = b.load(ref, index, operands)
        size = value.tile.size
        flat = b.reshape(value, shape=(size,))
        pad = dict(low=(0,), high=(SHAPE[0] * SHAPE[1] - size,), interior=(0,))
        padded = b.pad(flat, b.constant(-7.0, scalar(F32)), **pad)
        return b.reshape(padded, shape=SHAPE)

    def store(self, b: Builder, ref: Value, starts) -> None:
        index, operands = self.index(ref.ref.shape, starts)
        shape = tuple(e.size for e in index if isinstance(e, Span))
        number = b.constant(self.data.draw(st.integers(30, 99)), TileType(shape, F32))
        b.store(ref, number, index, operands)

    def nest(self, b: Builder, refs, tiles, starts, depth) -> Value:
        if self.pick(True, False):
            inner = [Builder() for _ in range(2)]
            results = [self.code(c, refs, tiles, starts, depth + 1) for c in inner]
            regions = [
                c.block((), (self.pick(*made),))
                for c, made in zip(inner, results, strict=True)
            ]
            return b.emit("cond", self.pick(*starts), regions=regions)[0]
        inner, i, carry = Builder(), Value(INDEX, "i"), Value(TILE, "c")
        made = self.code(inner, refs, [*tiles, carry], [*starts, i], depth + 1)
        region: Block = inner.block((i, carry), (self.pick(*made),))
        bounds = [b.index(self.pick(0, 1)), b.index(self.pick(0, 1, 2, 3)), b.index(1)]
        return b.emit("for", *bounds, self.pick(*tiles), regions=(region,))[0]


@given(st.data())
@settings(max_examples=100)
def test_random_kernels(data):
    kernel = Maker(data).kernel()
    verify(kernel)
    assert parse_kernel(kernel.text) == kernel
    rng = np.random.default_rng(len(kernel.text))
    x = rng.permutation(24).reshape(SHAPE).astype("f4")
    x[0] = [-0.0, 0.0, -1.0, 0.5, np.inf, np.nan]
    starts = rng.integers(-2, 8, 3).astype("i4")
    new = assert_same(kernel, [x, starts])
    assert sum(1 for _ in walk(new.body)) <= sum(1 for _ in walk(kernel.body))
