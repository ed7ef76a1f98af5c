"""What authors may choose for checked mode: `interpret=pl.Checked(...)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """The evaluator's choices where machines may differ (`pltpu.InterpretParams`).

    Attributes:
        zeros: unwritten memory holds zeros, not NaN or the least integer.
        reads_outside: an element read past the end of a ref is like unwritten memory;
            otherwise an index past the end is clamped.
        skips_floats: floating-point values are not computed: all are infinity.
        cores: how many cores share the programs along parallel axes.
        seed: seed of a random order of programs along parallel axes.
        recorder: called with each program's ids and its core's number.
        warns_of_races: a race is only a warning, and the run continues.
    """

    zeros: bool = False
    reads_outside: bool = False
    skips_floats: bool = False
    cores: int = 1
    seed: int | None = None
    recorder: Callable[..., Any] | None = None
    warns_of_races: bool = False


@dataclass(frozen=True)
class Checked:
    """Checked mode: `pallas_call(..., interpret=pl.Checked())`.

    Runs the kernel in numpy with shadow memory and reports the first bug it finds, with
    the user's line and the program's ids. Each kind of check can be disabled.

    Args:
        bounds: accesses outside a ref, and blocks outside the array.
        uninitialised: unwritten values of outputs, scratch or edges where they
            matter: in a result, a branch, a trip count or an index.
        races: unordered accesses to the same memory, by two programs along a parallel
            axis or by two cores.
        unwritten: outputs with elements never written.
        copies: async copies never waited for, or whose memory is used too early,
            semaphores that are not zero at the end, and deadlocks.
        promises: broken promises of `pl.multiple_of`.
        nan: the first op to produce a NaN from operands without one (off by default).
        inf: the first op to produce an infinity from finite operands (off by
            default, as masks of -inf are common).
        orders: the orders in which copies, cores and roles are scheduled; a kernel that
            has any of these is run once in each. "early" performs a copy at its start
            and runs cores one after another, "late" performs it when it is waited for
            and runs the last core first, a number is the seed of a random order. The
            call returns the results of the first order.
        machine: further settings of `pltpu.InterpretParams`.
    """

    bounds: bool = True
    uninitialised: bool = True
    races: bool = True
    unwritten: bool = True
    copies: bool = True
    promises: bool = True
    nan: bool = False
    inf: bool = False
    orders: tuple[str | int, ...] = ("early", "late", 0)
    machine: Machine = Machine()


@dataclass(frozen=True)
class CheckedElsewhere(Checked):
    """Checked mode of a GPU kernel called where there is no GPU: not requested by the
    user, so tools may still compile the kernel with a GPU's backend."""


def interpreted(params: Any) -> Checked:
    """Checked mode configured by a `pltpu.InterpretParams`."""
    late = params.random_seed if params.random_seed is not None else "late"
    return Checked(
        bounds=params.out_of_bounds_reads == "raise",
        uninitialised=False,
        races=params.detect_races,
        unwritten=False,
        promises=False,
        orders=("early" if params.dma_execution_mode == "eager" else late,),
        machine=Machine(
            zeros=params.uninitialized_memory == "zero",
            reads_outside=params.out_of_bounds_reads != "raise",
            skips_floats=params.skip_floating_point_ops,
            cores=params.num_cores_or_threads,
            seed=params.random_seed,
            recorder=params.grid_point_recorder,
            warns_of_races=getattr(params, "on_race", "raise") == "warn",
        ),
    )
