"""All claims about the kernels of a trace, for `pl.prove` and `pallasite prove`."""

from collections.abc import Sequence
from functools import partial

from pallasite.errors import SpecError
from pallasite.ir.nodes import Kernel
from pallasite.ir.nodes import walk as walk_ops
from pallasite.ir.opdef import table
from pallasite.passes.normal.counted_loops import counted_loops
from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.proofs.assume import Assumed, Given, check_names, check_ranges
from pallasite.proofs.bounds import bounds
from pallasite.proofs.coverage import coverage
from pallasite.proofs.races import order, races
from pallasite.proofs.replay import Replay
from pallasite.proofs.rows import Retrace, batch, doubled
from pallasite.proofs.sync import sync
from pallasite.proofs.touches import Walk
from pallasite.proofs.verdicts import CLAIMS, Claim, KernelProof, Proof
from pallasite.tools.sources import trace_of
from pallasite.tools.traces import Trace

_NOTHING: Assumed = {}


def prove_source(
    source: str,
    operands: str,
    claims: Sequence[str] = (),
    assume: Assumed = _NOTHING,
) -> Proof:
    """The claims about the kernels of "FILE::FUNCTION", or of a script, "FILE"."""
    claims = claims or CLAIMS
    check_claims(claims)
    trace = trace_of(source, operands)
    # The trace of a function is a partial over the function and its operands.
    given = trace.args if isinstance(trace, partial) else ()
    retrace = doubled(given[0], tuple(given[1:]), {}) if given else None
    return prove_sites(trace, claims, retrace, assume)


def check_claims(claims: Sequence[str]) -> None:
    """Reject a name that is no claim's."""
    for claim in claims:
        if claim not in CLAIMS:
            fix = f"one of {', '.join(CLAIMS)}"
            raise SpecError(f"there is no claim {claim!r}", fix=fix)


def prove_sites(
    trace: Trace,
    claims: Sequence[str] = CLAIMS,
    retrace: Retrace | None = None,
    assume: Assumed = _NOTHING,
) -> Proof:
    """The claims about kernel calls, each kernel once.

    Args:
        trace: makes the calls.
        claims: the names of those wanted.
        retrace: traces the function that makes them with other numbers of rows.
        assume: ranges of operands of integers, by the name of the parameter.
    """
    check_ranges(assume)
    found = dict[Kernel, KernelProof]()
    for number, site in enumerate(trace()):
        kernel = site.call.kernel
        if kernel not in found:
            found[kernel] = prove_kernel(kernel, claims, number, retrace, assume)
    check_names(assume, found)
    return Proof(tuple(found.values()))


def prove_kernel(
    kernel: Kernel,
    claims: Sequence[str] = CLAIMS,
    number: int = 0,
    retrace: Retrace | None = None,
    assume: Assumed = _NOTHING,
) -> KernelProof:
    """The claims about one kernel, the function's `number`-th."""
    replay = Replay(Given(kernel, assume))
    made = list[Claim]()
    if not {"bounds", "coverage", "races", "order"}.isdisjoint(claims):
        counted = _with_counters(kernel)
        known = Given(counted, assume)
        walk = Walk(counted, known)
        if "bounds" in claims:
            made.append(bounds(walk, replay, known))
        if "coverage" in claims:
            made.append(coverage(walk, replay))
        if not {"races", "order"}.isdisjoint(claims):
            raced = races(walk, replay)
            made.append(raced)
            if "order" in claims:
                made.append(order(walk, raced))
    if "sync" in claims:
        made.append(sync(kernel, replay))
    if "batch" in claims:
        made.append(batch(kernel, number, retrace, replay))
    wanted = tuple(claim for claim in made if claim.name in claims)
    return KernelProof(kernel.name, str(kernel.loc or ""), wanted, replay.given.text)


def _with_counters(kernel: Kernel) -> Kernel:
    """The kernel with loops that count by an index, as far as no access is lost."""
    kernel = drop_rules(kernel)
    counted = counted_loops(kernel)
    return counted if _accesses(counted) == _accesses(kernel) else kernel


def _accesses(kernel: Kernel) -> int:
    return sum(table()[op.name].indexed for op in walk_ops(kernel.body))
