"""The TPU backend: tile IR -> Mosaic MLIR -> `tpu_custom_call`.

Reading order: what no core has is refused by `limits.py`. What the chip lacks is made
of what it has by passes, in this order: `device_numbers.py`, `prints.py`,
`carried_types.py` (element types), `resident.py` and `fetch_slices.py`
(arrays in main memory used directly), `fit_windows.py` (blocks that miss the tiles),
`aliased.py` (an operand and a result that are one memory), `cores.py` (two cores),
`vmem.py` (room), `schedule.py` (inner pipelines become loops), `gathers.py`,
`repeats.py`, `dots.py`. Then `emit.py` (module, grid and windows), `control.py`,
`memory.py`, `tiles.py`, `elementwise.py` (ops by family), and `compile.py` (what XLA is
handed). libtpu compiles the result, with or without a TPU: see `runtime/aot.py`.
"""

from collections.abc import Sequence
from functools import cached_property, partial

from pallasite.backends.base import (
    Compiled,
    Launch,
    Options,
    Resource,
    Stage,
    scheduled_kernel,
)
from pallasite.ir.nodes import Op, walk
from pallasite.passes.run import Pass
from pallasite.target import Tpu

LANES = 128  # of a vector register of every TPU
SUBLANE_GATHER = 5  # the first generation whose cores reorder rows of a register
LEAST_MASK = 1 << 14  # elements of a mask that is worth a branch
FEW_ROWS = 4  # times the rows of a matrix unit: those that wait for it to be loaded
JOINED_SHARE = 0.2  # of on-chip memory, for a product that was several
# Multiplications of scores while the vector unit computes those before them: of 512
# queries and keys, 128 wide. With fewer it falls behind; with more, scores spill.
AHEAD = 512 * 512 * 128
MOST_SHORT = 512  # operations, in the body of a loop without matmuls
MOST_VERSIONS = 64_000  # operations on vector registers in all versions of a body


