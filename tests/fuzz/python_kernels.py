"""Random kernels as an author writes them: Python, refs and jnp, with a grid.

`random_call` draws a script of snippets. It runs inside `pl.pallas_call`, and as plain
Python over numpy blocks, one program after another: what the call must give.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from tests.fuzz.choices import Choices, chance, pick
from tests.fuzz.operands import BLOCK, FILL, Shown, random_operand
from tests.fuzz.snippets import COLUMNS, GET, ONE, PUT, ROWS, TWO

Script = list[tuple[Any, ...]]
TABLE = np.array([1, 0, 2, -1], np.int32)  # rows of blocks that are looked up


# --- what a kernel calls, in a kernel and in plain Python ---


class InKernel:
    """The language."""

    program_id = staticmethod(pl.program_id)
    when = staticmethod(pl.when)
    ds = staticmethod(pl.ds)
    load = staticmethod(pl.load)
    store = staticmethod(pl.store)
    atomic_add = staticmethod(pl.atomic_add)


@dataclass(frozen=True)
class Part:
    start: Any
    size: int


class InPython:
    """The same for one program at a time, on numpy arrays."""

    def __init__(self, ids: Sequence[int]):
        self.ids = ids

    def program_id(self, axis: int) -> Any:
        return jnp.int32(self.ids[axis])

    def when(self, condition: Any) -> Callable[[Callable[[], None]], None]:
        return lambda run: run() if condition else None

    def ds(self, start: Any, size: int) -> Part:
        return Part(start, size)

    def load(self, ref: "Block", index: Any, *, mask: Any, other: float) -> Any:
        return jnp.where(mask, ref[index], other)

    def store(self, ref: "Block", index: Any, value: Any, *, mask: Any) -> None:
        ref[index] = jnp.where(mask, value, ref[index])

    def atomic_add(self, ref: "Block", index: Any, value: Any) -> None:
        ref[index] = ref[index] + value


class Block:
    """A part of an array, indexed as a ref is: starts from values are clamped."""

    xp: Any = np

    def __init__(self, data: Any):
        self.data, self.shape, self.dtype = data, data.shape, data.dtype

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(self.data[self._places(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.data[self._places(index)] = np.asarray(value)

    def put_back(self, array: Any, place: Any) -> Any:
        """The array whose part this is."""
        return array  # it was a view

    def _places(self, index: Any) -> Any:
        if index is Ellipsis:
            return ...
        index = index if isinstance(index, tuple) else (index,)
        return tuple(map(_place, index, self.shape))


class JaxBlock(Block):
    """The same without changing an array, so that JAX can differentiate the code."""

    xp = jnp

    def __setitem__(self, index: Any, value: Any) -> None:
        self.data = self.data.at[self._places(index)].set(value)

    def put_back(self, array: Any, place: Any) -> Any:
        return array.at[place].set(self.data)


def _place(entry: Any, n: int) -> Any:
    if isinstance(entry, Part):
        start = min(max(int(entry.start), 0), n - entry.size)
        return slice(start, start + entry.size)
    if isinstance(entry, (int, slice)):
        return entry
    places = np.clip(np.asarray(entry), 0, n - 1)
    return places if places.ndim else int(places)


# --- scripts ---


def random_script(
    choices: Choices, axes: int, hangs: bool = False, depth: int = 0
) -> Script:
    """Lines of code; numbers name the tiles made so far, the last ones first.

    Where blocks hang over the edge, only the scratch is read across positions, and no
    operand is written: what an output has past the end is unspecified, and what an
    operand has there is its fill value again.
    """
    script: Script = []
    for _ in range(choices.integer(1, 4 if depth else 6)):
        kinds = ("one", "one", "one", "two", "put", "get", "when", "loop")
        kind = pick(choices, kinds[: 6 if depth else 8])
        first, second = choices.integer(0, 3), choices.integer(0, 3)
        if kind in ("one", "two"):
            names = sorted(ONE if kind == "one" else TWO)
            script.append((kind, pick(choices, names), first, second))
        elif kind in ("put", "get"):
            count = len(PUT if kind == "put" else GET)
            ref = choices.integer(0, 2 if hangs else 4)  # see `program`
            ref = 2 if hangs and kind == "get" else ref
            script.append((kind, choices.integer(0, count - 1), first, ref))
        elif kind == "when":
            axis, number = choices.integer(0, axes - 1), choices.integer(0, 1)
            inner = random_script(choices, axes, hangs, 1)
            script.append((kind, axis, number, inner))
        else:
            inner = random_script(choices, axes, hangs, 1)
            script.append((kind, first, second, inner))
    return script


def run_script(
    script: Script, tiles: list[Any], refs: Sequence[Any], row: Any, api: Any
) -> None:
    """Run the lines; `tiles` grows by what they make. Without refs, those for refs are
    left out.
    """
    for kind, *rest in script:
        if not refs and kind in ("put", "get"):
            continue
        if kind == "when":
            axis, number, inner = rest
            condition = api.program_id(axis) == number
            api.when(condition)(
                lambda inner=inner: run_script(inner, list(tiles), refs, row, api)
            )
            continue
        if kind == "put":
            number, source, ref = rest
            PUT[number](refs[ref], _tile(tiles, source), row, api)
            continue
        tiles.append(jnp.clip(_made(kind, rest, tiles, refs, row, api), -20, 20))


def _tile(tiles: list[Any], number: int) -> Any:
    return tiles[-1 - number % len(tiles)]


def _made(kind: str, rest: list[Any], tiles: list[Any], refs, row, api) -> Any:
    if kind == "one":
        return ONE[rest[0]](_tile(tiles, rest[1]))
    if kind == "two":
        return TWO[rest[0]](_tile(tiles, rest[1]), _tile(tiles, rest[2]))
    if kind == "get":
        return GET[rest[0]](refs[rest[2]], row, api)
    first, steps, inner = rest

    def step(k: Any, carry: Any) -> Any:
        inside = [*tiles, carry]
        run_script(inner, inside, refs, row + k, api)
        return inside[-1] * 0.5

    return lax.fori_loop(0, steps, step, _tile(tiles, first))


# --- calls ---

MAPS: dict[str, Callable[[int, int], Callable[[Any, Any], tuple[Any, Any]]]] = {
    "both": lambda m, n: lambda i, j: (i, j),
    "rows": lambda m, n: lambda i, j: (i, 0),
    "columns": lambda m, n: lambda i, j: (0, j),
    "backwards": lambda m, n: lambda i, j: (m - 1 - i, j),
    "shifted": lambda m, n: lambda i, j: (i, j + 1),  # clamped at the end
    "turns": lambda m, n: lambda i, j: ((i + j) % m, 0),  # returns to each block
}


@dataclass(frozen=True)
class RandomCall:
    """A drawn call: two inputs in, one output and one running block out.

    One that is `alone` has only the output, and no scratch.
    """

    grid: tuple[int, int]
    shape: tuple[int, int]
    maps: tuple[str, ...]
    shown: tuple[Shown, ...]
    running: str  # the map of the running block
    alone: bool
    script: Script
    row: int
    arrays: tuple[np.ndarray, ...]

    def __repr__(self) -> str:
        maps = (*self.maps, self.running)
        parts = self.grid, self.shape, maps, self.shown, self.alone, self.script
        return f"RandomCall({', '.join(map(str, parts))})"

    def index_map(self, number: int) -> Callable[[Any, Any], tuple[Any, Any]]:
        return MAPS[self.maps[number]](*self.grid)

    def program(self, x: Any, y: Any, out: Any, *memory: Any, api: Any):
        tiles = [x[...], y[...]]
        out[...] = tiles[0]
        row = api.program_id(1) + self.row
        if self.alone:
            run_script(self.script, tiles, (), row, api)
        else:
            running, scratch = memory
            self.start(running, scratch, api)
            refs = out, running, scratch, x, y
            run_script(self.script, tiles, refs, row, api)
            running[...] += tiles[-1] * 0.5
        out[...] += tiles[-1]

    def start(self, running: Any, scratch: Any, api: Any) -> None:
        i, j = api.program_id(0), api.program_id(1)

        # At its first visit, if not only then.
        @api.when((j if self.running == "rows" else i) == 0)
        def _():
            running[...] = jnp.zeros(BLOCK)

        @api.when((i == 0) & (j == 0))
        def _():
            scratch[...] = jnp.full(BLOCK, 0.25)

    def __call__(self, *arrays: Any, interpret: bool) -> Any:
        tables = [TABLE] if any(s.kind == "looked up" for s in self.shown) else []
        shapes = [self.shape, (self.shape[0], COLUMNS)]
        outputs = [MAPS[name](*self.grid) for name in ("both", self.running)]
        if self.alone:
            del shapes[1], outputs[1]
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=self.grid,
            in_specs=[s.spec(self.index_map(n)) for n, s in enumerate(self.shown)],
            out_specs=[Shown().spec(numbers) for numbers in outputs],
            scratch_shapes=[] if self.alone else [pltpu.VMEM(BLOCK, jnp.float32)],
        )
        return pl.pallas_call(
            lambda *refs: self.program(*refs[len(tables) :], api=InKernel),
            out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes],
            grid_spec=spec,
            interpret=interpret,
        )(*tables, *arrays)

    def in_python(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The results of running the programs one after another."""
        return self._in_order(arrays, Block)

    def in_jax(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The same, as JAX can differentiate it."""
        return tuple(self._in_order(arrays, JaxBlock))

    def _in_order(self, arrays: Sequence[Any], block: type[Block]) -> list[Any]:
        (m, n), xp = self.grid, block.xp
        whole = (m * ROWS, n * COLUMNS)
        padding = [(0, a - b) for a, b in zip(whole, self.shape, strict=True)]
        padded = [xp.pad(a, padding, constant_values=FILL) for a in arrays]
        shapes = whole, (whole[0], COLUMNS), BLOCK
        *made, scratch = (xp.full(shape, np.nan, np.float32) for shape in shapes)
        seen, scratch = [*padded, *made], block(scratch)
        maps = [*map(self.index_map, range(2))]
        maps += [MAPS[name](m, n) for name in ("both", self.running)]
        # One op at a time: on a GPU each would be compiled and launched by itself.
        with jax.default_device(jax.devices("cpu")[0]), jax.disable_jit():
            for i, j in np.ndindex(m, n):
                numbers = [index_map(i, j) for index_map in maps]
                places = [_slices(number, self.grid) for number in numbers]
                blocks = [block(x[at]) for x, at in zip(seen, places, strict=True)]
                cut = [k for k, s in enumerate(self.shown) if s.kind != "blocks"]
                for k in cut:
                    part = self.shown[k].part(xp, arrays[k], numbers[k], TABLE)
                    blocks[k] = block(part)
                self.program(*blocks, scratch, api=InPython((i, j)))
                for k, at in enumerate(places):
                    if k not in cut:
                        seen[k] = blocks[k].put_back(seen[k], at)
        (rows, columns), (*_, out, running) = self.shape, seen
        results = [out[:rows, :columns], running[:rows]]
        return results[:1] if self.alone else results


def _slices(place: tuple[int, int], grid: tuple[int, int]) -> tuple[slice, ...]:
    numbers = (min(p, g - 1) for p, g in zip(place, grid, strict=True))
    pairs = zip(numbers, BLOCK, strict=True)
    return tuple(slice(k * n, (k + 1) * n) for k, n in pairs)


def random_call(choices: Choices, hangs: bool = True) -> RandomCall:
    """A call; with `hangs`, blocks may hang over the arrays, or lie anywhere."""
    grid = (choices.integer(1, 2), choices.integer(1, 3))
    hang = [choices.integer(1, 3) if chance(choices, 30) else 0 for _ in range(2)]
    hang = hang if hangs else [0, 0]
    shape = (grid[0] * ROWS - hang[0], grid[1] * COLUMNS - hang[1])
    maps = tuple(pick(choices, sorted(MAPS)) for _ in range(2))
    rng = np.random.default_rng(choices.integer(0, 255))
    arrays = tuple(rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    row = choices.integer(0, 4)
    visited = grid[0] <= grid[1]  # by the first steps, each of its blocks
    running = "turns" if visited and chance(choices, 25) else "rows"
    shown = tuple(random_operand(choices) if hangs else Shown() for _ in range(2))
    alone = chance(choices, 40)
    cut = any(hang) or any(each.kind != "blocks" for each in shown)
    script = random_script(choices, len(grid), cut)
    return RandomCall(grid, shape, maps, shown, running, alone, script, row, arrays)
