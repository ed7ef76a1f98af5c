"""Every op of the op table has exactly one rule in each table of the evaluator."""

import pytest

from pallasite.emulation import elementwise as jax_elementwise
from pallasite.emulation import tiles as jax_tiles
from pallasite.emulation.reversible import ReverseWalker, SmoothWalker
from pallasite.interpret import numpy_tiles, shadow_tiles
from pallasite.interpret.checked import CheckedWalker
from pallasite.interpret.clusters import ClusterWalker
from pallasite.interpret.devices import DeviceWalker
from pallasite.interpret.gpu_level import GpuWalker
from pallasite.interpret.resume import ResumableWalker
from pallasite.interpret.tensor_memory import TensorWalker
from pallasite.interpret.waits import WaitingWalker
from pallasite.interpret.walker import Walker
from pallasite.ir.opdef import EXPLICIT, table

ROWS = table()
STRUCTURED = {name for name, row in ROWS.items() if not row.elementwise}
# Elementwise in the op table, but its result may have another shape.
SHAPED = {"bitcast"}
WALKERS = [Walker, ResumableWalker, WaitingWalker, DeviceWalker, GpuWalker]
WALKERS += [ClusterWalker, TensorWalker, CheckedWalker, SmoothWalker, ReverseWalker]


@pytest.mark.parametrize("walker", WALKERS)
def test_structured_ops_are_the_walkers_or_the_number_systems(walker: type[Walker]):
    assert not walker.RULES.keys() & numpy_tiles.RULES.keys()
    assert walker.RULES.keys() | numpy_tiles.RULES.keys() == STRUCTURED | SHAPED


def test_number_systems_have_the_same_tile_ops():
    assert jax_tiles.RULES.keys() == numpy_tiles.RULES.keys()
    others = {"constant", "iota", "inline_asm"}  # defined everywhere; refused
    assert shadow_tiles.RULES.keys() == numpy_tiles.RULES.keys() - others


def test_the_emulation_has_the_elementwise_ops():
    elementwise = {name for name, row in ROWS.items() if row.elementwise}
    assert jax_elementwise.FUNCTIONS.keys() == elementwise - SHAPED


def test_ops_that_may_pause_can_be_resumed():
    """Those of the explicit level, and those whose regions may hold one."""
    pausing = {n for n, r in ROWS.items() if r.level == EXPLICIT or r.regions != 0}
    assert TensorWalker.RESUMABLE.keys() == pausing
    assert CheckedWalker.RESUMABLE.keys() == pausing


@pytest.mark.parametrize("walker", WALKERS)
def test_each_rule_of_a_walker_is_in_its_table(walker: type[Walker]):
    """A method that overrides a rule runs only if its class's table names it."""
    own = {name: fn for name, fn in vars(walker).items() if name.startswith("do_")}
    unused = {name for name, fn in own.items() if fn not in walker.RULES.values()}
    if issubclass(walker, ResumableWalker):
        own = {n: fn for n, fn in vars(walker).items() if n.startswith("steps_")}
        rules = walker.RESUMABLE.values()
        unused |= {name for name, fn in own.items() if fn not in rules}
    assert not unused
