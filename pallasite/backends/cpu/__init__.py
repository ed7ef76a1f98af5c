"""The `cpu` backend: tile IR to LLVM IR text to machine code, called through XLA FFI.

Reading order: `emit.py` walks a kernel, `tiles.py` defines tiles during code
generation, the modules that `emit.py` lists have the rules for ops, XLA calls
`handler.py`, and `compile.py` makes machine code.
"""

import importlib.util
from collections.abc import Sequence
from functools import partial

from pallasite import target
from pallasite.backends.base import (
    Compiled,
    Launch,
    Options,
    Resource,
    Stage,
    scheduled_kernel,
)
from pallasite.backends.cpu.call import compile as compiler
from pallasite.backends.cpu.call.parallel_units import nanoseconds, share_programs
from pallasite.backends.cpu.dot.fusion import fuse_dot_sums
from pallasite.backends.cpu.dot.pack_once import pack_once
from pallasite.backends.cpu.dot.rows_uncounted import rows_uncounted
from pallasite.backends.cpu.emit import NATIVE, emit_kernel, is_native
from pallasite.backends.cpu.ops.debugging import RULES as DEBUG_RULES
from pallasite.backends.cpu.tiles.plan_memory import plan_memory
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import print_kernel
from pallasite.passes.lower.legalize import legalize
from pallasite.passes.lower.matrix_units import write_out
from pallasite.passes.lower.own_inputs import own_inputs, own_results
from pallasite.passes.lower.place_windows import place_windows
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.known_comparisons import known_comparisons
from pallasite.passes.normal.scratch_values import scratch_values
from pallasite.passes.optimise.equal_factors import equal_factors
from pallasite.passes.optimise.guard_bounds import guard_bounds
from pallasite.passes.optimise.one_hots import one_hots
from pallasite.passes.optimise.unmasked_steps import unmasked_steps
from pallasite.passes.run import Pass, run
from pallasite.passes.schedule.choose_blocks import for_threads
from pallasite.passes.schedule.exact_blocks import exact_blocks
from pallasite.passes.schedule.merge_k_steps import merge_k_rounds, merge_k_steps
from pallasite.passes.schedule.row_strips import row_strips
from pallasite.passes.schedule.wide_steps import wide_steps
from pallasite.target import Host

DEEPEST = 1024  # most steps of k between reading and writing sums
LEAST_MASK = 1024  # elements of a mask from which a branch pays off


def passes_for(host: Host, batch_invariant: bool = False) -> tuple[Pass, ...]:
    """The passes before LLVM text for this CPU."""
    computed = host.l2_bytes // 8  # of a computed tile, so that it stays in L2
    strip = host.l1_bytes // 3  # of a tile, so that those of one row's code stay in L1
    blocks = partial(for_threads, threads=host.threads, nanoseconds=nanoseconds)
    same = (Pass("rows_uncounted", rows_uncounted),) if batch_invariant else ()
    # The last rows of an array would be summed as a block of fewer rows is.
    exact = () if batch_invariant else (Pass("exact_blocks", exact_blocks),)
    return (
        *same,
        Pass("matrix_units", write_out),
        Pass("own_inputs", own_inputs),
        # Before blocks are chosen: what they are chosen by is what is left of the work.
        Pass("equal_factors", equal_factors),
        Pass("one_hots", one_hots),
        *exact,
        Pass("canonicalize", canonicalize, if_changed=True),
        Pass("choose_blocks", blocks),
        Pass("canonicalize", canonicalize, if_changed=True),
        Pass("place_windows", place_windows),
        Pass("guard_bounds", guard_bounds),
        Pass("unmasked_steps", partial(unmasked_steps, least=LEAST_MASK)),
        Pass(
            "merge_k_steps",
            partial(merge_k_steps, deepest=DEEPEST, most_bytes=computed),
        ),
        Pass("merge_k_rounds", partial(merge_k_rounds, most_bytes=computed)),
        Pass("wide_steps", partial(wide_steps, most_bytes=computed)),
        # Merging steps and loops leaves constants to fold.
        Pass("known_comparisons", known_comparisons),
        Pass("scratch_values", scratch_values),
        Pass("legalize", partial(legalize, native=is_native, backend="cpu")),
        Pass("row_strips", partial(row_strips, most_bytes=strip)),
        Pass("share_programs", share_programs),
        Pass("fuse_dot_sums", fuse_dot_sums),
        Pass("pack_once", pack_once),
        Pass("plan_memory", plan_memory),
    )


class CpuBackend:
    """Compiles kernels to machine code for this computer."""

    name = "cpu"
    platforms = ("cpu",)
    exports = False  # machine code belongs to this process
    native = NATIVE

    def passes(self, options: Options) -> Sequence[Pass]:
        return passes_for(target.host(), options.batch_invariant)

    def stages(self, options: Options) -> Sequence[Stage]:
        return (
            Stage("llvm", partial(make_llvm, lines=options.lines)),
            Stage("asm", compiler.make_assembly, is_view=True),
            Stage("object", compiler.make_object),
        )

    def launch(self, compiled: Compiled) -> Launch:
        kernel = compiled.kernel
        identity = _identity(kernel, compiled.options)
        code = compiler.stored_object(identity, lambda: compiled["object"])
        key = compiler.short_name(identity)
        address, owner = compiler.load(key, code)
        owning = own_inputs(kernel)
        return Launch(
            target=f"pallasite_cpu_{key}",
            config={},
            api_version=4,
            aliases=owning.aliases,
            # Effects are kept even if the results are unused.
            has_side_effect=_is_seen(kernel),
            handler=address,
            keep_alive=owner,
            scratch_results=own_results(owning, kernel.num_outputs),
        )

    def resources(self, compiled: Compiled) -> Sequence[Resource]:
        return ()  # LLVM allocates registers and stack

    def version(self) -> str:
        return f"cpu 1, {compiler.version()}"

    def missing(self, has_device: bool) -> str:
        del has_device
        found = importlib.util.find_spec("llvmlite") is not None
        return "" if found else "llvmlite is not installed: pip install llvmlite"


def make_llvm(scheduled: str, lines: bool = False) -> str:
    """The LLVM module of a scheduled kernel."""
    return emit_kernel(scheduled_kernel(scheduled), lines)


def llvm_text(kernel: Kernel) -> str:
    """The LLVM module of any kernel."""
    return emit_kernel(run(kernel, passes_for(target.host())))


def _identity(kernel: Kernel, options: Options) -> str:
    # The messages of checks name the source line.
    text = print_kernel(kernel, locs=True) if _is_seen(kernel) else kernel.text
    return compiler.identity(text + "\nbatch invariant" * options.batch_invariant)


def _is_seen(kernel: Kernel) -> bool:
    """Whether it has effects besides its results: prints and checks."""
    return any(op.name in DEBUG_RULES for op in walk(kernel.body))


BACKEND = CpuBackend()
