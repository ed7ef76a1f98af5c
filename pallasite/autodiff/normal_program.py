"""Kernels as the programs whose reverse is taken: in normal form, with plain loops."""

import functools

from pallasite.autodiff.flat_loops import flat_loops
from pallasite.autodiff.rescaled_sums import plain_sums
from pallasite.autodiff.reverse_activity import facts_of
from pallasite.autodiff.started_sums import started_sums
from pallasite.autodiff.step_blocks import step_blocks
from pallasite.ir.nodes import Kernel, Op, Value
from pallasite.passes.lower import phases
from pallasite.passes.lower.legalize import legalize
from pallasite.passes.lower.per_program import Program, program_of
from pallasite.passes.normal.edge_fills import edge_fills
from pallasite.passes.normal.known_integers import known_integers
from pallasite.passes.normal.results_in_scratch import results_in_scratch
from pallasite.passes.normal.seams import seams
from pallasite.passes.normal.untransposed import untransposed
from pallasite.passes.optimise.known_recurrences import known_recurrences
from pallasite.passes.optimise.known_scans import known_scans
from pallasite.passes.run import NORMAL, run
from pallasite.passes.schedule.gpu_blocks import fewer_rows
from pallasite.passes.schedule.gpu_tiles import narrow_steps
from pallasite.passes.schedule.joined_windows import joined_windows
from pallasite.passes.schedule.previous_blocks import previous_blocks
from pallasite.passes.schedule.rows_by_table import rows_by_table
from pallasite.passes.schedule.whole_rows import whole_rows
from pallasite.passes.schedule.wide_programs import wide_programs
from pallasite.passes.transform.unaliased import unaliased
from pallasite.target import Machine


@functools.lru_cache(maxsize=64)
def normal_program(kernel: Kernel, machine: Machine) -> tuple[Kernel, Program]:
    """The kernel in normal form, and as a program."""
    # Cotangents of memory that is updated in place are, too: in order.
    kernel = unaliased(kernel, range(len(kernel.inputs)))
    normal = run(kernel, NORMAL)
    kernel, gpu = seams(results_in_scratch(normal)), machine.gpu is not None
    if gpu:
        # Its many programs run in any order, and load shifted copies where they lie.
        kernel = known_recurrences(untransposed(kernel))
        kernel = joined_windows(previous_blocks(known_scans(kernel)))
    elif machine.tpu is not None:
        # Of maxima and products JAX's derivative has strided slices along lanes.
        kernel = legalize(known_scans(kernel), _has_derivative, "tpu")
    if kernel is not normal:
        kernel = run(kernel, NORMAL)  # rules for scratch apply to these, too
    kernel = whole_rows(kernel, machine.gpu, endless=machine.endless)
    if machine.tpu is not None and not machine.endless:
        kernel = wide_programs(kernel, machine.tpu)
    if machine.gpu is not None:
        if not machine.endless:
            kernel = narrow_steps(kernel, machine.gpu)
        # A mask of a loaded tile would be a mask of its cotangent, after a matmul.
        kernel = rows_by_table(fewer_rows(edge_fills(kernel)), machine.gpu)
    program = in_phases(program_of(kernel))
    return kernel, flat_loops(started_sums(program))


def _has_derivative(op: Op) -> bool:
    return op.name != "scan" or op.attrs["kind"] == "sum"


def in_phases(program: Program) -> Program:
    """The program with known integers folded and its phases one after another."""
    return phases.apart(_with_known_integers(step_blocks(program)))


def expected_cotangents(kernel: Kernel, machine: Machine) -> tuple[bool, ...]:
    """The results whose cotangents a forward kernel expects: floats that depend on no
    running maximum, or all if all of them do.

    Statistics of attention are results for the sake of other kernels; were they
    expected to have cotangents, its sums could not be plain.
    """
    kernel, program = normal_program(kernel, machine)
    outputs = kernel.outputs
    floats = tuple(ref.ref.dtype.is_float for ref in outputs)
    sums = len(plain_sums(program.body, outputs).scales)

    def is_plain(ref: Value) -> bool:
        others = [other for other in outputs if other is not ref]
        return len(plain_sums(program.body, others).scales) == sums

    if not sums or len(outputs) == 1:
        return floats
    pairs = zip(outputs, floats, strict=True)
    found = tuple(is_float and is_plain(ref) for ref, is_float in pairs)
    return found if any(found) else floats


def _with_known_integers(program: Program) -> Program:
    """Simplify trip counts and block indices by the ranges of grid indices."""
    facts = facts_of(program.body, program.sizes)
    return program.with_body(known_integers(program.body, facts)).simplified()
