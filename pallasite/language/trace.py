"""Tracing: a kernel or index-map function becomes a jaxpr over refs and scalars.

Values a kernel captures from outside (arrays, outer tracers) are returned with the
jaxpr, to be passed as operands. `importer.py` imports the result.
"""

import contextlib
import contextvars
import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import (
    KernelTypeError,
    PallasError,
    RefIndexError,
    SpecError,
    is_users,
)
from pallasite.ir.nodes import Loc
from pallasite.language import upstream

# JAX's messages (0.10, 0.12) for a ref used in place of an array.
_REF_AS_ARRAY = (
    "'AbstractRef' object has no attribute|requires ndarray .* got .*Tracer"
    "|a Ref can't be passed where an array is expected|Attempting to pass a Ref"
    "|Cannot store a Ref|TransformedRefs cannot be abstractified"
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
jaxcompat.exclude_from_tracebacks(_PACKAGE + os.sep)
# Path fragments of files that are not the user's.
_LIBRARIES = (
    _PACKAGE + os.sep,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(np.__file__)) + os.sep,
    os.path.abspath(functools.__file__),
    "<frozen ",  # Python's own: runpy, importlib
)


@dataclass(frozen=True)
class Traced:
    """A jaxpr, the captured values bound to its constants, and the output tree."""

    jaxpr: Any
    captured: tuple[Any, ...]
    out_tree: Any


@dataclass(frozen=True)
class KnownGrid:
    """The grid around the code being traced; None for sizes known only at run time."""

    sizes: tuple[int | None, ...]
    kernel: str
    whole: Sequence[Any]  # operands without a block (`spec.Operand`)

    def size(self, axis: int, asked: str) -> int | None:
        """The size along an axis, if it is known at trace time.

        Raises:
            SpecError: the grid has no such axis. Code that does not know the number of
                axes probes until it gets this.
        """
        if 0 <= axis < len(self.sizes):
            return self.sizes[axis]
        shown = tuple("?" if s is None else s for s in self.sizes)
        raise SpecError(
            f"pl.{asked}({axis}): the grid has {count_of(len(shown), 'axis', 'axes')}",
            [("kernel", self.kernel), ("grid", shown)],
            user_location(),
            "axes are numbered from 0" if shown else "pass grid= in the call",
        )


_grid: contextvars.ContextVar[KnownGrid | None]
_grid = contextvars.ContextVar("grid", default=None)


def innermost_grid() -> KnownGrid | None:
    """The grid around the code being traced; None outside kernels."""
    return _grid.get()


@contextlib.contextmanager
def _inside_grid(
    grid: Sequence[Any] | None, kernel: str, whole: Sequence[Any]
) -> Iterator[None]:
    """Sets `innermost_grid`. JAX caches traced functions by the named axes around
    them, so a function that queries the grid is retraced for other grid sizes."""
    if grid is None:
        yield
        return
    sizes = tuple(g if isinstance(g, int) else None for g in grid)
    token = _grid.set(KnownGrid(sizes, kernel, whole))
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
    axes: Sequence[tuple[Hashable, int]] = (),
    grid: Sequence[Any] | None = None,
    whole: Sequence[Any] = (),
    role: tuple[str, str] | None = None,
) -> Traced:
    """Stage `fn(*args)` where the flat arguments have the given types.

    `author`: the author's function that `fn` wraps, for errors. `axes`: further names
    and sizes for `lax.axis_index` and `lax.axis_size`. `grid`: the sizes of the grid
    that `fn` runs over; None: the enclosing one. `whole`: the operands without blocks.
    `role`: what the author's function is, and its name; default: a kernel.
    """
    role = role or ("kernel", name_of(author))
    out_tree: list[Any] = []

    def flat_fn(*flat: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, flat)
        try:
            result = fn(*args, **kwargs)
        except Exception as error:  # caught here, as JAX drops its frames further out
            better = explain_trace_failure(error, author, role, args)
            if better is None:
                raise
            raise better from None
        flat_out, out = jax.tree.flatten(result)
        out_tree.append(out)
        return flat_out

    _pose_as(flat_fn, author)
    axis_names = jaxcompat.named_axes(axes)
    inside = _inside_grid(grid, name_of(author), whole)
    with jaxcompat.kernel_tracing(), axis_names, inside:
        closed = jax.make_jaxpr(flat_fn)(*avals)
        closed = jaxcompat.lower_other_high_level(closed)
    jaxpr, captured = jaxcompat.opened(closed)
    return Traced(jaxpr, tuple(captured), out_tree[0])


