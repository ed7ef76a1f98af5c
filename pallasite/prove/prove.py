"""`pl.prove(f)(*args)`: what holds of a function's kernels for all inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pallasite.ir.nodes import Kernel
from pallasite.ir.nodes import walk as walk_ops
from pallasite.ir.opdef import table
from pallasite.passes.normal.counted_loops import counted_loops
from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.prove.bounds import bounds
from pallasite.prove.coverage import coverage
from pallasite.prove.races import order, races
from pallasite.prove.replay import Replay
from pallasite.prove.touches import Walk
from pallasite.prove.verdicts import KernelProof, Proof
from pallasite.sites import Site
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
        return prove_sites(partial(kernels_of, function, *args, **kwargs))

    return proved


def prove_sites(trace: Trace) -> Proof:
    """The claims about kernel calls, each kernel once."""
    sites = list(dict.fromkeys(_kernel(site) for site in trace()))
    return Proof(tuple(prove_kernel(kernel) for kernel in sites))


def _kernel(site: Site) -> Kernel:
    return site.call.kernel


def prove_kernel(kernel: Kernel) -> KernelProof:
    """The claims about one kernel."""
    walk, replay = Walk(_with_counters(kernel)), Replay(kernel)
    raced = races(walk, replay)
    claims = (
        bounds(walk, replay),
        coverage(walk, replay),
        raced,
        order(walk, raced),
    )
    return KernelProof(kernel.name, str(kernel.loc or ""), claims)


def _with_counters(kernel: Kernel) -> Kernel:
    """The kernel with loops that count by an index, as far as no access is lost."""
    kernel = drop_rules(kernel)
    counted = counted_loops(kernel)
    return counted if _accesses(counted) == _accesses(kernel) else kernel


def _accesses(kernel: Kernel) -> int:
    return sum(table()[op.name].indexed for op in walk_ops(kernel.body))
