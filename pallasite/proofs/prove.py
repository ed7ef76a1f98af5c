"""`pl.prove(f)(*args)`: what holds of a function's kernels for all inputs.

`kernels.py` decides it, a file per claim: `bounds.py`, `coverage.py`, `races.py`,
`sync.py`, `batch.py` with `rows.py`. They read what `touches.py` says of each access.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pallasite.proofs.verdicts import CLAIMS
from pallasite.tools.traces import kernels_of

if TYPE_CHECKING:
    from pallasite.proofs.verdicts import Proof


def prove(
    function: Callable[..., Any],
    claims: Sequence[str] = CLAIMS,
    assume: Mapping[str | int, Any] | None = None,
) -> "Callable[..., Proof]":
    """Prove or refute claims about the kernels of a function, for all inputs.

    Nothing is compiled. The claims are about the kernels as written, at these shapes:
    bounds, coverage, races, order, synchronisation and batch invariance (docs/prove.md
    says what each means). Each is proved, refuted with a counterexample that checked
    mode can replay, or unknown with the reason.

    Args:
        function: any JAX function that calls kernels, also inside `jit`, `grad`,
            `vmap`, `scan` or `shard_map`.
        claims: which of "bounds", "coverage", "races", "order", "sync" and "batch";
            default: all of them.
        assume: ranges of the integers in kernels' operands, or arrays of them, by the
            name of the kernel's parameter or the operand's number:
            `{"table_ref": range(0, 64)}`. What is proved holds for such operands.

    Returns:
        A function of the same arguments (arrays or `jax.ShapeDtypeStruct`s; anything
        else is passed to `function` as it is). It returns a `Proof`: print it, or look
        at its `kernels`; `.ok` is False if a claim is refuted.

    Raises:
        SpecError: the function calls no kernel, or there is no such claim or operand.

    Example:
        `print(pl.prove(f)(jax.ShapeDtypeStruct((8192, 2048), jnp.float32)))`
    """

    def proved(*args: Any, **kwargs: Any) -> "Proof":
        from pallasite.proofs.kernels import check_claims, prove_sites
        from pallasite.proofs.rows import doubled

        check_claims(claims)
        trace = partial(kernels_of, function, *args, **kwargs)
        return prove_sites(trace, claims, doubled(function, args, kwargs), assume or {})

    return proved
