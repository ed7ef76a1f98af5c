"""Import rules for the linear algebra of small blocks.

Each factorisation is a loop over columns, written here as a JAX function of one matrix
and imported in place of the primitive; leading dimensions are mapped over.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from pallasite.importer.custom_rules import register
from pallasite.importer.importer import Importer
from pallasite.ir.nodes import Value
from pallasite.ir.rule_table import RuleTable

RULES = RuleTable()


def _each_matrix(fn: Callable[..., Any], rank: int) -> Callable[..., Any]:
    for _ in range(rank - 2):
        fn = jax.vmap(fn)
    return fn


def _steps(count: int) -> tuple[Any, Any]:
    """Bounds of a loop: its counter is int32 also where JAX's default is 64 bits."""
    return jnp.int32(0), jnp.int32(count)


@RULES.rule("cholesky", params="")
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

    _, factor = lax.fori_loop(*_steps(size), column, (a, jnp.zeros_like(a)))
    return jnp.where(jnp.isnan(factor).any(), jnp.nan, factor)


@RULES.rule("triangular_solve", params="left_side lower transpose_a unit_diagonal")
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

    return lax.fori_loop(*_steps(size), row, jnp.zeros_like(b))


@RULES.rule("lu", params="")
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
    return lax.fori_loop(*_steps(steps), column, start)


@RULES.rule("custom_linear_solve", params="const_lengths jaxprs")
def _linear_solve(im: Importer, eqn: Any, *args: Value) -> Sequence[Value]:
    """Its solver's code, with the derivatives of the equation it solves."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    params = [Value(a.type) for a in args]
    *_, of_solver, _, right = _parts(params, lengths)
    body = im.region(jaxprs.solve, params, [*of_solver, *right])
    rule = register(_solver(jaxprs, lengths), eqn, jaxprs.solve)
    return im.builder.emit("custom", *args, regions=[body], rule=rule)


def _parts(args: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Operands of a solve: constants of each of its four functions, then b."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return [list(args[i:j]) for i, j in itertools.pairwise([*ends, len(args)])]


def _solver(jaxprs: Any, lengths: Sequence[int]) -> Callable[..., Any]:
    """The solution of A x = b as a function of all constants and b.

    Its derivatives are those of the equation, A dx = db - dA x, and backwards those of
    the transposed equation. Each is a solve of JAX again, not the solver's code:
    that sees the matrix through factors that have no derivative.
    """

    def solve(*args: Any) -> Any:
        of_product, _, of_solver, of_back, b = _parts(args, lengths)
        evaluate = lambda j, *given: jax.core.eval_jaxpr(j.jaxpr, j.consts, *given)
        num_aux = len(jaxprs.solve.out_avals) - len(b)
        split = lambda found: (found[: len(b)], found[len(b) :]) if num_aux else found

        def run(_: Any, b: Any) -> Any:
            return split(evaluate(jaxprs.solve, *of_solver, *b))

        def run_back(_: Any, c: Any) -> Any:
            if jaxprs.transpose_solve is not None:
                return split(evaluate(jaxprs.transpose_solve, *of_back, *c))
            (found,) = jax.linear_transpose(lambda b: run(None, b), b)(c)
            return found

        product = lambda x: evaluate(jaxprs.matvec, *of_product, *x)
        found = lax.custom_linear_solve(product, b, run, run_back, False, bool(num_aux))
        return jax.tree.leaves(found)

    return solve
