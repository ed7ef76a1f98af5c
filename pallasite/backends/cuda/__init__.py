"""The `cuda` backend: IR to CUDA C++ to PTX by NVRTC, launched by XLA on NVIDIA GPUs.

Reading order: `BACKEND` below, `layouts.py` (how a tile is distributed over threads),
`assign.py` (which tile has which layout), `emit.py` and the op families next to it,
`nvrtc.py`. The text has no #include, so the user needs no CUDA headers; XLA assembles
the PTX, so no CUDA tool is needed either.
"""

import json
import re
from collections.abc import Sequence
from functools import partial

from pallasite.backends.base import (
    Compiled,
    Launch,
    Options,
    Resource,
    Stage,
    scheduled_kernel,
    stored_launch,
)
from pallasite.backends.cuda import emit, nvrtc
from pallasite.backends.cuda.ampere import in_registers
from pallasite.backends.cuda.author_text import without_references
from pallasite.backends.cuda.authored import (
    all_at_once,
    one_role,
    rounds,
    share_core,
    stores_at_once,
)
from pallasite.backends.cuda.before_waits import before_waits
from pallasite.backends.cuda.fewer_dims import fewer_dims
from pallasite.backends.cuda.instruction_sets import instruction_set
from pallasite.backends.cuda.late_waits import late_waits
from pallasite.backends.cuda.overlap import overlap
from pallasite.backends.cuda.products import (
    MOST_COLUMNS,
    MOST_SUMS,
    SHARED_REGISTERS,
)
from pallasite.backends.cuda.repack import factors_before, forms_of, repack
from pallasite.backends.cuda.rows_out import rows_out
from pallasite.backends.cuda.scaled_operands import is_scaled, scaled_operands
from pallasite.backends.cuda.specialize import specialize
from pallasite.backends.cuda.streams import streams
from pallasite.backends.cuda.turned import turn_tiles
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Op
from pallasite.passes.lower.device_numbers import ask_for_device_numbers
from pallasite.passes.lower.filled_slots import filled_slots
from pallasite.passes.lower.legalize import legalize
from pallasite.passes.lower.matrix_units import write_out
from pallasite.passes.lower.own_inputs import own_inputs, own_results
from pallasite.passes.lower.place_windows import place_windows
from pallasite.passes.lower.plain_copies import plain_copies
from pallasite.passes.lower.promote import promote
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.columns import columns
from pallasite.passes.normal.edge_fills import edge_fills
from pallasite.passes.normal.exact_factors import exact_factors
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.normal.order import order
from pallasite.passes.normal.replicated import replicated
from pallasite.passes.normal.results_in_scratch import results_in_scratch
from pallasite.passes.normal.sums_of_products import sums_of_products
from pallasite.passes.normal.untransposed import untransposed
from pallasite.passes.optimise.added_products import added_products
from pallasite.passes.optimise.fold_exp2 import fold_exp2
from pallasite.passes.optimise.guard_bounds import guard_bounds
from pallasite.passes.optimise.hoist import hoist
from pallasite.passes.optimise.scale_after_max import scale_after_max
from pallasite.passes.optimise.scale_after_sum import scale_after_sum
from pallasite.passes.optimise.sink_loads import sink_loads
from pallasite.passes.optimise.split_accesses import split_accesses
from pallasite.passes.optimise.unmasked_steps import unmasked_loops
from pallasite.passes.run import Pass
from pallasite.passes.schedule.gpu_blocks import SHORT_TILE, Tiles, for_gpu
from pallasite.passes.schedule.row_strips import row_strips
from pallasite.passes.schedule.whole_rows import whole_rows
from pallasite.target import GPUS, Gpu

TARGET = "__gpu$xla.gpu.ptx"
# Accumulators and computed operands of matmuls are in registers without padding; two
# computing warpgroups have nine tenths of those (`specialize.REGISTERS`), 64 rows at a
# time. While a warpgroup that is alone waits or stores, the tensor cores are idle.
TILES = Tiles(
    register_share=0.875,
    stages=2,
    stages_alone=4,
    padded=False,
    rows=SHORT_TILE,
    most_sums=MOST_SUMS,
    keeps_operands=True,
    least_side=64,
    most_columns=MOST_COLUMNS,
    lone=1.15,
    reloads=False,
    of_thread=224,
    of_shared_thread=SHARED_REGISTERS[2],
    fills=True,
)
MASK_ELEMENTS = 1024  # from which unmasked iterations are worth a loop of their own
STRIP_BYTES = 32 << 10  # of a tile, so that it takes few registers of 512 threads
# What kernels may contain; `specialize` decomposes dots.
NATIVE_OPS = frozenset({"dot", *emit.RULES})


