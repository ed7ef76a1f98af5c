"""Random functions around random kernel calls: fused they give what they gave before.

All numbers are small integers or halves of them, and all that is computed of them is
exact in every type used here, so that both ways must agree in every bit, and in type.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
import pallasite.tpu as pltpu
from pallasite.sites import sites_of_jaxpr
from tests.fuzz.choices import Choices, chance, pick
from tests.fuzz.running import COMPILER_OPTIONS

F32, BF16, I32, I8 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8
DTYPES = (F32, BF16, I32, I8)
LIMIT = 8  # of every number
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Term:
    """A value: its type, what makes it of which others, and that as text."""

    shape: Shape
    dtype: Any
    text: str
    function: Callable[..., Any] | int  # the number of an operand
    terms: "tuple[Term, ...]" = ()


def clipped(x: Any) -> Any:
    return jnp.clip(x, -LIMIT, LIMIT)


# --- kernels ---


def copying(x_ref, y_ref, o_ref, _):
    o_ref[...] = x_ref[...]


def adding(x_ref, y_ref, o_ref, _):
    o_ref[...] = clipped(x_ref[...] + y_ref[...])


def twice(x_ref, y_ref, o_ref, _):
    """Stores its block again, and reads what it stored."""
    o_ref[...] = x_ref[...]
    o_ref[...] = jnp.maximum(o_ref[...], y_ref[...])


def by_rows(x_ref, y_ref, o_ref, _):
    """Reads and writes parts of its blocks."""
    half = x_ref.shape[0] // 2
    o_ref[:half] = x_ref[half : 2 * half]
    o_ref[half:] = jnp.minimum(y_ref[half:], x_ref[half:])


def by_scratch(x_ref, y_ref, o_ref, s_ref):
    s_ref[...] = x_ref[...] - y_ref[...]
    o_ref[...] = clipped(s_ref[...])


def in_turn(x_ref, y_ref, o_ref, _):
    """Another value at every program."""
    o_ref[...] = clipped(x_ref[...] + pl.program_id(0).astype(x_ref.dtype))


def summing(x_ref, y_ref, o_ref, _):
    """Adds up along the last axis of the grid, in its result."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = y_ref[...]

    o_ref[...] = clipped(o_ref[...] + x_ref[...])


