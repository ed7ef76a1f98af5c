"""Import rules for the linear algebra of small blocks.

Each factorisation is a loop over columns, written here as a JAX function of one matrix
and imported in place of the primitive; leading dimensions are mapped over.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from pallasite.importer.importer import Importer
from pallasite.ir.nodes import Value
from pallasite.ir.rule_table import RuleTable

RULES = RuleTable()


def _each_matrix(fn: Callable[..., Any], rank: int) -> Callable[..., Any]:
    for _ in range(rank - 2):
        fn = jax.vmap(fn)
    return fn


@RULES.rule("cholesky")
def _cholesky_rule(im: Importer, eqn: Any, a: Value) -> list[Value]:
    return im.splice(_each_matrix(_cholesky, a.tile.rank), [a])


def _cholesky(a: Any) -> Any:
    """Column by column; all NaN where the matrix is not positive definite."""
    size = a.shape[0]
    rows = lax.iota(jnp.int32, size)

    def column(j: Any, state: Any) -> Any:
        rest, factor = state
        pivot = lax.dynamic_slice(rest, (j, j), (1, 1))
        found = lax.dynamic_slice(rest, (jnp.int32(0), j), (size, 1))
        scaled = jnp.where((rows >= j)[:, None], found / jnp.sqrt(pivot), 0)
        factor = lax.dynamic_update_slice(factor, scaled, (jnp.int32(0), j))
        return rest - scaled * scaled.T, factor

    _, factor = lax.fori_loop(0, size, column, (a, jnp.zeros_like(a)))
    return jnp.where(jnp.isnan(factor).any(), jnp.nan, factor)


@RULES.rule("triangular_solve")
def _triangular_solve(im: Importer, eqn: Any, a: Value, b: Value) -> list[Value]:
    p = eqn.params

    def solve(a: Any, b: Any) -> Any:
        lower = p["lower"] != p["transpose_a"]
        a = a.T if p["transpose_a"] else a
        if p["left_side"]:
            return _substitute(a, b, lower, p["unit_diagonal"])
        return _substitute(a.T, b.T, not lower, p["unit_diagonal"]).T

    return im.splice(_each_matrix(solve, a.tile.rank), [a, b])


def _substitute(a: Any, b: Any, lower: bool, unit_diagonal: bool) -> Any:
    """The x with `a @ x = b`, row by row from the end that has one unknown."""
    size = a.shape[0]
    columns = lax.iota(jnp.int32, size)[None, :]

    def row(step: Any, x: Any) -> Any:
        i = step if lower else size - 1 - step
        line = lax.dynamic_slice(a, (i, jnp.int32(0)), (1, size))
        known = jnp.where(columns < i if lower else columns > i, line, 0)
        right = lax.dynamic_slice(b, (i, jnp.int32(0)), (1, b.shape[1]))
        found = right - jnp.dot(known, x, precision="highest")
        if not unit_diagonal:
            found = found / lax.dynamic_slice(a, (i, i), (1, 1))
        return lax.dynamic_update_slice(x, found, (i, jnp.int32(0)))

    return lax.fori_loop(0, size, row, jnp.zeros_like(b))


@RULES.rule("lu")
def _lu_rule(im: Importer, eqn: Any, a: Value) -> list[Value]:
    return im.splice(_each_matrix(_lu, a.tile.rank), [a])


def _lu(a: Any) -> tuple[Any, Any, Any]:
    """Both factors in one matrix, the row each step swapped with, and the order."""
    height, width = a.shape
    rows = lax.iota(jnp.int32, height)

    def column(k: Any, state: Any) -> Any:
        a, pivots, order = state
        here = lax.dynamic_slice(a, (jnp.int32(0), k), (height, 1))[:, 0]
        best = jnp.argmax(jnp.where(rows >= k, jnp.abs(here), -1)).astype(jnp.int32)
        swapped = jnp.where(rows == k, best, jnp.where(rows == best, k, rows))
        a, order = a[swapped], order[swapped]
        pivots = lax.dynamic_update_slice(pivots, best[None], (k,))
        pivot = lax.dynamic_slice(a, (k, k), (1, 1))[0, 0]
        here = lax.dynamic_slice(a, (jnp.int32(0), k), (height, 1))[:, 0]
        factors = jnp.where((rows > k) & (pivot != 0), here / pivot, 0)
        line = lax.dynamic_slice(a, (k, jnp.int32(0)), (1, width))[0]
        right = lax.iota(jnp.int32, width) > k
        a = a - factors[:, None] * jnp.where(right, line, 0)
        stored = jnp.where((rows > k) & (pivot != 0), factors, here)
        return (
            lax.dynamic_update_slice(a, stored[:, None], (jnp.int32(0), k)),
            pivots,
            order,
        )

    steps = min(height, width)
    start = (a, jnp.zeros(steps, jnp.int32), rows)
    return lax.fori_loop(0, steps, column, start)


@RULES.rule("custom_linear_solve")
def _linear_solve(im: Importer, eqn: Any, *args: Value) -> Sequence[Value]:
    """Its solver, with a derivative: the solver's constants do not have one."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    of_solver = lengths.matvec + lengths.vecmat
    rights = sum(lengths)
    used = (
        *args[: lengths.matvec],
        *args[of_solver : of_solver + lengths.solve],
        *args[rights:],
    )
    return im.splice(_solver(jaxprs, lengths.matvec, lengths.solve), used)


def _solver(jaxprs: Any, of_matvec: int, of_solve: int) -> Callable[..., Any]:
    """The solution of A x = b as a function of A's constants, the solver's and b.

    Its derivative is that of the equation: A dx = db - dA x.
    """
    matvec, run = (
        functools.partial(jax.core.eval_jaxpr, j.jaxpr, j.consts)
        for j in (jaxprs.matvec, jaxprs.solve)
    )
    rights = of_matvec + of_solve

    @jax.custom_jvp
    def solve(*args: Any) -> Any:
        return tuple(run(*args[of_matvec:]))

    @solve.defjvp
    def _(args: Any, tangents: Any) -> Any:
        x = solve(*args)
        product = lambda *constants: tuple(matvec(*constants, *x))
        changes = jax.jvp(product, args[:of_matvec], tangents[:of_matvec])[1]
        moved = [db - d for db, d in zip(tangents[rights:], changes, strict=True)]
        return x, solve(*args[:rights], *moved)

    return solve