class TpuBackend:
    """See `backends.base.Backend`."""

    name = "tpu"
    platforms = ("tpu",)
    exports = True

    @cached_property
    def native(self) -> frozenset[str]:
        from pallasite.backends.tpu.emit import native_ops

        return native_ops() | {"scatter", "debug_print"}  # by passes of its own

    def passes(self, options: Options) -> Sequence[Pass]:
        from pallasite.backends.tpu.aliased import join_aliased
        from pallasite.backends.tpu.carried_types import carry_types
        from pallasite.backends.tpu.carry_rows import carry_rows
        from pallasite.backends.tpu.compile import core_of
        from pallasite.backends.tpu.cores import share_between_cores
        from pallasite.backends.tpu.dots import plain_dots
        from pallasite.backends.tpu.emit import is_native
        from pallasite.backends.tpu.fetch_slices import fetch_slices
        from pallasite.backends.tpu.fit_windows import fit_windows
        from pallasite.backends.tpu.gathers import loop_over_gathers
        from pallasite.backends.tpu.limits import check_limits
        from pallasite.backends.tpu.matrix_units import schedule_units
        from pallasite.backends.tpu.order_axes import order_axes
        from pallasite.backends.tpu.order_dims import order_dims
        from pallasite.backends.tpu.prints import add_log
        from pallasite.backends.tpu.repeats import join_repeats
        from pallasite.backends.tpu.resident import keep_on_chip
        from pallasite.backends.tpu.schedule import schedule
        from pallasite.backends.tpu.vmem import check_vmem
        from pallasite.passes.lower.device_numbers import ask_for_device_numbers
        from pallasite.passes.lower.legalize import legalize
        from pallasite.passes.lower.narrow_integers import narrow_integers
        from pallasite.passes.lower.place_windows import place_windows
        from pallasite.passes.normal.canonicalize import canonicalize
        from pallasite.passes.normal.columns import columns
        from pallasite.passes.normal.consecutive_indices import consecutive_indices
        from pallasite.passes.normal.edge_fills import edge_fills
        from pallasite.passes.normal.known_comparisons import known_comparisons
        from pallasite.passes.normal.narrow_windows import narrow_windows
        from pallasite.passes.normal.replicated import replicated
        from pallasite.passes.normal.results_in_scratch import results_in_scratch
        from pallasite.passes.optimise.guard_bounds import guard_bounds
        from pallasite.passes.optimise.idle_windows import idle_windows
        from pallasite.passes.optimise.known_scans import known_scans
        from pallasite.passes.optimise.replicate_columns import replicate_columns
        from pallasite.passes.optimise.unmasked_steps import unmasked_steps

        chip = options.chip if isinstance(options.chip, Tpu) else None
        if core_of(options) != "tc":
            return self._sparse_passes(chip)
        asked = options.compiler_params.get("vmem_limit_bytes")
        limits = partial(check_limits, chip=chip, vmem_limit=asked)
        return (
            Pass("matrix_units", partial(schedule_units, chip=chip)),
            Pass("narrow_integers", narrow_integers),
            Pass("check_limits", limits),
            Pass("device_numbers", ask_for_device_numbers),
            Pass("prints", add_log),
            Pass("bitcasts", partial(legalize, native=_keeps_width, backend=self.name)),
            Pass("carry_types", carry_types),
            Pass("keep_on_chip", keep_on_chip),
            Pass("overlapping_windows", partial(narrow_windows, overlapping=True)),
            Pass("fetch_slices", partial(fetch_slices, chip=chip)),
            Pass("known_scans", known_scans),
            Pass("order_axes", order_axes),
            Pass("order_dims", order_dims),
            # Statistics that were in results are columns now.
            Pass("results_in_scratch", partial(results_in_scratch, least=2)),
            Pass("replicated", replicated, if_changed=True),
            Pass("columns", columns, if_changed=True),
            Pass("edge_fills", edge_fills),
            *self._blocks(options),
            Pass("replicate_columns", partial(replicate_columns, lanes=LANES)),
            Pass("known_comparisons", known_comparisons),
            Pass("canonicalize", canonicalize),
            Pass("place_windows", place_windows),
            Pass("guard_bounds", guard_bounds),
            Pass("unmasked_steps", partial(unmasked_steps, least=LEAST_MASK)),
            Pass("idle_windows", idle_windows),
            *self._versions(chip, asked),
            Pass("fit_windows", fit_windows),
            Pass("join_aliased", join_aliased),
            Pass("share_cores", partial(share_between_cores, chip=chip)),
            Pass("check_vmem", partial(check_vmem, chip=chip, limit=asked)),
            Pass("inner_pipelines", schedule),
            Pass("consecutive_indices", consecutive_indices),
            Pass("gathers", loop_over_gathers),
            Pass("repeats", join_repeats),
            *self._short_loops(chip),
            Pass("dots", partial(plain_dots, chip=chip)),
            Pass("legalize", partial(legalize, native=is_native, backend=self.name)),
            Pass("carry_rows", carry_rows),
        )

    def _sparse_passes(self, chip: Tpu | None) -> Sequence[Pass]:
        """Of kernels for SparseCores: arrays are whole, and copied by the kernel."""
        from pallasite.backends.tpu import sparse_core
        from pallasite.backends.tpu.schedule import schedule
        from pallasite.passes.lower.legalize import legalize
        from pallasite.passes.lower.narrow_integers import narrow_integers
        from pallasite.passes.normal.canonicalize import canonicalize
        from pallasite.passes.normal.known_comparisons import known_comparisons

        native = sparse_core.is_native
        return (
            Pass("check_chip", partial(sparse_core.check_chip, chip=chip)),
            Pass("narrow_integers", narrow_integers),
            Pass("known_comparisons", known_comparisons),
            Pass("canonicalize", canonicalize),
            Pass("inner_pipelines", schedule),
            Pass("legalize", partial(legalize, native=native, backend=self.name)),
            Pass("check_vectors", partial(sparse_core.check_vectors, chip=chip)),
        )

    def _blocks(self, options: Options) -> Sequence[Pass]:
        """Blocks for which there is room, and larger ones where it is known to be."""
        from pallasite.backends.tpu.vmem import cut_if_large
        from pallasite.passes.schedule.tpu_blocks import for_tpu, unroll_for_tpu

        if not isinstance(options.chip, Tpu):
            return (Pass("choose_blocks", cut_if_large),)
        limit = options.compiler_params.get("vmem_limit_bytes")
        blocks = partial(for_tpu, chip=options.chip, vmem_bytes=limit)
        unroll = partial(unroll_for_tpu, chip=options.chip)
        return (Pass("choose_blocks", blocks), Pass("unroll_rounds", unroll))

    def _versions(self, chip: Tpu | None, vmem_bytes: int | None) -> Sequence[Pass]:
        """Steps without branches between them, where code may grow, and their order."""
        from pallasite.passes.normal.scratch_values import scratch_values
        from pallasite.passes.optimise.fold_exp2 import fold_exp2
        from pallasite.passes.optimise.join_branches import join_branches
        from pallasite.passes.optimise.join_products import join_products
        from pallasite.passes.optimise.stagger_products import stagger_products
        from pallasite.passes.schedule.tpu_blocks import code_size

        if chip is None:
            return ()
        size = partial(code_size, chip=chip)
        join = partial(join_branches, size=size, most=MOST_VERSIONS)
        passes = [
            Pass("join_branches", join),
            Pass("scratch_values", scratch_values),
            Pass("fold_exp2", fold_exp2),
        ]
        if chip.mxu_size > LANES:
            few_rows = FEW_ROWS * chip.mxu_size
            allowed = chip.scoped_vmem if vmem_bytes is None else vmem_bytes
            room = int(JOINED_SHARE * allowed)
            rows = partial(join_products, few_rows=few_rows, granule=LANES)
            passes.append(Pass("join_products", partial(rows, most_bytes=room)))
        stagger = partial(stagger_products, ahead=AHEAD)
        return (*passes, Pass("stagger_products", stagger))

    def _short_loops(self, chip: Tpu | None) -> Sequence[Pass]:
        from pallasite.passes.schedule.tpu_blocks import code_size
        from pallasite.passes.schedule.unroll_rounds import unroll_short

        if chip is None:
            return ()
        size = lambda body: sum(1 for _ in walk(body)) + code_size(body, chip)
        return (
            Pass("unroll_short", partial(unroll_short, size=size, most=MOST_SHORT)),
        )

    def stages(self, options: Options) -> Sequence[Stage]:
        from pallasite.backends.tpu.compile import core_of

        chip = options.chip
        old = isinstance(chip, Tpu) and chip.generation < SUBLANE_GATHER
        settings = {"debug": options.debug, "core": core_of(options)}
        make = partial(make_mosaic, **settings, turns_columns=old)
        return (Stage("mosaic", make),)

    def launch(self, compiled: Compiled) -> Launch:
        from pallasite.backends.tpu.compile import (
            call_config,
            core_of,
            input_fusion,
        )
        from pallasite.backends.tpu.fit_windows import CallArrays, warn_of_forms
        from pallasite.backends.tpu.prints import LANES, ROWS, reader, sites_of
        from pallasite.backends.tpu.remote import check_collective_id
        from pallasite.backends.tpu.vmem import limit_for
        from pallasite.passes.lower.device_numbers import talks_to_devices

        options, kernel = compiled.options, compiled.kernel
        arrays = CallArrays.of(compiled.scheduled, kernel)
        if not options.own:
            warn_of_forms(kernel, arrays)
        chip = options.chip if isinstance(options.chip, Tpu) else None
        sparse = core_of(options) != "tc"
        vmem = None if sparse else limit_for(compiled.scheduled, chip)
        sites = sites_of(kernel)
        check_collective_id(kernel, options.compiler_params)
        talks = talks_to_devices(kernel.body)
        allowed = input_fusion(options.compiler_params, kernel)
        fusible = [allowed[source] for source, _ in arrays.operands if allowed]
        return Launch(
            target="tpu_custom_call",
            config=call_config(compiled["mosaic"], options, vmem, talks, fusible),
            api_version=1,
            aliases=arrays.aliases,
            log_words=ROWS * LANES if sites else 0,
            log_shape=(ROWS, LANES),
            read_log=reader(sites) if sites else None,
            operands=None if arrays.as_they_are else arrays.operands,
            result_forms=arrays.results,
            has_side_effect=bool(options.compiler_params.get("has_side_effects")),
        )

    def version(self) -> str:
        from pallasite.backends.tpu.compile import DIALECT_VERSION

        return f"1+mosaic{DIALECT_VERSION}"

    def missing(self, has_device: bool) -> str:
        from pallasite.runtime import aot

        return "" if has_device else aot.missing()

    def resources(self, compiled: Compiled) -> Sequence[Resource]:
        from pallasite.backends.tpu.vmem import taken

        chip = compiled.options.chip
        used = taken(compiled.scheduled, chip if isinstance(chip, Tpu) else None)
        return (Resource("VMEM", *used),)


def _keeps_width(op: Op) -> bool:
    """False for bitcasts between types of two widths, which Mosaic has not.

    Their decompositions come before `carry_types`, which is about the types they have.
    """
    if op.name != "bitcast":
        return True
    before, after = op.operands[0].tile.dtype, op.result.tile.dtype
    is_any_bool = before.is_bool or after.is_bool
    return before.bits == after.bits or is_any_bool or max(before.bits, after.bits) > 32


def make_mosaic(
    scheduled: str, debug: bool = False, core: str = "tc", turns_columns: bool = False
) -> str:
    """The Mosaic module of a scheduled kernel, for a kind of core."""
    from pallasite.backends.tpu.emit import emit_module

    return emit_module(scheduled_kernel(scheduled), debug, core, turns_columns)


BACKEND = TpuBackend()
