"""The passes that bring a kernel into normal form; docs/normal_form.md defines it."""

from collections.abc import Callable

from pallasite.ir.nodes import Kernel
from pallasite.passes.normal.affine_numbers import affine_numbers
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.columns import columns
from pallasite.passes.normal.consecutive_indices import single_slices
from pallasite.passes.normal.counted_loops import counted_loops
from pallasite.passes.normal.folds import folds
from pallasite.passes.normal.guarded_starts import guarded_starts
from pallasite.passes.normal.guarded_stores import guarded_stores
from pallasite.passes.normal.guarded_updates import guarded_updates
from pallasite.passes.normal.idle_clamps import idle_clamps
from pallasite.passes.normal.joined_loops import joined_loops
from pallasite.passes.normal.known_clamps import known_clamps
from pallasite.passes.normal.known_comparisons import known_comparisons
from pallasite.passes.normal.loop_axes import loop_axes
from pallasite.passes.normal.masked_branches import masked_branches
from pallasite.passes.normal.masks import masks
from pallasite.passes.normal.narrow_windows import narrow_windows
from pallasite.passes.normal.order import order
from pallasite.passes.normal.pipeline_axes import pipeline_axes
from pallasite.passes.normal.positions import positions
from pallasite.passes.normal.products import products
from pallasite.passes.normal.program_order import program_order
from pallasite.passes.normal.replicated import replicated
from pallasite.passes.normal.rows_in_place import rows_in_place
from pallasite.passes.normal.scratch_parts import scratch_parts
from pallasite.passes.normal.scratch_values import values_of_steps
from pallasite.passes.normal.unit_dims import unit_dims
from pallasite.passes.normal.whole_loops import whole_loops
from pallasite.passes.normal.wide_blocks import wide_blocks

RULES: tuple[tuple[str, Callable[[Kernel], Kernel]], ...] = (
    ("canonicalize", canonicalize),
    ("counted_loops", counted_loops),
    ("rows_in_place", rows_in_place),
    ("scratch_parts", scratch_parts),
    ("guarded_starts", guarded_starts),
    ("guarded_updates", guarded_updates),
    ("pipeline_axes", pipeline_axes),
    ("loop_axes", loop_axes),
    ("wide_blocks", wide_blocks),
    ("single_slices", single_slices),
    ("guarded_stores", guarded_stores),
    ("loops_of_slices", loop_axes),  # whose accesses were index arrays before
    ("narrow_windows", narrow_windows),
    ("idle_clamps", idle_clamps),
    ("program_order", program_order),
    ("affine_numbers", affine_numbers),
    ("positions", positions),
    ("known_clamps", known_clamps),
    ("known_comparisons", known_comparisons),
    ("scratch_values", values_of_steps),
    ("masks", masks),
    ("masked_branches", masked_branches),
    ("joined_loops", joined_loops),
    ("unit_dims", unit_dims),
    ("replicated", replicated),
    ("columns", columns),
    ("folds", folds),
    ("products", products),
    ("whole_loops", whole_loops),
    ("order", order),
)


def normalize(kernel: Kernel) -> Kernel:
    """The kernel in normal form; the same object if it already is."""
    for _, rule in RULES:
        kernel = rule(kernel)
    return kernel
