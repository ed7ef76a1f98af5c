"""Runs one function in a kernel and outside it, and compares: value, jvp and vjp."""

import functools
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite.errors import PallasError
from tests.functions.table import Row, function

DTYPES = {
    "f32": np.dtype("float32"),
    "bf16": jnp.dtype("bfloat16"),
    "i32": np.dtype("int32"),
    "bool": np.dtype("bool"),
}
SHAPES = ((5, 7), (13,))
KINDS = ("value", "jvp", "vjp")
ENGINES: dict[str, dict[str, Any]] = {
    "cpu": {"backend": "cpu"},
    "emulated": {"interpret": True},
}
# Relative to the size of an element, and to that of the largest one.
TOLERANCE = {"f32": (2e-5, 5e-6), "bf16": (2e-2, 1e-2)}


@dataclass(frozen=True)
class Case:
    """One function with operands of a dtype and shape, computed in one way."""

    module: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    engine: str


@dataclass(frozen=True)
class Verdict:
    """`outcome`: works, refused, differs, or none if JAX refuses it outside too."""

    outcome: str
    message: str = ""


def cases(module: str, name: str, row: Row) -> Iterator[Case]:
    """All dtypes natively, both shapes in f32; the emulation in f32 alone."""
    own = not set(row.letters) & set("xupqgsvt")
    for dtype in ("f32",) if own else DTYPES:
        for shape in SHAPES if dtype == "f32" and not own else SHAPES[:1]:
            for kind in KINDS if dtype in TOLERANCE else KINDS[:1]:
                yield Case(module, name, dtype, shape, kind, "cpu")
    for kind in KINDS[:1] if own else KINDS[:2]:
        yield Case(module, name, "f32", SHAPES[0], kind, "emulated")


_RANGES = {"u": (-0.95, 0.95), "p": (0.05, 0.95), "q": (0.2, 4), "g": (1.1, 5)}
_SHAPES = {"s": (5, 5), "v": (7,), "t": (2, 3, 5)}


def operand(letter: str, dtype: np.dtype, shape: Sequence[int], rng: Any) -> Any:
    """An array as the letters of `table.py` say."""
    if letter == "k":
        return jax.random.key(3)
    shape = _SHAPES.get(letter, shape)
    if letter == "i":
        return rng.integers(0, 5, shape).astype(np.int32)
    if letter == "n":
        return rng.integers(0, 7, shape).astype(np.int32)
    if letter == "m" or dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype == np.int32:
        low = 1 if letter in "pqg" else -9
        return rng.integers(low, 10, shape).astype(np.int32)
    low, high = _RANGES.get(letter, (-3, 3))
    return rng.uniform(low, high, shape).astype(dtype)


def run(case: Case, row: Row) -> Verdict:
    seed = zlib.crc32(f"{case.name}{case.dtype}{case.shape}".encode())
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    operands = [operand(n, dtype, case.shape, rng) for n in row.letters]
    fn = _plain(function(case.module, case.name, row))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = _computed(case.kind, fn, fn, operands)
        except Exception as error:  # JAX's own refusals have every class
            return Verdict("none", f"{type(error).__name__}: {error}")
        if wanted is None:
            return Verdict("none", "nothing to differentiate")
        try:
            mine = in_kernel(fn, ENGINES[case.engine])
            found = _computed(case.kind, mine, fn, operands)
        except PallasError as error:
            return Verdict("refused", str(error))
        except Exception as error:
            return Verdict("differs", f"raises {type(error).__name__}: {error}")
    return _compare(found, wanted, case.dtype)


def _plain(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function with a flat list of results, random keys as words."""

    def plain(*operands: Any) -> list[Any]:
        leaves = map(jnp.asarray, jax.tree.leaves(fn(*operands)))
        return [_words(leaf) for leaf in leaves]

    return plain


def _words(leaf: Any) -> Any:
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if key else leaf


def in_kernel(fn: Callable[..., list[Any]], options: dict[str, Any]) -> Any:
    """The function computed by one kernel on whole arrays."""

    def call(*operands: Any) -> list[Any]:
        words = [_words(jnp.asarray(v)) for v in operands]
        is_key = [w.dtype != v.dtype for w, v in zip(words, operands, strict=True)]

        def kernel(*refs: Any) -> None:
            given = [r[...] for r in refs[: len(words)]]
            given = [
                jax.random.wrap_key_data(v) if key else v
                for v, key in zip(given, is_key, strict=True)
            ]
            for ref, value in zip(refs[len(words) :], fn(*given), strict=True):
                ref[...] = value

        shapes = jax.eval_shape(fn, *operands)
        return pl.pallas_call(kernel, out_shape=shapes, **options)(*words)

    return call


def _computed(kind: str, fn: Any, plain: Any, operands: Sequence[Any]) -> Any:
    """The results as numpy arrays; None where nothing can be differentiated."""
    if kind == "value":
        return [np.asarray(r) for r in jax.jit(fn)(*operands)]
    results = jax.eval_shape(plain, *operands)
    floats = [n for n, v in enumerate(operands) if _is_float(v)]
    kept = [n for n, r in enumerate(results) if _is_float(r)]
    if not floats or not kept:
        return None

    def partly(*given: Any) -> list[Any]:
        everything = list(operands)
        for n, value in zip(floats, given, strict=True):
            everything[n] = value
        made = fn(*everything)
        return [made[n] for n in kept]

    rng = np.random.default_rng(5)
    points = [operands[n] for n in floats]
    if kind == "jvp":
        tangents = [_like(v, rng) for v in points]
        compute = jax.jit(lambda points, tangents: jax.jvp(partly, points, tangents))
        return [np.asarray(r) for r in compute(points, tangents)[1]]
    seeds = [_like(results[n], rng) for n in kept]
    compute = jax.jit(lambda points, seeds: jax.vjp(partly, *points)[1](seeds))
    return [np.asarray(r) for r in compute(points, seeds)]


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, np.floating)


def _like(value: Any, rng: Any) -> Any:
    return rng.uniform(-1, 1, value.shape).astype(value.dtype)


def _compare(found: Any, wanted: Any, dtype: str) -> Verdict:
    for n, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            text = f"{mine.dtype}{mine.shape}, not {theirs.dtype}{theirs.shape}"
            return Verdict("differs", f"result {n} is {text}")
        if not _is_float(theirs):
            if not np.array_equal(mine, theirs):
                return Verdict("differs", _where(n, mine, theirs, mine != theirs))
            continue
        narrow = theirs.dtype.itemsize < 4 or dtype == "bf16"
        relative, of_largest = TOLERANCE["bf16" if narrow else "f32"]
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        with np.errstate(all="ignore"):
            finite = np.abs(b[np.isfinite(b)])
            scale = finite.max() if finite.size else 0
            near = np.abs(a - b) <= relative * np.abs(b) + of_largest * scale
        same = near | (a == b) | (np.isnan(a) & np.isnan(b))
        if not same.all():
            return Verdict("differs", _where(n, mine, theirs, ~same))
    return Verdict("works")


def _where(n: int, mine: Any, theirs: Any, wrong: Any) -> str:
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    first = f"{mine[at]}, not {theirs[at]}"
    return f"result {n}: {wrong.sum()} of {wrong.size} differ, at {at}: {first}"


@functools.cache
def rows_of(module: str) -> dict[str, Row]:
    from tests.functions.table import rows

    return dict(rows(module))