def _is_native(op: Op) -> bool:
    integers = op.operands and not op.operands[0].type.dtype.is_float
    if op.name == "pow" and integers:
        return False
    if op.name == "integer_pow" and integers and op.attrs["y"] < 0:
        return False
    return op.name in NATIVE_OPS


# From blocks to tiles that loops carry, the same for every chip.
WITHOUT_BLOCKS = (
    Pass("place_windows", place_windows),
    Pass("plain_copies", plain_copies),
    Pass("without_references", without_references),
    Pass("device_numbers", ask_for_device_numbers),
    Pass("stores_at_once", stores_at_once),
    Pass("legalize", partial(legalize, native=_is_native, backend="cuda")),
    Pass("row_strips", partial(row_strips, most_bytes=STRIP_BYTES)),
    Pass("canonicalize", canonicalize),
    Pass("promote", promote),
    Pass("guard_bounds", guard_bounds),
    # What a guard kept in the loop can now be hoisted.
    Pass("hoist", hoist, if_changed=True),
    Pass("canonicalize", canonicalize, if_changed=True),
    Pass("fold_exp2", fold_exp2),
    Pass("scale_after_sum", scale_after_sum),
    Pass("turn_tiles", turn_tiles),
    Pass("canonicalize", canonicalize, if_changed=True),
    Pass("fewer_dims", fewer_dims),
    Pass("rows_out", rows_out),
)


def passes_for(chip: Gpu, batch_invariant: bool = False) -> tuple[Pass, ...]:
    """The passes before CUDA C++ for a chip."""
    same = batch_invariant
    whole = partial(whole_rows, chip=chip, endless=same)
    choose = partial(for_gpu, chip=chip, tiles=TILES, batch_invariant=same)
    blocks = lambda kernel: kernel if is_scaled(kernel, chip) else choose(kernel)
    return (
        Pass("filled_slots", filled_slots),
        Pass("untransposed", untransposed),
        Pass("whole_rows", whole),
        Pass("own_inputs", own_inputs),
        Pass("matrix_units", write_out),
        Pass("split_accesses", split_accesses),
        # A ring's slot is taken from where a tile is loaded on.
        Pass("order", order, if_changed=True),
        Pass("sums_of_products", sums_of_products),
        Pass("added_products", added_products),
        Pass("exact_factors", exact_factors),
        Pass("loop_steps", loop_steps),
        Pass("factors_before", partial(factors_before, chip=chip, always=same)),
        Pass("edge_fills", edge_fills),
        Pass("results_in_scratch", results_in_scratch),
        # Statistics that were in results are columns now.
        Pass("replicated", replicated, if_changed=True),
        Pass("columns", columns, if_changed=True),
        Pass("choose_blocks", blocks),
        Pass("canonicalize", canonicalize, if_changed=True),
        *WITHOUT_BLOCKS,
        Pass("repack", partial(repack, chip=chip, always=same)),
        Pass("scaled_operands", partial(scaled_operands, chip=chip)),
        Pass("overlap", overlap),
        Pass("unmasked_loops", partial(unmasked_loops, least=MASK_ELEMENTS)),
        Pass("canonicalize", canonicalize, if_changed=True),
        Pass("scale_after_max", scale_after_max),
        Pass("before_waits", before_waits),
        Pass("in_registers", in_registers),
        Pass("specialize", partial(specialize, chip=chip)),
        Pass("one_role", partial(one_role, chip=chip)),
        Pass("share_core", partial(share_core, chip=chip)),
        Pass("rounds", partial(rounds, chip=chip)),
        Pass("all_at_once", partial(all_at_once, chip=chip)),
        Pass("late_waits", late_waits),
        Pass("sink_loads", sink_loads),
        Pass("streams", partial(streams, chip=chip)),
    )