_kept: contextvars.ContextVar[list[tuple[Any, Any]] | None] = contextvars.ContextVar(
    "kept", default=None
)


@contextlib.contextmanager
def jaxprs_kept() -> Iterator[list[tuple[Any, Any]]]:
    """Collects kernels traced in a `with` block: each one's IR and its jaxpr."""
    found: list[tuple[Any, Any]] = []
    token = _kept.set(found)
    try:
        yield found
    finally:
        _kept.reset(token)


def keep_jaxpr(kernel: Any, traced: Traced) -> None:
    """Pass a kernel and its jaxpr to the enclosing `jaxprs_kept`, if any."""
    found = _kept.get()
    if found is not None:
        found.append((kernel, traced.jaxpr))


def _pose_as(fn: Any, author: Callable[..., Any]) -> None:
    """Make JAX's errors, which name the traced function, name the author's."""
    fn.__wrapped__ = _underlying(author)
    with contextlib.suppress(TypeError, ValueError):
        fn.__signature__ = inspect.signature(author)


def storing(fn: Callable[..., Any], name: str, at: Any) -> Callable[..., None]:
    """`fn`, rejected if it returns a value: a kernel's results are its stores."""

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
    """The types of what a kernel returned, for errors."""

    def kind(leaf: Any) -> str:
        if jaxcompat.is_ref(leaf):
            return f"a ref, {_type_of(leaf)}"
        aval = jaxcompat.aval_of(leaf) if isinstance(leaf, jax.Array) else None
        return type(leaf).__name__ if aval is None else aval.str_short()

    leaves = jax.tree.leaves(result, is_leaf=jaxcompat.is_ref)
    return ", ".join(kind(leaf) for leaf in leaves)


def _type_of(ref: Any) -> str:
    return f"{ref.dtype}[{', '.join(map(str, ref.shape))}]"


def check_signature(
    fn: Callable[..., Any], args: Any, kwargs: Any, facts: Any, at: Any
):
    """Reject a kernel whose parameters do not match the refs it will be given."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise KernelTypeError(
            "the kernel's parameters do not match the refs it gets",
            [
                ("kernel", f"{name_of(fn)}{signature}"),
                *facts,
                ("by name", ", ".join(kwargs) or None),
                ("problem", mismatch(signature, len(args), "ref", error)),
            ],
            location_of(fn) or at,
            "one parameter per scalar-prefetch operand, input, output and scratch",
        ) from None


def mismatch(
    signature: inspect.Signature, given: int, noun: str, error: Exception
) -> str:
    """Why a function cannot be called with that many arguments."""
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return str(error)
    taken = len([k for k in kinds if k is not inspect.Parameter.KEYWORD_ONLY])
    if taken == given:
        return str(error)
    counts = f"{count_of(given, noun)} for {count_of(taken, 'parameter')}"
    return counts if given > taken else f"{counts}: {error}"


def count_of(n: int, noun: str, plural: str = "") -> str:
    """`1 ref`, `2 refs`."""
    return f"{n} {noun}" if n == 1 else f"{n} {plural or noun + 's'}"


def name_of(fn: Any, unnamed: str = "kernel") -> str:
    """A readable name for a function (looking through partial and jit)."""
    fn = _underlying(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    return unnamed if name == "<lambda>" else name


def _underlying(fn: Any) -> Any:
    while hasattr(fn, "func"):
        fn = fn.func
    return fn


def is_of_library(fn: Any) -> bool:
    """Whether a kernel is one of `pallasite.kernels`."""
    module = getattr(_underlying(fn), "__module__", None) or ""
    return module.startswith("pallasite.kernels")


def location_of(fn: Any) -> Loc | None:
    """Where a function is defined."""
    fn = _underlying(fn)
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
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    return Loc(shorten(code.co_filename), frame.f_lineno, code.co_name)


def shorten(path: str) -> str:
    """A path as the user would name it: relative to the working directory."""
    return _within(os.getcwd(), path) if os.path.isabs(path) else path


@functools.lru_cache(maxsize=1024)  # called per equation, for few files
def _within(folder: str, path: str) -> str:
    relative = os.path.relpath(path, folder)
    return path if relative.startswith("..") else relative


def equation_location(eqn: Any) -> Loc | None:
    """The user's line that one equation comes from."""
    frame = jaxcompat.user_frame(eqn.source_info)
    if frame is None:
        return None
    file, line, function = frame
    return Loc(shorten(file), line, function)


