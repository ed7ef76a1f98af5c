"""The Triton backend: tile IR to TTIR, compiled and run by XLA on NVIDIA GPUs.

Reading order: `BACKEND` below, `passes/schedule/gpu_blocks.py` (blocks that fit the
chip), `passes/lower/promote.py` (grid to programs and loops, refs to values),
`launch.py` (warps, stages, program order), `emit.py` and the op families next to it.
XLA embeds Triton's compiler, so neither the triton package nor any CUDA tool is needed.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pallasite.backends.base import (
    Compiled,
    Launch,
    Options,
    Resource,
    Stage,
    scheduled_kernel,
    stored_launch,
)
from pallasite.backends.triton import emit
from pallasite.backends.triton.bf16_pieces import bf16_pieces
from pallasite.backends.triton.fill_in_parts import fill_in_parts
from pallasite.backends.triton.flat_indices import flat_indices
from pallasite.backends.triton.integer_dots import integer_dots
from pallasite.backends.triton.launch import STAGES, WARPS, schedule_launch
from pallasite.backends.triton.prints import WORDS, reader, sites_of
from pallasite.backends.triton.reload_operands import reload_operands
from pallasite.backends.triton.reshaped_loads import reshaped_loads
from pallasite.backends.triton.schedule import check_types, is_native
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.lower.filled_slots import filled_slots
from pallasite.passes.lower.legalize import legalize
from pallasite.passes.lower.matrix_units import write_out
from pallasite.passes.lower.own_inputs import own_inputs, own_results
from pallasite.passes.lower.place_windows import place_windows
from pallasite.passes.lower.plain_copies import plain_copies
from pallasite.passes.lower.promote import promote
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.edge_fills import edge_fills
from pallasite.passes.normal.exact_factors import exact_factors
from pallasite.passes.normal.loop_steps import loop_steps
from pallasite.passes.normal.sums_of_products import sums_of_products
from pallasite.passes.normal.untransposed import untransposed
from pallasite.passes.optimise.added_products import added_products
from pallasite.passes.optimise.carried_shapes import carried_shapes
from pallasite.passes.optimise.early_loads import early_loads
from pallasite.passes.optimise.fold_exp2 import fold_exp2
from pallasite.passes.optimise.guard_bounds import guard_bounds
from pallasite.passes.optimise.guard_range import guard_range
from pallasite.passes.optimise.hoist import hoist
from pallasite.passes.optimise.known_recurrences import known_recurrences
from pallasite.passes.optimise.known_scans import known_scans
from pallasite.passes.optimise.one_hots import one_hot_reads
from pallasite.passes.optimise.sink_loads import sink_loads
from pallasite.passes.optimise.split_accesses import split_accesses
from pallasite.passes.run import Pass
from pallasite.passes.schedule.gpu_blocks import for_gpu
from pallasite.passes.schedule.joined_windows import joined_windows
from pallasite.passes.schedule.ordered_sums import ordered_sums
from pallasite.passes.schedule.previous_blocks import previous_blocks
from pallasite.passes.schedule.shifted_parts import shifted_parts
from pallasite.passes.schedule.whole_rows import whole_rows
from pallasite.target import GPU_PLATFORMS, Gpu, usual

TARGET = "__gpu$xla.gpu.triton"


NATIVE_OPS = frozenset(emit.RULES)
PASSES = (
    Pass("place_windows", place_windows),
    Pass("plain_copies", plain_copies),
    Pass("flat_indices", flat_indices),
    Pass("integer_dots", integer_dots),
    Pass(
        "legalize",
        partial(legalize, native=partial(is_native, NATIVE_OPS), backend="triton"),
    ),
    Pass("canonicalize", canonicalize),
    Pass("promote", promote),
    Pass("guard_bounds", guard_bounds),
    # What a guard kept in the loop can now be hoisted.
    Pass("hoist", hoist, if_changed=True),
    Pass("canonicalize", canonicalize, if_changed=True),
    Pass("carried_shapes", carried_shapes),
    Pass("guard_range", guard_range),
    Pass("fold_exp2", fold_exp2),
    Pass("sink_loads", sink_loads),
    Pass("fill_in_parts", fill_in_parts),
    Pass("reshaped_loads", reshaped_loads),
    Pass("early_loads", early_loads),
)


class TritonBackend:
    """See `backends/base.py` for what the members mean."""

    name = "triton"
    platforms = GPU_PLATFORMS
    exports = True
    native = NATIVE_OPS

    def passes(self, options: Options) -> Sequence[Pass]:
        params = options.compiler_params
        chip = _chip(options)
        tuned = bool(params.get("num_warps") or params.get("num_stages"))
        same = options.batch_invariant
        blocks = partial(for_gpu, chip=chip, tuned=tuned, batch_invariant=same)
        fitted = partial(reload_operands, params=params, chip=chip)
        launch = partial(schedule_launch, params=params, chip=chip)
        whole = partial(whole_rows, chip=chip, endless=same)
        rows = () if tuned else (Pass("whole_rows", whole),)
        return (
            Pass("filled_slots", filled_slots),
            *rows,
            Pass("check_types", partial(check_types, chip=chip)),
            Pass("own_inputs", own_inputs),
            Pass("untransposed", untransposed),
            Pass("matrix_units", write_out),
            Pass("known_recurrences", known_recurrences),
            Pass("known_scans", known_scans),
            Pass("ordered_sums", ordered_sums),
            Pass("previous_blocks", previous_blocks),
            Pass("joined_windows", joined_windows),
            Pass("shifted_parts", shifted_parts),
            Pass("split_accesses", split_accesses),
            Pass("one_hots", one_hot_reads),
            Pass("sums_of_products", sums_of_products),
            Pass("added_products", added_products),
            Pass("exact_factors", exact_factors),
            Pass("loop_steps", loop_steps),
            Pass("edge_fills", edge_fills),
            Pass("choose_blocks", blocks),
            Pass("canonicalize", canonicalize, if_changed=True),
            Pass("bf16_pieces", bf16_pieces),
            *PASSES,
            Pass("reload_operands", fitted),
            Pass("launch", launch),
        )

    def stages(self, options: Options) -> Sequence[Stage]:
        chip = _chip(options)
        what = {
            "shared_bytes": chip.shared.bytes,
            "wave": chip.wave,
            "amd": chip.is_amd,
        }
        make = partial(make_ttir, lines=options.lines, **what)
        return (Stage("ttir", make),)

    def launch(self, compiled: Compiled) -> Launch:
        return stored_launch(compiled, partial(self._launch, compiled))

    def _launch(self, compiled: Compiled) -> Launch:
        scheduled, options = compiled.scheduled, compiled.options
        chosen = find_pipeline(scheduled).attrs
        config = {
            "name": emit.function_name(scheduled),
            "ir": compiled["ttir"],
            "num_stages": np.int32(chosen[STAGES]),
            "num_warps": np.int32(chosen[WARPS]),
            "grid_x": np.int32(max(1, prod(emit.program_grid(scheduled)))),
            "grid_y": np.int32(1),
            "grid_z": np.int32(1),
            "debug": bool(options.debug),
        }
        scratch, sites = emit.scratch_of(scheduled), sites_of(scheduled)
        return Launch(
            TARGET,
            config,
            api_version=4,
            symbol=emit.function_name(scheduled),
            aliases=scheduled.aliases,
            has_side_effect=bool(sites),
            scratch_results=(
                *own_results(compiled.scheduled, compiled.imported.num_outputs),
                *((s.shape, s.numpy_dtype) for s in scratch),
            ),
            log_words=WORDS if sites else 0,
            read_log=reader(sites) if sites else None,
            is_versioned=True,
        )

    def resources(self, compiled: Compiled) -> Sequence[Resource]:
        return ()  # Triton's compiler allocates registers and shared memory

    def version(self) -> str:
        return "triton-1"

    def missing(self, has_device: bool) -> str:
        text = "XLA compiles Triton's text only where there is a GPU"
        return "" if has_device else text


def _chip(options: Options) -> Gpu:
    """The GPU compiled for; if unknown, one with much shared memory."""
    chip = options.chip if isinstance(options.chip, Gpu) else usual("cuda")
    assert isinstance(chip, Gpu)
    return chip


def make_ttir(scheduled: str, wave: int, **how: Any) -> str:
    """The TTIR module of a scheduled kernel; `wave`: threads of a warp, `how`: as in
    `emit.emit`."""
    kernel = scheduled_kernel(scheduled)
    threads = wave * find_pipeline(kernel).attrs.get(WARPS, 0)
    return emit.emit(kernel, threads=threads, **how)


BACKEND = TritonBackend()