def at_the_end(x_ref, y_ref, o_ref, s_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        s_ref[...] = jnp.zeros_like(s_ref)

    s_ref[...] = clipped(s_ref[...] + x_ref[...])

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.maximum(s_ref[...], y_ref[...])


def guarded(x_ref, y_ref, o_ref, _):
    """Leaves the blocks of the first row as they are: nobody knows what is in them."""

    @pl.when(pl.program_id(0) > 0)
    def _():
        o_ref[...] = x_ref[...]


BOTH = (copying, adding, twice, by_rows, by_scratch, in_turn)
ALONG = (summing, at_the_end)  # the last axis
MAPS: dict[str, Callable[[int, int], Callable[[Any, Any], tuple[Any, Any]]]] = {
    "same": lambda m, n: lambda i, j: (i, j),
    "rows": lambda m, n: lambda i, j: (i, 0),
    "columns": lambda m, n: lambda i, j: (0, j),
    "backwards": lambda m, n: lambda i, j: (m - 1 - i, j),
    # Numbers out of range are those of the nearest block.
    "shifted": lambda m, n: lambda i, j: (i, j + 1),
    "before": lambda m, n: lambda i, j: (i - 1, j),
    "apart": lambda m, n: lambda i, j: (2 * i - 1, j),
    "halves": lambda m, n: lambda i, j: (i // 2, j),
}


@dataclass
class Builder:
    """Draws terms; remembers them, so that several others use one."""

    choices: Choices
    interpret: bool
    arrays: list[np.ndarray] = field(default_factory=list)
    known: list[Term] = field(default_factory=list)
    left: int = 14  # how many more equations

    # --- operands ---

    def term(self, shape: Shape, dtype: Any) -> Term:
        """Any value of a type."""
        same = [t for t in self.known if (t.shape, t.dtype) == (shape, dtype)]
        if same and chance(self.choices, 25):
            return pick(self.choices, same)
        makers = [self.leaf, self.negated, self.binary, self.cast, self.chosen]
        makers += [self.row, self.column, self.transposed, self.sliced, self.numbers]
        makers += [self.reduced, self.reshaped, self.layer, self.joined, self.reversed]
        makers += [self.scalar, self.picked, self.jitted]
        self.left -= 1
        make = pick(self.choices, makers) if self.left > 0 else self.leaf
        made = make(shape, dtype) or self.leaf(shape, dtype)
        self.known.append(made)
        return made

    def leaf(self, shape: Shape, dtype: Any) -> Term:
        number = len(self.arrays)
        rng = np.random.default_rng(number)
        array = rng.integers(-LIMIT, LIMIT, shape, endpoint=True)
        self.arrays.append(np.asarray(array).astype(dtype))
        name = f"{np.dtype(dtype).name}{list(shape)}"
        return Term(shape, dtype, f"x{number}:{name}", number)

    def _of(self, text: str, function: Callable[..., Any], *terms: Term) -> Term:
        """A term of others, its type found by tracing."""
        shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in terms]
        made = jax.eval_shape(function, *shapes)
        inner = ", ".join(t.text for t in terms)
        dtype = next(t for t in DTYPES if t == made.dtype)
        return Term(made.shape, dtype, f"{text}({inner})", function, terms)

    def negated(self, shape: Shape, dtype: Any) -> Term:
        name = pick(self.choices, ["negative", "abs", "sign"])
        return self._of(name, getattr(jnp, name), self.term(shape, dtype))

    def binary(self, shape: Shape, dtype: Any) -> Term:
        name = pick(self.choices, ["add", "subtract", "multiply", "maximum"])
        of = getattr(jnp, name)
        a, b = self.term(shape, dtype), self.term(shape, dtype)
        return self._of(name, lambda x, y: clipped(of(x, y)), a, b)

    def cast(self, shape: Shape, dtype: Any) -> Term:
        x = self.term(shape, pick(self.choices, DTYPES))
        return self._of("cast", lambda x: x.astype(dtype), x)

    def chosen(self, shape: Shape, dtype: Any) -> Term:
        a, b, c = (self.term(shape, dtype) for _ in range(3))
        return self._of("where", lambda x, y, z: jnp.where(x > y, z, y), a, b, c)

    def scalar(self, shape: Shape, dtype: Any) -> Term:
        x, s = self.term(shape, dtype), self.leaf((), dtype)
        return self._of("scaled", lambda x, s: clipped(x * s), x, s)

    def row(self, shape: Shape, dtype: Any) -> Term | None:
        if len(shape) < 2:
            return None
        x = self.term(shape[1:], dtype)
        return self._of("broadcast", lambda x: jnp.broadcast_to(x, shape), x)

    def column(self, shape: Shape, dtype: Any) -> Term | None:
        if len(shape) < 2:
            return None
        x = self.term((shape[0], *[1] * (len(shape) - 1)), dtype)
        return self._of("broadcast", lambda x: jnp.broadcast_to(x, shape), x)

    def transposed(self, shape: Shape, dtype: Any) -> Term | None:
        if len(shape) < 2:
            return None
        return self._of("transpose", jnp.transpose, self.term(shape[::-1], dtype))

    def sliced(self, shape: Shape, dtype: Any) -> Term | None:
        if not shape:
            return None
        axis = self.choices.integer(0, len(shape) - 1)
        unit = pick(self.choices, [shape[axis], 4, 1, 8])
        before, after = (unit * self.choices.integer(0, 2) for _ in range(2))
        size = before + shape[axis] + after
        x = self.term((*shape[:axis], size, *shape[axis + 1 :]), dtype)
        part = lambda x: lax.slice_in_dim(x, before, before + shape[axis], axis=axis)
        return self._of(f"slice[{before}:, {axis}]", part, x)

    def numbers(self, shape: Shape, dtype: Any) -> Term | None:
        if not shape:
            return None
        axis = self.choices.integer(0, len(shape) - 1)
        made = lambda: clipped(lax.broadcasted_iota(I32, shape, axis) - 4).astype(dtype)
        return self._of(f"iota[{axis}]", made)

    def reduced(self, shape: Shape, dtype: Any) -> Term | None:
        axis = self.choices.integer(0, len(shape))
        size = pick(self.choices, [2, 1, 8])
        x = self.term((*shape[:axis], size, *shape[axis:]), dtype)
        name = pick(self.choices, ["max", "min", "sum"])
        of = getattr(jnp, name)
        kept = {"dtype": dtype} if name == "sum" else {}
        return self._of(f"{name}[{axis}]", lambda x: clipped(of(x, axis, **kept)), x)

    def reshaped(self, shape: Shape, dtype: Any) -> Term | None:
        if not shape:
            return None
        forms = [(shape[0], 1, *shape[1:]), (1, *shape), (int(np.prod(shape)),)]
        forms += [(shape[0] // 4, 4, *shape[1:])] * (shape[0] % 4 == 0)
        forms += [(*shape[:-1], shape[-1] // 2, 2)] * (shape[-1] % 2 == 0)
        if len(shape) > 1:
            forms.append((shape[0] * shape[1], *shape[2:]))
        x = self.term(pick(self.choices, forms), dtype)
        return self._of(f"reshape{list(shape)}", lambda x: x.reshape(shape), x)

    def layer(self, shape: Shape, dtype: Any) -> Term:
        """One of a stack, that a scalar names."""
        stack = self.term((3, *shape), dtype)
        n = self.leaf((), I32)
        return self._of("layer", lambda x, n: x[jnp.clip(n, 0, 2)], stack, n)

    def picked(self, shape: Shape, dtype: Any) -> Term:
        stack, n = self.term((3, *shape), dtype), self.choices.integer(0, 2)
        return self._of(f"stack[{n}]", lambda x: x[n], stack)

    def joined(self, shape: Shape, dtype: Any) -> Term | None:
        axis = self.choices.integer(0, max(len(shape) - 1, 0))
        if not shape or shape[axis] < 2:
            return None
        first = pick(self.choices, [shape[axis] // 2, 1, shape[axis] - 1])
        sized = lambda n: self.term((*shape[:axis], n, *shape[axis + 1 :]), dtype)
        if 2 * first == shape[axis] and pick(self.choices, [False, True]):
            twice = lambda x: jnp.concatenate([x, x], axis)
            return self._of("twice", twice, sized(first))
        parts = sized(first), sized(shape[axis] - first)
        return self._of("join", lambda *x: jnp.concatenate(x, axis), *parts)

    def reversed(self, shape: Shape, dtype: Any) -> Term:
        """There is no rule for it."""
        return self._of("flip", jnp.flip, self.term(shape, dtype))

    def jitted(self, shape: Shape, dtype: Any) -> Term:
        x = self.term(shape, dtype)
        return self._of("relu", lambda x: jax.nn.relu(x), x)

    # --- calls ---

    def call(self, first: Term | None = None) -> Term:
        """A kernel call; `first` is its first operand, cut to blocks as it may be."""
        choose = self.choices
        dtype = first.dtype if first is not None else pick(choose, DTYPES)
        kernel = pick(choose, (*BOTH, *ALONG, guarded))
        rows, columns = pick(choose, [4, 8]), pick(choose, [8, 16])
        grid = (choose.integer(1, 3), choose.integer(1, 3))
        along = kernel in ALONG
        counts = (grid[0], 1 if along else grid[1])  # blocks of the result
        # A block over the edge reads what nobody knows: only where it stays there.
        hang = chance(choose, 20) and kernel in (copying, adding, twice)
        over = choose.integer(1, 3) if hang else 0
        shape = (counts[0] * rows - over, counts[1] * columns)
        operands, maps = [], []
        for n in range(2):
            name = "same" if hang else pick(choose, sorted(MAPS, key=_same_first))
            own = shape
            if along or not hang:
                blocks = (choose.integer(1, 3), choose.integer(1, 3))
                own = (blocks[0] * rows, blocks[1] * columns)
            given = first if n == 0 and first is not None else None
            if given is not None and given.shape != own:
                given = self._fit(given, own)
            operands.append(given or self.term(own, dtype))
            maps.append(name)
        block = (rows, columns)
        specs = [pl.BlockSpec(block, MAPS[m](*grid)) for m in maps]
        out = pl.BlockSpec(block, lambda i, j: (i, 0 if along else j))
        interpret = self.interpret

        def run(x, y):
            made = pl.pallas_call(
                kernel,
                out_shape=jax.ShapeDtypeStruct(shape, dtype),
                grid=grid,
                in_specs=specs,
                out_specs=out,
                scratch_shapes=[pltpu.VMEM(block, dtype)],
                interpret=interpret,
            )(x, y)
            if kernel is guarded:
                stored = lax.broadcasted_iota(I32, shape, 0) >= rows
                made = jnp.where(stored, made, jnp.asarray(1, dtype))
            return made

        text = f"{kernel.__name__}[{grid}, {block}, {maps}, {shape}]"
        made = self._of(text, run, *operands)
        self.known.append(made)
        return made

    def _fit(self, x: Term, shape: Shape) -> Term:
        """Any value as one of another shape."""

        def fit(x):
            x = x.reshape(-1)
            need = int(np.prod(shape))
            return jnp.tile(x, -(-need // x.size))[:need].reshape(shape)

        return self._of("fit", fit, x)

    # --- results ---

    def after(self, x: Term) -> Term:
        """Something that is made of a value."""
        options = [self._plain, self._with, self._cut, self._summed, self._turned]
        options += [self._typed, self._formed, self._weak, self._spread]
        self.left -= 1
        made = pick(self.choices, options)(x)
        self.known.append(made)
        return made

    def _plain(self, x: Term) -> Term:
        name = pick(self.choices, ["negative", "abs", "sign"])
        return self._of(name, getattr(jnp, name), x)

    def _with(self, x: Term) -> Term:
        shape = pick(self.choices, [x.shape, x.shape[1:], ()])
        y = self.term(shape, x.dtype)
        return self._of("add", lambda x, y: clipped(x + y), x, y)

    def _cut(self, x: Term) -> Term:
        if not x.shape:
            return x
        axis = self.choices.integer(0, len(x.shape) - 1)
        size = max(x.shape[axis] // pick(self.choices, [2, 1]), 1)
        first = pick(self.choices, [0, x.shape[axis] - size])
        part = lambda x: lax.slice_in_dim(x, first, first + size, axis=axis)
        return self._of(f"slice[{first}:, {axis}]", part, x)

    def _summed(self, x: Term) -> Term:
        if not x.shape:
            return x
        axis = self.choices.integer(0, len(x.shape) - 1)
        keeps = chance(self.choices, 50)
        name = pick(self.choices, ["max", "min"])
        of = getattr(jnp, name)
        return self._of(f"{name}[{axis}]", lambda x: of(x, axis, keepdims=keeps), x)

    def _turned(self, x: Term) -> Term:
        return self._of("transpose", jnp.transpose, x)

    def _typed(self, x: Term) -> Term:
        dtype = pick(self.choices, DTYPES)
        return self._of("cast", lambda x: x.astype(dtype), x)

    def _formed(self, x: Term) -> Term:
        if not x.shape:
            return x
        forms = [(1, *x.shape), (int(np.prod(x.shape)),), (x.shape[0], 1, *x.shape[1:])]
        form = pick(self.choices, forms)
        return self._of(f"reshape{list(form)}", lambda x: x.reshape(form), x)

    def _weak(self, x: Term) -> Term:
        return self._of("signs", lambda x: jnp.where(x > 0, 1.0, -1.0), x)

    def _spread(self, x: Term) -> Term:
        shape = (2, *x.shape)
        return self._of("broadcast", lambda x: jnp.broadcast_to(x, shape), x)


def _same_first(name: str) -> tuple[bool, str]:
    return name != "same", name


@dataclass(frozen=True)
class Fusion:
    """A function of arrays, with kernel calls in it."""

    results: tuple[Term, ...]
    arrays: tuple[np.ndarray, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        known: dict[Term, Any] = {}

        def value(term: Term) -> Any:
            if isinstance(term.function, int):
                return arrays[term.function]
            if term not in known:
                known[term] = term.function(*map(value, term.terms))
            return known[term]

        return [value(term) for term in self.results]

    def __repr__(self) -> str:
        return "\n".join(f"-> {term.text}" for term in self.results)


def random_fusion(choices: Choices, interpret: bool) -> Fusion:
    """One or two calls, what makes their operands and what is made of their results."""
    builder = Builder(choices, interpret)
    made = builder.call()
    results = []
    for n in range(choices.integer(1, 2)):
        if n:
            made = builder.call(made if chance(choices, 60) else None)
        for _ in range(choices.integer(0, 4)):
            if chance(choices, 25):
                results.append(made)
            made = builder.after(made)
            if int(np.prod(made.shape)) > 1 << 12:
                break
    return Fusion((*results, made), tuple(builder.arrays))


def _on_host(fusion: Fusion) -> list[Any]:
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(lambda *arrays: fusion(*arrays))(*fusion.arrays)


def check_fusion(choices: Choices, engine: str) -> str:
    """Compare a function with itself, fused. Returns whether anything was fused."""
    fusion = random_fusion(choices, interpret=engine == "emulation")
    fused = pl.fuse(lambda *arrays: fusion(*arrays))
    both = lambda *arrays: (fusion(*arrays), fused(*arrays))
    jaxpr = jax.make_jaxpr(fused)(*fusion.arrays)
    notes = [note for site in sites_of_jaxpr(jaxpr) for note in site.call.fused]
    lowered = jax.jit(both).lower(*fusion.arrays)
    plain, other = lowered.compile(compiler_options=COMPILER_OPTIONS)(*fusion.arrays)
    for n, (a, b) in enumerate(zip(plain, other, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"result {n}: {b}\n{fusion!r}"
        assert a.weak_type == b.weak_type, f"result {n} is weak: {b}\n{fusion!r}"
        wanted, got = (np.asarray(x, np.float32) for x in (a, b))
        if engine == "gpu" and not np.array_equal(got, wanted):
            # XLA's own bug on GPUs: of {y, max(abs(y), 0), max(abs(y), 0) + 1}, all in
            # one jit and without any kernel, the second is wrong (jaxlib 0.11.2). What
            # the host's CPU makes of the function decides.
            wanted = np.asarray(_on_host(fusion)[n], np.float32)
        np.testing.assert_array_equal(got, wanted, err_msg=f"{fusion!r}\n{notes}")
    done = [note for note in notes if not note.startswith(("not ", "nothing"))]
    return "fused" if done else "unfused"