def explain_trace_failure(
    error: Exception, fn: Any, role: tuple[str, str], args: Sequence[Any]
) -> Exception | None:
    """Rewrites a JAX error from tracing a kernel in our terms, with the user's line."""
    if isinstance(error, PallasError):
        return None
    text = str(error)
    at = _raising_line(error) or location_of(fn)
    facts = [role]
    if refused := _refused_read(facts):
        return refused
    if theirs := upstream.function_in(_frames_inside(error)):
        return upstream.foreign(theirs, facts, at)
    if "ShapedArray(bool" in text.partition("Transforms:")[2]:
        return boolean_index("a boolean mask", facts, at)
    if store := _STORE_REFUSED.match(text):
        return _explain_store(store, facts, at)
    if _USED_AS_REF.search(text) and (given := _not_a_ref(fn, args)):
        return KernelTypeError(
            "a parameter of the kernel is not a single ref",
            [
                *facts,
                ("parameter", given),
                ("problem", f"{type(error).__name__}: {text}"),
            ],
            at,
            "pass one array (jnp.asarray of a list of numbers), or use the refs one "
            "by one",
        )
    if isinstance(error, NameError) and (axis := _UNBOUND_AXIS.search(text)):
        return KernelTypeError(
            f"unbound axis name {axis[1]!r}",
            facts,
            at,
            "use a name in grid_names, cluster_names or thread_name, in the mesh of "
            "pl.kernel or pl.core_map, or in a jax.shard_map around the call",
        )
    if "Out of bound slice" in text:
        return RefIndexError(
            "a slice is out of bounds of its ref",
            [*facts, ("slice", text.split(": ", 1)[-1].rstrip("."))],
            at,
            "start at most at dim - size, or pass mask= for what is out of bounds",
        )
    if misused := _used_as_array(error, fn, args, facts, at):
        return misused
    if "not a valid JAX type" in text and (
        stored := _stored_value(_frames_inside(error))
    ):
        return KernelTypeError(
            "the value written to a ref is not an array",
            [*facts, ("value", _kind_of(stored[0]))],
            at,
            "write an array or a number; for a list, jnp.asarray(value, ref.dtype)",
        )
    if "__jax_array__" in text and _raised_while_reading(error):
        return RefIndexError(
            "a view of a ref is the index of a read or write",
            facts,
            at,
            "read it first: x_ref[i_ref[0]] instead of x_ref[i_ref.at[0]]; copies take "
            "views",
        )
    if "DShapedArray" in text or "size must be" in text:
        return KernelTypeError(
            "a slice of a ref needs a static size",
            facts,
            at,
            "use pl.ds(start, size) with an int size, and mask the rest",
        )
    if _raised_while_indexing(error):
        return _explain_index(error, facts, at)
    add_notes(error, f"while tracing the {' '.join(role)}, at {at}")
    return None


def _explain_index(error: Exception, facts: list[Any], at: Any) -> RefIndexError:
    """Our error for one that JAX raised from `ref[index]`."""
    text, index = str(error), _refused_index(error)
    given = _bools_in(index)
    if given is not None:
        return boolean_index(given, facts, at)
    if _has_traced_slice(index):
        return RefIndexError(
            "a slice of a ref has a traced bound",
            facts,
            at,
            "use pl.ds(start, size): only start may be traced",
        )
    unclear = "unpack" in text or "boolean conversion" in text
    problem = ("problem", text.splitlines()[0])
    return RefIndexError(
        "a ref cannot be indexed like this",
        [*facts, ("index", _refused_entry(index)) if unclear else problem],
        at,
        "use ints, slices with a step of at least 1, pl.ds(start, size), integer "
        "arrays (no lists), one ...; no None",
    )


