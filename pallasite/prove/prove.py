"""`pl.prove(f)(*args)`: what holds of a function's kernels for all inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pallasite.ir.nodes import Kernel
from pallasite.ir.nodes import walk as walk_ops
from pallasite.ir.opdef import table
from pallasite.passes.normal.counted_loops import counted_loops
from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.prove.batch import batch
from pallasite.prove.bounds import bounds
from pallasite.prove.coverage import coverage
from pallasite.prove.races import order, races
from pallasite.prove.replay import Replay
from pallasite.prove.rows import Retrace, doubled, over_sizes, refuted
from pallasite.prove.sync import sync
from pallasite.prove.touches import Walk
from pallasite.prove.verdicts import PROVED, KernelProof, Proof
from pallasite.tools.traces import Trace, kernels_of


def prove(function: Callable[..., Any]) -> Callable[..., Proof]:
    """Prove or refute claims about the kernels of a function, for all inputs.

    Nothing is compiled. The claims are about the kernels as written, at these shapes:
    bounds, coverage, races, order, synchronisation and batch invariance (docs/prove.md
    says what each means). Each is proved, refuted with a counterexample that checked
    mode can replay, or unknown with the reason.

    Args:
        function: any JAX function that calls kernels, also inside `jit`, `grad`,
            `vmap`, `scan` or `shard_map`.

    Returns:
        A function of the same arguments (arrays or `jax.ShapeDtypeStruct`s; anything
        else is passed to `function` as it is). It returns a `Proof`: print it, or look
        at its `kernels`; `.ok` is False if a claim is refuted.

    Raises:
        SpecError: the function calls no kernel.

    Example:
        `print(pl.prove(f)(jax.ShapeDtypeStruct((8192, 2048), jnp.float32)))`
    """

    def proved(*args: Any, **kwargs: Any) -> Proof:
        trace = partial(kernels_of, function, *args, **kwargs)
        return prove_sites(trace, doubled(function, args, kwargs))

    return proved


def prove_sites(trace: Trace, retrace: Retrace | None = None) -> Proof:
    """The claims about kernel calls, each kernel once.

    Args:
        trace: makes the calls.
        retrace: traces the function that makes them with other numbers of rows.
    """
    found = dict[Kernel, KernelProof]()
    for number, site in enumerate(trace()):
        kernel = site.call.kernel
        if kernel not in found:
            found[kernel] = prove_kernel(kernel, number, retrace)
    return Proof(tuple(found.values()))


def prove_kernel(
    kernel: Kernel, number: int = 0, retrace: Retrace | None = None
) -> KernelProof:
    """The claims about one kernel, the function's `number`-th."""
    walk, replay = Walk(_with_counters(kernel)), Replay(kernel)
    raced = races(walk, replay)
    rows = batch(drop_rules(kernel))
    invariant = over_sizes(kernel, number, rows, retrace)
    if rows.claim.verdict != PROVED:
        invariant = refuted(kernel, rows, replay)
    claims = (
        bounds(walk, replay),
        coverage(walk, replay),
        raced,
        order(walk, raced),
        sync(kernel, replay),
        invariant,
    )
    return KernelProof(kernel.name, str(kernel.loc or ""), claims)


def _with_counters(kernel: Kernel) -> Kernel:
    """The kernel with loops that count by an index, as far as no access is lost."""
    kernel = drop_rules(kernel)
    counted = counted_loops(kernel)
    return counted if _accesses(counted) == _accesses(kernel) else kernel


def _accesses(kernel: Kernel) -> int:
    return sum(table()[op.name].indexed for op in walk_ops(kernel.body))
