"""What the passes did to a kernel, in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.passes.run import Step

# Passes that have a description; others are listed if the grid, a block or the number
# of matmuls changed.
WHAT = {
    "choose_blocks": "blocks chosen for the chip",
    "merge_k_steps": "steps along k merged",
    "merge_k_rounds": "rounds of a loop along k merged",
    "guard_bounds": "guards are bounds of loops",
    "unmasked_steps": "steps that no mask touches are apart",
    "unmasked_loops": "rounds that no mask touches are apart",
    "join_branches": "steps that branches kept apart are one piece of code",
    "join_products": "products with the same right side are one",
    "stagger_products": "products ahead of the vector code that uses them",
    "idle_windows": "windows stand still where a guard skips the step",
    "order_dims": "dimensions seen one by one are in front",
    "fit_windows": "blocks brought into the chip's tiles",
    "replicate_columns": "numbers per row kept in all lanes",
    "join_aliased": "an operand and a result share one window",
    "keep_on_chip": "arrays that are accessed directly kept on chip",
    "carry_types": "element types that the chip lacks carried in others",
    "bitcasts": "bitcasts between widths composed of others",
    "inner_pipelines": "inner pipelines are loops with copies in flight",
    "gathers": "gathers are loops of slices",
    "dots": "products brought into the chip's form",
    "legalize": "operations that the backend lacks composed of others",
    "scratch_values": "scratch that every step overwrites first became values",
    "row_strips": "tiles computed in strips of rows",
    "share_programs": "programs divided among threads",
    "fuse_dot_sums": "sums fused into products",
    "pack_once": "operands of products packed once for several programs",
    "promote": "what is carried along sequential axes is in registers",
    "hoist": "what does not change moved out of loops",
    "fold_exp2": "factors folded into exponentials of base two",
    "repack": "arrays brought into another order before the call",
    "overlap": "products overlap with the arithmetic between them",
    "scale_after_max": "scores are scaled after their maximum is taken",
    "scale_after_sum": "sums of products are scaled instead of their factors",
    "specialize": "warps that copy and warps that multiply",
    "one_role": "one role for all warps",
    "turn_tiles": "tiles turned to the side they are used from",
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
        found.append(f"the grid {sizes(old.grid)} is programs and loops")
    products = [sum(op.name == "dot" for op in walk(k.body)) for k in (before, after)]
    if products[0] != products[1] and all(products):
        found.append(f"products in the code: {products[0]}, now {products[1]}")
    return found


def _pipeline(kernel: Kernel) -> Pipeline | None:
    found = [op for op in kernel.body.ops if op.name == "pipeline"]
    return Pipeline.of(found[0]) if len(found) == 1 else None


def _blocks(old: Pipeline, new: Pipeline) -> Iterable[str]:
    shapes = {s.array.name: s.window.block_shape for s in old.shown}
    for shown in new.shown:
        name, shape = shown.array.name, shown.window.block_shape
        if name and shapes.get(name, shape) != shape:
            yield f"block of {name} {shape_text(shapes[name])} is {shape_text(shape)}"


def sizes(grid: Sequence[int | None]) -> str:
    return " x ".join("?" if n is None else str(n) for n in grid) or "of one step"


def shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