# Attributes that only arrays have, used on a ref: the message, and the fix.
_ASKED_OF_REFS = {
    "__iter__": (
        "a ref cannot be iterated over",
        "read {}[i], with i from range or pl.loop",
    ),
    "__bool__": ("a ref has no truth value", "use pl.when of a value read from it"),
    "__array__": (
        "a ref cannot be used with numpy",
        "use jax.numpy on its value: {}[...]",
    ),
}
_HAS = "at, bitcast, dtype, get, ndim, reshape, set, shape, size, swap, T, transpose"


def _used_as_array(
    error: Exception, fn: Any, args: Sequence[Any], facts: Any, at: Any
) -> KernelTypeError | None:
    """The error for a ref used as an array, if that is the problem."""
    frames = _frames_inside(error)
    called = frames[0] if frames else None
    asked = called.f_code.co_name if called is not None else ""
    ref, name = _ref_among(frames, args), "x_ref"
    if ref is not None:
        name = _parameter_of(ref, fn, args) or name
        facts = [*facts, ("ref", f"'{name}', {_type_of(ref)}")]
    if re.search(_REF_AS_ARRAY, str(error)):
        fix = f"read it first: {name}[...]"
        return KernelTypeError("a ref is used like an array", facts, at, fix)
    if called is None or not jaxcompat.is_ref(called.f_locals.get("self")):
        return None
    if isinstance(error, AttributeError):
        asked = called.f_locals.get("name")
        what = f"a ref has no attribute {asked!r}"
        fix = f"its value is an array: {name}[...]"
        return KernelTypeError(what, [*facts, ("has", _HAS)], at, fix)
    if asked in _ASKED_OF_REFS:
        what, fix = _ASKED_OF_REFS[asked]
        return KernelTypeError(what, facts, at, fix.format(name))
    if asked in ("__float__", "__int__", "__index__", "__complex__"):
        kind = asked.strip("_")
        what = f"a ref cannot be converted with {kind}()"
        return KernelTypeError(what, facts, at, f"compute with {name}[...]")
    return None


def _ref_among(frames: Sequence[Any], args: Sequence[Any]) -> Any:
    """The kernel argument that the outermost of these frames operates on."""
    refs = {id(a): a for a in jax.tree.leaves(args, is_leaf=jaxcompat.is_ref)}
    if stored := _stored_value(frames):  # the destination ref is fine
        return refs.get(id(stored[0]))
    for frame in frames:
        for value in frame.f_locals.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if id(one) in refs:
                    return refs[id(one)]
    return None


def _parameter_of(ref: Any, fn: Any, args: Sequence[Any]) -> str:
    names = zip(parameter_names(fn, len(args)), args, strict=True)
    return next((name for name, arg in names if arg is ref), "")


def _stored_value(frames: Sequence[Any]) -> tuple[Any] | None:
    """The value of `ref[...] = value`, if that is what these frames execute."""
    for frame in frames:
        is_store = frame.f_code.co_name in ("__setitem__", "_setitem")
        if is_store and "value" in frame.f_locals:
            return (frame.f_locals["value"],)
    return None


def _kind_of(value: Any) -> str:
    """What to call a value that is not an array."""
    if value is None or isinstance(value, str):
        return repr(value)
    sized = isinstance(value, (list, tuple, dict))
    return f"a {type(value).__name__}" + (f" of {len(value)}" if sized else "")


def _refused_read(facts: Sequence[tuple[str, Any]]) -> PallasError | None:
    """The error for an earlier read with a non-integer index or a negative size.

    The shape of such a read may be what JAX rejects now.
    """
    for eqn in jaxcompat.staged_equations():
        if eqn.primitive.name == "get":
            ref, *index = eqn.invars
            where = [*facts, ("ref", _type_of(ref.aval))]
            at = equation_location(eqn)
            for entry in index:
                if refused := non_integer_index(entry, where, at):
                    return refused
            for size in eqn.outvars[0].aval.shape:
                if isinstance(size, int) and size < 0:
                    return negative_size(size, where, at)
    return None


def negative_size(
    size: int, facts: Sequence[tuple[str, Any]], at: Loc | None
) -> RefIndexError:
    """The error for a slice with a negative size."""
    return RefIndexError(
        f"a slice of a ref has a negative size, {size}",
        facts,
        at,
        "sizes are not negative: pl.ds(start, size) with a size of 0 or more",
    )