class CudaBackend:
    """See `backends/base.py` for what the members mean."""

    name: str = "cuda"
    platforms: tuple[str, ...] = ("cuda",)
    exports = False  # PTX is compiled for the chip at hand
    native: frozenset[str] = NATIVE_OPS

    def passes(self, options: Options) -> Sequence[Pass]:
        return passes_for(_chip(options), options.batch_invariant)

    def stages(self, options: Options) -> Sequence[Stage]:
        chip = _chip(options)
        arch = _arch(chip)
        approx = bool(options.compiler_params.get("approx_math"))
        most, lines = chip.shared.bytes, options.lines
        make = partial(make_cuda, shared_bytes=most, approx_math=approx, lines=lines)
        return (
            Stage("cuda", make),
            Stage(
                "ptx",
                partial(nvrtc.stored_ptx, arch=arch, lines=lines),
                begin=None if lines else partial(nvrtc.begin_ptx, arch=arch),
            ),
            Stage("ptxas", partial(nvrtc.report, arch=arch), is_view=True),
        )

    def launch(self, compiled: Compiled) -> Launch:
        return stored_launch(compiled, partial(self._launch, compiled))

    def _launch(self, compiled: Compiled) -> Launch:
        launched = emit.Launched.of(compiled["cuda"])
        if launched.devices > 1:
            raise UnsupportedError(
                "backend 'cuda' cannot launch a kernel that reaches other devices: "
                "XLA's call gives it the addresses of one",
                [("kernel", compiled.imported.name), ("devices", launched.devices)],
                compiled.imported.loc,
                "interpret=pl.Checked() runs it on host devices",
            )
        return Launch(
            TARGET,
            _config(launched, compiled["ptx"]),
            api_version=3,
            symbol=launched.name,
            aliases=compiled.scheduled.aliases,
            scratch_results=(
                *own_results(compiled.scheduled, compiled.imported.num_outputs),
                *(((n,), "uint8") for n in launched.scratch),
            ),
            operands=forms_of(compiled.imported, launched.repacked),
            result_forms=(None,) * len(compiled.imported.outputs),
            log_words=launched.semaphores,
        )

    def version(self) -> str:
        return f"cuda 1, {nvrtc.version()}"

    def missing(self, has_device: bool) -> str:
        del has_device  # XLA has no compiler of CUDA C++
        return "" if nvrtc.is_available() else f"{nvrtc.MISSING}: {nvrtc.SOURCE}"

    def resources(self, compiled: Compiled) -> Sequence[Resource]:
        chip = _chip(compiled.options)
        shared = emit.Launched.of(compiled["cuda"]).shared_bytes
        found = [Resource("shared memory", shared, chip.shared.bytes)]
        registers = re.search(r"Used (\d+) registers", compiled["ptxas"])
        if registers is not None:
            most = chip.registers_per_thread
            found.append(Resource("registers", int(registers[1]), most, "per thread"))
        spills = re.search(r"(\d+) bytes spill stores", compiled["ptxas"])
        if spills is not None and int(spills[1]):
            found.append(Resource("spilled registers", int(spills[1]), 0))
        return found


def _chip(options: Options) -> Gpu:
    """The GPU compiled for; if unknown, one of the most common kind."""
    return options.chip if isinstance(options.chip, Gpu) else GPUS["h100"]


def _arch(chip: Gpu) -> str:
    found = instruction_set(chip)  # features that only this generation of chips has
    return chip.arch if found is None else found.code


def _config(launched: emit.Launched, ptx: str) -> str:
    """What XLA reads: an MLIR dictionary attribute, as text."""
    numbers = {
        "grid_x": launched.programs,
        "grid_y": 1,
        "grid_z": 1,
        "block_x": launched.threads,
        "block_y": 1,
        "block_z": 1,
        "shared_mem_bytes": launched.shared_bytes,
    }
    fields = [f"name = {json.dumps(launched.name)}", 'kernel_type = "ptx"']
    fields.append(f"kernel_data = {_quoted(ptx)}")
    fields += [f"{key} = {value} : i32" for key, value in numbers.items()]
    return "{" + ", ".join(fields) + "}"


def _quoted(text: str) -> str:
    """A string as MLIR reads it."""
    kept = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + kept.replace("\n", "\\0A").replace("\t", "\\09") + '"'


def make_cuda(
    scheduled: str, shared_bytes: int, approx_math: bool = False, lines: bool = False
) -> str:
    """The CUDA C++ of a scheduled kernel."""
    return emit.emit(scheduled_kernel(scheduled), shared_bytes, approx_math, lines)


BACKEND = CudaBackend()
