"""The whole zoo as machine code in vmap, lax.scan and shard_map: no fallback.

What each transformation gives is compared with plain calls under jit, one per example;
`test_zoo.py` compares those with the references.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.backends.cpu.test_zoo import assert_agrees, each
from tests.zoo import Case, all_cases

pytestmark = pytest.mark.filterwarnings("error::pallasite.errors.FallbackWarning")

DEVICES = 8
BATCH = 2
STEPS = 2


def native(case: Case):
    """The default on a CPU, which warns if it is not machine code."""
    return lambda *args: case.run(*args, interpret=False)


@functools.cache
def compiled(name: str):
    """The plain call of a case, whose compilation the tests share."""
    return jax.jit(native(next(case for case in all_cases() if case.name == name)))


def examples(case: Case, count: int) -> list[tuple]:
    seeds = ([seed, *case.name.encode()] for seed in range(count))
    return [case.make_args(np.random.default_rng(seed)) for seed in seeds]


def one_by_one(case: Case, rows: list[tuple]):
    """What plain calls give, stacked."""
    return stacked([compiled(case.name)(*row) for row in rows])


def stacked(trees: list):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@each([case for case in all_cases() if case.vmap_axes is not None])
def test_vmap(case: Case):
    rows = examples(case, BATCH)
    axes = case.vmap_axes
    axes = axes if isinstance(axes, tuple) else (axes,) * len(rows[0])
    columns = [
        [row[k] for row in (rows if axis is not None else rows[:1] * BATCH)]
        for k, axis in enumerate(axes)
    ]
    batched = [
        column[0] if axis is None else np.stack(column, axis)
        for column, axis in zip(columns, axes, strict=True)
    ]
    got = jax.jit(jax.vmap(native(case), axes))(*batched)
    assert_agrees(case, got, one_by_one(case, list(zip(*columns, strict=True))))


@each(all_cases())
def test_scan_on_eight_devices_at_once(case: Case):
    """Each device runs the same code on an example of its own, in every round."""
    devices = jax.devices("cpu")
    assert len(devices) == DEVICES
    rows = examples(case, DEVICES)

    def one(*args):
        mine = [x[0] for x in args]
        step = lambda n, _: (n + 1, native(case)(*mine))
        _, results = jax.lax.scan(step, 0, length=STEPS)
        return jax.tree.map(lambda leaf: leaf[None], results)

    own = PartitionSpec("d")
    mesh = Mesh(np.array(devices), ("d",))
    spread = jax.shard_map(one, mesh=mesh, in_specs=own, out_specs=own)
    got = jax.tree.map(np.asarray, jax.jit(spread)(*stacked(rows)))
    want = one_by_one(case, rows)
    for step in range(STEPS):
        this = jax.tree.map(lambda leaf, n=step: leaf[:, n], got)
        jax.tree.map(np.testing.assert_array_equal, this, want)