def non_integer_index(
    entry: Any, facts: Sequence[tuple[str, Any]], at: Loc | None
) -> PallasError | None:
    """The error for an entry of an index that is not an integer, else None.

    `entry`: a number, or an operand of a staged equation.
    """
    if isinstance(entry, (bool, np.bool_)):
        return boolean_index(str(entry), facts, at)
    if isinstance(entry, (int, np.integer)):
        return None
    aval, known = entry.aval, getattr(entry, "val", None)
    if jax.numpy.issubdtype(aval.dtype, np.integer):
        return None
    if aval.dtype == bool:
        scalar = "a boolean" if known is None else str(bool(known))
        given = f"a boolean mask of shape {aval.shape}" if aval.shape else scalar
        return boolean_index(given, facts, at)
    given = aval.str_short() if known is None or aval.shape else known
    return KernelTypeError(
        f"an index must be an integer, got {given}",
        facts,
        at,
        "divide with //, or cast it: index.astype(jnp.int32)",
    )


def boolean_index(given: str, facts: Sequence[tuple[str, Any]], at: Loc | None):
    """The error for a mask, or True or False, as an index into a ref.

    How many elements a mask selects is known only at run time.
    """
    return RefIndexError(
        f"{given} cannot index a ref: indices must be integers",
        facts,
        at,
        "use pl.load(ref, idx, mask=, other=), pl.store(ref, idx, value, mask=), or "
        "jnp.where(mask, ref[...], other)",
    )


def add_notes(error: Exception, where: str) -> None:
    """Append to a JAX error where it happened, and what to do."""
    notes = getattr(error, "__notes__", ())
    error.add_note(where)
    said = str(error)
    fixes = [f for words, f in _FIXES_BY_TEXT.items() if re.search(words, said)]
    fixes += [f for kind, f in _TRACER_FIXES.items() if isinstance(error, kind)]
    if fixes and f"fix: {fixes[0]}" not in notes:  # a pipeline's body may have added it
        error.add_note(f"fix: {fixes[0]}")


# Python needs a concrete number from a tracer, or a tracer has leaked; the most
# specific class comes first.
_TRACER_FIXES: dict[type[Exception], str] = {
    jax.errors.NonConcreteBooleanIndexError: "keep all elements: "
    "jnp.where(mask, x, other), or a reduction with where=mask",
    jax.errors.TracerBoolConversionError: "branch at run time with pl.when, "
    "jax.lax.cond or jnp.where instead of `if`, `while`, `and` and `or`",
    jax.errors.TracerIntegerConversionError: "loop at run time with "
    "jax.lax.fori_loop or pl.loop instead of range(); index an array or a ref instead "
    "of a list",
    jax.errors.TracerArrayConversionError: "use jax.numpy instead of numpy",
    jax.errors.ConcretizationTypeError: "compute with the traced value itself, "
    "converted with .astype(jnp.int32) or .astype(jnp.float32), instead of int(), "
    "float() and .item(); branch with pl.when or jax.lax.cond, loop with "
    "jax.lax.fori_loop",
    jax.errors.UnexpectedTracerError: "a traced value leaked out of the kernel: "
    "store it to an output, or to scratch for a later program",
}


_FIXES_BY_TEXT = {
    r"Shapes must be 1D|in the jnp.arange argument|jnp.linspace|[Ss]ize argument": (
        "shapes must be static: use the largest size (size=), and mask the rest: "
        "jnp.where(jnp.arange(largest) < n, x, 0)"
    ),
    "format string passed to .*Tracer": "print when the kernel runs: "
    'pl.debug_print("{:.3f}", x)',
}

_UNBOUND_AXIS = re.compile(r"unbound axis name: ([^\s.]+)")
_STORE_REFUSED = re.compile(
    r"Invalid (?P<what>shape|dtype) for `(?:swap|addupdate)`\. "
    r"(?:Ref shape: (?P<ref>\(.*?\))\. Expected shape: (?P<picked>\(.*?\))\. "
    r"Value shape: (?P<value>\(.*?\))\.|"
    r"Ref dtype: (?P<ref_dtype>\S+)\. Value dtype: (?P<value_dtype>\S+)\.)"
)


