"""What authors may choose for checked mode: `interpret=pl.Checked(...)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallasite.errors import SpecError, UnsupportedError


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


_INTERPRET_CHOICES = {
    "dma_execution_mode": ("eager", "on_wait"),
    "on_race": ("raise", "warn"),
    "out_of_bounds_reads": ("raise", "uninitialized"),
    "uninitialized_memory": ("nan", "zero"),
    "buffer_bounds": ("logical", "padded"),
}


@dataclass(frozen=True)
class InterpretParams:
    """`interpret=pltpu.InterpretParams(...)`: one evaluator runs all devices and cores.

    Copies and semaphores behave as on a chip. Bugs are reported with their lines, as in
    checked mode: copies that are not waited for, semaphores left nonzero and deadlocks
    always, others as set here. `interpret=pl.Checked()` checks more.

    Args:
        dma_execution_mode: "eager" performs a copy when it starts, "on_wait" when it is
            waited for.
        detect_races: report two unordered accesses to the same memory.
        on_race: "raise", or "warn" and continue.
        out_of_bounds_reads: "raise" reports an index past the end of a ref;
            "uninitialized" reads it like unwritten memory.
        skip_floating_point_ops: every floating-point result is infinity.
        uninitialized_memory: unwritten memory holds "nan" (the least value of integer
            types) or "zero".
        num_cores_or_threads: how many cores share the programs along parallel axes.
            Cores of a mesh run concurrently, as many as the mesh has.
        random_seed: seed of a random order of parallel programs and "on_wait" copies.
        grid_point_recorder: called with each program's ids and its core's number.
        allow_hbm_allocation_in_run_scoped, vector_clock_size, logging_mode: accepted
            without effect.
        buffer_bounds: "logical": a ref ends where its shape ends.
    """

    dma_execution_mode: str = "on_wait"
    detect_races: bool = False
    on_race: str = "raise"
    out_of_bounds_reads: str = "raise"
    skip_floating_point_ops: bool = False
    uninitialized_memory: str = "nan"
    num_cores_or_threads: int = 1
    random_seed: int | None = None
    grid_point_recorder: Any = None
    allow_hbm_allocation_in_run_scoped: bool = False
    vector_clock_size: int | None = None
    logging_mode: Any = None
    buffer_bounds: str = "logical"

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name, known in _INTERPRET_CHOICES.items():
            if getattr(self, name) not in known:
                got = [("got", repr(getattr(self, name))), ("known", ", ".join(known))]
                raise SpecError(f"{kind} does not support this {name}", got)
        if self.num_cores_or_threads < 1:
            raise SpecError(
                f"{kind} needs at least one core",
                [("num_cores_or_threads", self.num_cores_or_threads)],
                fix="num_cores_or_threads=1, or leave it out",
            )
        if self.buffer_bounds == "padded":
            raise UnsupportedError(
                f"{kind}(buffer_bounds='padded') is not supported",
                fix="use buffer_bounds='logical': a ref ends where its shape says",
            )

    @property
    def num_cores_per_device(self) -> int:
        return self.num_cores_or_threads


@dataclass(frozen=True)
class InterpretGPUParams(InterpretParams):
    """`interpret=plgpu.InterpretGPUParams(...)`: checked mode, as its fields say.

    Args:
        num_tma_threads_per_device, inline_mgpu: accepted without effect; the others are
            those of `pltpu.InterpretParams`.
    """

    num_tma_threads_per_device: int = 5
    inline_mgpu: str = "error"


def interpreted(params: Any) -> Checked:
    """Checked mode configured by a `pltpu.InterpretParams` or upstream's."""
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
