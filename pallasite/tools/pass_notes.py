"""What the passes did to a kernel, in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.run import Step

# Passes that have a description; others are listed if the grid, a block or the number
# of matmuls changed.
WHAT = {
    "whole_rows": "steps along rows merged: blocks are whole rows",
    "known_recurrences": "recurrences of all rows at once computed row by row",
    "carried_shapes": "loops carry tiles in the shape that they compute",
    "known_scans": "running sums and maxima recognised as scans",
    "one_hots": "products with comparisons of indices add or load the rows they name",
    "choose_blocks": "blocks chosen for the chip",
    "merge_k_steps": "steps along k merged",
    "merge_k_rounds": "iterations of a loop along k merged",
    "guard_bounds": "guards turned into loop bounds",
    "unmasked_steps": "steps without a mask run in a loop of their own",
    "unmasked_loops": "iterations without a mask run in a loop of their own",
    "join_branches": "branches of the same form merged into one",
    "join_products": "matmuls with the same right operand merged",
    "stagger_products": "matmuls moved ahead of the vector code that uses them",
    "idle_windows": "windows do not move in steps that a guard skips",
    "order_dims": "dimensions of block size 1 moved to the front",
    "fit_windows": "blocks reshaped to the chip's tiles",
    "replicate_columns": "per-row values replicated in all lanes",
    "join_aliased": "an operand and a result share one window",
    "keep_on_chip": "directly accessed arrays kept on chip",
    "carry_types": "unsupported element types carried in others",
    "bitcasts": "bitcasts between widths decomposed",
    "inner_pipelines": "inner pipelines turned into loops with async copies",
    "flat_indices": "gathers and scatters done on flattened tiles",
    "gathers": "gathers turned into loops of slices",
    "integer_dots": "matmuls of integers computed from matmuls of bytes",
    "dots": "matmuls rewritten in the chip's form",
    "legalize": "unsupported operations decomposed",
    "scratch_values": "scratch that every step overwrites turned into values",
    "row_strips": "tiles computed in strips of rows",
    "share_programs": "programs split among threads",
    "fuse_dot_sums": "additions fused into matmuls",
    "pack_once": "matmul operands packed once for several programs",
    "promote": "blocks and scratch carried along sequential axes promoted to registers",
    "hoist": "loop-invariant code hoisted",
    "fold_exp2": "factors folded into exponentials of base two",
    "repack": "arrays copied into another layout before the call",
    "overlap": "matmuls overlapped with the arithmetic between them",
    "scale_after_max": "scaling moved after the maximum",
    "scale_after_sum": "scaling moved from matmul operands to the accumulator",
    "specialize": "warp specialisation: some warps copy, others multiply",
    "one_role": "one role for all warps",
    "turn_tiles": "tiles transposed to the layout they are used in",
}


@dataclass(frozen=True)
class PassNote:
    """One pass that changed the kernel."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def notes(kernel: Kernel, steps: Iterable[Step]) -> tuple[PassNote, ...]:
    """What each pass did, starting from `kernel`."""
    found = []
    for step in steps:
        if not step.changed:
            continue
        parts = [WHAT[step.name]] if step.name in WHAT else []
        parts += differences(kernel, step.kernel)
        if parts:
            found.append(PassNote(step.name, "; ".join(parts)))
        kernel = step.kernel
    return tuple(found)


def differences(before: Kernel, after: Kernel) -> list[str]:
    """Differences in the grid, the blocks and the number of matmuls."""
    old, new = _pipeline(before), _pipeline(after)
    found = []
    if old is not None and new is not None:
        if old.grid != new.grid:
            found.append(f"grid {sizes(old.grid)} is {sizes(new.grid)}")
        found += _blocks(old, new)
    elif old is not None:
        found.append(f"the grid {sizes(old.grid)} split into programs and loops")
    products = [sum(op.name == "dot" for op in walk(k.body)) for k in (before, after)]
    if products[0] != products[1] and all(products):
        found.append(f"matmuls in the code: {products[0]}, now {products[1]}")
    return found


def _pipeline(kernel: Kernel) -> Pipeline | None:
    found = [op for op in kernel.body.ops if op.name == "pipeline"]
    return Pipeline.of(found[0]) if len(found) == 1 else None


def _blocks(old: Pipeline, new: Pipeline) -> Iterable[str]:
    shapes = {s.array.name: s.window.block_shape for s in old.shown}
    for shown in new.shown:
        name, shape = shown.array.name, shown.window.block_shape
        if name and shapes.get(name, shape) != shape:
            yield (
                f"block of {name} {shape_text(shapes[name])} is now {shape_text(shape)}"
            )


def sizes(grid: Sequence[int | None]) -> str:
    return " x ".join("?" if n is None else str(n) for n in grid) or "of one step"


def shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