def _explain_store(found: re.Match[str], facts: Any, at: Any) -> PallasError:
    """The error for a value that JAX cannot store into a ref."""
    if found["what"] == "dtype":
        return KernelTypeError(
            "a value of the wrong dtype is written to a ref",
            [*facts, ("ref", found["ref_dtype"]), ("value", found["value_dtype"])],
            at,
            "value.astype(ref.dtype)",
        )
    ref, picked, value = found["ref"], found["picked"], found["value"]
    if negative := re.search(r"-\d+", picked):
        return negative_size(int(negative[0]), [*facts, ("ref", ref)], at)
    part = None if picked == ref else picked
    shapes = [("ref", ref), ("picked", part), ("value", value)]
    what = "a value of the wrong shape is written to a ref"
    sides = (("out_specs", ref, value), ("in_specs", value, ref))
    for operand in grid.whole if (grid := innermost_grid()) else ():
        for role, shape, block in sides:
            if (operand.role, str(operand.shape)) == (role, shape) and value != "()":
                uncut = f"{operand}: no BlockSpec, every program gets all of it"
                fix = f"pass a pl.BlockSpec({block}, index_map) for it in {role}"
                return KernelTypeError(
                    what, [*facts, *shapes, ("uncut", uncut)], at, fix
                )
    return KernelTypeError(what, [*facts, *shapes], at, _reshaped(value, picked))


def _reshaped(value: str, picked: str) -> str:
    """How to convert a value from one shape to another (shapes as JAX prints them)."""
    if value == "()":
        return f"jnp.full({picked}, value, ref.dtype)"
    have, want = (tuple(map(int, re.findall(r"\d+", s))) for s in (value, picked))
    if math.prod(have) == math.prod(want):
        return f"value.reshape({picked})"
    with contextlib.suppress(ValueError):
        if np.broadcast_shapes(have, want) == want:
            return f"jnp.broadcast_to(value, {picked})"
    return f"use an index that selects {value}, or a value of shape {picked}"


# Python's messages for a list, a dict or None used in place of a ref.
_USED_AS_REF = re.compile(
    r"^(list|tuple) indices must be|^'(NoneType|list|tuple|dict)' object|^Ellipsis$"
)


def _not_a_ref(fn: Any, args: Sequence[Any]) -> str | None:
    """The parameters of a kernel that are not refs, as an error shows them."""
    names = parameter_names(fn, len(args))
    shown = []
    for name, arg in zip(names, args, strict=True):
        if arg is None:
            shown.append(f"'{name}' is None")
        elif isinstance(arg, (list, tuple, dict)):
            refs = count_of(len(jax.tree.leaves(arg)), "ref")
            shown.append(f"'{name}' is a {type(arg).__name__} of {refs}")
    return ", ".join(shown) or None


def _raised_while_reading(error: BaseException) -> bool:
    """Whether one of JAX's functions that read and write refs raised the error."""
    codes = [frame.f_code for frame in _frames_inside(error)]
    return any(c.co_name in ("ref_get", "ref_swap", "ref_addupdate") for c in codes)


def _raised_while_indexing(error: BaseException) -> bool:
    """Whether JAX's code for indexing refs raised the error."""
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
    """The index that JAX rejected, or what remains of it; None if unknown."""
    return _indexing_frames(error)[0].f_locals.get("indices")


def _has_traced_slice(index: Any) -> bool:
    """Whether an entry of an index is a Python slice with a traced bound."""
    return any(
        isinstance(bound, jax.core.Tracer)
        for entry in (index if isinstance(index, tuple) else (index,))
        if isinstance(entry, slice)
        for bound in (entry.start, entry.stop, entry.step)
    )


def _refused_entry(index: Any) -> str | None:
    """What to call the entry of an index that refs do not accept."""
    for entry in index if isinstance(index, tuple) else (index,):
        if entry is None:
            return "has None in it"
        if isinstance(entry, list):
            return f"has a list of {len(entry)} in it"
    return None


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
    found, traceback = None, error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_users(code):
            found = Loc(shorten(code.co_filename), traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def _is_users(code: Any) -> bool:
    return not code.co_filename.startswith((*_LIBRARIES, "<"))


def _frames_inside(error: BaseException) -> list[Any]:
    """The frames of an exception that the user's last line called, outermost first."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        is_users = _is_users(traceback.tb_frame.f_code)
        frames = [] if is_users else [*frames, traceback.tb_frame]
        traceback = traceback.tb_next
    return frames
