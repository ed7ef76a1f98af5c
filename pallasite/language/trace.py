"""Tracing: a kernel or index-map function becomes a jaxpr over refs and scalars.

What a kernel captures from outside (arrays, outer tracers) comes back beside the jaxpr,
to be passed as operands. `importer.py` imports what comes out.
"""

import contextlib
import contextvars
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import (
    KernelTypeError,
    PallasError,
    RefIndexError,
    SpecError,
)
from pallasite.ir.nodes import Loc

# What JAX says (0.10, 0.12) where a ref stands in place of an array.
_REF_AS_ARRAY = (
    "'AbstractRef' object has no attribute|requires ndarray .* got .*Tracer"
    "|a Ref can't be passed where an array is expected"
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
jaxcompat.exclude_from_tracebacks(_PACKAGE + os.sep)


@dataclass(frozen=True)
class Traced:
    """A jaxpr, the captured values that feed its constants, and the output tree."""

    jaxpr: Any
    captured: tuple[Any, ...]
    out_tree: Any


@dataclass(frozen=True)
class KnownGrid:
    """The grid around the code being traced; None: a size not known before it runs."""

    sizes: tuple[int | None, ...]
    kernel: str

    def size(self, axis: int, asked: str) -> int | None:
        """The size along an axis, which must be there."""
        if 0 <= axis < len(self.sizes):
            return self.sizes[axis]
        shown = tuple("?" if s is None else s for s in self.sizes)
        raise SpecError(
            f"pl.{asked}({axis}): the grid has {len(shown)} axes",
            [("kernel", self.kernel), ("grid", shown)],
            user_location(),
        )


_grid: contextvars.ContextVar[KnownGrid | None]
_grid = contextvars.ContextVar("grid", default=None)


def known_grid_size(axis: int, asked: str) -> int | None:
    """The size of the innermost grid along an axis, if tracing knows it.

    Raises:
        SpecError: the grid has no such axis. Code that does not know how many there are
            asks until it meets this.
    """
    grid = _grid.get()
    return None if grid is None else grid.size(axis, asked)


@contextlib.contextmanager
def _inside_grid(grid: Sequence[Any] | None, kernel: str) -> Iterator[None]:
    """Let `known_grid_size` answer. JAX keeps traced functions by the named axes around
    them, so one that asks is traced anew for a grid of other sizes."""
    if grid is None:
        yield
        return
    sizes = tuple(g if isinstance(g, int) else None for g in grid)
    token = _grid.set(KnownGrid(sizes, kernel))
    try:
        with jaxcompat.named_axes([(f"pallasite grid {sizes}", 1)]):
            yield
    finally:
        _grid.reset(token)


def trace(
    fn: Callable[..., Any],
    tree: Any,
    avals: Sequence[Any],
    author: Callable[..., Any],
    axes: Sequence[tuple[str, int]] = (),
    grid: Sequence[Any] | None = None,
) -> Traced:
    """Stage `fn(*args)` where the flat arguments have the given types.

    `author`: the author's function behind `fn`, for errors. `axes`: names and sizes
    that `lax.axis_index` and `lax.axis_size` know besides. `grid`: the sizes of the
    grid that `fn` runs over; None: the one around it.
    """
    out_tree: list[Any] = []

    def flat_fn(*flat: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, flat)
        try:
            result = fn(*args, **kwargs)
        except Exception as error:  # here: JAX drops its frames further out
            better = explain_trace_failure(error, author)
            if better is None:
                raise
            raise better from None
        flat_out, out = jax.tree.flatten(result)
        out_tree.append(out)
        return flat_out

    axis_names = jaxcompat.named_axes(axes)
    inside = _inside_grid(grid, name_of(author))
    with jaxcompat.kernel_tracing(), axis_names, inside:
        closed = jax.make_jaxpr(flat_fn)(*avals)
        closed = jaxcompat.lower_high_level(closed)
    jaxpr, captured = jaxcompat.opened(closed)
    return Traced(jaxpr, tuple(captured), out_tree[0])


def storing(fn: Callable[..., Any], name: str, at: Any) -> Callable[..., None]:
    """`fn`, refused if it returns something: its results are what it stores."""

    def body(*args: Any, **kwargs: Any) -> None:
        result = fn(*args, **kwargs)
        if result is not None:
            raise KernelTypeError(
                "a kernel must not return a value",
                [("kernel", name), ("returned", _kinds(result))],
                at,
                "store results into the output refs: o_ref[...] = value",
            )

    return body


def _kinds(result: Any) -> str:
    """What a kernel returned, as one would say it: types of arrays, else of objects."""

    def kind(leaf: Any) -> str:
        aval = jaxcompat.aval_of(leaf) if isinstance(leaf, jax.Array) else None
        return type(leaf).__name__ if aval is None else aval.str_short()

    return ", ".join(kind(leaf) for leaf in jax.tree.leaves(result))


def check_signature(
    fn: Callable[..., Any], args: Any, kwargs: Any, facts: Any, at: Any
):
    """Refuse a kernel whose parameters cannot take the refs it will be given."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise KernelTypeError(
            "the kernel's parameters do not fit the refs it is given",
            [
                ("kernel", f"{name_of(fn)}{signature}"),
                *facts,
                ("problem", str(error)),
            ],
            location_of(fn) or at,
            "one parameter per scalar-prefetch operand, input, output and scratch",
        ) from None


def name_of(fn: Any) -> str:
    """A readable name for a kernel function (through partial and jit)."""
    while hasattr(fn, "func"):
        fn = fn.func
    name = getattr(fn, "__name__", type(fn).__name__)
    return "kernel" if name == "<lambda>" else name


def location_of(fn: Any) -> Loc | None:
    """Where a function is defined."""
    while hasattr(fn, "func"):
        fn = fn.func
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    if code is None:
        return None
    return Loc(shorten(code.co_filename), code.co_firstlineno, code.co_name)


def parameter_names(fn: Any, count: int) -> list[str]:
    """The kernel's positional parameter names, for error messages and IR names."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [p.name for p in parameters if p.kind in positional]
    return (names + [""] * count)[:count]


def user_location() -> Loc | None:
    """The innermost frame that is neither ours nor JAX's: the user's line."""
    jax_folder = os.path.dirname(os.path.abspath(jax.__file__))
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, jax_folder)) and "functools" not in file:
            return Loc(shorten(file), frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def shorten(path: str) -> str:
    """A path as the user would name it: relative to the working directory."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative


def equation_location(eqn: Any) -> Loc | None:
    """The user's line behind one equation."""
    frame = jaxcompat.user_frame(eqn.source_info)
    if frame is None:
        return None
    file, line, function = frame
    return Loc(shorten(file), line, function)


def explain_trace_failure(error: Exception, fn: Any) -> Exception | None:
    """A JAX error from tracing a kernel, in our words and with the user's line."""
    if isinstance(error, PallasError):
        return None
    text = str(error)
    at = _raising_line(error) or location_of(fn)
    facts = [("kernel", name_of(fn))]
    if "ShapedArray(bool" in text.partition("Transforms:")[2]:
        return boolean_index("a boolean mask", facts, at)
    if "Invalid shape for `swap`" in text or "Invalid dtype for `swap`" in text:
        what = "shape" if "shape for" in text else "dtype"
        return KernelTypeError(
            f"a value of the wrong {what} is written to a ref",
            [*facts, ("problem", _swap_problem(text))],
            at,
            "jnp.full(ref.shape, v, ref.dtype), jnp.broadcast_to(v, ref.shape) "
            "or v.astype(ref.dtype)",
        )
    if "Out of bound slice" in text:
        return RefIndexError(
            "a slice reaches outside its ref",
            [("kernel", name_of(fn)), ("slice", text.split(": ", 1)[-1].rstrip("."))],
            at,
        )
    if re.search(_REF_AS_ARRAY, text):
        return KernelTypeError(
            "a ref is used like an array",
            facts,
            at,
            "read it first: x_ref[...]",
        )
    if "DShapedArray" in text or "size must be" in text:
        return KernelTypeError(
            "a slice of a ref needs a size known when the kernel is traced",
            [("kernel", name_of(fn))],
            at,
            "pl.ds(start, size) with an int size; mask what is not wanted",
        )
    if _raised_while_indexing(error):
        given = _bools_in(_refused_index(error))
        if given is not None:
            return boolean_index(given, facts, at)
        unclear = "unpack" in text or "boolean conversion" in text
        return RefIndexError(
            "a ref cannot be indexed like this",
            [*facts, ("problem", None if unclear else text.splitlines()[0])],
            at,
            "ints, slices with a step of at least 1, pl.ds(start, size), integer "
            "arrays (no lists), one ...; no None",
        )
    error.add_note(f"while tracing the kernel {name_of(fn)}, at {at}")
    for kind, fix in _CONCRETE_FIXES.items():
        if isinstance(error, kind):
            error.add_note(f"fix: {fix}")
            break
    return None


def boolean_index(given: str, facts: Sequence[tuple[str, Any]], at: Loc | None):
    """The refusal of a mask, or of True or False, as an index into a ref.

    How many elements a mask picks is not known before the kernel runs.
    """
    return RefIndexError(
        f"{given} cannot index a ref: indices are integers",
        facts,
        at,
        "pl.load(ref, idx, mask=, other=), pl.store(ref, idx, value, mask=), or "
        "jnp.where(mask, ref[...], other)",
    )


# Python asks for a number where there is none yet; the most special class comes first.
_CONCRETE_FIXES: dict[type[Exception], str] = {
    jax.errors.NonConcreteBooleanIndexError: "keep all elements: "
    "jnp.where(mask, x, other), or a reduction with where=mask",
    jax.errors.TracerBoolConversionError: "decide at run time with pl.when, "
    "jax.lax.cond or jnp.where instead of `if`, `while`, `and` and `or`",
    jax.errors.TracerIntegerConversionError: "loop at run time with "
    "jax.lax.fori_loop or pl.loop instead of range()",
    jax.errors.TracerArrayConversionError: "use jax.numpy instead of numpy",
}


def _swap_problem(text: str) -> str:
    return text.split(". ", 1)[-1].split(" Transforms:")[0].strip()


def _raised_while_indexing(error: BaseException) -> bool:
    """Whether JAX's code for indices of refs refused one."""
    return bool(_indexing_frames(error))


def _indexing_frames(error: BaseException) -> list[Any]:
    traceback, frames = error.__traceback__, []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename.replace(os.sep, "/")
        if file.endswith("_src/state/indexing.py"):
            frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def _refused_index(error: BaseException) -> Any:
    """The index that JAX refused, or what is left of it; None if it cannot be told."""
    return _indexing_frames(error)[0].f_locals.get("indices")


def _bools_in(index: Any) -> str | None:
    """What to call the first boolean entry of an index."""
    for entry in index if isinstance(index, (tuple, list)) else (index,):
        if isinstance(entry, (bool, np.bool_)):
            return str(entry)
        leaves = jax.tree.leaves(entry)
        if any(getattr(v, "dtype", type(v)) in (bool, np.bool_) for v in leaves):
            return "a boolean mask"
    return None


def _raising_line(error: BaseException) -> Loc | None:
    """The last frame of the user's code in an exception's traceback."""
    jax_folder = os.path.dirname(os.path.abspath(jax.__file__))
    found, traceback = None, error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith((_PACKAGE, jax_folder, "<")):
            found = Loc(shorten(code.co_filename), traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found
